"""How long single outputs take, by every simulation: what lies behind a predicted mean."""

from __future__ import annotations

import numpy as np

from hsdopt.errors import PredictionError
from hsdopt.plan import Plan
from hsdopt.profiles import Profile
from hsdopt.simulate.events import simulate
from hsdopt.simulate.replay import replay

__all__ = ["output_distribution"]

_OUTPUTS = 400
"""Simulated outputs."""

_WALKS = 16
"""Replays of every traced output where acceptance has to be drawn."""


def output_distribution(plan: Plan, profile: Profile, *, seed: int = 0) -> dict[str, list[float]]:
    """Return seconds per token after the first of single outputs, ascending, by predictor.

    Trace replay gives one value per traced output (16 where sampling draws acceptance); event simulation gives 400
    outputs of the profile's length. A predictor that cannot speak of the plan is left out.

    Parameters
    ----------
    plan : Plan
    profile : Profile
    seed : int
    """
    found = {"trace replay": _replayed, "event simulation": _simulated}
    values = {}
    for name, draw in found.items():
        try:
            values[name] = sorted(float(value) for value in draw(plan, profile, seed))
        except PredictionError:
            continue
    return values


def _replayed(plan: Plan, profile: Profile, seed: int) -> np.ndarray:
    walks = _WALKS if profile.setting.temperature > 0 else 1
    # a walk at a time: several in one replay would come back as their mean
    runs = [replay(plan, profile, seed=seed + walk, repeats=1) for walk in range(walks)]
    rates = np.concatenate([run.prompt_seconds_per_token for run in runs])
    return np.asarray(rates[np.isfinite(rates)])


def _simulated(plan: Plan, profile: Profile, seed: int) -> np.ndarray:
    tokens = profile.setting.max_new_tokens
    if tokens < 2:
        raise PredictionError(f"expected outputs of at least 2 tokens to simulate; got {tokens}")
    run = simulate(plan, profile, tokens=_OUTPUTS, seed=seed)
    return np.asarray(run.time_to_finish(tokens, runs=_OUTPUTS) / (tokens - 1))
