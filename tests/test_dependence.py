"""Off the target's trajectory: what event logs tell of it, and a replay that follows the text there."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mocks import TableModel
from traced import traced_profile

from hsdopt.acceptance import Acceptance, PublishedRates, Strays, Traces
from hsdopt.costs import CostCurve
from hsdopt.errors import InvalidArgumentError, PredictionError, ProfileError
from hsdopt.plan import Level, parse_plan
from hsdopt.profiles import Profile, Setting
from hsdopt.profiling.dependence import count_strays, middle_reviews, stray_runs
from hsdopt.runtime import Generation, generate
from hsdopt.simulate import ReplayedRun, replay

torch.set_num_threads(1)
VOCAB, LENGTH = 24, 24
COSTS = {"t": 1.0, "m": 0.4, "s": 0.1}


def tables(seed: int, noise: float = 0.4) -> dict[str, TableModel]:
    """Return a target and two drafters that are noisy copies of it; the next token depends on the last two."""
    generator = torch.Generator().manual_seed(seed)
    shape = (VOCAB, VOCAB, VOCAB)
    base = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    models = {}
    for name, spread in (("t", 0.0), ("m", noise), ("s", 1.3 * noise)):
        own = base + 2 * spread * torch.randn(shape, generator=generator, dtype=torch.float64)
        models[name] = TableModel(name=name, vocab_size=VOCAB, table=own.softmax(-1))
    return models


def prompts(seed: int, count: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, VOCAB, (count, 2)).tolist()


def traced(models: dict[str, TableModel], texts: list[list[int]]) -> Profile:
    """Return the greedy traces along the target's outputs."""
    rows: dict[Any, list[Any]] = {}
    for number, prompt in enumerate(texts):
        text = list(prompt)
        for _ in range(LENGTH):
            laws = {name: model.law(text) for name, model in models.items()}
            best = {name: int(law.argmax()) for name, law in laws.items()}
            for name in models:
                rows.setdefault(("choice", name), []).append(best[name])
                rows.setdefault(("top", name), []).append(float(laws[name].max()))
                for other in models:
                    rows.setdefault(("surprise", name, other), []).append(-float(laws[other][best[name]].log()))
            rows.setdefault("prompt", []).append(number)
            rows.setdefault("context", []).append(len(text))
            text.append(best["t"])
    choice = {name: np.array(rows["choice", name]) for name in models}
    traces = Traces(
        choice["t"],
        np.array(rows["prompt"]),
        np.array(rows["context"]),
        choice,
        top={name: np.array(rows["top", name]) for name in models},
        surprise={(a, b): np.array(rows["surprise", a, b]) for a in models for b in models if a != b},
    )
    return Profile("t", {name: CostCurve.fixed(COSTS[name]) for name in models}, traces=traces)


def run(text: str, models: dict[str, Any], prompt: list[int]) -> Generation:
    return generate(parse_plan(text), models, prompt, max_new_tokens=LENGTH, ignore_eos=True)


def made(text: str, models: dict[str, Any], texts: list[list[int]]) -> dict[tuple[str, int], int]:
    """Return the passes of the runtime over all prompts."""
    total: dict[tuple[str, int], int] = {}
    for prompt in texts:
        for kind, count in run(text, models, prompt).counters.new_tokens.items():
            total[kind] = total.get(kind, 0) + count
    return total


# Logs


class Watched(TableModel):
    """A table that remembers the texts before the drafts that it was shown."""

    seen: list[tuple[int, ...]]

    def score(self, sequence: Sequence[int], n_logits: int) -> torch.Tensor:
        self.seen.append(tuple(sequence[: len(sequence) - n_logits + 1]))
        return super().score(sequence, n_logits)


@pytest.mark.parametrize("text", ["t(m:5(s:2))", "t(m:4+(s:3))", "t(m:3x(s:2), s:2)"])
def test_logs_tell_which_drafts_were_astray(text: str) -> None:
    models = tables(1)
    watched = Watched(name="m", vocab_size=VOCAB, table=models["m"].table)
    watched.seen = []
    strays = 0
    for prompt in prompts(2, 4):
        watched.seen.clear()
        output = run(text, {**models, "m": watched}, prompt)
        plan = parse_plan(text)
        assert isinstance(plan, Level)
        reviews = middle_reviews(output.events, plan)
        whole = (*prompt, *output.tokens)
        before = watched.seen[1:]  # the first is the prefill
        assert [review.astray for review in reviews] == [whole[: len(b)] != b for b in before][: len(reviews)]
        assert len(reviews) == len(before)
        strays += sum(review.astray for review in reviews)
    assert strays > 10


def test_counts_of_runs() -> None:
    models = tables(1)
    plans = [parse_plan(text) for text in ("t(m:5(s:2))", "t(s:3)", "t")]
    counted = stray_runs(plans, models, prompts(2, 3), setting=Setting(max_new_tokens=LENGTH))
    assert set(counted) == {("s", "m")}
    logs = [middle_reviews(run("t(m:5(s:2))", models, p).events, parse_plan("t(m:5(s:2))")) for p in prompts(2, 3)]
    assert counted == count_strays(review for log in logs for review in log)
    assert all(asked == drafted == 2 for asked, drafted, _ in counted["s", "m"].counts)


