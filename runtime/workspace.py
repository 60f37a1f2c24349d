"""The sequence being written, the session of every model of a plan, and the log of what they did."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, cast

from hsdopt.errors import InvalidArgumentError, ModelError
from hsdopt.runtime.events import Event
from hsdopt.runtime.lookup import LookupSession
from hsdopt.runtime.models import check_vocabulary
from hsdopt.runtime.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    import torch

    from hsdopt.plan import Plan
    from hsdopt.runtime.models import Model


class CancelledError(Exception):
    """The caller asked to stop; caught by `generate`."""


class Workspace:
    """One sequence and one session per model: every pass, proposal and cut of a generation goes through here.

    A session never holds anything but a prefix of the sequence: `cut` crops them all, so that nothing beyond a cut is
    used again by accident.

    Parameters
    ----------
    models : mapping of str to Model
        The models of the plan, by name.
    prompt : sequence of int
        The ids that every session is opened on.
    start : sequence of int or None
        The ids that the sequence starts with, if not the prompt's (as for the decoder behind an encoder).
    cancel : callable or None
        Asked before every pass; True breaks the generation off.
    sessions : mapping of str to session, or None
        Sessions to use again; they are emptied first. Missing ones are opened.

    Attributes
    ----------
    tokens : list of int
        The sequence; append to it, and take back with `cut`.
    prompt_length : int
        How many of them were there before any output: those of the prompt, or of `start`.
    events : list of Event
        The log.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        prompt: Sequence[int],
        *,
        start: Sequence[int] | None = None,
        cancel: Callable[[], bool] | None = None,
        sessions: Mapping[str, Session | LookupSession] | None = None,
    ) -> None:
        self._prompt = tuple(prompt)
        self.tokens = list(prompt if start is None else start)
        self.prompt_length = len(self.tokens)
        self.events: list[Event] = []
        self._cancel = cancel
        self._models = models
        given = {} if sessions is None else sessions
        self._sessions = {name: given[name] if name in given else model.session() for name, model in models.items()}
        self._indexed = dict.fromkeys(models, 0)
        for session in self._sessions.values():
            session.crop(0)

    def proposes(self, name: str) -> bool:
        """Return whether a model is a lookup drafter."""
        return self._models[name].kind == "lookup"

    def room(self, name: str) -> int:
        """Return how many tokens may follow before a model cannot score the sequence; negative if it cannot now."""
        limit = self._models[name].max_positions
        return 2**62 if limit is None else limit - len(self.tokens)

    def prefill(self, name: str) -> torch.Tensor | None:
        """Open a session on the prompt and feed what the sequence starts with; return logits [1, vocab] of its end.

        None if the model is a lookup drafter, or if the prompt is too long for it.
        """
        started = perf_counter()
        opening = self.tokens[: self.prompt_length]
        if not self.proposes(name) and self.room(name) < len(opening) - len(self.tokens):
            return None
        self._sessions[name].begin(self._prompt)
        if self.proposes(name):
            self._indexed[name] = self.prompt_length
            logits = None
        else:
            started = self._log_encoder(name, started)
            logits = self._forward(name, opening, 1)
        self.events.append(Event("prefill", name, len(opening), seconds=perf_counter() - started))
        return logits

    def _log_encoder(self, name: str, started: float) -> float:
        """Log the encoder's pass if there was one; return when the decoder's prefill started."""
        if self._models[name].start is None:
            return started
        encoded = perf_counter()
        self.events.append(Event("encode", name, len(self._prompt), seconds=encoded - started))
        return encoded

    def credit_prefill(self, name: str) -> None:
        """Log that the prefill of `name` gave a token."""
        at = next(i for i, event in enumerate(self.events) if event.kind == "prefill" and event.model == name)
        self.events[at] = replace(self.events[at], gained=1)

    def run(self, name: str, n_logits: int = 1) -> torch.Tensor:
        """Make one pass over the sequence; return logits [n_logits, vocab] of its last positions."""
        logits = self._forward(name, self.tokens, n_logits)
        made = cast("Session", self._sessions[name]).passes[-1]
        self.events.append(Event("pass", name, made.new_tokens, made.context, made.seconds, 1))
        return logits

    def _forward(self, name: str, sequence: Sequence[int], n_logits: int) -> torch.Tensor:
        if self._cancel is not None and self._cancel():
            raise CancelledError
        return cast("Session", self._sessions[name]).forward(sequence, n_logits)

    def propose(self, name: str, length: int, ends: AbstractSet[int]) -> list[int]:
        """Return at most `length` tokens of a lookup drafter, none of them behind an end of text or unknown."""
        started = perf_counter()
        session = cast("LookupSession", self._sessions[name])
        session.extend(self.tokens[self._indexed[name] :])
        self._indexed[name] = len(self.tokens)
        proposed = _usable(session.propose(length), ends, self._models[name].vocab_size)
        seconds = perf_counter() - started
        self.events.append(
            Event("lookup", name, context=len(self.tokens), seconds=seconds, gained=len(proposed)),
        )
        return proposed

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens of the sequence, and of every session."""
        if length >= len(self.tokens):
            return
        del self.tokens[length:]
        self._indexed = {name: min(place, length) for name, place in self._indexed.items()}
        for session in self._sessions.values():
            session.crop(length)

    def trim(self, name: str, length: int, why: str) -> None:
        """Cut tokens that `name` held back to `length`, and log it if there were any."""
        surplus = len(self.tokens) - length
        if surplus > 0:
            self.events.append(Event("cut", name, discarded=surplus, why=why))
            self.cut(length)


def _usable(proposed: Sequence[int], ends: AbstractSet[int], vocab_size: int) -> list[int]:
    usable: list[int] = []
    for token in proposed:
        if token >= vocab_size:
            break
        usable.append(token)
        if token in ends:
            break
    return usable


def models_of(plan: Plan, models: Mapping[str, Model]) -> dict[str, Model]:
    """Return the models that `plan` names.

    Raises
    ------
    ModelError
        If one is missing, or a lookup drafter would have to score tokens.
    VocabularyError
        If two of them do not share a vocabulary.
    """
    missing = [name for name in plan.models if name not in models]
    if missing:
        raise ModelError(
            f"expected a model for every name of {plan}; none for {', '.join(missing)}:"
            f" load it, or use one of {', '.join(models) or 'those you load'}"
        )
    named = {name: models[name] for name in plan.models}
    for name in plan.scoring:
        if named[name].kind == "lookup":
            raise ModelError(f"expected a language model as {name}; {named[name].source} only proposes: draft with it")
    for model in named.values():
        if model.kind != "lookup":
            check_vocabulary(named[plan.target], model)
    return named


def check_prompt(prompt: Sequence[int], target: Model, max_new_tokens: int) -> None:
    """Check a prompt against the target's vocabulary and positions.

    Raises
    ------
    InvalidArgumentError
        If the prompt is empty, has ids outside the vocabulary, or leaves no room for the output.
    """
    before = len(prompt if target.start is None else target.start)
    if not prompt:
        raise InvalidArgumentError("expected a prompt of at least 1 token; got none")
    odd = next((token for token in prompt if not 0 <= token < target.vocab_size), None)
    if odd is not None:
        raise InvalidArgumentError(f"expected token ids from 0 to {target.vocab_size - 1} in the prompt; got {odd}")
    if target.max_positions is not None and before + max_new_tokens > target.max_positions:
        raise InvalidArgumentError(
            f"expected prompt and output within the {target.max_positions} positions of {target.name};"
            f" got {before} + {max_new_tokens} tokens: shorten one of them"
        )
