"""Plans: small immutable trees that say who drafts for whom, their notation and their JSON.

Three kinds of node decode: `Level` (every lossless stack), `Bild` (Big Little Decoder) and
`Adaptive` (a table from tokens owed to the next draft). Everything else in hsdopt reads plans.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Real
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from hsdopt.errors import PlanError
from hsdopt.files import excerpt, parse_json

__all__ = [
    "LONGEST_DRAFT",
    "LONGEST_NAME",
    "LONGEST_TEXT",
    "LOOKUP",
    "MOST_CHOICES",
    "MOST_LEVELS",
    "MOST_SEGMENTS",
    "Adaptive",
    "Bild",
    "Choice",
    "Level",
    "Plan",
    "Segment",
    "Stop",
    "format_plan",
    "parse_plan",
    "plan_from_json",
    "plan_to_json",
]

LOOKUP = "lookup"
"""The reserved name of the Max-Gram drafter, which proposes but never verifies."""

MOST_LEVELS = 32
"""The most models above one another in a plan, the target among them."""

MOST_SEGMENTS = 1024
"""The most segments in all the rows of a plan."""

MOST_CHOICES = 16_384
"""The most entries in all the tables of an adaptive plan."""

LONGEST_DRAFT = 4096
"""The most tokens or rounds that a segment, a choice or a stint may ask for."""

LONGEST_NAME = 512
"""Characters of the longest name of a model."""

LONGEST_TEXT = 4 * 2**20
"""Characters of the longest text that is read as a plan."""

Stop = Literal["truncate", "overshoot", "rounds", "until"]
Semantics = Literal["paper", "reference"]

_SUFFIX: dict[Stop, str] = {"truncate": "{}", "overshoot": "{}+", "rounds": "{}x", "until": "..{}"}
_STOP_OF_SIGN: dict[str, Stop] = {"": "truncate", "+": "overshoot", "x": "rounds", "..": "until"}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_LENGTH = re.compile(r"(?P<until>\.\.)?(?P<count>[0-9]+)(?P<suffix>[+x]?)")
_NUMBER = re.compile(r"[+-]?(?:inf|[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?)")
_BILD = re.compile(r"bild\s*\(")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, those that turn the direction of a line, and halves of surrogate pairs."""
_FORMAT = "hsdopt-plan"
_WINDOW = 64
"""Characters of a text shown around a fault."""
_REFERENCE_RUN = 10  # small tokens that the authors' code of Big Little Decoder writes at once, unless told
T = TypeVar("T")


