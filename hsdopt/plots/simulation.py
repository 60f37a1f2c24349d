"""What simulated outputs take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from hsdopt.plots.data import keep
from hsdopt.plots.look import PALE, RED, TARGET, axes_for, elide, styled

__all__ = ["simulated_distribution"]


@styled
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
    axes = axes_for(ax, 3.4)
    values = 1e3 * np.asarray(seconds_per_token, dtype=float)
    axes.hist(values, bins=min(40, max(5, len(values) // 10)), color=PALE, edgecolor="white", label="simulated outputs")
    for value, colour, dashes, label in (
        (float(values.mean()), TARGET, "-", "their mean"),
        (1e3 * closed_form, RED, "--", "closed form"),
    ):
        axes.axvline(value, color=colour, linestyle=dashes, label=f"{label}, {value:.3g}")
    axes.set(xlabel="ms per token", ylabel="outputs", title=elide(title, 60))
    axes.legend()
    keep(axes, [{"milliseconds_per_token": value} for value in values.tolist()])
    return axes
