"""`profile_within`: measure until one plan is known to be good enough, or the time is spent.

Measuring goes in batches. The first are small: a few prompts, and a coarse grid of pass sizes timed twice. After each
batch a look (`hsdopt.profiling.elimination`) asks which plan is best and how sure that is; the next batch is whatever
helps most per second: pass sizes that the comparison hangs on, more prompts, or more timings of the passes that the
plans still in the race make. A drafter whose every plan is out is timed no more; it still reads each new output, in
one pass, so that the profile remains one table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from hsdopt.checks import check_nonnegative
from hsdopt.errors import InvalidArgumentError
from hsdopt.plan import LOOKUP, plan_to_json
from hsdopt.profiles import Profile, Setting
from hsdopt.profiling.acceptance import PromptTrace, assemble
from hsdopt.profiling.cost import Cell, CostRecord, PassTimer, SwitchRecord, fitting, measure_switches
from hsdopt.profiling.elimination import WITHIN, Pass, Predictor, Question, Rival, Verdict, judge
from hsdopt.profiling.journal import Journal
from hsdopt.profiling.measure import (
    Progress,
    Task,
    cost_curves,
    filler,
    finished_profile,
    leave_one_out,
    lookup_table,
    settle,
    silent,
    trace_prompt,
)
from hsdopt.profiling.workload import Workload
from hsdopt.runtime.lookup import Lookup
from hsdopt.runtime.model import Model

__all__ = ["COARSE", "Bench", "Race", "profile_within"]

COARSE = (1, 2, 4, 8, 16, 32)
"""Pass sizes timed first; others follow where a decision hangs on them."""

_PROMPTS, _REPEATS = 6, 3  # before the first look
_SWITCHES = 5  # pairs of passes of every network
_LOOK_SHARE = 4.0  # a batch takes at least this many times as long as a look
_PREFILLS, _ROUNDS = 6, 30  # of every network, and of the target in a stack, when measuring has ended
_GROWTH, _MOST_GROWTH = 0.5, 2.0  # and adds at least, and at most, this share of what there is
_MOST_REPEATS = 300
_STAGE, _PER_CENT = "budget", 100  # what progress is told: the share of the budget that is spent


class Bench(Protocol):
    """What takes the measurements."""

    def trace(self, index: int) -> PromptTrace:
        """Return what every network says along the target's output for prompt `index`."""

    def time(self, cell: Cell, traces: Sequence[PromptTrace]) -> float:
        """Return the seconds of one pass; `traces` hold text to fill caches with."""

    def switches(self, traces: Sequence[PromptTrace]) -> Iterable[SwitchRecord]:
        """Return pairs of passes of every network, behind another one's pass and behind an own one."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What is to be there after some measuring.

    Attributes
    ----------
    prompts : int
        Prompts traced in all.
    repeats : int
        Timings of each of `sizes` at each of `contexts`.
    sizes : tuple of (str, int)
        Models and new tokens.
    contexts : tuple of int
    """

    prompts: int
    repeats: int
    sizes: tuple[Pass, ...] = ()
    contexts: tuple[int, ...] = ()

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Batch:
        """Return the batch that a journal holds."""
        sizes = tuple((str(model), int(tokens)) for model, tokens in record["sizes"])
        return cls(record["prompts"], record["repeats"], sizes, tuple(record["contexts"]))


@dataclass(slots=True)
class _State:
    """What the looks left behind; plain values, kept in the journal."""

    looks: int = 0
    carried: float = 0.0
    risked: float = 0.0
    deciding: float = 0.0
    eliminated: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    verdict: dict[str, Any] = field(default_factory=dict)
    stopped: str = ""


