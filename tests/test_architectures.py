"""Every architecture: greedy output is that of transformers, or the model is refused by name."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import TYPE_CHECKING

import pytest
import torch
from tiny import CAUSAL, FORGETFUL, VOCAB, WINDOW, save_tiny, tiny_model, tiny_network
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hsdopt.errors import CacheError, VocabularyError
from hsdopt.plan import LOOKUP
from hsdopt.runtime import Model, generate, load_models, session
from hsdopt.runtime.lookup import Lookup
from hsdopt.runtime.models import check_vocabulary
from hsdopt.runtime.quantised import quantised_copy

if TYPE_CHECKING:
    from pathlib import Path

torch.set_num_threads(1)
WINDOWED = ("gemma2", "gemma3", "mistral")
PLANS = ("t", "t(s:4)", "t(lookup:5)", "t(m:6(s:3))", "t(m:4(lookup:3), s:2)", "t(m:2x(s:2))")


@lru_cache
def family(architecture: str) -> dict[str, Model]:
    made = {
        name: tiny_model(0, name=name, noise=noise, architecture=architecture)
        for name, noise in (("t", 0.0), ("m", 0.02), ("s", 0.05))
    }
    return {**made, LOOKUP: Model.of_lookup(Lookup(), made["t"])}


def reference(model: Model, prompt: list[int], count: int) -> list[int]:
    """What transformers writes greedily."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    return model.network.generate(ids, max_new_tokens=count, **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("architecture", CAUSAL)
def test_greedy_output_is_that_of_transformers(architecture: str, plan: str) -> None:
    rng = random.Random(f"{architecture} {plan}")
    models = family(architecture)
    prompt = [rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 2 * WINDOW + 3)))]
    output = generate(plan, models, prompt, max_new_tokens=2 * WINDOW + 5)
    assert list(output.tokens) == reference(models["t"], prompt, 2 * WINDOW + 5)


@pytest.mark.parametrize("architecture", WINDOWED)
def test_a_window_is_seen_through_the_mask_after_any_crop(architecture: str) -> None:
    model = family(architecture)["t"]
    opened = model.network_session()
    rng = random.Random(architecture)
    sequence = [rng.randrange(3, VOCAB) for _ in range(6 * WINDOW)]
    with torch.inference_mode():
        whole = model.network(torch.tensor([sequence]), use_cache=False).logits[0]
    tolerance = 1e-5 if architecture == "gemma2" else 1e-10  # its attention takes the softmax in float32
    for length, scored in ((5, 1), (20, 3), (WINDOW, 2), (24, 4), (23, 1), (48, 12), (30, 9), (31, 1), (48, 17)):
        logits = opened.forward(sequence[:length], scored)
        torch.testing.assert_close(logits, whole[length - scored : length], rtol=0, atol=tolerance)


@pytest.mark.parametrize("architecture", WINDOWED)
def test_the_window_matters_in_these_tests(architecture: str) -> None:
    network, wide = (tiny_network(architecture=architecture, layers=4) for _ in range(2))
    wide.config.sliding_window = 10**6
    for layer in wide.model.layers:
        layer.self_attn.sliding_window = None
    ids = torch.arange(3, 3 + 3 * WINDOW)[None]
    assert not torch.allclose(network(ids).logits[0, -1], wide(ids).logits[0, -1], atol=1e-3)


def test_a_window_that_the_masks_do_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_WINDOW_MASKS", ())
    with pytest.raises(CacheError, match=rf"^tiny: .*MistralForCausalLM: a sliding window of {WINDOW} tokens forgets"):
        tiny_model(architecture="mistral")


@pytest.mark.parametrize("architecture", FORGETFUL)
def test_models_that_forget_are_refused_by_name(architecture: str) -> None:
    network = tiny_network(architecture=architecture, layers=4)
    with pytest.raises(CacheError, match=rf"^mine: expected a cache whose last tokens .*; {type(network).__name__}: "):
        Model.of(network, None, name="mine")


def words(count: int, *, swapped: tuple[int, int] = (0, 0)) -> PreTrainedTokenizerFast:
    """A tokenizer of `count` words, two of which may trade ids."""
    vocab = {f"w{index}": index for index in range(count)}
    one, other = swapped
    vocab[f"w{one}"], vocab[f"w{other}"] = other, one
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocab)))


def test_rows_that_are_padded_differently_do_not_count() -> None:
    made = {
        name: Model.of(tiny_network(seed, vocab=rows, eos=1), words(60), name=name)
        for seed, name, rows in ((0, "t", 64), (1, "s", 80))
    }
    check_vocabulary(made["t"], made["s"])
    favoured = made["s"].network.lm_head.weight  # [80, width]: its padded rows win every argmax unless cut off
    favoured.data[60:] *= 100
    plain = generate("t", made, [5, 6, 7], max_new_tokens=20, ignore_eos=True)
    drafted = generate("t(s:3)", made, [5, 6, 7], max_new_tokens=20, ignore_eos=True)
    assert plain.tokens == drafted.tokens
    assert max(drafted.tokens) < 60


def test_a_permuted_vocabulary_is_refused_with_the_first_difference() -> None:
    target = Model.of(tiny_network(vocab=64, eos=1), words(60), name="t")
    drafter = Model.of(tiny_network(vocab=64, eos=1), words(60, swapped=(17, 41)), name="s")
    with pytest.raises(VocabularyError, match="t and s; id 17 is 'w17' and 'w41'"):
        check_vocabulary(target, drafter)
    with pytest.raises(VocabularyError, match="id 17"):
        generate("t(s:2)", {"t": target, "s": drafter}, [1, 2], max_new_tokens=4)


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "gemma3", "mistral"])
def test_quantised_copies_of_any_architecture_stay_close(architecture: str) -> None:
    network = tiny_network(architecture=architecture)
    copied = quantised_copy(network, "int8")
    ids = torch.arange(3, 203)[None]
    agreement = (network(ids).logits.argmax(-1) == copied(ids).logits.argmax(-1)).double().mean()
    assert agreement > 0.6
    assert {p.data_ptr() for p in network.parameters()} & {p.data_ptr() for p in copied.parameters()}


def test_conv1d_layers_are_quantised_by_a_recipe(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "gpt2", architecture="gpt2", dtype=torch.float32)
    loaded = load_models([f"t={folder}", f"q=int8@{folder}"])
    assert {w.dtype for w in loaded["q"].network.transformer.h[0].attn.c_attn.buffers()} == {torch.int8, torch.bfloat16}
    prompt = [70, 71, 72]
    output = generate("t(q:4)", loaded, prompt, max_new_tokens=20, ignore_eos=True)
    assert output.tokens == generate("t", loaded, prompt, max_new_tokens=20, ignore_eos=True).tokens


def test_every_model_may_have_a_type_of_its_own(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    loaded = load_models(
        [f"t={folder}", f"s={folder}", f"k=skip:0@{folder}"],
        dtype={"s": "float32", "k": torch.bfloat16},
        device={"s": "cpu"},
    )
    assert [model.precision for model in loaded.values()] == ["float64", "float32", "bfloat16"]
    prompt = [70, 71, 72]
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        output = generate("t(s:4(k:2))", loaded, prompt, max_new_tokens=20, ignore_eos=True, **options)
        assert len(output.tokens) == 20
    greedy = generate("t(s:4(k:2))", loaded, prompt, max_new_tokens=20)
    assert list(greedy.tokens) == reference(loaded["t"], prompt, 20)
