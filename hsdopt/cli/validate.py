"""`hsdopt validate`: run plans side by side and hold prediction against the clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hsdopt.cli.common import (
    load_plan,
    load_profile,
    milliseconds,
    new_table,
    output,
    output_folder,
    print_json,
    seconds_of,
    status,
)
from hsdopt.cli.faults import CHECK_FAILED
from hsdopt.cli.held_out import held_out_half, prepared_device, question, runnable
from hsdopt.cli.options import Device, NewTokens, ProfilePath, Remote, Repeats, Seed, Threads
from hsdopt.cli.place import Place, refuse_both
from hsdopt.cli.validate_report import comparison, distribution, mismatches, speed_changes, timed_runs
from hsdopt.cli.validate_runs import baselines_of, check_contexts, measured_runs
from hsdopt.plan import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hsdopt.plan import Plan
    from hsdopt.profiles import Profile
    from hsdopt.profiling import Baselines, Workload
    from hsdopt.solvers.solution import Solution

Plans = Annotated[
    list[str] | None, typer.Option("--plan", help="A plan to run, in notation or a file; repeat for more.")
]
Suite = Annotated[
    str | None,
    typer.Option(
        "--suite", help="quick (8 plans), standard (16) or full (44): standard, or none beside --plan, if not given."
    ),
]
Prompts = Annotated[
    str | None, typer.Option("--prompts", help="mixed, copy, chat or a file; the profile's own workload if not given.")
]
Count = Annotated[int | None, typer.Option("--max-prompts", min=1, help="Use at most this many validation prompts.")]
MaxError = Annotated[float | None, typer.Option("--max-error", min=0, help="Exit 1 if the median error is larger.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted validation.")]
Force = Annotated[bool, typer.Option("--force", help="Measure afresh, and replace a report that is at -o.")]
Out = Annotated[Path, typer.Option("--output", "-o", help="The folder for report and plots.")]
Budget = Annotated[
    str | None,
    typer.Option("--budget", help="Run as many prompts as fit into so long, at least two: 90s, 5m, 1h."),
]
Others = Annotated[
    bool | None,
    typer.Option(
        "--baselines/--no-baselines",
        help="Time transformers' own generate() as well; by default with the suites standard and full.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print report.json.")]


def validate(
    profile: ProfilePath,
    plan: Plans = None,
    suite: Suite = None,
    prompts: Prompts = None,
    max_new_tokens: NewTokens = None,
    max_prompts: Count = None,
    repeats: Repeats = 3,
    device: Device = None,
    threads: Threads = None,
    max_error: MaxError = None,
    resume: Resume = False,
    force: Force = False,
    seed: Seed = 0,
    output_path: Out = Path("validation"),
    baselines: Others = None,
    budget: Budget = None,
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """Run the chosen plan and its rivals on held-out prompts; compare with what was predicted.

    The rivals are a suite, the plans of --plan, or both where both options are given.

    Every run is saved as soon as it is done: stopped in the middle, the same command with --resume goes on.
    """
    refuse_both(resume=resume, force=force)
    profiled = load_profile(profile)
    if max_new_tokens is not None:
        profiled = replace(profiled, setting=profiled.setting.model_copy(update={"max_new_tokens": max_new_tokens}))
    where = prepared_device(profiled, device, threads)
    workload = held_out_half(profiled, prompts, max_prompts)
    limit = None if budget is None else seconds_of(budget)
    place = Place(output_folder(output_path), "report.json", ("traces", "runs", "control"), resume=resume)
    suite = "standard" if suite is None and not plan else suite
    beside = suite in ("standard", "full") if baselines is None else baselines
    ids = [prompt.id for prompt in workload]
    effort = {"repeats": repeats, "baselines": beside, "budget": limit}
    asked = question(
        profiled, workload, prompts=ids, seed=seed, plans=[*(plan or ()), *([] if suite is None else [suite])], **effort
    )
    report = place.finished(asked)
    if report is None:
        with place.replacing(force=force):
            report = _validated(
                profiled,
                workload,
                place,
                texts=plan or (),
                suite=suite,
                asked=asked,
                device=where,
                remote=trust_remote_code,
            )
    with place.showing():
        _print(report, place.folder, as_json=as_json)
        _check_error(report, max_error)


def _validated(
    profiled: Profile,
    workload: Workload,
    place: Place,
    *,
    texts: Sequence[str],
    suite: str | None,
    asked: Mapping[str, Any],
    device: str,
    remote: bool,
) -> dict[str, Any]:
    """Measure, compare and write; return the report."""
    from hsdopt.profiling import check_room, render_prompts
    from hsdopt.runtime import load_models

    solution, plans = _plans(profiled, texts, suite)
    if suite is None:
        status().print("running the chosen plan and those of --plan alone; add --suite for a suite as well")
    models = load_models(profiled, device=device, trust_remote_code=remote)
    rendered = render_prompts(workload, models[profiled.target])
    check_room(models, rendered.values(), profiled.setting.max_new_tokens)
    check_contexts(profiled, models[profiled.target], rendered.values())
    others = baselines_of(profiled, models, rendered, suite or "standard") if asked["baselines"] else None
    seed = asked["seed"]
    timed, noise, measured = measured_runs(profiled, models, rendered, plans, others, place, asked=asked)
    memory = _memory(profiled, plans, others)
    runs = timed_runs(measured, profiled.target)
    outcome = comparison(profiled, timed, solution, plans, runs, memory, noise=noise, seed=seed)
    report = outcome.to_report(
        provenance=_provenance(profiled, workload, device, asked),
        mismatches=mismatches(measured, plans, models[profiled.target], list(rendered.values()), profiled),
        outputs_compared=profiled.setting.temperature == 0,
        distribution=distribution(solution.plan, timed, measured, seed=seed),
        why=solution.why,
        warnings=[*solution.warnings, *speed_changes(profiled, timed)],
        notes=() if others is None else others.notes,
    )
    _write(report, profiled, place)
    return report


def _plans(profiled: Profile, texts: Sequence[str], suite: str | None) -> tuple[Solution, list[Plan]]:
    """Return the solution and what to run: the plans asked for, and any suite around what the solver chose."""
    from hsdopt.cli.predictions import replayer
    from hsdopt.solvers.solve import solve
    from hsdopt.suites import suite as make_suite

    solution = solve(profiled, rerank=replayer(profiled))
    plans: list[Plan] = [Level(profiled.target), solution.plan, *(load_plan(text) for text in texts)]
    if suite is not None:
        best = [candidate.plan for candidate in solution.best_by_family.values()]
        plans += make_suite(profiled, [solution.plan, *best], suite)
    return solution, runnable(profiled, plans)


def _memory(profiled: Profile, plans: Sequence[Plan], others: Baselines | None) -> dict[str, int]:
    """Return the bytes of weights behind every label."""
    from hsdopt.solvers.limits import memory_bytes

    needed = {plan.label: plan.models for plan in plans}
    needed |= {} if others is None else {runner.label: runner.models for runner in others.runners}
    return {label: memory_bytes(profiled, names) for label, names in needed.items()}


def _provenance(profiled: Profile, workload: Workload, device: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    from hsdopt.profiling.hardware import provenance

    models = {name: info.source for name, info in profiled.models.items()}
    return {**provenance(device), **asked, "workload": workload.name, "models": models}


def _write(report: dict[str, Any], profiled: Profile, place: Place) -> None:
    """Write report and figures; the journals go only when everything else is there."""
    from hsdopt.plots import report_figures
    from hsdopt.report import write_report

    write_report(report, report_figures(report, profiled), place.folder)
    place.finish()


def _print(report: dict[str, Any], directory: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
    else:
        _show(report, directory)


def _show(report: dict[str, Any], directory: Path) -> None:
    """Print the plans, fastest first, and where the report is."""
    headings = ("measured", "95 % interval", "predicted", "error", "tokens/pass", "speed-up")
    table = new_table("plan", *headings)
    for row in (*report["plans"], *report.get("baselines", ())):
        table.add_row(
            row["plan"],
            milliseconds(row["measured_seconds_per_token"]),
            " to ".join(milliseconds(bound) for bound in row["interval"] or ()),
            _or_blank(row["predicted_seconds_per_token"], milliseconds),
            _or_blank(row["error"], lambda error: f"{error:+.1%}"),
            _or_blank(row["tokens_per_pass"], lambda tokens: f"{tokens:.2f}"),
            _or_blank(row.get("speedup"), lambda ratio: f"{ratio:.2f}"),
        )
    summary = report["summary"]
    error = _or_blank(summary["median_error"], lambda value: f"{value:.1%}") or "unknown"
    regret = _or_blank(summary["regret"], lambda value: f"{value:+.1%}") or "unknown (needs 2 repeats)"
    typer.echo("ms per token, fastest plan first; predicted: from these very prompts and the speed of now")
    output().print(table)
    typer.echo(f"median error {error}, regret of the pick {regret}")
    typer.echo(f"report: {directory / 'report.html'}")


def _or_blank(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)


def _check_error(report: dict[str, Any], limit: float | None) -> None:
    error = report["summary"]["median_error"]
    if limit is not None and (error is None or error > limit):
        shown = "unknown, so not below" if error is None else f"{error:.1%}, above"
        typer.echo(f"hsdopt: median error is {shown} --max-error {limit:.1%}", err=True)
        raise typer.Exit(CHECK_FAILED)
