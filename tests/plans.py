"""Random plans and profiles of every kind, for tests that compare one reader of plans with another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from hsdopt.acceptance import Acceptance
from hsdopt.costs import CostCurve
from hsdopt.plan import LOOKUP, Adaptive, Choice, Level, Segment, Stop
from hsdopt.profiles import Profile

Kind = Literal["speculative", "lookup", "truncate", "overshoot", "rounds", "until", "row", "mixed", "adaptive"]
KINDS: tuple[Kind, ...] = get_args(Kind)
STOPS: tuple[Stop, ...] = get_args(Stop)
MODELS = ("big", "mid", "small", "tiny")
LONGEST = 96
"""How long survival curves and cost curves are: no random plan of up to 3 levels goes beyond."""
LONGEST_LOOKUP = 10


def random_case(
    rng: np.random.Generator, kind: Kind | None = None, *, levels: int = 3
) -> tuple[Level | Adaptive, Profile]:
    """Return a random plan of a kind (any, if not given) and a random profile that covers it."""
    return random_plan(rng, kind, levels=levels), random_profile(rng)


def random_plan(rng: np.random.Generator, kind: Kind | None = None, *, levels: int = 3) -> Level | Adaptive:
    """Return a random stack of at most `levels` levels, the target's among them."""
    kind = KINDS[rng.integers(len(KINDS))] if kind is None else kind
    if kind == "adaptive":
        return _adaptive(rng)
    if kind in ("speculative", "lookup"):
        drafter, longest = ("small", 8) if kind == "speculative" else (LOOKUP, LONGEST_LOOKUP)
        return Level("big", (Segment(Level(drafter), _between(rng, 1, longest)),))
    if kind == "row":
        return _level(rng, MODELS, 2, ("truncate",), segments=_between(rng, 2, 3))
    if kind == "mixed":
        return _level(rng, MODELS, levels, STOPS, segments=_between(rng, 1, 2))
    if kind == "until":
        first = _level(rng, MODELS, levels, ("overshoot",), segments=1).row
        return Level("big", (*first, Segment(Level("tiny"), _between(rng, 4, 12), "until")))
    return _level(rng, MODELS, levels, (kind,), segments=1)


def random_profile(rng: np.random.Generator) -> Profile:
    """Return costs and acceptance laws of all models, lookup included, in random shapes."""
    scales = dict(zip(MODELS, (1.0, 0.3, 0.1, 0.03), strict=True))
    costs = {name: random_cost(rng, scale * rng.uniform(0.7, 1.4)) for name, scale in scales.items()}
    costs = {name: replace(curve, switch=scales[name] * rng.uniform(0, 0.3)) for name, curve in costs.items()}
    pairs = [(j, i) for j in MODELS for i in MODELS if j not in (i, "big")]
    laws = {pair: random_survival(rng) for pair in pairs}
    proposed = rng.dirichlet(np.ones(LONGEST_LOOKUP + 1))
    laws |= {(LOOKUP, name): random_joint(rng, proposed) for name in MODELS}
    return Profile.from_rates("big", {**costs, LOOKUP: CostCurve.fixed(0.001)}, laws)


def random_cost(rng: np.random.Generator, scale: float) -> CostCurve:
    """Return a constant, sloped or stepped cost curve."""
    slope, step, jump = rng.uniform(0, 0.08), _between(rng, 2, 8), rng.uniform(0, 0.8)
    shapes: Sequence[Callable[[int], float]] = (
        lambda n: scale + 0 * n,
        lambda n: scale * (1 + slope * (n - 1)),
        lambda n: scale * (1 + jump * ((n - 1) // step)),
    )
    return CostCurve.from_function(shapes[rng.integers(3)], LONGEST)


def random_survival(rng: np.random.Generator) -> Acceptance:
    """Return an iid rate, or a survival curve whose ratios rise or fall."""
    rate = rng.uniform(0.3, 0.95)
    if rng.random() < 0.3:
        return Acceptance.from_rate(rate)
    ratios = np.clip(rate + rng.uniform(-0.05, 0.05) * np.arange(LONGEST), 0.05, 0.98)
    return Acceptance(tuple(np.concatenate([[1.0], np.cumprod(ratios)]).tolist()))


def random_joint(rng: np.random.Generator, proposed: np.ndarray) -> Acceptance:
    """Return a joint law of (proposed, accepted) with the given law of the proposed length."""
    size = len(proposed)
    joint = np.zeros((size, size))
    for n in range(size):
        joint[n, : n + 1] = proposed[n] * rng.dirichlet(np.full(n + 1, 0.7))
    return Acceptance.from_joint(joint)


def _level(
    rng: np.random.Generator, models: Sequence[str], levels: int, stops: Sequence[Stop], *, segments: int
) -> Level:
    """Return a level over `segments` random segments, whose own rows have one or two."""
    row = []
    for _ in range(segments):
        below = models[_between(rng, 1, len(models) - 1) :]
        stop = stops[rng.integers(len(stops))]
        if levels > 2 and len(below) > 1:
            drafter = _level(rng, below, levels - 1, stops, segments=_between(rng, 1, 2))
        else:
            drafter = Level(below[0] if rng.random() < 0.7 else LOOKUP)
        row.append(_segment(rng, drafter, stop))
    return Level(models[0], tuple(row))


def _segment(rng: np.random.Generator, drafter: Level, stop: Stop) -> Segment:
    if not drafter.row and stop in ("overshoot", "rounds"):
        stop = "truncate"
    return Segment(drafter, _between(rng, 1, 2 if stop == "rounds" else 6), stop)


def _adaptive(rng: np.random.Generator) -> Adaptive:
    longest = 8
    names = ("tiny", "small", "mid")
    tables = []
    for place, name in enumerate(names):
        below = (LOOKUP, *names[:place])
        choices = [_choice(rng, below, longest) if rng.random() < 0.6 else None for _ in range(longest)]
        tables.append((name, tuple(choices)))
    return Adaptive("big", _choice(rng, names, longest), tuple(tables))


def _choice(rng: np.random.Generator, drafters: Sequence[str], longest: int) -> Choice:
    return Choice(drafters[rng.integers(len(drafters))], _between(rng, 1, longest))


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    return int(rng.integers(low, high + 1))