class Race:
    """Measurements of one run under a budget, and the looks at them.

    Parameters
    ----------
    bench : Bench
    journal : Journal
        What stands in it is not measured again.
    target : str
    sizes : mapping of str to sequence of int
        Pass sizes timed first, by model, the target included; the lookup drafter has size 1.
    contexts : sequence of int
        Context lengths at which they are timed.
    prompts : sequence of str
        Ids of the prompts, in the order in which they are traced.
    question : Question
    budget : float
        Seconds, those spent before a resumed run included.
    setting : Setting, optional
    closing : bool
        Whether time is to be left for what a profile holds beside passes and traces: prefills, rounds of a stack.
    clock : callable, optional
        Returns seconds.
    progress : callable, optional
        Called with (stage, done, total).
    """

    def __init__(
        self,
        bench: Bench,
        journal: Journal,
        *,
        target: str,
        sizes: Mapping[str, Sequence[int]],
        contexts: Sequence[int],
        prompts: Sequence[str],
        question: Question,
        budget: float,
        setting: Setting | None = None,
        closing: bool = False,
        clock: Callable[[], float] = perf_counter,
        progress: Progress | None = None,
    ) -> None:
        self.traces: list[PromptTrace] = []
        self.records: list[CostRecord] = []
        self.switches: list[SwitchRecord] = []
        self._bench, self._journal, self._question = bench, journal, question
        self._target, self._sizes, self._contexts, self._prompts = target, sizes, tuple(contexts), prompts
        self._budget, self._clock, self._report = budget, clock, progress or silent
        self._setting = Setting() if setting is None else setting
        self._timings: dict[Cell, list[float]] = {}
        self._prompt_seconds: list[float] = []
        self._look_seconds = 0.0
        self._closing = closing
        self._state = _State()
        self._batch: Batch | None = None
        self._before = 0.0
        self._read()
        self._started = clock()

    @property
    def spent(self) -> float:
        """Seconds since the start, those of earlier runs included."""
        return self._before + self._clock() - self._started

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafters still in the race."""
        return tuple(name for name in self._sizes if name != self._target and name not in self._state.dropped)

    def run(self) -> dict[str, Any]:
        """Measure until the question is settled, the budget is spent, or more of the same would not help.

        Returns
        -------
        dict
            What goes into the profile's provenance.
        """
        if not self._state.stopped:
            base = tuple((name, size) for name, sizes in self._sizes.items() for size in sizes)
            self._measure(Batch(1, 1, base, self._contexts))
            self._time_switches()
            self._measure(Batch(min(_PROMPTS, len(self._prompts)), _REPEATS, base, self._contexts))
            while self._batch is not None or not self._state.looks:
                if self._batch is not None:
                    self._measure(self._batch)
                self._look()
                if self._state.stopped:
                    break
        return self._outcome()

    def profile(self) -> Profile:
        """Return what was measured so far as a profile without sources."""
        samples, curves = cost_curves(self.records, self.switches)
        lookup = leave_one_out(self.traces) if LOOKUP in self._sizes else None
        names = [*(name for name in self._sizes if name != self._target), self._target]
        return Profile(
            self._target,
            {name: curves[name] for name in names},
            setting=self._setting,
            samples=samples,
            traces=assemble(self.traces, lookup=lookup),
        )

    def _read(self) -> None:
        """Take over what the journal holds."""
        self._journal.read(self._take_over)

    def _take_over(self, record: dict[str, Any]) -> None:
        self._before = check_nonnegative(record["spent"], "spent")
        if "trace" in record:
            self._keep_trace(PromptTrace.from_record(record["trace"]), check_nonnegative(record["took"], "took"))
        elif "cost" in record:
            self._keep_timing(CostRecord(**record["cost"]))
        elif "switch" in record:
            self.switches.append(SwitchRecord(**record["switch"]))
        else:
            self._state = _State(**record["look"])
            self._batch = None if record["batch"] is None else Batch.from_record(record["batch"])

    def _keep_trace(self, trace: PromptTrace, took: float) -> None:
        self.traces.append(trace)
        self._prompt_seconds.append(took)

    def _keep_timing(self, record: CostRecord) -> None:
        self.records.append(record)
        self._timings.setdefault((record.model, record.tokens, record.context), []).append(record.seconds)

    def _measure(self, batch: Batch) -> None:
        """Take what the batch lacks, as far as the budget goes; a first prompt and first timings are always taken."""
        for index in range(len(self.traces), batch.prompts):
            if index and self._left < self._prompt_price:
                break
            started = self._clock()
            trace = self._bench.trace(index)
            self._keep_trace(trace, self._clock() - started)
            self._journal.add(
                id=self._prompts[index], trace=trace.to_record(), took=self._prompt_seconds[-1], spent=self.spent
            )
            self._tell()
        for cell in self._missing(batch):
            if cell in self._timings and self._left < self._price(cell):
                break
            repeat = len(self._timings.get(cell, ()))
            record = CostRecord(*cell, repeat, self._bench.time(cell, self.traces))
            self._keep_timing(record)
            self._journal.add(cost=asdict(record), spent=self.spent)
            self._tell()

    def _time_switches(self) -> None:
        """Time passes behind another network's, a little while; a run that was stopped among them goes on without."""
        if self.switches:
            return
        for record in self._bench.switches(self.traces):
            self.switches.append(record)
            self._journal.add(switch=asdict(record), spent=self.spent)
            self._tell()
            if self._left <= 0:
                break

    def _missing(self, batch: Batch) -> Iterator[Cell]:
        """Yield the passes to time, repeat by repeat; models take turns, in an order drawn anew for every repeat."""
        for repeat in range(batch.repeats):
            order = np.random.default_rng(repeat)
            places = sorted({(context, size) for context in batch.contexts for _, size in batch.sizes})
            for place in order.permutation(len(places)):
                context, size = places[place]
                for model, tokens in batch.sizes:
                    cell = (model, tokens, context)
                    if tokens == size and len(self._timings.get(cell, ())) <= repeat:
                        yield cell

    def _tell(self) -> None:
        self._report(_STAGE, min(math.floor(_PER_CENT * self.spent / self._budget), _PER_CENT - 1), _PER_CENT)

    @property
    def _left(self) -> float:
        """Seconds for measuring; one more look, and the closing, have to fit in."""
        return self._budget - self.spent - self._look_seconds - (self._closing_seconds if self._closing else 0.0)

    @property
    def _used(self) -> float:
        """Share of the budget, or of the prompts if more, that is used up."""
        return min(max(self.spent / self._budget, len(self.traces) / len(self._prompts)), 1.0)

    @property
    def _closing_seconds(self) -> float:
        """About how long the closing takes: a few prefills of every network, and some rounds of a stack."""
        widest: dict[str, tuple[int, float]] = {}
        for (name, tokens, _), taken in self._timings.items():
            if name != LOOKUP:
                widest[name] = max(widest.get(name, (0, 0.0)), (tokens, float(np.median(taken))))
        length = float(np.mean([len(trace.prompt) for trace in self.traces]))
        prefills = sum(seconds * max(length / tokens, 1.0) for tokens, seconds in widest.values())
        return _PREFILLS * prefills + _ROUNDS * widest.get(self._target, (0, 0.0))[1]

    @property
    def _prompt_price(self) -> float:
        return float(np.mean(self._prompt_seconds))

    def _price(self, cell: Cell) -> float:
        """Return about how long it takes to time a pass."""
        if cell in self._timings:
            return float(np.median(self._timings[cell]))
        near = [taken for (model, _, _), taken in self._timings.items() if model == cell[0]]
        return float(np.max(np.concatenate(near)))

    def _look(self) -> None:
        """Judge what there is, drop what is out, and settle what to measure next."""
        started, state = self._clock(), self._state
        risk = 1 - self._question.confidence
        profile = self.profile()
        verdict = judge(
            profile,
            self._question,
            drafters=self.drafters,
            allowed=max(self._used * risk - state.risked, 0.0),
            left=risk - state.risked,
            carried=state.carried,
            seed=len(self._journal.records),
        )
        self._look_seconds = self._clock() - started
        state.deciding += self._look_seconds
        batch, stopped = self._next(verdict, profile)
        if batch is None and not verdict.refine and verdict.wrong <= verdict.left:
            stopped = "settled"
        if not verdict.refine or batch is None:
            self._count(verdict)
        state.stopped = stopped
        state.verdict = _told(verdict, len(self.traces), self._repeats(verdict.used), settled=stopped == "settled")
        self._batch = batch
        self._journal.add(look=asdict(state), batch=None if batch is None else asdict(batch), spent=self.spent)

    def _count(self, verdict: Verdict) -> None:
        """Note which plans are out, and drop the drafters whose every plan is."""
        state = self._state
        state.looks += 1
        state.risked += verdict.allowed
        for rival in verdict.surviving:
            state.eliminated.pop(rival.plan.description, None)
        state.eliminated.pop(verdict.pick.description, None)
        if verdict.refine:
            return  # curves still hide something: nothing is ruled out on their account
        for rival in verdict.eliminated:
            state.eliminated.setdefault(rival.plan.description, f"look {state.looks}: {rival} against the pick")
        kept = {model for plan in (verdict.pick, *(rival.plan for rival in verdict.surviving)) for model in plan.models}
        for name in self.drafters:
            if name not in kept:
                with_it = [rival for rival in verdict.eliminated if name in rival.plan.models]
                state.dropped[name] = f"look {state.looks}: {with_it[0]} against the pick" if with_it else "no plan"
                state.carried += max((rival.wrong for rival in with_it), default=0.0)

    def _repeats(self, used: Sequence[Pass]) -> int:
        counts = [len(taken) for (model, tokens, _), taken in self._timings.items() if (model, tokens) in {*used}]
        return min(counts, default=0)

    def _next(self, verdict: Verdict, profile: Profile) -> tuple[Batch | None, str]:
        """Return the batch that helps most per second, or None and why there is none."""
        if verdict.settled:
            return None, "settled"
        prompts, repeats = len(self.traces), self._goal(verdict, profile)
        if verdict.refine:
            times = min(_REPEATS, repeats)
            batch = Batch(prompts, times, verdict.refine, self._contexts)
            return (batch, "") if self._seconds(batch) <= self._left else (None, "budget")
        return self._more(verdict, prompts, repeats, _bracket(self._contexts, profile.context))

    def _more(
        self, verdict: Verdict, prompts: int, repeats: int, contexts: tuple[int, ...]
    ) -> tuple[Batch | None, str]:
        """Return more of what takes most off the variance per second, and of the other if it does half as much."""
        round_ = self._seconds(Batch(prompts, repeats + 1, verdict.used, contexts))
        left = len(self._prompts) - prompts
        by_prompts = _reduction(verdict, "prompts", prompts) / self._prompt_price if left else 0.0
        futile = repeats >= _MOST_REPEATS or (not left and verdict.hopeless(prompts))
        by_timings = 0.0 if futile else _reduction(verdict, "timings", repeats) / max(round_, 1e-9)
        best = max(by_prompts, by_timings)
        if not best:
            return None, "timings" if left else "prompts"
        factor = 1 / min(max(verdict.needed(), 1e-3), 1.0)
        added = times = 0
        if by_prompts >= best / 2:
            added = min(self._amount(prompts, factor, self._prompt_price, self._left), left)
        if by_timings >= best / 2:
            times = self._amount(repeats, factor, round_, self._left - added * self._prompt_price)
        batch = Batch(prompts + added, min(repeats + times, _MOST_REPEATS), verdict.used if times else (), contexts)
        return (batch, "") if added or times else (None, "budget")

    def _goal(self, verdict: Verdict, profile: Profile) -> int:
        """Return how often the passes in use were timed at the contexts in use, at least."""
        contexts = _bracket(self._contexts, profile.context)
        return min((len(self._timings[m, n, c]) for m, n in verdict.used for c in contexts), default=_MOST_REPEATS)

    def _seconds(self, batch: Batch) -> float:
        """Return about how long the timings take that a batch lacks."""
        return sum(self._price(cell) for cell in self._missing(batch))

    def _amount(self, there: int, factor: float, price: float, left: float) -> int:
        """Return how many prompts or repeats to add to get towards `factor` times as many, within the budget."""
        towards = min(max((factor - 1) * there, _GROWTH * there), _MOST_GROWTH * there)
        wanted = math.ceil(max(towards, _LOOK_SHARE * self._look_seconds / max(price, 1e-9)))
        return max(0, min(wanted, math.floor(left / max(price, 1e-9))))

    def _outcome(self) -> dict[str, Any]:
        """Return plain values that say what was decided, on what grounds, and what is open."""
        state = self._state
        return {
            "seconds": self._budget,
            "confidence": self._question.confidence,
            "within": WITHIN,
            "spent": self.spent,
            "deciding": state.deciding,
            "looks": state.looks,
            "resolved": state.stopped == "settled",
            "stopped": state.stopped,
            **state.verdict,
            "eliminated": state.eliminated,
            "dropped": state.dropped,
            "prompts": len(self.traces),
            "of": len(self._prompts),
        }


