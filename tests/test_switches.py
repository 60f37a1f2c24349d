"""Passes right behind another network's: timed apart from the others, kept in the profile, paid for by every reader."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_control import slow_machine
from test_profiles import traced_profile

from hsdopt.acceptance import Acceptance
from hsdopt.costs import CostCurve
from hsdopt.errors import InvalidArgumentError, ProfileError
from hsdopt.latency import expected_latency
from hsdopt.plan import parse_plan
from hsdopt.profiles import Profile
from hsdopt.profiling import control
from hsdopt.profiling.control import ControlCosts
from hsdopt.profiling.cost import SwitchRecord, measure_costs, measure_switches, switch_seconds
from hsdopt.simulate import simulate


class Cache:
    """A processor that holds one network's weights: a pass of another one takes `reload` seconds more."""

    def __init__(self, reload: float) -> None:
        self.reload = reload
        self.held = ""

    def seconds(self, name: str, tokens: int) -> float:
        extra = 0.0 if name == self.held else self.reload
        self.held = name
        return 0.1 * tokens + extra


class Session:
    """A session on that processor."""

    def __init__(self, name: str, cache: Cache) -> None:
        self.name, self.cache, self.length = name, cache, 0
        self.passes: list[Any] = []

    def begin(self, prompt: Any) -> None:  # noqa: ANN401 -- not read
        pass

    def crop(self, length: int) -> None:
        self.length = length

    def forward(self, sequence: Any, n_logits: int = 1) -> None:  # noqa: ANN401, ARG002 -- as the runtime's
        fed, self.length = len(sequence) - self.length, len(sequence)
        self.passes.append(SimpleNamespace(seconds=self.cache.seconds(self.name, fed)))


def machine(reload: float = 7.0) -> dict[str, Any]:
    cache = Cache(reload)
    return {
        name: SimpleNamespace(
            network=None,
            max_positions=None,
            network_session=lambda name=name: Session(name, cache),
            kind="transformers",
        )
        for name in ("t", "d", "e")
    }


def test_costs_are_those_behind_a_pass_of_the_same_network() -> None:
    records = measure_costs(machine(), tokens=(1, 2, 5), contexts=(8, 16), repeats=3, text=[1])
    assert all(record.seconds == pytest.approx(0.1 * record.tokens) for record in records)


def test_passes_over_one_token_are_timed_more_often_and_all_are_resumed() -> None:
    grid: Any = {"tokens": (1, 2, 5), "contexts": (8,), "repeats": 2, "singles": 3, "text": [1]}
    records = list(measure_costs(machine(), **grid))
    assert {sum(r.model == name for r in records) for name in ("t", "d", "e")} == {2 * 5}
    keys = [(r.model, r.tokens, r.context, r.repeat) for r in records]
    assert len({*keys}) == len(keys) == 3 * 2 * 5
    rest = list(measure_costs(machine(), done=keys[:13], **grid))
    assert {(r.model, r.tokens, r.context, r.repeat) for r in rest} == {*keys[13:]}


def test_switches_are_timed_behind_another_network() -> None:
    records = list(measure_switches(machine(), "t", context=8, repeats=3, text=[1]))
    assert {record.model for record in records} == {"t", "d", "e"}
    assert {record.tokens for record in records} == {1, 4, 8}
    assert switch_seconds(records) == pytest.approx({"t": 7.0, "d": 7.0, "e": 7.0})


def test_a_single_network_never_switches() -> None:
    only = {"t": machine()["t"]}
    assert not list(measure_switches(only, "t", context=8, repeats=3, text=[1]))


def test_noise_does_not_make_a_switch_cheaper_than_nothing() -> None:
    assert switch_seconds([SwitchRecord("t", 1, 0, 1.0, 2.0)]) == {"t": 0.0}


