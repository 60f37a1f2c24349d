"""Journals: what is written stays, and is continued by the same options alone."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from hsdopt.errors import ProfileError
from hsdopt.profiling.journal import Journal

HEADER = {"target": "big", "setting": {"temperature": 0.0, "max_new_tokens": 8}, "contexts": (32, 48)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.json.partial"


def test_records_survive_and_are_read_back(path: Path) -> None:
    first = Journal(path, HEADER, resume=False)
    first.add(cost=0.1)
    first.add(cost=1 / 3)
    before = path.read_bytes()
    again = Journal(path, HEADER, resume=True)
    assert again.records == [{"cost": 0.1}, {"cost": 1 / 3}] == first.records
    again.add(cost=2.0)
    assert path.read_bytes().startswith(before)
    again.finish()
    assert not path.exists()


@pytest.mark.parametrize("torn", [b'{"cost": 0.', b"\0\0\0", b"\xff"])
def test_a_torn_last_line_is_dropped_and_no_other(path: Path, torn: bytes) -> None:
    Journal(path, HEADER, resume=False).add(cost=1)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert Journal(path, HEADER, resume=True).records == [{"cost": 1}]
    assert path.read_bytes() == whole


def test_a_torn_header_starts_afresh(path: Path) -> None:
    path.write_bytes(b'{"header": {"tar')
    journal = Journal(path, HEADER, resume=True)
    journal.add(cost=1)
    assert [list(json.loads(line)) for line in path.read_text().splitlines()] == [["header"], ["cost"]]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"target": "small"}, 'target = "big"; this call says "small"'),
        (
            {"setting": {"temperature": 0.0, "max_new_tokens": 9}},
            "setting.max_new_tokens = 8; this call says 9",
        ),
        ({"contexts": (32,)}, r"contexts = \[32, 48\]; this call says \[32\]"),
        ({"repeats": 3}, "repeats = nothing; this call says 3"),
    ],
)
def test_other_options_are_refused_by_name(path: Path, changed: dict[str, Any], named: str) -> None:
    Journal(path, HEADER, resume=False).add(cost=1)
    before = path.read_bytes()
    with pytest.raises(ProfileError, match=named):
        Journal(path, {**HEADER, **changed}, resume=True)
    assert path.read_bytes() == before


def test_an_unfinished_journal_is_not_overwritten(path: Path) -> None:
    Journal(path, HEADER, resume=False).add(cost=1)
    with pytest.raises(ProfileError, match="add --resume to continue it"):
        Journal(path, HEADER, resume=False)
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("line", [b"{oops}\n", b"[1]\n", b"\xff\n"])
def test_a_damaged_line_is_named(path: Path, line: bytes) -> None:
    Journal(path, HEADER, resume=False)
    with path.open("ab") as stream:
        stream.write(line + b'{"cost": 1}\n')
    with pytest.raises(ProfileError, match="line 2: expected one JSON object"):
        Journal(path, HEADER, resume=True)


def test_a_full_disk_keeps_what_was_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, HEADER, resume=False)
    journal.add(cost=1)
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(ProfileError, match="No space left on device; what was measured so far is kept"):
            journal.add(cost=2)
    assert path.read_bytes().startswith(before)
    assert Journal(path, HEADER, resume=True).records[0] == {"cost": 1}
