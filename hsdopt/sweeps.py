"""From a published sweep over draft lengths to costs, acceptance, and the lengths worth measuring.

Source: derived for this package. A row says how fast drafts of ``k`` tokens were and how many were accepted. With
``N(k)`` the tokens per round, a round costs ``r(k) = N(k) * base / speed(k)`` steps without speculation, and
``S(k) = N(k) - N(k - 1)``. Speeds alone cannot tell the drafter's time from the target's: all of it is booked as
the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from hsdopt.acceptance import Acceptance
from hsdopt.checks import FloatArray, check_choice, check_length, check_number, check_rate
from hsdopt.errors import InvalidArgumentError
from hsdopt.latency.speculative import expected_tokens
from hsdopt.profiles import Profile

__all__ = ["Meaning", "Sweep", "fit_sweep"]

Lengths: TypeAlias = NDArray[np.int64]
Meaning: TypeAlias = Literal["accepted/drafted", "first position", "iid"]

_MEANINGS = ("accepted/drafted", "first position", "iid")
_TIE = 1e-12  # relative gap under which two speeds are equal


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep over draft lengths says.

    Attributes
    ----------
    round_costs : mapping of int to float
        For length 0 (no speculation: 1) and every measured draft length, the cost of a round in steps without
        speculation, ascending.
    survival : tuple of float
        ``S(0) ... S(longest)``: the least-squares survival curve; the lengths of a gap share its increment.
    affine : tuple of (float, float) or None
        Intercept and slope of the least-squares line through the round costs of the measured lengths, length 0
        left out; None if only one length was measured.
    residual : float
        The largest relative distance of a measured round cost from the line, ``|line / cost - 1|``.
    best : int
        The fastest measured length; 0 if nothing beat the base.
    ties : tuple of int
        The measured lengths (0 is one) whose speed is within the residual of the best one's, the best among them,
        ascending: take the first.
    candidates : tuple of int
        Unmeasured lengths below the longest measured one that may come within the residual of the best, ascending:
        worth measuring, never an answer.
    profile : Profile
        Models "drafter", at cost 0, and "target", whose pass over ``k + 1`` tokens takes ``r(k) / base`` seconds: as
        measured, else on the line.
    """

    round_costs: Mapping[int, float]
    survival: tuple[float, ...]
    affine: tuple[float, float] | None
    residual: float
    best: int
    ties: tuple[int, ...]
    candidates: tuple[int, ...]
    profile: Profile


def fit_sweep(
    base: float,
    rows: Sequence[tuple[int, float, float]],
    *,
    acceptance: Meaning = "accepted/drafted",
) -> Sweep:
    """Return costs, survival curve and best draft length of a sweep over draft lengths.

    Parameters
    ----------
    base
        Tokens per second without speculation.
    rows
        Per measured draft length: the length (at least 1), tokens per second, and the acceptance. All at one
        setting: rows with a confidence gate have other round costs.
    acceptance
        What the third number of a row is; reports use one word for three numbers. Tokens per round ``N(k)`` are

        - "accepted/drafted" (vLLM, llama.cpp): ``1 + k a``, always;
        - "iid", accepted over tokens judged (accepted tokens and drafts with a refusal): ``1 + a + ... + a^k``,
          exact if tokens are accepted independently;
        - "first position", the share of drafts whose first token was accepted: ``1 + a`` at ``k = 1``; beyond, a row
          says nothing of later positions, and ``1 + a + ... + a^k`` takes them to be accepted at the same rate. Round
          costs are then off by the factor that tokens per round are; `best` is measured all the same.

    Returns
    -------
    Sweep
        Round costs in steps without speculation, survival, the measured best and the candidates.

    Raises
    ------
    InvalidArgumentError
        If there is no row, a row is not three numbers in their domain, or a length comes twice.

    Notes
    -----
    The survival curve is the least-squares projection of the increments ``N(k) - N(k - 1)`` onto non-increasing
    values in [0, 1]. A candidate is judged by the most tokens that such a curve through the measured lengths allows,
    at the round cost of the line (of one measured length: on the line through length 0).

    Examples
    --------
    >>> sweep = fit_sweep(22.92, [(1, 27.58, 0.8835), (2, 29.39, 0.815), (4, 26.09, 0.6421)])
    >>> sweep.best, sweep.ties, sweep.candidates
    (2, (2,), (3,))
    >>> {length: round(cost, 2) for length, cost in sweep.round_costs.items()}
    {0: 1.0, 1: 1.57, 2: 2.05, 4: 3.13}
    """
    plain = _speed(base, "base")
    check_choice(acceptance, "acceptance", _MEANINGS)
    lengths, speeds, tokens = _table(plain, rows, acceptance)
    costs = tokens * plain / speeds
    survival = _survival(lengths, tokens)
    affine, residual = _line(lengths[1:], costs[1:])
    best = int(np.argmax(speeds >= speeds.max() * (1.0 - _TIE)))
    enough = speeds[best] * (1.0 - residual) * (1.0 - _TIE)
    every = _every_cost(lengths, costs, affine)
    hoped = _most_tokens(lengths, survival) * plain / every
    unmeasured = np.setdiff1d(np.arange(lengths[-1] + 1), lengths)
    return Sweep(
        round_costs=dict(zip(lengths.tolist(), costs.tolist(), strict=True)),
        survival=tuple(survival.tolist()),
        affine=affine,
        residual=residual,
        best=int(lengths[best]),
        ties=tuple(lengths[speeds >= enough].tolist()),
        candidates=tuple(unmeasured[hoped[unmeasured] >= enough].tolist()),
        profile=Profile.from_rates(
            "target",
            {"drafter": 0.0, "target": lambda n: float(every[n - 1]) / plain},
            {("drafter", "target"): Acceptance(tuple(survival.tolist()))},
            max_tokens=len(every),
        ),
    )


