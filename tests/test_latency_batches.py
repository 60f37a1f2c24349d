"""Batches against reference cases, exhaustive enumeration in exact fractions, and simulation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsdopt.errors import InvalidArgumentError
from hsdopt.latency import batches, hierarchy, speculative

CASES = json.loads((Path(__file__).parent / "data" / "cases2_trees_batches.json").read_text())["batches"]
rates = st.floats(0.0, 1.0)
sequences = st.lists(st.tuples(rates, st.integers(0, 5), st.integers(0, 12)), min_size=1, max_size=4)
checked = settings(deadline=None, derandomize=True, max_examples=60)


def affine(tokens: int) -> float:
    return 10.0 + tokens


def prefixes(rate: Fraction, length: int) -> dict[int, Fraction]:
    """The accepted prefix of one draft, from every outcome of its tokens."""
    chances = dict.fromkeys(range(length + 1), Fraction(0))
    for outcome in itertools.product([True, False], repeat=length):
        chance = Fraction(1)
        for passed in outcome:
            chance *= rate if passed else 1 - rate
        chances[len(list(itertools.takewhile(bool, outcome)))] += chance
    return chances


def exact_makespan(
    rounds: Sequence[dict[int, Fraction]], lengths: Sequence[int], owed: tuple[int, ...], cost: Callable[[int], int]
) -> Fraction:
    """Seconds until all are done, over every joint outcome of every round."""
    alive = [index for index, left in enumerate(owed) if left > 0]
    if not alive:
        return Fraction(0)
    total = Fraction(cost(sum(lengths[index] + 1 for index in alive)))
    for outcome in itertools.product(*(rounds[index].items() for index in alive)):
        left, chance = list(owed), Fraction(1)
        for index, (accepted, share) in zip(alive, outcome, strict=True):
            left[index] -= accepted + 1
            chance *= share
        if chance:
            total += chance * exact_makespan(rounds, lengths, tuple(left), cost)
    return total


@pytest.mark.parametrize("index", range(3))
def test_lockstep_gives_the_reference_case(index: int) -> None:
    case = CASES["lockstep"]
    tokens = batches.lockstep_tokens(case["a"], case["k"], case["b"][index])
    assert tokens == pytest.approx(case["tokens"][index], abs=5e-5)


@pytest.mark.parametrize("case", CASES["ragged"])
def test_ragged_and_static_batches_give_the_reference_cases(case: dict[str, Any]) -> None:
    ragged = batches.ragged_seconds_per_token(case["a"], case["k"], affine)
    assert ragged == pytest.approx(case["refill_seconds_per_token"], rel=1e-12)
    assert ragged == pytest.approx(float(Fraction(case["refill_exact"])), rel=1e-12)
    seconds = batches.makespan(case["a"], case["k"], case["tokens"], affine)
    assert seconds == pytest.approx(case["makespan"], rel=1e-12)
    steps = batches.makespan(case["a"], case["k"], case["tokens"], 1.0)
    assert steps == pytest.approx(case["expected_steps"], rel=1e-12)


@pytest.mark.parametrize(("batch", "best"), [(1, 6), (4, 6), (8, 6), (16, 3), (32, 1), (64, 0)])
def test_the_best_draft_length_falls_as_the_batch_grows(batch: int, best: int) -> None:
    def seconds(length: int) -> float:
        return batches.ragged_seconds_per_token([0.8] * batch, [length] * batch, lambda tokens: max(1.0, tokens / 64))

    assert min(range(7), key=seconds) == best


@pytest.mark.parametrize(
    ("chances", "lengths", "owed"),
    [
        ([Fraction(4, 5), Fraction(1, 2)], [3, 1], (5, 4)),
        ([Fraction(1, 3), Fraction(1), Fraction(0)], [2, 1, 1], (3, 4, 2)),
        ([Fraction(2, 3), Fraction(2, 3)], [0, 4], (3, 0)),
    ],
)
def test_makespan_equals_exact_enumeration(chances: list[Fraction], lengths: list[int], owed: tuple[int, ...]) -> None:
    def cost(tokens: int) -> int:
        return 7 + tokens * tokens

    rounds = [prefixes(rate, length) for rate, length in zip(chances, lengths, strict=True)]
    exact = exact_makespan(rounds, lengths, owed, cost)
    assert batches.makespan([float(rate) for rate in chances], lengths, owed, cost) == pytest.approx(float(exact))


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_lockstep_equals_exact_enumeration(batch: int) -> None:
    single = prefixes(Fraction(3, 4), 3)
    exact = Fraction(0)
    for outcome in itertools.product(single.items(), repeat=batch):
        chance = Fraction(1)
        for _, share in outcome:
            chance *= share
        exact += chance * (1 + min(accepted for accepted, _ in outcome))
    assert batches.lockstep_tokens(0.75, 3, batch) == pytest.approx(float(exact), rel=1e-12)


def test_makespan_agrees_with_simulation() -> None:
    curves, lengths, owed = [[1.0, 0.9, 0.5, 0.45], [1.0, 0.4]], [3, 1], [20, 9]
    random, samples = np.random.default_rng(5), 20_000
    left = np.tile(np.array(owed), (samples, 1))
    seconds = np.zeros(samples)
    while (left > 0).any():
        size = ((left > 0) * (np.array(lengths) + 1)).sum(axis=1)
        seconds += np.where(size > 0, 3.0 + 0.1 * size**1.5, 0.0)
        for index, curve in enumerate(curves):
            drawn = random.random(samples)[:, None]
            left[:, index] -= 1 + (drawn < np.array(curve[1:])).sum(axis=1)
    predicted = batches.makespan(curves, lengths, owed, lambda tokens: 3.0 + 0.1 * tokens**1.5)
    assert abs(seconds.mean() - predicted) < 4 * seconds.std() / samples**0.5


@given(rates, st.integers(0, 8), st.integers(0, 40))
@checked
def test_one_sequence_takes_the_renewal_function(rate: float, length: int, tokens: int) -> None:
    rounds = hierarchy.expected_rounds(rate, length, tokens)
    assert batches.makespan([rate], [length], [tokens], 2.0) == pytest.approx(2.0 * rounds, rel=1e-9)


@given(rates, st.integers(0, 8), st.integers(1, 16))
@checked
def test_one_sequence_is_speculative_decoding_and_lockstep_never_beats_ragged(
    rate: float, length: int, batch: int
) -> None:
    single = speculative.expected_tokens(rate, length)
    assert batches.lockstep_tokens(rate, length, 1) == pytest.approx(single)
    assert 1.0 <= batches.lockstep_tokens(rate, length, batch) <= single + 1e-12
    seconds = batches.ragged_seconds_per_token([rate], [length], affine, drafting=2.0, alignment=0.5)
    assert seconds == pytest.approx((affine(length + 1) + 2.5) / single)


@given(sequences)
@checked
def test_the_batch_lasts_as_long_as_its_slowest_member_and_no_longer_than_all_in_turn(
    batch: list[tuple[float, int, int]],
) -> None:
    acceptances, lengths, owed = (list(column) for column in zip(*batch, strict=True))
    alone = [batches.makespan([rate], [length], [tokens], 1.0) for rate, length, tokens in batch]
    together = batches.makespan(acceptances, lengths, owed, 1.0)
    assert max(alone) - 1e-9 <= together <= sum(alone) + 1e-9
    assert together <= max(owed)
    in_turn = sum(batches.makespan([rate], [length], [tokens], float) for rate, length, tokens in batch)
    assert batches.makespan(acceptances, lengths, owed, float) == pytest.approx(in_turn)  # linear costs only add


def test_rates_and_their_survival_curves_agree() -> None:
    curves = [[0.5**m for m in range(5)], [0.75**m for m in range(3)]]
    for tokens in (7, [7, 7]):
        by_rate = batches.makespan([0.5, 0.75], [4, 2], tokens, affine)
        assert by_rate == pytest.approx(batches.makespan(curves, [4, 2], tokens, affine))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: batches.makespan([], [], [], 1.0), "at least one sequence"),
        (lambda: batches.makespan([0.5], [1, 2], [3], 1.0), "one draft length for each sequence, 1 in all; got 2"),
        (lambda: batches.makespan([0.5], [1], [3, 4], 1.0), "one number of tokens for each sequence, 1 in all"),
        (lambda: batches.makespan([0.5], [1], [-1], 1.0), "tokens to be a whole number of at least 0; got -1"),
        (lambda: batches.makespan([0.5], [1], 2.5, 1.0), "tokens to be a list"),
        (lambda: batches.makespan([0.5], [1], [1], lambda _: float("nan")), r"cost\(2\)"),
        (lambda: batches.makespan(0.5, [1], [1], 1.0), "acceptances to be a list"),
        (lambda: batches.ragged_seconds_per_token([1.5], [1], 1.0), r"acceptances\[0\].*got 1.5"),
        (lambda: batches.ragged_seconds_per_token([float("nan")], [1], 1.0), r"acceptances\[0\]"),
        (lambda: batches.ragged_seconds_per_token([[1.0, 0.5]], [2], 1.0), "cover 2 drafted tokens"),
        (lambda: batches.ragged_seconds_per_token([0.5], [1], 1.0, drafting=-1.0), "drafting"),
        (lambda: batches.ragged_seconds_per_token([0.5], [1], 1.0, alignment=-1.0), "alignment"),
        (lambda: batches.ragged_seconds_per_token([0.5], [-1], 1.0), r"draft_lengths\[0\]"),
        (lambda: batches.lockstep_tokens(0.5, 2, 0), "batch to be a whole number of at least 1; got 0"),
    ],
)
def test_bad_input_is_one_clear_error(call: Callable[[], float], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call()
