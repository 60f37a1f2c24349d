"""Measured runs: plans executed side by side on the same prompts, in turns, with a journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hsdopt.checks import check_length, check_nonnegative
from hsdopt.plan import Plan
from hsdopt.profiles import Setting
from hsdopt.profiling.journal import Journal
from hsdopt.profiling.measure import digest, machine, silent
from hsdopt.runtime import generate
from hsdopt.runtime.events import Generation
from hsdopt.runtime.model import Model

__all__ = ["MeasuredRun", "Runner", "Timed", "measure_plans"]

_FEWEST = 2  # prompts, whatever the budget: intervals need them

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Timed:
    """What one generation took.

    Attributes
    ----------
    output : tuple of int
        The tokens.
    tokens : int
        How many of them `seconds` were spent on: those after the first.
    seconds : float
        From the end of every model's prefill to the last token.
    prefill_seconds : float
        Time of all prefills.
    tokens_per_pass : float
        Those tokens, per pass of the target.
    passes : tuple of (model, new tokens, passes, seconds)
        What was run after the prefills; empty where nobody logged it.
    switches : tuple of (model, passes)
        How many of those stood right behind another network's.
    """

    output: tuple[int, ...]
    tokens: int
    seconds: float
    prefill_seconds: float
    tokens_per_pass: float
    passes: tuple[tuple[str, int, int, float], ...] = ()
    switches: tuple[tuple[str, int], ...] = ()


class Runner(Protocol):
    """Something that writes text and is timed in turn with the plans."""

    @property
    def label(self) -> str:
        """What its runs are called."""

    def run(self, prompt: Sequence[int], *, setting: Setting, seed: int) -> Timed:
        """Write `setting.max_new_tokens` tokens after `prompt`, end of text ignored."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One plan (or baseline) on one prompt, once.

    Attributes
    ----------
    plan : str
        Its label.
    prompt, repeat, order : int
        Which prompt, which repeat, and the place of the run in time.
    output, tokens, seconds, prefill_seconds, tokens_per_pass, passes, switches
        As in `Timed`.
    """

    plan: str
    prompt: int
    repeat: int
    order: int
    output: tuple[int, ...]
    tokens: int
    seconds: float
    prefill_seconds: float
    tokens_per_pass: float
    passes: tuple[tuple[str, int, int, float], ...]
    switches: tuple[tuple[str, int], ...] = ()

    def to_record(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> MeasuredRun:
        """Return the run that `to_record` wrote."""
        fields = dict(record)
        for name in ("prompt", "repeat", "order", "tokens"):
            check_length(fields[name], name)
        for name in ("seconds", "prefill_seconds", "tokens_per_pass"):
            check_nonnegative(fields[name], name)
        passes = tuple((str(m), int(k), int(n), float(s)) for m, k, n, s in fields.pop("passes"))
        switches = tuple((str(model), int(count)) for model, count in fields.pop("switches", ()))
        return cls(**{**fields, "output": tuple(fields["output"]), "passes": passes, "switches": switches})


def measure_plans(
    plans: Sequence[Plan],
    models: Mapping[str, Model],
    prompts: Sequence[Sequence[int]],
    *,
    setting: Setting,
    repeats: int,
    journal: str | Path,
    runners: Sequence[Runner] = (),
    resume: bool = False,
    seed: int = 0,
    budget: float | None = None,
    between: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> tuple[MeasuredRun, ...]:
    """Return one run per plan (or other runner), prompt and repeat; within a budget, of as many prompts as it lasts.

    All take their turns on one prompt before the next prompt, in an order drawn anew each time, so a machine that
    slows down slows them alike and ratios can be paired. End-of-text is ignored, so all write the same number of
    tokens.

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
    runners : sequence of Runner
        What else takes its turns: baselines.
    resume : bool
        Continue the journal.
    seed : int
        Of the order, and of sampling: all plans see the same seeds.
    budget : float, optional
        Seconds of runs: a prompt that would exceed it, were it like those before, is not begun, but for the first
        two. All repeats of a prompt are then made before the next prompt, so that none is left half done.
    between : callable, optional
        Called after every run.
    progress : callable, optional
        Called with (stage, done, total).

    Raises
    ------
    ProfileError
        If the journal cannot be continued or written.
    """
    entrants: list[Runner] = [*(_PlanRunner(plan, models) for plan in plans), *runners]
    record = Journal(
        Path(journal),
        _header(plans, models, prompts, setting=setting, repeats=repeats, seed=seed, budget=budget, runners=runners),
        resume=resume,
    )
    runs = record.read(MeasuredRun.from_record)
    finished = {(run.plan, run.prompt, run.repeat) for run in runs}
    total = len(entrants) * len(prompts) * repeats
    report = progress or silent
    if len(finished) < total:
        _warm_up(entrants, prompts[0], setting)
    for repeat, prompt, index in _turns(len(entrants), len(prompts), repeats, seed, by_prompt=budget is not None):
        if budget is not None and prompt >= _FEWEST and _spent(runs, prompt) * (prompt + 1) / prompt > budget:
            break
        label = entrants[index].label
        if (label, prompt, repeat) in finished:
            continue
        # plans draw alike from the same seed, so a repeat differs and a plan does not
        timed = entrants[index].run(prompts[prompt], setting=setting, seed=seed + repeat * len(prompts) + prompt)
        fields = {name: getattr(timed, name) for name in Timed.__slots__}
        runs.append(MeasuredRun(plan=label, prompt=prompt, repeat=repeat, order=len(runs), **fields))
        record.add(**runs[-1].to_record())
        if between is not None:
            between()
        report("runs", min(len(runs), total - 1), total)
    report("runs", total, total)  # a budget may end them earlier
    return tuple(runs)


def _header(
    plans: Sequence[Plan],
    models: Mapping[str, Model],
    prompts: Sequence[Sequence[int]],
    *,
    setting: Setting,
    repeats: int,
    seed: int,
    budget: float | None,
    runners: Sequence[Runner],
) -> dict[str, Any]:
    """Return what tells one measurement from another."""
    limited = {} if budget is None else {"budget": budget}
    return limited | {
        "plans": [plan.label for plan in plans],
        "baselines": [runner.label for runner in runners],
        "prompts": [digest(prompt) for prompt in prompts],
        "setting": setting.model_dump(),
        "repeats": repeats,
        "seed": seed,
        "models": {name: model.source for name, model in models.items()},
        "machine": machine(models[plans[0].target]),
    }


def _turns(entrants: int, prompts: int, repeats: int, seed: int, *, by_prompt: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (repeat, prompt, entrant); the slower of the first two is the prompt if so told."""
    rng = np.random.default_rng(seed)
    rounds = [(repeat, prompt) for repeat in range(repeats) for prompt in range(prompts)]
    for repeat, prompt in sorted(rounds, key=lambda turn: turn[::-1]) if by_prompt else rounds:
        for index in rng.permutation(entrants).tolist():
            yield repeat, prompt, index


