"""Event simulation against closed forms worked out here, hand-traced stacks, and laws of conservation."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import numpy as np
import plans
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import hsdopt.simulate
from hsdopt.acceptance import Acceptance
from hsdopt.costs import CostCurve
from hsdopt.errors import InvalidArgumentError, PredictionError
from hsdopt.plan import LOOKUP, Adaptive, Bild, Choice, parse_plan
from hsdopt.profiles import Profile
from hsdopt.simulate import SimulatedRun, simulate
from hsdopt.simulate.engine import CostTable

COSTS = {
    "big": lambda n: 1 + 0.05 * n,
    "mid": lambda n: 0.3 + 0.02 * n,
    "small": lambda n: 0.1 + 0.03 * n,
    LOOKUP: 0.001,
}


def make(**rates: float | Acceptance) -> Profile:
    """Return a profile; ``small_big=0.6`` is the acceptance of small's tokens by big."""
    pairs = {tuple(name.split("_")): rate for name, rate in rates.items()}
    return Profile.from_rates("big", COSTS, {(a, b): rate for (a, b), rate in pairs.items()})


def total_passes(run: SimulatedRun, model: str) -> int:
    return sum(run.new_tokens_histogram(model).values())


def per_round(run: SimulatedRun) -> dict[tuple[str, int], float]:
    return {key: count / run.rounds for key, count in run.passes.items()}


def renewal(rate: float, length: int, owed: int) -> float:
    """Return the expected rounds until `owed` tokens are held, by recursion over the law of one round."""
    law = {n: (1 - rate) * rate ** (n - 1) for n in range(1, length + 1)} | {length + 1: rate**length}
    expected = [0.0]
    for t in range(1, owed + 1):
        expected.append(1 + sum(p * expected[max(t - n, 0)] for n, p in law.items()))
    return expected[owed]


@pytest.mark.parametrize(("rate", "length"), [(0.0, 3), (0.35, 1), (0.6, 4), (0.9, 12), (1.0, 5)])
def test_one_drafter_is_its_closed_form(rate: float, length: int) -> None:
    run = simulate(parse_plan(f"big(small:{length})"), make(small_big=rate), tokens=300_000, seed=3)
    tokens = sum(rate**m for m in range(length + 1))
    small, big = COSTS["small"], COSTS["big"]
    seconds = length * small(1) + rate**length * (small(2) - small(1)) + big(length + 1)
    assert abs(run.tokens_per_pass - tokens) <= 4 * run.tokens_per_pass_error + 1e-9
    assert abs(run.seconds_per_token - seconds / tokens) <= 4 * run.standard_error + 1e-9


def test_catch_up_follows_every_full_acceptance() -> None:
    run = simulate(parse_plan("big(small:3)"), make(small_big=0.7), tokens=400_000, seed=1)
    share = run.passes["small", 2] / run.rounds
    assert share == pytest.approx(0.7**3, abs=4 * np.sqrt(0.7**3 * (1 - 0.7**3) / run.rounds))
    assert run.passes["small", 1] == 3 * run.rounds - run.passes["small", 2]
    assert run.new_tokens_histogram("big") == {4: run.rounds}


def test_accepted_lengths_follow_the_survival_curve() -> None:
    survival = (1.0, 0.8, 0.5, 0.45, 0.1)
    run = simulate(parse_plan("big(small:4)"), make(small_big=Acceptance(survival)), tokens=200_000, seed=5)
    at_least = np.cumsum(run.tokens_histogram[::-1])[::-1][1:]
    assert all(later <= earlier for earlier, later in pairwise(at_least))
    law = np.array(survival) - np.append(survival[1:], 0.0)
    assert run.tokens_histogram[0] == 0
    assert stats.chisquare(run.tokens_histogram[1:], law * run.rounds).pvalue > 1e-3


def test_a_survival_of_zero_is_never_passed() -> None:
    run = simulate(parse_plan("big(small:3)"), make(small_big=Acceptance((1.0, 0.5, 0.0, 0.0))), tokens=20_000)
    assert len(run.tokens_histogram) == 3


