"""The report page: the answer first, nothing from outside, everything escaped."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

from hsdopt import plots
from hsdopt.errors import HsdoptError
from hsdopt.report import CAPTIONS, html_page, write_report
from hsdopt.simulate.compare import Comparison, Mismatch, Predictions, Run, compare

mpl.use("Agg")

RATES = {"t": 0.040, "t(d:4)": 0.030, "t(m:6(d:3))": 0.020}


BASE = "transformers generate()"


def comparison(
    rates: dict[str, float] = RATES, *, chosen: str = "t(m:6(d:3))", noise: float = 0.0, **options: object
) -> Comparison:
    draw = np.random.default_rng(5)
    runs = [
        Run(plan, repeat, prompt, 10, 10 * rate * (1 + noise * draw.uniform(-1, 1)))
        for repeat in (1, 2)
        for prompt in range(5)
        for plan, rate in rates.items()
    ]
    foreseen = {plan: 1.1 * rate for plan, rate in rates.items() if plan != BASE}
    bounds = {plan: (0.9 * value, 1.1 * value) for plan, value in foreseen.items()}
    predictions = Predictions({"trace replay": foreseen}, "trace replay", {"trace replay": foreseen}, bounds)
    arguments: dict[str, Any] = {"chosen": chosen, "autoregression": "t", "rng": np.random.default_rng(0), **options}
    return compare(runs, predictions, replicates=200, **arguments)


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in {"meta", "img", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def heading(report: dict[str, Any]) -> str:
    found = re.search(r"<h1>(.*?)</h1>", html_page(report))
    assert found is not None
    return re.sub("<.*?>", "", found[1])


def test_the_answer_comes_first() -> None:
    page = Page(html_page(comparison().to_report(why="it is fast")))
    assert not page.open
    assert page.text.index("Use t(m:6(d:3))") < page.text.index("2.00 times as fast") < page.text.index("It is fast.")
    assert page.text.index("It is fast.") < page.text.index("What was measured")
    assert ("name", "viewport") in page.attributes


def test_every_verdict_has_its_heading() -> None:
    slow = {"t": 0.04, "t(d:4)": 0.05}
    assert heading(comparison(slow, chosen="t").to_report()) == "Do not speculate"
    assert heading(comparison(slow, chosen="t(d:4)").to_report()) == "Use t: the prediction missed it"
    assert heading(comparison(chosen="t").to_report()) == "Use t(m:6(d:3)): the prediction missed it"
    level = comparison({"t": 0.04, "t(d:4)": 0.04}, chosen="t(d:4)", noise=0.3)
    assert heading(level.to_report()) == "It makes little difference here"


def test_a_lossy_choice_is_not_called_lossless() -> None:
    kept = html_page(comparison().to_report())
    lossy = html_page(comparison({"t": 0.04, "bild(t, d)": 0.02}, chosen="bild(t, d)").to_report())
    assert "What the target says stays the same" in kept
    assert "trades quality for speed" in lossy
    assert "stays the same" not in lossy


def test_the_page_needs_nothing_else() -> None:
    report = comparison().to_report()
    images = {name: plots.render(figure, "svg") for name, figure in plots.report_figures(report).items()}
    page = Page(html_page(report, images))
    assert page.seen.count("img") == len(images) == 5
    assert not {"script", "link", "iframe", "object"} & set(page.seen)
    references = [value for name, value in page.attributes if name in {"src", "href", "srcset", "action"}]
    assert all(value is not None and value.startswith("data:image/svg+xml;base64,") for value in references)
    assert "url(" not in html_page(report)
    assert "@import" not in html_page(report)


def test_what_users_name_is_escaped() -> None:
    evil = '<script>alert("x")</script>'
    rates = {"t": 0.04, evil: 0.02}
    outcome = comparison({**rates, BASE: 0.03}, chosen=evil, families={evil: "adaptive"})
    report = outcome.to_report(
        notes=[evil],
        provenance={evil: {"path": evil}, "list": [evil]},
        mismatches=[Mismatch(evil, 0, 1, 0.5, 0.1)],
        why=evil,
        warnings=[evil],
    )
    report["summary"]["predictor"] = report["predictors"][0]["predictor"] = evil
    report["plans"][0]["family"] = evil
    report["baselines"][0]["plan"] = evil
    page = Page(html_page(report, {evil: b"<svg/>"}, quality=quality_of(evil)))
    assert "script" not in page.seen
    assert page.text.count(evil) >= 14


def test_missing_figures_are_dashes_not_errors() -> None:
    runs = [Run("t", 1, 0, 10, 0.4)]
    report = compare(
        runs, Predictions({"x": {}}, "x"), chosen="t", autoregression="t", rng=np.random.default_rng(0)
    ).to_report()
    page = Page(html_page(report))
    assert "needs two repeats" in page.text
    assert not re.search(r"\b(None|nan|null)\b", page.text)


def test_what_looks_wrong_is_said() -> None:
    report = comparison(chosen="t(d:4)").to_report(mismatches=[Mismatch("t(d:4)", 0, 3, 0.5, 0.1)])
    report["summary"] |= {"drift": 0.2, "slow_runs": 9}
    page = Page(html_page(report))
    assert "t(m:6(d:3)), was surely faster" in page.text
    assert "1 outputs differ" in page.text
    assert "machine drifted" in page.text
    assert "9 of 30 runs" in page.text


def text_of(report: dict[str, Any]) -> str:
    """Return the page's text, spaces joined."""
    return " ".join(Page(html_page(report)).text.split())


