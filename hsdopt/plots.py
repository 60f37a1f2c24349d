"""Every figure of hsdopt: functions of a report or a profile that take ``ax=None`` and return the Axes.

Reports are the dictionaries of report.json, so that a figure can be drawn again from the file alone.
Colours are those of Okabe and Ito, darkened where they also colour text, and never the only sign: lines
differ in their markers as well. The target is always black. Nothing here changes matplotlib's global settings.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter
from matplotlib.transforms import Bbox
from scipy.optimize import isotonic_regression

from hsdopt.errors import InvalidArgumentError, PredictionError
from hsdopt.plan import LOOKUP
from hsdopt.profiles import Profile, atomic_write
from hsdopt.solvers.what_if import WhatIf

__all__ = [
    "acceptance_by_position",
    "acceptance_heatmap",
    "cost_curves",
    "elide",
    "latency_against_memory",
    "learning_curve",
    "prediction_errors",
    "profile_figures",
    "quality_frontier",
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

P = ParamSpec("P")
Report = Mapping[str, Any]
Row = Mapping[str, Any]

_BLUE, _RED, _GREY, _PALE = "#0072B2", "#D55E00", "#5F5F5F", "#DADADA"
_PALETTE = (_BLUE, _RED, "#00865F", "#A64D83", "#B07900", "#3B9DD8", "#6B4F1D", "#6A51A3")
_TARGET = "#222222"
_MARKERS = "osD^vPX*"
_TEXT, _SMALL = 9.5, 8.5
"""Points: of text, and of plan names."""
_STYLE: dict[Any, Any] = {
    "font.size": _TEXT,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E8E8E8",
    "grid.linewidth": 0.7,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "xtick.labelcolor": "#222222",
    "ytick.labelcolor": "#222222",
    "legend.frameon": False,
    "legend.fontsize": _TEXT,
    "lines.linewidth": 1.6,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "hsdopt",
}
_WIDTH = 5.2
"""Inches: about the widest figure whose text a phone still shows legibly."""

_ROUND = tuple(m * 10.0**e for e in range(-4, 7) for m in (1, 1.5, 2, 3, 4, 5, 7))
"""Ticks of a long logarithmic axis."""

_TABLE = "hsdopt_table"
"""The attribute of an Axes under which a figure keeps the data that it shows."""


@contextmanager
def style() -> Iterator[None]:
    """Apply the look of hsdopt's figures inside a with block, and only there."""
    with mpl.rc_context(_STYLE):
        yield


def _styled(draw: Callable[P, Axes]) -> Callable[P, Axes]:
    """Let `draw` run under `style`."""

    @wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Axes:
        with style():
            return draw(*args, **kwargs)

    return wrapped


def elide(text: str, width: int = 40) -> str:
    """Return `text` with its middle left out if it is longer than `width`.

    Examples
    --------
    >>> elide("target(drafter-with-a-long-name:8)", 20)
    'target(draf…-name:8)'
    """
    if len(text) <= width:
        return text
    head = (width - 1) * 3 // 5
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


@_styled
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
    rows = [row for row in report["plans"] if row["predicted"]]
    if not rows:
        raise InvalidArgumentError("expected at least one predicted plan in the report; got none")
    axes = _axes(ax, max(5.0, 0.2 * len(rows) + 1.2), _WIDTH + 0.6)
    primary = report["summary"]["predictor"]
    names = sorted({name for row in rows for name in row["predicted"]}, key=lambda name: (name != primary, name))
    low, high = _span([value for row in rows for value in _times(row)])
    line = np.array([low, high])
    axes.plot(line, line, color=_GREY, linewidth=1, zorder=1)
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
    _label_column(axes, points, [elide(row["plan"], 36) for row in rows], [_ink(row, report) for row in rows])
    _keep(axes, [_flat(row) for row in rows])
    return axes


