"""A network and its key-value cache: the one place that feeds, crops and times passes."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hsdopt.errors import CacheError, InvalidArgumentError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import Cache, PreTrainedConfig, PreTrainedModel


_FIRST_ROOM = 256
_COMPILER = ("torch._dynamo", "torch._inductor")
_WINDOW_MASKS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask")
_OWN_CACHES = re.compile(r"\bdict\[|\b(?!Dynamic|EncoderDecoder|Static)\w+Cache\b")
"""Annotations of caches that only one kind of network knows."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of a model, as it was timed.

    Attributes
    ----------
    new_tokens : int
        Tokens fed.
    context : int
        Tokens whose keys and values were in the cache already.
    seconds : float
        Wall-clock time of the whole call: cropping, tensors, network, synchronisation.
    prefill : bool
        Whether the cache was empty, as it is for a prompt.
    encoder : bool
        Whether it was the encoder's, over the prompt of an encoder-decoder network.
    """

    new_tokens: int
    context: int
    seconds: float
    prefill: bool
    encoder: bool = False


class Session:
    """One network with one key-value cache, which scores any sequence and feeds only what is missing.

    Parameters
    ----------
    network : transformers.PreTrainedModel
        A causal language model in evaluation mode.
    name : str
        The model's name, for messages.
    vocab_size : int
        Rows of the logits that belong to tokens; padded rows above are cut off.
    max_positions : int or None
        The longest sequence that the network takes.
    compiled : callable or None
        The network as `compiled_network` made it; it takes all passes but those over a prompt, whose shape is seen
        once. None to run the network itself.

    Raises
    ------
    CacheError
        If the network's cache cannot be cropped.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        *,
        name: str,
        vocab_size: int,
        max_positions: int | None = None,
        compiled: Callable[..., Any] | None = None,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.passes: list[Pass] = []
        self._network = network
        self._compiled = compiled
        self._tokens: list[int] = []
        self._cache = self._empty_cache()
        self._keyword = str(_cache_keyword(network))
        self._keeps = "logits_to_keep" in inspect.signature(network.forward).parameters
        self._device = input_device(network)
        self._clocked = _cuda_devices(network)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids whose keys and values are in the cache."""
        return tuple(self._tokens)

    @property
    def room(self) -> int:
        """How many more tokens fit after those in the cache (`sys.maxsize` where the network names no limit)."""
        return sys.maxsize if self.max_positions is None else self.max_positions - len(self._tokens)

    def pending(self, sequence: Sequence[int]) -> int:
        """Return the number of tokens that the next pass over `sequence` feeds; at least one."""
        return len(sequence) - min(common_prefix(self._tokens, sequence), len(sequence) - 1)

    def begin(self, prompt: Sequence[int]) -> None:  # noqa: ARG002 -- only encoders read it here
        """Make ready for a new prompt, which `forward` is to feed: empty the cache."""
        self.crop(0)

    def crop(self, length: int) -> None:
        """Keep the first `length` cached tokens (all of them, if there are fewer).

        Raises
        ------
        InvalidArgumentError
            If `length` is negative.
        """
        if length < 0:
            raise InvalidArgumentError(f"expected a length of at least 0 to crop to; got {length}")
        surplus = len(self._tokens) - length
        if surplus > 0:
            self._cache.crop(-surplus)
            del self._tokens[length:]

    def forward(self, sequence: Sequence[int], n_logits: int = 1) -> torch.Tensor:
        """Return logits [n_logits, vocab_size] of the last positions of `sequence`, on the device that inputs go to.

        The cache is cropped to the prefix that it shares with `sequence` (further, if positions already cached
        are to be scored) and the rest is fed in one pass, whose time is appended to `passes`.

        Parameters
        ----------
        sequence : sequence of int
            All token ids from the first on.
        n_logits : int
            How many of the last positions to score.

        Raises
        ------
        InvalidArgumentError
            If `n_logits` is not between 1 and the length of the sequence.
        ModelError
            If the sequence is longer than the network's positions, or does not fit in memory.
        """
        self._check(len(sequence), n_logits)
        self._synchronise()
        started = perf_counter()
        self.crop(min(common_prefix(self._tokens, sequence), len(sequence) - n_logits))
        context = len(self._tokens)
        fed = list(sequence[context:])
        logits = self._feed(fed, n_logits)
        self._tokens.extend(fed)
        self._synchronise()
        self.passes.append(Pass(len(fed), context, perf_counter() - started, prefill=context == 0))
        return logits

    def _check(self, length: int, n_logits: int) -> None:
        if not 1 <= n_logits <= length:
            raise InvalidArgumentError(f"expected 1 to {length} positions to score; got {n_logits}")
        if self.max_positions is not None and length > self.max_positions:
            raise ModelError(
                f"{self.name}: expected at most {self.max_positions} tokens, the model's positions; got {length}:"
                " shorten the prompt, the output or the draft"
            )

    def _feed(self, fed: list[int], n_logits: int) -> torch.Tensor:
        arguments = self._inputs(torch.tensor([fed], device=self._device))
        arguments |= {self._keyword: self._cache, "use_cache": True}
        if self._keeps:
            arguments["logits_to_keep"] = n_logits
        # of a prompt every length is new, and lengths below 2 would each be compiled apart
        run = self._network if self._compiled is None or len(self._tokens) < 2 else self._compiled
        try:
            with torch.inference_mode():
                logits: torch.Tensor = run(**arguments).logits
        except BaseException as error:
            # a pass broken off may have fed some layers only: start afresh rather than answer wrongly
            self._restart()
            if type(error).__module__.startswith(_COMPILER):
                raise _uncompilable(self.name, error) from error
            raise
        return logits[0, -n_logits:, : self.vocab_size]

    def _restart(self) -> None:
        self._cache = self._empty_cache()
        self._tokens = []

    def _empty_cache(self) -> Cache:
        return croppable_cache(self._network, self.name, compact=self._compiled is not None)

    def _inputs(self, ids: torch.Tensor) -> dict[str, Any]:
        return {"input_ids": ids}

    def _synchronise(self) -> None:
        for device in self._clocked:
            torch.cuda.synchronize(device)


def compiled_network(network: PreTrainedModel) -> Callable[..., Any]:
    """Return what runs `network` through `torch.compile`, for the sessions of one model.

    Compiling happens in the first passes that need it: one token, and several. Every size is dynamic, since caches
    grow and are cropped. CUDA graphs are left out: they want tensors of fixed sizes in fixed places.
    """
    known = inspect.signature(torch.compile).parameters
    # networks of one architecture share their code: one must not use up the other's compilations
    apart: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
    compiled: Callable[..., Any] = torch.compile(network, dynamic=True, **apart)
    return compiled


def input_device(network: PreTrainedModel) -> torch.device:
    """Return the device that ids go to, and that logits come from, also for a network over several devices."""
    places = getattr(network, "hf_device_map", {}).values()
    main = next((place for place in places if str(place) not in ("cpu", "disk")), "cpu")
    own: torch.device = network.get_input_embeddings().weight.device
    # weights that are offloaded, "meta" here, visit the first device that computes
    return own if own.type != "meta" else _as_device(main)


def _cuda_devices(network: PreTrainedModel) -> list[torch.device]:
    """Return the CUDA devices that a pass keeps busy."""
    mapped = (place for place in getattr(network, "hf_device_map", {}).values() if str(place) not in ("cpu", "disk"))
    places = {weight.device for weight in network.parameters()} | {_as_device(place) for place in mapped}
    return sorted((place for place in places if place.type == "cuda"), key=str)


def _as_device(place: int | str | torch.device) -> torch.device:
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)


def croppable_cache(network: PreTrainedModel, name: str, *, compact: bool = False) -> DynamicCache:
    """Return an empty cache for `network` whose last tokens can be dropped; `compact` for a compiled network.

    Layers with a sliding window keep all keys and values here: which of them a token sees is up to the mask, which
    the network builds with the window for a cache of any length.

    Raises
    ------
    CacheError
        If any layer keeps a state that cannot be taken back: recurrent, convolutional, or a sliding window
        in a network whose masks are not those of transformers.
    """
    keyword = _cache_keyword(network)
    if keyword is None:
        raise _uncroppable(network, name, "its forward takes no key-value cache")
    taken = str(inspect.signature(network.forward).parameters[keyword].annotation)
    if _OWN_CACHES.search(taken):
        raise _uncroppable(network, name, f"its forward takes a cache of its own kind, {taken}")
    return growing_cache(network, network.config, name, compact=compact)


def growing_cache(
    network: PreTrainedModel, config: PreTrainedConfig, name: str, *, compact: bool = False
) -> DynamicCache:
    """Return an empty cache of growing layers for the decoder that `config` describes.

    Raises
    ------
    CacheError
        As for `croppable_cache`.
    """
    try:
        cache = DynamicCache(config=config)
    except (KeyError, TypeError) as error:  # a kind of layer that dynamic caches do not know
        raise _uncroppable(network, name, f"no growing cache for layers of kind {error}") from error
    windowed = any(type(layer) is DynamicSlidingWindowLayer for layer in cache.layers)
    masked = not windowed or _masks_windows(network)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer and not masked:
            raise _uncroppable(network, name, f"a sliding window of {layer.get_max_length()} tokens forgets")
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise _uncroppable(network, name, f"{type(layer).__name__} keeps a state that forgets")
        cache.layers[index] = _CompactLayer() if compact else _GrowingLayer()
    return cache


def max_positions(network: PreTrainedModel) -> int | None:
    """Return the longest sequence that `network` takes, or None where its configuration names none.

    Where positions turn by other angles once a sequence is long ("longrope"), it ends before they do: cached keys keep
    the old angles, so that a text would depend on how its passes were cut.
    """
    config = network.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    turned = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    limits = [limit for limit in (getattr(config, "max_position_embeddings", None), turned) if limit is not None]
    return min(limits, default=None)


class _GrowingLayer(DynamicLayer):  # type: ignore[misc] # transformers is not typed
    """Keys and values in buffers with room to grow: a pass writes its own rows and copies no others."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.get_seq_length()
        if length == 0:
            self.device, self.is_initialized = key_states.device, True
            self._buffers = [_buffer(states, 0) for states in (key_states, value_states)]
        total = length + key_states.shape[-2]
        if total > self._buffers[0].shape[-2]:
            self._buffers = [_buffer(old, total) for old in self._buffers]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., length:total, :] = states
        self.keys, self.values = (buffer[..., :total, :] for buffer in self._buffers)
        return self.keys, self.values


