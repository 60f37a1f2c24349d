"""Which layers a copy of the target can do without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hsdopt.errors import InvalidArgumentError
from hsdopt.runtime.calibration import Batch
from hsdopt.runtime.hidden import captured, scored
from hsdopt.runtime.quantised import decoder_layers, without_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from hsdopt.runtime.calibration import Example, Progress, Records

__all__ = ["check_layers", "choose_layers"]


def check_layers(network: PreTrainedModel, layers: int) -> int:
    """Return how many layers `network` has, if `layers` are fewer and at least one.

    Raises
    ------
    InvalidArgumentError
        If they are not.
    """
    count = decoder_layers(network)
    if not 1 <= layers < count:
        raise InvalidArgumentError(f"expected 1 to {count - 1} layers to keep; got {layers}")
    return count


@torch.no_grad()
def choose_layers(
    network: PreTrainedModel,
    examples: Sequence[Example],
    *,
    layers: int,
    group: int = 1,
    journal: Records | None = None,
    progress: Progress | None = None,
) -> tuple[int, ...]:
    """Return which layers to leave out so that `layers` are left and the copy agrees most with the target.

    Layers are dropped one by one, each time the one without which the target's choice is met most often (on a tie,
    without which its tokens are most probable). What comes below a dropped layer is computed once for all.

    Parameters
    ----------
    network : PreTrainedModel
        What the copy is made from.
    examples : sequence of Example
        Calibration data to measure on.
    layers : int
        Layers to keep.
    group : int
        Layers to drop between two rounds of measurements; they are not neighbours. 1 is the most careful.
    journal : Records, optional
        Where dropped layers are kept; those there are not measured again.
    progress : callable, optional
        Called with (stage, done, total).

    Raises
    ------
    InvalidArgumentError
        If `layers` is not between 1 and one less than the network has, or there are no examples.
    """
    count = check_layers(network, layers)
    if not examples or group < 1:
        raise InvalidArgumentError("expected examples to choose layers on, and groups of at least 1 layer")
    known = [] if journal is None else journal.read(lambda record: list(map(int, record["dropped"])), holding="dropped")
    dropped = [layer for layers_ in known for layer in layers_][: count - layers]
    while len(dropped) < count - layers:
        ranked = _ranked(network, dropped, examples)
        added = _apart(ranked, min(group, count - layers - len(dropped)))
        dropped += [layer for _, layer in added]
        if journal is not None:
            journal.add(dropped=[layer for _, layer in added], agreement=added[-1][0][0])
        if progress is not None:
            progress("choosing layers", len(dropped), count - layers)
    return tuple(sorted(dropped))


def _ranked(
    network: PreTrainedModel, dropped: Sequence[int], examples: Sequence[Example], batch: int = 8
) -> list[tuple[tuple[float, float], int]]:
    """Return (agreement, log-likelihood) without each of the layers left, best first, with the layer's number."""
    left = [index for index in range(decoder_layers(network)) if index not in dropped]
    base = without_layers(network, dropped) if dropped else network
    tails = {place: _tail_without(base, place) for place in range(len(left))}
    found = {place: [0.0, 0.0] for place in tails}
    places = 0
    for first in range(0, len(examples), batch):
        part = Batch.of(examples[first : first + batch], network.device)
        places += len(part.best)
        hidden: dict[int, torch.Tensor] = {}
        with captured(base, set(range(len(left))), hidden):
            base.base_model(input_ids=part.ids, use_cache=False)
        for place, tail in tails.items():
            agreed, log = _score(tail, part, hidden[place - 1] if place else None)
            found[place] = [found[place][0] + agreed, found[place][1] + log]
    ranking = [((agreed / places, log / places), left[place]) for place, (agreed, log) in found.items()]
    return sorted(ranking, key=lambda item: (*item[0], -item[1]), reverse=True)


def _tail_without(base: PreTrainedModel, place: int) -> PreTrainedModel:
    """Return the layers from the one below `place` on, without that at `place`."""
    return without_layers(base, [*range(place - 1), place])


def _score(tail: PreTrainedModel, part: Batch, hidden: torch.Tensor | None) -> tuple[float, float]:
    """Return how often the target's choice is met, and the log-likelihood of its choices, summed over places."""
    logits = scored(tail, part, hidden)
    log = -nn.functional.cross_entropy(logits.float(), part.best, reduction="sum")
    return float((logits.argmax(-1) == part.best).sum()), float(log)


def _apart(ranked: Sequence[tuple[tuple[float, float], int]], count: int) -> list[tuple[tuple[float, float], int]]:
    """Return at most `count` of the best, no two of them neighbours; at least one."""
    chosen: list[tuple[tuple[float, float], int]] = []
    for item in ranked:
        if len(chosen) < count and all(abs(item[1] - layer) > 1 for _, layer in chosen):
            chosen.append(item)
    return chosen
