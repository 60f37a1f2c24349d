"""All figures that a report or a profile can fill."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hsdopt.plots.acceptance import acceptance_by_position, acceptance_heatmap
from hsdopt.plots.costs import cost_curves
from hsdopt.plots.data import Report, baselines
from hsdopt.plots.measured import latency_against_memory, speedups, where_the_time_goes
from hsdopt.plots.saving import on_own_figure
from hsdopt.plots.validation import prediction_errors, run_distribution, simulated_against_real, transfer_intervals
from hsdopt.profiles import Profile

__all__ = ["profile_figures", "report_figures"]


def report_figures(report: Report, profile: Profile | None = None) -> dict[str, Figure]:
    """Return every figure that the report (and the profile behind it) can fill, by name, in reading order."""
    models = () if profile is None else profile.names
    predicted = any(row["predicted"] or row["transfer"] for row in report["plans"])
    everything = (*report["plans"], *baselines(report))
    wanted: dict[str, tuple[Callable[..., Axes], bool]] = {
        "simulated-against-real": (simulated_against_real, any(row["predicted"] for row in report["plans"])),
        "prediction-errors": (prediction_errors, predicted),
        "run-distribution": (run_distribution, bool((report.get("distribution") or {}).get("measured"))),
        "transfer-intervals": (transfer_intervals, any(row.get("transfer_interval") for row in report["plans"])),
        "speedups": (speedups, True),
        "latency-against-memory": (latency_against_memory, any(row.get("memory_bytes") for row in everything)),
    }
    figures = {name: on_own_figure(draw, report) for name, (draw, shown) in wanted.items() if shown}
    figures["where-the-time-goes"] = on_own_figure(where_the_time_goes, report, models=models)
    return figures | ({} if profile is None else profile_figures(profile))


def profile_figures(profile: Profile) -> dict[str, Figure]:
    """Return every figure of a profile, by name, in reading order."""
    costs = {
        "cost-curves": on_own_figure(cost_curves, profile),
        "cost-curves-relative": on_own_figure(cost_curves, profile, relative=True),
    }
    if not profile.drafters:
        return costs
    return costs | {
        "acceptance-heatmap": on_own_figure(acceptance_heatmap, profile),
        "acceptance-by-position": on_own_figure(acceptance_by_position, profile),
    }
