"""Expected seconds per token of any plan under a profile, exact under independent rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import singledispatch
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from hsdopt.checks import check_length
from hsdopt.errors import PlanError, PredictionError
from hsdopt.latency.counts import Counts, Passes, Position, finite_counts, positions, steady_counts
from hsdopt.latency.kernel import Kernel
from hsdopt.latency.stints import stint_counts
from hsdopt.overhead import Overhead
from hsdopt.plan import Adaptive, Bild, Level, Plan
from hsdopt.profiles import Profile

__all__ = ["EdgeShare", "Estimate", "ModelShare", "PositionValue", "expected_latency", "expected_passes"]

_Counted: TypeAlias = tuple[Counts, list[Position]]

_BEYOND = 2e-3  # share of the seconds that may be spent in passes longer than any profiled
_LEVEL = 95  # per cent of the replicates inside an interval
_COVERED = 0.8  # share of the replicates that have to cover the plan

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ModelShare:
    """What one model does per emitted token.

    Attributes
    ----------
    model : str
    passes : float
        Passes per emitted token; requests for the lookup drafter.
    seconds : float
        Seconds per emitted token.
    new_tokens : float
        Mean new tokens of a pass.
    """

    model: str
    passes: float
    seconds: float
    new_tokens: float


@dataclass(frozen=True, slots=True)
class EdgeShare:
    """Tokens drafted and accepted per emitted token, for one drafter under one verifier."""

    drafter: str
    verifier: str
    drafted: float
    accepted: float


@dataclass(frozen=True, slots=True)
class PositionValue:
    """What one position of the target's draft is worth.

    Attributes
    ----------
    position : int
        From 1.
    tokens : float
        Tokens per pass that it adds: the chance that everything up to it is drafted and accepted.
    seconds : float
        Seconds per round that it takes: its share of the drafting, and one more token in the verify pass.
    saved : float
        Seconds per round that it saves, `tokens` at the plan's seconds per token less `seconds`; a negative
        value speaks for a shorter draft.
    """

    position: int
    tokens: float
    seconds: float
    saved: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is expected of a plan.

    Attributes
    ----------
    seconds_per_token : float
    speedup : float
        Over the target's own autoregression, c(1), at the same context.
    tokens_per_pass : float
        Tokens emitted per pass of the target.
    interval, speedup_interval : (float, float) or None
        95 % intervals of seconds per token and of the speed-up, if replicates were asked for.
    breakdown : tuple of ModelShare
        One row per model, from the bottom to the target; their seconds and `overhead` sum to `seconds_per_token`.
    passes : mapping of (str, int) to float
        Passes per emitted token by (model, new tokens).
    edges : tuple of EdgeShare
        Tokens drafted and accepted per emitted token.
    position_value : tuple of PositionValue
        In the long run, also for a finite output; empty for Big Little Decoder.
    extrapolated : float
        Share of the seconds spent in passes longer than any profiled, at most 0.002.
    overhead : float
        Seconds per token outside the passes; 0 unless they were asked for.
    switches : mapping of str to float
        Passes per emitted token right behind another network's, by model.
    """

    seconds_per_token: float
    speedup: float
    tokens_per_pass: float
    interval: Interval | None = None
    breakdown: tuple[ModelShare, ...] = ()
    speedup_interval: Interval | None = None
    passes: Mapping[tuple[str, int], float] = field(default_factory=lambda: MappingProxyType({}))
    edges: tuple[EdgeShare, ...] = ()
    position_value: tuple[PositionValue, ...] = ()
    extrapolated: float = 0.0
    overhead: float = 0.0
    switches: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def expected_latency(
    plan: Plan,
    profile: Profile,
    *,
    context: float | None = None,
    tokens: int | None = None,
    interval: int = 0,
    rng: np.random.Generator | int | None = None,
    overhead: bool = False,
) -> Estimate:
    """Return the expected seconds per token of `plan`, with what they are spent on.

    Exact if rounds are independent and each segment of a draft is accepted by its pair's survival curve:
    lengths, conventions, short lookup proposals and the tokens that caches have to catch up on are all counted
    jointly. What passes right behind another network's take more is left out of the values of positions.

    Parameters
    ----------
    plan : Level, Adaptive or Bild
    profile : Profile
        Costs and acceptance. Big Little Decoder is replayed along its traces; there the small model's stints
        are taken to be as doubtful and as surprising as the target's own output at the same positions.
    context : float, optional
        Context length at which costs are read; the mean of those visited, or the curve's default, if not given.
    tokens : int, optional
        Emit this many tokens after the first, and stop: the last drafts are shorter, and every cache starts
        with one token missing. The long run if not given.
    interval : int
        Bootstrap replicates (of prompts and timings) behind 95 % percentile intervals; 0 for none. A profile
        given by hand has nothing to resample and gets none. Replicates whose prompts are too short for the
        plan are left out, up to a fifth of them.
    rng : numpy.random.Generator or int, optional
        Draws the replicates; seed 0 if not given.
    overhead : bool
        Whether the seconds outside the passes, as profiled, are added, here and to the target's own autoregression:
        then the estimate is of wall-clock time.

    Returns
    -------
    Estimate

    Raises
    ------
    PredictionError
        If the profile cannot speak about the plan: an unknown model or pair, drafts or passes longer than
        profiled, lenience, no traces for Big Little Decoder, or no overhead where it is asked for. Passes longer
        than profiled that take at most 0.2 % of the time are charged in proportion to their tokens.
    InvalidArgumentError
        If an option is outside its domain.

    Notes
    -----
    Leviathan et al. 2023; Chen et al., arXiv 2312.11462; Mohri et al., arXiv 2510.19705; Kim et al., arXiv
    2302.07863; here with survival curves, cost curves and catch-up.

    Examples
    --------
    >>> from hsdopt.plan import parse_plan
    >>> profile = Profile.from_rates("big", {"big": 1.0, "small": 0.125}, {("small", "big"): 0.5})
    >>> estimate = expected_latency(parse_plan("big(small:2)"), profile)
    >>> round(estimate.speedup, 12)
    1.4
    >>> [(row.model, round(row.passes, 3)) for row in estimate.breakdown]
    [('small', 1.143), ('big', 0.571)]
    """
    if tokens is not None:
        check_length(tokens, "tokens", minimum=1)
    check_length(interval, "interval")
    beside = Overhead.of(profile) if overhead else Overhead()
    estimate = _estimate(plan, profile, context, tokens, beside, full=True)
    if not interval or (profile.traces is None and not profile.samples):
        return estimate
    generator = np.random.default_rng(0 if rng is None else rng)
    drawn = _replicates(
        lambda copy: _estimate(plan, copy, context, tokens, beside, full=False), profile, interval, generator
    )
    return replace(
        estimate,
        interval=_percentiles([copy.seconds_per_token for copy in drawn]),
        speedup_interval=_percentiles([copy.speedup for copy in drawn]),
    )


