"""Expected passes per emitted token, in the long run or over a finite output, from the rounds of a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from hsdopt.costs import CostCurve
from hsdopt.latency.kernel import Bill, Kernel, Round, new_tokens

_TAIL = 1e-13  # chance of a cache lagging further behind that is left out
_FURTHEST = 4096  # missing tokens from which on all counts are one

Passes = Mapping[tuple[str, int], float]


@dataclass(frozen=True, slots=True)
class Counts:
    """What is expected per emitted token.

    Attributes
    ----------
    passes : mapping of (str, int) to float
        Passes by (model, new tokens).
    edges : mapping of (str, str) to (float, float)
        Tokens drafted and accepted by (drafter, verifier).
    tokens_per_pass : float
        Tokens emitted per pass of the target.
    switches : mapping of str to float
        Passes of each model right behind another network's.
    """

    passes: Passes
    edges: Mapping[tuple[str, str], tuple[float, float]]
    tokens_per_pass: float
    switches: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def switching(self, costs: Mapping[str, CostCurve]) -> float:
        """Return the seconds per emitted token that passes right behind another network's take more."""
        return sum(number * costs[model].switch for model, number in self.switches.items())


@dataclass(frozen=True, slots=True)
class Position:
    """One position of the target's draft: tokens per pass that it adds, and the passes behind it, per round."""

    tokens: float
    passes: Passes = field(default_factory=lambda: MappingProxyType({}))


def steady_counts(kernel: Kernel, models: Sequence[str]) -> Counts:
    """Return what is expected per token in the long run."""
    lengths = kernel.target_round(None)
    tokens = _mean_gain(lengths)
    passes: dict[tuple[str, int], float] = defaultdict(float)
    switches: dict[str, float] = {}
    for model in models:
        step = kernel.target_round(model)
        _charge(passes, model, step.bill, steady_start(step), 1.0 / tokens)
        switches[model] = step.bill.switches / tokens
    edges = {edge: (drafted / tokens, accepted / tokens) for edge, (drafted, accepted) in lengths.bill.edges.items()}
    return Counts(dict(passes), edges, tokens, switches)


def finite_counts(kernel: Kernel, models: Sequence[str], tokens: int) -> Counts:
    """Return what is expected per token while `tokens` tokens are emitted after the prefill.

    Every model starts with one token missing, and the target's last drafts are shortened to the room left.
    """
    passes: dict[tuple[str, int], float] = defaultdict(float)
    switches = dict.fromkeys(models, 0.0)
    for model in models:
        for room, starts in _visits(kernel, model, tokens).items():
            bill = kernel.target_round(model, room).bill
            _charge(passes, model, bill, starts, 1.0 / tokens)
            switches[model] += bill.switches * sum(starts.values()) / tokens
    edges: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    rounds = 0.0
    for room, starts in _visits(kernel, None, tokens).items():
        times = sum(starts.values())
        rounds += times
        for edge, (drafted, accepted) in kernel.target_round(None, room).bill.edges.items():
            edges[edge][0] += times * drafted / tokens
            edges[edge][1] += times * accepted / tokens
    return Counts(dict(passes), {edge: (both[0], both[1]) for edge, both in edges.items()}, tokens / rounds, switches)


def positions(kernel: Kernel, models: Sequence[str], target: str) -> list[Position]:
    """Return every position of the target's draft, with the passes that stand behind it in one steady round.

    A segment's passes are spread evenly over the tokens that it is expected to draft; the verify pass counts
    with what it takes to have one more token in it.
    """
    lengths = kernel.target_round(None)
    longest = max(drafted for drafted, _ in lengths.drafts)
    shares = [_coverage(span, longest) for span in lengths.spans]
    behind = _segment_passes(kernel, models, len(shares))
    values = []
    for place in range(1, longest + 1):
        passes: dict[tuple[str, int], float] = defaultdict(float)
        for share, segment in zip(shares, behind, strict=True):
            for key, count in segment.items():
                passes[key] += share[place] * count
        drafted = sum(chance for (held, _), chance in lengths.drafts.items() if held >= place)
        passes[target, place + 1] += drafted
        passes[target, place] -= drafted
        gain = sum(chance for (_, accepted), chance in lengths.drafts.items() if accepted >= place)
        values.append(Position(gain, dict(passes)))
    return values


