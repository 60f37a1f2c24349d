"""The linear program of generalized flow: exact on every graph, cycles that fade included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from hsdopt.gsp.graph import Path, trace, unreachable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hsdopt.gsp.graph import Edge, Problem

__all__ = ["solve"]

_TOLERANCE = 1e-10


def solve(problem: Problem) -> Path:
    r"""Return the optimum over simple paths and lassos (a path into a cycle that fades).

    Minimise :math:`\sum_e c_e f_e` over flows :math:`f \ge 0` with

    .. math:: \sum_{e\ \text{out of}\ v} f_e - \sum_{e\ \text{into}\ v} \mu_e f_e = [v = s]

    at every node but the target. A cycle whose multipliers have a product below 1 can absorb flow, so the
    optimum may lie below every path and exist where the target is out of reach; an optimal vertex is a
    simple path or a lasso. It is solved by HiGHS, which replaces Oldham's combinatorial algorithm (2001).
    The walk is read off the optimal flow and its cost is summed again from the edges.

    Raises
    ------
    UnreachableError
        If there is neither a path to the target nor a lasso.
    """
    if problem.source == problem.target:
        return Path((problem.nodes[problem.source],), 0.0, "path")
    edges = _reachable_edges(problem)
    if not edges:
        raise unreachable(problem)
    flow, slack = _optimal_flow(problem, edges)
    choice: list[Edge | None] = [None] * len(problem.nodes)
    # Largest flow last; where rounding left none, the edge that the prices call tight.
    for index in np.lexsort((-slack, flow)):
        choice[edges[index].tail] = edges[index]
    return trace(problem, choice)


def _reachable_edges(problem: Problem) -> list[Edge]:
    """Return the edges that a walk from the source can come to."""
    seen, waiting, edges = {problem.source}, [problem.source], []
    while waiting:
        for edge in problem.out[waiting.pop()]:
            edges.append(edge)
            if edge.head not in seen:
                seen.add(edge.head)
                waiting.append(edge.head)
    return edges


def _optimal_flow(problem: Problem, edges: Sequence[Edge]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the flow on every edge, and its reduced cost."""
    tails = np.array([edge.tail for edge in edges])
    heads = np.array([edge.head for edge in edges])
    costs = np.array([edge.cost for edge in edges], dtype=np.float64)
    multipliers = np.array([edge.multiplier for edge in edges])
    number = np.arange(len(edges))
    inside = heads != problem.target
    values = np.concatenate([np.ones(len(edges)), -multipliers[inside]])
    rows = np.concatenate([tails, heads[inside]])
    columns = np.concatenate([number, number[inside]])
    supply = np.zeros(len(problem.nodes))
    supply[problem.source] = 1.0
    balance = coo_array((values, (rows, columns)), shape=(supply.size, number.size)).tocsr()
    # Tolerances are absolute: scale the costs so that the largest is 1.
    scaled: NDArray[np.float64] = costs / (costs.max() or 1.0)
    # The simplex method, since only a vertex is a single path or lasso.
    result = linprog(  # type: ignore[call-overload]  # the stubs know no sparse matrices
        scaled,
        A_eq=balance,
        b_eq=supply,
        bounds=(0, None),
        method="highs-ds",
        options={"primal_feasibility_tolerance": _TOLERANCE, "dual_feasibility_tolerance": _TOLERANCE},
    )
    if result.x is None:
        raise unreachable(problem)
    return result.x, scaled - balance.T @ result.eqlin.marginals
