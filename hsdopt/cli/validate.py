"""`hsdopt validate`: run plans side by side and hold prediction against the clock."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
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
    progress_bar,
    require_extra,
    require_sources,
    seconds_of,
)
from hsdopt.cli.faults import CHECK_FAILED, resumable
from hsdopt.errors import HsdoptError, InvalidArgumentError, ProfileError
from hsdopt.plan import LOOKUP, Adaptive, Level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np

    from hsdopt.plan import Plan
    from hsdopt.profiles import Profile
    from hsdopt.profiling import Baselines, MeasuredRun, Workload
    from hsdopt.runtime.model import Model
    from hsdopt.simulate import ReplayedRun
    from hsdopt.simulate.compare import Comparison, Mismatch, Run
    from hsdopt.solvers.solution import Solution

    Report = Callable[[str, int, int], None]

ProfilePath = Annotated[Path, typer.Argument(help="A profile made by hsdopt profile.", metavar="PROFILE")]
Plans = Annotated[
    list[str] | None, typer.Option("--plan", help="A plan to run, in notation or a file; repeat for more.")
]
Suite = Annotated[str, typer.Option("--suite", help="quick (8 plans), standard (16) or full (44).")]
Prompts = Annotated[
    str | None, typer.Option("--prompts", help="mixed, copy, chat or a file; the profile's own workload if not given.")
]
NewTokens = Annotated[int | None, typer.Option("--max-new-tokens", min=2, help="Tokens per prompt; the profile's.")]
Count = Annotated[int | None, typer.Option("--max-prompts", min=1, help="Use at most this many validation prompts.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Runs of every plan on every prompt.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; the profile's.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; the profile's.")]
MaxError = Annotated[float | None, typer.Option("--max-error", min=0, help="Exit 1 if the median error is larger.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted validation.")]
Force = Annotated[bool, typer.Option("--force", help="Measure afresh, and replace a report that is at -o.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the order of runs, sampling and bootstrap.")]
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
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Let a hub model run its own code.")]
Json = Annotated[bool, typer.Option("--json", help="Print report.json.")]

_SURE_PROMPTS = 2  # that are run whatever the budget

_REPLICATES = 400  # of cost curves, behind predicted intervals

_STEADY = 0.05
"""Relative change of the target's pass time between profile and validation that is worth a warning."""


