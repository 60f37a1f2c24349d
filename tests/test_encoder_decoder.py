"""Encoder-decoder models: the same plans, the encoder once, output that of transformers."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode import check_accounts, some_plan
from tiny import EOS, VOCAB, save_tiny, tiny_model, tiny_network, tiny_tokenizer
from transformers import T5ForConditionalGeneration

from hsdopt.errors import CacheError, ModelError
from hsdopt.plan import LOOKUP, Bild
from hsdopt.profiles import Setting
from hsdopt.profiling import Prompt, Workload, profile
from hsdopt.profiling.measure import render_prompts
from hsdopt.runtime import Model, generate, load_models
from hsdopt.runtime.encoder_decoder import EncoderDecoderSession, PromptedLookup
from hsdopt.runtime.lookup import Lookup
from hsdopt.runtime.models import check_vocabulary
from hsdopt.runtime.quantised import quantised_copy

if TYPE_CHECKING:
    from pathlib import Path

torch.set_num_threads(1)
PROMPT = list(range(60, 80))


@lru_cache
def family() -> dict[str, Model]:
    made = {
        name: tiny_model(0, name=name, noise=noise, architecture="t5")
        for name, noise in (("t", 0.0), ("m", 0.01), ("s", 0.03))
    }
    return {LOOKUP: Model.of_lookup(Lookup(), made["t"]), **made}


def reference(prompt: list[int], count: int, **options: Any) -> list[int]:  # noqa: ANN401 -- handed on
    """What transformers writes greedily."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    return family()["t"].network.generate(ids, max_new_tokens=count, **options)[0, 1:].tolist()


@pytest.mark.parametrize("seed", range(30))
def test_greedy_output_is_that_of_transformers(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 2, 9, 30)))]
    plan, count = some_plan(rng), rng.randint(1, 40)
    output = generate(plan, family(), prompt, max_new_tokens=count)
    assert list(output.tokens) == reference(prompt, count), (str(plan), prompt)
    check_accounts(output)


def test_the_outputs_of_these_tests_differ_and_depend_on_the_prompt() -> None:
    outputs = [reference(list(range(start, start + 20)), 30) for start in (60, 90, 120)]
    assert len({tuple(output) for output in outputs}) == 3
    assert all(len(set(output)) > 3 for output in outputs)


def test_penalties_see_the_decoder_only_as_in_transformers() -> None:
    output = generate("t(m:4(s:2))", family(), PROMPT, max_new_tokens=30, repetition_penalty=1.3)
    assert list(output.tokens) == reference(PROMPT, 30, repetition_penalty=1.3)


def test_the_end_of_a_text_ends_it_inside_a_draft() -> None:
    models = family()
    whole = generate("t", models, PROMPT, max_new_tokens=30, ignore_eos=True).tokens
    for token in dict.fromkeys(whole):
        network = tiny_network(0, architecture="t5", eos=token)
        ending = {**models, "t": Model.of(network, tiny_tokenizer(), name="t")}
        for plan in ("t(s:5)", "t(lookup:6)", "t(m:3(s:2))"):
            output = generate(plan, ending, PROMPT, max_new_tokens=30)
            assert output.tokens == whole[: whole.index(token) + 1]


def test_bild_that_lets_nothing_pass_writes_what_the_large_model_would() -> None:
    strict = Bild("t", "s", fallback=0.0, rollback=0.0, max_draft=4)
    assert list(generate(strict, family(), PROMPT, max_new_tokens=25).tokens) == reference(PROMPT, 25)


@pytest.mark.parametrize("semantics", ["paper", "reference"])
def test_bild_that_lets_all_pass_writes_what_the_small_model_would(semantics: str) -> None:
    free = Bild("t", "s", fallback=0.0, rollback=1e9, semantics=semantics, max_draft=40)
    output = generate(free, family(), PROMPT, max_new_tokens=20)
    small = generate("s", family(), PROMPT, max_new_tokens=20)
    if semantics == "paper":
        assert output.tokens[:19] == small.tokens[:19]  # the last one is the large model's
    assert output.counters.passes["s"] > output.counters.passes["t"]


