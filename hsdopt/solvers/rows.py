"""Stacks whose drafts are rows: the best way to serve every request with up to two segments per row.

Requests are served level by level. With F(j, L) the least cost of L tokens from drafter j, a round over the row
(j, L), (k, M) costs F(j, L) + F(k, M), the verify pass over all that both propose, and what the two drafters have
to catch up on: the first with what was accepted behind its segment, the second with the segment before it. All of
this is local to the row, so F follows exactly for rows of one and two segments.

Source: the vertical and horizontal cascades of Chen et al., Cascade Speculative Drafting, arXiv 2312.11462.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hsdopt.checks import FloatArray
from hsdopt.errors import PlanError
from hsdopt.plan import Level, Segment
from hsdopt.solvers.arrays import ProfileArrays

__all__ = ["Requests", "best_latency", "best_requests", "best_rows", "proves_rows"]

_Option: TypeAlias = tuple[FloatArray, FloatArray, Callable[[int], tuple[tuple[int, int], ...]]]

_TIE = 1e-13
_PER_PAIR = 3  # rows listed of every pair of drafters, besides the best of all


@dataclass(frozen=True, slots=True)
class Requests:
    """The best way to serve every request.

    Attributes
    ----------
    cost : ndarray, shape [drafter, T]
        Seconds.
    first : ndarray of int, shape [drafter, T]
        Tokens that the first pass of the drafter verifies; 0 if it drafts alone.
    levels : tuple of tuple of Level
        The sub-plan, per drafter and T.
    """

    cost: FloatArray
    first: NDArray[np.int64]
    levels: tuple[tuple[Level, ...], ...]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Rows of two drafters under one verifier, all lengths that fit.

    `lengths` are the entries (L - 1, M - 1), shape [rows, 2]; `gain` the expected accepted tokens, `verify` the
    seconds of the verify pass, `law` the law of accepted tokens, `rounds` the passes per request of T tokens.
    """

    drafters: tuple[int, int]
    lengths: tuple[NDArray[np.intp], NDArray[np.intp]]
    gain: FloatArray
    verify: FloatArray
    rounds: FloatArray


def best_requests(arrays: ProfileArrays, *, levels: int | None = None) -> Requests:
    """Return the best way to serve every request with rows of up to two segments.

    Parameters
    ----------
    arrays : ProfileArrays
    levels : int or None
        Most models above each other in a sub-plan; None for no limit.
    """
    table = _alone(arrays)
    if levels == 1:
        return table
    pairs = {verifier: list(_pairs(arrays, verifier, rounds=True)) for verifier in arrays.networks}
    depth = len(arrays.draft) if levels is None else levels
    for _ in range(depth - 1):
        improved = _one_level_more(arrays, table, pairs)
        if np.array_equal(improved.cost, table.cost):
            break
        table = improved
    return table


def _alone(arrays: ProfileArrays) -> Requests:
    names = arrays.names[:-1]
    levels = tuple((Level(name),) * arrays.longest for name in names)
    return Requests(arrays.draft.copy(), np.zeros(arrays.draft.shape, dtype=np.int64), levels)


def _one_level_more(arrays: ProfileArrays, below: Requests, pairs: dict[int, list[_Pair]]) -> Requests:
    """Return the table in which every network may also verify drafts that `below` serves."""
    cost, first = below.cost.copy(), below.first.copy()
    levels = [list(row) for row in below.levels]
    for verifier in arrays.networks:
        for once, rounds, rows in _options(arrays, below, verifier, pairs[verifier]):
            options = once[:, np.newaxis] * rounds
            least = options.argmin(axis=0)
            for tokens in np.flatnonzero(options[least, range(arrays.longest)] < cost[verifier] * (1 - _TIE)):
                segments = rows(int(least[tokens]))
                try:
                    level = Level(arrays.names[verifier], _segments(below, segments))
                except PlanError:  # a model would draft for itself through another: keep what there was
                    continue
                cost[verifier, tokens] = options[least[tokens], tokens]
                first[verifier, tokens] = sum(length for _, length in segments)
                levels[verifier][tokens] = level
    return Requests(cost, first, tuple(map(tuple, levels)))


