"""The solvers of pools against the reference cases, an enumerator, the graph and each other."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from hsdopt.errors import InvalidArgumentError
from hsdopt.gsp import shortest_path
from hsdopt.gsp.reduction import hierarchy_graph
from hsdopt.latency.hierarchy import latency_per_token
from hsdopt.solvers import adaptive
from hsdopt.solvers.adaptive import optimal_latency, optimal_policy, request_cost
from hsdopt.solvers.exhaustive import best_stack, stacks
from hsdopt.solvers.hierarchy import best_hierarchies, optimal_hierarchy

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsdopt.solvers.hierarchy import Hierarchy
    from hsdopt.solvers.pool import Order

    Costs = list[float | Callable[[int], float]]

CASES = json.loads((Path(__file__).parent / "data" / "cases.json").read_text())["cases"]


def of_kind(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [c for c in CASES if c["kind"] == kind], ids=lambda case: case["id"])


def read_costs(specs: list[Any]) -> Costs:
    return [read_cost(spec) if isinstance(spec, dict) else spec for spec in specs]


def read_cost(spec: dict[str, Any]) -> Callable[[int], float]:
    if spec["type"] == "affine":
        return lambda n: spec["base"] + spec["slope"] * (n - 1)
    if spec["type"] == "roofline":
        return lambda n: spec["base"] * max(1, n / spec["knee"])
    return lambda n: spec["values"][min(n, len(spec["values"])) - 1]


def random_pool(rng: np.random.Generator, models: int) -> tuple[Costs, np.ndarray]:
    """Costs that rise to the target's 1 (some free, some sloped), acceptances with or without structure."""
    rates = rng.uniform(0, 1, (models, models))
    if rng.random() < 0.5:
        place = np.sort(rng.uniform(0, 1, models))
        rates = 1 - np.abs(place[:, np.newaxis] - place)
    rates[rng.random((models, models)) < 0.05] = rng.choice([0.0, 1.0])
    base = np.sort(np.exp(rng.uniform(np.log(0.002), np.log(0.8), models)))
    base[0] *= rng.random() > 0.1
    base[-1] = 1.0
    if rng.random() < 0.5:
        return base.tolist(), rates
    slope = float(rng.uniform(0, 0.1))
    return [lambda n, c=c: c * (1 + slope * (n - 1)) for c in base.tolist()], rates


def value_of(
    stack: Hierarchy,
    costs: Costs,
    rates: np.ndarray,
    convention: Literal["truncate", "overshoot"] = "truncate",
) -> float:
    """The latency of a reported stack, from the formula for one stack."""
    steps = [rates[j][i] for j, i in pairwise(stack.models)]
    return latency_per_token([costs[m] for m in stack.models], steps, stack.draft_lengths, convention=convention)


def close(value: float | list[float], rel: float = 1e-12) -> object:
    return pytest.approx(value, rel=rel, abs=1e-15)


@of_kind("pool")
@pytest.mark.parametrize(("order", "key"), [("given", "index"), ("any", "any")])
def test_reference_hierarchies(case: dict[str, Any], order: Order, key: str) -> None:
    inputs, expected = case["inputs"], case["expected"][key]
    costs = read_costs(inputs["costs"])
    found = optimal_hierarchy(costs, inputs["A"], inputs["Tbar"], order=order)
    assert found.latency == close(expected["latency"], 1e-9)
    assert found.latency == close(value_of(found, costs, np.array(inputs["A"])))
    if expected["unique"]:
        assert (list(found.models), list(found.draft_lengths)) == (expected["hierarchy"], expected["T"])
    graph = hierarchy_graph(costs, inputs["A"], inputs["Tbar"], order=order)
    assert shortest_path(graph, "s", "t").cost == close(found.latency)


