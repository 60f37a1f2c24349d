"""`hsdopt validate` on tiny models: the report, what a kill leaves, and what is refused before anything runs."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from stack import call, edited, kill_midway, make_stack, profile_arguments, refused

from hsdopt.profiles import Profile
from hsdopt.profiling.validate import MeasuredRun

QUICK = ("--suite", "quick", "--repeats", "2")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_stack(tmp_path_factory.mktemp("stack"))
    call(*profile_arguments(root, root / "profile.json"))
    return root / "profile.json"


@pytest.fixture(scope="module")
def finished(profile: Path) -> Path:
    folder = profile.parent / "report"
    call("validate", profile, *QUICK, "-o", folder)
    return folder


def test_the_report_has_the_agreed_keys(finished: Path) -> None:
    report = json.loads((finished / "report.json").read_text())
    summary = {"median_error", "p95_error", "transfer_median_error", "spearman", "regret", "speedup"}
    assert summary <= report["summary"].keys()
    row = {"plan", "family", "predicted_seconds_per_token", "measured_seconds_per_token", "tokens_per_pass", "error"}
    assert all(row <= entry.keys() for entry in report["plans"])
    assert 3 <= len(report["plans"]) <= 8  # plans that the clock of the day makes twice as slow are left out
    assert "big" in {entry["plan"] for entry in report["plans"]}
    assert (finished / "report.html").stat().st_size > 10_000
    assert (finished / "simulated-against-real.png").exists()
    assert not list(finished.glob("*.partial"))


def test_a_finished_report_is_kept(profile: Path, finished: Path) -> None:
    before = (finished / "report.json").read_bytes()
    assert "replace it with --force" in refused("validate", profile, *QUICK, "-o", finished)
    again = call("validate", profile, *QUICK, "-o", finished, "--resume", "--json")
    assert json.loads(again.stdout) == json.loads(before)
    assert "complete already" in again.stderr
    for option, said in (
        (("--seed", "3"), "with seed = 0; this call says 3"),
        (("--repeats", "3"), "with repeats = 2; this call says 3"),
        (("--plan", "big(small:2)"), 'with plans = ["quick"]; this call says ["big(small:2)", "quick"]'),
        (("--baselines",), "with baselines = false; this call says true"),
    ):
        assert said in refused("validate", profile, *QUICK, *option, "-o", finished, "--resume")
    assert (finished / "report.json").read_bytes() == before


def test_force_killed_before_its_first_line_is_unfinished(profile: Path, finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "report"))
    before = (folder / "report.json").read_bytes()
    arguments = ["validate", str(profile), *QUICK, "-o", str(folder)]
    assert kill_midway([*arguments, "--force"], folder / "traces.partial", lines=0) == -signal.SIGKILL
    assert (folder / "report.json").read_bytes() == before
    assert not (folder / "traces.partial").read_bytes()
    assert "complete already" not in call(*arguments, "--resume").stderr
    assert (folder / "report.json").read_bytes() != before
    assert not list(folder.glob("*.partial"))


def test_force_that_measures_nothing_leaves_the_report(profile: Path, finished: Path) -> None:
    assert "profiled models" in refused("validate", profile, "--plan", "big(nope:2)", "-o", finished, "--force")
    assert not list(finished.glob("*.partial"))
    assert "complete already" in call("validate", profile, *QUICK, "-o", finished, "--resume").stderr
    assert "not both" in refused("validate", profile, *QUICK, "-o", finished, "--resume", "--force")


def test_plans_run_beside_the_suite_that_is_named(profile: Path, finished: Path, tmp_path: Path) -> None:
    plan = ("--plan", "big(small:7(lookup:3))", "--repeats", "1", "--max-prompts", "1")
    said = call("validate", profile, *plan, "-o", tmp_path / "alone").stderr
    assert "running the chosen plan and those of --plan alone; add --suite" in said
    alone = json.loads((tmp_path / "alone" / "report.json").read_text())
    assert len(alone["plans"]) <= 3
    said = call("validate", profile, *plan, "--suite", "quick", "-o", tmp_path / "both").stderr
    assert "alone" not in said
    both = json.loads((tmp_path / "both" / "report.json").read_text())
    labels = {row["plan"] for row in both["plans"]}
    assert len(labels) > len(alone["plans"])
    assert {row["plan"] for row in alone["plans"]} <= labels
    assert {row["plan"] for row in json.loads((finished / "report.json").read_text())["plans"]} & labels


def test_baselines_stand_beside_the_plans(profile: Path, tmp_path: Path) -> None:
    plans = ("--plan", "big(small:2)", "--plan", "big(lookup:4)")
    call("validate", profile, *plans, "--baselines", "--repeats", "2", "-o", tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    labels = {row["plan"] for row in report["baselines"]}
    assert {"transformers generate()", "transformers generate(prompt_lookup_num_tokens=10)"} < labels
    assert any("assistant_model=" in label for label in labels)
    assert all(row["family"] == "baseline" and row["error"] is None for row in report["baselines"])
    assert not labels & {row["plan"] for row in report["plans"]}
    assert {report["summary"][key] for key in ("best", "regret_against")} <= {row["plan"] for row in report["plans"]}
    assert report["summary"]["fastest_baseline"] in labels
    assert report["notes"] == []
    assert "transformers' own generate()" in (tmp_path / "report.html").read_text()
    plain = next(row for row in report["baselines"] if row["plan"] == "transformers generate()")
    assert plain["tokens_per_pass"] == 1


def test_a_sampled_profile(profile: Path, tmp_path: Path) -> None:
    sampled = tmp_path / "profile.json"
    call(*profile_arguments(profile.parent, sampled, "--temperature", "1"))
    call("validate", sampled, "--repeats", "1", "--no-baselines", "-o", tmp_path / "report")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    page = (tmp_path / "report" / "report.html").read_text()
    assert len(report["plans"]) >= 12
    assert (report["outputs_compared"], report["mismatches"]) == (False, [])
    assert "not compared token by token" in " ".join(page.split())
    assert "stays the same" not in page
    assert report["baselines"] == []
    found = report["distribution"]
    assert found["plan"] == report["summary"]["chosen"]
    assert (len(found["measured"]), len(found["predicted"]["trace replay"])) == (2, 32)
    assert (tmp_path / "report" / "run-distribution.csv").exists()


def test_max_error_decides_the_exit_code(profile: Path, finished: Path) -> None:
    strict = call("validate", profile, *QUICK, "-o", finished, "--resume", "--max-error", "0", code=1)
    assert "--max-error 0.0%" in strict.stderr
    assert "report:" in strict.stdout
    call("validate", profile, *QUICK, "-o", finished, "--resume", "--max-error", "1e9")


def test_killed_and_resumed_keeps_every_run(profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["validate", str(profile), *QUICK, "-o", str(tmp_path)]
    journal = tmp_path / "runs.partial"
    code = kill_midway(arguments, journal, lines=8)
    assert code == -signal.SIGKILL
    data = journal.read_bytes()
    kept = [json.loads(line) for line in data[: data.rfind(b"\n")].split(b"\n")][1:]
    assert kept
    assert "add --resume" in refused(*arguments)
    assert "seed = 0; this call says 4" in call(*arguments, "--resume", "--seed", "4", code=2).stderr.splitlines()[-1]

    seen: list[MeasuredRun] = []
    monkeypatch.setattr(MeasuredRun, "from_record", classmethod(remember(MeasuredRun.from_record, seen)))
    call(*arguments, "--resume")
    assert [json.loads(json.dumps(run.to_record())) for run in seen[: len(kept)]] == kept
    assert len(json.loads((tmp_path / "report.json").read_text())["plans"]) == 8


def remember(original: object, seen: list[MeasuredRun]) -> object:
    def from_record(_cls: type, record: dict) -> MeasuredRun:
        seen.append(original(record))
        return seen[-1]

    return from_record


def test_refused_before_anything_runs(profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    assert "profiled models" in refused("validate", profile, "--plan", "big(nope:2)", "-o", out)
    assert "end in the target big" in refused("validate", profile, "--plan", "small(big:2)", "-o", out)
    assert "out of quick, standard, full" in refused("validate", profile, "--suite", "vast", "-o", out)
    assert "room for the longest prompt" in refused("validate", profile, "--max-new-tokens", "500", "-o", out)
    assert "is a file" in refused("validate", profile, "-o", profile)
    assert "which does not exist" in refused("validate", profile, "--prompts", "none.jsonl", "-o", out)
    assert not list(out.glob("*"))


def test_another_machine_or_thread_count_is_refused(profile: Path, tmp_path: Path) -> None:
    for change, said in ({"threads": 3}, "with 3 threads"), ({"device": "Abacus"}, "measured on Abacus"):
        moved = edited(profile, tmp_path / "profile.json", lambda it, change=change: it["provenance"].update(change))
        assert said in refused("validate", moved, "--threads", "1", "-o", tmp_path / "report")


def test_models_that_moved_away_are_named(profile: Path, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    moved = edited(profile, tmp_path / "profile.json", lambda it: it["models"]["small"].update(source=gone))
    writing = ("generate", "--profile", moved, "--plan", "big", "--prompt", "Hi.")
    for command in (("validate", moved, "-o", tmp_path / "report"), ("check", moved), writing):
        assert "expected small at" in refused(*command)
    assert Profile.load(moved).target == "big"


def test_a_budget_ends_with_a_report_of_the_prompts_it_lasted_for(profile: Path, tmp_path: Path) -> None:
    plan = ("--plan", "big(small:2)", "--repeats", "2", "--budget", "0.001s")
    call("validate", profile, *plan, "-o", tmp_path / "report")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["summary"]["prompts"] == 2
    assert report["provenance"]["budget"] == 0.001
    assert "expected --budget as a time above 0" in refused("validate", profile, *plan[:-1], "soon", "-o", tmp_path)
