"""The plans of each family that are worth a full count, from the searches on arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, permutations

import numpy as np

from hsdopt.plan import LOOKUP, Adaptive, Choice, Level, Plan, Segment
from hsdopt.solvers.adaptive import AdaptivePolicy
from hsdopt.solvers.adaptive import solve_arrays as solve_policy
from hsdopt.solvers.arrays import ProfileArrays
from hsdopt.solvers.cascade import optimal_segments
from hsdopt.solvers.hierarchy import Hierarchy, search_arrays
from hsdopt.solvers.limits import Limits
from hsdopt.solvers.rows import Requests, best_requests, best_rows

__all__ = ["adaptives", "cascades", "conventions", "exhaustive_orders", "hierarchies", "singles"]

_BEST = 20  # plans of each family that are counted in full
_PER_SUBSET = 3  # of every two or three drafters
_SUBSETS = 60  # sets of drafters looked at one by one
_ROWS = 30  # sets of three drafters for longer rows
_ALL_IN_ROW = 6  # drafters up to which a row of all is sought
_POLICY_DRAFTS = 6  # target drafts tried per policy
_ALL_ORDERS = 4  # networks up to which every order of an adaptive policy is tried


def singles(arrays: ProfileArrays) -> Iterator[Plan]:
    """Yield every plan of one drafter."""
    for name in arrays.names[:-1]:
        for length in range(1, arrays.longest + 1):
            yield Level(arrays.names[-1], (Segment(Level(name), length),))


def hierarchies(arrays: ProfileArrays, limits: Limits) -> Iterator[Plan]:
    """Yield the best stacks: of all drafters, and a few of every two or three of them."""
    numbers = {name: number for number, name in enumerate(arrays.names)}
    required = tuple(numbers[name] for name in limits.required)
    stacks = arrays.stacks(required)
    for found in search_arrays(stacks.arrays, count=_BEST, max_levels=limits.levels):
        yield from _stack(found, stacks.models, arrays.names)
    if required or len(arrays.draft) < 2:
        return
    subsets = [subset for size in (2, 3) for subset in combinations(range(len(arrays.draft)), size)]
    for subset in subsets[:_SUBSETS]:
        part = arrays.take(subset)
        stacks = part.stacks(range(len(subset)))
        for found in search_arrays(stacks.arrays, count=_PER_SUBSET, max_levels=limits.levels):
            yield from _stack(found, stacks.models, part.names)


def _stack(found: Hierarchy, models: Sequence[int], names: Sequence[str]) -> Iterator[Level]:
    """Yield the plan of a hierarchy, unless a model stands in it twice."""
    if not np.isfinite(found.latency):
        return
    used = [names[models[node]] for node in found.models[:-1]]
    if len({*used}) < len(used):
        return
    row: tuple[Segment, ...] = ()
    for name, length in zip(used, found.draft_lengths, strict=True):
        row = (Segment(Level(name, row), length),)
    yield Level(names[-1], row)


def cascades(arrays: ProfileArrays, limits: Limits) -> Iterator[Plan]:
    """Yield the best plans with rows, and the best row of any number of segments at the target."""
    if limits.levels == 1 or not len(arrays.draft):
        return
    requests = best_requests(arrays, levels=None if limits.levels is None else limits.levels - 1)
    yield from best_rows(arrays, requests, _BEST)
    for part in _longer_rows(arrays, limits):
        yield from _row_of(part, requests, arrays)


def _longer_rows(arrays: ProfileArrays, limits: Limits) -> list[tuple[int, ...]]:
    """Return the sets of drafters of which the target's best row is sought: all, and each set of three."""
    every = tuple(range(len(arrays.draft)))
    required = {arrays.names.index(name) for name in limits.required}
    threes: list[tuple[int, ...]] = [subset for subset in combinations(every, 3) if required <= {*subset}]
    # the work doubles with every drafter
    return [every, *threes[:_ROWS]] if len(every) <= _ALL_IN_ROW else threes[:_ROWS]


def _row_of(subset: Sequence[int], requests: Requests, arrays: ProfileArrays) -> Iterator[Level]:
    chosen = list(subset)
    usable = np.isfinite(arrays.verify[chosen, -1])
    found = optimal_segments(
        np.where(usable, requests.cost[chosen], np.inf),
        arrays.survival[chosen, -1],
        arrays.passes[-1, : arrays.longest + 1],
        max_draft_length=arrays.longest,
    )
    row = tuple(Segment(requests.levels[chosen[d]][length - 1], length) for d, length in found.segments)
    yield Level(arrays.names[-1], row)


