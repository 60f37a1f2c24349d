"""Runtime, simulator and closed form agree on what every kind of plan does.

The runtime works on mock models that accept on a schedule; the same schedule is the profile that the simulator and
the closed form read. Passes by model and new tokens, tokens per pass, and drafted and accepted tokens have to agree
within 4 standard errors; the tokens gained per pass by chi-square.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import numpy as np
import pytest
import torch
from mocks import MockModel, scheduled_models
from scipy import stats

from hsdopt.acceptance import Acceptance, Traces
from hsdopt.costs import CostCurve
from hsdopt.latency import Estimate, expected_latency
from hsdopt.plan import LOOKUP, Adaptive, Bild, Choice, Level, Plan, Stop, parse_plan
from hsdopt.profiles import Profile
from hsdopt.runtime import Generation, generate
from hsdopt.simulate import events, replay, simulate

if TYPE_CHECKING:
    import random

torch.set_num_threads(1)
Curve: TypeAlias = float | tuple[float, ...]
Key: TypeAlias = Any
"""What is counted: (model, new tokens), ("switch", model) for passes right behind another network's, ("drafted" or
"accepted", drafter, verifier), "tokens" or "rounds"."""

WARM_UP = 4  # rounds per output that are not counted in the long run
BATCH = 20  # rounds whose counts are one observation
ERRORS = 4
FEW = 30  # counts expected below which a key is pooled with others


@dataclass(frozen=True, slots=True)
class Case:
    """A plan, the acceptance of every (drafter, verifier), and the chances that lookup proposes 0, 1, ... tokens."""

    plan: Plan
    laws: Mapping[tuple[str, str], Curve] = field(default_factory=dict)
    proposed: tuple[float, ...] = ()

    def profile(self) -> Profile:
        laws = {pair: self._acceptance(pair[0], law) for pair, law in self.laws.items()}
        costs = dict.fromkeys(self.plan.models, CostCurve((1, 99), (0,), ((1.0, 1.0),), switch=0.25))
        return Profile.from_rates("t", costs | {LOOKUP: CostCurve.fixed(1.0)}, laws)

    def models(self, seed: int) -> dict[str, Any]:
        return scheduled_models(
            self.laws or {("s", "t"): 0.5}, below=_below(self.plan), lookup_lengths=self._length, seed=seed
        )

    def _acceptance(self, drafter: str, law: Curve) -> Acceptance:
        if isinstance(law, float):
            return Acceptance.from_rate(law)
        if drafter != LOOKUP:
            return Acceptance(law)
        joint = np.zeros((len(self.proposed),) * 2)
        for n, chance in enumerate(self.proposed):
            joint[n, : n + 1] = chance * -np.diff([*law[: n + 1], 0.0])
        return Acceptance.from_joint(joint)

    def _length(self, rng: random.Random, _: int) -> int:
        return rng.choices(range(len(self.proposed)), self.proposed)[0]


def _below(plan: Plan) -> dict[str, list[str]]:
    """Return who drafts, at any depth, for whom."""
    if isinstance(plan, Level):
        return {level.model: [name for name in level.models if name != level.model] for level in plan.walk()}
    assert isinstance(plan, Adaptive)
    found: dict[str, list[str]] = {}
    for owner, table in plan.tables:  # bottom up
        drafters = {choice.drafter for choice in table if choice is not None}
        found[owner] = [*drafters, *(name for drafter in drafters for name in found.get(drafter, ()))]
    return found


def _curve(first: float, slope: float) -> tuple[float, ...]:
    """Return a survival curve whose ratios start at `first` and rise or fall."""
    return (1.0, *np.cumprod(np.clip(first + slope * np.arange(60), 0.2, 0.95)).tolist())


RISING, FALLING, FLAT = _curve(0.5, 0.05), _curve(0.9, -0.06), _curve(0.75, 0.0)
SHORT = (0.3, 0.15, 0.1, 0.0, 0.2, 0.1, 0.1, 0.05)
ADAPTIVE = Adaptive(
    "t",
    Choice("m", 6),
    (
        ("u", (None, None)),
        ("s", (None, Choice("u", 1), Choice("u", 2), Choice("u", 2))),
        ("m", (None, Choice("s", 1), Choice("s", 4), Choice(LOOKUP, 3), Choice("s", 2), Choice("s", 3))),
    ),
)
KINDS = {
    "autoregression": Case(parse_plan("t")),
    "speculative": Case(parse_plan("t(s:4)"), {("s", "t"): FALLING}),
    "lookup": Case(parse_plan("t(lookup:5)"), {(LOOKUP, "t"): RISING}, SHORT),
    "truncate": Case(parse_plan("t(m:5(s:3))"), {("s", "m"): RISING, ("m", "t"): FALLING}),
    "overshoot": Case(parse_plan("t(m:4+(s:3))"), {("s", "m"): FALLING, ("m", "t"): FLAT}),
    "rounds": Case(parse_plan("t(m:2x(s:3))"), {("s", "m"): FLAT, ("m", "t"): RISING}),
    "until": Case(parse_plan("t(m:3+(s:2), u:..6)"), {("s", "m"): FLAT, ("m", "t"): FALLING, ("u", "t"): RISING}),
    "row": Case(
        parse_plan("t(m:2, s:3, lookup:4)"), {("m", "t"): FALLING, ("s", "t"): FLAT, (LOOKUP, "t"): RISING}, SHORT
    ),
    "rows below": Case(
        parse_plan("t(m:4(s:2, lookup:2), u:3+(v:2))"),
        {("s", "m"): FLAT, (LOOKUP, "m"): RISING, ("m", "t"): FALLING, ("v", "u"): RISING, ("u", "t"): FLAT},
        SHORT,
    ),
    # the second request finds m's cache cut back to all that stands; one drafter's ids do not tell two segments
    # apart, so the rates are constant
    "cut back": Case(parse_plan("t(m:1(s:3), m:3(s:2))"), {("s", "m"): 0.8, ("m", "t"): 0.85}),
    "adaptive": Case(ADAPTIVE, {("u", "s"): FLAT, ("s", "m"): FALLING, (LOOKUP, "m"): RISING, ("m", "t"): FLAT}, SHORT),
    "three levels": Case(parse_plan("t(m:6(s:3(u:2)))"), {("u", "s"): FALLING, ("s", "m"): RISING, ("m", "t"): FLAT}),
    "three mixed levels": Case(
        parse_plan("t(m:4+(s:2x(u:2), lookup:3), v:..6)"),
        {("u", "s"): FLAT, ("s", "m"): FALLING, (LOOKUP, "m"): RISING, ("m", "t"): FLAT, ("v", "t"): FALLING},
        SHORT,
    ),
}


# --- observations --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Observed:
    """What a reader that rolls dice did: counts, batch by batch, and how many passes gained how many tokens."""

    batches: list[Counter[Key]] = field(default_factory=list)
    gains: Counter[int] = field(default_factory=Counter)

    @property
    def keys(self) -> set[Key]:
        return {key for batch in self.batches for key, count in batch.items() if count}

    def ratio(self, keys: Iterable[Key], per: str = "tokens") -> tuple[float, float]:
        """Return a ratio of sums and its standard error, from the spread between batches."""
        keys = list(keys)
        above = np.array([sum(batch[key] for key in keys) for batch in self.batches], dtype=float)
        below = np.array([batch[per] for batch in self.batches], dtype=float)
        ratio, size = above.sum() / below.sum(), len(above)
        spread = np.sum((above - ratio * below) ** 2) * size / (size - 1)
        return float(ratio), float(np.sqrt(spread) / below.sum())

    def total(self, keys: Iterable[Key]) -> int:
        return sum(batch[key] for batch in self.batches for key in keys)


def rounds_of(output: Generation) -> list[Counter[Key]]:
    """Return the counts of every round of the target; a round ends with the last review of its verify pass."""
    rounds: list[Counter[Key]] = []
    ended, last = True, output.target
    for event in output.events:
        if event.kind not in ("pass", "lookup", "verify"):
            continue
        if ended and event.kind != "verify":
            rounds.append(Counter(rounds=1, tokens=1))
            ended = False
        if event.kind == "verify":
            rounds[-1]["drafted", event.drafter, event.model] += event.drafted
            rounds[-1]["accepted", event.drafter, event.model] += event.accepted
            rounds[-1]["tokens"] += event.accepted * (event.model == output.target)
        else:
            rounds[-1][event.model, 1 if event.kind == "lookup" else event.new_tokens] += 1
            if event.kind == "pass":
                rounds[-1]["switch", event.model] += event.model != last
                last = event.model
            ended = event.model == output.target
    return rounds


def counts_of(run: Any) -> Counter[Key]:  # noqa: ANN401 -- any of the simulator's counts
    drafted = {("drafted", *pair): count for pair, count in run.drafted.items()}
    accepted = {("accepted", *pair): count for pair, count in run.accepted.items()}
    switches = {("switch", model): count for model, count in run.switches.items()}
    return Counter({**run.passes, **switches, **drafted, **accepted, "tokens": run.tokens, "rounds": run.rounds})


def expected_of(estimate: Estimate) -> dict[Key, float]:
    """Return what is expected per token, by key."""
    found: dict[Key, float] = {key: share for key, share in estimate.passes.items() if share > 0}
    found |= {("switch", model): share for model, share in estimate.switches.items() if share > 0}
    for edge in estimate.edges:
        found["drafted", edge.drafter, edge.verifier] = edge.drafted
        found["accepted", edge.drafter, edge.verifier] = edge.accepted
    return found


@cache
def runtime_in_the_long_run(kind: str) -> Observed:
    """Rounds in the middle of long outputs, neither cold nor shortened."""
    case, seen = KINDS[kind], Observed()
    models, size, longest = case.models(seed=1), 300, len(closed_form(kind).position_value)
    for _ in range(25):
        written, middle = 1, []
        for count in rounds_of(generate(case.plan, models, [0], max_new_tokens=size)):
            if size - written > longest:
                middle.append(count)
            written += count["tokens"]
        middle = middle[WARM_UP:]
        seen.gains.update(count["tokens"] for count in middle)
        seen.batches += [sum(middle[at : at + BATCH], Counter()) for at in range(0, len(middle), BATCH)]
    return seen


@cache
def simulator_in_the_long_run(kind: str) -> Observed:
    case, seen = KINDS[kind], Observed()
    profile = case.profile()
    for seed in range(32):
        run = simulate(case.plan, profile, tokens=6_000, seed=seed, lanes=100)
        seen.gains.update(dict(enumerate(run.tokens_histogram)))
        seen.batches.append(counts_of(run))
    return seen


@cache
def closed_form(kind: str, tokens: int | None = None) -> Estimate:
    return expected_latency(KINDS[kind].plan, KINDS[kind].profile(), tokens=tokens)


def runtime_of_outputs(kind: str, tokens: int) -> Observed:
    """Whole outputs of some tokens after the first."""
    case, seen = KINDS[kind], Observed()
    models = case.models(seed=2)
    for _ in range(1500 // tokens):
        seen.batches.append(sum(rounds_of(generate(case.plan, models, [0], max_new_tokens=tokens + 1)), Counter()))
    return seen


def simulator_of_outputs(kind: str, tokens: int) -> Observed:
    case, seen = KINDS[kind], Observed()
    profile = case.profile()
    for seed in range(32):
        engine = events._engine(case.plan, profile, 100, seed, None)
        engine.finish(np.full(100, tokens))
        seen.batches.append(counts_of(engine.counts()))
    return seen


# --- agreement -----------------------------------------------------------------------------------------------


def agrees(name: object, found: tuple[float, float], expected: float) -> None:
    value, error = found
    assert abs(value - expected) <= ERRORS * error + 1e-9, (
        name,
        value,
        expected,
        (value - expected) / max(error, 1e-12),
    )


def holds_to(seen: Observed, estimate: Estimate) -> None:
    """Passes per model, each (model, new tokens), edges and tokens per pass are those of the closed form."""
    expected = expected_of(estimate)
    assert seen.keys <= {*expected, "tokens", "rounds"}
    tokens = seen.total(["tokens"])
    agrees("tokens per pass", seen.ratio(["tokens"], per="rounds"), estimate.tokens_per_pass)
    for row in estimate.breakdown:
        own = [key for key in expected if key[0] == row.model]
        agrees(row.model, seen.ratio(own), row.passes)
    frequent = [key for key, share in expected.items() if share * tokens >= FEW]
    for key in frequent:
        agrees(key, seen.ratio([key]), expected[key])
    rare = [key for key in expected if key not in frequent]
    most = stats.poisson.ppf(1 - 1e-6, tokens * sum(expected[key] for key in rare))
    assert seen.total(rare) <= most


def same_histogram(one: Mapping[Any, int], other: Mapping[Any, int]) -> float:
    """Return the p-value of two samples having one law; bins with few counts are pooled."""
    keys = sorted({*one, *other}, key=lambda key: one.get(key, 0) + other.get(key, 0))
    table = np.array([[counts.get(key, 0) for key in keys] for counts in (one, other)])
    few = np.cumsum(table.sum(axis=0)) < FEW
    table = np.column_stack([table[:, few].sum(axis=1), table[:, ~few]])
    table = table[:, table.sum(axis=0) > 0]
    return float(stats.chi2_contingency(table).pvalue) if table.shape[1] > 1 else 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_runtime_and_closed_form_agree(kind: str) -> None:
    holds_to(runtime_in_the_long_run(kind), closed_form(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_simulator_and_closed_form_agree(kind: str) -> None:
    holds_to(simulator_in_the_long_run(kind), closed_form(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_runtime_and_simulator_agree(kind: str) -> None:
    ran, simulated = runtime_in_the_long_run(kind), simulator_in_the_long_run(kind)
    for model in KINDS[kind].plan.models:
        passes = [key for key in ran.keys | simulated.keys if key[0] == model]
        for keys in (passes, *([key] for key in passes)):
            if min(ran.total(keys), simulated.total(keys)) >= FEW:
                (value, error), (other, more) = ran.ratio(keys), simulated.ratio(keys)
                agrees(keys, (value, math.hypot(error, more)), other)
    assert same_histogram(ran.gains, simulated.gains) > 1e-3 / len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_gained_are_those_of_the_closed_form(kind: str) -> None:
    gains = runtime_in_the_long_run(kind).gains
    survival = [1.0, *(place.tokens for place in closed_form(kind).position_value), 0.0]
    law = {size + 1: here - then for size, (here, then) in enumerate(pairwise(survival))}
    rounds = gains.total()
    common = [size for size, chance in law.items() if chance * rounds >= 5]
    seen, chances = [gains[size] for size in common], [law[size] for size in common]
    seen, chances = [*seen, rounds - sum(seen)], [*chances, max(0.0, 1 - sum(chances))]
    if chances[-1] < 1e-12:
        assert seen.pop() == 0
        chances.pop()
    if len(seen) > 1:
        expected = np.array(chances) / sum(chances) * rounds
        assert stats.chisquare(seen, expected).pvalue > 1e-3 / len(KINDS)


@pytest.mark.parametrize("tokens", [2, 10])
@pytest.mark.parametrize("kind", KINDS)
def test_finite_outputs_agree(kind: str, tokens: int) -> None:
    """Caches start cold, and the last drafts are cut to what is wanted."""
    estimate = closed_form(kind, tokens)
    holds_to(runtime_of_outputs(kind, tokens), estimate)
    holds_to(simulator_of_outputs(kind, tokens), estimate)


# --- Big Little Decoder: no dice, so all three are equal ------------------------------------------------------


@dataclass(slots=True)
class Lines(MockModel):
    """The law of the next token depends on the length of the prefix alone: row by row of `laws` [length, vocab]."""

    laws: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def score(self, sequence: Sequence[int], n_logits: int) -> torch.Tensor:
        return self.laws[len(sequence) - n_logits + 1 : len(sequence) + 1].log()


def bild_plan(rng: np.random.Generator) -> Bild:
    def one_of(*values: Any) -> Any:  # noqa: ANN401 -- any value
        return values[rng.integers(len(values))]

    return Bild(
        "large",
        "small",
        fallback=one_of(0.0, 0.4, 0.5, 0.7, 1.0),
        rollback=one_of(0.0, 0.5, 1.0, 3.0, math.inf),
        max_draft=one_of(None, None, 1, 4, 13),
        stride=one_of(None, None, None, 3, 13),
        semantics=one_of("paper", "reference"),
    )


def lines(rng: np.random.Generator, prompt: int, tokens: int) -> tuple[dict[str, Any], Profile]:
    """Return two models whose laws are alike, and the traces of the large one's output of `tokens` tokens."""
    size, vocab = prompt + tokens, 4
    small = rng.dirichlet(np.full(vocab, rng.choice([0.1, 0.5])), size)
    share = rng.uniform(0, 1, (size, 1))
    large = share * small + (1 - share) * rng.dirichlet(np.full(vocab, 0.5), size)
    laws = {"small": small, "large": large}
    models = {name: Lines(name, vocab, laws=torch.tensor(law)) for name, law in laws.items()}
    places = np.arange(prompt, size)
    choice = {name: law[places].argmax(axis=1) for name, law in laws.items()}
    traces = Traces(
        choice["large"],
        np.zeros(tokens, dtype=np.int64),
        places,
        choice,
        top={"small": small[places].max(axis=1)},
        surprise={("small", "large"): -np.log(large[places, choice["small"]])},
    )
    costs = CostCurve((1, 99), (0,), ((1.0, 1.0),), switch=0.25)
    return models, Profile("large", dict.fromkeys(laws, costs), traces=traces)


