"""Options that commands share which run plans of a profile on held-out prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Device", "NewTokens", "ProfilePath", "Remote", "Repeats", "Seed", "Threads"]

ProfilePath = Annotated[Path, typer.Argument(help="A profile made by hsdopt profile.", metavar="PROFILE")]
NewTokens = Annotated[int | None, typer.Option("--max-new-tokens", min=2, help="Tokens per prompt; the profile's.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Runs of every plan on every prompt.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; the profile's.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; the profile's.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the order of runs, sampling and bootstrap.")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Let a hub model run its own code.")]
