"""Profiles with traces, made up for the tests: a CPU's cost curves and outputs of easy and hard stretches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hsdopt.acceptance import Traces
from hsdopt.costs import CostCurve, CostSample
from hsdopt.profiles import ModelInfo, Profile

COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40)
CPU = {
    "lookup": (0.1, {}),
    "skip": (30.0, {2: 52, 4: 58, 8: 57, 16: 62, 32: 78, 40: 90}),
    "int4": (27.0, {2: 30, 4: 36, 5: 52, 8: 60, 16: 90, 32: 150, 40: 180}),
    "int8": (29.0, {2: 33, 4: 39, 5: 58, 8: 64, 16: 95, 32: 160, 40: 190}),
    "big": (40.0, {2: 47, 4: 50, 8: 63, 16: 85, 32: 121, 40: 145}),
}
"""Milliseconds of a pass over 1 and more new tokens."""

BYTES = {"lookup": 0, "skip": 0, "int4": 80, "int8": 135, "big": 540}
AGREE = {"skip": 0.64, "int4": 0.85, "int8": 0.95}


def traced_profile(
    seed: int = 0,
    *,
    prompts: int = 32,
    length: int = 48,
    milliseconds: Mapping[str, tuple[float, Mapping[int, float]]] = CPU,
    agree: Mapping[str, float] = AGREE,
    noise: float = 0.02,
) -> Profile:
    """Return a greedy profile of ``big`` and drafters that agree with it as often as `agree` says, in stretches."""
    rng = np.random.default_rng(seed)
    size = prompts * length
    tokens = rng.integers(0, 50, size)
    ease = _stretches(rng, size)
    choice = {"big": tokens}
    surprise, top = {}, {"big": rng.uniform(0.3, 1, size)}
    for name, rate in agree.items():
        right = rng.random(size) < np.where(ease, 1 - (1 - rate) * 0.5, 1 - (1 - rate) * 1.5)
        choice[name] = np.where(right, tokens, 60)
        top[name] = np.clip(np.where(right, 0.9, 0.5) + rng.normal(0, 0.15, size), 0.05, 1.0)
        surprise[name, "big"] = np.where(right, rng.exponential(0.3, size), rng.exponential(4.0, size))
    lookup = "lookup" in milliseconds
    traces = Traces(
        tokens,
        np.repeat(np.arange(prompts), length),
        np.arange(size) % length + 60,
        choice,
        top=top,
        surprise=surprise,
        **(_lookups(rng, choice, ease, length) if lookup else {}),
    )
    samples = {name: _samples(rng, name, *curve, noise) for name, curve in milliseconds.items()}
    curves = {
        name: CostCurve.fixed(taken[0].median) if name == "lookup" else CostCurve.from_samples(taken)
        for name, taken in samples.items()
    }
    models = {
        name: ModelInfo(source=name, kind="lookup" if name == "lookup" else "transformers", bytes=BYTES.get(name, 100))
        for name in milliseconds
    }
    return Profile("big", curves, models=models, samples=samples, traces=traces)


def _stretches(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return easy (True) and hard stretches of some ten tokens."""
    return (np.cumsum(rng.random(size) < 0.1) % 2).astype(bool)


def _lookups(rng: np.random.Generator, choice: Mapping[str, np.ndarray], ease: np.ndarray, length: int) -> dict:
    """Return what the lookup drafter proposes, and how much of it each model takes."""
    size = len(ease)
    proposed = np.where(
        rng.random(size) < np.where(ease, 0.5, 0.1), rng.integers(3, 25, size), rng.integers(0, 2, size)
    )
    left = length - np.arange(size) % length
    run = np.minimum(rng.geometric(np.where(ease, 0.25, 0.75)) - 1, left)
    accepted = {}
    for name in choice:
        own = run if name == "big" else np.where(rng.random(size) < 0.9, run, 0)
        accepted[name] = np.minimum(own, proposed)
    return {"proposed": proposed, "lookup_accepted": accepted}


def _samples(
    rng: np.random.Generator, name: str, first: float, rest: Mapping[int, float], noise: float
) -> tuple[CostSample, ...]:
    if name == "lookup":
        return (CostSample(1, 64, tuple(first / 1e3 * (1 + noise * rng.normal(size=9)))),)
    known = {1: first, **rest}
    curve = np.interp(COUNTS, list(known), list(known.values())) / 1e3
    return tuple(
        CostSample(n, context, tuple(seconds * (1 + context / 4000) * (1 + noise * rng.normal(size=5))))
        for context in (32, 256)
        for n, seconds in zip(COUNTS, curve, strict=True)
    )
