"""The exact law of one round of a plan, with the cache of one model followed through it.

What a plan does next depends on lengths and acceptance alone; how many tokens a cache is missing only says how
many new tokens a pass has. So the expected passes of every model follow, exactly, from the joint law of lengths
and of *that* model's missing tokens, and one small computation per model takes the place of a chain over the
caches of all of them.

Within a computation the followed model's state is what it is missing, or None as long as it has made no pass: it
is then missing what it was missing at the start, plus what was appended since. A model's first pass is therefore
billed with that start left open (`Bill.first`), and one computation serves every start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from hsdopt.errors import PredictionError
from hsdopt.plan import LOOKUP, Level, Plan, Segment, Stop
from hsdopt.profiles import Profile

State: TypeAlias = int | None
"""Tokens missing from the followed model's cache; None before its first pass."""
Law: TypeAlias = Mapping[tuple[int, State], float]
"""Probabilities of (tokens, state of the followed model)."""
Row: TypeAlias = tuple[Segment, ...]

_Front: TypeAlias = dict[tuple[int, int, State], float]  # (held, accepted, state); accepted == held: none rejected


@dataclass(slots=True)
class Bill:
    """Expected passes of the followed model, and what became of drafts; filled step by step.

    Attributes
    ----------
    sized : dict of int to float
        Passes by their new tokens.
    first : dict of (int, int) to float
        First passes by (appended, drafted): `appended` tokens came since the start, then a draft of
        `drafted` tokens to verify.
    switches : float
        Passes right behind another network's.
    edges : dict of (str, str) to [float, float]
        Tokens drafted and accepted per (drafter, verifier); complete only where no model is followed.
    """

    sized: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    first: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    switches: float = 0.0
    edges: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))

    def add(self, other: Bill, weight: float, state: State, appended: int) -> None:
        """Add `other`, which happens `weight` times, from `state` when `appended` tokens have come."""
        for tokens, passes in other.sized.items():
            self.sized[tokens] += weight * passes
        for (later, drafted), passes in other.first.items():
            if state is None:
                self.first[appended + later, drafted] += weight * passes
            else:
                self.sized[new_tokens(state + later, drafted)] += weight * passes
        self.switches += weight * other.switches
        for edge, (drafted_tokens, accepted) in other.edges.items():
            self.edges[edge][0] += weight * drafted_tokens
            self.edges[edge][1] += weight * accepted


def new_tokens(missing: int, drafted: int) -> int:
    """Return the new tokens of a pass: the last token is fed again if nothing before the draft is missing."""
    return max(1, missing) + drafted


@dataclass(frozen=True, slots=True)
class Request:
    """What a request gives: the law of (tokens, state at its end), and its bill."""

    law: Law
    bill: Bill


@dataclass(frozen=True, slots=True)
class Round:
    """What a round gives.

    Attributes
    ----------
    law : mapping
        Probabilities of (tokens gained, state at the end).
    bill : Bill
        All passes.
    segments : tuple of Bill
        The passes of each segment of the row.
    verify : Bill
        The verify pass.
    drafts : mapping
        Probabilities of (drafted, accepted).
    spans : tuple of mapping
        Per segment, probabilities of (tokens before it, its tokens).
    alone : float
        Chance that no other network made a pass in it.
    """

    law: Law
    bill: Bill
    segments: tuple[Bill, ...]
    verify: Bill
    drafts: Mapping[tuple[int, int], float]
    spans: tuple[Mapping[tuple[int, int], float], ...]
    alone: float


@dataclass(slots=True)
class _Stretch:
    """One segment of a row under way: what is asked, and what has come of it so far; `behind` is who drafted before."""

    segment: Segment
    verifier: str
    watched: str | None
    room: int | None
    behind: str | None = None
    bill: Bill = field(default_factory=Bill)
    spans: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    asked: float = 0.0

    @property
    def idle(self) -> float:
        """The chance that it gives no network anything to do."""
        return 1.0 if self.segment.level.model == LOOKUP else 1.0 - self.asked

    def judge(self, accepted: float) -> None:
        """Count the segment's tokens as drafted, `accepted` of them as accepted."""
        counts = self.bill.edges[self.segment.level.model, self.verifier]
        counts[0] += sum(tokens * chance for (_, tokens), chance in self.spans.items())
        counts[1] += accepted


