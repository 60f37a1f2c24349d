"""The closed forms against enumeration in exact rational arithmetic, and their properties."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsdopt.latency import cascade, hierarchy, speculative
from hsdopt.latency.hierarchy import Convention

Law = dict[int, Fraction]
rates = st.floats(0.0, 1.0)
ratios = st.floats(0.0, 2.0)
lengths = st.integers(0, 12)
checked = settings(deadline=None, derandomize=True, max_examples=60)


def accepted(steps: Sequence[Fraction]) -> Law:
    """The accepted prefix of one draft, from every outcome of its tokens, given each token's own chance."""
    law: Law = defaultdict(Fraction)
    for outcome in itertools.product([True, False], repeat=len(steps)):
        chance = Fraction(1)
        for passed, step in zip(outcome, steps, strict=True):
            chance *= step if passed else 1 - step
        law[len(list(itertools.takewhile(bool, outcome)))] += chance
    return law


def gained(steps: Sequence[Fraction]) -> Law:
    return {prefix + 1: chance for prefix, chance in accepted(steps).items()}


def rounds_and_tokens(pass_law: Law, owed: int) -> tuple[Fraction, Law]:
    """Expected passes until ``owed`` tokens are held, and the law of the tokens held then, by unrolling passes."""
    passes, done, running = Fraction(0), defaultdict(Fraction), {0: Fraction(1)}
    while running:
        unfinished: Law = defaultdict(Fraction)
        for held, chance in running.items():
            if held >= owed:
                done[held] += chance
                continue
            passes += chance
            for tokens, share in pass_law.items():
                unfinished[held + tokens] += chance * share
        running = unfinished
    return passes, done


def exact_stack(
    costs: Sequence[Callable[[int], Fraction]],
    acceptances: Sequence[Sequence[Fraction]],
    owed: Sequence[int],
    convention: Convention,
) -> Fraction:
    """Seconds per token of a stack; acceptances[i] holds the chance of each drafted token given those before."""
    request, drafts = owed[0] * costs[0](1), {owed[0]: Fraction(1)}
    for level in range(1, len(costs)):
        cost = request + sum(share * costs[level](length + 1) for length, share in drafts.items())
        law: Law = defaultdict(Fraction)
        for length, share in drafts.items():
            for tokens, chance in gained(acceptances[level - 1][:length]).items():
                law[tokens] += share * chance
        if level == len(costs) - 1:
            return cost / sum(tokens * chance for tokens, chance in law.items())
        passes, held = rounds_and_tokens(law, owed[level])
        request = passes * cost
        drafts = held if convention == "overshoot" else {owed[level]: Fraction(1)}
    raise AssertionError


def fraction_steps(rng: np.random.Generator, length: int) -> list[Fraction]:
    return [Fraction(int(rng.integers(0, 11)), 10) for _ in range(length)]


def survival(steps: Sequence[Fraction]) -> list[float]:
    return [float(product) for product in itertools.accumulate(steps, lambda x, y: x * y, initial=Fraction(1))]


@pytest.mark.parametrize("rate", [Fraction(0), Fraction(3, 7), Fraction(9, 10), Fraction(1)])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_tokens_of_one_pass_by_enumeration(rate: Fraction, length: int) -> None:
    law = gained([rate] * length)
    mean = sum(tokens * chance for tokens, chance in law.items())
    assert speculative.expected_tokens(float(rate), length) == pytest.approx(float(mean), rel=1e-14)
    power = sum(chance * Fraction(3, 2) ** tokens for tokens, chance in law.items())
    assert cascade.token_count_pgf(float(rate), length, 1.5) == pytest.approx(float(power), rel=1e-14)


@pytest.mark.parametrize("rate", [Fraction(0), Fraction(3, 7), Fraction(9, 10), Fraction(1)])
@pytest.mark.parametrize("length", [0, 1, 3, 6])
def test_rounds_by_enumeration(rate: Fraction, length: int) -> None:
    law = gained([rate] * length)
    exact = [float(rounds_and_tokens(law, owed)[0]) for owed in range(9)]
    curve = survival([rate] * length)
    assert [hierarchy.expected_rounds(float(rate), length, owed) for owed in range(9)] == pytest.approx(exact)
    assert [hierarchy.expected_rounds(curve, length, owed) for owed in range(9)] == pytest.approx(exact)
    assert hierarchy.expected_rounds_table(float(rate), length, 8).tolist() == pytest.approx(exact)
    assert hierarchy.expected_rounds_table(curve, length, 8).tolist() == pytest.approx(exact)


