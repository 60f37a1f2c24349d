"""Big Little Decoder: traces worked out by hand, one per rule and semantics.

The models are scripts: the law of the next token depends on the length of the prefix alone. The prompt has two
tokens, so the first token written stands at place 2. A trace lists

    small N, large N     a pass over N new tokens          drop     the small model's unsure token
    M of N               N small tokens reviewed, M kept   cut      a token behind the end of the text
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mocks import Branch, MockModel, every_outcome, table_model
from tiny import tiny_model

from hsdopt.plan import Bild
from hsdopt.runtime import Generation, Sampling, generate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

torch.set_num_threads(1)
PROMPT = [0, 0]
END = 7


@dataclass(slots=True)
class Script(MockModel):
    """The law after a prefix of so many tokens: the chances of some tokens; the rest is spread over the others."""

    places: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    default: Mapping[int, float] = field(default_factory=dict)

    def score(self, sequence: Sequence[int], n_logits: int) -> torch.Tensor:
        first = len(sequence) - n_logits + 1
        return torch.stack([self._law(length).log() for length in range(first, len(sequence) + 1)])

    def _law(self, length: int) -> torch.Tensor:
        chances = self.places.get(length, self.default)
        rest = (1 - sum(chances.values())) / (self.vocab_size - len(chances))
        return torch.tensor([chances.get(token, rest) for token in range(self.vocab_size)], dtype=torch.float64)


def scripts(
    small: Mapping[int, Mapping[int, float]], large: Mapping[int, Mapping[int, float]], *, vocab: int = 8
) -> dict[str, Any]:
    """A sure small model that writes 1 and a large one that agrees, but for the places given."""
    agreed = {1: 0.9}
    return {
        "small": Script("small", vocab, places=small, default=agreed),
        "large": Script("large", vocab, eos=frozenset({END}), places=large, default=agreed),
    }


def bild(**options: Any) -> Bild:  # noqa: ANN401 -- handed on
    return Bild(large="large", small="small", **options)


def trace(output: Generation) -> list[str]:
    """The events as the module's docstring writes them."""
    lines = []
    for event in output.events:
        if event.kind == "pass":
            lines.append(f"{event.model} {event.new_tokens}")
        elif event.kind == "verify":
            lines.append(f"{event.accepted} of {event.drafted}")
        elif event.kind == "cut":
            lines.append("drop" if event.why == "fallback" else "cut")
    return lines


UNSURE = {3: 0.5}
DOUBTFUL = {2: 0.9, 1: 0.001}  # the large model wants 2; the nats of 1 are 6.9
OPEN = {2: 0.45, 1: 0.35}  # it wants 2, but 1 costs 1.05 nats only


def test_paper_fallback_gives_the_place_to_the_large_model() -> None:
    models = scripts({4: UNSURE}, {4: {5: 0.9}})
    output = generate(bild(), models, PROMPT, max_new_tokens=5)
    assert output.tokens == (1, 1, 5, 1, 1)
    # the first token came from the small model's prefill; the large one is fed the last prompt token again to score it
    assert trace(output) == ["small 1", "small 1", "drop", "large 3", "2 of 2", "small 1", "large 2", "1 of 1"]


def test_paper_start_is_the_small_model_s_unless_it_is_unsure() -> None:
    models = scripts({2: UNSURE}, {2: {5: 0.9}})
    output = generate(bild(), models, PROMPT, max_new_tokens=3)
    assert output.tokens == (5, 1, 1)
    assert trace(output) == ["drop", "small 1", "large 2", "1 of 1"]
    assert [event.gained for event in output.events if event.kind == "prefill"] == [1, 1]


