"""Acceptance of one drafter's tokens by one verifier: survival curves, their counts, and traces.

``S(m)``, the survival curve, is the probability that the first m drafted tokens are all accepted;
``S(0) = 1``. A lookup drafter may propose fewer tokens than asked, so its law is joint over
(proposed, accepted).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsdopt.errors import InvalidArgumentError, PredictionError

__all__ = ["Acceptance", "PublishedRates", "Strays", "Traces", "survival_from_runs"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PublishedRates:
    """The three numbers that are published as "acceptance rate", side by side; they cannot be compared.

    Attributes
    ----------
    first_position : float
        Share of the drafts whose first token was accepted.
    per_drafted : float
        Tokens accepted over tokens drafted, as vLLM and llama.cpp count them; falls with the draft length.
    iid : float
        Tokens accepted over tokens judged, accepted + rejecting drafts: the rate that formulas for independent tokens
        need (Leviathan et al. 2023).
    length : int
        Tokens asked for per draft.
    drafts, drafted, accepted, rejecting : float
        What they were counted from: drafts, tokens drafted and accepted, drafts with a refused token. For a law
        without counts, per draft.
    """

    first_position: float
    per_drafted: float
    iid: float
    length: int
    drafts: float
    drafted: float
    accepted: float
    rejecting: float

    @classmethod
    def of(cls, counts: NDArray[Any]) -> PublishedRates:
        """Return the rates of ``counts[n, m]``, drafts of n tokens of which m were accepted.

        Examples
        --------
        Three tokens per draft; 39 drafts gained nothing, one gained 1, three gained 3:

        >>> counts = np.zeros((4, 4))
        >>> counts[3] = 39, 1, 0, 3
        >>> rates = PublishedRates.of(counts)
        >>> [round(rate, 4) for rate in (rates.first_position, rates.per_drafted, rates.iid)]
        [0.093, 0.0775, 0.2]
        """
        size = np.arange(len(counts))
        drafts, begun = float(counts.sum()), float(counts[1:].sum())
        drafted, accepted = float(counts.sum(axis=1) @ size), float(counts.sum(axis=0) @ size)
        rejecting = drafts - float(np.trace(counts))
        return cls(
            first_position=float(counts[:, 1:].sum()) / begun if begun else 0.0,
            per_drafted=accepted / drafted if drafted else 0.0,
            iid=accepted / (accepted + rejecting) if accepted + rejecting > 0 else 0.0,
            length=len(counts) - 1,
            drafts=drafts,
            drafted=drafted,
            accepted=accepted,
            rejecting=rejecting,
        )


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How one verifier receives one drafter's tokens.

    Attributes
    ----------
    survival : tuple of float
        S(0) ... S(L), non-increasing, S(0) = 1.
    trials : tuple of int
        Drafts at risk at each of the L positions (the counts behind each ratio); empty if unknown.
    joint : tuple of tuple of float or None
        ``joint[n][m]``, probability that n tokens are proposed and m accepted when L are asked for;
        None for a drafter that always proposes what it is asked for.
    iid : float or None
        A single rate that stands for the whole curve, so that any length can be read; None if the curve
        was measured.
    """

    survival: tuple[float, ...]
    trials: tuple[int, ...] = ()
    joint: tuple[tuple[float, ...], ...] | None = None
    iid: float | None = None

    def __post_init__(self) -> None:
        """Refuse curves that are not survival curves."""
        curve = np.asarray(self.survival, dtype=float)
        if curve.ndim != 1 or curve.size < 2 or curve[0] != 1 or not np.all(np.isfinite(curve)):
            raise InvalidArgumentError("expected a survival curve that starts with S(0) = 1 and has at least S(1)")
        if np.any(np.diff(curve) > 1e-12) or curve.min() < 0:
            raise InvalidArgumentError("expected a non-increasing survival curve of at least 0")

    @classmethod
    def from_rate(cls, rate: float) -> Acceptance:
        """Return the law in which every token is accepted with probability `rate`, independently."""
        if not 0 <= rate <= 1:
            raise InvalidArgumentError(f"expected an acceptance rate between 0 and 1; got {rate}")
        return cls((1.0, float(rate)), iid=float(rate))

    @classmethod
    def from_joint(cls, joint: NDArray[np.float64], *, trials: tuple[int, ...] = ()) -> Acceptance:
        """Return the law of a drafter that may propose less than asked; `joint` is [L+1, L+1], n by m."""
        accepted = joint.sum(axis=0)
        survival = np.concatenate([[1.0], 1.0 - np.cumsum(accepted)[:-1]])
        rows = tuple(tuple(float(p) for p in row) for row in joint)
        return cls(tuple(np.minimum.accumulate(np.clip(survival, 0, 1)).tolist()), trials, rows)

    @property
    def max_length(self) -> int | None:
        """The longest draft that the law covers; None for any."""
        return None if self.iid is not None else len(self.survival) - 1

    @property
    def rate(self) -> float:
        """The iid rate that EWIF needs: accepted / (accepted + rejecting drafts)."""
        if self.iid is not None:
            return self.iid
        accepted = sum(self.survival[1:])
        rejected = 1.0 - self.survival[-1]
        if self.joint is not None:  # a short proposal that was fully accepted rejected nothing
            rejected -= sum(self.joint[n][n] for n in range(len(self.joint) - 1))
        return accepted / (accepted + rejected) if accepted + rejected > 0 else 0.0

    def curve(self, length: int) -> Floats:
        """Return S(0) ... S(length), shape [length + 1].

        Raises
        ------
        PredictionError
            If `length` is beyond what was measured.
        """
        if self.iid is not None:
            return np.asarray(self.iid ** np.arange(length + 1))
        if length >= len(self.survival):
            raise PredictionError(
                f"expected drafts of at most {len(self.survival) - 1} tokens, as profiled; got {length}: "
                "shorten the draft or profile longer outputs"
            )
        return np.asarray(self.survival[: length + 1])

    def law(self, length: int) -> Floats:
        """Return the joint law of (proposed n, accepted m) when `length` tokens are asked for.

        Returns
        -------
        ndarray, shape [length + 1, length + 1]
            Probabilities that sum to 1; for a drafter that always proposes what it is asked for only
            row `length` is filled.
        """
        law = np.zeros((length + 1, length + 1))
        curve = self.curve(length)
        if self.joint is None:
            law[length] = curve - np.append(curve[1:], 0.0)
            return law
        joint = np.asarray(self.joint)
        places = np.minimum(np.arange(len(joint)), length)
        np.add.at(law, (places[:, np.newaxis], places), joint)
        return law

    def published(self, length: int) -> PublishedRates:
        """Return the three published definitions of the rate for drafts of `length` tokens.

        Counts are what as many drafts as there are starting positions behind the law give on average.

        Examples
        --------
        >>> rates = Acceptance((1.0, 0.5, 0.4), trials=(100, 50)).published(2)
        >>> rates.first_position, rates.per_drafted, round(rates.iid, 3), round(rates.accepted)
        (0.5, 0.45, 0.6, 90)
        """
        return PublishedRates.of(self.law(length) * (self.trials[0] if self.trials and self.trials[0] else 1))

    def as_iid(self) -> Acceptance:
        """Return the law with the single rate in place of the curve; short proposals keep their lengths."""
        return Acceptance.from_rate(self.rate)


