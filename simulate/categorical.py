"""Speculative sampling on known distributions: a plan run on tokens that depend on no context.

Every model draws from one fixed law, and every draft is reviewed as in Leviathan et al. 2023 (and,
with lenience, Chen et al., arXiv 2312.11462): a token x drawn from q is accepted by p with
probability ``min(1, lenience * p(x) / q(x))``, else replaced by a draw from
``norm(max(p - min(q, lenience * p), 0))``. Each level reports the law that its tokens follow, so
the output keeps the target's law whatever stands below; and since the tokens are real, the length
that a level passes up depends on them, which no model of independent acceptances can show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hsdopt.checks import check_length
from hsdopt.costs import CostCurve
from hsdopt.errors import InvalidArgumentError
from hsdopt.plan import LOOKUP, Plan
from hsdopt.simulate.engine import (
    EVERYWHERE,
    CostTable,
    Counts,
    Draft,
    Edge,
    Engine,
    Floats,
    Ints,
    Node,
    Where,
    World,
    compile_plan,
    counted,
)

__all__ = ["CategoricalRun", "categorical"]

Distribution = Sequence[float] | NDArray[np.float64]

_LANES = 1024


@dataclass(frozen=True, slots=True)
class CategoricalRun(Counts):
    """What a run on known distributions did; there are no costs, so all seconds are 0.

    Attributes
    ----------
    plan : Plan
    passed_up : mapping of str to ndarray of int, shape [vocabulary]
        How often each token was passed up by each model; for the target, how often it was emitted.
    lane_tokens : ndarray of int, shape [lanes]
        Tokens that each lane emitted, in the same number of rounds.
    """

    plan: Plan
    passed_up: Mapping[str, Ints] = field(repr=False, compare=False)
    lane_tokens: Ints = field(repr=False, compare=False)

    @property
    def tokens_per_pass_error(self) -> float:
        """The standard error of `tokens_per_pass`, from the spread between lanes."""
        lanes = len(self.lane_tokens)
        return float(np.std(self.lane_tokens, ddof=1) * np.sqrt(lanes) / self.rounds)

    def law(self, model: str) -> Floats:
        """Return the share of each token among those that `model` passed up, shape [vocabulary]."""
        counts = self.passed_up[model]
        return np.asarray(counts / max(int(counts.sum()), 1))


def categorical(
    plan: Plan, distributions: Mapping[str, Distribution], *, tokens: int = 10_000, seed: int = 0
) -> CategoricalRun:
    """Return what a plan does, and which tokens it emits, when every model draws from one fixed law.

    Parameters
    ----------
    plan : Plan
        A stack of levels, fixed or adaptive; lenience is allowed.
    distributions : mapping of str to probabilities
        The law of every model, over one vocabulary. The lookup drafter draws its proposals from its
        law, but reviewers know each as certain; it always proposes what it is asked for.
    tokens : int
        Tokens to emit in all lanes (1024) together; the run ends with the round that reaches them.
    seed : int
        Equal seeds give equal runs.

    Returns
    -------
    CategoricalRun

    Raises
    ------
    InvalidArgumentError
        If a law is missing, is no law, or has another vocabulary than the target's.
    PredictionError
        If the plan is a bild plan.

    Examples
    --------
    >>> from hsdopt.plan import parse_plan
    >>> laws = {"big": [0.5, 0.3, 0.2], "small": [0.2, 0.2, 0.6]}
    >>> run = categorical(parse_plan("big(small:3)"), laws, tokens=100_000)
    >>> bool(np.all(np.abs(run.law("big") - laws["big"]) < 0.01))
    True
    """
    check_length(tokens, "tokens", minimum=1)
    target = compile_plan(plan)
    rng = np.random.default_rng(check_length(seed, "seed"))
    world = _Distributions(target, _laws(plan, distributions), rng)
    free = [CostTable(CostCurve.fixed(0.0)) for _ in plan.models]
    engine = Engine(target, plan.models, free, world, np.ones(_LANES, dtype=np.int64))
    gained, total = np.zeros(_LANES, dtype=np.int64), 0
    while total < tokens:
        start = engine.length.copy()
        more = engine.target_round()
        world.emit(target.model, more, EVERYWHERE, start)
        gained += more
        total += int(more.sum())
    return CategoricalRun(**counted(engine.counts()), plan=plan, passed_up=world.passed_up, lane_tokens=gained)


def _laws(plan: Plan, distributions: Mapping[str, Distribution]) -> dict[str, Floats]:
    """Return the laws of the plan's models, checked."""
    laws: dict[str, Floats] = {}
    for model in plan.models:
        if model not in distributions:
            raise InvalidArgumentError(f"expected a distribution of {model}; got {', '.join(distributions) or 'none'}")
        law = np.asarray(distributions[model], dtype=float)
        if law.ndim != 1 or not law.size or not np.all(law >= 0) or not np.isclose(law.sum(), 1.0):
            raise InvalidArgumentError(f"expected probabilities of {model} that sum to 1; got {distributions[model]}")
        laws[model] = law / law.sum()
    sizes = {model: law.size for model, law in laws.items()}
    if len(set(sizes.values())) > 1:
        raise InvalidArgumentError(f"expected distributions over one vocabulary; got sizes {sizes}")
    return laws


