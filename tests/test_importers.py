"""Published data sets as workloads, on small files of the same shape; no hub is asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stack import refused

from hsdopt.errors import MissingExtraError, WorkloadError
from hsdopt.profiling import load_workload
from hsdopt.profiling.importers import DATASETS, dataset_lines

SHAPES = Path(__file__).parent / "data" / "datasets"
HUB = {
    "cnn_dailymail": ("abisee/cnn_dailymail", {"name": "3.0.0"}),
    "xsum": ("EdinburghNLP/xsum", {"data_dir": "default", "revision": "refs/convert/parquet"}),
    "iwslt2017-de-en": ("IWSLT/iwslt2017", {"data_dir": "iwslt2017-de-en", "revision": "refs/convert/parquet"}),
    "gsm8k": ("openai/gsm8k", {"name": "main"}),
}

Call = tuple[str, str, dict[str, Any]]


def serve(monkeypatch: pytest.MonkeyPatch, load: Callable[..., object]) -> None:
    """Put a `datasets` with this `load_dataset` in place of the real one."""
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SHAPES / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Serve the small files, and note what was asked for."""
    asked: list[Call] = []
    names = {path: name for name, (path, _) in HUB.items()}

    def load(path: str, *, split: str, **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401
        asked.append((path, split, options))
        return rows_of(names[path])

    serve(monkeypatch, load)
    return asked


@pytest.mark.parametrize("name", DATASETS)
def test_a_name_loads_prompts_with_references(name: str, calls: list[Call]) -> None:
    workload = load_workload(name)
    assert calls == [(HUB[name][0], "test[:200]", HUB[name][1])]
    assert workload.name == name
    assert len(workload) == 2
    assert len({prompt.id for prompt in workload}) == 2
    assert all(prompt.text and prompt.reference for prompt in workload)
    assert len(workload.profiling) == len(workload.validation) == 1
    assert load_workload(name).sha256 == workload.sha256


def test_fields_land_where_they_belong(calls: list[Call]) -> None:
    news = dataset_lines("cnn_dailymail")[0]
    assert news["id"] == "92c514c913c0bdfe25341af9fd72b29db544099b"
    assert news["prompt"].endswith("The old lighthouse opens to visitors on Sunday. Tickets cost two crowns .")
    assert news["reference"] == "Lighthouse opens on Sunday .\nTickets cost two crowns ."
    german, thanks = dataset_lines("iwslt2017-de-en")
    assert german["prompt"].endswith(": Vor einigen Jahren hatte ich einen Garten.")
    assert german["reference"] == "Some years ago, I had a garden."
    assert [german["id"], thanks["id"]] == ["iwslt2017-de-en-1", "iwslt2017-de-en-2"]
    sums = dataset_lines("gsm8k")[0]
    assert sums["reference"] == "The pens cost 3*2=6 crowns.\nShe gets 10-6=4 crowns back.\n#### 4"
    assert dataset_lines("gsm8k", rows=7)
    assert calls[-1][1] == "test[:7]"


def test_rows_without_text_are_left_out(calls: list[Call]) -> None:
    assert len(rows_of("xsum")) == 3
    assert [line["id"] for line in dataset_lines("xsum")] == ["38264402", "36451468"]


@pytest.mark.parametrize("name", DATASETS)
def test_rows_of_another_shape_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, lambda *_, **__: [rows_of(name)[0], {"text": "a", "label": 1}])
    with pytest.raises(WorkloadError, match=rf"^{name}, row 2: expected .*got a row of text, label"):
        load_workload(name)


def test_no_hub_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nmore")

    serve(monkeypatch, unreachable)
    with pytest.raises(WorkloadError, match=r"in the cache of datasets or on a hub \(openai/gsm8k\).*Couldn't reach"):
        load_workload("gsm8k")
    said = refused("profile", "--target", "a", "--draft", "b", "--prompts", "gsm8k", "-o", tmp_path / "profile.json")
    assert "or name a prompt file" in said


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"xsum need datasets: install hsdopt with its extra \[datasets\]"):
        load_workload("xsum")


def test_a_file_of_the_same_name_is_reached_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xsum").write_text('{"prompt": "Hi."}\n')
    monkeypatch.chdir(tmp_path)
    assert [prompt.text for prompt in load_workload("./xsum")] == ["Hi."]
