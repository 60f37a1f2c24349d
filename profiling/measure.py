"""`profile`: measure a target and its drafters on a workload, saving as it goes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hsdopt.costs import CONTEXT_SLACK, CostCurve, CostSample
from hsdopt.errors import InvalidArgumentError, ModelError
from hsdopt.plan import LOOKUP, Level
from hsdopt.profiles import ModelInfo, Profile, Setting
from hsdopt.profiling.acceptance import PromptTrace, assemble, score_output
from hsdopt.profiling.cost import (
    NEW_TOKENS,
    Cell,
    CostRecord,
    PassTimer,
    SwitchRecord,
    choose_contexts,
    collect,
    fitting,
    measure_costs,
    measure_switches,
    outliers,
    relative_error,
    switch_seconds,
)
from hsdopt.profiling.flops import shape_of
from hsdopt.profiling.hardware import device_name, provenance
from hsdopt.profiling.journal import Journal
from hsdopt.profiling.overhead import overhead_seconds, rounds_of
from hsdopt.profiling.workload import Workload, render
from hsdopt.runtime import generate
from hsdopt.runtime.lookup import Bigrams, Lookup
from hsdopt.runtime.model import Model, check_vocabulary

__all__ = ["check_room", "model_info", "profile", "render_prompts", "trace_prompts"]

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

CLOSING = "prefills and rounds"
"""The stage of progress at the end of a profile."""

MOST = 30
_SINGLES = 4  # times as many timings of passes over one token as of others
_SWITCHES = 24  # pairs of passes of every network, behind another one's and behind an own one
"""Timings of a kind of pass after which more would hardly help."""


@dataclass(frozen=True, slots=True)
class Task:
    """Everything one profiling run measures, settled before it starts."""

    models: Mapping[str, Model]
    target: str
    prompts: Mapping[str, tuple[int, ...]]
    setting: Setting
    contexts: tuple[int, ...]
    tokens: tuple[int, ...]
    repeats: int
    precision: float | None = None

    @property
    def networks(self) -> dict[str, Model]:
        return {name: model for name, model in self.models.items() if model.kind != LOOKUP}

    @property
    def header(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "models": {name: [model.source, str(model.dtype)] for name, model in self.models.items()},
            "prompts": {key: digest(ids) for key, ids in self.prompts.items()},
            "setting": self.setting.model_dump(),
            "contexts": self.contexts,
            "tokens": self.tokens,
            "repeats": self.repeats,
            **({} if self.precision is None else {"precision": self.precision}),
            "machine": machine(self.models[self.target]),
        }


def profile(
    target: str,
    drafters: Sequence[str],
    workload: Workload,
    *,
    models: Mapping[str, Model],
    journal: str | Path,
    setting: Setting | None = None,
    contexts: Sequence[int] | None = None,
    tokens: Sequence[int] = NEW_TOKENS,
    repeats: int = 5,
    precision: float | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Profile:
    """Return the profile of `target` and `drafters` on the profiling half of `workload`.

    Every measurement is in `journal` before the next is taken; the journal is left for the caller to
    finish once the profile is saved (`Journal.finish`, or deleting the file).

    Parameters
    ----------
    target : str
        Name of the target in `models`.
    drafters : sequence of str
        Names of the drafters, "lookup" among them if wanted.
    workload : Workload
        Its profiling half is measured.
    models : mapping of str to Model
        Loaded models by name (`hsdopt.runtime.load_models`).
    journal : str or Path
        Where measurements are kept until the profile is complete.
    setting : Setting, optional
        Temperature, filters and output length; greedy with 48 tokens if not given.
    contexts, tokens : sequence of int, optional
        Context lengths and numbers of new tokens to time; contexts are chosen from the workload if not given.
    repeats : int
        Timings of every kind of pass.
    precision : float, optional
        Time kinds of pass further whose median has a larger standard error than this fraction of it, up to 30 times.
    resume : bool
        Continue the journal.
    progress : callable, optional
        Called with (stage, done, total).

    Raises
    ------
    InvalidArgumentError
        If a name is not among the models, or numbers are out of range.
    VocabularyError
        If a drafter does not share the target's vocabulary.
    ProfileError
        If the journal cannot be continued or written.
    """
    task = settle(
        target,
        drafters,
        workload,
        models,
        setting=Setting() if setting is None else setting,
        contexts=contexts,
        tokens=tokens,
        repeats=repeats,
        precision=precision,
    )
    record = Journal(Path(journal), task.header, resume=resume)
    report = progress or silent
    traces = list(_traces(task.networks, target, task.prompts, setting=task.setting, journal=record, report=report))
    lookup = lookup_table(traces) if LOOKUP in task.models else None
    costs = time_passes(
        task.networks,
        record,
        traces,
        tokens=task.tokens,
        contexts=task.contexts,
        repeats=task.repeats,
        precision=task.precision,
        table=lookup,
        report=report,
    )
    switches = time_switches(task.networks, record, traces, target=target, contexts=task.contexts, report=report)
    report(CLOSING, 0, 1)
    measured = finished_profile(task, workload, traces, costs, lookup, switches=switches)
    report(CLOSING, 1, 1)
    return measured


def trace_prompts(
    models: Mapping[str, Model],
    target: str,
    prompts: Mapping[str, Sequence[int]],
    *,
    setting: Setting,
    journal: str | Path,
    resume: bool = False,
    progress: Progress | None = None,
) -> tuple[PromptTrace, ...]:
    """Return the traces of rendered prompts: the target's output, and what every network says along it.

    Parameters
    ----------
    models : mapping of str to Model
        The target and its drafters; the lookup drafter makes no traces here.
    target : str
    prompts : mapping of str to sequence of int
        Token ids by prompt id.
    setting : Setting
    journal : str or Path
        Every trace is there before the next is taken.
    resume : bool
        Continue the journal.
    progress : callable, optional
        Called with (stage, done, total).

    Raises
    ------
    ProfileError
        If the journal cannot be continued or written.
    """
    networks = {name: model for name, model in models.items() if model.kind != LOOKUP}
    header = {
        "target": target,
        "models": {name: model.source for name, model in networks.items()},
        "prompts": {key: digest(ids) for key, ids in prompts.items()},
        "setting": setting.model_dump(),
        "machine": machine(models[target]),
    }
    record = Journal(Path(journal), header, resume=resume)
    report = progress or silent
    return tuple(_traces(networks, target, prompts, setting=setting, journal=record, report=report))


def model_info(model: Model, *, device: str | None = None) -> ModelInfo:
    """Return what a profile keeps of a model, enough to load it again."""
    return ModelInfo(
        source=model.source,
        kind=model.kind,
        parameters=model.parameters,
        bytes=model.bytes,
        context=model.max_positions,
        tokenizer=model.fingerprint,
        dtype=str(model.dtype or "").removeprefix("torch."),
        device=device or str(model.device or "cpu"),
        shape=None if model.network is None else shape_of(model.network),
    )


def settle(
    target: str,
    drafters: Sequence[str],
    workload: Workload,
    models: Mapping[str, Model],
    *,
    setting: Setting,
    contexts: Sequence[int] | None,
    tokens: Sequence[int],
    repeats: int,
    precision: float | None = None,
) -> Task:
    """Check everything that can be checked before minutes are spent."""
    missing = [name for name in (target, *drafters) if name not in models]
    if missing:
        raise InvalidArgumentError(f"expected a loaded model for every name; got none for {', '.join(missing)}")
    if repeats < 1:
        raise InvalidArgumentError(f"expected at least 1 repeat; got {repeats}")
    if precision is not None and not 0 < precision < 1:
        raise InvalidArgumentError(f"expected a precision between 0 and 1, such as 0.02; got {precision}")
    if target in drafters or target == LOOKUP:
        raise InvalidArgumentError(f"expected drafters other than the target {target}, and a language model as target")
    chosen = {name: models[name] for name in (target, *dict.fromkeys(drafters))}
    check_kinds(chosen)
    for name, model in chosen.items():
        if model.kind != LOOKUP and name != target:
            check_vocabulary(models[target], model)
    prompts = render_prompts(workload.profiling, models[target])
    check_room(chosen, prompts.values(), setting.max_new_tokens)
    counts = tuple(sorted(set(tokens)))
    limit = min((model.max_positions for model in chosen.values() if model.max_positions is not None), default=None)
    starts = [len(models[target].opening(ids)) for ids in prompts.values()]
    if contexts is None:
        most = None if limit is None else limit - counts[-1]
        where = choose_contexts(starts, setting.max_new_tokens, most=most)
    else:
        where = tuple(sorted(set(contexts)))
        _check_contexts(where, chosen, max(starts) + setting.max_new_tokens)
    return Task(chosen, target, prompts, setting, where, counts, repeats, precision)


def _trace_by_id(record: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return str(record["id"]), PromptTrace.from_record(record["trace"]).to_record()


def render_prompts(workload: Workload, target: Model) -> dict[str, tuple[int, ...]]:
    """Return the token ids of every prompt, by its id, as the target's tokenizer renders them.

    Raises
    ------
    ModelError
        If the target has no tokenizer.
    """
    if target.tokenizer is None:
        raise ModelError(f"expected a tokenizer with {target.name} to encode prompts; load it from a folder with one")
    return {prompt.id: tuple(render(prompt, target.tokenizer)) for prompt in workload}


def check_room(models: Mapping[str, Model], prompts: Collection[Sequence[int]], max_new_tokens: int) -> None:
    """Raise ModelError if a model's positions do not hold the longest prompt and its output."""
    for name, model in models.items():
        longest = max(len(model.opening(prompt)) for prompt in prompts) + max_new_tokens
        if model.max_positions is not None and model.max_positions < longest:
            raise ModelError(
                f"{name}: expected room for the longest prompt and its output, {longest} tokens; the model holds "
                f"{model.max_positions}: shorten the prompts or --max-new-tokens, or leave {name} out"
            )


