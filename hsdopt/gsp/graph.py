"""The generalized shortest path problem: reading it from a networkx graph, and the value of a walk.

Every edge has a cost and a multiplier; a path costs the sum over its edges of the edge's cost times the
product of the multipliers before it. The algorithms of this package see only the `Problem` read here.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from hsdopt.errors import GraphError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    import networkx as nx

__all__ = ["Edge", "Path", "Problem", "read_problem", "topological_order", "trace", "unknown_node", "unreachable"]


@dataclass(frozen=True, slots=True)
class Edge:
    """One edge between numbered nodes; `key` tells parallel edges apart and is None in a DiGraph."""

    tail: int
    head: int
    cost: float
    multiplier: float
    key: Hashable


@dataclass(frozen=True, slots=True)
class Problem:
    """A checked problem: named nodes, and the edges out of each, by node number.

    Edges out of the target are left out, since every walk ends there.
    """

    nodes: tuple[Hashable, ...]
    out: tuple[tuple[Edge, ...], ...]
    source: int
    target: int
    acyclic: bool = field(default=False)

    def edges(self) -> Iterator[Edge]:
        """Every edge, tail by tail."""
        return (edge for edges in self.out for edge in edges)


@dataclass(frozen=True, slots=True)
class Path:
    """An optimal walk and its cost.

    Attributes
    ----------
    nodes
        The nodes in order. A path ends at the target; a lasso ends at the node where its cycle closes,
        which therefore stands in the list twice.
    cost
        Sum over the edges of cost times the multipliers before it; for a lasso the limit of going round
        for ever.
    kind
        ``"path"``, or ``"lasso"``: a walk into a cycle whose multipliers have a product below 1.
    keys
        Which of the parallel edges was taken at every step; None in a graph without parallel edges.
    """

    nodes: tuple[Hashable, ...]
    cost: float
    kind: Literal["path", "lasso"]
    keys: tuple[Hashable, ...] = ()


def read_problem(graph: nx.DiGraph, source: Hashable, target: Hashable) -> Problem:
    """Return the checked problem of a directed networkx graph.

    Raises
    ------
    GraphError
        If the graph is not directed, the source is unknown, or an edge has no usable cost and multiplier.
    """
    if not getattr(graph, "is_directed", lambda: False)():
        raise GraphError(
            f"expected a networkx DiGraph or MultiDiGraph; got {type(graph).__name__}; build a directed graph"
        )
    if source not in graph:
        raise unknown_node("source", source)
    # A list of edges leaves out isolated nodes, and a lasso needs no target.
    nodes = tuple(graph.nodes) if target in graph else (*graph.nodes, target)
    number = {node: index for index, node in enumerate(nodes)}
    out: list[list[Edge]] = [[] for _ in nodes]
    acyclic = _read_edges(graph, number, out)
    out[number[target]].clear()
    return Problem(nodes, tuple(map(tuple, out)), number[source], number[target], acyclic)


def _read_edges(graph: nx.DiGraph, number: Mapping[Hashable, int], out: list[list[Edge]]) -> bool:
    """Fill in the edges out of every node; return whether they form no cycle."""
    if graph.is_multigraph():
        triples = ((tail, head, key, data) for tail, head, key, data in graph.edges(keys=True, data=True))
    else:
        triples = ((tail, head, None, data) for tail, head, data in graph.edges(data=True))
    for tail, head, key, data in triples:
        where = f"edge {tail!r} -> {head!r}"
        cost = _attribute(data, "cost", where)
        multiplier = _attribute(data, "multiplier", where)
        if cost < 0:
            raise GraphError(f"expected a cost of at least 0 on {where}; got {cost}; make it 0 or more")
        if multiplier <= 0:
            raise GraphError(f"expected a multiplier above 0 on {where}; got {multiplier}; make it positive")
        out[number[tail]].append(Edge(number[tail], number[head], cost, multiplier, key))
    return topological_order(out) is not None


def _attribute(data: Mapping[str, Any], name: str, where: str) -> float:
    """Return one finite number of an edge."""
    if name not in data:
        raise GraphError(f"expected the attribute {name!r} on {where}; got {sorted(map(str, data))}; set it")
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, Real):
        raise GraphError(f"expected a number as {name} of {where}; got {value!r}; set a finite number")
    if not math.isfinite(value):
        raise GraphError(f"expected a finite {name} on {where}; got {float(value)}; set a finite number")
    return float(value)


def topological_order(out: Sequence[Sequence[Edge]]) -> list[int] | None:
    """Return the nodes with every edge leading forward, or None if there is a cycle."""
    entering = [0] * len(out)
    for edges in out:
        for edge in edges:
            entering[edge.head] += 1
    ready = deque(node for node, count in enumerate(entering) if count == 0)
    order: list[int] = []
    while ready:
        order.append(ready.popleft())
        for edge in out[order[-1]]:
            entering[edge.head] -= 1
            if entering[edge.head] == 0:
                ready.append(edge.head)
    return order if len(order) == len(out) else None


def trace(problem: Problem, choice: Sequence[Edge | None]) -> Path:
    """Return the walk from the source that takes every node's chosen edge, and its cost.

    Raises
    ------
    UnreachableError
        If the walk comes to a node without a chosen edge, or into a cycle that never fades.
    """
    at, factors, total = problem.source, [1.0], 0.0
    steps: list[Edge] = []
    position: dict[int, int] = {}
    while at != problem.target and at not in position:
        edge = choice[at]
        if edge is None:
            raise unreachable(problem)
        position[at] = len(steps)
        total += factors[-1] * edge.cost
        factors.append(factors[-1] * edge.multiplier)
        steps.append(edge)
        at = edge.head
    nodes = tuple(problem.nodes[number] for number in (problem.source, *(edge.head for edge in steps)))
    keys = tuple(edge.key for edge in steps)
    if at == problem.target:
        return Path(nodes, total, "path", keys)
    return Path(nodes, _lasso_cost(problem, steps, position[at]), "lasso", keys)


def _lasso_cost(problem: Problem, steps: Sequence[Edge], start: int) -> float:
    """Return the cost of walking `steps` and then repeating those from `start` on for ever."""
    stem, once, factor, gain = 0.0, 0.0, 1.0, 1.0
    for edge in steps[:start]:
        stem += factor * edge.cost
        factor *= edge.multiplier
    for edge in steps[start:]:
        once += gain * edge.cost
        gain *= edge.multiplier
    if gain >= 1:
        raise unreachable(problem)
    return stem + factor * once / (1 - gain)


def unknown_node(name: str, node: Hashable) -> GraphError:
    """Return the error for a source or target that is not in the graph."""
    return GraphError(f"expected a {name} that is in the graph; got {node!r}; add it or name another")


def unreachable(problem: Problem) -> UnreachableError:
    """Return the error for a target that no path reaches."""
    source, target = problem.nodes[problem.source], problem.nodes[problem.target]
    return UnreachableError(
        f"expected a path from {source!r} to {target!r}; found none; add edges that lead to {target!r}"
    )
