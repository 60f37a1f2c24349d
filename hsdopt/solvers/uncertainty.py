"""How sure a decision is: bootstrap over prompts and timings, the same draws for every plan.

A replicate draws prompts and timings with replacement. Acceptance laws are sums over prompts, so each pair's sums
are taken once per prompt and every replicate is a product with the numbers of times that its prompts were drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hsdopt.acceptance import Acceptance, Traces
from hsdopt.checks import FloatArray, check_length
from hsdopt.costs import CostCurve, fitted_costs
from hsdopt.errors import InvalidArgumentError, PredictionError
from hsdopt.latency.counts import steady_counts
from hsdopt.latency.expected import expected_latency
from hsdopt.latency.kernel import Kernel
from hsdopt.plan import LOOKUP, Level, Plan
from hsdopt.profiles import Profile

__all__ = ["Assessment", "assess", "cost_noise", "cost_replicates", "replicates"]

_WITHIN = 0.02
_LEVEL = 95


@dataclass(frozen=True, slots=True)
class Assessment:
    """How sure a profile is about a plan and its rivals.

    Attributes
    ----------
    interval : (float, float)
        95 % interval of the plan's speed-up over autoregression.
    probability_faster : float
        Share of the replicates in which the plan is faster than autoregression.
    probability_within : float
        Share of the replicates in which the plan is within 2 % of the best of all plans compared.
    resolution : float
        Half the width of the 95 % interval of the plan's relative difference from a rival that uses other models
        (autoregression is one), the widest of these: smaller differences may be noise.
    """

    interval: tuple[float, float]
    probability_faster: float
    probability_within: float
    resolution: float


def assess(
    plans: Sequence[Plan],
    profile: Profile,
    *,
    interval: int = 200,
    seed: int = 0,
    context: float | None = None,
    scale: Mapping[Plan, float] | None = None,
) -> Assessment | None:
    """Return how sure the first of `plans` is, held against the others and autoregression.

    Parameters
    ----------
    plans : sequence of Plan
        The plan in question, then its rivals.
    profile : Profile
    interval : int
        Bootstrap replicates; 0 for none.
    seed : int
    context : float, optional
        As in `expected_latency`.
    scale : mapping of Plan to float, optional
        What another evaluator's seconds are of the closed form's; replicates are multiplied by it.

    Returns
    -------
    Assessment or None
        None if no replicates were asked for, or the profile was given by hand and has nothing to resample.

    Raises
    ------
    InvalidArgumentError
        If there is no plan, or `interval` or `seed` is not a whole number of at least 0.
    PredictionError
        If the profile cannot speak about a plan.
    """
    if not plans:
        raise InvalidArgumentError("expected at least one plan to assess; got none")
    count = check_length(interval, "interval")
    check_length(seed, "seed")
    if count == 0 or not _resamples(profile):
        return None
    every = list(dict.fromkeys([*plans, Level(profile.target)]))
    factors = np.array([(scale or {}).get(plan, 1.0) for plan in every])
    seconds = np.array(list(replicates(every, profile, count=count, seed=seed, context=context))) * factors
    alone = seconds[:, every.index(Level(profile.target))]
    low, high = np.percentile(alone / seconds[:, 0], _ends())
    return Assessment(
        (float(low), float(high)),
        float(np.mean(seconds[:, 0] < alone)),
        float(np.mean(seconds[:, 0] <= seconds.min(axis=1) * (1 + _WITHIN))),
        _resolution(every, seconds),
    )


def _resamples(profile: Profile) -> bool:
    prompts = 0 if profile.traces is None else profile.traces.prompts
    return prompts > 1 or any(len(s.seconds) > 1 for samples in profile.samples.values() for s in samples)


def _resolution(plans: Sequence[Plan], seconds: FloatArray) -> float:
    """Return the widest half-interval of the first plan's log ratio to the best plan of each other set of models."""
    order = np.argsort(np.median(seconds, axis=0), kind="stable")
    rivals: dict[frozenset[str], int] = {}
    for place in order:
        rivals.setdefault(frozenset(plans[place].models), int(place))
    rivals.pop(frozenset(plans[0].models))
    ratios = np.log(seconds[:, list(rivals.values())] / seconds[:, :1]) if rivals else np.zeros((1, 1))
    low, high = np.percentile(ratios, _ends(), axis=0)
    return float(np.max(high - low) / 2)


def _ends() -> list[float]:
    outside = (100 - _LEVEL) / 2
    return [outside, 100 - outside]


def replicates(
    plans: Sequence[Plan], profile: Profile, *, count: int, seed: int = 0, context: float | None = None
) -> Iterator[list[float]]:
    """Yield the seconds per token of every plan, replicate by replicate.

    Raises
    ------
    PredictionError
        If the profile cannot speak about a plan.
    """
    rng = np.random.default_rng(seed)
    source = _Source(profile, plans, count, rng)
    for index in range(count):
        copy = source.profile(index)
        place = source.context(index) if context is None else context
        prices = _Prices(copy, place)
        yield [_seconds(plan, source, index, copy, prices) for plan in plans]


