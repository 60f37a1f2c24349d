"""Prediction against measurement: statistics of a set of timed runs, and the report made of them.

The unit of resampling is the prompt: every bootstrap replicate draws prompts with replacement, the
same ones for every plan, so that ratios of plans are paired and a machine that drifts between
prompts cancels out of them. No run is dropped; slow ones are counted and kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from hsdopt.errors import InvalidArgumentError, PlanError, PredictionError
from hsdopt.plan import parse_plan
from hsdopt.simulate.intervals import expanded_tail

__all__ = [
    "Comparison",
    "Interval",
    "Mismatch",
    "PlanResult",
    "Predictions",
    "PredictorScore",
    "Run",
    "compare",
    "plan_family",
]

BASELINE = "baseline"
"""The family of what is no plan."""

REPORT_SCHEMA = 1
"""The version of report.json that this code writes."""

Floats = NDArray[np.float64]
Pass = tuple[str, int]
"""A kind of pass: (model, new tokens)."""

_EMPTY: Mapping[Any, Any] = MappingProxyType({})
_SLOW = 1.5
"""A run this many times slower than the fastest repeat of the same plan and prompt is counted as slow."""


@dataclass(frozen=True, slots=True)
class Run:
    """One timed generation: one plan, one prompt, one repeat.

    Attributes
    ----------
    plan : str
        The plan in notation, or the label of a baseline from elsewhere.
    repeat : int
        Which repeat; odd ones pick the best plan, even ones time it.
    prompt : int
        Index of the prompt, the same for every plan.
    tokens : int
        Tokens after the first.
    seconds : float
        Time of the last token less the end of every model's prefill.
    target_passes : int
        Passes of the target after its prefill (0 if unknown).
    passes : mapping of (model, new tokens) to int
        How many passes of each kind were made (empty if unknown); a lookup request is ("lookup", 1).
    pass_seconds : mapping of (model, new tokens) to float
        Seconds spent in them.
    order : int
        Place of this run in the order in which runs were made.
    switches : mapping of str to int
        Passes of each model right behind another network's.
    """

    plan: str
    repeat: int
    prompt: int
    tokens: int
    seconds: float
    target_passes: int = 0
    passes: Mapping[Pass, int] = field(default_factory=lambda: MappingProxyType({}))
    pass_seconds: Mapping[Pass, float] = field(default_factory=lambda: MappingProxyType({}))
    order: int = 0
    switches: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Refuse runs that measured nothing."""
        if self.tokens < 1:
            raise InvalidArgumentError(
                f"expected at least 1 token after the first in a run of {self.plan}; got {self.tokens}"
            )
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InvalidArgumentError(f"expected positive seconds in a run of {self.plan}; got {self.seconds}")


