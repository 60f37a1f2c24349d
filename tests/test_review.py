"""Faults that a review found: each stays fixed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_profiles import traced_profile

from hsdopt.acceptance import Traces
from hsdopt.costs import CostCurve, fitted_costs
from hsdopt.errors import ProfileError
from hsdopt.plan import parse_plan
from hsdopt.profiles import Profile
from hsdopt.runtime.models import _is_whole
from hsdopt.simulate import replay


def test_replay_of_sampled_traces_goes_by_the_realised_token() -> None:
    """Overlaps say .6 and .6 everywhere, but every token that was realised is accepted for sure."""
    tokens = np.arange(12)
    traces = Traces(
        tokens,
        np.zeros(12, dtype=int),
        10 + tokens,
        {"big": tokens, "small": tokens},
        overlap={("small", "big"): np.full(12, 0.6)},
        ratio={("small", "big"): np.ones(12)},
    )
    profile = Profile("big", {"big": CostCurve.fixed(1.0), "small": CostCurve.fixed(0.1)}, traces=traces)
    run = replay(parse_plan("big(small:3)"), profile)
    assert run.accepted["small", "big"] == run.drafted["small", "big"]


def test_slow_passes_count_in_curve_and_replicates_alike() -> None:
    timings = np.array([[1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 50.0]])
    fitted = fitted_costs(timings[:, np.newaxis, np.newaxis])[:, 0, 0]
    assert fitted == pytest.approx([5 / 4, 6 / 4])  # one timing counts three medians at most


def test_numbers_given_by_hand_are_not_saved_as_if_measured(tmp_path: Path) -> None:
    profile = Profile.from_rates("big", {"big": 1.0, "small": 0.1}, {("small", "big"): 0.8})
    with pytest.raises(ProfileError, match="given by hand"):
        profile.save(tmp_path / "p.json")
    assert list(tmp_path.iterdir()) == []
    traced_profile().save(tmp_path / "p.json")


def test_a_hub_model_is_whole_only_with_every_shard(tmp_path: Path) -> None:
    assert not _is_whole(tmp_path)
    (tmp_path / "one.safetensors").touch()
    assert _is_whole(tmp_path)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not _is_whole(tmp_path)
    (tmp_path / "two.safetensors").touch()
    assert _is_whole(tmp_path)
