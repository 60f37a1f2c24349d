"""The application: every command under its name."""

from __future__ import annotations

from typing import Annotated

import typer

from hsdopt import __version__
from hsdopt.cli import align, check, generate, models, plot, profile, quality, simulate, solve, validate
from hsdopt.cli.faults import Group

__all__ = ["app"]

app = typer.Typer(
    name="hsdopt",
    cls=Group,
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


app.command(short_help="Measure pass costs and acceptance.")(profile.profile)
app.command(short_help="Find the fastest stack for a profile.")(solve.solve)
app.command(short_help="Run plans; compare with predictions.")(validate.validate)
app.command(short_help="What lossy decoding gains and costs.")(quality.quality)
app.command(short_help="Simulate a plan pass by pass.")(simulate.simulate)
app.command(short_help="Write text with a plan.")(generate.generate)
app.command(short_help="Draw a profile or a report again.")(plot.plot)
app.command(short_help="Train drafters for a target.")(align.align)
app.command(short_help="Does a profile still hold here?")(check.check)
app.add_typer(models.app, name="models", short_help="List or fetch the built-in models.")