def test_the_regret_is_spelled_out() -> None:
    assert "was also the fastest plan of those measured" in text_of(comparison().to_report())
    slower = comparison(chosen="t(d:4)").to_report()
    said = text_of(slower)
    assert "t(d:4) took 50.0 % more time than t(m:6(d:3)), the fastest by the odd repeats" in said
    assert "from 50.0 % more to 50.0 % more. So the other plan is surely faster." in said
    slower["summary"] |= {"regret": 0.01, "regret_interval": [-0.02, 0.04]}
    assert "from 2.0 % less to 4.0 % more. So these runs cannot tell" in text_of(slower)
    slower["summary"] |= {"regret": -0.03, "regret_interval": [-0.04, -0.02]}
    assert "took 3.0 % less time" in text_of(slower)
    assert "the odd repeats were lucky" in text_of(slower)
    slower["summary"] |= {"regret": None, "regret_interval": None}
    assert "One repeat cannot tell" in text_of(slower)


def test_baselines_have_their_own_heading() -> None:
    report = comparison(RATES | {BASE: 0.05}).to_report(notes=["assistant_model=x is left out: no kernel"])
    said = text_of(report)
    table = said[said.index("Beside transformers' own generate()") : said.index("How well the predictions held")]
    assert "2.50 times as fast as transformers generate()" in table
    assert "50.0" in table
    assert "left out: no kernel" in table
    assert "3 plans, fastest first" in said
    assert "Beside transformers" not in text_of(comparison().to_report())


def test_sampled_outputs_are_not_said_to_be_equal() -> None:
    said = text_of(comparison().to_report(outputs_compared=False))
    assert "follows the same law" in said
    assert "not compared token by token" in said
    assert "stays the same" not in said
    assert "No output that differs" not in said


def test_coverage_comes_with_the_width() -> None:
    report = comparison().to_report()
    assert "held the measured time of 100 % of plans (of 3); its median width is 20 %" in text_of(report)


def test_quality_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    report = comparison().to_report()
    assert "Speed against quality" not in text_of(report)
    (tmp_path / "quality.json").write_text(json.dumps(quality_of("bild(t, d)")), encoding="utf-8")
    page = Page(write_report(report, {}, tmp_path).html.read_text(encoding="utf-8"))
    said = " ".join(page.text.split())
    assert "rouge-l against" in said
    assert "bild(t, d)bild undominated0.500.40 to 0.6012.5 %25 %97.2-" in said
    for text in ("{", json.dumps({"plans": []})):
        (tmp_path / "quality.json").write_text(text, encoding="utf-8")
        assert "rouge-l" not in write_report(report, {}, tmp_path).html.read_text(encoding="utf-8")


def quality_of(name: str) -> dict[str, Any]:
    """Return a quality.json of one plan."""
    own = {"bleu": 90.0, "rouge_l": 97.25, "exact": 0.25}
    row = {"name": name, "family": "bild", "time": 0.5, "time_interval": [0.4, 0.6], "deviation": 0.125}
    rows = [row | {"own": own, "reference": None, "undominated": True}]
    return {"format": "hsdopt-quality", "measure": "rouge-l", "plans": rows}


def test_reports_of_older_versions_are_shown() -> None:
    report = comparison().to_report()
    for key in ("baselines", "notes", "distribution", "outputs_compared"):
        del report[key]
    for key in ("transfer_interval_width", "transfer_intervals", "fastest_baseline"):
        del report["summary"][key]
    for row in report["plans"]:
        del row["memory_bytes"]
    assert "3 plans, fastest first" in text_of(report)
    assert "speedups" in plots.report_figures(report)


def test_every_figure_has_a_caption() -> None:
    distribution = {"plan": "t", "measured": [0.04], "predicted": {"trace replay": [0.05]}}
    report = comparison(memory={"t": 5}).to_report(distribution=distribution)
    assert {"run-distribution", "latency-against-memory", "transfer-intervals"} < set(plots.report_figures(report))
    assert set(plots.report_figures(report)) <= set(CAPTIONS)
    assert all(text.endswith(".") for text in CAPTIONS.values())


def test_written_files(tmp_path: Path) -> None:
    report = comparison().to_report(provenance={"who": "Zoë"})
    written = write_report(report, plots.report_figures(report), tmp_path / "a" / "b")
    assert json.loads(written.json.read_text(encoding="utf-8")) == report
    assert "<h1>Use" in written.html.read_text(encoding="utf-8")
    assert {path.suffix for path in written.figures} == {".png", ".svg", ".csv"}
    assert not list((tmp_path / "a" / "b").glob("*.part"))


def test_a_report_without_figures(tmp_path: Path) -> None:
    written = write_report(comparison().to_report(), {}, tmp_path)
    assert written.figures == ()
    assert "<h2>Figures" not in written.html.read_text(encoding="utf-8")


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(HsdoptError, match=r"cannot write the report to .*; free some space or choose another -o"):
        write_report(comparison().to_report(), {}, tmp_path / "file" / "below")