@dataclass(frozen=True, slots=True)
class Predictions:
    """What was predicted before the clock was read, in seconds per token.

    Attributes
    ----------
    model : mapping of str to mapping of str to float
        Per predictor ("closed form", "event simulation", "trace replay", "constant-cost iid", ...), per
        plan, predicted from traces of the very prompts that were timed: what is off is the model.
    transfer : mapping of the same shape
        Predicted from the profiling prompts: what is off is the model and the change of prompts.
    primary : str
        The predictor that the summary speaks of.
    intervals : mapping of str to (low, high)
        Per plan, the interval of the primary predictor's transfer prediction.
    passes : mapping of str to mapping of (model, new tokens) to float
        Per plan, the primary predictor's passes per token on the timed prompts.
    switches : mapping of str to mapping of str to float
        Per plan, how many of them per token, by model, stand right behind another network's.
    """

    model: Mapping[str, Mapping[str, float]]
    primary: str
    transfer: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: MappingProxyType({}))
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=lambda: MappingProxyType({}))
    passes: Mapping[str, Mapping[Pass, float]] = field(default_factory=lambda: MappingProxyType({}))
    switches: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Refuse predictions that cannot be held against a clock."""
        if self.primary not in self.model and self.primary not in self.transfer:
            known = ", ".join(dict.fromkeys([*self.model, *self.transfer])) or "none"
            raise InvalidArgumentError(f"expected the primary predictor to be one of {known}; got {self.primary}")
        for kind in (self.model, self.transfer):
            for predictor, plans in kind.items():
                _require_positive(predictor, plans)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its bootstrap interval; `low` and `high` are None if one prompt is all there is."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """``(low, high)``, or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A place where a plan's greedy output left the target's own.

    Attributes
    ----------
    plan : str
    prompt, position : int
        Where the outputs first differ.
    gap : float
        Gap of the target's top two logits there.
    bound : float
        The largest gap that counts as a near tie.
    """

    plan: str
    prompt: int
    position: int
    gap: float
    bound: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap <= self.bound


@dataclass(frozen=True, slots=True)
class PlanResult:
    """One plan: what the clock said, what was predicted, and where the two part.

    ``(1 + acceptance_error) (1 + cost_error)`` is the ratio of the predicted passes at profiled costs
    to the seconds that the passes took; `outside` is the share of the time spent outside the passes.

    Attributes
    ----------
    plan, family : str
    measured : Interval
        Seconds per token, pooled over prompts and repeats.
    speedup : Interval
        The target's own decoding over this plan, paired over prompts.
    over_chosen : Interval
        This plan's time over the chosen one's, paired over prompts.
    tokens_per_pass : float or None
        Tokens per pass of the target.
    predicted, transfer : mapping of str to float
        Seconds per token, per predictor.
    error, transfer_error : mapping of str to float
        predicted / measured - 1, per predictor.
    transfer_interval : (low, high) or None
    acceptance_error : float or None
        Cost of the predicted passes over cost of the passes made, both at profiled costs, less 1.
    cost_error : float or None
        Profiled cost of the passes made over the seconds they took, less 1.
    outside : float or None
        Share of the measured time spent outside the passes.
    seconds_by_model, passes_by_model : mapping of str to float
        Seconds and passes per token.
    memory_bytes : int or None
        Weights that have to be loaded.
    """

    plan: str
    family: str
    measured: Interval
    speedup: Interval
    over_chosen: Interval
    tokens_per_pass: float | None = None
    predicted: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    error: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    transfer: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    transfer_error: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    transfer_interval: tuple[float, float] | None = None
    acceptance_error: float | None = None
    cost_error: float | None = None
    outside: float | None = None
    seconds_by_model: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    passes_by_model: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    memory_bytes: int | None = None

    @property
    def baseline(self) -> bool:
        """Whether this is no plan but something from elsewhere, timed beside the plans."""
        return self.family == BASELINE


@dataclass(frozen=True, slots=True)
class PredictorScore:
    """How well one predictor did over all plans that it predicted.

    Attributes
    ----------
    predictor : str
    kind : {"model", "transfer"}
        Whether it saw traces of the timed prompts or of the profiling prompts.
    plans : int
    median_error, p95_error : float
        Of the absolute error.
    spearman : float or None
        Rank correlation over all plans.
    rank_agreement : float or None
        Share of the pairs of plans with disjoint measured intervals that it puts in the right order.
    rank_pairs : int
        How many such pairs there are.
    pick : str or None
        The candidate that it calls fastest.
    regret : float or None
        What following it would have cost.
    """

    predictor: str
    kind: str
    plans: int
    median_error: float
    p95_error: float
    spearman: float | None
    rank_agreement: float | None
    rank_pairs: int
    pick: str | None = None
    regret: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that a set of runs says about a set of predictions; made by `compare`.

    Attributes
    ----------
    plans : tuple of PlanResult
        Fastest first; baselines among them.
    chosen, autoregression : str
    best : str
        The fastest candidate over all repeats.
    regret : Interval or None
        measured(chosen) / measured(best) - 1, best picked on odd repeats, both timed on even ones; None
        with a single repeat.
    regret_against : str or None
        The candidate that was fastest on odd repeats.
    primary : str
        The predictor that the summary speaks of.
    scores : tuple of PredictorScore
    coverage : float or None
        Share of plans whose measured time lies within the transfer prediction's interval.
    interval_width : float or None
        Median over plans of that interval's width, relative to its middle.
    intervals : int
        How many plans have one.
    fastest_baseline : str or None
        The baseline that was fastest over all repeats.
    against_baseline : Interval or None
        Its time over the chosen plan's, paired over prompts: above 1, the plan is faster.
    drift : float or None
        How much slower (relative) the same work was at the end of the measurement than at its start.
    slow_runs : int
        Runs over 1.5 times as slow as the fastest repeat of the same plan and prompt; all are kept.
    prompts, repeats, runs, tokens : int
    seconds : float
        Time of all runs.
    confidence : float
    """

    plans: tuple[PlanResult, ...]
    chosen: str
    autoregression: str
    best: str
    regret: Interval | None
    regret_against: str | None
    primary: str
    scores: tuple[PredictorScore, ...]
    coverage: float | None
    interval_width: float | None
    intervals: int
    fastest_baseline: str | None
    against_baseline: Interval | None
    drift: float | None
    slow_runs: int
    prompts: int
    repeats: int
    runs: int
    tokens: int
    seconds: float
    confidence: float

    def plan(self, text: str) -> PlanResult:
        """Return the result of one plan.

        Raises
        ------
        InvalidArgumentError
            If that plan was not run.
        """
        for result in self.plans:
            if result.plan == text:
                return result
        raise InvalidArgumentError(f"expected one of the plans that were run; got {text}")

    def score(self, predictor: str, kind: str = "model") -> PredictorScore | None:
        """Return how well `predictor` did, or None if it predicted no plan that was run."""
        found = (score for score in self.scores if (score.predictor, score.kind) == (predictor, kind))
        return next(found, None)

    @property
    def verdict(self) -> str:
        """What the clock advises.

        "speculate" (the chosen plan is surely faster than the target alone), "missed" (it is not, but another
        plan surely beats it), "within noise", or "do not speculate".
        """
        speedup = self.plan(self.chosen).speedup
        low, high = speedup.bounds or (speedup.value, speedup.value)
        if low > 1:
            return "speculate"
        if self.missed:
            return "missed"
        return "within noise" if low < 1 < high else "do not speculate"

    @property
    def missed(self) -> bool:
        """Whether the regret's interval lies above 0: another candidate is surely faster than the chosen plan."""
        return self.regret is not None and self.regret.low is not None and self.regret.low > 0

    def to_report(
        self,
        *,
        provenance: Mapping[str, Any] = _EMPTY,
        mismatches: Iterable[Mismatch] = (),
        outputs_compared: bool = True,
        distribution: Mapping[str, Any] | None = None,
        why: str = "",
        warnings: Iterable[str] = (),
        notes: Iterable[str] = (),
    ) -> dict[str, Any]:
        """Return report.json as a dictionary of plain values (None where a figure does not exist).

        Parameters
        ----------
        provenance : mapping
            Plain values: versions, device, workload, command line.
        mismatches : iterable of Mismatch
            Where greedy outputs differed from the target's own.
        outputs_compared : bool
            Whether anybody looked; sampled outputs cannot be compared token by token.
        distribution : mapping, optional
            Of single outputs: "plan", "measured" (seconds per token, one per run) and "predicted" (the same by
            predictor).
        why : str
            One line on why the solver chose its plan.
        warnings, notes : iterable of str
            What to be careful about; what is said beside the baselines.
        """
        return {
            "format": "hsdopt-report",
            "schema": REPORT_SCHEMA,
            "summary": _summary(self),
            "why": why,
            "warnings": list(warnings),
            "plans": [_plan_entry(result, self) for result in self.plans if not result.baseline],
            "baselines": [_plan_entry(result, self) for result in self.plans if result.baseline],
            "notes": list(notes),
            "predictors": [_score_entry(score) for score in self.scores],
            "mismatches": [_mismatch_entry(mismatch) for mismatch in mismatches],
            "outputs_compared": outputs_compared,
            "distribution": None if distribution is None else dict(distribution),
            "provenance": dict(provenance),
        }


