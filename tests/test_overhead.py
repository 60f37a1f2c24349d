"""Seconds outside the passes: what runs spend, what a profile keeps of it, and what predictions add."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from tiny import tiny_model
from traced import traced_profile

from hsdopt.errors import PredictionError
from hsdopt.latency import expected_latency
from hsdopt.overhead import DRAFTING, ROUND, STACK_ROUND, Overhead
from hsdopt.plan import LOOKUP, Level, parse_plan
from hsdopt.profiles import Profile, Setting
from hsdopt.profiling.measure import trace_prompt
from hsdopt.profiling.overhead import Rounds, overhead_seconds, prompt_seconds, round_overhead, rounds_of
from hsdopt.runtime import generate
from hsdopt.runtime.events import Event, Generation, Seconds
from hsdopt.runtime.lookup import Lookup
from hsdopt.runtime.model import Model

PROMPTS = (tuple(range(3, 20)), tuple(range(9, 40)), tuple(range(5, 11)))
SETTING = Setting(max_new_tokens=12)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@lru_cache
def stack() -> dict[str, Model]:
    big = tiny_model(0, name="big", layers=3)
    small = tiny_model(0, name="small", layers=3, noise=0.05)
    cut = tiny_model(0, name="cut", layers=1)
    return {"big": big, "small": small, "cut": cut, LOOKUP: Model.of_lookup(Lookup(), big)}


# --- predictions --------------------------------------------------------------------------------------------


def given_by_hand(**overhead: float) -> Profile:
    rates = {("small", "big"): 0.5, (LOOKUP, "big"): 0.3, (LOOKUP, "small"): 0.3}
    made = Profile.from_rates("big", {LOOKUP: 0.001, "small": 0.125, "big": 1.0}, rates)
    return replace(made, overhead={ROUND: 0.1, DRAFTING: 0.02, **overhead})


def test_every_pass_brings_its_seconds() -> None:
    profile, plan = given_by_hand(), parse_plan("big(small:2)")
    bare, wall = expected_latency(plan, profile), expected_latency(plan, profile, overhead=True)
    assert wall.overhead == pytest.approx((0.1 + 2 * 0.02) / 1.75, rel=1e-12)
    assert wall.seconds_per_token == pytest.approx(bare.seconds_per_token + wall.overhead, rel=1e-12)
    assert wall.speedup == pytest.approx(1.1 / wall.seconds_per_token, rel=1e-12)
    assert sum(row.seconds for row in wall.breakdown) + wall.overhead == pytest.approx(wall.seconds_per_token)
    assert bare.overhead == 0.0
    assert wall.passes == bare.passes


def test_autoregression_with_overhead_is_one_pass_and_one_round() -> None:
    wall = expected_latency(Level("big"), given_by_hand(), overhead=True)
    assert wall.seconds_per_token == pytest.approx(1.1, rel=1e-12)
    assert wall.speedup == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("text", ["big(small:3)", "big(lookup:4)", "big(small:4(lookup:3))", "big(small:2, lookup:3)"])
@pytest.mark.parametrize("tokens", [None, 9])
def test_overhead_counts_passes(text: str, tokens: int | None) -> None:
    wall = expected_latency(parse_plan(text), given_by_hand(), overhead=True, tokens=tokens)
    made: Counter[bool] = Counter()
    for (model, _), count in wall.passes.items():
        made[model == "big"] += count
    assert wall.overhead == pytest.approx(0.1 * made[True] + 0.02 * made[False], rel=1e-9)


def test_a_position_that_drafts_in_vain_is_worth_less_with_overhead() -> None:
    plan, profile = parse_plan("big(small:3)"), given_by_hand()
    bare, wall = expected_latency(plan, profile), expected_latency(plan, profile, overhead=True)
    for without, among in zip(bare.position_value, wall.position_value, strict=True):
        assert among.seconds == pytest.approx(without.seconds + 0.02, rel=1e-9)


def test_intervals_are_of_wall_clock_time_too() -> None:
    profile = replace(traced_profile(0, prompts=12), overhead={ROUND: 0.01, DRAFTING: 0.0})
    options = {"interval": 40, "rng": 3}
    bare = expected_latency(Level("big"), profile, **options)
    wall = expected_latency(Level("big"), profile, **options, overhead=True)
    assert np.subtract(wall.interval, bare.interval) == pytest.approx([0.01, 0.01], rel=1e-6)


def test_a_profile_without_says_so() -> None:
    with pytest.raises(PredictionError, match="profile again, or predict without"):
        expected_latency(Level("big"), replace(given_by_hand(), overhead={}), overhead=True)
    assert Overhead.of(replace(given_by_hand(), overhead={ROUND: 0.5})) == Overhead(0.5, 0.0)


# --- measurements -------------------------------------------------------------------------------------------


def test_known_seconds_are_recovered() -> None:
    rng = np.random.default_rng(0)
    rounds = rng.integers(10, 50, 40)
    noise = 1 + 0.1 * rng.normal(size=(2, 40))
    alone = [Rounds(0.004 * n * f, int(n), 0) for n, f in zip(rounds, noise[0], strict=True)]
    runs = [Rounds((0.004 + 5 * 0.0015) * n * f, int(n), 5 * int(n)) for n, f in zip(rounds, noise[1], strict=True)]
    found = round_overhead(alone, runs)
    assert found[ROUND] == pytest.approx(0.004, rel=0.05)
    assert found[STACK_ROUND] == pytest.approx(0.0115, rel=0.05)
    assert found[DRAFTING] == pytest.approx(0.0015, rel=0.1)


def test_a_suspended_machine_does_not_count() -> None:
    steady = [Rounds(0.04, 10, 0)] * 9
    assert round_overhead([*steady, Rounds(60.0, 10, 0)])[ROUND] == pytest.approx(0.004 * 1.2)
    assert round_overhead(steady) == {ROUND: pytest.approx(0.004)}
    assert round_overhead([]) == {}
    assert round_overhead([Rounds(0.0, 0, 0)]) == {}
    assert round_overhead(steady, [Rounds(0.01, 10, 40)])[DRAFTING] == 0.0


def test_a_run_is_its_passes_and_the_rest() -> None:
    events = (
        Event("prefill", "big", 9, seconds=5.0, gained=1),
        Event("prefill", "small", 9, seconds=2.0),
        Event("pass", "small", 1, 9, 0.25, 1),
        Event("lookup", LOOKUP, 0, 10, 0.125, 3),
        Event("pass", "big", 5, 9, 1.0, 1),
        Event("verify", "big", drafter="small", drafted=1, accepted=1),
        Event("pass", "big", 1, 9, 0.5, 1),
    )
    output = Generation((1, 2, 3, 4), "", "length", events, "big", Seconds(7.0, 2.0, 5.0, 9.0))
    assert rounds_of(output) == Rounds(0.125, 2, 2)


def test_slow_passes_are_not_outside_and_slow_readers_are() -> None:
    model = tiny_model(3, name="big")
    prompt = list(PROMPTS[0])
    slow = generate("big", {"big": model}, prompt, max_new_tokens=9, on_token=lambda _: time.sleep(0.01))
    assert rounds_of(slow).rounds == 8
    assert rounds_of(slow).outside >= 7 * 0.01  # the last sleep comes after the last token
    handle = model.network.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    passes = generate("big", {"big": model}, prompt, max_new_tokens=9)
    handle.remove()
    assert passes.seconds.decode >= 8 * 0.02
    assert rounds_of(passes).outside < passes.seconds.decode / 4


@pytest.mark.parametrize("drafters", [("small", "cut"), ("small",), (LOOKUP,), ()])
def test_what_a_profile_keeps(drafters: tuple[str, ...]) -> None:
    models = {name: stack()[name] for name in ("big", *drafters)}
    networks = {name: model for name, model in models.items() if name != LOOKUP}
    traces = [trace_prompt(networks, "big", prompt, SETTING, seed=0) for prompt in PROMPTS]
    assert all(0 < trace.outside < 5 for trace in traces)
    kept = overhead_seconds(models, "big", traces, setting=SETTING)
    assert kept[ROUND] > 0
    assert (STACK_ROUND in kept) == (DRAFTING in kept) == bool(drafters)
    once = {
        f"{what} of {name}, {n} tokens" for what in ("prefill", "first pass") for name in networks for n in (6, 17, 31)
    }
    assert {key for key in kept if key not in (ROUND, STACK_ROUND, DRAFTING)} == once
    assert all(value > 0 for key, value in kept.items() if key != DRAFTING)


def test_the_smallest_network_drafts_in_the_measured_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(plan: Level, *arguments: object, **options: object) -> Generation:
        seen.append(str(plan))
        return generate(plan, *arguments, **options)

    monkeypatch.setattr("hsdopt.profiling.overhead.generate", watched)
    traces = [trace_prompt({"big": stack()["big"]}, "big", prompt, SETTING, seed=0) for prompt in PROMPTS]
    overhead_seconds(stack(), "big", traces, setting=SETTING)
    assert set(seen) == {"big(cut:4)"}


def test_a_trace_that_another_run_wrote_says_nothing_about_rounds() -> None:
    trace = trace_prompt({"big": stack()["big"]}, "big", PROMPTS[0], SETTING, seed=0)
    assert type(trace).from_record(trace.to_record()) == trace
    old = {name: value for name, value in trace.to_record().items() if name != "outside"}
    kept = overhead_seconds({"big": stack()["big"]}, "big", [type(trace).from_record(old)], setting=SETTING)
    assert ROUND not in kept
    assert f"prefill of big, {len(PROMPTS[0])} tokens" in kept


def test_encoders_are_timed_apart() -> None:
    kept = prompt_seconds({"t": tiny_model(0, name="t", architecture="t5")}, PROMPTS)
    kinds = ("encoder", "prefill", "first pass")
    assert set(kept) == {f"{what} of t, {length} tokens" for what in kinds for length in (6, 17, 31)}


def test_a_prefill_is_of_the_whole_prompt() -> None:
    model = tiny_model(0, name="big")
    handle = model.network.register_forward_pre_hook(
        lambda _, __, options: time.sleep(0.001 * options["input_ids"].shape[1]), with_kwargs=True
    )
    kept = prompt_seconds({"big": model}, PROMPTS)
    handle.remove()
    for length in (6, 17, 31):
        assert kept[f"prefill of big, {length} tokens"] >= 0.001 * length
        assert kept[f"first pass of big, {length} tokens"] >= 0.001
