"""A profile as the arrays that the searches read, one per family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hsdopt.checks import FloatArray
from hsdopt.latency.hierarchy import rounds_tables_from_survival
from hsdopt.plan import LOOKUP
from hsdopt.profiles import Profile
from hsdopt.solvers.hierarchy import HierarchyArrays

__all__ = ["ProfileArrays", "profile_arrays"]


@dataclass(frozen=True, slots=True)
class ProfileArrays:
    """Costs and laws of a target and some drafters, drafters numbered 0, 1, ..., the target last.

    Entry 0 of an axis of draft lengths L or tokens T stands for 1.

    Attributes
    ----------
    names : tuple of str
        Model names, the target last.
    survival : ndarray, shape [drafter, verifier, longest + 1]
        S(0) ... S(longest); zero beyond S(0) where a pair must not be used.
    verify : ndarray, shape [drafter, verifier, longest]
        Expected seconds of one verify pass of a draft of L tokens asked for, with the edge-local part of
        catch-up; infinite where a pair must not be used.
    passes : ndarray, shape [model, longest + 1]
        Seconds of a pass over 1 ... longest + 1 new tokens.
    draft : ndarray, shape [drafter, longest]
        Seconds of a request that a model serves alone.
    """

    names: tuple[str, ...]
    survival: FloatArray
    verify: FloatArray
    passes: FloatArray
    draft: FloatArray

    @property
    def longest(self) -> int:
        """The longest draft."""
        return self.draft.shape[1]

    def hierarchy(self) -> HierarchyArrays:
        """Return what the search for hierarchies reads."""
        drafters = len(self.names) - 1
        tables = [rounds_tables_from_survival(self.survival[:, i], self.longest) for i in range(drafters)]
        return HierarchyArrays(
            rounds=lambda verifier: tables[verifier],
            verify=self.verify,
            draft=self.draft,
            tokens=np.asarray(self.survival[:, -1].cumsum(axis=1)[:, 1:]),
            autoregression=float(self.passes[-1, 0]),
            order="any",
        )


def profile_arrays(
    profile: Profile, drafters: Sequence[str], max_draft_length: int, *, context: float | None = None
) -> ProfileArrays:
    """Return the arrays of the target and `drafters`, for drafts as long as the profile can speak of.

    Raises
    ------
    PredictionError
        If a pair was not measured.
    """
    names = (*drafters, profile.target)
    longest = _longest(profile, names, max_draft_length)
    count = len(names)
    passes = np.array([profile.cost(name).table(longest + 1, context) for name in names])
    survival = np.zeros((count - 1, count, longest + 1))
    survival[..., 0] = 1.0
    verify = np.full((count - 1, count, longest), np.inf)
    for j, drafter in enumerate(names[:-1]):
        for i, verifier in enumerate(names):
            if verifier not in (drafter, LOOKUP):
                survival[j, i] = profile.acceptance(drafter, verifier).curve(longest)
                verify[j, i] = _verify(profile, drafter, verifier, passes[i]) + _catch_up(
                    drafter, passes[j], survival[j, i]
                )
    alone = passes[:-1, :1] * np.arange(1, longest + 1)
    lookups = [j for j, name in enumerate(names[:-1]) if name == LOOKUP]
    alone[lookups] = passes[lookups, :1]  # one request, however many tokens
    return ProfileArrays(names, survival, verify, passes, alone)


def _longest(profile: Profile, names: Sequence[str], max_draft_length: int) -> int:
    """Return the longest draft that costs and traces cover."""
    limits = [profile.cost(name).max_tokens - 1 for name in names if name != LOOKUP]
    if profile.traces is not None:
        limits.append(profile.max_draft_length)
    return max(1, int(min([max_draft_length, *limits])))


def _verify(profile: Profile, drafter: str, verifier: str, passes: FloatArray) -> FloatArray:
    """Return the expected seconds of a pass over drafts asked for as 1 ... longest tokens; short ones cost less."""
    law = profile.acceptance(drafter, verifier)
    lengths = range(1, len(passes))
    if law.joint is None:
        return passes[1:]
    return np.array([law.law(length).sum(axis=1) @ passes[: length + 1] for length in lengths])


def _catch_up(drafter: str, passes: FloatArray, survival: FloatArray) -> FloatArray:
    """Return the extra seconds per round for the drafter's own last token after a draft accepted whole."""
    if drafter == LOOKUP:
        return np.zeros(len(survival) - 1)
    return survival[1:] * (passes[1] - passes[0])
