"""Figures as files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hsdopt.files import write_document
from hsdopt.plots.data import Row, kept
from hsdopt.plots.look import style

__all__ = ["on_own_figure", "render", "save_figure"]


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
    tables = [table for axes in figure.axes if (table := kept(axes))]
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


def on_own_figure(draw: Callable[..., Axes], *args: Any, **options: Any) -> Figure:  # noqa: ANN401 (passed on)
    """Return the figure that `draw` makes, out of pyplot's keeping, so that nothing piles up there."""
    axes = draw(*args, **options)
    figure = axes.get_figure(root=True)
    assert figure is not None  # noqa: S101 (axes just drawn have a figure)
    plt.close(figure)
    return figure


def _write(path: Path, content: bytes) -> None:
    write_document(path, content)


def _as_csv(table: Sequence[Row]) -> bytes:
    columns = dict.fromkeys(key for row in table for key in row)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return stream.getvalue().encode()
