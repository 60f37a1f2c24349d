"""Confidence exits: which layers run, what the skipped ones hold, and that nothing is lost behind a verifier."""

from __future__ import annotations

import json
import random
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import pytest
import torch
from test_decode import check_accounts, reference
from tiny import CAUSAL, VOCAB, save_tiny, tiny_model, tiny_network, tiny_tokenizer
from transformers import DynamicCache
from typer.testing import CliRunner

from hsdopt.cli.app import app
from hsdopt.errors import CacheError, InvalidArgumentError, ModelError
from hsdopt.plan import LOOKUP
from hsdopt.runtime import Model, generate, load_models
from hsdopt.runtime.calm import CalmSession, Confidence, with_exits
from hsdopt.runtime.early_exit import first_layers, shared_sessions
from hsdopt.runtime.lookup import Lookup
from hsdopt.runtime.models import tensor_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from hsdopt.runtime.calm import Measure

torch.set_num_threads(1)
PROMPT = list(range(70, 82))
SOME = ("llama", "gpt2", "gpt_neox", "gemma3")
MEASURES: tuple[Measure, ...] = ("softmax", "similarity")


@lru_cache
def network(architecture: str = "llama") -> PreTrainedModel:
    """Four layers, of which the upper two change little."""
    made = tiny_network(architecture=architecture, layers=4)
    for name, weight in made.named_parameters():
        if any(f".{layer}." in name for layer in (2, 3)) and weight.ndim > 1:
            weight.data *= 0.2
    return made


def calm(threshold: float, measure: Measure = "softmax", architecture: str = "llama", name: str = "c") -> Model:
    confidence = Confidence(threshold, measure)
    return Model.of(with_exits(network(architecture)), tiny_tokenizer(), name=name, confidence=confidence)


def whole(architecture: str = "llama") -> Model:
    return Model.of(network(architecture), tiny_tokenizer(), name="t")


def session_of(model: Model) -> CalmSession:
    session = model.session()
    assert isinstance(session, CalmSession)
    return session


def stepwise(plain: PreTrainedModel, sequence: list[int], prompt: int) -> torch.Tensor:
    """Logits of a plain network from the prompt's end on, fed token by token: some round by the shape of a pass."""
    session = Model.of(plain, tiny_tokenizer(), name="plain").network_session()
    return torch.cat([session.forward(sequence[:end]) for end in range(prompt, len(sequence) + 1)])


def sequence_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("architecture", CAUSAL)
def test_a_threshold_above_one_is_the_whole_network(architecture: str, measure: Measure) -> None:
    model = calm(1.1, measure, architecture)
    sequence = sequence_of(20)
    session = session_of(model)
    scored = session.forward(sequence, 12)
    torch.testing.assert_close(scored, stepwise(network(architecture), sequence, 9), rtol=0, atol=1e-9)
    assert session.layers_used == [4] * 11
    output = generate("c", {"c": model}, PROMPT, max_new_tokens=8)
    assert list(output.tokens) == reference(whole(architecture), PROMPT, 8)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("architecture", CAUSAL)
def test_a_threshold_of_zero_is_an_exit_behind_the_first_layer(architecture: str, measure: Measure) -> None:
    sequence = sequence_of(20)
    session = session_of(calm(0.0, measure, architecture))
    scored = session.forward(sequence, 12)
    expected = stepwise(first_layers(network(architecture), 1), sequence, 9)
    torch.testing.assert_close(scored[1:], expected[1:], rtol=0, atol=1e-9)
    prompt = stepwise(network(architecture), sequence[:9], 9)  # which runs through all layers
    torch.testing.assert_close(scored[:1], prompt, rtol=0, atol=1e-9)
    assert session.layers_used == [1] * 11


