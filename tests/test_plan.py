from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsdopt.errors import PlanError
from hsdopt.plan import (
    LOOKUP,
    Adaptive,
    Bild,
    Choice,
    Level,
    Plan,
    Segment,
    format_plan,
    parse_plan,
    plan_from_json,
    plan_to_json,
)

NAMES = ["target", "mid", "small", "tiny", "smollm2-int8", "org/model-0.5B", 'odd "name"', "bild", "0b"]


@st.composite
def levels(draw: st.DrawFn, names: tuple[str, ...] = tuple(NAMES), depth: int = 3, *, top: bool = True) -> Level:
    name = draw(st.sampled_from(names))
    rest = tuple(other for other in names if other != name)
    if depth == 0 or not rest:
        return Level(name)
    row = []
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            row.append(Segment(Level(LOOKUP), draw(st.integers(1, 40))))
            continue
        below = draw(levels(rest, depth - 1, top=False))
        stops = ["truncate", "until"] + (["overshoot", "rounds"] if below.row else [])
        row.append(Segment(below, draw(st.integers(1, 40)), draw(st.sampled_from(stops))))
    lenient = not top and any(segment.level.model != LOOKUP for segment in row)
    lenience = draw(st.floats(1, 1e6)) if lenient else 1.0
    return Level(name, tuple(row), lenience)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(levels())
def test_notation_and_json_round_trip(plan: Level) -> None:
    assert parse_plan(format_plan(plan)) == plan
    assert plan_from_json(plan_to_json(plan)) == plan


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.builds(
        Bild,
        st.just("large"),
        st.just("small"),
        st.floats(0, 1),
        st.one_of(st.floats(0, 50), st.just(math.inf)),
        st.one_of(st.none(), st.integers(1, 50)),
        st.one_of(st.none(), st.integers(1, 50)),
        st.sampled_from(["paper", "reference"]),
    )
)
def test_bild_round_trips_with_thresholds_of_exactly_zero(plan: Bild) -> None:
    assert parse_plan(format_plan(plan)) == plan
    assert plan_from_json(plan_to_json(plan)) == plan


def test_adaptive_round_trips_through_json_and_notation() -> None:
    plan = Adaptive("t", Choice("mid", 3), (("mid", (None, Choice("lookup", 1), Choice("lookup", 2))),))
    assert plan_from_json(plan_to_json(plan)) == plan
    assert parse_plan(format_plan(plan)) == plan
    assert plan.models == ("lookup", "mid", "t")


def test_notation_of_the_design_is_read_as_it_says() -> None:
    plan = parse_plan("target(mid:2x(small:3), lookup:10)")
    assert plan == Level(
        "target", (Segment(Level("mid", (Segment(Level("small"), 3),)), 2, "rounds"), Segment(Level("lookup"), 10))
    )
    assert plan.models == ("lookup", "small", "mid", "target")
    assert plan.target == "target"
    assert plan.depth == 2
    assert plan.longest_draft == 2 * 4 + 10


@pytest.mark.parametrize(
    ("text", "expected", "column"),
    [
        ("target(", "a model name", 7),
        ("target(d)", "a draft length after d", 8),
        ("target(d:0)", "draft length of at least 1", 7),
        ("target(d:3+)", "a drafter below d", 7),
        ("target(d:x)", "a draft length such as", 9),
        ("t(a:3(b:2)", "a comma or a closing parenthesis", 10),
        ("t(a:3) b", "the end of the plan", 7),
        ("lookup(a:3)", "lookup only proposes", 0),
        ("lookup", "lookup only proposes", 0),
        ("t(t:3)", "at most once in a stack", 0),
        ("t(a:3, lenience=2)", "no lenience on the target", 0),
        ("t(a:3(lookup:2, lenience=2))", "never lenient", 2),
        ("t(a:3(b:2, lenience=0.5))", "at least 1", 2),
        ("bild(a)", "two models", 0),
        ("bild(a, a)", "two different models", 0),
        ("bild(a, b, fallback=2)", "between 0 and 1", 0),
        ("bild(a, b, speed=2)", "one of fallback, rollback", 11),
        ("bild(a, b, stride=1.5)", "a whole number", 11),
        ("", "a model name", 0),
        ('"open', "a closing quote", 0),
    ],
)
def test_a_parse_error_shows_the_text_a_caret_and_what_was_expected(text: str, expected: str, column: int) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    message, shown, caret = str(caught.value).split("\n")
    assert expected in message
    assert shown == f"  {text}"
    assert caret == "  " + " " * column + "^"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "expected a plan file"),
        ({"format": "hsdopt-plan", "version": 2, "plan": {}}, "use a newer hsdopt"),
        ({"format": "hsdopt-plan", "version": 1}, "complete plan"),
        ({"format": "hsdopt-plan", "version": 1, "plan": {"kind": "tree"}}, "kind level, bild or adaptive"),
        (
            {"format": "hsdopt-plan", "version": 1, "plan": {"kind": "level", "model": 3, "row": []}},
            "a string at plan.model",
        ),
    ],
)
def test_json_that_is_no_plan_is_refused(value: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_from_json(value)  # type: ignore[arg-type]


def test_k_matrices_of_the_paper_have_cumulative_stops() -> None:
    plan = Plan.from_k_matrix([[5, 8, 10], [0, 1, 10], [0, 0, 10]], ["xxl", "base", "small", "lookup"])
    assert format_plan(plan) == ("xxl(base:5+(small:1+(lookup:10), lookup:10), small:..8(lookup:10), lookup:10)")
    assert format_plan(Plan.from_k_matrix([[13, 10], [0, 10]], ["llama", "68m", "lookup"])) == (
        "llama(68m:13+(lookup:10), lookup:10)"
    )


@pytest.mark.parametrize(
    ("matrix", "message"),
    [([[1]], "2 x 2 k-matrix"), ([[1, 1], [1, 0]], "zeros below the diagonal"), ([[1, -1], [0, 0]], "whole numbers")],
)
def test_malformed_k_matrices_are_refused(matrix: list[list[int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_k_matrix(matrix, ["a", "b", "c"])


def test_adaptive_tables_must_cover_what_can_be_asked() -> None:
    with pytest.raises(PlanError, match="up to 3 tokens owed"):
        Adaptive("t", Choice("mid", 3), (("mid", (None, None)),))
    with pytest.raises(PlanError, match="stand before"):
        Adaptive("t", Choice("a", 1), (("a", (Choice("b", 1),)), ("b", (None,))))
