"""The command line: one module per command; each parses, calls and prints."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; errors that hsdopt raises on purpose print one line and exit with 2."""
    from hsdopt.cli.app import app
    from hsdopt.errors import HsdoptError

    try:
        app()
    except HsdoptError as error:
        sys.stderr.write(f"hsdopt: {error}\n")
        sys.exit(2)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        sys.stderr.write(f"hsdopt: {error.strerror or error}{where}\n")
        sys.exit(2)
