"""`hsdopt solve`: tables, JSON, files, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from traced import CPU, traced_profile
from typer.testing import CliRunner

from hsdopt.cli import main
from hsdopt.cli.app import app
from hsdopt.cli.common import load_plan
from hsdopt.cli.predictions import Replayer, replayer
from hsdopt.plan import Adaptive, Bild, format_plan, parse_plan
from hsdopt.profiles import Profile
from hsdopt.simulate import replay
from hsdopt.solvers.solve import solve

ANSI = "\x1b["


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved = tmp_path_factory.mktemp("profiles") / "profile.json"
    traced_profile(1, prompts=16).save(saved)
    return saved


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile whose one drafter is dearer than its target."""
    saved = tmp_path_factory.mktemp("profiles") / "slow.json"
    curves = {"skip": (60.0, {40: 100.0}), "big": CPU["big"]}
    traced_profile(2, prompts=8, milliseconds=curves, agree={"skip": 0.6}).save(saved)
    return saved


def run(*arguments: str | Path, columns: int = 100) -> str:
    result = CliRunner().invoke(
        app, ["solve", *map(str, arguments)], env={"COLUMNS": str(columns)}, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(*arguments: str | Path) -> dict:
    return json.loads(run(*arguments, "--json"))


def test_json_says_everything(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    answer = run_json(path, "--replicates", "20", "-o", out)
    profile = Profile.load(path)
    plan = parse_plan(answer["plan"]) if not answer["plan"].startswith("{") else load_plan(str(out))
    assert load_plan(str(out)) == plan
    assert answer["seconds_per_token"] == pytest.approx(replay(plan, profile).seconds_per_token)
    alone = replay(parse_plan("big"), profile).seconds_per_token
    assert answer["speedup"] == pytest.approx(alone / answer["seconds_per_token"])
    assert answer["autoregression"]["seconds_per_token"] == pytest.approx(alone)
    assert answer["interval"][0] < answer["speedup"] < answer["interval"][1]
    assert answer["predictor"] == "trace replay"
    assert answer["speculate"]
    assert 0 <= answer["probability_within"] <= 1
    assert 0 < answer["resolution"] < 1
    assert answer["memory_bytes"] == sum(profile.models[name].bytes for name in plan.models)
    assert {*answer["best_by_family"]} >= {"autoregression", "speculative", "hierarchy", "cascade"}
    assert answer["best_single"]["family"] == "speculative"
    speeds = [other["seconds_per_token"] for other in answer["runners_up"]]
    assert speeds == sorted(speeds)
    assert answer["sensitivities"]
    assert answer["what_if"] is None


def test_the_plan_file_reads_as_a_plan_whatever_its_kind(path: Path, tmp_path: Path) -> None:
    kinds = {"adaptive": Adaptive, "bild": Bild}
    curves = {**CPU, "int8": (9.0, {40: 40.0}), "lookup": (0.5, {})}
    cheap = tmp_path / "cheap.json"
    traced_profile(3, prompts=12, milliseconds=curves).save(cheap)
    for family, kind in kinds.items():
        out = tmp_path / f"{family}.json"
        more = ["--max-deviation", "0.2"] if family == "bild" else []
        answer = run_json(cheap, "--family", family, "--replicates", "0", "--closed-form", "-o", out, *more)
        assert isinstance(load_plan(str(out)), kind)
        assert format_plan(load_plan(str(out))) == answer["plan"]
        assert answer["interval"] is None
        assert answer["predictor"] == "closed form"
        if family == "bild":
            deviations = [point["deviation"] for point in answer["frontier"]]
            assert deviations == sorted(deviations)


def test_options_reach_the_solver(path: Path) -> None:
    profile = Profile.load(path)
    answer = run_json(
        path, "--family", "hierarchy", "--max-draft-length", "4", "--max-levels", "3", "--allow", "int8", "--allow",
        "lookup", "--require", "int8", "--context", "100", "--closed-form", "--replicates", "0",
    )  # fmt: skip
    found = solve(
        profile, family="hierarchy", max_draft_length=4, max_levels=3, allowed=["int8", "lookup"], required=["int8"],
        context=100, interval=0,
    )  # fmt: skip
    assert answer["plan"] == str(found.plan)
    assert answer["seconds_per_token"] == pytest.approx(found.seconds_per_token)
    assert run_json(path, "--max-memory-bytes", "600", "--replicates", "0")["memory_bytes"] <= 600
    one, two = (run_json(path, "--seed", seed, "--replicates", "20")["interval"] for seed in "12")
    assert one != two


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits(path: Path, columns: int) -> None:
    text = run(path, "--replicates", "20", "--what-if", "0.05,0.3", columns=columns)
    assert ANSI not in text
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= columns
    assert lines[0].startswith("Run ")
    assert "ms per token" in lines[1]
    assert "(95 %: " in lines[1]
    for needed in (
        "chosen",
        "best single drafter",
        "autoregression",
        "why: ",
        "memory: ",
        "predicted by: trace replay",
    ):
        assert needed in text
    assert "cost ratio" in text
    assert "…" not in text


def test_the_table_of_an_adaptive_plan_is_in_words(path: Path) -> None:
    text = run(path, "--family", "adaptive", "--replicates", "0", columns=80)
    assert "{" not in text


def test_do_not_speculate(slow: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    text = run(slow, "-o", out, "--replicates", "40")
    assert text.startswith("Do not speculate: run big alone, 40")
    assert "contender" in text
    assert load_plan(str(out)) == parse_plan("big")
    answer = run_json(slow, "--replicates", "40")
    assert not answer["speculate"]
    assert answer["speedup"] == 1.0
    assert answer["contender"]["speedup"] < 1
    assert "slower than autoregression: do not speculate" in answer["warnings"][0]


def test_warnings_are_no_results(slow: Path) -> None:
    result = CliRunner().invoke(app, ["solve", str(slow), "--replicates", "40"], catch_exceptions=False)
    assert "warning: " in result.stderr
    assert "warning: " not in result.stdout


def test_what_if_in_json_and_as_a_plot(path: Path, tmp_path: Path) -> None:
    answer = run_json(path, "--what-if", "0.05,0.3", "--what-if-plot", tmp_path / "curve", "--replicates", "0")
    points = answer["what_if"]["points"]
    assert [point["cost_ratio"] for point in points] == [0.05, 0.3]
    assert points[0]["acceptance"] < points[1]["acceptance"]
    assert len(answer["what_if"]["curve"]) > 5
    assert {file.suffix for file in tmp_path.iterdir()} == {".png", ".svg", ".csv"}


def test_output_in_a_pipe_without_colour(path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    code = "import sys; from hsdopt.cli import main; sys.argv[0] = 'hsdopt'; main()"
    command = [sys.executable, "-c", code, "solve", str(path), "--replicates", "5", "--family", "hierarchy"]
    for extra in ({}, {"NO_COLOR": "1"}):
        result = subprocess.run(command, env={**environment, **extra}, capture_output=True, text=True, check=True)  # noqa: S603
        assert ANSI not in result.stdout
        assert "best single drafter" in result.stdout


def test_replay_of_many_survives_a_plan_that_cannot_be_replayed() -> None:
    profile = traced_profile(4, prompts=6)
    assert replayer(Profile.from_rates("t", {"t": 1.0}, {})) is None
    evaluator = Replayer(profile)
    good, bad = parse_plan("big(int8:3)"), parse_plan("big(skip:3(nobody:2))")
    assert evaluator.many([good, bad]) == [replay(good, profile).seconds_per_token, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--family", "best"], "hsdopt: expected a family out of speculative"),
        (["--family", "bild"], "hsdopt: expected max_deviation with family bild"),
        (["--allow", "huge"], "hsdopt: expected the allowed models among the profiled ones"),
        (["--require", "huge"], "hsdopt: expected the required models among the profiled ones"),
        (["--max-memory-bytes", "5"], "hsdopt: expected max_memory_bytes of at least 540"),
        (
            ["--what-if", "cheap"],
            "hsdopt: expected --what-if as cost ratios with commas, such as 0.05,0.2; got",
        ),
        (["--what-if", "-1"], "hsdopt: expected cost ratios that are finite numbers of at least 0; got -1.0"),
        (["--what-if-plot", "curve"], "hsdopt: expected --what-if with --what-if-plot"),
        (["--context", "100000"], "hsdopt: expected contexts up to 256 tokens, as profiled; got 100000"),
        (["-o", "/nowhere/plan.json", "--replicates", "0"], "hsdopt: cannot write /nowhere/plan.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    path: Path,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["hsdopt", "solve", str(path), *options])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_a_profile_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hsdopt", "solve", "/nowhere.json"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.startswith("hsdopt: expected a profile at /nowhere.json; there is no such file")
