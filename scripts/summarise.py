"""Print reports of `hsdopt validate` as tables in Markdown, as the README shows them.

Usage: python scripts/summarise.py NAME=FOLDER [NAME=FOLDER ...]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from hsdopt.files import read_json

SUMMARY = (
    "workload",
    "chosen plan",
    "speed-up predicted",
    "speed-up measured (95 %)",
    "model error, median",
    "95th percentile",
    "transfer error, median",
    "intervals that hold (median width)",
    "ranks (pairs)",
    "regret (95 %)",
    "fastest baseline",
    "speed-up over it (95 %)",
)
PREDICTORS = (
    "workload",
    "predictor",
    "prompts",
    "error, median",
    "95th percentile",
    "ranks (pairs)",
    "its pick's regret",
)
SHOWN = ("trace replay", "constant-cost iid")
"""The predictor that decides, and the published one; the reports have them all."""

PLANS = (
    "plan",
    "measured, ms per token (95 %)",
    "predicted",
    "error",
    "tokens per pass",
    "speed-up",
    "time over the chosen plan's (95 %)",
    "outside passes",
)


def main(*arguments: str) -> None:
    """Print one summary column per report, how its predictors did, then its plans and baselines."""
    reports = {}
    for argument in arguments:
        name, _, folder = argument.partition("=")
        reports[name] = read_json(Path(folder) / "report.json")
    columns = [_summary(name, report) for name, report in reports.items()]
    heading, *facts = zip(SUMMARY, *columns, strict=True)
    lines = _table(heading, facts)
    scores = [
        _score(name, score)
        for name, report in reports.items()
        for score in report["predictors"]
        if score["predictor"] in SHOWN
    ]
    lines += ["", *_table(PREDICTORS, scores)]
    for name, report in reports.items():
        rows = (*report["plans"], *report.get("baselines", ()))
        lines += ["", f"`{name}`:", "", *_table(PLANS, [_plan(row) for row in rows])]
    sys.stdout.write("\n".join(lines) + "\n")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table without the columns that say nothing, as those that older reports lack."""
    told = [bool("".join(column)) for column in zip(*rows, strict=True)]
    headings, *rows = (list(compress(row, told)) for row in (headings, *rows))
    return ["| " + " | ".join(cells) + " |" for cells in (headings, ["---"] * len(headings), *rows)]


def _summary(name: str, report: Mapping[str, Any]) -> list[str]:
    summary = report["summary"]
    width = summary.get("transfer_interval_width")
    fastest = summary.get("fastest_baseline")
    return [
        name,
        f"`{summary['chosen']}`",
        _ratio(summary.get("predicted_speedup")),
        _ratio(summary["speedup"]) + _span(summary.get("speedup_interval"), 1, ".2f"),
        _share(summary["median_error"]),
        _share(summary["p95_error"]),
        _share(summary["transfer_median_error"]),
        _share(summary["transfer_coverage"]) + ("" if width is None else f" ({_share(width)})"),
        f"{_share(summary['rank_agreement'])} ({summary['rank_pairs']})",
        _share(summary["regret"]) + _span(summary.get("regret_interval"), 1, ".1%"),
        "" if fastest is None else f"`{fastest}`",
        _ratio(summary.get("against_baseline")) + _span(summary.get("against_baseline_interval"), 1, ".2f"),
    ]


def _score(name: str, score: Mapping[str, Any]) -> list[str]:
    return [
        name,
        score["predictor"],
        "the timed ones" if score["kind"] == "model" else "the profile's",
        _share(score["median_error"]),
        _share(score["p95_error"]),
        f"{_share(score['rank_agreement'])} ({score['rank_pairs']})",
        _share(score["regret"]),
    ]


def _plan(row: Mapping[str, Any]) -> list[str]:
    measured = f"{1e3 * row['measured_seconds_per_token']:.1f}" + _span(row["interval"], 1e3, ".1f")
    predicted, tokens = row["predicted_seconds_per_token"], row["tokens_per_pass"]
    return [
        f"`{row['plan']}`",
        measured,
        "" if predicted is None else f"{1e3 * predicted:.1f}",
        "" if row["error"] is None else f"{row['error']:+.1%}",
        "" if tokens is None else f"{tokens:.2f}",
        _ratio(row.get("speedup")),
        _ratio(row.get("over_chosen")) + _span(row.get("over_chosen_interval"), 1, ".2f"),
        _share(row.get("outside")),
    ]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _span(bounds: Sequence[float] | None, scale: float, style: str) -> str:
    return "" if bounds is None else f" ({scale * bounds[0]:{style}} to {scale * bounds[1]:{style}})"


if __name__ == "__main__":
    main(*sys.argv[1:])
