"""Cascades: a drafter that drafts with a drafter (vertical), and a draft written by several (horizontal).

Source: Chen et al., Cascade Speculative Drafting, arXiv 2312.11462. Costs are ratios to one target pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsdopt.checks import (
    Acceptance,
    Cost,
    FloatArray,
    as_cost,
    as_survival,
    check_cost,
    check_length,
    check_number,
    check_rate,
    is_rate,
)
from hsdopt.errors import InvalidArgumentError
from hsdopt.latency.catch_up import CatchUp, after_pass, catch_up_seconds, check_catch_up, drafted
from hsdopt.latency.laws import token_law

if TYPE_CHECKING:
    from collections.abc import Iterable


def token_count_pgf(acceptance: Acceptance, draft_length: int, x: float) -> float:
    """Return ``E[x**N]``, the probability generating function of the tokens gained by one verify pass.

    Parameters
    ----------
    acceptance
        An iid rate, or a survival curve with ``S[0] = 1``.
    draft_length
        Tokens drafted per verify pass.
    x
        Where to evaluate it.

    Returns
    -------
    float
        ``sum over n of P(N = n) x**n``.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, or the curve is too short.

    Notes
    -----
    arXiv 2312.11462; summed, since its quotient has a removable singularity at ``a x = 1``.

    Examples
    --------
    >>> token_count_pgf(0.5, 3, 2.0)
    5.0
    """
    law = token_law(acceptance, check_length(draft_length))
    return float(np.polynomial.polynomial.polyval(check_number(x, "x", "a finite number"), law))


def vertical_ewif(
    *,
    acceptance: Acceptance,
    inner_acceptance: Acceptance,
    rounds: int,
    inner_draft_length: int,
    cost_ratio: float,
    inner_cost_ratio: float,
) -> float:
    """Return the EWIF of a target whose drafter reviews another drafter for a fixed number of rounds.

    Parameters
    ----------
    acceptance
        Acceptance of the drafter's tokens by the target: an iid rate or a survival curve.
    inner_acceptance
        Acceptance of the inner drafter's tokens by the drafter: an iid rate or a survival curve.
    rounds
        Inner rounds per draft; 0 leaves both drafters out.
    inner_draft_length
        Tokens of the inner drafter in each inner round.
    cost_ratio, inner_cost_ratio
        Cost of a pass of the drafter and of the inner drafter in units of a target pass.

    Returns
    -------
    float
        A speed-up; below 1 is a slowdown.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, or a curve is too short; the drafter's has to cover
        ``rounds * (inner_draft_length + 1)`` tokens.

    Notes
    -----
    arXiv 2312.11462. The generating function takes the inner acceptance as its parameter and is
    evaluated at the outer one.

    Examples
    --------
    >>> factor = vertical_ewif(
    ...     acceptance=0.8, inner_acceptance=0.6, rounds=2, inner_draft_length=3,
    ...     cost_ratio=0.1, inner_cost_ratio=0.01,
    ... )
    >>> round(factor, 6)
    2.684941
    """
    passes = check_length(rounds, "rounds")
    length = check_length(inner_draft_length, "inner_draft_length")
    drafter = check_cost(cost_ratio, "cost_ratio")
    inner = check_cost(inner_cost_ratio, "inner_cost_ratio")
    law = token_law(inner_acceptance, length)
    if is_rate(acceptance):
        tokens = _tokens_at_rate(check_rate(acceptance), law, passes)
    else:
        tokens = _tokens_on_curve(as_survival(acceptance, passes * (length + 1)), law, passes)
    return tokens / (1.0 + passes * (drafter + length * inner))


def horizontal_ewif(segments: Iterable[tuple[Acceptance, float, int]]) -> float:
    """Return the EWIF of a draft that several drafters write one after the other.

    Parameters
    ----------
    segments
        For each segment of the row, first to last: acceptance by the target (an iid rate, or a survival
        curve that starts anew at the segment's first token, all before it accepted), cost ratio, and
        number of tokens.

    Returns
    -------
    float
        A speed-up; below 1 is a slowdown. An empty row gives 1.

    Raises
    ------
    InvalidArgumentError
        If a segment is not a triple, or a value is outside its domain.

    Notes
    -----
    arXiv 2312.11462. Expected tokens are 1 plus the chance, position by position, that
    everything up to there is accepted.

    Examples
    --------
    >>> horizontal_ewif([(0.5, 0.25, 1), (0.5, 0.0, 1)])
    1.4
    """
    tokens = cost = reached = 1.0
    for segment in segments:
        acceptance, ratio, length = _checked_segment(segment)
        survival = as_survival(acceptance, length)
        tokens += reached * float(survival[1:].sum())
        cost += length * ratio
        reached *= float(survival[-1])
    return tokens / cost


def vertical_latency_per_token(
    *,
    acceptance: Acceptance,
    inner_acceptance: Acceptance,
    rounds: int,
    inner_draft_length: int,
    inner_cost: Cost,
    drafter_cost: Cost,
    target_cost: Cost,
    catch_up: CatchUp = "none",
) -> float:
    """Return the expected cost per token of `vertical_ewif`'s stack, in the unit of the costs.

    Parameters
    ----------
    acceptance, inner_acceptance, rounds, inner_draft_length
        As in `vertical_ewif`.
    inner_cost, drafter_cost, target_cost
        Cost of one pass: a number, or a function of the new tokens of the pass.
    catch_up
        What tokens missing from a cache cost, as in `hsdopt.latency.hierarchy.latency_per_token`.

    Returns
    -------
    float
        Seconds per emitted token, if the costs are in seconds.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, or a curve is too short.

    Examples
    --------
    >>> stack = {"acceptance": 0.8, "inner_acceptance": 0.6, "rounds": 2, "inner_draft_length": 3}
    >>> seconds = vertical_latency_per_token(**stack, inner_cost=0.01, drafter_cost=0.1, target_cost=1.0)
    >>> round(1.0 / seconds, 6)
    2.684941
    """
    check_catch_up(catch_up)
    passes = check_length(rounds, "rounds")
    length = check_length(inner_draft_length, "inner_draft_length")
    target, drafter = as_cost(target_cost, "target_cost"), as_cost(drafter_cost, "drafter_cost")
    inner = as_cost(inner_cost, "inner_cost")
    law = token_law(inner_acceptance, length)
    held = _repeated(law, passes)
    survival = as_survival(acceptance, len(held) - 1)
    tokens = float(survival @ held[::-1].cumsum()[::-1])
    seconds = sum(float(held[n]) * target(int(n) + 1) for n in np.flatnonzero(held))
    if passes > 0:
        seconds += passes * (length * inner(1) + drafter(length + 1))
        own, below = _vertical_pending(law, inner_acceptance, survival, passes)
        seconds += catch_up_seconds(own, drafter, length, catch_up)
        seconds += catch_up_seconds(below, inner, 0, catch_up) if length > 0 else 0.0
    return seconds / tokens


def horizontal_latency_per_token(
    segments: Iterable[tuple[Acceptance, Cost, int]], target_cost: Cost, *, catch_up: CatchUp = "none"
) -> float:
    """Return the expected cost per token of a row of drafters, in the unit of the costs.

    Parameters
    ----------
    segments
        For each segment of the row, first to last: acceptance by the target, as in `horizontal_ewif`; cost of
        one drafter pass, a number or a function of its new tokens; and number of tokens.
    target_cost
        Cost of one target pass, a number or a function of its new tokens.
    catch_up
        What tokens missing from a cache cost, as in `hsdopt.latency.hierarchy.latency_per_token`. A later
        drafter has not read the row before it.

    Returns
    -------
    float
        Seconds per emitted token, if the costs are in seconds.

    Raises
    ------
    InvalidArgumentError
        If a segment is not a triple, or a value is outside its domain.

    Examples
    --------
    >>> horizontal_latency_per_token([(0.5, 0.25, 1), (0.5, 0.0, 1)], 1.5)
    1.0
    """
    check_catch_up(catch_up)
    target = as_cost(target_cost, "target_cost")
    row = [(acceptance, as_cost(cost), length) for acceptance, cost, length in map(_checked_row_segment, segments)]
    survival = _row_survival([(acceptance, length) for acceptance, _, length in row])
    accepted = survival - np.append(survival[1:], 0.0)
    seconds, start = target(len(survival)), 0
    for _, cost, length in row:
        if length > 0:
            seconds += length * cost(1)
            seconds += catch_up_seconds(_row_pending(accepted, start, start + length), cost, 0, catch_up)
        start += length
    return seconds / float(survival.sum())


def _vertical_pending(
    law: FloatArray, inner_acceptance: Acceptance, survival: FloatArray, rounds: int
) -> tuple[FloatArray, FloatArray]:
    """Return, per draft, how many requests find the drafter, and the inner drafter, lacking ``p`` tokens."""
    before = _repeated(law, rounds - 1)

    def after_target(last_round: FloatArray) -> FloatArray:
        passed_up = np.stack([np.convolve(before, row) for row in last_round])
        return np.asarray(after_pass(passed_up, survival).sum(axis=1))

    inner = after_pass(drafted(np.eye(len(law) - 1)[-1]), inner_acceptance)
    below = after_target(inner)
    below[:-1] += (rounds - 1) * inner.sum(axis=1)
    return after_target(drafted(law)), below


def _row_survival(row: Iterable[tuple[Acceptance, int]]) -> FloatArray:
    survival = np.ones(1)
    for acceptance, length in row:
        survival = np.append(survival, survival[-1] * as_survival(acceptance, length)[1:])
    return survival


def _row_pending(accepted: FloatArray, start: int, end: int) -> FloatArray:
    """Return the law of what a segment's first pass lacks: the row before it, and what it has not read since."""
    prefix = np.arange(len(accepted))
    # it has read the accepted prefix, at most up to the last token but one of its own segment
    lacking = 1 + start + np.maximum(0, prefix - end + 1)
    return np.asarray(np.bincount(lacking, weights=accepted), dtype=np.float64)


def _tokens_at_rate(rate: float, law: FloatArray, rounds: int) -> float:
    # With D tokens after r rounds, round r + 1 adds a^(D+1) (1 + ... + a^(N-1)); every term is positive, so
    # nothing cancels near a = 1, where the published quotient (1 - a phi^n) / (1 - a) loses its digits.
    reach = law[::-1].cumsum()[::-1][1:]  # P(N >= n), n = 1..k+1
    powers = rate ** np.arange(len(law))
    discount = float(law @ powers)
    return 1.0 + rate * float(reach @ powers[:-1]) * float((discount ** np.arange(rounds)).sum())


def _tokens_on_curve(survival: FloatArray, law: FloatArray, rounds: int) -> float:
    return float(survival @ _repeated(law, rounds)[::-1].cumsum()[::-1])


def _repeated(law: FloatArray, rounds: int) -> FloatArray:
    """Return the law of the tokens that a number of rounds gain together."""
    gained = np.ones(1)
    for _ in range(rounds):
        gained = np.convolve(gained, law)
    return gained


def _checked_segment(segment: tuple[Acceptance, float, int]) -> tuple[Acceptance, float, int]:
    acceptance, ratio, length = _checked_row_segment(segment)
    return acceptance, check_cost(ratio, "cost_ratio"), length


def _checked_row_segment(segment: tuple[Acceptance, Cost, int]) -> tuple[Acceptance, Cost, int]:
    try:
        acceptance, cost, length = segment
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"expected each segment to be (acceptance, cost_ratio, draft_length); got {segment!r}"
        ) from None
    return acceptance, cost, check_length(length)
