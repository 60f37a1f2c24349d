"""A profile as the arrays that the searches read, one per family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from hsdopt.acceptance import Acceptance
from hsdopt.checks import FloatArray
from hsdopt.costs import CostCurve
from hsdopt.errors import PredictionError
from hsdopt.latency.hierarchy import rounds_tables_from_survival
from hsdopt.plan import LOOKUP
from hsdopt.profiles import Profile
from hsdopt.solvers.adaptive import AdaptiveArrays
from hsdopt.solvers.hierarchy import HierarchyArrays

__all__ = ["ProfileArrays", "Stacks", "curve_table", "profile_arrays"]


@dataclass(frozen=True)
class ProfileArrays:
    """Costs and laws of a target and some drafters, drafters numbered 0, 1, ..., the target last.

    Entry 0 of an axis of draft lengths L or tokens T stands for 1. Pairs of a drafter and a verifier that must
    not be used have an infinite verify cost.

    Attributes
    ----------
    names : tuple of str
        Model names, the target last.
    proposed : ndarray, shape [drafter, verifier, L, longest + 1]
        Law of the tokens that a segment holds when L are asked for.
    stops : ndarray, shape [drafter, verifier, L, longest + 1]
        Chances that a token of the segment is rejected behind 0, 1, ... accepted ones.
    goes_on : ndarray, shape [drafter, verifier, L, longest + 1]
        Chances that the segment holds 0, 1, ... tokens and all are accepted.
    verify : ndarray, shape [drafter, verifier, L]
        Expected seconds of one verify pass of a draft of L tokens asked for.
    passes : ndarray, shape [model, 2 longest + 2]
        Seconds of a pass over 1, 2, ... new tokens; in proportion to the tokens beyond what was profiled.
    draft : ndarray, shape [drafter, T]
        Seconds of a request that a model serves alone.
    """

    names: tuple[str, ...]
    proposed: FloatArray
    stops: FloatArray
    goes_on: FloatArray
    verify: FloatArray
    passes: FloatArray
    draft: FloatArray

    @property
    def longest(self) -> int:
        """The longest draft."""
        return int(self.draft.shape[1])

    @property
    def networks(self) -> list[int]:
        """Numbers of the drafters that make passes, and so can verify."""
        return [index for index, name in enumerate(self.names[:-1]) if name != LOOKUP]

    @cached_property
    def accepted(self) -> FloatArray:
        """Law of the accepted tokens of a segment, [drafter, verifier, L, longest + 1]."""
        return self.stops + self.goes_on

    @cached_property
    def gain(self) -> FloatArray:
        """Expected accepted tokens of a segment, [drafter, verifier, L]."""
        return np.asarray(self.accepted @ np.arange(self.longest + 1.0))

    @cached_property
    def survival(self) -> FloatArray:
        """S(0) ... S(longest), [drafter, verifier, longest + 1]."""
        longest = self.accepted[:, :, -1]
        return np.asarray(longest[..., ::-1].cumsum(axis=-1)[..., ::-1])

    @cached_property
    def rounds(self) -> FloatArray:
        """Expected verify passes per request of T tokens, [verifier, drafter, L, T]."""
        return np.array(
            [rounds_tables_from_survival(self.survival[:, i], self.longest) for i in range(len(self.draft))]
        )

    @cached_property
    def unread(self) -> FloatArray:
        """Extra seconds per round for a lone drafter's own last token after a draft accepted whole, [j, i, L]."""
        extra = self.passes[:-1, 1] - self.passes[:-1, 0]
        extra[[index for index, name in enumerate(self.names[:-1]) if name == LOOKUP]] = 0.0
        return np.asarray(self.survival[..., 1:] * extra[:, np.newaxis, np.newaxis])

    def stacks(self, required: Sequence[int] = ()) -> Stacks:
        """Return what the search for hierarchies that use all the `required` drafters reads.

        A network is two drafters to the search, one that drafts alone and one that verifies drafts, since only
        the first has its catch-up on the edge; and each of these is one per set of required models at or below it.
        """
        bits = {model: 1 << place for place, model in enumerate(required)}
        every = (1 << len(bits)) - 1
        drafters = range(len(self.draft))
        nodes = [_Node(model, bits.get(model, 0), stacked=False) for model in drafters]
        nodes += [
            _Node(model, mask, stacked=True)
            for model, mask in product(self.networks, range(every + 1))
            if mask & bits.get(model, 0) == bits.get(model, 0) and len(self.draft) > 1
        ]
        models = np.array([node.model for node in nodes], dtype=np.intp)
        masks = np.array([node.mask for node in nodes], dtype=np.intp)
        stacked = np.array([node.stacked for node in nodes], dtype=bool)
        own = np.array([bits.get(node.model, 0) for node in nodes], dtype=np.intp)
        # a drafter's set and the verifier's own bit make the verifier's set
        usable = stacked[np.newaxis] & (models[:, np.newaxis] != models) & ((masks[:, np.newaxis] | own) == masks)
        usable = np.append(usable, (masks == every)[:, np.newaxis], axis=1)
        columns = [*models, len(self.names) - 1]
        verify = self.verify[models][:, columns] + np.where(
            stacked[:, np.newaxis, np.newaxis], 0.0, self.unread[models][:, columns]
        )
        rounds = self.rounds[:, models] if len(nodes) else self.rounds
        return Stacks(
            HierarchyArrays(
                rounds=lambda verifier: rounds[models[verifier]],
                verify=np.where(usable[..., np.newaxis], verify, np.inf),
                draft=np.where(stacked[:, np.newaxis], np.inf, self.draft[models]),
                tokens=1.0 + self.gain[models, -1],
                autoregression=float(self.passes[-1, 0]) if every == 0 else np.inf,
                order="any",
            ),
            tuple(models.tolist()),
        )

    def take(self, drafters: Sequence[int]) -> ProfileArrays:
        """Return the arrays of some of the drafters."""
        rows = list(drafters)
        pairs = np.ix_(rows, [*rows, len(self.names) - 1])
        return ProfileArrays(
            (*(self.names[row] for row in rows), self.names[-1]),
            self.proposed[pairs],
            self.stops[pairs],
            self.goes_on[pairs],
            self.verify[pairs],
            self.passes[[*rows, -1]],
            self.draft[rows],
        )

    def with_drafter(self, name: str, passes: FloatArray, rate: float, *, reach: float) -> ProfileArrays:
        """Return the arrays with one more drafter, the last, that drafts for the target alone at an iid rate.

        Parameters
        ----------
        name : str
        passes : ndarray, shape [2 longest + 2]
            Seconds of its pass over 1, 2, ... new tokens.
        rate : float
        reach : float
            The longest draft that the target can verify.
        """
        number, longest = len(self.draft), self.longest
        proposed, stops, goes_on = (
            np.insert(np.insert(law, number, 0.0, axis=0), number, 0.0, axis=1)
            for law in (self.proposed, self.stops, self.goes_on)
        )
        verify = np.insert(np.insert(self.verify, number, np.inf, axis=0), number, np.inf, axis=1)
        for law in (proposed, stops):
            law[number, :, :, 0] = law[:, number, :, 0] = 1.0
        pair = number, -1
        proposed[pair], stops[pair], goes_on[pair] = _segments(Acceptance.from_rate(rate), longest)
        usable = np.arange(1, longest + 1) <= reach
        verify[number, -1] = np.where(usable, self.passes[-1, 1 : longest + 1], np.inf)
        return ProfileArrays(
            (*self.names[:-1], name, self.names[-1]),
            proposed,
            stops,
            goes_on,
            verify,
            np.insert(self.passes, number, passes, axis=0),
            np.append(self.draft, passes[:1] * np.arange(1.0, longest + 1)[np.newaxis], axis=0),
        )

    def adaptive(self, order: Sequence[int]) -> AdaptiveArrays:
        """Return what the search for policies reads, drafters in the given order."""
        columns = [*order, len(self.names) - 1]
        lookups = np.array([self.names[model] == LOOKUP for model in order], dtype=bool)
        chosen = np.asarray(order, dtype=np.intp)
        return AdaptiveArrays(
            survival=lambda verifier: self.survival[chosen[:verifier], columns[verifier]],
            verify=(self.verify + self.unread)[chosen][:, columns],
            step=np.append(np.where(lookups, np.inf, self.passes[chosen, 0]), self.passes[-1, 0]),
            at_once=np.where(lookups[:, np.newaxis], self.draft[chosen], np.inf),
        )


