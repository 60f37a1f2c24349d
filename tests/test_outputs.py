"""What stands where something is written: links and devices stay, regular files change in one step."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from traced import traced_profile
from typer.testing import CliRunner

from hsdopt.cli.align_request import Folder
from hsdopt.cli.app import app
from hsdopt.cli.common import output_file, output_folder
from hsdopt.errors import HsdoptError
from hsdopt.files import write_document
from hsdopt.plan import plan_from_json
from hsdopt.profiles import Profile, traces_path
from hsdopt.profiling.journal import Journal


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("p") / "profile.json"
    traced_profile(0, prompts=4, length=24).save(path)
    return path


def test_a_link_stays_and_its_target_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    real, link = tmp_path / "kept" / "real.txt", tmp_path / "link.txt"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_document(link, b"new")
    assert link.is_symlink()
    assert (real.read_text(), stat.S_IMODE(real.stat().st_mode)) == ("new", 0o640)
    assert sorted(tmp_path.rglob("*.part")) == []


def test_a_dangling_link_gets_its_target(tmp_path: Path) -> None:
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "real.txt")
    write_document(link, b"new")
    assert link.is_symlink()
    assert (tmp_path / "real.txt").read_bytes() == b"new"


def test_a_document_goes_through_a_fifo(tmp_path: Path, profile: Path) -> None:
    fifo = tmp_path / "plan.json"
    os.mkfifo(fifo)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    result = CliRunner().invoke(app, ["solve", str(profile), "--replicates", "0", "-o", str(fifo)])
    reader.join(timeout=10)
    assert result.exit_code == 0, result.output
    assert plan_from_json(json.loads(read[0])).target == "big"
    assert stat.S_ISFIFO(fifo.stat().st_mode)


@pytest.mark.parametrize("what", ["profile", "journal"])
def test_what_is_more_than_a_document_refuses_a_fifo(tmp_path: Path, what: str) -> None:
    fifo = tmp_path / "p.json"
    os.mkfifo(fifo)
    write = partial(traced_profile(0, prompts=4, length=24).save, fifo)
    with pytest.raises(HsdoptError, match="expected a regular file"):
        (write if what == "profile" else partial(Journal, fifo, {}, resume=True))()
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_device_is_written_through(tmp_path: Path, profile: Path) -> None:
    for device, code in (("/dev/null", 0), ("/dev/full", 2)):
        before = Path(device).stat()
        result = CliRunner().invoke(app, ["solve", str(profile), "--replicates", "0", "-o", device])
        assert result.exit_code == code
        after = Path(device).stat()
        assert (before.st_mode, before.st_rdev) == (after.st_mode, after.st_rdev)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("same_name", [True, False])
def test_a_profile_behind_a_link_keeps_its_traces_beside_it(tmp_path: Path, *, same_name: bool) -> None:
    (tmp_path / "kept").mkdir()
    real = tmp_path / "kept" / "real.json"
    traced_profile(0, prompts=4, length=24).save(real)
    link = tmp_path / ("real.json" if same_name else "latest.json")
    link.symlink_to(real)
    assert Profile.load(link).traces is not None
    traced_profile(1, prompts=4, length=24).save(link)
    assert link.is_symlink()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["kept", link.name])
    assert Profile.load(real).samples == traced_profile(1, prompts=4, length=24).samples


def test_links_to_both_files_of_a_profile_are_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    real = tmp_path / "kept" / "a1.json"
    traced_profile(0, prompts=4, length=24).save(real)
    link = tmp_path / "p.json"
    link.symlink_to(real)
    (tmp_path / "p.traces.npz").symlink_to(traces_path(real))
    traced_profile(1, prompts=4, length=24).save(link)
    assert (tmp_path / "p.traces.npz").is_symlink()
    assert Profile.load(link).samples == Profile.load(real).samples


def test_a_dash_prints_the_document_alone(profile: Path) -> None:
    result = CliRunner().invoke(app, ["solve", str(profile), "--replicates", "0", "-o", "-"])
    assert plan_from_json(json.loads(result.stdout)).target == "big"
    both = CliRunner().invoke(app, ["solve", str(profile), "-o", "-", "--json"])
    assert both.exit_code == 2
    assert "not both" in both.output


@pytest.mark.parametrize("options", [["--json"], [], ["-o", "-"]])
def test_a_closed_pipe_is_no_fault(profile: Path, options: list[str]) -> None:
    command = [sys.executable, "-c", "from hsdopt.cli import main; main()", "solve", str(profile), "--replicates", "0"]
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(  # noqa: S603 -- our own command
        [*command, *options], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_letters_that_the_locale_lacks_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    traced_profile(0, prompts=4, length=24).save(path)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    ended = subprocess.run(  # noqa: S603 -- our own command
        [
            sys.executable,
            "-c",
            "from hsdopt.cli import main; main()",
            "simulate",
            str(path),
            "--plan",
            r'big("\u00e9":3)',
        ],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert ended.returncode == 2
    assert "\\xe9" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("check", [output_file, output_folder, lambda path: folder(path).clear()])
def test_a_dash_is_refused_where_more_than_one_document_is_written(check: Callable[[Path], object]) -> None:
    with pytest.raises(HsdoptError, match="standard output takes one document"):
        check(Path("-"))


def folder(path: Path) -> Folder:
    return Folder(path, None, resume=False, force=True)


def test_a_folder_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "alignment.json").write_text("{}")
    link = tmp_path / "drafter"
    link.symlink_to(tmp_path / "kept")
    place = folder(link)
    place.clear()
    made = place.partial / "made"
    made.mkdir()
    (made / "new").touch()
    place.settle(made)
    assert link.is_symlink()
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["new"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["drafter", "kept"]


def test_a_folder_that_holds_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(HsdoptError, match="it holds other files"):
        folder(tmp_path).clear()
    assert (tmp_path / "thesis.txt").exists()


def test_a_training_that_force_began_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "drafter"
    path.mkdir()
    (path / "alignment.json").write_text("{}")
    begun = Folder(path, None, resume=False, force=True)
    begun.clear()
    begun.journal.write_text('{"header": {}}\n{"step": 1}\n')
    with pytest.raises(HsdoptError, match="is there already"):
        Folder(path, None, resume=False, force=False).clear()
    Folder(path, None, resume=True, force=False).clear()
    assert begun.journal.exists()
