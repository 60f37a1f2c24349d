"""Speculative decoding of several sequences at once: throughput, lockstep, time until all are done.

A cost is that of one pass by all its new tokens, of every sequence together. Sequences are independent of each
other; each has its own acceptance, an iid rate or a survival curve, and its own draft length.

Source: the token count of one pass from Leviathan et al. 2023; the batch formulas follow from it by sums, minima
and convolutions of independent counts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from hsdopt.checks import (
    Acceptance,
    Cost,
    CostFunction,
    FloatArray,
    as_cost,
    as_survival,
    check_cost,
    check_count,
    check_length,
)
from hsdopt.errors import InvalidArgumentError
from hsdopt.latency.laws import law_from_survival

_T = TypeVar("_T")


def ragged_seconds_per_token(
    acceptances: Sequence[Acceptance],
    draft_lengths: Sequence[int],
    cost: Cost,
    *,
    drafting: float = 0.0,
    alignment: float = 0.0,
) -> float:
    """Return the seconds per token of a batch whose sequences each advance by what they had accepted.

    Finished sequences are replaced, so that the batch stays full.

    Parameters
    ----------
    acceptances
        An iid rate or a survival curve for each sequence.
    draft_lengths
        Tokens drafted per round for each sequence.
    cost
        Seconds of one verify pass: a number, or a function of the new tokens of the whole batch.
    drafting
        Seconds of drafting per round, for the whole batch.
    alignment
        Seconds per round of bringing the sequences, which advance unequally, back into one batch.

    Returns
    -------
    float
        Seconds per token, all sequences' tokens counted.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, the lists differ in length or are empty, or a curve is too short.

    Notes
    -----
    ``(c(sum (k_i + 1)) + drafting + alignment) / sum E[N_i]``, a renewal-reward quotient.

    Examples
    --------
    >>> round(ragged_seconds_per_token([0.8, 0.8], [3, 3], lambda tokens: 10 + tokens), 9)
    3.048780488
    """
    curves = _curves(acceptances, draft_lengths)
    spent = as_cost(cost)(sum(len(curve) for curve in curves))
    spent += check_cost(drafting, "drafting") + check_cost(alignment, "alignment")
    return spent / float(sum(curve.sum() for curve in curves))


def lockstep_tokens(acceptance: Acceptance, draft_length: int, batch: int) -> float:
    """Return the expected tokens that every sequence of a batch gains per round if all advance by the least.

    Parameters
    ----------
    acceptance
        An iid rate or a survival curve, the same for every sequence.
    draft_length
        Tokens drafted per round for each sequence.
    batch
        Sequences, at least 1.

    Returns
    -------
    float
        Tokens per sequence and round, between 1 and ``draft_length + 1``.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, or the curve is too short.

    Notes
    -----
    ``1 + sum over j of S(j)**batch``: the least of independent accepted prefixes.

    Examples
    --------
    >>> lockstep_tokens(0.5, 2, 2)
    1.3125
    """
    survival = as_survival(acceptance, check_length(draft_length))
    return float((survival ** check_length(batch, "batch", minimum=1)).sum())


def makespan(
    acceptances: Sequence[Acceptance],
    draft_lengths: Sequence[int],
    tokens: int | Sequence[int],
    cost: Cost,
) -> float:
    """Return the expected seconds until every sequence of a static batch has its tokens.

    Finished sequences leave and are not replaced. Drafts are not shortened at the end; prefill and drafting are
    left out.

    Parameters
    ----------
    acceptances
        An iid rate or a survival curve for each sequence.
    draft_lengths
        Tokens drafted per round for each sequence.
    tokens
        Tokens to generate for each sequence, or one number for all; 0 is done from the start.
    cost
        Seconds of one verify pass: a number, or a function of the new tokens of the whole pass.

    Returns
    -------
    float
        Seconds; with a cost of 1, the expected rounds of the slowest sequence.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, the lists differ in length or are empty, or a curve is too short.

    Notes
    -----
    The sum over rounds ``s`` of ``E[c(X_s)]``, no tokens costing nothing, where ``X_s`` is the sum of independent
    ``(k_i + 1) Bernoulli(P(R_i > s))`` and ``R_i`` the rounds that sequence ``i`` takes. With ``T`` tokens and
    ``W`` the tokens of a full pass it takes O(T * sequences * (T + W)) operations at most.

    Examples
    --------
    >>> makespan([0.5, 0.5], [1, 1], [2, 2], lambda tokens: 10 + tokens)
    23.5
    """
    curves = _curves(acceptances, draft_lengths)
    owed = [tokens] * len(curves) if isinstance(tokens, int | np.integer) else _listed(tokens, "tokens")
    check_count(owed, len(curves), "one number of tokens for each sequence")
    targets = [check_length(number, "tokens") for number in owed]
    widths = [len(curve) for curve in curves]
    alive = np.zeros((len(curves), max(targets)))
    for row, curve, target in zip(alive, curves, targets, strict=True):
        row[:target] = list(_unfinished(curve, target))
    price = functools.cache(as_cost(cost))
    return sum((_expected_cost(chances, widths, price) for chances in alive.T), start=0.0)


def _curves(acceptances: Sequence[Acceptance], draft_lengths: Sequence[int]) -> list[FloatArray]:
    """Return every sequence's survival curve, cut to its draft length."""
    given, lengths = _listed(acceptances, "acceptances"), _listed(draft_lengths, "draft_lengths")
    if not given:
        raise InvalidArgumentError("expected at least one sequence in the batch; got none")
    check_count(lengths, len(given), "one draft length for each sequence")
    return [
        as_survival(acceptance, check_length(length, f"draft_lengths[{index}]"), f"acceptances[{index}]")
        for index, (acceptance, length) in enumerate(zip(given, lengths, strict=True))
    ]


def _listed(values: Sequence[_T], name: str) -> list[_T]:
    try:
        return list(values)
    except TypeError:
        raise InvalidArgumentError(
            f"expected {name} to be a list with one entry for each sequence; got {values!r}"
        ) from None


def _unfinished(survival: FloatArray, tokens: int) -> Iterator[float]:
    """Yield the chance that a sequence still owes tokens after 0, 1, ... rounds, ``tokens`` values in all."""
    gained = law_from_survival(survival)
    held = np.zeros(tokens)
    held[:1] = 1.0
    for _ in range(tokens):
        yield min(1.0, float(held.sum()))
        held = np.convolve(held, gained)[:tokens]


def _expected_cost(chances: FloatArray, widths: list[int], cost: CostFunction) -> float:
    """Return the expected cost of a round in which sequence ``i`` takes part with probability ``chances[i]``."""
    size = np.ones(1)
    for chance, width in zip(chances, widths, strict=True):
        size = np.convolve(size, np.concatenate([[1.0 - chance], np.zeros(width - 1), [chance]]))
    passes = [total for total in np.flatnonzero(size).tolist() if total > 0]
    return sum((float(size[total]) * cost(total) for total in passes), start=0.0)
