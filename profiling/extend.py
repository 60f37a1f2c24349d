"""`add_drafters`: measure new drafters into a profile, and leave what it holds as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from hsdopt.acceptance import Traces
from hsdopt.errors import InvalidArgumentError, ProfileError
from hsdopt.plan import LOOKUP
from hsdopt.profiles import Profile
from hsdopt.profiling.acceptance import PromptTrace, assemble, score_output
from hsdopt.profiling.cost import fitting, switch_seconds
from hsdopt.profiling.hardware import provenance
from hsdopt.profiling.journal import Journal
from hsdopt.profiling.measure import (
    Progress,
    check_kinds,
    check_room,
    cost_curves,
    digest,
    leave_one_out,
    lookup_table,
    machine,
    model_info,
    render_prompts,
    silent,
    table_arrays,
    time_passes,
    time_switches,
)
from hsdopt.profiling.overhead import prompt_seconds
from hsdopt.profiling.workload import Workload
from hsdopt.runtime.model import Model, check_vocabulary

__all__ = ["add_drafters"]


def add_drafters(
    profile: Profile,
    drafters: Sequence[str],
    workload: Workload,
    *,
    models: Mapping[str, Model],
    journal: str | Path,
    resume: bool = False,
    progress: Progress | None = None,
) -> Profile:
    """Return `profile` with `drafters` beside its own, whose samples and traces stay as they are.

    The new models are timed at the profile's own contexts and token counts, and judged along the outputs that
    it holds; the networks it knows read those outputs once more, for the pairs they make with the new ones.

    Parameters
    ----------
    profile : Profile
    drafters : sequence of str
        Names of the new drafters.
    workload : Workload
        The one that was profiled.
    models : mapping of str to Model
        The profile's own models and the new ones.
    journal : str or Path
        Every measurement is there before the next is taken.
    resume : bool
        Continue the journal.
    progress : callable, optional
        Called with (stage, done, total).

    Raises
    ------
    InvalidArgumentError
        If a drafter is in the profile already, or is not among the models.
    VocabularyError
        If a drafter does not share the target's vocabulary.
    ProfileError
        If the profile has no traces, the workload is another one, or the journal cannot be continued or written.
    """
    new = _new(profile, drafters, models)
    outputs = _outputs(profile, workload, models[profile.target])
    check_room(new, [prompt for prompt, _ in outputs], profile.setting.max_new_tokens)
    record = Journal(Path(journal), _header(profile, new, models, outputs), resume=resume)
    report = progress or silent
    networks = {name: models[name] for name in (*profile.costs, *new) if name != LOOKUP}
    traces = list(_scored(networks, profile, outputs, record, report))
    return _extended(profile, new, traces, record, report, target=models[profile.target])


def _new(profile: Profile, drafters: Sequence[str], models: Mapping[str, Model]) -> dict[str, Model]:
    missing = [name for name in (*profile.names, *drafters) if name not in models]
    if missing or not drafters:
        raise InvalidArgumentError(f"expected loaded models of profile and drafters; got none for {missing}")
    known = [name for name in drafters if name in profile.costs]
    if known:
        raise InvalidArgumentError(f"expected drafters that the profile lacks; it has {', '.join(known)} already")
    new = {name: models[name] for name in drafters}
    check_kinds(new)
    for model in new.values():
        if model.kind != LOOKUP:
            check_vocabulary(models[profile.target], model)
    return new


def _outputs(profile: Profile, workload: Workload, target: Model) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return every profiled prompt with the output that the profile holds."""
    traces = profile.traces
    if traces is None or not len(traces):
        raise ProfileError("expected a profile with traces to add drafters to; got none: profile again")
    names = [str(name) for name in profile.provenance.get("prompts", ())]
    by_id = {prompt.id: prompt for prompt in workload}
    gone = next((name for name in names if name not in by_id), None)
    if gone is not None or len(names) != traces.prompts:
        raise ProfileError(f"expected the prompts that were profiled; {workload.name} lacks {gone}: give their file")
    rendered = render_prompts(Workload(workload.name, tuple(by_id[name] for name in names)), target)
    stored = profile.provenance.get("prompts_sha256")
    if stored != digest([digest(ids) for ids in rendered.values()]):
        raise ProfileError(f"expected the prompts that were profiled; those of {workload.name} have changed since")
    rows = [np.flatnonzero(traces.prompt == index) for index in range(traces.prompts)]
    return [(prompt, tuple(traces.tokens[row].tolist())) for prompt, row in zip(rendered.values(), rows, strict=True)]


