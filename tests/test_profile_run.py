"""`hsdopt profile` on tiny models: what it measures, what a kill or a full disk leaves, what --into adds."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from stack import OPTIONS, call, kill_midway, make_stack, profile_arguments, refused
from tiny import save_tiny

from hsdopt.profiles import Profile, traces_path
from hsdopt.profiling.cost import SwitchRecord


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stack(tmp_path_factory.mktemp("stack"))


@pytest.fixture(scope="module")
def finished(stack: Path) -> Path:
    out = stack / "profile.json"
    call(*profile_arguments(stack, out))
    return out


def journal_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def saved_samples(lines: list[bytes]) -> dict[tuple[str, int, int, int], str]:
    """Samples of journal lines by cell and repeat, as the text that stands in the file."""
    costs = [json.loads(line, parse_float=str)["cost"] for line in lines if b'"cost"' in line]
    return {(c["model"], c["tokens"], c["context"], c["repeat"]): c["seconds"] for c in costs}


def final_samples(path: Path) -> dict[tuple[str, int, int, int], str]:
    stored = json.loads(path.read_text(), parse_float=str)["costs"]
    return {
        (cost["model"], cost["tokens"], cost["context"], repeat): seconds
        for cost in stored
        for repeat, seconds in enumerate(cost["seconds"])
    }


def test_a_profile_is_complete_and_reads_back(finished: Path) -> None:
    profile = Profile.load(finished)
    assert profile.names == ("small", "cut", "lookup", "big")
    timings = {(name, s.tokens): len(s.seconds) for name, samples in profile.samples.items() for s in samples}
    singles = {name: timings.pop((name, 1)) for name in profile.names}
    assert {*timings.values()} == {2}
    assert singles == {name: 2 if name == "lookup" else 4 * 2 for name in profile.names}  # most passes are of one token
    assert {sample.context for sample in profile.samples["small"]} == {32, 48}
    assert profile.traces is not None
    assert len(profile.traces) == 2 * 12
    assert 0 < profile.acceptance("small", "big").rate < 1
    assert all(
        Path(info.source.rpartition("@")[2]).is_absolute() for n, info in profile.models.items() if n != "lookup"
    )
    assert not journal_of(finished).exists()


def test_a_finished_profile_is_kept(stack: Path, finished: Path) -> None:
    before = finished.read_bytes()
    assert "replace it with --force" in refused(*profile_arguments(stack, finished))
    done = call(*profile_arguments(stack, finished, "--resume", "--json"))
    assert "complete already" in done.stderr
    assert [row["model"] for row in json.loads(done.stdout)["models"]] == ["big", "small", "cut", "lookup"]
    other = refused(*profile_arguments(stack, finished, "--resume", "--repeats", "3"))
    assert "its options are --repeats 2, not --repeats 3" in other
    assert finished.read_bytes() == before


def test_killed_and_resumed_keeps_every_sample(stack: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    arguments = profile_arguments(stack, out)
    code = kill_midway(arguments, journal_of(out), lines=30)
    assert code == -signal.SIGKILL
    data = journal_of(out).read_bytes()
    whole = data[: data.rfind(b"\n")].split(b"\n")
    journal_of(out).write_bytes(b"\n".join(whole) + b'\n{"cost": {"model": "bi')
    assert "add --resume" in refused(*arguments)
    call(*arguments, "--resume")
    assert not journal_of(out).exists()
    kept, final = saved_samples(whole), final_samples(out)
    assert len(kept) > 10
    assert {cell: final[cell] for cell in kept} == kept
    assert len(final) == 2 * 2 * (3 * (15 + 3) + 1)  # those of one token four times
    traces = Profile.load(out).traces
    assert traces is not None
    for index, line in enumerate(json.loads(line) for line in whole if b'"trace"' in line):
        assert traces.tokens[traces.prompt == index].tolist() == line["trace"]["tokens"]


def test_control_c_says_how_to_go_on(stack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "profile.json"
    calls, fsync = itertools.count(), os.fsync

    def stop(descriptor: int) -> None:
        fsync(descriptor)
        if next(calls) == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", stop)
    last = call(*profile_arguments(stack, out), code=130).stderr.splitlines()[-1]
    assert last.startswith(f"hsdopt: stopped; what was measured is kept in {journal_of(out)}")
    assert last.endswith("continue with the same command and --resume")
    assert journal_of(out).read_bytes().count(b"\n") == 9


def fill_disk(patch: pytest.MonkeyPatch, place: str, after: int) -> None:
    """Let the call at `place` fail as on a full disk, from the one after `after` on."""
    owner, _, name = place.rpartition(".")
    original = getattr(sys.modules[owner], name)
    calls = itertools.count()

    def full(*arguments: object, **options: object) -> object:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments, **options)

    patch.setattr(place, full)


@pytest.mark.parametrize(("place", "after"), [("os.fsync", 0), ("os.fsync", 40), ("numpy.savez_compressed", 0)])
def test_a_full_disk_loses_nothing(
    stack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, after: int
) -> None:
    out = tmp_path / "profile.json"
    with monkeypatch.context() as patch:
        fill_disk(patch, place, after)
        last = call(*profile_arguments(stack, out), code=2).stderr.splitlines()[-1]
    assert last.startswith("hsdopt: cannot write ")
    assert "No space left on device" in last
    assert not out.exists()
    saved = saved_samples(journal_of(out).read_bytes().split(b"\n")[:-1])
    assert bool(saved) == (place != "os.fsync" or after > 0)
    call(*profile_arguments(stack, out, "--resume"))
    final = final_samples(out)
    assert {cell: final[cell] for cell in saved} == saved


def test_the_first_network_added_tells_what_the_target_pays_behind_it(
    stack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def pairs(models: Iterable[str], target: str, *, only: Iterable[str], **_: object) -> Iterator[SwitchRecord]:
        asked.append((target, {*models}, {*only}))
        yield from (SwitchRecord(name, 1, repeat, 3.0 + len(asked), 2.0) for name in only for repeat in range(24))

    out = tmp_path / "profile.json"
    call(
        "profile",
        "--target",
        f"big={stack / 'big'}",
        "--draft",
        "lookup",
        "--prompts",
        stack / "prompts.jsonl",
        "-o",
        out,
        *OPTIONS,
    )
    assert Profile.load(out).cost("big").switch == 0.0  # no other network ever came before
    monkeypatch.setattr("hsdopt.profiling.measure.measure_switches", pairs)
    for index, name in enumerate(("one", "two")):
        save_tiny(tmp_path / name, noise=0.05 * (index + 1))
        call("profile", "--into", out, "--draft", f"{name}={tmp_path / name}")
    assert asked == [("big", {"big", "one"}, {"big", "one"}), ("big", {"big", "two"}, {"two"})]
    profile = Profile.load(out)
    assert {name: profile.cost(name).switch for name in ("big", "one", "two")} == {"big": 2.0, "one": 2.0, "two": 3.0}


def test_into_adds_a_drafter_and_keeps_the_rest(stack: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    shutil.copy(finished, out)
    shutil.copy(traces_path(finished), traces_path(out))
    before, arrays = json.loads(out.read_text()), dict(np.load(traces_path(out)))
    save_tiny(tmp_path / "other", noise=0.05)
    call("profile", "--into", out, "--draft", f"other={tmp_path / 'other'}")
    after, more = json.loads(out.read_text()), dict(np.load(traces_path(out)))
    assert [cost for cost in after["costs"] if cost["model"] != "other"] == before["costs"]
    assert {name: after["models"][name] for name in before["models"]} == before["models"]
    assert len([cost for cost in after["costs"] if cost["model"] == "other"]) == 2 * 15
    kept = {key: (value.dtype, value.tobytes()) for key, value in arrays.items()}
    assert {key: (more[key].dtype, more[key].tobytes()) for key in kept} == kept
    profile = Profile.load(out)
    assert profile.drafters == ("small", "cut", "lookup", "other")
    for pair in (("other", "big"), ("other", "small"), ("small", "other"), ("lookup", "other")):
        assert 0 <= profile.acceptance(*pair).rate <= 1
    assert "it has other" in refused("profile", "--into", out, "--draft", f"other={tmp_path / 'other'}")


def test_into_agrees_with_profiling_all_at_once(stack: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    where = ["--prompts", str(stack / "prompts.jsonl"), "-o", str(out)]
    call("profile", "--target", f"big={stack / 'big'}", "--draft", f"small={stack / 'small'}", *where, *OPTIONS)
    call("profile", "--into", out, "--draft", f"cut=skip:1@{stack / 'big'}", "--draft", "lookup")
    added, whole = Profile.load(out), Profile.load(finished)
    assert added.names == whole.names
    for drafter in whole.drafters:
        for verifier in set(whole.names) - {drafter, "lookup"}:
            assert added.acceptance(drafter, verifier) == whole.acceptance(drafter, verifier)
    assert all((added.lookup[key] == whole.lookup[key]).all() for key in whole.lookup)