def _seconds(plan: Plan, source: _Source, index: int, copy: Profile, prices: _Prices) -> float:
    if plan.bild is None:
        counts = steady_counts(Kernel(plan, copy), plan.models)
        inside = sum(number * prices(model, tokens) for (model, tokens), number in counts.passes.items())
        return inside + counts.switching(copy.costs)
    walked = replace(copy, traces=source.traces(index))
    return expected_latency(plan, walked, context=prices.context).seconds_per_token


class _Prices:
    """Seconds per pass of one replicate; beyond a curve in proportion to the tokens."""

    def __init__(self, profile: Profile, context: float | None) -> None:
        self.context = context
        self._profile = profile
        self._tables: dict[str, list[float]] = {}

    def __call__(self, model: str, tokens: int) -> float:
        """Return the seconds of a pass over `tokens` new tokens."""
        curve = self._profile.cost(model)
        if model not in self._tables:
            size = 1 if curve.constant else int(curve.max_tokens)
            self._tables[model] = curve.table(size, self.context).tolist()
        table = self._tables[model]
        if curve.constant:
            return table[0]
        return table[min(tokens, len(table)) - 1] * max(1.0, tokens / len(table))


class _Source:
    """The replicates of a profile: draws made once, laws of the pairs that the plans use."""

    def __init__(self, profile: Profile, plans: Sequence[Plan], count: int, rng: np.random.Generator) -> None:
        self._profile = profile
        self._draws = np.zeros((count, 0), dtype=np.int64)
        weights = np.zeros((count, 0))
        laws: dict[tuple[str, str], Sequence[Acceptance]] = {}
        if profile.traces is not None:
            prompts = profile.traces.prompts
            self._draws = rng.integers(prompts, size=(count, prompts))
            weights = np.array([np.bincount(row, minlength=prompts) for row in self._draws], dtype=float)
            for pair in dict.fromkeys(pair for plan in plans for pair in plan.pairs):
                if pair not in profile.acceptances:
                    laws[pair] = _laws(profile.traces, pair, weights, profile.max_draft_length)
        self._laws = laws
        self._contexts = _contexts(profile.traces, weights)
        used = {model for plan in plans for model in plan.models} | {profile.target}
        self._curves = {name: cost_replicates(profile, name, count, rng) for name in profile.samples if name in used}

    def profile(self, index: int) -> Profile:
        """Return one replicate, without traces."""
        laws = {pair: replicate[index] for pair, replicate in self._laws.items()}
        costs = {name: replicate[index] for name, replicate in self._curves.items()}
        return Profile(
            self._profile.target,
            {**self._profile.costs, **costs},
            {**self._profile.acceptances, **laws},
        )

    def context(self, index: int) -> float | None:
        """Return the mean context of one replicate's prompts."""
        return None if self._contexts is None else float(self._contexts[index])

    def traces(self, index: int) -> Traces | None:
        """Return the traces of one replicate's prompts."""
        return None if self._profile.traces is None else self._profile.traces.take(self._draws[index])


def cost_noise(
    passes: Mapping[tuple[str, int], float],
    profile: Profile,
    *,
    count: int,
    rng: np.random.Generator,
) -> FloatArray:
    """Return by which factors the seconds of some passes may be off, since their costs come from a few timings.

    Parameters
    ----------
    passes : mapping of (model, new tokens) to float
        How many passes of each kind.
    profile : Profile
        Its timings are drawn anew, with replacement; costs without timings are taken as they are.
    count : int
        Replicates.
    rng : Generator

    Returns
    -------
    ndarray, shape [count]
    """
    seconds, fitted = np.zeros(count), 0.0
    for name in dict.fromkeys(model for model, _ in passes):
        kinds = {tokens: number for (model, tokens), number in passes.items() if model == name}
        sizes, numbers = np.array(list(kinds)), np.array(list(kinds.values()))
        curve = profile.costs[name]
        known = np.minimum(sizes, curve.max_tokens)
        own = float(numbers @ curve.at(known, profile.context))
        fitted += own
        if name not in profile.samples:
            seconds += own
            continue
        drawn = cost_replicates(profile, name, count, rng)
        seconds += np.array([numbers @ each.at(known, profile.context) for each in drawn])
    return seconds / fitted if fitted else np.ones(count)


def _contexts(traces: Traces | None, weights: FloatArray) -> FloatArray | None:
    if traces is None:
        return None
    totals = np.bincount(traces.prompt, weights=traces.context)
    return np.asarray((weights @ totals) / (weights @ np.bincount(traces.prompt)))