@pytest.mark.parametrize(("rate", "length", "owed"), [(0.6, 3, 1), (0.6, 3, 5), (0.85, 2, 8)])
def test_a_level_runs_the_expected_rounds(rate: float, length: int, owed: int) -> None:
    profile = make(small_mid=rate, mid_big=0.7)
    run = simulate(parse_plan(f"big(mid:{owed}(small:{length}))"), profile, tokens=400_000, seed=2)
    error = 4 * owed / np.sqrt(run.rounds)  # a request takes at most `owed` rounds
    assert total_passes(run, "mid") / run.rounds == pytest.approx(renewal(rate, length, owed), abs=error)
    assert run.tokens_per_pass == pytest.approx(sum(0.7**m for m in range(owed + 1)), abs=4 * run.tokens_per_pass_error)
    assert run.drafted["mid", "big"] == owed * run.rounds


@pytest.mark.parametrize("stop", ["+", "x"])
def test_everything_held_is_passed_up(stop: str) -> None:
    profile = make(small_mid=0.6, mid_big=0.7)
    run = simulate(parse_plan(f"big(mid:4{stop}(small:3))"), profile, tokens=400_000, seed=2)
    rounds = 4.0 if stop == "x" else renewal(0.6, 3, 4)
    tokens = rounds * sum(0.6**m for m in range(4))  # Wald
    assert run.drafted["mid", "big"] / run.rounds == pytest.approx(tokens, abs=4 * 16 / np.sqrt(run.rounds))
    assert run.discarded["mid"] == 0


def test_rounds_gain_what_the_vertical_cascade_says() -> None:
    run = simulate(parse_plan("big(mid:2x(small:3))"), make(small_mid=0.6, mid_big=0.7), tokens=500_000, seed=4)
    law = [0.4, 0.4 * 0.6, 0.4 * 0.36, 0.216]  # tokens 1 ... 4 of one round of mid
    power = sum(p * 0.7**n for n, p in enumerate(law, start=1)) ** 2
    assert run.tokens_per_pass == pytest.approx((1 - 0.7 * power) / 0.3, abs=4 * run.tokens_per_pass_error)


def test_a_row_counts_behind_accepted_segments_only() -> None:
    run = simulate(parse_plan("big(mid:2, small:3)"), make(mid_big=0.8, small_big=0.5), tokens=400_000, seed=4)
    tokens = 1 + 0.8 + 0.64 * (1 + 0.5 + 0.25 + 0.125)
    assert run.tokens_per_pass == pytest.approx(tokens, abs=4 * run.tokens_per_pass_error)
    assert run.accepted["small", "big"] / run.rounds == pytest.approx(0.64 * 0.875, rel=0.02)
    assert run.drafted == {("mid", "big"): 2 * run.rounds, ("small", "big"): 3 * run.rounds}


def test_until_asks_for_what_the_row_lacks() -> None:
    profile = make(small_mid=1.0, mid_big=0.5, small_big=0.5)
    run = simulate(parse_plan("big(mid:2+(small:3), small:..6)"), profile, tokens=20_000)
    assert run.new_tokens_histogram("big") == {7: run.rounds}
    assert run.drafted["mid", "big"] == 4 * run.rounds
    run = simulate(parse_plan("big(mid:2+(small:3), small:..3)"), profile, tokens=20_000)
    assert run.drafted["small", "big"] == 0


JOINT = np.array([[0.3, 0, 0, 0], [0.1, 0.05, 0, 0], [0, 0, 0, 0], [0.05, 0.1, 0.1, 0.3]])


def test_lookup_proposes_and_is_accepted_as_its_joint_law_says() -> None:
    run = simulate(parse_plan("big(lookup:3)"), make(lookup_big=Acceptance.from_joint(JOINT)), tokens=200_000, seed=6)
    proposed = np.array([run.passes.get(("big", n + 1), 0) for n in range(4)])
    assert stats.chisquare(proposed[[0, 1, 3]], JOINT.sum(axis=1)[[0, 1, 3]] * run.rounds).pvalue > 1e-3
    assert stats.chisquare(run.tokens_histogram[1:], JOINT.sum(axis=0) * run.rounds).pvalue > 1e-3
    assert run.passes["lookup", 1] == run.rounds
    assert run.passes_per_token["lookup"] == pytest.approx(run.rounds / run.tokens)


def test_a_short_proposal_fully_accepted_lets_the_row_go_on() -> None:
    nothing = np.zeros((3, 3))
    nothing[0, 0] = 1.0
    profile = make(lookup_big=Acceptance.from_joint(nothing), small_big=1.0)
    run = simulate(parse_plan("big(lookup:2, small:2)"), profile, tokens=5_000)
    assert run.tokens_per_pass == 3
    assert run.new_tokens_histogram("big") == {3: run.rounds}


