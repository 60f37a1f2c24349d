"""Candidates under the full count: evaluation, limits, and the neighbours of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from hsdopt.errors import InvalidArgumentError, PlanError, PredictionError
from hsdopt.latency.expected import expected_latency
from hsdopt.plan import LOOKUP, Level, Plan, Segment
from hsdopt.profiles import Profile
from hsdopt.solvers.limits import Limits
from hsdopt.solvers.solution import Candidate

__all__ = ["Pool", "neighbours", "ranked", "reranked"]


class Pool:
    """Plans evaluated so far, each once.

    Parameters
    ----------
    profile : Profile
    limits : Limits
        Plans outside are left out.
    context : float or None
        As in `expected_latency`.
    """

    def __init__(self, profile: Profile, limits: Limits, context: float | None) -> None:
        self._profile = profile
        self._limits = limits
        self._context = context
        self._seen: dict[Plan, Candidate | None] = {}

    @property
    def candidates(self) -> list[Candidate]:
        """The plans that the profile can predict, best first."""
        return ranked(candidate for candidate in self._seen.values() if candidate is not None)

    def add(self, plans: Iterable[Plan]) -> list[Candidate]:
        """Evaluate plans; return those that the limits admit and the profile can predict."""
        found = []
        for plan in plans:
            if plan not in self._seen:
                self._seen[plan] = self._evaluated(plan) if self._limits.admits(plan, self._profile) else None
            candidate = self._seen[plan]
            if candidate is not None:
                found.append(candidate)
        return found

    def _evaluated(self, plan: Plan) -> Candidate | None:
        try:
            estimate = expected_latency(plan, self._profile, context=self._context)
        except PredictionError:
            return None
        return Candidate(plan, plan.family, estimate.seconds_per_token, estimate)

    def climb(self, start: Candidate, *, rows: bool, drafters: Sequence[str], steps: int) -> Candidate:
        """Return the best plan reached from `start` by going to the best neighbour, at most `steps` times."""
        for _ in range(steps):
            if start.plan.stack is None:
                break
            best = min(self.add(neighbours(start.plan.stack, rows=rows, drafters=drafters)), key=_rank, default=start)
            if _rank(best) >= _rank(start):
                break
            start = best
        return start


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates best first; of those that tie, fewest models first, then shortest drafts."""
    return sorted(candidates, key=_rank)


def _rank(candidate: Candidate) -> tuple[float, tuple[int, int, str]]:
    # twelve digits: sums in another order differ by less
    return float(f"{candidate.seconds_per_token:.11e}"), candidate.plan.size


def reranked(candidates: Sequence[Candidate], rerank: Callable[[Plan], float]) -> list[Candidate]:
    """Return candidates as another evaluator ranks them; those that it cannot predict are left out.

    Raises
    ------
    InvalidArgumentError
        If the evaluator returns anything but a positive number.
    """
    many: Callable[[Sequence[Plan]], Sequence[float | None]] | None = getattr(rerank, "many", None)
    plans = [candidate.plan for candidate in candidates]
    values = [_value(rerank, plan) for plan in plans] if many is None else many(plans)
    found = []
    for candidate, seconds in zip(candidates, values, strict=True):
        if seconds is None:
            continue
        if not seconds > 0:
            raise InvalidArgumentError(
                f"expected rerank to return seconds per token above 0; got {seconds} for {candidate.plan}"
            )
        found.append(replace(candidate, seconds_per_token=float(seconds)))
    return ranked(found)


def _value(rerank: Callable[[Plan], Any], plan: Plan) -> float | None:
    try:
        value: float = rerank(plan)
    except PredictionError:
        return None
    return value


def neighbours(plan: Level, *, rows: bool, drafters: Sequence[str] = ()) -> Iterator[Level]:
    """Yield the plans that differ from `plan` in one thing.

    One draft is a token longer or shorter, twice or half as long, or one segment is gone with all below it, or it is
    drafted by its own drafter's drafter. With `rows`, conventions may change too, and a segment may join the
    target's row.

    Examples
    --------
    >>> from hsdopt.plan import parse_plan
    >>> [str(other) for other in neighbours(parse_plan("t(d:2(e:1))"), rows=False)]
    ['t(d:1(e:1))', 't(d:3(e:1))', 't(d:4(e:1))', 't', 't(e:1)', 't(d:2(e:2))', 't(d:2)']
    """
    yield from _changed(plan, rows=rows)
    if rows:
        for name in drafters:
            for place in range(len(plan.row) + 1):
                for length in (1, 3, 8):
                    yield from _built(plan, (*plan.row[:place], Segment(Level(name), length), *plan.row[place:]))


def _changed(level: Level, *, rows: bool) -> Iterator[Level]:
    for place, segment in enumerate(level.row):
        ahead, behind = level.row[:place], level.row[place + 1 :]
        for other in _segments(segment, rows=rows):
            yield from _built(level, (*ahead, other, *behind))
        yield from _built(level, (*ahead, *behind))
        if segment.level.row and len(segment.level.row) == 1:
            yield from _built(level, (*ahead, segment.level.row[0], *behind))
        for below in _changed(segment.level, rows=rows):
            if segment.stop == "truncate" or below.row:
                yield from _built(level, (*ahead, replace(segment, level=below), *behind))


def _segments(segment: Segment, *, rows: bool) -> Iterator[Segment]:
    """Yield the segment a token (or round) and half shorter, one longer, twice as long, and by other conventions."""
    now = segment.length
    for length in sorted({now - 1, now // 2, now + 1, 2 * now} - {0, now}):
        yield replace(segment, length=length)
    if rows and segment.level.row and segment.level.model != LOOKUP:
        if segment.stop != "overshoot":
            yield replace(segment, stop="overshoot")
        if segment.stop != "truncate":
            yield replace(segment, stop="truncate")
        if segment.stop != "rounds":
            for length in (1, 2):
                yield Segment(segment.level, length, "rounds")


def _built(level: Level, row: tuple[Segment, ...]) -> Iterator[Level]:
    """Yield the level with another row, unless a model would draft for itself or stand in the row twice.

    The second of two equal segments knows why the first ended, which the laws of pairs do not.
    """
    if len({segment.level.model for segment in row}) < len(row):
        return
    try:
        yield replace(level, row=row)
    except PlanError:
        return
