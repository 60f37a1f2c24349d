"""Kills at random moments of `hsdopt profile`, `validate` and `align`, then --resume: nothing saved is lost.

``HSDOPT_KILLS`` is the number of kills, ``HSDOPT_KILLS_SEED`` what they are drawn from; see ``make kill-test``.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stack import call, make_stack, profile_arguments

from hsdopt.profiles import Profile
from hsdopt.profiling.journal import Journal
from hsdopt.runtime import load_models

KILLS = int(os.environ.get("HSDOPT_KILLS", "5"))
SEED = int(os.environ.get("HSDOPT_KILLS_SEED", "0"))
COMMANDS = ("profile", "align", "validate")
OUTPUT = {"profile": "profile.json", "validate": "report", "align": "drafter"}
MARK = {"profile": "profile.json.partial", "validate": "report/traces.partial", "align": "drafter.partial/run.jsonl"}

Records = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Whole:
    """A run that nothing stopped: its seconds, its records by journal (see `count`), and the folder it wrote to."""

    seconds: float
    counts: dict[str, int]
    folder: Path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_stack(tmp_path_factory.mktemp("stack"))
    call(*profile_arguments(root, root / "profile.json"))
    return root


@pytest.fixture(scope="module")
def wholes(root: Path) -> dict[str, Whole]:
    return {}


def whole(command: str, root: Path, wholes: dict[str, Whole]) -> Whole:
    """Return the run of a command that nothing stopped, made when it is first asked for."""
    if command not in wholes:
        folder = root / "whole" / command
        folder.mkdir(parents=True)
        started = time.monotonic()
        with journals(folder) as seen:
            call(*arguments(command, root, folder))
        counts = {name: count(records) for name, records in seen.items()}
        wholes[command] = Whole(time.monotonic() - started, counts, folder)
    return wholes[command]


def arguments(command: str, root: Path, folder: Path, *more: str) -> list[str]:
    out = folder / OUTPUT[command]
    if command == "profile":
        return profile_arguments(root, out, *more)
    if command == "validate":
        plans = ("--plan", "big(small:2)", "--plan", "big(lookup:4)")
        options = (*plans, "--repeats", "2", "--no-baselines", "-o", str(out))
        return ["validate", str(root / "profile.json"), *options, *more]
    where = ("--target", str(root / "big"), "--prompts", str(root / "prompts.jsonl"), "-o", str(out))
    effort = ("--max-new-tokens", "12", "--layers", "1", "--steps", "8", "--evaluate-every", "2", "--holdout", "0.3")
    return ["align", *where, *effort, "--threads", "1", *more]


@contextmanager
def journals(folder: Path) -> Iterator[Records]:
    """Yield the records that every journal below `folder` came to hold, by its name; they outlive the files."""
    seen: Records = {}
    opened = Journal.__init__

    def remember(self: Journal, path: Path, header: dict[str, Any], *, resume: bool) -> None:
        opened(self, path, header, resume=resume)
        seen[str(path.relative_to(folder))] = self.records

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "__init__", remember)
        yield seen


def left(folder: Path) -> Records:
    """Return the whole records of the journals that a kill left."""
    found: Records = {}
    for path in (*folder.rglob("*.partial"), *folder.rglob("*.partial/*.jsonl")):
        if path.is_file():
            lines = path.read_bytes().split(b"\n")[:-1]
            found[str(path.relative_to(folder))] = [json.loads(line) for line in lines][1:]
    return found


def kill(command: list[str], mark: Path, rng: random.Random, seconds: float) -> int:
    """Kill a command at a random moment: now and then while it starts, else once it has made its journal."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    start = [sys.executable, "-c", "from hsdopt.cli import main; main()", *command]
    process = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)  # noqa: S603 - our own
    try:
        anywhere = rng.random() < 0.1
        began = time.monotonic()
        while not (anywhere or mark.exists() or process.poll() is not None):
            assert time.monotonic() - began < 120
            time.sleep(0.002)
        time.sleep(rng.uniform(0, seconds))
        process.kill()
        return process.wait(60)
    finally:
        process.kill()
        process.wait()


