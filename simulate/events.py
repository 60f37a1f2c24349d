"""Event simulation: a plan run round by round on random acceptances, in many lanes at once.

Every drafted token is accepted or not by a draw of its own, with the probability ``S(m) / S(m - 1)``
that the survival curve gives it once those before it stand; what a lookup drafter proposes is drawn
from its joint law. Nothing is taken from the closed forms, so that the two can check each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hsdopt.acceptance import Acceptance
from hsdopt.checks import check_length
from hsdopt.errors import InvalidArgumentError
from hsdopt.plan import Plan
from hsdopt.profiles import Profile
from hsdopt.simulate.engine import (
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
    edges,
    refuse_extrapolation,
    refuse_lenience,
)

__all__ = ["SimulatedRun", "simulate"]

_WARM_UP = 16
"""Rounds per lane that are run before counting, so that the caches stand as in a long output."""

_TOKENS_PER_LANE = 256
_MOST_LANES = 4096
_FEWEST_LANES = 16


@dataclass(frozen=True, slots=True)
class SimulatedRun(Counts):
    """What a simulated run did; the lanes are independent, so their spread gives the standard errors.

    Attributes
    ----------
    plan : Plan
    profile : Profile
    lane_tokens : ndarray of int, shape [lanes]
        Tokens that each lane gained, in the same number of rounds.
    lane_seconds : ndarray of float, shape [lanes]
        Seconds that each lane took.
    seed : int
    context : float or None
        Context length at which costs were read.
    """

    plan: Plan
    profile: Profile = field(repr=False)
    lane_tokens: Ints = field(repr=False, compare=False)
    lane_seconds: Floats = field(repr=False, compare=False)
    seed: int
    context: float | None

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return len(self.lane_tokens)

    @property
    def lane_seconds_per_token(self) -> Floats:
        """Seconds per token of each lane, a sample of its distribution, shape [lanes]."""
        return np.asarray(self.lane_seconds / self.lane_tokens)

    @property
    def standard_error(self) -> float:
        """The standard error of `seconds_per_token`, from the spread between lanes."""
        return _ratio_error(self.lane_seconds, self.lane_tokens.astype(float))

    @property
    def tokens_per_pass_error(self) -> float:
        """The standard error of `tokens_per_pass`, from the spread between lanes."""
        rounds = np.full(self.lanes, self.rounds / self.lanes)
        return _ratio_error(self.lane_tokens.astype(float), rounds)

    def time_to_finish(self, tokens: int, *, runs: int = 1000) -> Floats:
        """Return the seconds from the end of prefill until an output has `tokens` tokens.

        Prefill gives the first token; caches start as it leaves them, and the last drafts are cut to
        what is still wanted, so the mean is not just `tokens` times `seconds_per_token`.

        Parameters
        ----------
        tokens : int
            Length of the output, the first token included.
        runs : int
            Outputs to simulate.

        Returns
        -------
        ndarray of float, shape [runs], ascending

        Raises
        ------
        InvalidArgumentError
            If a number is below 1.
        """
        wanted = check_length(tokens, "tokens", minimum=1) - 1
        engine = _engine(self.plan, self.profile, check_length(runs, "runs", minimum=1), self.seed, self.context)
        engine.finish(np.full(runs, wanted))
        return np.sort(engine.seconds)


def simulate(
    plan: Plan,
    profile: Profile,
    *,
    tokens: int = 10_000,
    seed: int = 0,
    context: float | None = None,
    lanes: int | None = None,
) -> SimulatedRun:
    """Return what a plan does over about `tokens` tokens, drawing every acceptance.

    Parameters
    ----------
    plan : Plan
        A stack of levels, fixed or adaptive.
    profile : Profile
        Pass costs and acceptance laws.
    tokens : int
        Tokens to gain in all lanes together; the run ends with the round that reaches them.
    seed : int
        Equal seeds give equal runs.
    context : float or None
        Context length at which costs are read; None for the mean one that the profile visited.
    lanes : int or None
        Independent outputs simulated side by side; None for one per 256 tokens, at least 16 and at
        most 4096. Each starts with 16 uncounted rounds.

    Returns
    -------
    SimulatedRun

    Raises
    ------
    PredictionError
        If the profile does not cover the plan, passes longer than profiled take more than 0.2 % of the
        time, a level is lenient, or the plan is a bild plan.
    InvalidArgumentError
        If `tokens` is below 1 or `lanes` below 2.

    Notes
    -----
    Draws are compared in single precision: a probability is met to within 6e-8.

    Examples
    --------
    >>> from hsdopt.plan import parse_plan
    >>> profile = Profile.from_rates("big", {"big": 1.0, "small": 0.1}, {("small", "big"): 1.0})
    >>> run = simulate(parse_plan("big(small:4)"), profile)
    >>> run.tokens_per_pass, round(run.seconds_per_token, 9)
    (5.0, 0.28)
    """
    check_length(tokens, "tokens", minimum=1)
    if lanes is None:
        lanes = min(max(tokens // _TOKENS_PER_LANE, _FEWEST_LANES), _MOST_LANES)
    context = profile.context if context is None else context
    engine = _engine(plan, profile, check_length(lanes, "lanes", minimum=2), seed, context)
    for _ in range(_WARM_UP):
        engine.target_round()
    engine.reset()
    gained, total = np.zeros(lanes, dtype=np.int64), 0
    while total < tokens:
        more = engine.target_round()
        gained += more
        total += int(more.sum())
    run = SimulatedRun(
        **counted(engine.counts()),
        plan=plan,
        profile=profile,
        lane_tokens=gained,
        lane_seconds=engine.seconds,
        seed=seed,
        context=context,
    )
    refuse_extrapolation(plan, run, dict(zip(plan.models, engine.costs, strict=True)))
    return run


def _engine(plan: Plan, profile: Profile, lanes: int, seed: int, context: float | None) -> Engine:
    refuse_lenience(plan)
    target = compile_plan(plan)
    costs = [CostTable(profile.cost(model), context=context) for model in plan.models]
    world = _Laws(target, profile, np.random.Generator(np.random.SFC64(_check_seed(seed))))
    return Engine(target, plan.models, costs, world, np.ones(lanes, dtype=np.int64))


def _check_seed(seed: int) -> int:
    return check_length(seed, "seed", minimum=0)


def _ratio_error(above: Floats, below: Floats) -> float:
    """Return the standard error of sum(above) / sum(below) over independent lanes (delta method)."""
    lanes = len(above)
    residual = above - below * (above.sum() / below.sum())
    return float(np.sqrt(lanes / (lanes - 1) * np.sum(residual**2)) / below.sum())


class _Laws(World):
    """Acceptance by survival curves and joint laws."""

    def __init__(self, target: Node, profile: Profile, rng: np.random.Generator) -> None:
        self._rng = rng
        self._chances: dict[Edge, NDArray[np.float32]] = {}
        self._proposals: dict[Edge, Floats] = {}
        for edge in edges(target):
            law = profile.acceptance(edge.drafter, edge.verifier)
            if law.joint is None or edge.node is not None:
                self._chances[edge] = _ratios(law.curve(edge.longest)).astype(np.float32)
            else:
                self._proposals[edge], self._chances[edge] = _joint(law, edge.length)

    def propose(self, edge: Edge, asked: Ints, where: Where, start: Ints) -> Draft:  # noqa: ARG002
        """Draw how many tokens the lookup drafter finds; which row of the joint law it was is remembered."""
        if edge not in self._proposals:
            return Draft(asked)
        found = np.searchsorted(self._proposals[edge], self._rng.random(len(asked)), side="right")
        return Draft(np.minimum(found, asked), found)

    def accept(self, edge: Edge, draft: Draft, where: Where, start: Ints) -> Ints:  # noqa: ARG002
        """Draw token by token until one is refused."""
        tokens, chances = draft.tokens, self._chances[edge]
        shortest, longest = int(tokens.min()), int(tokens.max())
        accepted, alive = np.zeros_like(tokens), np.ones(len(tokens), dtype=bool)
        for place in range(longest):
            chance = chances[place] if draft.tag is None else chances[draft.tag, place]
            alive &= self._rng.random(len(tokens), dtype=np.float32) < chance
            if place >= shortest:
                alive &= tokens > place
            accepted += alive
        return accepted


def _ratios(survival: Floats) -> Floats:
    """Return S(m) / S(m - 1) for m = 1, 2, ..., 0 where nothing survives."""
    before = survival[..., :-1]
    return np.asarray(np.divide(survival[..., 1:], before, out=np.zeros_like(before), where=before > 0))


def _joint(law: Acceptance, length: int) -> tuple[Floats, NDArray[np.float32]]:
    """Return the cumulative law of the proposed length, and per proposed length the chance of each next token."""
    joint = law.law(length)
    proposed = joint.sum(axis=1)
    if not np.isclose(proposed.sum(), 1.0, atol=1e-6):
        raise InvalidArgumentError(f"expected a joint law that sums to 1; got {proposed.sum():.6g}")
    survival = np.cumsum(joint[:, ::-1], axis=1)[:, ::-1]  # [n, m]: proposed n and at least m accepted
    return np.cumsum(proposed)[:-1] / proposed.sum(), _ratios(survival).astype(np.float32)
