"""Bursts: the formulas against hand-derived cases, simpler closed forms and simulation; the fit against known truth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsdopt.errors import InvalidArgumentError
from hsdopt.latency import hierarchy, speculative
from hsdopt.latency.bursts import (
    BurstModel,
    _stationary,
    fit,
    held_out_likelihood,
    hierarchy_seconds_per_token,
    tokens_per_pass,
)

CASES = json.loads((Path(__file__).parent / "data" / "cases2.json").read_text())["two_state"]
ONCE = ((1.0,),)
MOVES = ((0.9, 0.1), (0.2, 0.8))
BURSTY = BurstModel((0.9, 0.1), MOVES)

rates = st.floats(0.0, 1.0)


@st.composite
def models(draw: st.DrawFn, *, states: int | None = None, rate: st.SearchStrategy[float] = rates) -> BurstModel:
    count = states or draw(st.integers(1, 4))
    rows = [draw(st.lists(st.floats(0.01, 1.0), min_size=count, max_size=count)) for _ in range(count)]
    transition = tuple(tuple(w / sum(row) for w in row) for row in rows)
    return BurstModel(tuple(draw(rate) for _ in range(count)), transition)


def walk(model: BurstModel, length: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The states and the agreement of one long output."""
    rng = np.random.default_rng(seed)
    moves, states = rng.random(length), np.zeros(length, dtype=int)
    cumulative = np.cumsum(model.transition, axis=1)
    for position in range(1, length):
        row = cumulative[states[position - 1]]
        states[position] = min(int(np.searchsorted(row, moves[position], side="right")), len(row) - 1)
    return states, rng.random(length) < np.array(model.acceptance)[states]


def replayed(outputs: list[np.ndarray[Any, Any]], length: int) -> float:
    """Tokens per pass of drafts of `length` over the outputs, one behind the other."""
    agreed, position, rounds = np.concatenate(outputs), 0, 0
    while position + length < len(agreed):
        run = agreed[position : position + length]
        position += 1 + (length if run.all() else int(np.argmin(run)))
        rounds += 1
    return position / rounds


def number(text: str) -> float:
    above, below = text.split("/")
    return int(above) / int(below)


@pytest.mark.parametrize("row", CASES["rows"], ids=lambda row: f"L={row['L']}")
def test_published_two_state_cases(row: dict[str, Any]) -> None:
    model = BurstModel(tuple(map(number, CASES["a"])), tuple(tuple(map(number, chances)) for chances in CASES["P"]))
    assert tokens_per_pass(model, row["L"]) == pytest.approx(row["tokens_per_pass"], rel=1e-12)
    assert model.survival(row["L"]).sum() == pytest.approx(row["position_averaged"], rel=1e-12)
    if row["exact"]:
        assert tokens_per_pass(model, row["L"]) == pytest.approx(number(row["exact"]), rel=1e-12)


@pytest.mark.parametrize("row", CASES["hsd"]["rows"])
def test_published_hierarchy_case(row: dict[str, Any]) -> None:
    lower = BurstModel(tuple(map(number, row["b"])), MOVES)
    seconds = hierarchy_seconds_per_token([lower, BURSTY], row["c"], [row["L"], row["T"]])
    assert seconds == pytest.approx(row["cost_per_token"], rel=1e-12)
    curves = [lower.survival(row["L"]), BURSTY.survival(row["T"])]
    independent = hierarchy.latency_per_token(row["c"], curves, [row["L"], row["T"]])
    assert independent == pytest.approx(row["independent"], rel=1e-12)


@settings(deadline=None)
@given(rates, st.integers(0, 30))
def test_one_state_is_the_iid_rate(rate: float, length: int) -> None:
    model = BurstModel((rate,), ONCE)
    assert tokens_per_pass(model, length) == pytest.approx(speculative.expected_tokens(rate, length), rel=1e-12)
    assert model.rate == rate


@settings(deadline=None)
@given(rates, st.integers(0, 12), st.integers(1, 4))
def test_states_of_one_rate_are_one_state(rate: float, length: int, states: int) -> None:
    model = BurstModel((rate,) * states, tuple(map(tuple, np.full((states, states), 1 / states).tolist())))
    assert tokens_per_pass(model, length) == pytest.approx(speculative.expected_tokens(rate, length), rel=1e-9)


@settings(deadline=None)
@given(st.lists(st.tuples(rates, st.integers(0, 9)), max_size=3), st.data())
def test_one_state_is_the_hierarchy_of_iid_rates(levels: list[tuple[float, int]], data: st.DataObject) -> None:
    count = len(levels) + 1
    costs = data.draw(st.lists(st.floats(0.0, 5.0), min_size=count, max_size=count))
    curves = [lambda n, c=c: c * (1.0 + 0.1 * n) for c in costs]
    acceptances, lengths = [rate for rate, _ in levels], [length for _, length in levels]
    stack = [BurstModel((rate,), ONCE) for rate in acceptances]
    expected = hierarchy.latency_per_token(curves, acceptances, lengths)
    assert hierarchy_seconds_per_token(stack, curves, lengths) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(models(rate=st.floats(0.0, 0.95)))
