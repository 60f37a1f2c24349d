"""Models without weights: laws from a table, acceptance on a schedule, dice whose outcomes can be enumerated.

- `TableModel`: the law of a token given the last two is a row of a table, so that the law of any output is known.
- `ScheduledModel` and `ScheduledLookup`: every verify pass accepts by a survival curve, independently of all others,
  which is what the closed forms and the simulator assume. Greedy decoding only.
- `every_outcome`: runs a program under all outcomes of its dice and returns the exact law of its result.
"""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from hsdopt.runtime.session import Pass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")
IDS = 8  # token ids per scheduled model


class MockSession:
    """A session without a network: it counts passes as a real one does, and takes no time."""

    def __init__(self, score: Callable[[Sequence[int], int], torch.Tensor], max_positions: int | None) -> None:
        self.passes: list[Pass] = []
        self.max_positions = max_positions
        self._score = score
        self._tokens: list[int] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    def begin(self, prompt: Sequence[int]) -> None:
        del self._tokens[:], prompt

    def crop(self, length: int) -> None:
        del self._tokens[length:]

    def forward(self, sequence: Sequence[int], n_logits: int = 1) -> torch.Tensor:
        assert 1 <= n_logits <= len(sequence)
        assert self.max_positions is None or len(sequence) <= self.max_positions
        assert self._tokens == list(sequence[: len(self._tokens)]), "a cache must hold a prefix of the sequence"
        context = min(len(self._tokens), len(sequence) - n_logits)
        self._tokens = list(sequence)
        self.passes.append(Pass(len(sequence) - context, context, 0.0, prefill=context == 0))
        return self._score(sequence, n_logits)


@dataclass(slots=True)
class MockModel:
    """The part of `Model` that decoding uses; subclasses score."""

    name: str
    vocab_size: int
    eos: frozenset[int] = frozenset()
    max_positions: int | None = None
    kind: str = "transformers"
    tokenizer: object = None
    source: str = "mock"
    fingerprint: str = "mock"
    start: None = None

    def session(self) -> MockSession:
        return MockSession(self.score, self.max_positions)

    def network_session(self) -> MockSession:
        return self.session()

    def score(self, sequence: Sequence[int], n_logits: int) -> torch.Tensor:
        raise NotImplementedError


@dataclass(slots=True)
class TableModel(MockModel):
    """The law of the next token is ``table[last but one, last]`` (shape [vocab, vocab, vocab])."""

    table: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def score(self, sequence: Sequence[int], n_logits: int) -> torch.Tensor:
        first = len(sequence) - n_logits + 1
        return torch.stack([self.law(sequence[:length]).log() for length in range(first, len(sequence) + 1)])

    def law(self, prefix: Sequence[int]) -> torch.Tensor:
        """The law [vocab] of the token after `prefix` (at least one token)."""
        return self.table[prefix[-2] if len(prefix) > 1 else 0, prefix[-1]]