def compare(
    runs: Iterable[Run],
    predictions: Predictions,
    *,
    chosen: str,
    autoregression: str,
    rng: np.random.Generator,
    cost: Callable[[str, int], float] | None = None,
    candidates: Collection[str] | None = None,
    families: Mapping[str, str] = _EMPTY,
    memory: Mapping[str, int] = _EMPTY,
    replicates: int = 4000,
    confidence: float = 0.95,
) -> Comparison:
    """Return what the runs say about the predictions.

    Parameters
    ----------
    runs : iterable of Run
        One per plan, repeat and prompt, none missing.
    predictions : Predictions
    chosen, autoregression : str
        The solver's plan, and the target alone; both must have been run.
    rng : numpy.random.Generator
    cost : callable (model, new tokens) -> seconds, optional
        Profiled cost of one pass, for the split of the error into acceptance and cost; over 0 new tokens, what a pass
        right behind another network's takes more. A plan for which it
        raises PredictionError gets no split.
    candidates : collection of str, optional
        The plans that the solver could have chosen, for the regret; by default every plan that was run, which
        baselines are not. Leave out plans that change the output.
    families : mapping of str to str
        Families of labels that are not plans in notation, as of adaptive plans; other such labels are baselines.
    memory : mapping of str to int
        Bytes of weights that each plan needs loaded, where known.
    replicates : int
        Bootstrap replicates.
    confidence : float
        Coverage aimed at by every interval.

    Raises
    ------
    InvalidArgumentError
        If a run is missing or there twice, or a plan named here was not run.

    Notes
    -----
    Intervals are expanded percentile intervals: the percentiles are moved out by Student's t for the
    number of prompts and by sqrt(n / (n - 1)), since the plain percentile interval is too narrow for
    few prompts (Hesterberg 2015, The American Statistician 69, 371-386).

    Examples
    --------
    >>> timed = [("t", 0, 1.0), ("t", 1, 1.0), ("t(d:2)", 0, 0.5), ("t(d:2)", 1, 0.5)]
    >>> runs = [Run(plan, 1, prompt, 10, seconds) for plan, prompt, seconds in timed]
    >>> predictions = Predictions({"closed form": {"t": 0.1, "t(d:2)": 0.055}}, "closed form")
    >>> outcome = compare(runs, predictions, chosen="t(d:2)", autoregression="t", rng=np.random.default_rng(0))
    >>> outcome.plan("t(d:2)").speedup.value, round(outcome.plan("t(d:2)").error["closed form"], 3)
    (2.0, 0.1)
    """
    grid = _Grid.from_runs(tuple(runs), rng, replicates, confidence)
    for name in (chosen, autoregression, *(candidates or ())):
        grid.index(name)
    results = tuple(
        replace(result, family=families.get(result.plan, result.family), memory_bytes=memory.get(result.plan))
        for result in _results(grid, predictions, chosen, autoregression, cost)
    )
    baselines = tuple(result.plan for result in results if result.baseline)
    allowed = {*grid.plans} - {*baselines} if candidates is None else {*candidates}
    options = tuple(name for name in grid.plans if name in allowed)
    regret, against = _regret(grid, chosen, options)
    rates = dict(zip(grid.plans, grid.rates(), strict=True))
    fastest = min(baselines, key=rates.__getitem__, default=None)
    return Comparison(
        plans=results,
        chosen=chosen,
        autoregression=autoregression,
        best=min(options, key=rates.__getitem__),
        regret=regret,
        regret_against=against,
        primary=predictions.primary,
        scores=_scores(grid, predictions, results, options),
        coverage=_coverage(results),
        interval_width=_interval_width(results),
        intervals=sum(result.transfer_interval is not None for result in results),
        fastest_baseline=fastest,
        against_baseline=next((result.over_chosen for result in results if result.plan == fastest), None),
        drift=_drift(grid.runs),
        slow_runs=int(np.count_nonzero(grid.seconds > _SLOW * grid.seconds.min(axis=1, keepdims=True))),
        prompts=grid.prompts,
        repeats=len(grid.repeats),
        runs=len(grid.runs),
        tokens=int(grid.tokens.sum()),
        seconds=float(grid.seconds.sum()),
        confidence=confidence,
    )