def _options(arrays: ProfileArrays, below: Requests, verifier: int, pairs: list[_Pair]) -> Iterator[_Option]:
    """Yield (cost of a round, rounds per request, segments by row) of single drafters and of pairs."""
    single = arrays.verify[:, verifier] + below.cost + _unread(arrays, below, verifier)
    for drafter in range(len(arrays.draft)):
        if drafter != verifier:
            yield single[drafter], arrays.rounds[verifier, drafter], partial(_single, drafter)
    for pair in pairs:
        once = pair.verify + _drafting(arrays, below, verifier, pair)
        yield once, pair.rounds, partial(_row, pair)


def _single(drafter: int, row: int) -> tuple[tuple[int, int], ...]:
    return ((drafter, row + 1),)


def _row(pair: _Pair, row: int) -> tuple[tuple[int, int], ...]:
    lengths = (int(entries[row]) + 1 for entries in pair.lengths)
    return tuple(zip(pair.drafters, lengths, strict=True))


def _segments(below: Requests, row: tuple[tuple[int, int], ...]) -> tuple[Segment, ...]:
    return tuple(Segment(below.levels[drafter][length - 1], length) for drafter, length in row)


def _unread(arrays: ProfileArrays, below: Requests, verifier: int) -> FloatArray:
    """Return the catch-up of a single drafter per round, [drafter, L]; only a lone drafter's is local."""
    return np.where(below.first == 0, arrays.unread[:, verifier], 0.0)


def _pairs(arrays: ProfileArrays, verifier: int, *, rounds: bool, using: int | None = None) -> Iterator[_Pair]:
    """Yield the rows of every two drafters for one verifier."""
    longest = arrays.longest
    first, second = np.nonzero(np.add.outer(np.arange(1, longest + 1), np.arange(1, longest + 1)) <= longest)
    ahead = np.add.outer(np.arange(longest + 1), np.arange(longest + 1))
    pass_cost = arrays.passes[verifier][ahead]
    for one, two in permutations(range(len(arrays.draft)), 2):
        if verifier in {one, two} or using not in {None, one, two}:
            continue
        verify = arrays.proposed[one, verifier] @ pass_cost @ arrays.proposed[two, verifier].T
        # what the verifier can take in at once is what it can take in from one drafter
        unusable = ~np.isfinite(arrays.verify[one, verifier][first + second + 1])
        unusable |= ~np.isfinite(arrays.verify[two, verifier][second])
        whole = arrays.goes_on[one, verifier].sum(axis=1)
        gain = arrays.gain[one, verifier][first] + whole[first] * arrays.gain[two, verifier][second]
        table = (
            _rounds(_law(arrays, verifier, (one, two), first, second), longest) if rounds else np.zeros((len(first), 0))
        )
        yield _Pair((one, two), (first, second), gain, np.where(unusable, np.inf, verify[first, second]), table)


def _law(
    arrays: ProfileArrays,
    verifier: int,
    drafters: tuple[int, int],
    first: NDArray[np.intp],
    second: NDArray[np.intp],
) -> FloatArray:
    """Return the law of the accepted tokens of rows of two segments, [row, longest + 1]."""
    one, two = drafters
    size = arrays.longest + 1
    behind = np.zeros((arrays.longest, size, size))  # [M, held before, accepted in all]
    for held in range(size):
        behind[:, held, held:] = arrays.accepted[two, verifier][:, : size - held]
    on = arrays.goes_on[one, verifier]
    continued = np.einsum("ln,mna->lma", on, behind, optimize=True)
    return np.asarray(arrays.stops[one, verifier][first] + continued[first, second])


def _rounds(accepted: FloatArray, longest: int) -> FloatArray:
    """Return the expected passes until 1, 2, ... tokens are held, [row, T], from the law of accepted tokens."""
    rounds = np.zeros((len(accepted), longest + 1))
    for tokens in range(1, longest + 1):
        rounds[:, tokens] = 1.0 + (accepted[:, :tokens] * rounds[:, :tokens][:, ::-1]).sum(axis=1)
    return rounds[:, 1:]


