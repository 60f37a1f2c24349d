"""The lookup drafter (Max-Gram of Cascade Speculative Drafting): it copies what followed an earlier match."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from hsdopt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

Occurrence = Literal["latest", "earliest"]
Semantics = Literal["paper", "reference"]


@dataclass(frozen=True, slots=True, eq=False)
class Bigrams:
    """The most frequent successor of every token in some training text; of equals, the smallest id.

    Two plain arrays, so that a table can be stored beside a profile.

    Parameters
    ----------
    previous, following : array of int64, shape [n]
        Tokens and their successors, `previous` rising.

    Examples
    --------
    >>> table = Bigrams.of([[1, 2, 1, 2, 1, 3]])
    >>> table.chain(1, 4)
    [2, 1, 2, 1]
    """

    previous: NDArray[np.int64]
    following: NDArray[np.int64]
    _successors: dict[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the arrays and turn them into a table."""
        rising = self.previous.ndim == 1 and bool(np.all(np.diff(self.previous) > 0))
        if not rising or self.previous.shape != self.following.shape:
            raise InvalidArgumentError(
                "expected two arrays of one length, the first rising, as bigrams;"
                f" got shapes {self.previous.shape} and {self.following.shape}"
            )
        table = dict(zip(self.previous.tolist(), self.following.tolist(), strict=True))
        object.__setattr__(self, "_successors", table)

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> Bigrams:
        """Count the successors in every sequence of token ids."""
        pairs = [np.column_stack((s[:-1], s[1:])) for s in map(np.asarray, sequences) if len(s) > 1]
        stacked = np.concatenate([np.empty((0, 2), np.int64), *pairs]).astype(np.int64)
        distinct, counts = np.unique(stacked, axis=0, return_counts=True)
        order = np.lexsort((distinct[:, 1], -counts, distinct[:, 0]))
        previous, first = np.unique(distinct[order, 0], return_index=True)
        return cls(previous, distinct[order, 1][first])

    def chain(self, token: int, length: int) -> list[int]:
        """Return up to `length` successors, each of the one before; it ends where a token was never seen."""
        chained: list[int] = []
        while len(chained) < length and (found := self._successors.get(token)) is not None:
            chained.append(found)
            token = found
        return chained


NO_BIGRAMS = Bigrams(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Lookup:
    """How a lookup drafter searches.

    Parameters
    ----------
    bigrams : Bigrams
        What to propose where nothing matches.
    max_ngram, min_ngram : int
        The longest and the shortest suffix that is searched for.
    occurrence : {"latest", "earliest"}
        Which of several matches to copy from.
    semantics : {"paper", "reference"}
        ``"paper"``: the longest match in prompt and output; bigrams if there is none. ``"reference"`` (the
        authors' code): the earliest match in the prompt, else the earliest in the output, else bigrams.
    """

    bigrams: Bigrams = NO_BIGRAMS
    max_ngram: int = 8
    min_ngram: int = 1
    occurrence: Occurrence = "latest"
    semantics: Semantics = "paper"

    def __post_init__(self) -> None:
        """Check the limits.

        Raises
        ------
        InvalidArgumentError
            If a limit or a word is outside its domain.
        """
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise InvalidArgumentError(
                f"expected 1 <= min_ngram <= max_ngram; got {self.min_ngram} and {self.max_ngram}"
            )
        if self.occurrence not in ("latest", "earliest"):
            raise InvalidArgumentError(f"expected occurrence latest or earliest; got {self.occurrence!r}")
        if self.semantics not in ("paper", "reference"):
            raise InvalidArgumentError(f"expected semantics paper or reference; got {self.semantics!r}")

    def session(self) -> LookupSession:
        """Open a session over an empty text."""
        return LookupSession(self)


class LookupSession:
    """An index over one growing text, prompt and output.

    Adding a token, dropping one and proposing take time that does not depend on the length of the text.
    Every n-gram maps to the rising list of places that it leads to, so dropping tokens undoes exactly what adding
    them did.

    Examples
    --------
    >>> session = Lookup().session()
    >>> session.extend([5, 6, 7, 8, 5, 6])
    >>> session.propose(3)
    [7, 8, 5]
    """

    def __init__(self, lookup: Lookup) -> None:
        self.lookup = lookup
        self._tokens: list[int] = []
        self._prompt_length = 0
        self._places: dict[tuple[int, ...], list[int]] = {}

    @property
    def tokens(self) -> tuple[int, ...]:
        """The text so far."""
        return tuple(self._tokens)

    @property
    def room(self) -> int:
        """How many more tokens fit: a lookup has no limit."""
        return sys.maxsize

    def begin(self, prompt: Sequence[int]) -> None:
        """Start afresh from a prompt, which reference semantics search first."""
        self.crop(0)
        self.extend(prompt)
        self._prompt_length = len(prompt)

    def follow(self, sequence: Sequence[int]) -> None:
        """Make `sequence` the text: drop what differs from it and add what is missing."""
        shared = 0
        limit = min(len(self._tokens), len(sequence))
        if self._tokens[:limit] == list(sequence[:limit]):
            shared = limit
        else:
            shared = next(i for i in range(limit) if self._tokens[i] != sequence[i])
        self.crop(shared)
        self.extend(sequence[shared:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            for ngram in self._suffixes():
                self._places.setdefault(ngram, []).append(len(self._tokens))
            self._tokens.append(token)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens (all of them, if there are fewer).

        Raises
        ------
        InvalidArgumentError
            If `length` is negative.
        """
        if length < 0:
            raise InvalidArgumentError(f"expected a length of at least 0 to crop to; got {length}")
        while len(self._tokens) > length:
            self._tokens.pop()
            for ngram in self._suffixes():
                places = self._places[ngram]
                places.pop()
                if not places:
                    del self._places[ngram]
        self._prompt_length = min(self._prompt_length, length)

    def propose(self, length: int) -> list[int]:
        """Return at most `length` tokens to follow the text; a shorter proposal is a prefix of a longer one.

        A match near the end of the text goes on into its own proposal, as a text that repeats itself does.

        Raises
        ------
        InvalidArgumentError
            If `length` is negative.
        """
        if length < 0:
            raise InvalidArgumentError(f"expected a draft length of at least 0; got {length}")
        start = self._match()
        if start is None:
            return self.lookup.bigrams.chain(self._tokens[-1], length) if self._tokens else []
        period = len(self._tokens) - start
        copied = self._tokens[start : start + length]
        return [copied[index % period] for index in range(length)] if copied else []

    def _suffixes(self) -> list[tuple[int, ...]]:
        """Every n-gram at the end of the text, the longest first."""
        tail = tuple(self._tokens[-self.lookup.max_ngram :])
        return [tail[-n:] for n in range(len(tail), self.lookup.min_ngram - 1, -1)]

    def _match(self) -> int | None:
        """Where the best match goes on, or None."""
        found = [places for ngram in self._suffixes() if (places := self._places.get(ngram))]
        if self.lookup.semantics == "reference":
            in_prompt = (places[0] for places in found if places[0] < self._prompt_length)
            return next(in_prompt, found[0][0] if found else None)
        if not found:
            return None
        return found[0][-1 if self.lookup.occurrence == "latest" else 0]
