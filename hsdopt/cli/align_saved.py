"""What `hsdopt align` writes of a training: networks, model cards, learning curves."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsdopt.cli.common import status

if TYPE_CHECKING:
    import torch

    from hsdopt.cli.align_request import Folder, Request
    from hsdopt.profiling import Workload
    from hsdopt.runtime import Model
    from hsdopt.runtime.alignment import Agreement, Outcome
    from hsdopt.runtime.calibration import Example
    from hsdopt.runtime.students import Students

__all__ = ["Saved"]


@dataclass(frozen=True, slots=True)
class Saved:
    """Writes what was trained."""

    request: Request
    place: Folder
    workload: Workload
    target: Model
    outcome: Outcome
    start: str
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

        data = (
            f"{len(examples)} outputs of {self.request.target} with {sum(e.outputs for e in examples)} tokens in all, "
            f"on prompts of {Path(self.workload.name).name} (sha256 {self.workload.sha256[:12]})."
        )
        card = model_card(
            [name] if self._split else list(self.outcome.after),
            self.outcome,
            target=self.request.target,
            source=self._source(name),
            start=self.start,
            data=data,
            recipe={**asdict(self.request.calibration), **asdict(self.request.recipe)},
        )
        return {"README.md": card, "log.csv": log_text(self.outcome.log), **_curve(self.outcome)}

    def _result(self, examples: list[Example]) -> dict[str, Any]:
        outcome = self.outcome
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
            "folder": str(self.place.path),
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
