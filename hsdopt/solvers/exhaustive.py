"""Every stack, one after another: slow, plain, and sharing no code with the solvers that it checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hsdopt.solvers.hierarchy import Hierarchy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hsdopt.checks import Cost

__all__ = ["best_stack", "stacks"]

_TIE = 1e-13


def best_stack(  # the options are keyword-only
    costs: Sequence[Cost],
    acceptance: Sequence[Sequence[float]],
    max_draft_length: int,
    *,
    order: Literal["given", "any"] = "given",
    convention: Literal["truncate", "overshoot"] = "truncate",
    max_levels: int | None = None,
) -> Hierarchy:
    """Return the best of all hierarchies by trying each: subsets, orders and draft lengths.

    Parameters
    ----------
    costs, acceptance, max_draft_length, order, max_levels
        As for `hsdopt.solvers.hierarchy.optimal_hierarchy`, rates only.
    convention
        ``"truncate"``: a model passes up exactly its draft length; ``"overshoot"``: all that it holds.

    Returns
    -------
    Hierarchy
        Of stacks that tie, the one of fewest models, then of shortest drafts.

    Notes
    -----
    For pools of a few models and short drafts: there are (max_draft_length + 1)^drafters stacks in the given
    order and more in any. Inputs are not checked.

    Examples
    --------
    >>> best_stack([0.1, 1.0], [[1, 0.8], [0.8, 1]], 8).draft_lengths
    (6,)
    """
    every = stacks(costs, acceptance, max_draft_length, order=order, convention=convention, max_levels=max_levels)
    best = next(every)
    for stack in every:
        if stack.latency < best.latency * (1 - _TIE):
            best = stack
        elif stack.latency <= best.latency * (1 + _TIE):
            best = min(best, stack, key=_size)
    return best


def stacks(  # the options are keyword-only
    costs: Sequence[Cost],
    acceptance: Sequence[Sequence[float]],
    max_draft_length: int,
    *,
    order: Literal["given", "any"] = "given",
    convention: Literal["truncate", "overshoot"] = "truncate",
    max_levels: int | None = None,
) -> Iterator[Hierarchy]:
    """Yield every hierarchy with its latency; see `best_stack`.

    Examples
    --------
    >>> len(list(stacks([0.1, 0.2, 1.0], [[1, 0.8, 0.7], [1, 1, 0.8], [1, 1, 1]], 3)))
    16
    """
    levels = len(costs) if max_levels is None else max_levels
    search = _Search(costs, acceptance, max_draft_length, order, convention, levels)
    yield Hierarchy((len(costs) - 1,), (), search.cost(len(costs) - 1, 1))
    if levels > 1:
        for model in range(len(costs) - 1):
            for length in range(1, max_draft_length + 1):
                bottom = length * search.cost(model, 1)
                yield from search.grow((model,), (length,), bottom, {length: 1.0})


def _size(stack: Hierarchy) -> tuple[int, int]:
    return len(stack.models), sum(stack.draft_lengths)


@dataclass(frozen=True, slots=True)
class _Search:
    """The pool and what to enumerate, with the rounds worked out so far."""

    costs: Sequence[Cost]
    acceptance: Sequence[Sequence[float]]
    longest: int
    order: str
    convention: str
    levels: int
    known: dict[tuple[float, int, int], float] = field(default_factory=dict)

    def cost(self, model: int, tokens: int) -> float:
        """Return the cost of one pass."""
        cost = self.costs[model]
        return cost(tokens) if callable(cost) else cost

    def grow(
        self, models: tuple[int, ...], lengths: tuple[int, ...], request: float, law: dict[int, float]
    ) -> Iterator[Hierarchy]:
        """Yield all stacks with these models at the bottom, `law` the tokens that a request passes up."""
        target = len(self.costs) - 1
        latency = self.round_cost(target, request, law) / self.gain(models[-1], target, law)
        yield Hierarchy((*models, target), lengths, latency)
        if len(models) + 1 >= self.levels:
            return
        for model in range(models[-1] + 1 if self.order == "given" else 0, target):
            if model in models:
                continue
            once = self.round_cost(model, request, law)
            for length in range(1, self.longest + 1):
                rounds, above = self.serve(self.acceptance[models[-1]][model], law, length)
                yield from self.grow((*models, model), (*lengths, length), rounds * once, above)

    def round_cost(self, model: int, request: float, law: dict[int, float]) -> float:
        """Return the cost of one round: a draft from below, and the pass that verifies it."""
        return request + sum(chance * self.cost(model, length + 1) for length, chance in law.items())

    def gain(self, drafter: int, verifier: int, law: dict[int, float]) -> float:
        """Return the tokens that a round gains on average."""
        rate = self.acceptance[drafter][verifier]
        return sum(chance * sum(rate**m for m in range(length + 1)) for length, chance in law.items())

    def serve(self, rate: float, law: dict[int, float], owed: int) -> tuple[float, dict[int, float]]:
        """Return the rounds that a request takes, and the law of what it passes up."""
        if self.convention == "overshoot":
            return _overshoot(_gains(rate, law), owed)
        (length,) = law
        return self.rounds(rate, length, owed), {owed: 1.0}

    def rounds(self, rate: float, length: int, owed: int) -> float:
        """Return the rounds until `owed` tokens are held, by first-step analysis."""
        if owed <= 0:
            return 0.0
        key = rate, length, owed
        if key not in self.known:
            self.known[key] = 1.0 + sum(
                chance * self.rounds(rate, length, owed - tokens)
                for tokens, chance in _gains(rate, {length: 1.0}).items()
                if tokens < owed
            )
        return self.known[key]


def _gains(rate: float, law: dict[int, float]) -> dict[int, float]:
    """Return the law of the tokens that one round gains."""
    gains: dict[int, float] = {}
    for length, chance in law.items():
        for accepted in range(length + 1):
            stop = 1.0 if accepted == length else 1.0 - rate
            gains[accepted + 1] = gains.get(accepted + 1, 0.0) + chance * rate**accepted * stop
    return gains


def _overshoot(gains: dict[int, float], owed: int) -> tuple[float, dict[int, float]]:
    """Return the rounds until `owed` tokens are held, and the law of the tokens then held."""
    held, final, rounds = {0: 1.0}, dict[int, float](), 0.0
    for have in range(owed):
        chance = held.get(have, 0.0)
        rounds += chance
        for tokens, part in gains.items():
            reached = final if have + tokens >= owed else held
            reached[have + tokens] = reached.get(have + tokens, 0.0) + chance * part
    return rounds, {length: chance for length, chance in final.items() if chance > 0}
