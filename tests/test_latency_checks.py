"""Every bad input of the closed forms is one clear line; every good spelling of an input is taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from hsdopt import checks
from hsdopt.errors import InvalidArgumentError
from hsdopt.latency import cascade, hierarchy, speculative

VERTICAL = {
    "acceptance": 0.8,
    "inner_acceptance": 0.6,
    "rounds": 2,
    "inner_draft_length": 3,
    "cost_ratio": 0.1,
    "inner_cost_ratio": 0.01,
}
BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: speculative.expected_tokens(1.5, 3), "expected acceptance to be a rate between 0 and 1; got 1.5"),
    (lambda: speculative.expected_tokens(math.nan, 3), "expected acceptance to be a rate between 0 and 1; got nan"),
    (lambda: speculative.expected_tokens("0.5", 3), "rate between 0 and 1; got '0.5'"),
    (lambda: speculative.expected_tokens(None, 3), "rate between 0 and 1; got None"),
    (lambda: speculative.expected_tokens(0.5, -1), "expected draft_length to be a whole number of at least 0; got -1"),
    (lambda: speculative.expected_tokens(0.5, 2.5), "whole number of at least 0; got 2.5"),
    (lambda: speculative.expected_tokens(0.5, np.True_), "whole number of at least 0; got .*True"),
    (lambda: speculative.expected_tokens([0.9, 0.5], 1), "to start with 1; got 0.9"),
    (lambda: speculative.expected_tokens([1.0, 0.5, 0.6], 2), "never to increase; it does at position 2"),
    (lambda: speculative.expected_tokens([1.0, 0.5, -0.1], 2), "to stay between 0 and 1"),
    (lambda: speculative.expected_tokens([1.0, 0.5, math.nan], 2), "to stay between 0 and 1; got .*nan"),
    (lambda: speculative.expected_tokens([1.0, 0.5], 2), r"to cover 2 drafted tokens \(3 entries\); got 2 entries"),
    (lambda: speculative.expected_tokens([], 0), "to be a list that starts with 1"),
    (lambda: speculative.expected_tokens([1.0, "x"], 1), "expected acceptance to hold numbers"),
    (lambda: speculative.expected_tokens([[1.0, 0.5]], 1), "a rate or one curve; got 2 axes"),
    (lambda: speculative.ewif(0.5, -0.1, 3), "expected cost_ratio to be a finite number of at least 0; got -0.1"),
    (lambda: speculative.ewif(0.5, math.inf, 3), "expected cost_ratio .* got inf"),
    (lambda: speculative.best_draft_length(0.5, 0.1, -1), "expected max_draft_length"),
    (lambda: speculative.latency_per_token(0.5, 0.1, 1.0, 2, catch_up="some"), "expected catch_up to be one of"),
    (lambda: speculative.latency_per_token(0.5, 0.1, lambda n: -n, 2), r"expected target_cost\(3\) .* got -3"),
    (lambda: speculative.speedup(0.5, 0.0, 0.0, 2), "expected passes that cost something"),
    (lambda: speculative.swi(tokens=3, target_passes=0), "got a total cost of 0"),
    (
        lambda: speculative.swi(tokens=3, target_passes=1, drafter_passes=[1], cost_ratios=[]),
        "expected one cost ratio for each drafter, 1 in all; got 0",
    ),
    (lambda: cascade.token_count_pgf(0.5, 2, math.nan), "expected x to be a finite number; got nan"),
    (lambda: cascade.vertical_ewif(**(VERTICAL | {"rounds": -1})), "expected rounds"),
    (lambda: cascade.vertical_ewif(**(VERTICAL | {"inner_acceptance": 2.0})), "rate between 0 and 1; got 2"),
    (lambda: cascade.vertical_ewif(**(VERTICAL | {"acceptance": [1.0, 0.5]})), "to cover 8 drafted tokens"),
    (lambda: cascade.vertical_ewif(**(VERTICAL | {"inner_cost_ratio": -1})), "expected inner_cost_ratio"),
    (lambda: cascade.horizontal_ewif([(0.5, 0.1)]), r"to be \(acceptance, cost_ratio, draft_length\)"),
    (lambda: cascade.horizontal_ewif([(0.5, 0.1, -2)]), "expected draft_length"),
    (lambda: cascade.horizontal_ewif([0.5]), "expected each segment"),
    (lambda: hierarchy.expected_rounds(0.5, 2, -1), "expected tokens to be a whole number"),
    (lambda: hierarchy.expected_rounds_table(0.5, 2, 1.0), "expected max_tokens to be a whole number"),
    (lambda: hierarchy.rounds_tables([0.5, 1.5], 4), "expected every acceptance .* got 1.5"),
    (lambda: hierarchy.rounds_tables(0.5, 0), "whole number of at least 1; got 0"),
    (lambda: hierarchy.rounds_tables_from_survival([1.0, 0.5], 4), "survival curves that cover 4 drafted tokens"),
    (
        lambda: hierarchy.latency_per_token([0.1, 1.0], [0.5, 0.5], [1, 2]),
        "expected one cost for each model, the target's last, 3 in all; got 2",
    ),
    (
        lambda: hierarchy.latency_per_token([0.1, 0.2, 1.0], [0.5, 0.5], [1]),
        "expected one draft length for each acceptance, 2 in all; got 1",
    ),
    (lambda: hierarchy.latency_per_token([0.1, 1.0], [1.5], [1]), r"expected acceptances\[0\] to be a rate"),
    (lambda: hierarchy.latency_per_token([0.1, 1.0], [0.5], [1.5]), r"expected draft_lengths\[0\] to be a whole"),
    (lambda: hierarchy.latency_per_token([-0.1, 1.0], [0.5], [1]), r"expected costs\[0\] to be a finite number"),
    (lambda: hierarchy.latency_per_token([], [], []), "1 in all; got 0"),
    (lambda: hierarchy.latency_per_token([1, 2], [0.5], [1], catch_up="x"), "expected catch_up to be one of 'none'"),
    (lambda: hierarchy.passes_per_token([0.5], [1], convention="keep"), "expected convention to be one of"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spelling", [list, tuple, np.array])
def test_lists_tuples_and_arrays_are_alike(spelling: Callable[[list[float]], object]) -> None:
    found = hierarchy.latency_per_token(spelling([0.02, 0.15, 1.0]), spelling([0.7, 0.85]), spelling([3, 6]))
    constant = [lambda _n, c=cost: c for cost in (0.02, 0.15, 1.0)]
    assert found == hierarchy.latency_per_token(constant, [0.7, 0.85], [3, 6])
    curve = spelling([1.0, 0.5, 0.25])
    assert speculative.expected_tokens(curve, 2) == speculative.expected_tokens(0.5, 2)
    assert cascade.horizontal_ewif(((curve, 0.1, 2),)) == cascade.horizontal_ewif([(0.5, 0.1, 2)])


@pytest.mark.parametrize("rate", [Fraction(1, 2), np.float32(0.5), np.array(0.5)])
def test_every_kind_of_number_is_a_rate(rate: object) -> None:
    assert speculative.expected_tokens(rate, np.int64(2)) == 1.75


def test_results_are_plain_numbers() -> None:
    length, factor = speculative.best_draft_length(np.float64(0.9), np.float64(0.1), np.int64(9))
    assert type(length) is int
    assert type(factor) is float
    assert type(hierarchy.expected_rounds(np.float64(0.9), 3, 4)) is float
    assert type(hierarchy.latency_per_token([0.1, 1.0], np.array([0.9]), np.array([3]))) is float


def test_a_curve_averaged_from_counts_may_be_off_by_rounding() -> None:
    assert checks.check_survival([1.0 - 1e-12, 0.5, 0.5 + 1e-13]).shape == (3,)