def expected_passes(plan: Plan, profile: Profile, *, tokens: int | None = None) -> Counts:
    """Return the passes per emitted token, by model and new tokens, whatever they cost.

    Parameters
    ----------
    plan : Level, Adaptive or Bild
    profile : Profile
        Acceptance; costs are not read.
    tokens : int, optional
        As in `expected_latency`.

    Raises
    ------
    PlanError, PredictionError
        As `expected_latency`.

    Examples
    --------
    >>> from hsdopt.plan import parse_plan
    >>> profile = Profile.from_rates("big", {"big": 1.0, "small": 0.125}, {("small", "big"): 0.5})
    >>> expected_passes(parse_plan("big(small:2)"), profile).tokens_per_pass
    1.75
    """
    for model in plan.models:
        profile.require(model)
    return _counted(plan, profile, tokens)[0]


@singledispatch
def _counted(plan: Plan, _profile: Profile, _tokens: int | None, *, full: bool = False) -> _Counted:  # noqa: ARG001
    """Return the passes and, of rounds and if `full`, the positions of the target's draft."""
    raise PlanError(f"expected a Level, Adaptive or Bild plan; got {type(plan).__name__}")


@_counted.register(Level)
@_counted.register(Adaptive)
def _rounds(plan: Plan, profile: Profile, tokens: int | None, *, full: bool = False) -> _Counted:
    kernel, names = Kernel(plan, profile), plan.models
    counts = steady_counts(kernel, names) if tokens is None else finite_counts(kernel, names, tokens)
    return counts, positions(kernel, names, plan.target) if full else []


@_counted.register(Bild)
def _stints(plan: Bild, profile: Profile, tokens: int | None, *, full: bool = False) -> _Counted:  # noqa: ARG001
    profile.require_greedy(plan)
    return stint_counts(plan, profile.traces, tokens), []


def _estimate(
    plan: Plan, profile: Profile, context: float | None, tokens: int | None, overhead: Overhead, *, full: bool
) -> Estimate:
    """Return the estimate without intervals, and without the values of positions unless `full`."""
    prices = _Prices(profile, profile.context if context is None else context, overhead, plan.target)
    for model in plan.models:
        profile.require(model)
    counts, places = _counted(plan, profile, tokens, full=full)
    return _priced(plan, counts, places, prices)


