"""The best hierarchy: which models stand in the stack, and how many tokens each drafts.

The cost of a request of T tokens at a model depends on what stands below it only through the best way to
serve the draft lengths it may ask for, so the optimum is a shortest path (see `hsdopt.gsp.reduction`). Here it
is found on arrays: with models in the given order by one sweep that reads each edge once, and in any order by
Dijkstra's method with all predecessors of a state relaxed at once.

Source: Mohri et al., Hierarchical Speculative Decoding, arXiv 2510.19705.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from hsdopt.checks import check_length
from hsdopt.solvers.pool import read_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from hsdopt.checks import Cost, FloatArray
    from hsdopt.solvers.pool import Order, Pool

__all__ = [
    "Hierarchy",
    "HierarchyArrays",
    "best_hierarchies",
    "hierarchy_arrays",
    "optimal_hierarchy",
    "search_arrays",
    "solve_arrays",
]

_TIE = 1e-13  # relative: sums in another order differ by less
_CACHED = 1 << 16  # numbers: what is worked on at once stays in the cache
_SMALL_TABLE = 1 << 20  # numbers: below this one table for all pairs is faster than one for each verifier


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A stack of models and its latency.

    Attributes
    ----------
    models
        Numbers of the models, from the bottom of the stack to the target.
    draft_lengths
        Tokens that each model but the target passes up per request.
    latency
        Expected cost per token, in the unit of the costs.
    """

    models: tuple[int, ...]
    draft_lengths: tuple[int, ...]
    latency: float


@dataclass(frozen=True, slots=True)
class HierarchyArrays:
    """What the search needs to know of a pool, drafters numbered 0, 1, ..., the target after them.

    Draft lengths L and tokens T run from 1 to the longest draft; entry 0 of an axis stands for 1. A pair that
    must not be used has an infinite verify cost.

    Attributes
    ----------
    rounds
        Verify passes per request, ``rounds(verifier)`` of shape ``[drafter, L, T]``. In the given order its
        drafters are those before the verifier; in any order all of them, the verifier's own entry ignored.
    verify
        Cost of one verify pass, ``[drafter, verifier, L]``, with whatever a round costs for this pair alone.
    draft
        Cost of a request that a model serves without a drafter, ``[drafter, T]``.
    tokens
        Tokens that a pass of the target gains, ``[drafter, L]``.
    autoregression
        Cost of one token of the target alone.
    order
        Whether drafters stand below a verifier only in the given order, or in any.
    """

    rounds: Callable[[int], FloatArray]
    verify: FloatArray
    draft: FloatArray
    tokens: FloatArray
    autoregression: float
    order: Order


def optimal_hierarchy(
    costs: Sequence[Cost] | FloatArray,
    acceptance: ArrayLike,
    max_draft_length: int,
    *,
    order: Order = "given",
    max_levels: int | None = None,
) -> Hierarchy:
    """Return the hierarchy with the lowest expected cost per token.

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
        ``"given"``: a model verifies only drafts of models before it. ``"any"``: every order of drafters.
    max_levels
        Most models in the stack, the target counted; None for no limit.

    Returns
    -------
    Hierarchy
        Of stacks that tie, the one of fewest models, then of shortest drafts.

    Raises
    ------
    InvalidArgumentError
        If a number is outside its domain or a shape does not fit.

    Notes
    -----
    Convention "truncate". In the given order the work is models^2 times max_draft_length^2.

    Examples
    --------
    >>> best = optimal_hierarchy([0.01, 0.1, 1.0], [[1, 0.9, 0.5], [0, 1, 0.8], [0, 0, 1]], 8)
    >>> best.models, best.draft_lengths, round(best.latency, 6)
    ((0, 1, 2), (7, 8), 0.297765)
    """
    pool = read_pool(costs, acceptance, max_draft_length, order=order)
    return solve_arrays(hierarchy_arrays(pool), max_levels=max_levels)


def best_hierarchies(  # the options are keyword-only
    costs: Sequence[Cost] | FloatArray,
    acceptance: ArrayLike,
    max_draft_length: int,
    *,
    order: Order = "given",
    max_levels: int | None = None,
    count: int = 20,
) -> tuple[Hierarchy, ...]:
    """Return the `count` best hierarchies, best first: exactly those, of all models and all draft lengths.

    Two hierarchies differ if a model or any draft length differs, so the list holds many neighbours of the
    best. Autoregression takes part. Fewer are returned where fewer exist.

    Parameters
    ----------
    costs, acceptance, max_draft_length, order, max_levels
        As for `optimal_hierarchy`.
    count
        How many to return.

    Raises
    ------
    InvalidArgumentError
        If a number is outside its domain or a shape does not fit.

    Examples
    --------
    >>> found = best_hierarchies([0.1, 1.0], [[1, 0.8], [0, 1]], 8, count=3)
    >>> [plan.draft_lengths for plan in found]
    [(6,), (5,), (7,)]
    """
    pool = read_pool(costs, acceptance, max_draft_length, order=order)
    return search_arrays(hierarchy_arrays(pool), count=count, max_levels=max_levels)