def survival_from_runs(last: Floats, step: Floats, prompt: Ints, length: int) -> tuple[Floats, Ints]:
    """Return the survival curve of drafts that start anywhere along a trajectory, and the counts behind it.

    ``S(m)`` is the mean over starts of ``step(x_1) ... step(x_{m-1}) last(x_m)``, the unbiased estimator
    under sampling: `step` is the acceptance of the token that was realised, min(1, q/p), and `last` may be its
    expectation, the overlap of the two laws. Each ratio S(m) / S(m-1) is taken over the drafts that got so far
    inside one prompt's output, so drafts cut by its end bias nothing.

    Parameters
    ----------
    last, step : ndarray, shape [positions]
        Acceptance at each position; both 0 or 1, and equal, when greedy.
    prompt : ndarray of int, shape [positions]
        Which prompt each position belongs to, ascending.
    length : int
        The longest draft.

    Returns
    -------
    survival : ndarray, shape [length + 1]
    trials : ndarray of int, shape [length]
        Starting positions behind each ratio.
    """
    survival, trials = np.ones(length + 1), np.zeros(length, dtype=np.int64)
    weight = np.ones(len(last))
    for m in range(length):
        starts = np.arange(max(len(last) - m, 0))
        inside = starts[prompt[starts] == prompt[starts + m]]
        reached = weight[inside]
        total = float(reached.sum())
        trials[m] = int(np.count_nonzero(reached > 0))
        survival[m + 1] = survival[m] * (float((reached * last[inside + m]).sum()) / total if total > 0 else 0.0)
        weight = np.zeros_like(weight)
        weight[inside] = reached * step[inside + m]
    return survival, trials


