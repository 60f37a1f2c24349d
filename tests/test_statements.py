"""What commands say, against what they know."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stack import call, make_stack, profile_arguments
from traced import traced_profile
from typer.testing import CliRunner

from hsdopt.cli.app import app
from hsdopt.costs import CostSample
from hsdopt.errors import PredictionError
from hsdopt.plan import LOOKUP
from hsdopt.profiles import Profile, Shape
from hsdopt.profiling import Drift
from hsdopt.work import KERNELS_PER_LAYER, LAUNCH_SECONDS, pass_work, roofline, without_cpu_only

SIZES = (1, 2, 3, 4, 10, 40)


def sample(tokens: int, seconds: float, *, spread: float = 0.02, timings: int = 9) -> CostSample:
    """Return timings whose interquartile range is `spread` of their median."""
    return CostSample(tokens, 64, tuple(seconds * (1 + spread * step) for step in np.linspace(-1, 1, timings)))


def drifted(factors: dict[int, float], *, spread: float = 0.02) -> Drift:
    stored = tuple(sample(size, 1.0, spread=spread) for size in SIZES)
    return Drift("big", stored, tuple(sample(size, factors.get(size, 1.0), spread=spread) for size in SIZES))


# --- check ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("short", [(1,), (1, 2, 3, 4), (4,)])
def test_short_passes_that_moved_are_not_outvoted(short: tuple[int, ...]) -> None:
    drift = drifted(dict.fromkeys(short, 1.35))
    assert not drift.holds
    assert [tokens for tokens, _ in drift.moved] == list(short)
    assert all(change == pytest.approx(0.35) for _, change in drift.moved)


def test_moves_both_ways_do_not_cancel() -> None:
    drift = drifted({1: 1.35, 2: 1 / 1.35})
    assert drift.change == pytest.approx(0)
    assert [tokens for tokens, _ in drift.moved] == [1, 2]


def test_noise_excuses_what_it_explains_only() -> None:
    assert drifted({1: 1.08}).holds
    assert drifted({1: 1.2}, spread=0.3).holds
    assert not drifted({1: 1.35}, spread=0.1).holds
    assert not drifted({1: 1.6}, spread=0.9).holds


# --- solve --hardware ----------------------------------------------------------------------------------------

LAYERS = {"big": 24, "int8": 24, "int4": 24, "skip": 12}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a profile with copies for CPUs among its drafters."""
    measured = traced_profile(1, prompts=8)
    sources = {"int8": "int8@org/big", "int4": "skip:1@int4@org/big", "skip": "skip:1@org/big", "big": "org/big"}
    shape = Shape(
        layers=1, hidden_size=64, intermediate_size=128, heads=4, kv_heads=4, head_dim=16, vocab_size=100, value_bytes=2
    )
    models = {
        name: info
        if name == LOOKUP
        else info.model_copy(
            update={"source": sources[name], "shape": shape.model_copy(update={"layers": LAYERS[name]})}
        )
        for name, info in measured.models.items()
    }
    saved = tmp_path_factory.mktemp("profiles") / "profile.json"
    replace(measured, models=models).save(saved)
    return saved