def hierarchy_arrays(pool: Pool) -> HierarchyArrays:
    """Return the arrays of a pool without catch-up."""
    drafters, longest = pool.target, pool.max_draft_length
    return HierarchyArrays(
        rounds=_rounds_source(pool),
        verify=np.broadcast_to(pool.costs[:, 1:], (drafters, drafters + 1, longest)),
        draft=pool.costs[:-1, :1] * np.arange(1, longest + 1),
        tokens=pool.tokens(),
        autoregression=float(pool.costs[-1, 0]),
        order=pool.order,
    )


def _rounds_source(pool: Pool) -> Callable[[int], FloatArray]:
    """Return the table of one verifier on demand: from one small table, or made anew each time."""
    if pool.max_draft_length and pool.target**2 * pool.max_draft_length**2 <= _SMALL_TABLE:
        table = pool.rounds(0, pool.target)
        return lambda verifier: table[: pool.drafters(verifier), verifier]
    return lambda verifier: pool.rounds(verifier, verifier + 1)[:, 0]


def solve_arrays(arrays: HierarchyArrays, *, max_levels: int | None = None) -> Hierarchy:
    """Return the best hierarchy of given arrays; see `optimal_hierarchy`.

    Raises
    ------
    InvalidArgumentError
        If `max_levels` is not a whole number of at least 1.
    """
    tables = _tables(arrays, max_levels)
    best = _read_off(arrays, tables)
    if len(set(best.models)) == len(best.models):
        return best
    # A model that drafts for itself through another: look for the best stack without.
    return next(_search(arrays, tables, 1))


def search_arrays(arrays: HierarchyArrays, *, count: int = 20, max_levels: int | None = None) -> tuple[Hierarchy, ...]:
    """Return the best hierarchies of given arrays, best first; see `best_hierarchies`.

    Raises
    ------
    InvalidArgumentError
        If `count` or `max_levels` is not a whole number of at least 1.
    """
    wanted = check_length(count, "count", minimum=1)
    return tuple(_search(arrays, _tables(arrays, max_levels), wanted))


@dataclass(frozen=True, slots=True)
class _Table:
    """The best way to serve every request (model, T) within some number of levels.

    `draft` is the flat index of (drafter, L) or -1 for none; `rank` is lower for fewer models, then for
    shorter drafts.
    """

    cost: FloatArray
    rank: NDArray[np.int64]
    draft: NDArray[np.int64]

    @classmethod
    def without_drafts(cls, arrays: HierarchyArrays) -> _Table:
        """Return the table in which every model serves alone."""
        drafters, longest = arrays.draft.shape
        rank = _step(arrays) + np.broadcast_to(np.arange(1, longest + 1), arrays.draft.shape)
        return cls(arrays.draft.copy(), rank.copy(), np.full((drafters, longest), -1))


def _step(arrays: HierarchyArrays) -> int:
    """Return what one more model adds to a rank: more than any sum of draft lengths."""
    return arrays.draft.size + 1


@dataclass(frozen=True, slots=True)
class _Tables:
    """One table if stacks may be of any depth, else one for each number of models below the target."""

    layers: tuple[_Table, ...]
    limited: bool

    def at(self, placed: int) -> _Table | None:
        """Return the table for the next drafter of a stack that has `placed` of them, None if it is full."""
        if not self.limited:
            return self.layers[0]
        return self.layers[-1 - placed] if placed < len(self.layers) else None


def _tables(arrays: HierarchyArrays, max_levels: int | None) -> _Tables:
    """Return the tables that say what the best stack below any request costs."""
    levels = None if max_levels is None else check_length(max_levels, "max_levels", minimum=1)
    if arrays.draft.size == 0:
        return _Tables((), limited=True)
    if levels is None:
        return _Tables((_sweep(arrays) if arrays.order == "given" else _dijkstra(arrays),), limited=False)
    layers: list[_Table] = []
    for _ in range(min(levels - 1, len(arrays.draft))):
        layers.append(_layer(arrays, layers[-1]) if layers else _Table.without_drafts(arrays))
    return _Tables(tuple(layers), limited=True)


def _sweep(arrays: HierarchyArrays) -> _Table:
    """Return the table of a pool in the given order: every model after all that may draft for it."""
    table = _Table.without_drafts(arrays)
    for verifier in range(1, len(arrays.draft)):
        _serve(arrays, verifier, table, table)
    return table