def _check_contexts(contexts: Sequence[int], models: Mapping[str, Model], longest: int) -> None:
    """Refuse contexts that a model does not hold, or behind which costs of the workload cannot be read."""
    for name, model in models.items():
        if model.max_positions is not None and contexts[-1] >= model.max_positions:
            raise InvalidArgumentError(
                f"expected contexts below the {model.max_positions} positions of {name}; got {contexts[-1]}: "
                f"shorten --contexts, or leave {name} out"
            )
    if len(contexts) > 1 and contexts[-1] * CONTEXT_SLACK < longest:
        raise InvalidArgumentError(
            f"expected contexts up to {longest} tokens, the longest prompt with its output; got {contexts[-1]}: "
            "give longer --contexts, or leave the choice to hsdopt"
        )


def check_kinds(models: Mapping[str, Model]) -> None:
    """Raise InvalidArgumentError unless the lookup drafter, and it alone, is called lookup."""
    for name, model in models.items():
        if (model.kind == LOOKUP) != (name == LOOKUP):
            raise InvalidArgumentError(
                f"expected the name {LOOKUP} for the lookup drafter and for it alone; got {name} for {model.source}"
            )


def machine(target: Model) -> dict[str, Any]:
    """Return what timings must have in common to stand side by side."""
    return {"device": device_name(str(target.device or "cpu")), "threads": torch.get_num_threads()}


