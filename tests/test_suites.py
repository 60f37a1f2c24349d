"""Suites of plans: what every one has to contain."""

from __future__ import annotations

import pytest
from traced import CPU, traced_profile

from hsdopt.errors import InvalidArgumentError
from hsdopt.latency.expected import expected_latency
from hsdopt.plan import LOOKUP, Bild, Level, Plan, parse_plan
from hsdopt.profiles import Profile
from hsdopt.solvers.solve import solve
from hsdopt.suites import SUITES, assistants, suite


def depth(plan: Plan) -> int:
    return plan.depth if isinstance(plan, Level) else 0


@pytest.fixture(scope="module")
def profile() -> Profile:
    return traced_profile(1, prompts=12)


@pytest.mark.parametrize("name", ["standard", "full"])
def test_a_suite_spreads_over_kinds_and_speeds(profile: Profile, name: str) -> None:
    solution = solve(profile, interval=0)
    best = [candidate.plan for candidate in solution.best_by_family.values()]
    plans = suite(profile, [solution.plan, *best], name)
    assert len(plans) == len({*plans}) <= SUITES[name]
    assert plans[:2] == (Level("big"), solution.plan)
    assert len(plans) >= 12
    assert len({model for plan in plans for model in plan.models}) >= 4
    assert sum(depth(plan) > 1 for plan in plans) >= 3
    assert sum(isinstance(plan, Level) and len(plan.row) > 1 for plan in plans) >= 2
    seconds = {plan: expected_latency(plan, profile).seconds_per_token for plan in plans}
    assert sum(value > seconds[Level("big")] for value in seconds.values()) >= 2
    assert max(seconds.values()) >= 2 * min(seconds.values())


def test_the_full_suite_holds_every_convention(profile: Profile) -> None:
    plans = suite(profile, [], "full")
    stops = {segment.stop for plan in plans if isinstance(plan, Level) for segment in plan.row}
    assert {"truncate", "overshoot", "rounds"} <= stops
    assert any(isinstance(plan, Bild) for plan in plans)
    assert len(plans) == SUITES["full"]


def test_the_quick_suite_is_small_and_has_the_neighbours_of_the_choice(profile: Profile) -> None:
    chosen = parse_plan("big(int8:5, lookup:4)")
    plans = suite(profile, [chosen], "quick")
    assert len(plans) == SUITES["quick"]
    assert parse_plan("big(int8:4, lookup:4)") in plans
    everything = suite(profile, [chosen], "standard")
    assert {parse_plan("big(int8:4, lookup:4)"), parse_plan("big(int8:6, lookup:4)")} <= {*everything}


def test_single_drafters_stand_at_their_best_length(profile: Profile) -> None:
    plans = suite(profile, [])
    for name in profile.drafters:
        own = [plan for plan in plans if plan.models == (name, "big")]
        best = min(
            (parse_plan(f"big({name}:{n})") for n in range(1, 17)),
            key=lambda plan: expected_latency(plan, profile).seconds_per_token,
        )
        assert best in own


def test_assistants_are_networks_best_first(profile: Profile) -> None:
    names = assistants(profile)
    assert set(names) == set(profile.drafters) - {LOOKUP}
    best = [
        min(expected_latency(parse_plan(f"big({name}:{n})"), profile).seconds_per_token for n in range(1, 17))
        for name in names
    ]
    assert best == sorted(best)


def test_a_profile_of_little_still_gives_a_suite() -> None:
    alone = Profile.from_rates("t", {"t": 1.0}, {})
    assert suite(alone, []) == (Level("t"),)
    one = traced_profile(2, prompts=6, milliseconds={name: CPU[name] for name in (LOOKUP, "big")}, agree={})
    assert all({*plan.models} <= {LOOKUP, "big"} for plan in suite(one, []))


def test_plans_that_cannot_be_predicted_are_left_out() -> None:
    partial = Profile.from_rates("t", {"a": 0.1, "b": 0.4, "t": 1.0}, {("b", "t"): 0.8})
    plans = suite(partial, [parse_plan("t(a:3)")])
    assert plans[0] == Level("t")
    assert all("a" not in plan.models for plan in plans)
    assert len(plans) > 3


def test_an_unknown_suite(profile: Profile) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a suite out of quick, standard, full; got 'huge'"):
        suite(profile, [], "huge")
