"""Cost curves from noisy timings: what is smoothed, and what must stay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsdopt.costs import CostCurve, CostSample, fitted_costs

TOKENS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
CONTEXTS = np.array([40, 100, 160])
TRUE = (0.04 + 0.001 * TOKENS + 0.02 * (TOKENS > 8)) * (1 + CONTEXTS[:, np.newaxis] / 4000)


def timings(rng: np.random.Generator, true: np.ndarray, *, noise: float, repeats: int, trials: int = 60) -> np.ndarray:
    """Return timings of `trials` machines: log-normal noise around the true seconds."""
    size = (trials, *true.shape, repeats)
    return true[np.newaxis, ..., np.newaxis] * np.exp(noise * rng.standard_normal(size) - noise**2 / 2)


def error(fitted: np.ndarray, true: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.log(fitted / true) ** 2)))


@pytest.mark.parametrize("repeats", [2, 4, 6])
def test_the_fit_halves_the_error_of_medians(repeats: int) -> None:
    taken = timings(np.random.default_rng(repeats), TRUE, noise=0.2, repeats=repeats)
    assert error(fitted_costs(taken), TRUE) < 0.6 * error(np.median(taken, axis=3), TRUE)


def test_a_step_stays_where_it_is() -> None:
    fitted = fitted_costs(timings(np.random.default_rng(1), TRUE, noise=0.1, repeats=6)).mean(axis=0)
    rise = fitted[:, 6] / fitted[:, 5]
    assert rise == pytest.approx(TRUE[:, 6] / TRUE[:, 5], rel=0.03)
    assert fitted[:, 5] / fitted[:, 4] == pytest.approx(TRUE[:, 5] / TRUE[:, 4], rel=0.03)


def test_a_real_fall_along_the_tokens_stays() -> None:
    true = TRUE.copy()
    true[:, 3] *= 1.5  # as a kernel that suits 6 tokens and not 4
    fitted = fitted_costs(timings(np.random.default_rng(2), true, noise=0.05, repeats=5))
    assert error(fitted[:, :, 3], true[:, 3]) < 0.05


def test_contexts_that_change_the_shape_are_not_averaged_away() -> None:
    true = 0.04 + 1e-5 * TOKENS * np.array([40, 2000, 16000])[:, np.newaxis]
    fitted = fitted_costs(timings(np.random.default_rng(3), true, noise=0.1, repeats=6))
    assert abs(np.log(fitted / true).mean(axis=0)).max() < 0.06


def test_slow_passes_raise_the_whole_curve_by_what_they_cost() -> None:
    taken = timings(np.random.default_rng(4), TRUE, noise=0.02, repeats=10)
    taken[..., 0] *= 2
    assert np.median(fitted_costs(taken) / TRUE) == pytest.approx(1.1, abs=0.01)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.floats(1e-6, 10), min_size=4, max_size=4), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_without_noise_the_timings_come_back(rows: list[list[float]], repeats: int) -> None:
    samples = [
        CostSample(n, 10 + place, (seconds,) * repeats)
        for place, row in enumerate(rows)
        for n, seconds in enumerate(row, 1)
    ]
    curve = CostCurve.from_samples(samples)
    assert np.asarray(curve.seconds) == pytest.approx(np.asarray(rows), rel=1e-12)


def test_cells_may_differ_in_their_number_of_timings() -> None:
    samples = [CostSample(1, 10, (1.0,) * 2), CostSample(2, 10, (2.0,) * 5), CostSample(3, 10, (3.0,) * 3)]
    assert CostCurve.from_samples(samples).seconds == ((pytest.approx(1), pytest.approx(2), pytest.approx(3)),)


def test_a_cell_with_many_timings_is_not_levelled_by_one_with_few() -> None:
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(200):
        grid = np.full((1, 1, 2, 64), np.nan)
        grid[0, 0, 0] = np.exp(0.2 * rng.standard_normal(64))
        grid[0, 0, 1, :4] = np.exp(0.2 * rng.standard_normal(4))
        first, second = np.log(fitted_costs(grid)[0, 0])
        errors.append((first, second))
    known, unknown = np.std(errors, axis=0)
    assert known < 0.05
    assert unknown < 0.12


def test_replicates_are_fitted_one_by_one() -> None:
    taken = timings(np.random.default_rng(5), TRUE, noise=0.2, repeats=4, trials=3)
    together = fitted_costs(taken)
    for index in range(3):
        assert fitted_costs(taken[index : index + 1])[0] == pytest.approx(together[index], rel=1e-12)
