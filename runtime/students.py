"""What is trained: copies of the target with fewer layers, smaller heads, and exits, each as a network of its own."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from hsdopt.errors import InvalidArgumentError
from hsdopt.runtime.calibration import Batch
from hsdopt.runtime.early_exit import first_layers
from hsdopt.runtime.heads import SubsetHead, shrink_head
from hsdopt.runtime.hidden import captured, layers_of, scored
from hsdopt.runtime.quantised import decoder_layers, without_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from hsdopt.runtime.calibration import Example

__all__ = [
    "FULL",
    "Student",
    "Students",
    "agreements",
    "check_exits",
    "drafter",
    "frozen_exits",
    "joint_exits",
]

FULL = "full"
"""The name of the whole network among those that are trained with its exits."""


@dataclass(slots=True, eq=False)
class Student:
    """A network in training.

    Attributes
    ----------
    name : str
        What results are listed under.
    network : PreTrainedModel
        The whole of it, as it will be saved.
    tail : PreTrainedModel
        The part that runs on the trunk's hidden states; the network itself without a trunk.
    first : int
        The trunk's layer whose input the tail starts from.
    """

    name: str
    network: PreTrainedModel
    tail: PreTrainedModel
    first: int = 0


@dataclass(slots=True, eq=False)
class Students:
    """Networks that are trained together on one forward pass of what they share.

    Attributes
    ----------
    parts : list of Student
        One network, or several exits.
    trunk : PreTrainedModel or None
        The network below the exits.
    joint : bool
        Whether the trunk is trained too, on its own loss.
    """

    parts: list[Student]
    trunk: PreTrainedModel | None = None
    joint: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all that is scored."""
        return (*(part.name for part in self.parts), *((FULL,) if self.joint else ()))

    @property
    def device(self) -> torch.device:
        """Where they are."""
        device: torch.device = self.parts[0].network.device
        return device

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained, by names that hold across processes; each once."""
        return {
            f"{owner}/{name}": weight
            for owner, network in self.networks().items()
            for name, weight in network.named_parameters()
            if weight.requires_grad
        }

    def networks(self) -> dict[str, PreTrainedModel]:
        """Return what is to be saved: every exit's network, or the one that holds them all."""
        return {FULL: self.parts[0].network} if self.joint else {part.name: part.network for part in self.parts}

    def train(self, *, mode: bool) -> None:
        """Switch dropout on or off in what is trained."""
        for part in self.parts:
            part.tail.train(mode)
        if self.joint and self.trunk is not None:
            self.trunk.train(mode)

    def heads(self) -> list[SubsetHead]:
        """Return the small heads."""
        heads = [part.network.get_output_embeddings() for part in self.parts]
        return [head for head in heads if isinstance(head, SubsetHead)]

    def logits(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return every student's logits [n, vocab] at the places of the batch."""
        if self.trunk is None:
            return {part.name: scored(part.network, batch) for part in self.parts}
        hidden: dict[int, torch.Tensor] = {}
        whole: dict[str, torch.Tensor] = {}
        with captured(self.trunk, {part.first for part in self.parts}, hidden):
            if self.joint:
                whole[FULL] = scored(self.trunk, batch)
            else:
                with torch.no_grad():
                    self.trunk.base_model(input_ids=batch.ids, use_cache=False)
        exits = {part.name: scored(part.tail, batch, hidden[part.first]) for part in self.parts}
        return exits | whole


def drafter(network: PreTrainedModel, *, skipped: Sequence[int] = (), embeddings: bool = False) -> Students:
    """Return a copy of `network` without the `skipped` layers, ready to be trained.

    Parameters
    ----------
    network : PreTrainedModel
        Stays as it is.
    skipped : sequence of int
        Layers to leave out.
    embeddings : bool
        Whether embeddings and head are trained; otherwise they are the network's own tensors, and frozen.
    """
    base = without_layers(network, skipped) if skipped else network
    frozen = () if embeddings else _embeddings(base)
    made = _owned(base, frozen)
    return Students([Student("drafter", made, made)])


def joint_exits(network: PreTrainedModel, exits: Sequence[int], *, embeddings: bool = False) -> Students:
    """Return a copy of `network` to be trained with exits after so many layers each, on one norm and head.

    The loss of its copy is the mean of the exits' and the whole network's. Source: Big Little Decoder, early exit.

    Raises
    ------
    InvalidArgumentError
        If an exit is not between 1 and one less than the network has layers.
    """
    made = drafter(network, embeddings=embeddings).parts[0].network
    count = decoder_layers(network)
    parts = []
    for layers in check_exits(exits, count):
        last = [index for index in range(count) if index != layers - 1]
        parts.append(Student(f"exit-{layers}", made, without_layers(made, last), layers - 1))
    return Students(parts, made, joint=True)


def frozen_exits(
    network: PreTrainedModel,
    exits: Sequence[int],
    *,
    own: int = 1,
    examples: Sequence[Example] = (),
    head_tokens: Sequence[int] | None = None,
) -> Students:
    """Return exits whose last `own` layers and final norm are theirs; all below, and the head, stays the network's.

    They start as the network's layers just below the exit, or as its last ones: whichever agrees more often with it
    on `examples`.

    Raises
    ------
    InvalidArgumentError
        If an exit is not above `own` layers and below the network's number.
    """
    count = decoder_layers(network)
    parts = []
    for layers in check_exits(exits, count, least=own):
        starts = [first_layers(network, layers), without_layers(network, range(layers - own, count - own))]
        base = (
            starts[0] if not examples or layers == count - own else max(starts, key=lambda n: _agreement(n, examples))
        )
        below = [w for layer in layers_of(base)[: layers - own] for w in layer.parameters()]
        made = _owned(base, (*_embeddings(base), *below))
        if head_tokens is not None:
            shrink_head(made, head_tokens)
        parts.append(Student(f"exit-{layers}", made, without_layers(made, range(layers - own)), layers - own))
    deepest = 1 + max(part.first for part in parts)
    return Students(parts, first_layers(network, deepest) if deepest < count else network)


def check_exits(exits: Sequence[int], count: int, *, least: int = 1) -> list[int]:
    """Return exits in order, each once, if all are after `least` layers or more and below `count`.

    Raises
    ------
    InvalidArgumentError
        If they are not, or there are none.
    """
    if not exits or not all(least <= layers < count for layers in exits):
        raise InvalidArgumentError(f"expected exits after {least} to {count - 1} layers; got {list(exits)}")
    return sorted(set(exits))


def _embeddings(network: PreTrainedModel) -> tuple[nn.Parameter, ...]:
    modules = (network.get_input_embeddings(), network.get_output_embeddings())
    return tuple(w for module in modules if module is not None for w in module.parameters())


def _owned(network: PreTrainedModel, frozen: Sequence[nn.Parameter]) -> PreTrainedModel:
    """Return a copy whose weights are its own and trained, but for the frozen ones, which stay the network's."""
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*frozen, *network.buffers())}
    made = copy.deepcopy(network, memo)
    kept = {id(weight) for weight in frozen}
    for weight in made.parameters():
        if id(weight) not in kept:
            weight.requires_grad_(requires_grad=True)
    return made


@torch.no_grad()
def agreements(students: Students, examples: Sequence[Example], *, batch: int = 8) -> dict[str, list[tuple[int, int]]]:
    """Return, by student and example, the places where its choice is the target's, and all places.

    Exits that are trained with the whole network are held against that network's choice, which is the one that will
    accept or refuse their drafts; the whole network is held against the target it was copied from.
    """
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in students.names}
    students.train(mode=False)
    for first in range(0, len(examples), batch):
        part = Batch.of(examples[first : first + batch], students.device)
        choices = {name: logits.argmax(-1) for name, logits in students.logits(part).items()}
        for name, chosen in choices.items():
            judge = choices[FULL] if FULL in choices and name != FULL else part.best
            equal = (chosen == judge).split(list(part.counts))  # type: ignore[no-untyped-call] # PyTorch's is not typed
            found[name] += [(int(places.sum()), len(places)) for places in equal]
    return found


def _agreement(network: PreTrainedModel, examples: Sequence[Example]) -> float:
    pairs = agreements(Students([Student("one", network, network)]), examples)["one"]
    return sum(agreed for agreed, _ in pairs) / sum(places for _, places in pairs)
