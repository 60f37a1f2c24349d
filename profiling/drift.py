"""`recheck`: time a few kinds of pass again, and say whether a profile still holds here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from hsdopt.costs import CostSample
from hsdopt.errors import ProfileError
from hsdopt.plan import LOOKUP
from hsdopt.profiles import Profile
from hsdopt.profiling.cost import CostRecord, measure_costs
from hsdopt.runtime.model import Model

__all__ = ["TOLERANCE", "Drift", "recheck"]

TOLERANCE = 0.1
"""The least change of a model's pass costs that counts, as a fraction: a quiet machine comes back to within this."""

_LOUDEST = 0.5
"""Costs that scatter more than this say nothing, so they excuse nothing either."""

_FEWEST, _MOST = 5, 25


@dataclass(frozen=True, slots=True)
class Drift:
    """One model's pass costs, then and now.

    Attributes
    ----------
    model : str
    stored, measured : tuple of CostSample
        Timings of the same kinds of pass, in the profile and just now.
    """

    model: str
    stored: tuple[CostSample, ...]
    measured: tuple[CostSample, ...]

    @property
    def changes(self) -> tuple[float, ...]:
        """Per kind of pass, the change of the median as a fraction of the stored one."""
        pairs = zip(self.stored, self.measured, strict=True)
        return tuple(now.median / then.median - 1 for then, now in pairs)

    @property
    def change(self) -> float:
        """The change over all kinds of pass: their geometric mean."""
        return math.exp(float(np.mean(np.log1p(self.changes)))) - 1

    @property
    def tolerance(self) -> float:
        """The change that is still noise: 10 %, or the usual spread of the timings where that is larger, up to half."""
        spreads = [max(then.spread, now.spread) for then, now in zip(self.stored, self.measured, strict=True)]
        return min(max(TOLERANCE, float(np.median(spreads))), _LOUDEST)

    @property
    def holds(self) -> bool:
        """Whether passes cost what they did, within the tolerance both ways."""
        return abs(math.log1p(self.change)) <= math.log1p(self.tolerance)


def recheck(
    profile: Profile,
    models: Mapping[str, Model],
    *,
    seconds: float = 20.0,
    measure: Callable[..., Iterable[CostRecord]] = measure_costs,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Drift, ...]:
    """Return how pass costs changed: every network's shortest, middle and longest pass, timed again in turns.

    The context is the one nearest to those that the workload visited.

    Parameters
    ----------
    profile : Profile
    models : mapping of str to Model
        The profile's models.
    seconds : float
        When to stop; every pass is timed at least 5 times first.
    measure : callable
        Takes the place of `hsdopt.profiling.cost.measure_costs`.
    progress : callable, optional
        Called with (stage, done, total).

    Raises
    ------
    ProfileError
        If the profile has no timings.
    """
    chosen = {name: _chosen(profile, name) for name in reversed(profile.names) if name != LOOKUP}
    records = measure(
        {name: models[name] for name in chosen},
        tokens=sorted({sample.tokens for samples in chosen.values() for sample in samples}),
        contexts=sorted({sample.context for samples in chosen.values() for sample in samples}),
        repeats=_MOST,
        text=[1] if profile.traces is None else profile.traces.tokens.tolist(),
    )
    timings: dict[tuple[str, int, int], list[float]] = {}
    started = perf_counter()
    for record in records:
        if record.repeat >= _FEWEST and perf_counter() - started > seconds:
            break
        timings.setdefault((record.model, record.tokens, record.context), []).append(record.seconds)
        if progress is not None:
            progress("pass costs", record.repeat + 1, _MOST)
    return tuple(Drift(name, samples, _now(name, samples, timings)) for name, samples in chosen.items())


def _chosen(profile: Profile, name: str) -> tuple[CostSample, ...]:
    """Return a model's shortest, middle and longest pass at the context nearest to those visited."""
    taken = profile.samples.get(name, ())
    if not taken:
        raise ProfileError(f"expected timings of {name} in the profile; got none: profile again")
    visited = profile.context
    contexts = sorted({sample.context for sample in taken})
    near = contexts[len(contexts) // 2] if visited is None else min(contexts, key=lambda c: abs(c - visited))
    row = sorted((sample for sample in taken if sample.context == near), key=lambda sample: sample.tokens)
    return tuple(row[index] for index in sorted({0, len(row) // 2, len(row) - 1}))


def _now(
    name: str, samples: Sequence[CostSample], timings: Mapping[tuple[str, int, int], Sequence[float]]
) -> tuple[CostSample, ...]:
    return tuple(CostSample(s.tokens, s.context, tuple(timings[name, s.tokens, s.context])) for s in samples)
