"""Reports: report.json and one self-contained page that says what to do, how sure that is, and why.

The page needs no network, no scripts and no other file. Everything that a user can name (plans, models,
paths) is escaped.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from hsdopt.errors import HsdoptError
from hsdopt.profiles import atomic_write

if TYPE_CHECKING:  # matplotlib is an extra, and slow to load
    from matplotlib.figure import Figure

__all__ = ["CAPTIONS", "Written", "html_page", "write_report"]

Report = Mapping[str, Any]
Row = Mapping[str, Any]

CAPTIONS: Mapping[str, str] = {
    "simulated-against-real": "Every plan, predicted against measured: points on the line are right, points in the "
    "grey band are within 5 %, and points below the line promised more speed than the clock gave.",
    "prediction-errors": "Every way to predict against the clock, one point per plan: above, with what the models said "
    "on the timed prompts; below, hollow, from the profile alone. The black bar is the median; points in the grey band "
    "are within 5 %, and points to the left promised more speed than the clock gave.",
    "run-distribution": "How long single outputs of the chosen plan took, and how long the simulations said: "
    "the curves lie on each other where the prediction knows not only the mean but also the spread over prompts.",
    "transfer-intervals": "Where the profile said each plan's time would lie (bars), and where it lay (points): "
    "crosses are misses. Wide bars are honest about few prompts; many crosses are not.",
    "latency-against-memory": "What memory buys: each plan's time against the weights it needs loaded. The red steps "
    "are the plans than which no other lossless one is both smaller and faster.",
    "speedups": "How many times as fast as the target alone each plan ran: a plan whose bar of uncertainty crosses "
    "the dashed line may not be faster at all. Hollow bars are what transformers' own generate() took.",
    "where-the-time-goes": "Time per token by the model that spent it: a good plan buys a shorter black bar (the "
    "target) with little colour (its drafters).",
    "cost-curves": "Seconds of one pass by the number of tokens it reads: the flatter the target's line, the cheaper "
    "it is to check a long draft.",
    "cost-curves-relative": "The same costs in units of each model's own one-token pass: a line that climbs early "
    "punishes long drafts.",
    "acceptance-heatmap": "How often a verifier keeps a drafter's token: dark squares are pairs that agree.",
    "acceptance-by-position": "The chance that a whole draft of m tokens survives: where a line falls below one in "
    "two, more draft tokens mostly go to waste.",
}
"""What to see in each figure, by name."""

_WORDS = {
    "Plan": "Who drafts for whom: target(draft:5) means that draft proposes 5 tokens, and the target checks them in "
    "one pass. Deeper brackets are drafters of drafters; a comma is a row, one drafter after another.",
    "Measured": "Time from the end of the prompt's processing to the last token, over the tokens after the first, "
    "pooled over prompts and repeats; in brackets the interval over prompts.",
    "Error": "Predicted over measured, less one: +3 % means that the plan ran faster than predicted. Model error "
    "uses what the models said on the very prompts timed; transfer error uses the profiling prompts.",
    "Error from acceptance, from cost": "The passes predicted against the passes made, both at profiled costs; and "
    "those passes at profiled costs against the seconds they took. Together they make the error, but for the time "
    "spent outside the passes.",
    "Tokens per pass": "Tokens gained by one pass of the target; 1 without a draft.",
    "Regret": "How much slower the chosen plan was than the fastest one measured. The fastest is picked on odd "
    "repeats and both are timed on even ones, so luck does not count and the figure may be negative.",
    "Predicted interval": "Where the profile says that a plan's time over these many new prompts lies, before any of "
    "them is run. Right are intervals that hold the measured time of about 95 % of plans, and among those narrow ones.",
    "Rank agreement": "Of the pairs of plans that the clock tells apart, the share that the prediction orders rightly.",
}


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
        _answer(report),
        _tiles(report["summary"]),
        _regret(report["summary"]),
        _plans(report),
        _baselines(report),
        _quality(quality),
        _figures(images or {}),
        _predictors(report),
        _outputs(report),
        _glossary(),
        _provenance(report),
    ]
    template = Template(resources.files("hsdopt").joinpath("data/report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(_headline(report["summary"])), body="\n".join(part for part in parts if part)
    )


def _write(path: Path, text: str) -> None:
    atomic_write(path, lambda stream: stream.write(text.encode()))


def _save_figures(figures: Mapping[str, Figure], folder: Path) -> tuple[Path, ...]:
    if not figures:
        return ()
    from hsdopt.plots import save_figure  # noqa: PLC0415 (loads matplotlib, which whoever has figures has)

    return tuple(path for name, figure in figures.items() for path in save_figure(figure, folder / name))


def _headline(summary: Row) -> str:
    """Return the answer in one line of plain text."""
    if summary["verdict"] == "do not speculate":
        return "Do not speculate"
    if summary["verdict"] == "within noise":
        return f"{summary['chosen']}: within noise of the target alone"
    if summary["verdict"] == "missed":
        return f"Use {summary['regret_against']}, not the predicted {summary['chosen']}"
    return f"Use {summary['chosen']}: {summary['speedup']:.2f} times as fast"


def _answer(report: Report) -> str:
    summary = report["summary"]
    chosen, alone = (_code(summary[name]) for name in ("chosen", "autoregression"))
    heading = {
        "speculate": f"Use {chosen}",
        "missed": f"Use {_code(summary['regret_against'] or '')}: the prediction missed it",
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
    times = {row["plan"]: _ms(row["measured_seconds_per_token"]) for row in report["plans"]}
    own, base = times[summary["chosen"]], times[summary["autoregression"]]
    if summary["chosen"] == summary["autoregression"]:
        return f"The prediction chose {alone} alone, which takes {base} ms per token. {_rival(report)}"
    foreseen = summary["predicted_speedup"]
    sure = _between(summary["speedup_interval"], "{:.2f}", summary["confidence"])
    return (
        f"{chosen} ran {summary['speedup']:.2f} times as fast as {alone} alone{sure}: "
        f"{own} instead of {base} ms per token{'' if foreseen is None else f' (predicted: {foreseen:.2f} times)'}."
        f"{_advice(report)}"
    )


def _rival(report: Report) -> str:
    """Return what the clock says against the chosen plan."""
    summary = report["summary"]
    if summary["missed"]:
        low, high = (100 * bound for bound in summary["regret_interval"])
        return f"{_code(summary['regret_against'])} was {_percent(low)} to {_percent(high)} faster than that."
    return "No plan measured here was surely faster."


def _percent(value: float) -> str:
    return f"{value:.0f}&#8239;%"


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
    if _sampled(report):
        return " What the target says follows the same law: each sample is as likely as from the target alone."
    return " What the target says stays the same."


def _sampled(report: Report) -> bool:
    """Return whether tokens were drawn, so that outputs differ from run to run; older reports do not say."""
    return not report.get("outputs_compared", True)


def _sentence_case(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def _warnings(report: Report) -> list[str]:
    """Return the report's own warnings and those that its figures call for."""
    summary, warnings = report["summary"], list(report.get("warnings", ()))
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


