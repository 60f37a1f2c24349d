"""Speculative decoding with one drafter: tokens per pass, speed-up, best draft length.

Source: Leviathan et al. 2023, with the iid rate generalised to a survival curve and constant costs to cost
curves. Draft length 0 is the target's own autoregression, always a candidate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsdopt.checks import (
    Acceptance,
    Cost,
    as_cost,
    as_survival,
    check_cost,
    check_count,
    check_length,
    check_nonnegative,
)
from hsdopt.errors import InvalidArgumentError
from hsdopt.latency.catch_up import CatchUp, catch_up_seconds, check_catch_up

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIE = 1e-12  # relative gap under which two draft lengths count as equally good


def expected_tokens(acceptance: Acceptance, draft_length: int) -> float:
    """Return the expected tokens gained by one verify pass, ``1 + S(1) + ... + S(draft_length)``.

    Parameters
    ----------
    acceptance
        An iid rate, or a survival curve with ``S[0] = 1``.
    draft_length
        Tokens drafted per verify pass.

    Returns
    -------
    float
        Tokens per pass, between 1 and ``draft_length + 1``.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, or the curve is too short.

    Notes
    -----
    Leviathan et al. 2023, equation 1, summed rather than taken as a quotient, which is 0/0 at a rate of 1.

    Examples
    --------
    >>> expected_tokens(0.5, 2)
    1.75
    >>> expected_tokens([1.0, 0.5, 0.5], 2)
    2.0
    """
    length = check_length(draft_length)
    return float(as_survival(acceptance, length).sum())


def ewif(acceptance: Acceptance, cost_ratio: float, draft_length: int) -> float:
    """Return the expected walltime improvement factor over the target's own autoregression.

    Parameters
    ----------
    acceptance
        An iid rate, or a survival curve with ``S[0] = 1``.
    cost_ratio
        Cost of a drafter pass in units of a target pass, both constant.
    draft_length
        Tokens drafted per verify pass.

    Returns
    -------
    float
        A speed-up; below 1 is a slowdown.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, or the curve is too short.

    Notes
    -----
    Leviathan et al. 2023, theorem 3.8.

    Examples
    --------
    >>> ewif(0.5, 0.125, 2)
    1.4
    """
    ratio = check_cost(cost_ratio, "cost_ratio")
    return expected_tokens(acceptance, draft_length) / (1.0 + draft_length * ratio)


def best_draft_length(acceptance: Acceptance, cost_ratio: float, max_draft_length: int) -> tuple[int, float]:
    """Return the draft length with the highest EWIF, and that EWIF; the shortest one on ties.

    Parameters
    ----------
    acceptance
        An iid rate, or a survival curve with at least ``max_draft_length + 1`` entries.
    cost_ratio
        Cost of a drafter pass in units of a target pass, both constant.
    max_draft_length
        Longest draft to consider; 0 (do not speculate) always is.

    Returns
    -------
    tuple of int and float
        Draft length and EWIF.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, or the curve is too short.

    Examples
    --------
    >>> best_draft_length(0.3, 0.5, 30)
    (0, 1.0)
    """
    longest = check_length(max_draft_length, "max_draft_length")
    ratio = check_cost(cost_ratio, "cost_ratio")
    tokens = np.cumsum(as_survival(acceptance, longest))
    factors = tokens / (1.0 + ratio * np.arange(longest + 1))
    best = int(np.argmax(factors >= factors.max() * (1.0 - _TIE)))
    return best, float(factors[best])


def latency_per_token(
    acceptance: Acceptance,
    drafter_cost: Cost,
    target_cost: Cost,
    draft_length: int,
    *,
    catch_up: CatchUp = "none",
) -> float:
    """Return the expected cost per emitted token, in the unit of the costs.

    Parameters
    ----------
    acceptance
        An iid rate, or a survival curve with ``S[0] = 1``.
    drafter_cost, target_cost
        Cost of one pass: a number, or a function of the new tokens of the pass.
    draft_length
        Tokens drafted per verify pass; 0 leaves the drafter out.
    catch_up
        What a fully accepted draft costs the drafter, whose cache then lacks its own last token: nothing
        ("none"), a first pass over two tokens in place of one ("parallel"), or one more pass ("sequential").

    Returns
    -------
    float
        ``(L c_d(1) + c_t(L + 1) + S(L) catch_up) / E[N]``.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, or the curve is too short.

    Examples
    --------
    >>> latency_per_token(0.5, 0.125, 1.0, 2)
    0.7142857142857143
    >>> latency_per_token(1.0, 0.2, 1.0, 3, catch_up="sequential")
    0.45
    """
    check_catch_up(catch_up)
    length = check_length(draft_length)
    survival = as_survival(acceptance, length)
    drafter, target = as_cost(drafter_cost, "drafter_cost"), as_cost(target_cost, "target_cost")
    verifying = target(length + 1)
    if length == 0:
        return verifying
    drafting = length * drafter(1) + catch_up_seconds(np.array([0.0, 0.0, survival[-1]]), drafter, 0, catch_up)
    return (drafting + verifying) / float(survival.sum())


def speedup(
    acceptance: Acceptance,
    drafter_cost: Cost,
    target_cost: Cost,
    draft_length: int,
    *,
    catch_up: CatchUp = "none",
) -> float:
    """Return the speed-up over the target's own autoregression, ``c_t(1)`` over `latency_per_token`.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, or a token costs nothing at all.

    Examples
    --------
    >>> round(speedup(0.86, 0.0, {1: 51.0, 2: 112.0}.__getitem__, 1), 3)
    0.847
    """
    latency = latency_per_token(acceptance, drafter_cost, target_cost, draft_length, catch_up=catch_up)
    if latency == 0.0:
        raise InvalidArgumentError("expected passes that cost something; got 0 seconds per token")
    return as_cost(target_cost, "target_cost")(1) / latency


def swi(
    *,
    tokens: float,
    target_passes: float,
    drafter_passes: Sequence[float] = (),
    cost_ratios: Sequence[float] = (),
) -> float:
    """Return the standardised walltime improvement: the speed-up that counted passes give at given costs.

    Parameters
    ----------
    tokens
        Tokens emitted.
    target_passes
        Passes of the target, each of cost 1.
    drafter_passes, cost_ratios
        Passes of each drafter, and the cost of one of them in units of a target pass.

    Returns
    -------
    float
        ``tokens / (target_passes + sum of drafter_passes * cost_ratios)``.

    Raises
    ------
    InvalidArgumentError
        If a number is negative, the two lists differ in length, or no pass cost anything.

    Notes
    -----
    Chen et al., Cascade Speculative Drafting, arXiv 2312.11462.

    Examples
    --------
    >>> swi(tokens=120, target_passes=40, drafter_passes=[160], cost_ratios=[0.125])
    2.0
    """
    check_count(cost_ratios, len(drafter_passes), "one cost ratio for each drafter")
    total = check_nonnegative(target_passes, "target_passes")
    for passes, ratio in zip(drafter_passes, cost_ratios, strict=True):
        total += check_nonnegative(passes, "drafter_passes") * check_cost(ratio, "cost_ratio")
    if total == 0.0:
        raise InvalidArgumentError("expected passes that cost something; got a total cost of 0")
    return check_nonnegative(tokens, "tokens") / total
