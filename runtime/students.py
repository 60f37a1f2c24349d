"""What is trained: copies of the target with fewer layers, smaller heads, and exits, each as a network of its own."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hsdopt.errors import InvalidArgumentError, ModelError
from hsdopt.runtime.calibration import Batch
from hsdopt.runtime.early_exit import first_layers
from hsdopt.runtime.quantised import decoder_layers, without_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from transformers import PreTrainedModel

    from hsdopt.runtime.calibration import Example, Progress, Records

__all__ = [
    "Student",
    "Students",
    "SubsetHead",
    "agreements",
    "check_exits",
    "check_layers",
    "choose_layers",
    "drafter",
    "frequent_tokens",
    "frozen_exits",
    "joint_exits",
    "scored",
    "shrink_head",
    "whole_head",
]

FULL = "full"
"""The name of the whole network among those that are trained with its exits."""


class SubsetHead(nn.Module):
    """A head over some ids only, whose logits stand at these ids; all others are out of reach.

    Parameters
    ----------
    whole : nn.Linear
        The head that it is cut from, with weights [vocab, width]; kept to be saved, unless it is told to `forget`.
    ids : Tensor [k] of int
        The ids that are left.
    """

    ids: torch.Tensor

    def __init__(self, whole: nn.Linear, ids: torch.Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = whole.weight.shape
        with torch.device("meta"):
            self.inner = nn.Linear(self.in_features, len(ids), bias=whole.bias is not None)
        # a linear layer within, which quantised copies find and quantise
        for name, weight in whole.named_parameters():
            rows = nn.Parameter(weight.detach()[ids].clone(), requires_grad=weight.requires_grad)
            setattr(self.inner, name, rows)
        self.register_buffer("ids", ids)
        self.spread = True
        self._whole: tuple[nn.Linear, ...] = (whole,)  # in a tuple, and so no part of the network

    @property
    def whole(self) -> nn.Linear:
        """The head that it was cut from.

        Raises
        ------
        ModelError
            If it was let go of.
        """
        if not self._whole:
            raise ModelError(
                "expected a drafter whose head is whole, or rows of its embeddings; got a small head of its own:"
                " start from another drafter"
            )
        return self._whole[0]

    def forget(self) -> None:
        """Let go of the whole head, and of its memory."""
        self._whole = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., width] to logits [..., vocab], or to those of the ids alone, [..., k], while `spread` is off."""
        small: torch.Tensor = self.inner(x)
        if not self.spread:
            return small
        # finite, so that no product with a probability of zero is undefined; its softmax is exactly zero
        logits = small.new_full((*small.shape[:-1], self.out_features), torch.finfo(small.dtype).min / 2)
        logits[..., self.ids] = small
        return logits


def shrink_head(network: PreTrainedModel, ids: Sequence[int]) -> PreTrainedModel:
    """Give `network` a head over `ids` only, in place; return it."""
    head = network.get_output_embeddings()
    rows = torch.tensor(sorted(ids), device=head.weight.device)
    network.set_output_embeddings(SubsetHead(head, rows))
    return network


def whole_head(network: PreTrainedModel) -> PreTrainedModel:
    """Give `network` its whole head back, in place, if it has a small one; return it.

    Raises
    ------
    ModelError
        If the whole head was let go of.
    """
    head = network.get_output_embeddings()
    if isinstance(head, SubsetHead):
        network.set_output_embeddings(head.whole)
    return network


def frequent_tokens(examples: Iterable[Example], count: int, *, vocab_size: int, ends: Iterable[int]) -> list[int]:
    """Return the `count` most frequent ids of the target's outputs, sorted; ends of text are always among them.

    Where the outputs hold fewer, the lowest ids fill up: tokenizers that merge pairs number them by frequency.

    Raises
    ------
    InvalidArgumentError
        If `count` is not between the number of ends and the vocabulary's size.

    Examples
    --------
    >>> from hsdopt.runtime.calibration import Example
    >>> frequent_tokens([Example(0, (9, 7, 7, 8), 1, (7, 7, 8))], 3, vocab_size=10, ends=[2])
    [2, 7, 8]
    """
    first = list(dict.fromkeys(ends))
    if not max(1, len(first)) <= count < vocab_size:
        raise InvalidArgumentError(
            f"expected a head of {max(1, len(first))} to {vocab_size - 1} tokens; got {count}: leave it out for all"
        )
    seen = Counter(token for example in examples for token in example.best)
    common = [token for token, _ in sorted(seen.items(), key=lambda item: (-item[1], item[0]))]
    return sorted(list(dict.fromkeys([*first, *common, *range(vocab_size)]))[:count])


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
        with _captured(self.trunk, {part.first for part in self.parts}, hidden):
            if self.joint:
                whole[FULL] = scored(self.trunk, batch)
            else:
                with torch.no_grad():
                    self.trunk.base_model(input_ids=batch.ids, use_cache=False)
        exits = {part.name: scored(part.tail, batch, hidden[part.first]) for part in self.parts}
        return exits | whole


def scored(network: PreTrainedModel, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """Return logits [n, vocab] at the places of a batch; the head computes no others.

    With `hidden` [batch, length, width] the first layer takes these states in place of what is below it.
    """
    with ExitStack() as stack:
        head = network.get_output_embeddings()
        picked = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][batch.mask][None],))
        stack.callback(picked.remove)
        if hidden is not None:
            replaced = _layers(network)[0].register_forward_pre_hook(
                lambda _, args, options: _with_hidden(args, options, hidden), with_kwargs=True
            )
            stack.callback(replaced.remove)
        logits: torch.Tensor = network(input_ids=batch.ids, use_cache=False).logits[0]
    return logits


@contextmanager
def _captured(network: PreTrainedModel, places: set[int], into: dict[int, torch.Tensor]) -> Iterator[None]:
    """Note the input [batch, length, width] of the layers at `places` while the network runs."""

    def note(place: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            into[place] = args[0] if args else options["hidden_states"]

        return hook

    layers = _layers(network)
    with ExitStack() as stack:
        for place in places:
            stack.callback(layers[place].register_forward_pre_hook(note(place), with_kwargs=True).remove)
        yield


def _with_hidden(
    args: tuple[Any, ...], options: dict[str, Any], hidden: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), options) if args else (args, {**options, "hidden_states": hidden})


def _layers(network: PreTrainedModel) -> nn.ModuleList:
    count = decoder_layers(network)
    lists = (m for m in network.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return next(lists)


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
        below = [w for layer in _layers(base)[: layers - own] for w in layer.parameters()]
        made = _owned(base, (*_embeddings(base), *below))
        if head_tokens is not None:
            shrink_head(made, head_tokens)
        parts.append(Student(f"exit-{layers}", made, without_layers(made, range(layers - own)), layers - own))
    deepest = 1 + max(part.first for part in parts)
    return Students(parts, first_layers(network, deepest) if deepest < count else network)


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
    known = [] if journal is None else [record["dropped"] for record in journal.records if "dropped" in record]
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
        with _captured(base, set(range(len(left))), hidden):
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
