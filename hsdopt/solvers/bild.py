"""Big Little Decoder: its thresholds as a frontier of speed against faithfulness, from traces.

Lowest latency alone would always let the small model write everything, so a setting is chosen under a bound on the
share of the output's tokens that differ from the target's.

Source: Kim et al., Big Little Decoder, arXiv 2302.07863.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from hsdopt.acceptance import Traces
from hsdopt.errors import PredictionError
from hsdopt.latency.expected import expected_latency
from hsdopt.plan import LOOKUP, Bild
from hsdopt.profiles import Profile
from hsdopt.solvers.limits import Limits
from hsdopt.solvers.solution import Candidate, FrontierPoint

__all__ = ["deviation", "frontier"]

_FALLBACKS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.55, 0.7, 0.85)  # shares of positions at which the small model is unsure
_ROLLBACKS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)  # shares of its tokens that pass review
_STINTS = (5, 10)


def frontier(profile: Profile, limits: Limits, *, context: float | None = None) -> tuple[FrontierPoint, ...]:
    """Return the settings that no other beats in both speed and faithfulness, the most faithful first.

    Parameters
    ----------
    profile : Profile
        With traces of the small models' confidence.
    limits : Limits
        Models and memory that may be used.
    context : float, optional
        As in `expected_latency`.

    Raises
    ------
    PredictionError
        If no drafter has such traces, or they are of sampled outputs.
    """
    traces = profile.traces
    small = [] if traces is None else [n for n in limits.drafters if n != LOOKUP and _traced(traces, n, profile.target)]
    if traces is None or not small:
        raise PredictionError(
            "expected traces of a small model's confidence and surprise for family bild; none in this profile: "
            "profile it together with the target"
        )
    points = []
    for name in small:
        for plan in _settings(traces, name, profile.target):
            if limits.admits(plan, profile):
                estimate = expected_latency(plan, profile, context=context)
                candidate = Candidate(plan, "bild", estimate.seconds_per_token, estimate)
                points.append(FrontierPoint(candidate, estimate.speedup, deviation(plan, traces)))
    return _undominated(points)


def _traced(traces: Traces, small: str, target: str) -> bool:
    return (small, target) in traces.surprise and small in traces.top and small in traces.choice


def _settings(traces: Traces, small: str, target: str) -> list[Bild]:
    """Return settings whose thresholds stand at even shares of what was traced."""
    fallbacks = np.quantile(traces.top[small], _FALLBACKS)
    with np.errstate(invalid="ignore"):  # between two infinite surprises stands none, which is rounded to infinity
        rollbacks = [*np.quantile(traces.surprise[small, target], _ROLLBACKS), np.inf]
    values = product(_rounded(fallbacks, 3), _rounded(rollbacks, 2), _STINTS)
    return [Bild(target, small, min(fallback, 1.0), rollback, stint) for fallback, rollback, stint in values]


def _rounded(values: np.ndarray | list[float], digits: int) -> list[float]:
    return sorted({round(float(value), digits) if np.isfinite(value) else float("inf") for value in values})


def deviation(plan: Bild, traces: Traces) -> float:
    """Return the share of the output's tokens that are not the target's most likely ones.

    The trajectory is walked round once, as `expected_latency` does, under "paper" semantics.

    Raises
    ------
    PredictionError
        If the traces of the pair are missing.
    """
    pair = (plan.small, plan.large)
    if not _traced(traces, *pair) or plan.large not in traces.choice:
        raise PredictionError(f"expected traces of {plan.small} under {plan.large} for bild(...); none in this profile")
    inner = np.flatnonzero(np.diff(traces.prompt, prepend=-1) == 0)
    doubts = traces.top[plan.small] < plan.fallback
    if plan.stride is not None:
        doubts = np.zeros_like(doubts)
    size = len(inner)
    # twice round, so that the last stint can run on
    unsure = _next(np.tile(doubts[inner], 2))
    refused = _next(np.tile((traces.surprise[pair] > plan.rollback)[inner], 2))
    differs = np.tile((traces.choice[plan.small] != traces.choice[plan.large])[inner], 2)
    before = np.concatenate([[0], np.cumsum(differs)])
    longest = size if plan.longest_run is None else plan.longest_run
    at = wrong = 0
    while at < size:
        end = min(int(unsure[at]), at + longest)
        kept = min(int(refused[at]), end)
        wrong += int(before[kept] - before[at])
        at = kept + 1
    return wrong / at if at else 0.0


def _next(marks: np.ndarray) -> np.ndarray:
    """Return, per position, where the next mark at or behind it is; the end if there is none."""
    places = np.where(marks, np.arange(len(marks)), len(marks))
    return np.asarray(np.minimum.accumulate(places[::-1])[::-1])


def _undominated(points: list[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Return the points that no other beats in both, by deviation."""
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda point: (point.deviation, point.candidate.seconds_per_token)):
        if not kept or point.candidate.seconds_per_token < kept[-1].candidate.seconds_per_token:
            kept.append(point)
    return tuple(kept)
