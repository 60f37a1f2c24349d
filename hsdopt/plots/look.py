"""How the figures look: colours, sizes, and the style that holds only while one is drawn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

__all__ = [
    "BLUE",
    "GREY",
    "MARKERS",
    "PALE",
    "PALETTE",
    "RED",
    "SMALL",
    "TARGET",
    "WIDTH",
    "axes_for",
    "elide",
    "model_colours",
    "style",
    "styled",
]

P = ParamSpec("P")

BLUE, RED, GREY, PALE = "#0072B2", "#D55E00", "#5F5F5F", "#DADADA"
PALETTE = (BLUE, RED, "#00865F", "#A64D83", "#B07900", "#3B9DD8", "#6B4F1D", "#6A51A3")
TARGET = "#222222"
MARKERS = "osD^vPX*"
_TEXT, SMALL = 9.5, 8.5
"""Points: of text, and of plan names."""
_STYLE: dict[Any, Any] = {
    "font.size": _TEXT,
    "text.parse_math": False,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E8E8E8",
    "grid.linewidth": 0.7,
    "xtick.color": GREY,
    "ytick.color": GREY,
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
WIDTH = 5.2
"""Inches: about the widest figure whose text a phone still shows legibly."""


@contextmanager
def style() -> Iterator[None]:
    """Apply the look of hsdopt's figures inside a with block, and only there."""
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        # names in scripts that no font here has are drawn as boxes; the CSV beside the figure spells them
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def styled(draw: Callable[P, Axes]) -> Callable[P, Axes]:
    """Let `draw` run under `style`."""

    @wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Axes:
        with style():
            return draw(*args, **kwargs)

    return wrapped


def axes_for(ax: Axes | None, height: float, width: float = WIDTH) -> Axes:
    """Return `ax`, or the axes of a new figure of that size in inches."""
    if ax is not None:
        return ax
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def model_colours(names: Sequence[str], target: str) -> dict[str, str]:
    """Return one colour per model, the target black."""
    others = [name for name in names if name != target]
    return {name: PALETTE[number % len(PALETTE)] for number, name in enumerate(others)} | {target: TARGET}


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
