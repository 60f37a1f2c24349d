"""Print the summary of several report.json files as a table in Markdown, for the README.

Usage: python scripts/summarise.py FOLDER WORKLOAD [WORKLOAD ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _row(folder: Path, workload: str) -> str:
    report = json.loads((folder / workload / "report.json").read_text(encoding="utf-8"))
    summary = report["summary"]
    scores = {(score["predictor"], score["kind"]): score for score in report["predictors"]}
    iid = scores.get(("constant-cost iid", "model"), {})
    low, high = summary.get("speedup_interval") or (None, None)
    cells = [
        workload,
        f"`{summary['chosen']}`",
        f"{summary['speedup']:.2f}" + ("" if low is None else f" ({low:.2f} to {high:.2f})"),
        _percent(summary["median_error"]),
        _percent(summary["p95_error"]),
        _percent(summary["transfer_median_error"]),
        _percent(summary["regret"]),
        _percent(iid.get("median_error")),
    ]
    return "| " + " | ".join(cells) + " |"


def main(folder: str, *workloads: str) -> None:
    """Print one row per workload."""
    headings = (
        "workload",
        "chosen plan",
        "measured speed-up (95 %)",
        "model error, median",
        "95th percentile",
        "transfer error, median",
        "regret",
        "constant-cost iid, median",
    )
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    lines += [_row(Path(folder), workload) for workload in workloads]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
