"""Catch-up in a stack against a simulation that moves every cache token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from hsdopt.checks import CostFunction
from hsdopt.latency import hierarchy, speculative
from hsdopt.latency.hierarchy import Convention


@dataclass
class Stack:
    """A stack whose caches are lengths: what a model has read of the one current sequence."""

    rates: list[float]
    lengths: list[int]
    curves: list[CostFunction]
    truncate: bool
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
        held, owed = 0, self.lengths[level]
        while held < owed:
            held += self.verify(level, base + held)
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
    # the ratio's standard error by the delta method; rounds are almost independent
    errors = (seconds - found * tokens) / tokens.mean()
    batches = errors.reshape(60, -1).mean(axis=1)
    assert abs(batches.mean()) < 4 * batches.std(ddof=1) / np.sqrt(len(batches))
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
