"""What `hsdopt align` writes of a training: networks, model cards, learning curves."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsdopt.cli.common import status
from hsdopt.errors import HsdoptError
from hsdopt.files import read_json

if TYPE_CHECKING:
    import torch

    from hsdopt.cli.align_request import Folder, Request
    from hsdopt.profiling import Workload
    from hsdopt.runtime import Model
    from hsdopt.runtime.alignment import Agreement, Outcome
    from hsdopt.runtime.calibration import Example
    from hsdopt.runtime.students import Students

__all__ = ["Saved", "Start", "kept_of_target"]

_RECORD = "alignment.json"
"""In the folder of a drafter: its acceptance before and after, the layers it has, and how it was trained."""


@dataclass(frozen=True, slots=True)
class Start:
    """What training started from.

    Attributes
    ----------
    text : str
        A sentence for the model card.
    layers : tuple of int or None
        The target's layers that are left; None if it is no cut of the target.
    """

    text: str
    layers: tuple[int, ...] | None = None


def kept_of_target(request: Request, kept: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return which of the target's layers are left where those `kept` are left of what a drafter starts from.

    None if it starts from a model that was not cut from this target.
    """
    if request.small is None:
        return kept
    try:
        record = read_json(Path(request.small) / _RECORD)
        below = record["layers"] if record["target"] == request.target else None
        return None if below is None else tuple(int(below[layer]) for layer in kept)
    except (OSError, HsdoptError, ValueError, KeyError, TypeError, IndexError):  # a model from elsewhere
        return None


@dataclass(frozen=True, slots=True)
class Saved:
    """Writes what was trained."""

    request: Request
    place: Folder
    workload: Workload
    target: Model
    outcome: Outcome
    start: Start
    compact: bool

    def write(self, students: Students, dtype: torch.dtype | None, examples: list[Example]) -> dict[str, Any]:
        """Write the folder of every network, put them in their place, and return what is shown."""
        from hsdopt.runtime.drafters import save_drafter

        made = self.place.partial / "made"
        shutil.rmtree(made, ignore_errors=True)
        for name, network in students.networks().items():
            save_drafter(
                made / name if self._split else made,
                network,
                self.target.tokenizer,
                target=self.target.network,
                source=self.request.target,
                dtype=dtype,
                compact=self.compact,
                files=self._files(name, examples),
            )
        self.place.settle(made)
        return self._result(examples)

    @property
    def _split(self) -> bool:
        """Whether every exit has a folder of its own."""
        return self.request.exits is not None and not self.request.joint

    def _source(self, name: str) -> str:
        """Return what a student is loaded from."""
        path = self.place.path.absolute()
        if self.request.exits is None or name == "full":
            return str(path)
        return f"exit:{name.removeprefix('exit-')}@{path}" if self.request.joint else str(path / name)

    def _files(self, name: str, examples: list[Example]) -> dict[str, str | bytes]:
        from hsdopt.runtime.checkpoints import log_text
        from hsdopt.runtime.drafters import model_card

        own = len({e.group for e in examples if e.group >= len(self.workload) and e.kind != "prompt"})
        data = (
            f"{len(examples)} outputs of {self.request.target} with {sum(e.outputs for e in examples)} tokens in all, "
            f"on prompts of {Path(self.workload.name).name} (sha256 {self.workload.sha256[:12]})"
            f"{f' and {own} that it wrote itself' if own else ''}."
        )
        card = model_card(
            [name] if self._split else list(self.outcome.after),
            self.outcome,
            target=self.request.target,
            source=self._source(name),
            start=self.start.text,
            data=data,
            recipe={**asdict(self.request.calibration), **asdict(self.request.recipe)},
        )
        record = {"target": self.request.target, **self._record(examples)}
        return {
            "README.md": card,
            "log.csv": log_text(self.outcome.log),
            _RECORD: json.dumps(record, indent=1) + "\n",
            **_curve(self.outcome),
        }

    def _result(self, examples: list[Example]) -> dict[str, Any]:
        return {"folder": str(self.place.path), **self._record(examples)}

    def _record(self, examples: list[Example]) -> dict[str, Any]:
        from hsdopt.runtime.quantised import decoder_layers

        outcome, kept = self.outcome, self.start.layers
        layers = range(decoder_layers(self.target.network))
        drafters = [
            {
                "name": name,
                "source": self._source(name),
                "before": _rate(outcome.before[name]),
                "after": _rate(outcome.after[name]),
            }
            for name in outcome.after
        ]
        return {
            "layers": kept,
            "without": None if kept is None else [layer for layer in layers if layer not in kept],
            "drafters": drafters,
            "steps": outcome.steps,
            "best_step": outcome.best_step,
            "tokens": outcome.tokens,
            "seconds": outcome.seconds,
            "stopped": outcome.stopped,
            "sequences": len(examples),
        }


def _curve(outcome: Outcome) -> dict[str, bytes]:
    """Return the learning curve as files; none without matplotlib."""
    try:
        from matplotlib.figure import Figure

        from hsdopt import plots
    except ModuleNotFoundError:
        status().print("no learning curve: install hsdopt with its extra [plots]")
        return {}
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    plots.learning_curve(outcome.log, ax=figure.subplots())
    return {f"learning-curve.{suffix}": plots.render(figure, suffix) for suffix in ("png", "svg")}


def _rate(found: Agreement) -> dict[str, Any]:
    return {
        "acceptance": found.rate,
        "interval": [found.low, found.high],
        "accepted": found.accepted,
        "places": found.places,
    }