class Plan:
    """What every plan can do; see `Level`, `Bild` and `Adaptive`."""

    __slots__ = ()

    @property
    def target(self) -> str:
        """The name of the model whose output the plan speeds up."""
        raise NotImplementedError

    @property
    def models(self) -> tuple[str, ...]:
        """The names of all models, from the bottom of the stack to the target, each once."""
        raise NotImplementedError

    @property
    def lossless(self) -> bool:
        """Whether the target's output law is kept."""
        return True

    @property
    def label(self) -> str:
        """A short name for tables and figures: the notation, or what stands for a plan that has none."""
        return format_plan(self)

    @property
    def description(self) -> str:
        """The plan in full for people: the notation, or an adaptive plan's tables in words."""
        return format_plan(self)

    @property
    def family(self) -> str:
        """The smallest family that contains the plan."""
        raise NotImplementedError

    @property
    def row(self) -> tuple[Segment, ...]:
        """The segments of the target's draft; none where the draft has no set length."""
        return ()

    @property
    def tables(self) -> tuple[tuple[str, tuple[Choice | None, ...]], ...]:
        """Per drafter that chooses as it goes, its choices at 1, 2, ... tokens owed."""
        return ()

    @property
    def stack(self) -> Level | None:
        """The plan itself if it is a stack of set rows."""
        return None

    @property
    def bild(self) -> Bild | None:
        """The plan itself if it is Big Little Decoder."""
        return None

    @property
    def drafters(self) -> tuple[str, ...]:
        """Who drafts for the target, first tokens first."""
        return tuple(segment.level.model for segment in self.row)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The (drafter, verifier) pairs whose acceptance decides, each once."""
        return ()

    @property
    def verifiers(self) -> tuple[str, ...]:
        """The models that may score several tokens in one pass, each once."""
        return (self.target,)

    @property
    def scoring(self) -> tuple[str, ...]:
        """The models that score drafts or decode, which no lookup drafter can."""
        return self.verifiers

    @property
    def lenient(self) -> tuple[Level, ...]:
        """The levels that review leniently."""
        return tuple(level for level in self.walk() if level.lenience != 1)

    @property
    def depth(self) -> int:
        """Levels of drafting; 0 is autoregression."""
        return len(self.models) - 1

    @property
    def longest_draft(self) -> int | None:
        """The most tokens one draft for the target can hold (None if that is open-ended)."""
        return None

    @property
    def longest_anywhere(self) -> int:
        """The most tokens one draft at any level can hold; 0 where none has a set length."""
        return max((level.longest_draft or 0 for level in self.walk()), default=0)

    @property
    def drafted(self) -> int:
        """The draft lengths of all levels together."""
        return 0

    @property
    def size(self) -> tuple[int, int, str]:
        """What decides between plans that tie: models, tokens drafted at all levels, then the notation."""
        return len(self.models), self.drafted, format_plan(self)

    def walk(self) -> Iterator[Level]:
        """Yield every level of a stack, the target's first, depth first; other plans have none."""
        yield from ()

    def __str__(self) -> str:
        """Return `label`."""
        return self.label

    @staticmethod
    def from_k_matrix(matrix: Sequence[Sequence[int]], models: Sequence[str]) -> Level:
        """Return the plan of a CS Drafting k-matrix.

        Row i is the row of ``models[i]`` (the target first); column j belongs to ``models[j + 1]``.
        Stops are cumulative, as in the authors' code: ``[5, 14, 10]`` is at least 5 tokens from the
        first drafter, then the second until 14 in all, then 10 from the lookup drafter, whose own
        column is a plain count.

        Parameters
        ----------
        matrix : sequence of rows
            One row per verifier, one column per drafter; 0 means not used.
        models : sequence of str
            Names from the target down, one more than the matrix has columns.

        Raises
        ------
        PlanError
            If the shape does not fit, or a model would draft for one below itself.

        Examples
        --------
        >>> matrix = [[5, 14, 10], [0, 1, 10], [0, 0, 10]]
        >>> print(Plan.from_k_matrix(matrix, ["xxl", "base", "small", "lookup"]))
        xxl(base:5+(small:1+(lookup:10), lookup:10), small:..14(lookup:10), lookup:10)
        """
        return _from_k_matrix(matrix, models)


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of a row: `length` tokens (or rounds) asked of a drafter.

    Attributes
    ----------
    level : Level
        The drafter, with whatever drafts for it.
    length : int
        Tokens asked for; rounds if `stop` is "rounds"; tokens of the whole row so far if "until".
    stop : {"truncate", "overshoot", "rounds", "until"}
        Pass up exactly `length` tokens; all it holds once it holds `length`; what `length` rounds
        gave; or all it holds once the row holds `length` tokens in all.
    """

    level: Level
    length: int
    stop: Stop = "truncate"

    def __post_init__(self) -> None:
        """Refuse lengths and conventions that mean nothing."""
        if not isinstance(self.level, Level):
            raise PlanError(f"expected a Level as the drafter of a segment; got {excerpt(self.level)}")
        if not isinstance(self.stop, str) or self.stop not in _SUFFIX:
            raise PlanError(f"expected a convention out of {', '.join(_SUFFIX)}; got {excerpt(self.stop)}")
        if not _is_length(self.length):
            _refuse_length(self.length, f"a draft length of at least 1 for {_brief(self.level.model)}")
        if self.stop in ("overshoot", "rounds") and not self.level.row:
            model = _brief(self.level.model)
            raise PlanError(
                f"expected a drafter below {model}, as in {model}:{self.length}+(small:3); "
                f"without one it passes up exactly {self.length} tokens: write {model}:{self.length}"
            )


class _Shape(NamedTuple):
    """What is known of a level from what is known of the levels below it, so that no level walks its whole tree."""

    names: frozenset[str]
    depth: int
    segments: int
    longest_draft: int


@dataclass(frozen=True, slots=True)
class Level(Plan):
    """A model and the row of segments that drafts for it; with an empty row it decodes alone.

    Attributes
    ----------
    model : str
        Name of the model in the profile.
    row : tuple of Segment
        Segments of one draft, first tokens first.
    lenience : float
        At least 1; how leniently this model reviews its drafts (never the target).
    """

    model: str
    row: tuple[Segment, ...] = ()
    lenience: float = 1.0
    _shape: _Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse stacks that cannot run."""
        _require_name(self.model, "a model name")
        object.__setattr__(self, "row", _row_of(self.row))
        object.__setattr__(self, "lenience", _real(self.lenience, "lenience to be a finite number of at least 1"))
        if self.model == LOOKUP and self.row:
            raise PlanError("expected a model that can verify above a draft; lookup only proposes")
        if not (math.isfinite(self.lenience) and self.lenience >= 1):
            raise PlanError(f"expected lenience to be a finite number of at least 1; got {self.lenience}")
        if self.lenience != 1 and all(segment.level.model == LOOKUP for segment in self.row):
            raise PlanError(
                f"expected a model below {_brief(self.model)} for its lenience (lookup is never lenient); drop it"
            )
        object.__setattr__(self, "_shape", _shape_of(self.model, self.row))

    @property
    def target(self) -> str:
        """The name of the model at the top."""
        return self.model

    @property
    def models(self) -> tuple[str, ...]:
        """Names from the bottom to the top, each once."""
        names = [name for segment in reversed(self.row) for name in segment.level.models]
        return tuple(dict.fromkeys([*names, self.model]))

    @property
    def family(self) -> str:
        """The smallest family that contains the plan.

        Examples
        --------
        >>> [parse_plan(text).family for text in ("t", "t(d:4)", "t(d:4(e:2))", "t(d:4, e:2)", "t(d:4+(e:2))")]
        ['autoregression', 'speculative', 'hierarchy', 'cascade', 'cascade']
        """
        rows = [level.row for level in self.walk()]
        if any(len(row) > 1 or any(segment.stop != "truncate" for segment in row) for row in rows):
            return "cascade"
        return ("autoregression", "speculative")[self.depth] if self.depth < 2 else "hierarchy"

    @property
    def stack(self) -> Level:
        """The plan itself."""
        return self

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The (drafter, verifier) pairs, the target's first."""
        return tuple(dict.fromkeys((below, level.model) for level in self.walk() for below in level.drafters))

    @property
    def verifiers(self) -> tuple[str, ...]:
        """The target, and every model with a draft to review."""
        return tuple(dict.fromkeys([self.model, *(level.model for level in self.walk() if level.row)]))

    @property
    def drafted(self) -> int:
        """The draft lengths of all levels together."""
        return sum(segment.length for level in self.walk() for segment in level.row)

    @property
    def depth(self) -> int:
        """Levels of drafting; 0 is autoregression."""
        return self._shape.depth

    @property
    def longest_draft(self) -> int | None:
        """The most tokens one draft for this level can hold (None if rounds leave it open-ended)."""
        return self._shape.longest_draft

    def walk(self) -> Iterator[Level]:
        """Yield every level, this one first, depth first."""
        yield self
        for segment in self.row:
            yield from segment.level.walk()


