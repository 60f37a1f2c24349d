"""Suites: fixed sets of plans to validate a profile on, settled before any of them is run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from hsdopt.errors import InvalidArgumentError, PredictionError
from hsdopt.latency.expected import expected_latency
from hsdopt.plan import LOOKUP, Bild, Level, Plan, Segment, Stop
from hsdopt.profiles import Profile

__all__ = ["SUITES", "assistants", "suite"]

SUITES = {"quick": 8, "standard": 16, "full": 44}
"""Number of plans per suite."""

_SHORT, _LONG = 4, 8
_LONGEST = 16
_SLOWEST = 2.0
"""Plans predicted to be this many times slower than autoregression would take the time of several others."""


def suite(profile: Profile, chosen: Iterable[Plan], name: str = "standard") -> tuple[Plan, ...]:
    """Return the plans of a suite: autoregression, the chosen plans, their neighbours, and a spread of others.

    The spread holds single drafters of every kind, stacks, rows, and plans that are predicted to be slower
    than autoregression; `full` adds overshoot and rounds, more lengths, and Big Little Decoder. Plans that the
    profile cannot predict, or that would take over twice autoregression's time, are left out.

    Parameters
    ----------
    profile : Profile
        Names the models; its predictions pick the slow plans.
    chosen : iterable of Plan
        What the solver chose, best first.
    name : {"quick", "standard", "full"}

    Returns
    -------
    tuple of Plan
        Autoregression first, then the chosen plans; at most as many as `SUITES` says.

    Raises
    ------
    InvalidArgumentError
        If there is no such suite.
    """
    if name not in SUITES:
        raise InvalidArgumentError(f"expected a suite out of {', '.join(SUITES)}; got {name!r}")
    first: list[Plan] = [Level(profile.target), *chosen]
    groups: list[list[Plan]] = [
        list(_singles(profile)),
        list(_stacks(profile)),
        list(_rows(profile)),
        list(_slow(profile)),
        [neighbour for plan in first[1:2] for neighbour in _neighbours(plan)],
    ]
    if name == "full":
        groups += [list(_conventions(profile)), list(_bild(profile))]
    limit = _SLOWEST * _seconds(first[0], profile)
    plans = dict.fromkeys(plan for plan in first if _seconds(plan, profile) < math.inf)
    for plan in _in_turn(groups):
        if len(plans) < SUITES[name] and plan not in plans and _seconds(plan, profile) <= limit:
            plans[plan] = None
    return tuple(plans)[: SUITES[name]]


def assistants(profile: Profile) -> tuple[str, ...]:
    """Return the drafters that are networks, the one that alone helps the target most first.

    Parameters
    ----------
    profile : Profile
        Its predictions rank them; drafters that it cannot predict are left out.
    """
    seconds = {
        name: _seconds(_draft(profile.target, name, _best_length(profile, name)), profile)
        for name in _networks(profile)
    }
    return tuple(sorted((name for name in seconds if seconds[name] < math.inf), key=seconds.__getitem__))


def _in_turn(groups: Iterable[Iterable[Plan]]) -> Iterator[Plan]:
    """Yield one plan of every group, then the second of every group, and so on."""
    queues = [list(group) for group in groups]
    for index in range(max(map(len, queues), default=0)):
        yield from (queue[index] for queue in queues if index < len(queue))


def _seconds(plan: Plan, profile: Profile) -> float:
    """Return the expected seconds per token, infinite for a plan that the profile cannot predict."""
    try:
        return expected_latency(plan, profile).seconds_per_token
    except PredictionError:
        return math.inf


def _networks(profile: Profile) -> list[str]:
    """Return the drafters that make passes, the cheapest first."""
    names = [name for name in profile.drafters if name != LOOKUP]
    return sorted(names, key=lambda name: profile.cost(name)(1))


def _draft(target: str, drafter: str, length: int) -> Level:
    return Level(target, (Segment(Level(drafter), length),))


def _singles(profile: Profile) -> Iterator[Plan]:
    """Every drafter at its best length, then at double and half."""
    best = {name: _best_length(profile, name) for name in profile.drafters}
    for scale in (1.0, 2.0, 0.5):
        for name, length in best.items():
            yield _draft(profile.target, name, max(1, round(scale * length)))


def _best_length(profile: Profile, drafter: str) -> int:
    longest = min(_LONGEST, profile.max_draft_length)
    return min(range(1, longest + 1), key=lambda length: _seconds(_draft(profile.target, drafter, length), profile))


def _stacks(profile: Profile, stop: Stop = "truncate") -> Iterator[Level]:
    """Two drafters above each other: every network over lookup or a cheaper network."""
    names = _networks(profile)
    bottoms = [name for name in profile.drafters if name == LOOKUP] + names
    for top, low in ((6, 3), (_LONG, _SHORT), (_SHORT, 2)):
        for middle in names:
            for bottom in bottoms:
                if bottom == LOOKUP or names.index(bottom) < names.index(middle):
                    inner = Level(middle, (Segment(Level(bottom), low),))
                    yield Level(profile.target, (Segment(inner, top, stop),))


def _rows(profile: Profile) -> Iterator[Plan]:
    """Put a network's tokens first, then the lookup drafter's (or a cheaper network's)."""
    names = _networks(profile)
    tails = [name for name in profile.drafters if name == LOOKUP] or names[:1]
    for head_length, tail_length in ((2, 4), (3, 6), (1, _LONG)):
        for head in names:
            for tail in tails:
                if head != tail:
                    row = (Segment(Level(head), head_length), Segment(Level(tail), tail_length))
                    yield Level(profile.target, row)


def _slow(profile: Profile) -> Iterator[Plan]:
    """Plans predicted to be slower than autoregression, slowest first: long drafts, and long drafts of those."""
    names = _networks(profile)
    plans = [_draft(profile.target, name, length) for name in names for length in (10, _LONGEST)]
    plans += [
        Level(profile.target, (Segment(_draft(middle, bottom, _LONG), _LONGEST),))
        for middle in names
        for bottom in names
        if middle != bottom
    ]
    alone = _seconds(Level(profile.target), profile)
    graded = [(_seconds(plan, profile), -index) for index, plan in enumerate(plans)]
    bounded = (grade for grade in sorted(graded, reverse=True) if alone < grade[0] <= _SLOWEST * alone)
    yield from (plans[-index] for _, index in bounded)


def _neighbours(plan: Plan) -> Iterator[Plan]:
    """Make one draft of the target one token shorter or longer."""
    if plan.stack is None:
        return
    for index, segment in enumerate(plan.row):
        for length in (segment.length - 1, segment.length + 1):
            if length >= 1:
                changed = replace(segment, length=length)
                yield replace(plan.stack, row=(*plan.row[:index], changed, *plan.row[index + 1 :]))


def _conventions(profile: Profile) -> Iterator[Plan]:
    yield from _in_turn([_stacks(profile, "overshoot"), (_in_rounds(plan) for plan in _stacks(profile))])


def _in_rounds(plan: Level) -> Level:
    return replace(plan, row=tuple(replace(segment, length=2, stop="rounds") for segment in plan.row))


def _bild(profile: Profile) -> Iterator[Plan]:
    for small in _networks(profile):
        for fallback, rollback in ((0.6, 3.0), (0.4, 5.0)):
            yield Bild(profile.target, small, fallback, rollback, max_draft=10)
