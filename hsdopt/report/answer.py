"""The top of the page: what to do, how sure that is, and what to beware of."""

from __future__ import annotations

from html import escape

from hsdopt.report.markup import Report, Row, code, in_brackets, milliseconds, more, number, percent

__all__ = ["answer_section", "headline", "regret_section", "sampled", "tiles_section"]


def headline(summary: Row) -> str:
    """Return the answer in one line of plain text."""
    if summary["verdict"] == "do not speculate":
        return "Do not speculate"
    if summary["verdict"] == "within noise":
        return f"{summary['chosen']}: within noise of the target alone"
    if summary["verdict"] == "missed":
        return f"Use {summary['regret_against']}, not the predicted {summary['chosen']}"
    return f"Use {summary['chosen']}: {summary['speedup']:.2f} times as fast"


def answer_section(report: Report) -> str:
    """Return what to do, in a heading and a sentence, why, and the warnings."""
    summary = report["summary"]
    chosen, alone = (code(summary[name]) for name in ("chosen", "autoregression"))
    heading = {
        "speculate": f"Use {chosen}",
        "missed": f"Use {code(summary['regret_against'] or '')}: the prediction missed it",
        "within noise": "It makes little difference here",
        "do not speculate": "Do not speculate",
    }[summary["verdict"]]
    parts = [f"<h1>{heading}</h1>", f"<p>{_sentence(report, chosen, alone)}</p>"]
    if report.get("why"):
        parts.append(f"<p><strong>Why:</strong> {escape(_sentence_case(report['why']))}</p>")
    warnings = "".join(f'<p class="warning">{escape(text)}</p>' for text in _warnings(report))
    return f'<section class="answer">{"".join(parts)}</section>{warnings}'


def _sentence(report: Report, chosen: str, alone: str) -> str:
    """Return what was measured, in plain words."""
    summary = report["summary"]
    times = {row["plan"]: milliseconds(row["measured_seconds_per_token"]) for row in report["plans"]}
    own, base = times[summary["chosen"]], times[summary["autoregression"]]
    if summary["chosen"] == summary["autoregression"]:
        return f"The prediction chose {alone} alone, which takes {base} ms per token. {_rival(report)}"
    foreseen = summary["predicted_speedup"]
    said = "" if foreseen is None else f" (the profile predicted {foreseen:.2f} times)"
    sure = in_brackets(summary["speedup_interval"], "{:.2f}", summary["confidence"])
    return (
        f"{chosen} ran {summary['speedup']:.2f} times as fast as {alone} alone{sure}: "
        f"{own} instead of {base} ms per token{said}."
        f"{_advice(report)}"
    )


def _rival(report: Report) -> str:
    """Return what the clock says against the chosen plan."""
    summary = report["summary"]
    if summary["missed"]:
        low, high = (100 * bound for bound in summary["regret_interval"])
        return f"{code(summary['regret_against'])} was {percent(low)} to {percent(high)} faster than that."
    return "No plan measured here was surely faster."


def _advice(report: Report) -> str:
    summary = report["summary"]
    if summary["missed"] and summary["verdict"] == "missed":
        return f" {_rival(report)}"
    if summary["verdict"] == "within noise":
        return " The interval holds 1: on these prompts there may be no gain at all."
    if summary["verdict"] == "do not speculate":
        return " That is slower: let the target decode alone."
    family = next(row["family"] for row in report["plans"] if row["plan"] == summary["chosen"])
    if family == "bild":
        return " It trades quality for speed: its output is not always the target's own."
    if sampled(report):
        return " What the target says follows the same law: each sample is as likely as from the target alone."
    return " What the target says stays the same."


def sampled(report: Report) -> bool:
    """Return whether tokens were drawn, so that outputs differ from run to run; older reports do not say."""
    return not report.get("outputs_compared", True)


def _sentence_case(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def _warnings(report: Report) -> list[str]:
    """Return the report's own warnings and those that its figures call for."""
    summary, warnings = report["summary"], [_sentence_case(text) for text in report.get("warnings", ())]
    unexplained = sum(not entry["near_tie"] for entry in report["mismatches"])
    if summary["missed"] and summary["verdict"] == "speculate":
        warnings.append(
            f"Another plan, {summary['regret_against']}, was surely faster than the chosen one: see the regret."
        )
    if unexplained:
        warnings.append(f"{unexplained} outputs differ from the target's own where no near tie explains it.")
    if summary["drift"] is not None and abs(summary["drift"]) > 0.1:
        warnings.append(
            f"The machine drifted: the same work took {summary['drift']:+.0%} time at the end. Ratios are "
            "paired, so they hold; absolute times are an average over the drift."
        )
    if summary["slow_runs"] > 0.05 * summary["runs"]:
        warnings.append(
            f"{summary['slow_runs']} of {summary['runs']} runs took over 1.5 times as long as the fastest like "
            "run; all were kept. Something else may have used the machine."
        )
    return warnings


def tiles_section(summary: Row) -> str:
    """Return the figures that sum the report up."""
    sure = summary["confidence"]
    regret = "needs two repeats" if summary["regret"] is None else "against the fastest plan measured"
    pairs = f"of {summary['rank_pairs']} pairs that the clock tells apart are in the right order"
    tiles = [
        ("Speed-up", number(summary["speedup"], "{:.2f}x"), in_brackets(summary["speedup_interval"], "{:.2f}", sure)),
        ("Error, median", number(summary["median_error"], "{:.1%}"), _p95(summary["p95_error"], "model error")),
        (
            "Error on new prompts",
            number(summary["transfer_median_error"], "{:.1%}"),
            _p95(summary["transfer_p95_error"], "transfer error"),
        ),
        ("Regret", number(summary["regret"], "{:.1%}"), regret),
        ("Rank agreement", number(summary["rank_agreement"], "{:.0%}"), pairs),
    ]
    cells = (
        f'<div><dt>{title}</dt><dd class="figure">{value}</dd><dd>{note.strip(" ()")}</dd></div>'
        for title, value, note in tiles
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _p95(value: float | None, kind: str) -> str:
    return kind if value is None else f"{kind}; 95&#8239;% of plans within {100 * value:.1f}&#8239;%"


def regret_section(summary: Row) -> str:
    """Return the regret and its interval in words."""
    title = "<h2>Was it the right choice?</h2>"
    if summary["regret"] is None:
        return (
            f"{title}<p>One repeat cannot tell: the fastest plan has to be picked and timed on different repeats.</p>"
        )
    chosen, rival = code(summary["chosen"]), code(summary["regret_against"])
    if summary["chosen"] == summary["regret_against"]:
        text = f"Yes: {chosen} was also the fastest plan of those measured, so the regret is 0."
        return f"{title}<p>{text}</p>"
    text = f"{chosen} took {more(summary['regret'])} time than {rival}, the fastest by the odd repeats"
    if summary["regret_interval"] is None:
        return f"{title}<p>{text}; with one prompt there is no interval.</p>"
    low, high = summary["regret_interval"]
    sure = percent(100 * summary["confidence"])
    text += (
        f". Other prompts of this kind would give, with {sure} confidence, anything from {more(low)} to {more(high)}"
    )
    if low > 0:
        verdict = "So the other plan is surely faster."
    elif high < 0:
        verdict = "So the chosen plan is surely faster, and the odd repeats were lucky for the other."
    else:
        verdict = "So these runs cannot tell which of the two is faster."
    return f"{title}<p>{text}. {verdict}</p>"
