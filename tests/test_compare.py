"""Statistics of measured runs: hand-computed cases, properties, and the report's keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsdopt.errors import InvalidArgumentError, PredictionError
from hsdopt.simulate.compare import Comparison, Interval, Mismatch, Predictions, Run, compare, plan_family

ALONE, DRAFT, STACK = "t", "t(d:4)", "t(m:6(d:3))"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def runs_of(
    seconds: Callable[[str, int, int], float],
    *,
    plans: tuple[str, ...] = (ALONE, DRAFT, STACK),
    repeats: int = 2,
    prompts: int = 6,
) -> list[Run]:
    """Return interleaved runs of 10 tokens: over prompts first, plans inside."""
    cells = [(plan, repeat, prompt) for repeat in range(1, repeats + 1) for prompt in range(prompts) for plan in plans]
    return [Run(*cell, 10, seconds(*cell), order=place) for place, cell in enumerate(cells)]


def constant(rates: dict[str, float]) -> Callable[[str, int, int], float]:
    return lambda plan, _repeat, _prompt: 10 * rates[plan]


RATES = {ALONE: 0.04, DRAFT: 0.03, STACK: 0.02}


def outcome(runs: list[Run], predicted: dict[str, float], **options: object) -> Comparison:
    arguments: dict[str, object] = {"chosen": STACK, "autoregression": ALONE, "rng": rng()} | options
    return compare(runs, Predictions({"closed form": predicted}, "closed form"), **arguments)  # type: ignore[arg-type]


def test_pooled_rates_are_sum_over_sum() -> None:
    runs = [Run(ALONE, 1, 0, 10, 1.0), Run(ALONE, 1, 1, 40, 2.0), Run(DRAFT, 1, 0, 10, 0.5), Run(DRAFT, 1, 1, 40, 1.0)]
    result = outcome(runs, {ALONE: 0.06}, chosen=DRAFT)
    assert result.plan(ALONE).measured.value == pytest.approx(3.0 / 50)
    assert result.plan(DRAFT).speedup.value == pytest.approx(2.0)
    assert result.plan(DRAFT).speedup.bounds == pytest.approx((2.0, 2.0))  # every prompt has the same ratio
    assert [entry.plan for entry in result.plans] == [DRAFT, ALONE]


def test_error_is_positive_when_the_prediction_is_too_slow() -> None:
    result = outcome(runs_of(constant(RATES)), {ALONE: 0.044, DRAFT: 0.027, STACK: 0.02})
    errors = [result.plan(plan).error["closed form"] for plan in RATES]
    assert errors == pytest.approx([0.1, -0.1, 0.0])
    score = result.score("closed form")
    assert score is not None
    assert score.median_error == pytest.approx(0.1)
    assert score.p95_error == pytest.approx(0.1)
    assert score.spearman == pytest.approx(1.0)


def test_spearman_and_rank_agreement_of_a_swapped_pair() -> None:
    result = outcome(runs_of(constant(RATES)), {ALONE: 0.04, DRAFT: 0.01, STACK: 0.02})
    score = result.score("closed form")
    assert score is not None
    assert score.spearman == pytest.approx(0.5)  # ranks 3,1,2 against 3,2,1
    assert (score.rank_agreement, score.rank_pairs) == (pytest.approx(2 / 3), 3)


def test_rank_agreement_leaves_out_overlapping_pairs() -> None:
    def seconds(plan: str, _repeat: int, prompt: int) -> float:
        return {ALONE: 1.0, DRAFT: 0.30 + 0.04 * prompt, STACK: 0.31 + 0.04 * prompt}[plan]

    score = outcome(runs_of(seconds), {ALONE: 0.1, DRAFT: 0.05, STACK: 0.04}).score("closed form")
    assert score is not None
    assert (score.rank_agreement, score.rank_pairs) == (1.0, 2)


def test_equal_predictions_have_no_rank_correlation() -> None:
    score = outcome(runs_of(constant(RATES)), dict.fromkeys(RATES, 0.03)).score("closed form")
    assert score is not None
    assert score.spearman is None
    assert score.rank_agreement == 0.0


def test_regret_picks_on_odd_repeats_and_times_on_even_ones() -> None:
    rates = {1: {ALONE: 0.04, DRAFT: 0.02, STACK: 0.03}, 2: {ALONE: 0.04, DRAFT: 0.025, STACK: 0.02}}
    result = outcome(runs_of(lambda plan, repeat, _: 10 * rates[repeat][plan]), {})
    assert result.regret_against == DRAFT
    assert result.regret is not None
    assert result.regret.value == pytest.approx(0.02 / 0.025 - 1)
    assert result.regret.bounds == pytest.approx((-0.2, -0.2))


def test_regret_of_the_best_is_nothing_and_of_another_is_its_ratio() -> None:
    best = outcome(runs_of(constant(RATES)), {})
    worse = outcome(runs_of(constant(RATES)), {}, chosen=DRAFT)
    assert best.regret == Interval(0.0, 0.0, 0.0)
    assert worse.regret is not None
    assert worse.regret.value == pytest.approx(0.5)
    assert best.best == worse.best == STACK


def test_regret_needs_two_repeats_and_looks_at_candidates_only() -> None:
    assert outcome(runs_of(constant(RATES), repeats=1), {}).regret is None
    narrowed = outcome(runs_of(constant(RATES)), {}, chosen=DRAFT, candidates=(ALONE, DRAFT))
    assert (narrowed.best, narrowed.regret_against) == (DRAFT, DRAFT)


def test_each_predictor_pays_for_its_own_pick() -> None:
    predictions = Predictions({"good": RATES, "bad": {ALONE: 0.01, DRAFT: 0.03, STACK: 0.02}}, "good")
    result = compare(runs_of(constant(RATES)), predictions, chosen=STACK, autoregression=ALONE, rng=rng())
    regrets = {score.predictor: (score.pick, score.regret) for score in result.scores}
    assert regrets == {"good": (STACK, 0.0), "bad": (ALONE, pytest.approx(1.0))}


def drifting_runs() -> list[Run]:
    """Return runs on a machine that changes its speed from prompt to prompt."""
    drift = np.exp(rng(1).normal(0, 0.4, size=(3, 12)))
    noise = rng(2)

    def seconds(plan: str, repeat: int, prompt: int) -> float:
        return 10 * RATES[plan] * drift[repeat - 1, prompt] * noise.normal(1, 0.01)

    return runs_of(seconds, prompts=12, repeats=3)


def test_pairing_cancels_a_machine_that_drifts() -> None:
    result = outcome(drifting_runs(), {})
    low, high = result.plan(STACK).speedup.bounds or (0, 9)
    assert low < 2 < high
    assert high - low < 0.06
    spread = result.plan(STACK).measured.bounds or (0, 0)
    unpaired = (spread[1] - spread[0]) / result.plan(STACK).measured.value * 2
    assert high - low < unpaired / 5


def test_times_over_the_chosen_plans_are_paired_too() -> None:
    result = outcome(drifting_runs(), {}, chosen=DRAFT)
    low, high = result.plan(STACK).over_chosen.bounds or (0, 9)
    assert low < RATES[STACK] / RATES[DRAFT] < high
    assert high - low < 0.03
    assert result.plan(DRAFT).over_chosen == Interval(1.0, 1.0, 1.0)
    assert result.plan(ALONE).over_chosen.value == pytest.approx(result.plan(DRAFT).speedup.value)


@pytest.mark.parametrize("prompts", [6, 24])
def test_intervals_cover(prompts: int) -> None:
    """Nominal 95 %: the standard error of a share of 300 is 1.3 %."""
    draw, covered = rng(3), 0
    for trial in range(300):
        factor = draw.gamma(9, 1 / 9, size=(2, prompts))
        seconds = {ALONE: 1 + factor[0], DRAFT: 0.5 + factor[1]}
        runs = runs_of(lambda plan, _, prompt: seconds[plan][prompt], plans=(ALONE, DRAFT), repeats=1, prompts=prompts)  # noqa: B023
        result = outcome(runs, {}, chosen=DRAFT, rng=rng(trial), replicates=800)
        low, high = result.plan(DRAFT).speedup.bounds or (0, 0)
        covered += low <= 2 / 1.5 <= high
    assert 0.91 <= covered / 300 <= 0.99


def test_one_prompt_has_no_interval() -> None:
    result = outcome(runs_of(constant(RATES), prompts=1), RATES)
    assert result.plan(DRAFT).measured.bounds is None
    assert result.verdict == "speculate"


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3), st.floats(0.1, 10.0), st.integers(2, 9))
def test_scaling_every_clock_changes_no_ratio(factors: list[float], scale: float, prompts: int) -> None:
    rates = dict(zip(RATES, factors, strict=True))

    def run(unit: float) -> Comparison:
        return outcome(runs_of(lambda p, _, i: unit * rates[p] * (1 + i), prompts=prompts), {}, replicates=200)

    one, other = run(1.0), run(scale)
    for plan in RATES:
        assert other.plan(plan).measured.value == pytest.approx(scale * one.plan(plan).measured.value)
        assert other.plan(plan).speedup.value == pytest.approx(rates[ALONE] / rates[plan])
        bounds = one.plan(plan).measured.bounds
        assert bounds is not None
        assert bounds[0] <= one.plan(plan).measured.value * (1 + 1e-9)
        assert bounds[1] >= one.plan(plan).measured.value * (1 - 1e-9)


def priced_runs() -> list[Run]:
    passes = {("t", 5): 4, ("d", 1): 16}
    taken = {("t", 5): 0.4, ("d", 1): 0.16}
    made = [Run(DRAFT, 1, i, 10, 0.6, 4, passes, taken) for i in range(2)]
    return [*made, *(Run(ALONE, 1, i, 10, 1.0, 10, {("t", 1): 10}, {("t", 1): 1.0}) for i in range(2))]


def test_error_splits_into_acceptance_and_cost() -> None:
    profiled = {("t", 5): 0.11, ("d", 1): 0.01, ("t", 1): 0.1}
    expected = {DRAFT: {("t", 5): 0.5, ("d", 1): 2.0}}
    predictions = Predictions({"closed form": {DRAFT: 0.075}}, "closed form", passes=expected)
    result = compare(
        priced_runs(),
        predictions,
        chosen=DRAFT,
        autoregression=ALONE,
        rng=rng(),
        cost=lambda model, tokens: profiled[model, tokens],
    ).plan(DRAFT)
    priced = (4 * 0.11 + 16 * 0.01) / 10
    assert result.acceptance_error == pytest.approx((0.5 * 0.11 + 2.0 * 0.01) / priced - 1)
    assert result.cost_error == pytest.approx(priced / 0.056 - 1)
    assert result.outside == pytest.approx(1 - 0.56 / 0.6)
    parts = (1 + (result.acceptance_error or 0)) * (1 + (result.cost_error or 0)) * (1 - (result.outside or 0))
    assert parts == pytest.approx(1 + result.error["closed form"])
    assert result.tokens_per_pass == pytest.approx(2.5)
    assert result.seconds_by_model == pytest.approx({"t": 0.04, "d": 0.016})
    assert result.passes_by_model == pytest.approx({"t": 0.4, "d": 1.6})


def test_switches_have_their_part_in_both_errors() -> None:
    profiled = {("t", 5): 0.11, ("d", 1): 0.01, ("t", 1): 0.1, ("t", 0): 0.02, ("d", 0): 0.005}
    switched = {"t": 4, "d": 4}
    runs = [replace(run, switches=switched) if run.plan == DRAFT else run for run in priced_runs()]
    predictions = Predictions(
        {"x": {DRAFT: 0.075}},
        "x",
        passes={DRAFT: {("t", 5): 0.5, ("d", 1): 2.0}},
        switches={DRAFT: {"t": 0.5, "d": 0.5}},
    )
    result = compare(
        runs, predictions, chosen=DRAFT, autoregression=ALONE, rng=rng(), cost=lambda *kind: profiled[kind]
    ).plan(DRAFT)
    priced = (4 * 0.11 + 16 * 0.01 + 4 * 0.02 + 4 * 0.005) / 10
    assert result.acceptance_error == pytest.approx((0.5 * 0.11 + 2.0 * 0.01 + 0.5 * 0.025) / priced - 1)
    assert result.cost_error == pytest.approx(priced / 0.056 - 1)
    assert result.passes_by_model == pytest.approx({"t": 0.4, "d": 1.6})


def test_passes_beyond_the_profile_get_no_split() -> None:
    def cost(_model: str, _tokens: int) -> float:
        raise PredictionError("expected passes of 1 to 4 new tokens")

    result = compare(
        priced_runs(), Predictions({"x": {}}, "x"), chosen=DRAFT, autoregression=ALONE, rng=rng(), cost=cost
    )
    assert result.plan(DRAFT).acceptance_error is None
    assert result.plan(DRAFT).cost_error is None
    assert result.plan(DRAFT).tokens_per_pass == pytest.approx(2.5)


def test_transfer_is_scored_apart_and_its_intervals_counted() -> None:
    predictions = Predictions(
        {"closed form": RATES},
        "closed form",
        transfer={"closed form": {plan: 1.2 * rate for plan, rate in RATES.items()}},
        intervals={ALONE: (0.03, 0.05), DRAFT: (0.031, 0.05)},
    )
    result = compare(runs_of(constant(RATES)), predictions, chosen=STACK, autoregression=ALONE, rng=rng())
    summary = result.to_report()["summary"]
    assert summary["median_error"] == pytest.approx(0.0)
    assert summary["transfer_median_error"] == pytest.approx(0.2)
    assert summary["transfer_coverage"] == pytest.approx(0.5)


def test_drift_and_slow_runs_are_told_and_kept() -> None:
    steady = runs_of(constant(RATES), repeats=2)
    slower = [
        Run(r.plan, r.repeat, r.prompt, r.tokens, r.seconds * (1 + 0.2 * r.order / 35), order=r.order) for r in steady
    ]
    assert outcome(steady, {}).drift == pytest.approx(0.0)
    assert outcome(slower, {}).drift == pytest.approx(0.2 / 1.1, rel=0.02)
    spiked = [*steady[:-1], Run(STACK, 2, 5, 10, 9.0, order=35)]
    assert outcome(spiked, {}).slow_runs == 1
    assert outcome(spiked, {}).plan(STACK).measured.value == pytest.approx((11 * 0.2 + 9.0) / 120)
    assert outcome(runs_of(constant(RATES), repeats=1), {}).drift is None


def test_verdicts() -> None:
    assert outcome(runs_of(constant(RATES)), {}).verdict == "speculate"
    slow = runs_of(constant({ALONE: 0.04, DRAFT: 0.05, STACK: 0.06}))
    assert outcome(slow, {}, chosen=ALONE).verdict == "do not speculate"
    assert outcome(runs_of(constant(RATES)), {}, chosen=ALONE).verdict == "missed"
    assert outcome(slow, {}).verdict == "missed"
    assert outcome(runs_of(constant(RATES)), {}, chosen=DRAFT).verdict == "speculate"
    assert outcome(runs_of(constant(RATES)), {}, chosen=DRAFT).missed
    single = runs_of(constant({ALONE: 0.04, DRAFT: 0.05, STACK: 0.06}), repeats=1)
    assert outcome(single, {}).verdict == "do not speculate"

    def unsure(plan: str, _repeat: int, prompt: int) -> float:
        return 1.0 if plan == ALONE else 0.7 + 0.1 * prompt

    assert outcome(runs_of(unsure), {}).verdict == "within noise"


KEYS = {
    "plan",
    "family",
    "predicted_seconds_per_token",
    "measured_seconds_per_token",
    "interval",
    "tokens_per_pass",
    "error",
}
SUMMARY = {"median_error", "p95_error", "transfer_median_error", "spearman", "regret", "speedup"}


def test_report_has_the_promised_keys_and_is_plain_json() -> None:
    labels = ("transformers generate()", *RATES)
    runs = runs_of(constant(RATES | {labels[0]: 0.05}), plans=labels)
    report = outcome(runs, RATES, families={STACK: "adaptive"}).to_report(
        provenance={"torch": "2.13"}, mismatches=[Mismatch(DRAFT, 3, 17, 0.01, 0.02)], why="it is fast"
    )
    read = json.loads(json.dumps(report, allow_nan=False))
    assert set(read["summary"]) >= SUMMARY
    assert all(set(entry) >= KEYS for entry in read["plans"])
    assert read["summary"]["speedup"] == pytest.approx(2.0)
    assert read["plans"][0]["family"] == "adaptive"
    assert {row["plan"]: row["over_chosen"] for row in read["plans"]}[ALONE] == pytest.approx(2.0)
    assert read["summary"]["predicted_speedup"] == pytest.approx(2.0)
    assert read["mismatches"][0]["near_tie"] is True
    assert labels[0] not in [entry["plan"] for entry in read["plans"]]
    assert [(row["plan"], row["family"], row["error"]) for row in read["baselines"]] == [(labels[0], "baseline", None)]


def test_baselines_are_compared_but_never_candidates() -> None:
    fast, slow = "transformers generate()", "transformers generate(prompt_lookup_num_tokens=10)"
    rates = RATES | {fast: 0.01, slow: 0.03}
    result = outcome(runs_of(constant(rates), plans=tuple(rates)), RATES)
    assert (result.best, result.regret_against) == (STACK, STACK)
    assert result.fastest_baseline == fast
    assert result.against_baseline == Interval(*[pytest.approx(0.5)] * 3)
    assert len(result.scores) == 1
    assert result.scores[0].plans == 3
    none = outcome(runs_of(constant(RATES)), RATES)
    assert (none.fastest_baseline, none.against_baseline) == (None, None)


def test_coverage_counts_plans_and_widths() -> None:
    bounds = {ALONE: (0.03, 0.05), DRAFT: (0.031, 0.032), STACK: (0.01, 0.03)}
    predictions = Predictions({"x": RATES}, "x", intervals=bounds)
    options = {"chosen": STACK, "autoregression": ALONE, "rng": rng(), "memory": {ALONE: 5}}
    result = compare(runs_of(constant(RATES)), predictions, **options)  # type: ignore[arg-type]
    assert (result.coverage, result.intervals) == (pytest.approx(2 / 3), 3)
    assert result.interval_width == pytest.approx(0.5)  # of 0.5, 0.032 and 1
    assert (result.plan(ALONE).memory_bytes, result.plan(STACK).memory_bytes) == (5, None)
    assert result.to_report()["summary"]["transfer_interval_width"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("t", "autoregression"),
        ("t(lookup:8)", "speculative"),
        ("t(m:6(d:3))", "hierarchy"),
        ("t(m:6+(d:3))", "cascade"),
        ("t(m:2x(d:3))", "cascade"),
        ("t(m:4, lookup:8)", "cascade"),
        ("bild(t, d)", "bild"),
        ("prompt_lookup_num_tokens=10", "baseline"),
    ],
)
def test_families(text: str, family: str) -> None:
    assert plan_family(text) == family


def test_what_cannot_be_compared_is_refused() -> None:
    runs = runs_of(constant(RATES))
    with pytest.raises(InvalidArgumentError, match="at least one run"):
        outcome([], {})
    with pytest.raises(InvalidArgumentError, match=r"one run of t\(m:6\(d:3\)\) in repeat 2 on prompt 5; got 0"):
        outcome(runs[:-1], {})
    with pytest.raises(InvalidArgumentError, match="got 2"):
        outcome([*runs, runs[0]], {})
    with pytest.raises(InvalidArgumentError, match=r"expected runs of t\(x:2\)"):
        outcome(runs, {}, chosen="t(x:2)")
    with pytest.raises(InvalidArgumentError, match="at least 1 token"):
        Run("t", 1, 0, 0, 1.0)
    with pytest.raises(InvalidArgumentError, match="positive seconds in a run"):
        Run("t", 1, 0, 4, float("nan"))
    with pytest.raises(InvalidArgumentError, match="positive seconds per token of t by x"):
        Predictions({"x": {"t": 0.0}}, "x")
    with pytest.raises(InvalidArgumentError, match="primary predictor to be one of x; got y"):
        Predictions({"x": {}}, "y")
    with pytest.raises(InvalidArgumentError, match="one of the plans that were run"):
        outcome(runs, {}).plan("nope")
