"""`torch.compile` behind a flag: the same tokens, few compilations, and one line where it cannot."""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_network, tiny_tokenizer

from hsdopt.errors import InvalidArgumentError, ModelError
from hsdopt.plan import LOOKUP
from hsdopt.runtime import Model, generate, load_models
from hsdopt.runtime.calm import Confidence, with_exits
from hsdopt.runtime.lookup import Lookup

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

torch.set_num_threads(1)
PROMPTS = (list(range(70, 82)), [80, 81, 82] * 6)

# what importing the compiler deprecates in itself
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Trace as torch.compile does, and run the traces as they are, without a C++ compiler; returns the traces."""
    made: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return made


def same_output(plan: str, plain: dict[str, Model], compiled: dict[str, Model], **options: float) -> None:
    for prompt in PROMPTS:
        run = partial(generate, plan, prompt=prompt, max_new_tokens=20, ignore_eos=True, **options)
        one, other = run(models=plain), run(models=compiled)
        assert other.tokens == one.tokens
        assert other.counters.edges == one.counters.edges


def test_caches_that_grow_and_are_cropped_are_compiled_once_per_kind_of_pass(tmp_path: Path, graphs: list[Any]) -> None:
    folder = str(save_tiny(tmp_path / "tiny", layers=1))
    plain, compiled = (load_models([f"t={folder}", LOOKUP], compile=flag) for flag in (False, True))
    same_output("t(lookup:4)", plain, compiled)
    assert 1 <= len(graphs) <= 3  # one token, several, and what the first trace took for a constant
    same_output("t(lookup:4)", plain, compiled, temperature=0.8, seed=3)
    assert len(graphs) <= 3


def test_encoder_decoders_compile_too(graphs: list[Any]) -> None:
    target = tiny_model(architecture="t5", layers=1)
    plain = {"t": target, LOOKUP: Model.of_lookup(Lookup(), target)}
    same_output("t(lookup:4)", plain, {**plain, "t": target.with_compiler()})
    assert graphs


def test_what_cannot_be_compiled_runs_as_it_is(graphs: list[Any]) -> None:
    exits = Model.of(with_exits(tiny_network()), tiny_tokenizer(), name="c", confidence=Confidence(0.3))
    lookup = Model.of_lookup(Lookup(), exits)
    assert exits.with_compiler() is exits
    assert lookup.with_compiler() is lookup
    assert not graphs


def test_a_compiler_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(*_: object) -> Callable[..., Any]:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    session = tiny_model(layers=1).with_compiler().session()
    session.forward([5, 6, 7])
    with pytest.raises(ModelError, match=r"^tiny: expected a network that torch.compile takes; .*without compile$"):
        session.forward([5, 6, 7, 8])
    assert session.tokens == ()


def test_a_device_map_does_not_compile(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="expected device_map or compile, not both"):
        load_models([str(save_tiny(tmp_path / "tiny"))], device_map="auto", compile=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_compiled_networks_write_the_same(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny", layers=2)
    names = [f"t={folder}", f"q=int8@{folder}", LOOKUP]
    plain, compiled = (load_models(names, compile=flag) for flag in (False, True))
    for plan in ("t(lookup:4)", "t(q:3)"):  # fused, bfloat16 rounds otherwise: the drafts of q may differ
        tokens = [generate(plan, models, PROMPTS[0], max_new_tokens=20).tokens for models in (plain, compiled)]
        assert tokens[0] == tokens[1]
