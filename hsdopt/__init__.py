"""Decide how to speed up a language model by speculative decoding.

The public names are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hsdopt.latency.expected import Estimate, expected_latency
    from hsdopt.plan import Plan, format_plan, parse_plan
    from hsdopt.profiles import Profile
    from hsdopt.solvers.solution import Solution
    from hsdopt.solvers.solve import solve
    from hsdopt.solvers.what_if import sensitivities, what_if
    from hsdopt.sweeps import Sweep, fit_sweep

__version__ = "0.1.0"

__all__ = [
    "Estimate",
    "Plan",
    "Profile",
    "Solution",
    "Sweep",
    "expected_latency",
    "fit_sweep",
    "format_plan",
    "parse_plan",
    "sensitivities",
    "solve",
    "what_if",
]

_HOMES = {
    "Estimate": "hsdopt.latency.expected",
    "Plan": "hsdopt.plan",
    "Profile": "hsdopt.profiles",
    "Solution": "hsdopt.solvers.solution",
    "Sweep": "hsdopt.sweeps",
    "expected_latency": "hsdopt.latency.expected",
    "fit_sweep": "hsdopt.sweeps",
    "format_plan": "hsdopt.plan",
    "parse_plan": "hsdopt.plan",
    "sensitivities": "hsdopt.solvers.what_if",
    "solve": "hsdopt.solvers.solve",
    "what_if": "hsdopt.solvers.what_if",
}


def __getattr__(name: str) -> object:
    """Return a public name from the module it lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hsdopt' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*globals(), *__all__])
