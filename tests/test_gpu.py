"""What needs a CUDA device: greedy output there, timing that waits for it, plans over two devices."""

from __future__ import annotations

from time import perf_counter

import pytest
import torch
from tiny import CAUSAL, save_tiny, tiny_network, tiny_tokenizer

from hsdopt.plan import LOOKUP
from hsdopt.profiling.cost import measure_costs
from hsdopt.runtime import Model, generate, load_models
from hsdopt.runtime.early_exit import first_layers, shared_sessions
from hsdopt.runtime.lookup import Lookup

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


def test_loading_puts_every_model_where_it_is_told(tmp_path: object) -> None:
    folder = save_tiny(tmp_path / "tiny")
    loaded = load_models([f"t={folder}", f"s={folder}"], device={"t": "cuda"})
    assert [model.device.type for model in loaded.values()] == ["cuda", "cpu"]


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
