"""The machinery of every simulation: the rounds of a plan, run in many independent lanes at once.

A lane is one output being decoded. Per lane the engine keeps the length of the sequence and, per
model, how much of it the model's cache holds; a pass takes in whatever is missing. What becomes of
a draft is decided by a `World`: survival curves (events.py), traces (replay.py) or known
distributions (categorical.py). Lanes diverge inside a round; those still at work are then picked
out by index, so that one NumPy call serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import singledispatch
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hsdopt.costs import CostCurve
from hsdopt.errors import PredictionError
from hsdopt.plan import LOOKUP, Adaptive, Choice, Level, Plan, Segment, Stop

__all__ = [
    "CostTable",
    "Counts",
    "Draft",
    "Edge",
    "Engine",
    "Node",
    "World",
    "compile_plan",
    "counted",
    "edges",
    "refuse_extrapolation",
    "refuse_lenience",
]

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Where: TypeAlias = slice | Ints
"""Which lanes: all of them as a slice (a view, hence fast), or some by index."""

EVERYWHERE = slice(None)
_BEYOND = 2e-3  # share of the seconds that may be spent in passes longer than any profiled


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One level, ready to run.

    Attributes
    ----------
    model : str
    index : int
        Its place among the models of the plan.
    rows : tuple of tuple of Edge
        The drafts it may review; an empty row is one pass by itself.
    pick : ndarray of int or None
        Which row to use at 0, 1, 2, ... tokens owed; None if there is only one.
    reach : int
        The most tokens that stand at any moment of one round.
    """

    model: str
    index: int
    rows: tuple[tuple[Edge, ...], ...] = ((),)
    pick: Ints | None = None
    reach: int = field(init=False)

    def __post_init__(self) -> None:
        """Find how far a round reaches."""
        object.__setattr__(self, "reach", 1 + max(sum(edge.reach for edge in row) for row in self.rows))

    @property
    def alone(self) -> bool:
        """Whether nothing drafts for it."""
        return self.rows == ((),)


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """One segment of a row, ready to run.

    Attributes
    ----------
    drafter, verifier : str
    index : int
        The drafter's place among the models of the plan.
    length : int
    stop : {"truncate", "overshoot", "rounds", "until"}
    node : Node or None
        The drafter's level; None for the lookup drafter.
    lenience : float
        Of the verifier towards this drafter.
    """

    drafter: str
    verifier: str
    index: int
    length: int
    stop: Stop
    node: Node | None
    lenience: float = 1.0

    @property
    def longest(self) -> int:
        """The most tokens that one request passes up."""
        if self.node is None or self.node.alone or self.stop == "truncate":
            return self.length
        gain = 1 + max(sum(edge.longest for edge in row) for row in self.node.rows)
        return self.length * gain if self.stop == "rounds" else self.length - 1 + gain

    @property
    def reach(self) -> int:
        """The most tokens that stand at any moment of one request, those about to be discarded included."""
        if self.node is None or self.node.alone:
            return self.length
        gain = self.node.reach
        return self.length * gain if self.stop == "rounds" else self.length - 1 + gain


@singledispatch
def compile_plan(plan: Plan) -> Node:
    """Return the target's level of a lossless plan, ready to run.

    Raises
    ------
    PredictionError
        If the plan is not a stack of levels (Big Little Decoder).
    """
    raise PredictionError(f"expected a stack of levels; got {plan}: bild plans are predicted by replaying traces")


@compile_plan.register(Level)
def _stack(plan: Level) -> Node:
    return _level(plan, plan.models)


def _level(level: Level, models: Sequence[str]) -> Node:
    row = tuple(_edge(level, segment, models) for segment in level.row)
    return Node(level.model, models.index(level.model), (row,))


def _edge(level: Level, segment: Segment, models: Sequence[str]) -> Edge:
    name = segment.level.model
    node = None if name == LOOKUP else _level(segment.level, models)
    lenience = 1.0 if name == LOOKUP else level.lenience  # a lookup drafter has no law to be lenient about
    return Edge(name, level.model, models.index(name), segment.length, segment.stop, node, lenience)


