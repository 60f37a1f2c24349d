"""`solve`: optimality against enumeration, families, limits, published decisions."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced import CPU, traced_profile

import hsdopt
from hsdopt.acceptance import Acceptance
from hsdopt.costs import CostCurve
from hsdopt.errors import InvalidArgumentError, PredictionError
from hsdopt.gsp import shortest_path
from hsdopt.gsp.reduction import arrays_graph, hierarchy_graph
from hsdopt.latency.expected import expected_latency
from hsdopt.plan import LOOKUP, Adaptive, Level, Plan, Segment, parse_plan
from hsdopt.profiles import ModelInfo, Profile
from hsdopt.solvers.arrays import profile_arrays
from hsdopt.solvers.candidates import hierarchies
from hsdopt.solvers.evaluate import neighbours
from hsdopt.solvers.hierarchy import optimal_hierarchy, search_arrays, solve_arrays
from hsdopt.solvers.limits import read_limits
from hsdopt.solvers.rows import best_latency, best_requests, best_rows
from hsdopt.solvers.solve import FAMILIES, solve

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published.json").read_text())
LOSSLESS = tuple(family for family in FAMILIES if family != "bild")


def random_profile(rng: np.random.Generator, drafters: int, *, curves: bool = False, lookup: bool = False) -> Profile:
    """Return a profile given by hand: cheap drafters below, constant costs or sloped curves."""
    names = [*(["lookup"] if lookup else []), *(f"d{i}" for i in range(drafters)), "t"]
    first = dict(zip(names, [*np.sort(rng.uniform(0.0, 0.6, len(names) - 1)), 1.0], strict=True))
    costs = {name: float(cost) for name, cost in first.items()}
    if curves:
        costs = {
            name: CostCurve.fixed(0.01) if name == LOOKUP else sloped(cost, rng.uniform(0, 0.2), 40)
            for name, cost in first.items()
        }
    rates = {(j, i): float(rng.uniform(0.2, 0.98)) for j in names[:-1] for i in names if i not in (j, LOOKUP)}
    return Profile.from_rates("t", costs, rates)


def sloped(first: float, slope: float, longest: int) -> CostCurve:
    return CostCurve.from_function(lambda n: first * (1 + slope * (n - 1)), longest)


def stacks(names: tuple[str, ...], target: str, longest: int) -> Iterator[Level]:
    """Every stack of some drafters in every order, all lengths."""
    yield Level(target)
    for size in range(1, len(names) + 1):
        for order in permutations(names, size):
            if LOOKUP in order[1:]:
                continue
            for lengths in product(range(1, longest + 1), repeat=size):
                row: tuple[Segment, ...] = ()
                for name, length in zip(order, lengths, strict=True):
                    row = (Segment(Level(name, row), length),)
                yield Level(target, row)


def latency(plan: Plan, profile: Profile) -> float:
    return expected_latency(plan, profile).seconds_per_token


@pytest.mark.parametrize("lookup", [False, True])
def test_hierarchy_is_the_best_of_all_stacks_at_constant_costs(*, lookup: bool) -> None:
    rng = np.random.default_rng(1)
    deep = 0
    for _ in range(6):
        profile = random_profile(rng, 2 if lookup else 3, lookup=lookup)
        found = solve(profile, family="hierarchy", max_draft_length=4)
        least = min(latency(plan, profile) for plan in stacks(profile.drafters, "t", 4))
        assert found.seconds_per_token == pytest.approx(least, rel=1e-12)
        assert found.exact
        deep += len(found.plan.models) > 2
    assert deep > 0


def test_hierarchy_is_close_to_the_best_of_all_stacks_with_curves() -> None:
    # Catch-up of deeper levels is no part of the search; what is lost by that is bounded here.
    rng = np.random.default_rng(2)
    losses = []
    for _ in range(5):
        profile = random_profile(rng, 3, curves=True)
        found = solve(profile, family="hierarchy", max_draft_length=4)
        least = min(latency(plan, profile) for plan in stacks(profile.drafters, "t", 4))
        losses.append(found.seconds_per_token / least - 1)
    assert max(losses) < 1e-9


def test_hierarchy_of_a_measured_profile_is_the_best_of_all_stacks() -> None:
    profile = traced_profile(3, milliseconds={name: CPU[name] for name in ("lookup", "int4", "int8", "big")})
    found = solve(profile, family="hierarchy", max_draft_length=5, interval=0)
    plans = list(stacks(profile.drafters, "big", 5))
    assert found.seconds_per_token == pytest.approx(min(latency(plan, profile) for plan in plans), rel=1e-9)


def test_cascade_is_the_best_of_all_rows_of_two() -> None:
    rng = np.random.default_rng(3)
    rows = 0
    for number in range(4):
        profile = random_profile(rng, 2, curves=number % 2 == 1, lookup=True)
        found = solve(profile, family="cascade", max_draft_length=4)
        plans: list[Plan] = list(stacks(profile.drafters, "t", 4))
        # every two stacks side by side, up to four tokens together
        parts = [plan.row[0] for plan in stacks(profile.drafters, "t", 2) if plan.row]
        parts += [replace(part, length=3) for part in parts if part.length == 2 and part.level.model != LOOKUP]
        plans += [
            Level("t", (first, second))
            for first, second in permutations(parts, 2)
            if first.length + second.length <= 4 and first.level.model != second.level.model
        ]
        least = min(latency(plan, profile) for plan in plans)
        assert found.seconds_per_token <= least * (1 + 1e-9)
        rows += found.candidate.family == "cascade"
    assert rows > 0


def every_level(name: str, below: tuple[str, ...], longest: int) -> Iterator[Level]:
    """Every level of `name` with rows of `below`, at every depth."""
    yield Level(name)
    if name == LOOKUP:
        return
    for size in range(1, len(below) + 1):
        for order in permutations(below, size):
            for lengths in product(range(1, longest + 1), repeat=size):
                if sum(lengths) <= longest:
                    rest = [tuple(other for other in below if other != drafter) for drafter in order]
                    for levels in product(*map(every_level, order, rest, [longest] * size)):
                        yield Level(name, tuple(map(Segment, levels, lengths)))


def test_cascade_is_the_best_of_all_rows_at_all_levels() -> None:
    rng = np.random.default_rng(4)
    for curves in (False, False, True):
        profile = random_profile(rng, 2, curves=curves, lookup=True)
        found = solve(profile, family="cascade", max_draft_length=2)
        plans = list(every_level("t", profile.drafters, 2))
        assert len(plans) > 500
        assert found.seconds_per_token <= min(latency(plan, profile) for plan in plans) * (1 + 1e-9)
        assert found.exact != curves


def test_cascade_of_three_segments_is_the_best_of_all_flat_rows() -> None:
    rates = {("a", "t"): 0.9, ("b", "t"): 0.6, ("c", "t"): 0.35}
    profile = Profile.from_rates("t", {"a": 0.2, "b": 0.04, "c": 0.0, "t": 1.0}, rates)
    found = solve(profile, family="cascade", max_draft_length=7)
    flat = [
        Level("t", tuple(Segment(Level(name), length) for name, length in zip(order, lengths, strict=True)))
        for order in permutations("abc")
        for lengths in product(range(1, 6), repeat=3)
        if sum(lengths) <= 7
    ]
    assert found.seconds_per_token <= min(latency(plan, profile) for plan in flat) * (1 + 1e-12)
    assert len(found.plan.row) == 3  # type: ignore[attr-defined]
    assert found.exact


def test_row_search_on_arrays_is_the_full_count_for_single_drafters() -> None:
    profile = traced_profile(4)
    arrays = profile_arrays(profile, profile.drafters, 12)
    alone = best_requests(arrays, levels=1)
    for number, name in enumerate(profile.drafters):
        best = min(latency(parse_plan(f"big({name}:{length})"), profile) for length in range(1, 13))
        part = arrays.take([number])
        assert best_latency(part, best_requests(part)) == pytest.approx(min(best, latency(Level("big"), profile)))
    assert np.array_equal(alone.cost, arrays.draft)


def test_row_search_on_arrays_is_close_to_the_full_count_for_rows() -> None:
    profile = traced_profile(5)
    arrays = profile_arrays(profile, profile.drafters, 12)
    requests = best_requests(arrays, levels=1)
    for text, drafters in (
        ("big(int8:3, lookup:5)", ("int8", "lookup")),
        ("big(lookup:4, int4:3)", ("lookup", "int4")),
    ):
        part = arrays.take([profile.drafters.index(name) for name in drafters])
        rows = {str(plan): plan for plan in best_rows(part, best_requests(part, levels=1), 200)}
        assert text in rows
        assert requests.levels[0][0] == Level("lookup")
    row = Level("big", (Segment(Level("int8"), 3), Segment(Level("lookup"), 5)))
    only = arrays.take([profile.drafters.index("int8"), profile.drafters.index("lookup")])
    found = best_latency(only, best_requests(only, levels=1))
    assert found <= latency(row, profile) * 1.002


@pytest.mark.parametrize("longest", [6, 24])
def test_sweep_and_graph_agree_on_the_arrays_of_a_profile(longest: int) -> None:
    profile = traced_profile(6)
    for required in ((), (1,)):
        arrays = profile_arrays(profile, profile.drafters, longest).stacks(required).arrays
        path = shortest_path(arrays_graph(arrays), "s", "t")
        assert path.kind == "path"
        assert solve_arrays(arrays).latency == pytest.approx(path.cost, rel=1e-12)
        assert search_arrays(arrays, count=1)[0].latency == pytest.approx(path.cost, rel=1e-12)


def test_sweep_and_graph_agree_on_curves_and_survival() -> None:
    profile = traced_profile(7)
    names, longest = profile.names[1:], 12
    costs = [lambda n, name=name: profile.cost(name)(n) for name in names]
    survival = np.zeros((len(names), len(names), longest + 1))
    for (j, drafter), (i, verifier) in permutations(enumerate(names), 2):
        if drafter != profile.target:
            survival[j, i] = profile.acceptance(drafter, verifier).curve(longest)
    survival[..., 0] = 1.0
    path = shortest_path(hierarchy_graph(costs, survival, longest, order="any"), "s", "t")
    found = optimal_hierarchy(costs, survival, longest, order="any")
    assert found.latency == pytest.approx(path.cost, rel=1e-12)


profiles = st.builds(
    lambda seed, drafters, lookup: random_profile(np.random.default_rng(seed), drafters, lookup=lookup),
    st.integers(0, 10_000),
    st.integers(1, 2),
    st.booleans(),
)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(profiles)
def test_families_contain_each_other(profile: Profile) -> None:
    by_family = {family: solve(profile, family=family, max_draft_length=6).seconds_per_token for family in LOSSLESS}
    slack = 1 + 1e-12
    assert by_family["adaptive"] <= by_family["hierarchy"] * slack
    assert by_family["cascade"] <= by_family["hierarchy"] * slack
    assert by_family["hierarchy"] <= by_family["speculative"] * slack
    assert by_family["speculative"] <= latency(Level("t"), profile) * slack
    assert by_family["all"] <= min(by_family.values()) * slack


@settings(max_examples=8, deadline=None, derandomize=True)
@given(profiles, st.integers(0, 1000))
def test_a_free_extra_drafter_never_hurts(profile: Profile, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates = {("free", name): float(rng.uniform(0, 1)) for name in profile.names if name != LOOKUP}
    more = Profile.from_rates(
        "t",
        {"free": 0.0, **profile.costs},
        {**profile.acceptances, **rates, **{(name, "free"): 0.5 for name in profile.drafters}},
    )
    for family in LOSSLESS:
        before = solve(profile, family=family, max_draft_length=5).seconds_per_token
        assert solve(more, family=family, max_draft_length=5).seconds_per_token <= before * (1 + 1e-12)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(profiles)
def test_wider_limits_never_hurt(profile: Profile) -> None:
    for family in LOSSLESS:
        narrow = solve(profile, family=family, max_draft_length=3, max_levels=2).seconds_per_token
        longer = solve(profile, family=family, max_draft_length=5, max_levels=2).seconds_per_token
        deeper = solve(profile, family=family, max_draft_length=5).seconds_per_token
        assert deeper <= longer * (1 + 1e-12)
        assert longer <= narrow * (1 + 1e-12)


def test_the_order_of_models_does_not_matter() -> None:
    profile = traced_profile(8, prompts=12)
    names = list(reversed(profile.drafters))
    turned = Profile(
        profile.target,
        {name: profile.costs[name] for name in [profile.target, *names]},
        models=profile.models,
        traces=profile.traces,
        samples=profile.samples,
    )
    for family in ("hierarchy", "adaptive"):
        one, two = (solve(p, family=family, max_draft_length=8, interval=0) for p in (profile, turned))
        assert one.plan == two.plan
        assert one.seconds_per_token == pytest.approx(two.seconds_per_token, rel=1e-12)


def test_ties_take_the_fewest_models_then_the_shortest_drafts() -> None:
    rates = {("a", "t"): 1.0, ("b", "t"): 1.0, ("a", "b"): 1.0, ("b", "a"): 1.0}
    equal = solve(Profile.from_rates("t", {"a": 1.0, "b": 1.0, "t": 1.0}, rates), max_draft_length=4)
    assert equal.plan == Level("t")
    assert not equal.speculate
    rates[("b", "t")] = rates[("b", "a")] = 0.0
    free = solve(Profile.from_rates("t", {"a": 0.1, "b": 0.0, "t": 1.0}, rates), max_draft_length=4)
    assert str(free.plan) == "t(a:4)"


def measured(**options: object) -> hsdopt.solvers.solution.Solution:  # type: ignore[name-defined]
    profile = traced_profile(9, prompts=16)
    return solve(profile, **{"max_draft_length": 8, "interval": 0, **options})  # type: ignore[arg-type]


def test_limits_on_levels_lengths_and_models() -> None:
    for levels in (1, 2, 3):
        found = measured(max_levels=levels)
        for candidate in (found.candidate, *found.runners_up):
            plan = candidate.plan
            assert (plan.depth if isinstance(plan, Level) else len(plan.models) - 1) < levels
    short = measured(max_draft_length=3)
    for candidate in (short.candidate, *short.runners_up):
        if isinstance(candidate.plan, Level):
            assert all((level.longest_draft or 0) <= 3 for level in candidate.plan.walk())
    only = measured(allowed=["int4", "skip"])
    assert all({*c.plan.models} <= {"int4", "skip", "big"} for c in (only.candidate, *only.runners_up))
    assert measured(max_levels=1).plan == Level("big")


@pytest.mark.parametrize("family", ["speculative", "hierarchy", "cascade", "adaptive", "all"])
def test_required_models_are_used(family: str) -> None:
    for required in (["skip"], ["lookup", "int4"]):
        if family == "speculative" and len(required) > 1:
            with pytest.raises(InvalidArgumentError, match="expected limits that some plan of the family"):
                measured(family=family, required=required)
            continue
        found = measured(family=family, required=required)
        assert all({*required} <= {*c.plan.models} for c in (found.candidate, *found.runners_up))
        assert found.autoregression.plan == Level("big")


def test_required_stacks_are_the_best_of_their_kind() -> None:
    profile = traced_profile(10, prompts=12, milliseconds={name: CPU[name] for name in ("skip", "int4", "int8", "big")})
    limits = read_limits(
        profile, max_draft_length=4, max_levels=None, max_memory_bytes=None, allowed=None, required=["skip", "int8"]
    )
    arrays = profile_arrays(profile, profile.drafters, 4)
    found = list(hierarchies(arrays, limits))
    assert all({"skip", "int8"} <= {*plan.models} for plan in found)
    best = solve(profile, family="hierarchy", max_draft_length=4, required=["skip", "int8"], interval=0)
    least = min(latency(p, profile) for p in stacks(profile.drafters, "big", 4) if {"skip", "int8"} <= {*p.models})
    assert best.seconds_per_token == pytest.approx(least, rel=1e-9)


def test_memory_is_a_limit_on_sets_of_models() -> None:
    profile = traced_profile(11, prompts=12)
    for budget in (540, 620, 675, 700, 1000):
        found = solve(profile, max_memory_bytes=budget, max_draft_length=6, interval=0)
        for candidate in (found.candidate, *found.runners_up):
            assert sum(profile.models[name].bytes for name in candidate.plan.models) <= budget
        assert found.memory_bytes == sum(profile.models[name].bytes for name in found.plan.models)
    # each alone fits, both together do not: the best over both sets is found
    pools = read_limits(
        profile, max_draft_length=4, max_levels=None, max_memory_bytes=680, allowed=None, required=None
    ).pools(profile)
    assert pools == [("lookup", "skip", "int4"), ("lookup", "skip", "int8")]


def test_unmeasured_pairs_are_not_used() -> None:
    rates = {("a", "t"): 0.8, ("b", "a"): 0.9}
    found = solve(Profile.from_rates("t", {"a": 0.3, "b": 0.01, "t": 1.0}, rates), max_draft_length=6)
    assert found.plan.models == ("b", "a", "t")
    alone = solve(Profile.from_rates("t", {"a": 0.3, "t": 1.0}, {}))
    assert alone.plan == Level("t")
    assert alone.why == "no drafter to use"
    assert solve(Profile.from_rates("t", {"t": 1.0}, {})).plan == Level("t")


def test_drafts_stop_where_the_profile_stops() -> None:
    law = Acceptance((1.0, 0.95, 0.93, 0.92))
    short = solve(Profile.from_rates("t", {"d": 0.01, "t": 1.0}, {("d", "t"): law}))
    assert str(short.plan) == "t(d:3)"
    costs = {"d": 0.01, "t": CostCurve.from_function(lambda n: 1.0 + 0.01 * n, 5)}
    assert str(solve(Profile.from_rates("t", costs, {("d", "t"): 0.95})).plan) == "t(d:4)"


def test_lookup_goes_before_a_network_where_it_often_finds_nothing() -> None:
    joint = np.zeros((9, 9))
    joint[0, 0], joint[8, 8], joint[8, 0] = 0.6, 0.3, 0.1
    laws = {("lookup", "t"): Acceptance.from_joint(joint), ("d", "t"): 0.6}
    profile = Profile.from_rates("t", {"lookup": 0.001, "d": 0.1, "t": 1.0}, laws)
    found = solve(profile, max_draft_length=9)
    assert found.plan.row[0].level.model == "lookup"  # type: ignore[attr-defined]
    assert "d" in found.plan.models


def test_conventions_are_candidates_of_the_cascade() -> None:
    rates = {("a", "b"): 0.9, ("b", "t"): 0.9, ("a", "t"): 0.4, ("b", "a"): 0.1}
    profile = Profile.from_rates("t", {"a": 0.02, "b": 0.15, "t": 1.0}, rates)
    found = solve(profile, family="cascade")
    stops = {segment.stop for level in found.plan.walk() for segment in level.row}  # type: ignore[attr-defined]
    assert stops & {"overshoot", "rounds"}
    assert found.seconds_per_token < found.best_by_family["hierarchy"].seconds_per_token


def test_an_adaptive_plan_runs_through_the_readers() -> None:
    rates = {("a", "b"): 0.8, ("b", "t"): 0.95, ("a", "t"): 0.3, ("b", "a"): 0.1}
    profile = Profile.from_rates("t", {"a": 0.05, "b": 0.2, "t": 1.0}, rates)
    found = solve(profile, family="adaptive", max_draft_length=8)
    assert isinstance(found.plan, Adaptive)
    assert found.best_by_family["adaptive"].plan == found.plan
    assert latency(found.plan, profile) == pytest.approx(found.seconds_per_token)
    assert found.plan.description.startswith("adaptive t(b:")
    assert found.exact


def test_another_evaluator_decides() -> None:
    profile = traced_profile(12, prompts=8)
    seen = []

    def shorter(plan: Plan) -> float:
        seen.append(plan)
        if "int8" in plan.models:
            raise PredictionError("not this one")
        return 0.01 * len(str(plan))

    found = solve(profile, family="speculative", rerank=shorter, interval=0)
    assert found.predictor == "shorter"
    assert found.plan == Level("big")
    assert found.seconds_per_token == pytest.approx(0.03)
    assert Level("big") in seen
    assert len(seen) < 97
    with pytest.raises(InvalidArgumentError, match="expected rerank to return seconds per token above 0; got -1"):
        solve(profile, rerank=lambda _: -1.0, interval=0)

    def refuse(plan: Plan) -> float:
        raise PredictionError(str(plan))

    with pytest.raises(InvalidArgumentError, match="expected rerank to predict autoregression"):
        solve(profile, rerank=refuse, interval=0)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_another_evaluator_finds_drafts_of_any_length(length: int) -> None:
    """The closed form may favour other lengths by far: bursts of accepted tokens look to it like a high rate."""
    profile = Profile.from_rates(
        "t", {"d": 0.02, "e": 0.1, "t": 1.0}, {("d", "t"): 0.9, ("e", "t"): 0.6, ("d", "e"): 0.9}
    )
    best = parse_plan(f"t(d:{length})")
    assert abs(length - solve(profile, family="speculative", interval=0).plan.row[0].length) > 3

    def rerank(plan: Plan) -> float:
        row = plan.row if isinstance(plan, Level) else ()
        alone = len(row) == 1 and plan.models == ("d", "t")
        return 0.5 + 0.01 * abs(row[0].length - length) if alone else 1.0

    for family in ("speculative", "hierarchy", "all"):
        assert solve(profile, family=family, rerank=rerank, interval=0).plan == best


def test_an_evaluator_climbs_to_stacks_that_no_search_proposed() -> None:
    profile = Profile.from_rates(
        "t", {"d": 0.02, "e": 0.1, "t": 1.0}, {("d", "t"): 0.7, ("e", "t"): 0.9, ("d", "e"): 0.9}
    )

    def rerank(plan: Plan) -> float:
        if plan.models != ("d", "e", "t") or not isinstance(plan, Level):
            return 1.0
        top = plan.row[0]
        return 0.5 + 0.01 * top.length + 0.01 * top.level.row[0].length if top.stop == "truncate" else 0.9

    assert solve(profile, family="hierarchy", rerank=rerank, interval=0).plan == parse_plan("t(e:1(d:1))")


def test_an_evaluator_may_take_all_plans_at_once() -> None:
    class Evaluator:
        name = "table"

        def __call__(self, plan: Plan) -> float:
            raise AssertionError(plan)

        def many(self, plans: list[Plan]) -> list[float | None]:
            return [None if "skip" in plan.models else 1.0 / (1 + len(plan.models)) for plan in plans]

    found = solve(traced_profile(12, prompts=8), family="hierarchy", rerank=Evaluator(), interval=0)
    assert found.predictor == "table"
    assert "skip" not in found.plan.models
    assert len(found.plan.models) > 2


def test_the_solution_says_why() -> None:
    found = solve(Profile.from_rates("t", {"d": 0.1, "t": 1.0}, {("d", "t"): 0.8}), family="speculative")
    assert found.why.startswith("d acceptance 0.80, a pass 0.1 of t's, c(7)/c(1) = 1; 3.95 tokens per pass")
    assert "\n" not in found.why
    assert [c.seconds_per_token for c in found.runners_up] == sorted(c.seconds_per_token for c in found.runners_up)
    assert found.interval is None
    assert found.resolution is None
    assert {*found.best_by_family} == {"autoregression", "speculative"}
    assert found.best_single is not None
    assert found.best_single.plan == found.plan


def test_published_expectations_and_decisions() -> None:
    for row in PUBLISHED["leviathan_2023_table_4"]["rows"]:
        profile = Profile.from_rates("t", {"d": row["cost_ratio"], "t": 1.0}, {("d", "t"): row["acceptance"]})
        plan = parse_plan(f"t(d:{row['draft_length']})")
        assert expected_latency(plan, profile).speedup == pytest.approx(row["expected"], abs=0.07)
        found = solve(profile)
        assert found.speculate
        assert found.speedup >= expected_latency(plan, profile).speedup * (1 - 1e-12)


def field_profile(inputs: dict[str, float]) -> tuple[Profile, int]:
    """Return what a field report says about costs and acceptance, and the longest draft that it covers."""
    if "costs_ms" in inputs:
        costs = {int(n): value for n, value in inputs["costs_ms"].items()}  # type: ignore[attr-defined]
        curve = CostCurve(tuple(costs), (0,), (tuple(costs.values()),))
        drafter = CostCurve.fixed(inputs["drafter_cost_ms"])
        return Profile.from_rates("t", {"d": drafter, "t": curve}, {("d", "t"): inputs["acceptance"]}), max(costs) - 1
    verifications = inputs["emitted"] - inputs["accepted"]
    drafting = inputs["draft_passes"] * inputs["draft_pass_ms"]
    verify = (inputs["total_ms"] - drafting) / verifications
    longest = math.ceil(inputs["drafted"] / verifications)
    rejected = verifications * (1 - (inputs["accepted"] / inputs["drafted"]) ** longest)
    rate = inputs["accepted"] / (inputs["accepted"] + rejected)
    curve = CostCurve((1, 2, longest + 1), (0,), ((inputs["baseline_ms"], verify, verify),))
    costs = {"d": CostCurve.fixed(drafting / inputs["drafted"]), "t": curve}
    return Profile.from_rates("t", costs, {("d", "t"): rate}), longest


def test_field_reports_are_decided_right() -> None:
    reports = [row for row in PUBLISHED["field_reports"]["rows"] if "inputs" in row]
    assert len(reports) >= 2
    for row in reports:
        profile, longest = field_profile(row["inputs"])
        found = solve(profile, max_draft_length=longest)
        assert found.speculate == row["decision"].startswith("speculate"), row["what"]
        assert bool(found.warnings) != found.speculate
    # a constant verify cost gets the first one wrong
    profile, _ = field_profile(reports[0]["inputs"])
    assert solve(profile.as_iid(), max_draft_length=1).speculate


def test_neighbours_differ_in_one_thing() -> None:
    plan = parse_plan("t(d:2(e:1), lookup:3)")
    assert isinstance(plan, Level)
    found = [str(other) for other in neighbours(plan, rows=True, drafters=["f"])]
    assert len(found) == len({*found})
    assert {"t(d:2+(e:1), lookup:3)", "t(d:1x(e:1), lookup:3)", "t(e:1, lookup:3)", "t(lookup:3)"} <= {*found}
    assert "t(d:2(e:1), f:3, lookup:3)" in found
    back = [str(other) for other in neighbours(parse_plan("t(d:2+(e:1))"), rows=True)]  # type: ignore[arg-type]
    assert "t(d:2(e:1))" in back


def test_families_of_plans() -> None:
    assert parse_plan("bild(t, d)").family == "bild"
    assert Adaptive("t", None).family == "autoregression"
    assert parse_plan("t(d:3)").description == "t(d:3)"


def test_solving_is_fast() -> None:
    profile = traced_profile()
    solve(profile, family="speculative", interval=0)
    for family, limit in (("hierarchy", 1.5), ("all", 6.0)):  # a busy machine is several times slower than a free one
        start = time.perf_counter()
        solve(profile, family=family, interval=0)
        assert time.perf_counter() - start < limit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"family": "best"},
            "expected a family out of speculative, hierarchy, cascade, adaptive, bild, all; got 'best'",
        ),
        ({"max_draft_length": 0}, "expected max_draft_length to be a whole number of at least 1"),
        ({"max_levels": 0}, "expected max_levels to be a whole number of at least 1"),
        ({"max_memory_bytes": 0}, "expected max_memory_bytes to be a whole number of at least 1"),
        ({"max_memory_bytes": 100}, "expected max_memory_bytes of at least 540, what big need"),
        ({"max_memory_bytes": 600, "required": ["int8"]}, "expected max_memory_bytes of at least 675"),
        ({"allowed": ["huge"]}, "expected the allowed models among the profiled ones .*; got huge"),
        ({"required": ["huge"]}, "expected the required models among the profiled ones .*; got huge"),
        ({"allowed": ["int4"], "required": ["int8"]}, "expected the required models among those allowed; got int8"),
        ({"required": ["int8"], "max_levels": 1}, "expected max_levels of at least 2, as drafters are required"),
        ({"interval": -1}, "expected interval to be a whole number of at least 0"),
        ({"seed": -1}, "expected seed to be a whole number of at least 0"),
        ({"family": "bild"}, "expected max_deviation with family bild"),
        ({"max_deviation": 0.1}, "expected max_deviation with family bild only; got it with all"),
        ({"family": "bild", "max_deviation": 2}, "expected max_deviation between 0 and 1; got 2"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        solve(traced_profile(13, prompts=4), **options)  # type: ignore[arg-type]


def test_no_traces_no_bild() -> None:
    profile = Profile.from_rates("t", {"d": 0.1, "t": 1.0}, {("d", "t"): 0.8})
    with pytest.raises(PredictionError, match="expected traces of a small model's confidence"):
        solve(profile, family="bild", max_deviation=0.1)


def test_models_given_by_hand_need_no_memory() -> None:
    profile = Profile.from_rates("t", {"d": 0.1, "t": 1.0}, {("d", "t"): 0.8})
    assert solve(profile, max_memory_bytes=1).speculate
    heavy = Profile("t", profile.costs, profile.acceptances, models={"d": ModelInfo(source="d", bytes=5)})
    assert not solve(heavy, max_memory_bytes=1).speculate
