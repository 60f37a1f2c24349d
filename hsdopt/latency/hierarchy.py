"""Hierarchical speculative decoding: a stack in which every level but the lowest verifies the one below.

Source: Mohri et al., Hierarchical Speculative Decoding, arXiv 2510.19705. Lists run from the bottom of the
stack to the target: ``acceptances[i]`` is model ``i``'s drafts by model ``i + 1``, and ``draft_lengths[i]`` is
what model ``i`` passes up per request. Two conventions say what a level does with surplus tokens:

- "truncate" passes up exactly its draft length and discards the rest;
- "overshoot" passes up everything it holds once it holds its draft length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from hsdopt.checks import (
    Acceptance,
    Cost,
    CostFunction,
    FloatArray,
    as_cost,
    as_survival,
    check_choice,
    check_count,
    check_length,
    check_rate,
    check_rates,
    check_survival,
    is_rate,
)
from hsdopt.errors import InvalidArgumentError
from hsdopt.latency.catch_up import CatchUp, catch_up_seconds, check_catch_up, drafted, pending_law, verified
from hsdopt.latency.laws import law_from_survival, renewal_masses, token_law

if TYPE_CHECKING:
    from collections.abc import Sequence

Convention: TypeAlias = Literal["truncate", "overshoot"]

_CURVES_AT_ONCE = 1 << 19  # numbers per chunk of curves: a chunk's working set stays in the cache


def expected_rounds(acceptance: Acceptance, draft_length: int, tokens: int) -> float:
    """Return the expected number of verify passes until at least ``tokens`` tokens are held.

    Parameters
    ----------
    acceptance
        An iid rate, or a survival curve with ``S[0] = 1``.
    draft_length
        Tokens drafted per verify pass.
    tokens
        Tokens to gather; 0 takes no pass.

    Returns
    -------
    float
        The renewal function ``R(tokens)``.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, or the curve is too short.

    Notes
    -----
    With ``q = draft_length + 1`` and an iid rate ``a``, the sum over ``m`` from 0 to ``(tokens - 1) // q`` of
    ``a**(q m) (1 + (1 - a)(tokens - 1 - q m))``. A survival curve goes through `expected_rounds_table`.

    Examples
    --------
    >>> expected_rounds(0.5, 1, 2)
    1.5
    """
    length, owed = check_length(draft_length), check_length(tokens, "tokens")
    if not is_rate(acceptance):
        return float(expected_rounds_table(acceptance, length, owed)[-1])
    rate, width = check_rate(acceptance), length + 1
    skipped = np.arange(0, owed, width)
    return float((rate ** skipped.astype(float)) @ (1.0 + (1.0 - rate) * (owed - 1 - skipped)))


def expected_rounds_table(acceptance: Acceptance, draft_length: int, max_tokens: int) -> FloatArray:
    """Return the expected number of verify passes for every number of tokens up to ``max_tokens``.

    Parameters
    ----------
    acceptance
        An iid rate, or a survival curve with ``S[0] = 1``.
    draft_length
        Tokens drafted per verify pass.
    max_tokens
        Largest number of tokens to gather.

    Returns
    -------
    numpy.ndarray
        ``R[0..max_tokens]``, shape ``[max_tokens + 1]``.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, or the curve is too short.

    Notes
    -----
    An iid rate takes O(max_tokens) steps, ``R(T) = 1 + (1 - a)(T - 1) + a**q R(T - q)``; a survival curve
    takes O(max_tokens * draft_length), the sum of its renewal masses.

    Examples
    --------
    >>> expected_rounds_table(0.5, 1, 3).tolist()
    [0.0, 1.0, 1.5, 2.25]
    """
    length, longest = check_length(draft_length), check_length(max_tokens, "max_tokens")
    rounds = np.zeros(longest + 1)
    if is_rate(acceptance):
        rate = check_rate(acceptance)
        rounds[1:] = 1.0 + (1.0 - rate) * np.arange(longest)
        _add_full_drafts(rounds[1:], rate ** (length + 1), length + 1)
    else:
        rounds[1:] = renewal_masses(token_law(acceptance, length), longest).cumsum()
    return rounds


def rounds_tables(rates: float | FloatArray, max_draft_length: int) -> FloatArray:
    """Return the expected number of verify passes for all draft lengths and all tokens owed, at iid rates.

    Parameters
    ----------
    rates
        One rate, or an array of rates of any shape, say one for each pair of models.
    max_draft_length
        Largest draft length, and largest number of tokens owed.

    Returns
    -------
    numpy.ndarray
        Shape ``[..., max_draft_length, max_draft_length]``; entry ``[..., L - 1, T - 1]`` is ``R(T)`` when
        the drafts have ``L`` tokens.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain.

    Examples
    --------
    >>> rounds_tables(0.5, 2).tolist()
    [[1.0, 1.5], [1.0, 1.5]]
    >>> rounds_tables(np.full((3, 4), 0.5), 8).shape
    (3, 4, 8, 8)
    """
    checked = check_rates(rates)
    longest = check_length(max_draft_length, "max_draft_length", minimum=1)
    # draft lengths outermost: each step then writes one contiguous block, 2 to 6 times faster
    tables = np.empty((longest, *checked.shape, longest))
    column = checked[..., np.newaxis]
    tables[...] = 1.0 + (1.0 - column) * np.arange(longest)
    for length in range(1, longest):
        _add_full_drafts(tables[length - 1], column ** (length + 1), length + 1)
    return np.moveaxis(tables, 0, -2)


def rounds_tables_from_survival(curves: FloatArray | Sequence[float], max_draft_length: int) -> FloatArray:
    """Return the expected number of verify passes for all draft lengths and all tokens owed, from curves.

    Parameters
    ----------
    curves
        A survival curve with at least ``max_draft_length + 1`` entries, or an array of them along the last
        axis.
    max_draft_length
        Largest draft length, and largest number of tokens owed.

    Returns
    -------
    numpy.ndarray
        Shape ``[..., max_draft_length, max_draft_length]``, laid out as in `rounds_tables`.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, or the curves are too short.

    Examples
    --------
    >>> rounds_tables_from_survival([1.0, 0.5, 0.25], 2).tolist()
    [[1.0, 1.5], [1.0, 1.5]]
    """
    longest = check_length(max_draft_length, "max_draft_length", minimum=1)
    survival = check_survival(curves)
    if survival.shape[-1] <= longest:
        raise InvalidArgumentError(
            f"expected survival curves that cover {longest} drafted tokens ({longest + 1} entries); "
            f"got {survival.shape[-1]} entries"
        )
    flat = survival[..., : longest + 1].reshape(-1, longest + 1)
    chunk = max(1, _CURVES_AT_ONCE // longest**2)
    tables = np.empty((len(flat), longest, longest))
    for start in range(0, len(flat), chunk):
        tables[start : start + chunk] = _renewal_tables(flat[start : start + chunk])
    return tables.reshape(*survival.shape[:-1], longest, longest)


def passes_per_token(
    acceptances: Sequence[Acceptance] | FloatArray,
    draft_lengths: Sequence[int],
    *,
    convention: Convention = "truncate",
) -> FloatArray:
    """Return the passes that each model of a stack makes per emitted token.

    Parameters
    ----------
    acceptances
        For each model below the target, bottom first, the acceptance of its drafts by the next: an iid rate
        or a survival curve.
    draft_lengths
        For each of them, the tokens it passes up per request.
    convention
        What a level does with surplus tokens: "truncate" or "overshoot".

    Returns
    -------
    numpy.ndarray
        Shape ``[models]``, bottom first, the target last. No models below the target: ``[1.0]``.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, the lists differ in length, or a curve is too short.

    Examples
    --------
    >>> passes_per_token([0.5], [2]).tolist()
    [1.1428571428571428, 0.5714285714285714]
    """
    return _passes(_levels(acceptances, draft_lengths, convention))


def latency_per_token(
    costs: Sequence[Cost],
    acceptances: Sequence[Acceptance] | FloatArray,
    draft_lengths: Sequence[int],
    *,
    convention: Convention = "truncate",
    catch_up: CatchUp = "none",
) -> float:
    """Return the expected cost per emitted token of a stack, in the unit of the costs.

    Parameters
    ----------
    costs
        For each model, bottom first, the target last: the cost of one pass, a number or a function of the
        new tokens of the pass.
    acceptances
        For each model below the target, the acceptance of its drafts by the next: an iid rate or a survival
        curve.
    draft_lengths
        For each of them, the tokens it passes up per request.
    convention
        What a level does with surplus tokens: "truncate" or "overshoot".
    catch_up
        What tokens missing from a cache cost, beyond the one that every first pass reads: nothing ("none"), a
        first pass that reads them too ("parallel"), or one more pass each ("sequential").

    Returns
    -------
    float
        The sum over models of passes per token times the expected cost of a pass.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, a list has the wrong length, or a curve is too short.

    Notes
    -----
    arXiv 2510.19705 for "truncate". "overshoot" carries the law of the length upward and takes every
    acceptance as independent of it, which real speculative sampling only approximates. Catch-up is exact
    where acceptances are independent from level to level.

    Examples
    --------
    >>> latency_per_token([1.0], [], [])
    1.0
    >>> round(latency_per_token([0.01, 0.05, 0.2, 1.0], [0.6, 0.8, 0.9], [2, 4, 12]), 9)
    0.334512872
    """
    levels = _levels(acceptances, draft_lengths, convention)
    check_catch_up(catch_up)
    check_count(costs, len(levels), "one cost for each model, the target's last")
    curves = [as_cost(cost, f"costs[{i}]") for i, cost in enumerate(costs)]
    passes = _passes(levels)
    terms = zip(passes, levels, curves, strict=True)
    total = sum(float(passed) * level.cost(curve) for passed, level, curve in terms if passed > 0.0)
    if catch_up == "none":
        return total
    pending = _pending(levels, acceptances, draft_lengths, truncate=convention == "truncate")
    return total + sum(
        float(requests) * level.catch_up_cost(curve, law, catch_up)
        for requests, level, curve, law in zip(passes[1:], levels[:-1], curves[:-1], pending, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Level:
    """One model's share of a request: its passes, and the law of the tokens it drafts upward.

    ``below[n]`` is the chance that one of its passes verifies a draft of ``n`` tokens; ``above[n]`` the chance
    that it passes up ``n`` tokens.
    """

    passes: float
    below: FloatArray
    above: FloatArray

    def cost(self, curve: CostFunction) -> float:
        """Return the expected cost of one of its passes."""
        lengths = np.flatnonzero(self.below)
        return sum(float(self.below[length]) * curve(int(length) + 1) for length in lengths)

    def catch_up_cost(self, curve: CostFunction, pending: FloatArray, catch_up: CatchUp) -> float:
        """Return what a request costs more because ``pending[p]`` is the chance that it lacks ``p`` tokens."""
        lengths = np.flatnonzero(self.below)
        return sum(float(self.below[n]) * catch_up_seconds(pending, curve, int(n), catch_up) for n in lengths)


def _passes(levels: list[_Level]) -> FloatArray:
    """Return passes per emitted token: a level's passes per request times the requests it gets."""
    return np.array([level.passes for level in levels])[::-1].cumprod()[::-1]


