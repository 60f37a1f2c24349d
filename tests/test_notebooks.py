"""The notebooks run from top to bottom, draw what they promise, and are kept without outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

if TYPE_CHECKING:
    from nbformat import NotebookNode

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
SECONDS = 240  # a run takes about 20 on two cores; more where they are shared

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


def execute(path: Path, folder: Path) -> NotebookNode:
    """Return the executed notebook; what it writes and reads besides is in `folder`."""
    done = folder / path.name
    command = [sys.executable, "-c", EXECUTE, str(path), str(done)]
    own = {
        "IPYTHONDIR": str(folder / "ipython"),
        "TMPDIR": str(folder),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    run = subprocess.run(  # noqa: S603 -- our own notebooks, by this interpreter
        command, cwd=folder, env=os.environ | own, timeout=SECONDS, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return nbformat.read(done, as_version=4)


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} >= {"quickstart", "theory"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_shows_a_figure_wherever_it_draws(path: Path, tmp_path: Path) -> None:
    for cell in code_cells(execute(path, tmp_path)):
        drawn = [output for output in cell.outputs if "image/png" in output.get("data", {})]
        assert bool(drawn) == ("plt.show()" in cell.source), cell.source
        complaints = [output.text for output in cell.outputs if output.get("name") == "stderr"]
        assert all("IProgress not found" in text for text in complaints), complaints  # transformers without widgets


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_kept_without_outputs(path: Path) -> None:
    for cell in code_cells(nbformat.read(path, as_version=4)):
        assert cell.outputs == []
        assert cell.execution_count is None