@compile_plan.register(Adaptive)
def _adaptive(plan: Adaptive) -> Node:
    nodes: dict[str, Node] = {}

    def row(owner: str, choice: Choice | None) -> tuple[Edge, ...]:
        if choice is None:
            return ()
        place = plan.models.index(choice.drafter)
        return (Edge(choice.drafter, owner, place, choice.length, "truncate", nodes.get(choice.drafter)),)

    for owner, table in plan.tables:
        if owner in plan.models:
            distinct = list(dict.fromkeys(table))
            pick = np.array([0, *(distinct.index(choice) for choice in table)], dtype=np.int64)
            rows = tuple(row(owner, choice) for choice in distinct)
            nodes[owner] = Node(owner, plan.models.index(owner), rows, None if len(rows) == 1 else pick)
    return Node(plan.model, plan.models.index(plan.model), (row(plan.model, plan.draft),))


def edges(node: Node, seen: set[Node] | None = None) -> Iterator[Edge]:
    """Yield every edge below `node`; the levels of an adaptive plan are shared, and visited once."""
    seen = set() if seen is None else seen
    if node in seen:
        return
    seen.add(node)
    for row in node.rows:
        for edge in row:
            yield edge
            if edge.node is not None:
                yield from edges(edge.node, seen)


class CostTable:
    """Seconds of passes over 1, 2, ... new tokens, at one context or at each of a range.

    Parameters
    ----------
    curve : CostCurve
    context : float or None
        Tokens in the cache; None for the curve's own middle.
    span : (int, int) or None
        First and last context of a run, which no pass may leave; given, costs follow the context of every pass.

    Attributes
    ----------
    longest : float
        The most new tokens that were profiled; longer passes are charged in proportion to their tokens.
    switch : float
        Seconds that a pass behind another network's takes more.
    """

    __slots__ = ("_constant", "_grid", "_low", "_sums", "longest", "switch")

    def __init__(self, curve: CostCurve, *, context: float | None = None, span: tuple[int, int] | None = None) -> None:
        self.longest = curve.max_tokens
        self.switch = curve.switch
        self._constant = curve(1, context) if curve.constant else None
        self._low = 0
        if span is None or len(curve.contexts) == 1:
            self._grid = _one_context(curve, context)
        else:
            self._low = span[0]
            self._grid = _many_contexts(curve, np.arange(span[0], span[1] + 1, dtype=float))
        self._sums = np.concatenate([[0.0], np.cumsum(self._grid[:, 1])])

    def passes(self, fed: Ints, cached: Ints) -> Floats | float:
        """Return the seconds of one pass per lane, over `fed` new tokens with `cached` tokens before them."""
        if self._constant is not None:
            return self._constant
        try:
            if len(self._grid) == 1:
                return np.asarray(self._grid[0].take(fed))
            return np.asarray(self._grid[cached - self._low, fed])
        except IndexError:
            self._extend(int(fed.max()))
            return self.passes(fed, cached)

    def single_passes(self, number: Ints, cached: Ints) -> Floats:
        """Return the seconds of `number` passes over one token each, the first with `cached` tokens before it."""
        if len(self._grid) == 1:
            return np.asarray(number * self._sums[1])
        first = cached - self._low
        return np.asarray(self._sums[first + number] - self._sums[first])

    def mean(self, fed: int) -> float:
        """Return the mean over the contexts of the seconds of one pass."""
        return float(self._constant if self._constant is not None else self._grid[:, fed].mean())

    def _extend(self, fed: int) -> None:
        longest = int(self.longest)
        beyond = np.arange(self._grid.shape[1], 2 * fed) / longest
        self._grid = np.concatenate([self._grid, self._grid[:, longest : longest + 1] * beyond], axis=1)


def refuse_extrapolation(plan: Plan, counts: Counts, costs: Mapping[str, CostTable]) -> None:
    """Raise PredictionError if passes longer than profiled took more than 0.2 % of the time."""
    for model, table in costs.items():
        beyond = sum(
            count * table.mean(fed)
            for (name, fed), count in counts.passes.items()
            if name == model and fed > table.longest
        )
        if beyond > _BEYOND * counts.seconds:
            raise PredictionError(
                f"expected passes of {model} over at most {table.longest:g} new tokens, as profiled; {plan} spends "
                f"{beyond / counts.seconds:.1%} of its time in longer ones: profile longer passes or shorten the drafts"
            )


