"""Cost samples: timed passes of every model, through the sessions that the runtime uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter

import numpy as np

from hsdopt.costs import CONTEXT_SLACK, CostSample
from hsdopt.errors import InvalidArgumentError
from hsdopt.plan import LOOKUP
from hsdopt.runtime.lookup import Lookup, LookupSession
from hsdopt.runtime.model import Model
from hsdopt.runtime.session import Session

__all__ = [
    "NEW_TOKENS",
    "Cell",
    "CostRecord",
    "PassTimer",
    "choose_contexts",
    "collect",
    "fitting",
    "measure_costs",
    "outliers",
    "relative_error",
]

Cell = tuple[str, int, int]
"""A kind of pass: model, new tokens, context length."""

NEW_TOKENS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40)
"""Numbers of new tokens at which passes are timed."""

_LOOKUP_DRAFT = 10
_LEVER = 4  # how many times as far as costs are read behind the last context the others reach back
_FAR, _MARKED = 5.0, 0.2  # an outlier is this many standard deviations and this share of the median away
_DEVIATION = 1.4826  # standard deviations of a normal law per median absolute deviation
_MEDIAN = 1.2533  # standard error of a median over that of a mean


@dataclass(frozen=True, slots=True)
class CostRecord:
    """One timed pass: model, new tokens, context length, which repeat, seconds."""

    model: str
    tokens: int
    context: int
    repeat: int
    seconds: float


def choose_contexts(prompt_lengths: Sequence[int], max_new_tokens: int, *, most: int | None = None) -> tuple[int, ...]:
    """Return three context lengths that span those a workload visits: shortest, middle, longest.

    Parameters
    ----------
    prompt_lengths : sequence of int
    max_new_tokens : int
    most : int, optional
        The longest context that leaves room for every pass; longer ones give way to it, as far as costs may be read
        behind it, and the shortest to a span that tells how costs grow.

    Examples
    --------
    >>> choose_contexts([40, 60, 80], 48)
    (40, 84, 128)
    >>> choose_contexts([40, 60, 80], 48, most=120)
    (40, 80, 120)
    >>> choose_contexts([40, 60, 80], 48, most=90)
    (3, 53, 103)
    """
    shortest, longest = min(prompt_lengths), max(prompt_lengths) + max_new_tokens
    if most is not None:
        last = min(longest, max(most, ceil(longest / CONTEXT_SLACK)))
        shortest, longest = max(1, min(shortest, last - _LEVER * (longest - last))), last
    return tuple(sorted({shortest, round((shortest + longest) / 2), longest}))


def fitting(model: Model, tokens: Sequence[int], contexts: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of new tokens that fit behind every context, so that a model's samples fill a grid."""
    limit = model.max_positions
    return tuple(count for count in tokens if limit is None or max(contexts) + count <= limit)


def measure_costs(
    models: Mapping[str, Model],
    *,
    tokens: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    text: Sequence[int],
    prompt: Sequence[int] | None = None,
    lookup: Lookup | None = None,
    done: Iterable[tuple[str, int, int, int]] = (),
    seed: int = 0,
) -> Iterable[CostRecord]:
    """Yield one record per model, number of new tokens, context and repeat.

    Models take turns within a repeat, so that a drifting machine touches all alike; the order of the
    cells is drawn anew in every repeat.

    Parameters
    ----------
    models : mapping of str to Model
        The networks, by name.
    tokens, contexts : sequence of int
        New tokens per pass, and tokens in the cache before it.
    repeats : int
        Timings of each cell.
    text : sequence of int
        Token ids to fill the caches with; repeated where it is too short.
    prompt : sequence of int, optional
        What encoders read before the decoder's passes are timed; what fills the caches if not given.
    lookup : Lookup, optional
        Times requests of the lookup drafter too.
    done : iterable of (model, tokens, context, repeat)
        Cells measured before.
    seed : int
        Of the order.
    """
    finished = set(done)
    cells = [(context, count) for context in contexts for count in tokens]
    rng = np.random.default_rng(seed)
    timer = PassTimer(models, longest=max(contexts) + max(tokens), text=text, prompt=prompt, lookup=lookup)
    fits = {name: fitting(model, tokens, contexts) for name, model in models.items()}
    for repeat in range(repeats):
        for context, count in rng.permutation(cells).tolist():
            for name in models:
                if (name, count, context, repeat) not in finished and count in fits[name]:
                    yield CostRecord(name, count, context, repeat, timer.time((name, count, context)))
        if lookup is not None:
            for context in contexts:
                if (LOOKUP, 1, context, repeat) not in finished:
                    yield CostRecord(LOOKUP, 1, context, repeat, timer.time((LOOKUP, 1, context)))


