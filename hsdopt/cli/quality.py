"""`hsdopt quality`: what lossy decoding gains in speed, and what it costs in quality, over a grid of thresholds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hsdopt.checks import check_choice
from hsdopt.cli.common import (
    load_plan,
    load_profile,
    new_table,
    output,
    output_folder,
    print_json,
    progress_bar,
    require_extra,
    require_sources,
    write_text,
)
from hsdopt.cli.faults import resumable
from hsdopt.errors import HsdoptError, InvalidArgumentError, PredictionError
from hsdopt.plan import LOOKUP, Bild, Level, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.table import Table

    from hsdopt.profiles import Profile
    from hsdopt.profiling import MeasuredRun, Workload
    from hsdopt.profiling.quality import Judgement, Measure, Point, Verdict
    from hsdopt.runtime.model import Model
    from hsdopt.simulate.compare import PlanResult

    Row = dict[str, Any]

ProfilePath = Annotated[Path, typer.Argument(help="A profile made by hsdopt profile.", metavar="PROFILE")]
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
NewTokens = Annotated[int | None, typer.Option("--max-new-tokens", min=2, help="Tokens per prompt; the profile's.")]
Temperature = Annotated[float | None, typer.Option("--temperature", min=0.0, help="0 is greedy; the profile's.")]
TopP = Annotated[float | None, typer.Option("--top-p", min=0.0, max=1.0, help="The profile's, if not given.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Runs of every plan on every prompt.")]
Predicted = Annotated[bool, typer.Option("--predicted", help="Show what the profile predicted as well.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; the profile's.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; the profile's.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted measurement.")]
Force = Annotated[bool, typer.Option("--force", help="Measure afresh, and replace what is at -o.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the order of runs, sampling and bootstrap.")]
Out = Annotated[Path, typer.Option("--output", "-o", help="The folder for quality.json and the frontier.")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Let a hub model run its own code.")]
Json = Annotated[bool, typer.Option("--json", help="Print quality.json.")]

_RULES = ("paper", "reference")
_NAMES = {"bleu": "BLEU", "rouge-l": "ROUGE-L"}
_FEW = 10
"""Prompts below which a line says how little they show."""


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
        from hsdopt.profiling.hardware import require_same_device, use_threads
        from hsdopt.runtime import load_models
    with require_extra("quality"):
        from hsdopt.profiling.quality import MEASURES
    check_choice(measure, "--measure", MEASURES)
    if force and resume:
        raise InvalidArgumentError("expected --resume or --force, not both: one continues, the other starts afresh")
    stored = load_profile(profile)
    profiled = _with_setting(stored, max_new_tokens, temperature, top_p)
    require_sources(profiled)
    where = profiled.models[profiled.target].device if device is None else device
    use_threads(threads, profiled.provenance)
    require_same_device(dict(profiled.provenance), where)
    plans = _plans(
        profiled,
        _smalls(profiled, small),
        _Grid(_numbers(fallback, "--fallback"), _numbers(rollback, "--rollback"), max_draft, semantics),
        plan or (),
    )
    workload = _workload(profiled, prompts, max_prompts)
    asked = _asked(profiled, workload, plans, measure=measure, repeats=repeats, seed=seed)
    place = _Place(output_folder(output_path), resume=resume)
    report = place.finished(asked)
    if report is None:
        with place.replacing(force=force):
            models = load_models(_only(profiled, plans), device=where, trust_remote_code=trust_remote_code)
            foreseen = _foreseen(stored, profiled)
            report = _measured(foreseen, models, workload, plans, place, asked=asked, device=where)
            _write(report, place)
    if as_json:
        print_json(report)
    else:
        _show(report, place.folder, predicted=predicted)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Thresholds, and what all settings share."""

    fallbacks: tuple[float, ...]
    rollbacks: tuple[float, ...]
    max_draft: int
    semantics: str


