"""Plans that are none, in notation, in JSON and in Python: each is one PlanError that says where and stays short."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stack import call
from traced import traced_profile

from hsdopt.errors import PlanError
from hsdopt.plan import (
    LONGEST_DRAFT,
    LONGEST_NAME,
    LONGEST_TEXT,
    LOOKUP,
    MOST_CHOICES,
    MOST_LEVELS,
    MOST_SEGMENTS,
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

DIGITS = "9" * 5000


def nested(levels: int) -> str:
    """Return a stack of so many models above one another."""
    return "m0(" + "".join(f"m{i}:2(" for i in range(1, levels - 1)) + f"m{levels - 1}:2" + ")" * (levels - 1)


def refusal(make: Callable[[], object]) -> str:
    """Return the message of the PlanError that comes soon, after checking that it is short and printable."""
    begun = time.process_time()
    with pytest.raises(PlanError) as caught:
        make()
    assert time.process_time() - begun < 2
    message = str(caught.value)
    lines = message.split("\n")
    assert len(lines) in (1, 3), message
    assert all(len(line) < 320 for line in lines), message
    assert all(line.isprintable() for line in lines), ascii(message)
    return message


NOTATION = [
    (nested(MOST_LEVELS + 1), f"at most {MOST_LEVELS} models above one another"),
    (nested(494), f"at most {MOST_LEVELS} models above one another"),
    (nested(100_000), f"at most {MOST_LEVELS} models above one another"),
    ("t(" * 300_000, "a draft length after t"),
    ("(" * 3_000_000, "a model name"),
    (f"t(a:{DIGITS})", f"a draft length of at most {LONGEST_DRAFT}"),
    (f"t(a:{DIGITS}x(b:2))", f"a draft length of at most {LONGEST_DRAFT}"),
    (f"t(a:..{DIGITS})", f"a draft length of at most {LONGEST_DRAFT}"),
    (f"t(a:{LONGEST_DRAFT + 1})", f"at most {LONGEST_DRAFT}"),
    ("t(a:0000)", "at least 1"),
    ("t(a:٣)", "a draft length such as"),
    ("t(" + "a:1," * 100_000 + "a:1)", f"at most {MOST_SEGMENTS} segments"),
    ("t(" + "a:1(b:2)," * 1000 + "a:1)", f"at most {MOST_SEGMENTS} segments"),
    ("bild(a,b,max_draft=inf)", "a whole number for max_draft"),
    ("bild(a,b,stride=-inf)", "a whole number for stride"),
    ("bild(a,b,max_draft=1e300)", f"at most {LONGEST_DRAFT}"),
    (f"bild(a,b,max_draft={DIGITS})", "a whole number for max_draft"),
    ("bild(a,b,max_draft=2.5)", "a whole number for max_draft"),
    ("bild(a,b,fallback=nan)", "a number"),
    ("bild(a,b,fallback=0.5,fallback=0.6)", "fallback once"),
    ("bild(a,b,semantics=paper,semantics=paper)", "semantics once"),
    ("bild(a,b,c)", "two models"),
    ("bild(" + "a," * 100_000 + "a)", "two models"),
    ("bild(a,b,semantics=fast)", "paper or reference"),
    ('bild("",b)', "a model name"),
    ("t(a:3(b:2,lenience=2,lenience=3))", "lenience once"),
    ("t(a:3(b:2,lenience=inf))", "finite"),
    (f"t(a:3(b:2,lenience={DIGITS}))", "finite"),
    ("t(a:3\x00)", "'\\x00'"),
    ("\x00", "a model name"),
    ("t(\x1b[31m:3)", "'\\x1b'"),
    ("t(\ud800:3)", "'\\ud800'"),
    ('t("\ud800":3)', "without control characters"),
    ('t("a\\u0000":3)', "without control characters"),
    ('t("a\nb":3)', "a name in quotes as JSON writes it"),
    ('t("a\\q":3)', "a name in quotes as JSON writes it"),
    ('t("open:3)', "a closing quote"),
    ('t("' + "o" * 100_000, "a closing quote"),
    ('""', "a model name"),
    ('"  "', "a model name"),
    ('t("a\u202eb":3)', "without control characters"),
    ('t("a\u200bb":0)', "for a\\u200bb"),
    ("t(é:3)", "'é'"),
    ("[1](a:3)", "a model name"),
    ("5:3", "the end of the plan"),
    ("n" * (LONGEST_NAME + 1), f"at most {LONGEST_NAME} characters"),
    ("n" * 1_000_000, f"at most {LONGEST_NAME} characters"),
    ("t(" + "n" * 1_000_000 + ")", "a draft length after nnn"),
    ("x" * (LONGEST_TEXT + 1), f"at most {LONGEST_TEXT} characters"),
    (" " * 1_000_000, "a model name"),
    ("{", "JSON"),
    ('{"a":' * 100_000, "nested too deeply"),
    ('{"format": ' + "[" * 3_000_000, "nested too deeply"),
    (f'{{"format": {DIGITS}}}', "digits"),
    ('{"format": NaN}', "NaN"),
    ("{}", "expected a plan file"),
]


@pytest.mark.parametrize(("text", "expected"), NOTATION, ids=range(len(NOTATION)))
def test_bad_notation_is_one_short_error(text: str, expected: str) -> None:
    assert expected in refusal(lambda: parse_plan(text))


def test_a_long_text_shows_a_window_with_the_caret_under_the_fault() -> None:
    text = "t(" + "a:1," * 200 + "!" + ",b:2" * 200 + ")"
    _, shown, caret = refusal(lambda: parse_plan(text)).split("\n")
    assert shown.startswith("  ...")
    assert shown.endswith("...")
    assert len(shown) < 80
    assert shown[caret.index("^")] == "!"


@pytest.mark.parametrize(
    ("text", "column"),
    [("t(\x00", 2), ('"\x01', 1), ('"e\u0301" !', 4), ('"模型" !', 7), ("t\n!", 3), ("\ufefft !", 2)],
)
def test_the_caret_counts_columns_as_terminals_do(text: str, column: int) -> None:
    assert refusal(lambda: parse_plan(text)).split("\n")[2] == "  " + " " * column + "^"


def test_plans_at_the_stated_limits_work() -> None:
    deep = parse_plan(nested(MOST_LEVELS))
    assert isinstance(deep, Level)
    assert deep.depth == MOST_LEVELS - 1
    wide = parse_plan("t(" + ", ".join([f"a:{LONGEST_DRAFT}"] * MOST_SEGMENTS) + ")")
    named = parse_plan("n" * LONGEST_NAME)
    entries = tuple(Choice(LOOKUP, 1) for _ in range(MOST_CHOICES))
    table = Adaptive("t", Choice("mid", LONGEST_DRAFT), (("mid", entries),))
    for plan in (deep, wide, named, table):
        assert parse_plan(format_plan(plan)) == plan
        assert plan_from_json(plan_to_json(plan)) == plan
        assert hash(copy.deepcopy(plan)) == hash(plan)
        assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301


def test_shared_branches_count_each_time_they_run() -> None:
    def doubled(times: int) -> Level:
        below = Level("m0")
        for i in range(1, times + 1):
            below = Level(f"m{i}", (Segment(below, 1), Segment(below, 1)))
        return below

    assert doubled(9)._shape.segments == 2**10 - 2
    assert f"at most {MOST_SEGMENTS} segments" in refusal(lambda: doubled(MOST_LEVELS - 1))


def test_a_level_knows_of_its_tree_what_a_walk_finds() -> None:
    plan = parse_plan("t(a:3+(b:2x(c:4), lookup:3), a:..9(c:2), lookup:5)")
    assert isinstance(plan, Level)
    assert plan._shape.names == {level.model for level in plan.walk()}
    assert plan._shape.segments == sum(len(level.row) for level in plan.walk())
    assert plan.longest_draft == (3 + 13 + 1 - 1 + 0) + 0 + 5


BILD: dict[str, Any] = {
    "kind": "bild",
    "large": "big",
    "small": "small",
    "fallback": 0.6,
    "rollback": 5.0,
    "max_draft": None,
    "stride": None,
    "semantics": "paper",
}
LEVEL: dict[str, Any] = plan_to_json(parse_plan("t(a:3+(b:2, lenience=2))"))["plan"]
TABLES: dict[str, Any] = {"mid": [None, {"drafter": "lookup", "length": 1}]}
ADAPTIVE: dict[str, Any] = {
    "kind": "adaptive",
    "model": "t",
    "draft": {"drafter": "mid", "length": 2},
    "tables": TABLES,
}


def changed(value: dict[str, Any], *path: str | int, to: object) -> dict[str, Any]:
    """Return `value` with what stands at a path replaced."""
    made = copy.deepcopy(value)
    at: Any = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return made


NOT_LENGTHS = ["x", math.nan, math.inf, -5, 0, 2.5, True, None, [], 10**100, LONGEST_DRAFT + 1, "3", 3.0]
NOT_NUMBERS = ["abc", math.nan, -math.inf, True, [], {}, "0.5", -1]
NOT_NAMES = [1, None, True, "", " ", [], {}, "\ud800", "a\nb", "n" * 5000]
BAD_JSON = [
    *((changed(LEVEL, "row", 0, "length", to=value), "length") for value in NOT_LENGTHS),
    *((changed(LEVEL, "row", 0, "level", "lenience", to=value), "lenience") for value in [*NOT_NUMBERS, None, 0.5]),
    *((changed(LEVEL, "row", 0, "stop", to=value), "stop") for value in ["x", None, 1, [], {}]),
    *((changed(LEVEL, "row", 0, "level", to=value), "level") for value in [1, None, "b", [], BILD]),
    *((changed(LEVEL, "row", to=value), "row") for value in [1, None, "b", {}, [1], [[]], [None]]),
    *((changed(LEVEL, "model", to=value), "") for value in NOT_NAMES),
    *((changed(BILD, name, to=value), "") for value in NOT_NAMES for name in ("large", "small")),
    *((changed(BILD, "fallback", to=value), "fallback") for value in [*NOT_NUMBERS, None, 2]),
    *((changed(BILD, "rollback", to=value), "rollback") for value in [*NOT_NUMBERS, math.inf]),
    *((changed(BILD, "max_draft", to=value), "max_draft") for value in NOT_LENGTHS if value is not None),
    *((changed(BILD, "stride", to=value), "stride") for value in NOT_LENGTHS if value is not None),
    *((changed(BILD, "semantics", to=value), "semantics") for value in ["fast", None, 1, []]),
    *((changed(ADAPTIVE, "model", to=value), "") for value in NOT_NAMES),
    (changed(ADAPTIVE, "model", to=LOOKUP), "lookup only proposes"),
    *((changed(ADAPTIVE, "draft", to=value), "draft") for value in [1, "mid", [], {}, {"drafter": "mid"}]),
    *((changed(ADAPTIVE, "draft", "length", to=value), "length") for value in NOT_LENGTHS),
    *((changed(ADAPTIVE, "tables", to=value), "tables") for value in [None, 1, "mid", [], [["mid", []]]]),
    *((changed(ADAPTIVE, "tables", "mid", to=value), "mid") for value in [None, 1, "mid", {}, [1], ["x"]]),
    *((changed(ADAPTIVE, "tables", "mid", 1, "drafter", to=value), "") for value in NOT_NAMES),
    (changed(ADAPTIVE, "tables", LOOKUP, to=[None]), "lookup"),
    (changed(ADAPTIVE, "tables", "\n" * 1000, to=[None]), ""),
    *((changed(plan, "extra", to=1), "no key plan.extra") for plan in (LEVEL, BILD, ADAPTIVE)),
    (changed(LEVEL, "row", 0, "level", "speed", to=1), "no key plan.row[0].level.speed"),
    (changed(LEVEL, "x" * 10_000, to=1), "no key plan.'xxx"),
    *((changed(LEVEL, "kind", to=kind), "") for kind in ["tree", "bild", "adaptive", None, 1, [], "k" * 5000]),
    ({key: value for key, value in LEVEL.items() if key != "kind"}, "none of plan.kind"),
    ({key: value for key, value in BILD.items() if key != "large"}, "none of plan.large"),
    *((value, "plan") for value in [None, 1, "t(a:3)", [], math.nan]),
]


@pytest.mark.parametrize(("plan", "expected"), BAD_JSON, ids=range(len(BAD_JSON)))
def test_bad_json_is_one_line_that_names_the_field(plan: object, expected: str) -> None:
    message = refusal(lambda: plan_from_json({"format": "hsdopt-plan", "version": 1, "plan": plan}))
    assert "\n" not in message
    assert expected in message


@pytest.mark.parametrize("version", [True, 1.0, "1", None, 0, 2, [], 10**5000], ids=range(8))
def test_other_versions_are_refused(version: object) -> None:
    assert "version 1" in refusal(lambda: plan_from_json({**plan_to_json(Level("t")), "version": version}))


def test_json_too_deep_or_too_large_is_refused_before_it_is_built() -> None:
    deep: dict[str, Any] = {"kind": "level", "model": "b", "row": []}
    for number in range(20_000):
        deep = {"kind": "level", "model": f"m{number}", "row": [{"level": deep, "length": 1, "stop": "truncate"}]}
    wide = {**LEVEL, "row": LEVEL["row"] * 100_000}
    circle: list[Any] = []
    circle.append(circle)
    for plan in (deep, wide, circle):
        assert "at most" in refusal(lambda plan=plan: plan_from_json({**plan_to_json(Level("t")), "plan": plan}))
    below: Any = deep
    while below["row"]:  # a deep value ends level by level: Python would end it all at once
        below["row"], below = [], below["row"][0]["level"]


D = Level("d")
CALLS: dict[str, Any] = {
    **{f"length {value!r:.20}": lambda value=value: Segment(D, value) for value in [*NOT_LENGTHS, math.nan]},
    **{f"choice {value!r:.20}": lambda value=value: Choice("d", value) for value in NOT_LENGTHS},
    **{f"drafter {value!r:.20}": lambda value=value: Choice(value, 1) for value in NOT_NAMES},
    **{f"model {value!r:.20}": lambda value=value: Level(value) for value in NOT_NAMES},
    **{f"large {value!r:.20}": lambda value=value: Bild(value, "b") for value in NOT_NAMES},
    **{f"small {value!r:.20}": lambda value=value: Bild("b", value) for value in NOT_NAMES},
    **{f"target {value!r:.20}": lambda value=value: Adaptive(value, None) for value in [*NOT_NAMES, LOOKUP]},
    **{f"lenience {value!r:.20}": lambda value=value: Level("t", (), value) for value in [*NOT_NUMBERS, 10**400]},
    **{f"fallback {value!r:.20}": lambda value=value: Bild("a", "b", value) for value in [*NOT_NUMBERS, None, "x"]},
    **{f"rollback {value!r:.20}": lambda value=value: Bild("a", "b", 0, value) for value in [*NOT_NUMBERS, 10**400]},
    **{
        f"draft {value!r:.20}": lambda value=value: Bild("a", "b", max_draft=value)
        for value in NOT_LENGTHS
        if value is not None
    },
    **{
        f"stride {value!r:.20}": lambda value=value: Bild("a", "b", stride=value)
        for value in NOT_LENGTHS
        if value is not None
    },
    **{f"rules {value!r:.20}": lambda value=value: Bild("a", "b", semantics=value) for value in ["x", None, []]},
    **{f"stop {value!r:.20}": lambda value=value: Segment(D, 1, value) for value in ["x", None, [], 1]},
    **{f"row {value!r:.20}": lambda value=value: Level("t", value) for value in ["x", None, 1, [1], [D], {}, "ab"]},
    **{f"level {value!r:.20}": lambda value=value: Segment(value, 1) for value in ["x", None, Bild("a", "b")]},
    **{f"tables {value!r:.20}": lambda value=value: Adaptive("t", None, value) for value in ["x", 1, [1], ["ab"], {}]},
    **{f"table {value!r:.20}": lambda value=value: Adaptive("t", None, (("d", value),)) for value in ["x", 1, [1], {}]},
    "draft of adaptive": lambda: Adaptive("t", "mid"),
    "too many choices": lambda: Adaptive("t", None, (("d", (None,) * (MOST_CHOICES + 1)),)),
    "too many segments": lambda: Level("t", (Segment(D, 1),) * 100_000),
    "an array as a row": lambda: Level("t", np.zeros((1000, 1000))),
    "no matrix": lambda: Plan.from_k_matrix(5, ["a", "b"]),
    "no rows": lambda: Plan.from_k_matrix([5], ["a", "b"]),
    "no numbers": lambda: Plan.from_k_matrix([[True]], ["a", "b"]),
    "no counts": lambda: Plan.from_k_matrix([[2.5]], ["a", "b"]),
    "a huge count": lambda: Plan.from_k_matrix([[10**100]], ["a", "b"]),
    "no models": lambda: Plan.from_k_matrix([], []),
    "models that are no names": lambda: Plan.from_k_matrix([[1]], [1, 2]),
    "a text of models": lambda: Plan.from_k_matrix([[1]], "ab"),
    "a large matrix": lambda: Plan.from_k_matrix([[1] * 2000] * 2000, [f"m{i}" for i in range(2001)]),
    "a full matrix": lambda: Plan.from_k_matrix(
        [[j + 1 if j >= i else 0 for j in range(31)] for i in range(31)], [f"m{i}" for i in range(32)]
    ),
    "no plan": lambda: parse_plan(5),
    "bytes": lambda: parse_plan(b"t(a:3)"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=[ascii(name) for name in CALLS])
def test_constructors_refuse_wrong_types_in_one_line(call: Callable[[], object]) -> None:
    assert "\n" not in refusal(call)


WORDS = ["t", "a", "b", "lookup", "bild", "(", ")", ":", ",", "=", "..", "+", "x", "3", "0", '"', "\\", "lenience", "{"]
WORDS += ["fallback", "max_draft", "inf", "semantics", "paper", " ", "\n", "\x00", "\ud800", "é", "\u0301", "9" * 30]


@settings(max_examples=400, deadline=2000, derandomize=True)
@given(st.one_of(st.text(), st.lists(st.sampled_from(WORDS), max_size=40).map("".join)))
@example("bild(a,b,max_draft=inf)")
def test_any_text_is_a_plan_or_a_short_error(text: str) -> None:
    try:
        plan = parse_plan(text)
    except PlanError as error:
        lines = str(error).split("\n")
        assert len(lines) in (1, 3), lines
        assert all(line.isprintable() and len(line) < 320 for line in lines), lines
    else:
        assert isinstance(plan, Plan)
        assert parse_plan(format_plan(plan)) == plan


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["level", "t"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*LEVEL, *BILD, *ADAPTIVE, "length", "stop", "level"]), inner, max_size=5)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=2000, derandomize=True)
@given(JSONS)
def test_any_json_is_a_plan_or_one_line(value: object) -> None:
    try:
        plan = plan_from_json({"format": "hsdopt-plan", "version": 1, "plan": value})
    except PlanError as error:
        lines = str(error).split("\n")
        assert len(lines) == 1, lines
        assert all(line.isprintable() for line in lines), lines
    else:
        assert plan_from_json(plan_to_json(plan)) == plan


@pytest.mark.parametrize("text", [nested(600), f"t(a:{DIGITS})", "bild(a,b,max_draft=inf)"], ids=range(3))
def test_the_command_line_says_it_and_exits_with_2(text: str, tmp_path: Path) -> None:
    traced_profile(3, prompts=8).save(tmp_path / "profile.json")
    said = call("simulate", tmp_path / "profile.json", "--plan", text, code=2).stderr
    assert said.startswith("hsdopt: expected ")
    assert len(said) < 320


def test_importing_hsdopt_loads_no_pydantic() -> None:
    code = "import sys, hsdopt; hsdopt.parse_plan('t(a:3)'); print('pydantic' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert said.stdout == "False\n"