@_styled
def speedups(report: Report, *, ax: Axes | None = None) -> Axes:
    """Return the measured speed-up of every plan over the target alone, with intervals, fastest on top.

    Baselines stand among the plans, their bars hollow.

    Parameters
    ----------
    report : mapping
        As in report.json.
    ax : Axes, optional
    """
    rows = sorted((*report["plans"], *_baselines(report)), key=lambda row: row["speedup"])
    axes = _axes(ax, 0.27 * len(rows) + 1.3)
    place, values = np.arange(len(rows)), [row["speedup"] for row in rows]
    colours = [_bar_colour(row, report) for row in rows]
    edges = [_GREY if row["family"] == "baseline" else colour for row, colour in zip(rows, colours, strict=True)]
    axes.barh(place, values, color=colours, edgecolor=edges, linewidth=0.8, height=0.68)
    bounds = [row["speedup_interval"] or [row["speedup"]] * 2 for row in rows]
    lengths = np.abs(np.array([[value - low, high - value] for value, (low, high) in zip(values, bounds, strict=True)]))
    axes.errorbar(values, place, xerr=lengths.T, fmt="none", ecolor=_TARGET, elinewidth=1, capsize=2)
    for y, (value, (_, high)) in enumerate(zip(values, bounds, strict=True)):
        axes.annotate(f"{value:.2f}", (max(value, high), y), (5, 0), textcoords="offset points", va="center")
    axes.axvline(1, color=_TARGET, linewidth=1, linestyle=(0, (4, 3)))
    axes.set(xlim=(0, 1.14 * max(high for _, high in bounds)), ylim=(-0.7, len(rows) - 0.3))
    _plan_ticks(axes, rows, report)
    axes.set_xlabel("speed-up (dashed line: the target alone)")
    axes.set_title("Measured speed-up")
    _keep(axes, [_columns(row, "plan", "family", "speedup", "speedup_interval") for row in reversed(rows)])
    return axes


@_styled
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
    axes = _axes(ax, 0.27 * len(rows) + 1.9)
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
        axes.barh(range(len(rows)), rest, left=left, color=_PALE, height=0.68, label="outside the passes")
    axes.set(xlim=(0, None), ylim=(-0.7, len(rows) - 0.3), xlabel="measured, ms per token")
    _plan_ticks(axes, rows, report)
    axes.set_title("Where the time goes", pad=6)
    if used:
        axes.legend(loc="upper right", bbox_to_anchor=(1, -0.55 / (0.27 * len(rows) + 0.6)), ncols=3, borderaxespad=0)
    _keep(axes, [{"plan": row["plan"], **row["seconds_by_model"], **_outside(row)} for row in reversed(rows)])
    return axes


@_styled
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
    rows = _error_rows(report)
    if not rows:
        raise InvalidArgumentError("expected at least one predicted plan in the report; got none")
    axes = _axes(ax, 0.42 * len(rows) + 1.5)
    axes.axvspan(-5, 5, color="#EFEFEF", zorder=0)
    axes.axvline(0, color=_GREY, linewidth=1)
    for place, (kind, _, errors) in enumerate(reversed(rows)):
        values = 100 * np.array(list(errors.values()))
        colour = _BLUE if kind == "same prompts" else _RED
        look: dict[str, Any] = {"markerfacecolor": colour if kind == "same prompts" else "none", "alpha": 0.75}
        spread = place + 0.24 * (np.arange(len(values)) % 3 - 1)  # points that coincide stay countable
        axes.plot(values, spread, marker="o", linestyle="none", color=colour, markersize=4.5, zorder=3, **look)
        axes.plot([np.median(values)] * 2, [place - 0.38, place + 0.38], color=_TARGET, linewidth=1.8, zorder=4)
        text = f"{np.median(np.abs(values)):.1f} %"
        axes.annotate(text, (1.02, place), xycoords=("axes fraction", "data"), va="center", annotation_clip=False)
    axes.set_yticks(range(len(rows)), [f"{name}\n{kind}" for kind, name, _ in reversed(rows)], fontsize=_SMALL)
    axes.set(ylim=(-0.6, len(rows) - 0.4), xlabel="predicted / measured - 1, per cent")
    axes.grid(visible=False, axis="y")
    axes.set_title("Errors by predictor")
    _keep(axes, [_error_entry(kind, name, plan, e) for kind, name, errors in rows for plan, e in errors.items()])
    return axes


