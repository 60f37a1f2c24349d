"""The application: every command under its name."""

from __future__ import annotations

from typing import Annotated

import typer

from hsdopt import __version__
from hsdopt.cli import generate, models, profile, simulate, solve, validate

__all__ = ["app"]

app = typer.Typer(
    name="hsdopt",
    help="Choose, predict and validate speculative decoding stacks for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 -- typer calls it with the option's value
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Choose, predict and validate speculative decoding stacks for language models."""


app.command()(profile.profile)
app.command()(solve.solve)
app.command()(validate.validate)
app.command()(simulate.simulate)
app.command()(generate.generate)
app.add_typer(models.app, name="models")
