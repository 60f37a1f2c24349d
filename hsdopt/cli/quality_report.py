"""quality.json: a row per plan, and what lossy decoding gains over the lossless plans."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hsdopt.errors import PredictionError
from hsdopt.plan import Level, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hsdopt.profiles import Profile
    from hsdopt.profiling import MeasuredRun
    from hsdopt.profiling.quality import Judgement, Measure, Point, Verdict
    from hsdopt.simulate.compare import PlanResult

    Row = dict[str, Any]

__all__ = ["make_report", "other_draws", "quality_of"]


def make_report(
    profiled: Profile,
    plans: Sequence[Plan],
    runs: Sequence[MeasuredRun],
    judged: Mapping[str, Judgement],
    *,
    asked: Mapping[str, Any],
    prompts: tuple[int, int],
    provenance: dict[str, Any],
) -> dict[str, Any]:
    """Return quality.json: a row per plan, and the lossy ones held against the lossless ones."""
    measure: Measure = asked["measure"]
    sampled = profiled.setting.temperature > 0
    against = "reference" if sampled and prompts[1] == prompts[0] else "own"
    timed = _timed(plans, runs, profiled.target, seed=asked["seed"])
    rows = [_row(plan, timed[plan.label], judged[plan.label], profiled) for plan in plans]
    for row in rows:
        itself = sampled and against == "own" and row["family"] == "autoregression"
        row["quality"] = None if itself else quality_of(row, measure, against)
        row["undominated"] = False
    for small in dict.fromkeys(row["small"] for row in rows if row["small"]):
        _mark_frontier([row for row in rows if row["small"] == small])
    limits = {"own": _own_limit(rows, measure, sampled=sampled), "reference": _reference_limit(rows, measure)}
    verdicts = {name: _verdict(rows, measure, name, limit) for name, limit in limits.items() if limit is not None}
    return {
        "format": "hsdopt-quality",
        "schema": 1,
        "target": Level(profiled.target).label,
        "measure": measure,
        "against": against,
        "sampled": sampled,
        "prompts": prompts[0],
        "prompts_with_reference": prompts[1],
        "plans": sorted(rows, key=lambda row: float(row["time"])),
        "verdicts": {name: asdict(found) for name, found in verdicts.items()},
        "provenance": provenance,
    }


def _timed(plans: Sequence[Plan], runs: Sequence[MeasuredRun], target: str, *, seed: int) -> dict[str, PlanResult]:
    """Return the times of every plan, with intervals over prompts that are paired with the target alone."""
    import numpy as np

    from hsdopt.simulate.compare import Predictions, Run, compare

    alone = plans[0].label
    clocked = [
        Run(
            plan=run.plan,
            repeat=run.repeat,
            prompt=run.prompt,
            tokens=len(run.output) - 1,
            seconds=run.seconds,
            target_passes=sum(count for model, _, count, _ in run.passes if model == target),
            order=run.order,
        )
        for run in runs
    ]
    nothing = Predictions({"none": {}}, "none")
    found = compare(clocked, nothing, chosen=alone, autoregression=alone, rng=np.random.default_rng(seed))
    return {result.plan: result for result in found.plans}


def _row(plan: Plan, timed: PlanResult, judged: Judgement, profiled: Profile) -> Row:
    bild = plan.bild
    bounds = timed.speedup.bounds
    return {
        "plan": plan.label,
        "name": _short(plan),
        "family": timed.family,
        "lossless": plan.lossless,
        "small": None if bild is None else bild.small,
        "fallback": None if bild is None else bild.fallback,
        "rollback": None if bild is None else bild.rollback if math.isfinite(bild.rollback) else "inf",
        "seconds_per_token": timed.measured.value,
        "interval": timed.measured.bounds,
        "time": 1 / timed.speedup.value,
        "time_interval": None if bounds is None else (1 / bounds[1], 1 / bounds[0]),
        "speedup": timed.speedup.value,
        "speedup_interval": bounds,
        "tokens_per_pass": timed.tokens_per_pass,
        "drafted_share": judged.drafted_share,
        "deviation": judged.deviation,
        "own": asdict(judged.own),
        "reference": None if judged.reference is None else asdict(judged.reference),
        "predicted": _predicted(plan, profiled),
    }


def _short(plan: Plan) -> str:
    """Return a name for tables: of Big Little Decoder the small model, fallback and rollback."""
    bild = plan.bild
    if bild is None or bild.stride is not None:
        return plan.label
    return f"bild({bild.small}, {bild.fallback:g}, {bild.rollback:g})"


def _predicted(plan: Plan, profiled: Profile) -> dict[str, float | None]:
    """Return what the profile says of time and deviation; None where it says nothing of the setting or the plan."""
    from hsdopt.latency import expected_latency
    from hsdopt.simulate import replay
    from hsdopt.solvers.bild import deviation

    alone, bild = Level(profiled.target), plan.bild
    if profiled.traces is None:
        return {"closed_form": None, "trace_replay": None, "deviation": None}
    tokens = profiled.setting.max_new_tokens - 1
    traces = profiled.traces
    return {
        "closed_form": _or_none(lambda: 1 / expected_latency(plan, profiled, tokens=tokens).speedup),
        "trace_replay": _or_none(
            lambda: replay(plan, profiled).seconds_per_token / replay(alone, profiled).seconds_per_token
        ),
        "deviation": None if bild is None else _or_none(lambda: deviation(bild, traces)),
    }


def _or_none(predict: Callable[[], float]) -> float | None:
    try:
        return predict()
    except PredictionError:
        return None


def quality_of(row: Row, measure: Measure, against: str) -> float | None:
    """Return the quality of a plan's outputs against "own" or "reference", or None if it is not known."""
    found = row[against]
    return None if found is None else float(found[measure.replace("-", "_")])


