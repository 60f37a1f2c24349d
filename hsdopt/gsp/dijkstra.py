"""Backward Dijkstra: exact where going one edge further back never makes a cost to go smaller."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from hsdopt.errors import GraphError
from hsdopt.gsp.graph import trace

if TYPE_CHECKING:
    from hsdopt.gsp.graph import Edge, Path, Problem

__all__ = ["may_absorb", "qualifies", "solve"]


def qualifies(problem: Problem) -> bool:
    """Return whether every multiplier off the source is at least 1."""
    return all(edge.multiplier >= 1 for edge in problem.edges() if edge.tail != problem.source)


def may_absorb(problem: Problem) -> bool:
    """Return whether a qualifying graph could still hold a fading cycle, which then runs through the source."""
    shrinks = any(edge.multiplier < 1 for edge in problem.out[problem.source])
    return shrinks and any(edge.head == problem.source for edge in problem.edges())


def solve(problem: Problem) -> Path:
    """Return the cheapest path from the source to the target, cycles allowed in the graph.

    Nodes are settled from the target backwards, cheapest first. With multipliers of at least 1 and costs
    of at least 0 a predecessor is never cheaper than the node it leads to, as Dijkstra's argument needs.
    Edges out of the source may shrink: the source is settled last, so nothing is ever relaxed through it.

    Raises
    ------
    GraphError
        If a multiplier off the source is below 1.
    UnreachableError
        If no path leads to the target.
    """
    if not qualifies(problem):
        raise GraphError(
            "expected multipliers of at least 1 off the source for 'dijkstra'; got one below; use 'linear-program'"
        )
    to_go, choice = _settle(problem)
    best = math.inf
    for edge in problem.out[problem.source]:
        value = edge.cost + edge.multiplier * to_go[edge.head]
        if edge.head != problem.source and value < best:
            best, choice[problem.source] = value, edge
    return trace(problem, choice)


def _settle(problem: Problem) -> tuple[list[float], list[Edge | None]]:
    """Return the cost to go and the chosen edge of every node but the source."""
    entering: list[list[Edge]] = [[] for _ in problem.nodes]
    for edge in problem.edges():
        if edge.tail != problem.source:
            entering[edge.head].append(edge)
    to_go = [math.inf] * len(problem.nodes)
    choice: list[Edge | None] = [None] * len(problem.nodes)
    to_go[problem.target] = 0.0
    queue = [(0.0, problem.target)]
    while queue:
        settled, node = heapq.heappop(queue)
        if settled > to_go[node]:
            continue
        for edge in entering[node]:
            value = edge.cost + edge.multiplier * settled
            if value < to_go[edge.tail]:
                to_go[edge.tail], choice[edge.tail] = value, edge
                heapq.heappush(queue, (value, edge.tail))
    return to_go, choice