def _header(
    profile: Profile, new: Mapping[str, Model], models: Mapping[str, Model], outputs: Sequence[Any]
) -> dict[str, Any]:
    return {
        "into": profile.provenance.get("date"),
        "target": profile.target,
        "models": {name: [model.source, str(model.dtype)] for name, model in new.items()},
        "outputs": digest([digest([*prompt, *tokens]) for prompt, tokens in outputs]),
        "machine": machine(models[profile.target]),
    }


def _scored(
    networks: Mapping[str, Model],
    profile: Profile,
    outputs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    journal: Journal,
    report: Progress,
) -> Iterator[PromptTrace]:
    stored = dict(
        journal.read(
            lambda record: (int(record["prompt"]), PromptTrace.from_record(record["trace"]).to_record()),
            holding="trace",
        )
    )
    for index, (prompt, tokens) in enumerate(outputs):
        if index not in stored:
            trace = score_output(networks, profile.target, prompt, tokens, setting=profile.setting)
            stored[index] = trace.to_record()
            journal.add(prompt=index, trace=stored[index])
        report("acceptance", index + 1, len(outputs))
        yield PromptTrace.from_record(stored[index])


def _extended(
    profile: Profile,
    new: Mapping[str, Model],
    traces: Sequence[PromptTrace],
    journal: Journal,
    report: Progress,
    *,
    target: Model,
) -> Profile:
    own = profile.samples[profile.target]
    tokens = tuple(sorted({sample.tokens for sample in own}))
    contexts = tuple(sorted({sample.context for sample in own}))
    repeats = int(np.median([len(sample.seconds) for sample in own]))  # single tokens are timed more often
    networks = {name: model for name, model in new.items() if model.kind != LOOKUP}
    for name, model in networks.items():
        if not fitting(model, tokens, contexts):
            raise InvalidArgumentError(f"expected room in {name} for contexts of {contexts[-1]}, as profiled")
    table = lookup_table(traces)
    records = time_passes(
        networks,
        journal,
        traces,
        tokens=tokens,
        contexts=contexts,
        repeats=repeats,
        table=table if LOOKUP in new else None,
        report=report,
    )
    alone = {profile.target: target}
    first = {*profile.drafters} <= {LOOKUP}  # until now no other network came before the target's passes
    wanted = {*networks, *(alone if first else ())}
    place: dict[str, Any] = {"target": profile.target, "contexts": contexts}
    switches = time_switches(networks | alone, journal, traces, **place, report=report, only=wanted)
    samples, curves = cost_curves(records, switches)
    own_cost = profile.cost(profile.target)
    own_cost = replace(own_cost, switch=switch_seconds(switches).get(profile.target, own_cost.switch))
    has_lookup = LOOKUP in new or LOOKUP in profile.costs
    assert profile.traces is not None  # noqa: S101 -- _outputs refuses a profile without
    return replace(
        profile,
        costs={**profile.costs, profile.target: own_cost, **{name: curves[name] for name in new}},
        models={**profile.models, **{name: model_info(model) for name, model in new.items()}},
        samples={**profile.samples, **{name: samples[name] for name in new}},
        traces=_merged(profile.traces, assemble(traces, lookup=leave_one_out(traces) if has_lookup else None)),
        lookup={**(table_arrays(table) if LOOKUP in new else {}), **profile.lookup},
        overhead={**profile.overhead, **prompt_seconds(networks, [trace.prompt for trace in traces])},
        provenance={**profile.provenance, "added": [*profile.provenance.get("added", ()), _added(profile, new)]},
        _laws={},
    )


def _added(profile: Profile, new: Mapping[str, Model]) -> dict[str, Any]:
    said = provenance(profile.models[profile.target].device)
    return {"models": list(new), "date": said["date"], "command": said["command"], "versions": said["versions"]}


def _merged(old: Traces, new: Traces) -> Traces:
    """Return `new`, with the arrays of `old` wherever it has them."""
    merged: dict[str, Any] = {}
    for field in fields(Traces):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if isinstance(before, Mapping):
            merged[field.name] = {**before, **{key: value for key, value in after.items() if key not in before}}
        else:
            merged[field.name] = after if before is None else before
    return Traces(**merged)
