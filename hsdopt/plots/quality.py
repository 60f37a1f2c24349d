"""What speed costs in quality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from hsdopt.plots.data import Report, Row, fields, keep, required
from hsdopt.plots.labels import label_points
from hsdopt.plots.look import GREY, MARKERS, TARGET, WIDTH, axes_for, elide, model_colours, styled

__all__ = ["quality_frontier"]


@styled
def quality_frontier(report: Report, *, ax: Axes | None = None) -> Axes:
    """Return quality against time per token: the settings of Big Little Decoder beside lossless plans.

    A line per small model joins the settings that none of its own beats in both; they are named by their
    thresholds, fallback and rollback. Bars are the intervals of the time.

    Parameters
    ----------
    report : mapping
        As in quality.json.
    ax : Axes, optional

    Raises
    ------
    InvalidArgumentError
        If no plan's quality is known.
    """
    known = [row for row in report["plans"] if row["quality"] is not None]
    rows = required(known, "plan whose quality is known")
    axes = axes_for(ax, 4.6, WIDTH + 0.4)
    smalls = sorted({row["small"] for row in rows if row["small"]})
    colours = model_colours(smalls, report["target"])
    others = [row for row in rows if not row["small"] and row["family"] != "autoregression"]
    _time_bars(axes, others, color=GREY, marker="D", markerfacecolor="white", label="lossless plans")
    own = [row for row in rows if row["family"] == "autoregression"]
    _time_bars(axes, own, color=TARGET, marker="*", markersize=11, label="the target alone")
    for number, small in enumerate(smalls):
        points = [row for row in rows if row["small"] == small]
        best = sorted((row for row in points if row["undominated"]), key=lambda row: row["time"])
        axes.plot([row["time"] for row in best], [row["quality"] for row in best], color=colours[small], zorder=2)
        _time_bars(axes, points, color=colours[small], marker=MARKERS[number % 3], label=f"bild, {elide(small, 24)}")
    drawn = ", drawn apart" if report["sampled"] else ""
    whose = f"the target's output{drawn}" if report["against"] == "own" else "the references"
    measure = {"bleu": "BLEU", "rouge-l": "ROUGE-L"}[report["measure"]]
    axes.set(xlabel="time per token (the target alone = 1)", ylabel=f"{measure} against {whose}")
    axes.set_title("Quality against latency")
    axes.margins(0.08, 0.1)
    axes.legend(loc="upper right", bbox_to_anchor=(1, -0.13), ncols=2, borderaxespad=0)
    named = [row for row in rows if row["small"] and row["undominated"]]
    texts = [f"{row['fallback']:g}, {float(row['rollback']):g}" for row in named]
    places = [(row["time"], row["quality"]) for row in named]
    label_points(axes, places, texts, [colours[row["small"]] for row in named], avoid=rows)
    names = ("plan", "family", "small", "fallback", "rollback", "time", "time_interval", "quality", "undominated")
    keep(axes, [fields(row, *names) for row in rows])
    return axes


def _time_bars(axes: Axes, rows: Sequence[Row], **look: Any) -> None:  # noqa: ANN401 (matplotlib's own)
    """Draw plans at their times, with intervals, and their quality."""
    if not rows:
        return
    times = np.array([row["time"] for row in rows])
    bounds = np.array([row["time_interval"] or [row["time"]] * 2 for row in rows])
    lengths = np.abs(np.stack([times - bounds[:, 0], bounds[:, 1] - times]))
    usual: dict[str, Any] = {"linestyle": "none", "markersize": 5.5, "elinewidth": 0.9, "zorder": 3}
    drawn = axes.errorbar(times, [row["quality"] for row in rows], xerr=lengths, **(usual | look))
    for bar in drawn.lines[2]:
        bar.set(alpha=0.35, zorder=1)