@pytest.mark.parametrize("seed", range(150))
def test_big_little_decoder_agrees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan, prompt, tokens = bild_plan(rng), int(rng.integers(1, 5)), int(rng.integers(1, 41))
    models, profile = lines(rng, prompt, tokens + 1)
    output = generate(plan, models, [0] * prompt, max_new_tokens=tokens + 1)
    ran = output.counters
    walked, estimate = replay(plan, profile), expected_latency(plan, profile, tokens=tokens)
    assert walked.passes == ran.new_tokens
    made = ["large", *(event.model for event in output.events if event.kind == "pass")]
    assert walked.switches == Counter(now for last, now in pairwise(made) if now != last)
    assert {m: share * tokens for m, share in estimate.switches.items() if share} == pytest.approx(walked.switches)
    assert walked.seconds == pytest.approx(sum(walked.passes.values()) + 0.25 * sum(walked.switches.values()))
    assert estimate.seconds_per_token * tokens == pytest.approx(walked.seconds)
    assert {key: share * tokens for key, share in estimate.passes.items()} == pytest.approx(dict(walked.passes))
    assert estimate.tokens_per_pass == pytest.approx(walked.tokens_per_pass)
    (edge,) = estimate.edges
    reviewed = ran.edges.get(("small", "large"))
    drafted, accepted = (reviewed.drafted, reviewed.accepted) if reviewed else (0, 0)
    assert (walked.drafted["small", "large"], walked.accepted["small", "large"]) == (drafted, accepted)
    assert (edge.drafted * tokens, edge.accepted * tokens) == pytest.approx((drafted, accepted))


