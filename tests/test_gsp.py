from __future__ import annotations

import json
import math
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
import pytest

from hsdopt.errors import GraphError, InvalidArgumentError, UnreachableError
from hsdopt.gsp import Path, shortest_path

if TYPE_CHECKING:
    from collections.abc import Iterator

Marks = dict[Any, tuple[float, float]]
CASES = [
    case
    for case in json.loads((File(__file__).parent / "data" / "cases.json").read_text())["cases"]
    if case["kind"] == "gsp"
]


def build(edges: list[Any], kind: type[Any] = nx.MultiDiGraph) -> nx.MultiDiGraph:
    graph = kind()
    for tail, head, cost, multiplier in edges:
        graph.add_edge(tail, head, cost=cost, multiplier=multiplier)
    return graph


def walks(graph: nx.MultiDiGraph, source: object, target: object) -> Iterator[tuple[str, float]]:
    """Every simple path and every lasso with a fading cycle, with its cost, by depth-first enumeration."""

    def extend(nodes: list[Any], cost: float, factor: float, marks: Marks) -> Iterator[tuple[str, float]]:
        if nodes[-1] == target:
            yield "path", cost
            return
        for _, head, data in graph.out_edges(nodes[-1], data=True):
            total, product = cost + factor * data["cost"], factor * data["multiplier"]
            if head in marks:
                before, at = marks[head]
                gain = product / at
                if gain < 1:
                    yield "lasso", before + (total - before) / (1 - gain)
            else:
                yield from extend([*nodes, head], total, product, marks | {head: (total, product)})

    yield from extend([source], 0.0, 1.0, {source: (0.0, 1.0)})


def best(graph: nx.MultiDiGraph, source: object, target: object, kinds: tuple[str, ...] = ("path", "lasso")) -> float:
    return min((cost for kind, cost in walks(graph, source, target) if kind in kinds), default=math.inf)


def resum(graph: nx.MultiDiGraph, path: Path) -> tuple[str, float]:
    """The cost of a reported walk from its own nodes and keys."""
    cost, factor, marks = 0.0, 1.0, {path.nodes[0]: (0.0, 1.0)}
    for tail, head, key in zip(path.nodes, path.nodes[1:], path.keys, strict=False):
        data = graph[tail][head] if key is None else graph[tail][head][key]
        cost, factor = cost + factor * data["cost"], factor * data["multiplier"]
        if head in marks:
            before, at = marks[head]
            return "lasso", before + (cost - before) / (1 - factor / at)
        marks[head] = (cost, factor)
    return "path", cost


def random_graph(rng: np.random.Generator, low: float = 0.3) -> tuple[nx.MultiDiGraph, int, int]:
    nodes = int(rng.integers(3, 7))
    graph = nx.MultiDiGraph()
    graph.add_nodes_from(range(nodes))
    for _ in range(int(rng.integers(nodes, 3 * nodes))):
        tail, head = (int(node) for node in rng.integers(0, nodes, 2))
        cost = 0.0 if rng.random() < 0.1 else float(rng.uniform(0, 2))
        multiplier = float(rng.choice([rng.uniform(low, 2), 1.0, max(low, 0.5), 2.0]))
        graph.add_edge(tail, head, cost=cost, multiplier=multiplier)
    return graph, 0, nodes - 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
