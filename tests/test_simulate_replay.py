"""Replay against passes counted by hand, and against a walker of one output at a time that shares no code with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import plans
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced import traced_profile

from hsdopt.acceptance import Traces
from hsdopt.costs import CostCurve
from hsdopt.errors import InvalidArgumentError, PredictionError
from hsdopt.overhead import DRAFTING, ROUND
from hsdopt.plan import LOOKUP, Adaptive, Bild, Choice, Level, Plan, Segment, Stop, parse_plan
from hsdopt.profiles import Profile
from hsdopt.simulate import ReplayedRun, replay, replay_many, simulate

PROMPT = 10
SCALES = {"big": 1.0, "mid": 0.3, "small": 0.1, "tiny": 0.03}
COUNTS = (1, 2, 3, 4, 6, 8, 12, 24, 96)


def curve(scale: float) -> CostCurve:
    """Return costs that rise with tokens and context."""
    contexts = (8, 32, 128)
    return CostCurve(COUNTS, contexts, tuple(tuple(scale * (1 + n / 20 + c / 100) for n in COUNTS) for c in contexts))


def scripted(*outputs: Mapping[str, str], **lookup: list[int]) -> Profile:
    """Return a profile from one letter per position and model; ``proposed`` and ``accepted_big`` are lookup's."""
    length = [len(output["big"]) for output in outputs]
    names = outputs[0].keys()
    choice = {name: np.array([ord(c) for output in outputs for c in output[name]]) for name in names}
    traces = Traces(
        choice["big"],
        np.repeat(np.arange(len(outputs)), length),
        np.concatenate([PROMPT + np.arange(n) for n in length]),
        choice,
        proposed=np.array(lookup["proposed"]) if lookup else None,
        lookup_accepted={k.removeprefix("accepted_"): np.array(v) for k, v in lookup.items() if k != "proposed"},
    )
    costs = {name: curve(SCALES[name]) for name in names} | {LOOKUP: CostCurve.fixed(0.001)}
    return Profile("big", costs, traces=traces)


def cost(model: str, fed: int, cached: int) -> float:
    return SCALES[model] * (1 + fed / 20 + cached / 100)


def test_one_drafter_by_hand() -> None:
    # position 0 is prefill's. Drafts of 1-3 (refused at 3), then 4-6 (accepted), then one token is left.
    run = replay(parse_plan("big(small:3)"), scripted({"big": "abcdefghi", "small": "abcXefghi"}))
    assert run.passes == {("small", 1): 6, ("big", 4): 2, ("big", 1): 1}
    assert run.tokens_histogram == (0, 1, 0, 1, 1)
    assert (run.tokens, run.rounds) == (8, 3)
    assert (run.drafted["small", "big"], run.accepted["small", "big"]) == (6, 5)
    passes = [("small", 1, 10), ("small", 1, 11), ("small", 1, 12), ("big", 4, 10)]
    passes += [("small", 1, 13), ("small", 1, 14), ("small", 1, 15), ("big", 4, 13), ("big", 1, 17)]
    assert run.prompt_seconds[0] == pytest.approx(sum(cost(*made) for made in passes))


def test_the_last_draft_leaves_room_for_the_target() -> None:
    # 3 wanted after the first round of 4: a draft of 2, small catching up on its own last token
    run = replay(parse_plan("big(small:3)"), scripted({"big": "abcdefgh", "small": "abcdefgh"}))
    assert run.passes == {("small", 1): 4, ("small", 2): 1, ("big", 4): 1, ("big", 3): 1}


def test_max_new_tokens_cuts_outputs() -> None:
    profile = scripted({"big": "abcdefgh", "small": "abcdefgh"}, {"big": "abc", "small": "abX"})
    run = replay(parse_plan("big(small:3)"), profile, max_new_tokens=5)
    assert run.prompt_tokens.tolist() == [4, 2]
    assert run.passes == {("small", 1): 4, ("big", 4): 1, ("big", 2): 1}


