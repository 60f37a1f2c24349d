"""What `hsdopt align` is to train, and the folder that it goes to."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hsdopt.cli.common import output_folder, refuse_dash
from hsdopt.cli.place import refuse_both
from hsdopt.errors import HsdoptError, InvalidArgumentError
from hsdopt.files import require_regular

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
        """Where checkpoints are kept until the drafter is complete: beside the folder that a link leads to."""
        place = self._place
        return place.with_name(place.name + ".partial")

    @property
    def _place(self) -> Path:
        return Path(os.path.realpath(self.path))

    @property
    def journal(self) -> Path:
        """Where the options and the choice of layers are kept."""
        return self.partial / "run.jsonl"

    def clear(self) -> None:
        """Refuse to replace a finished drafter unless told; forget an unfinished one when told."""
        refuse_both(resume=self.resume, force=self.force)
        self._require_folder()
        begun = self.resume and self.journal.exists()  # by --force, if a finished drafter is there as well
        if self.path.exists() and not self.force and not begun:
            raise HsdoptError(f"{self.path} is there already; name another folder with -o, or replace it with --force")
        if self.force:
            shutil.rmtree(self.partial, ignore_errors=True)
        output_folder(self.partial)
        if self._untouched():
            self.journal.unlink(missing_ok=True)

    def _require_folder(self) -> None:
        """Refuse a place where no folder can go, and one that holds what no alignment wrote."""
        refuse_dash(self.path)
        if self.data is not None:
            require_regular(self.data, "the target's outputs")
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise HsdoptError(f"expected a folder as -o; {self.path} is a file")
        if (
            self.force
            and any(self.path.iterdir())
            and not any((*self.path.glob("alignment.json"), *self.path.glob("*/alignment.json")))
        ):
            raise HsdoptError(
                f"expected a drafter of hsdopt align in {self.path}, for --force to replace; it holds other files: "
                "name another folder with -o"
            )

    def _untouched(self) -> bool:
        """Whether a run before this one left options and nothing else, as after a mistake in them."""
        if not self.journal.exists() or any(self.partial.glob("checkpoint-*")):
            return False
        return self.journal.read_bytes().count(b"\n") <= 1

    def settle(self, made: Path) -> None:
        """Put the finished folder in its place; what was there and the checkpoints go only once that is done."""
        if self._place.exists():
            before = self.partial / "replaced"
            shutil.rmtree(before, ignore_errors=True)
            self._place.replace(before)
        made.replace(self._place)
        shutil.rmtree(self.partial, ignore_errors=True)