@pytest.mark.parametrize("seed", range(12))
def test_rounds_on_a_curve_by_enumeration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = fraction_steps(rng, 5)
    exact = [float(rounds_and_tokens(gained(steps), owed)[0]) for owed in range(10)]
    assert hierarchy.expected_rounds_table(survival(steps), 5, 9).tolist() == pytest.approx(exact, rel=1e-13)


def test_tables_hold_every_length() -> None:
    chances = np.array([[0.0, 0.3], [0.95, 1.0]])
    curves = chances[..., np.newaxis] ** np.arange(13.0)
    tables = hierarchy.rounds_tables(chances, 12)
    assert tables.shape == (2, 2, 12, 12)
    np.testing.assert_allclose(hierarchy.rounds_tables_from_survival(curves, 12), tables, rtol=1e-12)
    for row, column, length in itertools.product(range(2), range(2), range(1, 13)):
        expected = hierarchy.expected_rounds_table(chances[row, column], length, 12)[1:]
        np.testing.assert_allclose(tables[row, column, length - 1], expected, rtol=1e-13)


@pytest.mark.parametrize("convention", ["truncate", "overshoot"])
@pytest.mark.parametrize("seed", range(20))
def test_stack_by_enumeration(seed: int, convention: Convention) -> None:
    rng = np.random.default_rng(seed)
    owed = [int(length) for length in rng.integers(1, 4, size=rng.integers(1, 4))]
    longest = list(itertools.accumulate(owed)) if convention == "overshoot" else owed
    steps = [fraction_steps(rng, length) for length in longest]
    base = [Fraction(int(x), 100) for x in rng.integers(0, 100, size=len(owed) + 1)]
    curves = [lambda n, b=b: b + Fraction(n - 1, 50) for b in base]
    exact = exact_stack(curves, steps, owed, convention)
    acceptances = [survival(chances) for chances in steps]
    found = hierarchy.latency_per_token(curves, acceptances, owed, convention=convention)
    assert found == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize("convention", ["truncate", "overshoot"])
def test_breakdown_sums_to_the_latency(convention: Convention) -> None:
    costs, chances, owed = np.array([0.02, 0.15, 1.0]), [0.7, 0.85], [3, 6]
    passes = hierarchy.passes_per_token(chances, owed, convention=convention)
    total = hierarchy.latency_per_token(list(costs), chances, owed, convention=convention)
    assert passes @ costs == pytest.approx(total, rel=1e-14)


@pytest.mark.parametrize("seed", range(12))
def test_vertical_cascade_by_enumeration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rounds, length = int(rng.integers(0, 4)), int(rng.integers(0, 4))
    outer, inner = fraction_steps(rng, rounds * (length + 1)), fraction_steps(rng, length)
    tokens = Fraction(0)
    for outcome in itertools.product(gained(inner).items(), repeat=rounds):
        chance = Fraction(1)
        for _, share in outcome:
            chance *= share
        drafted = sum(count for count, _ in outcome)
        tokens += chance * sum(count * share for count, share in gained(outer[:drafted]).items())
    found = cascade.vertical_ewif(
        acceptance=survival(outer),
        inner_acceptance=survival(inner),
        rounds=rounds,
        inner_draft_length=length,
        cost_ratio=0.1,
        inner_cost_ratio=0.01,
    )
    assert found == pytest.approx(float(tokens) / (1 + rounds * 0.1 + rounds * length * 0.01), rel=1e-12)


@given(rates, rates, st.integers(0, 6), lengths)
@checked
def test_vertical_cascade_at_a_rate_is_its_curve(outer: float, inner: float, rounds: int, length: int) -> None:
    shared = {"inner_acceptance": inner, "rounds": rounds, "inner_draft_length": length}
    costs = {"cost_ratio": 0.2, "inner_cost_ratio": 0.03}
    curve = outer ** np.arange(rounds * (length + 1) + 1.0)
    at_rate = cascade.vertical_ewif(acceptance=outer, **shared, **costs)
    assert at_rate == pytest.approx(cascade.vertical_ewif(acceptance=curve, **shared, **costs), rel=1e-12)


