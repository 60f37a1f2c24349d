"""Cost samples: timed passes of every model, through the sessions that the runtime uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import TypeVar

import numpy as np

from hsdopt.checks import check_length, check_nonnegative
from hsdopt.costs import CONTEXT_SLACK, CostSample
from hsdopt.errors import InvalidArgumentError
from hsdopt.plan import LOOKUP
from hsdopt.runtime.lookup import Lookup, LookupSession
from hsdopt.runtime.model import Model, tensor_bytes
from hsdopt.runtime.session import Session

__all__ = [
    "NEW_TOKENS",
    "Cell",
    "CostRecord",
    "PassTimer",
    "SwitchRecord",
    "choose_contexts",
    "collect",
    "fitting",
    "measure_costs",
    "measure_switches",
    "outliers",
    "relative_error",
    "switch_seconds",
]

T = TypeVar("T")
Cell = tuple[str, int, int]
"""A kind of pass: model, new tokens, context length."""

NEW_TOKENS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40)
"""Numbers of new tokens at which passes are timed."""

_TURN = 4  # kinds of pass that a model is timed at before the next one's turn
_SWITCH_TOKENS = (1, 4, 8)  # sizes of the passes that are timed behind another network's
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

    def __post_init__(self) -> None:
        """Refuse a record that was not measured, as a damaged journal may hold."""
        _check_record(self.model, self.tokens, self.repeat)
        check_length(self.context, "context")
        check_nonnegative(self.seconds, "seconds")


@dataclass(frozen=True, slots=True)
class SwitchRecord:
    """Two equal passes of a model, one after the other, the first of them behind another network's.

    Attributes
    ----------
    model : str
    tokens : int
        New tokens of either pass.
    repeat : int
    behind_other, behind_own : float
        Seconds of the first and of the second.
    """

    model: str
    tokens: int
    repeat: int
    behind_other: float
    behind_own: float

    def __post_init__(self) -> None:
        """Refuse a record that was not measured, as a damaged journal may hold."""
        _check_record(self.model, self.tokens, self.repeat)
        check_nonnegative(self.behind_other, "behind_other")
        check_nonnegative(self.behind_own, "behind_own")


def _check_record(model: str, tokens: int, repeat: int) -> None:
    if not isinstance(model, str):
        raise InvalidArgumentError(f"expected the name of a model; got {model!r}")
    check_length(tokens, "tokens", minimum=1)
    check_length(repeat, "repeat")


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
    singles: int = 1,
    prompt: Sequence[int] | None = None,
    lookup: Lookup | None = None,
    done: Iterable[tuple[str, int, int, int]] = (),
    seed: int = 0,
) -> Iterable[CostRecord]:
    """Yield one record per model, number of new tokens, context and repeat.

    Models take turns of four passes within a repeat, so that a drifting machine touches all alike; the order of the
    cells is drawn anew in every repeat. Every pass stands behind another of the same network (an untimed one at the
    beginning of a turn), as most passes of a stack do; `measure_switches` times the others.

    Parameters
    ----------
    models : mapping of str to Model
        The networks, by name.
    tokens, contexts : sequence of int
        New tokens per pass, and tokens in the cache before it.
    repeats : int
        Timings of each cell.
    singles : int
        How many times as many passes over one token are timed: they make up most of decoding.
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
    cells = [(c, n, turn) for c in contexts for n in tokens for turn in range(singles if n == 1 else 1)]
    rng = np.random.default_rng(seed)
    timer = PassTimer(models, longest=max(contexts) + max(tokens), text=text, prompt=prompt, lookup=lookup)
    fits = {name: fitting(model, tokens, contexts) for name, model in models.items()}
    for repeat in range(repeats):
        order = rng.permutation(cells).tolist()
        for name, (context, count, turn) in _turns(order, models):
            number = repeat + turn * repeats
            if (name, count, context, number) not in finished and count in fits[name]:
                yield CostRecord(name, count, context, number, timer.time((name, count, context)))
        if lookup is not None:
            for context in contexts:
                if (LOOKUP, 1, context, repeat) not in finished:
                    yield CostRecord(LOOKUP, 1, context, repeat, timer.time((LOOKUP, 1, context)))