def plan_family(text: str) -> str:
    """Return the family of a plan in notation; "baseline" for a label that is no plan.

    Examples
    --------
    >>> [plan_family(text) for text in ("t", "t(d:4)", "t(m:4(d:2))", "t(m:4, d:2)", "generate()")]
    ['autoregression', 'speculative', 'hierarchy', 'cascade', 'baseline']
    """
    try:
        return parse_plan(text).family
    except PlanError:
        return BASELINE


@dataclass(frozen=True, slots=True)
class _Grid:
    """Runs as arrays of shape [plans, repeats, prompts], and bootstrap weights of shape [replicates, prompts]."""

    plans: tuple[str, ...]
    repeats: tuple[int, ...]
    seconds: Floats
    tokens: Floats
    runs: tuple[Run, ...]
    weights: Floats
    confidence: float

    @classmethod
    def from_runs(cls, runs: Sequence[Run], rng: np.random.Generator, replicates: int, confidence: float) -> _Grid:
        """Return the full grid, or say which run it lacks."""
        if not runs:
            raise InvalidArgumentError("expected at least one run to compare with; got none")
        plans = tuple(dict.fromkeys(run.plan for run in runs))
        repeats = tuple(sorted({run.repeat for run in runs}))
        prompts = sorted({run.prompt for run in runs})
        cells = Counter((run.plan, run.repeat, run.prompt) for run in runs)
        _require_full(cells, plans, repeats, prompts)
        place = (
            {p: i for i, p in enumerate(plans)},
            {r: i for i, r in enumerate(repeats)},
            {p: i for i, p in enumerate(prompts)},
        )
        seconds, tokens = np.empty((2, len(plans), len(repeats), len(prompts)))
        for run in runs:
            where = place[0][run.plan], place[1][run.repeat], place[2][run.prompt]
            seconds[where], tokens[where] = run.seconds, run.tokens
        weights = rng.multinomial(len(prompts), np.full(len(prompts), 1 / len(prompts)), size=replicates)
        return cls(plans, repeats, seconds, tokens, tuple(runs), weights.astype(float), confidence)

    @property
    def prompts(self) -> int:
        """Return the number of prompts."""
        return int(self.seconds.shape[2])

    def index(self, plan: str) -> int:
        """Return the row of `plan`."""
        if plan not in self.plans:
            raise InvalidArgumentError(f"expected runs of {plan}; got runs of {', '.join(self.plans)}: run it as well")
        return self.plans.index(plan)

    def rates(self, repeats: NDArray[np.bool_] | None = None) -> Floats:
        """Return pooled seconds per token per plan, over the repeats marked (default: all)."""
        kept = slice(None) if repeats is None else repeats
        return np.asarray(self.seconds[:, kept].sum(axis=(1, 2)) / self.tokens[:, kept].sum(axis=(1, 2)))

    def replicates(self, repeats: NDArray[np.bool_] | None = None) -> Floats:
        """Return pooled seconds per token of every bootstrap replicate, shape [replicates, plans]."""
        kept = slice(None) if repeats is None else repeats
        seconds, tokens = self.seconds[:, kept].sum(axis=1), self.tokens[:, kept].sum(axis=1)
        return np.asarray((self.weights @ seconds.T) / (self.weights @ tokens.T))

    def interval(self, value: float, draws: Floats) -> Interval:
        """Return `value` with the expanded percentile interval of its bootstrap draws."""
        if self.prompts < 2:
            return Interval(float(value))
        tail = expanded_tail(self.prompts, self.confidence)
        low, high = np.quantile(draws, [tail, 1 - tail])
        return Interval(float(value), float(low), float(high))