@given(st.lists(st.tuples(rates, ratios, st.integers(0, 5)), max_size=4))
@checked
def test_horizontal_cascade_position_by_position(row: list[tuple[float, float, int]]) -> None:
    chances = [chance for chance, _, length in row for _ in range(length)]
    tokens = 1.0 + sum(np.prod(chances[: position + 1]) for position in range(len(chances)))
    cost = 1.0 + sum(ratio * length for _, ratio, length in row)
    assert cascade.horizontal_ewif(row) == pytest.approx(tokens / cost, rel=1e-12)


@given(rates, ratios, lengths, rates, st.integers(0, 8))
@checked
def test_a_free_drafter_at_the_end_never_hurts(rate: float, ratio: float, length: int, free: float, extra: int) -> None:
    row = [(rate, ratio, length)]
    assert cascade.horizontal_ewif([*row, (free, 0.0, extra)]) >= cascade.horizontal_ewif(row)


@given(rates, rates, ratios, st.integers(0, 6), st.integers(0, 8))
@checked
def test_a_free_drafter_below_never_hurts(rate: float, inner: float, ratio: float, rounds: int, length: int) -> None:
    cascaded = cascade.vertical_ewif(
        acceptance=rate,
        inner_acceptance=inner,
        rounds=rounds,
        inner_draft_length=length,
        cost_ratio=ratio,
        inner_cost_ratio=0.0,
    )
    assert cascaded >= speculative.ewif(rate, ratio, rounds) * (1 - 1e-14)


@given(rates, ratios, st.integers(0, 40))
@checked
def test_best_draft_length_is_the_first_best(rate: float, ratio: float, longest: int) -> None:
    length, factor = speculative.best_draft_length(rate, ratio, longest)
    factors = [speculative.ewif(rate, ratio, candidate) for candidate in range(longest + 1)]
    assert factor == pytest.approx(max(factors), rel=1e-12)
    assert all(earlier < factor for earlier in factors[:length])


def test_a_tie_goes_to_the_shortest_draft() -> None:
    assert speculative.best_draft_length(0.5, 0.5, 8) == (0, 1.0)
    assert speculative.best_draft_length(1.0, 1.0, 8) == (0, 1.0)
    assert speculative.best_draft_length(0.0, 0.0, 8) == (0, 1.0)


@given(rates, lengths, st.integers(1, 40))
@checked
def test_rounds_are_monotone_and_bounded(rate: float, length: int, owed: int) -> None:
    table = hierarchy.expected_rounds_table(rate, length, owed)
    assert (np.diff(table) >= -1e-12).all()
    assert owed / (length + 1) - 1e-12 <= table[-1] <= owed + 1e-12
    assert hierarchy.expected_rounds(rate, length, owed) == pytest.approx(table[-1], rel=1e-12)
    assert hierarchy.expected_rounds(rate, length + 1, owed) <= table[-1] + 1e-12
    assert hierarchy.expected_rounds(min(1.0, rate + 0.1), length, owed) <= table[-1] + 1e-12


@pytest.mark.parametrize(("rate", "length"), [(0.0, 3), (0.4, 1), (0.9, 8), (1.0, 5)])
def test_rounds_per_token_tend_to_the_renewal_rate(rate: float, length: int) -> None:
    owed = 200_000
    limit = 1.0 / speculative.expected_tokens(rate, length)
    assert hierarchy.expected_rounds(rate, length, owed) / owed == pytest.approx(limit, rel=1e-4)


@given(st.lists(st.tuples(rates, st.integers(1, 5)), min_size=1, max_size=3), st.lists(ratios, min_size=4, max_size=4))
@checked
def test_one_drafter_is_a_stack_of_two(levels: list[tuple[float, int]], costs: list[float]) -> None:
    rate, length = levels[0]
    for convention in ("truncate", "overshoot"):
        stack = hierarchy.latency_per_token(costs[:2], [rate], [length], convention=convention)
        assert stack == pytest.approx(speculative.latency_per_token(rate, costs[0], costs[1], length), rel=1e-12)


