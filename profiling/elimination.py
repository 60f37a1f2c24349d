"""Which plan is best so far, how sure that is, and what would make it surer: arithmetic only, nothing is measured.

The pick is the plan with the fewest expected seconds per token. Every rival is compared with it by the logarithm of
the ratio of their seconds, since both are read from the same prompts and the same timings, whose noise largely
cancels. The variance of that ratio has two parts: prompts (a jackknife, one prompt left out at a time) and timings (a
bootstrap over repeats, paired between all kinds of pass). Its tail is Student's, with Welch and Satterthwaite's degrees
of freedom, since both parts are estimated from few values.

Repeated looks: the chance of error, 1 - confidence, is spent in proportion to what has been used of the budget, or of
the prompts if that is more; a look may spend what has become free since the last, the final one all that is left.
Within a look, the chance that any rival is missed is that of a normal copula with the rivals' correlations (they fall
together: one prompt may favour the pick over all of them). The chances at which whole models were dropped are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from hsdopt.costs import CostCurve, fitted_costs
from hsdopt.errors import PredictionError
from hsdopt.latency.counts import Counts, steady_counts
from hsdopt.latency.kernel import Kernel
from hsdopt.plan import Level, Plan
from hsdopt.profiles import Profile
from hsdopt.solvers.solution import Candidate, Solution
from hsdopt.solvers.solve import solve

__all__ = ["WITHIN", "Question", "Rival", "Verdict", "judge"]

WITHIN = 0.02
"""A pick is good enough if it takes at most this fraction more time than the best plan."""

_LEADING = 10  # plans compared at a look
_PER_SET = 3  # of any set of models among them
_REPLICATES = 100
_DRAWS = 20_000
_GAP = 0.005  # share of a plan's time that may hang on how a curve is read between measured pass sizes
_CLOSE = 0.1  # of that share, what a single pass size may contribute without being timed
_REFINED = 4  # pass sizes added at a look

Floats = NDArray[np.float64]
Pass = tuple[str, int]
Predictor = Callable[[Profile], Callable[[Plan], float] | None]
"""Makes the evaluator of plans (as `hsdopt.solve` takes it) from a profile; None stands for the closed form."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be decided.

    Attributes
    ----------
    confidence : float
        Chance that the pick is within 2 % of the best plan.
    family : str
        As in `hsdopt.solve`.
    max_draft_length : int
        Longest draft of any level.
    predictor : callable or None
        Other than the closed form.
    """

    confidence: float = 0.95
    family: str = "all"
    max_draft_length: int = 24
    predictor: Predictor | None = None


@dataclass(frozen=True, slots=True)
class Rival:
    """One plan held against the pick.

    Attributes
    ----------
    plan : Plan
    seconds : float
        Expected per token.
    excess : float
        Logarithm of its seconds over the pick's.
    prompts, timings : float
        Variance of `excess` from either source; infinite where there are too few values to tell.
    wrong : float
        Chance that the pick takes over 2 % more time than this plan.
    faster : float
        Chance that this plan is faster than the pick.
    """

    plan: Plan
    seconds: float
    excess: float
    prompts: float
    timings: float
    wrong: float
    faster: float

    @property
    def deviation(self) -> float:
        """The standard error of `excess`."""
        return math.sqrt(self.prompts + self.timings)

    def __str__(self) -> str:
        """Say how it compares with the pick."""
        doubt = f" ± {2 * self.deviation:.1%}" if math.isfinite(self.deviation) else ", too few values to say how sure"
        return f"{self.plan.description} takes {math.expm1(self.excess):+.1%}{doubt}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one look finds.

    Attributes
    ----------
    pick : Plan
    seconds : float
        Expected per token.
    alone : float
        Seconds per token of the target alone.
    rivals : tuple of Rival
        All other plans compared, the best first.
    wrong, allowed, left : float
        Chance that the pick is over 2 % slower than the best plan, what it may be to stop here, and what it may be if
        this is the last look.
    refine : tuple of (str, int)
        Pass sizes to time, as the comparison hangs on how curves are read between those measured.
    used : tuple of (str, int)
        Pass sizes on which the pick and the rivals that may be over 2 % faster spend their time.
    level : float
        Chance of being faster below which a rival is out.
    """

    pick: Plan
    seconds: float
    alone: float
    rivals: tuple[Rival, ...]
    wrong: float
    allowed: float
    left: float
    refine: tuple[Pass, ...]
    used: tuple[Pass, ...]
    level: float

    @property
    def settled(self) -> bool:
        """Whether the pick stands with the confidence asked for."""
        return not self.refine and self.wrong <= self.allowed

    @property
    def eliminated(self) -> tuple[Rival, ...]:
        """The rivals that are out."""
        return tuple(rival for rival in self.rivals if rival.faster <= self.level)

    @property
    def surviving(self) -> tuple[Rival, ...]:
        """The rivals that may be faster."""
        return tuple(rival for rival in self.rivals if rival.faster > self.level)

    @property
    def open(self) -> tuple[Rival, ...]:
        """The rivals that may be over 2 % faster."""
        return tuple(rival for rival in self.rivals if rival.wrong > self.level)

    def hopeless(self, prompts: int) -> bool:
        """Return whether the pick would not stand even if timings had no noise, from these `prompts` alone."""
        margin = math.log1p(WITHIN)
        noisy = [rival for rival in self.rivals if 0 < rival.prompts < math.inf]
        tails = [stats.t.sf((rival.excess + margin) / math.sqrt(rival.prompts), max(prompts - 1, 1)) for rival in noisy]
        return max(tails, default=0.0) > self.left

    def needed(self) -> float:
        """Return the factor by which the variances have to shrink for the pick to stand, were all else to stay."""
        share = max(self.left / max(len(self.rivals), 1), 1e-12)
        tail = float(stats.norm.isf(share))
        margins = [(rival.excess + math.log1p(WITHIN)) / tail for rival in self.open]
        pairs = zip(self.open, margins, strict=True)
        return min((margin**2 / rival.deviation**2 for rival, margin in pairs if rival.deviation > 0), default=1.0)


