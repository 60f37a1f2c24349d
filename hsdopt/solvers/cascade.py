"""The best row: which drafter drafts which stretch of the tokens that one verify pass takes in.

A row is built from its end. If the tokens behind have expected gain x (given that all before them are
accepted) and cost y, then putting a stretch of gain s, full acceptance p and cost r before them gives gain
s + p x and cost r + y. Whatever comes before, the latency of the whole row is then a ratio that prefers, for
some price of a token between 0 and the best latency, the point of least y - price x; so of all rows behind of
one length only those on the lower hull of cost over gain matter, and keeping these is exact.

Source: the horizontal cascade of Chen et al., Cascade Speculative Drafting, arXiv 2312.11462; the price is
Dinkelbach's parameter (1967), here for all its values at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from hsdopt.checks import check_length, check_nonnegative, check_rate, check_survival
from hsdopt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike

    from hsdopt.checks import FloatArray

__all__ = ["Row", "Segment", "optimal_row", "optimal_segments"]

Segment: TypeAlias = tuple[int, int]
"""A drafter's number and how many tokens it drafts."""

_TIE = 1e-13


@dataclass(frozen=True, slots=True)
class Row:
    """The best row of segments.

    Attributes
    ----------
    segments
        (drafter, tokens) in the order of the row; none for autoregression.
    latency
        Expected cost per token, in the unit of the costs.
    tokens_per_pass
        Expected tokens that the verifier's pass gains.
    """

    segments: tuple[Segment, ...]
    latency: float
    tokens_per_pass: float


@dataclass(frozen=True, slots=True)
class _Tail:
    """The end of a row: its gain if everything before is accepted, its cost, and its segments."""

    gain: float
    cost: float
    segments: tuple[Segment, ...]

    def latency(self, pass_cost: float) -> float:
        """Return the cost per token if this is the whole row."""
        return (self.cost + pass_cost) / (1.0 + self.gain)


_EMPTY = _Tail(0.0, 0.0, ())


def optimal_row(drafters: Sequence[tuple[float, float]], max_draft_length: int) -> tuple[float, tuple[int, ...]]:
    """Return the best EWIF of a row of single-token drafts, and the drafter at every position.

    Parameters
    ----------
    drafters
        (acceptance, cost ratio) of each: an iid rate, and the cost of a token over that of a target's pass.
    max_draft_length
        Most tokens in the row.

    Returns
    -------
    tuple of float and tuple of int
        The EWIF, and a number of a drafter for each position; of rows that tie, one of fewest tokens. Higher
        acceptance stands first, which is optimal at iid rates.

    Raises
    ------
    InvalidArgumentError
        If a rate is not between 0 and 1, a cost negative, or the length not a whole number.

    Examples
    --------
    >>> optimal_row([(0.8, 0.1), (0.4, 0.0)], 4)
    (2.4283076923076923, (0, 0, 0, 1))
    """
    longest = check_length(max_draft_length, "max_draft_length")
    pairs = [_read_drafter(drafter, index) for index, drafter in enumerate(drafters)]
    best, tails = _EMPTY, [_EMPTY]
    for _ in range(longest):
        grown = [
            _Tail(rate * (1.0 + tail.gain), tail.cost + cost, ((index, 1), *tail.segments))
            for tail in tails
            for index, (rate, cost) in enumerate(pairs)
        ]
        tails = _hull(grown, best.latency(1.0))
        least = min(tails, key=lambda tail: tail.latency(1.0), default=best)
        best = least if least.latency(1.0) < best.latency(1.0) * (1 - _TIE) else best
    # Reordering keeps the cost and, highest acceptance first, loses no gain.
    sequence = sorted((index for index, _ in best.segments), key=lambda index: (-pairs[index][0], index))
    return _ewif(sequence, pairs), tuple(sequence)


def _ewif(sequence: Sequence[int], pairs: Sequence[tuple[float, float]]) -> float:
    """Return expected tokens over cost, both in passes of the target."""
    reached, tokens, cost = 1.0, 1.0, 1.0
    for index in sequence:
        reached *= pairs[index][0]
        tokens += reached
        cost += pairs[index][1]
    return tokens / cost


