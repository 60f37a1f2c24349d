"""Encoder-decoder networks: the encoder reads the prompt once, and the sequence is the decoder's."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from hsdopt.errors import ModelError
from hsdopt.runtime.lookup import Lookup, LookupSession
from hsdopt.runtime.session import Pass, Session, growing_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel


class EncoderDecoderSession(Session):
    """A session that is opened on a prompt: `begin` encodes it, and `forward` scores sequences of the decoder.

    Keys and values of the decoder's own attention are cropped with the sequence; those of its attention to the
    prompt are computed in the first pass and stay until the next `begin`.

    Raises
    ------
    CacheError
        If the decoder's cache cannot be cropped.
    """

    _encoded: Any = None

    def begin(self, prompt: Sequence[int]) -> None:
        """Empty the caches and encode `prompt`; the pass stands in `passes`, marked as the encoder's.

        Raises
        ------
        ModelError
            If the prompt is longer than the network's positions.
        """
        if self.max_positions is not None and len(prompt) > self.max_positions:
            raise ModelError(
                f"{self.name}: expected a prompt of at most {self.max_positions} tokens, the encoder's positions;"
                f" got {len(prompt)}: shorten it"
            )
        self._restart()
        self._synchronise()
        started = perf_counter()
        ids = torch.tensor([list(prompt)], device=self._device)
        with torch.inference_mode():
            self._encoded = self._network.get_encoder()(ids)
        self._synchronise()
        self.passes.append(Pass(len(prompt), 0, perf_counter() - started, prefill=True, encoder=True))

    def _empty_cache(self) -> EncoderDecoderCache:
        config, compact = self._network.get_decoder().config, self._compiled is not None
        own = growing_cache(self._network, config, self.name, compact=compact)
        return EncoderDecoderCache(own, DynamicCache())

    def _inputs(self, ids: torch.Tensor) -> dict[str, Any]:
        if self._encoded is None:
            raise ModelError(f"{self.name}: expected a prompt for the encoder before the first pass: call begin")
        return {"decoder_input_ids": ids, "encoder_outputs": self._encoded}


class PromptedLookup(LookupSession):
    """A lookup drafter over prompt and output, where the prompt is no part of the sequence.

    Parameters
    ----------
    lookup : Lookup
        How it searches.
    start : int
        Tokens at the head of the decoder's sequence that the prompt stands for in the index.
    """

    def __init__(self, lookup: Lookup, start: int) -> None:
        super().__init__(lookup)
        self._start = start
        self._ahead = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Start afresh from a prompt."""
        super().begin(prompt)
        self._ahead = len(prompt) - self._start

    def crop(self, length: int) -> None:
        """Keep the prompt and the first `length` tokens of the decoder's sequence; nothing if `length` is 0."""
        super().crop(max(0, length + self._ahead) if length > 0 else length)


def start_ids(network: PreTrainedModel, name: str) -> tuple[int, ...] | None:
    """Return the ids that the decoder starts from, None for a network that goes on from the prompt itself.

    Raises
    ------
    ModelError
        If an encoder-decoder network does not say where its decoder starts.
    """
    if not network.config.is_encoder_decoder:
        return None
    for holder in (getattr(network, "generation_config", None), network.config):
        start = getattr(holder, "decoder_start_token_id", None)
        if isinstance(start, int):
            return (start,)
    raise ModelError(f"{name}: expected a decoder_start_token_id in the configuration of an encoder-decoder; got none")