def _traces(
    networks: Mapping[str, Model],
    target: str,
    prompts: Mapping[str, Sequence[int]],
    *,
    setting: Setting,
    journal: Journal,
    report: Progress,
) -> Iterator[PromptTrace]:
    """Yield the trace of every prompt, from the journal where it stands there."""
    stored = dict(journal.read(_trace_by_id, holding="trace"))
    for index, (key, prompt) in enumerate(prompts.items()):
        if key not in stored:
            trace = trace_prompt(networks, target, prompt, setting, seed=index)
            journal.add(id=key, trace=trace.to_record())
            stored[key] = trace.to_record()
        report("acceptance", index + 1, len(prompts))
        yield PromptTrace.from_record(stored[key])


def trace_prompt(
    networks: Mapping[str, Model], target: str, prompt: Sequence[int], setting: Setting, *, seed: int
) -> PromptTrace:
    """Return what every network says along the output that the target writes after one prompt."""
    options = setting.model_dump()
    output = generate(Level(target), networks, list(prompt), ignore_eos=True, seed=seed, **options)
    trace = score_output(networks, target, prompt, output.tokens, setting=setting)
    return replace(trace, outside=rounds_of(output).outside)


def lookup_table(traces: Sequence[PromptTrace]) -> Bigrams:
    """Return the bigrams of prompts and outputs, which the lookup drafter falls back on."""
    return Bigrams.of([[*trace.prompt, *trace.tokens] for trace in traces])