def _bracket(contexts: Sequence[int], visited: float | None) -> tuple[int, ...]:
    """Return the measured contexts between which the mean of those visited lies."""
    if visited is None or len(contexts) < 2:
        return tuple(contexts)
    right = int(np.clip(np.searchsorted(contexts, visited), 1, len(contexts) - 1))
    return tuple(contexts[right - 1 : right + 1])


def _reduction(verdict: Verdict, source: str, there: int) -> float:
    """Return how much one more prompt or repeat takes off the variances, weighted by what hangs on them."""
    rivals = verdict.open or verdict.rivals
    return float(sum(rival.wrong * getattr(rival, source) for rival in rivals)) / (there + 1)


def _told(verdict: Verdict, prompts: int, repeats: int, *, settled: bool) -> dict[str, Any]:
    """Return a verdict as plain values."""
    return {
        "pick": verdict.pick.description,
        "plan": plan_to_json(verdict.pick),
        "seconds_per_token": verdict.seconds,
        "speedup": verdict.alone / verdict.seconds,
        "probability": 1 - verdict.wrong,
        "surviving": [rival.plan.description for rival in verdict.surviving],
        "unresolved": [] if settled else [str(rival) for rival in _deciding(verdict)],
        "needed": "" if settled else _needed(verdict, prompts, repeats),
    }


