"""The best adaptive policy: every level chooses drafter and draft length from the tokens it still owes.

With ``F(i, t)`` the least expected cost for model i to serve t more tokens, ``N`` the tokens that a round gains:

    F(i, t) = min( c_i(1) + F(i, t - 1),  min over j < i and L of F(j, L) + c_i(L + 1) + E[F(i, t - N)] )

and ``F(i, t) = 0`` for t <= 0. The target keeps no state: it repeats the one round of least cost per token.
This goes beyond the papers; see the Notes of `optimal_policy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from hsdopt.checks import check_length
from hsdopt.errors import InvalidArgumentError
from hsdopt.solvers.pool import read_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike

    from hsdopt.checks import Cost, FloatArray
    from hsdopt.solvers.pool import Pool

__all__ = [
    "AdaptiveArrays",
    "AdaptivePolicy",
    "Draft",
    "adaptive_arrays",
    "optimal_latency",
    "optimal_policy",
    "request_cost",
    "solve_arrays",
]

Draft: TypeAlias = tuple[int, int]
"""A drafter's number and a draft length."""

_TIE = 1e-13


@dataclass(frozen=True, slots=True)
class AdaptivePolicy:
    """What every level does, and what it costs.

    Attributes
    ----------
    drafts
        ``drafts[model][tokens - 1]``: the draft that a model below the target asks for when it owes so many
        tokens, or None to go on alone.
    request_costs
        ``request_costs[model][tokens - 1]``: expected cost of serving a request.
    target_draft
        The draft that the target asks for in every round, or None for autoregression.
    latency
        Expected cost per token, in the unit of the costs.
    """

    drafts: tuple[tuple[Draft | None, ...], ...]
    request_costs: tuple[tuple[float, ...], ...]
    target_draft: Draft | None
    latency: float


@dataclass(frozen=True, slots=True)
class AdaptiveArrays:
    """What the recursion needs to know of a pool, models in order, the target last.

    Entry 0 of an axis of draft lengths L or tokens T stands for 1.

    Attributes
    ----------
    survival
        ``survival(verifier)``: chances that the first m tokens of its drafters are accepted,
        ``[drafter, m]``, m from 0 to the longest draft.
    verify
        Cost of one verify pass, ``[drafter, verifier, L]``; infinite where a pair must not be used.
    step
        Cost of one token of a model alone, ``[model]``; infinite for a lookup drafter.
    at_once
        Cost of a request that a model serves as a whole, as a lookup drafter does, ``[drafter, T]``; infinite
        for other models.
    """

    survival: Callable[[int], FloatArray]
    verify: FloatArray
    step: FloatArray
    at_once: FloatArray


def request_cost(
    costs: Sequence[Cost] | FloatArray, acceptance: ArrayLike, max_draft_length: int, model: int, tokens: int
) -> float:
    """Return the least expected cost for one model to serve a request of so many tokens.

    Parameters
    ----------
    costs, acceptance, max_draft_length
        As for `optimal_policy`.
    model
        Number of the model; its drafters are the models before it.
    tokens
        Tokens owed, at least 0; may exceed the longest draft.

    Raises
    ------
    InvalidArgumentError
        If a number is outside its domain or a shape does not fit.

    Examples
    --------
    >>> round(request_cost([0.01, 0.1, 1.0], [[1, 0.9, 0.5], [0, 1, 0.8], [0, 0, 1]], 6, 1, 2), 9)
    0.12
    """
    pool = read_pool(costs, acceptance, max_draft_length)
    number, owed = check_length(model, "model"), check_length(tokens, "tokens")
    if number > pool.target:
        raise InvalidArgumentError(f"expected model to be at most {pool.target}; got {number}")
    if owed == 0:
        return 0.0
    arrays = adaptive_arrays(pool)
    table = np.zeros((number, pool.max_draft_length))
    for below in range(number):
        table[below] = _serve(arrays, below, table[:below], arrays.at_once[below])[0]
    return float(_serve(arrays, number, table, np.full(owed, np.inf))[0][-1])


def optimal_latency(costs: Sequence[Cost] | FloatArray, acceptance: ArrayLike, max_draft_length: int) -> float:
    """Return the least expected cost per token over adaptive policies, in the unit of the costs.

    Parameters
    ----------
    costs, acceptance, max_draft_length
        As for `optimal_policy`.

    Raises
    ------
    InvalidArgumentError
        If a number is outside its domain or a shape does not fit.

    Examples
    --------
    >>> round(optimal_latency([0.01, 0.1, 1.0], [[1, 0.9, 0.5], [0, 1, 0.8], [0, 0, 1]], 8), 6)
    0.291297
    """
    return optimal_policy(costs, acceptance, max_draft_length).latency


