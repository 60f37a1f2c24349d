from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsdopt.acceptance import Acceptance, Traces, survival_from_runs
from hsdopt.costs import CostCurve, CostSample
from hsdopt.errors import InvalidArgumentError, PredictionError, ProfileError
from hsdopt.files import write_document
from hsdopt.profiles import ModelInfo, Profile, traces_path


def traced_profile(seed: int = 0, *, prompts: int = 10, length: int = 40) -> Profile:
    rng = np.random.default_rng(seed)
    count = prompts * length
    tokens = rng.integers(0, 50, count)
    position = np.arange(count) % length
    proposed = rng.integers(0, 12, count)
    accepted = np.minimum(np.minimum(rng.geometric(0.4, count) - 1, proposed), length - position)
    traces = Traces(
        tokens,
        np.repeat(np.arange(prompts), length),
        position + 60,
        {"t": tokens, "d": np.where(rng.random(count) < 0.8, tokens, 50)},
        surprise={("d", "t"): rng.random(count)},
        proposed=proposed,
        lookup_accepted={"t": accepted, "d": accepted},
    )
    cells = [(n, context) for n in (1, 2, 4, 40) for context in (32, 128)]
    samples = {
        name: tuple(CostSample(n, context, tuple(rng.random(4) * 0.01 + 0.1 * n)) for n, context in cells)
        for name in ("d", "t")
    }
    samples["lookup"] = (CostSample(1, 32, (1e-4, 3e-4)),)
    curves = {name: CostCurve.from_samples(samples[name]) for name in ("d", "t")}
    models = {name: ModelInfo(source=name, kind="lookup" if name == "lookup" else "transformers") for name in samples}
    return Profile(
        "t",
        {**curves, "lookup": CostCurve.fixed(2e-4)},
        models=models,
        samples=samples,
        traces=traces,
        lookup={"previous": np.arange(3), "following": np.arange(3)},
        provenance={"device": "none"},
    )


def test_a_profile_survives_its_files(tmp_path: Path) -> None:
    first = traced_profile()
    first.save(tmp_path / "p.json")
    second = Profile.load(tmp_path / "p.json")
    second.save(tmp_path / "q.json")
    assert (tmp_path / "p.json").read_bytes() == (tmp_path / "q.json").read_bytes()
    assert second.acceptance("lookup", "t") == first.acceptance("lookup", "t")
    assert second.acceptance("d", "t") == first.acceptance("d", "t")
    assert second.samples == first.samples
    assert second.cost("d")(3, 100) == first.cost("d")(3, 100)
    assert np.array_equal(second.lookup["previous"], first.lookup["previous"])


def test_survival_is_read_from_runs_and_cut_runs_bias_nothing() -> None:
    agree = np.array([1, 1, 0, 1, 1, 1, 1, 0], dtype=float)
    prompt = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    survival, trials = survival_from_runs(agree, agree, prompt, 3)
    # the drafts that start at the last position of a prompt were never judged at their second
    assert survival[1] == 6 / 8
    assert trials.tolist() == [8, 5, 3]
    assert survival[2] == pytest.approx(6 / 8 * 3 / 5)
    assert survival[3] == pytest.approx(6 / 8 * 3 / 5 * 1 / 3)


def test_survival_under_sampling_is_unbiased_where_the_product_of_overlaps_is_not() -> None:
    """Two tokens, p = (.5, .5), q = (.9, .1); the next acceptance is 1 after the first and .2 after the second."""
    rng = np.random.default_rng(0)
    starts = 200_000
    first = rng.random(starts) < 0.5  # the realised token, drawn from p
    overlap = np.full((starts, 2), 0.6)
    overlap[:, 1] = np.where(first, 1.0, 0.2)
    step = overlap.copy()
    step[:, 0] = np.where(first, 1.0, 0.2)  # min(1, q/p)
    prompt = np.repeat(np.arange(starts), 2)
    survival, _ = survival_from_runs(overlap.reshape(-1), step.reshape(-1), prompt, 2)
    # only starts at a first position reach a second one
    first_position = 0.6
    assert survival[2] / survival[1] * first_position == pytest.approx(0.52, abs=0.005)


def test_a_lookup_that_proposes_less_has_a_joint_law() -> None:
    law = Acceptance.from_joint(np.array([[0.5, 0, 0], [0.1, 0.1, 0], [0.1, 0.1, 0.1]]))
    assert law.survival == pytest.approx((1, 0.3, 0.1))
    one = law.law(1)
    assert one[0, 0] == pytest.approx(0.5)
    assert one[1] == pytest.approx([0.2, 0.3])
    # accepted .4 in all; rejecting drafts: .1 of length 1 and .2 of length 2
    assert law.rate == pytest.approx(0.4 / 0.7)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_laws_sum_to_one_and_survival_is_their_tail(seed: int, length: int) -> None:
    profile = traced_profile(seed, prompts=3, length=20)
    for drafter in ("d", "lookup"):
        law = profile.acceptance(drafter, "t")
        joint = law.law(length)
        assert joint.sum() == pytest.approx(1)
        assert joint.min() >= 0
        tail = 1 - np.cumsum(joint.sum(axis=0))
        assert tail[:-1] == pytest.approx(law.curve(length)[1:])
        assert all(a >= b for a, b in zip(law.trials, law.trials[1:], strict=False))


