"""Copies of a network whose linear layers hold int8 or int4 weights, and copies without some of its layers.

Weights only: activations stay in bfloat16, because quantising them as well costs a drafter most of its acceptance.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hsdopt.errors import InvalidArgumentError, ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

Precision = Literal["int8", "int4"]
GROUP = 32
_ACTIVATIONS = torch.bfloat16
_SMALLEST = 1e-20  # of a scale: rows of zeros must not divide by it


class Int8Linear(nn.Module):
    """``y = x W^T + b`` with W [out, in] as int8, one scale per output."""

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        scales = torch.maximum(*(end.abs() for end in weight.float().aminmax(dim=1))) / 127
        scales = scales.clamp_min(_SMALLEST).to(_ACTIVATIONS)  # rounded first: the codes then suit what is used
        codes = (weight / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8).contiguous()
        self.register_buffer("weight", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if bias is None else bias.to(_ACTIVATIONS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out] in bfloat16."""
        rows = x.reshape(-1, self.in_features).to(_ACTIVATIONS)
        y = torch._weight_int8pack_mm(rows, self.weight, self.scales)  # noqa: SLF001 - no public name
        return _finish(y, self.bias, x.shape)


class Int4Linear(nn.Module):
    """``y = x W^T + b`` with W [out, in] as int4 in groups of 32 inputs, each with a scale and a zero point."""

    packed: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    weight = None  # networks that cast their activations to the weight's type must not take the packed bytes for it

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        grouped = weight.float().reshape(self.out_features, -1, GROUP)
        low, high = grouped.aminmax(dim=-1)
        # rounded first: the codes then suit what is used
        scales = ((high - low) / 15).clamp_min_(_SMALLEST).to(_ACTIVATIONS)
        zeros = (low + 8 * scales.float()).to(_ACTIVATIONS)  # the kernel computes (code - 8) * scale + zero
        codes = (grouped - zeros.float()[..., None]).div_(scales.float()[..., None]).add_(8).round_().clamp_(0, 15)
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu  # noqa: SLF001 - no public name
        self.register_buffer("packed", pack(codes.view(weight.shape).to(torch.int32), 1))
        self.register_buffer("scales", torch.stack((scales.T, zeros.T), -1).contiguous())
        self.register_buffer("bias", None if bias is None else bias.to(_ACTIVATIONS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out] in bfloat16."""
        rows = x.reshape(-1, self.in_features).to(_ACTIVATIONS).contiguous()
        product = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001 - no public name
        return _finish(product(rows, self.packed, GROUP, self.scales), self.bias, x.shape)


def _finish(y: torch.Tensor, bias: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    y = y if bias is None else y + bias
    return y.view(*shape[:-1], -1)


class _SharedEmbedding(nn.Module):
    """The source's embedding, its rows cast as they are read: no second copy in memory."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.inner = embedding
        self.weight = embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids [...] to rows [..., width] in bfloat16."""
        rows: torch.Tensor = self.inner(ids)
        return rows.to(_ACTIVATIONS)


_LAYERS: dict[Precision, type[Int8Linear | Int4Linear]] = {"int8": Int8Linear, "int4": Int4Linear}


def quantised_copy(network: PreTrainedModel, precision: Precision) -> PreTrainedModel:
    """Return a copy whose linear layers are quantised and whose embeddings are the network's own tensors.

    GPT-2's `Conv1D` layers count as linear: they are, with the weight transposed.

    Raises
    ------
    ModelError
        If this build of PyTorch has no kernel for the precision on the network's device, or the network has no
        linear layers to quantise, or widths that the kernel does not take.
    """
    linear = [module for module in network.modules() if isinstance(module, nn.Linear | Conv1D)]
    if not linear:
        raise ModelError(f"expected linear layers to quantise; {type(network).__name__} has none")
    _check_kernel(precision, network.device)
    _check_widths(precision, linear)
    memo: dict[int, object] = {id(weight): weight for weight in network.parameters()}
    memo |= {id(module): _LAYERS[precision](_weight(module), module.bias) for module in linear}
    memo |= {id(module): _SharedEmbedding(module) for module in network.modules() if isinstance(module, nn.Embedding)}
    made = copy.deepcopy(network, memo)
    for module in made.modules():
        if not isinstance(module, (_SharedEmbedding, nn.Embedding)):
            _cast_own(module)
    return made


def _weight(layer: nn.Linear | Conv1D) -> torch.Tensor:
    """Return the weight [out, in]."""
    weight: torch.Tensor = layer.weight
    return weight.T if isinstance(layer, Conv1D) else weight


def without_layers(network: PreTrainedModel, skipped: Sequence[int]) -> PreTrainedModel:
    """Return a copy without the decoder layers numbered in `skipped` (from 0); all weights are shared.

    Raises
    ------
    InvalidArgumentError
        If a number is outside the network's layers, or no layer would be left.
    """
    count = decoder_layers(network)
    kept = [index for index in range(count) if index not in set(skipped)]
    if not kept or not all(0 <= index < count for index in skipped):
        raise InvalidArgumentError(f"expected layers from 0 to {count - 1} to skip, not all; got {list(skipped)}")
    memo: dict[int, object] = {id(weight): weight for weight in (*network.parameters(), *network.buffers())}
    made = copy.deepcopy(network, memo)
    _keep_layers(_decoder(made), count, kept)
    return made


def decoder_layers(network: PreTrainedModel) -> int:
    """Return how many layers the network's decoder has."""
    return int(_decoder(network).config.get_text_config(decoder=True).num_hidden_layers)


def layer_list(network: PreTrainedModel) -> nn.ModuleList:
    """Return the list of the decoder's layers.

    Raises
    ------
    ModelError
        If the network has no such list, or several.
    """
    owner, name = _place_of_layers(_decoder(network), decoder_layers(network))
    found: nn.ModuleList = getattr(owner, name)
    return found


def _decoder(network: PreTrainedModel) -> PreTrainedModel:
    """Return the decoder of an encoder-decoder, else the network itself."""
    return network.get_decoder() if network.config.is_encoder_decoder else network


def _place_of_layers(network: PreTrainedModel, count: int) -> tuple[nn.Module, str]:
    """Return the module that owns the list of `count` layers, and the list's name in it."""
    stacks = [(owner, name, child) for owner in network.modules() for name, child in owner.named_children()]
    stacks = [s for s in stacks if isinstance(s[2], nn.ModuleList) and len(s[2]) == count]
    inner = {id(part) for _, _, stack in stacks for layer in stack for part in layer.modules()}
    stacks = [s for s in stacks if id(s[2]) not in inner]  # parts of a layer may be as many
    if len(stacks) != 1:
        raise ModelError(
            f"expected one list of {count} layers in {type(network).__name__}; found {len(stacks)}: use another copy"
        )
    owner, name, _ = stacks[0]
    return owner, name


def _keep_layers(network: PreTrainedModel, count: int, kept: list[int]) -> None:
    owner, name = _place_of_layers(network, count)
    layers = getattr(owner, name)
    setattr(owner, name, nn.ModuleList([layers[index] for index in kept]))
    for new, layer in enumerate(getattr(owner, name)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = new  # the place of its keys and values in the cache
    # of a flat encoder-decoder configuration get_text_config gives a copy
    config = network.config if network.config.is_encoder_decoder else network.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [kinds[index] for index in kept]
    setattr(config, "decoder_layers" if hasattr(config, "decoder_layers") else "num_hidden_layers", len(kept))


def _cast_own(module: nn.Module) -> None:
    for name, weight in module.named_parameters(recurse=False):
        setattr(module, name, nn.Parameter(weight.to(_ACTIVATIONS), requires_grad=False))


def _check_widths(precision: Precision, linear: list[nn.Linear | Conv1D]) -> None:
    # the int4 packing takes outputs by 16 and the groups need whole rows
    widths = [_weight(module).shape for module in linear]
    odd = [(out, into) for out, into in widths if precision == "int4" and (into % GROUP or out % 16)]
    if odd:
        raise ModelError(
            f"expected widths that int4 packs, inputs by {GROUP} and outputs by 16;"
            f" got {odd[0][1]} and {odd[0][0]}: use int8"
        )


def _check_kernel(precision: Precision, device: torch.device) -> None:
    try:
        tiny = _LAYERS[precision](torch.ones(32, GROUP, device=device), None)
        tiny(torch.ones(1, GROUP, device=device))
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        raise ModelError(
            f"expected a weight-only {precision} kernel; PyTorch {torch.__version__} has none on {device.type}:"
            " use the float model or another PyTorch"
        ) from error