def _read_drafter(drafter: tuple[float, float], index: int) -> tuple[float, float]:
    try:
        acceptance, cost_ratio = drafter
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"expected (acceptance, cost ratio) as drafters[{index}]; got {drafter!r}") from None
    rate = check_rate(acceptance, f"the acceptance of drafters[{index}]")
    return rate, check_nonnegative(cost_ratio, f"the cost ratio of drafters[{index}]")


def _hull(tails: Iterable[_Tail], price: float) -> list[_Tail]:
    """Return the tails of least cost minus p times gain, for all prices p from 0 to `price`."""
    kept: list[_Tail] = []
    for tail in sorted(tails, key=lambda tail: (tail.cost, -tail.gain)):
        if kept and not _pays(kept[-1], tail, price):
            continue
        while len(kept) > 1 and _below(kept[-2], kept[-1], tail):
            kept.pop()
        kept.append(tail)
    return kept


def _pays(cheap: _Tail, dear: _Tail, price: float) -> bool:
    """Return whether the dearer tail gains more, and enough for the highest price."""
    gain = dear.gain - cheap.gain
    # A rounding error must not drop a tail that breaks even at the price.
    return gain > 0 and dear.cost - cheap.cost <= price * gain * (1 + 1e-9)


def _below(first: _Tail, middle: _Tail, last: _Tail) -> bool:
    """Return whether the middle one lies on or below the line from the first to the last."""
    return (middle.gain - first.gain) * (last.cost - middle.cost) <= (last.gain - middle.gain) * (
        middle.cost - first.cost
    )


def optimal_segments(
    request_cost: ArrayLike,
    survival: ArrayLike,
    pass_cost: ArrayLike,
    *,
    max_draft_length: int,
    max_segments: int | None = None,
) -> Row:
    """Return the best row whose segments are drafts of known cost, each drafter at most once.

    Parameters
    ----------
    request_cost
        ``[drafter, L - 1]``: cost of a draft of L tokens, itself the best sub-plan of that drafter; infinite
        where a draft must not be used.
    survival
        ``[drafter, m]``, or ``[drafter, L - 1, m]`` if it depends on the tokens asked for: the chance that
        the first m tokens of the segment are accepted, given that everything before it is.
    pass_cost
        ``[n - 1]``: cost of the verifier's pass over n new tokens, n from 1 to ``max_draft_length + 1``.
    max_draft_length
        Most tokens in the row.
    max_segments
        Most segments in the row; None for no limit.

    Returns
    -------
    Row
        Of rows that tie, one of fewest segments, then of fewest tokens. Exact for any survival curves and cost
        curves; the work doubles with every drafter.

    Raises
    ------
    InvalidArgumentError
        If a shape does not fit, or a number is outside its domain.

    Examples
    --------
    >>> cost = [[0.1, 0.2, 0.3], [0.0, 0.0, 0.0]]
    >>> row = optimal_segments(cost, [[1, 0.8, 0.6, 0.5], [1, 0.5, 0.3, 0.2]], [1, 1, 1, 1], max_draft_length=3)
    >>> row.segments, round(row.latency, 6)
    (((0, 2), (1, 1)), 0.444444)
    """
    longest = check_length(max_draft_length, "max_draft_length")
    drafts = _read_drafts(request_cost, survival, longest)
    passes = _read_passes(pass_cost, longest)
    most = len(drafts.cost) if max_segments is None else check_length(max_segments, "max_segments")
    best, known = _EMPTY, {0: {0: [_EMPTY]}}
    price = min(float(passes[0]), drafts.least_latency(passes))
    for size in range(1, min(most, len(drafts.cost)) + 1):
        for used in combinations(range(len(drafts.cost)), size):
            tails = _prepend(drafts, used, known, price)
            known[sum(1 << drafter for drafter in used)] = tails
            best = _better(best, tails, passes)
    return Row(best.segments, best.latency(float(passes[_length(best)])), 1.0 + best.gain)