def _levels(
    acceptances: Sequence[Acceptance] | FloatArray, draft_lengths: Sequence[int], convention: Convention
) -> list[_Level]:
    """Return every level, bottom first; the target's passes are per emitted token."""
    check_choice(convention, "convention", ("truncate", "overshoot"))
    check_count(draft_lengths, len(acceptances), "one draft length for each acceptance")
    lengths = [check_length(length, f"draft_lengths[{i}]") for i, length in enumerate(draft_lengths)]
    if not lengths:
        return [_Level(1.0, _exactly(0), _exactly(1))]
    checked = [_checked(acceptance, f"acceptances[{i}]") for i, acceptance in enumerate(acceptances)]
    levels = [_Level(float(lengths[0]), _exactly(0), _exactly(lengths[0]))]
    for acceptance, owed in zip(checked[:-1], lengths[1:], strict=True):
        middle = _truncating if convention == "truncate" else _overshooting
        levels.append(middle(acceptance, levels[-1].above, owed))
    below = levels[-1].above
    tokens = float(_survival_of_pass(checked[-1], below).sum())
    return [*levels, _Level(1.0 / tokens, below, _exactly(1))]


def _pending(
    levels: list[_Level],
    acceptances: Sequence[Acceptance] | FloatArray,
    draft_lengths: Sequence[int],
    *,
    truncate: bool,
) -> list[FloatArray]:
    """Return, for each model below the target, the law of the tokens it lacks when a request reaches it."""
    passes, laws, chances = _passes(levels), [], list(acceptances)
    for index, level in enumerate(levels[:-1]):
        if passes[index] == 0.0:  # never asked for anything
            laws.append(np.zeros(1))
            continue
        passed_up = drafted(level.above)
        if index > 0:
            gained = law_from_survival(_survival_of_pass(chances[index - 1], level.below))
            passed_up = verified(gained, draft_lengths[index], truncate=truncate)
        above = index + 1
        laws.append(pending_law(passed_up, chances[index:], draft_lengths[above:], passes[above:], truncate=truncate))
    return laws


