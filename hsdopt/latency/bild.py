"""Big Little Decoder: a small model runs until it falls back to a large one, which may roll it back.

Source: Kim et al., Big Little Decoder, arXiv 2302.07863. One cycle runs from fallback to fallback: a stint of
small passes, whose last token is discarded, then one large pass, which gives one token and may discard some of
the stint. Reports count fallbacks and rollbacks over different denominators, so both have to be named here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from hsdopt.checks import (
    Cost,
    CostFunction,
    FloatArray,
    as_cost,
    check_choice,
    check_nonnegative,
    check_rate,
    check_rates,
)
from hsdopt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

FallbackPer: TypeAlias = Literal["small_pass", "kept_token", "all_pass"]
RollbackPer: TypeAlias = Literal["call", "kept_token", "small_pass"]

_SHORT_WORDS = {"small": "small_pass", "kept": "kept_token", "all": "all_pass"}
_ROUNDING = 1e-9
_TAIL = 1e-15  # stints longer than this share of them are left out of an average


def latency_per_token(
    *,
    fallback: float,
    rollback: float,
    tokens_lost: float,
    small_cost: Cost,
    large_cost: Cost,
    fallback_per: FallbackPer,
    rollback_per: RollbackPer,
    extra_large: bool = False,
    cap_share: float = 0.0,
    large_pass_tokens: Sequence[float] | FloatArray | None = None,
) -> float:
    """Return the expected cost per kept token, in the unit of the costs.

    Parameters
    ----------
    fallback
        Fallbacks (large passes that end a stint) per small pass, per kept token, or as a share of all of
        these passes, as ``fallback_per`` says.
    rollback
        Rollbacks per fallback ("call"), per kept token, or per small pass, as ``rollback_per`` says.
    tokens_lost
        Mean net tokens that a rollback costs: length after the large pass without it minus length with it.
    small_cost, large_cost
        Cost of one pass: a number, or a function of the new tokens of the pass.
    fallback_per
        "small_pass", "kept_token" or "all_pass" (fallbacks over fallbacks plus small passes).
    rollback_per
        "call", "kept_token" or "small_pass".
    extra_large
        Whether the large model runs once more after a rollback, over one token, and yields one token. That
        pass is no fallback: neither rate counts it.
    cap_share
        Chance that a limit on the stint, rather than the fallback rule, ended it: the stint's last token is
        then kept.
    large_pass_tokens
        ``[n - 1]`` is the chance that a fallback's pass has ``n`` new tokens. Read only when ``large_cost`` is
        a function; without it stints are geometric and a fallback's pass takes in as many tokens as the
        stint had passes.

    Returns
    -------
    float
        Cost per token that remains in the output.

    Raises
    ------
    InvalidArgumentError
        If an argument is outside its domain, the rates leave no kept token or ask for more fallbacks than
        small passes, or ``large_cost`` is a function, the stint is capped and ``large_pass_tokens`` is missing.

    Notes
    -----
    Per small pass let ``p`` fallbacks, ``b`` rollbacks and ``k = 1 + p cap_share - b l`` kept tokens happen,
    ``l`` being ``tokens_lost``, less 1 with the extra pass. The result is
    ``(c_S + p c_L + b c_extra) / k``. Per small pass and per call this is ``(c_S/f + c_L) / (1/f - r l)``; per
    kept token and per kept token ``c_S (1 + r l) + f c_L``.

    Examples
    --------
    >>> round(latency_per_token(
    ...     fallback=0.2109, rollback=0.0156, tokens_lost=2.0, small_cost=0.484, large_cost=1.0,
    ...     fallback_per="small_pass", rollback_per="call",
    ... ), 6)
    0.699503
    """
    small, large = as_cost(small_cost, "small_cost"), as_cost(large_cost, "large_cost")
    lost = check_nonnegative(tokens_lost, "tokens_lost") - float(extra_large)
    cap = check_rate(cap_share, "cap_share")
    fallbacks, rollbacks, kept = _per_small_pass(
        fallback, _unit(fallback_per), rollback, _unit(rollback_per), lost, cap
    )
    cost = small(1)
    if fallbacks > 0.0:
        average = callable(large_cost)
        cost += fallbacks * (_large_pass(large, fallbacks, cap, large_pass_tokens) if average else large(1))
    if extra_large:
        cost += rollbacks * large(1)
    return cost / kept


def speedup(*, latency: float, large_cost: Cost) -> float:
    """Return the speed-up of a cycle model's latency over the large model's own autoregression.

    Raises
    ------
    InvalidArgumentError
        If the latency is not positive, or a cost is outside its domain.

    Examples
    --------
    >>> speedup(latency=0.5, large_cost=1.0)
    2.0
    """
    seconds = check_nonnegative(latency, "latency")
    if seconds == 0.0:
        raise InvalidArgumentError("expected a latency above 0; got 0")
    return as_cost(large_cost, "large_cost")(1) / seconds


def _unit(word: str) -> str:
    return _SHORT_WORDS.get(word, word) if isinstance(word, str) else word


def _per_small_pass(  # noqa: PLR0917 - the figures of one cycle
    fallback: float, fallback_per: str, rollback: float, rollback_per: str, lost: float, cap: float
) -> tuple[float, float, float]:
    """Return fallbacks, rollbacks and kept tokens per small pass."""
    fixed, per_kept = _fallback_terms(fallback, fallback_per)
    rate = _rollback_rate(rollback, rollback_per)
    # fallbacks = fixed + per_kept * kept, and rollbacks are a share of fallbacks, kept tokens or small passes,
    # so kept = 1 + cap * fallbacks - lost * rollbacks is linear in kept.
    gain = cap - lost * rate * (rollback_per == "call")
    numerator = 1.0 + fixed * gain - lost * rate * (rollback_per == "small_pass")
    denominator = 1.0 - per_kept * gain + lost * rate * (rollback_per == "kept_token")
    if numerator <= _ROUNDING or denominator <= _ROUNDING:
        raise InvalidArgumentError(
            f"expected rollbacks to leave some tokens; got a rollback rate of {rollback} per {rollback_per} "
            f"at {fallback} fallbacks per {fallback_per}"
        )
    kept = numerator / denominator
    fallbacks = fixed + per_kept * kept
    if fallbacks > 1.0 + _ROUNDING:
        raise InvalidArgumentError(
            f"expected at most one fallback per small pass; got {fallbacks:.6g} "
            f"(fallback {fallback} per {fallback_per})"
        )
    share = {"call": fallbacks, "kept_token": kept, "small_pass": 1.0}[rollback_per]
    return fallbacks, rate * share, kept


def _fallback_terms(fallback: float, per: str) -> tuple[float, float]:
    """Return the fallbacks per small pass and, in the other unit, per kept token."""
    check_choice(per, "fallback_per", ("small_pass", "kept_token", "all_pass"))
    if per == "kept_token":
        return 0.0, check_nonnegative(fallback, "fallback")
    rate = check_rate(fallback, "fallback")
    if per == "small_pass":
        return rate, 0.0
    if rate == 1.0:
        raise InvalidArgumentError("expected a share of all passes below 1; got a fallback of 1.0")
    return rate / (1.0 - rate), 0.0


def _rollback_rate(rollback: float, per: str) -> float:
    check_choice(per, "rollback_per", ("call", "kept_token", "small_pass"))
    if per == "kept_token":
        return check_nonnegative(rollback, "rollback")
    return check_rate(rollback, "rollback")


def _large_pass(
    large: CostFunction, fallbacks: float, cap: float, tokens: Sequence[float] | FloatArray | None
) -> float:
    """Return the expected cost of a fallback's pass: of the last output token and the stint's kept tokens."""
    if tokens is None and cap > 0.0:
        raise InvalidArgumentError(
            "expected large_pass_tokens, the law of the new tokens of a large pass, since capped stints are "
            "not geometric; got None"
        )
    law = _geometric(min(fallbacks, 1.0)) if tokens is None else _checked_law(tokens)
    return sum(float(share) * large(index + 1) for index, share in enumerate(law) if share > 0.0)


def _geometric(rate: float) -> FloatArray:
    if rate == 1.0:
        return np.ones(1)
    longest = int(np.ceil(np.log(_TAIL) / np.log1p(-rate)))
    return np.asarray(rate * np.exp(np.arange(longest) * np.log1p(-rate)))


def _checked_law(tokens: Sequence[float] | FloatArray) -> FloatArray:
    law = check_rates(tokens, "entry of large_pass_tokens")
    if law.ndim != 1 or abs(law.sum() - 1.0) > _ROUNDING:
        raise InvalidArgumentError(f"expected large_pass_tokens to sum to 1; got {law.sum()}")
    return law