def test_two_levels_by_hand() -> None:
    # big wants 6. mid owes 4: small drafts 1-2, mid refuses 2 (holds 1-2), small drafts 3-4, mid holds 3-5, passes
    # up 1-4; big refuses 3. Position 4 on: 3 wanted, mid owes 2, holds 3 at once, passes up 2, big accepts.
    letters = {"big": "abcdefg", "mid": "abcXefg", "small": "abYXefg"}
    run = replay(parse_plan("big(mid:4(small:2))"), scripted(letters))
    # round 1: small 1+1, mid 3, small 1+1, mid 3; the cut takes mid's bonus back, big 5.
    # round 2: both lack the correction alone: small 1+1, mid 3 with bonus cut, big 3.
    assert run.passes == {("small", 1): 6, ("mid", 3): 3, ("big", 5): 1, ("big", 3): 1}
    assert run.discarded == {"small": 0, "mid": 2, "big": 0}
    assert run.tokens_histogram == (0, 0, 0, 2)


def test_overshoot_by_hand() -> None:
    # mid holds 1-2, then 3-5, and passes up all 5, of which big accepts 2. Then mid is asked for 2 and passes up 3,
    # but only 2 may be drafted: the third is discarded.
    letters = {"big": "abcdefg", "mid": "abcXefg", "small": "abYXefg"}
    run = replay(parse_plan("big(mid:4+(small:2))"), scripted(letters))
    assert run.passes == {("small", 1): 6, ("mid", 3): 3, ("big", 6): 1, ("big", 3): 1}
    assert run.discarded["mid"] == 1
    assert run.drafted["mid", "big"] == 7


def test_rounds_by_hand() -> None:
    letters = {"big": "abcdefg", "mid": "abcdefg", "small": "abXdefg"}
    run = replay(parse_plan("big(mid:2x(small:2))"), scripted(letters))
    # mid holds 1-2 (refusing 2), then 3-5; big accepts all five and adds the last; small lacked nothing but mid's.
    assert run.passes == {("small", 1): 4, ("mid", 3): 2, ("big", 6): 1}


def test_a_row_by_hand() -> None:
    # small 1-2 accepted, mid 3-4 refused at 4; then one token left
    letters = {"big": "abcdef", "mid": "abcdXf", "small": "abcdef"}
    run = replay(parse_plan("big(small:2, mid:2)"), scripted(letters))
    # mid's first pass takes in prefill's token and small's two
    assert run.passes == {("small", 1): 2, ("mid", 3): 1, ("mid", 1): 1, ("big", 5): 1, ("big", 1): 1}
    assert run.accepted == {("small", "big"): 2, ("mid", "big"): 1}


def test_lookup_with_empty_proposals_by_hand() -> None:
    profile = scripted({"big": "abcdefgh"}, proposed=[0, 0, 5, 0, 0, 9, 9, 9], accepted_big=[0, 0, 2, 0, 0, 9, 9, 9])
    run = replay(parse_plan("big(lookup:3)"), profile)
    # at 1: nothing; at 2: 3 of 5 asked, 2 accepted, to 5; at 5: 3 left, so 2 asked and accepted
    assert run.passes == {("lookup", 1): 3, ("big", 1): 1, ("big", 4): 1, ("big", 3): 1}
    assert run.tokens_histogram == (0, 1, 0, 2)
    assert run.passes_per_token["lookup"] == pytest.approx(3 / 7)


def test_an_adaptive_plan_by_hand() -> None:
    table = (None, Choice("small", 1), Choice("small", 2))
    plan = Adaptive("big", Choice("mid", 3), (("small", (None,) * 2), ("mid", table)))
    run = replay(plan, scripted({"big": "abcde", "mid": "abcde", "small": "aXcde"}))
    # mid owes 3: a draft of 2, refused at once, gains 1; owes 2: a draft of 1, accepted, gains 2.
    assert run.passes == {("small", 1): 3, ("mid", 3): 1, ("mid", 2): 1, ("big", 4): 1}


