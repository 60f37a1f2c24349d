"""`profile`: measure a target and its drafters on a workload, saving as it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsdopt.costs import CostCurve
from hsdopt.errors import InvalidArgumentError, ModelError
from hsdopt.plan import LOOKUP, Level
from hsdopt.profiles import ModelInfo, Profile, Setting
from hsdopt.profiling.acceptance import PromptTrace, assemble, score_output
from hsdopt.profiling.cost import NEW_TOKENS, CostRecord, choose_contexts, collect, measure_costs
from hsdopt.profiling.hardware import provenance
from hsdopt.profiling.journal import Journal
from hsdopt.profiling.workload import Workload, render
from hsdopt.runtime import generate
from hsdopt.runtime.lookup import Bigrams, Lookup
from hsdopt.runtime.model import Model, check_vocabulary

__all__ = ["model_info", "profile", "render_prompts", "trace_prompts"]

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


@dataclass(frozen=True, slots=True)
class _Task:
    """Everything one profiling run measures, settled before it starts."""

    models: Mapping[str, Model]
    target: str
    prompts: Mapping[str, tuple[int, ...]]
    setting: Setting
    contexts: tuple[int, ...]
    tokens: tuple[int, ...]
    repeats: int

    @property
    def networks(self) -> dict[str, Model]:
        return {name: model for name, model in self.models.items() if model.kind != LOOKUP}

    @property
    def header(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "models": {name: [model.source, str(model.dtype)] for name, model in self.models.items()},
            "prompts": {key: len(ids) for key, ids in self.prompts.items()},
            "setting": self.setting.model_dump(),
            "contexts": self.contexts,
            "tokens": self.tokens,
            "repeats": self.repeats,
            "threads": torch.get_num_threads(),
        }

    @property
    def cells(self) -> int:
        per_repeat = len(self.contexts) * (len(self.networks) * len(self.tokens) + (LOOKUP in self.models))
        return self.repeats * per_repeat


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
        Timings of every cell.
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
    task = _settle(
        target,
        drafters,
        workload,
        models,
        setting=Setting() if setting is None else setting,
        contexts=contexts,
        tokens=tokens,
        repeats=repeats,
    )
    record = Journal(Path(journal), task.header, resume=resume)
    report = progress or (lambda *_: None)
    traces = list(_traces(task.networks, target, task.prompts, setting=task.setting, journal=record, report=report))
    lookup = _lookup_table(traces) if LOOKUP in task.models else None
    costs = _costs(task, record, traces, lookup, report)
    return _assemble(task, workload, traces, costs, lookup)


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
        "prompts": {key: list(ids) for key, ids in prompts.items()},
        "setting": setting.model_dump(),
    }
    record = Journal(Path(journal), header, resume=resume)
    report = progress or (lambda *_: None)
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
    )


def _settle(
    target: str,
    drafters: Sequence[str],
    workload: Workload,
    models: Mapping[str, Model],
    *,
    setting: Setting,
    contexts: Sequence[int] | None,
    tokens: Sequence[int],
    repeats: int,
) -> _Task:
    """Check everything that can be checked before minutes are spent."""
    missing = [name for name in (target, *drafters) if name not in models]
    if missing:
        raise InvalidArgumentError(f"expected a loaded model for every name; got none for {', '.join(missing)}")
    if repeats < 1:
        raise InvalidArgumentError(f"expected at least 1 repeat; got {repeats}")
    if target in drafters or target == LOOKUP:
        raise InvalidArgumentError(f"expected drafters other than the target {target}, and a language model as target")
    chosen = {name: models[name] for name in (target, *dict.fromkeys(drafters))}
    for name, model in chosen.items():
        if model.kind != LOOKUP and name != target:
            check_vocabulary(models[target], model)
    prompts = render_prompts(workload.profiling, models[target])
    lengths = [len(ids) for ids in prompts.values()]
    where = tuple(sorted(set(contexts))) if contexts else choose_contexts(lengths, setting.max_new_tokens)
    _check_room(chosen, max(lengths) + setting.max_new_tokens)
    return _Task(chosen, target, prompts, setting, where, tuple(sorted(set(tokens))), repeats)


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


def _check_room(models: Mapping[str, Model], longest: int) -> None:
    for name, model in models.items():
        if model.max_positions is not None and model.max_positions < longest:
            raise ModelError(
                f"{name}: expected room for the longest prompt and its output, {longest} tokens; the model holds "
                f"{model.max_positions}: shorten the prompts or --max-new-tokens, or leave {name} out"
            )


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
    stored = {record["id"]: record["trace"] for record in journal.records if "trace" in record}
    for index, (key, prompt) in enumerate(prompts.items()):
        if key not in stored:
            trace = _trace(networks, target, prompt, setting, seed=index)
            journal.add(id=key, trace=trace.to_record())
            stored[key] = trace.to_record()
        report("acceptance", index + 1, len(prompts))
        yield PromptTrace.from_record(stored[key])


def _trace(
    networks: Mapping[str, Model], target: str, prompt: Sequence[int], setting: Setting, *, seed: int
) -> PromptTrace:
    options = setting.model_dump()
    output = generate(Level(target), networks, list(prompt), ignore_eos=True, seed=seed, **options)
    return score_output(networks, target, prompt, output.tokens, setting=setting)


def _lookup_table(traces: Sequence[PromptTrace]) -> Bigrams:
    return Bigrams.of([[*trace.prompt, *trace.tokens] for trace in traces])


def _costs(
    task: _Task, journal: Journal, traces: Sequence[PromptTrace], table: Bigrams | None, report: Progress
) -> list[CostRecord]:
    records = [CostRecord(**record["cost"]) for record in journal.records if "cost" in record]
    text = [token for trace in traces for token in (*trace.prompt, *trace.tokens)]
    new = measure_costs(
        task.networks,
        tokens=task.tokens,
        contexts=task.contexts,
        repeats=task.repeats,
        text=text,
        lookup=None if table is None else Lookup(table),
        done=[(r.model, r.tokens, r.context, r.repeat) for r in records],
    )
    for record in new:
        journal.add(cost=asdict(record))
        records.append(record)
        report("pass costs", len(records), task.cells)
    return records


def _assemble(
    task: _Task,
    workload: Workload,
    traces: Sequence[PromptTrace],
    costs: Sequence[CostRecord],
    table: Bigrams | None,
) -> Profile:
    samples = collect(costs)
    curves = {name: CostCurve.from_samples(samples[name]) for name in task.networks}
    if table is not None:
        curves[LOOKUP] = CostCurve.fixed(float(np.median([s for sample in samples[LOOKUP] for s in sample.seconds])))
    lookup = {} if table is None else {"previous": table.previous, "following": table.following}
    device = str(task.models[task.target].device or "cpu")
    return Profile(
        task.target,
        {name: curves[name] for name in task.models},
        models={name: model_info(model) for name, model in task.models.items()},
        setting=task.setting,
        samples={name: samples[name] for name in task.models},
        traces=assemble(traces, lookup=None if table is None else _leave_one_out(traces)),
        lookup=lookup,
        provenance={
            **provenance(device),
            "workload": workload.name,
            "workload_sha256": workload.sha256,
            "prompts": list(task.prompts),
            "contexts": list(task.contexts),
            "batch": 1,
            "repeats": task.repeats,
        },
    )


def _leave_one_out(traces: Sequence[PromptTrace]) -> Callable[[int], Lookup]:
    """Return lookup drafters that never saw the prompt they are judged on, so that rates hold for new prompts."""

    def without(index: int) -> Lookup:
        return Lookup(_lookup_table([trace for other, trace in enumerate(traces) if other != index]))

    return without