@of_kind("pool")
def test_reference_adaptive_latencies(case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    found = optimal_latency(read_costs(inputs["costs"]), inputs["A"], inputs["Tbar"])
    assert found == close(case["expected"]["adaptive_index"]["latency"], 1e-9)


@of_kind("pool")
def test_reference_overshoot_latencies(case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]["overshoot_index"]
    costs, rates = read_costs(inputs["costs"]), np.array(inputs["A"])
    best = dict(zip(("models", "draft_lengths"), (expected["hierarchy"], expected["T"]), strict=True))
    steps = [rates[j][i] for j, i in pairwise(best["models"])]
    chosen = [costs[model] for model in best["models"]]
    value = latency_per_token(chosen, steps, best["draft_lengths"], convention="overshoot")
    assert value == close(expected["latency"], 1e-9)
    if (inputs["Tbar"] + 1) ** (len(costs) - 1) > 800:
        return  # the enumerator would take seconds
    found = best_stack(costs, inputs["A"], inputs["Tbar"], convention="overshoot")
    assert found.latency == close(expected["latency"], 1e-9)
    if expected["unique"]:
        assert (list(found.models), list(found.draft_lengths)) == (expected["hierarchy"], expected["T"])


@of_kind("adaptive_F")
def test_reference_request_costs(case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    costs = read_costs(inputs["costs"])
    found = request_cost(costs, inputs["A"], inputs["Tbar"], inputs["model"], inputs["t"])
    assert found == close(case["expected"], 1e-9)


@of_kind("adaptive_latency")
def test_reference_adaptive_policies(case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    policy = optimal_policy(read_costs(inputs["costs"]), inputs["A"], inputs["Tbar"])
    assert policy.latency == close(case["expected"], 1e-9)
    if "best first action" in case["note"]:
        assert case["note"].endswith(str(policy.target_draft))


def test_sweep_is_the_enumerator_on_random_pools() -> None:
    rng = np.random.default_rng(5)
    for number in range(1000):
        models = int(rng.choice([1, 2, 3, 4], p=[0.02, 0.18, 0.5, 0.3]))
        longest = int(rng.integers(1, 9 if models < 4 else 5))
        costs, rates = random_pool(rng, models)
        order = ("given", "any")[number % 2]
        levels = (None, None, 2, 3)[number % 4 if number % 8 else 0]
        found = optimal_hierarchy(costs, rates, longest, order=order, max_levels=levels)
        expected = best_stack(costs, rates, longest, order=order, max_levels=levels)
        assert found.latency == close(expected.latency)
        assert (len(found.models), sum(found.draft_lengths)) == (
            len(expected.models),
            sum(expected.draft_lengths),
        )
        assert found.latency == close(value_of(found, costs, rates))
        assert len(set(found.models)) == len(found.models)


def test_overshoot_enumerator_is_the_formula_for_every_stack() -> None:
    rng = np.random.default_rng(6)
    for _ in range(10):
        costs, rates = random_pool(rng, 4)
        for stack in list(stacks(costs, rates, 3, convention="overshoot"))[::5]:
            assert stack.latency == close(value_of(stack, costs, rates, "overshoot"))


@pytest.mark.parametrize("order", ["given", "any"])
def test_graph_is_the_sweep_by_every_method(order: Order) -> None:
    rng = np.random.default_rng(7)
    for _ in range(15):
        costs, rates = random_pool(rng, 4)
        graph = hierarchy_graph(costs, rates, 6, order=order)
        latency = optimal_hierarchy(costs, rates, 6, order=order).latency
        methods = ("auto", "dijkstra", "linear-program", *(["dag"] if order == "given" else []))
        for method in methods:
            found = shortest_path(graph, "s", "t", method=method)
            assert found.kind == "path"
            assert found.cost == close(latency)


@pytest.mark.parametrize("order", ["given", "any"])
@pytest.mark.parametrize("levels", [None, 1, 2, 3])
def test_best_hierarchies_are_the_best_of_all(order: Order, levels: int | None) -> None:
    rng = np.random.default_rng(8)
    for _ in range(10):
        costs, rates = random_pool(rng, 4)
        found = best_hierarchies(costs, rates, 3, order=order, max_levels=levels, count=15)
        every = sorted(s.latency for s in stacks(costs, rates, 3, order=order, max_levels=levels))
        assert [stack.latency for stack in found] == close(every[:15])
        assert len({(stack.models, stack.draft_lengths) for stack in found}) == len(found)
        assert all(stack.latency == close(value_of(stack, costs, rates)) for stack in found)


def test_survival_curves_of_iid_rates_change_nothing() -> None:
    rng = np.random.default_rng(9)
    for order in ("given", "any"):
        costs, rates = random_pool(rng, 4)
        curves = rates[..., np.newaxis] ** np.arange(9.0)
        by_rates = optimal_hierarchy(costs, rates, 8, order=order)
        by_curves = optimal_hierarchy(costs, curves, 8, order=order)
        assert (by_curves.models, by_curves.draft_lengths) == (by_rates.models, by_rates.draft_lengths)
        assert by_curves.latency == close(by_rates.latency)
    assert optimal_latency(costs, curves, 8) == close(optimal_latency(costs, rates, 8))


def test_survival_curves_pick_the_best_stack_of_the_formula() -> None:
    rng = np.random.default_rng(10)
    for _ in range(5):
        costs, _ = random_pool(rng, 3)
        curves = np.concatenate([np.ones((3, 3, 1)), rng.uniform(0.5, 1, (3, 3, 4))], axis=2).cumprod(axis=2)
        found = optimal_hierarchy(costs, curves, 4)
        every = stacks(costs, np.zeros((3, 3)), 4)
        assert found.latency == close(min(value_of(stack, costs, curves) for stack in every))


def test_families_contain_each_other() -> None:
    rng = np.random.default_rng(11)
    strict = 0
    for _ in range(60):
        costs, rates = random_pool(rng, 5)
        target = costs[-1](1) if callable(costs[-1]) else costs[-1]
        by_levels = [optimal_hierarchy(costs, rates, 7, max_levels=d).latency for d in (1, 2, 3, 4, 5)]
        free = optimal_hierarchy(costs, rates, 7).latency
        slack = 1 + 1e-12
        assert by_levels[0] == target
        assert all(deeper <= shallower * slack for shallower, deeper in pairwise(by_levels))
        assert free == close(by_levels[-1])
        assert optimal_latency(costs, rates, 7) <= free * slack
        assert optimal_hierarchy(costs, rates, 7, order="any").latency <= free * slack
        assert optimal_hierarchy(costs, rates, 8).latency <= free * slack
        strict += optimal_latency(costs, rates, 7) < free * (1 - 1e-6)
    assert strict > 20


def test_a_free_extra_drafter_never_hurts() -> None:
    rng = np.random.default_rng(12)
    for _ in range(40):
        costs, rates = random_pool(rng, 4)
        more = np.zeros((5, 5))
        more[1:, 1:], more[0] = rates, rng.uniform(0, 1, 5)
        assert optimal_hierarchy([0.0, *costs], more, 6).latency <= optimal_hierarchy(costs, rates, 6).latency * (
            1 + 1e-12
        )
        assert optimal_latency([0.0, *costs], more, 6) <= optimal_latency(costs, rates, 6) * (1 + 1e-12)


def test_a_model_never_drafts_for_itself() -> None:
    # Costs that fall with length make going through one model twice worth its while in the graph.
    rng = np.random.default_rng(13)
    graph_went_lower = 0
    for _ in range(150):
        falling = rng.uniform(0, 0.3, (2, 5)).tolist()
        costs: Costs = [*(lambda n, row=row: row[n - 1] for row in falling), 1.0]
        rates = rng.uniform(0.5, 1, (3, 3))
        found = optimal_hierarchy(costs, rates, 4, order="any")
        assert found.latency == close(best_stack(costs, rates, 4, order="any").latency)
        graph = hierarchy_graph(costs, rates, 4, order="any")
        graph_went_lower += shortest_path(graph, "s", "t").cost < found.latency * (1 - 1e-9)
    assert graph_went_lower > 0


def test_policy_tables_repeat_their_own_costs() -> None:
    rng = np.random.default_rng(14)
    for _ in range(10):
        costs, rates = random_pool(rng, 4)
        policy = optimal_policy(costs, rates, 6)
        assert [len(row) for row in policy.drafts] == [6, 6, 6]
        for model, row in enumerate(policy.drafts):
            for owed, draft in enumerate(row, start=1):
                value = follow(policy, costs, rates, model, owed)
                assert policy.request_costs[model][owed - 1] == close(value)
                assert draft is None or draft[0] < model
                assert request_cost(costs, rates, 6, model, owed) == close(value)


def follow(policy: adaptive.AdaptivePolicy, costs: Costs, rates: np.ndarray, model: int, owed: int) -> float:
    """The expected cost of a request when the policy is followed, by its definition."""
    if owed <= 0:
        return 0.0
    price = costs[model]
    pay = price if callable(price) else lambda _: price
    draft = policy.drafts[model][owed - 1]
    if draft is None:
        return pay(1) + follow(policy, costs, rates, model, owed - 1)
    drafter, length = draft
    rate = rates[drafter][model]
    chances = [rate**m * (1 - rate) for m in range(length)] + [rate**length]
    rest = sum(p * follow(policy, costs, rates, model, owed - n) for n, p in enumerate(chances, start=1))
    return follow(policy, costs, rates, drafter, length) + pay(length + 1) + rest


def test_requests_beyond_the_longest_draft() -> None:
    costs, rates = [0.1, 1.0], [[1, 0.8], [0, 1]]
    assert request_cost(costs, rates, 4, 0, 10) == close(1.0)
    assert request_cost(costs, rates, 4, 1, 0) == 0.0
    long_run = request_cost(costs, rates, 4, 1, 4000) / 4000
    assert long_run == pytest.approx(optimal_latency(costs, rates, 4), rel=1e-3)


def test_ties_take_the_fewest_models_then_the_shortest_drafts() -> None:
    equal = optimal_hierarchy([1.0] * 3, np.ones((3, 3)), 5)
    assert equal.models == (2,)
    useless = optimal_hierarchy([0.0, 0.1, 1.0], [[1, 0.0, 0.0], [0, 1, 0.9], [0, 0, 1]], 5)
    assert useless.models == (1, 2)
    free = optimal_hierarchy([0.0, 1.0], [[1, 0.0], [0, 1]], 5)
    assert (free.models, free.draft_lengths) == ((1,), ())


@pytest.mark.parametrize("solve", [optimal_hierarchy, optimal_policy, hierarchy_graph])
def test_pools_without_drafts_are_autoregression(solve: Callable[..., Any]) -> None:
    for costs, rates, longest in (([2.0], [[1.0]], 4), ([0.1, 2.0], [[1, 0.9], [0, 1]], 0)):
        found = solve(costs, rates, longest)
        latency = shortest_path(found, "s", "t").cost if solve is hierarchy_graph else found.latency
        assert latency == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], 4), "expected the cost of at least one model"),
        (([-1, 1], np.ones((2, 2)), 4), r"expected costs\[0\] to be a finite number of at least 0; got -1"),
        (([0.1, 1], np.ones((3, 3)), 4), "expected acceptance between each pair of 2 models"),
        (([0.1, 1], [[1, 1.5], [1, 1]], 4), "expected every acceptance to be a rate between 0 and 1; got 1.5"),
        (([0.1, 1], [[1, np.nan], [1, 1]], 4), "expected every acceptance to be a rate between 0 and 1"),
        (([0.1, 1], np.ones((2, 2, 3)), 4), "expected survival curves over 4 drafted tokens"),
        (([0.1, 1], [[1, 1]], 4), "expected acceptance between"),
        (([0.1, 1], "no", 4), "expected acceptance to be a matrix"),
        (([0.1, 1], np.ones((2, 2)), -1), "expected max_draft_length to be a whole number of at least 0"),
        (([0.1, 1], np.ones((2, 2)), 1.5), "expected max_draft_length to be a whole number"),
        (([0.1, lambda _: np.inf], np.ones((2, 2)), 4), r"expected costs\[1\]\(1\) to be a finite number"),
    ],
)
@pytest.mark.parametrize("solve", [optimal_hierarchy, optimal_latency, hierarchy_graph])
def test_bad_pools(solve: Callable[..., object], arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        solve(*arguments)


def test_bad_options() -> None:
    pool = [0.1, 1.0], [[1, 0.8], [0, 1]], 4
    with pytest.raises(InvalidArgumentError, match="expected order to be one of 'given', 'any'"):
        optimal_hierarchy(*pool, order="best")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="expected max_levels to be a whole number of at least 1"):
        optimal_hierarchy(*pool, max_levels=0)
    with pytest.raises(InvalidArgumentError, match="expected count to be a whole number of at least 1"):
        best_hierarchies(*pool, count=0)
    with pytest.raises(InvalidArgumentError, match="expected model to be at most 1; got 2"):
        request_cost(*pool, 2, 1)


def test_unused_pairs_and_the_diagonal_are_ignored() -> None:
    rates = np.array([[np.nan, 0.9, 0.5], [np.nan, np.nan, 0.8], [np.nan, np.nan, np.nan]])
    clean = np.nan_to_num(rates)
    assert optimal_hierarchy([0.01, 0.1, 1.0], rates, 8) == optimal_hierarchy([0.01, 0.1, 1.0], clean, 8)
