"""The solvers on arrays of any content: costs of single pairs, forbidden pairs, requests served at once."""

from __future__ import annotations

from itertools import combinations, permutations, product
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

from hsdopt.solvers import adaptive, hierarchy
from hsdopt.solvers.adaptive import AdaptiveArrays
from hsdopt.solvers.hierarchy import HierarchyArrays

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hsdopt.solvers.pool import Order

DRAFTERS, LONGEST = 3, 3


def random_arrays(rng: np.random.Generator, order: Order) -> HierarchyArrays:
    """Arrays in which a pair has its own verify cost, or an infinite one, and requests cost anything."""
    rounds = rng.uniform(1, 3, (DRAFTERS, DRAFTERS, LONGEST, LONGEST))
    verify = rng.uniform(0, 0.3, (DRAFTERS, DRAFTERS + 1, LONGEST))
    verify[rng.random(verify.shape[:2]) < 0.15] = np.inf
    draft = rng.uniform(0, 2, (DRAFTERS, LONGEST))
    draft[rng.random(draft.shape) < 0.2] = np.inf

    def table(verifier: int) -> np.ndarray:
        drafters = verifier if order == "given" else DRAFTERS
        return rounds[:drafters, verifier]

    return HierarchyArrays(table, verify, draft, rng.uniform(1, 3, (DRAFTERS, LONGEST)), 1.0, order)


def latency(arrays: HierarchyArrays, models: tuple[int, ...], lengths: tuple[int, ...]) -> float:
    """The latency of one stack of drafters, from the bottom up."""
    if not models:
        return arrays.autoregression
    cost = arrays.draft[models[0], lengths[0] - 1]
    for (below, length), (model, tokens) in zip(
        zip(models, lengths, strict=True), zip(models[1:], lengths[1:], strict=True), strict=False
    ):
        cost = arrays.rounds(model)[below, length - 1, tokens - 1] * (cost + arrays.verify[below, model, length - 1])
    top, last = models[-1], lengths[-1] - 1
    return float((cost + arrays.verify[top, -1, last]) / arrays.tokens[top, last])


def every_stack(order: Order, levels: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    pick = combinations if order == "given" else permutations
    for count in range(min(DRAFTERS, levels - 1) + 1):
        for models in pick(range(DRAFTERS), count):
            for lengths in product(range(1, LONGEST + 1), repeat=count):
                yield models, lengths


@pytest.mark.parametrize("order", ["given", "any"])
def test_hierarchy_of_arrays_is_the_best_stack(order: Literal["given", "any"]) -> None:
    rng = np.random.default_rng(31)
    deep = 0
    for _ in range(60):
        arrays = random_arrays(rng, order)
        for levels in (None, 3):
            depth = DRAFTERS + 1 if levels is None else levels
            values = sorted(latency(arrays, *stack) for stack in every_stack(order, depth))
            finite = [value for value in values if value < np.inf]
            best = hierarchy.solve_arrays(arrays, max_levels=levels)
            assert best.latency == pytest.approx(values[0], rel=1e-12)
            assert latency(arrays, best.models[:-1], best.draft_lengths) == pytest.approx(best.latency, rel=1e-12)
            found = hierarchy.search_arrays(arrays, count=12, max_levels=levels)
            assert [stack.latency for stack in found] == pytest.approx(finite[:12], rel=1e-12)
            deep += len(best.models) > 2
    assert deep > 10


def test_all_stacks_are_listed_if_more_are_wanted() -> None:
    arrays = random_arrays(np.random.default_rng(32), "given")
    values = sorted(latency(arrays, *stack) for stack in every_stack("given", DRAFTERS + 1))
    found = hierarchy.search_arrays(arrays, count=10_000)
    assert [stack.latency for stack in found] == pytest.approx([v for v in values if v < np.inf], rel=1e-12)


def test_adaptive_request_served_at_once() -> None:
    survival = np.array([[1.0, 0.8, 0.7, 0.65]])
    at_once = np.array([[0.02, 0.02, 0.02], [np.inf] * 3])
    verify = np.empty((2, 3, 3))
    verify[:] = [0.1, 0.11, 0.12]
    verify[:, 0] = np.inf
    verify[:, 2] = [1.0, 1.05, 1.1]
    arrays = AdaptiveArrays(
        survival=lambda verifier: np.repeat(survival, verifier, axis=0),
        verify=verify,
        step=np.array([np.inf, 0.1, 1.0]),
        at_once=at_once,
    )
    policy = adaptive.solve_arrays(arrays)
    assert policy.request_costs[0] == (0.02, 0.02, 0.02)
    assert policy.drafts[0] == (None, None, None)
    assert policy.drafts[1][0] is None
    two = min(0.2, 0.02 + 0.1 + 0.2 * 0.1)
    assert policy.request_costs[1][:2] == pytest.approx((0.1, two))
    direct = (0.02 + np.array([1.0, 1.05, 1.1])) / (1 + np.array([0.8, 1.5, 2.15]))
    through = (np.array(policy.request_costs[1]) + np.array([1.0, 1.05, 1.1])) / (1 + np.array([0.8, 1.5, 2.15]))
    assert policy.latency == pytest.approx(min(1.0, direct.min(), through.min()))
    assert policy.target_draft == (0, 3)
