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
"""The least change of a kind of pass that counts, as a fraction: a quiet machine comes back to within this."""

_LOUDEST = 0.5
"""Costs that scatter more than this say nothing, so they excuse nothing either."""

_SURE = 3.0
"""Standard errors that a change has to be beyond: several kinds of pass of several models are judged at once."""

_ERROR = 0.93
"""Standard error of a median over the interquartile range, for one timing of a normal law."""

_DECODING = 4
"""Most new tokens of the passes that decoding consists of: drafting, catching up, and verifying short drafts."""

_FEWEST, _MOST = 5, 25
_PER_CENT = 100


@dataclass(frozen=True, slots=True)
class Drift:
    """One model's pass costs, then and now.

    Every kind of pass is judged by itself: passes of one token, which decoding mostly consists of, may have changed
    where long ones have not, and a mean over all of them would hide that.

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
    def tolerances(self) -> tuple[float, ...]:
        """Per kind of pass, the change that noise explains.

        Three standard errors of the two medians together, as the interquartile ranges tell them; at least 10 %, and
        at most half.
        """
        pairs = zip(self.stored, self.measured, strict=True)
        errors = [_SURE * math.hypot(_standard_error(then), _standard_error(now)) for then, now in pairs]
        return tuple(min(max(TOLERANCE, error), _LOUDEST) for error in errors)

    @property
    def moved(self) -> tuple[tuple[int, float], ...]:
        """New tokens and change of every kind of pass that changed by more than noise explains."""
        rows = zip(self.stored, self.changes, self.tolerances, strict=True)
        return tuple((then.tokens, change) for then, change, limit in rows if not _within(change, limit))

    @property
    def holds(self) -> bool:
        """Whether no kind of pass changed by more than noise explains, both ways."""
        return not self.moved


def _within(change: float, tolerance: float) -> bool:
    return abs(math.log1p(change)) <= math.log1p(tolerance)


def _standard_error(sample: CostSample) -> float:
    """Return the standard error of a sample's median as a fraction of it."""
    return _ERROR * sample.spread / math.sqrt(len(sample.seconds))


def recheck(
    profile: Profile,
    models: Mapping[str, Model],
    *,
    seconds: float = 20.0,
    measure: Callable[..., Iterable[CostRecord]] = measure_costs,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Drift, ...]:
    """Return how pass costs changed: passes of every network, timed again in turns.

    Those of one to four tokens, which decoding consists of, and the middle and the longest one of the profile. The
    context is the one nearest to those that the workload visited.

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
        Called with (stage, done, total): per cent of the timings or of the time, whichever ends first.

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
    report = (lambda *_: None) if progress is None else progress
    started, share = perf_counter(), 0
    for record in records:
        if record.repeat >= _FEWEST and perf_counter() - started > seconds:
            break
        timings.setdefault((record.model, record.tokens, record.context), []).append(record.seconds)
        share = max(share, _share(record.repeat, perf_counter() - started, seconds))
        report("pass costs", share, _PER_CENT)
    report("pass costs", _PER_CENT, _PER_CENT)
    return tuple(Drift(name, samples, _now(name, samples, timings)) for name, samples in chosen.items())


def _share(repeat: int, spent: float, seconds: float) -> int:
    """Return how far along the timings are, in per cent, where they stop at a number of them or after a time."""
    by_time = min(repeat / _FEWEST, spent / seconds) if seconds else repeat / _FEWEST
    return min(math.floor(_PER_CENT * max(repeat / _MOST, by_time)), _PER_CENT - 1)


def _chosen(profile: Profile, name: str) -> tuple[CostSample, ...]:
    """Return a model's short passes, the middle and the longest one, at the context nearest to those visited."""
    taken = profile.samples.get(name, ())
    if not taken:
        raise ProfileError(f"expected timings of {name} in the profile; got none: profile again")
    visited = profile.context
    contexts = sorted({sample.context for sample in taken})
    near = contexts[len(contexts) // 2] if visited is None else min(contexts, key=lambda c: abs(c - visited))
    row = sorted((sample for sample in taken if sample.context == near), key=lambda sample: sample.tokens)
    short = [index for index, sample in enumerate(row) if sample.tokens <= _DECODING]
    return tuple(row[index] for index in sorted({0, *short, len(row) // 2, len(row) - 1}))


def _now(
    name: str, samples: Sequence[CostSample], timings: Mapping[tuple[str, int, int], Sequence[float]]
) -> tuple[CostSample, ...]:
    return tuple(CostSample(s.tokens, s.context, tuple(timings[name, s.tokens, s.context])) for s in samples)
