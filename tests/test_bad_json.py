"""JSON that is none, or holds something else, at every door through which it comes in: one short line, soon."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stack import refused
from tiny import tiny_model
from traced import traced_profile

from hsdopt.cli.align_saved import kept_of_target
from hsdopt.cli.common import load_plan
from hsdopt.cli.place import Place
from hsdopt.errors import HsdoptError, ModelError, WorkloadError
from hsdopt.files import LARGEST_DOCUMENT, excerpt, parse_json, read_json
from hsdopt.plan import LONGEST_TEXT, parse_plan, plan_to_json
from hsdopt.profiling import importers, load_workload
from hsdopt.profiling.workload import LARGEST_PROMPT_FILE
from hsdopt.report.page import _read_quality
from hsdopt.runtime.drafters import read_note, restored
from hsdopt.runtime.models import _is_whole

DIGITS = "9" * 5000
NO_JSON = {
    "deep": b"[" * 1_000_000,
    "deep objects": b'{"a":' * 500_000,
    "digits": f'{{"plan": {DIGITS}}}'.encode(),
    "NaN": b'{"plan": NaN}',
    "infinity": b'{"plan": -Infinity}',
    "UTF-16": "{}".encode("utf-16"),
    "Latin-1": b'{"plan": "\xe9"}',
    "zeros": b"\x00" * 1000,
    "cut short": b'{"plan": [1, 2',
    "empty": b"",
    "text": b"plan",
}
OTHER = {
    "list": b"[1]",
    "text in quotes": json.dumps("x" * 100_000).encode(),
    "number": b"5",
    "null": b"null",
    "a mark, then a list": b"\xef\xbb\xbf[1]",
    "half a pair": b'["\\ud800"]',
    "deep but read": b"[" * 500 + b"]" * 500,
}
BAD = {**NO_JSON, **OTHER}


def place_of(path: Path) -> Place:
    return Place(path.parent, path.name, ("runs",), resume=True)


DOORS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "plan": ("plan.json", lambda path: load_plan(str(path))),
    "prompts": ("prompts.jsonl", load_workload),
    "report": ("report.json", lambda path: place_of(path).finished({})),
    "note": ("hsdopt.json", lambda path: read_note(path.parent)),
    "shards": ("model.safetensors.index.json", lambda path: _is_whole(path.parent)),
    "plot": ("any.json", lambda path: _refusal_of("plot", path)),
    "simulate": ("p.json", lambda path: _refusal_of("simulate", _profile(path.parent), "--plan", path)),
}


def _profile(folder: Path) -> Path:
    traced_profile(3, prompts=8).save(folder / "profile.json")
    return folder / "profile.json"


def _refusal_of(*arguments: str | Path) -> None:
    raise HsdoptError(refused(*arguments))


def one_line(read: Callable[[], object]) -> str:
    """Return the message that comes soon, after checking that it is one short printable line."""
    begun = time.process_time()
    with pytest.raises(HsdoptError) as caught:
        read()
    assert time.process_time() - begun < 5
    message = str(caught.value)
    assert message.isprintable(), ascii(message)
    assert len(message) < 420, message
    return message


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("door", DOORS)
def test_bad_json_is_one_line_at_every_door(door: str, kind: str, tmp_path: Path) -> None:
    name, read = DOORS[door]
    (tmp_path / name).write_bytes(BAD[kind])
    message = one_line(lambda: read(tmp_path / name))
    assert "expected" in message


@pytest.mark.parametrize("door", DOORS)
def test_files_over_the_stated_size_are_not_parsed(door: str, tmp_path: Path) -> None:
    name, read = DOORS[door]
    limit = {"plan": LONGEST_TEXT, "simulate": LONGEST_TEXT, "prompts": LARGEST_PROMPT_FILE}.get(door, LARGEST_DOCUMENT)
    with (tmp_path / name).open("wb") as stream:
        stream.truncate(limit + 1)
    assert f"at most {limit // 2**20} MiB" in one_line(lambda: read(tmp_path / name))


def test_a_line_of_prompts_over_the_stated_size_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b"[" * (LARGEST_DOCUMENT + 1))
    assert "line 1: expected at most 32 MiB" in one_line(lambda: load_workload(tmp_path / "p.jsonl"))


def test_25_million_brackets_are_refused_soon(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_bytes(b"[" * 25_000_000)
    assert "nested too deeply" in one_line(lambda: read_json(tmp_path / "deep.json"))


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    plan = parse_plan("t(a:3)")
    (tmp_path / "plan.json").write_text(json.dumps(plan_to_json(plan)), encoding="utf-8-sig")
    assert load_plan(str(tmp_path / "plan.json")) == plan
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}', encoding="utf-8-sig")
    assert load_workload(tmp_path / "p.jsonl").prompts[0].text == "Hi"


@pytest.mark.parametrize("kind", BAD)
def test_records_from_elsewhere_count_as_none(kind: str, tmp_path: Path) -> None:
    (tmp_path / "alignment.json").write_bytes(BAD[kind])
    (tmp_path / "quality.json").write_bytes(BAD[kind])
    request: Any = SimpleNamespace(small=str(tmp_path), target="t")
    assert kept_of_target(request, (0,)) is None
    assert _read_quality(tmp_path / "quality.json") is None


@pytest.mark.parametrize("more", [{}, {"plans": 5}, {"measure": 1, "plans": []}, {"measure": "x", "plans": [1]}])
def test_a_record_of_quality_of_another_shape_counts_as_none(more: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "quality.json").write_text(json.dumps({"format": "hsdopt-quality", **more}))
    assert _read_quality(tmp_path / "quality.json") is None


@pytest.mark.parametrize(
    "note",
    [
        {"shared": 1},
        {"shared": {"left_out": True}},
        {"shared": {"left_out": "yes", "source": "x", "tensors": []}},
        {"shared": {"left_out": True, "source": 5, "tensors": []}},
        {"head_tokens": 5},
        {"head_tokens": []},
        {"head_tokens": ["a"]},
        {"head_tokens": [-1]},
        {"head_tokens": [1.5]},
        {"head_tokens": ["x" * 100_000]},
    ],
    ids=range(10),
)
def test_notes_of_another_shape_are_one_line(note: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "hsdopt.json").write_text(json.dumps(note))
    with pytest.raises(ModelError, match="align the drafter again"):
        read_note(tmp_path)
    one_line(lambda: read_note(tmp_path))


def test_a_small_head_of_tokens_that_the_model_lacks_is_one_line() -> None:
    network = tiny_model().network
    assert "expected head_tokens below" in one_line(lambda: restored(network, {"head_tokens": [10**6]}, str))


@pytest.mark.parametrize("index", [{}, {"weight_map": 1}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_of_shards_of_another_shape_is_one_line(index: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "weight_map" in one_line(lambda: _is_whole(tmp_path))


REPORTS = [
    {"plans": 5, "summary": []},
    {"plans": [], "summary": {}},
    {"plans": [1], "summary": None},
    {"plans": [{}], "summary": {}},
    {"plans": {"a": 1}, "summary": {}},
    {"plans": "x" * 100_000, "summary": "x" * 100_000},
]


@pytest.mark.parametrize("report", REPORTS, ids=range(len(REPORTS)))
def test_reports_of_another_shape_are_one_line(report: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report))
    one_line(lambda: _refusal_of("plot", tmp_path / "report.json", "-o", tmp_path / "plots"))


def test_a_finished_report_of_another_shape_is_one_line(tmp_path: Path) -> None:
    def show() -> None:
        with place_of(tmp_path / "report.json").showing():
            raise KeyError("plans")

    assert "replace it with --force" in one_line(show)


@pytest.mark.parametrize("row", [None, 5, "row", [], {1: 2}, {"question": 5, "answer": {}}, {"x" * 1000: 1}])
def test_rows_of_another_shape_are_one_line(row: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importers, "import_module", lambda _: SimpleNamespace(load_dataset=lambda *_, **__: [row]))
    assert "gsm8k, row 1: expected" in one_line(lambda: load_workload("gsm8k"))


def test_rows_with_half_a_surrogate_pair_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"question": "\ud800", "answer": "x"}
    monkeypatch.setattr(importers, "import_module", lambda _: SimpleNamespace(load_dataset=lambda *_, **__: [row]))
    with pytest.raises(WorkloadError, match="gsm8k, prompt 1: expected Unicode text"):
        load_workload("gsm8k")


@pytest.mark.parametrize(
    "value",
    ["x" * 10**7, [[[[[1]]]]], list(range(10**6)), {"a" * 10**6: 1}, 10**5000, [10**5000], "\n\x1b", "\ud800"],
    ids=range(8),
)
def test_excerpts_are_one_short_line_of_any_value(value: object) -> None:
    text = excerpt(value)
    assert text.isprintable()
    assert len(text) <= 63


def test_a_text_is_read_as_its_bytes_are() -> None:
    assert parse_json("\ufeff[1]", "it") == parse_json(b"\xef\xbb\xbf[1]", "it") == [1]


@pytest.mark.parametrize("path", ["a\0.json", "x" * 100_000 + ".json", "\n.json", "\ud800.json", "none.json"])
def test_a_path_that_cannot_be_is_one_line(path: str) -> None:
    one_line(lambda: load_plan(path))
