"""The rest of the page: figures, how the predictions held, outputs that differ, words, and provenance."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from hsdopt.report.answer import sampled
from hsdopt.report.markup import Report, Row, as_table, code, number, percent, table_row
from hsdopt.report.words import CAPTIONS, WORDS

__all__ = ["figures_section", "glossary_section", "outputs_section", "predictors_section", "provenance_section"]


def figures_section(images: Mapping[str, bytes]) -> str:
    """Return the figures with their captions; nothing if there are none."""
    if not images:
        return ""
    figures = "".join(_figure(name, image) for name, image in images.items())
    return f'<h2>Figures</h2><div class="figures">{figures}</div>'


def _figure(name: str, image: bytes) -> str:
    caption = escape(CAPTIONS.get(name, name.replace("-", " ")))
    source = base64.b64encode(image).decode()
    # As an image, not inline: the ids inside two SVG files would clash on one page.
    picture = f'<img alt="{caption}" src="data:image/svg+xml;base64,{source}">'
    return f'<figure id="{escape(name)}"><div class="scroll">{picture}</div><figcaption>{caption}</figcaption></figure>'


def predictors_section(report: Report) -> str:
    """Return how well every predictor did; nothing if there was none."""
    if not report["predictors"]:
        return ""
    head = ["Predictor", "Kind", "Plans", "Median<br>error", "95th<br>percentile", "Rank<br>correlation"]
    head += ["Rank<br>agreement", "Regret of<br>its pick", "Its pick"]
    rows = [_predictor_row(entry) for entry in report["predictors"]]
    text = "<p>Each way to predict, over all plans it could predict, and what following it would have cost.</p>"
    return f"<h2>How well the predictions held</h2>{text}" + as_table(head, rows, _coverage(report["summary"]))


def _predictor_row(entry: Row) -> str:
    pick = "" if entry["pick"] is None else code(entry["pick"])
    cells = [
        escape(entry["predictor"]),
        "same prompts" if entry["kind"] == "model" else "new prompts",
        str(entry["plans"]),
        number(entry["median_error"], "{:.1%}"),
        number(entry["p95_error"], "{:.1%}"),
        number(entry["spearman"], "{:.2f}"),
        number(entry["rank_agreement"], "{:.0%}"),
        number(entry["regret"], "{:+z.1%}"),
        pick,
    ]
    return table_row(cells)


def _coverage(summary: Row) -> str:
    share, width = summary["transfer_coverage"], summary.get("transfer_interval_width")
    if share is None:
        return ""
    of = f" (of {summary['transfer_intervals']})" if "transfer_intervals" in summary else ""
    wide = "" if width is None else f"; its median width is {percent(100 * width)} of the predicted time"
    return (
        f"The interval predicted from the profile held the measured time of {percent(100 * share)} of plans{of}{wide}."
    )


def outputs_section(report: Report) -> str:
    """Return the section on outputs that differ; one sentence if none was recorded."""
    entries = report["mismatches"]
    if sampled(report):
        return (
            "<h2>Outputs</h2><p>Tokens were drawn, so outputs differ from run to run and were not compared token by "
            "token. Every plan but Big Little Decoder draws from the target's own law whatever its drafters say; this "
            "rests on the rejection rule and its tests, not on these runs. The outputs timed are other samples than "
            "those that the predictions were made from, so the errors hold that difference too.</p>"
        )
    if not entries:
        return "<h2>Outputs</h2><p>No output that differs from the target's own was recorded.</p>"
    head = ["Plan", "Prompt", "Position", "Gap of the<br>top two logits", "Bound", "Near tie"]
    rows = [_mismatch_row(entry) for entry in entries]
    text = (
        "<p>These outputs leave the target's own at the place shown. At a near tie the target's two best tokens are "
        "so close that rounding, which depends on how many tokens a pass reads, decides between them.</p>"
    )
    return f"<h2>Outputs</h2>{text}" + as_table(head, rows)


def _mismatch_row(entry: Row) -> str:
    where = (code(entry["plan"]), entry["prompt"], entry["position"])
    return table_row([*where, f"{entry['gap']:.2g}", f"{entry['bound']:.2g}", "yes" if entry["near_tie"] else "no"])


def glossary_section() -> str:
    """Return what the words mean."""
    words = "".join(f"<dt>{word}</dt><dd>{escape(text)}</dd>" for word, text in WORDS.items())
    return f'<h2>What the words mean</h2><dl class="words">{words}</dl>'


def provenance_section(report: Report) -> str:
    """Return what was timed, where and how."""
    summary, drift = report["summary"], report["summary"]["drift"]
    facts: dict[str, Any] = {
        "tokens timed": summary["tokens"],
        "seconds timed": f"{summary['seconds']:.1f}",
        "drift from first to last run": None if drift is None else f"{drift:+.1%}",
        "runs over 1.5 times the fastest like run (kept)": summary["slow_runs"],
        **report["provenance"],
    }
    rows = [
        f'<tr><td>{escape(str(name))}</td><td class="text wide">{escape(_plain(value))}</td></tr>'
        for name, value in facts.items()
        if value is not None
    ]
    return "<h2>Where this comes from</h2>" + as_table([], rows)


def _plain(value: object) -> str:
    """Return a provenance value as one line of text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_plain(inner) for inner in value)
    return str(value)