def _require_full(
    cells: Mapping[tuple[str, int, int], int], plans: Sequence[str], repeats: Sequence[int], prompts: Sequence[int]
) -> None:
    for plan in plans:
        for repeat in repeats:
            for prompt in prompts:
                count = cells.get((plan, repeat, prompt), 0)
                if count != 1:
                    raise InvalidArgumentError(
                        f"expected one run of {plan} in repeat {repeat} on prompt {prompt}; got {count}: "
                        "finish the measurement first"
                    )


def _require_positive(predictor: str, plans: Mapping[str, float]) -> None:
    for plan, value in plans.items():
        if not (math.isfinite(value) and value > 0):
            raise InvalidArgumentError(f"expected positive seconds per token of {plan} by {predictor}; got {value}")


def _regret(grid: _Grid, chosen: str, candidates: Sequence[str]) -> tuple[Interval | None, str | None]:
    """Return the regret of `chosen` and the plan it is against; both None with one repeat."""
    odd = np.array([repeat % 2 == 1 for repeat in grid.repeats])
    if odd.all() or not odd.any():
        return None, None
    rates = dict(zip(grid.plans, grid.rates(odd), strict=True))
    best = min(candidates, key=rates.__getitem__)
    ours, theirs = grid.index(chosen), grid.index(best)
    timed, draws = grid.rates(~odd), grid.replicates(~odd)
    ratios = draws[:, ours] / draws[:, theirs] - 1
    return grid.interval(timed[ours] / timed[theirs] - 1, ratios), best