@dataclass(frozen=True, slots=True)
class Bild(Plan):
    """Big Little Decoder: a small model writes until it is unsure, a large one takes over and reviews.

    Attributes
    ----------
    large, small : str
        Names of the two models.
    fallback : float
        The large model steps in when the small model's top probability is below this.
    rollback : float
        A small token is withdrawn when its negative log-likelihood (nats) under the large model
        exceeds this; infinity turns rollback off.
    max_draft : int or None
        The most small tokens of one stint; None for no limit ("paper") or 10 ("reference").
    stride : int or None
        A fixed stint length in place of fallback (an ablation of the paper).
    semantics : {"paper", "reference"}
        The paper's rules, or those of the authors' public code.
    """

    large: str
    small: str
    fallback: float = 0.6
    rollback: float = 5.0
    max_draft: int | None = None
    stride: int | None = None
    semantics: Semantics = "paper"

    def __post_init__(self) -> None:
        """Refuse thresholds outside their domain."""
        _require_name(self.large, "a model name as the large model of bild(...)")
        _require_name(self.small, "a model name as the small model of bild(...)")
        if self.large == self.small:
            raise PlanError(f"expected two different models in bild(...); got {_brief(self.large)} twice")
        if LOOKUP in (self.large, self.small):
            raise PlanError("expected two language models in bild(...); lookup has no probabilities")
        for name, domain in (
            ("fallback", "fallback between 0 and 1"),
            ("rollback", "rollback of at least 0 (inf turns it off)"),
        ):
            object.__setattr__(self, name, _real(getattr(self, name), domain))
        if not 0 <= self.fallback <= 1:
            raise PlanError(f"expected fallback between 0 and 1; got {self.fallback}")
        if not self.rollback >= 0:
            raise PlanError(f"expected rollback of at least 0 (inf turns it off); got {self.rollback}")
        for name, value in (("max_draft", self.max_draft), ("stride", self.stride)):
            if value is not None and not _is_length(value):
                _refuse_length(value, f"{name} of at least 1")
        if not isinstance(self.semantics, str) or self.semantics not in ("paper", "reference"):
            raise PlanError(f"expected semantics paper or reference; got {excerpt(self.semantics)}")

    @property
    def target(self) -> str:
        """The large model."""
        return self.large

    @property
    def models(self) -> tuple[str, ...]:
        """The small model, then the large one."""
        return (self.small, self.large)

    @property
    def family(self) -> str:
        """Big Little Decoder's own."""
        return "bild"

    @property
    def bild(self) -> Bild:
        """The plan itself."""
        return self

    @property
    def drafters(self) -> tuple[str, ...]:
        """The small model."""
        return (self.small,)

    @property
    def scoring(self) -> tuple[str, ...]:
        """Both models."""
        return self.models

    @property
    def longest_run(self) -> int | None:
        """The most small tokens before the large model reviews: the stride, else the limit; None is no limit."""
        longest = self.max_draft if self.stride is None else self.stride
        return _REFERENCE_RUN if longest is None and self.semantics == "reference" else longest

    @property
    def lossless(self) -> bool:
        """Never: quality is traded for speed."""
        return False