def rates(switch: float) -> Profile:
    costs = {
        name: CostCurve((1, 9), (0,), ((c, c),), switch=switch) for name, c in (("t", 1.0), ("m", 0.2), ("s", 0.1))
    }
    pairs = {("s", "m"): 0.8, ("m", "t"): 0.7, ("s", "t"): 0.6, ("lookup", "t"): Acceptance.from_rate(0.5)}
    return Profile.from_rates("t", costs | {"lookup": CostCurve.fixed(0.001)}, pairs)


def test_plain_decoding_and_lookup_pay_for_no_switch() -> None:
    for text in ("t", "t(lookup:3)"):
        plan = parse_plan(text)
        free, dear = expected_latency(plan, rates(0.0)), expected_latency(plan, rates(5.0))
        assert dear.seconds_per_token == free.seconds_per_token


@pytest.mark.parametrize(
    ("text", "switches"),
    [("t(s:3)", {"s": 1, "t": 1}), ("t(s:2, lookup:2)", {"s": 1, "t": 1}), ("t(m:1(s:2))", {"s": 1, "m": 1, "t": 1})],
)
def test_a_round_switches_once_to_every_level(text: str, switches: dict[str, int]) -> None:
    plan = parse_plan(text)
    free, dear = expected_latency(plan, rates(0.0)), expected_latency(plan, rates(5.0))
    per_round = {name: share * dear.tokens_per_pass for name, share in dear.switches.items() if share}
    assert per_round == pytest.approx(switches)
    more = (dear.seconds_per_token - free.seconds_per_token) * dear.tokens_per_pass
    assert more == pytest.approx(5.0 * sum(switches.values()))
    run = simulate(plan, rates(5.0), tokens=20_000)
    assert {name: count / run.rounds for name, count in run.switches.items()} == pytest.approx(switches)


def test_a_profile_keeps_them(tmp_path: Path) -> None:
    profile = traced_profile()
    costs = {**profile.costs, "t": replace(profile.cost("t"), switch=0.25)}
    replace(profile, costs=costs).save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert {name: again.cost(name).switch for name in ("t", "d")} == {"t": 0.25, "d": 0.0}
    assert again.resample(np.random.default_rng(0)).cost("t").switch == 0.25
    assert again.cost("t").scaled(2.0).switch == 0.5
    text = (tmp_path / "p.json").read_text()
    (tmp_path / "p.json").write_text(text.replace('"t": 0.25', '"t": -0.25'))
    with pytest.raises(ProfileError, match=r"field switches\.t: .*greater than or equal to 0; got -0\.25"):
        Profile.load(tmp_path / "p.json")


def test_a_curve_refuses_a_switch_below_nothing() -> None:
    with pytest.raises(InvalidArgumentError, match="at least 0 seconds"):
        CostCurve((1,), (0,), ((1.0,),), switch=-1.0)


def test_models_that_slow_spells_hit_by_chance_are_drawn_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model's own change is believed as far as it exceeds what the noise of the timings explains."""
    rng = np.random.default_rng(1)

    def noisy(*args: Any, **options: Any) -> Any:  # noqa: ANN401 -- passed on
        for record in slow_machine(*args, **options):
            slower = 1.6 if real and record.model == "d" else 1.0
            yield replace(record, seconds=record.seconds * slower * float(np.exp(0.4 * rng.standard_normal())))

    monkeypatch.setattr(control, "measure_costs", noisy)
    models: Any = {name: SimpleNamespace(kind="transformers") for name in ("d", "t")}
    apart = []
    for real in (False, True):
        costs = ControlCosts(traced_profile(), models, text=[1], journal=tmp_path / str(real), turns=1, repeats=12)
        changes = costs.changes()
        own = {name: costs._change(name) for name in models}
        apart.append((np.log(changes["d"] / changes["t"]), np.log(own["d"] / own["t"])))
    (drawn, raw), (kept, told) = apart
    assert abs(drawn) < 0.7 * abs(raw)
    assert kept == pytest.approx(told, rel=0.25)
    assert kept == pytest.approx(np.log(1.6), abs=0.2)
