"""Predictions of several plans by every predictor; only the command line sees them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hsdopt.plan import Plan
    from hsdopt.profiles import Profile
    from hsdopt.simulate import ReplayedRun

__all__ = ["CLOSED_FORM", "IID", "REPLAY", "SIMULATION", "predict", "replayer", "replays"]

CLOSED_FORM = "closed form"
SIMULATION = "event simulation"
REPLAY = "trace replay"
IID = "constant-cost iid"

_OUTPUTS = 400
"""Simulated outputs per plan."""


def predict(plans: Sequence[Plan], profile: Profile, *, seed: int = 0) -> dict[str, dict[str, float]]:
    """Return seconds per token by predictor and plan; a predictor that cannot speak of a plan leaves it out.

    Every predictor but the last speaks of outputs of the profile's length; "constant-cost iid" is the published
    model, for comparison: one cost per model, one acceptance rate per pair.
    """
    from hsdopt.latency import expected_latency
    from hsdopt.simulate import simulate

    tokens = profile.setting.max_new_tokens - 1
    iid = profile.as_iid()

    def simulated(plan: Plan) -> float:
        run = simulate(plan, profile, tokens=_OUTPUTS, seed=seed)
        return float(run.time_to_finish(tokens + 1, runs=_OUTPUTS).mean()) / tokens

    return {
        CLOSED_FORM: _each(plans, lambda plan: expected_latency(plan, profile, tokens=tokens).seconds_per_token),
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
            runs[str(plan)] = replay(plan, profile, seed=seed)
        except PredictionError:
            continue
    return runs


def replayer(profile: Profile) -> Callable[[Plan], float] | None:
    """Return the evaluator that decides between plans: trace replay, if the profile has traces."""
    if profile.traces is None:
        return None
    from hsdopt.simulate import replay

    return lambda plan: replay(plan, profile).seconds_per_token


def _each(plans: Sequence[Plan], seconds: Callable[[Plan], float]) -> dict[str, float]:
    from hsdopt.errors import PredictionError

    found = {}
    for plan in plans:
        try:
            found[str(plan)] = seconds(plan)
        except PredictionError:
            continue
    return found
