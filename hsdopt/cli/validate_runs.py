"""What `hsdopt validate` runs: plans and baselines by the clock, control passes between them, and traces."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from hsdopt.cli.common import progress_bar
from hsdopt.cli.faults import resumable
from hsdopt.errors import ProfileError
from hsdopt.plan import LOOKUP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from hsdopt.cli.place import Place
    from hsdopt.plan import Plan
    from hsdopt.profiles import Profile
    from hsdopt.profiling import Baselines, MeasuredRun
    from hsdopt.runtime.model import Model

    Report = Callable[[str, int, int], None]

__all__ = ["baselines_of", "check_contexts", "measured_runs"]

_SURE_PROMPTS = 2  # that are run whatever the budget


def check_contexts(profiled: Profile, target: Model, prompts: Iterable[Sequence[int]]) -> None:
    """Refuse prompts longer than the profile's costs cover, before anything is timed."""
    longest = max(len(target.opening(prompt)) for prompt in prompts) + profiled.setting.max_new_tokens
    covered = min(curve.max_context for curve in profiled.costs.values())
    if longest > covered:
        raise ProfileError(
            f"expected prompts and outputs of up to {covered:.0f} tokens, which the profile covers; got {longest}: "
            "profile with longer --contexts, or choose shorter prompts or --max-new-tokens"
        )


def baselines_of(
    profiled: Profile, models: Mapping[str, Model], rendered: Mapping[str, Sequence[int]], suite: str
) -> Baselines:
    """Return transformers' own ways to decode: assisted by the most promising network, in the full suite by all."""
    from hsdopt.profiling import transformers_baselines
    from hsdopt.suites import assistants

    names = assistants(profiled)[: None if suite == "full" else 1]
    prompt = next(iter(rendered.values()))
    return transformers_baselines(models[profiled.target], [models[name] for name in names], prompt)


def measured_runs(
    profiled: Profile,
    models: Mapping[str, Model],
    rendered: Mapping[str, Sequence[int]],
    plans: Sequence[Plan],
    others: Baselines | None,
    place: Place,
    *,
    asked: Mapping[str, Any],
) -> tuple[Profile, float, tuple[MeasuredRun, ...]]:
    """Return the profile as of this validation, traces and speed taken anew, the speed's error, and the timed runs."""
    from hsdopt.profiling import ControlCosts, measure_plans

    repeats, budget = asked["repeats"], asked["budget"]
    entrants = len(plans) + (0 if others is None else len(others.runners))
    sure = len(rendered) if budget is None else min(len(rendered), _SURE_PROMPTS)
    with resumable(place.journal("runs"), place.journal("traces")), progress_bar() as progress:
        control = ControlCosts(
            profiled,
            models,
            text=[token for prompt in rendered.values() for token in prompt],
            journal=place.journal("control"),
            turns=repeats * sure * entrants,
            repeats=4 if budget is None else 2,
            resume=place.resume,
        )
        measured = measure_plans(
            plans,
            models,
            list(rendered.values()),
            setting=profiled.setting,
            repeats=repeats,
            journal=place.journal("runs"),
            runners=() if others is None else others.runners,
            resume=place.resume,
            seed=asked["seed"],
            budget=budget,
            between=control.take,
            progress=progress,
        )
        reached = 1 + max(run.prompt for run in measured)
        used = dict(islice(rendered.items(), reached))
        timed = _traced(profiled, models, used, place.journal("traces"), resume=place.resume, progress=progress)
        control.finish(progress)
        return control.applied(timed), control.noise(), measured


def _traced(
    profiled: Profile,
    models: Mapping[str, Model],
    prompts: Mapping[str, Sequence[int]],
    path: Path,
    *,
    resume: bool,
    progress: Report,
) -> Profile:
    """Return the profile with traces of the validation prompts in place of its own."""
    from hsdopt.profiling import trace_prompts
    from hsdopt.profiling.acceptance import assemble

    traces = trace_prompts(
        models, profiled.target, prompts, setting=profiled.setting, journal=path, resume=resume, progress=progress
    )
    lookup = models[LOOKUP].lookup if LOOKUP in models else None
    return profiled.with_traces(assemble(traces, lookup=None if lookup is None else lambda _: lookup))