@_styled
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
    rows = [row for row in report["plans"] if row.get("transfer_interval")][::-1]
    if not rows:
        raise InvalidArgumentError("expected at least one plan with a predicted interval in the report; got none")
    axes = _axes(ax, 0.27 * len(rows) + 1.6)
    for place, row in enumerate(rows):
        low, high = (1e3 * bound for bound in row["transfer_interval"])
        axes.barh(place, high - low, left=low, height=0.6, color="#CFE2F0")
        inside = _covered(row)
        look: dict[str, Any] = {"marker": "o" if inside else "X", "color": _TARGET if inside else _RED}
        bounds = np.array(row["interval"] or [row["measured_seconds_per_token"]] * 2) * 1e3
        axes.plot(bounds, [place] * 2, color=look["color"], linewidth=1)
        axes.plot([1e3 * row["measured_seconds_per_token"]], [place], linestyle="none", markersize=5.5, **look)
    _plan_ticks(axes, rows, report)
    axes.set(xlim=(0, None), ylim=(-0.7, len(rows) - 0.3), xlabel="ms per token")
    axes.set_title(f"Intervals: {sum(map(_covered, rows))} of {len(rows)} hold")
    columns = ("plan", "measured_seconds_per_token", "interval", "transfer_seconds_per_token", "transfer_interval")
    _keep(axes, [_columns(row, *columns) | {"covered": _covered(row)} for row in reversed(rows)])
    return axes


@_styled
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
    axes = _axes(ax, 3.6)
    curves = {"measured": found["measured"], **found["predicted"]}
    for number, (name, values) in enumerate(curves.items()):
        times = 1e3 * np.sort(np.asarray(values, dtype=float))
        steps = np.arange(1, len(times) + 1) / len(times)
        look: dict[str, Any] = {"color": (_TARGET, *_PALETTE)[number], "linestyle": ("-", "--", ":", "-.")[number % 4]}
        label = f"{name}: mean {times.mean():.3g}, {len(times)} outputs"
        axes.step(
            [times[0], *times], [0, *steps], where="post", linewidth=2.2 if number == 0 else 1.6, label=label, **look
        )
    axes.set(ylim=(0, 1.02), xlabel="ms per token of one output", ylabel="share of outputs at least so fast")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title(f"One output of {elide(found['plan'], 28)}")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), borderaxespad=0)
    _keep(axes, [{"source": name, "seconds_per_token": value} for name, values in curves.items() for value in values])
    return axes


@_styled
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
    rows = [row for row in (*report["plans"], *_baselines(report)) if row.get("memory_bytes")]
    if not rows:
        raise InvalidArgumentError("expected a report that says what memory its plans need; this one does not")
    axes = _axes(ax, 4.4, _WIDTH + 0.6)
    front = _frontier(rows)
    kinds = {"lossless plan": "o", "changes the output": "D", "baseline": "s"}
    for kind, marker in kinds.items():
        points = np.array([_memory_point(row) for row in rows if _memory_kind(row) == kind]).reshape(-1, 2)
        if len(points):
            face = _BLUE if kind == "lossless plan" else "none"
            colour = _BLUE if kind == "lossless plan" else _GREY
            look: dict[str, Any] = {"marker": marker, "color": colour, "markerfacecolor": face, "alpha": 0.8}
            axes.plot(*points.T, linestyle="none", markersize=5, label=kind, zorder=3, **look)
    best = [_memory_point(row) for row in front]
    axes.plot(*np.array(best).T, color=_RED, marker="o", drawstyle="steps-post", label="best for its memory", zorder=4)
    axes.set(xlabel="weights that the plan needs, MB", ylabel="measured, ms per token")
    axes.set(ylim=(0, None))
    axes.margins(x=0.08)
    axes.set_title("Latency against memory")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15), ncols=2, borderaxespad=0)
    _label_column(axes, best, [_short_label(row) for row in front], [_ink(row, report) for row in front])
    columns = ("plan", "family", "memory_bytes", "measured_seconds_per_token", "interval")
    _keep(axes, [_columns(row, *columns) | {"frontier": row in front} for row in rows])
    return axes


@_styled
def cost_curves(
    profile: Profile, *, relative: bool = False, context: float | None = None, ax: Axes | None = None
) -> Axes:
    """Return the cost of one pass against its new tokens, one line per model.

    Parameters
    ----------
    profile : Profile
    relative : bool
        In units of the model's own one-token pass instead of milliseconds.
    context : float, optional
        Tokens in the cache; by default the mean that the target's output visited.
    ax : Axes, optional
    """
    axes = _axes(ax, 4.2)
    colours, ends, rows = model_colours(profile.names, profile.target), [], []
    unit = "relative_cost" if relative else "milliseconds"
    longest = max((curve.tokens[-1] for curve in profile.costs.values() if not curve.constant), default=8)
    for number, name in enumerate(profile.names):
        counts, seconds = _cost_line(profile, name, longest, context)
        values = seconds / seconds[0] if relative and seconds[0] > 0 else 1e3 * seconds
        if relative and profile.cost(name).constant:
            continue
        marker = "" if profile.cost(name).constant else _MARKERS[number % len(_MARKERS)]
        axes.plot(counts, values, color=colours[name], marker=marker, markersize=3.5, clip_on=False)
        ends.append((float(counts[-1]), float(values[-1]), name))
        pairs = zip(counts.tolist(), values.tolist(), strict=True)
        rows += [{"model": name, "new_tokens": int(n), unit: value} for n, value in pairs]
    axes.set(xlim=(0, longest), ylim=(0, None), xlabel="new tokens in the pass")
    axes.set_ylabel("cost of a pass, its one-token pass = 1" if relative else "cost of a pass, ms")
    axes.set_title("Pass cost, relative" if relative else "Pass cost")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label_column(axes, [end[:2] for end in ends], [elide(end[2], 24) for end in ends], [colours[e[2]] for e in ends])
    _keep(axes, rows)
    return axes


