"""The best hierarchy as a generalized shortest path: the graph of a pool of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from hsdopt.solvers.pool import read_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from hsdopt.checks import Cost, FloatArray
    from hsdopt.solvers.hierarchy import HierarchyArrays
    from hsdopt.solvers.pool import Order, Pool

__all__ = ["SOURCE", "TARGET", "arrays_graph", "hierarchy_graph"]

SOURCE = "s"
TARGET = "t"


def hierarchy_graph(
    costs: Sequence[Cost] | FloatArray, acceptance: ArrayLike, max_draft_length: int, *, order: Order = "given"
) -> nx.MultiDiGraph:
    """Return the graph whose cheapest path from ``"s"`` to ``"t"`` is the best hierarchy of a pool.

    Parameters
    ----------
    costs
        For each model, the target last: the cost of one pass, a number or a function of its new tokens.
    acceptance
        ``acceptance[j][i]``: rate of j's drafts by i, shape ``[models, models]``; or survival curves, shape
        ``[models, models, at least max_draft_length + 1]``. The diagonal is ignored.
    max_draft_length
        Longest draft of any level, in tokens.
    order
        ``"given"``: a model verifies only drafts of models before it, and the graph has no cycle.
        ``"any"``: every order, and the graph has cycles. A path may then use a model at two levels.

    Returns
    -------
    networkx.MultiDiGraph
        Node ``(i, T)``: model i owes T tokens. Every edge has a ``cost`` and a ``multiplier``.

    Raises
    ------
    InvalidArgumentError
        If a number is outside its domain or a shape does not fit.

    Notes
    -----
    With c a cost curve, N the tokens that a pass of the target gains and R the expected rounds of a request:

    - ``"s" -> (j, L)``: multiplier 1 / E[N], cost c(L + 1) / E[N] of the target;
    - ``(i, T) -> (j, L)``: multiplier R(T), cost R(T) c(L + 1) of model i;
    - ``(i, T) -> "t"``: cost T c(1) of model i; ``"s" -> "t"``: cost c(1) of the target.

    Source: Mohri et al., Hierarchical Speculative Decoding, arXiv 2510.19705.

    Examples
    --------
    >>> from hsdopt.gsp import shortest_path
    >>> graph = hierarchy_graph([0.1, 1.0], [[1, 0.8], [0, 1]], 8)
    >>> shortest_path(graph, "s", "t").nodes
    ('s', (0, 6), 't')
    """
    pool = read_pool(costs, acceptance, max_draft_length, order=order)
    graph = nx.MultiDiGraph()
    graph.add_edge(SOURCE, TARGET, cost=float(pool.costs[-1, 0]), multiplier=1.0)
    if pool.max_draft_length == 0:
        return graph
    _add_target(graph, pool)
    for verifier in range(pool.target):
        _add_verifier(graph, pool, verifier)
    return graph


def _add_target(graph: nx.MultiDiGraph, pool: Pool) -> None:
    """Add the drafts that the target may ask for."""
    for drafter, gains in enumerate(pool.tokens().tolist()):
        for length, gain in enumerate(gains, start=1):
            cost = float(pool.costs[-1, length]) / gain
            graph.add_edge(SOURCE, (drafter, length), cost=cost, multiplier=1.0 / gain)


def _add_verifier(graph: nx.MultiDiGraph, pool: Pool, verifier: int) -> None:
    """Add every way in which one model may serve its requests."""
    passes = pool.costs[verifier].tolist()
    for tokens in range(1, pool.max_draft_length + 1):
        graph.add_edge((verifier, tokens), TARGET, cost=tokens * passes[0], multiplier=1.0)
    tables = pool.rounds(verifier, verifier + 1)[:, 0].tolist()
    for drafter, table in enumerate(tables):
        if drafter == verifier:
            continue
        for length, row in enumerate(table, start=1):
            for tokens, rounds in enumerate(row, start=1):
                ends = (verifier, tokens), (drafter, length)
                graph.add_edge(*ends, cost=rounds * passes[length], multiplier=rounds)


def arrays_graph(arrays: HierarchyArrays) -> nx.MultiDiGraph:
    """Return the graph of the arrays that the fast search reads: costs of single pairs, requests served at once.

    Parameters
    ----------
    arrays : HierarchyArrays
        As for `hsdopt.solvers.hierarchy.solve_arrays`; whatever costs infinitely much has no edge.

    Returns
    -------
    networkx.MultiDiGraph
        As `hierarchy_graph` gives, from ``"s"`` to ``"t"``.
    """
    graph = nx.MultiDiGraph()
    if np.isfinite(arrays.autoregression):
        graph.add_edge(SOURCE, TARGET, cost=arrays.autoregression, multiplier=1.0)
    drafters, longest = arrays.draft.shape
    for drafter, place in np.argwhere(np.isfinite(arrays.verify[:, -1])).tolist():
        gain = float(arrays.tokens[drafter, place])
        cost = float(arrays.verify[drafter, -1, place]) / gain
        graph.add_edge(SOURCE, (drafter, place + 1), cost=cost, multiplier=1.0 / gain)
    for model, place in np.argwhere(np.isfinite(arrays.draft)).tolist():
        graph.add_edge((model, place + 1), TARGET, cost=float(arrays.draft[model, place]), multiplier=1.0)
    for verifier in range(drafters):
        rounds = arrays.rounds(verifier)
        usable = np.isfinite(arrays.verify[: len(rounds), verifier])
        for drafter, place in np.argwhere(usable).tolist():
            once = float(arrays.verify[drafter, verifier, place])
            for tokens in range(1, longest + 1):
                passes = float(rounds[drafter, place, tokens - 1])
                graph.add_edge((verifier, tokens), (drafter, place + 1), cost=once * passes, multiplier=passes)
    return graph