@dataclass(frozen=True, slots=True)
class Strays:
    """What became of drafts that started where the text had left the target's own output already.

    Attributes
    ----------
    counts : mapping of (int, int, int) to int
        Drafts by tokens asked for, proposed and accepted.
    """

    counts: Mapping[tuple[int, int, int], int]

    def __post_init__(self) -> None:
        """Refuse what cannot have been counted."""
        for (asked, proposed, accepted), drafts in self.counts.items():
            if not asked >= proposed >= accepted >= 0 or drafts < 1:
                raise InvalidArgumentError(
                    "expected counts of drafts with asked >= proposed >= accepted >= 0; "
                    f"got {drafts} of ({asked}, {proposed}, {accepted})"
                )

    @property
    def drafts(self) -> int:
        """How many drafts were counted."""
        return sum(self.counts.values())

    def __add__(self, other: Strays) -> Strays:
        """Return the counts of both."""
        return Strays(dict(Counter(self.counts) + Counter(other.counts)))

    def survival(self, prior: Acceptance, length: int, *, weight: float) -> tuple[Floats, Floats]:
        """Return the chances that at least 0, 1, ... `length` tokens are proposed, and that they are accepted.

        Every step is the share counted, drawn towards that of `prior` as if `weight` more drafts had come to it and
        fared as the prior says (the mean of a beta posterior). How much is accepted is taken not to depend on how
        much is proposed.

        Parameters
        ----------
        prior : Acceptance
            The law on the target's trajectory.
        length : int
            The longest draft; steps past the prior's longest are its last one's.
        weight : float
            Drafts that the prior is worth.

        Returns
        -------
        proposed, accepted : ndarray, shape [length + 1]
            Non-increasing from 1.

        Examples
        --------
        >>> strays = Strays({(2, 2, 0): 6, (2, 2, 2): 2})
        >>> strays.survival(Acceptance.from_rate(0.75), 2, weight=8)[1].round(3).tolist()
        [1.0, 0.5, 0.4]
        """
        asked, proposed, accepted = np.array(list(self.counts) or [(0, 0, 0)]).T
        drafts = np.array(list(self.counts.values()) or [0])
        offered, taken = _steps(prior, length)
        for m in range(1, length + 1):
            open_ = (asked >= m) & (proposed >= m - 1)
            judged = (proposed >= m) & (accepted >= m - 1)
            offered[m - 1] = _shrunk(drafts[open_ & (proposed >= m)], drafts[open_], offered[m - 1], weight)
            taken[m - 1] = _shrunk(drafts[judged & (accepted >= m)], drafts[judged], taken[m - 1], weight)
        return np.cumprod(np.append(1.0, offered)), np.cumprod(np.append(1.0, taken))


def _shrunk(good: Ints, tried: Ints, prior: float, weight: float) -> float:
    total = float(tried.sum()) + weight
    return (float(good.sum()) + weight * prior) / total if total > 0 else prior


def _steps(law: Acceptance, length: int) -> tuple[Floats, Floats]:
    """Return, per position 1 ... length, the chance that one more token is proposed, and that it is accepted."""
    known = length if law.max_length is None else min(length, law.max_length)
    joint = law.law(known)  # [proposed, accepted]
    places = np.arange(1, known + 1)
    offered = joint[::-1].sum(axis=1).cumsum()[::-1]
    taken = np.array([joint[m:, m:].sum() for m in places])
    judged = np.array([joint[m:, m - 1 :].sum() for m in places])
    steps = _quotients(offered[1:], offered[:-1]), _quotients(taken, judged)
    return tuple(np.append(step, np.full(length - known, step[-1])) for step in steps)  # type: ignore[return-value]


def _quotients(above: Floats, below: Floats) -> Floats:
    """Return the quotients; one without a case is that of the position before it."""
    steps = np.divide(above, below, out=np.full(len(above), np.nan), where=below > 1e-12)
    known = np.maximum.accumulate(np.where(np.isnan(steps), -1, np.arange(len(steps))))
    return np.asarray(np.clip(np.where(known < 0, 0.0, steps[np.maximum(known, 0)]), 0, 1))


