"""The page itself, and the folder that it is written to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from hsdopt.errors import HsdoptError
from hsdopt.files import read_json, require_regular, write_document
from hsdopt.report.answer import answer_section, headline, regret_section, tiles_section
from hsdopt.report.details import (
    figures_section,
    glossary_section,
    outputs_section,
    predictors_section,
    provenance_section,
)
from hsdopt.report.markup import Report
from hsdopt.report.measured import baselines_section, plans_section, quality_section

if TYPE_CHECKING:  # matplotlib is an extra, and slow to load
    from matplotlib.figure import Figure

__all__ = ["Written", "html_page", "write_report"]


@dataclass(frozen=True, slots=True)
class Written:
    """Where a report was written.

    Attributes
    ----------
    json, html : Path
    figures : tuple of Path
        PNG, SVG and CSV files.
    """

    json: Path
    html: Path
    figures: tuple[Path, ...]


def write_report(report: Report, figures: Mapping[str, Figure], directory: str | Path) -> Written:
    """Write report.json, report.html and every figure (PNG, SVG, CSV) into `directory`; return the paths.

    Parameters
    ----------
    report : mapping
        As `Comparison.to_report` returns it.
    figures : mapping of str to Figure
        By name, in reading order, as `hsdopt.plots.report_figures` returns them; may be empty.
    directory : path
        Made if it is missing. Each file is replaced in one step; report.json is written first. A quality.json that
        lies there already goes into the page.

    Raises
    ------
    HsdoptError
        If a file cannot be written.
    """
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report, indent=1, allow_nan=False, ensure_ascii=False)
        _write(folder / "report.json", text + "\n")
        paths = _save_figures(figures, folder)
        images = {name: (folder / f"{name}.svg").read_bytes() for name in figures}
        _write(folder / "report.html", html_page(report, images, quality=_read_quality(folder / "quality.json")))
    except OSError as error:
        raise HsdoptError(
            f"cannot write the report to {folder}: {error.strerror or error}; free some space or choose another -o"
        ) from error
    return Written(folder / "report.json", folder / "report.html", paths)


def html_page(
    report: Report, images: Mapping[str, bytes] | None = None, *, quality: Mapping[str, Any] | None = None
) -> str:
    """Return the page of a report, self-contained.

    Parameters
    ----------
    report : mapping
        As in report.json.
    images : mapping of str to bytes, optional
        SVG files by figure name, in reading order.
    quality : mapping, optional
        As in quality.json, which `hsdopt quality` writes; shown as a table.
    """
    parts = [
        answer_section(report),
        tiles_section(report["summary"]),
        regret_section(report["summary"]),
        plans_section(report),
        baselines_section(report),
        quality_section(quality),
        figures_section(images or {}),
        predictors_section(report),
        outputs_section(report),
        glossary_section(),
        provenance_section(report),
    ]
    template = Template(resources.files("hsdopt").joinpath("data/report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(headline(report["summary"])), body="\n".join(part for part in parts if part)
    )


def _write(path: Path, text: str) -> None:
    require_regular(path, "a report")
    write_document(path, text.encode())


def _save_figures(figures: Mapping[str, Figure], folder: Path) -> tuple[Path, ...]:
    if not figures:
        return ()
    from hsdopt.plots import save_figure  # noqa: PLC0415 (loads matplotlib, which whoever has figures has)

    return tuple(path for name, figure in figures.items() for path in save_figure(figure, folder / name))


def _read_quality(path: Path) -> dict[str, Any] | None:
    """Return what quality.json says; None if there is none, or it is not as `hsdopt quality` writes it."""
    try:
        value = read_json(path)
    except (OSError, HsdoptError):
        return None
    if not isinstance(value, dict) or value.get("format") != "hsdopt-quality":
        return None
    try:
        quality_section(value)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError):
        return None
    return value
