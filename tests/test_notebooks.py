"""The notebooks run from top to bottom, draw what they promise, and are kept without outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbformat import NotebookNode

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
SECONDS = 240  # a run takes 20 to 45 on one core; more where it is shared

# In a process of its own: the kernel's libraries warn about their own affairs, which are not ours to turn into errors.
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(path: Path, folder: Path, **variables: str) -> NotebookNode:
    """Return the executed notebook; what it writes and reads besides is in `folder`."""
    done = folder / path.name
    command = [sys.executable, "-c", EXECUTE, str(path), str(done)]
    own = {
        "IPYTHONDIR": str(folder / "ipython"),
        "TMPDIR": str(folder),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        **variables,
    }
    run = subprocess.run(  # noqa: S603 -- our own notebooks, by this interpreter
        command, cwd=folder, env=os.environ | own, timeout=SECONDS, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return nbformat.read(done, as_version=4)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], tuple[NotebookNode, Path]]:
    """Return a function that runs a notebook, once, and gives it and its folder."""

    @cache
    def run(path: Path) -> tuple[NotebookNode, Path]:
        folder = tmp_path_factory.mktemp(path.stem)
        return execute(path, folder), folder

    return run


def printed(notebook: NotebookNode) -> str:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} >= {"big_little_decoder", "quickstart", "theory"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_shows_a_figure_wherever_it_draws(
    path: Path, executed: Callable[[Path], tuple[NotebookNode, Path]]
) -> None:
    for cell in code_cells(executed(path)[0]):
        drawn = [output for output in cell.outputs if "image/png" in output.get("data", {})]
        assert bool(drawn) == ("plt.show()" in cell.source), cell.source
        complaints = [output.text for output in cell.outputs if output.get("name") == "stderr"]
        assert all("IProgress not found" in text for text in complaints), complaints  # transformers without widgets


def test_big_little_decoder_reads_what_was_made_before(
    tmp_path: Path, executed: Callable[[Path], tuple[NotebookNode, Path]]
) -> None:
    """What it made, of tiny models, is laid out like the folder of the ladder: read again, it says the same."""
    path = next(path for path in NOTEBOOKS if path.stem == "big_little_decoder")
    made, folder = executed(path)
    (report,) = folder.rglob("quality.json")
    again = execute(path, tmp_path, HSDOPT_LADDER=str(report.parents[1]))
    assert printed(again) == printed(made)
    assert not list(tmp_path.rglob("quality.json"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_kept_without_outputs(path: Path) -> None:
    for cell in code_cells(nbformat.read(path, as_version=4)):
        assert cell.outputs == []
        assert cell.execution_count is None