def test_long_drafts_end_at_refusals(model: BurstModel) -> None:
    assert tokens_per_pass(model, 2000) == pytest.approx(1.0 / (1.0 - model.rate), rel=1e-9)


@settings(deadline=None)
@given(models(), st.integers(0, 12))
def test_tokens_lie_between_one_and_the_draft(model: BurstModel, length: int) -> None:
    tokens = tokens_per_pass(model, length)
    assert 1.0 - 1e-12 <= tokens <= length + 1 + 1e-9


@settings(deadline=None)
@given(models(), st.integers(0, 8))
def test_the_order_of_the_states_is_a_name(model: BurstModel, length: int) -> None:
    turned = BurstModel(model.acceptance[::-1], tuple(row[::-1] for row in model.transition[::-1]))
    assert tokens_per_pass(turned, length) == pytest.approx(tokens_per_pass(model, length), rel=1e-9)


@settings(deadline=None)
@given(models(), st.integers(0, 8), st.integers(0, 8))
def test_a_certain_proposal_is_a_draft_of_that_length(model: BurstModel, asked: int, proposed: int) -> None:
    length = max(asked, proposed)
    certain = np.eye(length + 1)[proposed]
    assert tokens_per_pass(model, length, proposal=certain) == pytest.approx(tokens_per_pass(model, proposed), rel=1e-9)


@settings(deadline=None)
@given(models(states=2), st.integers(1, 8), st.floats(0.0, 2.0), st.floats(0.5, 2.0))
def test_a_stack_of_one_drafter(model: BurstModel, length: int, drafting: float, verifying: float) -> None:
    seconds = hierarchy_seconds_per_token([model], [drafting, verifying], [length])
    assert seconds == pytest.approx((length * drafting + verifying) / tokens_per_pass(model, length), rel=1e-9)


@pytest.mark.parametrize("length", [0, 1, 5, 40])
def test_certain_states(length: int) -> None:
    still = ((1.0, 0.0), (0.0, 1.0))
    assert tokens_per_pass(BurstModel((1.0, 1.0), MOVES), length) == pytest.approx(length + 1)
    assert tokens_per_pass(BurstModel((0.0, 0.0), MOVES), length) == pytest.approx(1.0)
    assert tokens_per_pass(BurstModel((1.0, 0.0), still), length) == pytest.approx((length + 2) / 2)
    # a state that is left for good does not count
    assert tokens_per_pass(BurstModel((0.3, 1.0), ((0.5, 0.5), (0.0, 1.0))), length) == pytest.approx(length + 1)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1), st.floats(0.2, 1.0))
def test_a_stationary_distribution_is_kept(states: int, seed: int, filled: float) -> None:
    """Also where states never meet, or are left for good."""
    rng = np.random.default_rng(seed)
    weights = rng.random((states, states)) * (rng.random((states, states)) < filled)
    weights[weights.sum(axis=1) == 0.0, 0] = 1.0
    moves = weights / weights.sum(axis=1, keepdims=True)
    held = _stationary(moves)
    assert (held >= 0.0).all()
    assert held.sum() == pytest.approx(1.0)
    assert held @ moves == pytest.approx(held, abs=1e-12)


def test_states_that_hardly_ever_move() -> None:
    rare = 1e-14
    model = BurstModel((0.5, 0.5), ((1.0 - rare, rare), (3 * rare, 1.0 - 3 * rare)))
    assert model.rate == 0.5
    slow = BurstModel((1.0, 0.0), ((1.0 - rare, rare), (3 * rare, 1.0 - 3 * rare)))
    assert slow.rate == pytest.approx(0.75, rel=1e-2)  # 1 - 1e-14 is rounded, their ratio hardly


@pytest.mark.parametrize("proposal", [None, (0.3, 0.0, 0.2, 0.0, 0.5)], ids=["always", "sometimes less"])
def test_tokens_against_simulated_rounds(proposal: tuple[float, ...] | None) -> None:
    """4,000 rounds; the mean stays within 4 standard errors (some 0.03 tokens each, of batches of 20 rounds)."""
    length, rounds = 4, 4000
    agreed = walk(BURSTY, rounds * (length + 1) + 1, seed=7)[1]
    asked = np.random.default_rng(8).choice(length + 1, size=rounds, p=proposal) if proposal else [length] * rounds
    position, gained = 0, np.zeros(rounds)
    for index, proposed in enumerate(asked):
        run = agreed[position : position + proposed]
        gained[index] = 1 + (proposed if run.all() else int(np.argmin(run)))
        position += int(gained[index])
    batches = gained.reshape(-1, 20).mean(axis=1)
    error = batches.std(ddof=1) / np.sqrt(len(batches))
    assert error < 0.06
    assert abs(gained.mean() - tokens_per_pass(BURSTY, length, proposal=proposal)) < 4 * error


