"""Names beside points and bars, apart from each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox
from scipy.optimize import isotonic_regression

from hsdopt.plots.data import Report, Row
from hsdopt.plots.look import RED, SMALL, TARGET, elide

__all__ = ["ink", "label_column", "label_ends", "label_points", "plan_ticks", "short_label"]


def label_column(
    axes: Axes, points: Sequence[tuple[float, float]], texts: Sequence[str], colours: Sequence[str]
) -> None:
    """Write one label per point in a column right of the axes, apart from each other, tied to it by a thin line."""
    if not points:
        return
    to_fraction = axes.transData + axes.transAxes.inverted()
    heights = to_fraction.transform(np.asarray(points, dtype=float))[:, 1]
    order = np.argsort(heights, kind="stable")
    tall = axes.get_window_extent().height / axes.figure.dpi * 72
    gap = min(1.35 * SMALL / tall, 1.06 / len(points))
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
            fontsize=min(SMALL, gap * tall / 1.2),
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


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str]], colours: Mapping[str, str]) -> None:
    """Name the lines that end at (x, y, model) in a column right of the axes."""
    points, names = [(x, y) for x, y, _ in ends], [name for *_, name in ends]
    label_column(axes, points, [elide(name, 24) for name in names], [colours[name] for name in names])


def label_points(
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
                text, point, offset, textcoords="offset points", ha=sides[0], va=sides[1], color=colour, fontsize=SMALL
            )
            label.set_path_effects([withStroke(linewidth=2, foreground="white")])
            box = label.get_window_extent()
            if axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and not any(map(box.overlaps, taken)):
                taken.append(box)
                break
            label.remove()


def plan_ticks(axes: Axes, rows: Sequence[Row], report: Report) -> None:
    """Name the bars by their plans; the chosen one is bold and says so."""
    chosen = report["summary"]["chosen"]
    texts = [short_label(row) for row in rows]
    axes.set_yticks(range(len(rows)), texts, fontsize=SMALL)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        if row["plan"] == chosen:
            label.set(color=RED, fontweight="bold", text=short_label(row))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def short_label(row: Row) -> str:
    """Return the plan, elided; of a baseline only what follows the library's name."""
    text = str(row["plan"])
    return elide(text.removeprefix("transformers ") if row["family"] == "baseline" else text, 34)


def ink(row: Row, report: Report) -> str:
    """Return the colour of a plan's name: the chosen one stands out."""
    return RED if row["plan"] == report["summary"]["chosen"] else TARGET
