"""A journal of measurements: every record is on disk before the next one is taken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hsdopt.errors import HsdoptError, ProfileError
from hsdopt.files import LARGEST_DOCUMENT, excerpt, parse_json, require_regular

__all__ = ["Journal"]

T = TypeVar("T")


class Journal:
    """An append-only file of JSON lines, led by a header that says what is being measured.

    Parameters
    ----------
    path : Path
        Where the journal lies while the measurement is unfinished.
    header : dict
        What is measured and how; an existing journal must have an equal one to be continued.
    resume : bool
        Continue an existing journal; without it an existing one is refused, so that nothing measured is lost.

    Raises
    ------
    ProfileError
        If there is a journal and `resume` is False, or if its header differs.
    """

    def __init__(self, path: Path, header: dict[str, Any], *, resume: bool) -> None:
        require_regular(path, "a journal of measurements")
        self.path = path
        self.records: list[dict[str, Any]] = []
        header = json.loads(json.dumps(header))
        if path.is_dir():
            raise ProfileError(f"expected a file of unfinished measurements at {path}; it is a folder: move it away")
        if path.exists() and path.stat().st_size:
            if not resume:
                raise ProfileError(
                    f"expected no unfinished measurement at {path}; add --resume to continue it, or delete the file"
                )
            self._read(header)
        else:
            self._append({"header": header})

    def add(self, **record: Any) -> None:  # noqa: ANN401 -- any JSON value
        """Append one record and flush it to disk.

        Raises
        ------
        ProfileError
            If it cannot be written; what was written before stays.
        """
        self._append(record)
        self.records.append(record)

    def read(self, make: Callable[[dict[str, Any]], T], *, holding: str = "") -> list[T]:
        """Return what `make` makes of every record, of those that have the field `holding` if one is named.

        Raises
        ------
        ProfileError
            Naming the line of a record that `make` cannot read; the journal stays as it is.
        """
        made = []
        for number, record in enumerate(self.records, start=2):
            if not holding or holding in record:
                try:
                    made.append(make(record))
                except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                    raise self._damaged(number, f"{_reason(error)}; got {excerpt(record)}") from error
        return made

    def finish(self) -> None:
        """Delete the journal: its records now stand in the finished file."""
        self.path.unlink(missing_ok=True)

    def _append(self, record: dict[str, Any]) -> None:
        try:
            with self.path.open("ab") as stream:
                stream.write(json.dumps(record).encode() + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise ProfileError(
                f"cannot write {self.path}: {error.strerror or error}; what was measured so far is kept: "
                "make room and continue with --resume"
            ) from error

    def _read(self, header: dict[str, Any]) -> None:
        """Read the records; a last line cut short by a kill is dropped from the file."""
        lines: list[dict[str, Any]] = []
        whole = 0
        with self.path.open("rb") as stream:
            # one line at a time, so that a file of another kind is refused before it fills the memory
            while line := stream.readline(LARGEST_DOCUMENT + 1):
                if not line.endswith(b"\n"):
                    if len(line) > LARGEST_DOCUMENT:
                        raise self._damaged(len(lines) + 1, f"it has more than {LARGEST_DOCUMENT // 2**20} MiB")
                    break
                lines.append(self._parse(len(lines) + 1, line))
                whole += len(line)
        if lines and lines[0].get("header") != header:
            raise ProfileError(_difference(self.path, lines[0].get("header"), header))
        if whole < self.path.stat().st_size:
            os.truncate(self.path, whole)
        if not lines:
            self._append({"header": header})
        self.records = lines[1:]

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            value = parse_json(line, "a line", error=ProfileError)
        except ProfileError:
            value = None
        if not isinstance(value, dict):
            raise self._damaged(number, "it is damaged")
        return value

    def _damaged(self, number: int, why: str) -> ProfileError:
        return ProfileError(
            f"{self.path}, line {number}: expected one JSON object as hsdopt writes it; {why}: "
            "delete that line to keep the rest, or the file to start afresh"
        )


def _reason(error: Exception) -> str:
    """Return why a record cannot be read, in a few words."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return str(error).partition("\n")[0] if isinstance(error, HsdoptError) else "it holds other fields or values"


def _difference(path: Path, old: object, new: dict[str, Any]) -> str:
    """Return a line that names the first option in which two headers differ."""
    where, stored, wanted = _first_difference(old, new)
    return (
        f"{path} was started with {where} = {_short(stored)}; this call says {_short(wanted)}: "
        "repeat the first call's options with --resume, or delete the file"
    )


def _first_difference(old: object, new: object, where: str = "") -> tuple[str, object, object]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return where or "header", old, new
    key = next(key for key in {**old, **new} if old.get(key) != new.get(key))
    return _first_difference(old.get(key), new.get(key), f"{where}.{key}" if where else key)


def _short(value: object, *, limit: int = 60) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
