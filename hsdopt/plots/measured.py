"""What was measured of every plan: speed, where the time goes, and what memory buys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from hsdopt.errors import InvalidArgumentError
from hsdopt.plots.data import Report, Row, baselines, fields, keep
from hsdopt.plots.labels import ink, label_column, plan_ticks, short_label
from hsdopt.plots.look import BLUE, GREY, PALE, RED, TARGET, WIDTH, axes_for, elide, model_colours, styled

__all__ = ["latency_against_memory", "speedups", "where_the_time_goes"]


@styled
def speedups(report: Report, *, ax: Axes | None = None) -> Axes:
    """Return the measured speed-up of every plan over the target alone, with intervals, fastest on top.

    Baselines stand among the plans, their bars hollow.

    Parameters
    ----------
    report : mapping
        As in report.json.
    ax : Axes, optional
    """
    rows = sorted((*report["plans"], *baselines(report)), key=lambda row: row["speedup"])
    axes = axes_for(ax, 0.27 * len(rows) + 1.3)
    place, values = np.arange(len(rows)), [row["speedup"] for row in rows]
    colours = [_bar_colour(row, report) for row in rows]
    edges = [GREY if row["family"] == "baseline" else colour for row, colour in zip(rows, colours, strict=True)]
    axes.barh(place, values, color=colours, edgecolor=edges, linewidth=0.8, height=0.68)
    bounds = [row["speedup_interval"] or [row["speedup"]] * 2 for row in rows]
    lengths = np.abs(np.array([[value - low, high - value] for value, (low, high) in zip(values, bounds, strict=True)]))
    axes.errorbar(values, place, xerr=lengths.T, fmt="none", ecolor=TARGET, elinewidth=1, capsize=2)
    for y, (value, (_, high)) in enumerate(zip(values, bounds, strict=True)):
        axes.annotate(f"{value:.2f}", (max(value, high), y), (5, 0), textcoords="offset points", va="center")
    axes.axvline(1, color=TARGET, linewidth=1, linestyle=(0, (4, 3)))
    axes.set(xlim=(0, 1.14 * max(high for _, high in bounds)), ylim=(-0.7, len(rows) - 0.3))
    plan_ticks(axes, rows, report)
    axes.set_xlabel("speed-up (dashed line: the target alone)")
    axes.set_title("Measured speed-up")
    keep(axes, [fields(row, "plan", "family", "speedup", "speedup_interval") for row in reversed(rows)])
    return axes


@styled
def where_the_time_goes(report: Report, *, models: Sequence[str] = (), ax: Axes | None = None) -> Axes:
    """Return each plan's time per token, stacked by the model that spent it, fastest on top.

    Parameters
    ----------
    report : mapping
        As in report.json; plans whose passes were not logged are one grey bar.
    models : sequence of str
        All models of the profile, so that each keeps its colour from figure to figure.
    ax : Axes, optional
    """
    rows = sorted(report["plans"], key=lambda row: -row["measured_seconds_per_token"])
    axes = axes_for(ax, 0.27 * len(rows) + 1.9)
    target = report["summary"]["autoregression"].strip('"')
    used = sorted({name for row in rows for name in row["seconds_by_model"]}, key=lambda name: (name != target, name))
    colours = model_colours(tuple(dict.fromkeys([*models, *used])), target)
    left = np.zeros(len(rows))
    for model in used:
        width = np.array([1e3 * row["seconds_by_model"].get(model, 0.0) for row in rows])
        label = elide(model, 26)
        axes.barh(range(len(rows)), width, left=left, color=colours[model], height=0.68, label=label, edgecolor="white")
        left += width
    rest = np.maximum([1e3 * row["measured_seconds_per_token"] for row in rows] - left, 0)
    if rest.sum() > 0.001 * left.sum():
        axes.barh(range(len(rows)), rest, left=left, color=PALE, height=0.68, label="outside the passes")
    axes.set(xlim=(0, None), ylim=(-0.7, len(rows) - 0.3), xlabel="measured, ms per token")
    plan_ticks(axes, rows, report)
    axes.set_title("Where the time goes", pad=6)
    if used:
        axes.legend(loc="upper right", bbox_to_anchor=(1, -0.55 / (0.27 * len(rows) + 0.6)), ncols=3, borderaxespad=0)
    keep(axes, [{"plan": row["plan"], **row["seconds_by_model"], **_outside(row)} for row in reversed(rows)])
    return axes


@styled
def latency_against_memory(report: Report, *, ax: Axes | None = None) -> Axes:
    """Return measured time per token against the bytes of weights; what no lossless plan beats in both is named.

    Plans that change the output are hollow diamonds, baselines hollow squares; neither counts for the frontier.

    Parameters
    ----------
    report : mapping
        As in report.json.
    ax : Axes, optional

    Raises
    ------
    InvalidArgumentError
        If the report does not say how much memory its plans need.
    """
    rows = [row for row in (*report["plans"], *baselines(report)) if row.get("memory_bytes")]
    if not rows:
        raise InvalidArgumentError("expected a report that says what memory its plans need; this one does not")
    axes = axes_for(ax, 4.4, WIDTH + 0.6)
    front = _frontier(rows)
    kinds = {"lossless plan": "o", "changes the output": "D", "baseline": "s"}
    for kind, marker in kinds.items():
        points = np.array([_memory_point(row) for row in rows if _memory_kind(row) == kind]).reshape(-1, 2)
        if len(points):
            face = BLUE if kind == "lossless plan" else "none"
            colour = BLUE if kind == "lossless plan" else GREY
            look: dict[str, Any] = {"marker": marker, "color": colour, "markerfacecolor": face, "alpha": 0.8}
            axes.plot(*points.T, linestyle="none", markersize=5, label=kind, zorder=3, **look)
    best = [_memory_point(row) for row in front]
    axes.plot(*np.array(best).T, color=RED, marker="o", drawstyle="steps-post", label="best for its memory", zorder=4)
    axes.set(xlabel="weights that the plan needs, MB", ylabel="measured, ms per token")
    axes.set(ylim=(0, None))
    axes.margins(x=0.08)
    axes.set_title("Latency against memory")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15), ncols=2, borderaxespad=0)
    label_column(axes, best, [short_label(row) for row in front], [ink(row, report) for row in front])
    columns = ("plan", "family", "memory_bytes", "measured_seconds_per_token", "interval")
    keep(axes, [fields(row, *columns) | {"frontier": row in front} for row in rows])
    return axes


def _bar_colour(row: Row, report: Report) -> str:
    if row["plan"] == report["summary"]["chosen"]:
        return RED
    if row["family"] == "baseline":
        return "white"
    return GREY if row["plan"] == report["summary"]["autoregression"] else "#8DBBDD"


def _outside(row: Row) -> dict[str, float]:
    return {"outside the passes": row["measured_seconds_per_token"] - sum(row["seconds_by_model"].values())}


def _memory_kind(row: Row) -> str:
    return {"bild": "changes the output", "baseline": "baseline"}.get(row["family"], "lossless plan")


def _memory_point(row: Row) -> tuple[float, float]:
    """Return (MB of weights, ms per token)."""
    return row["memory_bytes"] / 1e6, 1e3 * row["measured_seconds_per_token"]


def _frontier(rows: Sequence[Row]) -> list[Row]:
    """Return the lossless plans than which no other is both smaller and faster, smallest first."""
    front: list[Row] = []
    for row in sorted((row for row in rows if _memory_kind(row) == "lossless plan"), key=_memory_point):
        if not front or row["measured_seconds_per_token"] < front[-1]["measured_seconds_per_token"]:
            front.append(row)
    return front