@dataclass(frozen=True, slots=True)
class Choice:
    """The next draft of an adaptive level: `length` tokens from `drafter`."""

    drafter: str
    length: int

    def __post_init__(self) -> None:
        """Refuse lengths and names that mean nothing."""
        _require_name(self.drafter, "a model name as the drafter of a choice")
        if not _is_length(self.length):
            _refuse_length(self.length, f"a draft length of at least 1 for {_brief(self.drafter)}")

    @property
    def row(self) -> tuple[Segment, ...]:
        """The draft as the only segment of a row."""
        return (Segment(Level(self.drafter), self.length),)


@dataclass(frozen=True, slots=True)
class Adaptive(Plan):
    """A stack in which every level chooses its next draft from the tokens it still owes.

    Attributes
    ----------
    model : str
        The target.
    draft : Choice or None
        The target's draft, the same every round; None is autoregression.
    tables : tuple of (str, tuple of Choice or None)
        Per drafter, the choice at 1, 2, ... tokens owed (None: one token by itself).
    """

    model: str
    draft: Choice | None
    tables: tuple[tuple[str, tuple[Choice | None, ...]], ...] = ()

    def __post_init__(self) -> None:
        """Refuse tables that do not cover what can be asked, or that run in a circle."""
        _require_name(self.model, "a model name")
        if self.model == LOOKUP:
            raise PlanError("expected a language model as the target; lookup only proposes")
        if self.draft is not None and not isinstance(self.draft, Choice):
            raise PlanError(
                f"expected a Choice or None as the draft of {_brief(self.model)}; got {excerpt(self.draft)}"
            )
        object.__setattr__(self, "tables", _tables_of(self.tables))
        tables = dict(self.tables)
        if len(tables) != len(self.tables) or self.model in tables:
            raise PlanError("expected one table per drafter and none for the target")
        places = {name: place for place, (name, _) in enumerate(self.tables)}
        for owner, choice in self._choices():
            limit = len(tables.get(choice.drafter, ()))
            drafter = _brief(choice.drafter)
            if choice.drafter != LOOKUP and choice.length > limit:
                raise PlanError(
                    f"expected a table for {drafter} up to {choice.length} tokens owed; got {limit} entries"
                )
            if owner in places and places.get(choice.drafter, -1) >= places[owner]:
                raise PlanError(f"expected {drafter} to stand before {_brief(owner)}, for which it drafts")

    def _choices(self) -> Iterator[tuple[str, Choice]]:
        if self.draft is not None:
            yield self.model, self.draft
        for owner, table in self.tables:
            for choice in table:
                if choice is not None:
                    yield owner, choice

    @property
    def label(self) -> str:
        """The target's draft, and a digest that tells tables apart, as in ``adaptive target(mid:8) #1a2b``."""
        draft = "" if self.draft is None else f"({_quote(self.draft.drafter)}:{self.draft.length})"
        digest = hashlib.sha256(format_plan(self).encode()).hexdigest()[:4]
        return f"adaptive {_quote(self.model)}{draft} #{digest}"

    @property
    def description(self) -> str:
        """The tables in words.

        Examples
        --------
        >>> table = (None, Choice("lookup", 1), Choice("lookup", 1))
        >>> Adaptive("t", Choice("d", 3), (("d", table),)).description
        'adaptive t(d:3); d owing 1: alone, 2-3: lookup:1'
        """
        if self.draft is None:
            return format_plan(self)
        words = [f"adaptive {self.model}({self.draft.drafter}:{self.draft.length})"]
        for name, row in self.tables:
            starts = [place for place in range(len(row)) if place == 0 or row[place] != row[place - 1]]
            parts = []
            for start, end in zip(starts, [*starts[1:], len(row)], strict=True):
                choice = row[start]
                owed = f"{start + 1}" if end == start + 1 else f"{start + 1}-{end}"
                parts.append(f"{owed}: " + ("alone" if choice is None else f"{choice.drafter}:{choice.length}"))
            words.append(f"{name} owing {', '.join(parts)}")
        return "; ".join(words)

    @property
    def family(self) -> str:
        """A family of its own, unless the target decodes alone."""
        return "autoregression" if self.draft is None else "adaptive"

    @property
    def row(self) -> tuple[Segment, ...]:
        """The target's draft."""
        return () if self.draft is None else self.draft.row

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The (drafter, verifier) pairs, the target's first."""
        return tuple(dict.fromkeys((choice.drafter, owner) for owner, choice in self._choices()))

    @property
    def verifiers(self) -> tuple[str, ...]:
        """The target, and every model with a table."""
        return tuple(name for name in self.models if name in (self.model, *dict(self.tables)))

    @property
    def longest_draft(self) -> int:
        """The tokens of the target's draft."""
        return 0 if self.draft is None else self.draft.length

    @property
    def longest_anywhere(self) -> int:
        """The longest draft that the target or a table asks for."""
        return max((choice.length for _, choice in self._choices()), default=0)

    @property
    def drafted(self) -> int:
        """The target's draft, and the entries of all tables."""
        return self.longest_draft + sum(len(table) for _, table in self.tables)

    def table(self, model: str) -> tuple[Choice | None, ...]:
        """Return the choices of `model` at 1, 2, ... tokens owed."""
        return dict(self.tables)[model]

    @property
    def target(self) -> str:
        """The name of the model at the top."""
        return self.model

    @property
    def models(self) -> tuple[str, ...]:
        """Models that can come into play, from the bottom to the target."""
        used = {choice.drafter for _, choice in self._choices()}
        order = [LOOKUP, *(name for name, _ in self.tables)]
        return (*(name for name in order if name in used), self.model)