def test_paper_rollback_at_the_first_unlikely_token_then_the_small_model_resumes() -> None:
    models = scripts({6: UNSURE}, {3: DOUBTFUL, 5: DOUBTFUL})
    output = generate(bild(), models, PROMPT, max_new_tokens=9)
    # stint 1: places 2 to 5, unsure at 6; place 3 is withdrawn and written by the large model
    first = ["small 1", "small 1", "small 1", "small 1", "drop", "large 5", "1 of 4"]
    # stint 2: places 4 and 5 (unsure at 6); place 5 is withdrawn, the large model writes 2
    second = ["small 1", "small 1", "small 1", "drop", "large 3", "1 of 2"]
    # stint 3: unsure at once at place 6; the large model writes it; stint 4 is cut to leave the last place to it
    rest = ["small 1", "drop", "large 1", "small 1", "small 1", "small 1", "large 4", "3 of 3"]
    assert trace(output) == first + second + rest
    assert output.tokens == (1, 2, 1, 2, 1, 1, 1, 1, 1)


def test_paper_rollback_though_the_large_model_would_write_the_same() -> None:
    agreed = {1: 0.3, 2: 0.1, 3: 0.1}  # its best token, at 1.2 nats
    models = scripts({5: UNSURE}, {3: agreed})
    output = generate(bild(rollback=1.0), models, PROMPT, max_new_tokens=5)
    assert trace(output)[:6] == ["small 1", "small 1", "small 1", "drop", "large 4", "1 of 3"]
    assert output.tokens == (1, 1, 1, 1, 1)


def test_thresholds_are_strict() -> None:
    models = scripts({3: {1: 0.5}, 5: {3: 0.3}}, {4: {2: 0.5, 1: 0.25}})
    assert trace(generate(bild(fallback=0.5), models, PROMPT, max_new_tokens=2)) == ["large 2", "1 of 1"]
    nats = -float(Sampling().laws(models["large"].score([0] * 4, 1), [0] * 4, 4)[0, 1].log())
    assert nats == pytest.approx(-math.log(0.25))
    exact = generate(bild(fallback=0.5, rollback=nats), models, PROMPT, max_new_tokens=5)
    assert "3 of 3" in trace(exact)
    just = generate(bild(fallback=0.5, rollback=nats - 1e-9), models, PROMPT, max_new_tokens=5)
    assert "2 of 3" in trace(just)
    assert trace(generate(bild(fallback=0.5 + 1e-9), models, PROMPT, max_new_tokens=5))[:2] == ["small 1", "drop"]


def test_a_cap_ends_a_stint_without_dropping_a_token() -> None:
    # a stint kept whole leaves its last token missing in the small model's cache, beside the large model's
    output = generate(bild(max_draft=2), scripts({}, {}), PROMPT, max_new_tokens=6)
    assert trace(output) == ["small 1", "large 3", "2 of 2", "small 2", "small 1", "large 3", "2 of 2"]


@pytest.mark.parametrize("semantics", ["paper", "reference"])
def test_a_stride_replaces_fallback(semantics: str) -> None:
    models = scripts(dict.fromkeys(range(20), UNSURE), dict.fromkeys(range(20), UNSURE))
    output = generate(bild(stride=3, semantics=semantics), models, PROMPT, max_new_tokens=9)
    assert "drop" not in trace(output)
    assert [line for line in trace(output) if " of " in line] == ["3 of 3", "3 of 3"]
    assert len(output.tokens) == 9


def test_infinite_rollback_keeps_everything() -> None:
    models = scripts({5: UNSURE}, {3: {2: 1.0, 1: 0.0, 0: 0.0, 3: 0.0, 4: 0.0, 5: 0.0, 6: 0.0}})
    kept = generate(bild(rollback=math.inf), models, PROMPT, max_new_tokens=5)
    assert kept.tokens == (1, 1, 1, 1, 1)
    assert "1 of 3" in trace(generate(bild(rollback=1000.0), models, PROMPT, max_new_tokens=5))


def test_reference_starts_with_the_large_model_and_drops_the_unsure_token() -> None:
    models = scripts({4: UNSURE}, {2: {5: 0.9}, 4: {6: 0.9}})
    output = generate(bild(semantics="reference"), models, PROMPT, max_new_tokens=5)
    assert output.tokens == (5, 1, 6, 1, 1)
    assert trace(output) == ["small 1", "small 1", "drop", "large 2", "1 of 1", "small 1", "large 2", "1 of 1"]