def _one_context(curve: CostCurve, context: float | None) -> Floats:
    if curve.constant:
        return np.array([[0.0, curve(1, context)]])
    return np.concatenate([[0.0], curve.table(curve.tokens[-1], context)])[np.newaxis]


def _many_contexts(curve: CostCurve, contexts: Floats) -> Floats:
    """Return seconds, [contexts, 1 + tokens], linear between the measured contexts as the curve is."""
    measured = np.stack([_one_context(curve, context)[0] for context in curve.contexts])
    axis = np.asarray(curve.contexts, dtype=float)
    place = np.maximum(contexts, axis[0])
    right = np.clip(np.searchsorted(axis, place), 1, len(axis) - 1)
    weight = ((place - axis[right - 1]) / (axis[right] - axis[right - 1]))[:, np.newaxis]
    return np.asarray(np.maximum(measured[right - 1] * (1 - weight) + measured[right] * weight, 0.0))


class Draft(NamedTuple):
    """Tokens drafted per lane; `tag` is what the world wants to remember about each lane's draft."""

    tokens: Ints
    tag: Ints | None = None


class World:
    """What decides about tokens. `start` is always the length of each lane's sequence before the tokens."""

    writes = False
    """Whether tokens have identities, so that every token a model draws must be told to `write`."""

    def propose(self, edge: Edge, asked: Ints, where: Where, start: Ints) -> Draft:
        """Return the lookup drafter's answer to a request for `asked` tokens."""
        raise NotImplementedError

    def accept(self, edge: Edge, draft: Draft, where: Where, start: Ints) -> Ints:
        """Return how many tokens of a draft, from its beginning, the verifier accepts."""
        raise NotImplementedError

    def write(self, model: str, tokens: Ints, where: Where, start: Ints) -> None:
        """Let `model` draw `tokens` tokens from its own law."""

    def reviewed(self, model: str, accepted: Ints, where: Where, start: Ints) -> None:
        """Learn that `model` accepted `accepted` tokens of its draft, and wrote one behind them; if it `writes`."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a run did, summed over its lanes or prompts.

    Attributes
    ----------
    tokens : int
        Tokens that the target gained.
    rounds : int
        Verify passes of the target.
    passes : mapping of (str, int) to int
        Passes per model and number of new tokens; the lookup drafter's requests stand as 1 token.
    drafted, accepted : mapping of (drafter, verifier) to int
        Tokens that came to the verifier, and those it accepted.
    discarded : mapping of str to int
        Tokens that a model held and did not pass up.
    tokens_histogram : tuple of int
        Rounds of the target that gained 0, 1, 2, ... tokens.
    model_seconds : mapping of str to float
        Seconds spent in the passes of each model.
    switches : mapping of str to int
        Passes of each model right behind another network's; none are counted where they cost nothing more.
    """

    tokens: int
    rounds: int
    passes: Mapping[tuple[str, int], int]
    drafted: Mapping[tuple[str, str], int]
    accepted: Mapping[tuple[str, str], int]
    discarded: Mapping[str, int]
    tokens_histogram: tuple[int, ...]
    model_seconds: Mapping[str, float]
    switches: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """Seconds in all."""
        return sum(self.model_seconds.values())

    @property
    def seconds_per_token(self) -> float:
        """Seconds per token of the target, pooled (sum over sum)."""
        return self.seconds / self.tokens if self.tokens else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that one verify pass of the target gains (block efficiency)."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def kinds_per_token(self) -> dict[tuple[str, int], float]:
        """Passes per token of the target, by model and number of new tokens."""
        return {kind: count / self.tokens for kind, count in self.passes.items()} if self.tokens else {}

    @property
    def switches_per_token(self) -> dict[str, float]:
        """Passes right behind another network's per token of the target, by model."""
        return {model: count / self.tokens for model, count in self.switches.items()} if self.tokens else {}

    @property
    def passes_per_token(self) -> dict[str, float]:
        """Passes of each model per token of the target (requests, for the lookup drafter)."""
        totals = dict.fromkeys(self.model_seconds, 0)
        for (model, _), count in self.passes.items():
            totals[model] += count
        return {model: count / self.tokens if self.tokens else 0.0 for model, count in totals.items()}

    @property
    def model_seconds_per_token(self) -> dict[str, float]:
        """Seconds in each model per token of the target; they sum to `seconds_per_token`."""
        return {model: seconds / self.tokens if self.tokens else 0.0 for model, seconds in self.model_seconds.items()}

    def new_tokens_histogram(self, model: str) -> dict[int, int]:
        """Return how many passes of `model` took in 1, 2, ... new tokens."""
        return {fed: count for (name, fed), count in sorted(self.passes.items()) if name == model}