def steady_start(step: Round) -> dict[int, float]:
    """Return the long-run law of the followed model's missing tokens at the start of a round.

    The model either makes a pass in a round, which forgets all before it, or lags behind by the round's tokens;
    so the law is a renewal sequence, summed forward.
    """
    settled: dict[int, float] = defaultdict(float)
    skipped: dict[int, float] = defaultdict(float)
    for (gained, state), chance in step.law.items():
        (skipped if state is None else settled)[gained if state is None else state] += chance
    if not settled:
        return {1: 1.0}
    if not skipped:
        return dict(settled)
    return _renewal(settled, skipped)


def _renewal(settled: Mapping[int, float], skipped: Mapping[int, float]) -> dict[int, float]:
    law: dict[int, float] = {}
    missing, left = 0, 1.0
    while left > _TAIL and missing < _FURTHEST:
        mass = settled.get(missing, 0.0)
        mass += sum(chance * law.get(missing - gained, 0.0) for gained, chance in skipped.items())
        if mass > 0.0:
            law[missing] = mass
        left -= mass
        missing += 1
    law[missing] = max(left, 0.0)
    return law


def _visits(kernel: Kernel, watched: str | None, tokens: int) -> dict[int | None, dict[int, float]]:
    """Return, per room for a draft (None: enough), how often a round starts with how many tokens missing."""
    at: list[dict[int, float]] = [defaultdict(float) for _ in range(tokens + 1)]
    at[tokens][1] = 1.0
    visits: dict[int | None, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for wanted in range(tokens, 0, -1):
        starts = at[wanted]
        room = None if wanted > kernel.longest else wanted - 1
        for missing, chance in starts.items():
            visits[room][missing] += chance
        times = sum(starts.values())
        for (gained, state), share in kernel.target_round(watched, room).law.items() if times else ():
            if state is not None:
                at[wanted - gained][state] += times * share
                continue
            for missing, chance in starts.items():
                at[wanted - gained][missing + gained] += chance * share
    return visits


def _charge(
    passes: dict[tuple[str, int], float], model: str, bill: Bill, starts: Mapping[int, float], weight: float
) -> None:
    """Enter the passes of `bill`, given how often its round starts with how many tokens missing."""
    times = sum(starts.values()) * weight
    for tokens, count in bill.sized.items():
        passes[model, tokens] += times * count
    for (appended, drafted), count in bill.first.items():
        for missing, chance in starts.items():
            passes[model, new_tokens(missing + appended, drafted)] += weight * chance * count


def _segment_passes(kernel: Kernel, models: Sequence[str], segments: int) -> list[dict[tuple[str, int], float]]:
    """Return the passes of each segment in one steady round."""
    behind: list[dict[tuple[str, int], float]] = [defaultdict(float) for _ in range(segments)]
    for model in models:
        step = kernel.target_round(model)
        starts = steady_start(step)
        for passes, bill in zip(behind, step.segments, strict=True):
            _charge(passes, model, bill, starts, 1.0)
    return behind


def _coverage(span: Mapping[tuple[int, int], float], longest: int) -> list[float]:
    """Return, per position from 0 (unused), the share of a segment's expected tokens that lie there."""
    cover = [0.0] * (longest + 1)
    for (start, tokens), chance in span.items():
        for place in range(start + 1, start + tokens + 1):
            cover[place] += chance
    total = sum(cover)
    return [chance / total for chance in cover] if total > 0.0 else cover


def _mean_gain(step: Round) -> float:
    return sum(gained * chance for (gained, _), chance in step.law.items())
