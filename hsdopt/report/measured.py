"""What was measured: plans, baselines, and quality against speed."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from hsdopt.report.markup import Report, Row, as_table, code, in_brackets, milliseconds, number, small_range, table_row

__all__ = ["baselines_section", "plans_section", "quality_section"]


def plans_section(report: Report) -> str:
    """Return the table of the plans, fastest first."""
    summary = report["summary"]
    head = [
        "Plan",
        "Measured<br>ms per token",
        "Predicted on<br>these prompts",
        "Error",
        "Speed-up",
        "Tokens<br>per pass",
    ]
    caption = (
        f"{len(report['plans'])} plans, fastest first; {summary['prompts']} prompts, {summary['repeats']} repeats, "
        f"{summary['runs']} runs; predictions by {escape(summary['predictor'])}, in ms per token, from what the "
        "models said on these very prompts and from their speed now. \u00d7 is the time over "
        "the chosen plan's, paired over prompts."
    )
    rows = [_plan_row(row, summary) for row in report["plans"]]
    return "<h2>What was measured</h2>" + as_table(head, rows, caption)


def _plan_row(row: Row, summary: Row) -> str:
    chosen = row["plan"] == summary["chosen"]
    marks = {"chosen": chosen, "fastest": row["plan"] == summary["best"]}
    badges = "".join(f' <span class="badge">{word}</span>' for word, shown in marks.items() if shown)
    over = "" if chosen else _over(row)
    cells = [
        f"{code(row['plan'])}<small>{escape(row['family'])}{badges}</small>",
        milliseconds(row["measured_seconds_per_token"]) + small_range(row["interval"], 1e3, 1) + over,
        milliseconds(row["predicted_seconds_per_token"]),
        number(row["error"], "{:+z.1%}") + _split(row),
        number(row["speedup"], "{:.2f}") + small_range(row["speedup_interval"], 1, 2),
        number(row["tokens_per_pass"], "{:.2f}"),
    ]
    return table_row(cells, chosen=chosen)


def _over(row: Row) -> str:
    """Return the time over the chosen plan's, as small print."""
    ratio, bounds = row.get("over_chosen"), row.get("over_chosen_interval")
    if ratio is None:
        return ""
    span = "" if bounds is None else f" ({bounds[0]:.2f} to {bounds[1]:.2f})"
    return f"<small>\u00d7 {ratio:.2f}{span}</small>"


def _split(row: Row) -> str:
    """Return where the error comes from, as small print."""
    parts = [
        f"{word} {number(row[key], '{:+z.1%}')}"
        for word, key in (("acceptance", "acceptance_error"), ("cost", "cost_error"))
        if row[key] is not None
    ]
    return "".join(f"<small>{part}</small>" for part in parts)


def baselines_section(report: Report) -> str:
    """Return what transformers' own generate() took, and how the chosen plan compares."""
    rows, notes = report.get("baselines", ()), report.get("notes", ())
    if not rows and not notes:
        return ""
    head = ["Baseline", "Measured<br>ms per token", "Speed-up", "Tokens<br>per pass"]
    cells = [table_row(_baseline_cells(row)) for row in rows]
    said = "".join(f'<p class="soft">{escape(note)}</p>' for note in notes)
    table = as_table(head, cells) if rows else ""
    return f"<h2>Beside transformers' own generate()</h2>{_against(report['summary'])}{table}{said}"


def _baseline_cells(row: Row) -> list[str]:
    return [
        code(row["plan"].removeprefix("transformers ")),
        milliseconds(row["measured_seconds_per_token"]) + small_range(row["interval"], 1e3, 1),
        number(row["speedup"], "{:.2f}") + small_range(row["speedup_interval"], 1, 2),
        number(row["tokens_per_pass"], "{:.2f}"),
    ]


def _against(summary: Row) -> str:
    if summary["fastest_baseline"] is None:
        return ""
    ratio, sure = summary["against_baseline"], summary["confidence"]
    interval = in_brackets(summary["against_baseline_interval"], "{:.2f}", sure)
    return (
        "<p>Timed in the same turns as the plans, with the library's defaults, the same number of tokens and end of "
        "text ignored, from the first tokens that it hands over to the last. Nothing was predicted for them, and they "
        f"do not count for the regret. {code(summary['chosen'])} ran {ratio:.2f} times as fast as "
        f"{code(summary['fastest_baseline'])}, the fastest of them{interval}.</p>"
    )


def quality_section(quality: Mapping[str, Any] | None) -> str:
    """Return what speed costs in quality, plan by plan."""
    if quality is None:
        return ""
    head = [
        "Plan",
        "Time per token,<br>target = 1",
        "Tokens unlike<br>the target's",
        "Outputs equal<br>to the target's",
    ]
    head += [f"{escape(quality['measure'])} against<br>{against}" for against in ("the target", "the references")]
    cells = [_quality_cells(row, quality["measure"].replace("-", "_")) for row in quality["plans"]]
    rows = [table_row(row) for row in cells]
    text = (
        "<p>How near the outputs of each plan come to the target's own, and to right answers where the prompts have "
        "them, as <code>hsdopt quality</code> measured. Marked are the plans that no other beats in both time and "
        "quality.</p>"
    )
    return f"<h2>Speed against quality</h2>{text}" + as_table(head, rows)


def _quality_cells(row: Row, measure: str) -> list[str]:
    own, reference = (row[against] or {} for against in ("own", "reference"))
    badge = ' <span class="badge">undominated</span>' if row["undominated"] else ""
    return [
        f"{code(row['name'])}<small>{escape(row['family'])}{badge}</small>",
        number(row["time"], "{:.2f}") + small_range(row["time_interval"], 1, 2),
        number(row["deviation"], "{:.1%}"),
        number(own.get("exact"), "{:.0%}"),
        number(own.get(measure), "{:.1f}"),
        number(reference.get(measure), "{:.1f}"),
    ]