def _turns(order: Sequence[T], models: Iterable[str]) -> Iterator[tuple[str, T]]:
    """Yield (model, cell): a few cells of the first model, the same of the next, and so on."""
    for first in range(0, len(order), _TURN):
        for name in models:
            for cell in order[first : first + _TURN]:
                yield name, cell


def measure_switches(
    models: Mapping[str, Model],
    target: str,
    *,
    context: int,
    repeats: int,
    text: Sequence[int],
    prompt: Sequence[int] | None = None,
    only: Collection[str] | None = None,
) -> Iterator[SwitchRecord]:
    """Yield pairs of passes of every network, the first behind a pass of another one.

    A drafter follows the target; the target follows the drafter with the most weights that are not its own.

    Parameters
    ----------
    models : mapping of str to Model
        The networks, by name; nothing comes of a single one.
    target : str
    context : int
        Tokens in the caches.
    repeats : int
        Pairs per network.
    text : sequence of int
        Token ids to fill the caches with; repeated where it is too short.
    prompt : sequence of int, optional
        What encoders read before the decoder's passes are timed.
    only : collection of str, optional
        The networks that are wanted; all of them if not given.
    """
    drafters = [name for name in models if name != target]
    if not drafters:
        return
    others = dict.fromkeys(drafters, target) | {target: max(drafters, key=lambda name: _both(models, name, target))}
    timer = PassTimer(models, longest=context + max(_SWITCH_TOKENS), text=text, prompt=prompt)
    sizes = {name: fitting(model, _SWITCH_TOKENS, (context,)) for name, model in models.items()}
    for repeat in range(repeats):
        for name, other in others.items():
            if sizes[name] and sizes[other] and (only is None or name in only):
                tokens = sizes[name][repeat % len(sizes[name])]
                timer.time((other, 1, context))
                yield SwitchRecord(name, tokens, repeat, *timer.pair((name, tokens, context)))


def _both(models: Mapping[str, Model], name: str, target: str) -> int:
    """Return the bytes of both models' weights together."""
    return tensor_bytes(network for model in (models[name], models[target]) if (network := model.network) is not None)


def switch_seconds(records: Iterable[SwitchRecord]) -> dict[str, float]:
    """Return per network how many seconds longer a pass takes behind another network's: a median, at least 0.

    Examples
    --------
    >>> switch_seconds(SwitchRecord("t", 1, repeat, 5.0 + repeat, 4.0) for repeat in range(3))
    {'t': 2.0}
    """
    longer: dict[str, list[float]] = {}
    for record in records:
        longer.setdefault(record.model, []).append(record.behind_other - record.behind_own)
    return {name: max(float(np.median(seconds)), 0.0) for name, seconds in longer.items()}


class PassTimer:
    """Times single passes; caches are filled once and kept for the next pass at the same context.

    A pass behind another network's is preceded by an untimed one of its own network.

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
        self._last = ""

    def time(self, cell: Cell) -> float:
        """Return the seconds of one pass behind another of the same network, or of one lookup request."""
        name, count, context = cell
        if name == LOOKUP and self._lookup is not None:
            return _time_lookup(self._lookup, self._filler, context)
        bench = self._bench(name, context)
        if name != self._last:
            bench.time(1)
        self._last = name
        return bench.time(count)

    def pair(self, cell: Cell) -> tuple[float, float]:
        """Return the seconds of two equal passes, one after the other, the first behind whatever was timed before."""
        name, count, context = cell
        bench = self._bench(name, context)
        self._last = name
        return bench.time(count), bench.time(count)

    def _bench(self, name: str, context: int) -> _Bench:
        if (name, context) not in self._benches:
            self._benches[name, context] = _Bench(self._models[name], self._filler, context, self._prompt)
        return self._benches[name, context]


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
        self._filler, self._context = filler, context
        self._session: Session = model.network_session()
        self._session.begin(prompt)
        self._session.forward(filler[:context])
        self.time(1)  # the first pass after a prefill allocates; it is not a sample

    def time(self, count: int) -> float:
        self._session.crop(self._context)
        self._session.forward(self._filler[: self._context + count], n_logits=count)
        return self._session.passes[-1].seconds


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
