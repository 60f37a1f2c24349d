"""Shapes: what the work of a network's passes follows from, read off its modules and configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hsdopt.profiles import Shape

__all__ = ["shape_of"]

_CROSS = ("encdecattention", "encoder_attn", "cross_attn", "crossattention")
_KEYS_AND_VALUES = ("k", "v", "k_proj", "v_proj", "key", "value")


def shape_of(network: PreTrainedModel) -> Shape | None:
    """Return the shape of a network's decoder; None if its configuration does not name the usual sizes.

    Matrices are counted from the modules, so that quantised copies, copies without some layers, and layers of their
    own widths are counted as they are. Weights that make keys and values of an encoder's output do not count: only
    the first pass over a prompt uses them.

    Examples
    --------
    >>> shape_of(models["smollm2"].network).matrix_parameters  # doctest: +SKIP
    106168320
    """
    decoder = network.get_decoder() if network.config.is_encoder_decoder else network
    sizes = _sizes(decoder)
    if sizes is None:
        return None
    head = network.get_output_embeddings()
    experts = [weight for module in _working(network, decoder) for weight in _own(module) if weight.ndim == 3]
    return Shape(
        **sizes,
        matrix_parameters=sum(_entries(module) for module in _working(network, decoder)),
        expert_parameters=sum(weight.numel() for weight in experts),
        experts=len(experts[0]) if experts else 0,
        experts_per_token=_experts_per_token(decoder) if experts else 0,
        weight_bytes=_bytes([*_working(network, decoder), *(() if head is None else (head,))]),
        value_bytes=_value_type(decoder).itemsize,
        cross_attention=network.config.is_encoder_decoder,
    )


def _sizes(decoder: PreTrainedModel) -> dict[str, int] | None:
    """Return the sizes that configurations name, under the names of a `Shape`."""
    config = _config(decoder)
    layers = _first(config, "decoder_layers", "num_hidden_layers")
    hidden = _first(config, "hidden_size")
    heads = _first(config, "decoder_attention_heads", "num_attention_heads")
    vocab = _first(config, "vocab_size")
    if not (layers and hidden and heads and vocab):
        return None
    return {
        "layers": layers,
        "hidden_size": hidden,
        "intermediate_size": _first(config, "decoder_ffn_dim", "intermediate_size", "d_ff", "ffn_dim") or 4 * hidden,
        "heads": heads,
        "kv_heads": _first(config, "num_key_value_heads") or heads,
        "head_dim": _first(config, "head_dim", "d_kv") or hidden // heads,
        "vocab_size": vocab,
    }


def _first(config: Any, *names: str) -> int | None:  # noqa: ANN401 -- a configuration of any class
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _experts_per_token(decoder: PreTrainedModel) -> int:
    return _first(_config(decoder), "num_experts_per_tok", "top_k_experts") or 1


def _config(decoder: PreTrainedModel) -> Any:  # noqa: ANN401 -- a configuration of any class
    # of a flat encoder-decoder configuration get_text_config gives a copy that lacks its sizes
    return decoder.config if decoder.config.is_encoder_decoder else decoder.config.get_text_config(decoder=True)


def _working(network: PreTrainedModel, decoder: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the modules that every pass goes through, but for the head and for tables of which it reads rows."""
    tables = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    head = network.get_output_embeddings()
    for name, module in decoder.named_modules():
        *path, last = name.lower().split(".")
        of_encoder = last in _KEYS_AND_VALUES and any(word in part for part in path for word in _CROSS)
        if module is not head and not of_encoder and id(getattr(module, "weight", None)) not in tables:
            yield module


def _own(module: nn.Module) -> list[torch.Tensor]:
    """Return the weights of a module itself, buffers among them where linear layers keep quantised ones."""
    buffers = module.buffers(recurse=False) if hasattr(module, "in_features") else ()
    return [*module.parameters(recurse=False), *buffers]


def _entries(module: nn.Module) -> int:
    """Return the entries of a module's own matrices; packed ones by the sizes that they stand for."""
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        widths: tuple[Any, Any] = (module.in_features, module.out_features)
        return int(widths[0] * widths[1])
    return sum(weight.numel() for weight in _own(module) if weight.ndim == 2)


def _bytes(modules: list[nn.Module]) -> int:
    weights = {id(weight): weight for module in modules for weight in _own(module)}
    return sum(weight.nbytes for weight in weights.values())


def _value_type(decoder: PreTrainedModel) -> torch.dtype:
    """Return the type that a decoder computes in: that of its norms, as matrices may be quantised."""
    vectors = (weight.dtype for weight in decoder.parameters() if weight.ndim == 1 and weight.is_floating_point())
    own: torch.dtype = decoder.dtype
    return next(vectors, own)
