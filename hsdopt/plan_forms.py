"""The JSON of plans, as strict forms: what is let in has the right types, and one line says what has not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hsdopt.errors import PlanError
from hsdopt.files import excerpt
from hsdopt.plan import (
    LONGEST_DRAFT,
    LONGEST_NAME,
    MOST_CHOICES,
    MOST_LEVELS,
    MOST_SEGMENTS,
    Adaptive,
    Bild,
    Choice,
    Level,
    Plan,
    Segment,
)

__all__ = ["plan_of"]

_DEEPEST = 3 * MOST_LEVELS + 8
"""Containers in one another: a level, its row and a segment of it for each model, and what stands around them."""

_MOST_VALUES = 4 * (MOST_CHOICES + MOST_SEGMENTS * 8)

_Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
_Length = Annotated[int, Field(ge=1, le=LONGEST_DRAFT)]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


class _SegmentForm(_Form):
    level: _LevelForm
    length: _Length
    stop: Literal["truncate", "overshoot", "rounds", "until"]

    def plan(self) -> Segment:
        return Segment(self.level.plan(), self.length, self.stop)


class _LevelForm(_Form):
    kind: Literal["level"]
    model: _Name
    row: list[_SegmentForm]
    lenience: Annotated[float, Field(ge=1)] = 1.0

    def plan(self) -> Level:
        return Level(self.model, tuple(segment.plan() for segment in self.row), self.lenience)


class _BildForm(_Form):
    kind: Literal["bild"]
    large: _Name
    small: _Name
    fallback: Annotated[float, Field(ge=0, le=1)]
    rollback: Annotated[float, Field(ge=0)] | None
    max_draft: _Length | None
    stride: _Length | None
    semantics: Literal["paper", "reference"]

    def plan(self) -> Bild:
        fields = self.model_dump(exclude={"kind", "rollback"})
        return Bild(**fields, rollback=math.inf if self.rollback is None else self.rollback)


class _ChoiceForm(_Form):
    drafter: _Name
    length: _Length

    def plan(self) -> Choice:
        return Choice(self.drafter, self.length)


class _AdaptiveForm(_Form):
    kind: Literal["adaptive"]
    model: _Name
    draft: _ChoiceForm | None
    tables: dict[_Name, list[_ChoiceForm | None]]

    def plan(self) -> Adaptive:
        tables = tuple((name, tuple(map(_choice_of, table))) for name, table in self.tables.items())
        return Adaptive(self.model, _choice_of(self.draft), tables)


def _choice_of(form: _ChoiceForm | None) -> Choice | None:
    return None if form is None else form.plan()


class _File(_Form):
    format: Literal["hsdopt-plan"]
    version: Literal[1]
    plan: Annotated[_LevelForm | _BildForm | _AdaptiveForm, Field(discriminator="kind")]


def plan_of(value: Mapping[str, Any]) -> Plan:
    """Return the plan that a plan file's JSON value holds.

    Raises
    ------
    PlanError
        In one line: where the fault is, what was expected there and what was found.
    """
    _refuse_large(value)
    try:
        form = _File.model_validate(dict(value))
    except ValidationError as error:
        raise PlanError(_first_reason(error)) from None
    return form.plan.plan()


def _refuse_large(value: object) -> None:
    """Refuse a value too deep or too large for any plan, before anything goes down into it."""
    waiting, seen = [(value, 0)], 0
    while waiting:
        item, depth = waiting.pop()
        below = item.values() if isinstance(item, Mapping) else item if isinstance(item, list) else ()
        seen += len(below)
        if depth > _DEEPEST:
            raise PlanError(f"expected at most {MOST_LEVELS} models above one another in a plan; got more")
        if seen > _MOST_VALUES:
            raise PlanError(
                f"expected at most {MOST_SEGMENTS} segments and {MOST_CHOICES} choices in a plan; got many more"
            )
        waiting += [(other, depth + 1) for other in below]


_KINDS = ("level", "bild", "adaptive")
_EXPECTED = {
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
    "string_type": "a string",
    "float_type": "a number",
    "int_type": "a whole number",
    "finite_number": "a finite number",
    "string_too_short": "a name",
    "string_too_long": f"at most {LONGEST_NAME} characters",
    "union_tag_invalid": "a plan of kind level, bild or adaptive",
}


def _first_reason(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = _path(first["loc"])
    if first["type"] in ("missing", "union_tag_not_found"):
        name = place if first["type"] == "missing" else f"{place}.kind"
        return f"expected a complete plan in JSON; got none of {name}"
    if first["type"] == "extra_forbidden":
        return f"expected no key {place} in a plan in JSON; drop it, or use a newer hsdopt"
    expected = _EXPECTED.get(first["type"], first["msg"].removeprefix("Input should be "))
    return f"expected {expected} at {place}; got {excerpt(first['input'])}"


def _path(places: tuple[int | str, ...]) -> str:
    """Return where a fault is, as in ``plan.row[0].level.model``."""
    text = ""
    for place in places[:1] + places[2 if places[1:2] and places[1] in _KINDS else 1 :]:
        text += f"[{place}]" if isinstance(place, int) else f".{_key(place)}"
    return text.removeprefix(".")


def _key(place: str) -> str:
    return place if place.isidentifier() and len(place) <= 40 else excerpt(place, limit=40)