def validate(
    profile: ProfilePath,
    plan: Plans = None,
    suite: Suite = "standard",
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

    Every run is saved as soon as it is done: stopped in the middle, the same command with --resume goes on.
    """
    with require_extra("all"):
        from hsdopt.profiling.hardware import require_same_device, use_threads
    if force and resume:
        raise InvalidArgumentError("expected --resume or --force, not both: one continues, the other starts afresh")
    profiled = load_profile(profile)
    if max_new_tokens is not None:
        profiled = replace(profiled, setting=profiled.setting.model_copy(update={"max_new_tokens": max_new_tokens}))
    require_sources(profiled)
    where = profiled.models[profiled.target].device if device is None else device
    use_threads(threads, profiled.provenance)
    require_same_device(dict(profiled.provenance), where)
    workload = _workload(profiled, prompts, max_prompts)
    place = _Place(output_folder(output_path), resume=resume)
    beside = not plan and suite != "quick" if baselines is None else baselines
    limit = None if budget is None else seconds_of(budget)
    asked = _asked(profiled, workload, seed, plans=plan or [suite], repeats=repeats, baselines=beside, budget=limit)
    report = place.finished()
    if report is not None:
        _require_same(report, asked, place.report)
        typer.echo(f"{place.report} is complete already; --force measures afresh", err=True)
    else:
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
    _print(report, place.folder, as_json=as_json)
    _check_error(report, max_error)


def _validated(
    profiled: Profile,
    workload: Workload,
    place: _Place,
    *,
    texts: Sequence[str],
    suite: str,
    asked: Mapping[str, Any],
    device: str,
    remote: bool,
) -> dict[str, Any]:
    """Measure, compare and write; return the report."""
    from hsdopt.profiling import check_room, render_prompts
    from hsdopt.runtime import load_models

    solution, plans = _plans(profiled, texts, suite)
    models = load_models(profiled, device=device, trust_remote_code=remote)
    rendered = render_prompts(workload, models[profiled.target])
    check_room(models, rendered.values(), profiled.setting.max_new_tokens)
    _check_contexts(profiled, models[profiled.target], rendered.values())
    others = _baselines(profiled, models, rendered, suite) if asked["baselines"] else None
    seed = asked["seed"]
    timed, noise, measured = _measured(profiled, models, rendered, plans, others, place, asked=asked)
    memory = _memory(profiled, plans, others)
    runs = _runs(measured, profiled.target)
    outcome = _compare(profiled, timed, solution, plans, runs, memory, noise=noise, seed=seed)
    report = outcome.to_report(
        provenance=_provenance(profiled, workload, device, asked),
        mismatches=_mismatches(measured, plans, models[profiled.target], list(rendered.values()), profiled),
        outputs_compared=profiled.setting.temperature == 0,
        distribution=_distribution(solution.plan, timed, measured, seed=seed),
        why=solution.why,
        warnings=[*solution.warnings, *_speed_changes(profiled, timed)],
        notes=() if others is None else others.notes,
    )
    _write(report, profiled, place)
    return report


@dataclass(frozen=True, slots=True)
class _Place:
    """The folder of a report, and the journals of its measurements."""

    folder: Path
    resume: bool

    @property
    def traces(self) -> Path:
        """What every model says along the target's outputs."""
        return self.folder / "traces.partial"

    @property
    def runs(self) -> Path:
        """The timed runs."""
        return self.folder / "runs.partial"

    @property
    def control(self) -> Path:
        """Passes timed between the runs."""
        return self.folder / "control.partial"

    @property
    def report(self) -> Path:
        """What is there once all is done."""
        return self.folder / "report.json"

    def finished(self) -> dict[str, Any] | None:
        """Return the finished report that --resume finds, or None."""
        if not self.resume or self.traces.exists() or not self.report.exists():
            return None
        try:
            report = json.loads(self.report.read_text(encoding="utf-8"))
        except ValueError as error:
            raise HsdoptError(f"expected a report in {self.report}; {error}: replace it with --force") from error
        return dict(report)

    @contextmanager
    def replacing(self, *, force: bool) -> Iterator[None]:
        """Refuse to replace a finished report unless told; forget what was measured before when told.

        From here on --resume takes the report as unfinished: an empty journal of traces, which is made first and
        emptied last, says so however early a kill comes. It goes again if nothing was measured after all.
        """
        if not force:
            if self.report.exists() and not self.traces.exists():
                raise HsdoptError(
                    f"{self.folder} holds a finished report; name another folder with -o, or replace it with --force"
                )
            yield
            return
        fresh = not self.traces.exists()
        self.traces.touch()
        for path in (self.runs, self.control):
            path.unlink(missing_ok=True)
        self.traces.write_bytes(b"")
        try:
            yield
        except BaseException:
            if fresh and self.traces.exists() and not self.traces.stat().st_size:
                self.traces.unlink()
            raise

    def finish(self) -> None:
        """Delete the journals: what they hold stands in the report."""
        for path in (self.runs, self.control, self.traces):
            path.unlink(missing_ok=True)


def _check_contexts(profiled: Profile, target: Model, prompts: Iterable[Sequence[int]]) -> None:
    """Refuse prompts longer than the profile's costs cover, before anything is timed."""
    longest = max(len(target.opening(prompt)) for prompt in prompts) + profiled.setting.max_new_tokens
    covered = min(curve.max_context for curve in profiled.costs.values())
    if longest > covered:
        raise ProfileError(
            f"expected prompts and outputs of up to {covered:.0f} tokens, which the profile covers; got {longest}: "
            "profile with longer --contexts, or choose shorter prompts or --max-new-tokens"
        )


def _workload(profiled: Profile, prompts: str | None, count: int | None) -> Workload:
    """Return the held-out half of the prompts."""
    from hsdopt.profiling import load_workload

    source = str(profiled.provenance.get("workload", "")) if prompts is None else prompts
    if not source:
        raise InvalidArgumentError("expected --prompts, since the profile names no workload")
    half = load_workload(source).validation
    return half if count is None else half.take(count)


def _plans(profiled: Profile, texts: Sequence[str], suite: str) -> tuple[Solution, list[Plan]]:
    """Return the solution and what to run: the plans asked for, or a suite around what the solver chose."""
    from hsdopt.cli.predictions import replayer
    from hsdopt.solvers.solve import solve
    from hsdopt.suites import suite as make_suite

    solution = solve(profiled, rerank=replayer(profiled))
    plans: list[Plan] = [Level(profiled.target), solution.plan]
    if texts:
        plans += [load_plan(text) for text in texts]
    else:
        best = [candidate.plan for candidate in solution.best_by_family.values()]
        plans += make_suite(profiled, [solution.plan, *best], suite)
    for plan in plans:
        for name in plan.models:
            profiled.require(name)
        if plan.target != profiled.target:
            raise InvalidArgumentError(f"expected plans that end in the target {profiled.target}; got {plan.label}")
    return solution, list(dict.fromkeys(plans))


def _baselines(
    profiled: Profile, models: Mapping[str, Model], rendered: Mapping[str, Sequence[int]], suite: str
) -> Baselines:
    """Return transformers' own ways to decode: assisted by the most promising network, in the full suite by all."""
    from hsdopt.profiling import transformers_baselines
    from hsdopt.suites import assistants

    names = assistants(profiled)[: None if suite == "full" else 1]
    prompt = next(iter(rendered.values()))
    return transformers_baselines(models[profiled.target], [models[name] for name in names], prompt)


def _memory(profiled: Profile, plans: Sequence[Plan], others: Baselines | None) -> dict[str, int]:
    """Return the bytes of weights behind every label."""
    from hsdopt.solvers.limits import memory_bytes

    needed = {plan.label: plan.models for plan in plans}
    needed |= {} if others is None else {runner.label: runner.models for runner in others.runners}
    return {label: memory_bytes(profiled, names) for label, names in needed.items()}


def _measured(
    profiled: Profile,
    models: Mapping[str, Model],
    rendered: Mapping[str, Sequence[int]],
    plans: Sequence[Plan],
    others: Baselines | None,
    place: _Place,
    *,
    asked: Mapping[str, Any],
) -> tuple[Profile, float, tuple[MeasuredRun, ...]]:
    """Return the profile as of this validation, traces and speed taken anew, the speed's error, and the timed runs."""
    from hsdopt.profiling import ControlCosts, measure_plans

    repeats, budget = asked["repeats"], asked["budget"]
    entrants = len(plans) + (0 if others is None else len(others.runners))
    sure = len(rendered) if budget is None else min(len(rendered), _SURE_PROMPTS)
    with resumable(place.runs, place.traces), progress_bar() as progress:
        control = ControlCosts(
            profiled,
            models,
            text=[token for prompt in rendered.values() for token in prompt],
            journal=place.control,
            turns=repeats * sure * entrants,
            repeats=2 if budget is None else 1,
            resume=place.resume,
        )
        measured = measure_plans(
            plans,
            models,
            list(rendered.values()),
            setting=profiled.setting,
            repeats=repeats,
            journal=place.runs,
            runners=() if others is None else others.runners,
            resume=place.resume,
            seed=asked["seed"],
            budget=budget,
            between=control.take,
            progress=progress,
        )
        reached = 1 + max(run.prompt for run in measured)
        used = dict(islice(rendered.items(), reached))
        timed = _traced(profiled, models, used, place.traces, resume=place.resume, progress=progress)
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


def _runs(measured: Iterable[MeasuredRun], target: str) -> list[Run]:
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
    )