@dataclass(frozen=True, slots=True)
class Traces:
    """What every model said along the target's own output, position by position.

    All arrays have one entry per position; positions of one prompt are consecutive.

    Attributes
    ----------
    tokens : ndarray of int
        The target's output.
    prompt : ndarray of int
        Which prompt a position belongs to, ascending from 0.
    context : ndarray of int
        Tokens before the position (prompt included).
    choice : mapping of str to ndarray of int
        Per model, its most likely token there.
    probability : mapping of str to ndarray of float
        Per model, the probability (after temperature and filters) of the target's token there.
    top : mapping of str to ndarray of float
        Per model, the probability of its most likely token (unprocessed logits).
    surprise : mapping of (str, str) to ndarray of float
        Per (small, large), negative log-likelihood in nats of small's most likely token under large.
    overlap : mapping of (str, str) to ndarray of float
        Per (drafter, verifier), sum over the vocabulary of min(p, q); empty when greedy.
    proposed : ndarray of int or None
        Tokens that the lookup drafter proposes there when asked for as many as it can.
    lookup_accepted : mapping of str to ndarray of int
        Per verifier, how many of those are accepted.
    ratio : mapping of (str, str) to ndarray of float
        Per (drafter, target), min(1, q/p) of the realised token; empty when greedy.
    """

    tokens: Ints
    prompt: Ints
    context: Ints
    choice: Mapping[str, Ints]
    probability: Mapping[str, Floats] = field(default_factory=lambda: MappingProxyType({}))
    top: Mapping[str, Floats] = field(default_factory=lambda: MappingProxyType({}))
    surprise: Mapping[tuple[str, str], Floats] = field(default_factory=lambda: MappingProxyType({}))
    overlap: Mapping[tuple[str, str], Floats] = field(default_factory=lambda: MappingProxyType({}))
    proposed: Ints | None = None
    lookup_accepted: Mapping[str, Ints] = field(default_factory=lambda: MappingProxyType({}))
    ratio: Mapping[tuple[str, str], Floats] = field(default_factory=lambda: MappingProxyType({}))

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self.tokens)

    @property
    def prompts(self) -> int:
        """The number of prompts."""
        return int(self.prompt[-1]) + 1 if len(self.prompt) else 0

    def take(self, prompts: Ints) -> Traces:
        """Return the traces of the given prompts (repeats allowed), numbered anew in that order."""
        rows = [np.flatnonzero(self.prompt == index) for index in prompts]
        where = np.concatenate(rows)

        def pick(mapping: Mapping[Any, NDArray[Any]]) -> dict[Any, NDArray[Any]]:
            return {key: values[where] for key, values in mapping.items()}

        return Traces(
            self.tokens[where],
            np.repeat(np.arange(len(rows)), [len(row) for row in rows]),
            self.context[where],
            pick(self.choice),
            pick(self.probability),
            pick(self.top),
            pick(self.surprise),
            pick(self.overlap),
            None if self.proposed is None else self.proposed[where],
            pick(self.lookup_accepted),
            pick(self.ratio),
        )

    def agreement(self, drafter: str, verifier: str) -> Floats:
        """Return the probability, per position, that `verifier` accepts a token of `drafter`.

        Greedy traces give 0 or 1 (equal choices); sampled ones the overlap of the two laws.
        """
        if (drafter, verifier) in self.overlap:
            return self.overlap[drafter, verifier]
        return np.asarray(self.choice[drafter] == self.choice[verifier], dtype=float)

    def acceptance(self, drafter: str, verifier: str, length: int) -> Acceptance:
        """Return the law of (drafter, verifier) for drafts of up to `length` tokens, with its counts."""
        if drafter in self.choice:
            last = self.agreement(drafter, verifier)
            step = self.ratio.get((drafter, verifier), last)
            survival, trials = survival_from_runs(last, step, self.prompt, length)
            return Acceptance(tuple(survival.tolist()), tuple(trials.tolist()))
        if self.proposed is None:
            raise PredictionError(f"expected traces of {drafter}; add it with --draft {drafter} --into profile.json")
        return self._lookup_acceptance(self.proposed, self.lookup_accepted[verifier], length)

    def _lookup_acceptance(self, proposed: Ints, accepted: Ints, length: int) -> Acceptance:
        """Return the joint law of (proposed, accepted); runs cut by the end of an output count as at risk only."""
        proposed = np.minimum(proposed, length)
        accepted = np.minimum(accepted, proposed)
        _, first, counts = np.unique(self.prompt, return_index=True, return_counts=True)
        remaining = np.repeat(first + counts, counts) - np.arange(len(self))
        pooled, trials = _ratios(proposed, accepted, remaining, length)
        joint = np.zeros((length + 1, length + 1))
        for n in np.unique(proposed):
            group = proposed == n
            own, judged = _ratios(proposed[group], accepted[group], remaining[group], length)
            survival = np.concatenate([[1.0], np.cumprod(np.where(judged > 0, own, pooled)[:n]), [0.0]])
            joint[n, : n + 1] = group.mean() * (survival[:-1] - survival[1:])
        return Acceptance.from_joint(joint, trials=tuple(trials.tolist()))


def _ratios(proposed: Ints, accepted: Ints, remaining: Ints, length: int) -> tuple[Floats, Ints]:
    """Return, per position 1 ... length, the share accepted of the tokens that came to be judged, and their number."""
    shares, counts = np.zeros(length), np.zeros(length, dtype=np.int64)
    for m in range(1, length + 1):
        judged = (proposed >= m) & (accepted >= m - 1) & (remaining >= m)
        counts[m - 1] = np.count_nonzero(judged)
        shares[m - 1] = np.mean(accepted[judged] >= m) if judged.any() else 0.0
    return shares, counts