@dataclass(frozen=True, slots=True)
class Stacks:
    """Arrays for the search for hierarchies, and the model that each of its drafters stands for."""

    arrays: HierarchyArrays
    models: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Node:
    model: int
    mask: int
    stacked: bool


def profile_arrays(
    profile: Profile, drafters: Sequence[str], max_draft_length: int, *, context: float | None = None
) -> ProfileArrays:
    """Return the arrays of the target and `drafters`; pairs and lengths that were not profiled are left unused.

    Raises
    ------
    PredictionError
        If a model or the context was not profiled.
    """
    names = (*drafters, profile.target)
    place = profile.context if context is None else context
    laws = {
        (j, i): law
        for j, drafter in enumerate(names[:-1])
        for i, verifier in enumerate(names)
        if verifier not in (drafter, LOOKUP) and (law := _law(profile, drafter, verifier)) is not None
    }
    longest = _longest(profile, names, max_draft_length)
    shape = (len(names) - 1, len(names), longest)
    proposed, stops, goes_on = (np.zeros((*shape, longest + 1)) for _ in range(3))
    stops[..., 0] = proposed[..., 0] = 1.0
    verify = np.full(shape, np.inf)
    passes = np.array([curve_table(profile.cost(name), 2 * longest + 2, place) for name in names])
    for (j, i), law in laws.items():
        proposed[j, i], stops[j, i], goes_on[j, i] = _segments(law, longest)
        reach = min(longest, profile.cost(names[i]).max_tokens - 1, law.max_length or longest)
        usable = np.arange(1, longest + 1) <= reach
        verify[j, i] = np.where(usable, proposed[j, i] @ passes[i, : longest + 1], np.inf)
    alone = passes[:-1, :1] * np.arange(1.0, longest + 1)
    lookups = [j for j, name in enumerate(names[:-1]) if name == LOOKUP]
    alone[lookups] = passes[lookups, :1]  # one request, however many tokens
    return ProfileArrays(names, proposed, stops, goes_on, verify, passes, alone)