def cost_replicates(profile: Profile, name: str, count: int, rng: np.random.Generator) -> list[CostCurve]:
    """Return the cost curve of one model in each of `count` replicates: timings drawn anew, with replacement."""
    samples = [s for s in profile.samples[name] if s.batch == 1]
    drawn = [np.asarray(s.seconds)[rng.integers(len(s.seconds), size=(count, len(s.seconds)))] for s in samples]
    if profile.costs[name].constant:
        return [CostCurve.fixed(float(value)) for value in np.median(np.concatenate(drawn, axis=1), axis=1)]
    curve = profile.costs[name]
    most = max(len(s.seconds) for s in samples)
    timings = np.full((count, len(curve.contexts), len(curve.tokens), most), np.nan)
    for s, values in zip(samples, drawn, strict=True):
        timings[:, curve.contexts.index(s.context), curve.tokens.index(s.tokens), : len(s.seconds)] = values
    grids = fitted_costs(timings)
    return [replace(curve, seconds=tuple(map(tuple, grid.tolist()))) for grid in grids]


def _laws(traces: Traces, pair: tuple[str, str], weights: FloatArray, length: int) -> list[Acceptance]:
    """Return the law of a pair in every replicate, as `Traces.acceptance` would derive it."""
    drafter, verifier = pair
    if drafter != LOOKUP:
        return _network_laws(traces, pair, weights, length)
    if traces.proposed is None or verifier not in traces.lookup_accepted:
        raise PredictionError(f"expected traces of {drafter} under {verifier}; add it with --into profile.json")
    return _lookup_laws(traces, verifier, weights, length)


def _network_laws(traces: Traces, pair: tuple[str, str], weights: FloatArray, length: int) -> list[Acceptance]:
    last = traces.agreement(*pair)
    step = traces.ratio.get(pair, last)
    reached, prompt, prompts = np.ones(len(last)), traces.prompt, traces.prompts
    survival = np.ones((len(weights), length + 1))
    for m in range(length):
        starts = np.arange(max(len(last) - m, 0))
        inside = starts[prompt[starts] == prompt[starts + m]]
        at_risk = np.bincount(prompt[inside], weights=reached[inside], minlength=prompts)
        kept = np.bincount(prompt[inside], weights=reached[inside] * last[inside + m], minlength=prompts)
        survival[:, m + 1] = survival[:, m] * _ratio(weights @ kept, weights @ at_risk)
        following = np.zeros_like(reached)
        following[inside] = reached[inside] * step[inside + m]
        reached = following
    return [Acceptance(tuple(curve)) for curve in np.minimum(survival, 1.0).tolist()]


def _ratio(part: FloatArray, whole: FloatArray) -> FloatArray:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _lookup_laws(traces: Traces, verifier: str, weights: FloatArray, length: int) -> list[Acceptance]:
    assert traces.proposed is not None  # noqa: S101 -- the caller has refused this
    proposed = np.minimum(traces.proposed, length)
    accepted = np.minimum(traces.lookup_accepted[verifier], proposed)
    _, first, counts = np.unique(traces.prompt, return_index=True, return_counts=True)
    remaining = np.repeat(first + counts, counts) - np.arange(len(traces))
    size = (traces.prompts, length + 1, length + 1)
    judged, taken = np.zeros(size), np.zeros(size)  # [prompt, proposed, position]
    for m in range(1, length + 1):
        at_risk = (proposed >= m) & (accepted >= m - 1) & (remaining >= m)
        np.add.at(judged[..., m], (traces.prompt[at_risk], proposed[at_risk]), 1.0)
        kept = at_risk & (accepted >= m)
        np.add.at(taken[..., m], (traces.prompt[kept], proposed[kept]), 1.0)
    groups = np.zeros(size[:2])
    np.add.at(groups, (traces.prompt, proposed), 1.0)
    return _joint_laws(*(np.tensordot(weights, sums, 1) for sums in (groups, judged, taken)))


def _joint_laws(groups: FloatArray, judged: FloatArray, taken: FloatArray) -> list[Acceptance]:
    """Return the laws from (replicate, proposed) counts, and (replicate, proposed, position) judged and taken."""
    pooled = _ratio(taken.sum(axis=1), judged.sum(axis=1))
    shares = np.where(judged > 0, _ratio(taken, judged), pooled[:, np.newaxis])
    shares[..., 0] = 1.0
    longest = groups.shape[1]
    survival = shares.cumprod(axis=2) * (np.arange(longest) <= np.arange(longest)[:, np.newaxis])
    chances: NDArray[np.float64] = survival - np.concatenate([survival[..., 1:], np.zeros_like(survival[..., :1])], 2)
    joint = chances * (groups / groups.sum(axis=1, keepdims=True))[..., np.newaxis]
    return [Acceptance.from_joint(replicate) for replicate in joint]