def conventions(plans: Iterable[Plan], longest: int) -> Iterator[Plan]:
    """Yield the stacks of `plans` with all that the target's drafters hold passed up: overshoot, or some rounds."""
    for plan in plans:
        for place, segment in enumerate(plan.row):
            if segment.level.row:
                for other in _other_stops(segment, longest):
                    yield Level(plan.target, (*plan.row[:place], other, *plan.row[place + 1 :]))


def _other_stops(segment: Segment, longest: int) -> Iterator[Segment]:
    surplus = segment.level.longest_draft or 0
    for length in sorted({segment.length - 2, segment.length - 1, segment.length, longest - surplus}):
        if length >= 1:
            yield Segment(segment.level, length, "overshoot")
    for rounds in (1, 2, 3):
        yield Segment(segment.level, rounds, "rounds")


def adaptives(arrays: ProfileArrays, limits: Limits, stacks: Sequence[Plan]) -> Iterator[Plan]:
    """Yield the best adaptive plans, every order of drafters if there are few, else those of `stacks` and of cost."""
    for order in _orders(arrays, limits, stacks):
        view = arrays.adaptive(order)
        policy = solve_policy(view)
        names = [arrays.names[model] for model in order]
        tables = np.array(policy.request_costs)
        latency = (tables + view.verify[:, -1]) / (1.0 + arrays.gain[list(order), -1])
        for state in np.argsort(latency, axis=None, kind="stable")[:_POLICY_DRAFTS]:
            drafter, length = divmod(int(state), arrays.longest)
            if np.isfinite(latency[drafter, length]):
                yield _policy_plan(policy, names, arrays.names[-1], Choice(names[drafter], length + 1))


def exhaustive_orders(arrays: ProfileArrays, limits: Limits) -> bool:
    """Return whether `adaptives` tries every order."""
    return limits.levels is None and len(arrays.networks) <= _ALL_ORDERS


def _orders(arrays: ProfileArrays, limits: Limits, stacks: Sequence[Plan]) -> list[tuple[int, ...]]:
    lookups = tuple(index for index, name in enumerate(arrays.names[:-1]) if name == LOOKUP)
    by_cost = tuple(sorted(arrays.networks, key=lambda index: arrays.passes[index, 0]))
    if limits.levels is not None and limits.levels <= len(arrays.draft):
        some = range(1, limits.levels)
        return [order for size in some for order in permutations((*lookups, *by_cost), size) if _first(order, lookups)]
    if exhaustive_orders(arrays, limits):
        return [lookups + order for order in permutations(by_cost)]
    orders = [lookups + by_cost]
    for plan in stacks:
        used = [arrays.names.index(name) for name in plan.models[:-1] if name != LOOKUP]
        orders.append((*lookups, *used, *(index for index in by_cost if index not in used)))
    return list(dict.fromkeys(orders))


def _first(order: tuple[int, ...], lookups: tuple[int, ...]) -> bool:
    """Return whether lookup, which cannot verify, stands first if it is there."""
    return not any(index in lookups for index in order[1:])


def _policy_plan(policy: AdaptivePolicy, names: Sequence[str], target: str, draft: Choice) -> Plan:
    """Return the plan of a policy whose target asks for `draft`, its tables as long as they are asked.

    If no drafter ever drafts for another it is a plan of one drafter.
    """
    tables = {
        name: tuple(None if choice is None else Choice(names[choice[0]], choice[1]) for choice in row)
        for name, row in zip(names, policy.drafts, strict=True)
    }
    asked = {draft.drafter: draft.length}
    for name in reversed(names):
        for choice in tables[name][: asked.get(name, 0)]:
            if choice is not None:
                asked[choice.drafter] = max(asked.get(choice.drafter, 0), choice.length)
    kept = [(name, tables[name][: asked[name]]) for name in names if name in asked and name != LOOKUP]
    if all(choice is None for _, row in kept for choice in row):
        return Level(target, draft.row)
    return Adaptive(target, draft, tuple(kept))
