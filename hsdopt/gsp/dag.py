"""One backward sweep: exact on acyclic graphs, whatever their multipliers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hsdopt.errors import GraphError
from hsdopt.gsp.graph import topological_order, trace

if TYPE_CHECKING:
    from hsdopt.gsp.graph import Edge, Path, Problem

__all__ = ["solve"]


def solve(problem: Problem) -> Path:
    """Return the cheapest path of an acyclic problem, every edge read once.

    The cost to go of a node depends only on nodes behind it in topological order, so no condition on the
    multipliers is needed.

    Raises
    ------
    GraphError
        If the graph has a cycle.
    UnreachableError
        If no path leads to the target.
    """
    order = topological_order(problem.out) if problem.acyclic else None
    if order is None:
        raise GraphError(
            "expected a graph without cycles for 'dag'; got one with a cycle; use 'auto' or 'linear-program'"
        )
    to_go = [math.inf] * len(problem.nodes)
    to_go[problem.target] = 0.0
    choice: list[Edge | None] = [None] * len(problem.nodes)
    for node in reversed(order):
        for edge in problem.out[node]:
            value = edge.cost + edge.multiplier * to_go[edge.head]
            if value < to_go[node]:
                to_go[node], choice[node] = value, edge
    return trace(problem, choice)
