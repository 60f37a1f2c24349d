"""Predictions of several plans by every predictor; only the command line sees them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hsdopt.plan import Plan
    from hsdopt.profiles import Profile
    from hsdopt.simulate import ReplayedRun

__all__ = [
    "CLOSED_FORM",
    "IID",
    "REPLAY",
    "REPLAY_BEFORE",
    "REPLAY_NOW",
    "SIMULATION",
    "Replayer",
    "measured_overhead",
    "predict",
    "replayer",
    "replays",
]

CLOSED_FORM = "closed form"
SIMULATION = "event simulation"
REPLAY = "trace replay"
IID = "constant-cost iid"
REPLAY_BEFORE = "trace replay, costs as profiled"
REPLAY_NOW = "trace replay, costs as of now"

_OUTPUTS = 400
"""Simulated outputs per plan."""


def predict(plans: Sequence[Plan], profile: Profile, *, seed: int = 0) -> dict[str, dict[str, float]]:
    """Return seconds per token by predictor and plan; a predictor that cannot speak of a plan leaves it out.

    Every predictor but the last speaks of outputs of the profile's length, the seconds outside the passes included
    if the profile measured them; "constant-cost iid" is the published
    model, for comparison: one cost per model, one acceptance rate per pair.
    """
    from hsdopt.latency import expected_latency
    from hsdopt.overhead import Overhead
    from hsdopt.simulate import simulate

    tokens = profile.setting.max_new_tokens - 1
    iid = profile.as_iid()
    known = measured_overhead(profile)
    beside = Overhead.of(profile) if known else Overhead()

    def closed(plan: Plan) -> float:
        return expected_latency(plan, profile, tokens=tokens, overhead=known).seconds_per_token

    def simulated(plan: Plan) -> float:
        run = simulate(plan, profile, tokens=_OUTPUTS, seed=seed)
        outside = beside.seconds(run.kinds_per_token, plan.target)
        return float(run.time_to_finish(tokens + 1, runs=_OUTPUTS).mean()) / tokens + outside

    return {
        CLOSED_FORM: _each(plans, closed),
        SIMULATION: _each(plans, simulated),
        REPLAY: {name: run.seconds_per_token for name, run in replays(plans, profile, seed=seed).items()},
        IID: _each(plans, lambda plan: expected_latency(plan, iid).seconds_per_token),
    }


def replays(plans: Sequence[Plan], profile: Profile, *, seed: int = 0) -> dict[str, ReplayedRun]:
    """Return the replay of every plan that the traces can speak of, by notation."""
    from hsdopt.errors import PredictionError
    from hsdopt.simulate import replay

    runs = {}
    for plan in plans:
        try:
            runs[str(plan)] = replay(plan, profile, seed=seed, overhead=measured_overhead(profile))
        except PredictionError:
            continue
    return runs


def measured_overhead(profile: Profile) -> bool:
    """Return whether a profile knows the seconds outside the passes."""
    from hsdopt.overhead import ROUND

    return ROUND in profile.overhead


class Replayer:
    """Seconds per token by a replay of a profile's traces, for `solve(rerank=...)`."""

    name = REPLAY

    def __init__(self, profile: Profile, *, context: float | None = None) -> None:
        self._profile = profile
        self._context = context
        self._overhead = measured_overhead(profile)

    def __call__(self, plan: Plan) -> float:
        """Return the seconds per token of one plan."""
        from hsdopt.simulate import replay

        return replay(plan, self._profile, context=self._context, overhead=self._overhead).seconds_per_token

    def many(self, plans: Sequence[Plan]) -> list[float | None]:
        """Return the seconds per token of many plans; None for those that cannot be replayed."""
        from hsdopt.errors import PredictionError
        from hsdopt.simulate import replay_many

        try:
            runs = replay_many(plans, self._profile, context=self._context, overhead=self._overhead)
        except PredictionError:
            return [self._one(plan) for plan in plans]
        return [run.seconds_per_token for run in runs]

    def _one(self, plan: Plan) -> float | None:
        from hsdopt.errors import PredictionError

        try:
            return self(plan)
        except PredictionError:
            return None


def replayer(profile: Profile, *, context: float | None = None) -> Replayer | None:
    """Return the evaluator that decides between plans: trace replay, if the profile has traces."""
    return None if profile.traces is None else Replayer(profile, context=context)


def _each(plans: Sequence[Plan], seconds: Callable[[Plan], float]) -> dict[str, float]:
    from hsdopt.errors import PredictionError

    found = {}
    for plan in plans:
        try:
            found[str(plan)] = seconds(plan)
        except PredictionError:
            continue
    return found