def called(*arguments: str | Path, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


@pytest.mark.parametrize("hardware", ["H100", "989e12,3.35e12", "989e12,3.35e12,1e-5"])
def test_copies_for_cpus_are_left_out_elsewhere(path: Path, hardware: str) -> None:
    told, said = called("solve", path, "--replicates", "0", "--hardware", hardware, "--json")
    lines = [line for line in said.splitlines() if "left out" in line]
    assert len(lines) == 1
    assert lines[0].endswith("int4, int8; int8 and int4 copies run on CPUs only")
    answer = json.loads(told)
    plans = [answer["plan"], *(row["plan"] for row in answer["runners_up"])]
    assert not any("int" in plan for plan in plans)


def test_small_models_wait_for_their_launches(path: Path) -> None:
    profile = Profile.load(path)
    estimate = roofline(profile, flops_per_second=989e12, bytes_per_second=3.35e12)
    per_layer = KERNELS_PER_LAYER * LAUNCH_SECONDS
    assert estimate.cost("big")(1, 64) == pytest.approx(24 * per_layer)
    assert estimate.cost("skip")(4, 64) == pytest.approx(12 * per_layer)
    slow = roofline(profile, flops_per_second=1e9, bytes_per_second=1e6)
    assert slow.cost("big")(1, 64) == pytest.approx(pass_work(profile.models["big"], 1, 64).bytes / 1e6)
    _, said = called("solve", path, "--replicates", "0", "--hardware", "H100")
    assert "at least 10 kernel launches of 5 us per layer and pass" in said


def test_a_target_for_cpus_has_no_estimate_elsewhere(path: Path) -> None:
    profile = Profile.load(path)
    models = {**profile.models, "big": profile.models["big"].model_copy(update={"source": "int8@org/big"})}
    with pytest.raises(PredictionError, match="runs on CPUs only"):
        without_cpu_only(replace(profile, models=models))


# --- one plan, one number ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["all", "bild", "speculative"])
@pytest.mark.parametrize("closed_form", [(), ("--closed-form",)])
def test_a_plan_has_one_speed_wherever_solve_names_it(path: Path, family: str, closed_form: tuple[str, ...]) -> None:
    options = (*closed_form, *(("--max-deviation", "0.5") if family == "bild" else ()))
    told, _ = called("solve", path, "--replicates", "0", "--family", family, *options, "--json")
    answer = json.loads(told)
    rows = [answer, answer["autoregression"], answer["best_single"], answer["contender"]]
    rows += [*answer["best_by_family"].values(), *answer["runners_up"], *answer["frontier"]]
    speeds: dict[str, set[tuple[float, float]]] = {}
    for row in rows:
        if row is not None:
            speeds.setdefault(row["plan"], set()).add((row["seconds_per_token"], row["speedup"]))
    assert {plan: numbers for plan, numbers in speeds.items() if len(numbers) > 1} == {}
    assert bool(answer["frontier"]) == (family == "bild")


def test_the_frontier_is_one_under_the_deciding_evaluator(path: Path) -> None:
    told, _ = called("solve", path, "--replicates", "0", "--family", "bild", "--max-deviation", "1", "--json")
    points = json.loads(told)["frontier"]
    assert [point["deviation"] for point in points] == sorted(point["deviation"] for point in points)
    assert [point["speedup"] for point in points] == sorted(point["speedup"] for point in points)


# --- progress ------------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """Return what commands report to their progress bars: (done, total) by stage."""
    stages: dict[str, list[tuple[int, int]]] = {}

    @contextmanager
    def recorder() -> Iterator[Callable[[str, int, int], None]]:
        yield lambda stage, done, total: stages.setdefault(stage, []).append((done, total))

    for module in ("profile", "validate_runs", "quality", "align_train", "check"):
        monkeypatch.setattr(f"hsdopt.cli.{module}.progress_bar", recorder)
    return stages


def check_ends(stages: dict[str, list[tuple[int, int]]], *expected: str) -> None:
    """Require that every stage rises to a total that never changes, and gets there with its last report."""
    assert set(expected) <= stages.keys()
    for stage, reports in stages.items():
        totals = {total for _, total in reports}
        done = [count for count, _ in reports]
        assert len(totals) == 1, (stage, totals)
        assert done == sorted(done), stage
        assert done[-1] == totals.pop() > 0, (stage, reports[-1])
    stages.clear()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stack(tmp_path_factory.mktemp("stack"))


@pytest.fixture(scope="module")
def measured(root: Path) -> Path:
    call(*profile_arguments(root, root / "profile.json"))
    return root / "profile.json"


def test_bars_of_a_profile_end_at_their_ends(
    root: Path, told: dict[str, list[tuple[int, int]]], tmp_path: Path
) -> None:
    arguments = profile_arguments(root, tmp_path / "profile.json", "--precision", "0.2")
    call(*arguments)
    check_ends(told, "acceptance", "pass costs", "precision", "switches", "prefills and rounds")


def test_bars_of_a_budget_end_at_their_ends(root: Path, told: dict[str, list[tuple[int, int]]], tmp_path: Path) -> None:
    arguments = [*profile_arguments(root, tmp_path / "profile.json"), "--budget", "2s"]
    place = arguments.index("--repeats") if "--repeats" in arguments else None
    call(*(arguments if place is None else [*arguments[:place], *arguments[place + 2 :]]))
    check_ends(told, "budget")


@pytest.mark.parametrize("budget", [(), ("--budget", "0.01s")])
def test_bars_of_a_validation_end_at_their_ends(
    measured: Path, told: dict[str, list[tuple[int, int]]], tmp_path: Path, budget: tuple[str, ...]
) -> None:
    call("validate", measured, "--plan", "big(small:2)", "--repeats", "1", *budget, "-o", tmp_path)
    check_ends(told, "runs", "acceptance", "control passes")


def test_bars_of_quality_and_check_end_at_their_ends(
    measured: Path, told: dict[str, list[tuple[int, int]]], tmp_path: Path
) -> None:
    grid = ("--fallback", "0.5", "--rollback", "3", "--repeats", "1", "--max-prompts", "2")
    call("quality", measured, *grid, "-o", tmp_path / "quality")
    check_ends(told, "runs", "outputs")
    CliRunner().invoke(app, ["check", str(measured), "--seconds", "0.1"])  # what it finds depends on the machine
    check_ends(told, "pass costs")


@pytest.mark.parametrize("limit", [("--steps", "12", "--patience", "1"), ("--minutes", "0.03")])
def test_bars_of_an_alignment_end_at_their_ends(
    root: Path, told: dict[str, list[tuple[int, int]]], tmp_path: Path, limit: tuple[str, ...]
) -> None:
    what = ("--target", root / "big", "--prompts", root / "prompts.jsonl", "--layers", "1", "--max-new-tokens", "8")
    call("align", *what, "--spans", "2", "--evaluate-every", "3", "--batch", "2", *limit, "-o", tmp_path / "drafter")
    check_ends(told, "calibrating", "choosing layers", "training")
