"""Checkpoints of a training, from which it goes on bit for bit."""

from __future__ import annotations

import csv
import io
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import safetensors.torch
import torch
from torch import nn

from hsdopt.errors import HsdoptError
from hsdopt.files import write_document

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Checkpoints", "State", "Training", "log_text"]


@dataclass(slots=True)
class State:
    """Where a training stands, but for weights and the optimiser."""

    step: int = 0
    steps: int | None = None
    tokens: int = 0
    seconds: float = 0.0
    best: float = -1.0
    best_step: int = 0
    loss: float = 0.0
    losses: int = 0
    log: list[dict[str, Any]] = field(default_factory=list)


class Training(Protocol):
    """What a checkpoint holds of a training."""

    state: State
    weights: dict[str, nn.Parameter]
    best: dict[str, torch.Tensor]
    optimiser: torch.optim.Optimizer
    device: torch.device


class Checkpoints:
    """The checkpoint of a training: a folder that gets its name when it is whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint."""
        found = [path for path in self.folder.glob("checkpoint-*") if path.suffix != ".part"]
        return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)

    def save(self, training: Training) -> None:
        """Write the checkpoint and the log, then drop older checkpoints."""
        whole = self.folder / f"checkpoint-{training.state.step}"
        part = whole.with_suffix(".part")
        older = [path for path in self.folder.glob("checkpoint-*") if path != whole]
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            self._write(part, training)
            shutil.rmtree(whole, ignore_errors=True)
            part.replace(whole)
            write_document(self.folder / "log.csv", log_text(training.state.log).encode())
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise HsdoptError(
                f"cannot write {whole}: {error.strerror or error}; the checkpoint before it is kept: make room and"
                " continue with --resume"
            ) from error
        for path in older:
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, folder: Path, training: Training) -> None:
        device = training.device
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        state = {
            "state": asdict(training.state),
            "optimiser": training.optimiser.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": cuda,
        }
        stream = io.BytesIO()
        torch.save(state, stream)
        now = {name: weight.detach().contiguous() for name, weight in training.weights.items()}
        for name, content in (
            ("state.pt", stream.getbuffer()),
            ("weights.safetensors", safetensors.torch.save(now)),
            ("best.safetensors", safetensors.torch.save(training.best)),
        ):
            write_document(folder / name, bytes(content))

    def load(self, training: Training) -> None:
        """Continue from the newest checkpoint, if there is one."""
        path = self.latest()
        if path is None:
            return
        try:
            state = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
            now, best = (
                safetensors.torch.load_file(path / f"{name}.safetensors", device=str(training.device))
                for name in ("weights", "best")
            )
        except Exception as error:  # damaged files raise whatever their reader happens to trip over
            raise HsdoptError(f"expected a whole checkpoint in {path}; {error}: delete it to start afresh") from error
        self._check(path, now, training)
        with torch.no_grad():
            for name, weight in training.weights.items():
                weight.copy_(now[name])
        training.best = best
        training.optimiser.load_state_dict(state["optimiser"])
        training.state = State(**state["state"])
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"], training.device)

    def _check(self, path: Path, now: dict[str, torch.Tensor], training: Training) -> None:
        shapes = {name: weight.shape for name, weight in training.weights.items()}
        if {name: weight.shape for name, weight in now.items()} != shapes:
            raise HsdoptError(f"expected the weights of this training in {path}; got others: delete it to start afresh")


def log_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return a training's log as CSV."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