def _checked(acceptance: Acceptance, name: str) -> Acceptance:
    return check_rate(acceptance, name) if is_rate(acceptance) else check_survival(acceptance, name)


def _truncating(acceptance: Acceptance, below: FloatArray, owed: int) -> _Level:
    return _Level(expected_rounds(acceptance, len(below) - 1, owed), below, _exactly(owed))


def _overshooting(acceptance: Acceptance, below: FloatArray, owed: int) -> _Level:
    law = law_from_survival(_survival_of_pass(acceptance, below))
    masses = renewal_masses(law, owed)
    return _Level(float(masses.sum()), below, _held(masses, law))


def _survival_of_pass(acceptance: Acceptance, below: FloatArray) -> FloatArray:
    """Return ``P(A >= m)`` of a pass whose draft has a random length, independent of acceptance."""
    reach: FloatArray = np.minimum(below[::-1].cumsum()[::-1], 1.0)
    reach[0] = 1.0
    reach *= as_survival(acceptance, len(below) - 1)
    return reach


def _held(masses: FloatArray, law: FloatArray) -> FloatArray:
    """Return the law of the tokens held when the tokens owed are first reached: the renewal overshoot."""
    owed = len(masses)
    if owed == 0:
        return _exactly(0)
    held = np.convolve(masses, law)
    held[:owed] = 0.0
    return held