@pytest.mark.parametrize(("length", "tokens"), [(1, 2), (3, 12), (4, 13), (5, 40)])
def test_perfect_agreement(length: int, tokens: int) -> None:
    text = "a" * tokens
    run = replay(parse_plan(f"big(small:{length})"), scripted({"big": text, "small": text}))
    assert run.rounds == -(-(tokens - 1) // (length + 1))
    assert run.accepted == run.drafted


def test_total_disagreement_and_autoregression() -> None:
    profile = scripted({"big": "aaaaaaa", "small": "bbbbbbb"})
    run = replay(parse_plan("big(small:2)"), profile)
    assert run.rounds == 6
    assert run.accepted["small", "big"] == 0
    plain = replay(parse_plan("big"), profile)
    assert plain.passes == {("big", 1): 6}
    assert plain.seconds_per_token == pytest.approx(np.mean([cost("big", 1, PROMPT + k) for k in range(6)]))


def test_context_overrides_the_one_visited() -> None:
    run = replay(parse_plan("big"), scripted({"big": "aaaaaaa"}), context=20)
    assert run.seconds_per_token == pytest.approx(cost("big", 1, 20))


# One output at a time, straight from the rules of a run; nothing shared with the engine.


class Walker:
    """State of one output: the position after the sequence's last token, and what each cache holds."""

    def __init__(self, plan: Level | Adaptive, profile: Profile, prompt: int) -> None:
        traces = profile.traces
        assert traces is not None
        here = np.flatnonzero(traces.prompt == prompt)
        self.costs, self.plan = profile.costs, plan
        self.choice = {name: traces.choice[name][here] for name in traces.choice}
        assert traces.proposed is not None
        self.proposed = traces.proposed[here]
        self.lookup = {name: traces.lookup_accepted[name][here] for name in traces.lookup_accepted}
        self.length = len(here)
        self.base = int(traces.context[here[0]])
        self.at = 1
        self.missing = dict.fromkeys(plan.models, 1)
        self.passes: Counter[tuple[str, int]] = Counter()
        self.seconds = 0.0

    def run(self) -> Walker:
        wanted = self.length - 1
        while wanted:
            row = self.plan.row if isinstance(self.plan, Level) else self.row(self.plan.draft)
            wanted -= self.round(self.plan.model, row, wanted - 1)
        return self

    def row(self, choice: Choice | None) -> tuple[Segment, ...]:
        return () if choice is None else (Segment(Level(choice.drafter), choice.length),)

    def append(self, tokens: int) -> None:
        self.at += tokens
        for name in self.missing:
            self.missing[name] += tokens

    def cut(self, tokens: int) -> None:
        self.at -= tokens
        for name in self.missing:
            self.missing[name] = max(0, self.missing[name] - tokens)

    def one_pass(self, model: str, drafted: int) -> None:
        fed = max(1, self.missing[model] - drafted) + drafted
        self.passes[model, fed] += 1
        self.seconds += self.costs[model](fed, self.base + self.at - fed)
        self.missing[model] = 0

    def agrees(self, drafter: str, verifier: str, place: int) -> bool:
        place = min(place, self.length - 1)
        return bool(self.choice[drafter][place] == self.choice[verifier][place])

    def round(self, model: str, row: tuple[Segment, ...], limit: int | None = None) -> int:
        start, drafts = self.at, []
        for segment in row:
            held = self.at - start
            asked = segment.length - held if segment.stop == "until" else segment.length
            asked = asked if limit is None else min(asked, limit - held)
            if asked > 0:
                tokens = self.request(segment.level, asked, segment.stop)
                if limit is not None and held + tokens > limit:
                    self.cut(held + tokens - limit)
                    tokens = limit - held
                drafts.append((segment.level.model, tokens))
        drafted = self.at - start
        self.one_pass(model, drafted)
        accepted = self.review(model, drafts, start)
        self.cut(drafted - accepted)
        self.append(1)
        return accepted + 1

    def review(self, model: str, drafts: list[tuple[str, int]], start: int) -> int:
        place = start
        for drafter, tokens in drafts:
            known = self.lookup[model][min(place, self.length - 1)] if drafter == LOOKUP else None
            for index in range(tokens):
                fine = index < known if known is not None else self.agrees(drafter, model, place + index)
                if not fine:
                    return place + index - start
            place += tokens
        return place - start

    def request(self, level: Level, asked: int, stop: Stop) -> int:
        if level.model == LOOKUP:
            self.passes[LOOKUP, 1] += 1
            self.seconds += self.costs[LOOKUP](1)
            found = min(asked, int(self.proposed[min(self.at, self.length - 1)]))
            self.append(found)
            return found
        tables = dict(self.plan.tables) if isinstance(self.plan, Adaptive) else {}
        held = rounds = 0
        while (rounds if stop == "rounds" else held) < asked:
            row = self.row(tables[level.model][asked - held - 1]) if tables else level.row
            held += self.round(level.model, row)
            rounds += 1
        if stop == "truncate":
            self.cut(held - asked)
            return asked
        return held


def random_traces(rng: np.random.Generator, prompts: int = 4, tokens: int | None = None) -> Profile:
    """Return a profile of greedy traces; outputs have `tokens` tokens, or any number up to 30."""
    length = rng.integers(1, 30, prompts) if tokens is None else np.full(prompts, tokens)
    length[0] = max(length[0], 2)
    size = int(length.sum())
    text = rng.integers(0, 3, size)
    rates = dict(zip(plans.MODELS, (1.0, 0.85, 0.7, 0.5), strict=True))
    choice = {name: np.where(rng.random(size) < rate, text, rng.integers(0, 3, size)) for name, rate in rates.items()}
    proposed = rng.integers(0, 8, size)
    traces = Traces(
        text,
        np.repeat(np.arange(prompts), length),
        np.concatenate([rng.integers(5, 40) + np.arange(n) for n in length]),
        choice,
        proposed=proposed,
        lookup_accepted={name: np.minimum(rng.integers(0, 8, size), proposed) for name in plans.MODELS},
    )
    costs = {name: curve(SCALES[name]) for name in plans.MODELS} | {LOOKUP: CostCurve.fixed(0.001)}
    return Profile("big", costs, traces=traces)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(plans.KINDS))
