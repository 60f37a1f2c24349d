"""Sweeps: the public ones decided as measured, lengths withheld, and the curves against the definition."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hsdopt
from hsdopt import Sweep, expected_latency, fit_sweep, parse_plan
from hsdopt.errors import InvalidArgumentError

CASES = json.loads((Path(__file__).parent / "data" / "cases2.json").read_text())["sweeps"]
PUBLIC = {name: case for name, case in CASES.items() if name != "note" and "rows" in case}
WITHHELD = [(name, row[0]) for name, case in PUBLIC.items() for row in case["rows"] if len(case["rows"]) > 2]
ROWS = [(1, 108.4, 0.883), (2, 129.3, 0.8), (3, 133.8, 0.719)]


def seconds(sweep: Sweep, length: int) -> float:
    return expected_latency(parse_plan(f"target(drafter:{length})"), sweep.profile).seconds_per_token


@pytest.mark.parametrize("name", PUBLIC)
def test_public_sweeps_are_decided_as_measured(name: str) -> None:
    base, rows = PUBLIC[name]["base"], PUBLIC[name]["rows"]
    sweep = fit_sweep(base, rows)
    assert sweep.best == PUBLIC[name]["best"]
    assert sweep.best in sweep.ties
    assert list(sweep.round_costs) == [0, *(row[0] for row in rows)]
    assert sweep.round_costs[0] == 1.0
    for length, speed, rate in rows:
        assert sweep.round_costs[length] == pytest.approx((1 + length * rate) * base / speed)
        assert seconds(sweep, length) == pytest.approx(1 / speed)
    assert expected_latency(parse_plan("target"), sweep.profile).seconds_per_token == pytest.approx(1 / base)


@pytest.mark.parametrize(
    ("name", "line"), [("laptop GPU, MTP head", (1.02, 0.525)), ("RTX 5090, 400 W", (0.97, 0.241))]
)
def test_public_lines(name: str, line: tuple[float, float]) -> None:
    sweep = fit_sweep(PUBLIC[name]["base"], PUBLIC[name]["rows"])
    assert sweep.affine == pytest.approx(line, abs=0.006)
    assert sweep.residual < 0.025


def test_ties_and_candidates_of_public_sweeps() -> None:
    desktop = fit_sweep(PUBLIC["RTX 5090, 400 W"]["base"], PUBLIC["RTX 5090, 400 W"]["rows"])
    assert desktop.ties == (3, 4)  # 133.8 and 132.8 tokens a second, where the line is 2 % off
    assert desktop.candidates == ()
    cliff = fit_sweep(PUBLIC["cliff at 9 tokens"]["base"], PUBLIC["cliff at 9 tokens"]["rows"])
    assert (cliff.best, cliff.ties, cliff.candidates) == (2, (2,), (1,))
    assert cliff.residual == pytest.approx(0.0, abs=1e-12)  # a line through two points proves nothing
    assert cliff.survival[3:] == pytest.approx([(8 * 0.371 - 2 * 0.712) / 6] * 6)


@pytest.mark.parametrize(("name", "length"), WITHHELD)
def test_a_withheld_length(name: str, length: int) -> None:
    """The pick is measured, loses little, and a withheld best is a candidate or beaten by less than 1 %."""
    base, rows = PUBLIC[name]["base"], PUBLIC[name]["rows"]
    whole, kept = fit_sweep(base, rows), [row for row in rows if row[0] != length]
    sweep = fit_sweep(base, kept)
    assert sweep.best == max(kept, key=lambda row: row[1])[0]
    assert set(sweep.candidates) <= {length}
    if length == whole.best:
        assert sweep.candidates == (length,)
    elif length < rows[-1][0]:
        # between measured lengths, the sharing of the gap and the line are 7 % off at most
        assert 1 / seconds(sweep, length) == pytest.approx({k: speed for k, speed, _ in rows}[length], rel=0.07)


def test_one_machine_pays_and_one_does_not() -> None:
    case = CASES["same acceptance, two machines"]
    drafted, rate = case["drafted"], case["accepted_per_drafted"]
    for speedup, cost in zip(case["speedups"], case["round_costs"], strict=True):
        sweep = fit_sweep(10.0, [(drafted, 10.0 * speedup, rate)])
        assert sweep.round_costs[drafted] == pytest.approx(cost, abs=0.005)
        assert sweep.best == (drafted if speedup > 1 else 0)
        assert sweep.affine is None
        assert sweep.residual == 0.0


def test_a_fixed_cost_per_drafted_round() -> None:
    case = CASES["a fixed 0.6 s per drafted round"]
    base, rows = case["base"], []
    for length in (2, 4, 8):
        tokens = 1 + length * 0.9
        rows.append((length, tokens / (1 / base + 0.6), 0.9))
    sweep = fit_sweep(base, rows)
    assert sweep.best == case["best"]
    assert sweep.affine == pytest.approx((1 + 0.6 * base, 0.0), abs=1e-9)
    assert sweep.affine is not None
    assert sweep.affine[0] == pytest.approx(case["break_even_tokens_per_round"], abs=0.05)


@given(st.floats(0.0, 1.0), st.integers(1, 10))
def test_three_meanings_of_acceptance(rate: float, longest: int) -> None:
    """Independent tokens: all three numbers describe one machine, and give one sweep."""
    tokens = np.cumsum(rate ** np.arange(longest + 1.0))
    lengths = range(1, longest + 1)
    speeds = [float(tokens[k]) * 10.0 / (1.0 + 0.1 * k) for k in lengths]
    counted = [(k, speed, min(1.0, float(tokens[k] - 1) / k)) for k, speed in zip(lengths, speeds, strict=True)]
    independent = [(k, speed, rate) for k, speed in zip(lengths, speeds, strict=True)]
    sweeps = [
        fit_sweep(10.0, counted),
        fit_sweep(10.0, independent, acceptance="iid"),
        fit_sweep(10.0, independent, acceptance="first position"),
    ]
    for sweep in sweeps:
        assert list(sweep.round_costs.values()) == pytest.approx([1.0 + 0.1 * k for k in range(longest + 1)])
        assert sweep.survival == pytest.approx(tuple(rate ** np.arange(longest + 1.0)), abs=1e-9)
        assert sweep.candidates == ()
        if longest > 1:
            assert sweep.affine == pytest.approx((1.0, 0.1))


rows_of_any_sweep = st.lists(
    st.tuples(st.integers(1, 12), st.floats(1.0, 1000.0), st.floats(0.0, 1.0)),
    min_size=1,
    max_size=6,
    unique_by=lambda row: row[0],
)


@settings(deadline=None)
@given(st.floats(1.0, 1000.0), rows_of_any_sweep)
def test_any_sweep(base: float, rows: list[tuple[int, float, float]]) -> None:
    sweep = fit_sweep(base, rows)
    lengths = {0: base, **{length: speed for length, speed, _ in rows}}
    assert lengths[sweep.best] == pytest.approx(max(lengths.values()))
    assert sweep.best in sweep.ties
    assert set(sweep.ties) <= set(lengths)
    assert not set(sweep.candidates) & set(lengths)
    assert all(0 < length < max(lengths) for length in sweep.candidates)
    survival = np.array(sweep.survival)
    assert len(survival) == max(lengths) + 1
    assert survival[0] == 1.0
    assert (np.diff(survival) <= 1e-12).all()
    assert ((survival >= 0.0) & (survival <= 1.0)).all()
    assert fit_sweep(base, rows[::-1]) == sweep
    assert seconds(sweep, max(lengths)) > 0.0


def test_the_projection_is_the_nearest_curve() -> None:
    """Against a grid over all curves of three positions, where the counted increments rise and leave [0, 1]."""
    rows = [(1, 10.0, 0.3), (2, 10.0, 0.85), (3, 10.0, 0.55)]
    increments = np.diff([1.0, 1.3, 2.7, 2.65])
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 41)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    grid = grid[(np.diff(grid, axis=1) <= 0).all(axis=1)]
    nearest = ((grid - increments) ** 2).sum(axis=1).min()
    assert fit_sweep(10.0, rows).survival[1:] == pytest.approx((0.85, 0.85, 0.0))
    assert ((np.array(fit_sweep(10.0, rows).survival[1:]) - increments) ** 2).sum() == pytest.approx(nearest)


def test_a_line_that_falls_below_zero_is_not_followed() -> None:
    sweep = fit_sweep(10.0, [(6, 20.0, 0.5), (8, 5.0, 0.5)])
    assert sweep.affine is not None
    assert sweep.affine[0] < 0
    assert sweep.profile.cost("target")(2) == pytest.approx(0.1)


def test_one_row_leaves_the_lengths_below_open() -> None:
    sweep = fit_sweep(10.0, [(4, 15.0, 0.5)])
    assert sweep.survival == (1.0, 0.5, 0.5, 0.5, 0.5)
    assert sweep.best == 4
    assert sweep.candidates == (1, 2, 3)


def test_it_is_public() -> None:
    assert {"fit_sweep", "Sweep"} <= set(hsdopt.__all__)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_sweep(0.0, ROWS), "base to be a number of tokens per second above 0; got 0.0"),
        (lambda: fit_sweep(71.2, []), "got none"),
        (lambda: fit_sweep(71.2, [(1, 2.0)]), r"rows\[0\] to be"),  # type: ignore[list-item]
        (lambda: fit_sweep(71.2, [*ROWS, (2, 1.0, 0.5)]), "got 2 twice"),
        (lambda: fit_sweep(71.2, [(0, 71.2, 0.0)]), r"draft length of rows\[0\]"),
        (lambda: fit_sweep(71.2, [(1, -3.0, 0.5)]), r"speed of rows\[0\]"),
        (lambda: fit_sweep(71.2, [(1, float("inf"), 0.5)]), r"got inf"),
        (lambda: fit_sweep(71.2, [(1, 3.0, 88.3)]), r"acceptance of rows\[0\] to be a rate"),
        (lambda: fit_sweep(71.2, ROWS, acceptance="rate"), "acceptance to be one of"),  # type: ignore[arg-type]
    ],
)
def test_bad_input_is_one_clear_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
