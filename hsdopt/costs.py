"""Cost curves: seconds of one forward pass over n new tokens at a given context length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from hsdopt.errors import InvalidArgumentError, PredictionError

__all__ = ["CONTEXT_SLACK", "CostCurve", "CostSample", "fitted_costs"]

_SLOWEST = 3.0
"""A single timing counts at most this many times the fitted seconds."""

_FEWEST = 2  # timings that say anything about noise
_LEVELLED = 2.0  # standard errors within which a fall is noise
_QUARTILE = 0.6745  # median of the absolute standard normal

CONTEXT_SLACK = 1.25
"""How far beyond the longest measured context a curve may still be read, as a factor."""


@dataclass(frozen=True, slots=True)
class CostSample:
    """Repeated timings of one kind of pass.

    Attributes
    ----------
    tokens : int
        New tokens of the pass.
    context : int
        Tokens in the cache before it.
    seconds : tuple of float
        Raw timings, in the order taken.
    batch : int
        Sequences per pass.
    """

    tokens: int
    context: int
    seconds: tuple[float, ...]
    batch: int = 1

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """The interquartile range over the median."""
        low, high = np.percentile(self.seconds, [25, 75])
        return float((high - low) / self.median) if self.median else 0.0

    def __repr__(self) -> str:
        """Say what was measured, and when to doubt it."""
        doubt = f"; suspect: interquartile range is {self.spread:.0%} of the median" if self.spread > 0.2 else ""
        return f"<{self.tokens} tokens at {self.context}: {self.median:.4g} s ({len(self.seconds)} timings{doubt})>"


@dataclass(frozen=True, slots=True)
class CostCurve:
    """c(n): seconds of one pass over n new tokens.

    Linear between the measured token counts (so steps stay where they were seen) and between the
    measured contexts; constant below the shortest context. Reading it beyond what was measured is
    an error, not a guess.

    Attributes
    ----------
    tokens : tuple of int
        Measured numbers of new tokens, ascending.
    contexts : tuple of int
        Measured context lengths, ascending.
    seconds : tuple of tuple of float
        ``seconds[context][tokens]``, expected.
    constant : bool
        Whether any number of tokens costs the same (a single number given by hand, or lookup).
    switch : float
        Seconds that a pass takes more if the pass before it was another network's, whose weights have taken the place
        of its own in the processor's cache.
    """

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    constant: bool = False
    switch: float = 0.0

    def __post_init__(self) -> None:
        """Refuse tables that are not curves."""
        grid = np.asarray(self.seconds, dtype=float)
        if grid.shape != (len(self.contexts), len(self.tokens)) or grid.size == 0:
            raise InvalidArgumentError(
                f"expected seconds as {len(self.contexts)} contexts x {len(self.tokens)} token counts; got {grid.shape}"
            )
        if not (np.all(np.isfinite(grid)) and np.all(grid >= 0) and 0 <= self.switch < math.inf):
            raise InvalidArgumentError("expected finite pass costs of at least 0 seconds in a cost curve")
        if any(np.any(np.diff(axis) <= 0) for axis in (self.tokens, self.contexts)):
            raise InvalidArgumentError("expected ascending token counts and contexts in a cost curve")

    @classmethod
    def fixed(cls, seconds: float) -> CostCurve:
        """Return the curve of a pass that always takes `seconds`."""
        return cls((1,), (0,), ((float(seconds),),), constant=True)

    @classmethod
    def from_function(cls, cost: Callable[[int], float], max_tokens: int) -> CostCurve:
        """Return the curve through ``cost(1) ... cost(max_tokens)``, the same at every context."""
        counts = tuple(range(1, max_tokens + 1))
        return cls(counts, (0,), (tuple(float(cost(n)) for n in counts),))

    @classmethod
    def from_samples(cls, samples: Iterable[CostSample], *, switch: float = 0.0) -> CostCurve:
        """Return the curve that fits `samples`, which must fill a grid.

        See `fitted_costs` for how the timings become a curve.

        Parameters
        ----------
        samples : iterable of CostSample
            Timings of passes behind passes of the same network.
        switch : float
            Seconds that a pass behind another network's takes more.

        Raises
        ------
        InvalidArgumentError
            If a combination of token count and context is missing.
        """
        kept = [s for s in samples if s.batch == 1]
        timings = {(s.context, s.tokens): s.seconds for s in kept}
        contexts = tuple(sorted({context for context, _ in timings}))
        tokens = tuple(sorted({count for _, count in timings}))
        missing = [(c, n) for c in contexts for n in tokens if (c, n) not in timings]
        if missing or not timings:
            raise InvalidArgumentError(
                f"expected cost samples on a full grid; missing (context, tokens): {missing[:3]}"
            )
        most = max(map(len, timings.values()))
        grid = np.full((1, len(contexts), len(tokens), most), np.nan)
        for (context, count), seconds in timings.items():
            grid[0, contexts.index(context), tokens.index(count), : len(seconds)] = seconds
        return cls(tokens, contexts, tuple(map(tuple, fitted_costs(grid)[0].tolist())), switch=switch)

    @property
    def max_tokens(self) -> float:
        """The most new tokens that the curve covers (infinite for a constant)."""
        return math.inf if self.constant else float(self.tokens[-1])

    @property
    def max_context(self) -> float:
        """The longest context at which the curve may be read (infinite if it is the same at every context)."""
        return math.inf if len(self.contexts) == 1 else self.contexts[-1] * CONTEXT_SLACK

    def __call__(self, tokens: float, context: float | None = None) -> float:
        """Return the seconds of one pass over `tokens` new tokens.

        Raises
        ------
        PredictionError
            If `tokens` or `context` lies beyond what was measured.
        """
        return float(self.at([tokens], context)[0])

    def at(self, tokens: Sequence[float] | NDArray[np.float64], context: float | None = None) -> NDArray[np.float64]:
        """Return the seconds of passes over each of `tokens` new tokens, at one context (default: the middle one).

        Raises
        ------
        PredictionError
            If a token count or the context lies beyond what was measured.
        """
        counts = np.asarray(tokens, dtype=float)
        row = self._row(self.contexts[len(self.contexts) // 2] if context is None else context)
        if self.constant:
            return np.full(counts.shape, row[0])
        if counts.size and (counts.max() > self.tokens[-1] or counts.min() < self.tokens[0]):
            raise PredictionError(
                f"expected passes of {self.tokens[0]} to {self.tokens[-1]} new tokens, as profiled; "
                f"got {counts.max():g}: profile longer passes or shorten the drafts"
            )
        return np.asarray(np.interp(counts, self.tokens, row), dtype=float)

    def scaled(self, factor: float) -> CostCurve:
        """Return the curve with every cost multiplied by `factor`."""
        seconds = tuple(tuple(factor * value for value in row) for row in self.seconds)
        return replace(self, seconds=seconds, switch=factor * self.switch)

    def table(self, max_tokens: int, context: float | None = None) -> NDArray[np.float64]:
        """Return c(1) ... c(max_tokens), seconds, shape [max_tokens]."""
        return self.at(np.arange(1, max_tokens + 1, dtype=float), context)

    def _row(self, context: float) -> NDArray[np.float64]:
        """Return the seconds per token count at `context`, linear between the measured contexts."""
        grid = np.asarray(self.seconds, dtype=float)
        if len(self.contexts) == 1:
            return np.asarray(grid[0])
        if context > self.max_context:
            raise PredictionError(
                f"expected contexts up to {self.contexts[-1]} tokens, as profiled; got {context:g}: "
                "profile with longer --contexts"
            )
        place = float(np.clip(context, self.contexts[0], None))
        right = int(np.clip(np.searchsorted(self.contexts, place), 1, len(self.contexts) - 1))
        low, high = self.contexts[right - 1], self.contexts[right]
        weight = (place - low) / (high - low)
        return np.asarray(np.maximum(grid[right - 1] * (1 - weight) + grid[right] * weight, 0.0))


def fitted_costs(timings: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the expected seconds of every kind of pass, for each of several replicates.

    Single timings of a busy machine are off by a fifth, so that a cell's own few do not make a good curve. Three
    things are known of its neighbours: at other contexts the curve has nearly the same shape (medians are drawn
    towards one shape for all contexts, the more, the less they differ from it beyond their noise); more tokens
    do not take less time (falls within the noise are levelled, real steps either way stay); and a slow pass is
    part of a run (all are scaled by measured time over fitted time). Without noise the medians come back.

    Parameters
    ----------
    timings : ndarray, shape [replicates, contexts, tokens, repeats]
        Seconds; nan where a cell has fewer timings than others.

    Returns
    -------
    ndarray, shape [replicates, contexts, tokens]
    """
    counts = np.isfinite(timings).sum(axis=3)
    count = np.median(counts)
    if count < _FEWEST or np.nanmin(timings) <= 0:
        return np.asarray(np.nanmedian(timings, axis=3))
    logs = np.log(timings)
    cells = np.nanmedian(logs, axis=3)
    spread = np.nanmedian(np.abs(logs - cells[..., np.newaxis]), axis=(1, 2, 3)) / _QUARTILE
    spread *= math.sqrt(count / (count - 1))
    noise = math.pi / 2 * spread[:, np.newaxis, np.newaxis] ** 2 / counts  # variance of every cell's median
    fitted, noise = _one_shape(logs, cells, noise)
    seconds = np.exp(_levelled(fitted, noise))
    return np.asarray(seconds * _tail(timings, seconds)[:, np.newaxis, np.newaxis])