class PassTimer:
    """Times single passes; caches are filled once and kept for the next pass at the same context.

    Parameters
    ----------
    models : mapping of str to Model
        The networks, by name.
    longest : int
        The longest context and pass together.
    text : sequence of int
        Token ids to fill the caches with; repeated where it is too short.
    prompt : sequence of int, optional
        What encoders read before the decoder's passes are timed; what fills the caches if not given.
    lookup : Lookup, optional
        Times requests of the lookup drafter too.

    Raises
    ------
    InvalidArgumentError
        If there is no text.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        *,
        longest: int,
        text: Sequence[int],
        prompt: Sequence[int] | None = None,
        lookup: Lookup | None = None,
    ) -> None:
        self._models, self._lookup = models, lookup
        self._filler = _filler(text, longest)
        self._prompt = self._filler if prompt is None else prompt
        self._benches: dict[tuple[str, int], _Bench] = {}

    def time(self, cell: Cell) -> float:
        """Return the seconds of one pass."""
        name, count, context = cell
        if name == LOOKUP and self._lookup is not None:
            return _time_lookup(self._lookup, self._filler, context)
        if (name, context) not in self._benches:
            self._benches[name, context] = _Bench(self._models[name], self._filler, context, self._prompt)
        return self._benches[name, context].time(count)


def collect(records: Iterable[CostRecord]) -> dict[str, tuple[CostSample, ...]]:
    """Return cost samples per model, timings in the order of their repeats."""
    cells: dict[tuple[str, int, int], dict[int, float]] = {}
    for record in records:
        cells.setdefault((record.model, record.context, record.tokens), {})[record.repeat] = record.seconds
    samples: dict[str, list[CostSample]] = {}
    for (name, context, count), timings in sorted(cells.items()):
        seconds = tuple(timings[repeat] for repeat in sorted(timings))
        samples.setdefault(name, []).append(CostSample(count, context, seconds))
    return {name: tuple(taken) for name, taken in samples.items()}


def relative_error(seconds: Sequence[float]) -> float:
    """Return the standard error of the median of some timings as a fraction of it; infinite for a single timing.

    Examples
    --------
    >>> round(relative_error([1.0, 1.1, 0.9, 1.0, 3.0]), 3)
    0.083
    """
    if len(seconds) < 2:
        return float("inf")
    median = float(np.median(seconds))
    return _MEDIAN * _spread(seconds) / (median * len(seconds) ** 0.5) if median else 0.0


def outliers(sample: CostSample) -> tuple[float, ...]:
    """Return the timings of a sample that lie far from its others; they stay in it.

    An outlier is over 5 standard deviations (by the median absolute deviation) and over 20 % from the median.

    Examples
    --------
    >>> outliers(CostSample(1, 8, (1.0, 1.01, 0.99, 1.0, 3.0)))
    (3.0,)
    """
    limit = max(_FAR * _spread(sample.seconds), _MARKED * sample.median)
    return tuple(seconds for seconds in sample.seconds if abs(seconds - sample.median) > limit)


def _spread(seconds: Sequence[float]) -> float:
    """Return the standard deviation of timings, whatever a few of them do."""
    return _DEVIATION * float(np.median(np.abs(np.asarray(seconds) - np.median(seconds))))


class _Bench:
    """A session whose cache holds exactly `context` tokens before every timed pass."""

    def __init__(self, model: Model, filler: Sequence[int], context: int, prompt: Sequence[int]) -> None:
        self._session: Session | None = None
        self._model, self._filler, self._context, self._prompt = model, filler, context, prompt

    def time(self, count: int) -> float:
        if self._session is None:
            self._session = self._model.network_session()
            self._session.begin(self._prompt)
            self._session.forward(self._filler[: self._context])
            self._pass(self._session, 1)  # the first pass after a prefill allocates; it is not a sample
        return self._pass(self._session, count)

    def _pass(self, session: Session, count: int) -> float:
        session.crop(self._context)
        session.forward(self._filler[: self._context + count], n_logits=count)
        return session.passes[-1].seconds


def _filler(text: Sequence[int], length: int) -> list[int]:
    if not text:
        raise InvalidArgumentError("expected some token ids to fill the caches with; got none")
    return [text[index % len(text)] for index in range(length)]


def _time_lookup(lookup: Lookup, filler: Sequence[int], context: int) -> float:
    session: LookupSession = lookup.session()
    session.begin(filler[:context])
    started = perf_counter()
    session.extend(filler[context : context + 1])
    session.propose(_LOOKUP_DRAFT)
    return perf_counter() - started
