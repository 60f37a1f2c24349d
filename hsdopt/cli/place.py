"""The folder that a measurement writes its report to: finished, to be replaced, or to be continued."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from hsdopt.errors import HsdoptError, InvalidArgumentError
from hsdopt.files import excerpt, read_json

__all__ = ["Place", "refuse_both"]


def refuse_both(*, resume: bool, force: bool) -> None:
    """Raise InvalidArgumentError if both --resume and --force are given."""
    if force and resume:
        raise InvalidArgumentError("expected --resume or --force, not both: one continues, the other starts afresh")


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of a report, and the journals of its measurements.

    Attributes
    ----------
    folder : Path
        Where all of it lies.
    name : str
        Of the report, which is there once all is done.
    stages : tuple of str
        What is measured, a journal each. The first journal is made first and goes last: while it is there, the report
        is unfinished.
    resume : bool
        Whether a finished report may be shown again, and an unfinished one is gone on with.
    """

    folder: Path
    name: str
    stages: tuple[str, ...]
    resume: bool

    @property
    def report(self) -> Path:
        """What is there once all is done."""
        return self.folder / self.name

    def journal(self, stage: str) -> Path:
        """Return where the measurements of a stage are kept until all is done."""
        return self.folder / f"{stage}.partial"

    @property
    def _mark(self) -> Path:
        return self.journal(self.stages[0])

    def finished(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the finished report that --resume finds, or None.

        Parameters
        ----------
        asked : mapping
            What tells one measurement from another, as the report's provenance keeps it.

        Raises
        ------
        HsdoptError
            If the report cannot be read, or answers another question.
        """
        if not self.resume or self._mark.exists() or not self.report.exists():
            return None
        try:
            report = read_json(self.report)
        except HsdoptError as error:
            raise HsdoptError(
                f"expected a report in {self.report}; got none ({error}): replace it with --force"
            ) from error
        if not isinstance(report, dict) or not isinstance(report.get("provenance", {}), dict):
            raise HsdoptError(f"expected a report in {self.report}; got {excerpt(report)}: replace it with --force")
        self._require_same(report, json.loads(json.dumps(asked)))
        typer.echo(f"{self.report} is complete already; --force measures afresh", err=True)
        return report

    def _require_same(self, report: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
        stored = report.get("provenance", {})
        what = next((key for key in asked if stored.get(key) != asked[key]), None)
        if what is not None:
            raise HsdoptError(
                f"{self.report} is complete, but with {what} = {_short(stored.get(what))}; this call says "
                f"{_short(asked[what])}: repeat its options to see it, name another folder with -o, or replace it with "
                "--force"
            )

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Turn what a report from elsewhere lacks into one line; a report just made lacks nothing.

        Raises
        ------
        HsdoptError
            If the report is not as its command writes it.
        """
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
            if isinstance(error, HsdoptError | UnicodeError):  # also of a terminal without the letters
                raise
            fault = f"{type(error).__name__} at {excerpt(str(error))}"
            raise HsdoptError(
                f"expected a report in {self.report} as this command writes it; got another ({fault}): "
                "replace it with --force"
            ) from error

    @contextmanager
    def replacing(self, *, force: bool) -> Iterator[None]:
        """Refuse to replace a finished report unless told; forget what was measured before when told.

        From here on --resume takes the report as unfinished: an empty first journal, which is made before all else and
        emptied last, says so however early a kill comes. It goes again if nothing was measured after all.
        """
        if not force:
            if self.report.exists() and not self._mark.exists():
                raise HsdoptError(
                    f"{self.folder} holds a finished report; name another folder with -o, or replace it with --force"
                )
            yield
            return
        fresh = not self._mark.exists()
        self._mark.touch()
        for stage in self.stages[1:]:
            self.journal(stage).unlink(missing_ok=True)
        self._mark.write_bytes(b"")
        try:
            yield
        except BaseException:
            if fresh and self._mark.exists() and not self._mark.stat().st_size:
                self._mark.unlink()
            raise

    def finish(self) -> None:
        """Delete the journals, the first one last: what they hold stands in the report."""
        for stage in reversed(self.stages):
            self.journal(stage).unlink(missing_ok=True)


def _short(value: object, *, limit: int = 60) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