def _spearman(predicted: Floats, measured: Floats) -> float | None:
    """Return the rank correlation; None if one side has a single rank."""
    ranks = rankdata(predicted), rankdata(measured)
    if len(predicted) < 2 or any(np.ptp(r) == 0 for r in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def _rank_agreement(pairs: Sequence[tuple[float, Interval]]) -> tuple[float | None, int]:
    """Return the share of decided pairs that the predictions order rightly, and how many are decided."""
    right = decided = 0
    for number, (predicted, measured) in enumerate(pairs):
        for other_predicted, other in pairs[:number]:
            first, second = measured.bounds, other.bounds
            if first is None or second is None or (first[0] <= second[1] and second[0] <= first[1]):
                continue
            decided += 1
            right += (predicted - other_predicted) * (measured.value - other.value) > 0
    return (right / decided if decided else None), decided


def _drift(runs: Sequence[Run]) -> float | None:
    """Return the relative slowdown from the first run to the last, by least squares over like work."""
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.plan, run.prompt), []).append(run)
    relative, place = [], []
    for group in groups.values():
        seconds, order = np.array([run.seconds for run in group]), np.array([run.order for run in group], dtype=float)
        relative.append(seconds / seconds.mean() - 1)
        place.append(order - order.mean())
    x, y = np.concatenate(place), np.concatenate(relative)
    span = max(run.order for run in runs) - min(run.order for run in runs)
    return float((x @ y) / (x @ x) * span) if x @ x > 0 else None


def _coverage(results: Sequence[PlanResult]) -> float | None:
    inside = [
        result.transfer_interval[0] <= result.measured.value <= result.transfer_interval[1]
        for result in results
        if result.transfer_interval is not None
    ]
    return sum(inside) / len(inside) if inside else None


def _interval_width(results: Sequence[PlanResult]) -> float | None:
    """Return the median width of the predicted intervals, relative to their middles."""
    bounds = [result.transfer_interval for result in results if result.transfer_interval is not None]
    return float(np.median([2 * (high - low) / (high + low) for low, high in bounds])) if bounds else None


def _results(
    grid: _Grid,
    predictions: Predictions,
    chosen: str,
    autoregression: str,
    cost: Callable[[str, int], float] | None,
) -> tuple[PlanResult, ...]:
    """Return every plan's result, fastest first."""
    rates, draws = grid.rates(), grid.replicates()
    base, ours = grid.index(autoregression), grid.index(chosen)
    results = []
    for row, plan in enumerate(grid.plans):
        measured = grid.interval(rates[row], draws[:, row])
        predicted = _of_plan(predictions.model, plan)
        transfer = _of_plan(predictions.transfer, plan)
        results.append(
            PlanResult(
                plan=plan,
                family=plan_family(plan),
                measured=measured,
                speedup=grid.interval(rates[base] / rates[row], draws[:, base] / draws[:, row]),
                over_chosen=grid.interval(rates[row] / rates[ours], draws[:, row] / draws[:, ours]),
                predicted=predicted,
                error={name: value / measured.value - 1 for name, value in predicted.items()},
                transfer=transfer,
                transfer_error={name: value / measured.value - 1 for name, value in transfer.items()},
                transfer_interval=predictions.intervals.get(plan),
                **_passes([run for run in grid.runs if run.plan == plan], _foreseen(predictions, plan), cost),
            )
        )
    return tuple(sorted(results, key=lambda result: result.measured.value))


