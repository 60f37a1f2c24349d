"""`Solution`: what a solver answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hsdopt.latency.expected import Estimate
from hsdopt.plan import Plan

__all__ = ["Candidate", "FrontierPoint", "Solution"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan that was considered.

    Attributes
    ----------
    plan : Plan
    family : str
        The smallest family that contains it.
    seconds_per_token : float
        As the deciding evaluator sees it.
    estimate : Estimate
        As the closed form sees it, with the full count of catch-up tokens.
    """

    plan: Plan
    family: str
    seconds_per_token: float
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One setting of Big Little Decoder that no other beats in both speed and quality.

    Attributes
    ----------
    candidate : Candidate
    speedup : float
        Over the target's autoregression.
    deviation : float
        Share of the output's tokens that are not the target's most likely ones, along the traces.
    """

    candidate: Candidate
    speedup: float
    deviation: float


@dataclass(frozen=True, slots=True)
class Solution:
    """The best plan for a profile, and how sure that is.

    Attributes
    ----------
    plan : Plan
        The plan to run; the target alone where nothing beats it beyond noise.
    seconds_per_token : float
        Expected, as the deciding evaluator sees it.
    speedup : float
        Over the target's autoregression by the same evaluator.
    candidate, autoregression : Candidate
        The plan, and the target alone.
    best_by_family : mapping of str to Candidate
        The best plan of every family that was searched, of those that no smaller family contains.
    runners_up : tuple of Candidate
        The next best plans, best first; the first is the contender where the plan is autoregression.
    interval : (float, float) or None
        95 % interval of the speed-up, of the contender where the plan is autoregression. None if the profile
        has nothing to resample.
    probability_within : float or None
        Chance that the plan (or the contender) is within 2 % of the best of the leading candidates.
    resolution : float or None
        The smallest relative difference in speed that the profile can tell from noise.
    frontier : tuple of FrontierPoint
        Of Big Little Decoder, the most faithful first; empty for other families.
    memory_bytes : int
        Weights that the plan needs loaded.
    why : str
        One line.
    warnings : tuple of str
    exact : bool
        Whether every family was searched to its optimum under edge-local costs, or only in part. The full count
        of catch-up tokens chooses among the best so found.
    predictor : str
        Who decided: "closed form" or the name of the evaluator given.
    """

    plan: Plan
    seconds_per_token: float
    speedup: float
    candidate: Candidate
    autoregression: Candidate
    best_by_family: Mapping[str, Candidate] = field(default_factory=lambda: MappingProxyType({}))
    runners_up: tuple[Candidate, ...] = ()
    interval: tuple[float, float] | None = None
    probability_within: float | None = None
    resolution: float | None = None
    frontier: tuple[FrontierPoint, ...] = ()
    memory_bytes: int = 0
    why: str = ""
    warnings: tuple[str, ...] = ()
    exact: bool = True
    predictor: str = "closed form"

    @property
    def speculate(self) -> bool:
        """Whether the answer is anything but the target alone."""
        return self.plan != self.autoregression.plan

    @property
    def contender(self) -> Candidate | None:
        """The plan itself, or the best one that did not beat the target beyond noise; None if there is none."""
        if self.speculate:
            return self.candidate
        return next((other for other in self.runners_up if other.plan != self.plan), None)

    @property
    def best_single(self) -> Candidate | None:
        """The best plan of one drafter; None if there is none."""
        return self.best_by_family.get("speculative")
