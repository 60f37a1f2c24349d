"""Profiling: pass costs, acceptance and measured runs, through the runtime's own sessions.

What needs torch is loaded when first used, so that prompts can be read without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hsdopt.profiles import Setting
from hsdopt.profiling.workload import Prompt, Workload, load_workload, render, turn

if TYPE_CHECKING:
    from hsdopt.profiling.baselines import Baselines, TransformersBaseline, transformers_baselines
    from hsdopt.profiling.budget import profile_within
    from hsdopt.profiling.control import ControlCosts
    from hsdopt.profiling.drift import Drift, recheck
    from hsdopt.profiling.extend import add_drafters
    from hsdopt.profiling.measure import check_room, profile, render_prompts, trace_prompts
    from hsdopt.profiling.quality import Judge, Quality, score
    from hsdopt.profiling.validate import MeasuredRun, Runner, Timed, measure_plans

__all__ = [
    "Baselines",
    "ControlCosts",
    "Drift",
    "Judge",
    "MeasuredRun",
    "Prompt",
    "Quality",
    "Runner",
    "Setting",
    "Timed",
    "TransformersBaseline",
    "Workload",
    "add_drafters",
    "check_room",
    "load_workload",
    "measure_plans",
    "profile",
    "profile_within",
    "recheck",
    "render",
    "render_prompts",
    "score",
    "trace_prompts",
    "transformers_baselines",
    "turn",
]

_HOMES = {
    "Baselines": "hsdopt.profiling.baselines",
    "ControlCosts": "hsdopt.profiling.control",
    "Drift": "hsdopt.profiling.drift",
    "Judge": "hsdopt.profiling.quality",
    "MeasuredRun": "hsdopt.profiling.validate",
    "Quality": "hsdopt.profiling.quality",
    "Runner": "hsdopt.profiling.validate",
    "Timed": "hsdopt.profiling.validate",
    "TransformersBaseline": "hsdopt.profiling.baselines",
    "add_drafters": "hsdopt.profiling.extend",
    "check_room": "hsdopt.profiling.measure",
    "measure_plans": "hsdopt.profiling.validate",
    "profile": "hsdopt.profiling.measure",
    "profile_within": "hsdopt.profiling.budget",
    "recheck": "hsdopt.profiling.drift",
    "render_prompts": "hsdopt.profiling.measure",
    "score": "hsdopt.profiling.quality",
    "trace_prompts": "hsdopt.profiling.measure",
    "transformers_baselines": "hsdopt.profiling.baselines",
}


def __getattr__(name: str) -> object:
    """Return a public name from the module it lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hsdopt.profiling' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
