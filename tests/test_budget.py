"""`hsdopt profile --budget`: measuring under a fake clock, on problems whose answer is known."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from mocks import MockModel, MockSession
from stack import call, make_stack, refused
from tiny import VOCAB, tiny_tokenizer

from hsdopt.acceptance import Acceptance
from hsdopt.errors import InvalidArgumentError, ProfileError
from hsdopt.latency import expected_latency
from hsdopt.plan import Level, Plan, plan_from_json
from hsdopt.profiles import Profile, Setting
from hsdopt.profiling import Prompt, Workload, profile, profile_within
from hsdopt.profiling.acceptance import PromptTrace
from hsdopt.profiling.budget import COARSE, Race
from hsdopt.profiling.cost import CostRecord, SwitchRecord, collect, outliers, relative_error
from hsdopt.profiling.elimination import WITHIN, Question
from hsdopt.profiling.journal import Journal
from hsdopt.profiling.measure import sharpened
from hsdopt.solvers.solve import solve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hsdopt.profiling.journal import Journal

TARGET = "t"
CONTEXTS = (40, 80)
TOKENS = 24
PROMPT = 40
LONGEST = 8
"""Drafts in most problems here: few plans to look at."""


@dataclass(frozen=True)
class Problem:
    """Models with known pass costs, and drafters right with a chance that depends on the kind of prompt.

    `costs` are seconds by new tokens; `rates` holds per drafter its acceptance on each kind of prompt, all kinds
    being equally likely. A drafter is right or wrong by itself, so that a pair agrees where both are right.
    """

    costs: Mapping[str, Callable[[int], float]]
    rates: Mapping[str, tuple[float, ...]]

    def truth(self, longest: int = 33) -> Profile:
        kinds = {name: np.array(rates) for name, rates in self.rates.items()}
        laws = {}
        for drafter, own in kinds.items():
            for verifier in (*kinds, TARGET):
                if verifier != drafter:
                    both = own * kinds.get(verifier, np.ones(len(own)))
                    curve = [float(np.mean(both**m)) for m in range(longest + 1)]
                    laws[drafter, verifier] = Acceptance(tuple(curve))
        return Profile.from_rates(TARGET, {**self.costs}, laws, max_tokens=longest)

    def regret(self, plan: Plan, *, family: str = "all", longest: int = LONGEST) -> float:
        """Return how much longer a plan takes than the best, as a fraction."""
        truth = self.truth()
        best = solve(truth, family=family, max_draft_length=longest, interval=0).seconds_per_token
        return expected_latency(plan, truth).seconds_per_token / best - 1


@dataclass
class FakeBench:
    """Takes measurements of a problem on a clock of its own."""

    problem: Problem
    seed: int = 0
    noise: float = 0.05
    now: float = 0.0
    timed: Counter[str] = field(default_factory=Counter)
    traced: int = 0

    def clock(self) -> float:
        return self.now

    def trace(self, index: int) -> PromptTrace:
        rng = np.random.default_rng([self.seed, 1, index])
        tokens = rng.integers(1000, size=TOKENS)
        kind = int(rng.integers(len(next(iter(self.problem.rates.values()), (1.0,)))))
        choice = {TARGET: tokens.tolist()}
        for number, (name, rates) in enumerate(self.problem.rates.items(), start=1):
            right = rng.random(TOKENS) < rates[kind]
            choice[name] = np.where(right, tokens, -number).tolist()
        self.now += TOKENS * self.problem.costs[TARGET](1) + sum(c(TOKENS) for c in self.problem.costs.values())
        self.traced += 1
        sure = {name: [1.0] * TOKENS for name in choice}
        return PromptTrace(tuple(range(PROMPT)), tuple(tokens.tolist()), choice, sure, sure)

    def switches(self, traces: Sequence[PromptTrace]) -> tuple[SwitchRecord, ...]:
        assert traces
        return ()

    def time(self, cell: tuple[str, int, int], traces: Sequence[PromptTrace]) -> float:
        assert traces
        rng = np.random.default_rng([self.seed, 2, sum(self.timed.values())])
        seconds = self.problem.costs[cell[0]](cell[1]) * float(np.exp(self.noise * rng.standard_normal()))
        self.now += seconds
        self.timed[cell[0]] += 1
        return seconds


def race(bench: FakeBench, journal: Memory | Journal, *, budget: float, prompts: int = 60) -> Race:
    return Race(
        bench,
        journal,
        target=TARGET,
        sizes={TARGET: COARSE, **dict.fromkeys(bench.problem.rates, COARSE)},
        contexts=CONTEXTS,
        prompts=[f"prompt {index}" for index in range(prompts)],
        question=Question(family="speculative", max_draft_length=LONGEST),
        budget=budget,
        clock=bench.clock,
    )


class SwitchingBench(FakeBench):
    """Passes right behind another network's take a fifth of the target's first pass more."""

    def switches(self, traces: Sequence[PromptTrace]) -> tuple[SwitchRecord, ...]:
        assert traces
        one = self.problem.costs[TARGET](1)
        self.now += 2 * one
        return tuple(SwitchRecord(TARGET, 1, repeat, 1.2 * one, one) for repeat in range(3))


def linear(first: float, more: float) -> Callable[[int], float]:
    return lambda n: first + more * (n - 1)


CLEAR = Problem({TARGET: linear(1.0, 0.02), "d": linear(0.05, 0.001)}, {"d": (0.9, 0.85)})
HOPELESS = Problem(
    {TARGET: linear(1.0, 0.02), "d": linear(0.05, 0.001), "bad": linear(0.9, 0.02)},
    {"d": (0.9, 0.85), "bad": (0.3, 0.2)},
)
TWINS = Problem(
    {TARGET: linear(1.0, 0.02), "d": linear(0.1, 0.001), "e": linear(0.1, 0.001)},
    {"d": (0.9, 0.4), "e": (0.4, 0.9)},
)


def test_it_stops_early_when_one_plan_is_far_ahead() -> None:
    bench = FakeBench(CLEAR)
    said = race(bench, Memory(), budget=10_000).run()
    assert said["resolved"]
    assert said["stopped"] == "settled"
    assert not said["unresolved"]
    assert said["probability"] >= 0.95
    assert said["spent"] == pytest.approx(bench.now)
    assert bench.now < 2_000
    assert CLEAR.regret(plan_from_json(said["plan"]), family="speculative") <= WITHIN


def test_autoregression_is_an_answer() -> None:
    slow = Problem({TARGET: linear(1.0, 0.3), "d": linear(0.9, 0.1)}, {"d": (0.4, 0.5)})
    said = race(FakeBench(slow), Memory(), budget=10_000).run()
    assert said["resolved"]
    assert plan_from_json(said["plan"]) == Level(TARGET)
    assert set(said["dropped"]) == {"d"}


def test_a_hopeless_drafter_is_timed_no_more() -> None:
    bench = FakeBench(HOPELESS)
    measured = race(bench, Memory(), budget=10_000)
    said = measured.run()
    assert set(said["dropped"]) == {"bad"}
    assert "look" in said["dropped"]["bad"]
    assert bench.timed["bad"] < bench.timed["d"] / 2
    kept = measured.profile()
    assert sum(len(sample.seconds) for sample in kept.samples["bad"]) == bench.timed["bad"]
    assert kept.acceptance("bad", TARGET).trials[0] == kept.acceptance("d", TARGET).trials[0]


def test_equal_plans_spend_the_budget_and_stay_open() -> None:
    bench = FakeBench(TWINS)
    said = race(bench, Memory(), budget=700).run()
    assert not said["resolved"]
    assert said["stopped"] == "budget"
    assert 600 < bench.now <= 700
    assert 0 < said["probability"] < 0.95
    models = {name for line in said["unresolved"] for name in ("d", "e") if f"t({name}:" in line}
    assert models - {*plan_from_json(said["plan"]).models}
    assert "in all" in said["needed"] or "timings" in said["needed"]


def test_prompts_that_run_out_end_it() -> None:
    said = race(FakeBench(TWINS), Memory(), budget=1e6, prompts=8).run()
    assert said["stopped"] == "prompts"
    assert said["prompts"] == said["of"] == 8
    assert said["spent"] < 1e5


@pytest.mark.parametrize("budget", [0.5, 60.0, 250.0])
def test_the_least_is_measured_whatever_it_costs(budget: float) -> None:
    bench = FakeBench(CLEAR)
    measured = race(bench, Memory(), budget=budget)
    said = measured.run()
    assert not said["resolved"]
    least = TOKENS + 2 * TOKENS + len(CONTEXTS) * sum(c(n) for c in CLEAR.costs.values() for n in COARSE)
    assert bench.now <= max(1.1 * least, budget)
    sizes = {name: {sample.tokens for sample in samples} for name, samples in measured.profile().samples.items()}
    assert all({*COARSE} <= found for found in sizes.values())


def test_a_step_between_the_coarse_sizes_is_found() -> None:
    """Verifying 6 tokens is as cheap as one, 7 cost twice as much: a line from 4 to 8 would not show it."""
    stepped = Problem({TARGET: lambda n: 1.0 if n <= 6 else 2.0, "d": linear(0.02, 0.0)}, {"d": (0.9, 0.9)})
    measured = race(FakeBench(stepped, noise=0.01), Memory(), budget=20_000)
    said = measured.run()
    assert stepped.regret(plan_from_json(said["plan"]), family="speculative") <= WITHIN
    assert {6, 7} & {sample.tokens for sample in measured.profile().samples[TARGET]}


@pytest.fixture(scope="module")
def whole_run() -> tuple[Memory, dict[str, Any]]:
    whole = Memory()
    return whole, race(FakeBench(CLEAR), whole, budget=3_000).run()


@pytest.mark.parametrize("kept", [0.2, 0.6, 0.9, 1.0])
def test_a_stopped_run_continues_where_it_was(whole_run: tuple[Memory, dict[str, Any]], kept: float) -> None:
    whole, said = whole_run
    part = Memory()
    part.records = whole.records[: round(kept * len(whole.records))]
    before = list(part.records)
    bench = FakeBench(CLEAR)
    bench.timed["t"] = sum("cost" in record for record in before)  # the noise goes on where it stopped
    again = race(bench, part, budget=3_000).run()
    assert part.records[: len(before)] == before
    assert again["pick"] == said["pick"]
    assert again["spent"] == pytest.approx(bench.now + (before[-1]["spent"] if before else 0.0))
    if kept == 1.0:
        assert bench.now == 0.0
        assert {**again, "spent": 0} == {**said, "spent": 0}


def test_switches_are_timed_once_and_kept() -> None:
    records, bench = Memory(), SwitchingBench(CLEAR)
    measured = race(bench, records, budget=3_000)
    measured.run()
    assert measured.profile().cost(TARGET).switch == pytest.approx(0.2 * CLEAR.costs[TARGET](1))
    assert sum("switch" in record for record in records.records) == 3
    again = race(SwitchingBench(CLEAR), records, budget=3_000)
    again.run()
    assert again.switches == measured.switches
    assert sum("switch" in record for record in records.records) == 3


def random_problem(seed: int) -> Problem:
    """One or two drafters on two kinds of prompts, curves that are flat, sloped or stepped, plans near each other."""
    rng = np.random.default_rng([seed, 0])
    step, height, slope = int(rng.integers(2, 8)), rng.uniform(0, 0.6), rng.uniform(0, 0.1)
    costs = {TARGET: lambda n: 1.0 + slope * (n - 1) + height * (n > step)}
    rates = {}
    for name in ("d", "e")[: int(rng.integers(1, 3))]:
        costs[name] = linear(rng.uniform(0.05, 0.4), 0.002)
        mean, spread = rng.uniform(0.3, 0.95), rng.uniform(0, 0.1)
        rates[name] = (min(mean + spread, 0.99), max(mean - spread, 0.05))
    return Problem(costs, rates)


class Memory:
    """A journal that no disk slows down."""

    read = Journal.read

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def add(self, **record: Any) -> None:  # noqa: ANN401 -- any JSON value
        self.records.append(json.loads(json.dumps(record)))


def solved(seed: int, *, budget: float) -> tuple[dict[str, Any], float]:
    """What a run says about a random problem, and the regret of its pick."""
    problem = random_problem(seed)
    bench = FakeBench(problem, seed=seed)
    said = race(bench, Memory(), budget=budget).run()
    return said, problem.regret(plan_from_json(said["plan"]), family="speculative")


def test_picks_are_within_two_per_cent_of_the_best() -> None:
    runs = [solved(seed, budget=700) for seed in range(10)]
    assert np.mean([regret <= WITHIN for _, regret in runs]) >= 0.9


@pytest.mark.slow
def test_95_of_100_picks_are_within_two_per_cent_of_the_best() -> None:
    runs = [solved(seed, budget=3_000) for seed in range(100)]
    sure = [regret <= WITHIN for said, regret in runs if said["resolved"]]
    assert np.mean([regret <= WITHIN for _, regret in runs]) >= 0.95
    assert len(sure) >= 50
    assert np.mean(sure) >= 0.95


class TimedSession(MockSession):
    """A session whose passes take a known time, by a fake clock or by the real one."""

    model: Synthetic

    def forward(self, sequence: Sequence[int], n_logits: int = 1) -> torch.Tensor:
        scores = super().forward(sequence, n_logits)
        made = self.passes[-1]
        self.passes[-1] = replace(made, seconds=self.model.take(self.model.cost(made.new_tokens)))
        return scores


@dataclass
class Synthetic(MockModel):
    """A model with a known cost, right at all positions of the text but each `miss`-th (0: never wrong)."""

    cost: Callable[[int], float] = float
    miss: int = 0
    now: list[float] = field(default_factory=lambda: [0.0])
    real: bool = False
    network: None = None
    dtype: None = None
    device: None = None
    parameters: int = 1
    bytes: int = 1
    lookup: None = None

    def opening(self, prompt: Sequence[int]) -> list[int]:
        return list(prompt)

    def take(self, seconds: float) -> float:
        self.now[0] += seconds
        if not self.real:
            return seconds
        started = time.perf_counter()
        while time.perf_counter() - started < SHORT * seconds:
            pass
        return time.perf_counter() - started

    def session(self) -> TimedSession:
        session = TimedSession(self.score, self.max_positions)
        session.model = self
        return session

    def score(self, sequence: Sequence[int], n_logits: int) -> torch.Tensor:
        lengths = range(len(sequence) - n_logits + 1, len(sequence) + 1)
        right = [VOCAB - 1 - length % 50 for length in lengths]
        wrong = [self.miss and length % self.miss == 0 for length in lengths]
        ids = torch.tensor([token - 60 if off else token for token, off in zip(right, wrong, strict=True)])
        return torch.nn.functional.one_hot(ids, self.vocab_size).double()


COSTS = {"big": linear(10e-3, 0.5e-3), "small": linear(2e-3, 0.1e-3)}


def synthetic(*, real: bool = False) -> dict[str, Synthetic]:
    now = [0.0]
    made = {"vocab_size": VOCAB, "tokenizer": tiny_tokenizer(), "now": now, "real": real}
    return {name: Synthetic(name, cost=cost, miss=5 if name == "small" else 0, **made) for name, cost in COSTS.items()}


def workload(count: int) -> Workload:
    return Workload("some", tuple(Prompt(f"{index}", text=f"Say number {index} twice.") for index in range(count)))


SHORT = 0.1
"""Passes that take real time are this much shorter: a busy machine lets most of them run through."""


def check_recovered(profile: Profile, *, real: bool = False) -> None:
    """Hold a profile against the truth; medians where time is real, as slow passes are part of a curve."""
    for name, cost in COSTS.items():
        for sample in profile.samples[name]:
            read = sample.median / SHORT if real else profile.cost(name)(sample.tokens, sample.context)
            assert read == pytest.approx(cost(sample.tokens), rel=0.02), (name, sample)
    assert profile.acceptance("small", "big").survival[1] == pytest.approx(0.8, rel=0.02)


def test_known_costs_and_acceptance_are_recovered(tmp_path: Path) -> None:
    models = synthetic()
    setting = Setting(max_new_tokens=41)
    options = {"models": models, "setting": setting, "budget": 30.0, "clock": lambda: models["big"].now[0]}
    measured = profile_within("big", ["small"], workload(16), journal=tmp_path / "journal", **options)
    check_recovered(measured)
    said = measured.provenance["budget"]
    assert said["resolved"]
    assert said["spent"] < 30
    assert len(measured.provenance["prompts"]) == said["prompts"]
    measured.save(tmp_path / "profile.json")
    read = Profile.load(tmp_path / "profile.json")
    assert read.provenance["budget"] == json.loads(json.dumps(said))
    with pytest.raises(ProfileError, match=r"question\.budget = 30"):
        profile_within(
            "big", ["small"], workload(16), journal=tmp_path / "journal", **{**options, "budget": 31.0}, resume=True
        )


@pytest.mark.slow
def test_a_stub_that_takes_real_time_is_recovered(tmp_path: Path) -> None:
    options = {"setting": Setting(max_new_tokens=21), "contexts": (32, 48), "tokens": (1, 2, 4), "repeats": 15}
    measured = profile(
        "big", ["small"], workload(4), models=synthetic(real=True), journal=tmp_path / "journal", **options
    )
    check_recovered(measured, real=True)


@pytest.mark.parametrize("limits", [{"budget": 0.0}, {"budget": float("nan")}, {"budget": 9.0, "confidence": 1.0}])
def test_limits_that_mean_nothing_are_refused(tmp_path: Path, limits: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected a (budget|confidence)"):
        profile_within("big", ["small"], workload(4), models=synthetic(), journal=tmp_path / "journal", **limits)


def stack_arguments(stack: Path, out: Path, *more: str) -> list[str]:
    """Arguments that profile the tiny stack under a budget."""
    named = ["--target", f"big={stack / 'big'}", "--draft", f"small={stack / 'small'}", "--draft", "lookup"]
    where = ["--prompts", str(stack / "prompts.jsonl"), "-o", str(out), "--max-new-tokens", "12", "--threads", "1"]
    return ["profile", *named, *where, *more]


def test_the_command_measures_and_says_what_it_decided(tmp_path: Path) -> None:
    stack, out = make_stack(tmp_path), tmp_path / "profile.json"
    shown = call(*stack_arguments(stack, out, "--budget", "3s")).stdout
    said = Profile.load(out).provenance["budget"]
    assert said["seconds"] == 3
    assert said["confidence"] == 0.95
    assert said["pick"] in shown
    assert "within 2% of the best" in shown
    assert ("not settled" in shown) != said["resolved"]
    again = call(*stack_arguments(stack, out, "--budget", "3s", "--resume", "--json"))
    assert json.loads(again.stdout)["budget"] == said
    other = refused(*stack_arguments(stack, out, "--budget", "1m", "--resume"))
    assert "its options are --budget 3s --confidence 0.95, not --budget 60s" in other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--budget", "soon"), "expected --budget as a time above 0, such as 90s, 3m or 1h; got 'soon'"),
        (("--budget", "0s"), "expected --budget as a time above 0"),
        (("--budget", "3m", "--confidence", "1"), "expected --confidence of at least 0.5 and below 1"),
        (("--confidence", "0.9"), "expected --budget with --confidence"),
        (("--budget", "3m", "--repeats", "4"), "expected no --repeats with --budget"),
        (("--budget", "3m", "--precision", "0.1"), "expected no --precision with --budget"),
        (("--precision", "2"), "expected --precision between 0 and 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    assert message in refused(*stack_arguments(tmp_path, tmp_path / "profile.json", *options))


def test_precision_times_on_until_it_is_reached() -> None:
    values = iter([1.0, 1.4, *[1.0, 1.01, 1.0, 0.99, 1.0] * 20])
    timer = SimpleNamespace(time=lambda _: next(values))
    records = [CostRecord("t", 1, 8, repeat, timer.time(None)) for repeat in range(2)]
    added = list(sharpened(records, timer, 0.02))
    assert [record.repeat for record in records] == list(range(len(records)))
    assert relative_error([record.seconds for record in records]) <= 0.02
    assert relative_error([record.seconds for record in records[:-1]]) > 0.02
    assert added == records[2:]
    (sample,) = collect(records)["t"]
    assert outliers(sample) == (1.4,)
