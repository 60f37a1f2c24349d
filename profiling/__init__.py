"""Profiling: pass costs, acceptance and measured runs, through the runtime's own sessions."""

from __future__ import annotations

from hsdopt.profiles import Setting
from hsdopt.profiling.control import ControlCosts
from hsdopt.profiling.extend import add_drafters
from hsdopt.profiling.measure import check_room, profile, render_prompts, trace_prompts
from hsdopt.profiling.recheck import Drift, recheck
from hsdopt.profiling.validate import MeasuredRun, measure_plans
from hsdopt.profiling.workload import Prompt, Workload, load_workload, render

__all__ = [
    "ControlCosts",
    "Drift",
    "MeasuredRun",
    "Prompt",
    "Setting",
    "Workload",
    "add_drafters",
    "check_room",
    "load_workload",
    "measure_plans",
    "profile",
    "recheck",
    "render",
    "render_prompts",
    "trace_prompts",
]