def _brief(name: str, *, limit: int = 60) -> str:
    """Return a name as messages show it."""
    shown = "".join(map(_visible, name[:limit]))
    return shown if len(name) <= limit else f"{shown}..."


@lru_cache(maxsize=1024)  # plans are built by the thousand of a few names
def _is_name(value: str) -> bool:
    return bool(value.strip()) and len(value) <= LONGEST_NAME and _UNPRINTABLE.search(value) is None


def _require_name(value: object, what: str) -> None:
    if isinstance(value, str) and _is_name(value):
        return
    if not isinstance(value, str) or not value.strip():
        raise PlanError(f"expected {what}; got {excerpt(value)}")
    if len(value) > LONGEST_NAME:
        raise PlanError(f"expected {what} of at most {LONGEST_NAME} characters; got {len(value)}: {excerpt(value)}")
    unprintable = _UNPRINTABLE.search(value)
    if unprintable is not None:
        raise PlanError(f"expected {what} without control characters; got {unprintable[0]!a} in {excerpt(value)}")


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LONGEST_DRAFT


def _refuse_length(value: object, what: str) -> NoReturn:
    bound = f" and at most {LONGEST_DRAFT}" if isinstance(value, int) and value > LONGEST_DRAFT else ""
    raise PlanError(f"expected {what}{bound}; got {excerpt(value)}")


