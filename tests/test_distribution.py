"""Single outputs by every simulation: their mean is what the simulations predict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from traced import traced_profile

from hsdopt.plan import parse_plan
from hsdopt.profiles import Profile, Setting
from hsdopt.simulate import replay
from hsdopt.simulate.distribution import output_distribution


@pytest.fixture(scope="module")
def profile() -> Profile:
    return replace(traced_profile(1, prompts=12), setting=Setting(max_new_tokens=32))


def test_the_mean_over_outputs_is_the_replays_own(profile: Profile) -> None:
    plan = parse_plan("big(int8:3)")
    values = output_distribution(plan, profile)
    run = replay(plan, profile)
    assert values["trace replay"] == sorted(values["trace replay"])
    assert values["trace replay"] == pytest.approx(sorted(run.prompt_seconds_per_token))
    weighted = np.average(run.prompt_seconds_per_token, weights=run.prompt_tokens)
    assert weighted == pytest.approx(run.seconds_per_token)
    assert len(values["event simulation"]) == 400
    assert np.mean(values["event simulation"]) == pytest.approx(run.seconds_per_token, rel=0.1)


def test_sampled_outputs_are_walked_several_times(profile: Profile) -> None:
    drawn = replace(profile, setting=Setting(max_new_tokens=32, temperature=1.0))
    assert len(output_distribution(parse_plan("big(int8:3)"), drawn)["trace replay"]) == 16 * 12


def test_what_cannot_speak_of_a_plan_is_left_out(profile: Profile) -> None:
    assert "event simulation" not in output_distribution(parse_plan("bild(big, int8, fallback=0.5)"), profile)
    assert "trace replay" not in output_distribution(parse_plan("big(int8:3)"), replace(profile, traces=None))
