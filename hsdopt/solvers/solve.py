"""`solve`: the best plan for a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hsdopt.checks import check_length
from hsdopt.errors import InvalidArgumentError
from hsdopt.latency.expected import expected_latency
from hsdopt.plan import Level, Plan
from hsdopt.profiles import Profile
from hsdopt.solvers.arrays import ProfileArrays, profile_arrays
from hsdopt.solvers.bild import frontier
from hsdopt.solvers.candidates import adaptives, cascades, conventions, exhaustive_orders, hierarchies, singles
from hsdopt.solvers.evaluate import Pool, neighbours, ranked, reranked
from hsdopt.solvers.limits import Limits, memory_bytes, read_limits
from hsdopt.solvers.reasons import why
from hsdopt.solvers.rows import proves_rows
from hsdopt.solvers.solution import Candidate, FrontierPoint, Solution
from hsdopt.solvers.uncertainty import Assessment, assess

__all__ = ["FAMILIES", "solve"]

FAMILIES = ("speculative", "hierarchy", "cascade", "adaptive", "bild", "all")

_CONFIDENT = 0.8  # share of replicates in which a plan that is run beats autoregression
_LEADING = 8  # plans compared in every replicate
_RUNNERS_UP = 10
_PER_SET = 2  # of any set of models among the leading
_SHORTLIST = 40  # plans that another evaluator ranks
_PER_DRAFTER = 3  # single-drafter plans among them
_SPREAD = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # draft lengths of single drafters among them
_STARTS, _STEPS = 3, 6  # climbs to better neighbours under the full count
_STACKS = 5  # stacks whose conventions are varied


def solve(
    profile: Profile,
    *,
    family: str = "all",
    max_draft_length: int = 24,
    max_levels: int | None = None,
    max_memory_bytes: int | None = None,
    rerank: Callable[[Plan], float] | None = None,
    allowed: Iterable[str] | None = None,
    required: Iterable[str] | None = None,
    context: float | None = None,
    max_deviation: float | None = None,
    interval: int = 200,
    seed: int = 0,
) -> Solution:
    """Return the plan with the lowest expected seconds per token, and how sure that is.

    Parameters
    ----------
    profile : Profile
        Its drafters may stand in any order.
    family : {"all", "speculative", "hierarchy", "cascade", "adaptive", "bild"}
        One drafter; stacks; stacks whose drafts may be rows, and may pass up all they hold; stacks that choose
        their draft by the tokens owed; Big Little Decoder; or all but the last, which changes the output. Every
        family contains autoregression and the single drafters, the cascade and the adaptive one also stacks.
    max_draft_length : int
        Longest draft of any level.
    max_levels : int, optional
        Most models above each other, the target counted.
    max_memory_bytes : int, optional
        Most bytes of weights.
    rerank : callable, optional
        Takes a plan, returns seconds per token, and decides among the leading plans in place of the closed form.
        If it has an attribute ``many``, that is given all plans at once, and may return None for a plan.
    allowed, required : iterable of str, optional
        Drafters that may, and that must be used.
    context : float, optional
        Context length at which costs are read; the mean of those visited if not given.
    max_deviation : float, optional
        For Big Little Decoder, which needs it: the largest share of the output's tokens, between 0 and 1, that
        may differ from the target's most likely ones.
    interval : int
        Bootstrap replicates behind the interval of the speed-up; 0 for none. A profile given by hand has none.
    seed : int
        Draws the replicates.

    Returns
    -------
    Solution
        The target alone if nothing beats it beyond noise.

    Raises
    ------
    InvalidArgumentError
        If an option is outside its domain, or names a model that the profile lacks.
    PredictionError
        If the profile cannot speak about its own target, or has no traces for Big Little Decoder.

    Notes
    -----
    The searches are exact on costs that are local to an edge (or a row) of a stack. The best of what they find,
    every single drafter and autoregression are then evaluated by `expected_latency`, which counts all tokens
    that caches have to catch up on, and the best three climb to neighbours that are better still. With `rerank`
    the leading plans, and single drafters from short drafts to long ones, are ranked anew, and the best three climb
    once more: where tokens are accepted in bursts, the closed form drafts too many.

    Examples
    --------
    >>> rates = {("small", "big"): 0.8, ("lookup", "big"): 0.4, ("lookup", "small"): 0.4}
    >>> profile = Profile.from_rates("big", {"lookup": 0.0, "small": 0.1, "big": 1.0}, rates)
    >>> solution = solve(profile, family="speculative")
    >>> print(solution.plan, round(solution.speedup, 3))
    big(small:6) 2.47
    """
    limits = read_limits(
        profile,
        max_draft_length=max_draft_length,
        max_levels=max_levels,
        max_memory_bytes=max_memory_bytes,
        allowed=allowed,
        required=required,
    )
    _check(family, max_deviation)
    check_length(interval, "interval")
    check_length(seed, "seed")
    pool = Pool(profile, limits, context)
    found = _search(pool, profile, family, limits, context, max_deviation)
    ordered = found.candidates if rerank is None else _reconsidered(pool, found.candidates, rerank, family)
    alone = _alone(profile, ordered, context, rerank)
    ordered = ordered if required and limits.required else ranked({c.plan: c for c in (*ordered, alone)}.values())
    if not ordered:
        raise InvalidArgumentError(
            f"expected limits that some plan of the family {family} meets; got none: allow more levels or drafters"
        )
    contender = next((candidate for candidate in ordered if candidate.plan != alone.plan), None)
    sure = _assessment(profile, ordered, contender, alone, interval=interval, seed=seed, context=context)
    best = _decide(ordered, contender, alone, sure, required=bool(limits.required))
    return Solution(
        best.plan,
        best.seconds_per_token,
        alone.seconds_per_token / best.seconds_per_token,
        best,
        alone,
        best_by_family=_best_by_family(ordered),
        runners_up=tuple(candidate for candidate in ordered if candidate.plan != best.plan)[:_RUNNERS_UP],
        interval=None if sure is None else sure.interval,
        probability_within=None if sure is None else sure.probability_within,
        resolution=None if sure is None else sure.resolution,
        frontier=found.frontier if rerank is None else _frontier_again(found.frontier, alone, rerank),
        memory_bytes=memory_bytes(profile, best.plan.models),
        why=why(best, best if best.plan != alone.plan else contender, profile, context),
        warnings=tuple(_warnings(best, contender, alone, sure)),
        exact=found.exact,
        predictor="closed form" if rerank is None else _name(rerank),
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """What a search came up with, best first under the closed form."""

    candidates: list[Candidate]
    exact: bool
    frontier: tuple[FrontierPoint, ...] = ()


def _check(family: str, max_deviation: float | None) -> None:
    if family not in FAMILIES:
        raise InvalidArgumentError(f"expected a family out of {', '.join(FAMILIES)}; got {family!r}")
    if family == "bild" and max_deviation is None:
        raise InvalidArgumentError(
            "expected max_deviation with family bild, the share of tokens that may differ from the target's; got none"
        )
    if family != "bild" and max_deviation is not None:
        raise InvalidArgumentError(f"expected max_deviation with family bild only; got it with {family}")
    if max_deviation is not None and not 0 <= max_deviation <= 1:
        raise InvalidArgumentError(f"expected max_deviation between 0 and 1; got {max_deviation}")


def _search(  # noqa: PLR0917 - what was asked
    pool: Pool, profile: Profile, family: str, limits: Limits, context: float | None, max_deviation: float | None
) -> _Found:
    if not limits.required:
        pool.add([Level(profile.target)])
    if family == "bild":
        points = frontier(profile, limits, context=context)
        kept = [point.candidate for point in points if max_deviation is not None and point.deviation <= max_deviation]
        return _Found(ranked([*pool.candidates, *kept]), exact=False, frontier=points)
    exact = True
    for names in limits.pools(profile):
        arrays = profile_arrays(profile, names, limits.longest, context=context)
        exact &= _search_pool(pool, arrays, family, limits)
    return _Found(pool.candidates, exact)


def _search_pool(pool: Pool, arrays: ProfileArrays, family: str, limits: Limits) -> bool:
    """Add the best plans of a family out of one set of drafters; return whether its optimum is among them."""
    pool.add(singles(arrays))
    if family == "speculative" or len(arrays.names) == 1:
        return True
    stacks = pool.add(hierarchies(arrays, limits))
    exact = True
    if family in {"cascade", "all"}:
        rows = pool.add(cascades(arrays, limits))
        best = [candidate.plan for candidate in ranked([*stacks, *rows])[:_STACKS]]
        pool.add(conventions(best, limits.longest))
        exact &= proves_rows(arrays) and not limits.required
    for start in _distinct(pool.candidates, _STARTS):
        pool.climb(start, rows=family in {"cascade", "all"}, drafters=arrays.names[:-1], steps=_STEPS)
    if family in {"adaptive", "all"}:
        pool.add(adaptives(arrays, limits, [candidate.plan for candidate in ranked(stacks)]))
        exact &= exhaustive_orders(arrays, limits) and not limits.required
    return exact


def _distinct(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the best plan of each of the best `count` lists of models."""
    first: dict[tuple[str, ...], Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.plan.models, candidate)
    return list(first.values())[:count]