class ByHand:
    """A llama with confidence exits, written out: one token at a time, keys and values in plain lists."""

    def __init__(self, llama: PreTrainedModel, confidence: Confidence, prompt: list[int]) -> None:
        self.llama, self.confidence = llama, confidence
        cache = DynamicCache()
        llama(torch.tensor([prompt]), cache=cache, use_cache=True)
        self.keys = [list(layer.keys[0].unbind(1)) for layer in cache.layers]  # of one token: [heads, head_dim]
        self.values = [list(layer.values[0].unbind(1)) for layer in cache.layers]
        self.used: list[int] = []

    def feed(self, token: int) -> torch.Tensor:
        hidden = self.llama.model.embed_tokens.weight[token]
        exited = 0
        for index, layer in enumerate(self.llama.model.layers):
            self._store(index, layer, hidden)
            if exited:
                continue
            given, hidden = hidden, self._layer(index, layer, hidden)
            if self._sure(given, hidden):
                exited = index + 1
        self.used.append(exited or len(self.llama.model.layers))
        return self._logits(hidden)

    def _store(self, index: int, layer: torch.nn.Module, hidden: torch.Tensor) -> None:
        normed = layer.input_layernorm(hidden)
        key = self._rotated(layer.self_attn.k_proj(normed).view(2, 8), len(self.keys[index]))
        self.keys[index].append(key)
        self.values[index].append(layer.self_attn.v_proj(normed).view(2, 8))

    def _layer(self, index: int, layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        place = len(self.keys[index]) - 1
        query = self._rotated(layer.self_attn.q_proj(layer.input_layernorm(hidden)).view(4, 8), place)
        keys, values = (torch.stack(kept, 1).repeat_interleave(2, 0) for kept in (self.keys[index], self.values[index]))
        weights = torch.softmax((keys @ query[..., None])[..., 0] / 8**0.5, dim=-1)  # [heads, tokens]
        hidden = hidden + layer.self_attn.o_proj((weights[:, None] @ values).flatten())
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def _rotated(self, states: torch.Tensor, place: int) -> torch.Tensor:
        angles = place * self.llama.model.rotary_emb.inv_freq.float()
        cosine, sine = angles.cos().double(), angles.sin().double()  # the network takes them in float32 too
        real, imaginary = states[:, :4], states[:, 4:]
        return torch.cat((real * cosine - imaginary * sine, imaginary * cosine + real * sine), -1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.llama.lm_head(self.llama.model.norm(hidden))

    def _sure(self, given: torch.Tensor, hidden: torch.Tensor) -> bool:
        if self.confidence.measure == "softmax":
            largest = torch.softmax(self._logits(hidden), -1).sort().values
            return bool(largest[-1] - largest[-2] >= self.confidence.threshold)
        return bool(given @ hidden / (given.norm() * hidden.norm()) >= self.confidence.threshold)


@pytest.mark.parametrize("confidence", [Confidence(0.05, "softmax"), Confidence(0.6, "similarity")])
def test_skipped_layers_hold_what_the_copied_hidden_state_gives(confidence: Confidence) -> None:
    sequence = sequence_of(30, seed=3)
    session = session_of(calm(confidence.threshold, confidence.measure))
    with torch.inference_mode():
        hand = ByHand(network(), confidence, sequence[:6])
        session.forward(sequence[:6])
        for end in range(7, 31):
            expected = hand.feed(sequence[end - 1])
            torch.testing.assert_close(session.forward(sequence[:end])[0], expected, rtol=0, atol=1e-9)
    assert session.layers_used == hand.used
    assert len(set(hand.used)) > 1
    assert min(hand.used) < 4
    for layer, keys, values in zip(session._cache.layers, hand.keys, hand.values, strict=True):
        torch.testing.assert_close(layer.keys[0], torch.stack(keys, 1), rtol=0, atol=1e-9)
        torch.testing.assert_close(layer.values[0], torch.stack(values, 1), rtol=0, atol=1e-9)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("architecture", SOME)
def test_the_way_of_feeding_changes_nothing(architecture: str, measure: Measure) -> None:
    model = calm(0.3 if measure == "softmax" else 0.85, measure, architecture)
    sequence = sequence_of(24, seed=1)
    steps, jumps, once = (session_of(model) for _ in range(3))
    scored = once.forward(sequence, 19)
    one_by_one = torch.cat([steps.forward(sequence[:end]) for end in range(6, 25)])
    torch.testing.assert_close(one_by_one, scored, rtol=0, atol=1e-10)
    assert steps.layers_used == once.layers_used
    jumps.forward(sequence[:6])
    jumps.forward([*sequence[:9], 5, 5, 5], 2)
    jumps.forward(sequence[:14])
    torch.testing.assert_close(jumps.forward(sequence, 12), scored[-12:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("plan", ["t(c:4)", "t(c:4(lookup:3))", "t(c:3, lookup:3)"])
@pytest.mark.parametrize("architecture", SOME)
def test_a_verifier_loses_nothing(architecture: str, plan: str) -> None:
    for confidence in (Confidence(0.2), Confidence(0.9, "similarity")):
        target = whole(architecture)
        drafter = calm(confidence.threshold, confidence.measure, architecture)
        models = {"t": target, "c": drafter, LOOKUP: Model.of_lookup(Lookup(), target)}
        output = generate(plan, models, PROMPT, max_new_tokens=21)
        assert list(output.tokens) == reference(target, PROMPT, 21)
        check_accounts(output)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}])
def test_lookup_drafts_do_not_change_what_a_lossy_target_writes(options: dict[str, float]) -> None:
    model = calm(0.1)
    models = {"c": model, LOOKUP: Model.of_lookup(Lookup(), model)}
    alone, drafted = (
        generate(plan, models, PROMPT * 2, max_new_tokens=30, ignore_eos=True, **options)
        for plan in ("c", "c(lookup:4)")
    )
    if not options:
        assert drafted.tokens == alone.tokens
        assert drafted.tokens != generate("t", {"t": whole()}, PROMPT * 2, max_new_tokens=30, ignore_eos=True).tokens
    assert drafted.counters.edges[LOOKUP, "c"].drafted > 0


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("architecture", SOME)
def test_fewer_layers_run_the_lower_the_threshold(architecture: str, measure: Measure) -> None:
    means = []
    for threshold in (0.0, 0.1, 0.3, 0.9, 1.1):
        session = session_of(calm(threshold, measure, architecture))
        session.forward(sequence_of(30, seed=2), 25)
        means.append(session.mean_layers)
    assert means == sorted(means)
    assert means[0] == 1
    assert means[-1] == 4
    assert len(set(means)) > 2


def test_padded_rows_lend_no_confidence() -> None:
    padded = tiny_network(architecture="qwen2", vocab=VOCAB + 8, layers=3)
    padded.lm_head.weight.data[VOCAB:] = 50 * padded.lm_head.weight.data[:8]
    model = Model.of(with_exits(padded), tiny_tokenizer(), name="c", confidence=Confidence(0.5))
    assert model.vocab_size == VOCAB
    session = session_of(model)
    session.forward(sequence_of(30), 25)
    assert session.mean_layers > 2


def test_a_pass_that_fails_leaves_an_empty_session() -> None:
    session = session_of(calm(0.2))
    right = session.forward(sequence_of(8), 3)
    with pytest.raises(IndexError):
        session.forward([*sequence_of(8), 5, 10**6])
    assert session.tokens == ()
    torch.testing.assert_close(session.forward(sequence_of(8), 3), right, rtol=0, atol=1e-10)


def test_a_session_serves_one_prompt_after_another() -> None:
    models = {"c": calm(0.2)}
    sessions = {"c": models["c"].session()}
    for start in (70, 90, 70):
        prompt = list(range(start, start + 9))
        kept = generate("c", models, prompt, max_new_tokens=12, sessions=sessions)
        assert kept.tokens == generate("c", models, prompt, max_new_tokens=12).tokens


def test_recipes_share_all_weights(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny", layers=4)
    names = [f"t={folder}", f"c=calm:0.3@{folder}", f"s=calm:0.9,similarity@exit:3@{folder}"]
    loaded = load_models(names)
    assert tensor_bytes([model.network for model in loaded.values()]) == tensor_bytes([loaded["t"].network])
    assert [model.parameters for model in loaded.values()][:2] == [loaded["t"].parameters] * 2
    assert loaded["s"].confidence == Confidence(0.9, "similarity")
    output = generate("t(c:4, s:2)", loaded, PROMPT, max_new_tokens=20)
    assert list(output.tokens) == reference(loaded["t"], PROMPT, 20)
    with pytest.raises(ModelError, match="expected c to be the first layers"):
        shared_sessions(loaded["t"], loaded["c"])


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("calm:0.5,cosine", "expected one of softmax, similarity as measure of confidence; got 'cosine'"),
        ("calm:-1", r"expected a confidence threshold of at least 0; got -1\.0"),
        ("calm:nan", "expected a confidence threshold of at least 0; got nan"),
        ("calm:much", r"expected calm:THRESHOLD\[,MEASURE\]@SOURCE; got calm:much"),
        ("exit:1@calm:0.5", "expected calm: before every other recipe; got exit:1@calm:0.5@"),
    ],
)
def test_bad_recipes(tmp_path: Path, recipe: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        load_models([f"c={recipe}@{save_tiny(tmp_path / 'tiny')}"])


def test_other_architectures_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="exits; T5ForConditionalGeneration is an encoder-decoder: use exit"):
        with_exits(tiny_network(architecture="t5"))
    with pytest.raises(CacheError, match="MambaForCausalLM"):
        with_exits(tiny_network(architecture="mamba"))
    odd = tiny_network()
    odd.model.layers[1].forward = partial(_cacheless, odd.model.layers[1].forward)
    with pytest.raises(ModelError, match="LlamaForCausalLM has layers that do not write to the cache they are given"):
        with_exits(odd)


def _cacheless(forward: partial[torch.Tensor], hidden: torch.Tensor, **options: object) -> torch.Tensor:
    return forward(hidden, **{**options, "cache": None, "attention_mask": None})


def test_called_without_a_session_nothing_exits() -> None:
    ids = torch.tensor([sequence_of(12)])
    made = with_exits(network())
    torch.testing.assert_close(made(ids).logits, network()(ids).logits, rtol=0, atol=0)
    written = made.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(written, network().generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0))


def test_the_command_reports_mean_layers(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny", layers=4)
    arguments = ["generate", "--plan", "t(c:3)", "--prompt", "Say it.", "--max-new-tokens", "12"]
    arguments += ["--draft", f"t={folder}", "--draft", f"c=calm:0@{folder}"]
    shown = CliRunner().invoke(app, [*arguments, "--stats"], catch_exceptions=False)
    assert "c: 1.00 of 4 layers per token" in shown.stderr
    value = json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert value["models"]["c"]["mean_layers"] == 1
    assert "mean_layers" not in value["models"]["t"]


def test_models_without_confidence_open_other_sessions() -> None:
    assert not isinstance(tiny_model().session(), CalmSession)
