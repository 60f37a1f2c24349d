"""Alignment: calibration data, what is trained, and that it ends the same when it is broken off."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from stack import call, refused
from test_decode import reference
from tiny import EOS, VOCAB, save_tiny, tiny_model, tiny_network, tiny_tokenizer
from transformers import AutoModelForCausalLM

from hsdopt.cli.align_train import _some
from hsdopt.errors import HsdoptError, InvalidArgumentError, ModelError
from hsdopt.profiling.journal import Journal
from hsdopt.runtime import Model, generate, load_models
from hsdopt.runtime.alignment import Agreement, Recipe, align
from hsdopt.runtime.calibration import Batch, Calibration, Example, Turn, batches, calibrate, split
from hsdopt.runtime.drafters import save_drafter
from hsdopt.runtime.heads import frequent_tokens, shrink_head, whole_head
from hsdopt.runtime.hidden import scored
from hsdopt.runtime.layer_choice import choose_layers
from hsdopt.runtime.models import tensor_bytes
from hsdopt.runtime.quantised import quantised_copy, without_layers
from hsdopt.runtime.students import FULL, Students, agreements, drafter, frozen_exits, joint_exits

if TYPE_CHECKING:
    from collections.abc import Sequence

torch.set_num_threads(1)
MANY = [[3 + (7 * index + 11 * place) % (VOCAB - 3) for place in range(3 + index % 7)] for index in range(60)]
PROMPTS = MANY[:40]
DATA = Calibration(samples=2, temperature=1.0, spans=1, max_new_tokens=16, top=8, batch=16)
FAST: dict[str, Any] = {"steps": 40, "learning_rate": 2e-3, "evaluate_every": 20, "warmup": 5}


@lru_cache
def target() -> Model:
    return tiny_model(0, name="t", layers=4)


@lru_cache
def data() -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    train, held_out = split(calibrate(target(), PROMPTS, DATA), share=0.2, seed=0)
    return tuple(train), tuple(held_out)


def noisy() -> Students:
    """A copy of the target with noise, which has lost most of its agreement."""
    return drafter(tiny_network(0, noise=0.06, layers=4))


def rate(students: Students, examples: Sequence[Example], name: str = "drafter") -> float:
    pairs = agreements(students, examples)[name]
    return sum(agreed for agreed, _ in pairs) / sum(places for _, places in pairs)


def logits_of(network: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return network(torch.arange(3, 43)[None], use_cache=False).logits


class Stopped(Exception):  # noqa: N818 - no error
    """Breaks a training off."""


def stop_at(step: int) -> Any:  # noqa: ANN401 - a callback
    def progress(stage: str, done: int, total: int) -> None:
        if stage == "training" and done == step:
            raise Stopped

    return progress


def test_outputs_are_those_of_the_runtime() -> None:
    written = calibrate(target(), PROMPTS[:4], Calibration(max_new_tokens=16, batch=3, top=4))
    for example in written:
        prompt = list(example.tokens[: example.start])
        assert prompt == PROMPTS[example.group]
        assert list(example.tokens[example.start :]) == reference(target(), prompt, 16)
        assert example.best == example.tokens[example.start :]
        assert example.top is not None
        assert example.top[0][:, 0].tolist() == list(example.best)


def test_best_and_top_of_samples_are_the_targets_own() -> None:
    sampled = [example for example in data()[0] if example.kind == "sampled"]
    assert any(example.best != example.tokens[example.start :] for example in sampled)
    part = Batch.of(sampled[:6], torch.device("cpu"))
    with torch.inference_mode():
        log = scored(target().network, part).log_softmax(-1)
    assert part.top is not None
    assert log.argmax(-1).tolist() == part.best.tolist()
    values, ids = log.topk(8)
    assert (ids == part.top[0]).float().mean() > 0.99
    torch.testing.assert_close(values, part.top[1].double(), rtol=0, atol=2e-4)


def test_calibration_that_broke_off_continues_with_the_same_outputs(tmp_path: Path) -> None:
    whole = calibrate(target(), PROMPTS[:7], DATA)
    journal = Journal(tmp_path / "data.jsonl", {"of": 1}, resume=True)

    class Cut:
        records: list[dict[str, Any]] = journal.records
        read = journal.read

        def add(self, **record: Any) -> None:  # noqa: ANN401
            if len(self.records) == 10:  # in the middle of a batch
                raise Stopped
            journal.add(**record)

    with pytest.raises(Stopped):
        calibrate(target(), PROMPTS[:7], DATA, journal=Cut())
    again = Journal(tmp_path / "data.jsonl", {"of": 1}, resume=True)
    assert len(again.records) == 10
    resumed = calibrate(target(), PROMPTS[:7], DATA, journal=again)
    assert [(e.group, e.tokens, e.best) for e in resumed] == [(e.group, e.tokens, e.best) for e in whole]
    assert len(Journal(tmp_path / "data.jsonl", {"of": 1}, resume=True).records) == len(whole) == 21


TURN = Turn((7, 8), (100, 9))
OWN = Calibration(own_prompts=20, max_new_tokens=8, batch=8, top=4)


def test_the_target_writes_prompts_of_its_own() -> None:
    written = calibrate(target(), PROMPTS[:3], OWN, turn=TURN)
    openings = [e for e in written if e.kind == "prompt"]
    assert [e.group for e in openings] == list(range(3, 23))
    assert all(e.tokens[: e.start] == TURN.opening for e in openings)
    answered = {e.group: e.tokens[: e.start] for e in written if e.kind == "greedy"}
    whole = {e.group: e.tokens for e in openings if e.tokens[-1] in {EOS, TURN.closing[0]} and e.outputs > 1}
    assert whole
    assert len(whole) < len(openings)  # some did not end, and are not used
    assert answered == {n: tuple(prompt) for n, prompt in enumerate(PROMPTS[:3])} | {
        group: (*tokens[:-1], *TURN.closing) for group, tokens in whole.items()
    }
    for example in written:
        if example.kind == "greedy":
            ids = list(example.tokens)
            assert ids[example.start :] == reference(target(), ids[: example.start], 8)


def test_prompts_that_repeat_another_are_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsdopt.runtime.calibration._PROMPT_TEMPERATURE", 0.0)
    written = calibrate(target(), PROMPTS[:3], OWN, turn=Turn(TURN.opening, ()))
    assert len({e.tokens for e in written if e.kind == "prompt"}) == 1
    assert [e.group for e in written if e.kind == "greedy"] == sorted(
        {0, 1, 2, 3}, key=[*map(len, PROMPTS[:3]), 66].__getitem__
    )


def test_own_prompts_that_broke_off_continue_with_the_same_outputs(tmp_path: Path) -> None:
    whole = calibrate(target(), PROMPTS[:3], OWN, turn=TURN)
    for kept in (5, 16, 21):  # among the prompts, and after them
        journal = Journal(tmp_path / f"{kept}.jsonl", {"of": 1}, resume=True)
        calibrate(target(), PROMPTS[:3], OWN, turn=TURN, journal=journal)
        lines = (tmp_path / f"{kept}.jsonl").read_text().splitlines()
        (tmp_path / f"{kept}.jsonl").write_text("\n".join(lines[: kept + 1]) + "\n")
        again = Journal(tmp_path / f"{kept}.jsonl", {"of": 1}, resume=True)
        resumed = calibrate(target(), PROMPTS[:3], OWN, turn=TURN, journal=again)
        assert [(e.group, e.tokens, e.best) for e in resumed] == [(e.group, e.tokens, e.best) for e in whole]


def test_own_prompts_need_something_to_write_after() -> None:
    for turn in (None, Turn((), (5,))):
        with pytest.raises(InvalidArgumentError, match="expected a chat template or a first token"):
            calibrate(target(), PROMPTS[:3], OWN, turn=turn)


def test_padding_ids_are_never_written_and_ends_end() -> None:
    network = tiny_network(0, vocab=VOCAB + 5)
    padded = Model.of(network, tiny_tokenizer(), name="p")
    written = calibrate(padded, PROMPTS, Calibration(samples=3, temperature=3.0, max_new_tokens=30))
    outputs = [example.tokens[example.start :] for example in written]
    assert max(max(output) for output in outputs) < VOCAB
    assert any(output[-1] == EOS for output in outputs)
    assert not any(EOS in output[:-1] for output in outputs)


def test_every_epoch_visits_every_example_once_in_a_new_order() -> None:
    examples = data()[0]
    steps = -(-len(examples) // 8)
    epochs = [[e for s in range(steps) for e in batches(examples, 8, seed=3, step=k * steps + s)] for k in (0, 1)]
    assert [sorted(map(id, epoch)) for epoch in epochs] == [sorted(map(id, examples))] * 2
    assert epochs[0] != epochs[1]


MARGIN = 0.07
"""By how much the acceptance of a noisy copy rises at least; 0.37 to 0.48 when this was written."""


@pytest.mark.parametrize("soft", [0.0, 1.0])
def test_alignment_raises_acceptance(tmp_path: Path, soft: float) -> None:
    model = tiny_model(0, name="t", dtype=torch.float32)
    wanted = Calibration(samples=4, temperature=1.0, max_new_tokens=24, top=8, batch=64)
    train, held_out = split(calibrate(model, MANY, wanted), share=0.2, seed=0)
    students = drafter(tiny_network(0, noise=0.1, dtype=torch.float32))
    before = logits_of(model.network)
    recipe = Recipe(**{**FAST, "soft": soft, "batch": 16, "steps": 90, "evaluate_every": 30})
    outcome = align(students, train, held_out, recipe, folder=tmp_path)
    assert outcome.before["drafter"].rate < 0.45
    assert outcome.after["drafter"].rate > outcome.before["drafter"].rate + MARGIN
    assert outcome.after["drafter"].rate == max(row["acceptance"] for row in outcome.log)
    assert outcome.log[-1]["loss"] < outcome.log[1]["loss"]
    assert torch.equal(before, logits_of(model.network))
    assert (tmp_path / "log.csv").read_text().count("\n") == 1 + len(outcome.log)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_training_that_broke_off_ends_with_the_same_bits(tmp_path: Path, architecture: str) -> None:
    train, held_out = data()

    def make() -> Students:
        network = tiny_network(0, noise=0.06, layers=2, architecture=architecture)
        for module in network.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1  # random numbers must continue too
        return drafter(network, embeddings=True)

    recipe = Recipe(**{**FAST, "steps": 26, "evaluate_every": 8})
    whole, broken, resumed = make(), make(), make()
    first = align(whole, train, held_out, recipe, folder=tmp_path / "whole")
    for step in (12, 19):
        with pytest.raises(Stopped):
            align(broken, train, held_out, recipe, folder=tmp_path / "b", resume=True, progress=stop_at(step))
    second = align(resumed, train, held_out, recipe, folder=tmp_path / "b", resume=True)
    assert all(torch.equal(w, resumed.weights()[name]) for name, w in whole.weights().items())
    assert (first.steps, first.best_step, first.tokens) == (second.steps, second.best_step, second.tokens)
    timeless = [[{**row, "seconds": 0} for row in outcome.log] for outcome in (first, second)]
    assert timeless[0] == timeless[1]
    assert [path.name for path in (tmp_path / "b").glob("checkpoint-*")] == ["checkpoint-26"]


def test_training_stops_when_nothing_improves_and_in_time(tmp_path: Path) -> None:
    train, held_out = data()
    still = Recipe(steps=1000, learning_rate=1e-12, evaluate_every=2, patience=2)
    outcome = align(noisy(), train, held_out, still, folder=tmp_path / "a")
    assert (outcome.stopped, outcome.steps, outcome.best_step) == ("patience", 4, 0)
    timed = Recipe(minutes=1.5 / 60, evaluate_every=10)
    outcome = align(noisy(), train, held_out, timed, folder=tmp_path / "b")
    assert outcome.stopped == "time"
    assert outcome.seconds < 6


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, held_out = data()
    recipe = Recipe(**{**FAST, "steps": 8, "evaluate_every": 4})
    with pytest.raises(Stopped):
        align(noisy(), train, held_out, recipe, folder=tmp_path, progress=stop_at(5))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hsdopt.runtime.checkpoints.write_document", full)
        with pytest.raises(HsdoptError, match=r"cannot write .*checkpoint-8: No space left on device; .*--resume"):
            align(noisy(), train, held_out, recipe, folder=tmp_path, resume=True)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert align(noisy(), train, held_out, recipe, folder=tmp_path, resume=True).steps == 8


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    train, held_out = data()
    recipe = Recipe(**{**FAST, "steps": 4, "evaluate_every": 4})
    align(noisy(), train, held_out, recipe, folder=tmp_path)
    with pytest.raises(HsdoptError, match="expected the weights of this training"):
        align(drafter(target().network, skipped=[1]), train, held_out, recipe, folder=tmp_path, resume=True)
    (tmp_path / "checkpoint-4" / "state.pt").write_bytes(b"no")
    with pytest.raises(HsdoptError, match="expected a whole checkpoint"):
        align(noisy(), train, held_out, recipe, folder=tmp_path, resume=True)


def idle_layers(network: torch.nn.Module, numbers: Sequence[int]) -> None:
    """Let layers add next to nothing to what passes through them."""
    for number in numbers:
        layer = network.model.layers[number]
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.data *= 1e-3


@pytest.mark.parametrize("group", [1, 2])
def test_layers_that_do_nothing_are_dropped(group: int) -> None:
    network = tiny_network(4, layers=6)
    idle_layers(network, [1, 3, 4])
    model = Model.of(network, tiny_tokenizer(), name="t")
    examples = calibrate(model, PROMPTS[:12], Calibration(max_new_tokens=16))
    assert choose_layers(network, examples, layers=3, group=group) == (1, 3, 4)
    chosen = rate(drafter(network, skipped=(1, 3, 4)), examples)
    others = [rate(drafter(network, skipped=other), examples) for other in ((0, 2, 5), (1, 2, 5), (0, 3, 4))]
    assert chosen > 0.95
    assert chosen > max(others) + 0.2


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "gemma2"])
def test_each_drop_is_the_best_of_all_single_drops(architecture: str) -> None:
    model = tiny_model(1, layers=5, architecture=architecture)
    examples = calibrate(model, PROMPTS[:12], Calibration(max_new_tokens=16))

    def measured(skipped: Sequence[int]) -> float:
        return rate(drafter(model.network, skipped=skipped), examples)

    best = max(measured([layer]) for layer in range(5))
    dropped = choose_layers(model.network, examples, layers=4)
    assert measured(dropped) == best
    more = choose_layers(model.network, examples, layers=3)
    assert set(dropped) < set(more)
    assert measured(more) == max(measured([*dropped, layer]) for layer in range(5) if layer not in dropped)


def test_a_choice_that_broke_off_continues(tmp_path: Path) -> None:
    train = data()[0][:10]
    journal = Journal(tmp_path / "run.jsonl", {}, resume=True)
    choose_layers(target().network, train, layers=3, journal=journal)
    steps: list[int] = []
    again = Journal(tmp_path / "run.jsonl", {}, resume=True)
    seen = choose_layers(
        target().network, train, layers=2, journal=again, progress=lambda _, done, __: steps.append(done)
    )
    assert steps == [2]
    assert seen == choose_layers(target().network, train, layers=2)


def saved(tmp_path: Path, students: Students, *, compact: bool = False) -> dict[str, Model]:
    folder = tmp_path / "t"
    if not folder.exists():
        save_tiny(folder, layers=4)
    models = load_models([f"t={folder}"])
    network = next(iter(students.networks().values()))
    where = save_drafter(
        tmp_path / "d",
        network,
        tiny_tokenizer(),
        target=models["t"].network if students.trunk is None else network,
        source=str(folder),
        compact=compact,
    )
    return load_models([f"t={folder}", f"d={where}"])


def shaken(students: Students) -> Students:
    """Move every weight that is trained."""
    with torch.no_grad():
        for weight in students.weights().values():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight), alpha=0.02)
    return students


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("head", [None, range(2, 120)])
def test_a_folder_holds_what_was_trained(
    tmp_path: Path, head: range | None, *, embeddings: bool, compact: bool
) -> None:
    base = load_models([f"t={save_tiny(tmp_path / 't', layers=4)}"])["t"].network
    students = drafter(base, skipped=[1], embeddings=embeddings)
    made = students.parts[0].network
    if head is not None:
        shrink_head(made, head)
    shaken(students)
    where = save_drafter(
        tmp_path / "d", made, tiny_tokenizer(), target=base, source=str(tmp_path / "t"), compact=compact
    )
    models = load_models([f"t={tmp_path / 't'}", f"d={where}"])
    assert torch.equal(logits_of(models["d"].network), logits_of(made))
    embedding = models["t"].network.get_input_embeddings().weight
    shared = models["d"].network.get_input_embeddings().weight.data_ptr() == embedding.data_ptr()
    assert shared is not embeddings
    if not compact:
        plain = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float64)
        ids = list(range(VOCAB)) if head is None else list(head)
        # a product with fewer rows may sum in another order, which rounds differently on some processors
        torch.testing.assert_close(logits_of(plain)[..., ids], logits_of(made)[..., ids], rtol=1e-12, atol=1e-12)
    stored = {flag: (tmp_path / flag / "model.safetensors").stat().st_size for flag in "td"}
    assert (stored["d"] < stored["t"] - embedding.nbytes) is (compact and not embeddings)


def test_a_small_head_proposes_only_its_ids_and_the_plan_stays_lossless(tmp_path: Path) -> None:
    train, held_out = data()
    ids = frequent_tokens(train, 60, vocab_size=VOCAB, ends=[EOS])
    assert EOS in ids
    students = drafter(load_models([f"t={save_tiny(tmp_path / 't', layers=4)}"])["t"].network, skipped=[2])
    shrink_head(students.parts[0].network, ids)
    outcome = align(students, train, held_out, Recipe(**{**FAST, "soft": 0.5}), folder=tmp_path / "work")
    assert outcome.log[-1]["loss"] < outcome.log[1]["loss"]
    models = saved(tmp_path, students)
    assert models["d"].network.get_output_embeddings().inner.weight.shape[0] == 60
    chances = logits_of(models["d"].network).softmax(-1)
    assert set(chances.sum((0, 1)).nonzero().flatten().tolist()) <= set(ids)
    assert chances.argmax(-1).unique().tolist()
    for index, options in enumerate(({}, {"temperature": 0.9, "seed": 1})):
        output = generate("t(d:4)", models, PROMPTS[index], max_new_tokens=40, **options)
        assert output.counters.edges["d", "t"].accepted > 0
    plain = generate("t", models, PROMPTS[0], max_new_tokens=40)
    assert generate("t(d:4)", models, PROMPTS[0], max_new_tokens=40).tokens == plain.tokens
    assert models["d"].bytes < tensor_bytes([without_layers(models["t"].network, [2])]) + 60 * 32 * 8 + 60 * 8 + 1


def test_a_drafter_with_a_small_head_can_be_cut_again(pair: Path) -> None:
    call(*arguments(pair, "first", "--layers", "2", "--head-tokens", "90"))
    call(*arguments(pair, "second", "--small", str(pair / "first"), "--layers", "1", "--head-tokens", "80"))
    made = load_models([str(pair / name) for name in ("t", "first", "second")])
    heads = [model.network.get_output_embeddings() for model in made.values()]
    assert [getattr(head, "inner", head).weight.shape[0] for head in heads] == [VOCAB, 90, 80]


def test_a_small_head_is_quantised_with_the_rest() -> None:
    network = shrink_head(drafter(tiny_network(0, dtype=torch.float32)).parts[0].network, range(2, 50))
    quantised = logits_of(quantised_copy(network, "int8")).float()
    assert set(quantised.argmax(-1).unique().tolist()) <= set(range(2, 50))
    same = (quantised.argmax(-1) == logits_of(network).argmax(-1)).float().mean()
    assert same > 0.7


def test_exits_of_a_frozen_target_leave_its_output_as_it_was(tmp_path: Path) -> None:
    train, held_out = data()
    before = logits_of(target().network)
    weights = {name: weight.clone() for name, weight in target().network.named_parameters()}
    students = frozen_exits(target().network, [1, 3], examples=train[:10])
    assert students.names == ("exit-1", "exit-3")
    with torch.inference_mode():
        part = Batch.of(train[:3], torch.device("cpu"))
        for name, logits in students.logits(part).items():
            torch.testing.assert_close(logits, scored(students.networks()[name], part), rtol=0, atol=1e-12)
    outcome = align(students, train, held_out, Recipe(**FAST), folder=tmp_path)
    assert outcome.log[-1]["loss"] < outcome.log[1]["loss"] - 0.2
    assert torch.equal(before, logits_of(target().network))
    assert all(torch.equal(weights[name], weight) for name, weight in target().network.named_parameters())
    for part in students.parts:
        theirs = dict(target().network.named_parameters())
        moved = {n for n, w in part.network.named_parameters() if not torch.equal(w, theirs[n])}
        assert moved
        assert all(n.startswith(f"model.layers.{part.first}.") or n == "model.norm.weight" for n in moved)


def test_joint_exits_lower_their_loss_with_one_head(tmp_path: Path) -> None:
    train, held_out = data()
    students = joint_exits(target().network, [3, 2])
    assert students.names == ("exit-2", "exit-3", FULL)
    made = students.parts[0].network
    part = Batch.of(train[:4], torch.device("cpu"))
    found = students.logits(part)
    for exit_ in (2, 3):
        early = without_layers(made, range(exit_, 4))
        torch.testing.assert_close(found[f"exit-{exit_}"], scored(early, part), rtol=0, atol=1e-12)
    outcome = align(students, train, held_out, Recipe(**FAST), folder=tmp_path / "work")
    assert outcome.log[-1]["loss"] < outcome.log[1]["loss"] - 0.2
    assert outcome.before[FULL].rate == 1
    folder = save_drafter(tmp_path / "j", made, tiny_tokenizer(), target=target().network, source="t")
    models = load_models([f"t={folder}", f"x=exit:2@{folder}"])
    output = generate("t(x:3)", models, PROMPTS[0], max_new_tokens=20)
    assert list(output.tokens) == reference(models["t"], PROMPTS[0], 20)


def test_the_joint_loss_is_half_exits_and_half_the_whole(tmp_path: Path) -> None:
    train, held_out = data()
    students = joint_exits(target().network, [2, 3])
    step = Recipe(steps=1, batch=8, evaluate_every=1)
    part = Batch.of(batches(train, 8, seed=0, step=0), torch.device("cpu"))
    with torch.inference_mode():
        losses = {
            name: float(torch.nn.functional.cross_entropy(logits, part.best))
            for name, logits in students.logits(part).items()
        }
    outcome = align(students, train, held_out, step, folder=tmp_path)
    expected = ((losses["exit-2"] + losses["exit-3"]) / 2 + losses[FULL]) / 2
    assert outcome.log[-1]["loss"] == pytest.approx(expected, rel=1e-9)


def test_soft_labels_of_all_tokens_are_the_whole_divergence(tmp_path: Path) -> None:
    every = calibrate(target(), PROMPTS[:6], Calibration(max_new_tokens=12, top=VOCAB))
    students = noisy()
    part = Batch.of(batches(every, 8, seed=0, step=0), torch.device("cpu"))
    with torch.inference_mode():
        own = scored(students.parts[0].network, part).log_softmax(-1)
        theirs = scored(target().network, part).log_softmax(-1)
        divergence = float((theirs.exp() * (theirs - own)).sum(-1).mean())
        hard = float(torch.nn.functional.nll_loss(own, part.best))
    outcome = align(students, every, every, Recipe(steps=1, soft=2.0, evaluate_every=1), folder=tmp_path)
    assert outcome.log[-1]["loss"] == pytest.approx(hard + 2 * divergence, rel=2e-3)


BAD: tuple[tuple[Any, type[Exception], str], ...] = (
    (lambda: Calibration(samples=2), InvalidArgumentError, "expected a temperature above 0 for 2 samples"),
    (lambda: calibrate(target(), [], Calibration()), InvalidArgumentError, "expected at least one prompt"),
    (lambda: calibrate(target(), [[5]], Calibration(max_new_tokens=300)), InvalidArgumentError, "the 256 positions"),
    (
        lambda: calibrate(tiny_model(architecture="t5"), [[5]], Calibration()),
        ModelError,
        "expected a decoder-only network",
    ),
    (lambda: split(data()[0][:1], share=0.5, seed=0), InvalidArgumentError, "expected at least 2 prompts"),
    (lambda: split(data()[0], share=1.0, seed=0), InvalidArgumentError, "expected a share between 0 and 1"),
    (lambda: choose_layers(target().network, data()[0], layers=4), InvalidArgumentError, "expected 1 to 3 layers"),
    (lambda: joint_exits(target().network, [4]), InvalidArgumentError, "expected exits after 1 to 3 layers"),
    (lambda: frozen_exits(target().network, [1], own=2), InvalidArgumentError, "expected exits after 2 to 3 layers"),
    (lambda: Recipe(batch=0), InvalidArgumentError, "expected batch of at least 1"),
    (lambda: Recipe(learning_rate=0), InvalidArgumentError, "expected a learning rate above 0"),
    (lambda: Recipe(minutes=0), InvalidArgumentError, "expected minutes above 0"),
    (lambda: frequent_tokens([], VOCAB, vocab_size=VOCAB, ends=[2]), InvalidArgumentError, "expected a head of 1 to"),
)


@pytest.mark.parametrize(("act", "kind", "message"), BAD, ids=[message for _, _, message in BAD])
def test_bad_input(act: Any, kind: type[Exception], message: str) -> None:  # noqa: ANN401 - any call
    with pytest.raises(kind, match=message) as caught:
        act()
    assert "\n" not in str(caught.value)


def test_soft_labels_need_probabilities(tmp_path: Path) -> None:
    plain = calibrate(target(), PROMPTS[:4], Calibration(max_new_tokens=8))
    with pytest.raises(InvalidArgumentError, match="expected calibration data with probabilities"):
        align(noisy(), plain, plain, Recipe(soft=1.0), folder=tmp_path)


def test_a_small_head_of_its_own_cannot_be_made_whole(tmp_path: Path) -> None:
    students = drafter(target().network, skipped=[1], embeddings=True)
    shrink_head(students.parts[0].network, range(2, 50))
    loaded = saved(tmp_path, shaken(students))["d"].network
    with pytest.raises(ModelError, match="expected a drafter whose head is whole, or rows of its embeddings"):
        whole_head(loaded)


def test_intervals_hold_the_rate() -> None:
    found = Agreement.of([(1, 4), (3, 4), (2, 4), (4, 4)])
    assert (found.accepted, found.places, found.rate) == (10, 16, 0.625)
    assert 0.25 <= found.low < found.rate < found.high <= 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    save_tiny(root / "t", layers=3)
    save_tiny(root / "s", layers=3, noise=0.06)
    lines = [json.dumps({"prompt": f"Say number {index} twice."}) for index in range(10)]
    (root / "p.jsonl").write_text("\n".join(lines) + "\n")
    return root


def arguments(pair: Path, out: str, *more: str) -> list[str]:
    where = ["--target", str(pair / "t"), "--prompts", str(pair / "p.jsonl"), "-o", str(pair / out)]
    fast = ["--max-new-tokens", "12", "--steps", "12", "--evaluate-every", "6", "--threads", "1"]
    return ["align", *where, *fast, "--calibration", str(pair / "data.jsonl"), *more]


def test_the_command_makes_a_drafter_that_other_commands_take(pair: Path) -> None:
    result = json.loads(call(*arguments(pair, "cut", "--layers", "2", "--head-tokens", "90", "--json")).stdout)
    assert result["drafters"][0]["source"] == str(pair / "cut")
    files = {path.name for path in (pair / "cut").iterdir()}
    assert files >= {"README.md", "log.csv", "learning-curve.png", "learning-curve.svg", "hsdopt.json", "config.json"}
    assert not (pair / "cut.partial").exists()
    card = (pair / "cut" / "README.md").read_text()
    row = result["drafters"][0]["after"]
    assert f"| drafter | after | {row['acceptance']:.3f} |" in card
    assert "2 of the 3 layers" in card
    record = json.loads((pair / "cut" / "alignment.json").read_text())
    assert record["drafters"] == result["drafters"]
    assert sorted(record["layers"] + record["without"]) == [0, 1, 2]
    said = call("generate", "--plan", "t(cut:3)", "--draft", f"t={pair / 't'}", "--draft", f"cut={pair / 'cut'}",
                "--prompt", "Hi", "--max-new-tokens", "8")  # fmt: skip
    assert said.exit_code == 0
    table = call(*arguments(pair, "small", "--small", str(pair / "s"))).stdout
    assert str(pair / "small") in table.replace("\n", "")
    exits = json.loads(call(*arguments(pair, "x", "--exits", "1,2", "--freeze-target", "--json")).stdout)
    assert [row["source"] for row in exits["drafters"]] == [str(pair / "x" / f"exit-{n}") for n in (1, 2)]
    joint = json.loads(call(*arguments(pair, "j", "--exits", "1,2", "--json")).stdout)
    assert [row["source"] for row in joint["drafters"]][:2] == [f"exit:{n}@{pair / 'j'}" for n in (1, 2)]
    load_models([row["source"] for row in (*exits["drafters"], *joint["drafters"])])


def test_the_card_counts_the_prompts_that_the_target_wrote(pair: Path) -> None:
    path = pair / "own.jsonl"
    options = ("--layers", "2", "--own-prompts", "30", "--holdout", "0.1", "--calibration", str(path))
    call(*arguments(pair, "own", *options))
    records = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert sum(record["kind"] == "prompt" for record in records) == 30
    used = sum(record["kind"] == "greedy" for record in records) - 10
    assert used > 0
    assert " that it wrote itself" in (pair / "own" / "README.md").read_text()


def test_a_cut_of_a_cut_names_the_layers_of_the_target(pair: Path) -> None:
    def cut(out: str, *more: str) -> dict[str, list[int] | None]:
        record = json.loads(call(*arguments(pair, out, *more, "--force", "--json")).stdout)
        return {which: record[which] for which in ("layers", "without")}

    two = cut("two", "--layers", "2")
    one = cut("one", "--small", str(pair / "two"), "--layers", "1")
    for made, count in ((two, 2), (one, 1)):
        assert len(made["layers"] or ()) == count
        assert sorted([*(made["layers"] or ()), *(made["without"] or ())]) == [0, 1, 2]
    assert set(one["layers"] or ()) < set(two["layers"] or ())
    assert cut("same", "--small", str(pair / "two")) == two  # trained on
    other = cut("other", "--small", str(pair / "s"))
    assert other == {"layers": None, "without": None}  # a model from elsewhere


def test_the_command_continues_where_it_was_stopped(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--layers", "2")
    call(*arguments(pair, "once", *options))
    with monkeypatch.context() as patch:
        patch.setattr("hsdopt.runtime.alignment.measure", interrupt_after(3))
        said = call(*arguments(pair, "twice", *options), code=130).stderr.splitlines()[-1]
    assert "continue with the same command and --resume" in said
    assert "expected no unfinished measurement" in refused(*arguments(pair, "twice", *options))
    assert "started with layers = 2" in refused(*arguments(pair, "twice", "--layers", "1", "--resume"))
    call(*arguments(pair, "twice", *options, "--resume"))
    assert (pair / "once" / "model.safetensors").read_bytes() == (pair / "twice" / "model.safetensors").read_bytes()
    assert "is there already" in refused(*arguments(pair, "once", *options))


def interrupt_after(calls: int) -> Any:  # noqa: ANN401 - a stand-in
    from hsdopt.runtime.alignment import measure  # noqa: PLC0415 - before it is replaced

    left = iter(range(calls))

    def counted(*given: Any, **options: Any) -> Any:  # noqa: ANN401
        if next(left, None) is None:
            raise KeyboardInterrupt
        return measure(*given, **options)

    return counted


WRONG = (
    ((), "expected a start: --small MODEL, --layers N or --exits N,N"),
    (("--layers", "3"), "expected 1 to 2 layers to keep; got 3"),
    (("--exits", "1", "--layers", "2"), "expected --exits without --small and --layers"),
    (("--layers", "2", "--freeze-target"), "expected --exits with --freeze-target"),
    (("--exits", "1", "--head-tokens", "90"), "expected --freeze-target with --head-tokens and --exits"),
    (("--layers", "2", "--head-tokens", "999"), "expected a head of 1 to 258 tokens; got 999"),
    (("--layers", "2", "--labels", "soft"), "expected argmax or outputs as --labels"),
    (("--exits", "1,3"), "expected exits after 1 to 2 layers; got [1, 3]"),
    (("--layers", "2", "--holdout", "1"), "expected a share between 0 and 1"),
    (("--small", "lookup"), "expected a network to align; lookup only proposes"),
    (("--small", "nothing/here"), "unknown model 'nothing/here'"),
    (("--layers", "2", "--resume", "--force"), "expected --resume or --force, not both"),
)


@pytest.mark.parametrize(("more", "message"), WRONG, ids=[" ".join(more) or "nothing" for more, _ in WRONG])
def test_mistakes_print_one_line(pair: Path, more: tuple[str, ...], message: str) -> None:
    assert message in refused(*arguments(pair, "wrong", *more)).replace("\n", "")
    assert not (pair / "wrong").exists()


def test_calibration_data_of_other_options_is_refused(pair: Path) -> None:
    data = ("--calibration", str(pair / "hard.jsonl"), "--layers", "2")
    call(*arguments(pair, "hard", *data))
    said = refused(*arguments(pair, "soft", *data, "--soft", "1")).replace("\n", "")
    assert "hard.jsonl was started with top = 0; this call says 16" in said


def test_layers_are_chosen_on_the_given_prompts() -> None:
    written = [Example(group, (5,) * 9, 1, (5,) * 8) for group in range(20)]
    written += [Example(group, (5,) * 9, 1, (5,) * 8, "sampled") for group in range(3)]
    assert {example.group for example in _some(written, 400, given=3)} == {0, 1, 2}
    assert all(example.kind == "greedy" for example in _some(written, 400, given=3))
    assert len(_some(written, 8, given=3)) == 1
    assert {example.group for example in _some(written[5:], 400, given=3)} == set(range(5, 20))
