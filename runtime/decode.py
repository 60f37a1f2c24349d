"""The decoder of every lossless plan: levels that draft, verify and pass up, to any depth."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hsdopt.runtime.events import verifications

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from hsdopt.plan import Level, Plan, Segment, Stop
    from hsdopt.runtime.sampling import Law, Rule
    from hsdopt.runtime.workspace import Workspace

    Row = tuple[Segment, ...]
    Draft = tuple[list[Law], list[tuple[str, int]]]


class Decoder:
    """A `Level` or `Adaptive` plan at work.

    Every request appends tokens to the sequence of the workspace and returns their laws, as the model that passes
    them up reports them.

    Parameters
    ----------
    plan : Level or Adaptive
        Who drafts for whom.
    work : Workspace
        The sequence and the sessions.
    rule : Rule
        How tokens are chosen and drafts reviewed.
    ends : set of int
        Ids that end a text; nothing is drafted behind one.
    """

    def __init__(self, plan: Plan, work: Workspace, rule: Rule, ends: AbstractSet[int]) -> None:
        self._work = work
        self._rule = rule
        self._ends = ends
        self._target = plan.target
        self._drafters = [name for name in plan.models if name != plan.target]
        self._tables = {name: [() if choice is None else choice.row for choice in table] for name, table in plan.tables}
        self._row = plan.row

    def start(self) -> int:
        """Feed the prompt to the target, which gives the first token; return 1."""
        logits = self._work.prefill(self._target)
        assert logits is not None  # noqa: S101 -- the prompt was checked against the target's positions
        self._work.credit_prefill(self._target)
        token, _ = self._rule.choose(logits, self._work.tokens)
        self._work.tokens.append(token)
        return 1

    def prepare(self) -> None:
        """Feed the prompt to every drafter, before the first draft."""
        for name in self._drafters:
            self._work.prefill(name)

    def step(self, wanted: int) -> int:
        """Run one round of the target and return the tokens gained, at most `wanted`."""
        return len(self._round(self._target, partial(self._draft, self._row, wanted - 1)))

    def _round(self, verifier: str, draft: Callable[[], Draft], lenience: float = 1.0) -> list[Law]:
        """Draft; one pass over the draft; accept a prefix; append the correction or bonus token."""
        work = self._work
        base = len(work.tokens)
        laws, segments = draft()
        logits = work.run(verifier, len(laws) + 1)  # [drafted + 1, vocab]
        verdict = self._rule.review(logits, work.tokens, laws, lenience)
        work.events += verifications(verifier, segments, verdict.accepted, "rejected")
        work.cut(base + verdict.accepted)
        if verdict.accepted and work.tokens[-1] in self._ends:
            work.tokens.append(verdict.token)
            work.trim(verifier, base + verdict.accepted, "end-of-text")
            return verdict.laws[:-1]
        work.tokens.append(verdict.token)
        return verdict.laws

    def _draft(self, row: Row, limit: int) -> Draft:
        """Draft segment by segment, at most `limit` tokens; return their laws, and tokens per drafter."""
        work = self._work
        start = len(work.tokens)
        laws: list[Law] = []
        segments: list[tuple[str, int]] = []
        for segment in row:
            left = limit - len(laws)
            # a round gives a token at least, so that `left` rounds are enough
            asked = min(segment.length - len(laws) if segment.stop == "until" else segment.length, left)
            if asked <= 0:
                continue
            gained = self._request(segment.level, asked, segment.stop)[:left]
            work.trim(segment.level.model, start + limit, "limit")
            laws += gained
            segments.append((segment.level.model, len(gained)))
            if gained and work.tokens[-1] in self._ends:
                break
        return laws, segments

    def _request(self, level: Level, asked: int, stop: Stop) -> list[Law]:
        """Append what `level` passes up when asked for so many tokens (or rounds); return their laws."""
        if self._work.proposes(level.model):
            return self._proposal(level.model, asked)
        if level.model in self._tables:
            return self._owed(level.model, asked)
        if not level.row:
            return self._alone(level.model, asked)
        return self._rounds(level, asked, stop)

    def _proposal(self, model: str, asked: int) -> list[Law]:
        proposed = self._work.propose(model, asked, self._ends)
        self._work.tokens += proposed
        return [None] * len(proposed)

    def _alone(self, model: str, asked: int) -> list[Law]:
        """Write token by token."""
        work = self._work
        laws: list[Law] = []
        while len(laws) < asked and self._goes_on(model):
            token, law = self._rule.choose(work.run(model), work.tokens)
            work.tokens.append(token)
            laws.append(law)
        return laws

    def _rounds(self, level: Level, asked: int, stop: Stop) -> list[Law]:
        """Verify drafts, round after round, until enough is held."""
        laws: list[Law] = []
        start = len(self._work.tokens)
        rounds = 0
        while self._goes_on(level.model) and (rounds if stop == "rounds" else len(laws)) < asked:
            draft = partial(self._draft, level.row, self._work.room(level.model))
            laws += self._round(level.model, draft, level.lenience)
            rounds += 1
        if stop == "truncate":
            self._work.trim(level.model, start + asked, "truncate")
            return laws[:asked]
        return laws

    def _owed(self, model: str, asked: int) -> list[Law]:
        """Choose every draft from the tokens still owed."""
        laws: list[Law] = []
        start = len(self._work.tokens)
        while self._goes_on(model) and len(laws) < asked:
            row = self._tables[model][asked - len(laws) - 1]
            if row:
                laws += self._round(model, partial(self._draft, row, self._work.room(model)))
            else:
                laws += self._alone(model, 1)
        self._work.trim(model, start + asked, "truncate")
        return laws[:asked]

    def _goes_on(self, model: str) -> bool:
        """Whether the text is open, and within the positions of a drafter."""
        return self._work.room(model) >= 0 and self._work.tokens[-1] not in self._ends