def test_every_encoder_runs_once_and_is_logged() -> None:
    output = generate("t(m:4(s:2))", family(), PROMPT, max_new_tokens=20)
    encoded = [event for event in output.events if event.kind == "encode"]
    assert sorted(event.model for event in encoded) == ["m", "s", "t"]
    assert all(event.new_tokens == len(PROMPT) and event.seconds > 0 for event in encoded)
    prefills = [event for event in output.events if event.kind == "prefill"]
    assert [event.new_tokens for event in prefills] == [1, 1, 1]
    assert output.seconds.prefill >= sum(event.seconds for event in (*encoded, *prefills))


def test_sessions_are_used_again_for_another_prompt() -> None:
    models = family()
    sessions = {name: models[name].session() for name in ("t", "s", LOOKUP)}
    for start in (60, 90, 60):
        prompt = list(range(start, start + 12))
        plan = "t(s:3, lookup:2)"
        output = generate(plan, models, prompt, max_new_tokens=20, sessions=sessions)
        assert list(output.tokens) == reference(prompt, 20)
    made = [p for p in sessions["t"].passes if p.encoder]
    assert [(p.new_tokens, p.context, p.prefill) for p in made] == [(12, 0, True)] * 3


steps = st.lists(
    st.tuples(st.integers(0, 20), st.lists(st.integers(0, VOCAB - 1), max_size=6), st.integers(1, 6)), max_size=6
)


@settings(deadline=None, derandomize=True, max_examples=20)
@given(steps=steps)
def test_logits_equal_a_full_pass_after_any_feeding_and_cropping(
    steps: list[tuple[int, list[int], int]],
) -> None:
    model = family()["t"]
    session = model.network_session()
    session.begin(PROMPT)
    sequence = model.opening(PROMPT)
    for keep, added, wanted in steps:
        sequence = [*sequence[: max(1, keep)], *added]
        n_logits = min(wanted, len(sequence))
        logits = session.forward(sequence, n_logits)
        with torch.inference_mode():
            ids = {"input_ids": torch.tensor([PROMPT]), "decoder_input_ids": torch.tensor([sequence])}
            whole = model.network(**ids, use_cache=False).logits[0]
        torch.testing.assert_close(logits, whole[-n_logits:, :VOCAB], rtol=0, atol=1e-10)


def test_a_pass_that_fails_leaves_a_session_that_is_right() -> None:
    model = family()["t"]
    session = model.network_session()
    session.begin(PROMPT)
    right = session.forward([0, 5, 6])
    with pytest.raises(IndexError):
        session.forward([0, 5, 10**6])
    assert session.tokens == ()
    torch.testing.assert_close(session.forward([0, 5, 6]), right, rtol=0, atol=1e-10)


def test_a_session_without_a_prompt_says_so() -> None:
    session = family()["t"].network_session()
    assert isinstance(session, EncoderDecoderSession)
    with pytest.raises(ModelError, match="t: expected a prompt for the encoder before the first pass: call begin"):
        session.forward([0])


def test_the_lookup_drafter_reads_prompt_and_output() -> None:
    session = family()[LOOKUP].session()
    assert isinstance(session, PromptedLookup)
    session.begin([5, 6, 7, 8])
    session.extend([5, 6])  # the sequence is now start, 5, 6
    assert session.propose(2) == [7, 8]
    session.crop(2)
    assert session.tokens == (5, 6, 7, 8, 5)
    session.crop(0)
    assert session.tokens == ()