class Kernel:
    """Rounds and requests of one plan under one profile's acceptance, each computed once.

    Parameters
    ----------
    plan : Level or Adaptive
    profile : Profile
        Read for acceptance only.

    Raises
    ------
    PredictionError
        If a level is lenient, or (on use) if a pair was not profiled.
    """

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self._profile = profile
        _refuse_lenience(plan)
        self._tables = dict(plan.tables)
        self._top = Level(plan.target, plan.row)
        self._members = {} if self._tables else {id(level): frozenset(level.models) for level in self._top.walk()}
        self._requests: dict[tuple[Level, int, Stop, str | None], Request] = {}
        self._rounds: dict[tuple[str, Row, str | None, int | None], Round] = {}
        self._stops: dict[tuple[str, str, int], list[float]] = {}
        self._proposals: dict[tuple[str, int], list[tuple[int, list[float]]]] = {}

    @property
    def longest(self) -> int:
        """The most tokens that the target's draft can hold."""
        return self._top.longest_draft or 0

    def target_round(self, watched: str | None, room: int | None = None) -> Round:
        """Return a round of the target with `watched` followed; its draft limited to `room` tokens, if given."""
        return self._round(self._top, self._top.row, watched, room)

    def _round(self, level: Level, row: Row, watched: str | None, room: int | None = None) -> Round:
        key = (level.model, row, watched, room)
        if key not in self._rounds:
            self._rounds[key] = self._compute_round(level.model, row, watched, room)
        return self._rounds[key]

    def _compute_round(self, verifier: str, row: Row, watched: str | None, room: int | None) -> Round:
        front: _Front = {(0, 0, None): 1.0}
        stretches = [
            _Stretch(segment, verifier, watched, room, behind)
            for segment, behind in zip(row, _behind(row), strict=True)
        ]
        for stretch in stretches:
            front = self._extend(front, stretch)
        law: dict[tuple[int, State], float] = defaultdict(float)
        drafts: dict[tuple[int, int], float] = defaultdict(float)
        verify, total = Bill(), Bill()
        alone = min((stretch.idle for stretch in stretches), default=1.0)
        if verifier == watched:
            verify.switches = 1.0 - alone
        for (held, accepted, state), chance in front.items():
            drafts[held, accepted] += chance
            if verifier == watched:
                verify.first[0, held] += chance
                law[accepted + 1, 1] += chance
            else:
                law[accepted + 1, _after_cut(state, held - accepted, appended=1)] += chance
        bills = tuple(stretch.bill for stretch in stretches)
        for bill in (*bills, verify):
            total.add(bill, 1.0, None, 0)
        return Round(dict(law), total, bills, verify, drafts, tuple(stretch.spans for stretch in stretches), alone)

    def _extend(self, front: _Front, stretch: _Stretch) -> _Front:
        """Return the front after one more segment of the row; enter its passes and places in `stretch`."""
        after: _Front = defaultdict(float)
        for (held, accepted, state), chance in front.items():
            left = None if stretch.room is None else stretch.room - held
            asked = _asked(stretch.segment, held, left)
            if asked == 0:
                after[held, accepted, state] += chance
                continue
            stretch.asked += chance
            self._charge(stretch, asked, chance, state, held)
            for tokens, out, share, judged in self._offers(stretch, asked, left):
                now = out if out is not None or state is None else state + tokens
                stretch.spans[held, tokens] += chance * share
                if accepted < held:  # a token before this segment was rejected
                    after[held + tokens, accepted, now] += chance * share
                    continue
                for more, part in enumerate(judged):
                    if part > 0.0:
                        after[held + tokens, accepted + more, now] += chance * share * part
        if stretch.watched is None:
            stretch.judge(_mean_accepted(after) - _mean_accepted(front))
        return after

    def _charge(self, stretch: _Stretch, asked: int, chance: float, state: State, held: int) -> None:
        """Enter the passes behind one request for a segment."""
        segment = stretch.segment
        if segment.level.model != LOOKUP:
            bill = self._request(segment.level, asked, segment.stop, stretch.watched).bill
            stretch.bill.add(bill, chance, state, held)
            if stretch.behind is not None and stretch.behind == stretch.watched == _first(segment.level):
                stretch.bill.switches -= chance
        elif stretch.watched == LOOKUP:
            stretch.bill.sized[1] += chance

    def _offers(
        self, stretch: _Stretch, asked: int, left: int | None
    ) -> Iterator[tuple[int, State, float, list[float]]]:
        """Yield (tokens, state, chance, chances of 0, 1, ... of them accepted) of what a segment passes up."""
        segment = stretch.segment
        if segment.level.model == LOOKUP:
            for tokens, judged in self._proposed(stretch.verifier, asked):
                share = sum(judged)
                yield tokens, None, share, [part / share for part in judged]
            return
        edge = (segment.level.model, stretch.verifier)
        for (tokens, state), share in self._request(segment.level, asked, segment.stop, stretch.watched).law.items():
            kept = tokens if left is None else min(tokens, left)
            yield kept, _after_cut(state, tokens - kept), share, self._judged(edge, kept)

    def _judged(self, edge: tuple[str, str], tokens: int) -> list[float]:
        """Return the chances that 0 ... `tokens` of a segment's tokens are accepted."""
        key = (*edge, tokens)
        if key not in self._stops:
            curve = self._profile.acceptance(*edge).curve(tokens).tolist()
            self._stops[key] = [here - then for here, then in zip(curve, [*curve[1:], 0.0], strict=True)]
        return self._stops[key]

    def _proposed(self, verifier: str, asked: int) -> list[tuple[int, list[float]]]:
        """Return, per number of tokens that lookup may propose, the joint chances of 0, 1, ... accepted."""
        key = (verifier, asked)
        if key not in self._proposals:
            law = self._profile.acceptance(LOOKUP, verifier).law(asked).clip(0.0)
            self._proposals[key] = [(n, row[: n + 1].tolist()) for n, row in enumerate(law) if row.sum() > 0.0]
        return self._proposals[key]

    def _request(self, level: Level, asked: int, stop: Stop, watched: str | None) -> Request:
        if watched is not None and watched not in self._members.get(id(level), (watched,)):
            watched = None
        key = (level, asked, stop, watched)
        if key not in self._requests:
            self._requests[key] = self._compute_request(level, asked, stop, watched)
        return self._requests[key]

    def _compute_request(self, level: Level, asked: int, stop: Stop, watched: str | None) -> Request:
        if not level.row and level.model not in self._tables:
            return _plain_passes(asked, followed=level.model == watched)
        if stop == "rounds":
            return self._some_rounds(level, asked, watched)
        return self._rounds_until(level, asked, watched, cut=stop == "truncate")

    def _rounds_until(self, level: Level, asked: int, watched: str | None, *, cut: bool) -> Request:
        """Return the request that goes on until `asked` tokens are held; what it holds beyond is cut, or passed up."""
        bill = Bill()
        visits: list[dict[State, float]] = [defaultdict(float) for _ in range(asked)]
        visits[0][None] = 1.0
        if level.model == watched:  # its first pass, unless another network drafts for it
            bill.switches = self._round(level, self._next_row(level, asked), watched).alone
        done: dict[tuple[int, State], float] = defaultdict(float)
        for held in range(asked):
            if not visits[held]:
                continue
            step = self._round(level, self._next_row(level, asked - held), watched)
            for state, chance in visits[held].items():
                bill.add(step.bill, chance, state, held)
                for now, after, share in _outcomes(step, held, state):
                    if now < asked:
                        visits[now][after] += chance * share
                    elif cut:
                        done[asked, _after_cut(after, now - asked)] += chance * share
                    else:
                        done[now, after] += chance * share
        return Request(dict(done), bill)

    def _some_rounds(self, level: Level, rounds: int, watched: str | None) -> Request:
        bill, step = Bill(), self._round(level, level.row, watched)
        if level.model == watched:
            bill.switches = step.alone
        law: dict[tuple[int, State], float] = {(0, None): 1.0}
        for _ in range(rounds):
            following: dict[tuple[int, State], float] = defaultdict(float)
            for (held, state), chance in law.items():
                bill.add(step.bill, chance, state, held)
                for now, after, share in _outcomes(step, held, state):
                    following[now, after] += chance * share
            law = following
        return Request(dict(law), bill)

    def _next_row(self, level: Level, owed: int) -> Row:
        if level.model not in self._tables:
            return level.row
        choice = self._tables[level.model][owed - 1]
        return () if choice is None else choice.row


