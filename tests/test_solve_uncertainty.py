"""How sure a decision is: replicates, intervals, the flip at break-even, thresholds of Big Little Decoder."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from traced import CPU, traced_profile

from hsdopt.errors import InvalidArgumentError, PredictionError
from hsdopt.latency.expected import expected_latency
from hsdopt.plan import Bild, Level, Plan, parse_plan
from hsdopt.profiles import Profile
from hsdopt.simulate import replay
from hsdopt.solvers.bild import deviation, frontier
from hsdopt.solvers.limits import read_limits
from hsdopt.solvers.solve import solve
from hsdopt.solvers.uncertainty import _laws, assess, cost_noise, replicates

PLANS = [parse_plan(text) for text in ("big(int8:3)", "big(lookup:6)", "big(int8:5(lookup:3), lookup:4)", "big")]


def limits_of(profile: Profile) -> object:
    return read_limits(
        profile, max_draft_length=24, max_levels=None, max_memory_bytes=None, allowed=None, required=None
    )


def test_replicated_laws_are_those_of_redrawn_prompts() -> None:
    profile = traced_profile(1, prompts=9, length=20)
    assert profile.traces is not None
    rng = np.random.default_rng(0)
    for _ in range(3):
        drawn = rng.integers(9, size=9)
        redrawn = profile.traces.take(drawn)
        weights = np.bincount(drawn, minlength=9)[np.newaxis].astype(float)
        for pair in (("int8", "big"), ("skip", "int4"), ("lookup", "big"), ("lookup", "int8")):
            (law,) = _laws(profile.traces, pair, weights, 12)
            expected = redrawn.acceptance(*pair, 12)
            assert law.survival == pytest.approx(expected.survival, abs=1e-12)
            if expected.joint is not None:
                assert np.asarray(law.joint) == pytest.approx(np.asarray(expected.joint), abs=1e-12)


def test_replicated_laws_under_sampling() -> None:
    profile = traced_profile(2, prompts=7, length=15)
    assert profile.traces is not None
    rng = np.random.default_rng(1)
    size = len(profile.traces)
    traces = replace(
        profile.traces, overlap={("int8", "big"): rng.random(size)}, ratio={("int8", "big"): rng.random(size)}
    )
    drawn = rng.integers(7, size=7)
    (law,) = _laws(traces, ("int8", "big"), np.bincount(drawn, minlength=7)[np.newaxis].astype(float), 10)
    assert law.survival == pytest.approx(traces.take(drawn).acceptance("int8", "big", 10).survival, abs=1e-12)


def test_replicates_spread_like_those_of_the_closed_form() -> None:
    profile = traced_profile(3, prompts=16)
    seconds = np.array(list(replicates(PLANS[:3], profile, count=100, seed=1)))
    for place, plan in enumerate(PLANS[:3]):
        other = expected_latency(plan, profile, interval=60, rng=2)
        assert other.interval is not None
        assert np.median(seconds[:, place]) == pytest.approx(other.seconds_per_token, rel=0.03)
        width = np.subtract(*np.percentile(seconds[:, place], [97.5, 2.5]))
        assert width == pytest.approx(other.interval[1] - other.interval[0], rel=0.3)


def test_replicates_are_the_full_count() -> None:
    profile = traced_profile(4, prompts=1, noise=0.0)
    plans = [*PLANS, Bild("big", "int8", 0.5, 3.0, 10)]
    (seconds,) = replicates(plans, profile, count=1)
    assert seconds == pytest.approx([expected_latency(plan, profile).seconds_per_token for plan in plans], rel=1e-9)


def test_more_prompts_are_surer() -> None:
    few, many = (assess(PLANS[1:], traced_profile(5, prompts=prompts), interval=80) for prompts in (8, 128))
    assert few is not None
    assert many is not None
    assert many.interval[1] - many.interval[0] < 0.5 * (few.interval[1] - few.interval[0])
    assert many.resolution < 0.5 * few.resolution
    assert 0 <= few.probability_within <= 1


def test_a_clear_winner_and_a_clear_loser() -> None:
    profile = traced_profile(6)
    speedups = {plan: expected_latency(plan, profile).speedup for plan in PLANS}
    best, worst = max(PLANS, key=speedups.__getitem__), min(PLANS, key=speedups.__getitem__)
    winner, loser = (assess([plan, *PLANS], profile, interval=60) for plan in (best, worst))
    assert winner is not None
    assert loser is not None
    assert winner.probability_within > 0.95
    assert loser.probability_within < 0.05
    assert winner.interval[0] < speedups[best] < winner.interval[1]


def test_another_evaluators_seconds_scale_the_replicates() -> None:
    profile = traced_profile(7, prompts=8)
    plain = assess(PLANS[:1], profile, interval=20)
    slower = assess(PLANS[:1], profile, interval=20, scale={PLANS[0]: 2.0})
    assert plain is not None
    assert slower is not None
    assert slower.interval == pytest.approx([end / 2 for end in plain.interval])


def test_noise_of_costs_is_that_of_their_timings() -> None:
    passes = {("int8", 1): 3.0, ("big", 4): 1.0, ("lookup", 1): 1.0}
    rng = np.random.default_rng(0)
    noisy, quiet = (cost_noise(passes, traced_profile(8, noise=noise), count=300, rng=rng) for noise in (0.2, 0.0))
    assert quiet == pytest.approx(1.0, abs=1e-9)
    assert 0.01 < noisy.std() < 0.2
    assert noisy.mean() == pytest.approx(1.0, abs=0.1)
    by_hand = Profile.from_rates("t", {"d": 0.1, "t": 1.0}, {("d", "t"): 0.8})
    assert cost_noise({("t", 1): 1.0}, by_hand, count=5, rng=rng).tolist() == [1.0] * 5


def test_nothing_to_resample() -> None:
    profile = Profile.from_rates("t", {"d": 0.1, "t": 1.0}, {("d", "t"): 0.8})
    assert assess([parse_plan("t(d:3)")], profile) is None
    assert assess(PLANS, traced_profile(8, prompts=4), interval=0) is None
    with pytest.raises(InvalidArgumentError, match="expected at least one plan to assess; got none"):
        assess([], profile)


def break_even(gain: float, *, prompts: int = 400) -> Profile:
    """Return a profile whose best plan with a drafter is faster than the target alone by `gain`."""
    curves = {"small": (10.0, {40: 10.0}), "big": (40.0, {40: 40.0})}
    profile = traced_profile(9, prompts=prompts, milliseconds=curves, agree={"small": 0.6}, noise=0.001)

    def best(scale: float) -> float:
        slower = replace(
            profile.costs["small"],
            seconds=tuple(tuple(value * scale for value in row) for row in profile.costs["small"].seconds),
        )
        trial = replace(profile, costs={**profile.costs, "small": slower}, _laws={})
        return max(expected_latency(parse_plan(f"big(small:{n})"), trial).speedup for n in range(1, 9))

    low, high = 0.1, 10.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if best(middle) > 1 + gain else (low, middle)
    curves = {"small": (10.0 * low, {40: 10.0 * low}), "big": curves["big"]}
    return traced_profile(9, prompts=prompts, milliseconds=curves, agree={"small": 0.6}, noise=0.001)


@pytest.mark.parametrize("family", ["speculative", "all"])
def test_three_per_cent_on_either_side_of_break_even_flip_the_answer(family: str) -> None:
    for gain in (0.03, -0.03):
        found = solve(break_even(gain), family=family, max_draft_length=8)
        assert found.interval is not None
        assert (found.interval[1] - found.interval[0]) / 2 / 1.96 < 0.01  # the noise of one standard error
        assert found.speculate == (gain > 0)
        if gain > 0:
            assert found.speedup == pytest.approx(1.03, abs=0.01)
            assert not found.warnings
        else:
            assert found.plan == Level("big")
            assert found.speedup == 1.0
            assert "autoregression: do not speculate" in found.warnings[0]
            assert found.contender is found.runners_up[0]
            assert found.why.startswith("the best with a drafter, big(small:")


def test_within_noise_the_answer_is_the_target_alone() -> None:
    found = solve(break_even(0.005, prompts=6), family="speculative", max_draft_length=8)
    assert not found.speculate
    assert found.warnings[0].startswith("within noise of autoregression: do not speculate (big(small:")
    assert found.runners_up[0].seconds_per_token < found.seconds_per_token


def test_a_likely_gain_is_taken_with_a_warning() -> None:
    found = solve(break_even(0.03, prompts=6), family="speculative", max_draft_length=8)
    assert found.interval is not None
    assert found.interval[0] < 1.0
    assert found.speculate
    assert found.warnings[0].startswith("not surely faster than autoregression (big(small:")


def test_a_required_drafter_is_run_even_within_noise() -> None:
    found = solve(break_even(-0.03, prompts=6), required=["small"], max_draft_length=8)
    assert found.speculate
    assert "do not speculate" in found.warnings[0]


def test_the_same_seed_gives_the_same_answer() -> None:
    profile = traced_profile(10, prompts=8)
    one, two = (solve(profile, family="hierarchy", interval=20, seed=3) for _ in range(2))
    assert one.interval == two.interval
    assert solve(profile, family="hierarchy", interval=20, seed=4).interval != one.interval


def test_deviation_is_what_a_replay_counts() -> None:
    profile = traced_profile(11, prompts=20)
    assert profile.traces is not None
    for plan in (
        Bild("big", "int8", 0.6, 3.0, 10),
        Bild("big", "skip", 0.3, float("inf"), 5),
        Bild("big", "int4", 0.0, 1.0, None, 4),
    ):
        run = replay(plan, profile)
        assert run.bild is not None
        assert deviation(plan, profile.traces) == pytest.approx(run.bild.deviations / run.tokens, abs=0.01)
    assert deviation(Bild("big", "int8", 1.0, 0.0, 10), profile.traces) == 0.0
    with pytest.raises(PredictionError, match="expected traces of nobody under big"):
        deviation(Bild("big", "nobody"), profile.traces)


def test_the_frontier_trades_speed_for_quality() -> None:
    profile = traced_profile(12, prompts=12)
    points = frontier(profile, limits_of(profile))  # type: ignore[arg-type]
    assert len(points) > 3
    seconds = [point.candidate.seconds_per_token for point in points]
    deviations = [point.deviation for point in points]
    assert seconds == sorted(seconds, reverse=True)
    assert deviations == sorted(deviations)
    assert all(isinstance(point.candidate.plan, Bild) for point in points)


def test_bild_is_chosen_under_its_bound() -> None:
    cheap = {"int8": (8.0, {40: 30.0}), "big": CPU["big"]}
    profile = traced_profile(13, prompts=24, milliseconds=cheap, agree={"int8": 0.95})
    found = {bound: solve(profile, family="bild", max_deviation=bound, interval=30) for bound in (0.01, 0.1)}
    for bound, solution in found.items():
        assert not solution.exact
        chosen: Plan = solution.plan
        assert isinstance(chosen, Bild)
        assert profile.traces is not None
        assert deviation(chosen, profile.traces) <= bound
        assert solution.interval is not None
        assert not chosen.lossless
    assert found[0.1].seconds_per_token <= found[0.01].seconds_per_token
    assert found[0.1].frontier == found[0.01].frontier
    assert all(c.family != "bild" for c in solve(profile, interval=0).runners_up)