def judge(
    profile: Profile,
    question: Question,
    *,
    drafters: Sequence[str],
    allowed: float,
    left: float,
    carried: float = 0.0,
    seed: int = 0,
) -> Verdict:
    """Return the pick of a profile and how it stands against its rivals.

    Parameters
    ----------
    profile : Profile
        What was measured so far.
    question : Question
    drafters : sequence of str
        Those still in the race.
    allowed, left : float
        Chances of error that this look may spend, and that it may if it is the last.
    carried : float
        Chance of error with which others were dropped.
    seed : int
        Of the bootstrap over timings.

    Raises
    ------
    PredictionError
        If the profile cannot speak about its own target.
    """
    seconds = _candidates(profile, question, drafters)
    plans = sorted(seconds, key=lambda plan: seconds[plan])
    passes = {plan: _passes(plan, profile) for plan in plans}
    level = allowed / max(len(plans) - 1, 1)
    logs = [math.log(seconds[plan] / seconds[plans[0]]) for plan in plans]
    rng = np.random.default_rng(seed)
    prompts = _prompt_covariance(plans, profile)
    timings, repeats = _timing_covariance([passes[plan] for plan in plans], profile, rng)
    count = 0 if profile.traces is None else profile.traces.prompts
    rivals = tuple(
        _rival(plan, seconds[plan], log, (prompt, count), (timing, repeats))
        for plan, log, prompt, timing in list(zip(plans, logs, prompts.diagonal(), timings.diagonal(), strict=True))[1:]
    )
    alive = [plans[0], *(rival.plan for rival in rivals if rival.faster > level)]
    rest = [plans[0], *(rival.plan for rival in rivals if rival.wrong > level)]
    return Verdict(
        plans[0],
        seconds[plans[0]],
        seconds[Level(profile.target)],
        rivals,
        wrong=min(1.0, carried + _any_wrong([rival.wrong for rival in rivals], (prompts + timings)[1:, 1:], rng)),
        allowed=allowed,
        left=left,
        refine=_refine(profile, question, drafters, {plan: passes[plan] for plan in alive}, seconds[plans[0]]),
        used=_used(profile, [passes[plan] for plan in (rest if len(rest) > 1 else alive)]),
        level=level,
    )