def test_reference_keeps_the_tenth_token_of_a_stint() -> None:
    output = generate(bild(semantics="reference"), scripts({}, {}), PROMPT, max_new_tokens=14)
    assert trace(output) == [*["small 1"] * 10, "large 11", "10 of 10", "small 2", "large 2", "1 of 1"]


def test_reference_runs_the_large_model_once_more_after_a_rollback() -> None:
    models = scripts({6: UNSURE}, {4: DOUBTFUL, 5: {4: 0.9}})
    output = generate(bild(semantics="reference"), models, PROMPT, max_new_tokens=7)
    # places 3, 4, 5 by the small model; 4 is withdrawn and written anew; a second pass writes 5; then place 6
    stint = ["small 1", "small 1", "small 1", "small 1", "drop", "large 4", "1 of 3", "large 1"]
    assert trace(output) == [*stint, "small 2", "drop", "large 1", "small 1", "large 2", "1 of 1"]
    assert output.tokens == (1, 1, 2, 4, 1, 1, 1)


def test_reference_sees_no_later_token_behind_an_unlikely_one_that_it_agrees_with() -> None:
    agreed = {1: 0.3, 2: 0.1, 3: 0.1}
    models = scripts({6: UNSURE}, {4: agreed, 5: DOUBTFUL})
    reference = generate(bild(rollback=1.0, semantics="reference"), models, PROMPT, max_new_tokens=5)
    assert "3 of 3" in trace(reference)
    assert reference.tokens == (1, 1, 1, 1, 1)
    likely = scripts({6: UNSURE}, {5: DOUBTFUL})
    assert "2 of 3" in trace(generate(bild(rollback=1.0, semantics="reference"), likely, PROMPT, max_new_tokens=5))


def test_reference_reads_unprocessed_logits_and_paper_the_laws_tokens_are_drawn_from() -> None:
    models = scripts({}, {3: OPEN})
    options = {"top_k": 1, "temperature": 1.0, "seed": 0}  # processed, the large model's law holds 2 alone at place 3
    paper = generate(bild(), models, PROMPT, max_new_tokens=5, **options)
    assert paper.tokens[1] == 2
    reference = generate(bild(semantics="reference"), models, PROMPT, max_new_tokens=5, **options)
    assert reference.tokens == (1, 1, 1, 1, 1)


@pytest.mark.parametrize("semantics", ["paper", "reference"])
def test_end_of_text_written_by_a_rollback_ends_the_generation(semantics: str) -> None:
    models = scripts({6: UNSURE}, {4: {END: 0.9, 1: 0.001}})
    output = generate(bild(semantics=semantics), models, PROMPT, max_new_tokens=20)
    assert (output.tokens, output.finish_reason) == ((1, 1, END), "eos")


@pytest.mark.parametrize("semantics", ["paper", "reference"])
def test_end_of_text_by_the_small_model_is_reviewed_and_nothing_follows_it(semantics: str) -> None:
    agreed = scripts({5: {END: 0.9}}, {5: {END: 0.9}})
    output = generate(bild(semantics=semantics), agreed, PROMPT, max_new_tokens=20)
    assert (output.tokens, output.finish_reason) == ((1, 1, 1, END), "eos")
    assert trace(output)[-1] == "cut"
    refused = scripts({5: {END: 0.9}}, {5: {2: 0.9, END: 0.001}})
    output = generate(bild(semantics=semantics), refused, PROMPT, max_new_tokens=6)
    assert output.tokens == (1, 1, 1, 2, 1, 1)


@pytest.mark.parametrize("semantics", ["paper", "reference"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 12])
def test_no_token_is_left_unreviewed_at_the_end(semantics: str, count: int) -> None:
    models = scripts({}, dict.fromkeys(range(2, 40), DOUBTFUL))
    output = generate(bild(semantics=semantics), models, PROMPT, max_new_tokens=count)
    assert output.tokens == (2,) * count  # the large model lets no 1 pass