def _distribution(plan: Plan, timed: Profile, measured: Iterable[MeasuredRun], *, seed: int) -> dict[str, Any]:
    """Return the seconds per token of single outputs of the chosen plan, measured and by every simulation."""
    from hsdopt.simulate.distribution import output_distribution

    return {
        "plan": plan.label,
        "measured": sorted(run.seconds / run.tokens for run in measured if run.plan == plan.label),
        "predicted": output_distribution(plan, timed, seed=seed),
    }


def _compare(
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

    from hsdopt.cli.predictions import REPLAY, REPLAY_BEFORE, REPLAY_NOW, predict, replays
    from hsdopt.simulate.compare import Predictions, compare

    rng = np.random.default_rng(seed)
    prompts = len({run.prompt for run in runs})
    foreseen = {name: run.kinds_per_token for name, run in replays(plans, timed, seed=seed).items()}
    before = replays(plans, profiled.with_traces(timed.traces), seed=seed) if timed.traces is not None else {}
    now = replays(plans, replace(profiled, costs=timed.costs), seed=seed)
    predictions = Predictions(
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
        foreseen,
    )
    return compare(
        runs,
        predictions,
        chosen=solution.plan.label,
        autoregression=Level(profiled.target).label,
        rng=rng,
        cost=lambda model, tokens: timed.cost(model)(tokens, timed.context),
        candidates=[plan.label for plan in plans if plan.lossless],
        families={plan.label: "adaptive" for plan in plans if isinstance(plan, Adaptive)},
        memory=memory,
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


def _speed_changes(profiled: Profile, timed: Profile) -> list[str]:
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


def _mismatches(
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


def _provenance(profiled: Profile, workload: Workload, device: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    from hsdopt.profiling.hardware import provenance

    models = {name: info.source for name, info in profiled.models.items()}
    return {**provenance(device), **asked, "workload": workload.name, "models": models}


def _asked(
    profiled: Profile,
    workload: Workload,
    seed: int,
    *,
    plans: Sequence[str],
    repeats: int,
    baselines: bool,
    budget: float | None,
) -> dict[str, Any]:
    """Return what tells one validation from another, as its report keeps it."""
    return {
        "workload_sha256": workload.sha256,
        "prompts": [prompt.id for prompt in workload],
        "setting": profiled.setting.model_dump(),
        "seed": seed,
        "plans": list(plans),
        "repeats": repeats,
        "baselines": baselines,
        "budget": budget,
        "profile": {key: profiled.provenance.get(key) for key in ("date", "command", "workload_sha256")},
    }


def _require_same(report: Mapping[str, Any], asked: Mapping[str, Any], path: Path) -> None:
    stored = report.get("provenance", {})
    what = next((key for key in asked if stored.get(key) != asked[key]), None)
    if what is not None:
        raise HsdoptError(
            f"{path} is complete, but with {what} = {_short(stored.get(what))}; this call says {_short(asked[what])}: "
            "repeat its options to see it, name another folder with -o, or replace it with --force"
        )


def _short(value: object, *, limit: int = 60) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _write(report: dict[str, Any], profiled: Profile, place: _Place) -> None:
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
    typer.echo("ms per token, fastest plan first")
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