def _priced(plan: Plan, counts: Counts, places: list[Position], prices: _Prices) -> Estimate:
    breakdown = tuple(_share(model, counts, prices) for model in plan.models)
    outside = prices.outside(counts.passes)
    seconds = sum(row.seconds for row in breakdown) + outside
    if seconds <= 0.0:
        raise PredictionError(f"expected passes that cost something; got 0 seconds per token for {plan}")
    return Estimate(
        seconds_per_token=seconds,
        speedup=(prices(plan.target, 1) + prices.outside({(plan.target, 1): 1.0})) / seconds,
        tokens_per_pass=counts.tokens_per_pass,
        breakdown=breakdown,
        passes=MappingProxyType(dict(counts.passes)),
        edges=tuple(EdgeShare(*edge, *both) for edge, both in counts.edges.items()),
        position_value=tuple(_worth(index + 1, place, seconds, prices) for index, place in enumerate(places)),
        extrapolated=_extrapolated(counts, prices, seconds),
        overhead=outside,
        switches=MappingProxyType(dict(counts.switches)),
    )


def _share(model: str, counts: Counts, prices: _Prices) -> ModelShare:
    own = [(tokens, count) for (name, tokens), count in counts.passes.items() if name == model]
    passes = sum(count for _, count in own)
    seconds = sum(count * prices(model, tokens) for tokens, count in own)
    seconds += counts.switches.get(model, 0.0) * prices.switch(model)
    fed = sum(count * tokens for tokens, count in own)
    return ModelShare(model, passes, seconds, fed / passes if passes > 0.0 else 0.0)


def _worth(position: int, place: Position, seconds_per_token: float, prices: _Prices) -> PositionValue:
    seconds = sum(count * prices(model, tokens) for (model, tokens), count in place.passes.items())
    seconds += prices.outside(place.passes)
    return PositionValue(position, place.tokens, seconds, place.tokens * seconds_per_token - seconds)


def _extrapolated(counts: Counts, prices: _Prices, seconds: float) -> float:
    """Return the share of `seconds` in passes beyond the cost curves; raise if it is more than a trace."""
    beyond: dict[tuple[str, int], float] = {
        key: count * prices(*key) / seconds for key, count in counts.passes.items() if prices.beyond(*key)
    }
    share = sum(beyond.values())
    if share > _BEYOND:
        model, tokens = max(beyond, key=lambda key: beyond[key])
        raise PredictionError(
            f"expected passes of {model} over at most {prices.longest(model):g} new tokens, as profiled; got "
            f"{tokens}, and {share:.1%} of the time in such passes: profile longer passes or shorten the drafts"
        )
    return share


class _Prices:
    """Seconds per pass, at one context, each read once; beyond a curve in proportion to the tokens."""

    def __init__(self, profile: Profile, context: float | None, overhead: Overhead, target: str) -> None:
        self._profile = profile
        self._context = context
        self._overhead = overhead
        self._target = target
        self._read: dict[str, list[float]] = defaultdict(list)

    def longest(self, model: str) -> float:
        """Return the most new tokens that were profiled."""
        return self._profile.cost(model).max_tokens

    def beyond(self, model: str, tokens: int) -> bool:
        """Return whether passes of so many tokens were not profiled."""
        return tokens > self.longest(model)

    def switch(self, model: str) -> float:
        """Return the seconds that a pass behind another network's takes more."""
        return self._profile.cost(model).switch

    def outside(self, passes: Passes) -> float:
        """Return the seconds outside so many passes by (model, new tokens)."""
        return self._overhead.seconds(passes, self._target)

    def __call__(self, model: str, tokens: int) -> float:
        """Return the seconds of one pass of `model` over `tokens` new tokens."""
        curve = self._profile.cost(model)
        if curve.constant:
            tokens = 1
        known = min(tokens, curve.max_tokens)
        table = self._read[model]
        if len(table) < known:
            size = int(min(max(2 * known, 32), curve.max_tokens))
            table[:] = curve.table(size, self._context).tolist()
        return table[int(known) - 1] * (tokens / known)


def _replicates(
    predict: Callable[[Profile], Estimate], profile: Profile, count: int, rng: np.random.Generator
) -> list[Estimate]:
    """Return the estimates of `count` bootstrap replicates, less those too short for the plan."""
    drawn = []
    for _ in range(count):
        try:
            drawn.append(predict(profile.resample(rng)))
        except PredictionError:
            continue
    if len(drawn) < _COVERED * count:
        raise PredictionError(
            f"expected most of {count} bootstrap replicates to cover the plan; got {len(drawn)}: shorten its drafts, "
            "or profile more prompts"
        )
    return drawn


def _percentiles(values: list[float]) -> Interval:
    outside = (100 - _LEVEL) / 2
    low, high = np.percentile(values, [outside, 100 - outside])
    return float(low), float(high)