def test_any_plan_is_walked_as_one_output_at_a_time_is(seed: int, kind: plans.Kind) -> None:
    rng = np.random.default_rng(seed)
    plan, profile = plans.random_plan(rng, kind), random_traces(rng)
    run = replay(plan, profile)
    walkers = [Walker(plan, profile, prompt).run() for prompt in range(4)]
    total: Counter[tuple[str, int]] = Counter()
    for walker in walkers:
        total += walker.passes
    assert run.passes == dict(total)
    assert run.prompt_seconds == pytest.approx([walker.seconds for walker in walkers])
    assert run.tokens == run.prompt_tokens.sum() == sum(walker.length - 1 for walker in walkers)
    assert run.seconds == pytest.approx(run.prompt_seconds.sum())
    assert run.repeats == 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(plans.KINDS))
def test_tokens_are_conserved_at_every_level(seed: int, kind: plans.Kind) -> None:
    rng = np.random.default_rng(seed)
    plan, profile = plans.random_plan(rng, kind), random_traces(rng)
    run = replay(plan, profile)
    for model in set(plan.models) - {LOOKUP}:
        taken = sum(count for (_, verifier), count in run.accepted.items() if verifier == model)
        held = taken + sum(run.new_tokens_histogram(model).values())
        passed_up = sum(count for (drafter, _), count in run.drafted.items() if drafter == model)
        assert held - run.discarded[model] == (run.tokens if model == "big" else passed_up)


def overlapping(rate: float, prompts: int, tokens: int) -> Profile:
    """Return sampled traces whose acceptance probability is `rate` everywhere."""
    size = prompts * tokens
    pairs = [("small", "mid"), ("mid", "big"), ("small", "big")]
    traces = Traces(
        np.zeros(size, dtype=int),
        np.repeat(np.arange(prompts), tokens),
        np.tile(PROMPT + np.arange(tokens), prompts),
        {name: np.zeros(size, dtype=int) for name in ("big", "mid", "small")},
        overlap={pair: np.full(size, rate) for pair in pairs},
    )
    costs = {name: CostCurve.from_function(lambda n, s=SCALES[name]: s * (1 + n / 10), 40) for name in traces.choice}
    return Profile("big", costs, traces=traces)