def counted(counts: Counts) -> dict[str, Any]:
    """Return the fields of `counts` by name, to build a larger value from them."""
    return {item.name: getattr(counts, item.name) for item in fields(Counts)}


class Engine:
    """The state of all lanes, and the operations that a run of a plan is made of.

    Parameters
    ----------
    target : Node
        The plan, compiled.
    models : sequence of str
        Its models.
    costs : sequence of CostTable
        One per model.
    world : World
        What decides about tokens.
    length : ndarray of int, shape [lanes]
        Length of each sequence at the start, the first output token included.
    """

    def __init__(
        self, target: Node, models: Sequence[str], costs: Sequence[CostTable], world: World, length: Ints
    ) -> None:
        self.target = target
        self.models = tuple(models)
        self.length = length.copy()
        self.costs = tuple(costs)
        self._world = world
        self._switching = any(table.switch for table in self.costs)
        self._last = np.full(len(length), target.index)  # the model of each lane's last pass
        # After prefill every cache holds the prompt and lacks the first output token.
        self._cached = np.tile(length - 1, (len(self.models), 1))
        self._caches = list(self._cached)
        self.reset()

    def reset(self) -> None:
        """Forget what was counted so far, but not the state of the caches."""
        self.seconds = np.zeros(len(self.length))
        self._model_seconds = [0.0] * len(self.models)
        self._fed = [np.zeros(1, dtype=np.int64) for _ in self.models]
        self._gained = np.zeros(1, dtype=np.int64)
        self._drafted: dict[tuple[str, str], int] = {}
        self._accepted: dict[tuple[str, str], int] = {}
        self._discarded = [0] * len(self.models)
        self._switches = [0] * len(self.models)

    def target_round(self, where: Where = EVERYWHERE, left: Ints | None = None) -> Ints:
        """Run one round of the target; return the tokens gained per lane.

        Parameters
        ----------
        where : slice or ndarray of int
            Which lanes.
        left : ndarray of int or None
            The most tokens the target's draft may have, per lane.
        """
        gained = self._round(self.target, self.target.rows[0], where, left)
        self._gained = _added(self._gained, np.bincount(gained))
        return gained

    def finish(self, wanted: Ints) -> Ints:
        """Run rounds until every lane has gained exactly `wanted` tokens; return the rounds per lane."""
        owed, rounds = wanted.copy(), np.zeros_like(wanted)
        while (where := np.flatnonzero(owed > 0)).size:
            owed[where] -= self.target_round(where, owed[where] - 1)
            rounds[where] += 1
        return rounds

    def counts(self) -> Counts:
        """Return what was counted since the last reset."""
        sizes = np.arange(len(self._gained))
        return Counts(
            tokens=int(sizes @ self._gained),
            rounds=int(self._gained.sum()),
            passes={
                (model, int(fed)): int(counts[fed])
                for model, counts in zip(self.models, self._fed, strict=True)
                for fed in np.flatnonzero(counts)
            },
            drafted=dict(self._drafted),
            accepted=dict(self._accepted),
            discarded={model: self._discarded[index] for index, model in enumerate(self.models)},
            tokens_histogram=tuple(self._gained.tolist()),
            model_seconds=dict(zip(self.models, self._model_seconds, strict=True)),
            switches={model: count for model, count in zip(self.models, self._switches, strict=True) if count},
        )

    def _round(self, node: Node, row: tuple[Edge, ...], where: Where, left: Ints | None = None) -> Ints:
        """Draft the row, review it in one pass, gain the accepted prefix and one token more."""
        start = self.length[where].copy()
        drafts, held = [], np.zeros_like(start)
        for edge in row:
            drafts.append(self._draft(edge, held, where, left))
            held = held + drafts[-1].tokens
        self._pass(node.index, where, held)
        accepted = self._review(row, drafts, where, start)
        if self._world.writes:
            full = np.flatnonzero(accepted == held)
            self._world.write(node.model, np.ones_like(full), _among(where, full), (start + accepted)[full])
            self._world.reviewed(node.model, accepted, where, start)
        if row:
            self._cut_to(start + accepted, where)
        self.length[where] += 1
        return accepted + 1

    def _draft(self, edge: Edge, held: Ints, where: Where, left: Ints | None) -> Draft:
        """Ask a segment's drafter; `held` tokens of the row stand already."""
        asked = np.full_like(held, edge.length)
        if edge.stop == "until":
            asked = np.maximum(asked - held, 0)
        if left is not None:
            asked = np.minimum(asked, left - held)
        if edge.stop != "until" and left is None:
            return self._request(edge, asked, where)
        draft = self._request_some(edge, asked, where)
        return draft if left is None else draft._replace(tokens=self._limit(edge, draft.tokens, left - held, where))

    def _request_some(self, edge: Edge, asked: Ints, where: Where) -> Draft:
        """Ask only in the lanes in which anything is asked for."""
        active = np.flatnonzero(asked > 0)
        if len(active) == len(asked):
            return self._request(edge, asked, where)
        tokens, tag = np.zeros_like(asked), None
        if active.size:
            draft = self._request(edge, asked[active], _among(where, active))
            tokens[active] = draft.tokens
            if draft.tag is not None:
                tag = np.zeros_like(asked)
                tag[active] = draft.tag
        return Draft(tokens, tag)

    def _request(self, edge: Edge, asked: Ints, where: Where) -> Draft:
        if edge.node is not None:
            return Draft(self._hold(edge.node, asked, where, edge.stop))
        draft = self._world.propose(edge, asked, where, self.length[where])
        one = np.ones_like(asked)
        self._charge(edge.index, self.costs[edge.index].passes(one, one), where, len(asked))
        self._fed[edge.index] = _added(self._fed[edge.index], np.array([0, len(asked)]))
        self.length[where] += draft.tokens
        return draft

    def _hold(self, node: Node, asked: Ints, where: Where, stop: Stop) -> Ints:
        """Let a level gather what it is asked for; return the tokens it passes up."""
        if node.alone:
            return self._write_alone(node, asked, where)
        held, rounds = np.zeros_like(asked), 0
        active: Where = EVERYWHERE
        while True:
            gained = self._choose(node, (asked - held)[active], _among(where, active))
            held[active] += gained
            rounds += 1
            open_lanes = np.flatnonzero((rounds if stop == "rounds" else held) < asked)
            if not open_lanes.size:
                break
            active = EVERYWHERE if len(open_lanes) == len(asked) else open_lanes
        return self._limit_to(node.index, held, asked, where) if stop == "truncate" else held

    def _choose(self, node: Node, owed: Ints, where: Where) -> Ints:
        """Run one round of a level, with the row that it uses for what it owes."""
        if node.pick is None:
            return self._round(node, node.rows[0], where)
        picked, gained = node.pick[owed], np.zeros_like(owed)
        for index in np.flatnonzero(np.bincount(picked)):
            lanes = np.flatnonzero(picked == index)
            gained[lanes] = self._round(node, node.rows[index], _among(where, lanes))
        return gained

    def _write_alone(self, node: Node, asked: Ints, where: Where) -> Ints:
        """Let a model without drafter write `asked` tokens, one pass each; the first pass takes in what is missing."""
        start = self.length[where].copy()
        self._pass(node.index, where)
        single = asked - 1
        number = int(single.sum())
        if number:
            seconds = self.costs[node.index].single_passes(single, start)
            self._charge(node.index, seconds, where, len(asked))
            self._fed[node.index] = _added(self._fed[node.index], np.array([0, number]))
        self.length[where] = start + asked
        self._caches[node.index][where] = start + single
        if self._world.writes:
            self._world.write(node.model, asked, where, start)
        return asked

    def _review(self, row: tuple[Edge, ...], drafts: list[Draft], where: Where, start: Ints) -> Ints:
        """Return the accepted prefix of the whole row; a segment counts only behind fully accepted ones."""
        total, intact = np.zeros_like(start), np.ones(len(start), dtype=bool)
        for edge, draft in zip(row, drafts, strict=True):
            accepted = self._world.accept(edge, draft, where, start)
            if len(row) > 1:
                accepted = accepted * intact
                intact &= accepted == draft.tokens
                start = start + draft.tokens
            total = total + accepted
            pair = (edge.drafter, edge.verifier)
            self._drafted[pair] = self._drafted.get(pair, 0) + int(draft.tokens.sum())
            self._accepted[pair] = self._accepted.get(pair, 0) + int(accepted.sum())
        return total

    def _pass(self, model: int, where: Where, drafted: Ints | int = 0) -> None:
        """Let a model take in all it is missing and the token before the draft, anew if need be, in one pass."""
        length = self.length[where]
        fed = np.maximum(length - self._caches[model][where], drafted + 1)
        self._caches[model][where] = length
        self._charge(model, self.costs[model].passes(fed, length - fed), where, len(fed))
        if self._switching:
            self._switch(model, where)
        self._fed[model] = _added(self._fed[model], np.bincount(fed))

    def _switch(self, model: int, where: Where) -> None:
        """Charge what the pass takes more in the lanes in which another network made the last one."""
        other = self._last[where] != model
        self._last[where] = model
        self._switches[model] += int(other.sum())
        self._charge(model, self.costs[model].switch * other, where, len(other))

    def _charge(self, model: int, seconds: Floats | float, where: Where, lanes: int) -> None:
        self.seconds[where] += seconds
        self._model_seconds[model] += seconds * lanes if isinstance(seconds, float) else float(seconds.sum())

    def _limit(self, edge: Edge, tokens: Ints, room: Ints, where: Where) -> Ints:
        return self._limit_to(edge.index, tokens, np.minimum(tokens, room), where)

    def _limit_to(self, model: int, held: Ints, kept: Ints, where: Where) -> Ints:
        """Discard what a model holds beyond `kept` tokens."""
        excess = held - kept
        number = int(excess.sum())
        if number:
            self._discarded[model] += number
            self._cut_to(self.length[where] - excess, where)
        return kept

    def _cut_to(self, length: Ints, where: Where) -> None:
        """Cut sequences back; every cache keeps at most what stands."""
        self.length[where] = length
        if isinstance(where, slice):
            np.minimum(self._cached, self.length, out=self._cached)
        else:
            self._cached[:, where] = np.minimum(self._cached[:, where], length)


def _among(where: Where, chosen: Where) -> Where:
    """Return the lanes at the `chosen` places of `where`."""
    if isinstance(chosen, slice):
        return where
    return chosen if isinstance(where, slice) else where[chosen]


def _added(total: Ints, more: Ints) -> Ints:
    """Return the sum of two histograms, in place if it fits."""
    if len(more) > len(total):
        total = np.concatenate([total, np.zeros(len(more) - len(total), dtype=np.int64)])
    total[: len(more)] += more
    return total


def refuse_lenience(plan: Plan) -> None:
    """Raise PredictionError if a level of `plan` is lenient, since pairwise rates do not tell what it accepts."""
    for level in plan.lenient:
        raise PredictionError(
            f"expected lenience 1 to predict {plan}; got {level.lenience:g} at {level.model}: "
            "pairwise acceptance does not predict it, so measure it with short runs"
        )