def _points(rows: Sequence[Row], measure: Measure, against: str) -> list[Point]:
    from hsdopt.profiling.quality import Point

    pairs = [(row, quality_of(row, measure, against)) for row in rows]
    return [Point(row["name"], row["time"], value) for row, value in pairs if value is not None]


def _mark_frontier(rows: Sequence[Row]) -> None:
    """Mark the rows that none of these beats in both time and quality."""
    from hsdopt.profiling.quality import Point, undominated

    points = [Point(row["plan"], row["time"], row["quality"]) for row in rows if row["quality"] is not None]
    kept = {point.plan for point in undominated(points)}
    for row in rows:
        row["undominated"] = row["plan"] in kept


def _own_limit(rows: Sequence[Row], measure: Measure, *, sampled: bool) -> float:
    """Return how near lossless outputs come to the target's own.

    Drawn outputs of one law differ too: the least that another lossless plan reaches is within chance.
    """
    if not sampled:
        return 100.0
    return min(other_draws(rows, measure), default=100.0)


def other_draws(rows: Sequence[Row], measure: Measure) -> list[float]:
    """Return what lossless plans other than the target alone reach against its own output."""
    others = [row for row in rows if row["lossless"] and row["family"] != "autoregression"]
    return [value for row in others if (value := quality_of(row, measure, "own")) is not None]


def _reference_limit(rows: Sequence[Row], measure: Measure) -> float | None:
    """Return what the target alone reaches by references; None without any."""
    return next(quality_of(row, measure, "reference") for row in rows if row["family"] == "autoregression")


def _verdict(rows: Sequence[Row], measure: Measure, against: str, limit: float) -> Verdict:
    """Hold the grid against the lossless plans."""
    from hsdopt.profiling.quality import verdict

    rivals = [row for row in rows if row["lossless"]]
    lossy = [row for row in rows if not row["lossless"]]
    return verdict(limit, _points(rivals, measure, against), _points(lossy, measure, against))
