"""Models: what the names in a plan stand for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from hsdopt.errors import ModelError, VocabularyError
from hsdopt.runtime.calm import CalmSession, Confidence
from hsdopt.runtime.encoder_decoder import EncoderDecoderSession, PromptedLookup, start_ids
from hsdopt.runtime.lookup import Bigrams, Lookup, LookupSession
from hsdopt.runtime.session import Session, compiled_network, input_device, max_positions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A loaded model under the name that plans use.

    Attributes
    ----------
    name : str
        The name in plans and profiles.
    source : str
        What it was loaded from: a built-in name, a recipe (``int8@smollm2``), a folder, a GGUF file or a hub id.
    kind : {"transformers", "lookup"}
        A network, or a table and an index.
    network, tokenizer
        The transformers objects; the network is None for a lookup drafter.
    vocab_size : int
        Token ids in use; rows of the network above are padding and are never proposed.
    max_positions : int or None
        The longest sequence.
    eos : frozenset of int
        The ids that end a text.
    parameters, bytes : int
        Weights, and the memory they take (shared tensors counted once).
    fingerprint : str
        SHA-256 over every id and its token: equal for models that share a vocabulary.
    precision : str
        How weights are held: ``"float32"``, ``"bfloat16"``, ``"int8"``, ``"int4"``, ...; ``"none"`` without any.
    lookup : Lookup or None
        How a lookup drafter searches, and its bigrams.
    start : tuple of int or None
        The ids that the decoder of an encoder-decoder network starts from; None if the prompt is the start.
    confidence : Confidence or None
        When tokens leave the layers of a network made with `with_exits`; None for those that always run them all.
    compiled : callable or None
        The network as `torch.compile` made it (see `with_compiler`), which sessions then run.
    """

    name: str
    source: str
    kind: Literal["transformers", "lookup"]
    network: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    max_positions: int | None
    eos: frozenset[int]
    parameters: int
    bytes: int
    fingerprint: str
    precision: str
    lookup: Lookup | None = None
    start: tuple[int, ...] | None = None
    confidence: Confidence | None = None
    compiled: Callable[..., Any] | None = None

    @classmethod
    def of(
        cls,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        source: str = "memory",
        parameters: int | None = None,
        precision: str | None = None,
        confidence: Confidence | None = None,
    ) -> Model:
        """Wrap a network that is in memory already.

        Raises
        ------
        CacheError
            If the network's cache cannot be cropped.
        """
        rows = int(network.config.get_text_config(decoder=True).vocab_size)
        size = rows if tokenizer is None else min(rows, 1 + max(tokenizer.get_vocab().values()))
        made = cls(
            name=name,
            source=source,
            kind="transformers",
            network=network,
            tokenizer=tokenizer,
            vocab_size=size,
            max_positions=max_positions(network),
            eos=_end_ids(network, tokenizer),
            parameters=sum(w.numel() for w in network.parameters()) if parameters is None else parameters,
            bytes=tensor_bytes([network]),
            fingerprint=fingerprint(tokenizer, size),
            precision=str(network.dtype).removeprefix("torch.") if precision is None else precision,
            start=start_ids(network, name),
            confidence=confidence,
        )
        made.network_session()  # refuses caches that cannot be cropped
        return made

    @classmethod
    def of_lookup(cls, lookup: Lookup, like: Model, *, name: str = "lookup", source: str = "lookup") -> Model:
        """Make a lookup drafter over the vocabulary of `like`."""
        return cls(
            name=name,
            source=source,
            kind="lookup",
            network=None,
            tokenizer=like.tokenizer,
            vocab_size=like.vocab_size,
            max_positions=None,
            eos=like.eos,
            parameters=0,
            bytes=0,
            fingerprint=like.fingerprint,
            precision="none",
            lookup=lookup,
            start=like.start,
        )

    def with_bigrams(self, bigrams: Bigrams) -> Model:
        """Return this lookup drafter with another table to fall back on.

        Raises
        ------
        ModelError
            If this is not a lookup drafter.
        """
        if self.lookup is None:
            raise ModelError(f"expected a lookup drafter to take bigrams; {self.name} is a network")
        return replace(self, lookup=replace(self.lookup, bigrams=bigrams))

    def with_compiler(self) -> Model:
        """Return this model with a network that `torch.compile` makes faster in the first passes.

        A lookup drafter, and a network with confidence exits, whose way through the layers depends on the data, come
        back as they are.
        """
        if self.network is None or self.confidence is not None:
            return self
        return replace(self, compiled=compiled_network(self.network))

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of the network's weights."""
        return None if self.network is None else self.network.dtype

    @property
    def device(self) -> torch.device | None:
        """Where ids go and logits come from: the network's device, or one of those that it is spread over."""
        return None if self.network is None else input_device(self.network)

    def opening(self, prompt: Sequence[int]) -> list[int]:
        """Return the ids that the sequence starts with: the prompt's, or the decoder's start."""
        return list(prompt if self.start is None else self.start)

    def session(self) -> Session | LookupSession:
        """Open a new session with an empty cache; call its `begin` with the prompt."""
        if self.lookup is None:
            return self.network_session()
        return self.lookup.session() if self.start is None else PromptedLookup(self.lookup, len(self.start))

    def network_session(self) -> Session:
        """Open a new session of a network.

        Raises
        ------
        ModelError
            If this is a lookup drafter.
        """
        if self.network is None:
            raise ModelError(f"expected a network to score tokens; {self.name} is a lookup drafter")
        options: dict[str, Any] = {
            "name": self.name,
            "vocab_size": self.vocab_size,
            "max_positions": self.max_positions,
        }
        if self.confidence is not None:
            return CalmSession(self.network, confidence=self.confidence, **options)
        kind = Session if self.start is None else EncoderDecoderSession
        return kind(self.network, compiled=self.compiled, **options)


