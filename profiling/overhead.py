"""Seconds outside the passes, and of the passes that a prompt costs once: prefill, encoder, and the first after them.

What stands beside the passes of a round is the wall-clock time of a run less that of its passes. The target's own
output, written anyway for the traces, gives it for plain decoding; a short run of one drafter gives it for a stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hsdopt.overhead import DRAFTING, ROUND, STACK_ROUND
from hsdopt.plan import LOOKUP, Level, Segment
from hsdopt.profiles import Setting
from hsdopt.profiling.acceptance import PromptTrace
from hsdopt.runtime import generate
from hsdopt.runtime.events import Generation
from hsdopt.runtime.model import Model

__all__ = ["Rounds", "overhead_seconds", "prompt_seconds", "round_overhead", "rounds_of"]

_SLOWEST = 3.0
"""Seconds outside a round count at most this many times the median over runs."""

_DRAFT = 4
_STACK_RUNS, _STACK_TOKENS = 2, 24
_PROMPT_REPEATS = 2


@dataclass(frozen=True, slots=True)
class Rounds:
    """What one run spent outside its passes.

    Attributes
    ----------
    outside : float
        Wall-clock seconds after the prefills, less those of all passes and lookup requests.
    rounds : int
        Passes of the target.
    others : int
        Passes, and lookup requests, of the other models.
    """

    outside: float
    rounds: int
    others: int


def rounds_of(output: Generation) -> Rounds:
    """Return what a run spent outside its passes."""
    made = [event for event in output.events if event.kind in ("pass", "lookup")]
    rounds = sum(event.model == output.target for event in made)
    return Rounds(output.seconds.decode - sum(event.seconds for event in made), rounds, len(made) - rounds)


def overhead_seconds(
    models: Mapping[str, Model], target: str, traces: Sequence[PromptTrace], *, setting: Setting
) -> dict[str, float]:
    """Return what a profile keeps as overhead: rounds, and passes that a prompt costs once.

    Parameters
    ----------
    models : mapping of str to Model
        The target and its drafters; the one with the fewest parameters drafts in the stack that is measured.
    target : str
    traces : sequence of PromptTrace
        With what their runs spent.
    setting : Setting
        Temperature and filters of the stack's runs.
    """
    alone = [Rounds(trace.outside, len(trace.tokens) - 1, 0) for trace in traces if trace.outside is not None]
    stack = _stack(models, target)
    prompts = [trace.prompt for trace in traces]
    runs = [] if stack is None else list(_runs(stack, models, prompts[:_STACK_RUNS], setting))
    return {**round_overhead(alone, runs), **prompt_seconds(models, prompts)}


def round_overhead(alone: Sequence[Rounds], stack: Sequence[Rounds] = ()) -> dict[str, float]:
    """Return seconds outside the passes per round, from runs of plain decoding and of a stack.

    Keys are those of `hsdopt.overhead`; there are none without a round of plain decoding. A run in which the machine
    was busy elsewhere counts at most three medians.

    Examples
    --------
    >>> round_overhead([Rounds(6.0, 3, 0)], [Rounds(21.0, 3, 15)])
    {'round of autoregression': 2.0, 'round of a stack': 7.0, 'drafting pass of a stack': 1.0}
    """
    if not any(run.rounds for run in alone):
        return {}
    by_itself = _per_round(alone)
    if not any(run.others for run in stack):
        return {ROUND: by_itself}
    whole = _per_round(stack)
    others = sum(run.others for run in stack) / sum(run.rounds for run in stack)
    return {ROUND: by_itself, STACK_ROUND: whole, DRAFTING: max(whole - by_itself, 0.0) / others}


def _per_round(runs: Sequence[Rounds]) -> float:
    """Return seconds per round, pooled over runs; a run counts at most `_SLOWEST` medians per round."""
    rounds = np.array([run.rounds for run in runs if run.rounds])
    each = np.array([run.outside for run in runs if run.rounds]) / rounds
    return max(float(np.average(np.minimum(each, _SLOWEST * np.median(each)), weights=rounds)), 0.0)


def _stack(models: Mapping[str, Model], target: str) -> Level | None:
    """Return the stack whose rounds are measured: the target over its smallest network, or over lookup."""
    networks = [name for name, model in models.items() if model.kind != LOOKUP and name != target]
    drafter = min(networks, key=lambda name: models[name].parameters, default=LOOKUP)
    return Level(target, (Segment(Level(drafter), _DRAFT),)) if drafter in models else None


def _runs(
    plan: Level, models: Mapping[str, Model], prompts: Iterable[Sequence[int]], setting: Setting
) -> Iterator[Rounds]:
    options = {**setting.model_dump(), "max_new_tokens": min(_STACK_TOKENS, setting.max_new_tokens)}
    for prompt in prompts:
        yield rounds_of(generate(plan, models, list(prompt), ignore_eos=True, seed=0, **options))


def prompt_seconds(models: Mapping[str, Model], prompts: Iterable[Sequence[int]]) -> dict[str, float]:
    """Return the seconds of what a prompt costs once, for every network at three of the prompts' lengths.

    Keys read "prefill of NAME, 80 tokens", "encoder of NAME, 80 tokens" for models that have one, and "first pass of
    NAME, 80 tokens": over one token, behind the prefill. Every measurement starts from an empty cache, as a run does.
    """
    by_length = {len(prompt): prompt for prompt in prompts}
    lengths = sorted(by_length)
    chosen = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    taken: dict[str, list[float]] = {}
    for _ in range(_PROMPT_REPEATS):
        for length in chosen:
            for name, model in models.items():
                if model.kind != LOOKUP:
                    for what, seconds in _once(model, by_length[length]).items():
                        taken.setdefault(f"{what} of {name}, {length} tokens", []).append(seconds)
    return {key: float(np.median(seconds)) for key, seconds in taken.items()}


def _once(model: Model, prompt: Sequence[int]) -> dict[str, float]:
    session = model.network_session()
    session.begin(prompt)
    opening = model.opening(prompt)
    session.forward(opening)
    session.forward([*opening, opening[-1]])
    kinds = ("encoder", "prefill", "first pass")  # the first for encoder-decoders only
    return dict(zip(kinds[-len(session.passes) :], (made.seconds for made in session.passes), strict=True))
