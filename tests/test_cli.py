"""The command line as a whole: what loads, what prints where, and what every mistake says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from stack import OPTIONS, call, edited, make_stack, profile_arguments, refused
from tiny import save_tiny
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hsdopt.cli.common import absolute
from hsdopt.cli.place import Place
from hsdopt.errors import HsdoptError
from hsdopt.profiles import Profile
from hsdopt.profiling import recheck
from hsdopt.profiling.cost import CostRecord
from hsdopt.runtime import load_models
from hsdopt.runtime.builtin import BUILTIN

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMANDS = ("profile", "solve", "validate", "quality", "simulate", "generate", "models", "plot", "align", "check")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stack(tmp_path_factory.mktemp("stack"))


@pytest.fixture(scope="module")
def profile(stack: Path) -> Path:
    call(*profile_arguments(stack, stack / "profile.json"))
    return stack / "profile.json"


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**{k: v for k, v in os.environ.items() if k != "COLUMNS"}, **environment},
    )


@pytest.mark.parametrize("start", ["import hsdopt", "import hsdopt.cli.app", "help"])
def test_neither_torch_nor_matplotlib_is_loaded_to_begin(start: str) -> None:
    begin = "from typer.testing import CliRunner; from hsdopt.cli.app import app; r = CliRunner().invoke(app, '--help')"
    heavy = "{'torch', 'transformers', 'matplotlib', 'pandas'}"
    code = f"{begin if start == 'help' else start}\nimport sys; print(sorted({heavy} & set(sys.modules)))"
    assert python(code).stdout.strip() == "[]"


def test_help_names_every_command_whole() -> None:
    said = call("--help").stdout
    assert all(f"\n  {name} " in said for name in COMMANDS)
    assert "..." not in said.partition("Commands:")[2]
    for name in COMMANDS:
        assert "Usage:" in call(name, "--help").stdout


SHOWN = (
    ("solve", "{profile}", "--replicates", "20"),
    ("simulate", "{profile}", "--plan", "big(small:3)", "--tokens", "2000"),
    ("models", "list"),
)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", SHOWN, ids=[command[0] for command in SHOWN])
def test_tables_are_whole(profile: Path, columns: int, command: tuple[str, ...]) -> None:
    done = call(*(part.format(profile=profile) for part in command), COLUMNS=str(columns))
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout
    assert all(len(line.rstrip()) <= columns for line in done.stdout.splitlines())
    assert not done.stderr or done.stderr.startswith("warning: ")  # whether two cores time alike is up to them


def test_a_pipe_gets_plain_text_that_nothing_folds(profile: Path) -> None:
    arguments = ["hsdopt", "solve", str(profile), "--replicates", "20"]
    done = python(f"import sys; sys.argv[:] = {arguments}; from hsdopt.cli import main; main()", NO_COLOR="1")
    assert "\x1b" not in done.stdout
    assert all(line.startswith("warning: ") for line in done.stderr.splitlines())
    labels = ("why: ", "memory: ", "work: ", "predicted by: ", "sure: ", "matters most ")
    tail = done.stdout[done.stdout.index("why: ") :].splitlines()
    assert all(line.startswith(labels) for line in tail)


def test_every_command_speaks_json_on_stdout_alone(profile: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    solved = json.loads(call("solve", profile, "--replicates", "20", "-o", plan, "--json").stdout)
    simulated = json.loads(call("simulate", profile, "--plan", plan, "--tokens", "2000", "--json").stdout)
    assert simulated["plan"] == solved["plan"]
    written = json.loads(
        call(
            "generate", "--plan", plan, "--profile", profile, "--prompt", "Hi.", "--max-new-tokens", "8", "--json"
        ).stdout
    )
    assert len(written["tokens"]) <= 8
    assert {"smollm2", "lookup"} <= {
        row["name"] for row in json.loads(call("models", "list", "--json").stdout)["models"]
    }


def test_plot_draws_profiles_and_reports(profile: Path, tmp_path: Path) -> None:
    drawn = json.loads(call("plot", profile, "-o", tmp_path / "figures", "--json").stdout)
    assert "cost-curves" in drawn["figures"]
    assert {Path(path).suffix for path in drawn["files"]} == {".png", ".svg", ".csv"}
    assert all(Path(path).stat().st_size for path in drawn["files"])
    broken = tmp_path / "report.json"
    broken.write_text('{"plans": [{}], "summary": {}}')
    assert "as hsdopt validate writes it" in refused("plot", broken)
    assert "there is no such file" in refused("plot", tmp_path / "none.json")
    assert refused("plot", tmp_path).endswith("Is a directory")


def place_of(folder: Path, *, resume: bool = False) -> Place:
    return Place(folder, "report.json", ("first", "second"), resume=resume)


def finished_place(folder: Path, **asked: object) -> Place:
    place = place_of(folder, resume=True)
    place.report.write_text(json.dumps({"provenance": asked}))
    return place


def test_a_finished_report_answers_the_same_question_only(tmp_path: Path) -> None:
    place = finished_place(tmp_path, seed=3, plans=["a", "b"])
    assert place.finished({"seed": 3, "plans": ("a", "b")}) == {"provenance": {"seed": 3, "plans": ["a", "b"]}}
    with pytest.raises(HsdoptError, match="is complete, but with seed = 3; this call says 4: repeat its options"):
        place.finished({"seed": 4})
    with pytest.raises(HsdoptError, match="but with budget = nothing; this call says 9"):
        place.finished({"budget": 9})
    assert place_of(tmp_path).finished({"seed": 3}) is None
    for text in ("{", "[1]"):
        place.report.write_text(text)
        with pytest.raises(HsdoptError, match=r"expected a report in .*: replace it with --force"):
            place.finished({})


def test_a_finished_report_is_replaced_by_force_only(tmp_path: Path) -> None:
    place = finished_place(tmp_path)
    with pytest.raises(HsdoptError, match="holds a finished report"), place.replacing(force=False):
        pytest.fail("nothing may be measured")
    place.journal("second").write_text("old")
    with place.replacing(force=True):
        assert place.journal("first").read_bytes() == b""
        assert not place.journal("second").exists()
        assert place.finished({}) is None  # a kill from here on leaves an unfinished report
        place.journal("second").write_text("new")
    place.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def stopped(journal: Path, records: int) -> None:
    if records:
        journal.write_text("new")
    raise KeyboardInterrupt


@pytest.mark.parametrize(("before", "measured", "unfinished"), [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1)])
def test_force_that_fails_leaves_what_was_there(tmp_path: Path, before: int, measured: int, unfinished: int) -> None:
    place = finished_place(tmp_path)
    if before:
        place.journal("first").write_text("old")
    with pytest.raises(KeyboardInterrupt), place.replacing(force=True):
        stopped(place.journal("first"), measured)
    assert (place.finished({}) is None) == unfinished


def timings(profile: Profile, factor: float) -> Iterator[CostRecord]:
    for name, samples in profile.samples.items():
        for sample in samples:
            for repeat in range(6):
                yield CostRecord(name, sample.tokens, sample.context, repeat, sample.median * factor)


@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (1.05, True), (0.95, True), (3.0, False), (0.3, False)])
def test_recheck_tells_drift_from_noise(profile: Path, factor: float, holds: bool) -> None:  # noqa: FBT001
    stored = Profile.load(profile)
    names = {name: SimpleNamespace() for name in stored.names}
    drifts = recheck(stored, names, measure=lambda *_, **__: timings(stored, factor))
    assert [drift.model for drift in drifts] == ["big", "cut", "small"]
    assert {drift.holds for drift in drifts} == {holds}
    assert all(drift.change == pytest.approx(factor - 1) for drift in drifts)
    assert all([sample.tokens for sample in drift.stored] == [1, 2, 3, 4, 10, 40] for drift in drifts)


def test_check_exits_with_its_verdict(profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Profile.load(profile)

    def stub(factor: float) -> object:
        return lambda _, models, **__: recheck(stored, models, measure=lambda *_, **__: timings(stored, factor))

    monkeypatch.setattr("hsdopt.profiling.recheck", stub(1.0))
    assert "profile.json holds" in call("check", profile).stdout
    monkeypatch.setattr("hsdopt.profiling.recheck", stub(3.0))
    assert "big +200.0%" in call("check", profile, code=1).stdout
    assert json.loads(call("check", profile, "--json", code=1).stdout)["holds"] is False
    elsewhere = edited(profile, tmp_path / "profile.json", lambda it: it["provenance"].update(device="Abacus"))
    assert "it was measured on Abacus" in call("check", elsewhere, code=1).stdout


def test_recheck_measures(profile: Path) -> None:
    stored = Profile.load(profile)
    drifts = recheck(stored, load_models(stored), seconds=0)
    assert {len(sample.seconds) for drift in drifts for sample in drift.measured} == {5}
    assert all(second > 0 for drift in drifts for sample in drift.measured for second in sample.seconds)


def test_sources_hold_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big").mkdir()
    assert absolute("big") == absolute("./big") == str(tmp_path / "big")
    assert absolute("skip:1@big") == f"skip:1@{tmp_path / 'big'}"
    assert [absolute(name) for name in ("smollm2", "lookup", "org/model")] == ["smollm2", "lookup", "org/model"]


BAD = [
    (["--temperature", "-1"], "invalid value for '--temperature'"),
    (["--temperature", "nan"], "invalid value for '--temperature'"),
    (["--temperature", "inf"], "expected a finite temperature"),
    (["--top-p", "0"], "above 0 and at most 1"),
    (["--contexts", "abc"], "expected contexts as whole numbers"),
    (["--contexts", "0"], "expected contexts of at least 1"),
    (["--contexts", "256"], "below the 256 positions of big"),
    (["--max-new-tokens", "5000"], "the model holds 256"),
    (["--repeats", "0"], "invalid value for '--repeats'"),
    (["--bogus"], "no such option: --bogus"),
    (["--device", "abacus"], "expected a device such as cpu or cuda"),
    (["--dtype", "int3"], "as dtype; got 'int3'"),
    (["--draft", "small=lookup"], "got small twice"),
    (["--draft", "copy=lookup"], "expected the name lookup for the lookup drafter"),
    (["--draft", "nowhere-to-be-found"], "unknown model 'nowhere-to-be-found'"),
    (["--draft", "x=skip:9@{root}/big"], "expected layers from 0 to 1"),
    (["--draft", "x={root}/empty"], "expected a model folder with config.json"),
    (["--draft", "x={root}/other"], "expected one vocabulary for big and x"),
    (["--prompts", "none.jsonl"], "which does not exist"),
    (["--prompts", "{root}/bad.jsonl"], "bad.jsonl, line 2: expected one JSON object"),
    (["--prompts", "{root}/zero.jsonl"], "expected at least one prompt, got none"),
    (["--prompts", "{root}/one.jsonl"], "expected at least 2 different prompts"),
    (["-o", "{root}"], "expected a file as -o"),
    (["-o", "/proc/none/profile.json"], "cannot write into /proc/none"),
    (["--resume", "--force"], "expected --resume or --force, not both"),
]


@pytest.fixture(scope="module")
def bad(stack: Path) -> Path:
    (stack / "empty").mkdir()
    (stack / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": oops}\n')
    (stack / "zero.jsonl").write_text("")
    (stack / "one.jsonl").write_text('{"prompt": "a"}\n')
    save_tiny(stack / "other")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(259)}, unk_token="w0"))  # noqa: S106
    ).save_pretrained(stack / "other")
    return stack


@pytest.mark.parametrize(("extra", "said"), BAD, ids=[" ".join(extra) for extra, _ in BAD])
def test_bad_input_is_one_line(
    bad: Path, tmp_path: Path, extra: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    arguments = ["profile", "--target", f"big={bad / 'big'}", "--draft", f"small={bad / 'small'}", *OPTIONS]
    where = ["--prompts", str(bad / "prompts.jsonl"), "-o", str(tmp_path / "profile.json")]
    assert said in refused(*arguments, *where, *(part.format(root=bad) for part in extra))
    assert not (tmp_path / "profile.json").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_plans_and_profiles_are_checked(profile: Path, stack: Path, tmp_path: Path) -> None:
    lines = call("simulate", profile, "--plan", "big(small)", code=2).stderr.splitlines()
    assert "expected a draft length after small" in lines[0]
    assert lines[2].index("^") == lines[1].index(")")
    assert "(small, cut, lookup, big); got nope" in refused("simulate", profile, "--plan", "big(nope:2)")
    assert "no such file" in refused("simulate", profile, "--plan", "none.json")
    assert "no such file" in refused("solve", tmp_path / "none.json")
    assert "expected JSON in" in refused("solve", stack / "prompts.jsonl")
    (tmp_path / "new.json").write_text(profile.read_text().replace('"schema": 1', '"schema": 7'))
    assert "expected schema 1" in refused("solve", tmp_path / "new.json")
    assert "no such command" in refused("frobnicate")
    assert "missing option '--plan'" in refused("simulate", profile)
    assert "expected --target" in refused("profile", "--draft", "lookup")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(13, "Permission denied", "x.json"), 2, "x.json: Permission denied"),
        (OSError("odd"), 2, "odd"),
        (MemoryError(), 2, "out of memory"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_the_unexpected_is_one_line_too(
    profile: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("hsdopt.profiles.Profile.load", fail)
    assert said in refused("solve", profile, code=code)


def test_built_in_names_stand_for_the_recipes_that_profiles_keep() -> None:
    for name, (recipe, _) in BUILTIN.items():
        assert absolute(name) == recipe
