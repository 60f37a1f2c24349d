"""Expected latency of whole plans, against the textbook formulas and against chance itself."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hsdopt
from hsdopt.acceptance import Acceptance, Traces
from hsdopt.costs import CostCurve, CostSample
from hsdopt.errors import InvalidArgumentError, PlanError, PredictionError
from hsdopt.latency import Estimate, bild, cascade, expected_latency, hierarchy, speculative
from hsdopt.plan import LOOKUP, Adaptive, Bild, Choice, Level, Plan, Segment, parse_plan
from hsdopt.profiles import Profile

NAMES = ("tiny", "small", "mid", "target")
LONGEST = 60
LENGTHS = st.integers(1, 7)
RATES = st.one_of(st.sampled_from([0.0, 1.0, 1.0 - 1e-9]), st.floats(0.0, 1.0))


# --- an independent run of a plan, one round at a time ------------------------------------------------------


@dataclass
class Machine:
    """Runs a plan on random acceptances; knows lengths and caches, and nothing of the closed form."""

    plan: Level | Adaptive
    profile: Profile
    rng: random.Random
    length: int = 1
    cached: Counter[str] = field(default_factory=Counter)
    passes: Counter[tuple[str, int]] = field(default_factory=Counter)
    drafted: Counter[tuple[str, str]] = field(default_factory=Counter)
    accepted: Counter[tuple[str, str]] = field(default_factory=Counter)
    curves: dict[object, list[float]] = field(default_factory=dict)

    def feed(self, model: str, scored: int = 1) -> None:
        """One pass over what is missing, and at least over the last `scored` tokens."""
        self.passes[model, max(self.length - self.cached[model], scored)] += 1
        self.cached[model] = self.length

    def cut(self, length: int) -> None:
        self.length = length
        for model, read in self.cached.items():
            self.cached[model] = min(read, length)

    def round(self, model: str, row: tuple[Segment, ...], room: int | None = None) -> int:
        start, intact, total = self.length, True, 0
        for segment in row:
            held = self.length - start
            tokens, good = self.segment(model, segment, held, None if room is None else room - held)
            edge = (segment.level.model, model)
            self.drafted[edge] += tokens
            if intact:
                self.accepted[edge] += good
                total += good
                intact = good == tokens
        self.feed(model, 1 + self.length - start)
        self.cut(start + total)
        self.length += 1
        return total + 1

    def segment(self, verifier: str, segment: Segment, held: int, left: int | None) -> tuple[int, int]:
        asked = max(0, segment.length - held) if segment.stop == "until" else segment.length
        asked = asked if left is None else min(asked, left)
        if asked == 0:
            return 0, 0
        if segment.level.model == LOOKUP:
            return self.look_up(verifier, asked)
        tokens = self.request(segment.level, asked, segment.stop)
        if left is not None and tokens > left:
            self.cut(self.length - (tokens - left))
            tokens = left
        curve = self.curves.setdefault(
            (segment.level.model, verifier), list(self.profile.acceptance(segment.level.model, verifier).curve(LONGEST))
        )
        draw, good = self.rng.random(), 0
        while good < tokens and draw < curve[good + 1]:
            good += 1
        return tokens, good

    def look_up(self, verifier: str, asked: int) -> tuple[int, int]:
        self.passes[LOOKUP, 1] += 1
        key = (verifier, asked)
        if key not in self.curves:
            self.curves[key] = list(np.cumsum(self.profile.acceptance(LOOKUP, verifier).law(asked).ravel()))
        place = int(np.searchsorted(self.curves[key], self.rng.random() * self.curves[key][-1], side="right"))
        tokens, good = divmod(place, asked + 1)
        self.length += tokens
        return tokens, good

    def request(self, level: Level, asked: int, stop: str) -> int:
        start, rounds = self.length, 0
        while (rounds if stop == "rounds" else self.length - start) < asked:
            row = level.row
            if isinstance(self.plan, Adaptive):
                row = as_row(self.plan.table(level.model)[asked - (self.length - start) - 1])
            if row:
                self.round(level.model, row)
            else:
                self.feed(level.model)
                self.length += 1
            rounds += 1
        if stop == "truncate":
            self.cut(start + asked)
        return self.length - start

    def step(self, room: int | None = None) -> int:
        if isinstance(self.plan, Adaptive):
            return self.round(self.plan.model, as_row(self.plan.draft), room)
        return self.round(self.plan.model, self.plan.row, room)


def as_row(choice: Choice | None) -> tuple[Segment, ...]:
    return () if choice is None else (Segment(Level(choice.drafter), choice.length),)


def measured(plan: Level | Adaptive, profile: Profile, rounds: int, seed: int) -> list[tuple[Machine, int]]:
    """Batches of rounds: what was counted in each, and the tokens gained."""
    machine = Machine(plan, profile, random.Random(seed))
    for _ in range(50):
        machine.step()
    batches = []
    for _ in range(100):
        machine = Machine(plan, profile, machine.rng, machine.length, machine.cached, curves=machine.curves)
        batches.append((machine, sum(machine.step() for _ in range(rounds // 100))))
    return batches


def agrees(name: object, expected: float, values: Sequence[float], tokens: Sequence[int]) -> None:
    """A ratio of sums within 4 standard errors of what is expected."""
    value, weight = np.asarray(values, dtype=float), np.asarray(tokens, dtype=float)
    residual = value - expected * weight
    error = residual.std(ddof=1) * math.sqrt(len(value))
    assert abs(residual.sum()) <= 4 * error + 1e-9 * weight.sum(), (name, expected, value.sum() / weight.sum())


def compare(estimate: Estimate, profile: Profile, batches: list[tuple[Machine, int]]) -> None:
    tokens = [gained for _, gained in batches]
    seconds = [sum(n * profile.cost(m)(k) for (m, k), n in run.passes.items()) for run, _ in batches]
    agrees("seconds", estimate.seconds_per_token, seconds, tokens)
    for row in estimate.breakdown:
        done = [sum(n for (m, _), n in run.passes.items() if m == row.model) for run, _ in batches]
        agrees(row.model, row.passes, done, tokens)
    for (model, k), share in estimate.passes.items():
        if share * sum(tokens) > 200:
            agrees((model, k), share, [run.passes[model, k] for run, _ in batches], tokens)
    for edge in estimate.edges:
        pair = (edge.drafter, edge.verifier)
        agrees((*pair, "drafted"), edge.drafted, [run.drafted[pair] for run, _ in batches], tokens)
        agrees((*pair, "accepted"), edge.accepted, [run.accepted[pair] for run, _ in batches], tokens)
    seen = {key for run, _ in batches for key in run.passes}
    assert seen <= {key for key, share in estimate.passes.items() if share > 0}


# --- random profiles and plans ------------------------------------------------------------------------------


def random_profile(rng: random.Random) -> Profile:
    """Survival curves that are not iid, lookup that proposes less than asked, sloped and stepped costs."""
    laws: dict[tuple[str, str], Acceptance] = {}
    for i, verifier in enumerate(NAMES):
        for drafter in NAMES[:i]:
            steps = [rng.uniform(0.5, 1.0) for _ in range(LONGEST)]
            laws[drafter, verifier] = Acceptance((1.0, *np.cumprod(steps).tolist()))
        joint = np.tril(np.array([[rng.random() ** 3 for _ in range(13)] for _ in range(13)]))
        joint[:3] *= 6  # often few tokens are proposed, or none
        joint[0, 0] += 5
        laws[LOOKUP, verifier] = Acceptance.from_joint(joint / joint.sum())
    costs: dict[str, CostCurve] = {LOOKUP: CostCurve.fixed(0.02)}
    for scale, name in enumerate(NAMES, 1):
        steps = [scale, *(rng.choice([0.0, 0.05, 0.5]) * scale for _ in range(999))]
        costs[name] = CostCurve(tuple(range(1, 1001)), (0,), (tuple(np.cumsum(steps).tolist()),))
    return Profile.from_rates("target", costs, laws)


def random_level(rng: random.Random, index: int, depth: int) -> Level:
    row = []
    for _ in range(rng.choice([1, 1, 2, 3]) if depth else 0):
        drafter = rng.randrange(-1, index)
        level = Level(LOOKUP) if drafter < 0 else random_level(rng, drafter, depth - 1)
        stops = ["truncate", "until", *(["overshoot", "rounds", "truncate"] if level.row else [])]
        stop = rng.choice(stops)
        length = rng.randint(1, {"rounds": 2, "until": 9}.get(stop, 5))
        row.append(Segment(level, length, stop))  # type: ignore[arg-type]
    return Level(NAMES[index], tuple(row))


CHOSEN = [
    "target",
    "target(small:4)",
    "target(lookup:6)",
    "target(mid:6(small:3))",
    "target(mid:4+(small:2))",
    "target(mid:2x(small:3))",
    "target(mid:4, small:3, lookup:6)",
    "target(mid:3(lookup:6), lookup:6)",
    "target(mid:3(small:2), small:2, tiny:..7)",
    "target(lookup:3, small:..1)",
    "target(lookup:8, small:..3(tiny:2))",
    "target(mid:5(small:2(tiny:2)), small:3(tiny:1))",
    "target(mid:5+(small:1+(lookup:6), lookup:4), small:..9(lookup:5), lookup:4)",
    "target(mid:3(small:2), mid:3(tiny:2), mid:2)",
    "target(small:2, mid:3+(small:2, tiny:2), small:2)",
    "target(mid:4(small:..3, lookup:5))",
    "target(lookup:1, mid:1(small:1(tiny:1(lookup:1))))",
]
ADAPTIVE = Adaptive(
    "target",
    Choice("mid", 6),
    (
        ("tiny", (None, None, None)),
        ("small", (None, Choice(LOOKUP, 4), Choice("tiny", 2), Choice("tiny", 3))),
        (
            "mid",
            (None, Choice("small", 1), Choice("tiny", 3), Choice("small", 4), Choice(LOOKUP, 6), Choice("small", 3)),
        ),
    ),
)


def random_plans() -> list[Level]:
    rng = random.Random(7)
    return [random_level(rng, 3, 3) for _ in range(18)]


@pytest.mark.parametrize("plan", [*map(parse_plan, CHOSEN), ADAPTIVE, *random_plans()], ids=str)
def test_agrees_with_chance(plan: Level | Adaptive) -> None:
    profile = random_profile(random.Random(11))
    compare(expected_latency(plan, profile), profile, measured(plan, profile, 5000, seed=5))


FINITE = [
    "target",
    "target(small:4)",
    "target(mid:6(small:3))",
    "target(mid:4+(small:2), lookup:6)",
    "target(mid:2x(small:3), small:..7)",
    "target(lookup:3, small:..1)",
    "target(small:2, mid:3(small:2), lookup:5)",
]


@pytest.mark.parametrize("tokens", [1, 2, 13])
@pytest.mark.parametrize("plan", [*map(parse_plan, FINITE), ADAPTIVE], ids=str)
def test_finite_outputs_agree_with_chance(plan: Level | Adaptive, tokens: int) -> None:
    profile = random_profile(random.Random(12))
    rng = random.Random(6)
    batches = []
    for _ in range(500):
        machine = Machine(plan, profile, rng)
        wanted = tokens
        while wanted:
            wanted -= machine.step(wanted - 1)
        batches.append((machine, tokens))
    estimate = expected_latency(plan, profile, tokens=tokens)
    compare(estimate, profile, batches)


# --- the textbook -------------------------------------------------------------------------------------------


def stack(lengths: list[int], stop: str = "truncate") -> Level:
    level = Level(NAMES[0])
    for name, length in zip(NAMES[1:], lengths, strict=False):
        level = Level(name, (Segment(level, length, stop if level.row else "truncate"),))  # type: ignore[arg-type]
    return level


def profile_of(costs: Sequence[object], rates: Sequence[float], target: str | None = None) -> Profile:
    laws = {(NAMES[i], NAMES[i + 1]): rate for i, rate in enumerate(rates)}
    return Profile.from_rates(target or NAMES[len(rates)], dict(zip(NAMES, costs, strict=False)), laws)  # type: ignore[arg-type]


CURVES: list[Callable[[int], float]] = [
    lambda n: 0.1 + 0.03 * n,
    lambda n: 0.4 + 0.2 * (n > 4),
    lambda n: 0.7 + 0.1 * n,
    lambda n: 2 + n**0.5,
]


@given(rate=RATES, length=LENGTHS)
@settings(deadline=None, derandomize=True, max_examples=50)
def test_one_drafter_with_catch_up(rate: float, length: int) -> None:
    found = expected_latency(stack([length]), profile_of(CURVES, [rate])).seconds_per_token
    tokens = speculative.expected_tokens(rate, length)
    plain = length * CURVES[0](1) + CURVES[1](length + 1)
    assert found == pytest.approx((plain + rate**length * (CURVES[0](2) - CURVES[0](1))) / tokens, rel=1e-12)
    textbook = speculative.latency_per_token(rate, CURVES[0], CURVES[1], length, catch_up="parallel")
    assert found == pytest.approx(textbook, rel=1e-12)


@given(data=st.data(), stop=st.sampled_from(["truncate", "overshoot"]), flat=st.booleans())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_hierarchies(data: st.DataObject, stop: str, flat: bool) -> None:  # noqa: FBT001
    lengths = data.draw(st.lists(LENGTHS, min_size=1, max_size=3))
    rates = data.draw(st.lists(RATES, min_size=len(lengths), max_size=len(lengths)))
    costs = [curve(1) if flat else curve for curve in CURVES[: len(lengths) + 1]]
    mode = "none" if flat else "parallel"
    found = expected_latency(stack(lengths, stop), profile_of(costs, rates)).seconds_per_token
    textbook = hierarchy.latency_per_token(costs, rates, lengths, convention=stop, catch_up=mode)  # type: ignore[arg-type]
    assert found == pytest.approx(textbook, rel=1e-12)


@given(rates=st.tuples(RATES, RATES), rounds=st.integers(1, 4), length=LENGTHS)
@settings(deadline=None, derandomize=True, max_examples=40)
def test_vertical_cascades(rates: tuple[float, float], rounds: int, length: int) -> None:
    inner, outer = rates
    plan = Level("mid", (Segment(Level("small", (Segment(Level("tiny"), length),)), rounds, "rounds"),))
    flat = expected_latency(plan, profile_of([0.05, 0.3, 1.0], [inner, outer]))
    shared = {"acceptance": outer, "inner_acceptance": inner, "rounds": rounds, "inner_draft_length": length}
    textbook = cascade.vertical_ewif(**shared, cost_ratio=0.3, inner_cost_ratio=0.05)  # type: ignore[arg-type]
    assert flat.speedup == pytest.approx(textbook, rel=1e-12)
    curves = dict(zip(("inner_cost", "drafter_cost", "target_cost"), CURVES, strict=False))
    sloped = cascade.vertical_latency_per_token(**shared, **curves, catch_up="parallel")  # type: ignore[arg-type]
    found = expected_latency(plan, profile_of(CURVES[:3], [inner, outer])).seconds_per_token
    assert found == pytest.approx(sloped, rel=1e-12)


@given(rates=st.tuples(RATES, RATES, RATES), lengths=st.tuples(LENGTHS, LENGTHS, LENGTHS))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_horizontal_cascades(rates: tuple[float, ...], lengths: tuple[int, ...]) -> None:
    row = [Segment(Level(name), length) for name, length in zip(NAMES, lengths, strict=False)]
    laws = {(name, "target"): rate for name, rate in zip(NAMES, rates, strict=False)}
    plan = Level("target", tuple(row))
    flat = Profile.from_rates("target", dict(zip(NAMES, (0.01, 0.1, 0.4, 1.0), strict=True)), laws)
    segments = [(rate, cost, length) for rate, cost, length in zip(rates, (0.01, 0.1, 0.4), lengths, strict=True)]
    assert expected_latency(plan, flat).speedup == pytest.approx(cascade.horizontal_ewif(segments), rel=1e-12)
    sloped = Profile.from_rates("target", dict(zip(NAMES, CURVES, strict=True)), laws)
    textbook = cascade.horizontal_latency_per_token(
        list(zip(rates, CURVES, lengths, strict=False)), CURVES[-1], catch_up="parallel"
    )
    assert expected_latency(plan, sloped).seconds_per_token == pytest.approx(textbook, rel=1e-12)


def test_adaptive_with_fixed_tables_is_the_hierarchy() -> None:
    plan = Adaptive("mid", Choice("small", 6), (("tiny", (None,) * 3), ("small", (Choice("tiny", 3),) * 6)))
    profile = profile_of(CURVES[:3], [0.7, 0.8])
    fixed = expected_latency(stack([3, 6]), profile)
    assert expected_latency(plan, profile).seconds_per_token == pytest.approx(fixed.seconds_per_token, rel=1e-12)


# --- properties ---------------------------------------------------------------------------------------------


@given(cost=st.floats(1e-6, 1e3), slope=st.floats(0, 10), tokens=st.sampled_from([None, 1, 7]))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_autoregression_has_speedup_one(cost: float, slope: float, tokens: int | None) -> None:
    profile = Profile.from_rates("target", {"target": lambda n: cost + slope * (n - 1)}, {})
    estimate = expected_latency(Level("target"), profile, tokens=tokens)
    assert (estimate.speedup, estimate.tokens_per_pass) == (1.0, 1.0)
    assert estimate.seconds_per_token == pytest.approx(cost, rel=1e-12)


@given(seed=st.integers(0, 10**6), rate=RATES, length=LENGTHS)
@settings(deadline=None, derandomize=True, max_examples=30)
def test_a_free_extra_drafter_never_hurts(seed: int, rate: float, length: int) -> None:
    profile = random_profile(random.Random(seed))
    flat = {name: curve(1) for name, curve in profile.costs.items()}
    rates = {pair: 0.7 for pair in profile.acceptances if LOOKUP not in pair}
    free = Profile.from_rates("target", {**flat, LOOKUP: 0.0}, {**rates, (LOOKUP, "target"): rate})
    plan = random_level(random.Random(seed), 3, 2)
    plan = replace(plan, row=tuple(s for s in plan.row if LOOKUP not in s.level.models))
    longer = replace(plan, row=(*plan.row, Segment(Level(LOOKUP), length)))
    assert expected_latency(longer, free).speedup >= expected_latency(plan, free).speedup * (1 - 1e-12)


@pytest.mark.parametrize("tokens", [None, 9])
@pytest.mark.parametrize("plan", [*map(parse_plan, CHOSEN), ADAPTIVE], ids=str)
def test_the_parts_sum_to_the_whole(plan: Plan, tokens: int | None) -> None:
    profile = random_profile(random.Random(13))
    found = expected_latency(plan, profile, tokens=tokens)
    assert [row.model for row in found.breakdown] == list(plan.models)
    assert sum(row.seconds for row in found.breakdown) == pytest.approx(found.seconds_per_token, rel=1e-12)
    priced = sum(share * profile.cost(model)(k) for (model, k), share in found.passes.items())
    assert priced == pytest.approx(found.seconds_per_token, rel=1e-12)
    for row in found.breakdown:
        own = {k: share for (model, k), share in found.passes.items() if model == row.model}
        assert sum(own.values()) == pytest.approx(row.passes, rel=1e-12)
        assert sum(k * share for k, share in own.items()) == pytest.approx(row.new_tokens * row.passes, rel=1e-12)
    accepted = sum(edge.accepted for edge in found.edges if edge.verifier == plan.target)
    assert accepted + found.breakdown[-1].passes == pytest.approx(1.0, rel=1e-12)
    assert found.breakdown[-1].passes * found.tokens_per_pass == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("text", [text for text in CHOSEN if text != "target"])
def test_positions_share_out_tokens_and_seconds(text: str) -> None:
    profile = random_profile(random.Random(14))
    found = expected_latency(parse_plan(text), profile)
    worth = found.position_value
    assert 1 + sum(place.tokens for place in worth) == pytest.approx(found.tokens_per_pass, rel=1e-12)
    drafting = found.seconds_per_token * found.tokens_per_pass - profile.cost("target")(1)
    assert sum(place.seconds for place in worth) == pytest.approx(drafting, rel=1e-9)
    for place in worth:
        assert place.saved == pytest.approx(place.tokens * found.seconds_per_token - place.seconds, abs=1e-12)


def test_the_value_of_a_position_is_the_derivative() -> None:
    profile = profile_of([0.02, CURVES[3]], [0.8])
    for length in range(1, 9):
        longer, shorter = (expected_latency(stack([n]) if n else Level("small"), profile) for n in (length, length - 1))
        last = longer.position_value[-1]
        assert last.position == length
        assert last.tokens == pytest.approx(longer.tokens_per_pass - shorter.tokens_per_pass, rel=1e-9)
        helps = longer.seconds_per_token < shorter.seconds_per_token
        assert helps == (last.saved > 0)


def test_long_outputs_approach_the_long_run() -> None:
    profile = random_profile(random.Random(15))
    plan = parse_plan("target(mid:6(small:3), lookup:4)")
    steady = expected_latency(plan, profile).seconds_per_token
    gaps = [abs(expected_latency(plan, profile, tokens=n).seconds_per_token - steady) * n for n in (60, 120)]
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-6)  # a constant number of seconds is lost at the end


def test_costs_are_read_at_the_context() -> None:
    grid = ((1.0, 2.0), (3.0, 6.0))
    curve = CostCurve((1, 32), (0, 100), grid)
    profile = Profile.from_rates("small", {"small": curve, "tiny": 0.1}, {("tiny", "small"): 0.5})
    near, far = (expected_latency(Level("small"), profile, context=c).seconds_per_token for c in (0, 50))
    assert (near, far) == (1.0, 2.0)


# --- what cannot be predicted -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target(mid:3(small:2, lenience=2))", "lenience 1 everywhere.*got 2 at mid: predict this plan by replaying"),
        ("target(other:3)", "one of the profiled models.*got other"),
        ("target(small:61)", "at most 60 tokens"),
        ("bild(target, small)", "traces of small under target"),
    ],
)
def test_what_the_profile_cannot_say(text: str, message: str) -> None:
    with pytest.raises(PredictionError, match=message):
        expected_latency(parse_plan(text), random_profile(random.Random(1)))


def test_pairs_that_were_not_profiled() -> None:
    with pytest.raises(PredictionError, match="acceptance rate of small's tokens by target"):
        expected_latency(parse_plan("target(small:2)"), Profile.from_rates("target", {"small": 1, "target": 2}, {}))


def test_passes_beyond_the_curve() -> None:
    curve = CostCurve.from_function(lambda n: 1.0 + n, 4)
    profile = Profile.from_rates("small", {"small": curve, "tiny": 0.1}, {("tiny", "small"): 0.5})
    with pytest.raises(PredictionError, match=r"passes of small over at most 4 new tokens.*got 6, and 93.8%"):
        expected_latency(stack([5]), profile)
    rare = Profile.from_rates(
        "small", {"small": 1.0, "tiny": CostCurve.from_function(lambda n: 0.1 * n, 1)}, {("tiny", "small"): 0.05}
    )
    found = expected_latency(stack([2]), rare)  # 1 round in 400 starts with 2 tokens missing
    assert 0 < found.extrapolated < 0.002
    exact = Profile.from_rates("small", {"small": 1.0, "tiny": lambda n: 0.1 * n}, {("tiny", "small"): 0.05})
    assert found.seconds_per_token == pytest.approx(expected_latency(stack([2]), exact).seconds_per_token, rel=1e-12)


def test_bad_options() -> None:
    profile = profile_of([0.1, 1.0], [0.5])
    with pytest.raises(InvalidArgumentError, match="tokens"):
        expected_latency(stack([1]), profile, tokens=0)
    with pytest.raises(InvalidArgumentError, match="interval"):
        expected_latency(stack([1]), profile, interval=-1)
    with pytest.raises(PlanError, match="Level, Adaptive or Bild"):
        expected_latency(Plan.__new__(Unknown), profile)
    with pytest.raises(PredictionError, match="passes that cost something"):
        expected_latency(stack([1]), profile_of([0.0, 0.0], [0.5]))


class Unknown(Plan):
    target = "small"
    models = ("small",)


def test_the_names_at_the_top() -> None:
    assert hsdopt.expected_latency is expected_latency
    assert hsdopt.Estimate is Estimate


# --- intervals ----------------------------------------------------------------------------------------------


def traced_profile(lengths: list[int], seed: int = 3) -> Profile:
    rng = np.random.default_rng(seed)
    size = sum(lengths)
    tokens = rng.integers(0, 9, size)
    ease = np.repeat(rng.uniform(0.4, 0.95, len(lengths)), lengths)
    choice = {"small": np.where(rng.random(size) < ease, tokens, 9), "target": tokens}
    traces = Traces(
        tokens,
        np.repeat(np.arange(len(lengths)), lengths),
        np.concatenate([np.arange(length) for length in lengths]) + 30,
        choice,
        top={"small": rng.uniform(0, 1, size)},
        surprise={("small", "target"): rng.exponential(1.0, size)},
    )
    samples = {
        name: tuple(
            CostSample(n, c, tuple((base * (1 + 0.02 * n) * rng.uniform(0.9, 1.1, 9)).tolist()))
            for n in (1, 32)
            for c in (0, 100)
        )
        for name, base in (("small", 0.1), ("target", 1.0))
    }
    return Profile("target", {n: CostCurve.from_samples(s) for n, s in samples.items()}, samples=samples, traces=traces)


@pytest.mark.parametrize("text", ["target(small:4)", "bild(target, small, fallback=0.2, rollback=3)"])
def test_intervals(text: str) -> None:
    plan = parse_plan(text)
    widths = []
    for prompts in (6, 60):
        profile = traced_profile([24] * prompts)
        found = expected_latency(plan, profile, interval=60)
        assert found == expected_latency(plan, profile, interval=60, rng=np.random.default_rng(0))
        assert found.interval is not None
        assert found.speedup_interval is not None
        assert found.interval[0] < found.seconds_per_token < found.interval[1]
        assert found.speedup_interval[0] < found.speedup < found.speedup_interval[1]
        assert replace(found, interval=None, speedup_interval=None) == expected_latency(plan, profile)
        widths.append(found.interval[1] - found.interval[0])
    assert widths[1] < widths[0]


def test_intervals_cover() -> None:
    """The truth of a large profile lies in about 95 % of the intervals of small ones drawn from the same source."""
    plan = parse_plan("target(small:3)")
    truth = expected_latency(plan, traced_profile([24] * 3000, seed=99)).seconds_per_token
    inside = 0
    for seed in range(30):
        interval = expected_latency(plan, traced_profile([24] * 25, seed), interval=60).interval
        assert interval is not None
        inside += interval[0] <= truth <= interval[1]
    assert inside >= 26  # 28.5 expected


def test_no_interval_without_raw_measurements() -> None:
    assert expected_latency(stack([2]), profile_of([0.1, 1.0], [0.5]), interval=50).interval is None


def test_replicates_that_are_too_short() -> None:
    profile = traced_profile([3] * 8 + [12])
    plan = parse_plan("target(small:8)")
    assert expected_latency(plan, profile).seconds_per_token > 0
    with pytest.raises(PredictionError, match="most of 40 bootstrap replicates"):
        expected_latency(plan, profile, interval=40)


# --- Big Little Decoder -------------------------------------------------------------------------------------


def script(doubts: str, exceeds: str, agrees: str | None = None, *, costs: object = None) -> Profile:
    """One output whose positions are written as signs: 1 where the small model doubts, or exceeds the threshold."""
    size = len(doubts) + 1  # the first token comes from the prefill
    texts = (doubts, exceeds, agrees or "0" * len(doubts))
    flags = [np.array([False, *(sign == "1" for sign in text)]) for text in texts]
    same = np.arange(size)
    traces = Traces(
        same,
        np.zeros(size, dtype=np.int64),
        same,
        {"small": np.where(flags[2], same, -1), "target": same},
        top={"small": np.where(flags[0], 0.1, 0.9)},
        surprise={("small", "target"): np.where(flags[1], 9.0, 0.0)},
    )
    curves = costs or {"small": CostCurve.fixed(0.25), "target": CostCurve.fixed(1.0)}
    return Profile("target", curves, traces=traces)  # type: ignore[arg-type]


def passes(plan: Bild, profile: Profile, tokens: int | None = None) -> dict[tuple[str, int], float]:
    size = len(profile.traces or ()) - 1
    found = expected_latency(plan, profile, tokens=tokens)
    assert sum(row.seconds for row in found.breakdown) == pytest.approx(found.seconds_per_token)
    return {key: share * size for key, share in found.passes.items()}


def test_bild_by_hand() -> None:
    # s s F: two small tokens, a doubt; then s F; then F at once
    got = passes(Bild("target", "small"), script("001011", "000000"))
    assert got == pytest.approx({("small", 1): 6, ("target", 3): 1, ("target", 2): 1, ("target", 1): 1})


def test_bild_rolls_back_by_hand() -> None:
    # positions 0-3: s X s F -> back to 1 (large gives it), then s at 2, F at 3; then s F at 4, 5
    profile = script("000101", "010000")
    got = passes(Bild("target", "small"), profile)
    assert got == pytest.approx({("small", 1): 4 + 2 + 2, ("target", 4): 1, ("target", 2): 2})
    # the authors' code: the large model runs once more, over position 2, so the small one then lacks 2 tokens
    got = passes(Bild("target", "small", semantics="reference"), profile)
    assert got == pytest.approx(
        {
            ("small", 1): 4 + 2,
            ("small", 2): 1,
            ("target", 4): 1,
            ("target", 1): 2,
            ("target", 2): 1,
        }
    )
    # and lets a first excess pass, and all after it, where the large model agrees
    agreed = script("0001", "0110", "0100")
    assert passes(Bild("target", "small", semantics="reference"), agreed) == {("small", 1): 4, ("target", 4): 1}
    assert passes(Bild("target", "small"), agreed)["target", 4] == 1
    assert len(passes(Bild("target", "small", rollback=math.inf), agreed)) == 2


def test_bild_caps_keep_the_last_token() -> None:
    # four small tokens, then the large one's, of which the small model then lacks two
    got = passes(Bild("target", "small", max_draft=4), script("0" * 10, "0" * 10))
    assert got == pytest.approx({("small", 1): 7, ("small", 2): 1, ("target", 5): 2})
    assert passes(Bild("target", "small", stride=4), script("1" * 10, "0" * 10)) == pytest.approx(got)
    quiet = script("0" * 22, "0" * 22)
    long = passes(Bild("target", "small", semantics="reference"), quiet)
    assert long == pytest.approx({("small", 1): 19, ("small", 2): 1, ("target", 11): 2})
    longer = passes(Bild("target", "small", max_draft=21, semantics="reference"), quiet)
    assert longer == pytest.approx({("small", 1): 21, ("target", 22): 1})


def test_bild_finite_outputs_leave_the_last_token_to_the_large_model() -> None:
    got = passes(Bild("target", "small", semantics="reference"), script("0" * 10, "0" * 10), tokens=5)
    assert got == pytest.approx({("small", 1): 8, ("target", 5): 2})
    # the paper's first token is the small model's, and reviewed with the rest
    got = passes(Bild("target", "small"), script("0" * 10, "0" * 10), tokens=5)
    assert got == pytest.approx({("small", 1): 8, ("target", 6): 2})


def test_bild_paper_start_by_hand() -> None:
    # two outputs of 3 tokens after the first: the prefill of the second gives the token at position 3, a doubt
    got = passes(Bild("target", "small"), script("001000", "000000"), tokens=3)
    assert got == pytest.approx({("small", 1): 4, ("target", 4): 1, ("target", 3): 1})
    # the first output's prefill token is withdrawn: the large model writes it, and the stint begins anew behind it
    profile = script("000", "000")
    traces = profile.traces
    assert traces is not None
    surprise = {("small", "target"): np.array([9.0, 0.0, 0.0, 0.0])}
    got = passes(Bild("target", "small"), replace(profile, traces=replace(traces, surprise=surprise)), tokens=3)
    assert got == pytest.approx({("small", 1): 4, ("target", 4): 1, ("target", 3): 1})


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("cap", [3, 10])
def test_bild_is_the_cycle_model(reference: bool, cap: int) -> None:  # noqa: FBT001
    """Rates counted here, put into the published cycle, give the same seconds per token."""
    rng = random.Random(8)
    doubts, exceeds = ("".join("01"[rng.random() < share] for _ in range(20000)) for share in (0.2, 0.05))
    doubts, exceeds = doubts + "1", exceeds + "0"  # the round ends with a stint
    at = calls = small = capped = rollbacks = lost = 0
    while at < len(doubts):
        kept = doubts.find("1", at, at + cap) - at
        capped += kept < 0
        small += kept + 1 if kept >= 0 else cap
        kept = kept if kept >= 0 else cap
        back = exceeds.find("1", at, at + kept) - at
        calls += 1
        if back >= 0:
            rollbacks += 1
            lost += kept - back
        at += back + 1 + reference if back >= 0 else kept + 1
    textbook = bild.latency_per_token(
        fallback=calls / small,
        rollback=rollbacks / calls,
        tokens_lost=lost / rollbacks,
        small_cost=0.25,
        large_cost=1.0,
        fallback_per="small_pass",
        rollback_per="call",
        extra_large=reference,
        cap_share=capped / calls,
    )
    plan = Bild("target", "small", max_draft=cap, semantics="reference" if reference else "paper")
    found = expected_latency(plan, script(doubts, exceeds))
    assert found.seconds_per_token == pytest.approx(textbook, rel=1e-9)
    assert found.edges[0].drafted - found.edges[0].accepted == pytest.approx(lost / at, rel=1e-9)
    assert found.position_value == ()
