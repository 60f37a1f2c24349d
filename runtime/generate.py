"""The one call that writes text with a plan."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from hsdopt.checks import check_length
from hsdopt.errors import InvalidArgumentError
from hsdopt.plan import parse_plan
from hsdopt.runtime.bild import BildDecoder
from hsdopt.runtime.decode import Decoder
from hsdopt.runtime.events import Generation, Seconds
from hsdopt.runtime.sampling import Chance, Sampling, rule_for
from hsdopt.runtime.workspace import CancelledError, Workspace, check_prompt, models_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from transformers import PreTrainedTokenizerBase

    from hsdopt.plan import Plan
    from hsdopt.runtime.events import FinishReason
    from hsdopt.runtime.lookup import LookupSession
    from hsdopt.runtime.models import Model
    from hsdopt.runtime.sampling import Dice, Processor
    from hsdopt.runtime.session import Session

_SLACK = 16


class Scheme(Protocol):
    """A plan at work: one per kind of plan."""

    def start(self) -> int:
        """Feed the prompt to the target; return the tokens gained, 0 or 1."""

    def prepare(self) -> None:
        """Feed the prompt to the other models."""

    def step(self, wanted: int) -> int:
        """Run one round; return the tokens gained, at least 1 and at most `wanted`."""


def generate(
    plan: Plan | str,
    models: Mapping[str, Model],
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    processors: Iterable[Processor] = (),
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    on_token: Callable[[int], object] | None = None,
    ignore_eos: bool = False,
    cancel: Callable[[], bool] | None = None,
    sessions: Mapping[str, Session | LookupSession] | None = None,
    dice: Dice | None = None,
) -> Generation:
    """Return the text that `plan` writes after `prompt`, with a log of every pass.

    Every lossless plan writes what its target would: the same tokens at temperature 0, the same law otherwise.

    Parameters
    ----------
    plan : Plan or str
        A plan, or its notation.
    models : mapping of str to Model
        At least the models that the plan names.
    prompt : str or sequence of int
        A text, which the target's tokenizer encodes as it is (render a chat with its template first), or token ids;
        what the encoder reads in an encoder-decoder model.
    max_new_tokens : int
        The most tokens to write.
    temperature, top_p, top_k, min_p, repetition_penalty, processors
        How tokens are drawn, for every model alike: see `Sampling`.
    stop : str or sequence of str
        Texts that end the output; the token that completes one is the last.
    seed : int or None
        The same seed gives the same tokens; None is a new one every time. Greedy decoding uses none.
    on_token : callable or None
        Called with every token once it is final, in order.
    ignore_eos : bool
        Whether to go on behind an end of text, as timing runs do.
    cancel : callable or None
        Asked before every pass; once it returns True the generation ends with the tokens that are final.
    sessions : mapping of str to session, or None
        Open sessions to use again instead of new ones; they are emptied first, and stay usable.
    dice : Dice or None
        Another source of randomness than `seed`.

    Raises
    ------
    InvalidArgumentError
        If an option is outside its domain, or prompt and output exceed the target's positions.
    ModelError
        If a model of the plan is missing, cannot do its part, or does not share the target's vocabulary.

    Examples
    --------
    >>> from hsdopt.runtime import load_models  # doctest: +SKIP
    >>> models = load_models(["smollm2", "lookup"])  # doctest: +SKIP
    >>> generate("smollm2(lookup:8)", models, "Once upon a time", max_new_tokens=32).text  # doctest: +SKIP
    """
    started = perf_counter()
    plan = parse_plan(plan) if isinstance(plan, str) else plan
    check_length(max_new_tokens, "max_new_tokens", minimum=1)
    named = models_of(plan, models)
    target = named[plan.target]
    ids = _encode(prompt, target)
    check_prompt(ids, target, max_new_tokens)
    sampling = Sampling(temperature, top_p, top_k, min_p, repetition_penalty, tuple(processors))
    ends: AbstractSet[int] = frozenset() if ignore_eos else target.eos
    work = Workspace(named, ids, start=target.start, cancel=cancel, sessions=sessions)
    scheme = _scheme(plan, work, sampling, Chance(seed) if dice is None else dice, ends)
    output = _Output(max_new_tokens, ends, _stop_finder(stop, target), on_token)
    with torch.inference_mode():
        prepared = _write(plan.target, scheme, work, output)
    return Generation(
        tokens=tuple(output.tokens),
        text="" if target.tokenizer is None else _decode(target.tokenizer, output.tokens),
        finish_reason=output.reason or "cancelled",
        events=tuple(work.events),
        target=plan.target,
        seconds=Seconds(
            prefill=prepared - started,
            decode=max(output.last - prepared, 0.0),
            first_token=max(output.first - started, 0.0),
            total=perf_counter() - started,
        ),
    )


def _write(target: str, scheme: Scheme, work: Workspace, output: _Output) -> float:
    """Write until the output ends; return when the prompt was in every cache."""
    prepared = perf_counter()
    try:
        _settle(target, work, output, scheme.start())
        if output.reason is None:
            scheme.prepare()
        prepared = perf_counter()
        while output.reason is None:
            _settle(target, work, output, scheme.step(output.wanted))
    except CancelledError:
        work.cut(work.prompt_length + len(output.tokens))
    return prepared


def _settle(owner: str, work: Workspace, output: _Output, gained: int) -> None:
    """Hand the `gained` tokens to the output; cut those behind its end."""
    written = work.prompt_length + len(output.tokens)
    output.take(work.tokens[written : written + gained])
    work.trim(owner, work.prompt_length + len(output.tokens), "stop")


def _scheme(plan: Plan, work: Workspace, sampling: Sampling, dice: Dice, ends: AbstractSet[int]) -> Scheme:
    rule = rule_for(sampling, dice, lenient=bool(plan.lenient))
    if plan.bild is None:
        return Decoder(plan, work, rule, ends)
    return BildDecoder(plan.bild, work, sampling, rule, ends)


class _Output:
    """The tokens that are final, and why no more follow.

    `first` and `last` are the times of the first and the last token.
    """

    def __init__(
        self,
        limit: int,
        ends: AbstractSet[int],
        stops: StopFinder | None,
        on_token: Callable[[int], object] | None,
    ) -> None:
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        self.first = self.last = 0.0
        self._limit = limit
        self._ends = ends
        self._stops = stops
        self._on_token = on_token

    @property
    def wanted(self) -> int:
        """How many tokens are still to come."""
        return self._limit - len(self.tokens)

    def take(self, tokens: Sequence[int]) -> None:
        """Add tokens until one of them is the last."""
        for token in tokens:
            self.tokens.append(token)
            self.reason = self._reason(token)
            self.last = perf_counter()
            self.first = self.first or self.last
            if self._on_token is not None:
                self._on_token(token)
            if self.reason is not None:
                return

    def _reason(self, token: int) -> FinishReason | None:
        if token in self._ends:
            return "eos"
        if self._stops is not None and self._stops.found(token):
            return "stop"
        return "length" if len(self.tokens) == self._limit else None


class StopFinder:
    """Finds the token that completes one of some texts, whatever tokens they are spread over.

    Parameters
    ----------
    stops : sequence of str
        The texts, none of them empty.
    tokenizer : transformers tokenizer
        What decodes the tokens.
    """

    def __init__(self, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._stops = tuple(stops)
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._window = max(len(text.encode()) for text in stops) + _SLACK
        self._visible: list[int] = []

    def found(self, token: int) -> bool:
        """Add one token; return whether some text is complete."""
        if token in self._special:
            return False
        self._visible = [*self._visible[1 - self._window :], token]
        text = _decode(self._tokenizer, self._visible)
        return any(stop in text for stop in self._stops)


def _stop_finder(stop: str | Sequence[str], target: Model) -> StopFinder | None:
    stops = [stop] if isinstance(stop, str) else list(stop)
    if not all(stops):
        raise InvalidArgumentError("expected stop strings of at least one character; got an empty one")
    if not stops:
        return None
    if target.tokenizer is None:
        raise InvalidArgumentError(f"expected a tokenizer with {target.name} to find stop strings; it has none")
    return StopFinder(stops, target.tokenizer)


def _encode(prompt: str | Sequence[int], target: Model) -> list[int]:
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    if target.tokenizer is None:
        raise InvalidArgumentError(f"expected token ids as a prompt: {target.name} has no tokenizer; got a text")
    return list(target.tokenizer.encode(prompt))


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
