"""What a plan may use: draft lengths, levels, models, memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import combinations

from hsdopt.checks import check_length
from hsdopt.errors import InvalidArgumentError
from hsdopt.plan import Plan
from hsdopt.profiles import Profile

__all__ = ["Limits", "memory_bytes", "read_limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Checked limits.

    Attributes
    ----------
    longest : int
        Most tokens of a draft at any level.
    levels : int or None
        Most models above each other, the target counted.
    memory : int or None
        Most bytes of weights.
    drafters : tuple of str
        Drafters that may be used.
    required : tuple of str
        Drafters that must be used.
    """

    longest: int
    levels: int | None
    memory: int | None
    drafters: tuple[str, ...]
    required: tuple[str, ...]

    def pools(self, profile: Profile) -> list[tuple[str, ...]]:
        """Return the largest sets of drafters that fit into memory together; every plan that fits lies in one."""
        if self.memory is None or memory_bytes(profile, (*self.drafters, profile.target)) <= self.memory:
            return [self.drafters]
        pools: list[tuple[str, ...]] = []
        for size in range(len(self.drafters) - 1, -1, -1):
            for pool in combinations(self.drafters, size):
                fits = memory_bytes(profile, (*pool, profile.target)) <= self.memory
                if fits and {*self.required} <= {*pool} and not any({*pool} <= {*larger} for larger in pools):
                    pools.append(pool)
        return pools

    def admits(self, plan: Plan, profile: Profile) -> bool:
        """Return whether a plan keeps to the limits."""
        names = {*plan.models} - {profile.target}
        if not {*self.required} <= names <= {*self.drafters}:
            return False
        if self.memory is not None and memory_bytes(profile, plan.models) > self.memory:
            return False
        return plan.longest_anywhere <= self.longest and (self.levels is None or plan.depth < self.levels)


def read_limits(
    profile: Profile,
    *,
    max_draft_length: int,
    max_levels: int | None,
    max_memory_bytes: int | None,
    allowed: Iterable[str] | None,
    required: Iterable[str] | None,
) -> Limits:
    """Return checked limits for a profile.

    Raises
    ------
    InvalidArgumentError
        If a number is below 1, a model is not in the profile, or the limits leave no plan.
    """
    longest = check_length(max_draft_length, "max_draft_length", minimum=1)
    levels = None if max_levels is None else check_length(max_levels, "max_levels", minimum=1)
    memory = None if max_memory_bytes is None else check_length(max_memory_bytes, "max_memory_bytes", minimum=1)
    allow = profile.drafters if allowed is None else _drafters(profile, allowed, "allowed")
    require = () if required is None else _drafters(profile, required, "required")
    if not {*require} <= {*allow}:
        missing = next(name for name in require if name not in allow)
        raise InvalidArgumentError(f"expected the required models among those allowed; got {missing}: allow it too")
    if require and levels == 1:
        raise InvalidArgumentError("expected max_levels of at least 2, as drafters are required; got 1")
    needed = memory_bytes(profile, (*require, profile.target))
    if memory is not None and needed > memory:
        raise InvalidArgumentError(
            f"expected max_memory_bytes of at least {needed}, what {', '.join((*require, profile.target))} "
            f"need(s); got {memory}"
        )
    return Limits(longest, levels, memory, allow, require)


def memory_bytes(profile: Profile, names: Collection[str]) -> int:
    """Return the bytes of weights of some models together; 0 for models given by hand."""
    return sum(profile.models[name].bytes for name in {*names} if name in profile.models)


def _drafters(profile: Profile, names: Iterable[str], what: str) -> tuple[str, ...]:
    """Return the named drafters in the profile's order; the target may be named and is dropped."""
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in profile.names:
            raise InvalidArgumentError(
                f"expected the {what} models among the profiled ones ({', '.join(profile.names)}); got {name}"
            )
    return tuple(name for name in profile.drafters if name in wanted)