@pytest.mark.parametrize("rate", [1.0 - 1e-9, 1.0])
def test_a_rate_near_one_keeps_its_digits(rate: float) -> None:
    exact = Fraction(rate)
    tokens = sum(exact**m for m in range(513))
    assert speculative.expected_tokens(rate, 512) == pytest.approx(float(tokens), rel=1e-14)
    pass_law = {n: (1 - exact) * exact ** (n - 1) for n in range(1, 5)} | {5: exact**4}
    passes, _ = rounds_and_tokens(pass_law, 12)
    assert hierarchy.expected_rounds(rate, 4, 12) == pytest.approx(float(passes), rel=1e-14)
    discount = sum(share * exact**n for n, share in pass_law.items())
    drafted = 2 * 5 + 1 if rate == 1.0 else float((1 - exact * discount**2) / (1 - exact))
    found = cascade.vertical_ewif(
        acceptance=rate,
        inner_acceptance=rate,
        rounds=2,
        inner_draft_length=4,
        cost_ratio=0.0,
        inner_cost_ratio=0.0,
    )
    assert found == pytest.approx(drafted, rel=1e-13)


@pytest.mark.parametrize("convention", ["truncate", "overshoot"])
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0 - 1e-9, 1.0])
def test_long_drafts_stay_within_the_possible(rate: float, convention: Convention) -> None:
    latency = hierarchy.latency_per_token([0.0, 0.0, 1.0], [rate, rate], [256, 512], convention=convention)
    assert 1.0 / (2 * 769 + 1) <= latency <= 1.0 + 1e-12
    slow = hierarchy.latency_per_token([3.0, 1.0], [rate], [512], convention=convention)
    assert slow > 1.0


@pytest.mark.parametrize("convention", ["truncate", "overshoot"])
def test_a_request_for_nothing_leaves_the_models_below_out(convention: Convention) -> None:
    def priceless(tokens: int) -> float:
        raise AssertionError(tokens)

    how: dict[str, Any] = {"convention": convention, "catch_up": "sequential"}
    assert hierarchy.latency_per_token([priceless, priceless, 2.0], [0.5, 0.5], [3, 0], **how) == 2.0
    lower = hierarchy.latency_per_token([priceless, 0.1, 1.0], [0.5, 0.5], [0, 4], **how)
    single = speculative.latency_per_token(0.5, 0.1, 1.0, 4, catch_up="sequential")
    assert lower == pytest.approx(single, rel=1e-14)


def test_catch_up_by_enumeration() -> None:
    rate, costs = Fraction(4, 5), {1: Fraction(1, 10), 2: Fraction(3, 20)}
    law = gained([rate] * 3)
    tokens = sum(count * chance for count, chance in law.items())
    for mode, extra in (("none", 0), ("parallel", costs[2] - costs[1]), ("sequential", costs[1])):
        exact = (3 * costs[1] + law[4] * extra + 1) / tokens
        found = speculative.latency_per_token(0.8, costs.__getitem__, 1.0, 3, catch_up=mode)
        assert found == pytest.approx(float(exact), rel=1e-14)
    assert speculative.latency_per_token(0.8, 0.1, 1.0, 0, catch_up="sequential") == 1.0


@given(
    st.lists(st.tuples(rates, st.integers(1, 6)), min_size=1, max_size=3),
    st.lists(ratios, min_size=4, max_size=4),
)
@checked
def test_overshoot_is_never_slower_at_constant_costs(levels: list[tuple[float, int]], costs: list[float]) -> None:
    chances, owed = [rate for rate, _ in levels], [length for _, length in levels]
    stack = (costs[: len(levels) + 1], chances, owed)
    truncated = hierarchy.latency_per_token(*stack)
    assert hierarchy.latency_per_token(*stack, convention="overshoot") <= truncated * (1 + 1e-12)


def test_overshoot_can_be_slower_on_a_slope() -> None:
    stack = ([0.02, 0.15, lambda n: 1.0 + 0.5 * max(0, n - 4)], [0.9, 0.6], [3, 3])
    assert hierarchy.latency_per_token(*stack, convention="overshoot") > hierarchy.latency_per_token(*stack)