def _candidates(profile: Profile, question: Question, drafters: Sequence[str]) -> dict[Plan, float]:
    """Return the leading plans, autoregression, and the best plan with every drafter, with their seconds per token."""
    shortlist = _Shortlist(profile, None if question.predictor is None else question.predictor(profile))
    found = _solve(profile, question, rerank=shortlist, allowed=drafters)
    seconds = shortlist.seconds
    alone = found.autoregression
    leading = {alone.plan: alone.seconds_per_token}
    sets: dict[frozenset[str], int] = {}
    left = set(drafters)
    for plan in sorted(seconds, key=lambda plan: seconds[plan]):
        models = frozenset(plan.models)
        sets[models] = sets.get(models, 0) + 1
        if (len(leading) <= _LEADING and sets[models] <= _PER_SET) or left & models:
            leading[plan] = seconds[plan]
            left -= models
    return leading


class _Shortlist:
    """Judges the plans that `solve` asks about, and remembers them: its leaders, and the best of every drafter."""

    def __init__(self, profile: Profile, predictor: Callable[[Plan], float] | None) -> None:
        self.seconds: dict[Plan, float] = {}
        self._profile, self._predictor = profile, predictor
        self._tables = {name: _table(curve, profile.context) for name, curve in profile.costs.items()}

    def __call__(self, plan: Plan) -> float:
        """Return the seconds per token of one plan."""
        (value,) = self.many([plan])
        if value is None:
            raise PredictionError(f"expected a plan that the profile can predict; got {plan}")
        return value

    def many(self, plans: Sequence[Plan]) -> list[float | None]:
        """Return the seconds per token of many plans; None for those that cannot be predicted."""
        values = self._values(plans)
        self.seconds |= {plan: value for plan, value in zip(plans, values, strict=True) if value is not None}
        return values

    def _values(self, plans: Sequence[Plan]) -> list[float | None]:
        if self._predictor is None:
            return [self._expected(plan) for plan in plans]
        many: Callable[[Sequence[Plan]], list[float | None]] | None = getattr(self._predictor, "many", None)
        return [self._predictor(plan) for plan in plans] if many is None else many(plans)

    def _expected(self, plan: Plan) -> float:
        counts = _counts(plan, self._profile)
        return _seconds(counts.passes, self._tables) + counts.switching(self._profile.costs)


def _solve(profile: Profile, question: Question, **options: Any) -> Solution:  # noqa: ANN401 -- handed on
    length = min(question.max_draft_length, profile.max_draft_length)
    return solve(profile, family=question.family, max_draft_length=length, interval=0, **options)


def _ordered(found: Solution) -> list[Candidate]:
    return sorted([found.candidate, *found.runners_up], key=lambda candidate: candidate.seconds_per_token)


def _counts(plan: Plan, profile: Profile) -> Counts:
    return steady_counts(Kernel(plan, profile), plan.models)


def _passes(plan: Plan, profile: Profile) -> dict[Pass, float]:
    """Return the passes per token of a plan."""
    return dict(_counts(plan, profile).passes)


def _table(curve: CostCurve, context: float | None) -> Floats:
    return curve.table(1 if curve.constant else int(curve.max_tokens), context)


def _seconds(passes: Mapping[Pass, float], tables: Mapping[str, Floats]) -> float:
    return sum(number * _price(tables[model], tokens) for (model, tokens), number in passes.items())


def _price(table: Floats, tokens: int) -> float:
    """Return the seconds of a pass; beyond the table in proportion to the tokens, as in `expected_latency`."""
    if len(table) == 1:
        return float(table[0])
    return float(table[min(tokens, len(table)) - 1]) * max(1.0, tokens / len(table))


def _prompt_covariance(plans: Sequence[Plan], profile: Profile) -> Floats:
    """Return the covariance of the plans' log ratios to the first from the prompts: the jackknife's."""
    traces = profile.traces
    if traces is None or traces.prompts < 2:
        return np.full((len(plans), len(plans)), math.inf)
    used = {model for plan in plans for model in plan.models}
    rows = []
    for left_out in range(traces.prompts):
        kept = np.delete(np.arange(traces.prompts), left_out)
        copy = replace(profile, traces=traces.take(kept), samples={}, _laws={})
        tables = {name: _table(profile.costs[name], copy.context) for name in used}
        rows.append([math.log(_seconds(_passes(plan, copy), tables)) for plan in plans])
    ratios = np.array(rows) - np.array(rows)[:, :1]
    return np.asarray((traces.prompts - 1) * np.cov(ratios.T, bias=True).reshape(len(plans), -1))


