"""Every lossless plan writes what its target writes, to the right length, and accounts for every pass."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mocks import TableLookup, scheduled_models, table_model
from tiny import VOCAB, tiny_model, tiny_tokenizer

from hsdopt.errors import InvalidArgumentError, ModelError, PlanError, VocabularyError
from hsdopt.plan import LOOKUP, Adaptive, Bild, Choice, Level, Plan, Segment, parse_plan
from hsdopt.runtime import Generation, Model, generate
from hsdopt.runtime.lookup import Bigrams, Lookup

if TYPE_CHECKING:
    from collections.abc import Sequence

torch.set_num_threads(1)
CROPPABLE = ("llama", "gpt2", "qwen2", "gemma")
PROMPT = [70, 71, 72, 70, 71]


@lru_cache
def family(architecture: str = "llama") -> dict[str, Any]:
    """A target, two noisy copies of it and a lookup drafter."""
    made: dict[str, Any] = {
        name: tiny_model(0, name=name, noise=noise, architecture=architecture)
        for name, noise in (("s", 0.05), ("m", 0.02), ("t", 0.0))
    }
    return {LOOKUP: Model.of_lookup(Lookup(), made["t"]), **made}


def random_plan(rng: random.Random, names: Sequence[str] = (LOOKUP, "s", "m", "t")) -> Level:
    """A plan of any shape over a stack of models, named from the bottom."""
    below = names[:-1]
    row = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3)) if below else 0):
        top = rng.randrange(len(below))
        level = Level(LOOKUP) if below[top] == LOOKUP else random_plan(rng, below[: top + 1])
        stops = ("truncate", "truncate", "until", *(("overshoot", "rounds") if level.row else ()))
        stop = rng.choice(stops)
        row.append(Segment(level, rng.randint(1, 3 if stop == "rounds" else 6), stop))
    lenient = names[-1] != "t" and any(segment.level.model != LOOKUP for segment in row) and rng.random() < 0.3
    return Level(names[-1], tuple(row), rng.choice((1.5, 4.0)) if lenient else 1.0)


def random_adaptive(rng: random.Random) -> Adaptive:
    """An adaptive plan over the same stack."""

    def choice(drafters: Sequence[str]) -> Choice | None:
        return None if rng.random() < 0.3 else Choice(rng.choice(drafters), rng.randint(1, 6))

    tables = (
        ("s", tuple(choice([LOOKUP]) for _ in range(6))),
        ("m", tuple(choice([LOOKUP, "s"]) for _ in range(6))),
    )
    return Adaptive("t", choice([LOOKUP, "s", "m"]), tables)


def some_plan(rng: random.Random) -> Plan:
    return random_adaptive(rng) if rng.random() < 0.15 else random_plan(rng)


def reference(model: Model, prompt: Sequence[int], count: int, **options: Any) -> list[int]:  # noqa: ANN401 -- handed on
    """What transformers writes greedily."""
    ids = torch.tensor([list(prompt)])
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids), **options}
    return model.network.generate(ids, max_new_tokens=count, **options)[0, len(prompt) :].tolist()


def check_accounts(output: Generation) -> None:
    """held = accepted + own; passed up = held - discarded, at every level; counts that make sense."""
    counters = output.counters
    passed_up = {name: counters.held[name] - counters.discarded.get(name, 0) for name in counters.held}
    drafted: dict[str, int] = {}
    for (drafter, _), edge in counters.edges.items():
        drafted[drafter] = drafted.get(drafter, 0) + edge.drafted
        assert 0 <= edge.accepted <= edge.drafted
        assert sum(edge.accepted_at) == edge.accepted
        assert list(edge.accepted_at) == sorted(edge.accepted_at, reverse=True)
        assert all(count <= edge.drafts for count in edge.accepted_at)
    for name, count in passed_up.items():
        assert count == (len(output.tokens) if name == output.target else drafted.get(name, 0)), name
    for event in output.events:
        if event.kind == "verify":
            assert event.discarded == event.drafted - event.accepted
            assert (event.why is None) == (event.discarded == 0 and event.why != "after a rejection")


def greedy_case(seed: int) -> None:
    rng = random.Random(seed)
    architecture = rng.choice(CROPPABLE)
    models = family(architecture)
    prompt = [rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 2, 5, 17)))]
    plan, count = some_plan(rng), rng.randint(1, 45)
    output = generate(plan, models, prompt, max_new_tokens=count)
    assert list(output.tokens) == reference(models["t"], prompt, count), (str(plan), architecture, prompt)
    check_accounts(output)


@pytest.mark.parametrize("seed", range(60))
def test_greedy_output_is_that_of_transformers(seed: int) -> None:
    greedy_case(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60, 560))
def test_greedy_output_is_that_of_transformers_500_times(seed: int) -> None:
    greedy_case(seed)


PLANS = ["t", "t(s:3)", "t(m:5(s:2))", "t(m:4+(s:3), s:2)", "t(m:2x(lookup:3), lookup:4)", "t(m:4(s:2, lenience=3))"]


@pytest.mark.parametrize("plan", PLANS)
def test_end_of_text_at_every_position_of_a_draft(plan: str) -> None:
    models = family()
    whole = generate("t", models, PROMPT, max_new_tokens=24, ignore_eos=True).tokens
    for index, token in enumerate(whole):
        if token in whole[:index]:
            continue
        ending = {**models, "t": replace(models["t"], eos=frozenset({token, 1}))}
        output = generate(plan, ending, PROMPT, max_new_tokens=24)
        assert output.tokens == whole[: index + 1]
        assert output.finish_reason == ("length" if index == 23 and token not in ending["t"].eos else "eos")
        check_accounts(output)


def test_several_end_of_text_ids_and_ignoring_them() -> None:
    models = family()
    whole = generate("t", models, PROMPT, max_new_tokens=30, ignore_eos=True)
    ends = frozenset(whole.tokens[9:11])
    ending = {**models, "t": replace(models["t"], eos=ends)}
    first = next(index for index, token in enumerate(whole.tokens) if token in ends)
    for plan in PLANS:
        assert generate(plan, ending, PROMPT, max_new_tokens=30).tokens == whole.tokens[: first + 1]
        ignored = generate(plan, ending, PROMPT, max_new_tokens=30, ignore_eos=True)
        assert (ignored.tokens, ignored.finish_reason) == (whole.tokens, "length")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 13])
def test_max_new_tokens_is_exact(plan: str, count: int) -> None:
    models = family()
    output = generate(plan, models, PROMPT, max_new_tokens=count, ignore_eos=True)
    assert len(output.tokens) == count
    assert output.finish_reason == "length"
    check_accounts(output)


@settings(deadline=None, derandomize=True, max_examples=120)
@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([0.0, 0.8]), ends=st.booleans())
def test_held_is_accepted_plus_passes_and_passed_up_is_held_less_discarded(
    seed: int, temperature: float, *, ends: bool
) -> None:
    rng = random.Random(seed)
    models: dict[str, Any] = {name: table_model(name, 7, vocab=6) for name in "tms"}
    for name, model in models.items():
        model.table = (model.table + 0.2 * table_model(name, seed % 97, vocab=6).table) / 1.2
    models["t"].eos = frozenset({5} if ends else {})
    models[LOOKUP] = TableLookup(LOOKUP, models["t"], longest=rng.randint(0, 4))
    count = rng.randint(1, 40)
    output = generate(some_plan(rng), models, [0, 1], max_new_tokens=count, temperature=temperature, seed=seed)
    assert len(output.tokens) == count or output.finish_reason == "eos"
    check_accounts(output)


def test_a_model_that_drafts_for_itself_is_always_accepted() -> None:
    models = {name: tiny_model(0, name=name, positions=1024) for name in "tms"}
    for options in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 4}):
        output = generate("t(m:5(s:3))", models, PROMPT, max_new_tokens=500, ignore_eos=True, **options)
        edges = output.counters.edges
        assert all(edge.accepted == edge.drafted > 0 for edge in edges.values())


def test_passes_and_new_tokens_of_a_hand_worked_stack() -> None:
    """All drafts accepted: m holds 3 + 1 after one round, and t gains 5."""
    models = scheduled_models({("s", "m"): 1.0, ("m", "t"): 1.0}, below={"m": ["s"]})
    output = generate("t(m:4(s:3))", models, [0], max_new_tokens=11)
    passes = [(event.model, event.new_tokens) for event in output.events if event.kind == "pass"]
    first = [("s", 1), ("s", 1), ("s", 1), ("m", 4), ("t", 5)]
    # s lacks its own last token, m's bonus and t's; m its bonus and t's
    later = [("s", 3), ("s", 1), ("s", 1), ("m", 5), ("t", 5)]
    assert passes == first + later
    assert output.counters.tokens_per_pass == 5


def test_passes_and_new_tokens_when_everything_is_rejected() -> None:
    models = scheduled_models({("s", "m"): 0.0, ("m", "t"): 0.0}, below={"m": ["s"]})
    output = generate("t(m:2(s:2))", models, [0], max_new_tokens=9)
    passes = [(event.model, event.new_tokens) for event in output.events if event.kind == "pass"]
    request = [("s", 1), ("s", 1), ("m", 3)]
    assert passes[:7] == [*request, *request, ("t", 3)]
    # the second request began after m's token: neither model lacks more than t's correction
    assert passes[7:14] == [*request, *request, ("t", 3)]
    assert output.counters.edges["m", "t"].accepted == 0


def test_truncation_cuts_what_was_held_and_caches_with_it() -> None:
    models = scheduled_models({("s", "m"): 1.0, ("m", "t"): 1.0}, below={"m": ["s"]})
    output = generate("t(m:5(s:3))", models, [0], max_new_tokens=13)
    cuts = [(event.model, event.discarded, event.why) for event in output.events if event.kind == "cut"]
    assert cuts == [("m", 3, "truncate"), ("m", 3, "truncate")]
    passes = [(event.model, event.new_tokens) for event in output.events if event.kind == "pass"]
    half = [("s", 1), ("s", 1), ("s", 1), ("m", 4), ("s", 2), ("s", 1), ("s", 1), ("m", 4), ("t", 6)]
    assert passes == half + half


def test_a_verifier_that_lacks_nothing_reads_the_token_before_its_draft_again() -> None:
    models = scheduled_models({("s", "m"): 1.0, ("m", "t"): 1.0}, below={"m": ["s"]})
    output = generate("t(m:1(s:3), m:3(s:2))", models, [0], max_new_tokens=11)
    passes = [(event.model, event.new_tokens) for event in output.events if event.kind == "pass"]
    first, again = [("s", 1), ("s", 1), ("m", 5)], [("s", 1), ("s", 1), ("m", 3), ("t", 5)]
    assert passes[-8:] == [("s", 3), *first, *again]


def test_no_more_rounds_are_run_than_tokens_are_wanted() -> None:
    models = scheduled_models({("s", "m"): 0.0, ("m", "t"): 0.0}, below={"m": ["s"]})
    output = generate("t(m:4x(s:3))", models, [0], max_new_tokens=4)
    assert output.counters.passes == {"t": 3, "m": 2 + 1, "s": 6 + 3}
    models = scheduled_models({("s", "m"): 1.0, ("m", "t"): 1.0}, below={"m": ["s"]})
    output = generate("t(m:4x(s:3))", models, [0], max_new_tokens=4)  # 2 rounds, 8 tokens, cut to 2
    assert output.counters.passes == {"t": 1, "m": 2, "s": 6}


def test_conventions_differ_in_what_is_passed_up() -> None:
    def drafted(plan: str) -> int:
        models = scheduled_models({("s", "m"): 1.0, ("m", "t"): 1.0}, below={"m": ["s"]})
        output = generate(plan, models, [0], max_new_tokens=60)
        return next(event.drafted for event in output.events if event.kind == "verify" and event.model == "t")

    assert [drafted(f"t(m:{length}(s:3))") for length in ("5", "5+", "2x", "..5")] == [5, 8, 8, 8]


def test_lookup_that_proposes_little_or_nothing_makes_drafts_shorter() -> None:
    models = scheduled_models({(LOOKUP, "t"): 1.0}, lookup_lengths=lambda rng, _: rng.choice((0, 0, 1)))
    output = generate("t(lookup:4)", models, [0], max_new_tokens=40)
    sizes = {event.new_tokens for event in output.events if event.kind == "pass"}
    assert sizes == {1, 2}
    assert len(output.tokens) == 40
    check_accounts(output)


@pytest.mark.parametrize("acceptance", [0.3, (1.0, 0.9, 0.8, 0.2)])
def test_tokens_per_pass_on_a_schedule_are_the_sum_of_the_survival_curve(acceptance: Any) -> None:  # noqa: ANN401
    models = scheduled_models({("s", "t"): acceptance}, seed=5)
    output = generate("t(s:3)", models, [0], max_new_tokens=8000)
    curve = acceptance if isinstance(acceptance, tuple) else [acceptance**m for m in range(4)]
    rounds = output.counters.passes["t"]
    assert output.counters.tokens_per_pass == pytest.approx(sum(curve), abs=4 * 1.5 / rounds**0.5)


def test_streamed_tokens_are_final_and_in_order() -> None:
    models = family()
    for plan in PLANS:
        streamed: list[int] = []
        output = generate(plan, models, PROMPT, max_new_tokens=30, on_token=streamed.append, ignore_eos=True)
        assert streamed == list(output.tokens)


@pytest.mark.parametrize("plan", ["t", "t(s:6)", "t(m:6(s:3))", "t(s:4, lookup:4)"])
def test_stop_strings_inside_and_across_drafted_tokens(plan: str) -> None:
    models = {**family(), "s": tiny_model(0, name="s")}
    whole = generate("t", models, PROMPT, max_new_tokens=40, ignore_eos=True).tokens
    tokenizer = tiny_tokenizer()
    for start, length in ((3, 1), (5, 3), (11, 2), (20, 5)):
        stop = tokenizer.decode(whole[start : start + length], skip_special_tokens=True)
        if not stop or "\N{REPLACEMENT CHARACTER}" in stop:
            continue
        streamed: list[int] = []
        output = generate(
            plan,
            models,
            PROMPT,
            max_new_tokens=40,
            stop=["never seen", stop],
            on_token=streamed.append,
            ignore_eos=True,
        )
        end = next(n for n in range(1, 41) if stop in tokenizer.decode(whole[:n], skip_special_tokens=True))
        assert output.tokens == whole[:end] == tuple(streamed)
        assert output.finish_reason == "stop"
        assert output.text.count(stop) == 1
        check_accounts(output)


def test_stop_strings_look_through_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    from hsdopt.runtime.generate import StopFinder  # noqa: PLC0415 -- only this test goes below the call

    finder = StopFinder(["abc"], tokenizer)
    ids = [*tokenizer.encode("xxa"), 0, *tokenizer.encode("b"), 1, *tokenizer.encode("cd")]
    assert [finder.found(token) for token in ids] == [False] * 6 + [True, True]


def test_cancel_in_the_middle_keeps_what_was_final_and_sessions_that_work() -> None:
    models = family()
    plan = parse_plan("t(m:4(s:2), lookup:3)")
    whole = generate(plan, models, PROMPT, max_new_tokens=30, ignore_eos=True)
    sessions = {name: models[name].session() for name in plan.models}
    for after in (0, 1, 5, 12, 23):
        calls = iter(range(1000))
        output = generate(
            plan,
            models,
            PROMPT,
            max_new_tokens=30,
            ignore_eos=True,
            sessions=sessions,
            cancel=lambda calls=calls, after=after: next(calls) >= after,
        )
        assert output.finish_reason == "cancelled"
        assert output.tokens == whole.tokens[: len(output.tokens)]
        again = generate(plan, models, PROMPT, max_new_tokens=30, ignore_eos=True, sessions=sessions)
        assert again.tokens == whole.tokens


def trace(output: Generation) -> list[Any]:
    return [replace(event, seconds=0.0) for event in output.events]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3, "top_k": 5, "repetition_penalty": 1.3}])
def test_running_the_same_call_twice_gives_the_same_trace_and_leaves_no_state(options: dict[str, Any]) -> None:
    models = family()
    configs = [copy.deepcopy(models[name].network.generation_config.to_dict()) for name in "tms"]
    plan = "t(m:4+(s:2), lookup:3)"
    first, second = (generate(plan, models, PROMPT, max_new_tokens=40, **options) for _ in range(2))
    assert first.tokens == second.tokens
    assert trace(first) == trace(second)
    assert configs == [models[name].network.generation_config.to_dict() for name in "tms"]


def test_processors_state_is_not_carried_over_a_rejection() -> None:
    """Repetition penalty and no-repeat n-grams depend on the prefix alone, so drafts never leak into it."""
    from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor  # noqa: PLC0415

    models = family()
    expected = reference(models["t"], PROMPT, 40, repetition_penalty=1.4, no_repeat_ngram_size=2)
    for plan in PLANS:
        output = generate(
            plan,
            models,
            PROMPT,
            max_new_tokens=40,
            repetition_penalty=1.4,
            processors=[NoRepeatNGramLogitsProcessor(2)],
        )
        assert list(output.tokens) == expected, plan


def test_a_drafter_whose_positions_run_out_stops_drafting() -> None:
    models = family()
    whole = generate("t", models, PROMPT, max_new_tokens=60, ignore_eos=True).tokens
    short = {**models, "s": tiny_model(0, name="s", noise=0.02, positions=24)}
    shorter = {**short, "m": tiny_model(0, name="m", noise=0.02, positions=20)}
    never = {**models, "s": tiny_model(0, name="s", positions=4)}
    for plan in ("t(s:5)", "t(m:6(s:4))", "t(m:3+(s:4), s:5)", "t(m:2x(s:3))", "t(m:4(lookup:6), s:3)"):
        for limited in (short, shorter, never):
            output = generate(plan, limited, PROMPT, max_new_tokens=60, ignore_eos=True)
            assert output.tokens == whole
            check_accounts(output)


def test_a_prompt_of_one_token() -> None:
    models = family()
    for plan in PLANS:
        assert list(generate(plan, models, [9], max_new_tokens=12).tokens) == reference(models["t"], [9], 12)


def test_beyond_the_target_s_positions_is_refused_at_once() -> None:
    models = {"t": tiny_model(name="t", positions=16)}
    assert len(generate("t", models, [5] * 6, max_new_tokens=10, ignore_eos=True).tokens) == 10
    with pytest.raises(InvalidArgumentError, match=r"within the 16 positions of t; got 6 \+ 11 tokens"):
        generate("t", models, [5] * 6, max_new_tokens=11)


def test_padded_ids_are_never_proposed_nor_accepted() -> None:
    padded = {name: tiny_model(0, name=name, vocab=VOCAB + rows) for name, rows in (("t", 13), ("s", 2))}
    lookup = Lookup(Bigrams.of([[71, VOCAB + 1, 72]]), min_ngram=8)  # a table made with other ids
    models = {**padded, LOOKUP: Model.of_lookup(lookup, padded["t"])}
    output = generate("t(s:3, lookup:3)", models, PROMPT, max_new_tokens=30, temperature=2, seed=1)
    assert max(output.tokens) < VOCAB
    with pytest.raises(InvalidArgumentError, match=f"ids from 0 to {VOCAB - 1} in the prompt; got {VOCAB}"):
        generate("t", models, [VOCAB], max_new_tokens=1)


def test_different_vocabularies_are_refused() -> None:
    models = {"t": tiny_model(name="t"), "s": tiny_model(name="s", vocab=100)}
    with pytest.raises(VocabularyError, match="one vocabulary for t and s"):
        generate("t(s:2)", models, PROMPT, max_new_tokens=2)


def test_a_text_is_encoded_as_it_is_and_decoded_without_special_tokens() -> None:
    models = family()
    output = generate("t(s:3)", models, "copy this", max_new_tokens=12)
    ids = tiny_tokenizer().encode("copy this")
    assert output.tokens == generate("t", models, ids, max_new_tokens=12).tokens
    assert output.text == tiny_tokenizer().decode(list(output.tokens), skip_special_tokens=True)


def test_times_add_up() -> None:
    output = generate("t(m:4(s:2))", family(), PROMPT, max_new_tokens=20, ignore_eos=True)
    seconds = output.seconds
    inside = sum(event.seconds for event in output.events if event.kind in ("pass", "lookup"))
    assert 0 < inside <= seconds.decode
    assert 0 < seconds.first_token < seconds.prefill
    assert seconds.prefill + seconds.decode <= seconds.total
    assert output.seconds_per_token == seconds.decode / 19


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"plan": "t(x:3)"}, ModelError, "a model for every name of t.x:3.; none for x"),
        ({"plan": "t("}, PlanError, "expected a model name"),
        ({"prompt": []}, InvalidArgumentError, "a prompt of at least 1 token"),
        ({"max_new_tokens": 0}, InvalidArgumentError, "max_new_tokens"),
        ({"stop": [""]}, InvalidArgumentError, "stop strings of at least one character"),
        ({"plan": Bild(large="t", small="look")}, ModelError, "a language model as look"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    models = {**family(), "look": family()[LOOKUP]}
    call: dict[str, Any] = {"plan": "t", "prompt": PROMPT, "max_new_tokens": 3, **arguments}
    with pytest.raises(error, match=message):
        generate(call.pop("plan"), models, call.pop("prompt"), **call)


def test_models_without_a_tokenizer_take_ids_only() -> None:
    models = {"t": table_model("t", 0)}
    assert generate("t", models, [0], max_new_tokens=2).text == ""
    with pytest.raises(InvalidArgumentError, match="expected token ids as a prompt: t has no tokenizer"):
        generate("t", models, "text", max_new_tokens=2)
    with pytest.raises(InvalidArgumentError, match="expected a tokenizer with t to find stop strings"):
        generate("t", models, [0], max_new_tokens=2, stop="x")