def _layer(arrays: HierarchyArrays, below: _Table) -> _Table:
    """Return the table with one more level than `below`."""
    table = _Table.without_drafts(arrays)
    for verifier in range(len(arrays.draft)):
        _serve(arrays, verifier, below, table)
    return table


def _serve(arrays: HierarchyArrays, verifier: int, below: _Table, table: _Table) -> None:
    """Fill in one verifier's row of `table`, its drafts served as `below` says."""
    rounds = arrays.rounds(verifier)
    drafters, longest = len(rounds), arrays.draft.shape[1]
    if drafters == 0:
        return
    once = arrays.verify[:drafters, verifier] + below.cost[:drafters]
    if arrays.order == "any":
        once[verifier] = math.inf
    chunk = max(1, _CACHED // longest**2)
    for start in range(0, drafters, chunk):
        part = slice(start, min(start + chunk, drafters))
        options = (rounds[part] * once[part, :, np.newaxis]).reshape(-1, longest)
        chosen, best = _choose(options, below.rank[part].reshape(-1))
        chosen += start * longest
        ranks = below.rank.reshape(-1)[chosen] + _step(arrays) + np.arange(1, longest + 1)
        wins = _wins(best, ranks, table.cost[verifier], table.rank[verifier])
        table.cost[verifier, wins] = best[wins]
        table.rank[verifier, wins] = ranks[wins]
        table.draft[verifier, wins] = chosen[wins]


def _wins(
    cost: FloatArray, rank: NDArray[np.int64], best: FloatArray, best_rank: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return where an option beats the best so far, ties by rank."""
    lower, tied = cost < best * (1 - _TIE), cost <= best * (1 + _TIE)
    return np.asarray(lower | (tied & (rank < best_rank)))


def _choose(options: FloatArray, rank: NDArray[np.int64]) -> tuple[NDArray[np.int64], FloatArray]:
    """Return for each column the row of the least option, ties by rank, and that option."""
    least = options.min(axis=0)
    rows, columns = np.nonzero(options <= least * (1 + _TIE))
    keys = np.full(len(least), np.iinfo(np.int64).max)
    np.minimum.at(keys, columns, rank[rows] * len(rank) + rows)
    chosen: NDArray[np.int64] = keys % len(rank)
    return chosen, options[chosen, np.arange(len(least))]


def _dijkstra(arrays: HierarchyArrays) -> _Table:
    """Return the table of a pool in any order, requests settled from the cheapest up.

    A request is never cheaper than the drafts it is served from, since at least one round is needed.
    """
    table = _Table.without_drafts(arrays)
    rounds = _all_rounds(arrays)
    bars = table.cost * (1 + _TIE)  # what a new option must not exceed; -inf once settled
    waiting = table.cost.copy()
    for _ in range(table.cost.size):
        state = int(waiting.argmin())
        drafter, length = divmod(state, waiting.shape[1])
        if waiting[drafter, length] == math.inf:
            break
        waiting[drafter, length], bars[drafter, length] = math.inf, -math.inf
        once = arrays.verify[drafter, :-1, length] + table.cost[drafter, length]
        once[drafter] = math.inf
        options = rounds[:, drafter, length] * once[:, np.newaxis]
        better = _improve(table, state, options, np.flatnonzero(options <= bars))
        waiting.reshape(-1)[better] = table.cost.reshape(-1)[better]
        bars.reshape(-1)[better] = table.cost.reshape(-1)[better] * (1 + _TIE)
    return table


def _all_rounds(arrays: HierarchyArrays) -> FloatArray:
    """Return the rounds of all pairs, ``[verifier, drafter, L, T]``, in one block."""
    drafters, longest = arrays.draft.shape
    rounds = np.empty((drafters, drafters, longest, longest))
    for verifier in range(drafters):
        rounds[verifier] = arrays.rounds(verifier)
    return rounds


def _improve(table: _Table, state: int, options: FloatArray, candidates: NDArray[np.intp]) -> NDArray[np.intp]:
    """Serve the candidates (flat model, T) from `state` where that is better, ties by rank; return those."""
    cost, rank, draft = table.cost.reshape(-1), table.rank.reshape(-1), table.draft.reshape(-1)
    new = options.reshape(-1)[candidates]
    ranks = rank[state] + (table.cost.size + 1) + candidates % table.cost.shape[1] + 1
    wins = _wins(new, ranks, cost[candidates], rank[candidates])
    better: NDArray[np.intp] = candidates[wins]
    cost[better], rank[better], draft[better] = new[wins], ranks[wins], state
    return better


def _entries(arrays: HierarchyArrays, table: _Table) -> FloatArray:
    """Return the latency of the target over the best stack that serves each draft (drafter, L)."""
    return np.asarray((arrays.verify[:, -1] + table.cost) / arrays.tokens)


def _read_off(arrays: HierarchyArrays, tables: _Tables) -> Hierarchy:
    """Return the best stack in the tables; in any order a model may stand in it more than once."""
    table, target = tables.at(0), len(arrays.draft)
    alone = Hierarchy((target,), (), arrays.autoregression)
    if table is None:
        return alone
    chosen, latency = _choose(_entries(arrays, table).reshape(-1, 1), table.rank.reshape(-1))
    if arrays.autoregression <= latency[0] * (1 + _TIE):
        return alone
    stack, state = [], int(chosen[0])
    while table is not None and state >= 0:
        stack.append(divmod(state, arrays.draft.shape[1]))
        state = int(table.draft.reshape(-1)[state])
        table = tables.at(len(stack))
    models = (*(model for model, _ in reversed(stack)), target)
    return Hierarchy(models, tuple(length + 1 for _, length in reversed(stack)), float(latency[0]))


@dataclass(frozen=True, slots=True, order=True)
class _Partial:
    """The upper part of a stack: a bound on what it can become, and its drafters from the top down.

    `spent` is the cost per token of the verify passes fixed so far, `factor` the requests per token that
    reach the lowest of them. A whole stack has nothing left to add.
    """

    bound: float
    levels: int
    length: int
    models: tuple[int, ...]
    lengths: tuple[int, ...]
    spent: float
    factor: float
    whole: bool


def _search(arrays: HierarchyArrays, tables: _Tables, count: int) -> Iterator[Hierarchy]:
    """Yield the best stacks in order of latency, best first.

    The tables say exactly what the rest of a stack costs (in any order, at least what), so the first `count`
    whole stacks that come off the queue are the best.
    """
    rounds = lru_cache(maxsize=None)(arrays.rounds)
    queue = [_Partial(arrays.autoregression, 0, 0, (), (), arrays.autoregression, 0.0, whole=True)]
    queue += _first_drafts(arrays, tables, count)
    heapq.heapify(queue)
    while queue and count:
        part = heapq.heappop(queue)
        if part.whole:
            count -= 1
            yield Hierarchy((*part.models[::-1], len(arrays.draft)), part.lengths[::-1], part.bound)
            continue
        for child in (_finish(arrays, part), *_next_drafts(arrays, tables, part, rounds, count)):
            if child.bound < math.inf:
                heapq.heappush(queue, child)


def _finish(arrays: HierarchyArrays, part: _Partial) -> _Partial:
    """Return the stack whose lowest model so far drafts alone."""
    total = part.spent + part.factor * float(arrays.draft[part.models[-1], part.lengths[-1] - 1])
    return _Partial(total, part.levels, part.length, part.models, part.lengths, total, 0.0, whole=True)


def _first_drafts(arrays: HierarchyArrays, tables: _Tables, count: int) -> list[_Partial]:
    """Return the stacks of the target and one drafter, open below."""
    table = tables.at(0)
    if table is None:
        return []
    top = _Partial(0.0, 0, 0, (), (), 0.0, 1.0, whole=False)
    return _open(arrays, top, table, (arrays.verify[:, -1] / arrays.tokens, 1 / arrays.tokens), count)


def _next_drafts(
    arrays: HierarchyArrays,
    tables: _Tables,
    part: _Partial,
    rounds: Callable[[int], FloatArray],
    count: int,
) -> list[_Partial]:
    """Return the stacks with one more drafter below the lowest, open below."""
    table, lowest = tables.at(part.levels), part.models[-1]
    if table is None:
        return []
    factors = rounds(lowest)[:, :, part.lengths[-1] - 1]
    return _open(arrays, part, table, (factors * arrays.verify[: len(factors), lowest], factors), count)


def _open(
    arrays: HierarchyArrays,
    part: _Partial,
    table: _Table,
    edges: tuple[FloatArray, FloatArray],
    count: int,
) -> list[_Partial]:
    """Return `part` with each next draft (drafter, L), given the costs and multipliers of these edges."""
    spent, factors = part.spent + part.factor * edges[0], part.factor * edges[1]
    bounds = spent + factors * table.cost[: len(factors)]
    bounds[[model for model in part.models if model < len(bounds)]] = math.inf
    flat = bounds.reshape(-1)
    kept = np.flatnonzero(np.isfinite(flat))
    if arrays.order == "given" and len(kept) > count:
        # Every bound is the latency of a stack of its own, so no other can be among the best.
        kept = kept[np.argpartition(flat[kept], count - 1)[:count]]
    return [
        _Partial(
            float(flat[state]),
            part.levels + 1,
            part.length + state % bounds.shape[1] + 1,
            (*part.models, int(state // bounds.shape[1])),
            (*part.lengths, int(state % bounds.shape[1]) + 1),
            float(spent.reshape(-1)[state]),
            float(factors.reshape(-1)[state]),
            whole=False,
        )
        for state in kept
    ]