def _timing_covariance(
    passes: Sequence[Mapping[Pass, float]], profile: Profile, rng: np.random.Generator
) -> tuple[Floats, int]:
    """Return the covariance of the plans' log ratios to the first from the timings, and the repeats behind it.

    Repeats are drawn for all kinds of pass alike: what slows a whole repeat slows all of it.
    """
    names = {model for each in passes for model, _ in each}
    counts = [len(sample.seconds) for name in names for sample in profile.samples[name]]
    repeats = int(np.median(counts))
    if repeats < 2:
        return np.full((len(passes), len(passes)), math.inf), repeats
    draws = rng.random((_REPLICATES, max(counts)))
    tables = {name: _drawn_tables(profile, name, draws) for name in names}
    seconds = [sum((number * _prices(tables[m], n) for (m, n), number in each.items()), np.zeros(1)) for each in passes]
    logs = np.log(np.array(seconds))
    spread = np.cov(logs - logs[:1], bias=True).reshape(len(passes), -1)
    return np.asarray(spread * repeats / (repeats - 1)), repeats


def _drawn_tables(profile: Profile, name: str, draws: Floats) -> Floats:
    """Return c(1), c(2), ... of a model in every replicate, shape [replicates, tokens]."""
    curve = profile.costs[name]
    if curve.constant:
        pooled = np.array([seconds for sample in profile.samples[name] for seconds in sample.seconds])
        return np.asarray(np.median(pooled[(draws * len(pooled)).astype(int)], axis=1)[:, np.newaxis])
    grid = np.full((len(draws), len(curve.contexts), len(curve.tokens), draws.shape[1]), np.nan)
    for sample in profile.samples[name]:
        seconds = np.array(sample.seconds)
        place = curve.contexts.index(sample.context), curve.tokens.index(sample.tokens)
        drawn = seconds[(draws[:, : len(seconds)] * len(seconds)).astype(int)]
        grid[:, place[0], place[1], : len(seconds)] = drawn
    fitted = fitted_costs(grid)
    curves = (replace(curve, seconds=tuple(map(tuple, one.tolist()))) for one in fitted)
    return np.array([_table(each, profile.context) for each in curves])


def _prices(tables: Floats, tokens: int) -> Floats:
    longest = tables.shape[1]
    return tables[:, min(tokens, longest) - 1] * (1.0 if longest == 1 else max(1.0, tokens / longest))


def _rival(plan: Plan, seconds: float, excess: float, prompts: tuple[float, int], timings: tuple[float, int]) -> Rival:
    """Return a rival from its log ratio to the pick, and (variance, values behind it) of either source."""
    variance = prompts[0] + timings[0]
    margin = math.log1p(WITHIN)
    if not math.isfinite(variance):
        return Rival(plan, seconds, excess, prompts[0], timings[0], 0.5, 0.5)
    if variance <= 0:
        return Rival(plan, seconds, excess, 0.0, 0.0, float(excess < -margin), float(excess < 0))
    freedom = variance**2 / sum(part**2 / (values - 1) for part, values in (prompts, timings) if values > 1)
    wrong, faster = stats.t.sf(np.array([excess + margin, excess]) / math.sqrt(variance), freedom)
    return Rival(plan, seconds, excess, prompts[0], timings[0], float(wrong), float(faster))


def _any_wrong(wrong: Sequence[float], covariance: Floats, rng: np.random.Generator) -> float:
    """Return the chance that any of several events happens, by their single chances and a normal copula."""
    if len(wrong) < 2 or not np.all(np.isfinite(covariance)):
        return max(wrong, default=0.0)
    scale = np.sqrt(np.maximum(covariance.diagonal(), np.finfo(float).tiny))
    values, vectors = np.linalg.eigh(covariance / np.outer(scale, scale))
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    draws = rng.standard_normal((_DRAWS, len(wrong))) @ root.T
    joint = float(np.mean(np.any(draws < stats.norm.ppf(np.asarray(wrong)), axis=1)))
    return min(max(joint, *wrong), sum(wrong))


