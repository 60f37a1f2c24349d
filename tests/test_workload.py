"""Workloads: the built-in sets, prompt files and their errors, the halves, rendering."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsdopt.errors import WorkloadError
from hsdopt.profiling.workload import BUILT_IN, TRAINING, Message, Prompt, Workload, load_workload, render, turn

if TYPE_CHECKING:
    from pathlib import Path

SETS = (*BUILT_IN, TRAINING)
SIZES = {"mixed": 40, "copy": 24, "chat": 24, "training": 60}
LEAST_PER_TASK = {"mixed": 5, "copy": 4, "chat": 4, "training": 6}
MIXED_TASKS = {
    "summarising",
    "rewriting",
    "extraction",
    "translation",
    "code editing",
    "question answering",
    "arithmetic",
    "stories",
}


class FakeTokenizer:
    """One token a character; a chat template marks roles with the codes 1 to 3."""

    def __init__(self, template: str | None = None) -> None:
        self.chat_template = template

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: bool) -> list[int]:
        assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        roles = ["", "system", "user", "assistant"]
        turns = [[roles.index(turn["role"]), *self.encode(turn["content"])] for turn in conversation]
        return [token for turn in turns for token in turn] + [3]


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603 -- code of this file
    return done.stdout.strip()


@pytest.mark.parametrize("name", SETS)
def test_a_built_in_set_has_the_promised_size_and_tasks(name: str) -> None:
    workload = load_workload(name)
    counts = Counter(prompt.task for prompt in workload)
    assert (workload.name, len(workload)) == (name, SIZES[name])
    assert min(counts.values()) >= LEAST_PER_TASK[name]
    assert tuple(counts) == workload.tasks


def test_mixed_covers_the_eight_tasks() -> None:
    assert set(load_workload("mixed").tasks) == MIXED_TASKS


def test_chat_prompts_have_several_turns_and_end_with_the_user() -> None:
    for prompt in load_workload("chat"):
        turns = [message.role for message in prompt.messages if message.role != "system"]
        assert len(turns) >= 3
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"]


def test_the_answer_of_a_copy_prompt_largely_repeats_the_prompt() -> None:
    for prompt in load_workload("copy"):
        assert prompt.text is not None
        assert prompt.reference is not None
        known = set(pairwise(words(prompt.text)))
        pairs = list(pairwise(words(prompt.reference)))
        assert 40 <= len(prompt.text.split()) <= 120
        assert sum(pair in known for pair in pairs) >= 0.6 * len(pairs), prompt.id


@pytest.mark.parametrize("name", SETS)
def test_prompts_are_of_moderate_length(name: str) -> None:
    lengths = [sum(len(words(turn.content)) for turn in prompt.conversation) for prompt in load_workload(name)]
    assert min(lengths) >= 5
    assert max(lengths) <= 120


def test_no_request_stands_in_two_sets_or_twice_in_one() -> None:
    requests = Counter(prompt.conversation for name in SETS for prompt in load_workload(name))
    last_turns = Counter(prompt.conversation[-1].content for name in SETS for prompt in load_workload(name))
    assert set(requests.values()) == {1}
    assert set(last_turns.values()) == {1}


def test_no_id_stands_in_two_sets() -> None:
    ids = [prompt.id for name in SETS for prompt in load_workload(name)]
    assert len(set(ids)) == len(ids) == sum(SIZES.values())


def test_a_path_named_like_a_built_in_set_is_still_reachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mixed", {"prompt": "Mine."})
    assert len(load_workload("mixed")) == 40
    assert len(load_workload("./mixed")) == 1


@pytest.mark.parametrize("name", SETS)
def test_the_halves_are_disjoint_complete_even_and_hold_every_task(name: str) -> None:
    workload = load_workload(name)
    profiling, validation = workload.profiling, workload.validation
    assert set(profiling) | set(validation) == set(workload)
    assert not set(profiling) & set(validation)
    assert len(profiling) - len(validation) in (0, 1)
    assert set(profiling.tasks) == set(validation.tasks) == set(workload.tasks)
    assert (profiling.name, validation.name) == (f"{name}/profiling", f"{name}/validation")


TASKED = st.lists(st.sampled_from("abc"), min_size=2, max_size=24)


def workload_of(tasks: list[str]) -> Workload:
    return Workload("drawn", tuple(Prompt(str(index), f"Say {index}.", task=task) for index, task in enumerate(tasks)))


@settings(deadline=None, derandomize=True)
@given(tasks=TASKED)
def test_any_workload_splits_evenly_over_every_task_of_two(tasks: list[str]) -> None:
    workload = workload_of(tasks)
    halves = (workload.profiling, workload.validation)
    assert abs(len(halves[0]) - len(halves[1])) <= 1
    assert sorted([*halves[0], *halves[1]], key=lambda prompt: int(prompt.id)) == list(workload)
    for task, count in Counter(tasks).items():
        held = [sum(prompt.task == task for prompt in half) for half in halves]
        assert sum(held) == count
        assert abs(held[0] - held[1]) <= 1


@settings(deadline=None, derandomize=True)
@given(tasks=TASKED, order=st.permutations("abc"))
def test_the_split_does_not_depend_on_how_tasks_are_mixed_in_the_file(tasks: list[str], order: list[str]) -> None:
    mixed = workload_of(tasks)
    grouped = Workload("grouped", tuple(sorted(mixed, key=lambda prompt: order.index(prompt.task))))
    assert set(grouped.profiling) == set(mixed.profiling)
    assert set(grouped.validation) == set(mixed.validation)


def test_a_repeated_request_stays_in_one_half() -> None:
    texts = ["One?", "One?", "Two?", "One?", "Three?"]
    workload = Workload("repeats", tuple(Prompt(str(i), text) for i, text in enumerate(texts)))
    profiling = {prompt.text for prompt in workload.profiling}
    validation = {prompt.text for prompt in workload.validation}
    assert (profiling, validation) == ({"One?", "Three?"}, {"Two?"})


@pytest.mark.parametrize("texts", [["One?"], ["One?", "One?"]])
@pytest.mark.parametrize("half", ["profiling", "validation"])
def test_a_single_request_loads_but_has_no_halves(texts: list[str], half: str) -> None:
    workload = Workload("one.txt", tuple(Prompt(str(i), text) for i, text in enumerate(texts)))
    expected = (
        "expected at least 2 different prompts to split one.txt into a profiling and a validation half, "
        "got 1: add another prompt"
    )
    with pytest.raises(WorkloadError) as caught:
        getattr(workload, half)
    assert str(caught.value) == expected


def test_take_spreads_over_the_tasks_in_file_order() -> None:
    workload = workload_of(["a", "a", "a", "b", "a", "c", "b"])
    assert [prompt.id for prompt in workload.take(3)] == ["0", "3", "5"]
    assert [prompt.id for prompt in workload.take(5)] == ["0", "1", "3", "5", "6"]
    assert workload.take(100) == workload
    with pytest.raises(WorkloadError, match="expected to take at least 1 prompt, got 0"):
        workload.take(0)


BASE = Prompt("a", "One?", reference="1", task="count")
CHANGES = [{"id": "b"}, {"text": "Two?"}, {"reference": None}, {"task": "other"}]


@pytest.mark.parametrize("change", CHANGES)
def test_the_hash_changes_with_every_field(change: dict[str, str | None]) -> None:
    changed = dataclasses.replace(BASE, **change)
    assert Workload("w", (changed,)).sha256 != Workload("w", (BASE,)).sha256


def test_the_hash_tells_a_text_from_a_conversation_and_sees_the_order() -> None:
    turn = dataclasses.replace(BASE, text=None, messages=(Message("user", "One?"),))
    other = Prompt("b", "Two?")
    hashes = {Workload("w", prompts).sha256 for prompts in [(BASE,), (turn,), (BASE, other), (other, BASE), (other,)]}
    assert len(hashes) == 5


def test_the_hash_ignores_where_the_prompts_came_from(tmp_path: Path) -> None:
    first = load_workload(write(tmp_path / "a.jsonl", {"prompt": "Un, deux, où?"}))
    (tmp_path / "b.txt").write_bytes("\ufeff\r\nUn, deux, où?\r\n\r\n".encode())
    second = load_workload(tmp_path / "b.txt")
    assert first.sha256 == second.sha256
    assert len(bytes.fromhex(first.sha256)) == 32
    assert first.name != second.name


def test_the_hash_is_the_same_in_another_process() -> None:
    code = "from hsdopt.profiling.workload import load_workload; print(load_workload('mixed').sha256)"
    assert run_python(code) == load_workload("mixed").sha256


def test_json_lines_are_read_with_all_their_fields(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]
    path = write(
        tmp_path / "mine.jsonl",
        {"prompt": "Zero?", "id": 7, "task": "count", "reference": "0", "source": "ignored"},
        {"messages": turns, "prompt": None},
    )
    workload = load_workload(str(path))
    assert workload.name == str(path)
    assert workload.prompts == (
        Prompt("7", "Zero?", reference="0", task="count"),
        Prompt("prompt-2", messages=(Message("system", "Be brief."), Message("user", "One?"))),
    )


def test_blank_lines_windows_line_ends_and_unicode_separators_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n  {"prompt": "c"}\r\n'.encode())
    assert [prompt.text for prompt in load_workload(path)] == ["a\u2028b", "c"]


def test_plain_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.TXT"
    path.write_text('Say hello.\n\n   \n  {"prompt": "not JSON here"}  \n', encoding="utf-8")
    assert [(prompt.id, prompt.text) for prompt in load_workload(path)] == [
        ("prompt-1", "Say hello."),
        ("prompt-2", '{"prompt": "not JSON here"}'),
    ]


USER = {"role": "user", "content": "Hi"}
WRONG_LINES = [
    ('{"prompt": "x"', "Expecting ',' delimiter: line 1 column 15 (char 14)"),
    ("Say hello.", "plain text belongs in a .txt file"),
    ("[" * 100_000, "it is nested too deeply"),
    ('{"id": ' + "9" * 5000 + "}", "Exceeds the limit (4300 digits) for integer string conversion"),
    ('["prompt"]', 'expected a JSON object with prompt or messages, got ["prompt"]'),
    ("{}", "expected either prompt or messages, got neither"),
    ({"prompt": "x", "messages": [USER]}, "expected either prompt or messages, got both"),
    ({"prompt": 7}, "expected prompt to be a string, got 7"),
    ({"prompt": "x", "reference": ["y"]}, "expected reference to be a string, got ['y']"),
    ({"prompt": "x", "task": None}, "expected task to be a string, got None"),
    ({"prompt": "x", "id": True}, "expected id to be a string, got True"),
    ({"prompt": " \n"}, "expected a prompt with some text, got an empty one"),
    ({"messages": [{"role": "user", "content": ""}]}, "expected a prompt with some text, got an empty one"),
    ({"messages": []}, "expected messages that end with the user's, got no message"),
    ({"messages": "Hi"}, "expected messages to be a list, got 'Hi'"),
    ({"messages": ["Hi"]}, "expected message 1 to be an object, got 'Hi'"),
    ({"messages": [USER, {"role": "user"}]}, "expected the content of message 2, got none"),
    ({"messages": [{"role": "tool", "content": ""}]}, "expected the role of message 1 to be 'system', 'user' or"),
    ({"messages": [USER, {"role": "assistant", "content": "Hi"}]}, "end with the user's, got the assistant's"),
    ({"prompt": "a\ud800"}, "expected Unicode text, got half of a surrogate pair in 'a\\ud800'"),
    ({"prompt": "x", "id": "first"}, "expected a new id, got 'first', which line 1 has"),
]


@pytest.mark.parametrize(("line", "message"), WRONG_LINES)
def test_a_wrong_line_is_named_with_its_number(tmp_path: Path, line: str | dict[str, object], message: str) -> None:
    path = tmp_path / "mine.jsonl"
    wrong = line if isinstance(line, str) else json.dumps(line)
    path.write_text(f'{{"prompt": "ok", "id": "first"}}\n\n{wrong}\n{{"prompt": 1}}\n', encoding="utf-8")
    with pytest.raises(WorkloadError) as caught:
        load_workload(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200


def test_a_missing_file_names_the_built_in_sets(tmp_path: Path) -> None:
    expected = f"expected a prompt file or one of mixed, copy, chat, got '{tmp_path}/no', which does not exist"
    with pytest.raises(WorkloadError) as caught:
        load_workload(tmp_path / "no")
    assert str(caught.value) == expected


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as caught:
        load_workload(tmp_path)
    assert str(caught.value) == f"expected a prompt file, got the directory {tmp_path}: name a file in it"


@pytest.mark.parametrize(("name", "reason"), [("a\0b", "embedded null byte"), ("n" * 300, "File name too long")])
def test_an_impossible_name_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(WorkloadError, match=f"expected a readable prompt file, .*{reason}"):
        load_workload(name)


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_bytes_that_are_not_utf8_are_named_with_their_line(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine.{suffix}"
    path.write_bytes('{"prompt": "où"}\n'.encode() + '{"prompt": "où"}\n'.encode("latin-1"))
    with pytest.raises(WorkloadError) as caught:
        load_workload(path)
    assert str(caught.value) == f"{path}, line 2: expected UTF-8, got the byte 0xf9: save the file as UTF-8"


@pytest.mark.parametrize("content", ["", "\n \n"])
@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_zero_prompts_are_refused(tmp_path: Path, content: str, suffix: str) -> None:
    path = tmp_path / f"mine.{suffix}"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(WorkloadError) as caught:
        load_workload(path)
    assert str(caught.value) == f"expected at least one prompt, got none in {path}: add a prompt"


def test_values_built_by_hand_are_checked_too() -> None:
    with pytest.raises(WorkloadError, match="expected a text or messages for prompt 'a', got both or neither"):
        Prompt("a")
    with pytest.raises(WorkloadError, match="got both or neither"):
        Prompt("a", "One?", (Message("user", "One?"),))
    with pytest.raises(WorkloadError, match="expected a different id for every prompt of w, got 'a' twice"):
        Workload("w", (BASE, BASE))


CONVERSATION = Prompt("c", messages=(Message("system", "S"), Message("user", "U"), Message("assistant", "A")))


def test_a_text_without_a_template_is_encoded_as_it_is() -> None:
    assert render(Prompt("p", "Hé"), FakeTokenizer()) == [ord("H"), ord("é")]


def test_a_conversation_without_a_template_becomes_lines() -> None:
    tokens = render(CONVERSATION, FakeTokenizer())
    assert "".join(map(chr, tokens)) == "system: S\nuser: U\nassistant: A\nassistant:"


def test_a_template_takes_a_text_as_the_users_only_message() -> None:
    assert render(Prompt("p", "Hé"), FakeTokenizer("any")) == [2, ord("H"), ord("é"), 3]


def test_a_template_takes_a_conversation_as_it_is() -> None:
    assert render(CONVERSATION, FakeTokenizer("any")) == [1, ord("S"), 2, ord("U"), 3, ord("A"), 3]


def test_a_tokenizer_of_transformers_renders_as_its_template_says() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[U]": 0, "[A]": 1, "hello": 2, "there": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[U]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    prompt = Prompt("p", "hello there")
    assert render(prompt, tokenizer) == [2, 3]
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role\n') }}{% endif %}"
        "[U] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
    )
    assert render(prompt, tokenizer) == [0, 2, 3, 1]
    with pytest.raises(WorkloadError) as caught:
        render(CONVERSATION, tokenizer)
    expected = "expected the tokenizer's chat template to take prompt 'c', got TemplateError: no system role"
    assert str(caught.value) == expected


@pytest.mark.parametrize(("template", "around"), [(None, ((), ())), ("any", ((2,), (3,)))])
def test_a_turn_is_what_stands_around_every_request(template: str | None, around: tuple[tuple[int, ...], ...]) -> None:
    assert turn(FakeTokenizer(template)) == around


def test_a_prompt_that_gives_no_token_is_refused() -> None:
    with pytest.raises(WorkloadError, match="expected at least one token for prompt 'p', got none"):
        render(Prompt("p", ""), FakeTokenizer())


def test_loading_prompts_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from hsdopt.profiling.workload import load_workload; load_workload('chat');"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert run_python(code) == "[]"
