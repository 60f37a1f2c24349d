"""`hsdopt quality`: what lossy decoding gains in speed, and what it costs in quality, over a grid of thresholds."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hsdopt.checks import check_choice
from hsdopt.cli.common import (
    load_plan,
    load_profile,
    output_folder,
    print_json,
    progress_bar,
    require_extra,
    write_text,
)
from hsdopt.cli.faults import resumable
from hsdopt.cli.held_out import held_out_half, prepared_device, question, runnable
from hsdopt.cli.options import Device, NewTokens, ProfilePath, Remote, Repeats, Seed, Threads
from hsdopt.cli.place import Place, refuse_both
from hsdopt.cli.quality_report import make_report
from hsdopt.cli.quality_tables import show
from hsdopt.errors import InvalidArgumentError
from hsdopt.plan import LOOKUP, Level, Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hsdopt.profiles import Profile
    from hsdopt.profiling import Workload
    from hsdopt.runtime.model import Model

Plans = Annotated[
    list[str] | None, typer.Option("--plan", help="One more plan to run, in notation or a file; repeat for more.")
]
Smalls = Annotated[
    list[str] | None, typer.Option("--small", help="A small model of the profile; repeat for more. Its cheapest one.")
]
Fallbacks = Annotated[str, typer.Option("--fallback", help="Thresholds of the small model's top probability.")]
Rollbacks = Annotated[str, typer.Option("--rollback", help="Thresholds in nats under the target; inf is never.")]
MaxDraft = Annotated[int, typer.Option("--max-draft", min=1, help="The most small tokens of one stint.")]
Rules = Annotated[str, typer.Option("--semantics", help="paper, or reference: the rules of the authors' code.")]
MeasureName = Annotated[str, typer.Option("--measure", help="What ranks the settings: rouge-l or bleu.")]
Prompts = Annotated[
    str | None, typer.Option("--prompts", help="A set, data set or file; the profile's own workload if not given.")
]
Count = Annotated[int | None, typer.Option("--max-prompts", min=1, help="Use at most this many held-out prompts.")]
Temperature = Annotated[float | None, typer.Option("--temperature", min=0.0, help="0 is greedy; the profile's.")]
TopP = Annotated[float | None, typer.Option("--top-p", min=0.0, max=1.0, help="The profile's, if not given.")]
Predicted = Annotated[bool, typer.Option("--predicted", help="Show what the profile predicted as well.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted measurement.")]
Force = Annotated[bool, typer.Option("--force", help="Measure afresh, and replace what is at -o.")]
Out = Annotated[Path, typer.Option("--output", "-o", help="The folder for quality.json and the frontier.")]
Json = Annotated[bool, typer.Option("--json", help="Print quality.json.")]

_RULES = ("paper", "reference")


def quality(
    profile: ProfilePath,
    plan: Plans = None,
    small: Smalls = None,
    fallback: Fallbacks = "0.2,0.4,0.6,0.8",
    rollback: Rollbacks = "1,2,3,5",
    max_draft: MaxDraft = 10,
    semantics: Rules = "paper",
    measure: MeasureName = "rouge-l",
    prompts: Prompts = None,
    max_prompts: Count = None,
    max_new_tokens: NewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    repeats: Repeats = 1,
    predicted: Predicted = False,
    device: Device = None,
    threads: Threads = None,
    resume: Resume = False,
    force: Force = False,
    seed: Seed = 0,
    output_path: Out = Path("quality"),
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """Run Big Little Decoder over a grid of thresholds on held-out prompts, beside lossless plans.

    Lossless are the target alone and each small model under rejection sampling, at its best length and others.
    Every run is saved as soon as it is done: stopped in the middle, the same command with --resume goes on.
    """
    with require_extra("all"):
        from hsdopt.runtime import load_models
    with require_extra("quality"):
        from hsdopt.profiling.quality import MEASURES
    check_choice(measure, "--measure", MEASURES)
    refuse_both(resume=resume, force=force)
    stored = load_profile(profile)
    profiled = _with_setting(stored, max_new_tokens, temperature, top_p)
    where = prepared_device(profiled, device, threads)
    grid = _Grid(_numbers(fallback, "--fallback"), _numbers(rollback, "--rollback"), max_draft, semantics)
    plans = _plans(profiled, _smalls(profiled, small), grid, plan or ())
    workload = held_out_half(profiled, prompts, max_prompts)
    labels = [plan.label for plan in plans]
    asked = question(profiled, workload, plans=labels, measure=measure, repeats=repeats, seed=seed)
    place = Place(output_folder(output_path), "quality.json", ("runs",), resume=resume)
    report = place.finished(asked)
    if report is None:
        with place.replacing(force=force):
            models = load_models(_only(profiled, plans), device=where, trust_remote_code=trust_remote_code)
            report = _measured(_foreseen(stored, profiled), models, workload, plans, place, asked=asked, device=where)
            _write(report, place)
    with place.showing():
        if as_json:
            print_json(report)
        else:
            show(report, place.folder, predicted=predicted)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Thresholds, and what all settings share."""

    fallbacks: tuple[float, ...]
    rollbacks: tuple[float, ...]
    max_draft: int
    semantics: str


