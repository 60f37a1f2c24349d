"""What verifiers accept of what drafters propose."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hsdopt.errors import PredictionError
from hsdopt.plan import LOOKUP
from hsdopt.plots.data import keep
from hsdopt.plots.labels import label_ends
from hsdopt.plots.look import MARKERS, TARGET, WIDTH, axes_for, elide, model_colours, styled
from hsdopt.profiles import Profile

__all__ = ["acceptance_by_position", "acceptance_heatmap"]


@styled
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
    axes = axes_for(ax, size + 1.9, min(WIDTH, 3.0 + 0.62 * len(verifiers)))
    image = axes.imshow(np.ma.masked_invalid(rates), vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axes.set_facecolor("#F2F2F2")
    for (y, x), rate in np.ndenumerate(rates):
        dark = np.isfinite(rate) and rate > 0.6
        text = f"{100 * rate:.0f}" if np.isfinite(rate) else "-"
        axes.text(x, y, text, ha="center", va="center", color="white" if dark else TARGET)
    axes.set_xticks(range(len(verifiers)), [elide(name, 20) for name in verifiers], rotation=40, ha="right")
    axes.set_yticks(range(len(drafters)), [elide(name, 20) for name in drafters])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set(xlabel="verifier", ylabel="drafter")
    axes.set_title("Acceptance rate, %")
    bar = axes.figure.colorbar(image, ax=axes, format=PercentFormatter(1, symbol=""), shrink=0.9, pad=0.03)
    bar.outline.set_visible(False)
    keep(axes, [_heat_row(drafters[y], verifiers[x], rate) for (y, x), rate in np.ndenumerate(rates)])
    return axes


@styled
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
    axes = axes_for(ax, 4.2)
    colours, ends, rows = model_colours(profile.names, profile.target), [], []
    for number, drafter in enumerate(profile.names):
        curve = _survival(profile, drafter, verifier, max_length)
        if len(curve) < 2:
            continue
        axes.plot(curve, color=colours[drafter], marker=MARKERS[number % len(MARKERS)], markersize=3.5, clip_on=False)
        ends.append((len(curve) - 1.0, float(curve[-1]), drafter))
        rows += [{"drafter": drafter, "verifier": verifier, "tokens": m, "survival": s} for m, s in enumerate(curve)]
    axes.set(xlim=(0, max_length), ylim=(0, 1.02), xlabel="drafted tokens, m")
    axes.set_ylabel("chance that the first m are all accepted")
    axes.set_title(f"Acceptance by position, reviewed by {elide(verifier, 24)}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    label_ends(axes, ends, colours)
    keep(axes, rows)
    return axes


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
