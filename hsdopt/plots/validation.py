"""Predictions held against the clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hsdopt.errors import InvalidArgumentError
from hsdopt.plots.data import Report, Row, fields, keep, required
from hsdopt.plots.labels import ink, label_column, plan_ticks
from hsdopt.plots.look import BLUE, GREY, MARKERS, PALETTE, RED, SMALL, TARGET, WIDTH, axes_for, elide, styled

__all__ = ["prediction_errors", "run_distribution", "simulated_against_real", "transfer_intervals"]

_ROUND = tuple(m * 10.0**e for e in range(-4, 7) for m in (1, 1.5, 2, 3, 4, 5, 7))
"""Ticks of a long logarithmic axis."""


@styled
def simulated_against_real(report: Report, *, ax: Axes | None = None) -> Axes:
    """Return predicted against measured time per token, one point per plan and predictor.

    Horizontal bars are the measured intervals, the band is 5 % around equality. Labels belong to the
    points of the report's main predictor.

    Parameters
    ----------
    report : mapping
        As in report.json.
    ax : Axes, optional

    Raises
    ------
    InvalidArgumentError
        If no plan of the report was predicted.
    """
    rows = required([row for row in report["plans"] if row["predicted"]], "predicted plan in the report")
    axes = axes_for(ax, max(5.0, 0.2 * len(rows) + 1.2), WIDTH + 0.6)
    primary = report["summary"]["predictor"]
    names = sorted({name for row in rows for name in row["predicted"]}, key=lambda name: (name != primary, name))
    low, high = _span([value for row in rows for value in _times(row)])
    line = np.array([low, high])
    axes.plot(line, line, color=GREY, linewidth=1, zorder=1)
    for number, name in enumerate(names):
        _predictor_points(axes, rows, name, number)
    axes.fill_between(line, 0.95 * line, 1.05 * line, color="#EFEFEF", zorder=0, label="within 5 %")
    axes.set(xlim=(low, high), ylim=(low, high), xlabel="measured, ms per token", ylabel="predicted, ms per token")
    _log_axes(axes)
    axes.set_title("Predicted against measured")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    entries = [*names, "within 5 %"]
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, -0.12), "borderaxespad": 0, "ncols": 2}
    axes.legend([handles[name] for name in entries], entries, **place)  # below: points may lie anywhere within
    shown = primary if all(primary in row["predicted"] for row in rows) else None
    points = [(1e3 * row["measured_seconds_per_token"], _shown(row, shown)) for row in rows]
    label_column(axes, points, [elide(row["plan"], 36) for row in rows], [ink(row, report) for row in rows])
    keep(axes, [_flat(row) for row in rows])
    return axes


@styled
def prediction_errors(report: Report, *, ax: Axes | None = None) -> Axes:
    """Return the error of every plan by every predictor, one row per predictor; a bar marks the median.

    Filled points predict from traces of the timed prompts, hollow ones from the profile; the band is 5 % around none.
    The median of the absolute error stands at the right.

    Parameters
    ----------
    report : mapping
        As in report.json.
    ax : Axes, optional

    Raises
    ------
    InvalidArgumentError
        If no plan of the report was predicted.
    """
    rows = required(_error_rows(report), "predicted plan in the report")
    axes = axes_for(ax, 0.42 * len(rows) + 1.5)
    axes.axvspan(-5, 5, color="#EFEFEF", zorder=0)
    axes.axvline(0, color=GREY, linewidth=1)
    for place, (kind, _, errors) in enumerate(reversed(rows)):
        values = 100 * np.array(list(errors.values()))
        colour = BLUE if kind == "same prompts" else RED
        look: dict[str, Any] = {"markerfacecolor": colour if kind == "same prompts" else "none", "alpha": 0.75}
        spread = place + 0.24 * (np.arange(len(values)) % 3 - 1)  # points that coincide stay countable
        axes.plot(values, spread, marker="o", linestyle="none", color=colour, markersize=4.5, zorder=3, **look)
        axes.plot([np.median(values)] * 2, [place - 0.38, place + 0.38], color=TARGET, linewidth=1.8, zorder=4)
        text = f"{np.median(np.abs(values)):.1f} %"
        axes.annotate(text, (1.02, place), xycoords=("axes fraction", "data"), va="center", annotation_clip=False)
    axes.set_yticks(range(len(rows)), [f"{name}\n{kind}" for kind, name, _ in reversed(rows)], fontsize=SMALL)
    axes.set(ylim=(-0.6, len(rows) - 0.4), xlabel="predicted / measured - 1, per cent")
    axes.grid(visible=False, axis="y")
    axes.set_title("Errors by predictor")
    keep(axes, [_error_entry(kind, name, plan, e) for kind, name, errors in rows for plan, e in errors.items()])
    return axes


@styled
def transfer_intervals(report: Report, *, ax: Axes | None = None) -> Axes:
    """Return the interval predicted from the profile (bars) beside the measured time (points), fastest on top.

    Points that their interval misses are red crosses.

    Parameters
    ----------
    report : mapping
        As in report.json.
    ax : Axes, optional

    Raises
    ------
    InvalidArgumentError
        If no plan of the report has such an interval.
    """
    known = [row for row in report["plans"] if row.get("transfer_interval")]
    rows = required(known, "plan with a predicted interval in the report")[::-1]
    axes = axes_for(ax, 0.27 * len(rows) + 1.6)
    for place, row in enumerate(rows):
        low, high = (1e3 * bound for bound in row["transfer_interval"])
        axes.barh(place, high - low, left=low, height=0.6, color="#CFE2F0")
        inside = _covered(row)
        look: dict[str, Any] = {"marker": "o" if inside else "X", "color": TARGET if inside else RED}
        bounds = np.array(row["interval"] or [row["measured_seconds_per_token"]] * 2) * 1e3
        axes.plot(bounds, [place] * 2, color=look["color"], linewidth=1)
        axes.plot([1e3 * row["measured_seconds_per_token"]], [place], linestyle="none", markersize=5.5, **look)
    plan_ticks(axes, rows, report)
    axes.set(xlim=(0, None), ylim=(-0.7, len(rows) - 0.3), xlabel="ms per token")
    axes.set_title(f"Intervals: {sum(map(_covered, rows))} of {len(rows)} hold")
    columns = ("plan", "measured_seconds_per_token", "interval", "transfer_seconds_per_token", "transfer_interval")
    keep(axes, [fields(row, *columns) | {"covered": _covered(row)} for row in reversed(rows)])
    return axes


@styled
def run_distribution(report: Report, *, ax: Axes | None = None) -> Axes:
    """Return the share of single outputs of the chosen plan that were at least so fast, measured and simulated.

    Parameters
    ----------
    report : mapping
        As in report.json; its "distribution" has to be there.
    ax : Axes, optional

    Raises
    ------
    InvalidArgumentError
        If the report holds no distribution.
    """
    found = report.get("distribution")
    if not found or not found["measured"]:
        raise InvalidArgumentError("expected a distribution of single outputs in the report; got none")
    axes = axes_for(ax, 3.6)
    curves = {"measured": found["measured"], **found["predicted"]}
    for number, (name, values) in enumerate(curves.items()):
        times = 1e3 * np.sort(np.asarray(values, dtype=float))
        steps = np.arange(1, len(times) + 1) / len(times)
        look: dict[str, Any] = {"color": (TARGET, *PALETTE)[number], "linestyle": ("-", "--", ":", "-.")[number % 4]}
        label = f"{name}: mean {times.mean():.3g}, {len(times)} outputs"
        axes.step(
            [times[0], *times], [0, *steps], where="post", linewidth=2.2 if number == 0 else 1.6, label=label, **look
        )
    axes.set(ylim=(0, 1.02), xlabel="ms per token of one output", ylabel="share of outputs at least so fast")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title(f"One output of {elide(found['plan'], 28)}")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), borderaxespad=0)
    keep(axes, [{"source": name, "seconds_per_token": value} for name, values in curves.items() for value in values])
    return axes


def _predictor_points(axes: Axes, rows: Sequence[Row], name: str, number: int) -> None:
    """Draw one predictor: filled with error bars if it is the main one (number 0), else hollow."""
    known = [row for row in rows if name in row["predicted"]]
    x = np.array([1e3 * row["measured_seconds_per_token"] for row in known])
    y = np.array([1e3 * row["predicted"][name] for row in known])
    colour = PALETTE[number % len(PALETTE)]
    look: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "linestyle": "none", "color": colour}
    if number:
        axes.plot(x, y, markerfacecolor="none", markersize=5, markeredgewidth=1, label=name, zorder=3, **look)
        return
    bounds = np.array([row["interval"] or [row["measured_seconds_per_token"]] * 2 for row in known]) * 1e3
    error = np.abs(np.stack([x - bounds[:, 0], bounds[:, 1] - x]))
    axes.errorbar(x, y, xerr=error, markersize=5.5, elinewidth=0.9, alpha=0.9, label=name, zorder=4, **look)


def _times(row: Row) -> list[float]:
    """Return every time that a point of the plan shows, ms."""
    bounds = row["interval"] or []
    return [1e3 * value for value in (row["measured_seconds_per_token"], *bounds, *row["predicted"].values())]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return limits that hold the values with some air; geometric, as ratios are what counts."""
    low, high = min(values), max(values)
    air = max((high / low) ** 0.06, 1.04)
    return low / air, high * air


