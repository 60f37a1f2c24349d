"""What the ecosystem's own decoding takes on the same prompts: transformers' `generate`, plain and assisted.

A baseline is timed like a plan: from the end of the prompt's processing to the last token, end of text ignored. What
`generate` hands to its streamer tells when that was. With an assistant, drafts are made before the target has read the
prompt, and the first hand-over may hold several tokens; then time and tokens both count from there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from hsdopt.profiles import Setting
from hsdopt.profiling.validate import Timed
from hsdopt.runtime.model import Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Baselines", "TransformersBaseline", "transformers_baselines"]

PROMPT_LOOKUP_TOKENS = 10
"""What the documentation of transformers proposes for ``prompt_lookup_num_tokens``."""


@dataclass(frozen=True, slots=True, eq=False)
class TransformersBaseline:
    """One way to call transformers' `generate`, with its defaults where nothing is said.

    Attributes
    ----------
    label : str
        What the report calls it.
    network : transformers.PreTrainedModel
        The target.
    options : mapping of str to object
        Passed on to `generate`.
    models : tuple of str
        The models that it needs loaded.
    """

    label: str
    network: PreTrainedModel = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)
    models: tuple[str, ...]

    def run(self, prompt: Sequence[int], *, setting: Setting, seed: int) -> Timed:
        """Return one timed generation."""
        ids = torch.tensor([list(prompt)], device=self.network.device)
        clock = _Clock()
        with _alone(self.network.device, seed), torch.inference_mode():
            clock.start()
            self.network.generate(
                ids, attention_mask=torch.ones_like(ids), streamer=clock, **_options(setting), **self.options
            )
        return clock.timed()


@dataclass(frozen=True, slots=True)
class Baselines:
    """The baselines that can be run, and why others cannot.

    Attributes
    ----------
    runners : tuple of TransformersBaseline
    notes : tuple of str
        One line for each that was left out.
    """

    runners: tuple[TransformersBaseline, ...] = ()
    notes: tuple[str, ...] = ()


def transformers_baselines(target: Model, assistants: Sequence[Model], prompt: Sequence[int]) -> Baselines:
    """Return plain, assisted and prompt-lookup decoding by transformers, each tried on a few tokens.

    Parameters
    ----------
    target : Model
    assistants : sequence of Model
        Networks to use as ``assistant_model``, one baseline each; others are passed over.
    prompt : sequence of int
        What to try them on; a baseline that fails is left out, with a note that says why.
    """
    if target.network is None or target.start is not None:
        return Baselines(notes=("transformers generate() is not timed beside encoder-decoder models",))
    network = _neutral(target.network)
    wanted: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
        ("", {}, ()),
        *(
            (f"assistant_model={model.name}", {"assistant_model": _neutral(model.network)}, (model.name,))
            for model in assistants
            if model.network is not None
        ),
        (f"prompt_lookup_num_tokens={PROMPT_LOOKUP_TOKENS}", {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}, ()),
    ]
    runners, notes = [], []
    for text, options, models in wanted:
        runner = TransformersBaseline(f"transformers generate({text})", network, options, (*models, target.name))
        reason = _fault(runner, prompt)
        if reason is None:
            runners.append(runner)
        else:
            notes.append(f"{runner.label} is left out: {reason}")
    return Baselines(tuple(runners), tuple(notes))


def _fault(runner: TransformersBaseline, prompt: Sequence[int]) -> str | None:
    """Return why a baseline cannot be run, or None."""
    try:
        runner.run(prompt, setting=Setting(max_new_tokens=4), seed=0)
    except Exception as error:  # noqa: BLE001 -- a foreign loop over foreign networks fails in its own ways
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return None


def _neutral(network: PreTrainedModel) -> PreTrainedModel:
    """Return the same network without generation settings of its own: no end of text, no sampling filters."""
    made = copy.copy(network)  # weights and modules are shared
    made.generation_config = GenerationConfig()
    return made


def _options(setting: Setting) -> dict[str, Any]:
    """Return the setting in the words of `generate`."""
    options: dict[str, Any] = {"max_new_tokens": setting.max_new_tokens, "do_sample": setting.temperature > 0}
    if setting.repetition_penalty != 1:
        options["repetition_penalty"] = setting.repetition_penalty
    if setting.temperature > 0:
        options |= {"temperature": setting.temperature, "top_p": setting.top_p, "top_k": setting.top_k}
    return options | {"pad_token_id": 0}


@contextmanager
def _alone(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the generators that `generate` draws from, put them back afterwards, and keep its warnings quiet."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            torch.manual_seed(seed)
            yield
    finally:
        logging.set_verbosity(level)


class _Clock:
    """A streamer that notes when tokens arrive."""

    def __init__(self) -> None:
        self._started = 0.0
        self._arrivals: list[tuple[float, list[int]]] = []

    def start(self) -> None:
        self._started = perf_counter()

    def put(self, tokens: torch.Tensor) -> None:
        """Take the prompt first, then the tokens of each pass of the target."""
        self._arrivals.append((perf_counter(), tokens.flatten().tolist()))

    def end(self) -> None:
        """Close the stream; its last token has come already."""

    def timed(self) -> Timed:
        """Return what was measured; an output of one pass counts whole, its prompt included."""
        (first, opening), *rest = self._arrivals[1:]
        output = tuple(token for _, tokens in self._arrivals[1:] for token in tokens)
        if not rest:
            return Timed(output, len(output) - 1, first - self._started, 0.0, float(len(output)))
        after = len(output) - len(opening)
        return Timed(output, after, rest[-1][0] - first, first - self._started, after / len(rest))
