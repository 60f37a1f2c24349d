"""A stack of tiny models on disk, and the command line run on it: in this process, or in one that can be killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tiny import save_tiny
from typer.testing import CliRunner

from hsdopt.cli.app import app
from hsdopt.profiles import traces_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result

OPTIONS = ("--max-new-tokens", "12", "--contexts", "32,48", "--repeats", "2", "--threads", "1")


def make_stack(root: Path) -> Path:
    """Save two models and four prompts in `root`; return it."""
    save_tiny(root / "big")
    save_tiny(root / "small", noise=0.03)
    lines = [json.dumps({"prompt": f"Say number {index} twice."}) for index in range(4)]
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return root


def profile_arguments(root: Path, out: Path, *more: str) -> list[str]:
    """Arguments that profile the stack: a noisy copy, a copy without a layer, and lookup."""
    drafts = [f"small={root / 'small'}", f"cut=skip:1@{root / 'big'}", "lookup"]
    named = [part for draft in drafts for part in ("--draft", draft)]
    where = ["--prompts", str(root / "prompts.jsonl"), "-o", str(out)]
    return ["profile", "--target", f"big={root / 'big'}", *named, *where, *OPTIONS, *more]


def edited(profile: Path, out: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write a changed copy of a profile to `out`, with the traces it names beside it; return it."""
    stored = json.loads(profile.read_text())
    change(stored)
    out.write_text(json.dumps(stored))
    shutil.copy(traces_path(profile), traces_path(out))
    return out


def call(*arguments: str | Path, code: int = 0, **environment: str) -> Result:
    """Run a command in this process; hold it to its exit code, and failures to one line on stderr."""
    torch.set_num_threads(1)
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120", **environment})
    assert result.exit_code == code, (result.output, result.exception)
    assert "\x1b" not in result.output
    if code == 2:
        assert not result.stdout
        assert "Traceback" not in result.stderr
    return result


def refused(*arguments: str | Path, code: int = 2) -> str:
    """Return the one line that a refused command prints."""
    lines = call(*arguments, code=code).stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("hsdopt: ")
    return lines[0]


def kill_midway(arguments: list[str], journal: Path, *, lines: int) -> int:
    """Start the command in a process of its own, kill it once the journal has so many lines; return its exit code."""
    command = [sys.executable, "-c", "from hsdopt.cli import main; main()", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    process = subprocess.Popen(  # noqa: S603 -- our own command
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        deadline = time.monotonic() + 60
        while not (journal.exists() and journal.read_bytes().count(b"\n") >= lines):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.kill()
        return process.wait(30)
    finally:
        process.kill()
        process.wait()
