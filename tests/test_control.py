"""Passes timed between runs: every cell once per repeat, spread over the turns, and kept in a journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_profiles import traced_profile

from hsdopt.profiling import control
from hsdopt.profiling.control import ControlCosts
from hsdopt.profiling.cost import CostRecord

SLOWER = 1.5


def slow_machine(
    models: Iterable[str],
    *,
    tokens: Iterable[int],
    contexts: Iterable[int],
    repeats: int,
    done: Iterable[tuple[str, int, int, int]],
    **_: object,
) -> Iterator[CostRecord]:
    """Stand in for the clock of a machine on which a pass of n tokens takes 0.15 n seconds."""
    finished = set(done)
    for repeat in range(repeats):
        for context in contexts:
            for count in tokens:
                for name in models:
                    if (name, count, context, repeat) not in finished:
                        yield CostRecord(name, count, context, repeat, SLOWER * 0.1 * count)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(control, "measure_costs", slow_machine)
    return {
        name: SimpleNamespace(kind="lookup" if name == "lookup" else "transformers") for name in ("d", "lookup", "t")
    }


def test_a_slower_machine_stretches_every_network_and_leaves_lookup(models: dict[str, Any], tmp_path: Path) -> None:
    profile = traced_profile()  # a pass of n tokens took 0.1 n seconds, and up to 0.01 more
    costs = ControlCosts(profile, models, text=[1], journal=tmp_path / "c", turns=4, repeats=3)
    for _ in range(4):
        costs.take()
    now, changes = costs.applied(profile), costs.changes()
    assert changes == pytest.approx({"d": SLOWER, "t": SLOWER}, rel=0.05)
    for name in ("d", "t"):
        assert now.cost(name)(4, 60) == pytest.approx(changes[name] * profile.cost(name)(4, 60))
    assert now.cost("lookup")(1) == profile.cost("lookup")(1)
    assert now.acceptance("d", "t") == profile.acceptance("d", "t")


def test_one_suspended_pass_does_not_stretch_a_model(
    models: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def suspended(*args: Any, **options: Any) -> Iterator[CostRecord]:  # noqa: ANN401 -- passed on
        first, *rest = slow_machine(*args, **options)
        yield replace(first, seconds=1000.0)
        yield from rest

    monkeypatch.setattr(control, "measure_costs", suspended)
    costs = ControlCosts(traced_profile(), models, text=[1], journal=tmp_path / "c", turns=1, repeats=3)
    assert costs.changes() == pytest.approx({"d": SLOWER, "t": SLOWER}, rel=0.08)


def test_turns_share_the_cells_and_what_is_left_is_timed_at_the_end(models: dict[str, Any], tmp_path: Path) -> None:
    profile = traced_profile()  # two networks, four token counts, two contexts: 16 cells
    costs = ControlCosts(profile, models, text=[1], journal=tmp_path / "c", turns=4, repeats=2)
    costs.take()
    lines = (tmp_path / "c").read_bytes().splitlines()
    assert len(lines) == 1 + 8
    costs.changes()
    assert len((tmp_path / "c").read_bytes().splitlines()) == 1 + 32


def test_the_last_turns_have_their_share_too(models: dict[str, Any], tmp_path: Path) -> None:
    costs = ControlCosts(traced_profile(), models, text=[1], journal=tmp_path / "c", turns=24, repeats=2)
    counts = []
    for _ in range(24):
        costs.take()
        counts.append(len((tmp_path / "c").read_bytes().splitlines()) - 1)
    assert counts[-1] >= 31
    assert {later - before for before, later in pairwise(counts)} == {1, 2}


def test_a_journal_is_continued_not_repeated(models: dict[str, Any], tmp_path: Path) -> None:
    profile = traced_profile()
    ControlCosts(profile, models, text=[1], journal=tmp_path / "c", turns=4, repeats=2).take()
    kept = (tmp_path / "c").read_bytes()
    again = ControlCosts(profile, models, text=[1], journal=tmp_path / "c", turns=4, repeats=2, resume=True)
    again.changes()
    assert (tmp_path / "c").read_bytes().startswith(kept)
    assert len((tmp_path / "c").read_bytes().splitlines()) == 1 + 32


def test_the_error_of_the_speed_is_that_of_blocks_of_time(
    models: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)

    def slow_for_a_while(*args: Any, **options: Any) -> Iterator[CostRecord]:  # noqa: ANN401 -- passed on
        records = list(slow_machine(*args, **options))
        spells = np.exp(0.2 * rng.standard_normal(12)).repeat(-(-len(records) // 12))
        yield from (replace(r, seconds=r.seconds * spell) for r, spell in zip(records, spells, strict=False))

    monkeypatch.setattr(control, "measure_costs", slow_for_a_while)
    costs = ControlCosts(traced_profile(), models, text=[1], journal=tmp_path / "c", turns=1, repeats=30)
    assert costs.noise() == pytest.approx(0.2 / 12**0.5, rel=0.5)


def test_a_steady_machine_is_sure_of_its_speed(models: dict[str, Any], tmp_path: Path) -> None:
    profile = traced_profile()
    costs = ControlCosts(profile, models, text=[1], journal=tmp_path / "c", turns=1, repeats=12)
    assert costs.noise() < 0.01