@dataclass(frozen=True, slots=True)
class _Drafts:
    """Cost, gain and chance of full acceptance of every draft, ``[drafter, L - 1]``."""

    cost: FloatArray
    gain: FloatArray
    whole: FloatArray

    def least_latency(self, passes: FloatArray) -> float:
        """Return the latency of the best row of one segment."""
        return float(((self.cost + passes[1:]) / (1.0 + self.gain)).min(initial=math.inf))


def _read_drafts(request_cost: ArrayLike, survival: ArrayLike, longest: int) -> _Drafts:
    """Return the checked drafts."""
    cost = np.asarray(request_cost, dtype=np.float64)
    if cost.ndim != 2 or cost.shape[1] < longest:
        raise InvalidArgumentError(f"expected request_cost of shape [drafters, {longest}]; got shape {cost.shape}")
    cost = cost[:, :longest]
    if not (cost >= 0).all():
        raise InvalidArgumentError(f"expected request costs of at least 0; got {cost[~(cost >= 0)][0]}")
    curves = check_survival(survival, "survival") if len(cost) else np.ones((0, longest + 1))
    if curves.ndim == 2:
        curves = np.broadcast_to(curves[:, np.newaxis], (len(curves), longest, curves.shape[1]))
    if curves.ndim != 3 or len(curves) != len(cost) or min(curves.shape[1], curves.shape[2] - 1) < longest:
        raise InvalidArgumentError(
            f"expected survival of shape [{len(cost)}, {longest + 1}] or [{len(cost)}, {longest}, {longest + 1}]; "
            f"got shape {np.shape(survival)}"
        )
    asked = np.arange(longest)
    return _Drafts(cost, curves.cumsum(axis=2)[:, asked, asked + 1] - 1.0, curves[:, asked, asked + 1])


def _read_passes(pass_cost: ArrayLike, longest: int) -> FloatArray:
    """Return the checked cost of the verifier's passes."""
    passes = np.asarray(pass_cost, dtype=np.float64)
    if passes.ndim != 1 or len(passes) <= longest:
        raise InvalidArgumentError(f"expected {longest + 1} costs of a pass; got shape {passes.shape}")
    if not ((passes >= 0) & np.isfinite(passes)).all():
        raise InvalidArgumentError(f"expected finite costs of a pass of at least 0; got {passes.tolist()}")
    return passes[: longest + 1]


def _prepend(
    drafts: _Drafts, used: tuple[int, ...], known: dict[int, dict[int, list[_Tail]]], price: float
) -> dict[int, list[_Tail]]:
    """Return the useful tails made of exactly the drafters in `used`, by length."""
    whole = sum(1 << drafter for drafter in used)
    grown: dict[int, list[_Tail]] = {}
    for drafter in used:
        for length, tails in known[whole ^ (1 << drafter)].items():
            for tail in tails:
                _extend(drafts, drafter, length, tail, grown)
    return {length: _hull(tails, price) for length, tails in grown.items()}


def _extend(drafts: _Drafts, drafter: int, length: int, tail: _Tail, grown: dict[int, list[_Tail]]) -> None:
    """Add to `grown` the tail with every draft of one drafter before it."""
    longest = drafts.cost.shape[1] - length
    gains = (drafts.gain[drafter, :longest] + drafts.whole[drafter, :longest] * tail.gain).tolist()
    costs = (drafts.cost[drafter, :longest] + tail.cost).tolist()
    for asked, (gain, cost) in enumerate(zip(gains, costs, strict=True), start=1):
        if cost < math.inf:
            grown.setdefault(length + asked, []).append(_Tail(gain, cost, ((drafter, asked), *tail.segments)))


def _better(best: _Tail, tails: dict[int, list[_Tail]], passes: FloatArray) -> _Tail:
    """Return the best of a row and of tails taken as rows, the shortest of those that tie."""
    for length in sorted(tails):
        cost = float(passes[length])
        for tail in tails[length]:
            if tail.latency(cost) < best.latency(float(passes[_length(best)])) * (1 - _TIE):
                best = tail
    return best


def _length(tail: _Tail) -> int:
    return sum(asked for _, asked in tail.segments)
