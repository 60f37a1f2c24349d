"""Cost curves: seconds of one forward pass over n new tokens at a given context length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hsdopt.errors import InvalidArgumentError, PredictionError

__all__ = ["CostCurve", "CostSample", "tail_factors"]

_SLOWEST = 3.0
"""A single timing counts at most this many medians."""

_CONTEXT_SLACK = 1.25
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
        ``seconds[context][tokens]``, medians.
    constant : bool
        Whether any number of tokens costs the same (a single number given by hand, or lookup).
    """

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    constant: bool = False

    def __post_init__(self) -> None:
        """Refuse tables that are not curves."""
        grid = np.asarray(self.seconds, dtype=float)
        if grid.shape != (len(self.contexts), len(self.tokens)) or grid.size == 0:
            raise InvalidArgumentError(
                f"expected seconds as {len(self.contexts)} contexts x {len(self.tokens)} token counts; got {grid.shape}"
            )
        if not (np.all(np.isfinite(grid)) and np.all(grid >= 0)):
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
    def from_samples(cls, samples: Iterable[CostSample]) -> CostCurve:
        """Return the curve through the medians of `samples`, which must fill a grid, scaled to add up.

        A run is a sum of passes, and the slow ones among them are part of it: medians alone promise too much. So
        all medians are scaled by one factor, measured time over the time of as many medians (single timings count
        at most three medians, so that a suspended machine does not stretch the curve).

        Raises
        ------
        InvalidArgumentError
            If a combination of token count and context is missing.
        """
        kept = [s for s in samples if s.batch == 1]
        medians = {(s.context, s.tokens): s.median for s in kept}
        contexts = tuple(sorted({context for context, _ in medians}))
        tokens = tuple(sorted({count for _, count in medians}))
        missing = [(c, n) for c in contexts for n in tokens if (c, n) not in medians]
        if missing or not medians:
            raise InvalidArgumentError(
                f"expected cost samples on a full grid; missing (context, tokens): {missing[:3]}"
            )
        scale = float(tail_factors([np.asarray([s.seconds]) for s in kept])[0])
        return cls(tokens, contexts, tuple(tuple(scale * medians[c, n] for n in tokens) for c in contexts))

    @property
    def max_tokens(self) -> float:
        """The most new tokens that the curve covers (infinite for a constant)."""
        return math.inf if self.constant else float(self.tokens[-1])

    @property
    def max_context(self) -> float:
        """The longest context at which the curve may be read (infinite if it is the same at every context)."""
        return math.inf if len(self.contexts) == 1 else self.contexts[-1] * _CONTEXT_SLACK

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
        return replace(self, seconds=tuple(tuple(factor * value for value in row) for row in self.seconds))

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


def tail_factors(timings: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return measured time over the time of as many medians, for each of several replicates.

    Parameters
    ----------
    timings : sequence of ndarray, shape [replicates, repeats]
        One array per kind of pass, seconds.

    Returns
    -------
    ndarray, shape [replicates]
    """
    medians = [np.median(values, axis=1, keepdims=True) for values in timings]
    measured = sum(
        np.minimum(values, _SLOWEST * median).sum(axis=1) for values, median in zip(timings, medians, strict=True)
    )
    expected = sum(median[:, 0] * values.shape[1] for values, median in zip(timings, medians, strict=True))
    return np.asarray(np.divide(measured, expected, out=np.ones(len(medians[0])), where=np.asarray(expected) > 0))