def _spent(runs: Sequence[MeasuredRun], prompt: int) -> float:
    """Return the seconds of all runs on the prompts before `prompt`, whatever came after them."""
    return sum(run.seconds + run.prefill_seconds for run in runs if run.prompt < prompt)


def _warm_up(entrants: Sequence[Runner], prompt: Sequence[int], setting: Setting) -> None:
    """Run everything briefly and drop the result: first passes allocate and compile."""
    short = setting.model_copy(update={"max_new_tokens": min(setting.max_new_tokens, 6)})
    for entrant in entrants:
        entrant.run(prompt, setting=short, seed=0)


@dataclass(frozen=True, slots=True)
class _PlanRunner:
    """A plan and its models, as something to time."""

    plan: Plan
    models: Mapping[str, Model]

    @property
    def label(self) -> str:
        """The plan's label."""
        return self.plan.label

    def run(self, prompt: Sequence[int], *, setting: Setting, seed: int) -> Timed:
        """Run the plan and group its passes."""
        output = generate(self.plan, self.models, list(prompt), ignore_eos=True, seed=seed, **setting.model_dump())
        groups: dict[tuple[str, int], list[float]] = {}
        for event in output.events:
            if event.kind in ("pass", "lookup"):  # a request to a lookup drafter is one "pass" of one token
                groups.setdefault((event.model, max(1, event.new_tokens)), []).append(event.seconds)
        return Timed(
            output=tuple(output.tokens),
            tokens=len(output.tokens) - 1,
            seconds=output.seconds.decode,
            prefill_seconds=output.seconds.prefill,
            tokens_per_pass=output.counters.tokens_per_pass,
            passes=tuple((name, count, len(times), sum(times)) for (name, count), times in sorted(groups.items())),
            switches=_switches(output),
        )


def _switches(output: Generation) -> tuple[tuple[str, int], ...]:
    """Return per model how many passes stood right behind another network's; what the prefills left counts as none."""
    made = [event.model for event in output.events if event.kind == "pass"]
    counts = Counter(now for before, now in pairwise([output.target, *made]) if now != before)
    return tuple(sorted(counts.items()))