def table_model(name: str, seed: int, *, vocab: int = 3, spread: float = 1.0, **fields: object) -> TableModel:
    """A table of random laws in float64; those of models with near seeds have nothing in common."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((vocab, vocab, vocab), generator=generator, dtype=torch.float64) * spread
    return TableModel(name=name, vocab_size=vocab, table=logits.softmax(-1), **fields)


@dataclass(slots=True)
class TableLookup:
    """A lookup drafter that proposes the most likely tokens of a table, at most `longest` of them."""

    name: str
    table: TableModel
    longest: int = sys.maxsize
    kind: str = "lookup"
    eos: frozenset[int] = frozenset()
    source: str = "mock"
    tokenizer: object = None
    max_positions: int | None = None
    start: None = None

    @property
    def vocab_size(self) -> int:
        return self.table.vocab_size

    def session(self) -> MockLookupSession:
        return MockLookupSession(self._propose)

    def _propose(self, text: Sequence[int], length: int) -> list[int]:
        written = list(text)
        for _ in range(min(length, self.longest)):
            written.append(int(self.table.law(written).argmax()))
        return written[len(text) :]


class MockLookupSession:
    """A text that grows and shrinks, and a rule that continues it."""

    def __init__(self, propose: Callable[[Sequence[int], int], list[int]]) -> None:
        self._propose = propose
        self._text: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        self._text += tokens

    def crop(self, length: int) -> None:
        del self._text[length:]

    def propose(self, length: int) -> list[int]:
        return self._propose(self._text, length)


@dataclass(slots=True)
class ScheduledModel(MockModel):
    """A model that writes its own ids and accepts its drafters' tokens by survival curves.

    `curves` maps a drafter to its survival curve S[0] = 1, S[1], ..., or to one rate; `origin` maps every id to the
    drafter it counts for (ids of a model that drafts below a drafter count for the latter). Within one draft the curve
    restarts where the drafter changes.
    """

    own: range = range(0)
    curves: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    origin: Mapping[int, str] = field(default_factory=dict)
    random: random.Random = field(default_factory=random.Random)

    def score(self, sequence: Sequence[int], n_logits: int) -> torch.Tensor:
        drafted = sequence[len(sequence) - n_logits + 1 :]
        picks = [self.random.choice(self.own) for _ in range(n_logits)]
        place = 0
        for index, token in enumerate(drafted):
            restarts = index == 0 or self.origin[token] != self.origin[drafted[index - 1]]
            place = 1 if restarts else place + 1
            if self.random.random() >= self._chance(self.origin[token], place):
                break
            picks[index] = token
        return torch.nn.functional.one_hot(torch.tensor(picks), self.vocab_size).double()

    def _chance(self, drafter: str, place: int) -> float:
        """The chance of the token at `place`, given those before it."""
        curve = self.curves[drafter]
        if not isinstance(curve, int | float):
            before, now = curve[place - 1], curve[place]
            return now / before if before else 0.0
        return float(curve)


@dataclass(slots=True)
class ScheduledLookup:
    """A lookup drafter that proposes its own ids, as many as `lengths` says (None: all that were asked)."""

    name: str
    vocab_size: int
    own: range
    lengths: Callable[[random.Random, int], int] | None = None
    random: random.Random = field(default_factory=random.Random)
    kind: str = "lookup"
    eos: frozenset[int] = frozenset()
    max_positions: int | None = None
    source: str = "mock"
    tokenizer: object = None

    def session(self) -> MockLookupSession:
        return MockLookupSession(self._propose)

    def _propose(self, _: Sequence[int], length: int) -> list[int]:
        count = length if self.lengths is None else min(length, self.lengths(self.random, length))
        return [self.random.choice(self.own) for _ in range(count)]


def scheduled_models(
    acceptance: Mapping[tuple[str, str], float | Sequence[float]],
    *,
    below: Mapping[str, Sequence[str]] | None = None,
    lookup_lengths: Callable[[random.Random, int], int] | None = None,
    seed: int = 0,
) -> dict[str, ScheduledModel | ScheduledLookup]:
    """Models for greedy decoding whose acceptance is that of `acceptance`, by (drafter, verifier).

    A model called "lookup" proposes. `below` maps a drafter to the models that draft for it: whoever reviews it counts
    their tokens as its own, unless `acceptance` names them as drafters of that verifier themselves.

    >>> models = scheduled_models({("s", "m"): 0.8, ("m", "t"): 0.6}, below={"m": ["s"]})
    """
    names = list(dict.fromkeys(itertools.chain.from_iterable(acceptance)))
    ids = {name: range(IDS * index, IDS * (index + 1)) for index, name in enumerate(names)}
    size = IDS * len(names)
    made: dict[str, ScheduledModel | ScheduledLookup] = {}
    for index, name in enumerate(names):
        dice = random.Random(1000 * seed + index)
        if name == "lookup":
            made[name] = ScheduledLookup(name, size, ids[name], lookup_lengths, dice)
            continue
        curves = {drafter: curve for (drafter, verifier), curve in acceptance.items() if verifier == name}
        made[name] = ScheduledModel(
            name, size, own=ids[name], curves=curves, origin=_origins(curves, ids, below or {}), random=dice
        )
    return made


def _origins(
    drafters: Mapping[str, object], ids: Mapping[str, range], below: Mapping[str, Sequence[str]]
) -> dict[int, str]:
    origins: dict[int, str] = {}
    for drafter in drafters:
        for member in (*below.get(drafter, ()), drafter):
            if member == drafter or member not in drafters:
                origins |= dict.fromkeys(ids[member], drafter)
    return origins


class Branch:
    """Dice that follow one path through all outcomes and note the branches not taken."""

    def __init__(self, path: Sequence[int]) -> None:
        self.weight = 1.0
        self.open: list[list[int]] = []
        self._path = list(path)
        self._at = 0

    def accept(self, probability: float) -> bool:
        return self._choose([1 - probability, probability]) == 1

    def draw(self, law: torch.Tensor) -> int:
        return self._choose(law.tolist())

    def _choose(self, chances: list[float]) -> int:
        if self._at == len(self._path):
            options = [option for option, chance in enumerate(chances) if chance > 0]
            self.open += [[*self._path, option] for option in options[1:]]
            self._path.append(options[0])
        option = self._path[self._at]
        self._at += 1
        self.weight *= chances[option]
        return option


def every_outcome(program: Callable[[Branch], T]) -> dict[T, float]:
    """The exact law of what `program` returns, summed over all outcomes of its dice."""
    law: dict[T, float] = {}
    paths: list[list[int]] = [[]]
    while paths:
        branch = Branch(paths.pop())
        result = program(branch)
        paths += branch.open
        law[result] = law.get(result, 0.0) + branch.weight
    return law
