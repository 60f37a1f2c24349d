"""Seconds outside the passes: choosing tokens, reviewing drafts, cropping caches, keeping the log.

A profile holds them per round, measured by the runtime itself. From those of plain decoding, one pass a round, and
those of a stack, some passes a round, follow the seconds that a target's round takes by itself and those that every
further pass adds; both together speak for any plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hsdopt.errors import PredictionError
from hsdopt.profiles import Profile

__all__ = ["DRAFTING", "ROUND", "STACK_ROUND", "Overhead"]

ROUND = "round of autoregression"
"""Seconds outside the passes, per pass of the target that decodes alone."""

STACK_ROUND = "round of a stack"
"""Seconds outside the passes, per pass of the target in the stack that was measured."""

DRAFTING = "drafting pass of a stack"
"""Seconds that every pass (or lookup request) below the target adds to a round; 0 if no stack was measured."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds outside the passes.

    Attributes
    ----------
    round : float
        Per pass of the target.
    drafting_pass : float
        Per pass, or lookup request, of any other model.
    """

    round: float = 0.0
    drafting_pass: float = 0.0

    @classmethod
    def of(cls, profile: Profile) -> Overhead:
        """Return what a profile measured.

        Raises
        ------
        PredictionError
            If it did not measure any.
        """
        if ROUND not in profile.overhead:
            raise PredictionError(
                f"expected the seconds outside the passes ({ROUND}) in the profile; it has none: profile again, or "
                "predict without them"
            )
        return cls(profile.overhead[ROUND], profile.overhead.get(DRAFTING, 0.0))

    def seconds(self, passes: Mapping[tuple[str, int], float], target: str) -> float:
        """Return the seconds outside `passes`, counts by (model, new tokens).

        Examples
        --------
        >>> Overhead(2.0, 0.5).seconds({("big", 3): 1.0, ("small", 1): 1.0, ("small", 2): 1.0}, "big")
        3.0
        """
        return sum(
            count * (self.round if model == target else self.drafting_pass) for (model, _), count in passes.items()
        )