# --- no kind of node without all of its readers ---------------------------------------------------------------


def _bild_case() -> tuple[Plan, dict[str, Any], Profile]:
    return (Bild("large", "small"), *lines(np.random.default_rng(0), 1, 40))


def _case(kind: str) -> tuple[Plan, dict[str, Any], Profile]:
    case = KINDS[kind]
    return case.plan, case.models(seed=0), case.profile()


NODES: dict[str, Callable[[], tuple[Plan, dict[str, Any], Profile]]] = {
    "Level": lambda: _case("truncate"),
    "Adaptive": lambda: _case("adaptive"),
    "Bild": _bild_case,
}
READERS: dict[str, Callable[[Plan, dict[str, Any], Profile], Iterable[Key]]] = {
    "runtime": lambda plan, models, _: sum(rounds_of(generate(plan, models, [0], max_new_tokens=40)), Counter()),
    "simulator": lambda plan, _, profile: (replay if profile.traces is not None else simulate)(plan, profile).passes,
    "closed form": lambda plan, _, profile: expected_latency(plan, profile).passes,
}
KNOWN = sorted({node.__name__ for node in Plan.__subclasses__() if node.__module__.startswith("hsdopt.")})


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("node", KNOWN)
def test_every_reader_reads_every_kind_of_node(node: str, reader: str) -> None:
    plan, models, profile = NODES[node]()
    assert type(plan).__name__ == node
    assert {*plan.models} <= {key[0] for key in READERS[reader](plan, models, profile)}


def test_every_convention_is_compared() -> None:
    levels = [level for case in KINDS.values() if isinstance(case.plan, Level) for level in case.plan.walk()]
    assert {segment.stop for level in levels for segment in level.row} == {*get_args(Stop)}