@dataclass(frozen=True, slots=True)
class _Place:
    """The folder of the results, and the journal of the runs."""

    folder: Path
    resume: bool

    @property
    def runs(self) -> Path:
        """The timed runs, until all is done."""
        return self.folder / "runs.partial"

    @property
    def report(self) -> Path:
        """What is there once all is done."""
        return self.folder / "quality.json"

    def finished(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the finished report that --resume finds, or None; one of another question is refused."""
        if not self.resume or self.runs.exists() or not self.report.exists():
            return None
        try:
            report = dict(json.loads(self.report.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise HsdoptError(f"expected a report in {self.report}; {error}: replace it with --force") from error
        stored = report.get("provenance", {})
        for what in asked:
            if stored.get(what) != json.loads(json.dumps(asked[what])):
                raise HsdoptError(
                    f"{self.report} is complete, but of another {what}: name another folder with -o, "
                    "or replace it with --force"
                )
        typer.echo(f"{self.report} is complete already; --force measures afresh", err=True)
        return report

    @contextmanager
    def replacing(self, *, force: bool) -> Iterator[None]:
        """Refuse to replace a finished report unless told; an empty journal, made first, says that it is being done."""
        if self.report.exists() and not self.runs.exists() and not force:
            raise HsdoptError(
                f"{self.folder} holds finished results; name another folder with -o, or replace them with --force"
            )
        if force:
            self.runs.write_bytes(b"")
        try:
            yield
        except BaseException:
            if self.runs.exists() and not self.runs.stat().st_size:
                self.runs.unlink()
            raise


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
    for plan in plans:
        for name in plan.models:
            profiled.require(name)
        if plan.target != profiled.target:
            raise InvalidArgumentError(f"expected plans that end in the target {profiled.target}; got {plan.label}")
    return list(dict.fromkeys(plans))


def _only(profiled: Profile, plans: Sequence[Plan]) -> Profile:
    """Return the profile with those models alone that some plan needs, so that no other is loaded."""
    used = {name for plan in plans for name in plan.models}
    return replace(
        profiled,
        costs={name: curve for name, curve in profiled.costs.items() if name in used},
        models={name: info for name, info in profiled.models.items() if name in used},
    )


def _workload(profiled: Profile, prompts: str | None, count: int | None) -> Workload:
    """Return the held-out half of the prompts."""
    from hsdopt.profiling import load_workload

    source = str(profiled.provenance.get("workload", "")) if prompts is None else prompts
    if not source:
        raise InvalidArgumentError("expected --prompts, since the profile names no workload")
    half = load_workload(source).validation
    return half if count is None else half.take(count)


def _asked(profiled: Profile, workload: Workload, plans: Sequence[Plan], **options: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return what tells one measurement from another, as its report keeps it."""
    return {
        "workload_sha256": workload.sha256,
        "setting": profiled.setting.model_dump(),
        "plans": [plan.label for plan in plans],
        "profile": {key: profiled.provenance.get(key) for key in ("date", "command", "workload_sha256")},
        **options,
    }


def _measured(
    profiled: Profile,
    models: Mapping[str, Model],
    workload: Workload,
    plans: Sequence[Plan],
    place: _Place,
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
    with resumable(place.runs), progress_bar() as progress:
        runs = measure_plans(
            plans,
            models,
            rendered,
            setting=profiled.setting,
            repeats=asked["repeats"],
            journal=place.runs,
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
    return _report(
        profiled,
        plans,
        runs,
        judged,
        asked=asked,
        prompts=(len(rendered), len(references)),
        provenance={**provenance(device), **asked, "workload": workload.name},
    )


def _report(
    profiled: Profile,
    plans: Sequence[Plan],
    runs: Sequence[MeasuredRun],
    judged: Mapping[str, Judgement],
    *,
    asked: Mapping[str, Any],
    prompts: tuple[int, int],
    provenance: dict[str, Any],
) -> dict[str, Any]:
    """Return quality.json: a row per plan, and the lossy ones held against the lossless ones."""
    measure: Measure = asked["measure"]
    sampled = profiled.setting.temperature > 0
    against = "own" if not sampled else "reference" if prompts[1] else None
    timed = _timed(plans, runs, profiled.target, seed=asked["seed"])
    rows = [_row(plan, timed[plan.label], judged[plan.label], profiled) for plan in plans]
    for row in rows:
        row["quality"] = None if against is None else _quality(row, measure, against)
        row["undominated"] = False
    for small in dict.fromkeys(row["small"] for row in rows if row["small"]):
        _mark_frontier([row for row in rows if row["small"] == small])
    verdicts = {} if sampled else {"own": _verdict(rows, measure, "own")}
    if prompts[1]:
        verdicts["reference"] = _verdict(rows, measure, "reference")
    return {
        "format": "hsdopt-quality",
        "schema": 1,
        "target": Level(profiled.target).label,
        "measure": measure,
        "against": against,
        "sampled": sampled,
        "prompts": prompts[0],
        "prompts_with_reference": prompts[1],
        "plans": sorted(rows, key=lambda row: float(row["time"])),
        "verdicts": {name: asdict(found) for name, found in verdicts.items()},
        "provenance": provenance,
    }


def _timed(plans: Sequence[Plan], runs: Sequence[MeasuredRun], target: str, *, seed: int) -> dict[str, PlanResult]:
    """Return the times of every plan, with intervals over prompts that are paired with the target alone."""
    import numpy as np

    from hsdopt.simulate.compare import Predictions, Run, compare

    alone = plans[0].label
    clocked = [
        Run(
            plan=run.plan,
            repeat=run.repeat,
            prompt=run.prompt,
            tokens=len(run.output) - 1,
            seconds=run.seconds,
            target_passes=sum(count for model, _, count, _ in run.passes if model == target),
            order=run.order,
        )
        for run in runs
    ]
    nothing = Predictions({"none": {}}, "none")
    found = compare(clocked, nothing, chosen=alone, autoregression=alone, rng=np.random.default_rng(seed))
    return {result.plan: result for result in found.plans}


def _row(plan: Plan, timed: PlanResult, judged: Judgement, profiled: Profile) -> Row:
    bild = plan if isinstance(plan, Bild) else None
    bounds = timed.speedup.bounds
    return {
        "plan": plan.label,
        "name": _short(plan),
        "family": timed.family,
        "lossless": plan.lossless,
        "small": None if bild is None else bild.small,
        "fallback": None if bild is None else bild.fallback,
        "rollback": None if bild is None else bild.rollback if math.isfinite(bild.rollback) else "inf",
        "seconds_per_token": timed.measured.value,
        "interval": timed.measured.bounds,
        "time": 1 / timed.speedup.value,
        "time_interval": None if bounds is None else (1 / bounds[1], 1 / bounds[0]),
        "speedup": timed.speedup.value,
        "speedup_interval": bounds,
        "tokens_per_pass": timed.tokens_per_pass,
        "drafted_share": judged.drafted_share,
        "deviation": judged.deviation,
        "own": asdict(judged.own),
        "reference": None if judged.reference is None else asdict(judged.reference),
        "predicted": _predicted(plan, profiled),
    }


def _short(plan: Plan) -> str:
    """Return a name for tables: of Big Little Decoder the small model, fallback and rollback."""
    if not isinstance(plan, Bild):
        return plan.label
    usual = Bild(plan.large, plan.small, plan.fallback, plan.rollback, plan.max_draft, semantics=plan.semantics)
    return f"bild({plan.small}, {plan.fallback:g}, {plan.rollback:g})" if plan == usual else plan.label


def _predicted(plan: Plan, profiled: Profile) -> dict[str, float | None]:
    """Return what the profile says of time and deviation; None where it says nothing of the setting or the plan."""
    from hsdopt.latency import expected_latency
    from hsdopt.simulate import replay
    from hsdopt.solvers.bild import deviation

    alone = Level(profiled.target)
    if profiled.traces is None:
        return {"closed_form": None, "trace_replay": None, "deviation": None}
    tokens = profiled.setting.max_new_tokens - 1
    traces = profiled.traces
    return {
        "closed_form": _or_none(lambda: 1 / expected_latency(plan, profiled, tokens=tokens).speedup),
        "trace_replay": _or_none(
            lambda: replay(plan, profiled).seconds_per_token / replay(alone, profiled).seconds_per_token
        ),
        "deviation": _or_none(lambda: deviation(plan, traces)) if isinstance(plan, Bild) else None,
    }


def _or_none(predict: Callable[[], float]) -> float | None:
    try:
        return predict()
    except PredictionError:
        return None


def _quality(row: Row, measure: Measure, against: str) -> float | None:
    found = row[against]
    return None if found is None else float(found[measure.replace("-", "_")])


def _points(rows: Sequence[Row], measure: Measure, against: str) -> list[Point]:
    from hsdopt.profiling.quality import Point

    pairs = [(row, _quality(row, measure, against)) for row in rows]
    return [Point(row["name"], row["time"], value) for row, value in pairs if value is not None]


def _mark_frontier(rows: Sequence[Row]) -> None:
    """Mark the rows that none of these beats in both time and quality."""
    from hsdopt.profiling.quality import Point, undominated

    points = [Point(row["plan"], row["time"], row["quality"]) for row in rows if row["quality"] is not None]
    kept = {point.plan for point in undominated(points)}
    for row in rows:
        row["undominated"] = row["plan"] in kept


def _verdict(rows: Sequence[Row], measure: Measure, against: str) -> Verdict:
    """Hold the grid against the lossless plans; by references, lossless is what the target alone gives."""
    from hsdopt.profiling.quality import verdict

    alone = next(row for row in rows if row["family"] == "autoregression")
    rivals = [row for row in rows if row["lossless"]]
    limit = _quality(alone, measure, against)
    assert limit is not None  # noqa: S101 -- asked for only where it is known
    lossy = [row for row in rows if not row["lossless"]]
    return verdict(limit, _points(rivals, measure, against), _points(lossy, measure, against))


def _write(report: dict[str, Any], place: _Place) -> None:
    """Write the frontier and quality.json; the journal goes only when everything else is there."""
    import matplotlib.pyplot as plt

    from hsdopt.plots import quality_frontier, save_figure

    if report["against"] is not None:
        figure = quality_frontier(report).get_figure(root=True)
        assert figure is not None  # noqa: S101 -- axes just drawn have a figure
        save_figure(figure, place.folder / "frontier")
        plt.close(figure)
    write_text(place.report, json.dumps(report, indent=2) + "\n")
    place.runs.unlink(missing_ok=True)


def _show(report: Mapping[str, Any], folder: Path, *, predicted: bool) -> None:
    """Print the plans, fastest first, the verdicts, and where the rest is."""
    typer.echo("time per token, the target alone = 1; bild(small model, fallback, rollback)")
    output().print(_table(report))
    if predicted:
        output().print(_predictions(report))
    for line in (*_legend(report), *_verdict_lines(report)):
        output().print(line)
    typer.echo(f"frontier: {folder / 'frontier.png'}" if report["against"] else f"report: {folder / 'quality.json'}")


def _table(report: Mapping[str, Any]) -> Table:
    known = report["prompts_with_reference"] > 0
    table = new_table("plan", "time", "95 %", "drafted", "same", "BLEU", "ROUGE-L", *(["ref."] if known else []))
    for row in report["plans"]:
        bounds = row["time_interval"]
        own, answer = row["own"], _quality(row, report["measure"], "reference")
        table.add_row(
            row["name"],
            f"{row['time']:.2f}",
            "" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f}",
            f"{row['drafted_share']:.0%}",
            f"{own['agreement']:.0%}",
            f"{own['bleu']:.1f}",
            f"{own['rouge_l']:.1f}",
            *([] if not known else ["" if answer is None else f"{answer:.1f}"]),
        )
    return table


def _predictions(report: Mapping[str, Any]) -> Table:
    """Return times and deviations as predicted and as measured."""
    table = new_table("plan", "time", "closed form", "replay", "deviates", "predicted")
    for row in report["plans"]:
        said = row["predicted"]
        times = (row["time"], said["closed_form"], said["trace_replay"])
        shares = (row["deviation"], said["deviation"])
        table.add_row(
            row["name"],
            *("" if value is None else f"{value:.2f}" for value in times),
            *("" if value is None else f"{value:.1%}" for value in shares),
        )
    return table


def _legend(report: Mapping[str, Any]) -> Iterator[str]:
    known, count = report["prompts_with_reference"], report["prompts"]
    own = "the target's output, drawn apart" if report["sampled"] else "the target's output"
    yield f"drafted: tokens that are not the target's own; same (tokens), BLEU, ROUGE-L: against {own}"
    if known:
        yield f"ref.: {_NAMES[report['measure']]} against references, for prompts that have one ({known} of {count})"
    if count < _FEW:
        yield f"so few prompts ({count}) show little about quality: use more before choosing by it"


def _verdict_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what lossy decoding gains at equal latency and at equal quality, or that it gains nothing."""
    name = _NAMES[report["measure"]]
    found = report["verdicts"]
    if "own" in found:
        yield _at_equal_latency(found["own"], name)
        yield _at_equal_quality(found["own"], name, "equal quality")
    if "reference" in found:
        yield _at_equal_quality(found["reference"], name, "equal quality by the references")
    if not found:
        yield "no verdict: outputs are drawn and no prompt has a reference, so nothing tells loss from chance"


def _at_equal_latency(found: Mapping[str, Any], name: str) -> str:
    rival, point, fastest = found["lossless"], found["equal_latency"], found["fastest"]
    if rival is None or fastest is None:
        return "equal latency: nothing to compare with"
    start = f"equal latency: the best lossless plan, {rival['plan']}, takes {rival['time']:.2f}"
    if point is None:
        return f"{start}; no setting is as fast, {_at(fastest, name)} is the fastest"
    return f"{start}; {_at(point, name)} is the best of those as fast (lossless: {found['limit']:.1f})"


def _at_equal_quality(found: Mapping[str, Any], name: str, start: str) -> str:
    rival, point, limit = found["lossless"], found["equal_quality"], found["limit"]
    if rival is None or point is None:
        return f"{start}: nothing to compare with"
    speeds = f"speed-up {1 / point['time']:.2f}, lossless at best {1 / rival['time']:.2f}"
    values = f"{name} {point['quality']:.1f}, lossless {limit:.1f}"
    if found["kept"]:
        return f"{start}: {point['plan']} is the fastest of those that lose nothing ({values}): {speeds}"
    return f"{start}: every setting loses some; {point['plan']} loses least ({values}): {speeds}"


def _at(point: Mapping[str, Any], name: str) -> str:
    return f"{point['plan']} at {point['time']:.2f} with {name} {point['quality']:.1f}"