def _behind(row: Row) -> list[str | None]:
    """Return, per segment, the network that makes the last pass of those before it in the row; None if none does."""
    found: list[str | None] = []
    last = None
    for segment in row:
        found.append(last)
        if segment.level.model != LOOKUP:
            last = segment.level.model
    return found


def _first(level: Level) -> str:
    """Return the network that makes the first pass when a level is asked."""
    below = next((segment.level for segment in level.row if segment.level.model != LOOKUP), None)
    return level.model if below is None else _first(below)


def _asked(segment: Segment, held: int, left: int | None) -> int:
    """Return what is asked of a segment when the row holds `held` tokens and has room for `left` more."""
    asked = max(0, segment.length - held) if segment.stop == "until" else segment.length
    return asked if left is None else min(asked, left)


def _after_cut(state: State, cut: int, *, appended: int = 0) -> State:
    """Return the state after a cut (never below the start, so None stays None) and an append."""
    return None if state is None else max(0, state - cut) + appended


def _mean_accepted(front: _Front) -> float:
    return sum(accepted * chance for (_, accepted, _), chance in front.items())


def _outcomes(step: Round, held: int, state: State) -> Iterator[tuple[int, State, float]]:
    """Yield (held, state, chance) after one more round."""
    for (gained, after), share in step.law.items():
        yield held + gained, after if after is not None or state is None else state + gained, share


def _plain_passes(tokens: int, *, followed: bool) -> Request:
    """Return the request of a drafter with nothing below: one pass per token."""
    bill = Bill()
    if followed:
        bill.first[0, 0] = 1.0
        bill.switches = 1.0
        if tokens > 1:
            bill.sized[1] = float(tokens - 1)
    return Request({(tokens, 1 if followed else None): 1.0}, bill)


def _refuse_lenience(plan: Plan) -> None:
    for level in plan.lenient:
        raise PredictionError(
            f"expected lenience 1 everywhere, as pairwise rates predict no other; got {level.lenience:g} at "
            f"{level.model}: predict this plan by replaying traces or by a short run"
        )
