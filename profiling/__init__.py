"""Profiling: pass costs, acceptance and measured runs, through the runtime's own sessions."""

from __future__ import annotations

from hsdopt.profiles import Setting
from hsdopt.profiling.measure import profile, render_prompts, trace_prompts
from hsdopt.profiling.validate import MeasuredRun, measure_plans
from hsdopt.profiling.workload import Prompt, Workload, load_workload, render

__all__ = [
    "MeasuredRun",
    "Prompt",
    "Setting",
    "Workload",
    "load_workload",
    "measure_plans",
    "profile",
    "render",
    "render_prompts",
    "trace_prompts",
]
