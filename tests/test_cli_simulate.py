"""`hsdopt simulate` on profiles made up for the tests: every kind of plan, and what it says of each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from stack import call, refused
from traced import traced_profile

from hsdopt.plan import parse_plan
from hsdopt.profiles import Profile, Setting
from hsdopt.simulate import replay

BILD = "bild(big, int8, fallback=0.6, rollback=3, max_draft=5)"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    traced_profile(3, prompts=8).save(path)
    return path


def test_big_little_decoder_is_replayed_beside_its_closed_form(path: Path, tmp_path: Path) -> None:
    said = json.loads(call("simulate", path, "--plan", BILD, "--json").stdout)
    run = replay(parse_plan(BILD), Profile.load(path))
    assert (said["method"], said["tokens"]) == ("trace replay", 8 * 47)
    assert said["seconds_per_token"] == run.seconds_per_token
    assert said["interval"][0] <= said["seconds_per_token"] <= said["interval"][1]
    # the closed form cuts the trajectory elsewhere, but into outputs of the same length
    assert said["closed_form"]["seconds_per_token"] == pytest.approx(run.seconds_per_token, rel=0.1)
    shown = call("simulate", path, "--plan", BILD, "--plot", tmp_path / "bild")
    assert "replayed along the 376 tokens traced; 95 % over prompts: " in shown.stdout
    assert (tmp_path / "bild.png").exists()


def test_stacks_are_simulated_with_their_standard_error(path: Path) -> None:
    said = json.loads(call("simulate", path, "--plan", "big(int8:3)", "--tokens", "4000", "--json").stdout)
    assert said["method"] == "event simulation"
    assert said["tokens"] >= 4000
    assert abs(said["seconds_per_token"] - said["closed_form"]["seconds_per_token"]) < 5 * said["standard_error"]
    assert "(+- standard error)" in call("simulate", path, "--plan", "big(int8:3)", "--tokens", "4000").stdout


def test_big_little_decoder_under_sampling_is_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "sampled.json"
    replace(traced_profile(3, prompts=4), setting=Setting(temperature=0.7)).save(path)
    line = refused("simulate", path, "--plan", BILD)
    assert "expected a profile at --temperature 0 to predict bild(big, int8" in line
    assert "temperature 0.7" in line
    solving = refused("solve", path, "--family", "bild", "--max-deviation", "0.1")
    assert "expected a profile at --temperature 0" in solving
