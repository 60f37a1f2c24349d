"""Passes of a network in parts: what its layers take in, and logits from there on."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hsdopt.runtime.quantised import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    from hsdopt.runtime.calibration import Batch

__all__ = ["captured", "layers_of", "scored"]


def scored(network: PreTrainedModel, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """Return logits [n, vocab] at the places of a batch; the head computes no others.

    With `hidden` [batch, length, width] the first layer takes these states in place of what is below it.
    """
    with ExitStack() as stack:
        head = network.get_output_embeddings()
        picked = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][batch.mask][None],))
        stack.callback(picked.remove)
        if hidden is not None:
            replaced = layers_of(network)[0].register_forward_pre_hook(
                lambda _, args, options: _with_hidden(args, options, hidden), with_kwargs=True
            )
            stack.callback(replaced.remove)
        logits: torch.Tensor = network(input_ids=batch.ids, use_cache=False).logits[0]
    return logits


@contextmanager
def captured(network: PreTrainedModel, places: set[int], into: dict[int, torch.Tensor]) -> Iterator[None]:
    """Note the input [batch, length, width] of the layers at `places` while the network runs."""

    def note(place: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            into[place] = args[0] if args else options["hidden_states"]

        return hook

    layers = layers_of(network)
    with ExitStack() as stack:
        for place in places:
            stack.callback(layers[place].register_forward_pre_hook(note(place), with_kwargs=True).remove)
        yield


def _with_hidden(
    args: tuple[Any, ...], options: dict[str, Any], hidden: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), options) if args else (args, {**options, "hidden_states": hidden})


def layers_of(network: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a network."""
    count = decoder_layers(network)
    lists = (m for m in network.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return next(lists)