def _tiles(summary: Row) -> str:
    sure = summary["confidence"]
    regret = "needs two repeats" if summary["regret"] is None else "against the fastest plan measured"
    pairs = f"of {summary['rank_pairs']} pairs that the clock tells apart are in the right order"
    tiles = [
        ("Speed-up", _number(summary["speedup"], "{:.2f}x"), _between(summary["speedup_interval"], "{:.2f}", sure)),
        ("Error, median", _number(summary["median_error"], "{:.1%}"), _p95(summary["p95_error"], "model error")),
        (
            "Error on new prompts",
            _number(summary["transfer_median_error"], "{:.1%}"),
            _p95(summary["transfer_p95_error"], "transfer error"),
        ),
        ("Regret", _number(summary["regret"], "{:.1%}"), regret),
        ("Rank agreement", _number(summary["rank_agreement"], "{:.0%}"), pairs),
    ]
    cells = (
        f'<div><dt>{title}</dt><dd class="figure">{value}</dd><dd>{note.strip(" ()")}</dd></div>'
        for title, value, note in tiles
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _p95(value: float | None, kind: str) -> str:
    return kind if value is None else f"{kind}; 95&#8239;% of plans within {100 * value:.1f}&#8239;%"


def _regret(summary: Row) -> str:
    """Return the regret and its interval in words."""
    title = "<h2>Was it the right choice?</h2>"
    if summary["regret"] is None:
        return (
            f"{title}<p>One repeat cannot tell: the fastest plan has to be picked and timed on different repeats.</p>"
        )
    chosen, rival = _code(summary["chosen"]), _code(summary["regret_against"])
    if summary["chosen"] == summary["regret_against"]:
        text = f"Yes: {chosen} was also the fastest plan of those measured, so the regret is 0."
        return f"{title}<p>{text}</p>"
    text = f"{chosen} took {_more(summary['regret'])} time than {rival}, the fastest by the odd repeats"
    if summary["regret_interval"] is None:
        return f"{title}<p>{text}; with one prompt there is no interval.</p>"
    low, high = summary["regret_interval"]
    sure = _percent(100 * summary["confidence"])
    text += (
        f". Other prompts of this kind would give, with {sure} confidence, anything from {_more(low)} to {_more(high)}"
    )
    if low > 0:
        verdict = "So the other plan is surely faster."
    elif high < 0:
        verdict = "So the chosen plan is surely faster, and the odd repeats were lucky for the other."
    else:
        verdict = "So these runs cannot tell which of the two is faster."
    return f"{title}<p>{text}. {verdict}</p>"


def _more(share: float) -> str:
    """Return a relative difference of times in words."""
    return f"{100 * abs(share):.1f}&#8239;% {'more' if share >= 0 else 'less'}"


def _plans(report: Report) -> str:
    summary = report["summary"]
    head = ["Plan", "Measured<br>ms per token", "Predicted<br>ms per token", "Error", "Speed-up", "Tokens<br>per pass"]
    caption = (
        f"{len(report['plans'])} plans, fastest first; {summary['prompts']} prompts, {summary['repeats']} repeats, "
        f"{summary['runs']} runs; predictions by {escape(summary['predictor'])}."
    )
    rows = [_plan_row(row, summary) for row in report["plans"]]
    return "<h2>What was measured</h2>" + _table(head, rows, caption)


def _plan_row(row: Row, summary: Row) -> str:
    chosen = row["plan"] == summary["chosen"]
    marks = {"chosen": chosen, "fastest": row["plan"] == summary["best"]}
    badges = "".join(f' <span class="badge">{word}</span>' for word, shown in marks.items() if shown)
    cells = [
        f"{_code(row['plan'])}<small>{escape(row['family'])}{badges}</small>",
        _ms(row["measured_seconds_per_token"]) + _range(row["interval"], 1e3, 1),
        _ms(row["predicted_seconds_per_token"]),
        _number(row["error"], "{:+z.1%}") + _split(row),
        _number(row["speedup"], "{:.2f}") + _range(row["speedup_interval"], 1, 2),
        _number(row["tokens_per_pass"], "{:.2f}"),
    ]
    kind = ' class="chosen"' if chosen else ""
    return f"<tr{kind}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _split(row: Row) -> str:
    """Return where the error comes from, as small print."""
    parts = [
        f"{word} {_number(row[key], '{:+z.1%}')}"
        for word, key in (("acceptance", "acceptance_error"), ("cost", "cost_error"))
        if row[key] is not None
    ]
    return "".join(f"<small>{part}</small>" for part in parts)


def _baselines(report: Report) -> str:
    """Return what transformers' own generate() took, and how the chosen plan compares."""
    rows, notes = report.get("baselines", ()), report.get("notes", ())
    if not rows and not notes:
        return ""
    head = ["Baseline", "Measured<br>ms per token", "Speed-up", "Tokens<br>per pass"]
    cells = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in _baseline_cells(row)) + "</tr>" for row in rows]
    said = "".join(f'<p class="soft">{escape(note)}</p>' for note in notes)
    table = _table(head, cells) if rows else ""
    return f"<h2>Beside transformers' own generate()</h2>{_against(report['summary'])}{table}{said}"


