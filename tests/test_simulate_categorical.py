"""Real speculative sampling on known laws: every level keeps its law, and overshoot is not iid."""

from __future__ import annotations

import numpy as np
import plans
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hsdopt.errors import InvalidArgumentError, PredictionError
from hsdopt.plan import LOOKUP, Adaptive, Choice, parse_plan
from hsdopt.profiles import Profile
from hsdopt.simulate import CategoricalRun, categorical, simulate

LAWS = {
    "big": np.array([0.4, 0.25, 0.2, 0.1, 0.05]),
    "mid": np.array([0.5, 0.15, 0.15, 0.15, 0.05]),
    "small": np.array([0.25, 0.2, 0.2, 0.05, 0.3]),
    "tiny": np.array([0.1, 0.3, 0.1, 0.3, 0.2]),
    LOOKUP: np.array([0.6, 0.0, 0.2, 0.2, 0.0]),
}
ADAPTIVE = Adaptive(
    "big",
    Choice("mid", 3),
    (("small", (None, Choice(LOOKUP, 1), None)), ("mid", (None, Choice("small", 1), Choice("small", 3)))),
)


def overlap(drafter: str, verifier: str) -> float:
    return float(np.minimum(LAWS[drafter], LAWS[verifier]).sum())


def p_value(run: CategoricalRun, model: str) -> float:
    counts = run.passed_up[model]
    return float(stats.chisquare(counts, LAWS[model] * counts.sum()).pvalue)


@pytest.mark.parametrize(
    "plan",
    [
        "big",
        "big(small:4)",
        "big(lookup:3)",
        "big(mid:3(small:2))",
        "big(mid:3+(small:2))",
        "big(mid:2x(small:2))",
        "big(mid:2(small:2(tiny:2)))",
        "big(mid:2(small:2, lookup:2), lookup:2)",
        "big(mid:2+(small:3), small:..6(lookup:2))",
        ADAPTIVE,
    ],
    ids=str,
)
def test_every_level_passes_up_its_own_law(plan: str | Adaptive) -> None:
    plan = parse_plan(plan) if isinstance(plan, str) else plan
    run = categorical(plan, LAWS, tokens=150_000, seed=1)
    assert run.passed_up["big"].sum() == run.tokens
    for model in set(plan.models) - {LOOKUP}:
        assert p_value(run, model) > 1e-4


@pytest.mark.parametrize(
    "plan",
    [
        "big(mid:3(small:2, lenience=2))",
        "big(mid:3+(small:2, lenience=5), lookup:2)",
        "big(mid:2(small:2(tiny:2, lenience=3), lenience=2))",
        "big(mid:2(small:2, lookup:1, lenience=4))",
    ],
)
def test_lenience_below_leaves_the_target_alone(plan: str) -> None:
    run = categorical(parse_plan(plan), LAWS, tokens=200_000, seed=2)
    assert p_value(run, "big") > 1e-4
    assert p_value(run, "mid") < 1e-9  # the lenient level itself does not keep its law


def test_lenience_accepts_more() -> None:
    strict, lenient = (
        categorical(parse_plan(f"big(mid:3(small:2{extra}))"), LAWS, tokens=50_000) for extra in ("", ", lenience=2")
    )
    pair = ("small", "mid")
    assert lenient.accepted[pair] / lenient.drafted[pair] > strict.accepted[pair] / strict.drafted[pair] + 0.05


def test_a_lookup_token_is_accepted_with_its_probability() -> None:
    run = categorical(parse_plan("big(lookup:1)"), LAWS, tokens=100_000)
    rate = float(LAWS[LOOKUP] @ LAWS["big"])
    assert run.tokens_per_pass == pytest.approx(1 + rate, abs=4 * run.tokens_per_pass_error)


def test_tokens_per_pass_of_one_drafter_follow_the_overlap() -> None:
    run = categorical(parse_plan("big(small:4)"), LAWS, tokens=200_000)
    rate = overlap("small", "big")
    assert run.tokens_per_pass == pytest.approx(sum(rate**m for m in range(5)), abs=4 * run.tokens_per_pass_error)


def test_truncate_is_iid() -> None:
    run = categorical(parse_plan("big(mid:1(small:3))"), LAWS, tokens=400_000)
    assert run.tokens_per_pass == pytest.approx(1 + overlap("mid", "big"), abs=4 * run.tokens_per_pass_error)


def one_round_overshoot() -> float:
    """Return the exact tokens per pass of big(mid:1+(small:1)), by enumeration of what mid passes up."""
    big, mid, small = LAWS["big"], LAWS["mid"], LAWS["small"]
    kept = np.minimum(small, mid)
    residual = (mid - kept) / (1 - kept.sum())
    fine = np.minimum(1, big / mid)
    refused = (1 - kept.sum()) * float(residual @ fine)  # one token, drawn from the residual
    accepted = float(kept @ fine) * (1 + float(mid @ fine)) if kept.sum() else 0.0  # two: the draft and a bonus
    return 1 + refused + accepted


def test_overshoot_is_not_iid() -> None:
    plan = parse_plan("big(mid:1+(small:1))")
    real = categorical(plan, LAWS, tokens=800_000, seed=3)
    assert real.tokens_per_pass == pytest.approx(one_round_overshoot(), abs=4 * real.tokens_per_pass_error)
    rates = {("small", "mid"): overlap("small", "mid"), ("mid", "big"): overlap("mid", "big")}
    profile = Profile.from_rates("big", {"big": 1.0, "mid": 0.3, "small": 0.1}, rates)
    iid = simulate(plan, profile, tokens=800_000, seed=3)
    error = np.hypot(real.tokens_per_pass_error, iid.tokens_per_pass_error)
    assert abs(iid.tokens_per_pass - real.tokens_per_pass) > 5 * error


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(plans.KINDS))
def test_tokens_are_conserved_at_every_level(seed: int, kind: plans.Kind) -> None:
    plan = plans.random_plan(np.random.default_rng(seed), kind)
    run = categorical(plan, LAWS, tokens=2_000, seed=seed)
    for model in set(plan.models) - {LOOKUP}:
        taken = sum(count for (_, verifier), count in run.accepted.items() if verifier == model)
        held = taken + sum(run.new_tokens_histogram(model).values())
        assert held - run.discarded[model] == run.passed_up[model].sum()


def test_equal_seeds_give_equal_runs() -> None:
    runs = [categorical(parse_plan("big(mid:2(small:2))"), LAWS, tokens=5_000, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0].passes != runs[2].passes


def test_what_is_refused() -> None:
    plan = parse_plan("big(small:2)")
    with pytest.raises(InvalidArgumentError, match="expected a distribution of small; got big"):
        categorical(plan, {"big": [0.5, 0.5]})
    with pytest.raises(InvalidArgumentError, match="expected probabilities of small that sum to 1"):
        categorical(plan, {"big": [0.5, 0.5], "small": [0.5, 0.6]})
    with pytest.raises(InvalidArgumentError, match="expected distributions over one vocabulary"):
        categorical(plan, {"big": [0.5, 0.5], "small": [0.5, 0.2, 0.3]})
    with pytest.raises(PredictionError, match="expected a stack of levels"):
        categorical(parse_plan("bild(big, small)"), LAWS)
    with pytest.raises(InvalidArgumentError, match="expected tokens"):
        categorical(plan, LAWS, tokens=0)
