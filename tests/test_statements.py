"""What commands say, against what they know."""

from __future__ import annotations

import numpy as np
import pytest

from hsdopt.costs import CostSample
from hsdopt.profiling import Drift

SIZES = (1, 2, 3, 4, 10, 40)


def sample(tokens: int, seconds: float, *, spread: float = 0.02, timings: int = 9) -> CostSample:
    """Return timings whose interquartile range is `spread` of their median."""
    return CostSample(tokens, 64, tuple(seconds * (1 + spread * step) for step in np.linspace(-1, 1, timings)))


def drifted(factors: dict[int, float], *, spread: float = 0.02) -> Drift:
    stored = tuple(sample(size, 1.0, spread=spread) for size in SIZES)
    return Drift("big", stored, tuple(sample(size, factors.get(size, 1.0), spread=spread) for size in SIZES))


# --- check ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("short", [(1,), (1, 2, 3, 4), (4,)])
def test_short_passes_that_moved_are_not_outvoted(short: tuple[int, ...]) -> None:
    drift = drifted(dict.fromkeys(short, 1.35))
    assert not drift.holds
    assert [tokens for tokens, _ in drift.moved] == list(short)
    assert all(change == pytest.approx(0.35) for _, change in drift.moved)


def test_moves_both_ways_do_not_cancel() -> None:
    drift = drifted({1: 1.35, 2: 1 / 1.35})
    assert drift.change == pytest.approx(0)
    assert [tokens for tokens, _ in drift.moved] == [1, 2]


def test_noise_excuses_what_it_explains_only() -> None:
    assert drifted({1: 1.08}).holds
    assert drifted({1: 1.2}, spread=0.3).holds
    assert not drifted({1: 1.35}, spread=0.1).holds
    assert not drifted({1: 1.6}, spread=0.9).holds
