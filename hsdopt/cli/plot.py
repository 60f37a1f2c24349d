"""`hsdopt plot`: the figures of a profile or a report, drawn again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hsdopt.cli.common import load_profile, output_folder, print_json, require_extra
from hsdopt.errors import HsdoptError
from hsdopt.files import excerpt, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

Source = Annotated[
    Path, typer.Argument(help="A profile, or the report.json of hsdopt validate.", metavar="PROFILE|REPORT")
]
ProfilePath = Annotated[
    Path | None, typer.Option("--profile", help="With a report: the profile behind it, whose figures are added.")
]
Out = Annotated[Path, typer.Option("--output", "-o", help="The folder for PNG, SVG and CSV files.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plot(
    source: Source,
    profile: ProfilePath = None,
    output_path: Out = Path("plots"),
    as_json: Json = False,
) -> None:
    """Draw the figures of a profile or a report; each comes as PNG and SVG, and its data as CSV."""
    report = _report(source)
    behind = source if report is None else profile
    profiled = None if behind is None else load_profile(behind)
    with require_extra("plots"):
        from hsdopt.plots import profile_figures, report_figures, save_figure
    figures: Mapping[str, Figure]
    if report is not None:
        figures = _of_report(report_figures, report, profiled, source)
    else:
        assert profiled is not None  # noqa: S101 -- without a report the source is the profile
        figures = profile_figures(profiled)
    folder = output_folder(output_path)
    written = [path for name, figure in figures.items() for path in save_figure(figure, folder / name)]
    if as_json:
        print_json({"figures": list(figures), "files": [str(path) for path in written]})
    else:
        typer.echo("\n".join(str(path) for path in written))


def _report(path: Path) -> dict[str, Any] | None:
    """Return the report at `path`, or None if what is there is none."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise HsdoptError(f"expected a profile or a report.json at {path}; there is no such file") from None
    if not isinstance(value, dict):
        raise HsdoptError(f"expected a profile or a report.json at {path}; got {excerpt(value)}")
    return value if {"plans", "summary"} <= value.keys() else None


def _of_report(draw: Any, report: dict[str, Any], profile: Any, path: Path) -> Mapping[str, Figure]:  # noqa: ANN401
    try:
        figures: Mapping[str, Figure] = draw(report, profile)
    except KeyError as error:
        raise HsdoptError(f"expected a report.json as hsdopt validate writes it; {path} lacks {error}") from error
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise HsdoptError(
            f"expected a report.json as hsdopt validate writes it; {path} has other values ({_first_line(error)})"
        ) from error
    return figures


def _first_line(error: Exception) -> str:
    return excerpt(next(iter(str(error).splitlines()), type(error).__name__), limit=100)