def optimal_policy(costs: Sequence[Cost] | FloatArray, acceptance: ArrayLike, max_draft_length: int) -> AdaptivePolicy:
    """Return the best adaptive policy: a table for every model, and the target's round.

    Parameters
    ----------
    costs
        For each model, the target last: the cost of one pass, a number or a function of its new tokens.
    acceptance
        ``acceptance[j][i]``: rate of j's drafts by i, shape ``[models, models]``; or survival curves, shape
        ``[models, models, at least max_draft_length + 1]``. Only j < i is read.
    max_draft_length
        Longest draft of any level, in tokens.

    Returns
    -------
    AdaptivePolicy
        Of choices that tie, going on alone, then the shorter draft, then the earlier drafter.

    Raises
    ------
    InvalidArgumentError
        If a number is outside its domain or a shape does not fit.

    Notes
    -----
    Never slower than the best hierarchy of the same order, length limit and cost model, which is the policy
    that ignores what is owed. The work is models^2 times max_draft_length^2.

    Examples
    --------
    >>> policy = optimal_policy([0.01, 0.1, 1.0], [[1, 0.9, 0.5], [0, 1, 0.8], [0, 0, 1]], 4)
    >>> policy.target_draft, policy.drafts[1]
    ((1, 4), (None, (0, 1), (0, 2), (0, 3)))
    """
    return solve_arrays(adaptive_arrays(read_pool(costs, acceptance, max_draft_length)))


def adaptive_arrays(pool: Pool) -> AdaptiveArrays:
    """Return the arrays of a pool without catch-up or lookup drafters."""
    models, longest = len(pool.costs), pool.max_draft_length
    return AdaptiveArrays(
        survival=pool.survival,
        verify=np.broadcast_to(pool.costs[:, 1:], (models - 1, models, longest)),
        step=pool.costs[:, 0],
        at_once=np.full((models - 1, longest), np.inf),
    )


def solve_arrays(arrays: AdaptiveArrays) -> AdaptivePolicy:
    """Return the best policy of given arrays; see `optimal_policy`."""
    drafters, longest = arrays.at_once.shape
    table = np.zeros((drafters, longest))
    drafts = []
    for model in range(drafters):
        table[model], row = _serve(arrays, model, table[:model], arrays.at_once[model])
        drafts.append(tuple(row))
    target_draft, latency = _target(arrays, table)
    return AdaptivePolicy(tuple(drafts), tuple(map(tuple, table.tolist())), target_draft, latency)


def _target(arrays: AdaptiveArrays, table: FloatArray) -> tuple[Draft | None, float]:
    """Return the target's best round and its cost per token."""
    alone = float(arrays.step[-1])
    if table.size == 0:
        return None, alone
    tokens = arrays.survival(len(table)).cumsum(axis=1)[:, 1:]
    return _choose((table + arrays.verify[:, -1]) / tokens, alone)


def _serve(
    arrays: AdaptiveArrays, model: int, below: FloatArray, at_once: FloatArray
) -> tuple[FloatArray, list[Draft | None]]:
    """Return cost and choice of one model for 1, 2, ... tokens owed, given the requests below it."""
    longest = arrays.verify.shape[2]
    cost = np.zeros(len(at_once) + longest + 1)  # entry longest + t is F(model, t)
    if below.size:
        survival = arrays.survival(model)[: len(below)]
        gains = survival[:, :-1] - survival[:, 1:]
        once = below + arrays.verify[: len(below), model]
    choices: list[Draft | None] = []
    for owed in range(1, len(at_once) + 1):
        now = longest + owed
        past = cost[now - longest - 1 : now][::-1]  # F(t - 1), F(t - 2), ...
        alone = min(float(at_once[owed - 1]), float(arrays.step[model] + past[0]))
        choice: Draft | None = None
        if below.size:
            later = (gains * past[:-1]).cumsum(axis=1) + survival[:, 1:] * past[1:]
            choice, alone = _choose(once + later, alone)
        cost[now] = alone
        choices.append(choice)
    return cost[longest + 1 :], choices


def _choose(options: FloatArray, alone: float) -> tuple[Draft | None, float]:
    """Return the least of the options (drafter, L) and of going on alone."""
    least = options.min()
    if alone <= least * (1 + _TIE):
        return None, alone
    # Transposed, so that the first is the shortest.
    length, drafter = np.argwhere(least * (1 + _TIE) >= options.T)[0]
    return (int(drafter), int(length) + 1), float(options[drafter, length])