def _foreseen(predictions: Predictions, plan: str) -> dict[Pass, float] | None:
    """Return the passes foreseen per token, those behind another network's once more as (model, 0)."""
    passes = predictions.passes.get(plan)
    if passes is None:
        return None
    return {**passes, **{(model, 0): number for model, number in predictions.switches.get(plan, {}).items()}}


def _of_plan(predictions: Mapping[str, Mapping[str, float]], plan: str) -> dict[str, float]:
    return {name: float(plans[plan]) for name, plans in predictions.items() if plan in plans}


def _passes(
    runs: Sequence[Run], expected: Mapping[Pass, float] | None, cost: Callable[[str, int], float] | None
) -> dict[str, Any]:
    """Return the fields of a result that come from the passes of its runs."""
    tokens, target_passes = sum(run.tokens for run in runs), sum(run.target_passes for run in runs)
    made: Counter[Pass] = Counter()
    switched: Counter[Pass] = Counter()
    taken: dict[str, float] = {}
    for run in runs:
        made.update(run.passes)
        switched.update({(model, 0): number for model, number in run.switches.items()})
        for (model, _), seconds in run.pass_seconds.items():
            taken[model] = taken.get(model, 0.0) + seconds
    count = Counter[str]()
    for (model, _), number in made.items():
        count[model] += number
    inside = sum(taken.values())
    fields: dict[str, Any] = {
        "tokens_per_pass": tokens / target_passes if target_passes else None,
        "outside": 1 - inside / sum(run.seconds for run in runs) if inside else None,
        "seconds_by_model": {model: seconds / tokens for model, seconds in taken.items()},
        "passes_by_model": {model: number / tokens for model, number in count.items()},
    }
    return fields | _split(made | switched, inside, tokens, expected, cost)


def _split(
    made: Mapping[Pass, int],
    inside: float,
    tokens: int,
    expected: Mapping[Pass, float] | None,
    cost: Callable[[str, int], float] | None,
) -> dict[str, float | None]:
    """Return the acceptance part and the cost part of the error."""
    nothing: dict[str, float | None] = {"acceptance_error": None, "cost_error": None}
    if cost is None or not made:
        return nothing
    try:
        priced = sum(number * cost(*kind) for kind, number in made.items()) / tokens
        foreseen = None if expected is None else sum(number * cost(*kind) for kind, number in expected.items())
    except PredictionError:
        return nothing
    return {
        "acceptance_error": foreseen / priced - 1 if foreseen is not None and priced > 0 else None,
        "cost_error": priced / (inside / tokens) - 1 if inside > 0 else None,
    }


def _scores(
    grid: _Grid, predictions: Predictions, results: Sequence[PlanResult], candidates: Sequence[str]
) -> tuple[PredictorScore, ...]:
    """Return one score per predictor and kind, model errors first."""
    scores = []
    for kind, by_predictor in (("model", predictions.model), ("transfer", predictions.transfer)):
        for predictor, values in by_predictor.items():
            known = [result for result in results if result.plan in values]
            if not known:
                continue
            score = _score(predictor, kind, [values[result.plan] for result in known], known)
            pick = min((plan for plan in candidates if plan in values), key=values.__getitem__, default=None)
            regret = None if pick is None else _regret(grid, pick, candidates)[0]
            scores.append(replace(score, pick=pick, regret=None if regret is None else regret.value))
    return tuple(scores)


def _score(predictor: str, kind: str, values: Sequence[float], results: Sequence[PlanResult]) -> PredictorScore:
    predicted, measured = np.array(values), np.array([result.measured.value for result in results])
    errors = np.abs(predicted / measured - 1)
    agreement, pairs = _rank_agreement([(v, r.measured) for v, r in zip(values, results, strict=True)])
    return PredictorScore(
        predictor=predictor,
        kind=kind,
        plans=len(results),
        median_error=float(np.median(errors)),
        p95_error=float(np.quantile(errors, 0.95)),
        spearman=_spearman(predicted, measured),
        rank_agreement=agreement,
        rank_pairs=pairs,
    )


