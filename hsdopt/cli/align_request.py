"""What `hsdopt align` is to train, and the folder that it goes to."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hsdopt.cli.common import output_folder
from hsdopt.cli.place import refuse_both
from hsdopt.errors import HsdoptError, InvalidArgumentError

if TYPE_CHECKING:
    from hsdopt.runtime.alignment import Recipe
    from hsdopt.runtime.calibration import Calibration

__all__ = ["Folder", "Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be trained, and how: all that a resumed run must have alike."""

    target: str
    small: str | None
    layers: int | None
    exits: tuple[int, ...] | None
    own_layers: int | None
    head_tokens: int | None
    train_embeddings: bool | None
    drop_group: int
    choice_tokens: int
    holdout: float
    recipe: Recipe
    calibration: Calibration

    def __post_init__(self) -> None:
        """Refuse what cannot go together."""
        given = [self.small, self.layers, self.exits]
        if all(option is None for option in given):
            raise InvalidArgumentError("expected a start: --small MODEL, --layers N or --exits N,N; got none")
        if self.exits is not None and (self.small is not None or self.layers is not None):
            raise InvalidArgumentError("expected --exits without --small and --layers: exits are the target's own")
        if self.own_layers is not None and self.exits is None:
            raise InvalidArgumentError("expected --exits with --freeze-target; got none")
        if self.joint and self.head_tokens is not None:
            raise InvalidArgumentError("expected --freeze-target with --head-tokens and --exits: the head is shared")

    @property
    def joint(self) -> bool:
        """Whether the target's copy is trained together with its exits."""
        return self.exits is not None and self.own_layers is None

    @property
    def embeddings(self) -> bool:
        """Whether embeddings are trained: those of a given model unless told, those of a copy if told."""
        if self.train_embeddings is None:
            return self.small is not None and self.layers is None
        return self.train_embeddings


@dataclass(frozen=True, slots=True)
class Folder:
    """Where the drafter goes, and its checkpoints until it is complete.

    Attributes
    ----------
    path : Path
        The drafter's own folder.
    data : Path or None
        The file of the target's outputs; beside the checkpoints if not given.
    resume, force : bool
        Whether to continue an unfinished training, or to start afresh.
    """

    path: Path
    data: Path | None
    resume: bool
    force: bool

    @property
    def partial(self) -> Path:
        """Where checkpoints are kept until the drafter is complete."""
        return self.path.with_name(self.path.name + ".partial")

    @property
    def journal(self) -> Path:
        """Where the options and the choice of layers are kept."""
        return self.partial / "run.jsonl"

    def clear(self) -> None:
        """Refuse to replace a finished drafter unless told; forget an unfinished one when told."""
        refuse_both(resume=self.resume, force=self.force)
        if self.path.exists() and not self.force:
            raise HsdoptError(f"{self.path} is there already; name another folder with -o, or replace it with --force")
        if self.force:
            shutil.rmtree(self.partial, ignore_errors=True)
        output_folder(self.partial)
        if self._untouched():
            self.journal.unlink(missing_ok=True)

    def _untouched(self) -> bool:
        """Whether a run before this one left options and nothing else, as after a mistake in them."""
        if not self.journal.exists() or any(self.partial.glob("checkpoint-*")):
            return False
        return self.journal.read_bytes().count(b"\n") <= 1

    def settle(self, made: Path) -> None:
        """Put the finished folder in its place; the checkpoints go only once that is done."""
        if self.path.exists():
            shutil.rmtree(self.path)
        made.replace(self.path)
        shutil.rmtree(self.partial, ignore_errors=True)
