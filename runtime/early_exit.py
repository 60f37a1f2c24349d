"""Early exit: the first layers of a network, with its own norm and head, draft for the whole.

The recipe ``exit:E@SOURCE`` makes such a drafter; its weights are the network's own. Drafter and network may also
share one cache of keys and values, as `shared_sessions` does: their first E layers compute the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import DynamicCache

from hsdopt.errors import InvalidArgumentError, ModelError
from hsdopt.runtime.quantised import decoder_layers, without_layers
from hsdopt.runtime.session import Session, common_prefix, croppable_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import PreTrainedModel

    from hsdopt.runtime.model import Model


def first_layers(network: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return the first `layers` decoder layers of `network` with its norm and head; all weights are shared.

    Raises
    ------
    InvalidArgumentError
        If `layers` is not between 1 and one less than the network has.
    """
    count = decoder_layers(network)
    if not 1 <= layers < count:
        raise InvalidArgumentError(f"expected an exit after 1 to {count - 1} layers; got {layers}")
    return without_layers(network, range(layers, count))


def shared_sessions(full: Model, early: Model) -> dict[str, Session]:
    """Return sessions of a network and of its early exit, by name, on one cache: give them to `generate`.

    What the whole network fed, the exit need not feed again; what the exit drafted is fed to the whole network, which
    writes the true keys and values of all its layers. Tokens are those of separate caches. Costs are not quite: an
    exit then feeds fewer tokens than predictions and profiles, which know one cache per model, suppose.

    Raises
    ------
    ModelError
        If `early` is not the first layers of the decoder-only network `full`, or one is a lookup drafter.

    Examples
    --------
    >>> models = load_models(["t=smollm2", "x=exit:20@smollm2"])  # doctest: +SKIP
    >>> sessions = shared_sessions(models["t"], models["x"])  # doctest: +SKIP
    >>> generate("t(x:3)", models, "Once", max_new_tokens=32, sessions=sessions)  # doctest: +SKIP
    """
    if not _is_exit(full, early):
        raise ModelError(
            f"expected {early.name} to be the first layers of the decoder-only network {full.name}; got"
            f" {early.source} and {full.source}: load it as exit:E@{full.source}"
        )
    whole = _WholeSession(full.network, name=full.name, vocab_size=full.vocab_size, max_positions=full.max_positions)
    exit_ = _ExitSession(early.network, name=early.name, vocab_size=early.vocab_size, max_positions=early.max_positions)
    whole.share(exit_, decoder_layers(early.network))
    return {full.name: whole, early.name: exit_}


def _is_exit(full: Model, early: Model) -> bool:
    if full.network is None or early.network is None or full.start is not None or early.start is not None:
        return False
    if full.confidence is not None or early.confidence is not None:
        return False
    if decoder_layers(early.network) >= decoder_layers(full.network):
        return False
    places = {name: weight.data_ptr() for name, weight in full.network.named_parameters()}
    return all(places.get(name) == weight.data_ptr() for name, weight in early.network.named_parameters())


class _ExitSession(Session):
    """The session of the exit: its cache is the first layers of the whole network's.

    `begin` keeps what the whole network has fed; a sequence that differs is cropped by the next pass.
    """

    _whole: _WholeSession

    def begin(self, prompt: Sequence[int]) -> None:
        """Make ready for a new prompt, which the whole network may have fed already."""

    def join(self, whole: _WholeSession, cache: DynamicCache) -> None:
        self._whole = whole
        self._tokens = []
        self._cache = cache

    def shared_with(self, sequence: Sequence[int]) -> int:
        """Return how many ids in the first layers' cache are those of `sequence`."""
        return common_prefix(self._tokens, sequence)

    def follow(self, tokens: Sequence[int]) -> None:
        """Note that the whole network wrote the keys and values of `tokens`."""
        self._tokens.extend(tokens[len(self._tokens) :])

    def _restart(self) -> None:
        self._whole.restart()


class _WholeSession(Session):
    """The session of the whole network, whose first layers may hold more tokens, or others, than the rest."""

    _exit: _ExitSession
    _layers: int

    def share(self, early: _ExitSession, layers: int) -> None:
        self._exit = early
        self._layers = layers
        self.restart()

    def restart(self) -> None:
        """Empty both caches."""
        self._tokens = []
        self._cache = croppable_cache(self._network, self.name)
        lower = DynamicCache()
        lower.layers = self._cache.layers[: self._layers]
        self._exit.join(self, lower)

    def _restart(self) -> None:
        self.restart()

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens in all layers."""
        self._exit.crop(length)
        surplus = len(self._tokens) - length
        if surplus > 0:
            for layer in self._cache.layers[self._layers :]:
                layer.crop(-surplus)
            del self._tokens[length:]

    def forward(self, sequence: Sequence[int], n_logits: int = 1) -> torch.Tensor:
        """Return logits as `Session.forward` does; afterwards all layers hold the whole sequence."""
        self.crop(self._exit.shared_with(sequence))
        logits = super().forward(sequence, n_logits)
        self._exit.follow(self._tokens)
        return logits
