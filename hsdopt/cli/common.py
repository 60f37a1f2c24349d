"""What the commands share: consoles, progress, files, and names of models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hsdopt.errors import HsdoptError, InvalidArgumentError, PlanError

if TYPE_CHECKING:
    from hsdopt.plan import Plan
    from hsdopt.profiles import Profile

__all__ = [
    "alias",
    "aliases",
    "load_plan",
    "load_profile",
    "milliseconds",
    "output",
    "print_json",
    "progress_bar",
    "require_extra",
    "status",
    "whole_numbers",
    "write_text",
]


def output() -> Console:
    """Return the console for results, on stdout; in a pipe tables are as wide as they need."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in __import__("os").environ:
        return Console(highlight=False, width=120)
    return console


def status() -> Console:
    """Return the console for everything that is not a result, on stderr."""
    return Console(stderr=True, highlight=False)


def print_json(value: object) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of (stage, done, total) that draws bars with the time left, on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=status()) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, completed=done)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


def load_profile(path: Path) -> Profile:
    """Return the profile at `path`."""
    from hsdopt.profiles import Profile

    return Profile.load(path)


def load_plan(text: str) -> Plan:
    """Return the plan that `text` writes, or that the JSON file of that name holds."""
    from hsdopt.plan import parse_plan, plan_from_json

    path = Path(text)
    if path.suffix != ".json":
        return parse_plan(text)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(
            f"expected a plan file at {path}; there is no such file: write one with hsdopt solve -o"
        ) from None
    except (OSError, ValueError) as error:
        raise PlanError(f"expected a plan in JSON at {path}; {error}") from error
    return plan_from_json(value.get("plan_file", value) if isinstance(value, dict) else value)


def alias(text: str) -> tuple[str, str]:
    """Return (name, source) of a model argument: ``name=source``, or a source that is its own name."""
    name, equals, source = text.partition("=")
    if not equals:
        return text, text
    if not name or not source:
        raise InvalidArgumentError(f"expected a model as SOURCE or NAME=SOURCE; got {text!r}")
    return name, source


def aliases(texts: Sequence[str]) -> dict[str, str]:
    """Return sources by name; the same name twice is an error."""
    pairs = [alias(text) for text in texts]
    named = dict(pairs)
    if len(named) < len(pairs):
        twice = next(name for name in named if sum(name == other for other, _ in pairs) > 1)
        raise InvalidArgumentError(f"expected every model once; got {twice} twice: give one an alias, NAME=SOURCE")
    return named


def whole_numbers(text: str | None, what: str) -> tuple[int, ...] | None:
    """Return the numbers of a comma-separated list, or None if none was given."""
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgumentError(
            f"expected {what} as whole numbers with commas, such as 64,128; got {text!r}"
        ) from None
    if any(number < 1 for number in numbers):
        raise InvalidArgumentError(f"expected {what} of at least 1; got {text!r}")
    return numbers


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically."""
    from hsdopt.profiles import atomic_write

    try:
        atomic_write(path, lambda stream: stream.write(text.encode()))
    except OSError as error:
        raise HsdoptError(f"cannot write {path}: {error.strerror or error}") from error


def milliseconds(seconds: float) -> str:
    """Return `seconds` as milliseconds, with a precision that suits its size."""
    value = seconds * 1e3
    return f"{value:.3g}" if value < 10 else f"{value:.1f}"


@contextmanager
def require_extra(extra: str) -> Iterator[None]:
    """Turn a failing import into one line that names what to install."""
    from hsdopt.errors import MissingExtraError

    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"this needs {error.name}; install it with: pip install 'hsdopt[{extra}]'") from error