@pytest.mark.parametrize("semantics", ["paper", "reference"])
def test_thresholds_of_exactly_zero(semantics: str) -> None:
    models = scripts(dict.fromkeys(range(40), UNSURE), {})
    never_unsure = generate(bild(fallback=0, rollback=math.inf, semantics=semantics), models, PROMPT, max_new_tokens=9)
    assert "drop" not in trace(never_unsure)
    # nothing but a certain token is certain: every stint loses all it wrote, and still the text grows
    strict = generate(bild(fallback=0, rollback=0, semantics=semantics), models, PROMPT, max_new_tokens=9)
    assert strict.tokens == (1,) * 9
    assert strict.counters.edges["small", "large"].accepted == 0


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    fallback=st.sampled_from([0.0, 0.4, 0.7, 1.0]),
    rollback=st.sampled_from([0.0, 0.5, 2.0, math.inf]),
    max_draft=st.sampled_from([None, 1, 4]),
    stride=st.sampled_from([None, 3]),
    semantics=st.sampled_from(["paper", "reference"]),
    temperature=st.sampled_from([0.0, 1.0]),
    count=st.integers(1, 30),
)
def test_accounts_and_an_end_for_any_threshold(count: int, temperature: float, **options: Any) -> None:  # noqa: ANN401
    models: dict[str, Any] = {name: table_model(name, seed, vocab=5) for seed, name in enumerate(("small", "large"))}
    models["large"].eos = frozenset({4})
    output = generate(bild(**options), models, PROMPT, max_new_tokens=count, temperature=temperature, seed=1)
    assert len(output.tokens) == count or output.finish_reason == "eos"
    counters = output.counters
    assert counters.held["large"] - counters.discarded.get("large", 0) == len(output.tokens)
    drafted = sum(edge.drafted for edge in counters.edges.values())
    assert counters.held["small"] - counters.discarded.get("small", 0) == drafted
    assert all(event.discarded == event.drafted - event.accepted for event in output.events if event.kind == "verify")


def test_sampled_tokens_are_drawn_from_the_model_that_writes_them() -> None:
    """With a stride of 1 and no rollback the models take turns, so the joint law is a product of both."""
    models: dict[str, Any] = {name: table_model(name, seed) for seed, name in enumerate(("small", "large"))}

    def program(dice: Branch) -> tuple[int, ...]:
        plan = bild(stride=1, rollback=math.inf)
        return generate(plan, models, PROMPT, max_new_tokens=4, temperature=1, dice=dice).tokens

    law = every_outcome(program)
    for tokens in itertools.product(range(3), repeat=4):
        writers = (models["small"], models["large"]) * 2
        chances = [
            float(writer.law([*PROMPT, *tokens[:at]])[token])
            for at, (writer, token) in enumerate(zip(writers, tokens, strict=True))
        ]
        assert law[tokens] == pytest.approx(math.prod(chances), abs=1e-12)


def test_a_fallback_of_one_is_the_large_model_s_own_text() -> None:
    models: dict[str, Any] = {name: table_model(name, seed) for seed, name in enumerate(("small", "large"))}
    plain = generate("large", models, PROMPT, max_new_tokens=30).tokens
    for semantics in ("paper", "reference"):
        assert generate(bild(fallback=1, semantics=semantics), models, PROMPT, max_new_tokens=30).tokens == plain


def test_a_small_model_whose_positions_run_out_leaves_the_rest_to_the_large_one() -> None:
    models = {"large": tiny_model(0, name="large"), "small": tiny_model(0, name="small", positions=12)}
    output = generate(bild(fallback=0.0), models, [5] * 6, max_new_tokens=20, ignore_eos=True)
    assert len(output.tokens) == 20
    too_long = generate(bild(fallback=0.0), models, [5] * 13, max_new_tokens=4, ignore_eos=True)
    assert too_long.counters.passes == {"large": 3}


def test_real_networks_write_the_large_model_s_text_where_the_small_one_is_its_copy() -> None:
    models = {name: tiny_model(0, name=name) for name in ("large", "small")}
    expected = generate("large", models, [5, 6], max_new_tokens=40, ignore_eos=True).tokens
    for semantics in ("paper", "reference"):
        plan = bild(fallback=0.3, rollback=math.inf, semantics=semantics)
        assert generate(plan, models, [5, 6], max_new_tokens=40, ignore_eos=True).tokens == expected
