"""Every figure of hsdopt: functions of a report or a profile that take ``ax=None`` and return the Axes.

Reports are the dictionaries of report.json, so that a figure can be drawn again from the file alone.
Colours are those of Okabe and Ito, darkened where they also colour text, and never the only sign: lines
differ in their markers as well. The target is always black. Nothing here changes matplotlib's global settings.
"""

from __future__ import annotations

from hsdopt.plots.acceptance import acceptance_by_position, acceptance_heatmap
from hsdopt.plots.costs import cost_curves
from hsdopt.plots.figures import profile_figures, report_figures
from hsdopt.plots.learning import learning_curve
from hsdopt.plots.look import elide, model_colours, style
from hsdopt.plots.measured import latency_against_memory, speedups, where_the_time_goes
from hsdopt.plots.quality import quality_frontier
from hsdopt.plots.saving import on_own_figure, render, save_figure
from hsdopt.plots.simulation import simulated_distribution
from hsdopt.plots.validation import prediction_errors, run_distribution, simulated_against_real, transfer_intervals
from hsdopt.plots.what_if import what_if_curve

__all__ = [
    "acceptance_by_position",
    "acceptance_heatmap",
    "cost_curves",
    "elide",
    "latency_against_memory",
    "learning_curve",
    "model_colours",
    "on_own_figure",
    "prediction_errors",
    "profile_figures",
    "quality_frontier",
    "render",
    "report_figures",
    "run_distribution",
    "save_figure",
    "simulated_against_real",
    "simulated_distribution",
    "speedups",
    "style",
    "transfer_intervals",
    "what_if_curve",
    "where_the_time_goes",
]
