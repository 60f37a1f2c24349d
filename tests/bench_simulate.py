"""Speed of the simulators: ``pytest tests/bench_simulate.py``."""

from __future__ import annotations

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from test_simulate_replay import random_traces

from hsdopt.plan import parse_plan
from hsdopt.profiles import Profile
from hsdopt.simulate import replay_many, simulate

PROFILE = Profile.from_rates(
    "big",
    {"big": lambda n: 1 + 0.02 * n, "mid": lambda n: 0.3 + 0.01 * n, "small": lambda n: 0.1 + 0.02 * n},
    {("small", "big"): 0.6, ("small", "mid"): 0.8, ("mid", "big"): 0.8},
)
PLANS = ("big(small:4)", "big(lookup:8)", "big(mid:8(small:3))", "big(mid:6(small:3), lookup:4)")


def test_rounds_per_second_of_one_drafter(benchmark: BenchmarkFixture) -> None:
    run = benchmark(simulate, parse_plan("big(small:4)"), PROFILE, tokens=4_000_000)
    rate = run.rounds / benchmark.stats.stats.min
    benchmark.extra_info["verify rounds per second"] = rate
    print(f"\n{rate / 1e6:.1f} million verify rounds per second")  # noqa: T201
    assert rate > 5e6


@pytest.mark.parametrize("text", ["big(mid:8(small:3))", "big(mid:8+(small:3))", "big(mid:4, small:4)"])
def test_rounds_per_second_of_stacks(benchmark: BenchmarkFixture, text: str) -> None:
    run = benchmark(simulate, parse_plan(text), PROFILE, tokens=1_000_000)
    benchmark.extra_info["verify rounds per second"] = run.rounds / benchmark.stats.stats.min


@pytest.mark.parametrize("text", PLANS)
def test_replay_of_twenty_prompts(benchmark: BenchmarkFixture, text: str) -> None:
    profile = random_traces(np.random.default_rng(0), prompts=20, tokens=48)
    benchmark(replay_many, [parse_plan(text)], profile)
    assert benchmark.stats.stats.min < 0.02