@pytest.mark.parametrize("text", ["big(small:4)", "big(mid:4(small:3))", "big(mid:2x(small:2), small:2)"])
def test_sampled_traces_of_one_rate_are_the_event_simulation(text: str) -> None:
    profile = overlapping(0.7, 40, 20)
    run = replay(parse_plan(text), profile, seed=4)
    assert run.repeats == 16
    rates = {("small", "mid"): 0.7, ("mid", "big"): 0.7, ("small", "big"): 0.7}
    known = Profile.from_rates("big", profile.costs, rates)
    times = simulate(parse_plan(text), known, tokens=100).time_to_finish(20, runs=4000)
    error = times.std() * np.sqrt(1 / 4000 + 1 / (40 * 16))
    assert run.prompt_seconds.mean() == pytest.approx(times.mean(), abs=4 * error)


def test_draws_follow_the_seed() -> None:
    profile = overlapping(0.6, 5, 20)
    first, second, other = (replay(parse_plan("big(small:4)"), profile, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert first.passes != other.passes
    assert replay(parse_plan("big(small:4)"), profile, repeats=3).repeats == 3


def test_per_prompt_times_and_their_interval() -> None:
    profile = random_traces(np.random.default_rng(3), prompts=12)
    run = replay(parse_plan("big(small:3)"), profile)
    rates = run.prompt_seconds_per_token
    assert np.array_equal(np.isnan(rates), run.prompt_tokens == 0)
    assert run.seconds_per_token == pytest.approx(np.nansum(rates * run.prompt_tokens) / run.prompt_tokens.sum())
    low, high = run.interval(np.random.default_rng(0))
    assert np.nanmin(rates) <= low < run.seconds_per_token < high <= np.nanmax(rates)
    narrow = run.interval(np.random.default_rng(0), confidence=0.5)
    assert low < narrow[0] < narrow[1] < high
    assert run.interval(np.random.default_rng(0)) == (low, high)
    with pytest.raises(InvalidArgumentError, match="expected a confidence between 0 and 1; got 1"):
        run.interval(np.random.default_rng(0), confidence=1)


def test_many_plans_are_each_replayed_as_alone() -> None:
    rng = np.random.default_rng(6)
    profile = random_traces(rng)
    several = [plans.random_plan(rng) for _ in range(8)]
    assert replay_many(several, profile) == [replay(plan, profile) for plan in several]
    assert replay_many([], profile) == []


# Big Little Decoder


def bild(plan: Bild, top: list[float], surprise: list[float], small: str, big: str | None = None) -> ReplayedRun:
    big = "a" * len(small) if big is None else big
    profile = scripted({"big": big, "small": small})
    traces = profile.traces
    assert traces is not None
    traces = Traces(
        traces.tokens,
        traces.prompt,
        traces.context,
        traces.choice,
        top={"small": np.array(top)},
        surprise={("small", "big"): np.array(surprise)},
    )
    return replay(plan, Profile("big", profile.costs, traces=traces))


TEXT = "aaaaXaaa"
TOP = [0.9, 0.9, 0.9, 0.9, 0.9, 0.2, 0.9, 0.9]
SURPRISE = [0.0, 0.0, 0.0, 9.0, 9.0, 0.0, 0.0, 0.0]


def test_bild_falls_back_and_rolls_back_by_hand() -> None:
    # small: 0 by prefill, 1-4, unsure at 5 (discarded). large: reviews 0-4, withdraws 3 and 4, writes 3.
    # small: 4 again, unsure at 5. large: withdraws 4, writes it; small: unsure at 5 at once; large writes 5.
    # small: 6, and leaves the last to large.
    run = bild(Bild("big", "small", fallback=0.5, rollback=5.0), TOP, SURPRISE, TEXT)
    assert run.new_tokens_histogram("small") == {1: 9}
    # the first review feeds the prompt's last token again, whose logits the small token is judged by
    assert run.new_tokens_histogram("big") == {6: 1, 2: 2, 1: 1}
    assert run.bild is not None
    assert (run.bild.fallbacks, run.bild.rollbacks, run.bild.withdrawn, run.bild.deviations) == (3, 2, 3, 0)
    assert (run.tokens, run.rounds) == (7, 4)
    assert run.tokens_histogram == (0, 2, 1, 1)
    passes = [("small", 1, c) for c in (10, 11, 12, 13, 14, 13, 14, 14, 15)]
    passes += [("big", 6, 9), ("big", 2, 13), ("big", 1, 14), ("big", 2, 15)]
    assert run.prompt_seconds[0] == pytest.approx(sum(cost(*made) for made in passes))


def test_bild_reference_starts_with_large_and_runs_it_again_after_a_rollback() -> None:
    # surprise at 3 is overruled by equal choices, which ends the review: 4 stands, a deviation.
    plan = Bild("big", "small", fallback=0.5, rollback=5.0, semantics="reference")
    run = bild(plan, TOP, SURPRISE, TEXT)
    # small 1-4, unsure at 5; large keeps all, writes 5; small 6; large 7
    assert run.passes == {("small", 1): 6, ("big", 5): 1, ("big", 2): 1}
    assert run.bild is not None
    assert (run.bild.rollbacks, run.bild.deviations) == (0, 1)
    # with another choice at 3 it is withdrawn with 4: large writes 3, and 4 by a pass of its own
    run = bild(plan, TOP, SURPRISE, "aaaXXaaa")
    # small 1-4, unsure at 5; large reviews, writes 3; large writes 4; small unsure at 5, having read only up to 2:
    # its cut cache lacks 3 and 4; large writes 5; small 6; large 7
    assert run.passes == {("small", 1): 6, ("small", 2): 1, ("big", 5): 1, ("big", 1): 2, ("big", 2): 1}
    assert run.bild is not None
    assert (run.bild.rollbacks, run.bild.withdrawn) == (1, 2)


def test_bild_stints() -> None:
    sure, calm = [0.9] * 9, [0.0] * 9
    text = "a" * 9
    # stints of 3, the first one's first token from prefill: 0-2, large 3, 4-6, large 7, large 8
    run = bild(Bild("big", "small", fallback=0.5, max_draft=3), sure, calm, text)
    assert run.passes == {("small", 1): 4, ("small", 2): 1, ("big", 4): 2, ("big", 1): 1}
    # a fixed stride asks nobody: the same though small is never sure
    run = bild(Bild("big", "small", fallback=0.5, stride=3), [0.1] * 9, calm, text)
    assert run.passes == {("small", 1): 4, ("small", 2): 1, ("big", 4): 2, ("big", 1): 1}
    assert run.bild is not None
    assert run.bild.fallbacks == 0
    # without limit one stint runs to the end, and the large model reviews it and writes the last token
    run = bild(Bild("big", "small", fallback=0.0), [0.0] * 9, calm, text)
    assert run.passes == {("small", 1): 7, ("big", 9): 1}


def test_bild_reference_stints_end_at_ten() -> None:
    plan = Bild("big", "small", fallback=0.5, semantics="reference")
    run = bild(plan, [0.9] * 14, [0.0] * 14, "a" * 14)
    assert run.passes == {("small", 1): 10, ("small", 2): 1, ("big", 11): 1, ("big", 2): 1}


def test_bild_without_rollback_lets_everything_stand() -> None:
    run = bild(Bild("big", "small", fallback=0.5, rollback=float("inf")), TOP, SURPRISE, TEXT)
    assert run.bild is not None
    assert (run.bild.rollbacks, run.bild.withdrawn, run.bild.deviations) == (0, 0, 1)
    assert run.passes == {("small", 1): 6, ("big", 6): 1, ("big", 2): 1}


def test_bild_that_is_never_sure_is_the_large_model_and_wasted_small_passes() -> None:
    run = bild(Bild("big", "small", fallback=1.0), [0.5] * 6, [0.0] * 6, "a" * 6)
    assert run.passes == {("small", 1): 4, ("big", 1): 5}
    assert run.seconds == pytest.approx(run.prompt_seconds.sum())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_bild_keeps_its_accounts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 40))
    plan = Bild(
        "big",
        "small",
        fallback=float(rng.choice([0.0, 0.3, 0.7, 1.0])),
        rollback=float(rng.choice([0.0, 1.0, np.inf])),
        max_draft=None if rng.random() < 0.5 else int(rng.integers(1, 6)),
        stride=None if rng.random() < 0.8 else int(rng.integers(1, 6)),
        semantics="paper" if rng.random() < 0.5 else "reference",
    )
    letters = "".join(rng.choice(["a", "b"], size))
    run = bild(plan, rng.random(size).tolist(), rng.exponential(1, size).tolist(), letters)
    assert run.bild is not None
    drafted, accepted = run.drafted["small", "big"], run.accepted["small", "big"]
    first = run.tokens + 1 - accepted - run.rounds  # prefill gave the first token: large's own, or small's draft
    assert first in (0, 1)
    small = sum(run.new_tokens_histogram("small").values())
    assert small - run.bild.fallbacks == drafted - (1 - first)
    assert run.bild.withdrawn == drafted - accepted
    assert sum(n * count for n, count in enumerate(run.tokens_histogram)) == run.tokens == size - 1
    assert sum(run.tokens_histogram) == run.rounds