def _speedup_error(outcome: Comparison) -> float | None:
    """Return the median relative error of the speed-ups predicted from the profile; a machine's speed cancels."""
    alone = outcome.plan(outcome.autoregression).transfer.get(outcome.primary)
    errors = [
        abs(alone / result.transfer[outcome.primary] / result.speedup.value - 1)
        for result in outcome.plans
        if alone is not None and outcome.primary in result.transfer and result.plan != outcome.autoregression
    ]
    return float(np.median(errors)) if errors else None


def _summary(outcome: Comparison) -> dict[str, Any]:
    chosen, alone = outcome.plan(outcome.chosen), outcome.plan(outcome.autoregression)
    model, transfer = outcome.score(outcome.primary), outcome.score(outcome.primary, "transfer")
    forecast = chosen.transfer if outcome.primary in chosen.transfer else chosen.predicted
    alone_forecast = alone.transfer if outcome.primary in chosen.transfer else alone.predicted
    foreseen = outcome.primary in forecast and outcome.primary in alone_forecast
    return {
        "verdict": outcome.verdict,
        "chosen": outcome.chosen,
        "best": outcome.best,
        "autoregression": outcome.autoregression,
        "predictor": outcome.primary,
        "median_error": model and model.median_error,
        "p95_error": model and model.p95_error,
        "transfer_median_error": transfer and transfer.median_error,
        "transfer_p95_error": transfer and transfer.p95_error,
        "transfer_speedup_median_error": _speedup_error(outcome),
        "transfer_coverage": outcome.coverage,
        "transfer_interval_width": outcome.interval_width,
        "transfer_intervals": outcome.intervals,
        "spearman": model and model.spearman,
        "rank_agreement": model and model.rank_agreement,
        "rank_pairs": model.rank_pairs if model else 0,
        "regret": outcome.regret and outcome.regret.value,
        "regret_interval": _bounds(outcome.regret),
        "regret_against": outcome.regret_against,
        "missed": outcome.missed,
        "speedup": chosen.speedup.value,
        "speedup_interval": _bounds(chosen.speedup),
        "predicted_speedup": alone_forecast[outcome.primary] / forecast[outcome.primary] if foreseen else None,
        "fastest_baseline": outcome.fastest_baseline,
        "against_baseline": outcome.against_baseline and outcome.against_baseline.value,
        "against_baseline_interval": _bounds(outcome.against_baseline),
        "prompts": outcome.prompts,
        "repeats": outcome.repeats,
        "runs": outcome.runs,
        "tokens": outcome.tokens,
        "seconds": outcome.seconds,
        "confidence": outcome.confidence,
        "drift": outcome.drift,
        "slow_runs": outcome.slow_runs,
    }


def _bounds(interval: Interval | None) -> list[float] | None:
    bounds = None if interval is None else interval.bounds
    return None if bounds is None else list(bounds)


def _plan_entry(result: PlanResult, outcome: Comparison) -> dict[str, Any]:
    primary = outcome.primary
    return {
        "plan": result.plan,
        "family": result.family,
        "predicted_seconds_per_token": result.predicted.get(primary),
        "measured_seconds_per_token": result.measured.value,
        "interval": _bounds(result.measured),
        "tokens_per_pass": result.tokens_per_pass,
        "error": result.error.get(primary),
        "speedup": result.speedup.value,
        "speedup_interval": _bounds(result.speedup),
        "over_chosen": result.over_chosen.value,
        "over_chosen_interval": _bounds(result.over_chosen),
        "transfer_seconds_per_token": result.transfer.get(primary),
        "transfer_interval": None if result.transfer_interval is None else list(result.transfer_interval),
        "transfer_error": result.transfer_error.get(primary),
        "acceptance_error": result.acceptance_error,
        "cost_error": result.cost_error,
        "outside": result.outside,
        "predicted": dict(result.predicted),
        "transfer": dict(result.transfer),
        "seconds_by_model": dict(result.seconds_by_model),
        "passes_by_model": dict(result.passes_by_model),
        "memory_bytes": result.memory_bytes,
    }


def _score_entry(score: PredictorScore) -> dict[str, Any]:
    return {name: getattr(score, name) for name in PredictorScore.__slots__}


def _mismatch_entry(mismatch: Mismatch) -> dict[str, Any]:
    fields = {name: getattr(mismatch, name) for name in Mismatch.__slots__}
    return fields | {"near_tie": mismatch.near_tie}
