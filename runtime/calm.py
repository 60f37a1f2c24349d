"""Confidence exits, token by token (CALM): layers run until the hidden state is sure enough of the next token.

The skipped layers are not left empty: their keys and values are computed from the hidden state of the exit, so that
later tokens find something to attend to. What comes out is not the network's own law, so such a model decodes lossily
by itself (plan ``c``); as a drafter (plan ``t(c:4)``) it is reviewed by the law that its logits say, and nothing is
lost. The prompt runs through all layers in one pass; every later token runs by itself and may exit, whatever else a
pass feeds, so that ``c(lookup:4)`` writes what ``c`` writes.

Reference: Schuster et al., "Confident Adaptive Language Modeling", NeurIPS 2022, section 3.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from transformers import DynamicCache

from hsdopt.errors import InvalidArgumentError, ModelError
from hsdopt.runtime.quantised import decoder_layers, layer_list, without_layers
from hsdopt.runtime.session import Session, croppable_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

Measure = Literal["softmax", "similarity"]


@dataclass(frozen=True, slots=True)
class Confidence:
    """When a token leaves the layers.

    Attributes
    ----------
    threshold : float
        A token exits behind the first layer whose measure is at least this. Both measures lie in [0, 1]: 0 exits
        behind the first layer, anything above 1 never.
    measure : {"softmax", "similarity"}
        The gap between the two largest probabilities that norm and head give for the layer's output (a head per
        layer), or the cosine of the layer's output and its input (cheap), negative ones counted as 0.

    Raises
    ------
    InvalidArgumentError
        If the threshold is negative or not a number, or the measure is unknown.

    Examples
    --------
    >>> Confidence.parse("0.9")
    Confidence(threshold=0.9, measure='softmax')
    >>> Confidence.parse("0.95,similarity")
    Confidence(threshold=0.95, measure='similarity')
    """

    threshold: float
    measure: Measure = "softmax"

    def __post_init__(self) -> None:
        """Check both fields."""
        if math.isnan(self.threshold) or self.threshold < 0:
            raise InvalidArgumentError(f"expected a confidence threshold of at least 0; got {self.threshold}")
        if self.measure not in get_args(Measure):
            raise InvalidArgumentError(
                f"expected one of {', '.join(get_args(Measure))} as measure of confidence; got {self.measure!r}"
            )

    @classmethod
    def parse(cls, text: str) -> Confidence:
        """Return what ``THRESHOLD`` or ``THRESHOLD,MEASURE`` says, as it stands in recipes.

        Raises
        ------
        InvalidArgumentError
            If the text says something else.
        """
        threshold, *measure = text.split(",", 1)
        try:
            number = float(threshold)
        except ValueError as error:
            raise InvalidArgumentError(f"expected calm:THRESHOLD[,MEASURE]@SOURCE; got calm:{text}") from error
        return cls(number, *measure)  # type: ignore[arg-type] # checked above


def with_exits(network: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `network` whose tokens exit where a `CalmSession` says so; all weights are shared.

    Called in any other way, the copy computes what the network does.

    Raises
    ------
    CacheError
        If the network's cache cannot be cropped.
    ModelError
        If its tokens cannot exit: it is an encoder-decoder, its decoder layers are not one list, or they do not write
        to the cache that they are given.
    """
    if network.config.is_encoder_decoder:
        raise _unfit(network, "is an encoder-decoder")
    croppable_cache(network, type(network).__name__)  # refuses caches that cannot be cropped
    made = without_layers(network, ())
    for index, layer in enumerate(layer_list(made)):
        # an attribute rather than a wrapper: names of weights, and what networks read from their layers, stay
        layer.forward = partial(_run_layer, layer.forward, index)
    _check_exits(made)
    return made