def _exactly(tokens: int) -> FloatArray:
    law = np.zeros(tokens + 1)
    law[tokens] = 1.0
    return law


def _add_full_drafts(rounds: FloatArray, power: float | FloatArray, width: int) -> None:
    """Turn ``1 + (1 - a)(T - 1)`` for ``T = 1, 2, ...`` into ``R(T)``, by adding ``a**width R(T - width)``."""
    for start in range(width, rounds.shape[-1], width):
        block = rounds[..., start : start + width]
        block += power * rounds[..., start - width : start - width + block.shape[-1]]


def _renewal_tables(survival: FloatArray) -> FloatArray:
    """Return ``R[curve, L - 1, T - 1]`` from ``S[curve, 0..longest]``, all draft lengths at once."""
    curves, longest = survival.shape[0], survival.shape[1] - 1
    laws = np.zeros((curves, longest, longest))  # laws[:, L - 1, n - 1] = P(N = n), for n up to longest
    gains = survival[:, :-1] - survival[:, 1:]
    for length in range(1, longest + 1):
        laws[:, length - 1, :length] = gains[:, :length]
        laws[:, length - 1, length : length + 1] = survival[:, length, np.newaxis]
    backward = np.empty((curves, longest, longest))  # [..., longest - T] = R(T): products stay contiguous
    for owed in range(1, longest + 1):
        seen = backward[:, :owed, longest - owed + 1 :]
        rounds = 1.0 + np.einsum("cln,cln->cl", laws[:, :owed, : owed - 1], seen)
        backward[:, :owed, longest - owed] = rounds
        backward[:, owed:, longest - owed] = rounds[:, -1:]  # a draft longer than what is owed changes nothing
    return np.asarray(backward[..., ::-1])
