"""Whatever drafts, tokens follow the target's law: summed exactly, drawn and counted, and broken on purpose."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mocks import Branch, MockModel, TableLookup, TableModel, every_outcome, table_model
from scipy import stats
from tiny import tiny_model
from transformers.generation import logits_process

import hsdopt.runtime.sampling as rules
from hsdopt.errors import InvalidArgumentError
from hsdopt.plan import Adaptive, Choice, Plan, parse_plan
from hsdopt.runtime import Sampling, generate, near_tie
from hsdopt.runtime.sampling import Chance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

torch.set_num_threads(1)
PROMPT = [0, 1]

KINDS: dict[str, Plan] = {
    "speculative": parse_plan("t(s:2)"),
    "hierarchy": parse_plan("t(m:2(s:1))"),
    "deep draft in a hierarchy": parse_plan("t(m:1(s:2))"),
    "overshoot": parse_plan("t(m:1+(s:1))"),
    "rounds": parse_plan("t(m:1x(s:1))"),
    "row": parse_plan("t(m:1, s:1)"),
    "until": parse_plan("t(m:1+(s:1), s:..2)"),
    "lookup": parse_plan("t(lookup:2)"),
    "vertical and horizontal": parse_plan("t(m:1(lookup:1), lookup:1)"),
    "lenience": parse_plan("t(m:2(s:1, lenience=2))"),
    "lenience over a lookup drafter": parse_plan("t(m:1(s:1, lookup:1, lenience=3))"),
    "adaptive": Adaptive("t", Choice("m", 2), (("s", (None, None)), ("m", (None, Choice("s", 1))))),
}


class NoRepeat:
    """A processor that looks at the whole prefix: tokens lose weight by how often they occur in it."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0], minlength=scores.shape[-1])
        return scores - 0.4 * counts


PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.75},
    "min-p": {"min_p": 0.3, "temperature": 1.5},
    "repetition penalty": {"repetition_penalty": 1.7},
    "processor": {"processors": [NoRepeat()], "top_p": 0.9},
}


def models(vocab: int = 3) -> dict[str, Any]:
    made: dict[str, Any] = {name: table_model(name, seed, vocab=vocab) for seed, name in enumerate("tms")}
    made["lookup"] = TableLookup("lookup", table_model("words", 9, vocab=vocab))
    return made


