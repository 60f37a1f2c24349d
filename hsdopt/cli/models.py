"""The commands ``hsdopt models list`` and ``hsdopt models fetch``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hsdopt.cli.common import new_table, output, require_extra
from hsdopt.errors import InvalidArgumentError

app = typer.Typer(no_args_is_help=True, help="List the built-in models, or fetch them.")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("list")
def list_models(*, as_json: AsJson = False) -> None:
    """List the built-in models and whether they are in the cache."""
    with require_extra("runtime"):
        from hsdopt.runtime import builtin

    fetched = builtin.is_fetched()
    rows = [
        {"name": name, "recipe": recipe, "what": what, "fetched": fetched or name == "lookup"}
        for name, (recipe, what) in builtin.BUILTIN.items()
    ]
    if as_json:
        typer.echo(json.dumps({"cache": str(builtin.cache_folder()), "models": rows}))
        return
    table = new_table("name")
    for heading in ("recipe", "here", "what"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(str(row["name"]), str(row["recipe"]), "yes" if row["fetched"] else "no", str(row["what"]))
    output().print(table)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A built-in name; all derive from one download.")] = "smollm2",
    *,
    as_json: AsJson = False,
) -> None:
    """Download and convert the built-in model (93 MB to download, 540 MB kept)."""
    with require_extra("runtime"):
        from hsdopt.runtime import builtin

    if name not in builtin.BUILTIN:
        raise InvalidArgumentError(f"expected one of {', '.join(builtin.BUILTIN)}; got {name!r}")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # bound to the stream now: conversion redirects it for a while
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("looking", total=None)
        folder = builtin.fetch_target(report=lambda step: progress.update(task, description=step))
    typer.echo(json.dumps({"name": name, "folder": str(folder)}) if as_json else str(folder))