def time_passes(
    networks: Mapping[str, Model],
    journal: Journal,
    traces: Sequence[PromptTrace],
    *,
    tokens: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    table: Bigrams | None,
    report: Progress,
    precision: float | None = None,
) -> list[CostRecord]:
    """Return all cost records: those in the journal, and those it lacks, which are added to it."""
    records = journal.read(lambda record: CostRecord(**record["cost"]), holding="cost")
    text, prompt = filler(traces)
    lookup = None if table is None else Lookup(table)
    kinds = [fitting(model, tokens, contexts) for model in networks.values()]
    passes = sum(len(sizes) + (_SINGLES - 1) * (1 in sizes) for sizes in kinds)
    total = repeats * len(contexts) * (passes + (table is not None))
    done = [(r.model, r.tokens, r.context, r.repeat) for r in records]
    options: dict[str, Any] = {"text": text, "prompt": prompt, "lookup": lookup}
    grid: dict[str, Any] = {"tokens": tokens, "contexts": contexts, "repeats": repeats, "singles": _SINGLES}
    new = measure_costs(networks, done=done, **grid, **options)
    for record in new:
        journal.add(cost=asdict(record))
        records.append(record)
        report("pass costs", len(records), total)
    if precision is not None:
        timer = PassTimer(networks, longest=max(contexts) + max(tokens), **options)
        _sharpen(records, journal, timer, precision, report)
    return records


def _sharpen(records: list[CostRecord], journal: Journal, timer: PassTimer, precision: float, report: Progress) -> None:
    """Time further what is not known to `precision` yet; progress is the number of kinds of pass that are settled."""
    taken = _by_cell(records)
    vague = {cell for cell, seconds in taken.items() if _vague(seconds, precision)}
    for record in sharpened(records, timer, precision):
        journal.add(cost=asdict(record))
        cell = (record.model, record.tokens, record.context)
        taken[cell].append(record.seconds)
        if not _vague(taken[cell], precision):
            vague.discard(cell)
        report("precision", len(taken) - len(vague), len(taken))
    report("precision", len(taken), len(taken))


def _by_cell(records: Sequence[CostRecord]) -> dict[Cell, list[float]]:
    cells: dict[Cell, list[float]] = {}
    for record in records:
        cells.setdefault((record.model, record.tokens, record.context), []).append(record.seconds)
    return cells


def _vague(seconds: Sequence[float], precision: float) -> bool:
    return len(seconds) < MOST and relative_error(seconds) > precision


