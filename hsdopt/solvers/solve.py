"""`solve`: the best plan for a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from hsdopt.errors import InvalidArgumentError, PredictionError
from hsdopt.latency.expected import expected_latency
from hsdopt.plan import Level, Plan, Segment, format_plan
from hsdopt.profiles import Profile
from hsdopt.solvers.arrays import ProfileArrays, profile_arrays
from hsdopt.solvers.hierarchy import Hierarchy, search_arrays
from hsdopt.solvers.solution import Candidate, Solution

__all__ = ["FAMILIES", "solve"]

FAMILIES = ("speculative", "hierarchy", "cascade", "adaptive", "bild", "all")

_REEVALUATED = 20


def solve(
    profile: Profile,
    *,
    family: str = "all",
    max_draft_length: int = 24,
    max_levels: int | None = None,
    max_memory_bytes: int | None = None,
    rerank: Callable[[Plan], float] | None = None,
) -> Solution:
    """Return the plan with the lowest expected seconds per token."""
    if family not in FAMILIES:
        raise InvalidArgumentError(f"expected a family out of {', '.join(FAMILIES)}; got {family!r}")
    arrays = profile_arrays(profile, profile.drafters, max_draft_length)
    plans = dict.fromkeys([Level(profile.target), *_singles(arrays), *_hierarchies(arrays, max_levels)])
    candidates = sorted(_evaluate(plans, profile, rerank), key=_rank)
    best = candidates[0]
    alone = next(c for c in candidates if c.plan == Level(profile.target))
    return Solution(
        best.plan,
        best.seconds_per_token,
        alone.seconds_per_token / best.seconds_per_token,
        best,
        alone,
        best_by_family={
            name: next(c for c in candidates if c.family == name) for name in {c.family for c in candidates}
        },
        runners_up=tuple(candidates[1:10]),
        memory_bytes=sum(profile.models[name].bytes for name in best.plan.models if name in profile.models),
        why=format_plan(best.plan),
    )


def _rank(candidate: Candidate) -> tuple[float, int, str]:
    return candidate.seconds_per_token, len(candidate.plan.models), format_plan(candidate.plan)


def _singles(arrays: ProfileArrays) -> Iterator[Plan]:
    for name in arrays.names[:-1]:
        for length in range(1, arrays.longest + 1):
            yield Level(arrays.names[-1], (Segment(Level(name), length),))


def _hierarchies(arrays: ProfileArrays, max_levels: int | None) -> Iterator[Plan]:
    for found in search_arrays(arrays.hierarchy(), count=_REEVALUATED, max_levels=max_levels):
        yield _stack(found, arrays.names)


def _stack(found: Hierarchy, names: Sequence[str]) -> Level:
    level = Level(names[found.models[0]])
    for model, length in zip(found.models[1:], found.draft_lengths, strict=True):
        level = Level(names[model], (Segment(level, length),))
    return level


def _evaluate(plans: Iterable[Plan], profile: Profile, rerank: Callable[[Plan], float] | None) -> Iterator[Candidate]:
    for plan in plans:
        try:
            estimate = expected_latency(plan, profile)
        except PredictionError:
            continue
        seconds = estimate.seconds_per_token if rerank is None else rerank(plan)
        depth = plan.depth if isinstance(plan, Level) else 0
        family = ("autoregression", "speculative")[depth] if depth < 2 else "hierarchy"
        yield Candidate(plan, family, seconds, estimate)
