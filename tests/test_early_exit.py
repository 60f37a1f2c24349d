"""Early exit: the first layers draft, with a cache of their own or in the network's."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import TYPE_CHECKING

import pytest
import torch
from test_decode import check_accounts, reference
from tiny import VOCAB, save_tiny, tiny_model, tiny_network, tiny_tokenizer

from hsdopt.errors import InvalidArgumentError, ModelError
from hsdopt.plan import LOOKUP
from hsdopt.runtime import Model, generate, load_models
from hsdopt.runtime.early_exit import first_layers, shared_sessions
from hsdopt.runtime.lookup import Lookup
from hsdopt.runtime.models import tensor_bytes
from hsdopt.runtime.quantised import without_layers

if TYPE_CHECKING:
    from pathlib import Path

    from hsdopt.runtime import Event

torch.set_num_threads(1)
IDS = torch.arange(3, 43)[None]
ARCHITECTURES = ("llama", "gpt2", "gpt_neox", "gemma3", "mistral")


@lru_cache
def family(architecture: str = "llama") -> dict[str, Model]:
    """A network of four layers whose upper ones change little, and its exit after two."""
    network = tiny_network(architecture=architecture, layers=4)
    for name, weight in network.named_parameters():
        if any(f".{layer}." in name for layer in (2, 3)) and weight.ndim > 1:
            weight.data *= 0.2
    made = {
        "t": Model.of(network, tiny_tokenizer(), name="t"),
        "x": Model.of(first_layers(network, 2), tiny_tokenizer(), name="x"),
    }
    return {LOOKUP: Model.of_lookup(Lookup(), made["t"]), **made}


def test_an_exit_is_the_first_layers_with_norm_and_head_and_no_copies() -> None:
    network = tiny_network(layers=4)
    made = first_layers(network, 3)
    hidden = {}
    network.model.layers[2].register_forward_hook(lambda *call: hidden.update(out=call[2]))
    network(IDS, use_cache=False)
    expected = network.lm_head(network.model.norm(hidden["out"]))
    torch.testing.assert_close(made(IDS, use_cache=False).logits, expected, rtol=0, atol=1e-12)
    assert tensor_bytes([made, network]) == tensor_bytes([network])


@pytest.mark.parametrize("layers", [0, 4, 9])
def test_exits_that_are_none_are_refused(layers: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"expected an exit after 1 to 3 layers; got {layers}"):
        first_layers(tiny_network(layers=4), layers)


def test_recipes(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny", layers=4)
    loaded = load_models([f"t={folder}", f"x=exit:2@{folder}", f"q=exit:1@skip:0@{folder}"])
    assert [model.network.config.num_hidden_layers for model in loaded.values()] == [4, 2, 1]
    assert tensor_bytes([m.network for m in loaded.values()]) == tensor_bytes([loaded["t"].network])
    sessions = shared_sessions(loaded["t"], loaded["x"])
    output = generate("t(x:3)", loaded, [70, 71, 72], max_new_tokens=20, sessions=sessions)
    assert list(output.tokens) == reference(loaded["t"], [70, 71, 72], 20)
    with pytest.raises(InvalidArgumentError, match="expected an exit after 1 to 3 layers; got 4"):
        load_models([f"exit:4@{folder}"])


def test_an_encoder_decoder_exits_from_its_decoder() -> None:
    network = tiny_network(architecture="t5", layers=3)
    models = {
        "t": Model.of(network, tiny_tokenizer(), name="t"),
        "x": Model.of(first_layers(network, 2), tiny_tokenizer(), name="x"),
    }
    assert len(models["x"].network.get_encoder().block) == 2
    plain = generate("t", models, [70, 71, 72], max_new_tokens=20)
    assert generate("t(x:3)", models, [70, 71, 72], max_new_tokens=20).tokens == plain.tokens
    with pytest.raises(ModelError, match="first layers of the decoder-only network t"):
        shared_sessions(models["t"], models["x"])


PLANS = ("t(x:4)", "t(x:3, lookup:3)", "t(x:5(lookup:3))", "t(lookup:4)")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_cache_writes_what_transformers_writes(architecture: str, plan: str) -> None:
    models = family(architecture)
    sessions = {**shared_sessions(models["t"], models["x"]), LOOKUP: models[LOOKUP].session()}
    rng = random.Random(f"{architecture} {plan}")
    for length in (1, 12):
        prompt = [rng.randrange(3, VOCAB) for _ in range(length)]
        output = generate(plan, models, prompt, max_new_tokens=21, sessions=sessions)
        assert list(output.tokens) == reference(models["t"], prompt, 21)
        check_accounts(output)


def fed_by(name: str, events: tuple[Event, ...]) -> set[int]:
    return {event.new_tokens for event in events if event.kind == "pass" and event.model == name}


def test_what_the_whole_network_fed_the_exit_does_not_feed_again() -> None:
    models = family()
    prompt = list(range(70, 90))
    apart = generate("t(x:4)", models, prompt, max_new_tokens=40, ignore_eos=True)
    shared = generate(
        "t(x:4)",
        models,
        prompt,
        max_new_tokens=40,
        ignore_eos=True,
        sessions=(sessions := shared_sessions(models["t"], models["x"])),
    )
    assert shared.tokens == apart.tokens
    assert shared.counters.edges == apart.counters.edges
    assert shared.counters.edges["x", "t"].accepted > 0
    assert fed_by("x", apart.events) == {1, 2}
    assert fed_by("x", shared.events) == {1}
    assert sessions["x"].passes[0].new_tokens == 1  # the prompt was in the cache already


def test_any_order_of_passes_and_crops_scores_as_a_full_pass_does() -> None:
    models = family()
    sessions = shared_sessions(models["t"], models["x"])
    rng = random.Random(0)
    sequence = [5]
    for _ in range(60):
        added = [rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 5))]
        sequence = [*sequence[: rng.randint(1, len(sequence))], *added]
        name = rng.choice("tx")
        if rng.random() < 0.3:
            sessions[rng.choice("tx")].crop(rng.randint(0, len(sequence)))
        scored = rng.randint(1, min(4, len(sequence)))
        with torch.inference_mode():
            whole = models[name].network(torch.tensor([sequence]), use_cache=False).logits[0, -scored:, :VOCAB]
        torch.testing.assert_close(sessions[name].forward(sequence, scored), whole, rtol=0, atol=1e-10)


def test_a_pass_that_fails_leaves_both_sessions_right() -> None:
    models = family()
    for broken in "tx":
        sessions = shared_sessions(models["t"], models["x"])
        right = {name: sessions[name].forward([5, 6, 7]) for name in "tx"}
        with pytest.raises(IndexError):
            sessions[broken].forward([5, 6, 10**6])
        assert sessions["t"].tokens == sessions["x"].tokens == ()
        for name in "xt":
            torch.testing.assert_close(sessions[name].forward([5, 6, 7]), right[name], rtol=0, atol=1e-10)


def test_only_an_exit_shares_a_cache() -> None:
    models = family()
    skipping = Model.of(without_layers(models["t"].network, [0, 1]), tiny_tokenizer(), name="k")
    for other in (skipping, tiny_model(0, name="k"), models["t"], models[LOOKUP]):
        with pytest.raises(ModelError, match=r"expected .* to be the first layers of the decoder-only network t; got"):
            shared_sessions(models["t"], other)
