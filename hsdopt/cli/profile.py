"""`hsdopt profile`: measure pass costs and acceptance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hsdopt.cli.common import (
    absolute,
    aliases,
    load_profile,
    milliseconds,
    new_table,
    output,
    output_file,
    print_json,
    progress_bar,
    require_extra,
    require_sources,
    seconds_of,
    status,
    whole_numbers,
)
from hsdopt.cli.faults import resumable
from hsdopt.cli.place import refuse_both
from hsdopt.errors import InvalidArgumentError, ProfileError

if TYPE_CHECKING:
    from hsdopt.profiles import Profile, Setting
    from hsdopt.profiling import Workload

Target = Annotated[
    str | None, typer.Option("--target", help="The model to speed up: built-in name, folder, GGUF file or hub id.")
]
Drafts = Annotated[list[str], typer.Option("--draft", help="A drafter, as SOURCE or NAME=SOURCE; repeat for more.")]
Prompts = Annotated[str | None, typer.Option("--prompts", help="mixed, copy, chat, or a file of prompts.")]
Out = Annotated[
    Path | None, typer.Option("--output", "-o", help="Where the profile goes: profile.json, or the one of --into.")
]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=2, help="Tokens written per prompt.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0)]
TopK = Annotated[int, typer.Option("--top-k", min=0)]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; the model's own if not given.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")]
Contexts = Annotated[str | None, typer.Option("--contexts", help="Context lengths to time, such as 64,256,1024.")]
Count = Annotated[int | None, typer.Option("--max-prompts", min=1, help="Use at most this many profiling prompts.")]
Repeats = Annotated[int | None, typer.Option("--repeats", min=1, help="Timings of every kind of pass (default 5).")]
Precision = Annotated[
    float | None,
    typer.Option("--precision", help="Time further what is known less precisely than this, as a fraction: 0.02."),
]
Budget = Annotated[
    str | None,
    typer.Option("--budget", help="Measure what the choice of a plan needs, for at most so long: 90s, 3m, 1h."),
]
Confidence = Annotated[
    float | None,
    typer.Option("--confidence", help="With --budget: stop once a plan is within 2 % of the best this surely (0.95)."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted profile.")]
Force = Annotated[bool, typer.Option("--force", help="Measure afresh, whatever is at -o, and replace it when done.")]
Into = Annotated[
    Path | None, typer.Option("--into", help="Add the drafters to this profile; what it holds stays as it is.")
]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Let a hub model run its own code.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def profile(
    draft: Drafts,
    target: Target = None,
    prompts: Prompts = None,
    output_path: Out = None,
    max_new_tokens: NewTokens = 48,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    device: Device = "cpu",
    dtype: Dtype = None,
    threads: Threads = None,
    contexts: Contexts = None,
    max_prompts: Count = None,
    repeats: Repeats = None,
    precision: Precision = None,
    budget: Budget = None,
    confidence: Confidence = None,
    resume: Resume = False,
    force: Force = False,
    into: Into = None,
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """Measure each model's pass cost and every pair's acceptance on your hardware and prompts.

    Every measurement is saved as soon as it is taken: stopped in the middle, the same command with --resume
    goes on. A finished profile is replaced with --force only, and not before the new one is complete.

    With --budget measuring goes where the choice of a plan needs it, and stops as soon as one is known to be within
    2 % of the best (or when time is up); what was decided, ruled out and left open is printed and kept.
    """
    chosen = aliases([*([] if target is None else [target]), *draft])
    loading = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if into is not None:
        given = {"repeats": repeats, "precision": precision, "budget": budget, "confidence": confidence}
        _refuse_with_into(target=target, max_prompts=max_prompts, contexts=contexts, **given)
        place = _Place(output_file(output_path or into), resume=resume, force=force)
        path = _extend(into, chosen, place, prompts=prompts, threads=threads, loading=loading)
    else:
        if target is None or prompts is None:
            missing = "--target" if target is None else "--prompts"
            raise InvalidArgumentError(f"expected {missing}, unless drafters are added --into a profile; got none")
        place = _Place(output_file(output_path or Path("profile.json")), resume=resume, force=force)
        asked = _Asked(
            _setting(temperature, top_p, top_k, max_new_tokens),
            whole_numbers(contexts, "contexts"),
            _effort(repeats, precision, budget, confidence),
            _workload(prompts, max_prompts),
        )
        path = _measure(chosen, asked, place, {**loading, "device": device, "threads": threads})
    _show(path, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a profile goes, and what to do about one that is there."""

    path: Path
    resume: bool
    force: bool

    @property
    def journal(self) -> Path:
        """Where measurements are kept until the profile is complete."""
        return self.path.with_name(self.path.name + ".partial")

    def clear(self) -> None:
        """Refuse to replace a finished profile unless told; forget an unfinished one when told."""
        refuse_both(resume=self.resume, force=self.force)
        if self.force:
            self.journal.write_bytes(b"")  # from here on --resume means this measurement, not the finished one
        elif self.path.exists() and not self._begun():
            raise ProfileError(f"{self.path} is there already; name another file with -o, or replace it with --force")

    def _begun(self) -> bool:
        """Whether there is something to continue: an empty journal was left by --force, and only --resume goes on."""
        return self.journal.exists() and (self.resume or self.journal.stat().st_size > 0)

    def keep(self, measured: Profile) -> Path:
        """Save the profile; the journal goes only once that is done."""
        measured.save(self.path)
        self.journal.unlink(missing_ok=True)
        return self.path


