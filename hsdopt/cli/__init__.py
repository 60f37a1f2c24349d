"""The command line: one module per command; each parses, calls and prints."""

from __future__ import annotations


def main() -> None:
    """Run the command line; mistakes print one line and exit with 2, Ctrl-C with 130."""
    from hsdopt.cli.app import app

    app()
