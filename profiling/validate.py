"""Measured runs: plans executed side by side on the same prompts, in turns, with a journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsdopt.plan import Plan
from hsdopt.profiles import Setting
from hsdopt.profiling.journal import Journal
from hsdopt.profiling.measure import digest, machine
from hsdopt.runtime import generate
from hsdopt.runtime.events import Generation
from hsdopt.runtime.model import Model

__all__ = ["MeasuredRun", "measure_plans"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One plan on one prompt, once.

    Attributes
    ----------
    plan : str
        Its label.
    prompt, repeat, order : int
        Which prompt, which repeat, and the place of the run in time.
    output : tuple of int
        The tokens.
    seconds : float
        From the end of every model's prefill to the last token.
    prefill_seconds : float
        Time of all prefills.
    passes : tuple of (model, new tokens, passes, seconds)
        What was run after the prefills.
    tokens_per_pass : float
        Tokens after the first, per pass of the target.
    """

    plan: str
    prompt: int
    repeat: int
    order: int
    output: tuple[int, ...]
    seconds: float
    prefill_seconds: float
    passes: tuple[tuple[str, int, int, float], ...]
    tokens_per_pass: float

    def to_record(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> MeasuredRun:
        """Return the run that `to_record` wrote."""
        fields = dict(record)
        passes = tuple((str(m), int(k), int(n), float(s)) for m, k, n, s in fields.pop("passes"))
        return cls(**{**fields, "output": tuple(fields["output"]), "passes": passes})


def measure_plans(
    plans: Sequence[Plan],
    models: Mapping[str, Model],
    prompts: Sequence[Sequence[int]],
    *,
    setting: Setting,
    repeats: int,
    journal: str | Path,
    resume: bool = False,
    seed: int = 0,
    between: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> tuple[MeasuredRun, ...]:
    """Return one run per plan, prompt and repeat.

    All plans take their turns on one prompt before the next prompt, in an order drawn anew each time, so
    a machine that slows down slows them alike and ratios can be paired. End-of-text is ignored, so all
    plans write the same number of tokens.

    Parameters
    ----------
    plans : sequence of Plan
    models : mapping of str to Model
        Every model that a plan names.
    prompts : sequence of sequence of int
        Rendered prompts.
    setting : Setting
        Temperature, filters and output length.
    repeats : int
        Runs of each plan on each prompt.
    journal : str or Path
        Every run is there before the next starts.
    resume : bool
        Continue the journal.
    seed : int
        Of the order, and of sampling: all plans see the same seeds.
    between : callable, optional
        Called after all plans have had their turn on a prompt.
    progress : callable, optional
        Called with (stage, done, total).

    Raises
    ------
    ProfileError
        If the journal cannot be continued or written.
    """
    texts = [plan.label for plan in plans]
    header = {
        "plans": texts,
        "prompts": [digest(prompt) for prompt in prompts],
        "setting": setting.model_dump(),
        "repeats": repeats,
        "seed": seed,
        "models": {name: model.source for name, model in models.items()},
        "machine": machine(models[plans[0].target]),
    }
    record = Journal(Path(journal), header, resume=resume)
    runs = [MeasuredRun.from_record(entry) for entry in record.records]
    finished = {(run.plan, run.prompt, run.repeat) for run in runs}
    if len(finished) < len(plans) * len(prompts) * repeats:
        _warm_up(plans, models, prompts[0], setting)
    for repeat, prompt, index in _turns(len(plans), len(prompts), repeats, seed):
        if (texts[index], prompt, repeat) in finished:
            continue
        # plans draw alike from the same seed, so a repeat differs and a plan does not
        output = _run(plans[index], models, prompts[prompt], setting, seed=seed + repeat * len(prompts) + prompt)
        runs.append(_measured(output, texts[index], prompt, repeat, order=len(runs)))
        record.add(**runs[-1].to_record())
        if progress is not None:
            progress("runs", len(runs), len(plans) * len(prompts) * repeats)
        if between is not None and len(runs) % len(plans) == 0:
            between()
    return tuple(runs)


def _turns(plans: int, prompts: int, repeats: int, seed: int) -> Iterator[tuple[int, int, int]]:
    rng = np.random.default_rng(seed)
    for repeat in range(repeats):
        for prompt in range(prompts):
            for index in rng.permutation(plans).tolist():
                yield repeat, prompt, index


def _warm_up(plans: Sequence[Plan], models: Mapping[str, Model], prompt: Sequence[int], setting: Setting) -> None:
    """Run every plan briefly and drop the result: first passes allocate and compile."""
    short = setting.model_copy(update={"max_new_tokens": min(setting.max_new_tokens, 6)})
    for plan in plans:
        _run(plan, models, prompt, short, seed=0)


def _run(plan: Plan, models: Mapping[str, Model], prompt: Sequence[int], setting: Setting, *, seed: int) -> Generation:
    return generate(plan, models, list(prompt), ignore_eos=True, seed=seed, **setting.model_dump())


def _measured(output: Generation, text: str, prompt: int, repeat: int, *, order: int) -> MeasuredRun:
    groups: dict[tuple[str, int], list[float]] = {}
    for event in output.events:
        if event.kind in ("pass", "lookup"):  # a request to a lookup drafter is one "pass" of one token
            groups.setdefault((event.model, max(1, event.new_tokens)), []).append(event.seconds)
    return MeasuredRun(
        plan=text,
        prompt=prompt,
        repeat=repeat,
        order=order,
        output=tuple(output.tokens),
        seconds=output.seconds.decode,
        prefill_seconds=output.seconds.prefill,
        passes=tuple((name, count, len(times), sum(times)) for (name, count), times in sorted(groups.items())),
        tokens_per_pass=output.counters.tokens_per_pass,
    )
