"""Data sets of published results as prompts with references, read through `datasets` from a hub or its cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

from hsdopt.errors import MissingExtraError, WorkloadError
from hsdopt.files import excerpt

__all__ = ["DATASETS", "cnn_dailymail", "dataset_lines", "gsm8k", "iwslt2017", "xsum"]

ROWS = 200
"""Rows taken of a test split: a workload is run whole, and thousands of prompts would take days."""

Line = dict[str, str]
_CALCULATION = re.compile(r"<<[^<>]*>>")


def cnn_dailymail(row: Mapping[str, Any]) -> Line:
    """Return the prompt line of a row of CNN/DailyMail: an article, and its highlights as the reference.

    Examples
    --------
    >>> cnn_dailymail({"article": "It rained.", "highlights": "Rain .", "id": "ab"})["reference"]
    'Rain .'
    """
    prompt = f"Summarise the following article in a few short sentences:\n\n{_text(row, 'article')}"
    return {"id": _text(row, "id"), "prompt": prompt, "reference": _text(row, "highlights"), "task": "summarising"}


def xsum(row: Mapping[str, Any]) -> Line:
    """Return the prompt line of a row of XSum: a document, and its one-sentence summary as the reference.

    Examples
    --------
    >>> xsum({"document": "It rained.", "summary": "Rain fell.", "id": "1"})["reference"]
    'Rain fell.'
    """
    prompt = f"Summarise the following article in one sentence:\n\n{_text(row, 'document')}"
    return {"id": _text(row, "id"), "prompt": prompt, "reference": _text(row, "summary"), "task": "summarising"}


def iwslt2017(row: Mapping[str, Any]) -> Line:
    """Return the prompt line of a row of IWSLT 2017 De-En: German to translate, and English as the reference.

    Examples
    --------
    >>> iwslt2017({"translation": {"de": "Es regnet.", "en": "It is raining."}})["prompt"]
    'Translate from German into English: Es regnet.'
    """
    pair = row.get("translation")
    if not isinstance(pair, Mapping):
        raise WorkloadError(f"expected a translation, got a row of {_keys(row)}: is this another data set?")
    prompt = f"Translate from German into English: {_text(pair, 'de')}"
    return {"prompt": prompt, "reference": _text(pair, "en"), "task": "translation"}


def gsm8k(row: Mapping[str, Any]) -> Line:
    """Return the prompt line of a row of GSM8K: a question, and its worked answer without calculator marks.

    Examples
    --------
    >>> gsm8k({"question": "2 and 3?", "answer": "It is 2+3=<<2+3=5>>5. #### 5"})["reference"]
    'It is 2+3=5. #### 5'
    """
    answer = _CALCULATION.sub("", _text(row, "answer"))
    return {"prompt": _text(row, "question"), "reference": answer, "task": "arithmetic"}


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a data set lies on the hub, and how its rows become lines."""

    path: str
    convert: Callable[[Mapping[str, Any]], Line]
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


_PARQUET = "refs/convert/parquet"  # the hub's own copy of data sets that come as a script, which nobody runs any more
DATASETS: Mapping[str, _Source] = MappingProxyType(
    {
        "cnn_dailymail": _Source("abisee/cnn_dailymail", cnn_dailymail, {"name": "3.0.0"}),
        "xsum": _Source("EdinburghNLP/xsum", xsum, {"revision": _PARQUET, "data_dir": "default"}),
        "iwslt2017-de-en": _Source("IWSLT/iwslt2017", iwslt2017, {"revision": _PARQUET, "data_dir": "iwslt2017-de-en"}),
        "gsm8k": _Source("openai/gsm8k", gsm8k, {"name": "main"}),
    }
)
"""Names that `load_workload` takes besides built-in sets and files."""


def dataset_lines(name: str, *, rows: int = ROWS) -> list[Line]:
    """Return the first rows of a data set's test split as lines of a prompt file.

    Parameters
    ----------
    name : str
        One of `DATASETS`.
    rows : int
        How many to take.

    Raises
    ------
    MissingExtraError
        If `datasets` is not installed.
    WorkloadError
        If the data set is neither in its cache nor on a hub that can be reached, or its rows have another shape.

    Notes
    -----
    Rows without a request or without an answer are left out.
    """
    source = DATASETS[name]
    try:
        load = import_module("datasets").load_dataset
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"the prompts of {name} need {error.name}: install hsdopt with its extra [datasets], or name a prompt file"
        ) from error
    return _converted(name, _rows(name, source, load, rows), source.convert)


def _rows(name: str, source: _Source, load: Callable[..., Any], rows: int) -> list[Mapping[str, Any]]:
    try:
        return list(load(source.path, split=f"test[:{rows}]", **source.options))
    except Exception as error:  # the hub's client raises those of whichever HTTP library it uses
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise WorkloadError(
            f"expected {name} in the cache of datasets or on a hub ({source.path}); got neither ({said}): "
            "connect once to fetch it, or name a prompt file"
        ) from error


def _converted(
    name: str, rows: Iterable[Mapping[str, Any]], convert: Callable[[Mapping[str, Any]], Line]
) -> list[Line]:
    lines = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise WorkloadError(f"{name}, row {number}: expected an object, got {excerpt(row)}")
        try:
            line = convert(row)
        except _EmptyError:  # published splits have a few such rows
            continue
        except WorkloadError as error:
            raise WorkloadError(f"{name}, row {number}: {error}") from None
        lines.append({"id": f"{name}-{number}", **line})
    return lines


class _EmptyError(WorkloadError):
    """A row without a request or without an answer."""


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise WorkloadError(f"expected a text under {key!r}, got a row of {_keys(row)}: is this another data set?")
    if not value.strip():
        raise _EmptyError(f"expected some text under {key!r}, got none")
    return value.strip()


def _keys(row: Mapping[str, Any], *, limit: int = 100) -> str:
    text = ", ".join(key if isinstance(key, str) and key.isprintable() else excerpt(key) for key in row)
    return text if len(text) <= limit else f"{text[:limit]}..."
