"""Rows: the optimum against the reference cases and against every row of small problems."""

from __future__ import annotations

import json
from itertools import permutations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hsdopt.errors import InvalidArgumentError
from hsdopt.latency.cascade import horizontal_ewif
from hsdopt.latency.speculative import best_draft_length
from hsdopt.solvers.cascade import optimal_row, optimal_segments

if TYPE_CHECKING:
    from collections.abc import Iterator

CASES = [
    case
    for case in json.loads((Path(__file__).parent / "data" / "cases.json").read_text())["cases"]
    if case["kind"] == "horizontal_opt"
]


def ewif(sequence: Any, drafters: list[tuple[float, float]]) -> float:  # noqa: ANN401  # any iterable of ints
    return horizontal_ewif([(*drafters[index], 1) for index in sequence])


def random_drafters(rng: np.random.Generator, count: int) -> list[tuple[float, float]]:
    rates = rng.choice([0.0, 1.0, *rng.uniform(0, 1, 8)], count)
    costs = rng.choice([0.0, 1.2, *rng.uniform(0, 0.3, 8)], count)
    return list(zip(rates.tolist(), costs.tolist(), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_reference_rows(case: dict[str, Any]) -> None:
    drafters = [(drafter["alpha"], drafter["c"]) for drafter in case["inputs"]["drafters"]]
    found, sequence = optimal_row(drafters, case["inputs"]["Lmax"])
    assert found == pytest.approx(case["expected"]["ewif"], rel=1e-9)
    assert list(sequence) == case["expected"]["sequence"]


def test_row_is_the_best_of_all_sequences() -> None:
    rng = np.random.default_rng(21)
    for _ in range(60):
        drafters = random_drafters(rng, int(rng.integers(1, 4)))
        longest = int(rng.integers(0, 6))
        found, sequence = optimal_row(drafters, longest)
        every = [row for n in range(longest + 1) for row in product(range(len(drafters)), repeat=n)]
        values = [ewif(row, drafters) for row in every]
        assert found == pytest.approx(max(values), rel=1e-12)
        assert ewif(sequence, drafters) == pytest.approx(found, rel=1e-12)
        shortest = min(len(row) for row, v in zip(every, values, strict=True) if v >= max(values) * (1 - 1e-13))
        assert len(sequence) == shortest


def test_row_of_one_drafter_is_its_best_draft_length() -> None:
    rng = np.random.default_rng(22)
    for _ in range(30):
        rate, cost = float(rng.uniform(0, 0.99)), float(rng.uniform(0.001, 1.2))
        length, value = best_draft_length(rate, cost, 24)
        found, sequence = optimal_row([(rate, cost)], 24)
        assert (found, sequence) == (pytest.approx(value, rel=1e-12), (0,) * length)


def test_a_further_drafter_never_hurts() -> None:
    rng = np.random.default_rng(23)
    for _ in range(40):
        drafters = random_drafters(rng, 3)
        extra = (float(rng.uniform(0, 1)), 0.0)
        assert optimal_row([*drafters, extra], 12)[0] >= optimal_row(drafters, 12)[0] * (1 - 1e-12)
        assert optimal_row(drafters, 13)[0] >= optimal_row(drafters, 12)[0] * (1 - 1e-12)


def test_a_free_drafter_fills_the_tail() -> None:
    _, sequence = optimal_row([(0.9, 0.2), (0.3, 0.0)], 10)
    assert len(sequence) == 10
    assert sequence[-1] == 1


def test_rows_without_drafts() -> None:
    assert optimal_row([], 8) == (1.0, ())
    assert optimal_row([(0.9, 0.1)], 0) == (1.0, ())
    assert optimal_row([(0.2, 0.5)], 8) == (1.0, ())
    assert optimal_segments([[3.0]], [[1, 0.5]], [1, 1], max_draft_length=1).segments == ()


def every_row(drafters: int, longest: int, most: int) -> Iterator[tuple[tuple[int, int], ...]]:
    for count in range(most + 1):
        for order in permutations(range(drafters), count):
            for lengths in product(range(1, longest + 1), repeat=count):
                if sum(lengths) <= longest:
                    yield tuple(zip(order, lengths, strict=True))


def row_latency(row: Any, cost: np.ndarray, curves: np.ndarray, passes: np.ndarray) -> float:  # noqa: ANN401
    reached, tokens, spent, drafted = 1.0, 1.0, 0.0, 0
    for drafter, length in row:
        for m in range(1, length + 1):
            tokens += reached * curves[drafter, length - 1, m]
        reached *= curves[drafter, length - 1, length]
        spent += cost[drafter, length - 1]
        drafted += length
    return (spent + passes[drafted]) / tokens


@pytest.mark.parametrize("by_length", [False, True])
def test_segments_are_the_best_of_all_rows(by_length: bool) -> None:  # noqa: FBT001  # a parameter
    rng = np.random.default_rng(24)
    used = []
    for _ in range(60):
        drafters, longest = int(rng.integers(1, 4)), int(rng.integers(1, 7))
        low = np.array([0.8, 0.5, 0.2])[:drafters, np.newaxis, np.newaxis]
        curves = rng.uniform(low, 1, (drafters, longest, longest + 1))
        curves[..., 0] = 1
        curves = curves.cumprod(axis=2)
        curves = curves if by_length else np.broadcast_to(curves[:, :1], curves.shape)
        cost = rng.uniform(0, 0.3, (drafters, longest)).cumsum(axis=1) * np.array([1, 0.2, 0.02])[:drafters, np.newaxis]
        cost[rng.random(cost.shape) < 0.1] = np.inf
        passes = 1 + rng.uniform(-0.02, 0.05, longest + 1)
        limit = int(rng.integers(1, drafters + 1))
        row = optimal_segments(
            cost,
            curves if by_length else curves[:, 0],
            passes,
            max_draft_length=longest,
            max_segments=limit,
        )
        best = min(row_latency(each, cost, curves, passes) for each in every_row(drafters, longest, limit))
        assert row.latency == pytest.approx(best, rel=1e-12)
        assert row_latency(row.segments, cost, curves, passes) == pytest.approx(row.latency, rel=1e-12)
        used.append(len(row.segments))
    assert used.count(2) > 5
    assert max(used) == 3


def test_segments_at_constant_costs_are_the_row() -> None:
    rng = np.random.default_rng(25)
    for _ in range(20):
        drafters = [(float(rng.uniform(0, 1)), float(rng.uniform(0, 0.3))) for _ in range(3)]
        lengths = np.arange(1, 11)
        cost = [[price * n for n in lengths] for _, price in drafters]
        curves = [rate ** np.arange(11.0) for rate, _ in drafters]
        row = optimal_segments(cost, curves, np.ones(11), max_draft_length=10)
        assert 1 / row.latency == pytest.approx(optimal_row(drafters, 10)[0], rel=1e-12)
        assert row.tokens_per_pass == pytest.approx(
            horizontal_ewif([(drafters[j][0], 0.0, n) for j, n in row.segments]), rel=1e-12
        )


@pytest.mark.parametrize(
    ("drafters", "longest", "message"),
    [
        ([(1.2, 0.1)], 4, r"expected the acceptance of drafters\[0\] to be a rate between 0 and 1; got 1.2"),
        ([(0.5, -0.1)], 4, r"expected the cost ratio of drafters\[0\] to be a finite number of at least 0"),
        ([0.5], 4, r"expected \(acceptance, cost ratio\) as drafters\[0\]; got 0.5"),
        ([(0.5, 0.1)], -1, "expected max_draft_length to be a whole number of at least 0; got -1"),
    ],
)
def test_bad_rows(drafters: Any, longest: int, message: str) -> None:  # noqa: ANN401  # wrong on purpose
    with pytest.raises(InvalidArgumentError, match=message):
        optimal_row(drafters, longest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.1], [[1, 0.5]], [1, 1]), "expected request_cost of shape"),
        (([[-0.1]], [[1, 0.5]], [1, 1]), "expected request costs of at least 0; got -0.1"),
        (([[0.1]], [[1]], [1, 1]), "expected survival of shape"),
        (([[0.1]], [[0.9, 0.5]], [1, 1]), "expected the survival curve of survival to start with 1"),
        (([[0.1]], [[1, 0.5]], [1]), "expected 2 costs of a pass"),
        (([[0.1]], [[1, 0.5]], [1, np.nan]), "expected finite costs of a pass"),
    ],
)
def test_bad_segments(arguments: Any, message: str) -> None:  # noqa: ANN401  # wrong on purpose
    with pytest.raises(InvalidArgumentError, match=message):
        optimal_segments(*arguments, max_draft_length=1)