class CalmSession(Session):
    """A session whose tokens behind the prompt exit once they are sure enough.

    The first pass over an empty cache takes what stands before the first scored position, and that position, for the
    prompt: these tokens run through all layers together. All others are fed one by one, so that a pass over n tokens
    costs about n passes over one.

    Parameters
    ----------
    network : transformers.PreTrainedModel
        What `with_exits` made.
    confidence : Confidence
        When tokens exit.
    name, vocab_size, max_positions
        As for `Session`.

    Attributes
    ----------
    layers : int
        How many layers the network has.
    layers_used : list of int
        How many layers every token fed after the prompt ran through, in the order of feeding; like `passes`, it
        grows as long as the session lives.
    """

    _cache: ExitCache

    def __init__(
        self,
        network: PreTrainedModel,
        *,
        confidence: Confidence,
        name: str,
        vocab_size: int,
        max_positions: int | None = None,
    ) -> None:
        super().__init__(network, name=name, vocab_size=vocab_size, max_positions=max_positions)
        self.confidence = confidence
        self.layers_used: list[int] = []
        self.layers = decoder_layers(network)

    @property
    def mean_layers(self) -> float:
        """The mean of `layers_used`; nan if no token was fed after the prompt."""
        return sum(self.layers_used) / len(self.layers_used) if self.layers_used else math.nan

    def _feed(self, fed: list[int], n_logits: int) -> torch.Tensor:
        prompt = 0 if self._tokens else len(fed) - n_logits + 1
        try:
            rows = [super()._feed(fed[:prompt], 1)] if prompt else []
            rows += [self._feed_one(token) for token in fed[prompt:]]
        except BaseException:
            # tokens that were fed before one failed are in the cache, but not yet in the sequence
            self._restart()
            raise
        return torch.cat(rows[-n_logits:])

    def _feed_one(self, token: int) -> torch.Tensor:
        self._cache.arm(self._is_sure)
        row = super()._feed([token], 1)
        self.layers_used.append(self._cache.layers_run)
        self._cache.arm(None)
        return row

    def _is_sure(self, layers: int, given: torch.Tensor, output: Any) -> bool:  # noqa: ANN401 -- as layers return it
        """Whether a token needs no more layers behind the one that made `output` of `given`, [1, 1, width]."""
        if layers == self.layers:
            return False
        cheap = self.confidence.measure == "similarity"
        sure = _similarity(given, _hidden(output)) if cheap else self._gap(output)
        return sure >= self.confidence.threshold

    def _gap(self, output: Any) -> float:  # noqa: ANN401 -- as layers return it
        # the network itself turns the hidden state into logits: norms, scales and caps are its own
        arguments = self._inputs(torch.zeros((1, 1), dtype=torch.long, device=self._device))
        logits = self._network(**arguments, **{self._keyword: _Probe(output)}).logits[0, -1, : self.vocab_size]
        best = logits.softmax(-1, dtype=_wide(logits)).topk(2).values
        return float(best[0] - best[1])

    def cached_lengths(self) -> set[int]:
        """Return the numbers of tokens whose keys and values the layers hold: one number, unless a layer differs."""
        return {layer.get_seq_length() for layer in self._cache.layers}

    def _empty_cache(self) -> ExitCache:
        return ExitCache(croppable_cache(self._network, self.name))


class ExitCache(DynamicCache):  # type: ignore[misc] # transformers is not typed
    """A cache that says to the layers which write to it whether the token has left them.

    Parameters
    ----------
    cache : DynamicCache
        An empty one, whose layers it takes.

    Attributes
    ----------
    output : tensor, tuple or None
        What the layer returned that the token exited behind; None before.
    layers_run : int
        Layers that ran in the last armed pass.
    """

    def __init__(self, cache: DynamicCache) -> None:
        super().__init__()
        self.layers = cache.layers
        self.arm(None)

    def arm(self, is_sure: Callable[[int, torch.Tensor, Any], bool] | None) -> None:
        """Let the token of the next pass exit where `is_sure(layers run, input, output)`; None: nowhere."""
        self._is_sure = is_sure
        self.output: Any = None
        self.layers_run = 0

    def watch(self, layers: int, given: torch.Tensor, output: Any) -> None:  # noqa: ANN401 -- as layers return it
        """Note what layer number `layers` (from 1) made of `given`."""
        self.layers_run = layers
        if self._is_sure is not None and self._is_sure(layers, given, output):
            self.output = output

    def update(self, *states: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 -- handed on
        """Store keys and values; behind an exit nothing else of the layer is wanted."""
        stored: tuple[torch.Tensor, torch.Tensor] = super().update(*states, **options)
        if self.output is not None:
            raise _StoredError
        return stored


class _Probe(DynamicCache):  # type: ignore[misc] # transformers is not typed
    """An empty cache that layers answer with `output`: the network then only applies its norm and head to it."""

    def __init__(self, output: Any) -> None:  # noqa: ANN401 -- as layers return it
        super().__init__()
        self.output = output


class _StoredError(Exception):
    """Breaks a layer off once its keys and values are in the cache."""


def _run_layer(inner: Callable[..., Any], index: int, hidden: torch.Tensor, *rest: Any, **options: Any) -> Any:  # noqa: ANN401 -- as layers return it
    """Run a layer, or behind an exit that part of it which makes its keys and values."""
    cache = next((given for given in (*rest, *options.values()) if isinstance(given, (ExitCache, _Probe))), None)
    if isinstance(cache, _Probe):
        return cache.output
    if cache is None or cache.output is None:
        output = inner(hidden, *rest, **options)
        if cache is not None:
            cache.watch(index + 1, hidden, output)
        return output
    with suppress(_StoredError):
        inner(hidden, *rest, **options)
    return cache.output


def _hidden(output: Any) -> torch.Tensor:  # noqa: ANN401 -- as layers return it
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _similarity(given: torch.Tensor, output: torch.Tensor) -> float:
    """Return the cosine of two hidden states, between 0 and 1."""
    one, other = (state.flatten().to(output.device, _wide(output)) for state in (given, output))
    return float(torch.cosine_similarity(one, other, dim=0).clamp(0, 1))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """Return a type that sums of `tensor` fit: float32, or its own if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _check_exits(network: PreTrainedModel) -> None:
    """Let a token exit behind the first layer, and see that every layer has its keys and values."""
    session = CalmSession(network, confidence=Confidence(0.0, "similarity"), name=type(network).__name__, vocab_size=1)
    session.forward([0])
    session.forward([0, 0])
    if session.layers_used != [1] or session.cached_lengths() != {2}:
        raise _unfit(network, "has layers that do not write to the cache they are given")


def _unfit(network: PreTrainedModel, why: str) -> ModelError:
    return ModelError(
        f"expected a decoder-only network with attention in every layer for confidence exits; {type(network).__name__}"
        f" {why}: use exit:E@SOURCE or another model"
    )