def test_folders_are_loaded_with_recipes(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "t5", architecture="t5", layers=3)
    loaded = load_models([f"t={folder}", f"q=int8@{folder}", f"k=skip:1@{folder}", "lookup"])
    assert loaded["t"].start == loaded["lookup"].start == (0,)
    assert loaded["k"].network.get_decoder().config.num_hidden_layers == 2
    assert len(loaded["k"].network.get_encoder().block) == 2
    plain = generate("t", loaded, PROMPT, max_new_tokens=20)
    for plan in ("t(q:3)", "t(k:3)", "t(q:4(k:2, lookup:2))"):
        assert generate(plan, loaded, PROMPT, max_new_tokens=20).tokens == plain.tokens


@pytest.mark.parametrize(("precision", "least"), [("int8", 0.9), ("int4", 0.75)])
def test_quantised_copies_stay_close(precision: str, least: float) -> None:
    config = tiny_network(architecture="t5", vocab=320).config
    config.d_ff, config.initializer_factor = 64, 1.0  # widths that int4 packs; weights that bfloat16 resolves
    torch.manual_seed(0)
    network = T5ForConditionalGeneration(config).float().eval().requires_grad_(requires_grad=False)
    copied = quantised_copy(network, precision)
    ids = {"input_ids": torch.tensor([PROMPT]), "decoder_input_ids": torch.arange(3, 83)[None]}
    agreement = (network(**ids).logits.argmax(-1) == copied(**ids).logits.argmax(-1)).double().mean()
    assert agreement > least


def test_other_kinds_of_models_do_not_draft_for_it() -> None:
    models = {**family(), "d": tiny_model(0, name="d")}
    with pytest.raises(ModelError, match=r"expected d to start from decoder ids \[0\] like t; got the prompt: use a"):
        generate("t(d:3)", models, PROMPT, max_new_tokens=5)
    with pytest.raises(ModelError, match=r"expected t to start from the prompt like d; got decoder ids \[0\]"):
        check_vocabulary(models["d"], models["t"])


def test_a_decoder_that_does_not_say_where_it_starts_is_refused() -> None:
    network = tiny_network(architecture="t5")
    network.config.decoder_start_token_id = network.generation_config.decoder_start_token_id = None
    with pytest.raises(ModelError, match="mine: expected a decoder_start_token_id"):
        Model.of(network, None, name="mine")


def test_decoders_that_forget_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    network = tiny_network(architecture="t5")
    decoder = network.get_decoder()
    monkeypatch.setattr(decoder.config, "layer_types", ["linear_attention", "full_attention"], raising=False)
    with pytest.raises(CacheError, match=r"mine: expected a cache .*; T5ForConditionalGeneration: LinearAttention"):
        Model.of(network, None, name="mine")


def test_end_ids_are_the_models() -> None:
    assert family()["t"].eos == frozenset({EOS})


def test_a_profile_has_decoder_contexts_and_the_encoders_time(tmp_path: Path) -> None:
    texts = ["a short one", "one that is a good deal longer than the first", "something between them", "and another"]
    workload = Workload("t5", tuple(Prompt(str(index), text) for index, text in enumerate(texts)))
    setting = Setting(max_new_tokens=10)
    made = profile(
        "t",
        ["s", LOOKUP],
        workload,
        models=family(),
        journal=tmp_path / "journal",
        setting=setting,
        tokens=(1, 2, 4),
        repeats=1,
    )
    assert {sample.context for sample in made.samples["t"]} == {1, 6, 11}
    assert made.traces.context.min() == 1
    assert made.traces.context.max() == 10
    prompts = list(render_prompts(workload.profiling, family()["t"]).values())
    lengths = sorted(len(prompt) for prompt in prompts)
    for name in ("t", "s"):
        assert all(made.overhead[f"encoder of {name}, {length} tokens"] > 0 for length in lengths)
    output = generate("t", family(), prompts[0], max_new_tokens=10, ignore_eos=True).tokens
    assert made.traces.tokens[:10].tolist() == list(output)
    assert made.traces.choice["t"][:10].tolist() == list(output)