def test_stack_against_simulated_rounds() -> None:
    """3,000 rounds of the target over drafts of 4 from a middle model over drafts of 2; 4 standard errors."""
    rounds, low, middle, costs = 3000, 2, 4, (0.05, 0.2, 1.0)
    states, upper = walk(BURSTY, rounds * (middle + 1) + 20, seed=3)
    lower = np.random.default_rng(4).random(len(states)) < np.array((0.8, 0.2))[states]
    position, seconds, gained = 0, np.zeros(rounds), np.zeros(rounds)
    for index in range(rounds):
        held = 0
        while held < middle:
            run = lower[position + held : position + held + low]
            held += 1 + (low if run.all() else int(np.argmin(run)))
            seconds[index] += low * costs[0] + costs[1]
        run = upper[position : position + middle]
        gained[index] = 1 + (middle if run.all() else int(np.argmin(run)))
        seconds[index] += costs[2]
        position += int(gained[index])
    predicted = hierarchy_seconds_per_token([BurstModel((0.8, 0.2), MOVES), BURSTY], costs, [low, middle])
    ratio = seconds.sum() / gained.sum()
    misses = (seconds - ratio * gained).reshape(-1, 20).sum(axis=1)
    error = misses.std(ddof=1) * np.sqrt(len(misses)) / gained.sum()
    assert error < 0.02
    assert abs(ratio - predicted) < 4 * error


@pytest.fixture(scope="module")
def outputs() -> list[np.ndarray[Any, Any]]:
    return [walk(BURSTY, 200, seed=seed)[1] for seed in range(20)]


def test_the_fit_finds_the_states(outputs: list[np.ndarray[Any, Any]]) -> None:
    model = fit(outputs)
    assert model.acceptance == pytest.approx((0.9, 0.1), abs=0.05)
    assert np.array(model.transition) == pytest.approx(np.array(MOVES), abs=0.07)
    assert fit(outputs) == model
    for length in (1, 4, 8):
        assert tokens_per_pass(model, length) == pytest.approx(replayed(outputs, length), rel=0.02)
        assert model.survival(length).sum() > 1.05 * replayed(outputs, length)  # what the states are for
    assert held_out_likelihood(outputs) > held_out_likelihood(outputs, states=1)


def test_pairs_share_a_transition(outputs: list[np.ndarray[Any, Any]]) -> None:
    opposite = [~output for output in outputs]
    fitted = fit({("small", "big"): outputs, ("tiny", "big"): opposite})
    model, other = fitted["small", "big"], fitted["tiny", "big"]
    assert model.transition == other.transition
    assert len(model.acceptance) == 2
    assert sum(model.acceptance) == pytest.approx(2 - sum(other.acceptance))


def test_independent_agreement_has_one_state() -> None:
    agreed = np.random.default_rng(1).random((10, 100)) < 0.7
    model = fit(list(agreed))
    assert model == BurstModel((float(agreed.mean()),), ONCE)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(rates, min_size=1, max_size=12), min_size=1, max_size=4))
def test_one_state_is_the_mean_of_soft_agreement(agreement: list[list[float]]) -> None:
    mean = np.mean(np.concatenate(agreement))
    assert fit(agreement, states=1).acceptance == pytest.approx((mean,), abs=1e-12)
    assert held_out_likelihood(agreement, states=1) <= 0.0
    fit(agreement)  # whatever the agreement, a valid model comes back


def test_constant_agreement() -> None:
    assert fit([[1, 1, 1]] * 3).acceptance == pytest.approx((1.0,), abs=1e-12)
    assert fit([[0, 0, 0], [0]]).acceptance == pytest.approx((0.0,), abs=1e-12)
    assert fit([[1.0]]).acceptance == pytest.approx((1.0,), abs=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BurstModel((1.5,), ONCE), "every acceptance to be a rate"),
        (lambda: BurstModel((), ()), "one rate per state"),
        (lambda: BurstModel((0.5, 0.5), ONCE), "2 rows of 2 chances"),
        (lambda: BurstModel((0.5,), ((0.9,),)), "row 0 sums to 0.9"),
        (lambda: tokens_per_pass(BURSTY, -1), "draft_length"),
        (lambda: tokens_per_pass(BURSTY, 2, proposal=[0.5, 0.5]), "chances of 0 to 2"),
        (lambda: tokens_per_pass(BURSTY, 1, proposal=[0.5, 0.6]), "sum to 1"),
        (lambda: fit([]), "at least one position"),
        (lambda: fit([[], []]), "got none"),
        (lambda: fit({}), "every pair"),
        (lambda: fit([[0.5, 2.0]]), "agreement in output 0"),
        (lambda: fit([[1], [float("nan")]]), "agreement in output 1"),
        (lambda: fit({"a": [[1, 0]], "b": [[1]]}), "same positions"),
        (lambda: fit([True, False]), "one list of agreement per output"),  # type: ignore[list-item]
        (lambda: fit([[1]], states=0), "states"),
        (lambda: hierarchy_seconds_per_token([BURSTY], [1.0], [2]), "one cost for each model"),
        (lambda: hierarchy_seconds_per_token([BURSTY], [1.0, 1.0], []), "one draft length"),
        (lambda: hierarchy_seconds_per_token([BURSTY, BurstModel((1.0,), ONCE)], [1, 1, 1], [1, 1]), "one transition"),
    ],
)
def test_bad_input_is_one_clear_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
