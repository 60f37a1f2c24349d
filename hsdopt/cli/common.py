"""What the commands share: consoles, progress, files, and names of models."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hsdopt.errors import HsdoptError, InvalidArgumentError, ModelError, PlanError
from hsdopt.files import excerpt, read_json, require_regular, write_document

if TYPE_CHECKING:
    from hsdopt.plan import Plan
    from hsdopt.profiles import Profile

__all__ = [
    "absolute",
    "alias",
    "aliases",
    "load_plan",
    "load_profile",
    "milliseconds",
    "new_table",
    "output",
    "output_file",
    "output_folder",
    "print_json",
    "progress_bar",
    "refuse_dash",
    "require_extra",
    "require_sources",
    "seconds_of",
    "status",
    "whole_numbers",
    "write_text",
]


_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

_UNLIMITED = 1000
"""Columns of a pipe: nothing is folded there."""


def output() -> Console:
    """Return the console for results, on stdout; in a pipe tables are as wide as they need."""
    return _console(stderr=False)


def status() -> Console:
    """Return the console for everything that is not a result, on stderr."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    """Return a console that prints names as they are: brackets and colons in them mean nothing."""
    options: dict[str, Any] = {"stderr": stderr, "highlight": False, "markup": False, "emoji": False}
    console = _Console(**options)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return _Console(**options, width=_UNLIMITED)


class _Console(Console):
    """A console that leaves a closed pipe to the command, which ends quietly."""

    def on_broken_pipe(self) -> None:
        """Say that whoever read has gone."""
        raise BrokenPipeError


def new_table(first: str, *numbers: str) -> Table:
    """Return a table with a column of names, which folds, and columns of numbers, which do not."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(first, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_json(value: object) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of (stage, done, total) that draws bars with the time left, on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=_bar_console())
    tasks: dict[str, Any] = {}

    def report(stage: str, done: int, total: int) -> None:
        bars.start()  # with the first news, so that a call that fails at once draws nothing
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total, completed=done)
        bars.update(tasks[stage], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            bars.stop()


def _bar_console() -> Console:
    """Return the console of progress bars, whose descriptions are markup of rich's own."""
    console = Console(stderr=True, highlight=False)
    return console if console.is_terminal else Console(stderr=True, highlight=False, width=80)


def load_profile(path: Path) -> Profile:
    """Return the profile at `path`."""
    from hsdopt.profiles import Profile

    return Profile.load(path)


def load_plan(text: str) -> Plan:
    """Return the plan that `text` writes, or that the JSON file of that name holds."""
    from hsdopt.plan import LONGEST_TEXT, parse_plan, plan_from_json

    path = Path(text)
    if path.suffix != ".json":
        return parse_plan(text)
    shown = text if text.isprintable() and len(text) <= 300 else excerpt(text)
    try:
        value = read_json(path, limit=LONGEST_TEXT, error=PlanError)
    except FileNotFoundError:
        raise PlanError(
            f"expected a plan file at {shown}; there is no such file: write one with hsdopt solve -o"
        ) from None
    except OSError as error:
        raise PlanError(f"expected a plan in JSON at {shown}; {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"expected the path of a plan file; got {shown}") from error
    return plan_from_json(value.get("plan_file", value) if isinstance(value, dict) else value)


def require_sources(profile: Profile) -> None:
    """Raise ModelError if a model that the profile was measured with has moved away."""
    for name, info in profile.models.items():
        path = info.source.rpartition("@")[2]
        if Path(path).is_absolute() and not Path(path).exists():
            raise ModelError(
                f"expected {name} at {path}, where it was profiled; it is not there any more: "
                "put it back, or profile again"
            )


def absolute(source: str) -> str:
    """Return a source as profiles keep it: a built-in name as its recipe, and a path that holds in every folder.

    Examples
    --------
    >>> absolute("smollm2-int8")
    'int8@smollm2'
    """
    from hsdopt.runtime.builtin import BUILTIN

    if source in BUILTIN:
        return BUILTIN[source][0]
    recipe, at, base = source.rpartition("@")
    path = Path(base).expanduser()
    # a link stays a link: caches of the hub link to files whose own names say nothing
    return f"{recipe}{at}{path.absolute()}" if base not in BUILTIN and path.exists() else source


def output_file(path: Path) -> Path:
    """Return `path`, after making sure that a file can be written there; nothing is measured in vain.

    Raises
    ------
    HsdoptError
        If it is a folder, or its folder cannot be made or written.
    """
    refuse_dash(path)
    require_regular(path, "a measurement")
    if path.is_dir():
        raise HsdoptError(f"expected a file as -o; {path} is a folder: name a file in it")
    output_folder(path.parent)
    return path


def refuse_dash(path: Path) -> None:
    """Raise HsdoptError if `path` is ``-``, standard output, which takes one document and no more."""
    if str(path) == "-":
        raise HsdoptError("expected a file or folder as -o; standard output takes one document, this writes several")


def output_folder(path: Path) -> Path:
    """Return `path`, made if it is missing, after making sure that files can be written there.

    Raises
    ------
    HsdoptError
        If it is a file, or cannot be made or written.
    """
    refuse_dash(path)
    if path.exists() and not path.is_dir():
        raise HsdoptError(f"expected a folder as -o; {path} is a file")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise HsdoptError(f"cannot write into {path}: {error.strerror or error}; choose another -o") from error
    return path


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
    """Write a small text file atomically; ``-`` is standard output."""
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        write_document(path, text.encode())
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
        raise MissingExtraError(f"this needs {error.name}: install hsdopt with its extra [{extra}]") from error


def seconds_of(text: str) -> float:
    """Return a length of time in seconds.

    Raises
    ------
    InvalidArgumentError
        If it is not a number above 0 with s, m or h, or several such.

    Examples
    --------
    >>> seconds_of("3m"), seconds_of("90s"), seconds_of("1m30s"), seconds_of("45")
    (180.0, 90.0, 90.0, 45.0)
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(min|[smh]?)", text.strip())
    total = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != re.sub(r"\s", "", text) or total <= 0:
        raise InvalidArgumentError(f"expected --budget as a time above 0, such as 90s, 3m or 1h; got {text!r}")
    return total