def no_traces(plan: Plan) -> Profile:
    return Profile.from_rates("big", dict.fromkeys(plan.models, 1.0), {})


def test_what_cannot_be_replayed() -> None:
    profile = scripted({"big": "aaaa", "small": "aaaa", "mid": "aaaa"})
    speculative = parse_plan("big(small:2)")
    with pytest.raises(PredictionError, match="this one has none: use simulate instead"):
        replay(speculative, no_traces(speculative))
    with pytest.raises(PredictionError, match="expected one of the profiled models"):
        replay(parse_plan("big(tiny:2)"), profile)
    with pytest.raises(PredictionError, match="expected traces of lookup under big"):
        replay(parse_plan("big(lookup:2)"), profile)
    with pytest.raises(PredictionError, match="expected lenience 1"):
        replay(parse_plan("big(mid:2(small:2, lenience=2))"), profile)
    with pytest.raises(PredictionError, match="expected traces of small's confidence"):
        replay(Bild("big", "small"), profile)
    with pytest.raises(PredictionError, match="expected outputs of at least 2 tokens to replay; got 1"):
        replay(speculative, profile, max_new_tokens=1)
    with pytest.raises(InvalidArgumentError, match="expected repeats"):
        replay(speculative, profile, repeats=0)
    with pytest.raises(PredictionError, match="expected contexts up to 128 tokens"):
        replay(speculative, scripted({"big": "a" * 200, "small": "a" * 200}))


