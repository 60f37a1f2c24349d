"""Work: operations against PyTorch's own counter, bytes against weights and caches, plans by hand, rooflines."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny import CAUSAL, VOCAB, tiny_network
from torch.utils.flop_counter import FlopCounterMode
from traced import traced_profile
from typer.testing import CliRunner

from hsdopt.acceptance import Traces
from hsdopt.cli.app import app
from hsdopt.errors import InvalidArgumentError, PredictionError, ProfileError
from hsdopt.latency import expected_latency
from hsdopt.plan import LOOKUP, Level, parse_plan
from hsdopt.profiles import ModelInfo, Profile, Shape
from hsdopt.profiling.flops import shape_of
from hsdopt.profiling.measure import model_info
from hsdopt.runtime.encoder_decoder import EncoderDecoderSession
from hsdopt.runtime.model import Model
from hsdopt.runtime.quantised import quantised_copy, without_layers
from hsdopt.runtime.session import Session
from hsdopt.work import HARDWARE, PassWork, estimate_of, pass_work, plan_work, read_hardware, roofline

PROMPT = tuple(range(3, 20))
WIDE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
MIXED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
UNEVEN = {"encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 48}
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**WIDE, num_experts=4, **MIXED),
    "phi3": lambda: transformers.Phi3Config(**WIDE),
    "t5": lambda: transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=3, num_decoder_layers=2
    ),
    "bart": lambda: transformers.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_attention_heads=2, decoder_attention_heads=4, **UNEVEN
    ),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def network_of(architecture: str) -> transformers.PreTrainedModel:
    """A tiny network whose products all go through operators that PyTorch counts."""
    if architecture not in CONFIGS:
        made = tiny_network(architecture=architecture)
    else:
        config = CONFIGS[architecture]()
        kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        made = kind.from_config(config, dtype=torch.float32).eval()
    made.set_attn_implementation("eager")
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")
    return made


def session_of(network: transformers.PreTrainedModel, context: int) -> tuple[Session, list[int]]:
    """A session with `context` tokens in its cache, and a sequence that goes on from there."""
    kind = EncoderDecoderSession if network.config.is_encoder_decoder else Session
    session = kind(network, name="m", vocab_size=VOCAB)
    session.begin(PROMPT)
    sequence = [3 + index % 200 for index in range(200)]
    session.forward(sequence[:context])
    return session, sequence


@pytest.mark.parametrize("architecture", [*CAUSAL, *CONFIGS])
@pytest.mark.parametrize(("tokens", "context", "scored"), [(1, 60, 1), (6, 23, 6), (5, 40, 2)])
def test_operations_are_those_that_pytorch_counts(architecture: str, tokens: int, context: int, scored: int) -> None:
    network = network_of(architecture)
    session, sequence = session_of(network, context)
    with FlopCounterMode(display=False) as counter:
        session.forward(sequence[: context + tokens], n_logits=scored)
    encoded = len(PROMPT) if network.config.is_encoder_decoder else 0
    all_rows = network.config.is_encoder_decoder  # these compute the logits of every position
    info = ModelInfo(source="m", shape=shape_of(network))
    work = pass_work(info, tokens, context, scored=tokens if all_rows else scored, encoded=encoded)
    assert work.flops == pytest.approx(counter.get_total_flops(), rel=1e-12)
    assert not work.approximate


@pytest.mark.parametrize("architecture", CAUSAL)
def test_bytes_are_those_of_weights_and_cache(architecture: str) -> None:
    network = network_of(architecture)
    session, sequence = session_of(network, 30)
    session.forward(sequence[:37])
    cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in session._cache.layers)
    tied = network.get_output_embeddings().weight is network.get_input_embeddings().weight
    tables = [module.weight for module in network.modules() if isinstance(module, torch.nn.Embedding)]
    rows_only = tables[1:] if tied else tables  # of the first the head reads all, if they are one
    weights = sum(weight.nbytes for weight in network.parameters()) - sum(table.nbytes for table in rows_only)
    work = pass_work(ModelInfo(source="m", shape=shape_of(network)), 7, 30)
    assert work.bytes == weights + cached
    assert work.intensity == work.flops / work.bytes


def test_copies_are_counted_as_they_are() -> None:
    network = tiny_network(layers=3, dtype=torch.float32)
    whole, int8 = shape_of(network), shape_of(quantised_copy(network, "int8"))
    less = shape_of(without_layers(network, [1]))
    assert less.layers == 2
    assert less.matrix_parameters * 3 == whole.matrix_parameters * 2
    assert int8.matrix_parameters == whole.matrix_parameters
    assert int8.value_bytes == 2
    linear = whole.matrix_parameters + whole.hidden_size * whole.vocab_size
    assert linear < int8.weight_bytes < 1.3 * linear
    assert whole.weight_bytes >= 4 * linear


def test_a_shape_alone_counts_gated_layers() -> None:
    counted = shape_of(tiny_network(architecture="llama", dtype=torch.float32))
    named = counted.model_copy(update={"matrix_parameters": None, "weight_bytes": None})
    works = [pass_work(ModelInfo(source="m", shape=shape), 4, 9) for shape in (counted, named)]
    assert works[0].flops == works[1].flops
    vectors = counted.weight_bytes - 4 * (counted.matrix_parameters + counted.hidden_size * counted.vocab_size)
    assert works[0].bytes - works[1].bytes == vectors  # of norms


def test_experts_that_no_token_goes_to_are_not_read() -> None:
    shape = shape_of(network_of("mixtral"))
    pairs = list(combinations(range(4), 2))
    used = np.mean([len(set().union(*chosen)) / 4 for chosen in product(pairs, repeat=3)])
    works = [pass_work(ModelInfo(source="m", shape=shape), 3, 0), pass_work(ModelInfo(source="m", shape=shape), 500, 0)]
    cache = [2 * shape.layers * shape.kv_heads * shape.head_dim * shape.value_bytes * n for n in (3, 500)]
    saved = shape.weight_bytes - (works[0].bytes - cache[0])
    assert saved == pytest.approx((1 - used) * shape.expert_parameters * 4, rel=0.02)  # weights are not all matrices
    assert works[1].bytes - cache[1] == pytest.approx(shape.weight_bytes)


def test_without_a_shape_the_work_is_approximate() -> None:
    info = ModelInfo(source="m", parameters=1000, bytes=4000)
    assert pass_work(info, 3, 77) == PassWork(6000.0, 4000.0, approximate=True)
    assert pass_work(ModelInfo(source="lookup", kind=LOOKUP), 3, 77) == PassWork(0.0, 0.0)
    with pytest.raises(PredictionError, match="profile the model again"):
        pass_work(ModelInfo(source="m", bytes=100), 1, 0)
    with pytest.raises(InvalidArgumentError, match="tokens"):
        pass_work(info, 0, 0)


# --- plans --------------------------------------------------------------------------------------------------


BIG = Shape(layers=4, hidden_size=64, intermediate_size=128, heads=4, kv_heads=2, head_dim=16, vocab_size=500)
SMALL = Shape(layers=2, hidden_size=32, intermediate_size=64, heads=2, kv_heads=1, head_dim=16, vocab_size=500)
INFOS = {"big": ModelInfo(source="big", shape=BIG), "small": ModelInfo(source="small", shape=SMALL)}


def given_by_hand(rate: float = 0.5) -> Profile:
    rates = {("small", "big"): rate, (LOOKUP, "big"): 0.4, (LOOKUP, "small"): 0.4}
    made = Profile.from_rates("big", {LOOKUP: 0.001, "small": 0.1, "big": 1.0}, rates)
    return replace(made, models=INFOS)


def test_a_plan_is_the_sum_of_its_passes() -> None:
    big, small = INFOS["big"], INFOS["small"]
    work = plan_work(parse_plan("big(small:2)"), given_by_hand(), context=100)
    verify = pass_work(big, 3, 100)
    # the first draft token takes in two tokens after a fully accepted draft, half times half of all rounds
    first = [pass_work(small, tokens, 100, scored=1) for tokens in (1, 2)]
    for what in ("flops", "bytes"):
        drafting = getattr(first[0], what) * 1.75 + getattr(first[1], what) * 0.25
        expected = (getattr(verify, what) + drafting) / 1.75
        assert getattr(work, f"{what}_per_token") == pytest.approx(expected, rel=1e-12)
        alone = getattr(pass_work(big, 1, 100), what)
        assert getattr(work, f"{what}_relative") == pytest.approx(expected / alone, rel=1e-12)
    assert work.intensity == pytest.approx(work.flops_per_token / work.bytes_per_token)
    assert work.intensity_relative > 1


def test_autoregression_is_the_measure() -> None:
    work = plan_work(Level("big"), given_by_hand())
    assert (work.flops_relative, work.bytes_relative, work.intensity_relative) == (1.0, 1.0, 1.0)


def test_a_lookup_drafter_moves_nothing_itself() -> None:
    profile = given_by_hand()
    work = plan_work(parse_plan("big(lookup:4)"), profile, context=10)
    passes = expected_latency(parse_plan("big(lookup:4)"), profile).passes
    own = sum(n * pass_work(INFOS["big"], k, 10).flops for (name, k), n in passes.items() if name == "big")
    assert work.flops_per_token == pytest.approx(own)
    assert work.bytes_relative < 1 < work.flops_relative


def test_what_a_profile_cannot_know_is_refused() -> None:
    with pytest.raises(PredictionError, match="given by hand"):
        plan_work(Level("big"), Profile.from_rates("big", {"big": 1.0}, {}))
    with pytest.raises(PredictionError, match="nobody"):
        plan_work(parse_plan("big(nobody:2)"), given_by_hand())


def t5(layers: int, width: int, heads: int) -> ModelInfo:
    """The decoder of a T5 model, from its published sizes."""
    inner, inside = heads * 64, 4 * width
    shape = Shape(
        layers=layers,
        hidden_size=width,
        intermediate_size=inside,
        heads=heads,
        kv_heads=heads,
        head_dim=64,
        vocab_size=32128,
        matrix_parameters=layers * (6 * width * inner + 2 * width * inside),
        value_bytes=4,
    )
    return ModelInfo(source="t5", shape=shape)


def test_big_little_decoder_moves_what_was_published() -> None:
    published = json.loads((Path(__file__).parent / "data" / "published.json").read_text())["bild_2023_hardware"]
    every = 8  # one free number: tokens from one fallback to the next
    size = 40 * every
    doubtful = np.arange(size) % every == every - 1
    tokens = np.zeros(size, dtype=np.int64)
    traces = Traces(
        tokens,
        np.zeros(size, dtype=np.int64),
        np.arange(size),
        {"small": tokens, "large": tokens},
        top={"small": np.where(doubtful, 0.1, 0.9)},
        surprise={("small", "large"): np.zeros(size)},
    )
    made = Profile.from_rates("large", {"small": 0.1, "large": 1.0}, {})
    profile = replace(made, models={"small": t5(6, 512, 8), "large": t5(24, 1024, 16)}, traces=traces)
    work = plan_work(parse_plan("bild(large, small, fallback=0.5)"), profile, context=60)
    assert work.bytes_relative == pytest.approx(published["memory_operations"], rel=0.05)
    assert work.flops_relative == pytest.approx(published["flops"], rel=0.05)
    assert work.intensity_relative == pytest.approx(published["arithmetic_intensity"], rel=0.05)


# --- rooflines ----------------------------------------------------------------------------------------------


def test_a_roofline_is_the_slower_of_the_two() -> None:
    measured = traced_profile(0, prompts=4)
    sized = {name: info.model_copy(update={"shape": BIG}) for name, info in measured.models.items() if name != LOOKUP}
    profile = replace(measured, models={**measured.models, **sized})
    estimate = roofline(profile, flops_per_second=8e9, bytes_per_second=1e9, overhead_seconds=1e-3)
    info, sides = sized["big"], set()
    for tokens in range(1, 41):
        for context in (32, 256):
            work = pass_work(info, tokens, context)
            sides.add(work.flops > 8 * work.bytes)
            seconds = max(work.flops / 8e9, work.bytes / 1e9) + 1e-3
            assert estimate.cost("big")(tokens, context) == pytest.approx(seconds, rel=1e-12)
    assert estimate.cost(LOOKUP) == measured.cost(LOOKUP)
    assert sides == {True, False}
    assert estimate.traces is profile.traces


def test_an_estimate_says_so_and_is_not_saved(tmp_path: Path) -> None:
    profile = given_by_hand()
    estimate = roofline(profile, flops_per_second=312e12, bytes_per_second=2.039e12, name="A100")
    assert estimate_of(profile) is None
    rates = "roofline of A100: 3.12e+14 FLOP/s, 2.039e+12 B/s, at least 10 kernel launches of 5 us per layer and pass"
    assert estimate_of(estimate) == f"{rates}, weights as profiled; not measured, a lower bound"
    with pytest.raises(ProfileError, match="expected a measured profile to save"):
        estimate.save(tmp_path / "profile.json")
    for name, value in (("flops_per_second", 0.0), ("bytes_per_second", -1.0), ("overhead_seconds", -1.0)):
        rates = {"flops_per_second": 1.0, "bytes_per_second": 1.0, name: value}
        with pytest.raises(InvalidArgumentError, match=name):
            roofline(profile, **rates)


def test_memory_bound_passes_cost_the_same_until_the_ridge() -> None:
    info = ModelInfo(source="big", parameters=1000, bytes=2000)
    profile = replace(Profile.from_rates("big", {"big": 1.0}, {}), models={"big": info})
    curve = roofline(profile, flops_per_second=1e4, bytes_per_second=1e3).cost("big")
    assert curve.table(12).tolist() == pytest.approx([2.0] * 10 + [2.2, 2.4])


def test_hardware_has_a_name_or_numbers() -> None:
    assert read_hardware("rtx4090") == (165e12, 1.008e12, None, "RTX4090")
    assert read_hardware("1e12,2e11, 1e-4")[:3] == (1e12, 2e11, 1e-4)
    assert all(rates.flops_per_second > 100 * rates.bytes_per_second for rates in HARDWARE.values())
    for wrong in ("B300", "1e12", "1,2,3,4", ""):
        with pytest.raises(InvalidArgumentError, match="expected hardware out of A100, H100"):
            read_hardware(wrong)


# --- files and command line ---------------------------------------------------------------------------------


def test_profiles_keep_shapes_and_old_ones_load(tmp_path: Path) -> None:
    network = tiny_network()
    info = model_info(Model.of(network, None, name="big"))
    assert info.shape == shape_of(network)
    measured = traced_profile(0, prompts=4)
    path = tmp_path / "profile.json"
    replace(measured, models={**measured.models, "big": info}).save(path)
    assert Profile.load(path).models["big"] == info
    stored = json.loads(path.read_text())
    for model in stored["models"].values():
        del model["shape"]
    path.write_text(json.dumps(stored))
    loaded = Profile.load(path)
    assert loaded.models["big"].shape is None
    assert pass_work(loaded.models["big"], 1, 50).approximate


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    measured = traced_profile(1, prompts=8)
    sizes = {"int8": SMALL, "int4": SMALL, "skip": SMALL, "big": BIG}
    models = {
        name: info if name == LOOKUP else info.model_copy(update={"shape": sizes[name]})
        for name, info in measured.models.items()
    }
    saved = tmp_path_factory.mktemp("profiles") / "profile.json"
    replace(measured, models=models).save(saved)
    return saved


def solved(*arguments: str | Path, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["solve", *map(str, arguments)], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def test_solve_prints_work(path: Path) -> None:
    text, _ = solved(path, "--replicates", "0", "--closed-form", "--family", "hierarchy")
    assert "FLOPs x" in text
    assert "bytes x" in text
    assert max(map(len, text.splitlines())) <= 100
    alone = next(line for line in text.splitlines() if line.startswith("autoregression"))
    assert alone.split()[-2:] == ["1.00", "1.00"]
    assert "estimate" not in text
    answer = json.loads(solved(path, "--replicates", "0", "--closed-form", "--family", "hierarchy", "--json")[0])
    assert answer["estimate"] is None
    work = plan_work(parse_plan(answer["plan"]), Profile.load(path))
    assert answer["work"]["bytes_relative"] == pytest.approx(work.bytes_relative)
    assert answer["work"]["intensity"] == pytest.approx(work.intensity)
    assert all(row["work"]["flops_relative"] > 0 for row in answer["runners_up"])


def test_solve_on_other_hardware_says_estimate(path: Path) -> None:
    options = (path, "--replicates", "0", "--family", "speculative", "--hardware")
    text, warned = solved(*options, "A100")
    assert text.startswith("estimate: ")
    assert "warning: costs are an estimate, roofline of A100" in warned.replace("\n", " ")
    slow = json.loads(solved(*options, "1e9,1e6", "--json")[0])
    quick = json.loads(solved(*options, "1e12,1e9", "--json")[0])
    assert "not measured" in quick["estimate"]
    ratio = slow["autoregression"]["seconds_per_token"] / quick["autoregression"]["seconds_per_token"]
    assert ratio == pytest.approx(1000, rel=1e-6)
    big = Profile.load(path).models["big"]
    work = pass_work(big, 1, Profile.load(path).context)
    assert quick["autoregression"]["closed_form_seconds_per_token"] == pytest.approx(work.bytes / 1e9, rel=1e-9)
    stdout, stderr = solved(*options, "abacus", code=2)
    assert not stdout
    assert "expected hardware out of A100" in stderr


def test_solve_leaves_out_work_that_is_not_known(tmp_path: Path) -> None:
    saved = tmp_path / "profile.json"
    traced_profile(1, prompts=8).save(saved)
    text, _ = solved(saved, "--replicates", "0", "--closed-form", "--family", "speculative")
    assert "FLOPs" not in text
    solved(saved, "--hardware", "H100", code=2)