def test_replicates_draw_prompts_and_timings() -> None:
    profile = traced_profile()
    rng = np.random.default_rng(1)
    rates = [profile.resample(rng).acceptance("d", "t").rate for _ in range(50)]
    assert np.std(rates) > 0.005
    assert np.mean(rates) == pytest.approx(profile.acceptance("d", "t").rate, abs=0.02)


def test_cost_curves_are_linear_between_samples_and_refuse_to_guess() -> None:
    curve = CostCurve((1, 2, 5), (0, 100), ((1.0, 2.0, 8.0), (2.0, 3.0, 9.0)))
    assert curve(3, 0) == pytest.approx(4)
    assert curve(1, 50) == pytest.approx(1.5)
    assert curve(1, 110) == pytest.approx(2.1)
    with pytest.raises(PredictionError, match="got 6"):
        curve(6, 0)
    with pytest.raises(PredictionError, match="contexts up to 100"):
        curve(1, 200)
    with pytest.raises(InvalidArgumentError, match="full grid"):
        CostCurve.from_samples([CostSample(1, 0, (1.0,)), CostSample(2, 5, (1.0,))])


def test_a_wide_spread_is_said_in_the_repr() -> None:
    assert "suspect" in repr(CostSample(1, 64, (1.0, 2.0, 3.0)))
    assert "suspect" not in repr(CostSample(1, 64, (1.0, 1.01, 1.02)))


def test_beyond_what_was_traced_nothing_is_predicted() -> None:
    profile = traced_profile()
    with pytest.raises(PredictionError, match="drafts of at most 32"):
        profile.acceptance("d", "t").curve(33)
    with pytest.raises(PredictionError, match=r"expected one of the profiled models \(d, lookup, t\); got x"):
        profile.acceptance("x", "t")


def _break(path: Path, change: dict[str, object]) -> None:
    value = json.loads(path.read_text())
    value.update(change)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "expected schema 1 .* got 2"),
        ({"target": 3}, "field target: .*; got 3"),
        ({"surplus": 1}, "field surplus"),
        ({"target": "nobody"}, "field target: expected a language model out of d, t, lookup; got nobody"),
        ({"costs": [{"model": "x", "tokens": 1, "context": 0, "seconds": [1.0]}]}, "expected a model out of"),
        ({"costs": [{"model": "d", "tokens": 1, "context": 0, "seconds": []}]}, "costs.0.seconds"),
        ({"costs": []}, "expected timings of"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused_by_field(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "p.json"
    traced_profile().save(path)
    _break(path, change)
    with pytest.raises(ProfileError, match=message):
        Profile.load(path)


def test_files_that_are_no_profiles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no such file"):
        Profile.load(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('{"schema": 1, "ta')
    with pytest.raises(ProfileError, match="cut short"):
        Profile.load(tmp_path / "cut.json")
    traced_profile().save(tmp_path / "p.json")
    np.savez(tmp_path / "p.traces.npz", tokens=np.array([{"a": 1}], dtype=object))
    checksum = hashlib.sha256((tmp_path / "p.traces.npz").read_bytes()).hexdigest()
    _break(tmp_path / "p.json", {"traces_sha256": checksum})
    with pytest.raises(ProfileError, match="expected an array of plain numbers or names"):
        Profile.load(tmp_path / "p.json")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    traced_profile(0).save(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hsdopt.files.os.fsync", full)
    with pytest.raises(ProfileError, match="No space left on device; free some space"):
        replace(traced_profile(1), target="d").save(path)
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["p.json", "p.traces.npz"]


def test_an_interrupted_write_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupted(stream: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_document(tmp_path / "x", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_both_files_of_a_profile_change_or_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the two writes finds the disk full, the old pair stays whole."""
    path = tmp_path / "p.json"
    traced_profile(0).save(path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    fsync = os.fsync
    for whole in (0, 1):
        calls = itertools.count()

        def full(descriptor: int, calls: itertools.count[int] = calls, whole: int = whole) -> None:
            if next(calls) == whole:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        monkeypatch.setattr("hsdopt.files.os.fsync", full)
        with pytest.raises(ProfileError, match="No space left on device"):
            traced_profile(1).save(path)
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_profile_without_its_traces_is_refused_at_once(tmp_path: Path) -> None:
    """Copied alone, beside another's traces, or with a damaged file: said in one line when it is loaded."""
    path, other = tmp_path / "p.json", tmp_path / "other.json"
    traced_profile(0).save(path)
    traced_profile(1).save(other)
    alone = tmp_path / "alone.json"
    alone.write_bytes(path.read_bytes())
    with pytest.raises(ProfileError, match=r"the profile's traces in .*alone\.traces\.npz; there is no such file"):
        Profile.load(alone)
    traces_path(alone).write_bytes(traces_path(other).read_bytes())
    with pytest.raises(ProfileError, match=r"saved with in .*alone\.traces\.npz; got others: put its own"):
        Profile.load(alone)
    traces_path(alone).write_bytes(traces_path(path).read_bytes())
    assert Profile.load(alone).acceptance("d", "t") == traced_profile(0).acceptance("d", "t")


def test_profiles_that_do_not_name_their_traces_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    traced_profile(0).save(path)
    stored = json.loads(path.read_text())
    del stored["traces_sha256"]
    path.write_text(json.dumps(stored))
    with pytest.raises(ProfileError, match="field traces_sha256: expected the checksum of its traces; got none"):
        Profile.load(path)


def test_a_profile_without_traces_needs_no_second_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    traced_profile(0).save(path)
    replace(traced_profile(0), traces=None, lookup={}).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]
    assert Profile.load(path).traces is None