@dataclass(frozen=True, slots=True)
class _Effort:
    """How much is to be measured: so many timings, or what a decision needs within a budget of seconds."""

    repeats: int = 5
    precision: float | None = None
    budget: float | None = None
    confidence: float = 0.95

    @classmethod
    def of(cls, profiled: Profile) -> _Effort:
        """Return the effort that a finished profile was measured with."""
        stored = profiled.provenance
        budget = stored.get("budget")
        if budget is not None:
            return cls(budget=budget["seconds"], confidence=budget["confidence"])
        return cls(int(stored.get("repeats", 0)), stored.get("precision"))

    def __str__(self) -> str:
        """Return the options that ask for it."""
        if self.budget is not None:
            return f"--budget {self.budget:g}s --confidence {self.confidence:g}"
        return f"--repeats {self.repeats}" + ("" if self.precision is None else f" --precision {self.precision:g}")


def _effort(repeats: int | None, precision: float | None, budget: str | None, confidence: float | None) -> _Effort:
    if budget is None:
        if confidence is not None:
            raise InvalidArgumentError("expected --budget with --confidence, such as --budget 3m; got none")
        if precision is not None and not 0 < precision < 1:
            raise InvalidArgumentError(f"expected --precision between 0 and 1, such as 0.02; got {precision:g}")
        return _Effort(5 if repeats is None else repeats, precision)
    for option, value in (("--repeats", repeats), ("--precision", precision)):
        if value is not None:
            raise InvalidArgumentError(f"expected no {option} with --budget, which settles how often passes are timed")
    sure = 0.95 if confidence is None else confidence
    if not 0.5 <= sure < 1:
        raise InvalidArgumentError(f"expected --confidence of at least 0.5 and below 1, such as 0.95; got {sure:g}")
    return _Effort(budget=seconds_of(budget), confidence=sure)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be measured."""

    setting: Setting
    contexts: tuple[int, ...] | None
    effort: _Effort
    workload: Workload

    def difference(self, profiled: Profile, sources: dict[str, str]) -> str | None:
        """Return how a finished profile differs from what is asked for, or None if it does not."""
        stored = profiled.provenance
        pairs: dict[str, tuple[Any, Any]] = {
            "models": (
                {name: profiled.models[name].source for name in (profiled.target, *profiled.drafters)},
                sources,
            ),
            "setting": (profiled.setting.model_dump(), self.setting.model_dump()),
            "workload": (stored.get("workload_sha256"), self.workload.sha256),
            "options": (str(_Effort.of(profiled)), str(self.effort)),
        }
        if self.contexts is not None:
            pairs["contexts"] = (stored.get("contexts"), sorted(set(self.contexts)))
        return next((f"its {what} are {old}, not {new}" for what, (old, new) in pairs.items() if old != new), None)


def _setting(temperature: float, top_p: float, top_k: int, max_new_tokens: int) -> Setting:
    from hsdopt.profiles import Setting

    if not math.isfinite(temperature):
        raise InvalidArgumentError(f"expected a finite temperature; got {temperature}")
    if not 0 < top_p <= 1:
        raise InvalidArgumentError(f"expected --top-p above 0 and at most 1; got {top_p:g}")
    return Setting(temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=max_new_tokens)


def _workload(prompts: str, count: int | None) -> Workload:
    with require_extra("runtime"):
        from hsdopt.profiling import load_workload
    workload = load_workload(prompts)
    return workload if count is None else workload.take(2 * count)


def _measure(chosen: dict[str, str], asked: _Asked, place: _Place, loading: dict[str, Any]) -> Path:
    """Measure a profile, or find it complete; return where it is."""
    with require_extra("runtime"):
        from hsdopt.runtime import load_models
    sources = {name: absolute(source) for name, source in chosen.items()}
    if place.resume and place.path.exists() and not place.journal.exists():
        difference = asked.difference(load_profile(place.path), sources)
        if difference is not None:
            raise ProfileError(f"{place.path} is complete, but {difference}: name another file with -o, or add --force")
        status().print(f"{place.path} is complete already")
        return place.path
    place.clear()
    target, *drafters = sources
    models = load_models(sources, **loading)
    with resumable(place.journal), progress_bar() as report:
        options = {"models": models, "journal": place.journal, "resume": place.resume, "progress": report}
        measured = _measured(target, drafters, asked, **options)
        return place.keep(measured)


def _measured(target: str, drafters: list[str], asked: _Asked, **options: Any) -> Profile:  # noqa: ANN401 -- handed on
    """Measure a profile, by the clock or by counts."""
    from hsdopt.cli.predictions import replayer
    from hsdopt.profiling import profile as measure
    from hsdopt.profiling import profile_within

    effort = asked.effort
    options |= {"setting": asked.setting, "contexts": asked.contexts}
    if effort.budget is None:
        counts: dict[str, Any] = {"repeats": effort.repeats, "precision": effort.precision}
        return measure(target, drafters, asked.workload, **counts, **options)
    limits: dict[str, Any] = {"budget": effort.budget, "confidence": effort.confidence, "predictor": replayer}
    return profile_within(target, drafters, asked.workload, **limits, **options)


def _refuse_with_into(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise InvalidArgumentError(f"expected no {option} with --into, which measures as the profile was measured")


def _extend(
    into: Path,
    chosen: dict[str, str],
    place: _Place,
    *,
    prompts: str | None,
    threads: int | None,
    loading: dict[str, Any],
) -> Path:
    """Add drafters to a profile; return where the result is."""
    with require_extra("runtime"):
        from hsdopt.profiling import add_drafters, load_workload
        from hsdopt.profiling.hardware import require_same_device, use_threads
        from hsdopt.runtime import load_models
    profiled = load_profile(into)
    require_sources(profiled)
    if place.path != into:
        place.clear()
    device = profiled.models[profiled.target].device
    use_threads(threads, profiled.provenance)
    require_same_device(dict(profiled.provenance), device)
    workload = load_workload(str(profiled.provenance.get("workload", "")) if prompts is None else prompts)
    added = {name: absolute(source) for name, source in chosen.items()}
    own = {name: profiled.models[name].source for name in (profiled.target, *profiled.drafters)}
    twice = next((name for name in added if name in own), None)
    if twice is not None:
        raise InvalidArgumentError(f"expected drafters that {into} lacks; it has {twice}: give another NAME=SOURCE")
    loading = {**loading, "dtype": loading["dtype"] or profiled.models[profiled.target].dtype}
    models = load_models({**own, **added}, device=device, **loading)
    with resumable(place.journal), progress_bar() as report:
        measured = add_drafters(
            profiled,
            list(added),
            workload,
            models=models,
            journal=place.journal,
            resume=place.resume,
            progress=report,
        )
        return place.keep(measured)


def _show(path: Path, *, as_json: bool) -> None:
    """Print what a profile holds: costs and acceptance of every model."""
    profiled = load_profile(path)
    rows = [_row(profiled, name) for name in (profiled.target, *profiled.drafters)]
    if as_json:
        budget = profiled.provenance.get("budget")
        print_json({"profile": str(path), "models": rows} | ({} if budget is None else {"budget": budget}))
        return
    table = new_table("model", "c(1)", "c(4)", "c(8)", "c(16)", "iid", "first", "of 4", "positions", "MB")
    for row in rows:
        costs = ["" if seconds is None else milliseconds(seconds) for seconds in row["seconds_per_pass"].values()]
        known = row["published"] or {}
        rates = (row["acceptance"], known.get("first_position"), known.get("per_drafted"))
        shown = ["" if rate is None else f"{rate:.3f}" for rate in rates]
        table.add_row(row["model"], *costs, *shown, str(row["positions"] or ""), f"{row['bytes'] / 1e6:.3g}")
    typer.echo(
        f"{path}: ms per pass of n tokens, c(n); acceptance by {profiled.target}: per token judged (iid), of first "
        "tokens, and accepted / drafted in drafts of 4"
    )
    output().print(table)
    switches = [f"{row['model']} {milliseconds(row['switch_seconds'])}" for row in rows if row["switch_seconds"]]
    if switches:
        output().print(f"more ms in a pass right behind another network's: {', '.join(switches)}", soft_wrap=True)
    if "budget" in profiled.provenance:
        for line in _decision(profiled.provenance["budget"]):
            output().print(line, soft_wrap=True)


def _decision(said: dict[str, Any]) -> Iterator[str]:
    """Yield what a run under a budget decided, and what it left open."""
    read = f"{said['spent']:.0f} of {said['seconds']:.0f} s, {said['prompts']} of {said['of']} prompts"
    speed = f"{milliseconds(said['seconds_per_token'])} ms per token, {said['speedup']:.2f}x"
    within = f"within {said['within']:.0%} of the best"
    if said["resolved"]:
        yield f"pick: {said['pick']}, {speed}; {within} with {said['confidence']:.0%} confidence ({read})"
    else:
        yield f"not settled ({read}): {said['pick']} leads, {speed}"
        yield f"  {within} with {said['probability']:.0%}, not the {said['confidence']:.0%} asked for"
    for rival in said["unresolved"][:3]:
        yield f"  still open: {rival}"
    if said["needed"]:
        yield f"  it would take {said['needed']}"
    for name, reason in said["dropped"].items():
        yield f"  out: {name} ({reason})"


def _row(profiled: Profile, name: str) -> dict[str, Any]:
    from hsdopt.profiles import PUBLISHED

    cost = profiled.cost(name)
    law = None if name == profiled.target else profiled.acceptance(name, profiled.target)
    seconds = {n: cost(n, profiled.context) if n <= cost.max_tokens else None for n in (1, 4, 8, 16)}
    return {
        "model": name,
        "seconds_per_pass": seconds,
        "switch_seconds": cost.switch,
        "acceptance": None if law is None else law.rate,
        "published": None if law is None else asdict(law.published(min(PUBLISHED, profiled.max_draft_length))),
        "positions": law.trials[0] if law is not None and law.trials else None,
        "bytes": profiled.models[name].bytes,
    }
