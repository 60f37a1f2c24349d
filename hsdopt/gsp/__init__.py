"""Generalized shortest paths: edges with a cost and a multiplier, on networkx graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hsdopt.errors import InvalidArgumentError, UnreachableError
from hsdopt.gsp import dag, dijkstra, linear_program
from hsdopt.gsp.graph import Path, read_problem, unknown_node

if TYPE_CHECKING:
    from collections.abc import Hashable

    import networkx as nx

    from hsdopt.gsp.graph import Problem

__all__ = ["Path", "shortest_path"]

_METHODS = {"dag": dag.solve, "dijkstra": dijkstra.solve, "linear-program": linear_program.solve}


def shortest_path(
    graph: nx.DiGraph,
    source: Hashable,
    target: Hashable,
    *,
    method: Literal["auto", "dag", "dijkstra", "linear-program"] = "auto",
) -> Path:
    """Return the cheapest walk from `source` to `target`.

    A path costs the sum over its edges of the edge's ``cost`` times the product of the ``multiplier`` of
    the edges before it.

    Parameters
    ----------
    graph
        A DiGraph or MultiDiGraph; every edge has a ``cost`` of at least 0 and a ``multiplier`` above 0.
    source, target
        Nodes of the graph. If they are the same node the path is that node alone, at cost 0.
    method
        ``"dag"``: a backward sweep, for graphs without cycles.
        ``"dijkstra"``: for graphs whose multipliers are at least 1 on every edge not leaving the source;
        finds the best path that does not come back to the source.
        ``"linear-program"``: for every graph; may find a lasso, and does so where that is cheaper than
        every path or no path exists.
        ``"auto"``: the first of these that is exact for the graph.

    Returns
    -------
    Path
        Nodes, cost, and whether it is a path or a lasso.

    Raises
    ------
    GraphError
        If the graph is malformed, lacks a node, or does not qualify for the method.
    UnreachableError
        If no path leads to the target (and, for the linear program, no lasso exists).

    Notes
    -----
    A graph that qualifies for Dijkstra can hold a fading cycle only through the source; ``"auto"`` takes
    the linear program there too. The problem is that of Oldham, Combinatorial approximation algorithms
    for generalized flow problems (2001).

    Examples
    --------
    >>> import networkx as nx
    >>> graph = nx.DiGraph()
    >>> graph.add_edge("s", "a", cost=1.0, multiplier=2.0)
    >>> graph.add_edge("a", "t", cost=1.0, multiplier=1.0)
    >>> graph.add_edge("s", "t", cost=4.0, multiplier=1.0)
    >>> shortest_path(graph, "s", "t").cost
    3.0
    """
    if method not in ("auto", *_METHODS):
        names = ", ".join(("auto", *_METHODS))
        raise InvalidArgumentError(f"expected a method among {names}; got {method!r}; choose one of them")
    problem = read_problem(graph, source, target)
    solve = _METHODS[_exact_method(problem) if method == "auto" else method]
    try:
        return solve(problem)
    except UnreachableError:
        if target not in graph:
            raise unknown_node("target", target) from None
        raise


def _exact_method(problem: Problem) -> str:
    """Return the cheapest method that is exact for the problem."""
    if problem.acyclic:
        return "dag"
    if dijkstra.qualifies(problem) and not dijkstra.may_absorb(problem):
        return "dijkstra"
    return "linear-program"