def _used(profile: Profile, passes: Iterable[Mapping[Pass, float]]) -> tuple[Pass, ...]:
    """Return the measured pass sizes on which plans spend at least 0.5 % of their time, or between which they do."""
    found: dict[Pass, None] = {}
    tables = {name: _table(curve, profile.context) for name, curve in profile.costs.items()}
    for each in passes:
        total = _seconds(each, tables)
        for (model, tokens), number in each.items():
            if number * _price(tables[model], tokens) >= _GAP * total:
                found |= {(model, size): None for size in _around(profile.costs[model], tokens)}
    return tuple(sorted(found))


def _around(curve: CostCurve, tokens: int) -> tuple[int, ...]:
    """Return the measured pass sizes next to `tokens`, or `tokens` itself if it was measured."""
    if curve.constant:
        return (1,)
    place = int(np.searchsorted(curve.tokens, tokens))
    if place == len(curve.tokens):
        return (curve.tokens[-1],)
    return (tokens,) if curve.tokens[place] == tokens else (curve.tokens[place - 1], curve.tokens[place])


def _refine(
    profile: Profile,
    question: Question,
    drafters: Sequence[str],
    alive: Mapping[Plan, Mapping[Pass, float]],
    best: float,
) -> tuple[Pass, ...]:
    """Return the pass sizes to time next: those that the plans in the race hang on, then those of plans that might be.

    A curve is taken to lie between its neighbours at a size that was not timed. A plan that would be over 2 % faster
    than the best, were its passes as cheap as their cheaper neighbours, may be what the measured sizes hide.
    """
    wanted: dict[Pass, float] = {}
    for passes in alive.values():
        _note_gaps(wanted, passes, profile)
    if not wanted:
        hopeful = replace(profile, costs={name: _cheapest(curve) for name, curve in profile.costs.items()}, samples={})
        for candidate in _ordered(_solve(hopeful, question, allowed=drafters)):
            if candidate.seconds_per_token < best * (1 - WITHIN):
                _note_gaps(wanted, _passes(candidate.plan, profile), profile, halved=True)
                break
    return tuple(sorted(wanted, key=lambda each: -wanted[each])[:_REFINED])


def _note_gaps(
    wanted: dict[Pass, float], passes: Mapping[Pass, float], profile: Profile, *, halved: bool = False
) -> None:
    """Add the pass sizes that a plan uses between measured ones, if together they may move its seconds by 0.5 %."""
    tables = {model: _table(profile.costs[model], profile.context) for model, _ in passes}
    total = _seconds(passes, tables)
    gaps: dict[Pass, float] = {}
    for (model, tokens), number in passes.items():
        around = _around(profile.costs[model], tokens)
        if len(around) > 1:
            price = _price(tables[model], tokens)
            off = max(abs(_price(tables[model], size) - price) for size in around)
            gaps[model, tokens] = number * off / total
    if sum(gaps.values()) <= _GAP:
        return
    for (model, tokens), share in gaps.items():
        if share > _CLOSE * _GAP:
            wanted[model, tokens] = max(share, wanted.get((model, tokens), 0.0))
            low = _around(profile.costs[model], tokens)[0]
            if halved and tokens - low > 2:
                wanted.setdefault((model, (low + tokens + 1) // 2), share)


def _cheapest(curve: CostCurve) -> CostCurve:
    """Return the curve that costs at any size what the cheaper measured neighbour costs."""
    if curve.constant:
        return curve
    sizes = range(curve.tokens[0], curve.tokens[-1] + 1)
    grid = np.asarray(curve.seconds)
    columns = [[curve.tokens.index(size) for size in _around(curve, tokens)] for tokens in sizes]
    rows = np.array([grid[:, places].min(axis=1) for places in columns]).T
    return replace(curve, tokens=tuple(sizes), seconds=tuple(map(tuple, rows.tolist())))