def _deciding(verdict: Verdict) -> Sequence[Rival]:
    return sorted(verdict.open or verdict.rivals, key=lambda rival: -rival.wrong)


def _needed(verdict: Verdict, prompts: int, repeats: int) -> str:
    """Return what more measuring would settle the question, all else staying as it is."""
    if verdict.refine:
        sizes = ", ".join(f"{tokens} tokens by {model}" for model, tokens in verdict.refine)
        return f"passes of {sizes} to be timed"
    rivals = verdict.open or verdict.rivals
    by_prompts, by_timings = (sum(rival.wrong * getattr(rival, what) for rival in rivals) for what in _SOURCES)
    if not rivals or not math.isfinite(by_prompts + by_timings):
        return "more prompts and timings: a larger budget"
    factor = max(verdict.needed(), 1e-3)
    if by_prompts >= by_timings:
        return f"about {math.ceil(prompts / factor)} prompts in all; {prompts} were read"
    return f"about {math.ceil(repeats / factor)} timings of every kind of pass; {repeats} were taken"


_SOURCES = ("prompts", "timings")


class _ModelBench:
    """Measures loaded models."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._prompts = list(task.prompts.values())
        self._timer: PassTimer | None = None

    def trace(self, index: int) -> PromptTrace:
        task = self._task
        return trace_prompt(task.networks, task.target, self._prompts[index], task.setting, seed=index)

    def time(self, cell: Cell, traces: Sequence[PromptTrace]) -> float:
        task = self._task
        if self._timer is None:
            text, prompt = filler(traces)
            lookup = Lookup(lookup_table(traces)) if LOOKUP in task.models else None
            longest = max(task.contexts) + max(task.tokens)
            self._timer = PassTimer(task.networks, longest=longest, text=text, prompt=prompt, lookup=lookup)
        return self._timer.time(cell)

    def switches(self, traces: Sequence[PromptTrace]) -> Iterable[SwitchRecord]:
        task = self._task
        text, prompt = filler(traces)
        context = task.contexts[len(task.contexts) // 2]
        options: dict[str, Any] = {"context": context, "repeats": _SWITCHES, "text": text, "prompt": prompt}
        return measure_switches(task.networks, task.target, **options)


def profile_within(
    target: str,
    drafters: Sequence[str],
    workload: Workload,
    *,
    models: Mapping[str, Model],
    journal: str | Path,
    budget: float,
    confidence: float = 0.95,
    setting: Setting | None = None,
    contexts: Sequence[int] | None = None,
    predictor: Predictor | None = None,
    family: str = "all",
    max_draft_length: int = 24,
    resume: bool = False,
    clock: Callable[[], float] = perf_counter,
    progress: Progress | None = None,
) -> Profile:
    """Return a profile measured until one plan is within 2 % of the best with some confidence, or time is up.

    The profile is a full one: everything measured is in it, and ``provenance["budget"]`` says what was decided, which
    plans and drafters were ruled out and why, and what stayed open. "Do not speculate" is always among the plans.

    Parameters
    ----------
    target, drafters, workload, models, journal, setting, contexts, resume, progress
        As in `profile`. The profiling half's prompts are read in an order drawn once, so that the first few are
        like the rest.
    budget : float
        Seconds to measure and decide in, models being loaded already. One prompt and one timing of the coarse grid
        are taken whatever they cost.
    confidence : float
        Chance, between 0.5 and 1, that the pick is within 2 % of the best plan when measuring stops early.
    predictor : callable, optional
        Returns from a profile what judges plans, as `hsdopt.solve` takes it; the closed form if not given.
    family, max_draft_length
        As in `hsdopt.solve`.
    clock : callable, optional
        Returns seconds.

    Raises
    ------
    InvalidArgumentError
        As `profile`, or if `budget` or `confidence` is out of range.
    VocabularyError, ProfileError
        As `profile`.
    """
    _check(budget, confidence)
    used = Setting() if setting is None else setting
    grid: dict[str, Any] = {"contexts": contexts, "tokens": COARSE, "repeats": _REPEATS}
    task = settle(target, drafters, workload, models, setting=used, **grid)
    task = replace(task, prompts=_shuffled(task.prompts))
    question = {"budget": budget, "confidence": confidence, "family": family, "max_draft_length": max_draft_length}
    record = Journal(Path(journal), {**task.header, "question": question}, resume=resume)
    sizes = {name: (1,) if name == LOOKUP else _fitting(model, task) for name, model in task.models.items()}
    race = Race(
        _ModelBench(task),
        record,
        target=target,
        sizes=sizes,
        contexts=task.contexts,
        prompts=list(task.prompts),
        question=Question(confidence, family, max_draft_length, predictor),
        budget=budget,
        setting=task.setting,
        closing=True,
        clock=clock,
        progress=progress,
    )
    outcome = race.run()
    read = dict(list(task.prompts.items())[: len(race.traces)])
    table = lookup_table(race.traces) if LOOKUP in task.models else None
    task = replace(task, prompts=read)
    switches = race.switches
    measured = finished_profile(task, workload, race.traces, race.records, table, switches=switches, budget=outcome)
    if progress is not None:
        progress(_STAGE, _PER_CENT, _PER_CENT)  # settled, out of time, or out of things to measure
    return measured


def _fitting(model: Model, task: Task) -> tuple[int, ...]:
    sizes = fitting(model, task.tokens, task.contexts)
    if not sizes:
        raise InvalidArgumentError(f"expected room in {model.name} for contexts of {task.contexts[-1]}; shorten them")
    return sizes


def _shuffled(prompts: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    names = list(prompts)
    return {names[place]: prompts[names[place]] for place in np.random.default_rng(0).permutation(len(names))}


def _check(budget: float, confidence: float) -> None:
    if not (math.isfinite(budget) and budget > 0):
        raise InvalidArgumentError(f"expected a budget of seconds above 0; got {budget}")
    if not 0.5 <= confidence < 1:
        raise InvalidArgumentError(f"expected a confidence of at least 0.5 and below 1, such as 0.95; got {confidence}")