class _CompactLayer(DynamicLayer):  # type: ignore[misc] # transformers is not typed
    """Keys and values without gaps, even once cropped: for compiled networks, which see no strides but those."""

    keys: torch.Tensor
    values: torch.Tensor

    def crop(self, max_length: int) -> None:
        super().crop(max_length)
        self.keys, self.values = self.keys.contiguous(), self.values.contiguous()


def _buffer(states: torch.Tensor, length: int) -> torch.Tensor:
    grown = states.new_empty((*states.shape[:-2], max(_FIRST_ROOM, 2 * length), states.shape[-1]))
    if length:
        grown[..., : states.shape[-2], :] = states
    return grown


def _cache_keyword(network: PreTrainedModel) -> str | None:
    parameters = inspect.signature(network.forward).parameters
    return next((word for word in ("cache", "past_key_values") if word in parameters), None)


def _masks_windows(network: PreTrainedModel) -> bool:
    """Whether the code of some part of `network` makes its masks with the window, whatever the cache's length."""
    modules = {type(module).__module__ for module in network.modules()}
    return any(hasattr(sys.modules[name], maker) for name in modules for maker in _WINDOW_MASKS)


def _uncroppable(network: PreTrainedModel, name: str, why: str) -> CacheError:
    return CacheError(
        f"{name}: expected a cache whose last tokens can be dropped; {type(network).__name__}: {why}:"
        " use a model with attention in every layer"
    )


def _uncompilable(name: str, error: BaseException) -> ModelError:
    said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ModelError(f"{name}: expected a network that torch.compile takes; {said.strip()}: load it without compile")


def common_prefix(cached: list[int], sequence: Sequence[int]) -> int:
    """Return how many of the first ids agree."""
    low, high = 0, min(len(cached), len(sequence))
    if cached[:high] == list(sequence[:high]):
        return high
    while high - low > 1:  # slices compare at C speed, so halving beats a loop over the tokens
        middle = (low + high) // 2
        if cached[low:middle] == list(sequence[low:middle]):
            low = middle
        else:
            high = middle
    return low
