"""The simulator against the closed form on random plans of all kinds of node."""

from __future__ import annotations

from itertools import cycle, islice

import numpy as np
import plans
import pytest

from hsdopt.latency import expected_latency
from hsdopt.simulate import simulate

ROUNDS = 100_000
ERRORS = 4


def scores(index: int, kind: plans.Kind, rounds: int = ROUNDS) -> tuple[float, float]:
    """Return by how many standard errors seconds per token and tokens per pass are off, for one random plan."""
    plan, profile = plans.random_case(np.random.default_rng([2026, index]), kind)
    exact = expected_latency(plan, profile)
    run = simulate(plan, profile, tokens=round(1.02 * rounds * exact.tokens_per_pass), seed=index)
    assert run.rounds >= rounds
    seconds = _score(run.seconds_per_token, exact.seconds_per_token, run.standard_error)
    tokens = _score(run.tokens_per_pass, exact.tokens_per_pass, run.tokens_per_pass_error)
    assert max(abs(seconds), abs(tokens)) <= ERRORS, (str(plan), seconds, tokens)
    return seconds, tokens


def _score(found: float, exact: float, error: float) -> float:
    if error < 1e-9 * exact:  # nothing random about it
        assert found == pytest.approx(exact, rel=1e-6)
        return 0.0
    return (found - exact) / error


def cases(start: int, stop: int) -> list[tuple[int, plans.Kind]]:
    return list(islice(enumerate(cycle(plans.KINDS)), start, stop))


@pytest.mark.parametrize(("index", "kind"), cases(0, 60))
def test_60_random_plans(index: int, kind: plans.Kind) -> None:
    scores(index, kind)


@pytest.mark.slow
def test_300_random_plans() -> None:
    """All of them, and their scores are those of a normal law: neither too wide nor too narrow."""
    found = np.array([scores(*case) for case in cases(0, 300)])
    for column in found.T:
        assert abs(column.mean()) <= ERRORS / np.sqrt(len(column))
        assert 0.8 < column.std() < 1.2
