"""A pool of models as arrays: what every array-level solver reads its inputs into.

A pool lists its models with the target last; `acceptance[j][i]` is `j`'s drafts by `i`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from hsdopt.checks import as_cost, check_choice, check_cost, check_length, check_rates, check_survival
from hsdopt.errors import InvalidArgumentError
from hsdopt.latency.hierarchy import rounds_tables, rounds_tables_from_survival

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from hsdopt.checks import Cost, FloatArray

__all__ = ["Order", "Pool", "read_pool"]

Order: TypeAlias = Literal["given", "any"]


@dataclass(frozen=True, slots=True)
class Pool:
    """Checked arrays of a pool.

    Attributes
    ----------
    costs
        Shape ``[models, max_draft_length + 1]``; ``costs[i, n - 1]`` is a pass of model i over n new tokens.
    acceptance
        Rates ``[models, models]`` or survival curves ``[models, models, max_draft_length + 1]``; pairs that
        the order of models leaves unused are 0 (curves: no token accepted).
    max_draft_length
        Longest draft of any level.
    order
        Whether drafters stand below a verifier only in the given order, or in any.
    """

    costs: FloatArray
    acceptance: FloatArray
    max_draft_length: int
    order: Order

    @property
    def target(self) -> int:
        """Number of the target model."""
        return len(self.costs) - 1

    def drafters(self, verifier: int) -> int:
        """How many models, counted from the first, may draft for a verifier."""
        return verifier if self.order == "given" else self.target

    def survival(self, verifier: int) -> FloatArray:
        """Survival curves of the drafts that a verifier may see, ``[drafter, accepted]``."""
        pairs = self.acceptance[: self.drafters(verifier), verifier]
        if self.acceptance.ndim == 3:
            return pairs
        return np.asarray(pairs[:, np.newaxis] ** np.arange(self.max_draft_length + 1.0))

    def tokens(self) -> FloatArray:
        """Tokens that a pass of the target gains, ``[drafter, draft_length - 1]``."""
        return np.asarray(self.survival(self.target).cumsum(axis=1)[:, 1:])

    def rounds(self, first: int, stop: int) -> FloatArray:
        """Return expected verify passes ``[drafter, verifier - first, draft_length - 1, tokens - 1]``."""
        pairs = self.acceptance[: self.drafters(stop - 1), first:stop]
        make = rounds_tables if self.acceptance.ndim == 2 else rounds_tables_from_survival
        return make(pairs, self.max_draft_length)


def read_pool(
    costs: Sequence[Cost] | FloatArray, acceptance: ArrayLike, max_draft_length: int, *, order: Order = "given"
) -> Pool:
    """Return a checked pool.

    Raises
    ------
    InvalidArgumentError
        If there is no model, a shape does not fit, or a number that is used is outside its domain.
    """
    check_choice(order, "order", ("given", "any"))
    longest = check_length(max_draft_length, "max_draft_length")
    if len(costs) == 0:
        raise InvalidArgumentError("expected the cost of at least one model, the target's last; got none")
    table = np.array([_cost_row(cost, longest + 1, index) for index, cost in enumerate(costs)])
    return Pool(table, _read_acceptance(acceptance, len(costs), longest, order), longest, order)


def _cost_row(cost: Cost, tokens: int, index: int) -> FloatArray:
    """Return the cost of a pass over 1 to `tokens` new tokens."""
    name = f"costs[{index}]"
    if not callable(cost):
        return np.full(tokens, check_cost(cost, name))
    curve = as_cost(cost, name)
    return np.array([curve(count) for count in range(1, tokens + 1)])


def _read_acceptance(acceptance: ArrayLike, models: int, longest: int, order: Order) -> FloatArray:
    """Return rates or curves of the pairs in use, the others blank."""
    try:
        given = np.asarray(acceptance, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            "expected acceptance to be a matrix of rates, or of survival curves of one length; got neither"
        ) from None
    if given.shape[:2] != (models, models) and models > 1:
        raise InvalidArgumentError(
            f"expected acceptance between each pair of {models} models, shape ({models}, {models}) or "
            f"({models}, {models}, {longest + 1}); got shape {given.shape}"
        )
    used = _used_pairs(models, order)
    if given.ndim == 3:
        return _read_curves(given, used, longest)
    rates = np.zeros((models, models))
    rates[used] = check_rates(given[used] if models > 1 else np.empty(0), "acceptance")
    return rates


def _read_curves(given: FloatArray, used: NDArray[np.bool_], longest: int) -> FloatArray:
    """Return the survival curves of the pairs in use, cut to the longest draft."""
    if given.shape[2] <= longest:
        raise InvalidArgumentError(
            f"expected survival curves over {longest} drafted tokens ({longest + 1} entries); "
            f"got {given.shape[2]} entries"
        )
    curves = np.zeros((*used.shape, longest + 1))
    curves[..., 0] = 1.0
    if used.any():
        curves[used] = check_survival(given[used][:, : longest + 1], "acceptance")
    return curves


def _used_pairs(models: int, order: Order) -> NDArray[np.bool_]:
    """Which pairs [drafter, verifier] a stack may contain."""
    if order == "given":
        return np.triu(np.ones((models, models), dtype=bool), 1)
    used = ~np.eye(models, dtype=bool)
    used[-1] = False
    return used