def _drafting(arrays: ProfileArrays, below: Requests, verifier: int, pair: _Pair) -> FloatArray:
    """Return the seconds of drafting a row, with all that both drafters have to catch up on, [row]."""
    (one, two), (first, second) = pair.drafters, pair.lengths
    total = below.cost[one][first] + below.cost[two][second]
    whole = arrays.goes_on[one, verifier].sum(axis=1)
    if one in arrays.networks:
        more = _more(arrays, one, below.first[one], 1)
        extra = whole[:, np.newaxis] * (more @ arrays.accepted[two, verifier].T)
        total = total + extra[first, second]
    if two in arrays.networks:
        more = _more(arrays, two, below.first[two], 0)
        extra = arrays.proposed[one, verifier] @ more.T
        again = _more(arrays, two, below.first[two], 1) - more
        full = whole[first] * arrays.goes_on[two, verifier].sum(axis=1)[second]
        total = total + extra[first, second] + full * again[second, first + 1]
    return np.asarray(total)


def _more(arrays: ProfileArrays, drafter: int, first: NDArray[np.int64], offset: int) -> FloatArray:
    """Return what a request's first pass costs more for 0, 1, ... (plus `offset`) tokens to catch up, [L, tokens]."""
    longest = arrays.longest
    passes = arrays.passes[drafter]
    places = np.minimum(first[:, np.newaxis] + offset + np.arange(longest + 1), len(passes) - 1)
    return np.asarray(passes[places] - passes[first][:, np.newaxis])


def best_latency(arrays: ProfileArrays, requests: Requests, *, using: int | None = None) -> float:
    """Return the seconds per token of the target's best row of up to two segments, or alone.

    Parameters
    ----------
    arrays : ProfileArrays
    requests : Requests
    using : int, optional
        Look at rows with this drafter only.
    """
    options = _target_options(arrays, requests, using)
    rows = [float((once / (1.0 + gain)).min(initial=np.inf)) for once, gain, _ in options]
    return min([float(arrays.passes[-1, 0]), *rows])


def proves_rows(arrays: ProfileArrays) -> bool:
    """Return whether the search for rows, with `optimal_segments` for the target's longer ones, finds the optimum.

    Rows of two are exact. The target's longer rows are so at constant costs and if drafters propose all that they
    are asked for; an intermediate row has at most all drafters but its own verifier.
    """
    drafters = len(arrays.draft)
    constant = bool(np.all(arrays.passes == arrays.passes[:, :1]))
    asked = np.arange(arrays.longest)
    full = arrays.proposed[:, -1][:, asked, asked + 1] > 1 - _TIE
    return drafters <= 2 or (drafters == 3 and constant and bool(np.all(full | ~np.isfinite(arrays.verify[:, -1]))))


def best_rows(arrays: ProfileArrays, requests: Requests, count: int) -> list[Level]:
    """Return plans whose target drafts a row of up to two segments: the best of all, and some of every pair."""
    found = sorted(_target_rows(arrays, requests, count), key=lambda pair: pair[0])
    per_pair: dict[tuple[str, ...], int] = {}
    plans = []
    for place, (_, plan) in enumerate(found):
        names = tuple(segment.level.model for segment in plan.row)
        per_pair[names] = per_pair.get(names, 0) + 1
        if place < count or per_pair[names] <= _PER_PAIR:
            plans.append(plan)
    return plans


def _target_rows(arrays: ProfileArrays, requests: Requests, count: int) -> Iterator[tuple[float, Level]]:
    for once, gain, rows in _target_options(arrays, requests):
        latency = once / (1.0 + gain)
        for row in np.argsort(latency, kind="stable")[:count]:
            if np.isfinite(latency[row]):
                yield float(latency[row]), Level(arrays.names[-1], _segments(requests, rows(int(row))))


def _target_options(arrays: ProfileArrays, requests: Requests, using: int | None = None) -> Iterator[_Option]:
    target = len(arrays.names) - 1
    single = arrays.verify[:, target] + requests.cost + _unread(arrays, requests, target)
    for drafter in range(len(arrays.draft)):
        if using in {None, drafter}:
            yield single[drafter], arrays.gain[drafter, target], partial(_single, drafter)
    for pair in _pairs(arrays, target, rounds=False, using=using):
        once = pair.verify + _drafting(arrays, requests, target, pair)
        yield once, pair.gain, partial(_row, pair)
