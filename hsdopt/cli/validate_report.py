"""Prediction against measurement: what `hsdopt validate` makes of the runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hsdopt.plan import Level

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

    from hsdopt.plan import Plan
    from hsdopt.profiles import Profile
    from hsdopt.profiling import MeasuredRun
    from hsdopt.runtime.model import Model
    from hsdopt.simulate import ReplayedRun
    from hsdopt.simulate.compare import Comparison, Mismatch, Predictions, Run
    from hsdopt.solvers.solution import Solution

__all__ = ["comparison", "distribution", "mismatches", "speed_changes", "timed_runs"]

_REPLICATES = 400  # of cost curves, behind predicted intervals

_STEADY = 0.05
"""Relative change of the target's pass time between profile and validation that is worth a warning."""


def comparison(
    profiled: Profile,
    timed: Profile,
    solution: Solution,
    plans: Sequence[Plan],
    runs: Sequence[Run],
    memory: Mapping[str, int],
    *,
    noise: float,
    seed: int,
) -> Comparison:
    """Hold every predictor against the clock: by traces and costs of the validation itself, and by the profile's.

    Both kinds are reported: what is off with the former is the model, with the latter also prompts and machine. The
    intervals speak of other prompts and of few timings, at the speed that the machine has now.
    """
    import numpy as np

    from hsdopt.simulate.compare import compare

    rng = np.random.default_rng(seed)
    prompts = len({run.prompt for run in runs})
    return compare(
        runs,
        _predictions(profiled, timed, plans, noise=noise, prompts=prompts, rng=rng, seed=seed),
        chosen=solution.plan.label,
        autoregression=Level(profiled.target).label,
        rng=rng,
        cost=partial(_pass_seconds, timed),
        candidates=[plan.label for plan in plans if plan.lossless],
        families={plan.label: plan.family for plan in plans},
        memory=memory,
    )


def _pass_seconds(timed: Profile, model: str, tokens: int) -> float:
    """Return the seconds of a pass; over no tokens, what one right behind another network's takes more."""
    curve = timed.cost(model)
    return curve(tokens, timed.context) if tokens else curve.switch


def _predictions(
    profiled: Profile,
    timed: Profile,
    plans: Sequence[Plan],
    *,
    noise: float,
    prompts: int,
    rng: np.random.Generator,
    seed: int,
) -> Predictions:
    """Return what every predictor says, from the validation's own traces and costs and from the profile's."""
    from hsdopt.cli.predictions import REPLAY, REPLAY_BEFORE, REPLAY_NOW, predict, replays
    from hsdopt.simulate import compare

    foreseen = replays(plans, timed, seed=seed)
    before = replays(plans, profiled.with_traces(timed.traces), seed=seed) if timed.traces is not None else {}
    now = replays(plans, replace(profiled, costs=timed.costs), seed=seed)
    return compare.Predictions(
        {
            **predict(plans, timed, seed=seed),
            REPLAY_BEFORE: {name: run.seconds_per_token for name, run in before.items()},
        },
        REPLAY,
        {
            **predict(plans, profiled, seed=seed),
            REPLAY_NOW: {name: run.seconds_per_token for name, run in now.items()},
        },
        {name: _expected_range(run, profiled, noise, prompts, rng) for name, run in now.items()},
        {name: run.kinds_per_token for name, run in foreseen.items()},
        {name: run.switches_per_token for name, run in foreseen.items()},
    )


def _expected_range(
    run: ReplayedRun, profiled: Profile, noise: float, prompts: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Return where the seconds per token over other prompts should lie.

    `noise` is the relative error of the machine's speed: timed passes have it, and the runs once more.
    """
    import numpy as np

    from hsdopt.solvers.uncertainty import cost_noise

    factors = cost_noise(run.kinds_per_token, profiled, count=_REPLICATES, rng=rng)
    machine = np.exp(rng.normal(0.0, np.sqrt(2.0) * noise, size=len(factors)))
    return run.predictive_interval(rng, prompts=prompts, noise=factors * machine)


def timed_runs(measured: Iterable[MeasuredRun], target: str) -> list[Run]:
    """Return the runs as they are compared."""
    return [_run(one, target) for one in measured]


def _run(measured: MeasuredRun, target: str) -> Run:
    from hsdopt.simulate.compare import Run as Timed

    logged = sum(count for model, _, count, _ in measured.passes if model == target)
    return Timed(
        plan=measured.plan,
        repeat=measured.repeat,
        prompt=measured.prompt,
        tokens=measured.tokens,
        seconds=measured.seconds,
        target_passes=logged or round(measured.tokens / measured.tokens_per_pass),
        passes={(model, tokens): count for model, tokens, count, _ in measured.passes},
        pass_seconds={(model, tokens): seconds for model, tokens, _, seconds in measured.passes},
        order=measured.order,
        switches=dict(measured.switches),
    )


def distribution(plan: Plan, timed: Profile, measured: Iterable[MeasuredRun], *, seed: int) -> dict[str, Any]:
    """Return the seconds per token of single outputs of the chosen plan, measured and by every simulation."""
    from hsdopt.simulate.distribution import output_distribution

    return {
        "plan": plan.label,
        "measured": sorted(run.seconds / run.tokens for run in measured if run.plan == plan.label),
        "predicted": output_distribution(plan, timed, seed=seed),
    }


def speed_changes(profiled: Profile, timed: Profile) -> list[str]:
    """Return a line if the target's passes took another time now than when it was profiled."""
    before, now = (one.cost(profiled.target)(1, timed.context) for one in (profiled, timed))
    change = now / before - 1
    if abs(change) < _STEADY:
        return []
    direction = "longer" if change > 0 else "less"
    line = (
        f"the machine changed: one token of {profiled.target} takes {abs(change):.0%} {direction} than when profiled; "
        "the model error allows for that, the transfer error does not"
    )
    return [line]


def mismatches(
    measured: Sequence[MeasuredRun],
    plans: Sequence[Plan],
    target: Model,
    prompts: Sequence[Sequence[int]],
    profiled: Profile,
) -> list[Mismatch]:
    """Return where greedy outputs of lossless plans leave the target's own, and how near a tie it was there."""
    from hsdopt.runtime.sampling import near_tie
    from hsdopt.simulate.compare import Mismatch as Place

    if profiled.setting.temperature > 0:
        return []
    own = {run.prompt: run.output for run in measured if run.plan == Level(profiled.target).label and run.repeat == 0}
    lossless = {plan.label for plan in plans if plan.lossless}
    places: dict[tuple[int, int], list[str]] = {}
    for run in measured:
        if run.repeat == 0 and run.plan in lossless and run.output != own[run.prompt]:
            pairs = enumerate(zip(run.output, own[run.prompt], strict=True))
            first = next(index for index, (a, b) in pairs if a != b)
            places.setdefault((run.prompt, first), []).append(run.plan)
    found = []
    for (prompt, position), texts in places.items():
        written = [*target.opening(prompts[prompt]), *own[prompt][:position]]
        tie = near_tie(target, written, prompt=prompts[prompt])
        found += [Place(text, prompt, position, tie.gap, 4 * tie.difference) for text in texts]
    return found
