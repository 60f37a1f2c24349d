"""The closed forms against the reference cases and the published tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hsdopt.checks import Cost
from hsdopt.latency import bild, cascade, hierarchy, speculative
from hsdopt.latency.hierarchy import Convention

Inputs = dict[str, Any]

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "cases.json").read_text())["cases"]
PUBLISHED = json.loads((DATA / "published.json").read_text())


def curve(spec: float | dict[str, Any]) -> Cost:
    """A cost as a number, or as the function that a case's cost spec describes."""
    if not isinstance(spec, dict):
        return spec
    kinds = {
        "affine": lambda n: spec["base"] + spec["slope"] * (n - 1),
        "roofline": lambda n: spec["base"] * max(1.0, n / spec["knee"]),
        "table": lambda n: spec["values"][min(n, len(spec["values"])) - 1],
    }
    return kinds[spec["type"]]


def hierarchy_latency(inputs: Inputs, convention: Convention) -> float:
    costs = [curve(spec) for spec in inputs["costs"]]
    return hierarchy.latency_per_token(costs, inputs["alphas"], inputs["T"], convention=convention)


def segments(inputs: Inputs) -> list[tuple[float, float, int]]:
    return [(segment["alpha"], segment["c"], segment["k"]) for segment in inputs["segments"]]


def bild_latency(inputs: Inputs) -> float:
    return bild.latency_per_token(
        fallback=inputs["f"],
        rollback=inputs["r"],
        tokens_lost=inputs["ell"],
        small_cost=inputs["cS"],
        large_cost=inputs["cL"],
        fallback_per=inputs["denom"],
        rollback_per=inputs["rollback_per"],
        extra_large=inputs["extra_large"],
    )


FUNCTIONS: dict[str, Callable[[Inputs], Any]] = {
    "expected_tokens": lambda i: speculative.expected_tokens(i["alpha"], i["T"]),
    "leviathan_ewif": lambda i: speculative.ewif(i["alpha"], i["c"], i["gamma"]),
    "best_gamma": lambda i: speculative.best_draft_length(i["alpha"], i["c"], i["gamma_max"]),
    "csd_pgf": lambda i: cascade.token_count_pgf(i["alpha"], i["k"], i["x"]),
    "vertical_ewif": lambda i: cascade.vertical_ewif(
        acceptance=i["alpha"],
        inner_acceptance=i["alpha_inner"],
        rounds=i["n"],
        inner_draft_length=i["k"],
        cost_ratio=i["c1"],
        inner_cost_ratio=i["c2"],
    ),
    "horizontal_ewif": lambda i: cascade.horizontal_ewif(segments(i)),
    "rounds": lambda i: hierarchy.expected_rounds(i["alpha"], i["draft_len"], i["T"]),
    "hsd_latency": lambda i: hierarchy_latency(i, "truncate"),
    "hsd_overshoot_latency": lambda i: hierarchy_latency(i, "overshoot"),
    "catchup_k1": lambda i: speculative.latency_per_token(i["alpha"], i["c0"], i["cK"], i["T0"], catch_up=i["mode"]),
    "bild_latency": bild_latency,
}
MINE = [case for case in CASES if case["kind"] in FUNCTIONS]


def test_every_kind_has_a_case() -> None:
    assert {case["kind"] for case in MINE} == set(FUNCTIONS)


@pytest.mark.parametrize("case", MINE, ids=lambda case: case["id"])
def test_reference_case(case: Inputs) -> None:
    found, expected = FUNCTIONS[case["kind"]](case["inputs"]), case["expected"]
    if case["kind"] == "best_gamma":
        assert found[0] == expected["gamma"]
        found, expected = found[1], expected["ewif"]
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("row", PUBLISHED["leviathan_2023_table_4"]["rows"])
def test_leviathan_table_4(row: Inputs) -> None:
    found = speculative.ewif(row["acceptance"], row["cost_ratio"], row["draft_length"])
    assert found == pytest.approx(row["expected"], abs=0.07)


def field_report(beginning: str) -> Inputs:
    rows = PUBLISHED["field_reports"]["rows"]
    return next(row for row in rows if row["what"].startswith(beginning))


def test_a_dear_verify_pass_decides_against_speculation() -> None:
    report = field_report("verify pass of 1 token 51 ms")
    assert report["decision"].startswith("do not speculate")
    inputs = report["inputs"]
    costs = {int(tokens): cost for tokens, cost in inputs["costs_ms"].items()}
    arguments = (inputs["acceptance"], inputs["drafter_cost_ms"], costs.__getitem__, inputs["draft_length"])
    assert speculative.speedup(*arguments) == pytest.approx(0.85, abs=0.01)
    constant = speculative.speedup(inputs["acceptance"], inputs["drafter_cost_ms"], costs[1], 1)
    assert constant == pytest.approx(1.86, abs=0.01)


def test_a_slow_drafter_that_still_pays() -> None:
    report = field_report("70B target + 7B drafter")
    assert report["decision"].startswith("speculate")
    inputs = report["inputs"]
    measured = inputs["baseline_ms"] / (inputs["total_ms"] / inputs["emitted"])
    assert measured == pytest.approx(1.18, abs=0.01)
    ratio = inputs["draft_pass_ms"] / inputs["baseline_ms"]
    constant = speculative.swi(
        tokens=inputs["emitted"],
        target_passes=inputs["emitted"] - inputs["accepted"],
        drafter_passes=[inputs["draft_passes"]],
        cost_ratios=[ratio],
    )
    assert constant > 1.0
    # what is left of the total after drafting, spread over the verify passes, is a pass of 1.19 plain steps
    verify = inputs["total_ms"] - inputs["draft_passes"] * inputs["draft_pass_ms"]
    steps = verify / (inputs["emitted"] - inputs["accepted"]) / inputs["baseline_ms"]
    assert steps == pytest.approx(1.19, abs=0.01)


@pytest.mark.parametrize(("task", "cost_ratio"), [("iwslt2017", 0.48), ("xsum", 0.32)])
def test_published_bild_rows_share_one_cost_ratio(task: str, cost_ratio: float) -> None:
    rows = PUBLISHED["bild_2023_vs_rejection_sampling"][task]
    for row in (rows["bild"], rows["rejection"]):
        latency = bild.latency_per_token(
            fallback=row["fallback"],
            rollback=row["rollback"],
            tokens_lost=1.45,
            small_cost=cost_ratio,
            large_cost=1.0,
            fallback_per="kept_token",
            rollback_per="kept_token",
        )
        assert bild.speedup(latency=latency, large_cost=1.0) == pytest.approx(row["speedup"], rel=0.03)
