"""Tiny random models, made in milliseconds: what the tests use in place of real ones.

``tiny_model(seed)`` is a target; ``tiny_model(seed, noise=0.05)`` is a drafter of it: the same weights with
noise, so that more noise means fewer accepted tokens (greedy agreement is about 0.65 at 0.03, 0.35 at 0.1).
All of it is deterministic, in float64 unless told.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from pathlib import Path

    from hsdopt.runtime.models import Model

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = len(SPECIAL) + 256
EOS = SPECIAL.index("<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WINDOW = 8
CAUSAL = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2", "gpt_neox", "mistral")
FORGETFUL = ("mamba", "rwkv", "recurrent_gemma", "jamba")


@lru_cache(maxsize=1)
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 259 tokens (three special ones first), with a chat template."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL, *symbols))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[2],
        additional_special_tokens=[SPECIAL[1]],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_network(
    seed: int = 0,
    *,
    noise: float = 0.0,
    noise_seed: int = 1,
    architecture: str = "llama",
    vocab: int = VOCAB,
    dtype: torch.dtype = torch.float64,
    layers: int = 2,
    positions: int = 256,
    eos: int | None = None,
) -> transformers.PreTrainedModel:
    """A random transformers network; `noise` is relative to each weight's own spread."""
    config = _config(architecture, vocab, layers, positions, min(EOS, vocab - 1) if eos is None else eos)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        network = kind.from_config(config, dtype=dtype)
    if noise:
        _perturb(network, noise, noise_seed)
    return network.to(dtype).eval().requires_grad_(requires_grad=False)


def tiny_model(
    seed: int = 0,
    *,
    name: str = "tiny",
    noise: float = 0.0,
    architecture: str = "llama",
    vocab: int = VOCAB,
    dtype: torch.dtype = torch.float64,
    **network: int,
) -> Model:
    """A `Model` round `tiny_network`: no tokenizer below 259 tokens, padded rows above."""
    from hsdopt.runtime.models import Model  # noqa: PLC0415 - the helpers above serve tests of lower layers too

    made = tiny_network(seed, noise=noise, architecture=architecture, vocab=vocab, dtype=dtype, **network)
    return Model.of(made, tiny_tokenizer() if vocab >= VOCAB else None, name=name)


def save_tiny(folder: Path, seed: int = 0, **network: Any) -> Path:  # noqa: ANN401 - handed on
    """Save a tiny network and the tiny tokenizer as a folder that any loader reads; returns the folder."""
    tiny_network(seed, **network).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _config(architecture: str, vocab: int, layers: int, positions: int, eos: int) -> transformers.PreTrainedConfig:
    shared = {"vocab_size": vocab, "bos_token_id": 0, "eos_token_id": eos, "initializer_range": 0.3}
    wide = {
        **shared,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": positions,
    }
    drop = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    short = {**shared, **drop, "n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": positions}
    sliding = {**wide, "sliding_window": WINDOW}
    soft = {**sliding, "query_pre_attn_scalar": 8, "layer_types": _alternating(layers)}
    narrow = {**shared, "hidden_size": 32, "num_hidden_layers": layers}
    heads = {**narrow, "num_attention_heads": 4, "intermediate_size": 48}
    made = {
        "llama": lambda: transformers.LlamaConfig(**wide, tie_word_embeddings=True),
        "qwen2": lambda: transformers.Qwen2Config(**wide),
        "qwen3": lambda: transformers.Qwen3Config(**wide),
        "gemma": lambda: transformers.GemmaConfig(**wide),
        "gemma2": lambda: transformers.Gemma2Config(**soft),
        "gemma3": lambda: transformers.Gemma3TextConfig(**soft),
        "mistral": lambda: transformers.MistralConfig(**sliding),
        "gpt2": lambda: transformers.GPT2Config(**short),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(**heads, max_position_embeddings=positions),
        "t5": lambda: transformers.T5Config(**_t5(shared, layers)),
        "mamba": lambda: transformers.MambaConfig(**narrow, state_size=4),
        "rwkv": lambda: transformers.RwkvConfig(**narrow),
        "recurrent_gemma": lambda: transformers.RecurrentGemmaConfig(**heads, lru_width=32),
        "jamba": lambda: transformers.JambaConfig(**heads, num_key_value_heads=2, num_experts=2, mamba_d_state=4),
    }
    return made[architecture]()


def _alternating(layers: int) -> list[str]:
    """Sliding windows in every layer but each second one."""
    return ["full_attention" if index % 2 else "sliding_attention" for index in range(layers)]


def _t5(shared: dict[str, Any], layers: int) -> dict[str, Any]:
    size = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "num_decoder_layers": layers}
    bias = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 32}
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": shared["eos_token_id"]}
    return {**size, **bias, **ids, "vocab_size": shared["vocab_size"], "dropout_rate": 0.0, "initializer_factor": 4.0}


def _perturb(network: torch.nn.Module, noise: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in network.parameters():
            spread = weight.std() if weight.numel() > 1 else weight.abs().mean()
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)
            weight.add_(drawn * spread * noise)