def test_a_model_that_was_timed_but_not_traced() -> None:
    profile = scripted({"big": "aaaa", "small": "aaaa"})
    timed = Profile("big", {**profile.costs, "mid": CostCurve.fixed(0.1)}, traces=profile.traces)
    with pytest.raises(PredictionError, match=r"expected traces of mid; got those of big, small: add it with"):
        replay(parse_plan("big(mid:2)"), timed)


def test_seconds_outside_the_passes_are_added_where_asked_for() -> None:
    measured = replace(traced_profile(21, prompts=6), overhead={ROUND: 0.01, DRAFTING: 0.002})
    for plan in (parse_plan("big(int8:4(lookup:3))"), parse_plan("big"), Bild("big", "int8", 0.6, 3.0, 10)):
        bare, whole = replay(plan, measured), replay(plan, measured, overhead=True)
        below = sum(count for (model, _), count in bare.passes.items() if model != "big")
        outside = 0.01 * bare.rounds + 0.002 * below
        assert whole.seconds_per_token * whole.tokens == pytest.approx(bare.seconds + outside)
        assert whole.prompt_seconds.sum() == pytest.approx(bare.prompt_seconds.sum() + outside)
        assert whole.interval(np.random.default_rng(0))[0] > bare.interval(np.random.default_rng(0))[0]
    with pytest.raises(PredictionError, match="seconds outside the passes"):
        replay(parse_plan("big"), traced_profile(21, prompts=6), overhead=True)


def test_noise_of_another_kind_widens_the_predicted_interval() -> None:
    run = replay(parse_plan("big(int8:4)"), traced_profile(22, prompts=12))
    rng = np.random.default_rng(0)
    plain = run.predictive_interval(rng, prompts=8)
    wide = run.predictive_interval(rng, prompts=8, noise=np.exp(0.3 * rng.standard_normal(500)))
    assert wide[1] - wide[0] > 1.3 * (plain[1] - plain[0])
