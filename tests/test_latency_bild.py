"""The cycle model of the Big Little Decoder against an event simulation that counts its own rates."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest

from hsdopt.errors import InvalidArgumentError
from hsdopt.latency import bild

SMALL, LARGE = 0.3, 1.0


@dataclass
class Run:
    """Counts of a simulated run."""

    small: int = 0
    fallbacks: int = 0
    rollbacks: int = 0
    extra: int = 0
    lost: int = 0
    capped: int = 0
    kept: int = 0
    large_seconds: float = 0.0

    def fallback(self, per: str) -> float:
        return (
            self.fallbacks
            / {
                "small_pass": self.small,
                "kept_token": self.kept,
                "all_pass": self.small + self.fallbacks,
            }[per]
        )

    def rollback(self, per: str) -> float:
        return self.rollbacks / {"call": self.fallbacks, "kept_token": self.kept, "small_pass": self.small}[per]


def large_cost(tokens: int) -> float:
    return LARGE + 0.1 * (tokens - 1) ** 2


def simulate(*, limit: int, extra_large: bool, cycles: int = 2000) -> Run:
    """Token by token: a stint of small passes, a large pass that may cut it, and what is then in the output."""
    rng, run, output = np.random.default_rng(5), Run(), 0
    for _ in range(cycles):
        stint, capped = 0, False
        while True:
            run.small += 1
            if rng.random() < 0.25:  # this pass is unsure: its token is discarded
                break
            stint += 1
            if stint == limit:
                capped = True
                break
        run.capped += capped
        run.fallbacks += 1
        run.large_seconds += large_cost(stint + 1)
        wrong = next((position for position in range(stint) if rng.random() < 0.05), None)
        if wrong is None:
            output += stint + 1
            continue
        run.rollbacks += 1
        run.lost += stint - wrong
        output += wrong + 1
        if extra_large:
            run.extra += 1
            run.large_seconds += large_cost(1)
            output += 1
    run.kept = output
    return run


UNITS = list(
    itertools.product(
        ["small_pass", "kept_token", "all_pass"], ["call", "kept_token", "small_pass"], [True, False], [4, 10**9]
    )
)


@pytest.mark.parametrize(("fallback_per", "rollback_per", "extra_large", "limit"), UNITS)
def test_every_denominator_gives_the_simulated_cost(
    *, fallback_per: bild.FallbackPer, rollback_per: bild.RollbackPer, extra_large: bool, limit: int
) -> None:
    run = simulate(limit=limit, extra_large=extra_large)
    assert run.rollbacks > 100
    found = bild.latency_per_token(
        fallback=run.fallback(fallback_per),
        rollback=run.rollback(rollback_per),
        tokens_lost=run.lost / run.rollbacks,
        small_cost=SMALL,
        large_cost=LARGE,
        fallback_per=fallback_per,
        rollback_per=rollback_per,
        extra_large=extra_large,
        cap_share=run.capped / run.fallbacks,
    )
    measured = (SMALL * run.small + LARGE * (run.fallbacks + run.extra)) / run.kept
    assert found == pytest.approx(measured, rel=1e-12)  # an accounting identity: no sampling error


def test_a_cost_curve_is_averaged_over_geometric_stints() -> None:
    run = simulate(limit=10**9, extra_large=True, cycles=40_000)
    found = bild.latency_per_token(
        fallback=0.25,
        rollback=run.rollback("call"),
        tokens_lost=run.lost / run.rollbacks,
        small_cost=SMALL,
        large_cost=large_cost,
        fallback_per="small_pass",
        rollback_per="call",
        extra_large=True,
    )
    measured = (SMALL * run.small + run.large_seconds) / run.kept
    assert found == pytest.approx(measured, rel=0.02)


def test_a_capped_cost_curve_takes_its_law() -> None:
    run = simulate(limit=4, extra_large=False, cycles=40_000)
    law = [0.25 * 0.75**n for n in range(4)] + [0.75**4]
    arguments = {
        "fallback": run.fallback("small_pass"),
        "rollback": run.rollback("call"),
        "tokens_lost": run.lost / run.rollbacks,
        "small_cost": SMALL,
        "large_cost": large_cost,
        "fallback_per": "small_pass",
        "rollback_per": "call",
        "cap_share": run.capped / run.fallbacks,
    }
    found = bild.latency_per_token(**arguments, large_pass_tokens=law)
    assert found == pytest.approx((SMALL * run.small + run.large_seconds) / run.kept, rel=0.01)
    with pytest.raises(InvalidArgumentError, match="expected large_pass_tokens"):
        bild.latency_per_token(**arguments)


def test_forgetting_the_cap_is_as_wrong_as_stated() -> None:
    # 5 % unsure, at most 10 small passes per stint: MATH of the cap says 7.5 %
    sure = 0.95**10
    passes = (1 - sure) / 0.05
    shared = {
        "fallback": 1 / passes,
        "rollback": 0.0,
        "tokens_lost": 1.0,
        "small_cost": SMALL,
        "large_cost": LARGE,
        "fallback_per": "small_pass",
        "rollback_per": "call",
    }
    exact, wrong = bild.latency_per_token(**shared, cap_share=sure), bild.latency_per_token(**shared)
    assert wrong / exact - 1 == pytest.approx(0.075, abs=0.001)


def test_limits() -> None:
    shared = {"tokens_lost": 2.0, "small_cost": SMALL, "large_cost": LARGE, "rollback": 0.0}
    units = {"fallback_per": "small_pass", "rollback_per": "call"}
    assert bild.latency_per_token(fallback=0.0, **shared, **units) == SMALL
    assert bild.latency_per_token(fallback=1.0, **shared, **units) == SMALL + LARGE
    every_pass = bild.latency_per_token(fallback=1.0, **(shared | {"large_cost": large_cost}), **units)
    assert every_pass == SMALL + large_cost(1)
    assert bild.speedup(latency=0.5, large_cost=large_cost) == 2.0
    with pytest.raises(InvalidArgumentError, match="expected a latency above 0"):
        bild.speedup(latency=0.0, large_cost=LARGE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fallback": 1.1}, "expected fallback to be a rate between 0 and 1; got 1.1"),
        ({"fallback": math.nan}, "expected fallback to be a rate"),
        ({"rollback": -0.1}, "expected rollback to be a rate"),
        ({"tokens_lost": -1.0}, "expected tokens_lost to be a finite number of at least 0; got -1.0"),
        ({"small_cost": -1.0}, "expected small_cost"),
        ({"large_cost": math.inf}, "expected large_cost"),
        ({"fallback_per": "token"}, "expected fallback_per to be one of 'small_pass', 'kept_token', 'all_pass'"),
        ({"rollback_per": None}, "expected rollback_per to be one of 'call', 'kept_token', 'small_pass'; got None"),
        ({"cap_share": 2}, "expected cap_share"),
        ({"rollback": 0.5, "tokens_lost": 10.0, "fallback": 0.5}, "expected rollbacks to leave some tokens"),
        ({"fallback": 0.7, "fallback_per": "all_pass"}, "expected at most one fallback per small pass"),
        ({"fallback": 1.0, "fallback_per": "all_pass"}, "expected a share of all passes below 1"),
        ({"large_cost": large_cost, "large_pass_tokens": [0.5, 0.4]}, "expected large_pass_tokens to sum to 1"),
    ],
)
def test_bad_input(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "fallback": 0.2,
        "rollback": 0.1,
        "tokens_lost": 2.0,
        "small_cost": SMALL,
        "large_cost": LARGE,
        "fallback_per": "small_pass",
        "rollback_per": "call",
    }
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        bild.latency_per_token(**(arguments | change))
    assert "\n" not in str(caught.value)