@_styled
def acceptance_heatmap(profile: Profile, *, ax: Axes | None = None) -> Axes:
    """Return the acceptance rate of every drafter (rows) by every verifier (columns), per cent.

    Parameters
    ----------
    profile : Profile
    ax : Axes, optional
    """
    verifiers = [name for name in profile.names if name != LOOKUP]
    drafters = profile.drafters or (profile.target,)
    rates = np.array([[_rate(profile, drafter, verifier) for verifier in verifiers] for drafter in drafters])
    size = 0.42 * len(drafters)
    axes = _axes(ax, size + 1.9, min(_WIDTH, 3.0 + 0.62 * len(verifiers)))
    image = axes.imshow(np.ma.masked_invalid(rates), vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axes.set_facecolor("#F2F2F2")
    for (y, x), rate in np.ndenumerate(rates):
        dark = np.isfinite(rate) and rate > 0.6
        text = f"{100 * rate:.0f}" if np.isfinite(rate) else "-"
        axes.text(x, y, text, ha="center", va="center", color="white" if dark else _TARGET)
    axes.set_xticks(range(len(verifiers)), [elide(name, 20) for name in verifiers], rotation=40, ha="right")
    axes.set_yticks(range(len(drafters)), [elide(name, 20) for name in drafters])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set(xlabel="verifier", ylabel="drafter")
    axes.set_title("Acceptance rate, %")
    bar = axes.figure.colorbar(image, ax=axes, format=PercentFormatter(1, symbol=""), shrink=0.9, pad=0.03)
    bar.outline.set_visible(False)
    _keep(axes, [_heat_row(drafters[y], verifiers[x], rate) for (y, x), rate in np.ndenumerate(rates)])
    return axes


@_styled
def acceptance_by_position(
    profile: Profile, *, verifier: str | None = None, max_length: int = 12, ax: Axes | None = None
) -> Axes:
    """Return, per drafter, the chance that the first m drafted tokens are all accepted.

    Parameters
    ----------
    profile : Profile
    verifier : str, optional
        Whose review; by default the target's.
    max_length : int
        The longest draft shown.
    ax : Axes, optional
    """
    verifier = profile.target if verifier is None else verifier
    axes = _axes(ax, 4.2)
    colours, ends, rows = model_colours(profile.names, profile.target), [], []
    for number, drafter in enumerate(profile.names):
        curve = _survival(profile, drafter, verifier, max_length)
        if len(curve) < 2:
            continue
        axes.plot(curve, color=colours[drafter], marker=_MARKERS[number % len(_MARKERS)], markersize=3.5, clip_on=False)
        ends.append((len(curve) - 1.0, float(curve[-1]), drafter))
        rows += [{"drafter": drafter, "verifier": verifier, "tokens": m, "survival": s} for m, s in enumerate(curve)]
    axes.set(xlim=(0, max_length), ylim=(0, 1.02), xlabel="drafted tokens, m")
    axes.set_ylabel("chance that the first m are all accepted")
    axes.set_title(f"Acceptance by position, reviewed by {elide(verifier, 24)}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _label_column(axes, [end[:2] for end in ends], [elide(end[2], 24) for end in ends], [colours[e[2]] for e in ends])
    _keep(axes, rows)
    return axes


@_styled
def simulated_distribution(
    seconds_per_token: Sequence[float], *, closed_form: float, title: str = "", ax: Axes | None = None
) -> Axes:
    """Return the distribution of simulated outputs beside the closed form.

    Parameters
    ----------
    seconds_per_token : sequence of float
        One per simulated output.
    closed_form : float
        Seconds per token.
    title : str
    ax : Axes, optional
    """
    axes = _axes(ax, 3.4)
    values = 1e3 * np.asarray(seconds_per_token, dtype=float)
    axes.hist(
        values, bins=min(40, max(5, len(values) // 10)), color=_PALE, edgecolor="white", label="simulated outputs"
    )
    for value, colour, dashes, label in (
        (float(values.mean()), _TARGET, "-", "their mean"),
        (1e3 * closed_form, _RED, "--", "closed form"),
    ):
        axes.axvline(value, color=colour, linestyle=dashes, label=f"{label}, {value:.3g}")
    axes.set(xlabel="ms per token", ylabel="outputs", title=elide(title, 60))
    axes.legend()
    _keep(axes, [{"milliseconds_per_token": value} for value in values.tolist()])
    return axes


def report_figures(report: Report, profile: Profile | None = None) -> dict[str, Figure]:
    """Return every figure that the report (and the profile behind it) can fill, by name, in reading order."""
    models = () if profile is None else profile.names
    predicted = any(row["predicted"] or row["transfer"] for row in report["plans"])
    everything = (*report["plans"], *_baselines(report))
    wanted: dict[str, tuple[Callable[..., Axes], bool]] = {
        "simulated-against-real": (simulated_against_real, any(row["predicted"] for row in report["plans"])),
        "prediction-errors": (prediction_errors, predicted),
        "run-distribution": (run_distribution, bool((report.get("distribution") or {}).get("measured"))),
        "transfer-intervals": (transfer_intervals, any(row.get("transfer_interval") for row in report["plans"])),
        "speedups": (speedups, True),
        "latency-against-memory": (latency_against_memory, any(row.get("memory_bytes") for row in everything)),
    }
    figures = {name: _on_own_figure(draw, report) for name, (draw, shown) in wanted.items() if shown}
    figures["where-the-time-goes"] = _on_own_figure(where_the_time_goes, report, models=models)
    return figures | ({} if profile is None else profile_figures(profile))


def profile_figures(profile: Profile) -> dict[str, Figure]:
    """Return every figure of a profile, by name, in reading order."""
    costs = {
        "cost-curves": _on_own_figure(cost_curves, profile),
        "cost-curves-relative": _on_own_figure(cost_curves, profile, relative=True),
    }
    if not profile.drafters:
        return costs
    return costs | {
        "acceptance-heatmap": _on_own_figure(acceptance_heatmap, profile),
        "acceptance-by-position": _on_own_figure(acceptance_by_position, profile),
    }


def save_figure(figure: Figure, stem: str | Path) -> tuple[Path, ...]:
    """Write `figure` as PNG and SVG and its data as CSV; return the paths.

    Parameters
    ----------
    figure : Figure
    stem : path
        Without a suffix, as in ``report/speedups``; more than one panel with data gives
        ``report/speedups-2.csv`` and so on.
    """
    stem = Path(stem)
    images = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "svg")]
    for path in images:
        _write(path, render(figure, path.suffix[1:]))
    tables = [table for axes in figure.axes if (table := getattr(axes, _TABLE, None))]
    written = []
    for number, table in enumerate(tables, start=1):
        path = stem.with_name(f"{stem.name}.csv" if number == 1 else f"{stem.name}-{number}.csv")
        _write(path, _as_csv(table))
        written.append(path)
    return (*images, *written)


def render(figure: Figure, suffix: str) -> bytes:
    """Return the figure as the bytes of a "png" or "svg" file, the same for the same figure."""
    stream = io.BytesIO()
    metadata = {"Date": None} if suffix == "svg" else {"Software": None}
    with style():
        figure.savefig(stream, format=suffix, dpi=200, metadata=metadata)
    return stream.getvalue()


def model_colours(names: Sequence[str], target: str) -> dict[str, str]:
    """Return one colour per model, the target black."""
    others = [name for name in names if name != target]
    return {name: _PALETTE[number % len(_PALETTE)] for number, name in enumerate(others)} | {target: _TARGET}


def _axes(ax: Axes | None, height: float, width: float = _WIDTH) -> Axes:
    """Return `ax`, or the axes of a new figure of that size in inches."""
    if ax is not None:
        return ax
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def _on_own_figure(draw: Callable[..., Axes], *args: Any, **options: Any) -> Figure:  # noqa: ANN401 (passed on)
    """Return the figure that `draw` makes, out of pyplot's keeping, so that nothing piles up there."""
    axes = draw(*args, **options)
    figure = axes.get_figure(root=True)
    assert figure is not None  # noqa: S101 (axes just drawn have a figure)
    plt.close(figure)
    return figure


def _write(path: Path, content: bytes) -> None:
    atomic_write(path, lambda stream: stream.write(content))


def _keep(axes: Axes, table: Sequence[Row]) -> None:
    setattr(axes, _TABLE, table)


def _as_csv(table: Sequence[Row]) -> bytes:
    columns = dict.fromkeys(key for row in table for key in row)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return stream.getvalue().encode()


def _label_column(
    axes: Axes, points: Sequence[tuple[float, float]], texts: Sequence[str], colours: Sequence[str]
) -> None:
    """Write one label per point in a column right of the axes, apart from each other, tied to it by a thin line."""
    if not points:
        return
    to_fraction = axes.transData + axes.transAxes.inverted()
    heights = to_fraction.transform(np.asarray(points, dtype=float))[:, 1]
    order = np.argsort(heights, kind="stable")
    tall = axes.get_window_extent().height / axes.figure.dpi * 72
    gap = min(1.35 * _SMALL / tall, 1.06 / len(points))
    steps = gap * np.arange(len(points))
    # Least movement that keeps the order and the gap: an isotonic fit of the heights less their steps.
    places = isotonic_regression(heights[order] - steps).x
    places = np.clip(places, -0.03, max(1.03 - steps[-1], -0.03)) + steps
    for place, index in zip(places, order, strict=True):
        axes.annotate(
            texts[index],
            points[index],
            (1.05, place),
            textcoords="axes fraction",
            va="center",
            color=colours[index],
            fontsize=min(_SMALL, gap * tall / 1.2),
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": "#B5B5B5",
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


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


def _predictor_points(axes: Axes, rows: Sequence[Row], name: str, number: int) -> None:
    """Draw one predictor: filled with error bars if it is the main one (number 0), else hollow."""
    known = [row for row in rows if name in row["predicted"]]
    x = np.array([1e3 * row["measured_seconds_per_token"] for row in known])
    y = np.array([1e3 * row["predicted"][name] for row in known])
    colour = _PALETTE[number % len(_PALETTE)]
    look: dict[str, Any] = {"marker": _MARKERS[number % len(_MARKERS)], "linestyle": "none", "color": colour}
    if number:
        axes.plot(x, y, markerfacecolor="none", markersize=5, markeredgewidth=1, label=name, zorder=3, **look)
        return
    bounds = np.array([row["interval"] or [row["measured_seconds_per_token"]] * 2 for row in known]) * 1e3
    error = np.abs(np.stack([x - bounds[:, 0], bounds[:, 1] - x]))
    axes.errorbar(x, y, xerr=error, markersize=5.5, elinewidth=0.9, alpha=0.9, label=name, zorder=4, **look)


def _ink(row: Row, report: Report) -> str:
    return _RED if row["plan"] == report["summary"]["chosen"] else _TARGET


def _bar_colour(row: Row, report: Report) -> str:
    if row["plan"] == report["summary"]["chosen"]:
        return _RED
    if row["family"] == "baseline":
        return "white"
    return _GREY if row["plan"] == report["summary"]["autoregression"] else "#8DBBDD"


def _baselines(report: Report) -> Sequence[Row]:
    """Return the rows of the baselines; reports of older versions have none."""
    rows: Sequence[Row] = report.get("baselines", ())
    return rows


def _short_label(row: Row) -> str:
    """Return the plan, elided; of a baseline only what follows the library's name."""
    text = str(row["plan"])
    return elide(text.removeprefix("transformers ") if row["family"] == "baseline" else text, 34)


def _plan_ticks(axes: Axes, rows: Sequence[Row], report: Report) -> None:
    """Name the bars by their plans; the chosen one is bold and says so."""
    chosen = report["summary"]["chosen"]
    texts = [_short_label(row) for row in rows]
    axes.set_yticks(range(len(rows)), texts, fontsize=_SMALL)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        if row["plan"] == chosen:
            label.set(color=_RED, fontweight="bold", text=_short_label(row))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


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


def _flat(row: Row) -> dict[str, Any]:
    """Return the plan's row of the CSV, one column per predictor."""
    kept = _columns(row, "plan", "family", "measured_seconds_per_token", "interval")
    return kept | {f"predicted ({name})": value for name, value in row["predicted"].items()}


def _columns(row: Row, *names: str) -> dict[str, Any]:
    """Return these fields of a row, intervals as two columns."""
    flat: dict[str, Any] = {}
    for name in names:
        if name.endswith("interval"):
            flat[f"{name}_low"], flat[f"{name}_high"] = row[name] or ("", "")
        else:
            flat[name] = row[name]
    return flat


def _outside(row: Row) -> dict[str, float]:
    return {"outside the passes": row["measured_seconds_per_token"] - sum(row["seconds_by_model"].values())}


def _cost_line(profile: Profile, name: str, longest: int, context: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the measured token counts of a model and the seconds there; a constant spans the whole width."""
    curve = profile.cost(name)
    counts = np.array([1, longest] if curve.constant else curve.tokens, dtype=float)
    place = profile.context if context is None else context
    if context is None and place is not None and not curve.constant:
        place = float(np.clip(place, curve.contexts[0], curve.contexts[-1]))
    return counts, np.asarray(curve.at(counts, place))


def _survival(profile: Profile, drafter: str, verifier: str, max_length: int) -> list[float]:
    """Return S(0) ... S(max_length or what was measured); empty if the pair was not."""
    if drafter == verifier:
        return []
    try:
        law = profile.acceptance(drafter, verifier)
    except PredictionError:
        return []
    limit = max_length if law.max_length is None else min(max_length, law.max_length)
    return [float(value) for value in law.curve(limit)]


def _rate(profile: Profile, drafter: str, verifier: str) -> float:
    """Return the pair's rate, nan if it was not measured."""
    if drafter == verifier:
        return float("nan")
    try:
        return profile.acceptance(drafter, verifier).rate
    except PredictionError:
        return float("nan")


def _heat_row(drafter: str, verifier: str, rate: float) -> dict[str, Any]:
    return {"drafter": drafter, "verifier": verifier, "rate": float(rate) if np.isfinite(rate) else ""}


@_styled
def what_if_curve(answer: WhatIf, *, ax: Axes | None = None) -> Axes:
    """Return the acceptance from which on a drafter of each cost ratio improves the best plan.

    Drafters above the line pay, those below do not; the cost ratios asked about are marked.

    Parameters
    ----------
    answer : WhatIf
        Of `hsdopt.solvers.what_if.what_if`.
    ax : Axes, optional
    """
    axes = _axes(ax, 3.6)
    points = sorted((*answer.curve, *answer.points), key=lambda point: point.cost_ratio)
    needed = [(point.cost_ratio, point.acceptance) for point in points if point.acceptance is not None]
    ratios, rates = [ratio for ratio, _ in needed], [rate for _, rate in needed]
    axes.plot(ratios, rates, color=_BLUE, label="break-even")
    axes.fill_between(ratios, rates, 1.0, color=_BLUE, alpha=0.1, linewidth=0, label="faster than the best plan")
    asked = [(point.cost_ratio, point.acceptance) for point in answer.points if point.acceptance is not None]
    for ratio, rate in asked:
        axes.plot([ratio], [rate], color=_RED, marker="o", linestyle="none")
        axes.annotate(f"{rate:.2f}", (ratio, rate), textcoords="offset points", xytext=(6, -12), color=_RED)
    axes.set(xlabel="cost of a pass over the target's", ylabel="acceptance rate", xlim=(0, None), ylim=(0, 1))
    axes.set_title(f"What a drafter has to be like to beat {answer.speedup:.2f}x")
    axes.legend(loc="lower right")
    _keep(
        axes, [{"cost_ratio": p.cost_ratio, "acceptance": "" if p.acceptance is None else p.acceptance} for p in points]
    )
    return axes


@_styled
def quality_frontier(report: Report, *, ax: Axes | None = None) -> Axes:
    """Return quality against time per token: the settings of Big Little Decoder beside lossless plans.

    A line per small model joins the settings that none of its own beats in both; they are named by their
    thresholds, fallback and rollback. Bars are the intervals of the time.

    Parameters
    ----------
    report : mapping
        As in quality.json.
    ax : Axes, optional
    """
    rows = [row for row in report["plans"] if row["quality"] is not None]
    if not rows:
        raise InvalidArgumentError("expected at least one plan whose quality is known; got none")
    axes = _axes(ax, 4.6, _WIDTH + 0.4)
    smalls = sorted({row["small"] for row in rows if row["small"]})
    colours = model_colours(smalls, report["target"])
    others = [row for row in rows if not row["small"] and row["family"] != "autoregression"]
    _time_bars(axes, others, color=_GREY, marker="D", markerfacecolor="white", label="lossless plans")
    own = [row for row in rows if row["family"] == "autoregression"]
    _time_bars(axes, own, color=_TARGET, marker="*", markersize=11, label="the target alone")
    for number, small in enumerate(smalls):
        points = [row for row in rows if row["small"] == small]
        best = sorted((row for row in points if row["undominated"]), key=lambda row: row["time"])
        axes.plot([row["time"] for row in best], [row["quality"] for row in best], color=colours[small], zorder=2)
        _time_bars(axes, points, color=colours[small], marker=_MARKERS[number % 3], label=f"bild, {elide(small, 24)}")
    whose = "the target's output" if report["against"] == "own" else "the references"
    measure = {"bleu": "BLEU", "rouge-l": "ROUGE-L"}[report["measure"]]
    axes.set(xlabel="time per token (the target alone = 1)", ylabel=f"{measure} against {whose}")
    axes.set_title("Quality against latency")
    axes.margins(0.08, 0.1)
    axes.legend(loc="upper right", bbox_to_anchor=(1, -0.13), ncols=2, borderaxespad=0)
    named = [row for row in rows if row["small"] and row["undominated"]]
    texts = [f"{row['fallback']:g}, {float(row['rollback']):g}" for row in named]
    places = [(row["time"], row["quality"]) for row in named]
    _label_points(axes, places, texts, [colours[row["small"]] for row in named], avoid=rows)
    names = ("plan", "family", "small", "fallback", "rollback", "time", "time_interval", "quality", "undominated")
    _keep(axes, [_columns(row, *names) for row in rows])
    return axes


def _label_points(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    colours: Sequence[str],
    *,
    avoid: Sequence[Row],
) -> None:
    """Name points beside them, below on the right or else above on the left; one with room on neither side has none."""
    figure = axes.get_figure(root=True)
    assert figure is not None  # noqa: S101 (axes just drawn have a figure)
    figure.draw_without_rendering()  # settles the layout, from which the room is read
    radius = 3 * figure.dpi / 72
    centres = axes.transData.transform(np.array([(row["time"], row["quality"]) for row in avoid], dtype=float))
    taken = [Bbox.from_extents(x - radius, y - radius, x + radius, y + radius) for x, y in centres]
    for point, text, colour in zip(points, texts, colours, strict=True):
        for offset, sides in (((5, -4), ("left", "top")), ((-5, 4), ("right", "bottom"))):
            label = axes.annotate(
                text, point, offset, textcoords="offset points", ha=sides[0], va=sides[1], color=colour, fontsize=_SMALL
            )
            label.set_path_effects([withStroke(linewidth=2, foreground="white")])
            box = label.get_window_extent()
            if axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and not any(map(box.overlaps, taken)):
                taken.append(box)
                break
            label.remove()


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


@_styled
def learning_curve(rows: Sequence[Row], *, ax: Axes | None = None) -> Axes:
    """Return held-out acceptance over the target tokens trained on, and the training loss on a second axis.

    Parameters
    ----------
    rows : sequence of mapping
        The log of an alignment, as in log.csv; the first row is the drafter before training.
    ax : Axes, optional

    Raises
    ------
    InvalidArgumentError
        If there are no rows.
    """
    if not rows:
        raise InvalidArgumentError("expected at least one row of an alignment's log; got none")
    axes = _axes(ax, 3.6)
    tokens = [float(row["tokens"]) for row in rows]
    rates = [float(row["acceptance"]) for row in rows]
    axes.plot(tokens, rates, color=_BLUE, marker="o", markersize=4, label="held-out acceptance")
    axes.axhline(rates[0], color=_BLUE, linewidth=1, linestyle=(0, (4, 3)), label="before")
    axes.set(xlabel="target tokens trained on", ylabel="acceptance", ylim=(0, 1), xlim=(0, None))
    losses = [(at, float(row["loss"])) for at, row in zip(tokens, rows, strict=True) if row["loss"] not in (None, "")]
    if losses:
        right = axes.twinx()
        right.plot(*zip(*losses, strict=True), color=_RED, marker="s", markersize=3, linewidth=1, label="training loss")
        right.set_ylabel("loss, nats per token", color=_RED)
        right.grid(visible=False)
        axes.plot([], [], color=_RED, marker="s", markersize=3, linewidth=1, label="training loss")
    axes.set_title("Alignment")
    axes.legend(loc="best")
    _keep(axes, [dict(row) for row in rows])
    return axes
