"""Hypothetical drafters and sensitivities."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from traced import traced_profile

from hsdopt.acceptance import Acceptance
from hsdopt.costs import CostCurve
from hsdopt.errors import InvalidArgumentError, PredictionError
from hsdopt.latency.expected import expected_latency
from hsdopt.latency.speculative import best_draft_length
from hsdopt.plan import Bild, parse_plan
from hsdopt.plots import what_if_curve
from hsdopt.profiles import Profile
from hsdopt.solvers.solve import solve
from hsdopt.solvers.what_if import sensitivities, what_if

ALONE = Profile.from_rates("t", {"t": 1.0}, {})


def test_without_other_drafters_the_threshold_is_known() -> None:
    # One drafted token pays as soon as 1 + a > 1 + c, and longer drafts pay no earlier.
    answer = what_if(ALONE, cost_ratio=[0.0, 0.1, 0.5, 1.0])
    assert answer.speedup == 1.0
    assert [point.acceptance for point in answer.points][1:3] == pytest.approx([0.1, 0.5], abs=1e-6)
    assert answer.points[0].acceptance == pytest.approx(0.0, abs=1e-6)
    assert answer.points[3].acceptance is None
    for point in answer.points:
        for rate, speedup in zip(answer.acceptances, point.speedups, strict=True):
            assert speedup == pytest.approx(max(1.0, best_draft_length(rate, point.cost_ratio, 24)[1]))


def test_the_threshold_is_where_solve_changes_its_mind() -> None:
    profile = Profile.from_rates(
        "t", {"lookup": 0.001, "s": 0.2, "t": 1.0}, {("s", "t"): 0.7, ("lookup", "t"): 0.3, ("lookup", "s"): 0.4}
    )
    before = solve(profile, family="cascade", max_draft_length=8).seconds_per_token
    answer = what_if(profile, cost_ratio=0.05, max_draft_length=8)
    threshold = answer.points[0].acceptance
    assert threshold is not None
    for rate, better in ((threshold + 0.02, True), (threshold - 0.02, False)):
        more = Profile.from_rates("t", {"h": 0.05, **profile.costs}, {**profile.acceptances, ("h", "t"): rate})
        # rows of three are no part of the question
        found = solve(more, family="cascade", max_draft_length=8)
        if better:
            assert found.seconds_per_token < before
            assert "h" in found.plan.models
        else:
            assert len(found.plan.row) > 2 or found.seconds_per_token >= before * (1 - 1e-9)  # type: ignore[attr-defined]


def test_dearer_drafters_need_more_acceptance() -> None:
    answer = what_if(traced_profile(1, prompts=12), cost_ratio=0.07)
    needed = [point.acceptance if point.acceptance is not None else 1.1 for point in answer.curve]
    assert needed == sorted(needed)
    for point in (*answer.points, *answer.curve):
        assert list(point.speedups) == sorted(point.speedups)
        assert min(point.speedups) >= answer.speedup * (1 - 1e-12)


def test_costs_as_a_curve() -> None:
    profile = traced_profile(2, prompts=12)
    base = profile.cost("big")(1, profile.context)
    flat = what_if(profile, cost_ratio=0.1).points[0]
    assert what_if(profile, cost_ratio=CostCurve.fixed(0.1 * base)).points[0].acceptance == flat.acceptance
    steep = what_if(profile, cost_ratio=lambda n: 0.1 * base * (1 + 0.5 * (n > 1))).points[0]
    assert steep.acceptance is not None
    assert flat.acceptance is not None
    assert steep.acceptance > flat.acceptance
    assert steep.cost_ratio == pytest.approx(flat.cost_ratio)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost_ratio": -0.1}, "expected cost ratios that are finite numbers of at least 0; got -0.1"),
        ({"cost_ratio": math.inf}, "expected cost ratios that are finite numbers of at least 0; got inf"),
        ({"cost_ratio": 0.1, "acceptances": [1.2]}, "expected acceptances between 0 and 1; got 1.2"),
        ({"cost_ratio": 0.1, "max_draft_length": 0}, "expected max_draft_length to be a whole number of at least 1"),
    ],
)
def test_bad_questions(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        what_if(ALONE, **options)  # type: ignore[arg-type]


def test_a_target_that_costs_nothing() -> None:
    with pytest.raises(PredictionError, match="expected a target whose passes cost something"):
        what_if(Profile.from_rates("t", {"t": 0.0}, {}), cost_ratio=0.1)


def test_sensitivities_are_the_derivatives_of_the_best_latency() -> None:
    # The envelope theorem: solving again after a small change gives the same slope.
    rates = {("a", "b"): 0.7, ("b", "t"): 0.85, ("a", "t"): 0.4, ("b", "a"): 0.3}
    costs = {"a": 0.02, "b": 0.15, "t": 1.0}

    def best(costs: dict[str, float], rates: dict[tuple[str, str], float]) -> float:
        return math.log(solve(Profile.from_rates("t", costs, rates), family="hierarchy").seconds_per_token)

    profile = Profile.from_rates("t", costs, rates)
    plan = solve(profile, family="hierarchy").plan
    step = 1e-5
    for row in sensitivities(plan, profile):
        if row.what == "cost":
            (name,) = row.models
            changed = [best({**costs, name: costs[name] * (1 + s)}, rates) for s in (step, -step)]
        else:
            pair = row.models[0], row.models[1]
            changed = [best(costs, {**rates, pair: rates[pair] * (1 + s)}) for s in (step, -step)]
        assert row.elasticity == pytest.approx((changed[0] - changed[1]) / (2 * step), rel=1e-4, abs=1e-7)


def test_costs_share_out_the_latency_and_the_strongest_comes_first() -> None:
    profile = traced_profile(3, prompts=12)
    for text in ("big", "big(lookup:6)", "big(int8:6(lookup:3), lookup:4)"):
        rows = sensitivities(parse_plan(text), profile)
        assert sum(row.elasticity for row in rows if row.what == "cost") == pytest.approx(1)
        strengths = [abs(row.elasticity) for row in rows]
        assert strengths == sorted(strengths, reverse=True)
        assert all(row.elasticity < 0 for row in rows if row.what == "acceptance")


def test_measured_curves_move_as_a_whole() -> None:
    profile = traced_profile(4, prompts=12)
    plan = parse_plan("big(int4:4)")
    (row,) = [row for row in sensitivities(plan, profile) if row.what == "acceptance"]
    law = profile.acceptance("int4", "big")
    step = 1e-3
    curve = np.asarray(law.survival) * (1 - step) ** np.arange(len(law.survival))
    harder = replace(profile, acceptances={("int4", "big"): Acceptance(tuple(curve.tolist()))}, _laws={})
    slope = math.log(
        expected_latency(plan, profile).seconds_per_token / expected_latency(plan, harder).seconds_per_token
    )
    assert row.elasticity == pytest.approx(slope / step, rel=1e-2)
    assert row.value == law.rate


def test_big_little_decoder_has_costs_only() -> None:
    profile = traced_profile(5, prompts=8)
    rows = sensitivities(Bild("big", "int8", 0.5, 3.0, 10), profile)
    assert {row.what for row in rows} == {"cost"}


def test_the_plot_shows_the_curve() -> None:
    answer = what_if(traced_profile(6, prompts=8), cost_ratio=[0.05, 0.9])
    axes = what_if_curve(answer, ax=Figure().add_subplot())
    line = axes.lines[0]
    known = [point for point in (*answer.curve, *answer.points) if point.acceptance is not None]
    assert sorted(line.get_xdata()) == sorted(point.cost_ratio for point in known)  # type: ignore[arg-type]
    assert f"{answer.speedup:.2f}x" in axes.get_title(loc="left")
