"""What a drafter that one does not have would have to be like, and which measurement matters most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hsdopt.acceptance import Acceptance
from hsdopt.checks import FloatArray, check_length
from hsdopt.costs import CostCurve
from hsdopt.errors import InvalidArgumentError, PredictionError
from hsdopt.latency.expected import expected_latency
from hsdopt.plan import Level, Plan
from hsdopt.profiles import Profile
from hsdopt.solvers.arrays import curve_table, profile_arrays
from hsdopt.solvers.rows import Requests, best_latency, best_requests

__all__ = ["Sensitivity", "WhatIf", "WhatIfPoint", "sensitivities", "what_if"]

_NAME = "hypothetical"
_GRID = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_STEP = 1e-4  # relative change behind a derivative
_BETTER = 1e-9  # relative gain that counts as an improvement
_HALVINGS = 24


@dataclass(frozen=True, slots=True)
class WhatIfPoint:
    """One hypothetical drafter.

    Attributes
    ----------
    cost_ratio : float
        Seconds of its pass over those of a one-token pass of the target.
    acceptance : float or None
        The acceptance rate from which on it makes the best plan faster; None if even 1 does not.
    speedups : tuple of float
        Of the best plan that may use it, over autoregression, at each of `WhatIf.acceptances`.
    """

    cost_ratio: float
    acceptance: float | None
    speedups: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What hypothetical drafters would change.

    Attributes
    ----------
    speedup : float
        Of the best plan without one, under the same search.
    acceptances : tuple of float
        Acceptance rates at which speed-ups are given.
    points : tuple of WhatIfPoint
        The cost ratios asked for.
    curve : tuple of WhatIfPoint
        A grid of cost ratios, ascending; without those asked for.
    """

    speedup: float
    acceptances: tuple[float, ...]
    points: tuple[WhatIfPoint, ...]
    curve: tuple[WhatIfPoint, ...]


def what_if(
    profile: Profile,
    *,
    cost_ratio: float | Sequence[float] | CostCurve | Callable[[int], float],
    max_draft_length: int = 24,
    acceptances: Sequence[float] = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95),
    context: float | None = None,
) -> WhatIf:
    """Return what acceptance a drafter of a given cost would need, and what it would bring.

    The hypothetical drafter accepts every token with the same chance, whatever came before. It drafts for the
    target alone, in a row with at most one of the profile's own drafters (each with its best stack below), whose
    acceptance stays what it is.

    Parameters
    ----------
    profile : Profile
    cost_ratio : float, sequence of float, CostCurve or callable
        Seconds of a pass over those of a one-token pass of the target; or, as a curve or a function of the new
        tokens, the seconds themselves.
    max_draft_length : int
        Longest draft of any level.
    acceptances : sequence of float
        Rates at which to give the speed-up.
    context : float, optional
        Context length at which costs are read.

    Returns
    -------
    WhatIf

    Raises
    ------
    InvalidArgumentError
        If a cost ratio is negative, or a rate not between 0 and 1.

    Examples
    --------
    >>> profile = Profile.from_rates("big", {"big": 1.0, "small": 0.2}, {("small", "big"): 0.7})
    >>> answer = what_if(profile, cost_ratio=0.05)
    >>> round(answer.speedup, 3), round(answer.points[0].acceptance, 3)
    (1.583, 0.215)
    """
    longest = check_length(max_draft_length, "max_draft_length", minimum=1)
    rates = tuple(float(rate) for rate in acceptances)
    if not all(0 <= rate <= 1 for rate in rates):
        raise InvalidArgumentError(f"expected acceptances between 0 and 1; got {', '.join(map(str, rates))}")
    ask = _Question(profile, longest, context, rates)
    points = tuple(ask.point(ratio, curve) for ratio, curve in _asked(cost_ratio, ask.target_pass))
    grid = tuple(ask.point(ratio, CostCurve.fixed(ratio * ask.target_pass)) for ratio in _GRID)
    return WhatIf(ask.target_pass / ask.best, rates, points, grid)


def _asked(
    cost_ratio: float | Sequence[float] | CostCurve | Callable[[int], float], target_pass: float
) -> Iterator[tuple[float, CostCurve]]:
    """Yield (ratio, curve) of every drafter asked about."""
    if isinstance(cost_ratio, CostCurve):
        yield cost_ratio(1) / target_pass, cost_ratio
    elif callable(cost_ratio):
        yield cost_ratio(1) / target_pass, CostCurve.from_function(cost_ratio, 257)
    else:
        for ratio in [cost_ratio] if isinstance(cost_ratio, int | float) else cost_ratio:
            if not (np.isfinite(ratio) and ratio >= 0):
                raise InvalidArgumentError(f"expected cost ratios that are finite numbers of at least 0; got {ratio}")
            yield float(ratio), CostCurve.fixed(ratio * target_pass)


