"""What `hsdopt quality` prints: plans, predictions, and the verdicts in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hsdopt.cli.common import new_table, output
from hsdopt.cli.quality_report import other_draws, quality_of

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["show"]

_NAMES = {"bleu": "BLEU", "rouge-l": "ROUGE-L"}
_FEW = 10
"""Prompts below which a line says how little they show."""


def show(report: Mapping[str, Any], folder: Path, *, predicted: bool) -> None:
    """Print the plans, fastest first, the verdicts, and where the rest is."""
    typer.echo("time per token, the target alone = 1; bild(small model, fallback, rollback)")
    output().print(_table(report))
    if predicted:
        output().print(_predictions(report))
    for line in (*_legend(report), *_verdict_lines(report)):
        output().print(line)
    typer.echo(f"frontier: {folder / 'frontier.png'}")


def _table(report: Mapping[str, Any]) -> Table:
    known = report["prompts_with_reference"] > 0
    table = new_table("plan", "time", "95 %", "drafted", "same", "BLEU", "ROUGE-L", *(["ref."] if known else []))
    for row in report["plans"]:
        bounds = row["time_interval"]
        own, answer = row["own"], quality_of(row, report["measure"], "reference")
        table.add_row(
            row["name"],
            f"{row['time']:.2f}",
            "" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f}",
            f"{row['drafted_share']:.0%}",
            f"{own['agreement']:.0%}",
            f"{own['bleu']:.1f}",
            f"{own['rouge_l']:.1f}",
            *([] if not known else ["" if answer is None else f"{answer:.1f}"]),
        )
    return table


def _predictions(report: Mapping[str, Any]) -> Table:
    """Return times and deviations as predicted and as measured."""
    table = new_table("plan", "time", "closed form", "replay", "deviates", "predicted")
    for row in report["plans"]:
        said = row["predicted"]
        times = (row["time"], said["closed_form"], said["trace_replay"])
        shares = (row["deviation"], said["deviation"])
        table.add_row(
            row["name"],
            *("" if value is None else f"{value:.2f}" for value in times),
            *("" if value is None else f"{value:.1%}" for value in shares),
        )
    return table


def _legend(report: Mapping[str, Any]) -> Iterator[str]:
    known, count = report["prompts_with_reference"], report["prompts"]
    own = "the target's output, drawn apart" if report["sampled"] else "the target's output"
    yield f"drafted: tokens that are not the target's own; same (tokens), BLEU, ROUGE-L: against {own}"
    if report["sampled"]:
        yield f"lossless plans, whose outputs are drawn by the target's law too, reach {_drawn(report)} of it"
    if known:
        yield f"ref.: {_NAMES[report['measure']]} against references, for prompts that have one ({known} of {count})"
    if count < _FEW:
        yield f"so few prompts ({count}) show little about quality: use more before choosing by it"


def _drawn(report: Mapping[str, Any]) -> str:
    """Return the range of what lossless plans reach against outputs drawn apart from theirs."""
    values = other_draws(report["plans"], report["measure"])
    return f"{_NAMES[report['measure']]} {min(values, default=100.0):.1f} to {max(values, default=100.0):.1f}"


def _verdict_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what lossy decoding gains at equal latency and at equal quality, or that it gains nothing."""
    name = _NAMES[report["measure"]]
    found = report["verdicts"]
    yield _at_equal_latency(found["own"], name)
    yield _at_equal_quality(found["own"], name, "equal quality")
    if "reference" in found:
        yield _at_equal_quality(found["reference"], name, "equal quality by the references")


def _at_equal_latency(found: Mapping[str, Any], name: str) -> str:
    rival, point, fastest = found["lossless"], found["equal_latency"], found["fastest"]
    if rival is None or fastest is None:
        return "equal latency: nothing to compare with"
    start = f"equal latency: the best lossless plan, {rival['plan']}, takes {rival['time']:.2f}"
    if point is None:
        return f"{start}; no setting is as fast, {_at(fastest, name)} is the fastest"
    return f"{start}; {_at(point, name)} is the best of those as fast (lossless: {found['limit']:.1f})"


def _at_equal_quality(found: Mapping[str, Any], name: str, start: str) -> str:
    rival, point, limit = found["lossless"], found["equal_quality"], found["limit"]
    if rival is None or point is None:
        return f"{start}: nothing to compare with"
    speeds = f"speed-up {1 / point['time']:.2f}, lossless at best {1 / rival['time']:.2f}"
    values = f"{name} {point['quality']:.1f}, lossless {limit:.1f}"
    if found["kept"]:
        return f"{start}: {point['plan']} is the fastest of those that lose nothing ({values}): {speeds}"
    return f"{start}: every setting loses some; {point['plan']} loses least ({values}): {speeds}"


def _at(point: Mapping[str, Any], name: str) -> str:
    return f"{point['plan']} at {point['time']:.2f} with {name} {point['quality']:.1f}"
