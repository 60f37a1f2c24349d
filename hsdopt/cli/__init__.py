"""The command line: one module per command; each parses, calls and prints."""

from __future__ import annotations

import signal
import sys
from time import monotonic
from types import FrameType
from typing import TextIO

_HURRY = 1.0
"""Seconds after a Ctrl-C in which another one changes nothing: the first is being answered."""


def main() -> None:
    """Run the command line; mistakes print one line and exit with 2, Ctrl-C with 130."""
    for stream in (sys.stdout, sys.stderr):
        _print_everything(stream)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _stop_once()
    from hsdopt.cli.app import app

    app()


def _print_everything(stream: TextIO) -> None:
    """Let letters that the locale cannot write appear escaped, where they would end the command."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _stop_once() -> None:
    """Make one Ctrl-C of several in a row."""
    first = -_HURRY

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal first
        if monotonic() - first > _HURRY:
            first = monotonic()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