def test_hand_traced_two_levels_that_accept_everything() -> None:
    # mid drafts 3 + bonus = 4 for big, which accepts 4 and adds one: small then lacks its own last token,
    # mid's bonus and big's; mid lacks its own bonus and big's.
    run = simulate(parse_plan("big(mid:4(small:3))"), make(small_mid=1.0, mid_big=1.0), tokens=5_000)
    assert per_round(run) == {("small", 3): 1, ("small", 1): 2, ("mid", 5): 1, ("big", 5): 1}
    seconds = COSTS["small"](3) + 2 * COSTS["small"](1) + COSTS["mid"](5) + COSTS["big"](5)
    assert run.seconds_per_token == pytest.approx(seconds / 5)
    assert run.standard_error == pytest.approx(0, abs=1e-12)


def test_hand_traced_two_levels_with_truncation() -> None:
    # 4 held, 3 passed up: the cut takes mid's bonus token back before small or mid had to read it.
    run = simulate(parse_plan("big(mid:3(small:3))"), make(small_mid=1.0, mid_big=1.0), tokens=5_000)
    assert per_round(run) == {("small", 2): 1, ("small", 1): 2, ("mid", 4): 1, ("big", 4): 1}
    assert run.discarded == {"small": 0, "mid": run.rounds, "big": 0}


def test_hand_traced_two_levels_that_are_always_refused() -> None:
    run = simulate(parse_plan("big(mid:4(small:3))"), make(small_mid=1.0, mid_big=0.0), tokens=2_000)
    assert per_round(run) == {("small", 1): 3, ("mid", 4): 1, ("big", 5): 1}


def test_a_later_drafter_takes_in_the_row_before_it() -> None:
    # big's token, mid's two and, after full acceptance, small's own last one
    run = simulate(parse_plan("big(mid:2, small:2)"), make(mid_big=1.0, small_big=1.0), tokens=5_000)
    assert per_round(run) == {("mid", 4): 1, ("mid", 1): 1, ("small", 4): 1, ("small", 1): 1, ("big", 5): 1}


def test_a_cache_that_lacks_nothing_reads_its_last_token_again() -> None:
    # small ends mid's request cut back to what it has read, then drafts again in the same row
    run = simulate(
        parse_plan("big(mid:1(small:3), small:1)"), make(small_mid=1.0, mid_big=1.0, small_big=1.0), tokens=5_000
    )
    assert per_round(run) == {("small", 1): 3, ("small", 2): 1, ("mid", 5): 1, ("big", 3): 1}


def test_a_verifier_that_lacks_nothing_reads_the_token_before_its_draft_again() -> None:
    # mid's first request ends cut back into what it has read; its second verifies 2 tokens of small's
    plan = parse_plan("big(mid:1(small:3), mid:3(small:2))")
    run = simulate(plan, make(small_mid=1.0, mid_big=1.0), tokens=5_000)
    assert per_round(run) == {("small", 3): 1, ("small", 1): 4, ("mid", 5): 1, ("mid", 3): 1, ("big", 5): 1}


def test_an_adaptive_level_chooses_by_what_it_owes() -> None:
    # owing 3: a draft of 1 gains 2; owing 1: a plain pass, over its own bonus token alone
    table = (None, Choice("small", 1), Choice("small", 1))
    plan = Adaptive("big", Choice("mid", 3), (("small", (None,)), ("mid", table)))
    run = simulate(plan, make(small_mid=1.0, mid_big=1.0), tokens=4_000)
    assert per_round(run) == {("small", 4): 1, ("mid", 3): 1, ("mid", 1): 1, ("big", 4): 1}


def test_an_adaptive_level_is_cut_to_what_it_owes() -> None:
    plan = Adaptive("big", Choice("mid", 1), (("small", (None,) * 2), ("mid", (Choice("small", 2),))))
    run = simulate(plan, make(small_mid=1.0, mid_big=1.0), tokens=4_000)
    assert run.discarded["mid"] == 2 * run.rounds
    assert run.drafted["mid", "big"] == run.rounds