def test_stray_counts() -> None:
    assert (Strays({(2, 2, 1): 3}) + Strays({(2, 2, 1): 1, (2, 1, 0): 2})).counts == {(2, 2, 1): 4, (2, 1, 0): 2}
    with pytest.raises(InvalidArgumentError, match=r"asked >= proposed >= accepted >= 0; got 1 of \(2, 3, 0\)"):
        Strays({(2, 3, 0): 1})


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), weight=st.sampled_from([0.0, 1.0, 10.0, 1e12]))
def test_shrinkage_ends_at_the_counts_and_at_the_prior(seed: int, weight: float) -> None:
    rng = np.random.default_rng(seed)
    kinds = [(4, n, m) for n in range(5) for m in range(n + 1)]
    counts = dict(zip(kinds, (1 + rng.integers(0, 9, len(kinds))).tolist(), strict=True))
    joint = np.tril(rng.random((5, 5)))
    prior = Acceptance.from_joint(joint / joint.sum())
    offered, taken = Strays(counts).survival(prior, 4, weight=weight)
    for curve in (offered, taken):
        assert curve[0] == 1
        assert np.all(np.diff(curve) <= 1e-12)
        assert curve.min() >= 0
    drafts = sum(counts.values())
    if weight == 0:
        for n in range(5):
            assert offered[n] == pytest.approx(sum(c for (_, p, _), c in counts.items() if p >= n) / drafts)
    if weight == 1e12:
        law = joint / joint.sum()
        assert offered == pytest.approx([law[n:].sum() for n in range(5)], abs=1e-6)
        assert taken[1] == pytest.approx(law[1:, 1:].sum() / law[1:].sum(), abs=1e-6)


# Replay


def test_counts_change_nothing_where_nothing_strays() -> None:
    models = tables(3)
    texts = prompts(4, 5)
    profile = traced(models, texts)
    strays = {("s", "m"): Strays({(9, 9, 0): 50})}
    for text in ("t(s:3)", "t(m:4)", "t(m:1(s:3))", "t(m:1x(s:1))"):
        plain = replay(parse_plan(text), profile)
        assert plain.passes == made(text, models, texts)  # every draft starts on the trajectory, and so is known
        corrected = replay(parse_plan(text), replace(profile, strays=strays), repeats=1)
        if text != "t(m:1(s:3))":
            assert corrected.passes == plain.passes
        assert corrected.rounds == plain.rounds


def stranded(accepted: int) -> ReplayedRun:
    """Replay m's draft of 6, wrong at its second token, above s, which agrees with m along the trajectory."""
    letters = {"t": "abcdefgh", "m": "abXdefgh", "s": "abXdefgh"}
    choice = {name: np.array([ord(letter) for letter in text]) for name, text in letters.items()}
    traces = Traces(choice["t"], np.zeros(8, dtype=int), np.arange(8) + 5, choice)
    costs = {name: CostCurve.fixed(COSTS[name]) for name in letters}
    strays = {("s", "m"): Strays({(2, 2, accepted): 10**9})}
    return replay(parse_plan("t(m:6(s:2))"), Profile("t", costs, traces=traces, strays=strays))


def test_a_draft_that_strays_by_hand() -> None:
    # t's first token is prefill's. m owes 6: s gives 2 (b X), both taken, m adds one: 3 held, astray. All taken from
    # there: 3 more, done in 2 passes. None taken: 3 passes of one token each, 4 in all. t takes one and writes c.
    # Then m owes 4 on the trajectory, where s is always right: 2 passes, t takes 4 and writes the last token.
    assert stranded(2).passes_per_token["m"] * 7 == 2 + 2
    assert stranded(0).passes_per_token["m"] * 7 == 4 + 2
    for accepted in (0, 2):
        assert stranded(accepted).passes_per_token["t"] * 7 == 2
        assert stranded(accepted).accepted["m", "t"] == 16 * (1 + 4)


def test_corrected_replay_is_nearer_on_other_prompts_and_plans() -> None:
    before, after = [], []
    for seed in range(4):
        models = tables(seed, noise=0.35)
        setting = Setting(max_new_tokens=LENGTH)
        strays = stray_runs([parse_plan("t(m:8(s:3))")], models, prompts(90 + seed, 4), setting=setting)
        texts = prompts(seed, 8)
        profile = traced(models, texts)
        for text in ("t(m:4(s:4))", "t(m:12(s:6))"):
            seconds = sum(COSTS[name] * n for (name, _), n in made(text, models, texts).items())
            for errors, one in ((before, profile), (after, replace(profile, strays=strays))):
                run = replay(parse_plan(text), one)
                errors.append(abs(run.seconds_per_token * 8 * (LENGTH - 1) / seconds - 1))
    assert np.mean(after) < 0.8 * np.mean(before)


# Lenience