def contents(out: Path) -> dict[str, bytes]:
    """Return what a finished output holds, by file; what is unfinished beside it does not count."""
    if out.suffix == ".json":
        files = [path for path in (out, out.with_suffix(".traces.npz")) if path.exists()]
    else:
        files = [path for path in out.rglob("*") if path.is_file() and path.suffix not in (".partial", ".part")]
    return {str(path.relative_to(out.parent)): path.read_bytes() for path in files}


def check_complete(command: str, out: Path) -> None:
    """Hold a finished output to being whole."""
    if command == "profile":
        profile = Profile.load(out)
        assert profile.names == ("small", "cut", "lookup", "big")
        assert profile.traces is not None
    elif command == "validate":
        report = json.loads((out / "report.json").read_text())
        assert {"big", "big(small:2)", "big(lookup:4)"} <= {row["plan"] for row in report["plans"]}
        assert (out / "report.html").read_text().rstrip().endswith("</html>")
    else:
        assert load_models([str(out)])
        assert {"README.md", "log.csv", "config.json"} <= {path.name for path in out.iterdir()}


def count(records: list[dict[str, Any]]) -> int:
    """Return the number of records but switches: stopped among those, a profile takes all of them anew."""
    return sum("switch" not in record for record in records)


def twice(records: list[dict[str, Any]]) -> list[str]:
    """Return the passes that were timed more than once under the same number."""
    timed = [record["cost"] for record in records if "cost" in record]
    names = [json.dumps({key: value for key, value in of.items() if not isinstance(value, float)}) for of in timed]
    return sorted({name for name in names if names.count(name) > 1})


def is_finished(command: str, out: Path) -> bool:
    """Whether a command's output is there; a report counts once its first journal is gone."""
    if command == "validate":
        return (out / "report.json").exists() and not (out / "traces.partial").exists()
    return out.exists()


@pytest.mark.parametrize("index", range(KILLS))
def test_a_kill_loses_nothing(root: Path, wholes: dict[str, Whole], tmp_path: Path, index: int) -> None:
    rng = random.Random(f"{SEED}/{index}")
    command = COMMANDS[index % len(COMMANDS)]
    reference = whole(command, root, wholes)
    out = tmp_path / OUTPUT[command]
    replaces = index >= len(COMMANDS) and rng.random() < 0.5
    if replaces:
        shutil.copytree(reference.folder, tmp_path, dirs_exist_ok=True)
    before = contents(out)
    more = ("--force",) if replaces else ()
    code = kill(arguments(command, root, tmp_path, *more), tmp_path / MARK[command], rng, 1.2 * reference.seconds)
    kept = left(tmp_path)
    what = (
        f"HSDOPT_KILLS_SEED={SEED}, kill {index}: {command} {more}, code {code}, {list(map(len, kept.values()))} kept"
    )
    print(what)  # noqa: T201 - shown where it fails, and by make kill-test

    assert code in (-signal.SIGKILL, 0), what
    if is_finished(command, out):
        check_complete(command, out)
    if replaces and command == "validate":
        assert json.loads((out / "report.json").read_text())["plans"], what
    elif replaces:
        assert is_finished(command, out), what
        assert contents(out) == before or not kept or code == 0, what
    resume(command, root, tmp_path, reference, kept)


def resume(command: str, root: Path, folder: Path, reference: Whole, kept: Records) -> None:
    """Continue what was killed, and hold what it ends with to what was kept and to the run that nothing stopped."""
    out = folder / OUTPUT[command]
    if command == "align" and out.exists():
        said = call(*arguments(command, root, folder, "--resume"), code=2).stderr
        assert "is there already" in said
        check_complete(command, out)
        return
    finished = contents(out) if is_finished(command, out) and not kept else None
    with journals(folder) as seen:
        call(*arguments(command, root, folder, "--resume"))
    check_complete(command, out)
    if finished is not None:
        assert contents(out) == finished
        return
    for name, records in kept.items():
        assert seen[name][: len(records)] == records, name
    for name, records in seen.items():
        assert not twice(records), name
        assert count(records) == reference.counts[name], name
    assert seen.keys() == reference.counts.keys()
    assert not left(folder)
    if command == "align":
        made, expected = (path / OUTPUT[command] / "model.safetensors" for path in (folder, reference.folder))
        assert made.read_bytes() == expected.read_bytes()
