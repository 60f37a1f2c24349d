"""How commands fail: one line on stderr, and an exit code that scripts can tell apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from hsdopt.errors import HsdoptError

__all__ = ["BAD_INPUT", "CHECK_FAILED", "STOPPED", "Group", "StoppedError", "resumable"]

CHECK_FAILED = 1
"""Exit code: a check that the user asked for failed."""

BAD_INPUT = 2
"""Exit code: nothing could be done with what was given."""

STOPPED = 130
"""Exit code: stopped with Ctrl-C."""


class StoppedError(HsdoptError):
    """Ctrl-C, with a line that says how to go on."""


class Group(TyperGroup):
    """Commands whose mistakes print one line."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 -- typer's context and result
        """Run the command that was named."""
        with _one_line():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result


@contextmanager
def resumable(*journals: Path) -> Iterator[None]:
    """Turn Ctrl-C into a line that says what is kept, and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        kept = next((journal for journal in journals if journal.exists()), None)
        what = "nothing was measured yet" if kept is None else f"what was measured is kept in {kept}"
        how = "" if kept is None else ": continue with the same command and --resume"
        raise StoppedError(f"stopped; {what}{how}") from None


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except StoppedError as error:
        _fail(str(error), STOPPED)
    except KeyboardInterrupt:
        _fail("stopped", STOPPED)
    except BrokenPipeError:  # whoever read our output has gone; that is no fault
        with open(os.devnull, "w", encoding="utf-8") as nothing:  # noqa: PTH123 -- what is left to flush goes there
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        _fail(message, BAD_INPUT)


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"hsdopt: {message}\n")
    raise typer.Exit(code) from None


def _message(error: Exception) -> str | None:
    """Return the line for a mistake, or None for what must be a fault of hsdopt's own."""
    if isinstance(error, HsdoptError):
        return str(error)
    if isinstance(error, OSError):
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([*names, error.strerror or str(error) or type(error).__name__])
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory: close other programs, use fewer or smaller models, or --dtype bfloat16"
    return _usage(error)


def _usage(error: Exception) -> str | None:
    """Return what the parser of options says, which brings its own class along with typer's version."""
    said = getattr(error, "format_message", None)
    context = getattr(error, "ctx", None)
    if said is None or context is None or "\n" in said():
        return None
    text = said().rstrip(".")
    return f"{text[:1].lower()}{text[1:]} (see {context.command_path} --help)"
