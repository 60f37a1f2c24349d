"""Figures: drawn without warnings from one plan to forty, labels apart and inside, data kept."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.text import Annotation

from hsdopt import plots
from hsdopt.acceptance import Acceptance
from hsdopt.errors import InvalidArgumentError
from hsdopt.profiles import Profile
from hsdopt.simulate.compare import Predictions, Run, compare

mpl.use("Agg")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


BASE = "transformers generate(assistant_model=a-drafter-with-a-rather-long-name)"


def report_of(count: int, *, prompts: int = 3, logged: bool = True, predicted: bool = True) -> dict[str, Any]:
    """Return a report of `count` plans whose times crowd together, from 20 ms upwards."""
    plans = ["target", *(f"target(a-drafter-with-a-rather-long-name-{i}:{i})" for i in range(1, count))]
    rates = {plan: 0.02 * (1 + 0.003 * place**1.5) for place, plan in enumerate(reversed(plans))}
    logs = {("target", 1): 0.1, ("small", 1): 0.05} if logged else {}
    runs = [
        Run(p, r, i, 10, 10 * rates[p] * (1 + 0.1 * i), 5, dict.fromkeys(logs, 5), logs)
        for p in plans
        for r in (1, 2)
        for i in range(prompts)
    ]
    runs += [Run(BASE, r, i, 10, 10 * 0.021 * (1 + 0.1 * i), 5) for r in (1, 2) for i in range(prompts)]
    values = {"trace replay": {p: 1.08 * v for p, v in rates.items()}, "closed form": rates} if predicted else {"x": {}}
    bounds = {p: (1.01 * v, 1.2 * v) for p, v in rates.items()} if predicted else {}
    predictions = Predictions(values, next(iter(values)), values if predicted else {}, bounds)
    weights = {plan: 100_000_000 * (1 + place % 3) for place, plan in enumerate((*plans, BASE))} if logged else {}
    distribution = {"plan": plans[-1], "measured": [0.03, 0.02], "predicted": {"trace replay": [0.021, 0.025]}}
    rng = np.random.default_rng(0)
    outcome = compare(
        runs, predictions, chosen=plans[-1], autoregression="target", rng=rng, replicates=100, memory=weights
    )
    return outcome.to_report(distribution=distribution if logged else None)


def profile_of(count: int) -> Profile:
    """Return a profile of `count` models, the last the target."""
    names = [f"model-with-a-long-name-{i}" for i in range(count)]
    costs = {name: (lambda n, i=i: 0.01 * (1 + i) + 0.001 * n) for i, name in enumerate(names)}
    rates = {(a, b): 0.4 + 0.05 * i for i, a in enumerate(names[:-1]) for b in names if a != b}
    return Profile.from_rates(names[-1], costs, rates, max_tokens=32)


def column(axes: Axes) -> list[Annotation]:
    return [text for text in axes.texts if isinstance(text, Annotation) and text.get_text()]


def apart(axes: Axes) -> None:
    """Check that no two labels overlap and none leaves the figure."""
    figure = axes.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    boxes = [mpl.text.Text.get_window_extent(text, renderer) for text in column(axes)]
    for number, box in enumerate(boxes):
        assert box.x1 <= figure.bbox.x1 + 1
        assert box.y0 >= figure.bbox.y0 - 1
        assert not any(box.overlaps(other) for other in boxes[:number])


@pytest.mark.parametrize("count", [1, 2, 14, 40])
def test_labels_of_every_plan_are_apart_and_inside(count: int) -> None:
    axes = plots.simulated_against_real(report_of(count))
    assert len(column(axes)) == count
    apart(axes)


@pytest.mark.parametrize("count", [2, 8])
def test_labels_of_every_model_are_apart_and_inside(count: int) -> None:
    for axes in (
        plots.cost_curves(profile_of(count)),
        plots.cost_curves(profile_of(count), relative=True),
        plots.acceptance_by_position(profile_of(count)),
    ):
        apart(axes)


@pytest.mark.parametrize(("plans", "models"), [(1, 1), (14, 4)])
def test_every_figure_draws(plans: int, models: int) -> None:
    figures = plots.report_figures(report_of(plans), profile_of(models))
    assert len(figures) == (11 if models > 1 else 9)
    for figure in figures.values():
        assert plots.render(figure, "svg").startswith(b"<?xml")
    assert not plt.get_fignums()


def test_thin_reports_draw() -> None:
    bare = report_of(3, prompts=1, logged=False, predicted=False)
    assert list(plots.report_figures(bare)) == ["speedups", "where-the-time-goes"]
    with pytest.raises(InvalidArgumentError, match="at least one predicted plan"):
        plots.simulated_against_real(bare)


def test_points_stand_where_the_numbers_say() -> None:
    report = report_of(3)
    axes = plots.simulated_against_real(report)
    hollow = next(line for line in axes.lines if line.get_label() == "closed form")
    measured = [1e3 * row["measured_seconds_per_token"] for row in report["plans"]]
    predicted = [1e3 * row["predicted"]["closed form"] for row in report["plans"]]
    assert np.allclose(hollow.get_xydata(), np.stack([measured, predicted], axis=1))
    assert axes.get_xlim() == axes.get_ylim()


def test_errors_stand_where_the_numbers_say() -> None:
    report = report_of(3)
    axes = plots.prediction_errors(report)
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert len(points) == 4  # two predictors, on the same and on new prompts
    scale = [
        100 * (row["predicted"]["trace replay"] / row["measured_seconds_per_token"] - 1) for row in report["plans"]
    ]
    top = next(line for line in points if max(line.get_ydata()) > 2.5)
    assert top.get_xdata() == pytest.approx(scale)
    labels = [label.get_text().split("\n") for label in axes.get_yticklabels()]
    assert labels[-1] == ["trace replay", "same prompts"]
    assert labels[0] == ["closed form", "new prompts"]
    with pytest.raises(InvalidArgumentError, match="at least one predicted plan"):
        plots.prediction_errors(report_of(2, predicted=False))


def test_missed_intervals_are_crosses() -> None:
    report = report_of(4)
    for row, shift in zip(report["plans"], (1, 1, 5, 1), strict=True):
        middle = shift * row["measured_seconds_per_token"]
        row["transfer_interval"] = [0.9 * middle, 1.1 * middle]
    axes = plots.transfer_intervals(report)
    assert [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "X"] == [1]  # third from the top
    assert "3 of 4" in axes.get_title(loc="left")
    with pytest.raises(InvalidArgumentError, match="a predicted interval"):
        plots.transfer_intervals(report_of(2, predicted=False))


def test_the_distribution_climbs_from_nothing_to_all() -> None:
    axes = plots.run_distribution(report_of(2))
    measured = axes.lines[0]
    assert measured.get_xdata() == pytest.approx([20, 20, 30])
    assert measured.get_ydata() == pytest.approx([0, 0.5, 1])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "measured: mean 25, 2 outputs",
        "trace replay: mean 23, 2 outputs",
    ]
    with pytest.raises(InvalidArgumentError, match="distribution of single outputs"):
        plots.run_distribution(report_of(2, logged=False))


def test_the_memory_frontier_holds_lossless_plans_only() -> None:
    report = report_of(4)
    memory = {"bild": (50, 0.001), "baseline": (40, 0.001)}
    sizes = [(300, 0.02), (100, 0.03), (200, 0.031), (100, 0.04)]
    for row, (size, seconds) in zip(report["plans"], sizes, strict=True):
        row |= {"memory_bytes": size * 10**6, "measured_seconds_per_token": seconds}
    for family, (size, seconds) in memory.items():
        extra = dict(report["plans"][0]) | {"plan": family, "family": family}
        report["plans"].append(extra | {"memory_bytes": size * 10**6, "measured_seconds_per_token": seconds})
    axes = plots.latency_against_memory(report)
    front = next(line for line in axes.lines if line.get_label() == "best for its memory")
    assert front.get_xydata().tolist() == [[100, 30], [300, 20]]
    assert len(column(axes)) == 2
    apart(axes)
    with pytest.raises(InvalidArgumentError, match="what memory its plans need"):
        plots.latency_against_memory(report_of(2, logged=False))


def test_baselines_are_hollow_bars() -> None:
    report = report_of(3)
    axes = plots.speedups(report)
    assert len(axes.patches) == len(report["plans"]) + 1
    hollow = [bar for bar in axes.patches if mpl.colors.to_hex(bar.get_facecolor()) == "#ffffff"]
    assert [bar.get_width() for bar in hollow] == pytest.approx([report["baselines"][0]["speedup"]])


def test_bars_add_up_to_the_measured_time() -> None:
    report = report_of(4)
    axes = plots.where_the_time_goes(report)
    ends: dict[float, float] = {}
    for bar in axes.patches:
        row = round(bar.get_y() + bar.get_height() / 2)
        ends[row] = max(ends.get(row, 0.0), bar.get_x() + bar.get_width())
    assert [ends[row] for row in sorted(ends)] == pytest.approx(
        [1e3 * row["measured_seconds_per_token"] for row in reversed(report["plans"])]
    )


def test_a_given_axes_is_used_and_settings_stay() -> None:
    before = dict(mpl.rcParams)
    figure, panels = plt.subplots(1, 2)
    assert plots.speedups(report_of(3), ax=panels[1]) is panels[1]
    assert len(figure.axes) == 2
    assert dict(mpl.rcParams) == before


def test_models_keep_their_colours() -> None:
    profile = profile_of(4)
    colours = plots.model_colours(profile.names, profile.target)
    drawn = [line.get_color() for line in plots.cost_curves(profile).lines]
    assert drawn == [colours[name] for name in profile.names]
    assert len(set(plots.model_colours([f"m{i}" for i in range(9)], "m8").values())) == 9


def test_unmeasured_pairs_are_left_blank() -> None:
    profile = Profile.from_rates("t", {"t": 1.0, "d": 0.1, "e": 0.2}, {("d", "t"): 0.8, ("e", "t"): 0.5})
    texts = [text.get_text() for text in plots.acceptance_heatmap(profile).texts]
    assert sorted(texts) == ["-", "-", "-", "-", "50", "80"]


def test_survival_stops_where_it_was_measured() -> None:
    law = Acceptance((1.0, 0.8, 0.5))
    axes = plots.acceptance_by_position(Profile.from_rates("t", {"t": 1.0, "d": 0.1}, {("d", "t"): law}))
    assert axes.lines[0].get_ydata() == pytest.approx([1.0, 0.8, 0.5])


def test_saved_figures_come_with_their_data(tmp_path: Path) -> None:
    report = report_of(3)
    paths = plots.save_figure(plots.report_figures(report)["speedups"], tmp_path / "v1.2-speedups")
    assert [path.name for path in paths] == ["v1.2-speedups.png", "v1.2-speedups.svg", "v1.2-speedups.csv"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(paths[2].read_text(encoding="utf-8").splitlines()))
    everything = sorted((*report["plans"], *report["baselines"]), key=lambda row: -row["speedup"])
    assert [row["plan"] for row in rows] == [row["plan"] for row in everything]
    assert [float(row["speedup"]) for row in rows] == [row["speedup"] for row in everything]
    assert rows[0]["speedup_interval_low"]


def test_elide_keeps_both_ends_and_the_width() -> None:
    assert plots.elide("short") == "short"
    text = plots.elide("target(drafter-with-a-long-name:8)", 20)
    assert len(text) == 20
    assert text.startswith("target(")
    assert text.endswith(":8)")
