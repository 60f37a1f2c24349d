"""How drafters learn."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from hsdopt.plots.data import Row, keep, required
from hsdopt.plots.look import BLUE, RED, axes_for, styled

__all__ = ["learning_curve"]


@styled
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
    required(rows, "row of an alignment's log")
    axes = axes_for(ax, 3.6)
    tokens = [float(row["tokens"]) for row in rows]
    rates = [float(row["acceptance"]) for row in rows]
    axes.plot(tokens, rates, color=BLUE, marker="o", markersize=4, label="held-out acceptance")
    axes.axhline(rates[0], color=BLUE, linewidth=1, linestyle=(0, (4, 3)), label="before")
    axes.set(xlabel="target tokens trained on", ylabel="acceptance", ylim=(0, 1), xlim=(0, None))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    losses = [(at, float(row["loss"])) for at, row in zip(tokens, rows, strict=True) if row["loss"] not in (None, "")]
    if losses:
        right = axes.twinx()
        right.plot(*zip(*losses, strict=True), color=RED, marker="s", markersize=3, linewidth=1, label="training loss")
        right.set_ylabel("loss, nats per token", color=RED)
        right.grid(visible=False)
        axes.plot([], [], color=RED, marker="s", markersize=3, linewidth=1, label="training loss")
    axes.set_title("Alignment")
    axes.legend(loc="best")
    keep(axes, [dict(row) for row in rows])
    return axes
