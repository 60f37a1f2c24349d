"""`Solution`: what a solver answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hsdopt.latency.expected import Estimate
from hsdopt.plan import Plan

__all__ = ["Candidate", "Solution"]


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
class Solution:
    """The best plan for a profile, and how sure that is.

    Attributes
    ----------
    plan : Plan
    seconds_per_token : float
        Expected, as the deciding evaluator sees it.
    speedup : float
        Over the target's autoregression by the same evaluator.
    interval : (float, float) or None
        95 % interval of the speed-up.
    candidate : Candidate
        The plan with its estimate.
    autoregression : Candidate
    best_by_family : mapping of str to Candidate
        The best plan of every family that was searched.
    runners_up : tuple of Candidate
        The next best plans, best first.
    memory_bytes : int
        Weights that the plan needs loaded.
    why : str
        One line.
    warnings : tuple of str
    exact : bool
        Whether the optimum of the family was found exactly (under the closed form), or searched.
    predictor : str
        Who decided: "closed form" or the name of the evaluator given.
    """

    plan: Plan
    seconds_per_token: float
    speedup: float
    candidate: Candidate
    autoregression: Candidate
    interval: tuple[float, float] | None = None
    best_by_family: Mapping[str, Candidate] = field(default_factory=lambda: MappingProxyType({}))
    runners_up: tuple[Candidate, ...] = ()
    memory_bytes: int = 0
    why: str = ""
    warnings: tuple[str, ...] = ()
    exact: bool = True
    predictor: str = "closed form"

    @property
    def speculate(self) -> bool:
        """Whether anything beats the target alone."""
        return self.plan != self.autoregression.plan