@pytest.mark.parametrize("method", ["auto", "linear-program"])
def test_reference_cases(case: dict[str, Any], method: str) -> None:
    inputs, expected = case["inputs"], case["expected"]
    graph = build(inputs["edges"])
    found = shortest_path(graph, inputs["s"], inputs["t"], method=method)
    assert found.cost == pytest.approx(expected["lp"], rel=1e-9)
    path = expected["simple_path"]
    assert (found.kind == "path") == (path is not None and path == pytest.approx(expected["lp"], rel=1e-9))
    assert (found.kind, pytest.approx(found.cost, rel=1e-12)) == resum(graph, found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_reference_simple_paths_where_a_method_for_paths_qualifies(case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    graph = build(inputs["edges"])
    for method in ("dag", "dijkstra"):
        try:
            found = shortest_path(graph, inputs["s"], inputs["t"], method=method)
        except GraphError:
            continue
        assert found.kind == "path"
        assert found.cost == pytest.approx(expected["simple_path"], rel=1e-9)


def test_linear_program_is_the_best_of_all_paths_and_lassos() -> None:
    rng = np.random.default_rng(1)
    kinds = []
    for _ in range(500):
        graph, source, target = random_graph(rng)
        optimum = best(graph, source, target)
        for method in ("linear-program", "auto"):
            try:
                found = shortest_path(graph, source, target, method=method)
            except UnreachableError:
                assert optimum == math.inf
                kinds.append("none")
                continue
            assert found.cost == pytest.approx(optimum, rel=1e-9, abs=1e-12)
            kind, cost = resum(graph, found)
            assert found.kind == kind
            assert found.cost == pytest.approx(cost, rel=1e-12, abs=1e-15)
            kinds.append(kind)
    assert all(kinds.count(kind) > 50 for kind in ("path", "lasso", "none"))


def test_dijkstra_is_the_best_path_on_graphs_with_cycles() -> None:
    rng = np.random.default_rng(2)
    found_any = 0
    for _ in range(400):
        graph, source, target = random_graph(rng, low=1.0)
        for _, _, data in graph.out_edges(source, data=True):
            data["multiplier"] *= float(rng.uniform(0.2, 1))
        optimum = best(graph, source, target, kinds=("path",))
        try:
            found = shortest_path(graph, source, target, method="dijkstra")
        except UnreachableError:
            assert optimum == math.inf
            continue
        found_any += 1
        assert found.kind == "path"
        assert found.cost == pytest.approx(optimum, rel=1e-12, abs=1e-15)
        assert resum(graph, found)[1] == pytest.approx(found.cost, rel=1e-12, abs=1e-15)
    assert found_any > 200


def test_dag_sweep_is_the_best_path_for_any_multipliers() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        graph = nx.MultiDiGraph()
        graph.add_nodes_from(range(6))
        for _ in range(14):
            tail, head = sorted(rng.choice(6, 2, replace=False).tolist())
            graph.add_edge(tail, head, cost=float(rng.uniform(0, 2)), multiplier=float(rng.uniform(0.2, 3)))
        optimum = best(graph, 0, 5)
        if optimum == math.inf:
            with pytest.raises(UnreachableError):
                shortest_path(graph, 0, 5)
            continue
        costs = [shortest_path(graph, 0, 5, method=m).cost for m in ("auto", "dag", "linear-program")]
        assert costs == pytest.approx([optimum] * 3, rel=1e-10)


def test_example_where_a_lasso_beats_every_path() -> None:
    graph = build([("s", "a", 1, 1), ("a", "b", 0.1, 0.5), ("b", "a", 0.1, 0.5), ("a", "t", 10, 1)])
    found = shortest_path(graph, "s", "t")
    assert found.kind == "lasso"
    assert found.nodes == ("s", "a", "b", "a")
    assert found.cost == pytest.approx(1.2, rel=1e-12)


def test_fading_self_loop_is_a_lasso() -> None:
    found = shortest_path(build([("s", "a", 1, 1), ("a", "a", 1, 0.5)], nx.DiGraph), "s", "s")
    assert found == Path(("s",), 0.0, "path")
    graph = build([("s", "a", 1, 1), ("a", "a", 1, 0.5)], nx.DiGraph)
    graph.add_node("t")
    found = shortest_path(graph, "s", "t")
    assert (found.nodes, found.kind, found.cost) == (("s", "a", "a"), "lasso", 3.0)


@pytest.mark.parametrize("gain", [1.0, 2.0])
@pytest.mark.parametrize("cost", [0.0, 1.0])
def test_cycle_that_does_not_fade_never_pays(gain: float, cost: float) -> None:
    graph = build([("s", "a", 1, 1), ("a", "b", cost, gain), ("b", "a", cost, 1), ("a", "t", 5, 1)])
    for method in ("auto", "dijkstra", "linear-program"):
        found = shortest_path(graph, "s", "t", method=method)
        assert (found.kind, found.nodes, found.cost) == ("path", ("s", "a", "t"), 6.0)
    graph.remove_edge("a", "t")
    for method in ("auto", "dijkstra", "linear-program"):
        with pytest.raises(UnreachableError, match="expected a path from 's' to 't'"):
            shortest_path(graph, "s", "t", method=method)


def test_free_fading_cycle_costs_only_the_way_there() -> None:
    graph = build([("s", "a", 1, 3), ("a", "b", 0, 0.5), ("b", "a", 0, 1), ("a", "t", 5, 1)])
    found = shortest_path(graph, "s", "t")
    assert (found.kind, found.cost) == ("lasso", 1.0)


@pytest.mark.parametrize("method", ["auto", "dijkstra", "linear-program"])
def test_source_that_is_the_target(method: str) -> None:
    graph = build([("s", "a", 1, 1), ("a", "s", 1, 1)])
    assert shortest_path(graph, "s", "s", method=method) == Path(("s",), 0.0, "path")


def test_parallel_edges_report_their_key() -> None:
    graph = nx.MultiDiGraph()
    graph.add_edge("s", "t", key="dear", cost=3, multiplier=1)
    graph.add_edge("s", "t", key="cheap", cost=2, multiplier=5)
    for method in ("dag", "dijkstra", "linear-program"):
        assert shortest_path(graph, "s", "t", method=method) == Path(("s", "t"), 2.0, "path", ("cheap",))


def test_edges_out_of_the_target_play_no_part() -> None:
    graph = build([("s", "t", 3, 1), ("t", "a", 0, 0.1), ("a", "t", 0, 0.1)])
    assert shortest_path(graph, "s", "t").cost == 3.0
    assert shortest_path(graph, "s", "t", method="linear-program").nodes == ("s", "t")


def test_auto_sees_a_fading_cycle_through_the_source() -> None:
    graph = build([("s", "a", 1, 0.5), ("a", "s", 1, 1), ("a", "t", 100, 1)])
    assert shortest_path(graph, "s", "t", method="dijkstra").cost == 51.0
    found = shortest_path(graph, "s", "t")
    assert (found.kind, found.cost) == ("lasso", pytest.approx(3.0))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"cost": -1, "multiplier": 1}, "expected a cost of at least 0 on edge 's' -> 't'; got -1"),
        ({"cost": 1, "multiplier": 0}, "expected a multiplier above 0 .*got 0"),
        ({"cost": 1, "multiplier": -2}, "expected a multiplier above 0 .*got -2"),
        ({"multiplier": 1}, "expected the attribute 'cost'"),
        ({"cost": 1}, "expected the attribute 'multiplier'"),
        ({"cost": math.nan, "multiplier": 1}, "expected a finite cost .*got nan"),
        ({"cost": 1, "multiplier": math.inf}, "expected a finite multiplier .*got inf"),
        ({"cost": "1", "multiplier": 1}, "expected a number as cost"),
        ({"cost": 1, "multiplier": None}, "expected a number as multiplier"),
    ],
)
@pytest.mark.parametrize("kind", [nx.DiGraph, nx.MultiDiGraph])
def test_malformed_edges(kind: type[nx.DiGraph], attributes: dict[str, Any], message: str) -> None:
    graph = kind()
    graph.add_edge("s", "t", **attributes)
    with pytest.raises(GraphError, match=message):
        shortest_path(graph, "s", "t")


