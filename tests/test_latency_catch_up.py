"""Catch-up in a stack against a simulation that moves every cache token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from hsdopt.checks import CostFunction
from hsdopt.latency import cascade, hierarchy, speculative
from hsdopt.latency.hierarchy import Convention


@dataclass
class Stack:
    """A stack whose caches are lengths: what a model has read of the one current sequence."""

    rates: list[float]
    lengths: list[int]
    curves: list[CostFunction]
    truncate: bool
    rounds: int | None = None
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.read = [0] * len(self.curves)

    def run(self, rounds: int) -> np.ndarray:
        """Seconds and tokens of every round of the target."""
        written, records = 1, []
        for _ in range(rounds):
            before = self.seconds
            gained = self.verify(len(self.rates), written)
            written += gained
            records.append((self.seconds - before, gained))
        return np.array(records)

    def request(self, level: int, base: int) -> int:
        if level == 0:
            for drawn in range(self.lengths[0]):
                self.forward(0, base + drawn)
            return self.lengths[0]
        held, owed, passes = 0, self.lengths[level], 0
        while (held < owed) if self.rounds is None else (passes < self.rounds):
            held += self.verify(level, base + held)
            passes += 1
        if not self.truncate:
            return held
        self.crop(level, base + owed)
        return owed

    def verify(self, level: int, base: int) -> int:
        drafted = self.request(level - 1, base)
        self.forward(level, base + drafted)
        accepted = 0
        while accepted < drafted and self.rng.random() < self.rates[level - 1]:
            accepted += 1
        self.crop(level, base + accepted)
        return accepted + 1

    def forward(self, level: int, length: int) -> None:
        self.seconds += self.curves[level](length - self.read[level])
        self.read[level] = length

    def crop(self, level: int, length: int) -> None:
        for model in range(level + 1):
            self.read[model] = min(self.read[model], length)


def deviation(found: float, seconds: np.ndarray, tokens: np.ndarray) -> float:
    """How many standard errors the simulated ratio is off, by batch means."""
    batches = (seconds - found * tokens).reshape(60, -1).mean(axis=1)
    return float(batches.mean() / batches.std(ddof=1) * np.sqrt(len(batches)))


CURVES: list[CostFunction] = [
    lambda n: 0.05 + 0.03 * (n - 1),
    lambda n: 0.1 + 0.1 * (n - 1) ** 0.5,
    lambda n: 0.3 + 0.02 * (n - 1) ** 2,
    lambda n: 1.0 + 0.1 * (n - 1),
]
STACKS = [
    ([0.8], [4]),
    ([0.7, 0.9], [2, 5]),
    ([0.9, 0.8], [1, 1]),
    ([0.9, 0.95], [3, 3]),
    ([0.8, 0.9, 0.9], [1, 2, 2]),
    ([0.6, 0.7, 0.9], [2, 3, 5]),
    ([0.9, 0.9], [4, 2]),
]


@pytest.mark.parametrize("convention", ["truncate", "overshoot"])
@pytest.mark.parametrize(("rates", "lengths"), STACKS)
def test_parallel_catch_up_is_exact(rates: list[float], lengths: list[int], convention: Convention) -> None:
    curves = [*CURVES[: len(rates)], CURVES[-1]]
    stack = Stack(rates, lengths, curves, truncate=convention == "truncate")
    seconds, tokens = stack.run(6000).T
    found = hierarchy.latency_per_token(curves, rates, lengths, convention=convention, catch_up="parallel")
    assert abs(deviation(found, seconds, tokens)) < 4.0
    plain = hierarchy.latency_per_token(curves, rates, lengths, convention=convention)
    assert found > plain


def test_one_drafter_agrees_with_its_closed_form() -> None:
    for mode in ("none", "parallel", "sequential"):
        stack = hierarchy.latency_per_token([CURVES[1], CURVES[-1]], [0.8], [4], catch_up=mode)
        single = speculative.latency_per_token(0.8, CURVES[1], CURVES[-1], 4, catch_up=mode)
        assert stack == pytest.approx(single, rel=1e-14)


def test_constant_costs_know_no_parallel_catch_up() -> None:
    stack = ([0.05, 0.2, 1.0], [0.7, 0.9], [2, 5])
    assert hierarchy.latency_per_token(*stack, catch_up="parallel") == hierarchy.latency_per_token(*stack)
    assert hierarchy.latency_per_token(*stack, catch_up="sequential") > hierarchy.latency_per_token(*stack)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_extreme_rates(rate: float) -> None:
    stack = Stack([rate, rate], [2, 6], CURVES[1:], truncate=True)
    seconds, tokens = stack.run(400)[1:].sum(axis=0)
    found = hierarchy.latency_per_token(CURVES[1:], [rate, rate], [2, 6], catch_up="parallel")
    assert found == pytest.approx(seconds / tokens, rel=1e-12)


@pytest.mark.parametrize(("rounds", "length"), [(1, 3), (2, 1), (3, 2), (2, 0)])
def test_vertical_catch_up_is_exact(rounds: int, length: int) -> None:
    stack = Stack([0.8, 0.9], [length, 0], CURVES[:2] + CURVES[3:], truncate=False, rounds=rounds)
    seconds, tokens = stack.run(6000).T
    found = cascade.vertical_latency_per_token(
        acceptance=0.9,
        inner_acceptance=0.8,
        rounds=rounds,
        inner_draft_length=length,
        inner_cost=CURVES[0],
        drafter_cost=CURVES[1],
        target_cost=CURVES[3],
        catch_up="parallel",
    )
    assert abs(deviation(found, seconds, tokens)) < 4.0


def simulate_row(row: list[tuple[float, int]], curves: list[CostFunction], rounds: int) -> np.ndarray:
    rng, read, written, records = np.random.default_rng(4), [0] * len(row), 1, []
    chances = [rate for rate, length in row for _ in range(length)]
    for _ in range(rounds):
        seconds, position = curves[-1](len(chances) + 1), written
        for index, (_, length) in enumerate(row):
            for _ in range(length):
                seconds += curves[index](position - read[index])
                read[index] = position
                position += 1
        accepted = next((i for i, chance in enumerate(chances) if rng.random() >= chance), len(chances))
        read = [min(length, written + accepted) for length in read]
        written += accepted + 1
        records.append((seconds, accepted + 1))
    return np.array(records)


@pytest.mark.parametrize(
    "row", [[(0.8, 3)], [(0.9, 2), (0.8, 3)], [(0.95, 1), (0.9, 1), (0.9, 4)], [(0.9, 0), (0.9, 2)]]
)
def test_row_catch_up_is_exact(row: list[tuple[float, int]]) -> None:
    curves = [*CURVES[: len(row)], CURVES[-1]]
    seconds, tokens = simulate_row(row, curves, 6000).T
    segments = [(rate, curve, length) for (rate, length), curve in zip(row, curves, strict=False)]
    found = cascade.horizontal_latency_per_token(segments, curves[-1], catch_up="parallel")
    assert abs(deviation(found, seconds, tokens)) < 4.0


def test_constant_costs_give_the_ewif() -> None:
    row = [(0.9, 0.3, 1), (0.7, 0.1, 2), (0.4, 0.005, 6)]
    assert 1.0 / cascade.horizontal_latency_per_token(row, 1.0) == pytest.approx(cascade.horizontal_ewif(row))
    assert cascade.horizontal_latency_per_token([], CURVES[-1], catch_up="sequential") == CURVES[-1](1)
    shared = {"acceptance": 0.7, "inner_acceptance": 0.6, "inner_draft_length": 3, "target_cost": 2.0}
    idle = cascade.vertical_latency_per_token(**shared, rounds=0, inner_cost=1.0, drafter_cost=1.0, catch_up="parallel")
    assert idle == 2.0