def warped(model: TableModel, prefix: Sequence[int], options: dict[str, Any]) -> torch.Tensor:
    """The law [vocab] that transformers' own processors make of a model's law: the oracle."""
    ids, scores = torch.tensor([list(prefix)]), model.law(prefix).log()[None]
    chain: list[Any] = []
    if "repetition_penalty" in options:
        chain.append(logits_process.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    chain += options.get("processors", [])
    chain.append(logits_process.TemperatureLogitsWarper(float(options.get("temperature", 1.0))))
    if "top_k" in options:
        chain.append(logits_process.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        chain.append(logits_process.TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        chain.append(logits_process.MinPLogitsWarper(options["min_p"]))
    for processor in chain:
        scores = processor(ids, scores)
    return scores.softmax(-1)[0]


def target_law(model: TableModel, count: int, options: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The joint law of `count` tokens, the target alone."""
    law = {}
    for tokens in itertools.product(range(model.vocab_size), repeat=count):
        chances = [warped(model, [*PROMPT, *tokens[:i]], options)[token] for i, token in enumerate(tokens)]
        law[tokens] = math.prod(map(float, chances))
    return law


def exact_error(plan: Plan, options: dict[str, Any], *, vocab: int = 3, spare: int = 0) -> float:
    """The largest difference between the law of 3 tokens with `plan` and that of the target.

    The output may grow by `spare` tokens, so that no draft is cut short; it is broken off as soon as 3 are final.
    """
    made = models(vocab)
    options = {"temperature": 1.0, **options}

    def program(dice: Branch) -> tuple[int, ...]:
        final: list[int] = []
        shared = {"dice": dice, "on_token": final.append, "cancel": lambda: len(final) >= 3}
        return generate(plan, made, PROMPT, max_new_tokens=3 + spare, **shared, **options).tokens[:3]

    got, expected = every_outcome(program), target_law(made["t"], 3, options)
    assert got.keys() <= expected.keys()
    return max(abs(got.get(key, 0.0) - chance) for key, chance in expected.items())


def chi_square(plan: Plan, options: dict[str, Any], *, samples: int = 1500, seed: int = 0) -> float:
    """The probability of a worse fit of `samples` outputs of 3 tokens to the target's joint law."""
    made = models()
    options = {"temperature": 1.0, **options}
    expected = target_law(made["t"], 3, options)
    outputs = (
        generate(plan, made, PROMPT, max_new_tokens=3, seed=samples * seed + index, **options).tokens
        for index in range(samples)
    )
    counts = Counter(outputs)
    assert all(expected[tokens] > 0 for tokens in counts)
    keys = [key for key, chance in expected.items() if chance > 1e-12]
    rare = [key for key in keys if expected[key] * samples < 5]
    cells = [(counts[key], expected[key]) for key in keys if key not in rare]
    if rare:
        cells.append((sum(counts[key] for key in rare), sum(expected[key] for key in rare)))
    observed, chances = np.array(cells).T
    return float(stats.chisquare(observed, chances / chances.sum() * samples).pvalue)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_exact_law_of_every_kind_of_node_with_every_processor_on_both_sides(kind: str, processor: str) -> None:
    assert exact_error(KINDS[kind], PROCESSORS[processor]) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_exact_law_of_drafts_that_nothing_cuts_short(kind: str) -> None:
    assert exact_error(KINDS[kind], PROCESSORS["processor"], vocab=2, spare=3) < 1e-12


CHI_SQUARE = [
    ("speculative", "processor"),
    ("hierarchy", "top-p"),
    ("overshoot", "top-k"),
    ("row", "min-p"),
    ("lookup", "temperature"),
    ("lenience", "repetition penalty"),
    ("adaptive", "none"),
]


@pytest.mark.parametrize(("kind", "processor"), CHI_SQUARE)
def test_joint_law_of_three_drawn_tokens(kind: str, processor: str) -> None:
    assert chi_square(KINDS[kind], PROCESSORS[processor]) > 0.001 / len(CHI_SQUARE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_joint_law_of_three_drawn_tokens_in_every_combination(kind: str, processor: str) -> None:
    threshold = 0.001 / len(KINDS) / len(PROCESSORS)
    assert chi_square(KINDS[kind], PROCESSORS[processor], samples=4000, seed=1) > threshold


def accepts_with_p_times_q(p: float, q: float, lenience: float = 1.0) -> float:
    return min(1.0, lenience * p * q)


def residual_without_norm(p: torch.Tensor, q: torch.Tensor, lenience: float = 1.0) -> torch.Tensor:
    return (p - torch.minimum(q, lenience * p)).clamp(min=0)


def residual_of_p_alone(p: torch.Tensor, q: torch.Tensor, lenience: float = 1.0) -> torch.Tensor:
    return p


def lenient_law_not_reported(p: torch.Tensor, q: torch.Tensor, lenience: float = 1.0) -> torch.Tensor:
    return p


def laws_off_by_one(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def broken(sampling: Sampling, logits: torch.Tensor, tokens: Sequence[int], base: int) -> torch.Tensor:
        return original(sampling, logits, tokens, base).roll(1, dims=0)

    return broken


def law_before_top_p(sampled: rules.Sampled, logits: torch.Tensor, tokens: Sequence[int]) -> tuple[int, torch.Tensor]:
    law = sampled.sampling.laws(logits, tokens, len(tokens))[0]
    return sampled.dice.draw(law), logits.softmax(-1)[0]


def processors_see_the_first_prefix(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def broken(sampling: Sampling, logits: torch.Tensor, tokens: Sequence[int], base: int) -> torch.Tensor:
        return torch.cat([original(sampling, row[None], tokens, base) for row in logits])

    return broken


MUTATIONS: dict[str, tuple[object, str, Any, str, str]] = {
    "p q acceptance": (rules, "acceptance", accepts_with_p_times_q, "speculative", "none"),
    "residual not renormalised": (rules, "residual", residual_without_norm, "speculative", "none"),
    "correction from p": (rules, "residual", residual_of_p_alone, "hierarchy", "none"),
    "law of the wrong position": (Sampling, "laws", laws_off_by_one(Sampling.laws), "speculative", "none"),
    "q before top-p": (rules.Sampled, "choose", law_before_top_p, "speculative", "top-p"),
    "lenience law not reported": (rules, "reported_law", lenient_law_not_reported, "lenience", "none"),
    "one prefix for all": (Sampling, "scores", processors_see_the_first_prefix(Sampling.scores), "row", "processor"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_rule_fails_the_exact_test(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken, kind, processor = MUTATIONS[mutation]
    monkeypatch.setattr(owner, name, broken)
    assert exact_error(KINDS[kind], PROCESSORS[processor]) > 1e-3


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_rule_fails_the_chi_square_test(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken, kind, processor = MUTATIONS[mutation]
    monkeypatch.setattr(owner, name, broken)
    assert chi_square(KINDS[kind], PROCESSORS[processor], samples=2500) < 0.001 / len(CHI_SQUARE)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    options=st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.3, 1.0, 2.0])},
        optional={
            "top_k": st.integers(1, 9),
            "top_p": st.floats(0.05, 1.0),
            "min_p": st.floats(0.01, 1.0),
            "repetition_penalty": st.floats(0.5, 2.0),
        },
    ),
    count=st.integers(1, 4),
)
def test_laws_are_those_of_transformers_with_each_position_s_own_prefix(
    seed: int, options: dict[str, Any], count: int
) -> None:
    model = table_model("t", seed, vocab=7)
    tokens = torch.randint(7, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
    base = len(tokens) - count + 1
    logits = torch.stack([model.law(tokens[: base + index]).log() for index in range(count)])
    laws = Sampling(**options).laws(logits, tokens, base)
    expected = torch.stack([warped(model, tokens[: base + index], options) for index in range(count)])
    torch.testing.assert_close(laws, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_laws_of_half_precision_logits_are_precise(dtype: torch.dtype) -> None:
    logits = torch.linspace(-3, 3, 50).to(dtype)[None]
    laws = Sampling(temperature=0.7).laws(logits, [0], 1)
    assert laws.dtype == torch.float32
    assert float(laws.sum()) == pytest.approx(1, abs=1e-6)


class Always:
    """A source of numbers that is stuck at one."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_draws_never_pick_a_token_of_probability_zero(number: float) -> None:
    chance = Chance(0)
    chance._random = Always(number)  # type: ignore[assignment] # a source that is stuck
    law = torch.tensor([0.0, 0.1, 0.2, 0.0, 0.7, 0.0], dtype=torch.float32)
    assert law[chance.draw(law)] > 0


def test_draws_follow_the_law() -> None:
    chance, law = Chance(3), torch.tensor([0.05, 0.0, 0.6, 0.35])
    counts = Counter(chance.draw(law) for _ in range(4000))
    observed = [counts[token] for token in (0, 2, 3)]
    assert counts[1] == 0
    assert stats.chisquare(observed, [200, 2400, 1400]).pvalue > 0.001


def test_seeds_reproduce_and_differ() -> None:
    def write(seed: int) -> tuple[int, ...]:
        return generate(KINDS["hierarchy"], models(), PROMPT, max_new_tokens=40, temperature=1, seed=seed).tokens

    assert write(1) == write(1)
    assert write(1) != write(2)


def test_temperature_zero_is_no_division_and_greedy_drafts_under_sampling_are_one_hot() -> None:
    made = models()
    greedy = generate("t(s:2)", made, PROMPT, max_new_tokens=20).tokens
    expected: list[int] = []
    for _ in range(20):
        expected.append(int(made["t"].law([*PROMPT, *expected]).argmax()))
    assert list(greedy) == expected
    assert exact_error(KINDS["lookup"], {"temperature": 0.5}) < 1e-12


def test_a_very_low_temperature_is_almost_greedy() -> None:
    made = models()
    cold = generate("t(m:2(s:1))", made, PROMPT, max_new_tokens=30, temperature=1e-4, seed=0).tokens
    assert cold == generate("t", made, PROMPT, max_new_tokens=30).tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature to be a finite number of at least 0; got -1"),
        ({"temperature": math.nan}, "temperature to be a finite number"),
        ({"top_p": 0}, "top_p to be a number above 0 and at most 1; got 0"),
        ({"top_k": -1}, "top_k to be a whole number of at least 0; got -1"),
        ({"min_p": 1.5}, "min_p to be a number from 0 to 1; got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty to be a finite number above 0; got 0"),
    ],
)
def test_options_outside_their_domain(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Sampling(**options)


def test_lenience_at_temperature_zero_accepts_what_is_likely_enough_and_keeps_the_output() -> None:
    made = models()
    plain = generate("t", made, PROMPT, max_new_tokens=60).tokens
    strict = generate("t(m:3(s:2))", made, PROMPT, max_new_tokens=60)
    lenient = generate("t(m:3(s:2, lenience=4))", made, PROMPT, max_new_tokens=60)
    assert plain == strict.tokens == lenient.tokens
    assert lenient.counters.edges["s", "m"].acceptance > strict.counters.edges["s", "m"].acceptance


class Shaky(MockModel):
    """Two best tokens a small gap apart, and logits that move with the size of the pass."""

    gap = 1.0
    noise = 0.1
    fed = 0

    def session(self) -> Any:  # noqa: ANN401 -- a mock
        session = super().session()
        forward = session.forward

        def noted(sequence: Sequence[int], n_logits: int = 1) -> torch.Tensor:
            self.fed = len(sequence) - min(len(session.tokens), len(sequence) - n_logits)
            return forward(sequence, n_logits)

        session.forward = noted
        return session

    def score(self, *_: object) -> torch.Tensor:
        logits = torch.tensor([[0.0, self.gap, -5.0]], dtype=torch.float64)
        return logits + (self.noise if self.fed > 1 else 0.0) * torch.tensor([1.0, 0.0, 0.0])


@pytest.mark.parametrize("gap", [0.39, 0.41])
def test_near_tie_compares_the_gap_with_four_times_the_difference_between_passes(gap: float) -> None:
    model = Shaky("shaky", 3)
    model.gap = gap
    tie = near_tie(model, list(range(9)))
    assert (tie.gap, tie.difference) == (pytest.approx(gap), pytest.approx(0.1))
    assert bool(tie) is tie.near is (gap < 0.4)


def test_float64_leaves_no_near_tie() -> None:
    tie = near_tie(tiny_model(), [5, 6, 7, 8, 9, 10])
    assert tie.difference < 1e-9
    assert not tie