def test_autoregression() -> None:
    run = simulate(parse_plan("big"), make(), tokens=1_000)
    assert per_round(run) == {("big", 1): 1}
    assert run.seconds_per_token == pytest.approx(COSTS["big"](1))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(plans.KINDS))
def test_tokens_are_conserved_at_every_level(seed: int, kind: plans.Kind) -> None:
    plan, profile = plans.random_case(np.random.default_rng(seed), kind)
    run = simulate(plan, profile, tokens=2_000, seed=seed)
    for model in plan.models:
        taken = sum(count for (_, verifier), count in run.accepted.items() if verifier == model)
        if model == LOOKUP:
            continue
        held = taken + total_passes(run, model)
        passed_up = sum(count for (drafter, _), count in run.drafted.items() if drafter == model)
        assert held - run.discarded[model] == (run.tokens if model == "big" else passed_up)
    assert all(run.accepted[pair] <= run.drafted[pair] for pair in run.drafted)
    by_passes = sum(count * profile.cost(model)(fed) for (model, fed), count in run.passes.items())
    by_switches = sum(count * profile.cost(model).switch for model, count in run.switches.items())
    assert run.seconds == pytest.approx(by_passes + by_switches)
    assert run.seconds == pytest.approx(run.lane_seconds.sum())
    assert run.tokens == run.lane_tokens.sum()
    assert sum(run.model_seconds_per_token.values()) == pytest.approx(run.seconds_per_token)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 30))
def test_finished_outputs_have_the_length_asked_for(seed: int, tokens: int) -> None:
    plan, profile = plans.random_case(np.random.default_rng(seed))
    times = simulate(plan, profile, tokens=200).time_to_finish(tokens, runs=20)
    assert times.shape == (20,)
    assert np.all(np.diff(times) >= 0)
    least = (tokens - 1) / (plans.LONGEST + 1) * profile.cost("big")(1)
    assert np.all(times >= least)


def test_time_to_finish_cuts_the_last_draft() -> None:
    # 8 tokens: one from prefill, 5 by a full round, then a draft of 1 and its bonus
    run = simulate(parse_plan("big(small:4)"), make(small_big=1.0), tokens=100)
    small, big = COSTS["small"], COSTS["big"]
    expected = 4 * small(1) + big(5) + small(2) + big(2)
    assert run.time_to_finish(8, runs=3) == pytest.approx([expected] * 3)
    assert run.time_to_finish(1, runs=2).tolist() == [0, 0]
    assert run.time_to_finish(2, runs=1) == pytest.approx([big(1)])


def test_time_to_finish_cuts_what_a_level_passes_up_too_much() -> None:
    # 4 wanted after the first: mid is asked for 3, holds 4, big's draft has room for 3
    run = simulate(parse_plan("big(mid:5+(small:3))"), make(small_mid=1.0, mid_big=1.0), tokens=100)
    small, mid, big = COSTS["small"], COSTS["mid"], COSTS["big"]
    assert run.time_to_finish(5, runs=1) == pytest.approx([3 * small(1) + mid(4) + big(4)])