def _one_shape(
    logs: NDArray[np.float64], cells: NDArray[np.float64], noise: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the cells drawn towards one shape for all contexts, and the variance that is left."""
    contexts, tokens = cells.shape[1:]
    level = np.median(cells - np.median(cells, axis=1, keepdims=True), axis=2, keepdims=True)
    moved = (logs - level[..., np.newaxis]).transpose(0, 2, 1, 3).reshape(len(cells), tokens, -1)
    shape = level + np.nanmedian(moved, axis=2)[:, np.newaxis]
    own = cells - shape
    free = (contexts - 1) * (tokens - 1) / (contexts * tokens)
    spread = np.median(np.abs(own), axis=2, keepdims=True) / _QUARTILE
    real = np.maximum(spread**2 - free * noise.mean(axis=2, keepdims=True), 0.0)
    weight = np.divide(real, real + noise, out=np.ones_like(noise), where=noise > 0)
    return shape + weight * own, noise * (weight + (1 - weight) / contexts)


def _levelled(fitted: NDArray[np.float64], noise: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return curves that never fall along the tokens, except where they fall by more than noise explains."""
    rising = fitted.copy()
    for row in np.ndindex(fitted.shape[:2]):
        if np.all(noise[row] > 0):
            rising[row] = isotonic_regression(fitted[row], weights=1 / noise[row]).x
    return np.where(np.abs(rising - fitted) <= _LEVELLED * np.sqrt(noise), rising, fitted)


def _tail(timings: NDArray[np.float64], fitted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return measured time over fitted time, replicate by replicate; single timings count at most `_SLOWEST` fits."""
    whole = np.where(np.isfinite(timings), fitted[..., np.newaxis], 0.0)
    measured = np.nansum(np.minimum(timings, _SLOWEST * whole), axis=(1, 2, 3))
    return np.asarray(measured / whole.sum(axis=(1, 2, 3)))