def _log_axes(axes: Axes) -> None:
    axes.set(xscale="log", yscale="log")
    low, high = axes.get_xlim()
    nice = MaxNLocator(6).tick_values(low, high) if high < 3 * low else _ROUND
    ticks = [tick for tick in nice if low <= tick <= high]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)


def _shown(row: Row, predictor: str | None) -> float:
    """Return the prediction that a plan's label points at, ms."""
    predicted = row["predicted"]
    return 1e3 * float(predicted[predictor] if predictor is not None else next(iter(predicted.values())))


def _flat(row: Row) -> dict[str, Any]:
    """Return the plan's row of the CSV, one column per predictor."""
    kept = fields(row, "plan", "family", "measured_seconds_per_token", "interval")
    return kept | {f"predicted ({name})": value for name, value in row["predicted"].items()}


def _error_rows(report: Report) -> list[tuple[str, str, dict[str, float]]]:
    """Return (kind, predictor, error by plan), the report's main predictor first in each kind."""
    primary, rows = report["summary"]["predictor"], []
    for kind, field in (("same prompts", "predicted"), ("new prompts", "transfer")):
        names = dict.fromkeys(name for row in report["plans"] for name in row[field])
        for name in sorted(names, key=lambda name: name != primary):
            errors = {
                row["plan"]: row[field][name] / row["measured_seconds_per_token"] - 1
                for row in report["plans"]
                if name in row[field]
            }
            rows.append((kind, name, errors))
    return rows


def _error_entry(kind: str, predictor: str, plan: str, error: float) -> dict[str, Any]:
    return {"predictor": predictor, "kind": kind, "plan": plan, "error": error}


def _covered(row: Row) -> bool:
    low, high = row["transfer_interval"]
    return bool(low <= row["measured_seconds_per_token"] <= high)