def test_equal_seeds_give_equal_runs() -> None:
    plan, profile = plans.random_case(np.random.default_rng(8), "mixed")
    first, second, other = (simulate(plan, profile, tokens=5_000, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert np.array_equal(first.lane_seconds, second.lane_seconds)
    assert first.passes != other.passes


def test_standard_errors_are_honest() -> None:
    plan, profile = parse_plan("big(mid:4(small:3))"), make(small_mid=0.7, mid_big=0.6)
    truth = simulate(plan, profile, tokens=2_000_000, seed=99)
    runs = [simulate(plan, profile, tokens=4_000, seed=seed, lanes=32) for seed in range(40)]
    scores = [(run.seconds_per_token - truth.seconds_per_token) / run.standard_error for run in runs]
    assert 0.6 < np.std(scores) < 1.5
    assert abs(np.mean(scores)) < 0.6
    gains = [(run.tokens_per_pass - truth.tokens_per_pass) / run.tokens_per_pass_error for run in runs]
    assert 0.6 < np.std(gains) < 1.5


def test_lanes_are_a_sample_of_seconds_per_token() -> None:
    run = simulate(parse_plan("big(small:4)"), make(small_big=0.6), tokens=50_000, lanes=100)
    assert run.lane_seconds_per_token.shape == (100,)
    assert run.lane_seconds_per_token.mean() == pytest.approx(run.seconds_per_token, rel=0.01)
    assert run.lanes == 100


def test_context_overrides_the_mean_one() -> None:
    sloped = CostCurve((1, 8), (0, 100), ((1.0, 1.0), (2.0, 2.0)))
    profile = Profile.from_rates("big", {"big": sloped, "small": 0.0}, {("small", "big"): 1.0})
    run = simulate(parse_plan("big(small:1)"), profile, tokens=100, context=50)
    assert run.seconds_per_token == pytest.approx(0.75)


def test_cost_tables_are_the_curve() -> None:
    rng = np.random.default_rng(2)
    grid = np.sort(rng.uniform(1, 5, (3, 4)), axis=1)
    curve = CostCurve((1, 2, 5, 9), (10, 40, 100), tuple(map(tuple, grid.tolist())))
    table = CostTable(curve, span=(4, 120))
    fed, cached = rng.integers(1, 10, 50), rng.integers(4, 121, 50)
    expected = [curve(int(n), int(c)) for n, c in zip(fed, cached, strict=True)]
    assert table.passes(fed, cached) == pytest.approx(expected)
    number, first = np.array([0, 1, 5]), np.array([10, 20, 115])
    expected = [sum(curve(1, int(f) + k) for k in range(n)) for n, f in zip(number, first, strict=True)]
    assert table.single_passes(number, first) == pytest.approx(expected)


def test_long_passes_are_charged_in_proportion_if_they_are_rare() -> None:
    curve = CostCurve.from_function(lambda n: 1.0 + n, 4)
    table = CostTable(curve)
    assert table.passes(np.array([4, 6]), np.zeros(2, dtype=int)) == pytest.approx([5.0, 7.5])
    profile = Profile.from_rates("big", {"big": curve, "small": 0.1}, {("small", "big"): 0.5})
    with pytest.raises(PredictionError, match=r"at most 4 new tokens, as profiled; .* of its time in longer ones"):
        simulate(parse_plan("big(small:4)"), profile)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("big(mid:4(small:3, lenience=2))", "expected lenience 1 to predict"),
        ("bild(big, small)", "predicted by replaying traces"),
        ("big(tiny:4)", "expected one of the profiled models"),
        ("big(lookup:4)", "none was given"),
        ("big(mid:9)", "expected drafts of at most 2 tokens"),
    ],
)
def test_plans_that_cannot_be_predicted(plan: str, message: str) -> None:
    profile = make(small_mid=0.5, mid_big=Acceptance((1.0, 0.5, 0.2)))
    with pytest.raises(PredictionError, match=message):
        simulate(parse_plan(plan), profile)


def test_options_outside_their_domain() -> None:
    plan, profile = parse_plan("big"), make()
    with pytest.raises(InvalidArgumentError, match="expected tokens to be a whole number of at least 1"):
        simulate(plan, profile, tokens=0)
    with pytest.raises(InvalidArgumentError, match="expected lanes to be a whole number of at least 2"):
        simulate(plan, profile, lanes=1)
    with pytest.raises(InvalidArgumentError, match="expected seed"):
        simulate(plan, profile, seed=-1)
    with pytest.raises(InvalidArgumentError, match="expected runs"):
        simulate(plan, profile).time_to_finish(3, runs=0)
    with pytest.raises(InvalidArgumentError, match="expected a joint law that sums to 1"):
        simulate(parse_plan("big(lookup:3)"), make(lookup_big=Acceptance.from_joint(JOINT / 2)))
    with pytest.raises(PredictionError, match="bild"):
        simulate(Bild("big", "small"), profile)


def test_random_plans_are_of_every_kind() -> None:
    rng = np.random.default_rng(0)
    made = [plans.random_plan(rng, kind) for kind in plans.KINDS for _ in range(20)]
    stops = {s.stop for plan in made if not isinstance(plan, Adaptive) for level in plan.walk() for s in level.row}
    assert stops == set(plans.STOPS)
    assert any(isinstance(plan, Adaptive) for plan in made)
    assert any(LOOKUP in plan.models for plan in made)
    assert max(plan.depth for plan in made if not isinstance(plan, Adaptive)) == 2


def test_nothing_is_taken_from_the_closed_forms() -> None:
    for path in Path(hsdopt.simulate.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        assert not [name for name in imported if name.startswith(("hsdopt.latency", "hsdopt.runtime", "torch"))]