def _real(value: object, what: str) -> float:
    if type(value) is float and value == value:  # noqa: PLR0124 -- the common case, and no NaN
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise PlanError(f"expected {what}; got {excerpt(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.nan
    if math.isnan(number):
        raise PlanError(f"expected {what}; got {excerpt(value)}")
    return number


def _row_of(value: object) -> tuple[Segment, ...]:
    if not isinstance(value, (tuple, list)):
        raise PlanError(f"expected a row of segments; got {excerpt(value)}")
    for segment in value:
        if not isinstance(segment, Segment):
            raise PlanError(f"expected a Segment in a row; got {excerpt(segment)}")
    return tuple(value)


def _tables_of(value: object) -> tuple[tuple[str, tuple[Choice | None, ...]], ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise PlanError(f"expected tables as pairs of a drafter and its choices; got {excerpt(value)}")
    pairs = []
    for pair in value:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise PlanError(f"expected a table as a pair of a drafter and its choices; got {excerpt(pair)}")
        name, table = pair
        _require_name(name, "a model name as the drafter of a table")
        if name == LOOKUP or not isinstance(table, Sequence) or isinstance(table, str):
            raise PlanError(f"expected a table of choices of a language model; got {_brief(name)}: {excerpt(table)}")
        for choice in table:
            if choice is not None and not isinstance(choice, Choice):
                raise PlanError(f"expected a Choice or None in the table of {_brief(name)}; got {excerpt(choice)}")
        pairs.append((name, tuple(table)))
    total = sum(len(table) for _, table in pairs)
    if total > MOST_CHOICES:
        raise PlanError(f"expected at most {MOST_CHOICES} entries in the tables of a plan; got {total}")
    return tuple(pairs)


def _shape_of(model: str, row: tuple[Segment, ...]) -> _Shape:
    """Return the shape of a level, or refuse one that is too large or whose model would draft for itself."""
    if not row:
        return _Shape(frozenset({model}), 0, 0, 0)
    below = [segment.level._shape for segment in row]  # noqa: SLF001
    depth = 1 + max(shape.depth for shape in below)
    segments = sum(1 + shape.segments for shape in below)
    if depth >= MOST_LEVELS:
        raise PlanError(f"expected at most {MOST_LEVELS} models above one another; {_brief(model)} stands above more")
    if segments > MOST_SEGMENTS:
        raise PlanError(f"expected at most {MOST_SEGMENTS} segments in a plan; got {segments} below {_brief(model)}")
    if any(model in shape.names for shape in below):
        raise PlanError(f"expected {_brief(model)} at most once in a stack; it would draft for itself")
    held = 0
    for segment in row:
        asked = max(segment.length - held, 0) if segment.stop == "until" else segment.length
        held += _longest_request(segment.level, asked, segment.stop)
    return _Shape(frozenset((model,)).union(*[shape.names for shape in below]), depth, segments, held)


def _check_top(plan: Plan) -> Plan:
    if isinstance(plan, Level) and plan.model == LOOKUP:
        raise PlanError("expected a language model as the target; lookup only proposes")
    if isinstance(plan, Level) and plan.lenience != 1:
        raise PlanError(
            f"expected no lenience on the target {_brief(plan.model)}: its output law would change; put it below"
        )
    return plan


def _longest_request(level: Level, length: int, stop: Stop) -> int:
    per_round = 1 + (level.longest_draft or 0)
    if stop == "truncate" or not level.row:
        return length
    if stop == "rounds":
        return length * per_round
    return length + per_round - 1 if length > 0 else 0


def _from_k_matrix(matrix: Sequence[Sequence[int]], models: Sequence[str]) -> Level:
    if isinstance(models, str) or not isinstance(models, Sequence) or not models:
        raise PlanError(f"expected names of models from the target down; got {excerpt(models)}")
    size = len(models) - 1
    if size >= MOST_LEVELS:
        raise PlanError(f"expected at most {MOST_LEVELS} models above one another; got {size + 1}")
    if not isinstance(matrix, Sequence) or not all(isinstance(row, Sequence) for row in matrix):
        raise PlanError(f"expected a k-matrix as rows of whole numbers; got {excerpt(matrix)}")
    if len(matrix) != size or any(len(row) != size for row in matrix):
        raise PlanError(f"expected a {size} x {size} k-matrix for {len(models)} models; got {len(matrix)} rows")
    if any(not isinstance(k, int) or isinstance(k, bool) or k < 0 for row in matrix for k in row):
        raise PlanError("expected whole numbers of at least 0 in the k-matrix")
    if any(matrix[i][j] for i in range(size) for j in range(i)):
        raise PlanError("expected zeros below the diagonal of the k-matrix: no model drafts for one below itself")

    def level(index: int) -> Level:
        row: list[Segment] = []
        held = 0
        for column in range(index, size):
            stop_at = matrix[index][column] if index < size else 0
            if not stop_at or (models[column + 1] != LOOKUP and stop_at <= held):
                continue
            drafter = level(column + 1)
            row.append(_k_segment(drafter, stop_at, first=not row))
            held = stop_at
        return Level(models[index], tuple(row))

    return level(0)


def _k_segment(drafter: Level, stop_at: int, *, first: bool) -> Segment:
    if drafter.model == LOOKUP:
        return Segment(drafter, stop_at)
    if first:
        return Segment(drafter, stop_at, "overshoot" if drafter.row else "truncate")
    return Segment(drafter, stop_at, "until")


def format_plan(plan: Plan) -> str:
    """Return the plan in notation; adaptive plans, which have none, as one line of JSON.

    What comes back is what `parse_plan` reads.

    Examples
    --------
    >>> format_plan(Level("big", (Segment(Level("small"), 5),)))
    'big(small:5)'
    """
    if isinstance(plan, Level):
        return _format_level(plan)
    if isinstance(plan, Bild):
        return _format_bild(plan)
    return json.dumps(plan_to_json(plan))


def _format_level(level: Level) -> str:
    return _quote(level.model) + _inner(level)


def _inner(level: Level) -> str:
    parts = [
        f"{_quote(segment.level.model)}:{_SUFFIX[segment.stop].format(segment.length)}{_inner(segment.level)}"
        for segment in level.row
    ]
    if level.lenience != 1:
        parts.append(f"lenience={_number(level.lenience)}")
    return f"({', '.join(parts)})" if parts else ""


def _number(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _format_bild(plan: Bild) -> str:
    parts = [_quote(plan.large), _quote(plan.small)]
    parts += [f"fallback={_number(plan.fallback)}", f"rollback={_number(plan.rollback)}"]
    parts += [f"{name}={value}" for name, value in (("max_draft", plan.max_draft), ("stride", plan.stride)) if value]
    if plan.semantics != "paper":
        parts.append(f"semantics={plan.semantics}")
    return f"bild({', '.join(parts)})"


def _quote(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) and name != "bild" else json.dumps(name)


def parse_plan(text: str) -> Plan:
    """Return the plan that `text` writes in notation (or in JSON).

    Raises
    ------
    PlanError
        With the text, a caret under the fault, and what was expected.

    Examples
    --------
    >>> parse_plan("target(mid:8(small:3))").models
    ('small', 'mid', 'target')
    """
    if not isinstance(text, str):
        raise PlanError(f"expected a plan in notation, such as target(draft:5); got {type(text).__name__}")
    if len(text) > LONGEST_TEXT:
        raise PlanError(f"expected a plan of at most {LONGEST_TEXT} characters; got {len(text)}: {excerpt(text)}")
    text = text.removeprefix("\ufeff")
    if text.lstrip().startswith("{"):
        return plan_from_json(parse_json(text, "a plan", error=PlanError))
    return _Parser(text).plan()


class _Parser:
    """A recursive-descent parser over the notation; errors carry the text and a caret."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.segments = 0

    def plan(self) -> Plan:
        self._space()
        start = self.at
        result: Plan = self._bild(start) if _BILD.match(self.text, start) else self._level(start)
        self._space()
        if self.at < len(self.text):
            self._fail("the end of the plan")
        return self._build(start, lambda: _check_top(result))

    def _level(self, start: int) -> Level:
        name = self._name()
        row, lenience = self._row()
        return self._build(start, lambda: Level(name, row, lenience))

    def _row(self) -> tuple[tuple[Segment, ...], float]:
        opening = self.at
        if not self._take("("):
            return (), 1.0
        self.depth += 1
        if self.depth >= MOST_LEVELS:
            self._fail(f"at most {MOST_LEVELS} models above one another", opening)
        segments: list[Segment] = []
        lenience: float | None = None
        while True:
            self._space()
            start = self.at
            name = self._name()
            if self._take("="):
                if name != "lenience":
                    self._fail("a segment such as draft:5, or lenience=NUMBER", start)
                if lenience is not None:
                    self._fail("lenience once", start)
                lenience = self._float()
            else:
                segments.append(self._segment(name, start))
            if self._take(")"):
                self.depth -= 1
                return tuple(segments), 1.0 if lenience is None else lenience
            self._need(",", "a comma or a closing parenthesis")

    def _segment(self, name: str, start: int) -> Segment:
        self.segments += 1
        if self.segments > MOST_SEGMENTS:
            self._fail(f"at most {MOST_SEGMENTS} segments in a plan", start)
        shown = _brief(name)
        self._need(":", f"a draft length after {shown}, such as {shown}:5")
        self._space()
        match = _LENGTH.match(self.text, self.at)
        if match is None or (match["until"] and match["suffix"]):
            self._fail("a draft length such as 5, 5+, 2x or ..14")
        count = match["count"].lstrip("0")
        if len(count) > len(str(LONGEST_DRAFT)):
            self._fail(f"a draft length of at most {LONGEST_DRAFT}")
        self.at = match.end()
        stop = _STOP_OF_SIGN[match["until"] or match["suffix"]]
        row, lenience = self._row()
        return self._build(start, lambda: Segment(Level(name, row, lenience), int(count or "0"), stop))

    def _bild(self, start: int) -> Bild:
        self.at += len("bild")
        self._need("(", "an opening parenthesis")
        names: list[str] = []
        options: dict[str, Any] = {}
        while True:
            self._space()
            mark = self.at
            name = self._name()
            if self._take("="):
                if name in options:
                    self._fail(f"{name} once", mark)
                options[name] = self._bild_option(name, mark)
            elif len(names) == 2:
                self._fail("two models, then options such as fallback=0.6", mark)
            else:
                names.append(name)
            if self._take(")"):
                break
            self._need(",", "a comma or a closing parenthesis")
        if len(names) != 2:
            self._fail("two models, as in bild(large, small, fallback=0.6, rollback=5)", start)
        return self._build(start, lambda: Bild(names[0], names[1], **options))

    def _bild_option(self, name: str, mark: int) -> object:
        if name in ("fallback", "rollback"):
            return self._float()
        if name in ("max_draft", "stride"):
            number = self._float()
            if not number.is_integer():
                self._fail(f"a whole number for {name}", mark)
            return int(number)
        if name != "semantics":
            self._fail("one of fallback, rollback, max_draft, stride, semantics", mark)
        return self._name()

    def _name(self) -> str:
        self._space()
        if self.text[self.at : self.at + 1] == '"':
            try:
                name, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if error.msg.startswith("Unterminated"):
                    self._fail("a closing quote")
                self._fail(f"a name in quotes as JSON writes it ({error.msg})", error.pos)
            return str(name)
        match = _PLAIN_NAME.match(self.text, self.at)
        if match is None:
            self._fail('a model name (names with other signs in quotes: "org/model")')
        self.at = match.end()
        return match[0]

    def _float(self) -> float:
        self._space()
        match = _NUMBER.match(self.text, self.at)
        if match is None:
            self._fail("a number")
        self.at = match.end()
        return float(match[0])

    def _build(self, start: int, make: Callable[[], T]) -> T:
        try:
            return make()
        except PlanError as error:
            if "\n" in str(error):
                raise
            raise PlanError(f"{error}\n{_pointed(self.text, start)}") from error

    def _space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def _take(self, sign: str) -> bool:
        self._space()
        if self.text.startswith(sign, self.at):
            self.at += len(sign)
            return True
        return False

    def _need(self, sign: str, expected: str) -> None:
        if not self._take(sign):
            self._fail(expected)

    def _fail(self, expected: str, at: int | None = None) -> NoReturn:
        where = self.at if at is None else at
        got = repr(self.text[where]) if where < len(self.text) else "the end"
        raise PlanError(f"expected {expected}; got {got}\n{_pointed(self.text, where)}")


def _pointed(text: str, at: int) -> str:
    """Return two lines: the text, or what of a long one stands around `at`, and a caret below it."""
    first, last = (0, len(text)) if len(text) <= _WINDOW else (max(at - _WINDOW // 2, 0), at + _WINDOW // 2)
    before = "  " + ("..." if first else "") + "".join(map(_visible, text[first:at]))
    after = "".join(map(_visible, text[at:last])) + ("..." if last < len(text) else "")
    return f"{before}{after}\n{' ' * sum(map(_columns, before))}^"


def _visible(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def _columns(character: str) -> int:
    """Return how many columns of a terminal a printable character takes."""
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return `plan` as plain JSON values; `plan_from_json` reads them back."""
    return {"format": _FORMAT, "version": 1, "plan": _node_to_json(plan)}


def _node_to_json(plan: Plan) -> dict[str, Any]:
    if isinstance(plan, Level):
        row = [
            {"level": _node_to_json(segment.level), "length": segment.length, "stop": segment.stop}
            for segment in plan.row
        ]
        return {"kind": "level", "model": plan.model, "row": row, "lenience": plan.lenience}
    if isinstance(plan, Bild):
        fields = {
            name: getattr(plan, name) for name in ("large", "small", "fallback", "max_draft", "stride", "semantics")
        }
        rollback = None if math.isinf(plan.rollback) else plan.rollback
        return {"kind": "bild", **fields, "rollback": rollback}
    if isinstance(plan, Adaptive):
        tables = {name: [_choice_to_json(choice) for choice in table] for name, table in plan.tables}
        return {
            "kind": "adaptive",
            "model": plan.model,
            "draft": _choice_to_json(plan.draft),
            "tables": tables,
        }
    raise PlanError(f"expected a Level, Bild or Adaptive plan; got {type(plan).__name__}")


def _choice_to_json(choice: Choice | None) -> dict[str, Any] | None:
    return None if choice is None else {"drafter": choice.drafter, "length": choice.length}


def plan_from_json(value: Mapping[str, Any]) -> Plan:
    """Return the plan that `plan_to_json` wrote.

    Raises
    ------
    PlanError
        If the value is not a plan, or was written by a newer version.
    """
    from hsdopt.plan_forms import plan_of  # noqa: PLC0415 -- loads pydantic, which notation does without

    if not isinstance(value, Mapping) or value.get("format") != _FORMAT:
        raise PlanError(f'expected a plan file with "format": "{_FORMAT}"; write one with hsdopt solve -o plan.json')
    version = value.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version != 1:
        raise PlanError(f"expected plan version 1; got {excerpt(version)}: use a newer hsdopt")
    return _check_top(plan_of(value))