def _law(profile: Profile, drafter: str, verifier: str) -> Acceptance | None:
    """Return the law of a pair, None if it was not measured."""
    try:
        return profile.acceptance(drafter, verifier)
    except PredictionError:
        return None


def _longest(profile: Profile, names: Sequence[str], max_draft_length: int) -> int:
    """Return the longest draft that some verifier can take in."""
    reach = max(profile.cost(name).max_tokens - 1 for name in names if name != LOOKUP)
    return max(1, int(min(max_draft_length, reach)))


def curve_table(curve: CostCurve, size: int, context: float | None) -> FloatArray:
    """Return c(1) ... c(size), shape [size]; beyond the curve in proportion to the tokens."""
    known = int(min(size, curve.max_tokens))
    table = curve.table(known, context)
    return np.asarray(np.append(table, table[-1] * np.arange(known + 1, size + 1) / known))


def _segments(law: Acceptance, longest: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the laws `proposed`, `stops` and `goes_on` of one pair, [L, longest + 1] each."""
    joint = _joint(law, longest)
    proposed, stops, goes_on = (np.zeros((longest, longest + 1)) for _ in range(3))
    counts = np.arange(len(joint))
    for length in range(1, longest + 1):
        held = np.minimum(counts, length)
        kept = np.minimum(counts[np.newaxis], held[:, np.newaxis])  # accepted, by (proposed, accepted)
        whole = kept == held[:, np.newaxis]
        row = length - 1
        np.add.at(proposed[row], held, joint.sum(axis=1))
        np.add.at(goes_on[row], kept[whole], joint[whole])
        np.add.at(stops[row], kept[~whole], joint[~whole])
    return proposed, stops, goes_on


def _joint(law: Acceptance, longest: int) -> NDArray[np.float64]:
    """Return the joint law of (proposed, accepted); curves that end early accept nothing beyond their end."""
    if law.joint is not None:
        return np.asarray(np.clip(np.asarray(law.joint, dtype=float), 0.0, None))
    covered = longest if law.max_length is None else min(longest, law.max_length)
    curve: FloatArray = np.append(law.curve(covered), np.zeros(longest - covered))
    joint = np.zeros((longest + 1, longest + 1))
    joint[longest] = curve - np.append(curve[1:], 0.0)
    return joint
