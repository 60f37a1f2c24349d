"""Plans: small immutable trees that say who drafts for whom, their notation and their JSON.

Three kinds of node decode: `Level` (every lossless stack), `Bild` (Big Little Decoder) and
`Adaptive` (a table from tokens owed to the next draft). Everything else in hsdopt reads plans.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

from hsdopt.errors import PlanError

__all__ = [
    "LOOKUP",
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

Stop = Literal["truncate", "overshoot", "rounds", "until"]
Semantics = Literal["paper", "reference"]

_SUFFIX: dict[Stop, str] = {"truncate": "{}", "overshoot": "{}+", "rounds": "{}x", "until": "..{}"}
_STOP_OF_SIGN: dict[str, Stop] = {"": "truncate", "+": "overshoot", "x": "rounds", "..": "until"}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_LENGTH = re.compile(r"(?P<until>\.\.)?(?P<count>\d+)(?P<suffix>[+x]?)")
_NUMBER = re.compile(r"[+-]?(?:inf|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)")
_FORMAT = "hsdopt-plan"
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
        if self.stop not in _SUFFIX:
            raise PlanError(f"expected a convention out of {', '.join(_SUFFIX)}; got {self.stop!r}")
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 1:
            raise PlanError(f"expected a draft length of at least 1 for {self.level.model}; got {self.length!r}")
        if self.stop in ("overshoot", "rounds") and not self.level.row:
            raise PlanError(
                f"expected a drafter below {self.level.model}, as in {self.level.model}:{self.length}+(small:3); "
                f"without one it passes up exactly {self.length} tokens: write {self.level.model}:{self.length}"
            )


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

    def __post_init__(self) -> None:
        """Refuse stacks that cannot run."""
        object.__setattr__(self, "row", tuple(self.row))
        object.__setattr__(self, "lenience", float(self.lenience))
        if not self.model or not isinstance(self.model, str):
            raise PlanError(f"expected a model name; got {self.model!r}")
        if self.model == LOOKUP and self.row:
            raise PlanError("expected a model that can verify above a draft; lookup only proposes")
        if not (math.isfinite(self.lenience) and self.lenience >= 1):
            raise PlanError(f"expected lenience to be a finite number of at least 1; got {self.lenience}")
        if self.lenience != 1 and all(segment.level.model == LOOKUP for segment in self.row):
            raise PlanError(f"expected a model below {self.model} for its lenience (lookup is never lenient); drop it")
        _refuse_repeats(self)

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
    def depth(self) -> int:
        """Levels of drafting; 0 is autoregression."""
        return max((1 + segment.level.depth for segment in self.row), default=0)

    @property
    def longest_draft(self) -> int | None:
        """The most tokens one draft for this level can hold (None if rounds leave it open-ended)."""
        held = 0
        for segment in self.row:
            asked = max(segment.length - held, 0) if segment.stop == "until" else segment.length
            held += _longest_request(segment.level, asked, segment.stop)
        return held

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
        if self.large == self.small:
            raise PlanError(f"expected two different models in bild(...); got {self.large} twice")
        if LOOKUP in (self.large, self.small):
            raise PlanError("expected two language models in bild(...); lookup has no probabilities")
        if not 0 <= self.fallback <= 1:
            raise PlanError(f"expected fallback between 0 and 1; got {self.fallback}")
        if not self.rollback >= 0:
            raise PlanError(f"expected rollback of at least 0 (inf turns it off); got {self.rollback}")
        for name, value in (("max_draft", self.max_draft), ("stride", self.stride)):
            if value is not None and value < 1:
                raise PlanError(f"expected {name} of at least 1; got {value}")
        if self.semantics not in ("paper", "reference"):
            raise PlanError(f"expected semantics paper or reference; got {self.semantics!r}")

    @property
    def target(self) -> str:
        """The large model."""
        return self.large

    @property
    def models(self) -> tuple[str, ...]:
        """The small model, then the large one."""
        return (self.small, self.large)

    @property
    def lossless(self) -> bool:
        """Never: quality is traded for speed."""
        return False


@dataclass(frozen=True, slots=True)
class Choice:
    """The next draft of an adaptive level: `length` tokens from `drafter`."""

    drafter: str
    length: int


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
        tables = dict(self.tables)
        if len(tables) != len(self.tables) or self.model in tables:
            raise PlanError("expected one table per drafter and none for the target")
        order = [name for name, _ in self.tables]
        for owner, choice in self._choices():
            limit = len(tables.get(choice.drafter, ()))
            if choice.drafter != LOOKUP and not 1 <= choice.length <= limit:
                raise PlanError(
                    f"expected a table for {choice.drafter} up to {choice.length} tokens owed; got {limit} entries"
                )
            if owner in order and choice.drafter in order and order.index(choice.drafter) >= order.index(owner):
                raise PlanError(f"expected {choice.drafter} to stand before {owner}, for which it drafts")

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


def _refuse_repeats(level: Level) -> None:
    """Refuse a model that would draft, at any depth, for itself."""

    def descend(node: Level, above: tuple[str, ...]) -> None:
        if node.model in above:
            raise PlanError(f"expected {node.model} at most once in a stack; it would draft for itself")
        for segment in node.row:
            descend(segment.level, (*above, node.model))

    descend(level, ())


def _check_top(plan: Plan) -> Plan:
    if isinstance(plan, Level) and plan.model == LOOKUP:
        raise PlanError("expected a language model as the target; lookup only proposes")
    if isinstance(plan, Level) and plan.lenience != 1:
        raise PlanError(f"expected no lenience on the target {plan.model}: its output law would change; put it below")
    return plan


def _longest_request(level: Level, length: int, stop: Stop) -> int:
    per_round = 1 + (level.longest_draft or 0)
    if stop == "truncate" or not level.row:
        return length
    if stop == "rounds":
        return length * per_round
    return length + per_round - 1 if length > 0 else 0


def _from_k_matrix(matrix: Sequence[Sequence[int]], models: Sequence[str]) -> Level:
    size = len(models) - 1
    if len(matrix) != size or any(len(row) != size for row in matrix):
        raise PlanError(f"expected a {size} x {size} k-matrix for {len(models)} models; got {len(matrix)} rows")
    if any(not isinstance(k, int) or k < 0 for row in matrix for k in row):
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
    if text.lstrip().startswith("{"):
        try:
            return plan_from_json(json.loads(text))
        except json.JSONDecodeError as error:
            raise PlanError(f"expected a plan in JSON; {error}") from error
    return _Parser(text).plan()


class _Parser:
    """A recursive-descent parser over the notation; errors carry the text and a caret."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def plan(self) -> Plan:
        self._space()
        start = self.at
        result: Plan = self._bild(start) if re.match(r"bild\s*\(", self.text[start:]) else self._level(start)
        self._space()
        if self.at < len(self.text):
            self._fail("the end of the plan")
        return self._build(start, lambda: _check_top(result))

    def _level(self, start: int) -> Level:
        name = self._name()
        row, lenience = self._row()
        return self._build(start, lambda: Level(name, row, lenience))

    def _row(self) -> tuple[tuple[Segment, ...], float]:
        segments: list[Segment] = []
        lenience = 1.0
        if not self._take("("):
            return (), lenience
        while True:
            self._space()
            start = self.at
            name = self._name()
            if self._take("="):
                if name != "lenience":
                    self._fail("a segment such as draft:5, or lenience=NUMBER", start)
                lenience = self._float()
            else:
                segments.append(self._segment(name, start))
            if self._take(")"):
                return tuple(segments), lenience
            self._need(",", "a comma or a closing parenthesis")

    def _segment(self, name: str, start: int) -> Segment:
        self._need(":", f"a draft length after {name}, such as {name}:5")
        self._space()
        match = _LENGTH.match(self.text, self.at)
        if match is None or (match["until"] and match["suffix"]):
            self._fail("a draft length such as 5, 5+, 2x or ..14")
        self.at = match.end()
        stop = _STOP_OF_SIGN[match["until"] or match["suffix"]]
        row, lenience = self._row()
        return self._build(start, lambda: Segment(Level(name, row, lenience), int(match["count"]), stop))

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
                options[name] = self._bild_option(name, mark)
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
            if number != int(number):
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
            except json.JSONDecodeError:
                self._fail("a closing quote")
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
            raise PlanError(f"{error}\n  {self.text}\n  {' ' * start}^") from error

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
        raise PlanError(f"expected {expected}; got {got}\n  {self.text}\n  {' ' * where}^")


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
    if not isinstance(value, Mapping) or value.get("format") != _FORMAT:
        raise PlanError(f'expected a plan file with "format": "{_FORMAT}"; write one with hsdopt solve -o plan.json')
    if value.get("version") != 1:
        raise PlanError(f"expected plan version 1; got {value.get('version')!r}: use a newer hsdopt")
    try:
        return _check_top(_node_from_json(value["plan"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"expected a complete plan in JSON; {type(error).__name__} at {error}") from error


def _node_from_json(value: Mapping[str, Any]) -> Plan:
    kind = value["kind"]
    if kind == "level":
        return _level_from_json(value)
    if kind == "bild":
        fields = {name: value[name] for name in ("large", "small", "fallback", "max_draft", "stride", "semantics")}
        rollback = math.inf if value["rollback"] is None else value["rollback"]
        return Bild(**fields, rollback=rollback)
    if kind == "adaptive":
        tables = tuple((name, tuple(map(_choice_from_json, table))) for name, table in value["tables"].items())
        return Adaptive(value["model"], _choice_from_json(value["draft"]), tables)
    raise PlanError(f"expected a plan of kind level, bild or adaptive; got {kind!r}")


def _level_from_json(value: Mapping[str, Any]) -> Level:
    row = tuple(
        Segment(_level_from_json(segment["level"]), segment["length"], segment["stop"]) for segment in value["row"]
    )
    return Level(value["model"], row, value.get("lenience", 1.0))


def _choice_from_json(value: Mapping[str, Any] | None) -> Choice | None:
    return None if value is None else Choice(str(value["drafter"]), int(value["length"]))