def _table(
    base: float, rows: Sequence[tuple[int, float, float]], acceptance: str
) -> tuple[Lengths, FloatArray, FloatArray]:
    """Return lengths, speeds and tokens per round, length 0 first, ascending."""
    found = {0: (base, 1.0)}
    for index, row in enumerate(rows):
        name = f"rows[{index}]"
        if not isinstance(row, Sequence | np.ndarray) or isinstance(row, str) or len(row) != 3:
            raise InvalidArgumentError(
                f"expected {name} to be (draft length, tokens per second, acceptance); got {row!r}"
            )
        length = check_length(row[0], f"the draft length of {name}", minimum=1)
        if length in found:
            raise InvalidArgumentError(f"expected one row per draft length; got {length} twice: average their speeds")
        rate = check_rate(row[2], f"the acceptance of {name}")
        tokens = 1.0 + length * rate if acceptance == "accepted/drafted" else expected_tokens(rate, length)
        found[length] = _speed(row[1], f"the speed of {name}"), tokens
    if len(found) == 1:
        raise InvalidArgumentError("expected a row for each measured draft length; got none: measure at least one")
    lengths = np.array(sorted(found), dtype=np.int64)
    speeds, gained = np.array([found[length] for length in lengths.tolist()]).T
    return lengths, speeds, gained


def _speed(value: object, name: str) -> float:
    expected = "a number of tokens per second above 0"
    speed = check_number(value, name, expected)
    if speed <= 0.0:
        raise InvalidArgumentError(f"expected {name} to be {expected}; got {speed}")
    return speed


def _survival(lengths: Lengths, tokens: FloatArray) -> FloatArray:
    """Return ``S[0..longest]``: increments, shared in gaps, projected onto the survival curves."""
    gaps = np.diff(lengths)
    increments = np.repeat(np.diff(tokens) / gaps, gaps)
    falling = isotonic_regression(increments, increasing=False).x  # clipping it is the projection onto the bounds too
    return np.concatenate([[1.0], np.clip(falling, 0.0, 1.0)])


def _line(lengths: Lengths, costs: FloatArray) -> tuple[tuple[float, float] | None, float]:
    """Return the least-squares line through the round costs, and its largest relative residual."""
    if len(lengths) == 1:
        return None, 0.0
    about = lengths - lengths.mean()
    slope = float(about @ costs / (about @ about))
    intercept = float(costs.mean() - slope * lengths.mean())
    return (intercept, slope), float(np.abs((intercept + slope * lengths) / costs - 1.0).max())


def _every_cost(lengths: Lengths, costs: FloatArray, affine: tuple[float, float] | None) -> FloatArray:
    """Return the round cost of every length up to the longest: as measured, else on the line."""
    every = np.arange(lengths[-1] + 1.0)
    if affine is None:
        return np.asarray(np.interp(every, lengths, costs), dtype=np.float64)
    # the line may fall below 0 where nothing was measured
    line: FloatArray = np.maximum(affine[0] + affine[1] * every, costs.min())
    line[lengths] = costs
    return line


def _most_tokens(lengths: Lengths, survival: FloatArray) -> FloatArray:
    """Return the most tokens per round, for every length, that a survival curve through the measured ones allows."""
    every = np.arange(lengths[-1] + 1)
    tokens = survival.cumsum()
    after = lengths[np.searchsorted(lengths, every)]
    before = lengths[np.searchsorted(lengths, every, side="right") - 1]
    beyond = np.append(survival, 0.0)[after + 1]
    rising = tokens[before] + (every - before) * survival[before]
    return np.asarray(np.minimum(rising, tokens[after] - (after - every) * beyond))