def _baseline_cells(row: Row) -> list[str]:
    return [
        _code(row["plan"].removeprefix("transformers ")),
        _ms(row["measured_seconds_per_token"]) + _range(row["interval"], 1e3, 1),
        _number(row["speedup"], "{:.2f}") + _range(row["speedup_interval"], 1, 2),
        _number(row["tokens_per_pass"], "{:.2f}"),
    ]


def _against(summary: Row) -> str:
    if summary["fastest_baseline"] is None:
        return ""
    ratio, sure = summary["against_baseline"], summary["confidence"]
    interval = _between(summary["against_baseline_interval"], "{:.2f}", sure)
    return (
        "<p>Timed in the same turns as the plans, with the library's defaults, the same number of tokens and end of "
        "text ignored, from the first tokens that it hands over to the last. Nothing was predicted for them, and they "
        f"do not count for the regret. {_code(summary['chosen'])} ran {ratio:.2f} times as fast as "
        f"{_code(summary['fastest_baseline'])}, the fastest of them{interval}.</p>"
    )


def _read_quality(path: Path) -> dict[str, Any] | None:
    """Return what quality.json says; None if there is none, or it is not as `hsdopt quality` writes it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and value.get("format") == "hsdopt-quality" else None


def _quality(quality: Mapping[str, Any] | None) -> str:
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
    rows = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells]
    text = (
        "<p>How near the outputs of each plan come to the target's own, and to right answers where the prompts have "
        "them, as <code>hsdopt quality</code> measured. Marked are the plans that no other beats in both time and "
        "quality.</p>"
    )
    return f"<h2>Speed against quality</h2>{text}" + _table(head, rows)


def _quality_cells(row: Row, measure: str) -> list[str]:
    own, reference = (row[against] or {} for against in ("own", "reference"))
    badge = ' <span class="badge">undominated</span>' if row["undominated"] else ""
    return [
        f"{_code(row['name'])}<small>{escape(row['family'])}{badge}</small>",
        _number(row["time"], "{:.2f}") + _range(row["time_interval"], 1, 2),
        _number(row["deviation"], "{:.1%}"),
        _number(own.get("exact"), "{:.0%}"),
        _number(own.get(measure), "{:.1f}"),
        _number(reference.get(measure), "{:.1f}"),
    ]


def _figures(images: Mapping[str, bytes]) -> str:
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


def _predictors(report: Report) -> str:
    if not report["predictors"]:
        return ""
    head = ["Predictor", "Kind", "Plans", "Median<br>error", "95th<br>percentile", "Rank<br>correlation"]
    head += ["Rank<br>agreement", "Regret of<br>its pick", "Its pick"]
    rows = [_predictor_row(entry) for entry in report["predictors"]]
    text = "<p>Each way to predict, over all plans it could predict, and what following it would have cost.</p>"
    return f"<h2>How well the predictions held</h2>{text}" + _table(head, rows, _coverage(report["summary"]))


def _predictor_row(entry: Row) -> str:
    pick = "" if entry["pick"] is None else _code(entry["pick"])
    cells = [
        escape(entry["predictor"]),
        "same prompts" if entry["kind"] == "model" else "new prompts",
        str(entry["plans"]),
        _number(entry["median_error"], "{:.1%}"),
        _number(entry["p95_error"], "{:.1%}"),
        _number(entry["spearman"], "{:.2f}"),
        _number(entry["rank_agreement"], "{:.0%}"),
        _number(entry["regret"], "{:+z.1%}"),
        pick,
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _coverage(summary: Row) -> str:
    share, width = summary["transfer_coverage"], summary.get("transfer_interval_width")
    if share is None:
        return ""
    of = f" (of {summary['transfer_intervals']})" if "transfer_intervals" in summary else ""
    wide = "" if width is None else f"; its median width is {_percent(100 * width)} of the predicted time"
    return (
        f"The interval predicted from the profile held the measured time of {_percent(100 * share)} of plans{of}{wide}."
    )


def _outputs(report: Report) -> str:
    """Return the section on outputs that differ; one sentence if none was recorded."""
    entries = report["mismatches"]
    if _sampled(report):
        return (
            "<h2>Outputs</h2><p>Tokens were drawn, so outputs differ from run to run and were not compared token by "
            "token. Every plan but Big Little Decoder draws from the target's own law whatever its drafters say; this "
            "rests on the rejection rule and its tests, not on these runs. The outputs timed are other samples than "
            "those that the predictions were made from, so the errors hold that difference too.</p>"
        )
    if not entries:
        return "<h2>Outputs</h2><p>No output that differs from the target's own was recorded.</p>"
    head = ["Plan", "Prompt", "Position", "Gap of the<br>top two logits", "Bound", "Near tie"]
    rows = [
        "<tr>"
        + "".join(f"<td>{cell}</td>" for cell in (_code(entry["plan"]), entry["prompt"], entry["position"]))
        + "".join(f"<td>{cell}</td>" for cell in (f"{entry['gap']:.2g}", f"{entry['bound']:.2g}"))
        + f"<td>{'yes' if entry['near_tie'] else 'no'}</td></tr>"
        for entry in entries
    ]
    text = (
        "<p>These outputs leave the target's own at the place shown. At a near tie the target's two best tokens are "
        "so close that rounding, which depends on how many tokens a pass reads, decides between them.</p>"
    )
    return f"<h2>Outputs</h2>{text}" + _table(head, rows)


def _glossary() -> str:
    words = "".join(f"<dt>{word}</dt><dd>{escape(text)}</dd>" for word, text in _WORDS.items())
    return f'<h2>What the words mean</h2><dl class="words">{words}</dl>'


def _provenance(report: Report) -> str:
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
    return "<h2>Where this comes from</h2>" + _table([], rows)


def _plain(value: object) -> str:
    """Return a provenance value as one line of text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_plain(inner) for inner in value)
    return str(value)


def _table(head: Sequence[str], rows: Sequence[str], caption: str = "") -> str:
    title = f'<p class="soft">{caption}</p>' if caption else ""
    names = "".join(f'<th scope="col">{name}</th>' for name in head)
    top = f"<thead><tr>{names}</tr></thead>" if head else ""
    return f'{title}<div class="scroll"><table>{top}<tbody>{"".join(rows)}</tbody></table></div>'


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _number(value: float | None, form: str) -> str:
    """Return a figure as text, a dash if there is none; per cent signs stand apart."""
    return "-" if value is None else form.format(value).replace("%", "&#8239;%")


def _ms(seconds: float | None) -> str:
    """Return milliseconds to three figures or a tenth, whichever is finer."""
    if seconds is None:
        return "-"
    value = 1e3 * seconds
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _range(bounds: Sequence[float] | None, scale: float, digits: int) -> str:
    if bounds is None:
        return ""
    low, high = (f"{scale * bound:.{digits}f}" for bound in bounds)
    return f"<small>{low} to {high}</small>"


def _between(bounds: Sequence[float] | None, form: str, confidence: float) -> str:
    if bounds is None:
        return ""
    return f" ({_percent(100 * confidence)} interval {form.format(bounds[0])} to {form.format(bounds[1])})"
