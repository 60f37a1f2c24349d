"""What needs a CUDA device: greedy output there, timing that waits for it, plans and models over two devices."""

from __future__ import annotations

import warnings
from time import perf_counter
from typing import TYPE_CHECKING

import pytest
import torch
from tiny import CAUSAL, save_tiny, tiny_network, tiny_tokenizer

from hsdopt.plan import LOOKUP
from hsdopt.profiling.cost import measure_costs
from hsdopt.runtime import Model, generate, load_models
from hsdopt.runtime.calm import Confidence, with_exits
from hsdopt.runtime.early_exit import first_layers, shared_sessions
from hsdopt.runtime.lookup import Lookup

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPT = list(range(70, 90))


def on(device: str, architecture: str = "llama") -> dict[str, Model]:
    """A target and two noisy copies on a device, in float64."""
    made = {
        name: Model.of(tiny_network(0, noise=noise, architecture=architecture).to(device), tiny_tokenizer(), name=name)
        for name, noise in (("t", 0.0), ("m", 0.02), ("s", 0.05))
    }
    return {**made, LOOKUP: Model.of_lookup(Lookup(), made["t"])}


@pytest.mark.parametrize("plan", ["t(s:4)", "t(m:5(s:2), lookup:3)"])
@pytest.mark.parametrize("architecture", [*CAUSAL, "t5"])
def test_greedy_output_is_that_of_transformers_and_of_the_cpu(architecture: str, plan: str) -> None:
    models = on("cuda", architecture)
    output = generate(plan, models, PROMPT, max_new_tokens=30)
    ids = torch.tensor([PROMPT], device="cuda")
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    written = models["t"].network.generate(ids, max_new_tokens=30, **options)[0].tolist()
    assert list(output.tokens) == written[len(models["t"].opening(PROMPT)) :]
    assert output.tokens == generate(plan, on("cpu", architecture), PROMPT, max_new_tokens=30).tokens


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 1}])
@pytest.mark.parametrize("places", [("cuda", "cpu"), ("cpu", "cuda")])
def test_models_of_one_plan_on_two_devices(places: tuple[str, str], options: dict[str, float]) -> None:
    target, drafter = places
    models = {**on(drafter), "t": on(target)["t"]}
    for plan in ("t(s:4)", "t(m:4(s:2), lookup:2)"):
        here = generate(plan, models, PROMPT, max_new_tokens=25, **options)
        assert here.tokens == generate(plan, on("cpu"), PROMPT, max_new_tokens=25, **options).tokens


def test_loading_puts_every_model_where_it_is_told(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    loaded = load_models([f"t={folder}", f"s={folder}"], device={"t": "cuda"})
    assert [model.device.type for model in loaded.values()] == ["cuda", "cpu"]


def test_every_model_has_its_own_type(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    names = [f"t={folder}", f"s={folder}"]
    loaded = load_models(names, device="cuda", dtype={"t": "float64", "s": "bfloat16"})
    assert [model.precision for model in loaded.values()] == ["float64", "bfloat16"]
    output = generate("t(s:4)", loaded, PROMPT, max_new_tokens=25)
    assert output.tokens == generate("t", loaded, PROMPT, max_new_tokens=25).tokens


def test_a_target_larger_than_the_device_leaves_a_part_outside(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    inside = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
    loaded = load_models([f"t={folder}"], device_map={**dict.fromkeys(inside, 0), "model.layers.1": "cpu"})
    assert loaded["t"].device == torch.device("cuda", 0)
    models = {**on("cuda"), "t": loaded["t"]}
    for plan in ("t", "t(s:4)"):
        assert generate(plan, models, PROMPT, max_new_tokens=25).tokens == whole_output()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_target_over_two_devices(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    first = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0", "lm_head"), 0)
    names = [f"t={folder}", f"x=exit:1@{folder}", f"c=calm:0.3@{folder}"]
    loaded = load_models(names, device_map={**first, "model.layers.1": 1, "model.norm": 1})
    for plan in ("t", "t(x:3)", "t(c:3)"):
        assert generate(plan, loaded, PROMPT, max_new_tokens=25).tokens == whole_output()


def whole_output() -> tuple[int, ...]:
    return generate("t", on("cpu"), PROMPT, max_new_tokens=25).tokens


def test_confidence_exits() -> None:
    models = {}
    for device in ("cuda", "cpu"):
        made = on(device)
        network = with_exits(made["t"].network)
        made["c"] = Model.of(network, tiny_tokenizer(), name="c", confidence=Confidence(0.2))
        models[device] = made
    for plan in ("c", "t(c:3)"):
        here, there = (generate(plan, models[device], PROMPT, max_new_tokens=25) for device in models)
        assert here.tokens == there.tokens


@pytest.mark.filterwarnings("ignore")  # what compilers say of settings that are not ours
def test_a_compiled_network_writes_the_same(tmp_path: Path) -> None:
    names = [f"t={save_tiny(tmp_path / 'tiny')}", LOOKUP]
    for plan in ("t", "t(lookup:4)"):
        one, other = (
            generate(plan, load_models(names, device="cuda", compile=flag), PROMPT, max_new_tokens=25)
            for flag in (False, True)
        )
        assert one.tokens == other.tokens


def test_an_exit_in_the_cache_of_its_network() -> None:
    models = on("cuda")
    models["x"] = Model.of(first_layers(models["t"].network, 1), tiny_tokenizer(), name="x")
    sessions = shared_sessions(models["t"], models["x"])
    output = generate("t(x:3)", models, PROMPT, max_new_tokens=25, sessions=sessions)
    assert output.tokens == generate("t", models, PROMPT, max_new_tokens=25).tokens


def test_a_timed_pass_includes_the_work_of_the_device() -> None:
    model = on("cuda")["t"]
    weight = torch.ones(8192, 8192, device="cuda")
    work = model.network.lm_head.register_forward_hook(lambda *_: [weight @ weight for _ in range(20)] and None)
    weight @ weight  # the first product loads its kernels
    torch.cuda.synchronize()
    started = perf_counter()
    for _ in range(20):
        weight @ weight
    torch.cuda.synchronize()
    alone = perf_counter() - started
    records = list(measure_costs({"t": model}, tokens=(1, 2), contexts=(4,), repeats=3, text=PROMPT))
    work.remove()
    assert all(record.seconds > 0.5 * alone for record in records)


def test_a_pass_is_over_when_its_clock_stops() -> None:
    session = on("cuda")["t"].network_session()
    session.forward(PROMPT)
    for end in (1, 2, 5):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        started.record()
        session.forward([*PROMPT, *range(60, 60 + end)], end)
        assert torch.cuda.current_stream().query()  # nothing is left to do
        ended.record()
        ended.synchronize()
        # the events stand outside the clock, so that they enclose the same work
        assert session.passes[-1].seconds <= started.elapsed_time(ended) / 1000 + 1e-3


def test_nothing_waits_for_the_device_but_clocks_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    models = on("cuda")
    generate("t(s:4)", models, PROMPT, max_new_tokens=25)
    clocks: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", clocks.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            output = generate("t(s:4)", models, PROMPT, max_new_tokens=25)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    passes = sum(event.kind in ("prefill", "pass") for event in output.events)
    waits = sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)
    assert len(clocks) == 2 * passes  # before and after
    assert 0 < waits <= 2 * passes  # ids go up, the choice comes down
