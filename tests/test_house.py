"""How the sources are kept: what only a plan may say of itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NODES = {"Level", "Bild", "Adaptive", "Segment"}
DISPATCHERS = {ROOT / "hsdopt/plan.py"}  # reads and writes plans
PARTS = ("hsdopt", "runtime", "simulate", "profiling")
SOURCES = sorted({path for part in PARTS for path in (ROOT / part).rglob("*.py")} - DISPATCHERS)


def kinds_asked(source: str) -> list[int]:
    """Return the lines that ask with isinstance for a kind of plan."""
    return [
        call.lineno
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "isinstance"
        and NODES
        & {getattr(name, "id", getattr(name, "attr", "")) for kind in call.args[1:] for name in ast.walk(kind)}
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_but_the_plan_asks_for_its_kind(path: Path) -> None:
    assert not kinds_asked(path.read_text(encoding="utf-8"))


def test_questions_of_kind_are_found() -> None:
    assert kinds_asked("isinstance(plan, Level)\nisinstance(p, (int, plan.Bild))\nisinstance(p, Level | Adaptive)") == [
        1,
        2,
        3,
    ]
    assert not kinds_asked("isinstance(level, int)\nplan.stack")
