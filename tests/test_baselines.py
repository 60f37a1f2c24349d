"""Baselines by transformers: the same tokens, the same clock, and reasons where one cannot be run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import tiny_model, tiny_network, tiny_tokenizer

from hsdopt.plan import Level
from hsdopt.profiles import Setting
from hsdopt.profiling import MeasuredRun, Timed, measure_plans, transformers_baselines
from hsdopt.profiling import baselines as module
from hsdopt.runtime import generate
from hsdopt.runtime.model import Model
from hsdopt.runtime.quantised import quantised_copy

PROMPT = (40, 41, 42, 43, 40, 41, 42)
GREEDY = Setting(max_new_tokens=20)
DRAWN = Setting(max_new_tokens=20, temperature=1.0, top_p=0.9, top_k=50)


@pytest.fixture(scope="module")
def target() -> Model:
    torch.set_num_threads(1)
    return tiny_model(0, name="big")


def test_every_baseline_writes_what_the_target_writes(target: Model) -> None:
    small = tiny_model(0, noise=0.03, name="small")
    own = generate(Level("big"), {"big": target}, PROMPT, max_new_tokens=20, ignore_eos=True).tokens
    made = transformers_baselines(target, [small], PROMPT)
    assert [runner.label.removeprefix("transformers ") for runner in made.runners] == [
        "generate()",
        "generate(assistant_model=small)",
        "generate(prompt_lookup_num_tokens=10)",
    ]
    assert [runner.models for runner in made.runners] == [("big",), ("small", "big"), ("big",)]
    assert made.notes == ()
    for runner in made.runners:
        timed = runner.run(PROMPT, setting=GREEDY, seed=0)
        assert timed.output == own
        assert 1 <= timed.tokens < 20
        assert timed.seconds > 0
        assert timed.prefill_seconds > 0
    assert made.runners[0].run(PROMPT, setting=GREEDY, seed=0).tokens_per_pass == 1
    assert made.runners[1].run(PROMPT, setting=GREEDY, seed=0).tokens_per_pass > 1


def test_end_of_text_is_ignored(target: Model) -> None:
    own = generate(Level("big"), {"big": target}, PROMPT, max_new_tokens=20, ignore_eos=True).tokens
    ends = Model.of(tiny_network(0, eos=int(own[4])), tiny_tokenizer(), name="big")
    before = ends.network.generation_config.eos_token_id
    for runner in transformers_baselines(ends, [tiny_model(0, noise=0.03, name="small")], PROMPT).runners:
        assert runner.run(PROMPT, setting=GREEDY, seed=0).output == own
    assert ends.network.generation_config.eos_token_id == before == own[4]


def test_sampling_follows_its_seed_and_leaves_the_generator_alone(target: Model) -> None:
    plain = transformers_baselines(target, [], PROMPT).runners[0]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    outputs = [plain.run(PROMPT, setting=DRAWN, seed=seed).output for seed in (1, 1, 2)]
    assert torch.equal(state, torch.get_rng_state())
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("setting", [GREEDY, DRAWN])
def test_quantised_copies_assist(setting: Setting) -> None:
    whole = tiny_model(0, name="big", dtype=torch.float32)
    copy = Model.of(quantised_copy(whole.network, "int8"), whole.tokenizer, name="int8", precision="int8")
    made = transformers_baselines(whole, [copy], PROMPT)
    assert made.notes == ()
    assert len(made.runners[1].run(PROMPT, setting=setting, seed=0).output) == 20


def test_what_cannot_be_run_is_left_out_with_a_reason(target: Model) -> None:
    short = tiny_model(0, name="short", vocab=100)
    made = transformers_baselines(target, [short], (200, 201, 202))
    assert [runner.models for runner in made.runners] == [("big",), ("big",)]
    assert made.notes[0].startswith("transformers generate(assistant_model=short) is left out: ")
    t5 = tiny_model(0, name="t5", architecture="t5")
    assert transformers_baselines(t5, [], PROMPT).runners == ()
    assert "encoder-decoder" in transformers_baselines(t5, [], PROMPT).notes[0]


def test_the_clock_counts_from_the_first_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 12.0, 13.0, 15.0])
    monkeypatch.setattr(module, "perf_counter", lambda: next(times))
    clock = module._Clock()
    clock.start()
    for tokens in ([1, 2, 3], [4, 5], [6], [7, 8, 9]):
        clock.put(torch.tensor([tokens]))
    assert clock.timed() == Timed((4, 5, 6, 7, 8, 9), 4, 3.0, 2.0, 2.0)


def test_an_output_of_one_pass_counts_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 12.0])
    monkeypatch.setattr(module, "perf_counter", lambda: next(times))
    clock = module._Clock()
    clock.start()
    clock.put(torch.tensor([1]))
    clock.put(torch.tensor([[4, 5, 6]]))
    assert clock.timed() == Timed((4, 5, 6), 2, 2.0, 0.0, 3.0)


class Stub:
    """A runner that writes at once and counts its turns."""

    label = "stub()"
    turns = 0

    def run(self, prompt: tuple[int, ...], *, setting: Setting, seed: int) -> Timed:
        """Return one second per token."""
        self.turns += 1
        return Timed((*prompt[:1], seed), 1, float(setting.max_new_tokens), 0.0, 1.0)


def test_runners_take_turns_with_plans_and_resume(target: Model, tmp_path: Path) -> None:
    stub, prompts = Stub(), [PROMPT, PROMPT[::-1]]
    setting = Setting(max_new_tokens=4)
    options = {"setting": setting, "repeats": 2, "journal": tmp_path / "runs"}
    calls: list[int] = []
    runs = measure_plans(
        [Level("big")], {"big": target}, prompts, runners=[stub], between=lambda: calls.append(stub.turns), **options
    )
    assert stub.turns == 5  # one to warm up
    assert len(calls) == 8
    assert calls[1::2] == [2, 3, 4, 5]
    for start in range(0, len(runs), 2):
        assert {run.plan for run in runs[start : start + 2]} == {"big", "stub()"}
        assert len({run.prompt for run in runs[start : start + 2]}) == 1
    assert [run.seconds for run in runs if run.plan == "stub()"] == [4.0] * 4
    again = measure_plans([Level("big")], {"big": target}, prompts, runners=[stub], resume=True, **options)
    assert stub.turns == 5
    assert again == runs
    assert MeasuredRun.from_record(runs[0].to_record()) == runs[0]


@pytest.mark.parametrize(("budget", "prompts"), [(1e-9, 2), (23.0, 2), (25.0, 3), (31.0, 3), (1e9, 4)])
def test_a_budget_stops_between_prompts_and_resumes(target: Model, tmp_path: Path, budget: float, prompts: int) -> None:
    texts = [PROMPT, PROMPT[::-1], PROMPT[1:], PROMPT[2:]]
    options = {"setting": Setting(max_new_tokens=4), "repeats": 2, "journal": tmp_path / "runs", "budget": budget}
    stub = Stub()  # four seconds a run, eight a prompt; a run of the plan is next to nothing
    runs = measure_plans([Level("big")], {"big": target}, texts, runners=[stub], **options)
    assert [run.prompt for run in runs] == [prompt for prompt in range(prompts) for _ in range(4)]
    assert stub.turns == 1 + 2 * prompts
    journal = tmp_path / "runs"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:4]))
    again = measure_plans([Level("big")], {"big": target}, texts, runners=[stub], resume=True, **options)
    assert [(run.plan, run.prompt, run.repeat) for run in again] == [(run.plan, run.prompt, run.repeat) for run in runs]