def _reconsidered(
    pool: Pool, candidates: Sequence[Candidate], rerank: Callable[[Plan], float], family: str
) -> list[Candidate]:
    """Return the shortlist, and what is better near its best, as another evaluator ranks them."""
    ordered = reranked(_shortlist(candidates), rerank)
    if family == "bild":
        return ordered
    judged = {candidate.plan: candidate for candidate in ordered}
    for start in _distinct(ordered, _STARTS):
        best = start
        for _ in range(_STEPS):
            if best.plan.stack is None:
                break
            near = pool.add(neighbours(best.plan.stack, rows=family in {"cascade", "all"}))
            fresh = reranked([candidate for candidate in near if candidate.plan not in judged], rerank)
            judged |= {candidate.plan: candidate for candidate in fresh}
            better = ranked([best, *(judged[candidate.plan] for candidate in near if candidate.plan in judged)])[0]
            if better.plan == best.plan:
                break
            best = better
    return ranked(judged.values())


def _shortlist(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return what another evaluator gets to see: the leading plans, the best of every family, and of every drafter.

    Of single drafters, draft lengths are spread: another evaluator may prefer much shorter ones.
    """
    kept = {candidate.plan: candidate for candidate in candidates[:_SHORTLIST]}
    groups: dict[tuple[str, ...], int] = {}
    for candidate in candidates:
        single = candidate.family == "speculative"
        key = (candidate.family, *(candidate.plan.models if single else ()))
        groups[key] = groups.get(key, 0) + 1
        if groups[key] <= _PER_DRAFTER or (
            candidate.family == "speculative" and candidate.plan.longest_draft in _SPREAD
        ):
            kept.setdefault(candidate.plan, candidate)
    return list(kept.values())


def _alone(
    profile: Profile,
    ordered: Sequence[Candidate],
    context: float | None,
    rerank: Callable[[Plan], float] | None,
) -> Candidate:
    """Return autoregression as the deciding evaluator sees it, also where the limits exclude it."""
    for candidate in ordered:
        if candidate.plan == Level(profile.target):
            return candidate
    plan = Level(profile.target)
    estimate = expected_latency(plan, profile, context=context)
    alone = Candidate(plan, plan.family, estimate.seconds_per_token, estimate)
    if rerank is None:
        return alone
    judged = reranked([alone], rerank)
    if not judged:
        raise InvalidArgumentError(f"expected rerank to predict autoregression ({alone.plan}), which it refused")
    return judged[0]


def _frontier_again(
    frontier: Sequence[FrontierPoint], alone: Candidate, rerank: Callable[[Plan], float]
) -> tuple[FrontierPoint, ...]:
    """Return the frontier as another evaluator sees it, without points that are no longer on it."""
    judged = {candidate.plan: candidate for candidate in reranked([point.candidate for point in frontier], rerank)}
    kept: list[FrontierPoint] = []
    for point in sorted(frontier, key=lambda point: point.deviation):
        candidate = judged.get(point.candidate.plan)
        if candidate is None:
            continue
        speedup = alone.seconds_per_token / candidate.seconds_per_token
        if not kept or speedup > max(other.speedup for other in kept):
            kept.append(FrontierPoint(candidate, speedup, point.deviation))
    return tuple(kept)


def _assessment(
    profile: Profile,
    ordered: Sequence[Candidate],
    contender: Candidate | None,
    alone: Candidate,
    *,
    interval: int,
    seed: int,
    context: float | None,
) -> Assessment | None:
    """Return how sure the contender is, held against the leading plans."""
    if contender is None:
        return None
    leading = {candidate.plan: candidate for candidate in (contender, *_leading(ordered), alone)}
    scale = {plan: each.seconds_per_token / each.estimate.seconds_per_token for plan, each in leading.items()}
    return assess(list(leading), profile, interval=interval, seed=seed, context=context, scale=scale)


def _leading(ordered: Sequence[Candidate]) -> list[Candidate]:
    """Return the best plans, at most two of any set of models."""
    taken: dict[frozenset[str], int] = {}
    kept = []
    for candidate in ordered:
        key = frozenset(candidate.plan.models)
        taken[key] = taken.get(key, 0) + 1
        if taken[key] <= _PER_SET:
            kept.append(candidate)
    return kept[: _LEADING - 1]


def _decide(
    ordered: Sequence[Candidate],
    contender: Candidate | None,
    alone: Candidate,
    sure: Assessment | None,
    *,
    required: bool,
) -> Candidate:
    """Return the plan to run: the best, unless too few replicates find it faster than the target alone."""
    if contender is None:
        return alone
    if required:
        return contender
    if sure is not None and sure.probability_faster < _CONFIDENT:
        return alone
    return ordered[0]


def _best_by_family(ordered: Sequence[Candidate]) -> MappingProxyType[str, Candidate]:
    first: dict[str, Candidate] = {}
    for candidate in ordered:
        first.setdefault(candidate.family, candidate)
    return MappingProxyType(first)


def _warnings(best: Candidate, contender: Candidate | None, alone: Candidate, sure: Assessment | None) -> Iterable[str]:
    if contender is None:
        return
    words = contender.plan.description
    if sure is not None:
        low, high = sure.interval
        found = f"{words} is {low:.3g}x to {high:.3g}x, faster in {sure.probability_faster:.0%} of the replicates"
        if high < 1.0:
            yield f"slower than autoregression: do not speculate ({words} is {low:.3g}x to {high:.3g}x)"
        elif sure.probability_faster < _CONFIDENT:
            yield f"within noise of autoregression: do not speculate ({found}); profile more prompts to tell"
        elif low <= 1.0:
            yield f"not surely faster than autoregression ({found}); profile more prompts to tell"
    elif contender.seconds_per_token >= alone.seconds_per_token:
        yield f"no faster than autoregression: do not speculate ({words})"
    if best.estimate.extrapolated > 0:
        yield f"{best.estimate.extrapolated:.2%} of the time is in passes longer than any profiled"


def _name(rerank: Callable[[Plan], float]) -> str:
    return str(getattr(rerank, "name", None) or getattr(rerank, "__name__", type(rerank).__name__))
