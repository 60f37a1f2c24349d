"""Checks of the numbers that users hand in: one place, one clear line per mistake.

Every ``check_*`` function returns the value in its plain Python or NumPy form, so that a caller writes
``rate = check_rate(rate)``; every ``as_*`` function brings the two spellings of an input into one.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hsdopt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

FloatArray: TypeAlias = NDArray[np.float64]
Acceptance: TypeAlias = float | Sequence[float] | FloatArray
"""An iid rate, or a survival curve: ``S[m]`` is the chance that the first ``m`` tokens are all accepted."""
CostFunction: TypeAlias = Callable[[int], float]
Cost: TypeAlias = float | CostFunction
"""Seconds of one pass: a constant, or a function of the number of new tokens."""

_ROUNDING = 1e-9  # what a curve averaged from counts, or read back from a file, may be off by


def check_number(value: object, name: str, expected: str) -> float:
    """Return a real, finite number as a float; ``expected`` completes the message.

    Raises
    ------
    InvalidArgumentError
        If the value is no number, is a truth value, or is not finite.
    """
    plain = value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
    if isinstance(plain, bool | np.bool_) or not isinstance(plain, numbers.Real):
        raise InvalidArgumentError(f"expected {name} to be {expected}; got {value!r}")
    if not math.isfinite(plain):
        raise InvalidArgumentError(f"expected {name} to be {expected}; got {plain}")
    return float(plain)


def check_rate(value: object, name: str = "acceptance") -> float:
    """Return a probability as a float.

    Raises
    ------
    InvalidArgumentError
        If the value is not a number between 0 and 1.

    Examples
    --------
    >>> check_rate(1)
    1.0
    """
    expected = "a rate between 0 and 1"
    rate = check_number(value, name, expected)
    if not 0.0 <= rate <= 1.0:
        raise InvalidArgumentError(f"expected {name} to be {expected}; got {rate}")
    return rate


def check_rates(values: object, name: str = "acceptance") -> FloatArray:
    """Return an array of probabilities, of any shape.

    Raises
    ------
    InvalidArgumentError
        If an entry is not a number between 0 and 1.
    """
    rates = _as_array(values, name)
    outside = ~((rates >= 0.0) & (rates <= 1.0))
    if outside.any():
        worst = rates[outside].flat[0]
        raise InvalidArgumentError(f"expected every {name} to be a rate between 0 and 1; got {worst}")
    return rates


def check_length(value: Any, name: str = "draft_length", *, minimum: int = 0) -> int:  # noqa: ANN401
    """Return a number of tokens (or of rounds, or of levels) as an int.

    Raises
    ------
    InvalidArgumentError
        If the value is not a whole number, or is below ``minimum``.

    Examples
    --------
    >>> check_length(3)
    3
    """
    expected = f"a whole number of at least {minimum}"
    if isinstance(value, bool | np.bool_):
        raise InvalidArgumentError(f"expected {name} to be {expected}; got {value!r}")
    try:
        length = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"expected {name} to be {expected}; got {value!r}") from None
    if length < minimum:
        raise InvalidArgumentError(f"expected {name} to be {expected}; got {length}")
    return length


def check_nonnegative(value: object, name: str) -> float:
    """Return a finite number of at least 0 as a float.

    Raises
    ------
    InvalidArgumentError
        If the value is not a finite number, or is negative.
    """
    expected = "a finite number of at least 0"
    number = check_number(value, name, expected)
    if number < 0.0:
        raise InvalidArgumentError(f"expected {name} to be {expected}; got {number}")
    return number


def check_cost(value: object, name: str = "cost") -> float:
    """Return the cost of a pass, in any unit, as a float.

    Raises
    ------
    InvalidArgumentError
        If the value is not a finite number, or is negative.
    """
    return check_nonnegative(value, name)


def check_choice(value: str, name: str, choices: Iterable[str]) -> str:
    """Return a word that is one of the choices.

    Raises
    ------
    InvalidArgumentError
        If it is none of them.
    """
    allowed = list(choices)
    if value not in allowed:
        words = ", ".join(repr(choice) for choice in allowed)
        raise InvalidArgumentError(f"expected {name} to be one of {words}; got {value!r}")
    return value


def check_count(values: Sequence[object] | NDArray[Any], expected: int, name: str) -> None:
    """Raise an error unless a list has the expected number of entries; ``name`` says what they are.

    Raises
    ------
    InvalidArgumentError
        If the count differs.
    """
    if len(values) != expected:
        raise InvalidArgumentError(f"expected {name}, {expected} in all; got {len(values)}")


def check_survival(curve: object, name: str = "acceptance") -> FloatArray:
    """Return a survival curve, or a stack of them along the last axis, as an array.

    Raises
    ------
    InvalidArgumentError
        If it is empty, does not start at 1, leaves [0, 1] or increases.
    """
    survival = _as_array(curve, name)
    what = f"the survival curve of {name}"
    if survival.ndim == 0 or survival.shape[-1] == 0:
        raise InvalidArgumentError(f"expected {what} to be a list that starts with 1; got {curve!r}")
    if not (np.abs(survival[..., 0] - 1.0) <= _ROUNDING).all():
        raise InvalidArgumentError(f"expected {what} to start with 1; got {survival[..., 0].min()}")
    if not ((survival >= 0.0) & (survival <= 1.0 + _ROUNDING)).all():
        raise InvalidArgumentError(f"expected {what} to stay between 0 and 1; got {survival.tolist()}")
    _check_falling(survival, what)
    return survival


def is_rate(acceptance: Acceptance) -> bool:
    """Return whether an acceptance is one iid rate rather than a survival curve.

    Examples
    --------
    >>> is_rate(0.8), is_rate([1.0, 0.8])
    (True, False)
    """
    return np.ndim(acceptance) == 0


def as_survival(acceptance: Acceptance, length: int, name: str = "acceptance") -> FloatArray:
    """Return ``S[0..length]`` of an iid rate or of a survival curve.

    Parameters
    ----------
    acceptance
        A rate ``a`` (then ``S[m] = a**m``) or a curve with at least ``length + 1`` entries.
    length
        Number of drafted positions to cover.
    name
        What to call it in a message.

    Returns
    -------
    numpy.ndarray
        Shape ``[length + 1]``.

    Raises
    ------
    InvalidArgumentError
        If the rate or the curve is invalid, or the curve is too short.

    Examples
    --------
    >>> as_survival(0.5, 2).tolist()
    [1.0, 0.5, 0.25]
    """
    if is_rate(acceptance):
        return np.asarray(check_rate(acceptance, name) ** np.arange(length + 1.0))
    survival = check_survival(acceptance, name)
    if survival.ndim != 1:
        raise InvalidArgumentError(f"expected {name} to be a rate or one curve; got {survival.ndim} axes")
    if len(survival) <= length:
        raise InvalidArgumentError(
            f"expected the survival curve of {name} to cover {length} drafted tokens "
            f"({length + 1} entries); got {len(survival)} entries"
        )
    return survival[: length + 1]


def as_cost(cost: Cost, name: str = "cost") -> CostFunction:
    """Return the cost of a pass as a function of its new tokens, checked at every call.

    Raises
    ------
    InvalidArgumentError
        If the constant, or later a value of the function, is negative or not finite.

    Examples
    --------
    >>> as_cost(0.5)(3), as_cost(lambda n: 0.5 + 0.25 * n)(2)
    (0.5, 1.0)
    """
    if callable(cost):
        curve = cost
        return lambda tokens: check_cost(curve(tokens), f"{name}({tokens})")
    constant = check_cost(cost, name)
    return lambda _tokens: constant


def _as_array(values: object, name: str) -> FloatArray:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"expected {name} to hold numbers; got {values!r}") from None


def _check_falling(survival: FloatArray, what: str) -> None:
    steps = np.diff(survival, axis=-1)
    if steps.size and steps.max() > _ROUNDING:
        position = int(np.argmax(steps.max(axis=tuple(range(steps.ndim - 1))))) + 1
        raise InvalidArgumentError(f"expected {what} never to increase; it does at position {position}")