def test_malformed_calls() -> None:
    cyclic = build([("s", "a", 1, 1), ("a", "b", 1, 0.5), ("b", "a", 1, 1), ("a", "t", 1, 1)])
    with pytest.raises(GraphError, match="expected a graph without cycles"):
        shortest_path(cyclic, "s", "t", method="dag")
    with pytest.raises(GraphError, match="expected multipliers of at least 1 off the source"):
        shortest_path(cyclic, "s", "t", method="dijkstra")
    with pytest.raises(GraphError, match="expected a source that is in the graph; got 'x'"):
        shortest_path(cyclic, "x", "t")
    with pytest.raises(GraphError, match="expected a target that is in the graph; got 'x'"):
        shortest_path(build([("s", "a", 1, 1)]), "s", "x")
    with pytest.raises(GraphError, match="expected a networkx DiGraph"):
        shortest_path(nx.Graph([("s", "t")]), "s", "t")
    with pytest.raises(InvalidArgumentError, match="expected a method among auto, dag"):
        shortest_path(cyclic, "s", "t", method="simplex")


@pytest.mark.parametrize("method", ["auto", "dag", "dijkstra", "linear-program"])
def test_unreachable_target(method: str) -> None:
    graph = build([("s", "a", 1, 1), ("t", "a", 1, 1)])
    with pytest.raises(UnreachableError, match="expected a path from 's' to 't'; found none"):
        shortest_path(graph, "s", "t", method=method)