class _Question:
    """A profile, ready to take one more drafter."""

    def __init__(self, profile: Profile, longest: int, context: float | None, rates: tuple[float, ...]) -> None:
        self._context = profile.context if context is None else context
        self._rates = rates
        self._reach = profile.cost(profile.target).max_tokens - 1
        self._arrays = profile_arrays(profile, profile.drafters, longest, context=context)
        self._requests = best_requests(self._arrays)
        self.best = best_latency(self._arrays, self._requests)
        self.target_pass = profile.cost(profile.target)(1, self._context)
        if self.target_pass <= 0:
            raise PredictionError("expected a target whose passes cost something; got 0 seconds")

    def point(self, ratio: float, curve: CostCurve) -> WhatIfPoint:
        """Return what a drafter of this cost would change."""
        size = self._arrays.passes.shape[1]
        passes = curve_table(curve, size, self._context)
        own = passes[:1] * np.arange(1.0, self._arrays.longest + 1)
        requests = Requests(
            np.append(self._requests.cost, own[np.newaxis], axis=0),
            np.append(self._requests.first, np.zeros((1, len(own)), dtype=np.int64), axis=0),
            (*self._requests.levels, (Level(_NAME),) * len(own)),
        )
        latency = partial(self._latency, passes, requests)
        speedups = tuple(self.target_pass / latency(rate) for rate in self._rates)
        bar = self.best * (1 - _BETTER)
        if latency(1.0) >= bar:
            return WhatIfPoint(ratio, None, speedups)
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if latency(middle) < bar else (middle, high)
        return WhatIfPoint(ratio, high, speedups)

    def _latency(self, passes: FloatArray, requests: Requests, rate: float) -> float:
        arrays = self._arrays.with_drafter(_NAME, passes, rate, reach=self._reach)
        return min(self.best, best_latency(arrays, requests, using=len(arrays.draft) - 1))


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How the latency of a plan follows one measurement.

    Attributes
    ----------
    what : {"acceptance", "cost"}
    models : tuple of str
        (drafter, verifier) of an acceptance rate; the model of a cost curve.
    value : float
        The rate, or the seconds of a one-token pass.
    elasticity : float
        d ln(seconds per token) / d ln(value): per cent of latency per per cent of the measurement, all lengths of
        a cost curve together, each token's acceptance at every position alike.
    """

    what: str
    models: tuple[str, ...]
    value: float
    elasticity: float


def sensitivities(plan: Plan, profile: Profile, *, context: float | None = None) -> tuple[Sensitivity, ...]:
    """Return how the latency of a plan follows every rate and cost that it rests on, the strongest first.

    At the optimum these are the derivatives of the best latency itself: a small change of a measurement moves the
    best plan too, but that moves the latency by the square of the change only (the envelope theorem).

    Parameters
    ----------
    plan : Plan
        Usually the best one.
    profile : Profile
    context : float, optional
        As in `expected_latency`.

    Raises
    ------
    PredictionError
        If the profile cannot speak about the plan.

    Notes
    -----
    A cost's elasticity is its model's share of the seconds, exactly. A rate's is a one-sided second-order
    difference of the logarithm, every S(m) times (1 - h)^m. Big Little Decoder has no rates to vary.

    Examples
    --------
    >>> from hsdopt.plan import parse_plan
    >>> profile = Profile.from_rates("big", {"big": 1.0, "small": 0.1}, {("small", "big"): 0.8})
    >>> for row in sensitivities(parse_plan("big(small:5)"), profile):
    ...     print(row.what, *row.models, round(row.elasticity, 3))
    acceptance small big -1.868
    cost big 0.667
    cost small 0.333
    """
    base = expected_latency(plan, profile, context=context)
    place = profile.context if context is None else context
    rows = [
        Sensitivity("cost", (share.model,), profile.cost(share.model)(1, place), share.seconds / base.seconds_per_token)
        for share in base.breakdown
    ]
    for drafter, verifier in plan.pairs:
        law = profile.acceptance(drafter, verifier)

        def latency(step: float, pair: tuple[str, str] = (drafter, verifier), law: Acceptance = law) -> float:
            changed = replace(profile, acceptances={**profile.acceptances, pair: _harder(law, step)}, _laws={})
            return float(np.log(expected_latency(plan, changed, context=context).seconds_per_token))

        near, far, here = latency(_STEP), latency(2 * _STEP), float(np.log(base.seconds_per_token))
        slope = (3 * here - 4 * near + far) / (2 * _STEP)
        rows.append(Sensitivity("acceptance", (drafter, verifier), law.rate, slope))
    return tuple(sorted(rows, key=lambda row: -abs(row.elasticity)))


def _harder(law: Acceptance, step: float) -> Acceptance:
    """Return the law with every token's acceptance times 1 - step."""
    if law.iid is not None:
        return Acceptance.from_rate(law.iid * (1 - step))
    if law.joint is None:
        curve = np.asarray(law.survival) * (1 - step) ** np.arange(len(law.survival))
        return Acceptance(tuple(curve.tolist()), law.trials)
    joint = np.asarray(law.joint)
    survival = joint[:, ::-1].cumsum(axis=1)[:, ::-1] * (1 - step) ** np.arange(len(joint))
    return Acceptance.from_joint(survival - np.append(survival[:, 1:], np.zeros((len(joint), 1)), axis=1))