def _with_setting(profiled: Profile, tokens: int | None, temperature: float | None, top_p: float | None) -> Profile:
    """Return the profile under the setting asked for."""
    from hsdopt.profiles import Setting

    if temperature is not None and not math.isfinite(temperature):
        raise InvalidArgumentError(f"expected a finite temperature; got {temperature}")
    if top_p == 0:
        raise InvalidArgumentError("expected --top-p above 0 and at most 1; got 0")
    asked = {"max_new_tokens": tokens, "temperature": temperature, "top_p": top_p}
    changes = {name: value for name, value in asked.items() if value is not None}
    return replace(profiled, setting=Setting(**{**profiled.setting.model_dump(), **changes}))


def _foreseen(stored: Profile, profiled: Profile) -> Profile:
    """Return the profile, without its traces if it was measured under other sampling: it then predicts nothing."""
    same = stored.setting.model_copy(update={"max_new_tokens": profiled.setting.max_new_tokens}) == profiled.setting
    if same:
        return profiled
    typer.echo("the profile was measured under another sampling setting: nothing is predicted", err=True)
    return replace(profiled, traces=None)


def _smalls(profiled: Profile, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the small models: those named, or the one whose passes are cheapest."""
    networks = [name for name in profiled.drafters if name != LOOKUP]
    if not networks:
        raise InvalidArgumentError("expected a small model in the profile beside the target; profile one with --draft")
    wrong = [name for name in names or () if name not in networks]
    if wrong:
        raise InvalidArgumentError(f"expected --small to be one of {', '.join(networks)}; got {wrong[0]}")
    cheapest = min(networks, key=lambda name: profiled.cost(name)(1, profiled.context))
    return tuple(dict.fromkeys(names or (cheapest,)))


def _numbers(text: str, option: str) -> tuple[float, ...]:
    """Return the numbers of a comma-separated list."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgumentError(f"expected {option} as numbers with commas, such as 0.4,0.6; got {text!r}") from None


def _plans(profiled: Profile, smalls: Sequence[str], grid: _Grid, texts: Sequence[str]) -> list[Plan]:
    """Return the target alone, lossless plans and the grid of every small model, and the plans asked for."""
    from hsdopt.profiling.quality import rejection_plans, threshold_grid

    plans: list[Plan] = [Level(profiled.target)]
    for small in smalls:
        plans += rejection_plans(profiled, small)
        plans += threshold_grid(
            profiled.target,
            small,
            grid.fallbacks,
            grid.rollbacks,
            max_draft=grid.max_draft,
            semantics="reference" if check_choice(grid.semantics, "--semantics", _RULES) == "reference" else "paper",
        )
    plans += [load_plan(text) for text in texts]
    return runnable(profiled, plans)


def _only(profiled: Profile, plans: Sequence[Plan]) -> Profile:
    """Return the profile with those models alone that some plan needs, so that no other is loaded."""
    used = {name for plan in plans for name in plan.models}
    return replace(
        profiled,
        costs={name: curve for name, curve in profiled.costs.items() if name in used},
        models={name: info for name, info in profiled.models.items() if name in used},
    )


def _measured(
    profiled: Profile,
    models: Mapping[str, Model],
    workload: Workload,
    plans: Sequence[Plan],
    place: Place,
    *,
    asked: dict[str, Any],
    device: str,
) -> dict[str, Any]:
    """Run the plans, judge their outputs, and return the report."""
    from hsdopt.profiling import check_room, measure_plans, render_prompts
    from hsdopt.profiling.hardware import provenance
    from hsdopt.profiling.quality import Judge

    target = models[profiled.target]
    rendered = list(render_prompts(workload, target).values())
    check_room(models, rendered, profiled.setting.max_new_tokens)
    with resumable(place.journal("runs")), progress_bar() as progress:
        runs = measure_plans(
            plans,
            models,
            rendered,
            setting=profiled.setting,
            repeats=asked["repeats"],
            journal=place.journal("runs"),
            resume=place.resume,
            seed=asked["seed"],
            progress=progress,
        )
        by_plan = {plan.label: [run for run in runs if run.plan == plan.label] for plan in plans}
        references = {number: prompt.reference for number, prompt in enumerate(workload) if prompt.reference}
        judge = Judge(target, by_plan[plans[0].label], rendered, references, profiled.setting)
        judged = {}
        for number, plan in enumerate(plans, 1):
            judged[plan.label] = judge(by_plan[plan.label])
            progress("outputs", number, len(plans))
    return make_report(
        profiled,
        plans,
        runs,
        judged,
        asked=asked,
        prompts=(len(rendered), len(references)),
        provenance={**provenance(device), **asked, "workload": workload.name},
    )


def _write(report: dict[str, Any], place: Place) -> None:
    """Write the frontier and quality.json; the journal goes only when everything else is there."""
    from hsdopt.plots import on_own_figure, quality_frontier, save_figure

    save_figure(on_own_figure(quality_frontier, report), place.folder / "frontier")
    write_text(place.report, json.dumps(report, indent=2) + "\n")
    place.finish()
