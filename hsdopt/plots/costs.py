"""What a pass costs."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from hsdopt.plots.data import keep
from hsdopt.plots.labels import label_ends
from hsdopt.plots.look import MARKERS, axes_for, model_colours, styled
from hsdopt.profiles import Profile

__all__ = ["cost_curves"]


@styled
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
    axes = axes_for(ax, 4.2)
    colours, ends, rows = model_colours(profile.names, profile.target), [], []
    unit = "relative_cost" if relative else "milliseconds"
    longest = max((curve.tokens[-1] for curve in profile.costs.values() if not curve.constant), default=8)
    for number, name in enumerate(profile.names):
        counts, seconds = _cost_line(profile, name, longest, context)
        values = seconds / seconds[0] if relative and seconds[0] > 0 else 1e3 * seconds
        if relative and profile.cost(name).constant:
            continue
        marker = "" if profile.cost(name).constant else MARKERS[number % len(MARKERS)]
        axes.plot(counts, values, color=colours[name], marker=marker, markersize=3.5, clip_on=False)
        ends.append((float(counts[-1]), float(values[-1]), name))
        pairs = zip(counts.tolist(), values.tolist(), strict=True)
        rows += [{"model": name, "new_tokens": int(n), unit: value} for n, value in pairs]
    axes.set(xlim=(0, longest), ylim=(0, None), xlabel="new tokens in the pass")
    axes.set_ylabel("cost of a pass, its one-token pass = 1" if relative else "cost of a pass, ms")
    axes.set_title("Pass cost, relative" if relative else "Pass cost")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label_ends(axes, ends, colours)
    keep(axes, rows)
    return axes


def _cost_line(profile: Profile, name: str, longest: int, context: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the measured token counts of a model and the seconds there; a constant spans the whole width."""
    curve = profile.cost(name)
    counts = np.array([1, longest] if curve.constant else curve.tokens, dtype=float)
    place = profile.context if context is None else context
    if context is None and place is not None and not curve.constant:
        place = float(np.clip(place, curve.contexts[0], curve.contexts[-1]))
    return counts, np.asarray(curve.at(counts, place))
