"""Passes of Big Little Decoder, replayed along the target's own output."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from hsdopt.acceptance import Traces
from hsdopt.errors import PredictionError
from hsdopt.latency.counts import Counts
from hsdopt.plan import Bild

_REFERENCE_STINT = 10  # what the authors' code lets the small model write at once, unless told


@dataclass(frozen=True, slots=True)
class _Script:
    """What would happen at each position: the small model falls back, its token is over the rollback threshold."""

    doubts: list[bool]
    exceeds: list[bool]
    agrees: list[bool]


def stint_counts(plan: Bild, traces: Traces | None, tokens: int | None) -> Counts:
    """Return what is expected per token, replayed from fallback to fallback.

    The outputs of all prompts, less the token that each prefill gives, form one closed trajectory. In the long
    run it is walked round once; for finite outputs it is cut into outputs of `tokens` tokens, each of which
    starts with one token missing everywhere and whose stints leave room for the large model's last token.

    A stint leaves the large model's own output where the two disagree and no rollback follows. The traces say
    nothing about such texts; they are taken to be as doubtful and as surprising as the output at the same
    positions.

    Raises
    ------
    PredictionError
        If the traces of the pair are missing or too short.
    """
    script = _script(plan, traces)
    size = len(script.doubts)
    passes: dict[tuple[str, int], float] = defaultdict(float)
    judged = [0, 0]
    if tokens is None:
        emitted = _walk(plan, script, (0, size), None, passes, judged)
    else:
        starts = range(0, max(size - tokens, 0) + 1, tokens)
        emitted = sum(_walk(plan, script, (start, start + tokens), start + tokens, passes, judged) for start in starts)
    large = sum(count for (model, _), count in passes.items() if model == plan.large)
    edges = {(plan.small, plan.large): (judged[0] / emitted, judged[1] / emitted)}
    return Counts({key: count / emitted for key, count in passes.items()}, edges, emitted / large)


def _script(plan: Bild, traces: Traces | None) -> _Script:
    pair = (plan.small, plan.large)
    if traces is None or pair not in traces.surprise or not {*pair} <= {*traces.choice} or plan.small not in traces.top:
        raise PredictionError(
            f"expected traces of {plan.small} under {plan.large} for bild(...); none in this profile: "
            "profile both models together"
        )
    after_first = np.flatnonzero(np.diff(traces.prompt, prepend=-1) == 0)
    if not len(after_first):
        raise PredictionError("expected outputs of at least 2 tokens in the traces for bild(...); profile longer ones")
    doubts = traces.top[plan.small] < plan.fallback
    if plan.stride is not None:
        doubts = np.zeros_like(doubts)
    exceeds = traces.surprise[pair] > plan.rollback
    agrees = traces.choice[plan.small] == traces.choice[plan.large]
    return _Script(doubts[after_first].tolist(), exceeds[after_first].tolist(), agrees[after_first].tolist())


def _walk(  # noqa: PLR0917 - one loop over stints and what it counts
    plan: Bild,
    script: _Script,
    span: tuple[int, int],
    limit: int | None,
    passes: dict[tuple[str, int], float],
    judged: list[int],
) -> int:
    """Return the tokens emitted from the start of `span` until its end is reached; count passes and judged tokens."""
    at, end = span
    small = large = 1  # tokens missing
    while at < end:
        room = len(script.doubts) if limit is None else limit - at - 1
        written, small = _stint(plan, script, at, room, small, passes)
        passes[plan.large, large + written] += 1
        kept = _reviewed(plan, script, at, written)
        judged[0] += written
        judged[1] += kept
        at += kept + 1
        small, large = max(0, small - (written - kept)) + 1, 1
        if kept < written and plan.semantics == "reference" and at < end:
            passes[plan.large, 1] += 1
            at, small = at + 1, small + 1
    return at - span[0]


def _stint(  # noqa: PLR0917 - the state of one stint
    plan: Bild, script: _Script, at: int, room: int, missing: int, passes: dict[tuple[str, int], float]
) -> tuple[int, int]:
    """Return how many small tokens a stint from `at` keeps, and what the small model is missing after it."""
    longest = plan.max_draft if plan.stride is None else plan.stride
    if longest is None and plan.semantics == "reference":
        longest = _REFERENCE_STINT
    longest = room if longest is None else min(longest, room)
    for written in range(longest):
        passes[plan.small, max(1, missing)] += 1
        if script.doubts[(at + written) % len(script.doubts)]:
            return written, 0  # the pass took in all there was; its token is discarded
        missing = 1
    return longest, missing


def _reviewed(plan: Bild, script: _Script, at: int, written: int) -> int:
    """Return how many of the small model's tokens the large one keeps."""
    for kept in range(written):
        place = (at + kept) % len(script.doubts)
        if script.exceeds[place]:
            return written if plan.semantics == "reference" and script.agrees[place] else kept
    return written