def tensor_bytes(networks: Iterable[torch.nn.Module]) -> int:
    """Return the bytes of the weights of all `networks` in memory; a tensor that several share counts once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for network in networks
        for tensor in (*network.parameters(), *network.buffers())
        if tensor.device.type != "meta" and (storage := tensor.untyped_storage()).nbytes()
    }
    return sum(storages.values())


def fingerprint(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> str:
    """Return SHA-256 over every id and its token, in the order of ids; ids from `vocab_size` on do not count."""
    digest = hashlib.sha256(f"{vocab_size} tokens".encode())
    for index, token in sorted(_token_strings(tokenizer, vocab_size).items()):
        digest.update(f"\0{index}\0{token}".encode())
    return digest.hexdigest()


def check_vocabulary(target: Model, drafter: Model) -> None:
    """Compare two vocabularies token by token; padded rows do not count.

    Raises
    ------
    VocabularyError
        If they differ; the message names the first id where they do, and both tokens.
    ModelError
        If one is an encoder-decoder and the other is not, or their decoders start differently.
    """
    if target.start != drafter.start:
        raise ModelError(
            f"expected {drafter.name} to start from {_start(target)} like {target.name}; got {_start(drafter)}:"
            " use a drafter of the target's kind"
        )
    if target.fingerprint == drafter.fingerprint:
        return
    ours, theirs = (_token_strings(model.tokenizer, model.vocab_size) for model in (target, drafter))
    first = min((i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)), default=None)
    where = (
        f"{target.vocab_size} and {drafter.vocab_size} ids without tokenizers"
        if first is None
        else f"id {first} is {ours.get(first)!r} and {theirs.get(first)!r}"
    )
    raise VocabularyError(
        f"expected one vocabulary for {target.name} and {drafter.name}; {where}:"
        " use a drafter made for the target's tokenizer"
    )


def _start(model: Model) -> str:
    return "the prompt" if model.start is None else f"decoder ids {list(model.start)}"


def _token_strings(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> dict[int, str]:
    if tokenizer is None:
        return {}
    return {index: token for token, index in tokenizer.get_vocab().items() if index < vocab_size}


def _end_ids(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    generation = getattr(network, "generation_config", None)
    for holder in (generation, network.config.get_text_config(decoder=True), tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
