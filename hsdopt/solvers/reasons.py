"""Why a plan is the best: one line of the numbers that decide."""

from __future__ import annotations

from hsdopt.latency.expected import Estimate
from hsdopt.plan import LOOKUP, Plan
from hsdopt.profiles import Profile
from hsdopt.solvers.solution import Candidate

__all__ = ["why"]


def why(best: Candidate, contender: Candidate | None, profile: Profile, context: float | None) -> str:
    """Return one line of what decides: acceptance, cost ratios, tokens per pass.

    Parameters
    ----------
    best : Candidate
        The plan to run.
    contender : Candidate or None
        The best plan with a drafter, if `best` has none.
    profile : Profile
    context : float or None
        Context length at which costs are read.
    """
    place = profile.context if context is None else context
    if contender is None:
        return "no drafter to use"
    line = "; ".join([*_drafters(contender.plan, profile, place), _target(contender.estimate, contender.plan)])
    if contender is best:
        return line
    return f"the best with a drafter, {contender.plan.description}, is at {contender.estimate.speedup:.3g}x ({line})"


def _drafters(plan: Plan, profile: Profile, place: float | None) -> list[str]:
    """Return what is to say of each drafter of the target, and of the target's passes."""
    target = profile.cost(plan.target)
    parts = []
    for name in plan.drafters:
        length = plan.longest_draft if name == plan.drafters[-1] else None
        ratio = profile.cost(name)(1, place) / target(1, place) if target(1, place) > 0 else float("inf")
        unit = "a request" if name == LOOKUP else "a pass"
        rate = f"{name} acceptance {profile.acceptance(name, plan.target).rate:.2f}"
        parts.append(f"{rate}, {unit} {ratio:.2g} of {plan.target}'s")
        if length is not None and length + 1 <= target.max_tokens:
            grown = target(length + 1, place) / target(1, place) if target(1, place) > 0 else 1.0
            parts[-1] += f", c({length + 1})/c(1) = {grown:.2g}"
    return parts


def _target(estimate: Estimate, plan: Plan) -> str:
    share = next((row.seconds for row in estimate.breakdown if row.model == plan.target), 0.0)
    return f"{estimate.tokens_per_pass:.2f} tokens per pass, {share / estimate.seconds_per_token:.0%} of the time in it"
