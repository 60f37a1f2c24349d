"""Passes of Big Little Decoder, replayed along the target's own output."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hsdopt.acceptance import Traces
from hsdopt.errors import PredictionError
from hsdopt.latency.counts import Counts
from hsdopt.plan import Bild


@dataclass(frozen=True, slots=True)
class _Script:
    """What would happen at each position: the small model falls back, its token is over the rollback threshold."""

    doubts: list[bool]
    exceeds: list[bool]
    agrees: list[bool]


@dataclass(slots=True)
class _Tally:
    """Passes by (model, new tokens), and behind the other model's; small tokens reviewed and kept; tokens emitted."""

    passes: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))
    switches: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    last: str = ""
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0

    def add(self, model: str, tokens: int) -> None:
        """Count one pass."""
        self.passes[model, tokens] += 1
        self.switches[model] += model != self.last
        self.last = model


def stint_counts(plan: Bild, traces: Traces | None, tokens: int | None) -> Counts:
    """Return what is expected per token, replayed from fallback to fallback.

    The outputs of all prompts, less the token that each prefill gives, form one closed trajectory. In the long
    run it is walked round once; for finite outputs it is cut into outputs of `tokens` tokens, each of which
    starts behind a token that a prefill gave: the small model's in paper semantics, and then reviewed with the
    first stint, unless that model doubts it. Stints leave room for the large model's last token.

    A stint leaves the large model's own output where the two disagree and no rollback follows. The traces say
    nothing about such texts; they are taken to be as doubtful and as surprising as the output at the same
    positions.

    Raises
    ------
    PredictionError
        If the traces of the pair are missing or too short.
    """
    flags, places = _flags(plan, traces)
    size, tally = len(places), _Tally()
    if tokens is None:
        _walk(plan, _script(flags, places), tally, finite=False)
    else:
        for start in range(0, max(size - tokens, 0) + 1, tokens):
            own = places[(start + np.arange(tokens)) % size]
            _walk(plan, _script(flags, np.concatenate([own[:1] - 1, own])), tally, finite=True)
    large = sum(count for (model, _), count in tally.passes.items() if model == plan.large)
    edges = {(plan.small, plan.large): (tally.drafted / tally.emitted, tally.accepted / tally.emitted)}
    passes = {key: count / tally.emitted for key, count in tally.passes.items()}
    switches = {model: count / tally.emitted for model, count in tally.switches.items()}
    return Counts(passes, edges, tally.emitted / large, switches)


def _flags(plan: Bild, traces: Traces | None) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return what a script says of all positions, [3, positions], and the positions behind the first of an output."""
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
    return np.stack([doubts, exceeds, agrees]), after_first


def _script(flags: NDArray[np.bool_], places: NDArray[np.int64]) -> _Script:
    return _Script(*flags[:, places].tolist())


def _walk(plan: Bild, script: _Script, tally: _Tally, *, finite: bool) -> None:
    """Walk a script: once round a closed one; from its second token, if `finite`, to its end."""
    end = len(script.doubts)
    longest = end if plan.longest_run is None else min(plan.longest_run, end)
    first = at = int(finite)
    mark = 0 if finite and plan.semantics == "paper" and not script.doubts[0] else at
    missing = 1  # tokens that the small model's cache lacks; the large one's lacks one before every stint
    if finite or not tally.last:
        tally.last = plan.large  # the prefill's, or that of the round before in the long run
    while at < end:
        stop = min(mark + longest, end - 1) if finite else mark + longest
        at, missing = _stint(plan, script, (at, stop), missing, tally)
        tally.add(plan.large, at - mark + 1)
        kept = _reviewed(plan, script, mark, at)
        tally.drafted += at - mark
        tally.accepted += kept - mark
        missing = max(0, missing - (at - kept)) + 1
        again = plan.semantics == "reference" and kept < at and kept + 1 < end
        if again:
            tally.add(plan.large, 1)
            missing += 1
        at = mark = kept + 1 + again
    tally.emitted += at - first


def _stint(plan: Bild, script: _Script, span: tuple[int, int], missing: int, tally: _Tally) -> tuple[int, int]:
    """Return where a stint over at most `span` ends, and what the small model is missing after it."""
    for place in range(*span):
        tally.add(plan.small, max(1, missing))
        if script.doubts[place % len(script.doubts)]:
            return place, 0  # the pass took in all there was; its token is discarded
        missing = 1
    return span[1], missing


def _reviewed(plan: Bild, script: _Script, mark: int, at: int) -> int:
    """Return up to where the large model keeps the small one's tokens between two positions."""
    for place in range(mark, at):
        index = place % len(script.doubts)
        if script.exceeds[index]:
            return at if plan.semantics == "reference" and script.agrees[index] else place
    return at