def time_switches(
    networks: Mapping[str, Model],
    journal: Journal,
    traces: Sequence[PromptTrace],
    *,
    target: str,
    contexts: Sequence[int],
    report: Progress,
    only: Collection[str] | None = None,
) -> list[SwitchRecord]:
    """Return pairs of passes behind another network's and behind an own one; `only` of some networks, if given.

    A run that was stopped among them takes all of them anew.
    """
    records = journal.read(lambda record: SwitchRecord(**record["switch"]), holding="switch")
    wanted = [name for name in networks if only is None or name in only]
    if len(records) < _SWITCHES * len(wanted):
        text, prompt = filler(traces)
        context = contexts[len(contexts) // 2]
        options: dict[str, Any] = {"context": context, "repeats": _SWITCHES, "text": text, "prompt": prompt}
        records, total = [], _SWITCHES * len(wanted)
        for record in measure_switches(networks, target, only=wanted, **options):
            journal.add(switch=asdict(record))
            records.append(record)
            report("switches", len(records), total)
        if records:
            report("switches", total, total)  # a network without room for such passes has none
    return records


def sharpened(records: list[CostRecord], timer: PassTimer, precision: float) -> Iterator[CostRecord]:
    """Add to `records`, and yield, further timings of what is not known to `precision` yet."""
    cells = _by_cell(records)
    while vague := [cell for cell, taken in cells.items() if _vague(taken, precision)]:
        for cell in vague:
            records.append(CostRecord(*cell, len(cells[cell]), timer.time(cell)))
            cells[cell].append(records[-1].seconds)
            yield records[-1]


def filler(traces: Sequence[PromptTrace]) -> tuple[list[int], tuple[int, ...]]:
    """Return the text that fills caches while passes are timed, and the prompt of middle length for encoders."""
    text = [token for trace in traces for token in (*trace.prompt, *trace.tokens)]
    return text, sorted((trace.prompt for trace in traces), key=len)[len(traces) // 2]


def silent(*_: object) -> None:
    """Report nothing."""


def finished_profile(
    task: Task,
    workload: Workload,
    traces: Sequence[PromptTrace],
    costs: Sequence[CostRecord],
    table: Bigrams | None,
    *,
    switches: Sequence[SwitchRecord] = (),
    **more: Any,  # noqa: ANN401 -- any JSON value
) -> Profile:
    """Return what was measured as a profile; `more` joins its provenance."""
    samples, curves = cost_curves(costs, switches)
    device = str(task.models[task.target].device or "cpu")
    return Profile(
        task.target,
        {name: curves[name] for name in task.models},
        models={name: model_info(model) for name, model in task.models.items()},
        setting=task.setting,
        samples={name: samples[name] for name in task.models},
        traces=assemble(traces, lookup=None if table is None else leave_one_out(traces)),
        lookup=table_arrays(table),
        overhead=overhead_seconds(_with_table(task.models, table), task.target, traces, setting=task.setting),
        provenance={
            **provenance(device),
            "workload": workload.name,
            "workload_sha256": workload.sha256,
            "prompts": list(task.prompts),
            "prompts_sha256": digest([digest(ids) for ids in task.prompts.values()]),
            "contexts": list(task.contexts),
            "batch": 1,
            "repeats": task.repeats,
            **({} if task.precision is None else {"precision": task.precision}),
            "outliers": _outliers(samples),
            **more,
        },
    )


def _outliers(samples: Mapping[str, tuple[CostSample, ...]]) -> list[str]:
    """Return a line for every kind of pass with timings far from the others; they count all the same."""
    return [
        f"{name}, {sample.tokens} tokens at {sample.context}: {', '.join(f'{value:.3g}' for value in found)} s against "
        f"a median of {sample.median:.3g} s over {len(sample.seconds)} timings"
        for name, taken in samples.items()
        if name != LOOKUP
        for sample in taken
        if (found := outliers(sample))
    ]


def cost_curves(
    records: Sequence[CostRecord], switches: Iterable[SwitchRecord] = ()
) -> tuple[dict[str, tuple[CostSample, ...]], dict[str, CostCurve]]:
    """Return samples and cost curve of every model in `records`."""
    samples, switch = collect(records), switch_seconds(switches)
    curves = {
        name: CostCurve.from_samples(taken, switch=switch.get(name, 0.0))
        for name, taken in samples.items()
        if name != LOOKUP
    }
    if LOOKUP in samples:
        seconds = [seconds for sample in samples[LOOKUP] for seconds in sample.seconds]
        curves[LOOKUP] = CostCurve.fixed(float(np.median(seconds)))
    return samples, curves


def _with_table(models: Mapping[str, Model], table: Bigrams | None) -> dict[str, Model]:
    if table is None or LOOKUP not in models:
        return dict(models)
    return {**models, LOOKUP: models[LOOKUP].with_bigrams(table)}


def table_arrays(table: Bigrams | None) -> dict[str, NDArray[np.int64]]:
    """Return a lookup table as a profile keeps it."""
    return {} if table is None else {"previous": table.previous, "following": table.following}


def digest(value: Sequence[int] | Sequence[str]) -> str:
    """Return a short hash of token ids, or of other hashes."""
    return hashlib.sha256(json.dumps(list(value)).encode()).hexdigest()[:16]


def leave_one_out(traces: Sequence[PromptTrace]) -> Callable[[int], Lookup]:
    """Return lookup drafters, by prompt, that never saw it and its output, so that rates hold for new prompts."""

    def without(index: int) -> Lookup:
        return Lookup(lookup_table([trace for other, trace in enumerate(traces) if other != index]))

    return without