@pytest.mark.parametrize("lenience", [1.5, 3.0, 100.0])
def test_lenience_is_read_from_greedy_traces(lenience: float) -> None:
    models = tables(5)
    texts = prompts(6, 6)
    profile = traced(models, texts)
    text = f"t(m:1(s:1, lenience={lenience:g}))"
    foreseen = replay(parse_plan(text), profile)
    assert foreseen.passes == made(text, models, texts)
    strict = replay(parse_plan("t(m:1(s:1))"), profile)
    assert foreseen.accepted["s", "m"] > strict.accepted["s", "m"]


def test_longer_lenient_drafts_are_exact_for_the_target() -> None:
    models = tables(5, noise=0.3)
    texts = prompts(7, 25)
    text = "t(m:4(s:3, lenience=3))"
    passes = made(text, models, texts)
    foreseen = replay(parse_plan(text), traced(models, texts))
    # below the target the rest of a draft that has strayed is read as if it had not
    for model, error in (("t", 1e-9), ("m", 0.15), ("s", 0.15)):
        count = sum(n for (name, _), n in passes.items() if name == model)
        assert foreseen.passes_per_token[model] * foreseen.tokens == pytest.approx(count, rel=error)


def test_lenience_that_traces_do_not_tell() -> None:
    profile = traced(tables(5), prompts(6, 2))
    plan = parse_plan("t(m:2(s:2, lenience=2))")
    for setting in (Setting(temperature=1.0), Setting(top_p=0.9), Setting(repetition_penalty=1.1)):
        with pytest.raises(PredictionError, match="expected lenience 1 to predict"):
            replay(plan, replace(profile, setting=setting))


# Rates and intervals


def test_published_rates_are_three_numbers() -> None:
    counts = np.zeros((4, 4))
    counts[3] = 39, 1, 0, 3
    rates = PublishedRates.of(counts)
    assert (rates.drafts, rates.drafted, rates.accepted, rates.rejecting) == (43, 129, 10, 40)
    assert (rates.first_position, rates.per_drafted, rates.iid) == (4 / 43, 10 / 129, 10 / 50)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rate=st.floats(0.01, 0.99), length=st.integers(1, 12))
def test_published_rates_of_independent_tokens(rate: float, length: int) -> None:
    rates = Acceptance.from_rate(rate).published(length)
    assert rates.first_position == pytest.approx(rate)
    assert rates.iid == pytest.approx(rate)
    assert rates.per_drafted == pytest.approx(sum(rate**m for m in range(1, length + 1)) / length)


def test_short_proposals_that_were_accepted_reject_nothing() -> None:
    joint = np.zeros((3, 3))
    joint[0, 0], joint[1, 1], joint[2, 0] = 0.5, 0.25, 0.25
    rates = Acceptance.from_joint(joint, trials=(8, 2)).published(2)
    assert (rates.first_position, rates.per_drafted, rates.iid) == (0.5, 0.25 / 0.75, 0.5)
    assert (rates.drafts, rates.accepted, rates.rejecting) == (8, 2, 2)


def test_predictive_intervals_cover() -> None:
    # 12 replayed prompts, 8 to come, of the same population; the plain percentile interval covers 88 to 93 %
    rng = np.random.default_rng(0)
    inside = trials = 0
    for _ in range(150):
        for draw in (lambda n: rng.normal(1, 0.2, n), lambda n: np.exp(rng.normal(0, 0.3, n)), mixture(rng)):
            profiled, new = draw(12), draw(8)
            run = ReplayedRun(
                tokens=12,
                rounds=12,
                passes={},
                drafted={},
                accepted={},
                discarded={},
                tokens_histogram=(),
                model_seconds={"t": float(profiled.sum())},
                switches={},
                plan=parse_plan("t"),
                prompt_tokens=np.ones(12, dtype=np.int64),
                prompt_rounds=np.ones(12),
                prompt_seconds=profiled,
                repeats=1,
            )
            low, high = run.predictive_interval(rng, prompts=8, replicates=1000)
            inside += low <= new.mean() <= high
            trials += 1
    assert 0.92 <= inside / trials <= 0.975


def mixture(rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    """Return a population in which a quarter of the prompts takes a third of the time."""
    return lambda n: np.where(rng.random(n) < 0.25, 0.35, 1.0) * np.exp(rng.normal(0, 0.15, n))


def test_counts_are_saved_with_the_profile(tmp_path: Path) -> None:
    strays = {("lookup", "int8"): Strays({(4, 4, 1): 7, (4, 0, 0): 2}), ("int4", "int8"): Strays({(3, 3, 3): 1})}
    profile = replace(traced_profile(prompts=4, length=12), strays=strays)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").strays == strays
    stored = json.loads((tmp_path / "profile.json").read_text())
    stored["strays"][0]["counts"] = [[1, 2, 0, 1]]
    (tmp_path / "profile.json").write_text(json.dumps(stored))
    with pytest.raises(ProfileError, match="field strays: expected counts of drafts with asked >= proposed"):
        Profile.load(tmp_path / "profile.json")
