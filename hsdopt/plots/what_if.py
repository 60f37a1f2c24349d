"""What a drafter would have to be like."""

from __future__ import annotations

from matplotlib.axes import Axes

from hsdopt.plots.data import keep
from hsdopt.plots.look import BLUE, RED, axes_for, styled
from hsdopt.solvers.what_if import WhatIf

__all__ = ["what_if_curve"]


@styled
def what_if_curve(answer: WhatIf, *, ax: Axes | None = None) -> Axes:
    """Return the acceptance from which on a drafter of each cost ratio improves the best plan.

    Drafters above the line pay, those below do not; the cost ratios asked about are marked.

    Parameters
    ----------
    answer : WhatIf
        Of `hsdopt.solvers.what_if.what_if`.
    ax : Axes, optional
    """
    axes = axes_for(ax, 3.6)
    points = sorted((*answer.curve, *answer.points), key=lambda point: point.cost_ratio)
    needed = [(point.cost_ratio, point.acceptance) for point in points if point.acceptance is not None]
    ratios, rates = [ratio for ratio, _ in needed], [rate for _, rate in needed]
    axes.plot(ratios, rates, color=BLUE, label="break-even")
    axes.fill_between(ratios, rates, 1.0, color=BLUE, alpha=0.1, linewidth=0, label="faster than the best plan")
    asked = [(point.cost_ratio, point.acceptance) for point in answer.points if point.acceptance is not None]
    for ratio, rate in asked:
        axes.plot([ratio], [rate], color=RED, marker="o", linestyle="none")
        axes.annotate(f"{rate:.2f}", (ratio, rate), textcoords="offset points", xytext=(6, -12), color=RED)
    axes.set(xlabel="cost of a pass over the target's", ylabel="acceptance rate", xlim=(0, None), ylim=(0, 1))
    axes.set_title(f"What a drafter has to be like to beat {answer.speedup:.2f}x")
    axes.legend(loc="lower right")
    keep(
        axes, [{"cost_ratio": p.cost_ratio, "acceptance": "" if p.acceptance is None else p.acceptance} for p in points]
    )
    return axes
