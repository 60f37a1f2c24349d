"""Hold two profiles of the same models and workload against each other: their costs and their predictions.

Usage: python scripts/reproducible.py FIRST.json SECOND.json [REPLICATES]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from hsdopt.latency.expected import expected_latency
from hsdopt.plan import Level
from hsdopt.profiles import Profile
from hsdopt.solvers.uncertainty import cost_replicates
from hsdopt.suites import suite

Cells = Mapping[tuple[str, int, int], NDArray[np.float64]]


def main(first: str, second: str, replicates: str = "400") -> None:
    """Print how many cells agree within their 95 % intervals, and how far apart the predictions are."""
    one, two = Profile.load(first), Profile.load(second)
    rng = np.random.default_rng(0)
    cells = [_cells(profile, int(replicates), rng) for profile in (one, two)]
    sure, speed = _agreeing(*cells, speed=0.0), _speed(*cells)
    alike = _agreeing(*cells, speed=speed)
    seconds, ratios = zip(*_predictions(one, two), strict=True)
    lines = [
        f"cells that agree within their 95 % intervals: {sum(sure)} of {len(sure)} ({np.mean(sure):.1%})",
        f"the same, less one factor for the machine's speed ({np.exp(speed):.3f}): {np.mean(alike):.1%}",
        f"target, one token: {1e3 * one.cost(one.target)(1):.1f} ms and {1e3 * two.cost(two.target)(1):.1f} ms",
        f"predicted seconds per token, second over first: {_spread(seconds)}",
        f"predicted speed-up over autoregression, second over first: {_spread(ratios)}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _cells(profile: Profile, replicates: int, rng: np.random.Generator) -> Cells:
    """Return the fitted logarithm of every cell's seconds, replicate by replicate."""
    cells: dict[tuple[str, int, int], NDArray[np.float64]] = {}
    for name, curve in profile.costs.items():
        if curve.constant:
            continue
        drawn = np.log([each.seconds for each in cost_replicates(profile, name, replicates, rng)])
        for row, context in enumerate(curve.contexts):
            for column, tokens in enumerate(curve.tokens):
                cells[name, tokens, context] = drawn[:, row, column]
    return cells


def _agreeing(one: Cells, two: Cells, *, speed: float) -> list[bool]:
    """Return per cell whether the difference, less `speed`, is within 1.96 of its standard errors."""
    pairs = [(one[cell], two[cell]) for cell in one if cell in two]
    return [bool(abs(b.mean() - a.mean() - speed) <= 1.96 * np.hypot(a.std(), b.std())) for a, b in pairs]


def _speed(one: Cells, two: Cells) -> float:
    """Return the median logarithm of the second profile's seconds over the first's."""
    return float(np.median([two[cell].mean() - one[cell].mean() for cell in one if cell in two]))


def _predictions(one: Profile, two: Profile) -> Iterator[tuple[float, float]]:
    """Yield the second profile's seconds and speed-up over the first's, plan by plan of the standard suite."""
    for plan in suite(one, [Level(one.target)], "standard"):
        before, after = (expected_latency(plan, profile) for profile in (one, two))
        yield after.seconds_per_token / before.seconds_per_token, after.speedup / before.speedup


def _spread(values: tuple[float, ...]) -> str:
    apart = np.abs(np.asarray(values) - 1)
    return f"median {np.median(values):.3f}; farthest {apart.max():.1%} off, median {np.median(apart):.1%} off"


if __name__ == "__main__":
    main(*sys.argv[1:])