@dataclass(frozen=True, slots=True)
class _Review:
    """How one verifier receives tokens of each reported law: tables over (law, token).

    Attributes
    ----------
    chance : ndarray, shape [laws, vocabulary]
        Probability to accept a token.
    correction : ndarray, shape [laws, vocabulary]
        Cumulative law of the token that replaces a refused one.
    reported : ndarray of int, shape [laws]
        The law that the outcome follows.
    """

    chance: Floats
    correction: Floats
    reported: Ints


class _Distributions(World):
    """Tokens and the laws they are reported to follow, per lane, in a ring that covers one round."""

    writes = True

    def __init__(self, target: Node, laws: Mapping[str, Floats], rng: np.random.Generator) -> None:
        self._rng = rng
        self._book = _Book(laws)
        self._book.enter(target)
        self._reviews = {edge: self._book.review(edge) for edge in self._book.incoming}
        self._size = target.reach + 1
        self._tokens = np.zeros((_LANES, self._size), dtype=np.int64)
        self._followed = np.zeros((_LANES, self._size), dtype=np.int64)
        self.passed_up = {model: np.zeros(self._book.vocabulary, dtype=np.int64) for model in laws}

    def propose(self, edge: Edge, asked: Ints, where: Where, start: Ints) -> Draft:
        """Let the lookup drafter draw its proposals, each certain in the eyes of a reviewer."""
        self.write(edge.drafter, asked, where, start)
        return Draft(asked)

    def write(self, model: str, tokens: Ints, where: Where, start: Ints) -> None:
        """Draw tokens from the law of `model`."""
        law, cumulative = self._book.own[model], self._book.cumulative[model]
        for ahead in range(int(tokens.max(initial=0))):
            lanes, places = self._at(where, start + ahead, tokens > ahead)
            drawn = _draw(self._rng, np.broadcast_to(cumulative, (len(lanes), self._book.vocabulary)))
            self._tokens[lanes, places] = drawn
            self._followed[lanes, places] = self._book.certain + drawn if model == LOOKUP else law

    def accept(self, edge: Edge, draft: Draft, where: Where, start: Ints) -> Ints:
        """Review a draft token by token; the first refused one is replaced on the spot."""
        self.emit(edge.drafter, draft.tokens, where, start)
        review, accepted = self._reviews[edge], np.zeros_like(draft.tokens)
        alive = draft.tokens > 0
        ahead = 0
        while alive.any():
            lanes, places = self._at(where, start + ahead, alive)
            law, token = self._followed[lanes, places], self._tokens[lanes, places]
            kept = self._rng.random(len(lanes)) < review.chance[law, token]
            self._tokens[lanes, places] = np.where(kept, token, _draw(self._rng, review.correction[law]))
            self._followed[lanes, places] = review.reported[law]
            accepted[alive] += kept
            ahead += 1
            alive = (accepted == ahead) & (draft.tokens > ahead)
        return accepted

    def emit(self, model: str, tokens: Ints, where: Where, start: Ints) -> None:
        """Count the tokens that `model` passes up."""
        for ahead in range(int(tokens.max(initial=0))):
            lanes, places = self._at(where, start + ahead, tokens > ahead)
            self.passed_up[model] += np.bincount(self._tokens[lanes, places], minlength=self._book.vocabulary)

    def _at(self, where: Where, start: Ints, chosen: NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """Return lanes, and places in the ring, of the chosen ones."""
        lanes = np.arange(_LANES) if isinstance(where, slice) else where
        return lanes[chosen], start[chosen] % self._size


class _Book:
    """All laws that tokens of a plan may be reported to follow, numbered.

    Attributes
    ----------
    own : dict of str to int
        The law of each model.
    cumulative : dict of str to ndarray, shape [vocabulary]
        The same, summed up.
    certain : int
        The first of the laws that give all weight to one token.
    incoming : dict of Edge to list of int
        The laws that the tokens of a segment may follow.
    """

    def __init__(self, laws: Mapping[str, Floats]) -> None:
        self.own = {model: index for index, model in enumerate(laws)}
        self.vocabulary = len(next(iter(laws.values())))
        self.certain = len(laws)
        self.cumulative = {model: np.cumsum(law) for model, law in laws.items()}
        self._laws = [*laws.values(), *np.eye(self.vocabulary)]
        self.incoming: dict[Edge, list[int]] = {}
        self._outcome: dict[tuple[Edge, int], int] = {}
        self._entered: dict[Node, list[int]] = {}

    def enter(self, node: Node) -> list[int]:
        """Enter the laws of all segments below a level; return those that its own tokens may follow."""
        if node in self._entered:
            return self._entered[node]
        followed = [self.own[node.model]]
        for edge in (edge for row in node.rows for edge in row):
            certain = range(self.certain, self.certain + self.vocabulary)
            self.incoming[edge] = list(certain) if edge.node is None else self.enter(edge.node)
            for law in self.incoming[edge]:
                self._outcome[edge, law] = self._reported(edge, law)
            followed += [self._outcome[edge, law] for law in self.incoming[edge]]
        self._entered[node] = list(dict.fromkeys(followed))
        return self._entered[node]

    def _reported(self, edge: Edge, law: int) -> int:
        """Return the number of the law that reviewed tokens follow: the verifier's own unless it is lenient."""
        if edge.lenience == 1:
            return self.own[edge.verifier]
        wanted, drafted = self._laws[self.own[edge.verifier]], self._laws[law]
        kept = np.minimum(drafted, edge.lenience * wanted)
        self._laws.append(kept + (1 - kept.sum()) * _residual(wanted, kept))
        return len(self._laws) - 1

    def review(self, edge: Edge) -> _Review:
        """Return how the verifier of a segment receives its tokens."""
        drafted, wanted = np.array(self._laws), self._laws[self.own[edge.verifier]]
        kept = np.minimum(drafted, edge.lenience * wanted)
        chance = np.divide(kept, drafted, out=np.zeros_like(kept), where=drafted > 0)
        correction = np.cumsum([_residual(wanted, row) for row in kept], axis=1)
        reported = np.zeros(len(drafted), dtype=np.int64)
        for law in self.incoming[edge]:
            reported[law] = self._outcome[edge, law]
        return _Review(chance, correction, reported)


def _residual(wanted: Floats, kept: Floats) -> Floats:
    """Return norm(max(wanted - kept, 0)); the wanted law itself if nothing is left, for then nothing is refused."""
    rest = np.maximum(wanted - kept, 0.0)
    total = rest.sum()
    return np.asarray(rest / total if total > 1e-15 else wanted)


def _draw(rng: np.random.Generator, cumulative: Floats) -> Ints:
    """Return one token per row of cumulative laws, shape [rows, vocabulary]."""
    place = rng.random((len(cumulative), 1)) * cumulative[:, -1:]
    return np.asarray((cumulative <= place).sum(axis=1))
