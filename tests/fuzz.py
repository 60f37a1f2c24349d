"""Damaged inputs for every door that a file or a plan comes through, and a count of what came of them.

``python tests/fuzz.py KIND COUNT SEED`` prints the outcome as JSON. Each kind runs in a process of its own, so that
its memory can be told from that of others. The same seed makes the same inputs.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from traced import CPU, traced_profile
from typer.testing import CliRunner

import hsdopt
from hsdopt.acceptance import Strays
from hsdopt.cli.common import load_plan
from hsdopt.errors import HsdoptError
from hsdopt.plan import Plan, format_plan, parse_plan, plan_from_json, plan_to_json
from hsdopt.profiles import Profile, Setting, traces_path

SLOWEST = 2.0
"""Seconds of the processor that one input may take."""

MOST_MEMORY = 300 * 2**20
"""Bytes that inputs may take on top of what the valid ones took."""

_STOP_AFTER = 20
"""Seconds after which an input is given up."""

_ROOM = 2 * 2**30
"""Bytes of address space beyond which an allocation fails: enough to measure a greedy reader, too little to harm."""

Json = Any
"""A JSON value, of any shape."""

Make = Callable[[random.Random], tuple[object, Callable[[], None]]]
"""Make one input; return it (to be shown) and what hands it to its door."""


class GivenUpError(BaseException):
    """An input took so long that it was given up; no ``except Exception`` swallows this."""


class UncleanError(Exception):
    """An input was taken, or refused, in a way that it must not be."""


@dataclass
class Outcome:
    """What came of the inputs of one kind."""

    kind: str
    seed: int
    count: int = 0
    taken: int = 0
    refused: int = 0
    slowest: float = 0.0
    slowest_index: int = -1
    memory: int = 0
    memory_index: int = -1
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def fail(self, signature: str, index: int, shown: object, said: object) -> None:
        first = {"count": 0, "index": index, "input": _cut(repr(shown)), "said": _cut(str(said))}
        self.failures.setdefault(signature, first)["count"] += 1


def _cut(text: str, limit: int = 240) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} letters)"


# --------------------------------------------------------------------------------------------- damage to bytes

_TOKENS = (
    *(b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\n", b"\r\n", b"\x1b[31m", b'"\\ud800"'),
    *(b"NaN", b"1e999", b"-1", b"null", b"true", b"[" * 5000, b'{"a":' * 3000, b"9" * 5000, b"," * 50, b" " * 4000),
)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return `data` after one to four edits: flipped bits, cuts, splices, repeats, and odd bytes put in."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice((_flip, _truncate, _splice, _repeat, _remove, _insert))(data, rng)
    return data


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice((1, 2, 8, 64, 1024)))


def _flip(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20)) if found else 0):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _splice(data: bytes, rng: random.Random) -> bytes:
    (start, end), (at, until) = _span(data, rng), _span(data, rng)
    return data[:at] + data[start:end] + data[until:]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    return data[:end] + data[start:end] * rng.choice((1, 1, 2, 50)) + data[end:]


def _remove(data: bytes, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + data[end:]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at, until = _span(data, rng)
    return data[:at] + rng.choice(_TOKENS) + data[rng.choice((at, until)) :]


# ---------------------------------------------------------------------------------------- damage to JSON values

_RAW = {
    "@digits": "9" * 5000,
    "@negative": "-" + "9" * 5000,
    "@overflow": "1e999",
    "@deep": "[" * 100_000 + "]" * 100_000,
    "@deeper": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "@nested": "[" * 500 + "]" * 500,
}
"""What json.dumps cannot write, by the strings that stand for it."""

_LEAVES = (
    *(-1, 0, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf),
    *(True, False, None, "x", "", "\ud800", "\n", "lookup", "a" * 10_000, [], {}, [[]], [1], {"a": 1}, [None]),
    *_RAW,
)


def damaged_value(value: Json, rng: random.Random) -> Json:
    """Return a copy of a JSON value after one to three edits of its leaves, keys and lists."""
    box = [json.loads(json.dumps(value))]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder, key = _place(box, rng)
        rng.choice((_put_leaf, _put_leaf, _put_leaf, _drop, _rename, _double, _move, _add))(holder, key, box, rng)
    return box[0]


def _place(box: list[Any], rng: random.Random) -> tuple[Any, Any]:
    """Walk down from the top, so that fields of the top are met as often as the many leaves below them."""
    holder: Any = box
    key: Any = 0
    while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.85:
        holder = holder[key]
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    return holder, key


def _leaf(rng: random.Random) -> Json:
    """Return a leaf of its own, since lists and objects are edited further."""
    return deepcopy(rng.choice(_LEAVES))


def _put_leaf(holder: Json, key: Json, box: list[Json], rng: random.Random) -> None:
    holder[key] = _leaf(rng)


def _drop(holder: Json, key: Json, box: list[Json], rng: random.Random) -> None:
    if holder is not box:
        del holder[key]


def _rename(holder: Json, key: Json, box: list[Json], rng: random.Random) -> None:
    if isinstance(holder, dict):
        holder[rng.choice((f"{key}2", "", str(key).upper(), "lookup", "\n", "\x1b[31m"))] = holder.pop(key)


def _double(holder: Json, key: Json, box: list[Json], rng: random.Random) -> None:
    if isinstance(holder, list) and holder is not box:
        holder[key:key] = [holder[key]] * rng.choice((1, 2, 50))


def _move(holder: Json, key: Json, box: list[Json], rng: random.Random) -> None:
    other, where = _place(box, rng)
    # as text, so that a value never comes to hold itself
    holder[key] = json.loads(json.dumps(other[where]))


def _add(holder: Json, key: Json, box: list[Json], rng: random.Random) -> None:
    if isinstance(holder, dict):
        holder[rng.choice(("extra", "kind", "row", "source", "0"))] = _leaf(rng)
    elif holder is not box:
        holder.append(_leaf(rng))


def written(value: Json) -> bytes:
    """Return a damaged value as JSON, with what the json module would not write."""
    text = json.dumps(value)
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


def damaged_json(value: Json, rng: random.Random) -> bytes:
    """Return the JSON of a value, damaged in its bytes or in its values."""
    whole = written(damaged_value(value, rng)) if rng.random() < 0.7 else json.dumps(value).encode()
    return damaged(whole, rng) if whole == json.dumps(value).encode() or rng.random() < 0.1 else whole


# --------------------------------------------------------------------------------------------- damage to arrays

_TYPES = ("f8", "f4", "f2", "i1", "u1", "u8", ">i8", "?", "U8", "S3", "c16", "M8[s]", "O")
_NUMBERS = (-1, 0, 1, 2, 10**6, 2**31, 2**62, -(2**63), math.nan, math.inf, -math.inf, -0.5, 1.5, 1e300)


def damaged_arrays(arrays: dict[str, np.ndarray], rng: random.Random) -> dict[str, np.ndarray]:
    """Return the arrays after one or two edits of their types, shapes, values and names."""
    found = {name: values.copy() for name, values in arrays.items()}
    # what numpy says of an edit that makes no sense is no fault of the reader
    senseless = suppress(ValueError, TypeError, IndexError, OverflowError, RuntimeError)
    for _ in range(rng.choice((1, 1, 2))):
        with np.errstate(all="ignore"), warnings.catch_warnings(), senseless:
            warnings.simplefilter("ignore")
            edit = rng.choice((_cast, _shape, _shape, _numbers, _numbers, _lose, _swap, _more))
            edit(found, rng.choice(list(found)), rng)
    return found


def _cast(found: dict[str, np.ndarray], name: str, rng: random.Random) -> None:
    found[name] = found[name].astype(rng.choice(_TYPES))


def _shape(found: dict[str, np.ndarray], name: str, rng: random.Random) -> None:
    values = found[name]
    size = values.size
    made = (values[:-1], values[:0], values.reshape(-1, 1), values.reshape(1, -1), values[:1].reshape(()))
    more = (np.resize(values, size + 1), np.resize(values, 2 * size), np.resize(values, (size, 2)), values[::-1])
    found[name] = rng.choice((*made, *more))


def _numbers(found: dict[str, np.ndarray], name: str, rng: random.Random) -> None:
    values = found[name]
    number = rng.choice(_NUMBERS)
    if rng.random() < 0.5 and values.dtype.kind in "iu" and not float(number).is_integer():
        number = -1
    if isinstance(number, float):
        values = found[name] = values.astype("f8")
    where = slice(None) if rng.random() < 0.3 else rng.randrange(values.shape[0])
    values[where] = number


def _lose(found: dict[str, np.ndarray], name: str, rng: random.Random) -> None:
    del found[name]


def _swap(found: dict[str, np.ndarray], name: str, rng: random.Random) -> None:
    other = rng.choice(list(found))
    found[name], found[other] = found[other], found[name]


def _more(found: dict[str, np.ndarray], name: str, rng: random.Random) -> None:
    other = rng.choice(("extra", "choice/9", "choice/x", "choice/0/key", "surprise/7/key", "top/²", "lookup/", "../up"))
    found[other] = found[name]


def packed(arrays: dict[str, np.ndarray]) -> bytes:
    """Return the bytes of a traces file, with whatever the arrays hold."""
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def bomb(arrays: dict[str, np.ndarray], rng: random.Random) -> bytes:
    """Return a small file in which one array would take 400 MB, or says that it holds more than any memory."""
    name = rng.choice(list(arrays))
    stream = io.BytesIO()
    length = rng.choice((50 * 10**6, 10**15))
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for other, values in arrays.items():
            with file.open(f"{other}.npy", "w") as member:
                if other != name:
                    np.lib.format.write_array(member, values)
                    continue
                np.lib.format.write_array_header_1_0(
                    member, {"descr": "<i8", "fortran_order": False, "shape": (length,)}
                )
                for _ in range(400 if length < 10**9 else 1):
                    member.write(bytes(10**6))
    return stream.getvalue()


# ------------------------------------------------------------------------------------------------------- doors


def not_a_file(path: Path, rng: random.Random) -> bool:
    """Now and then put at `path` what is no sensible file: a folder, an endless device, or one that takes no room."""
    if rng.random() >= 0.01:
        return False
    if rng.random() < 0.3:
        path.mkdir()
    elif rng.random() < 0.5:
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**30)
    return True


def put(path: Path, data: bytes) -> None:
    """Write a file, whatever stood in its place."""
    clear(path)
    path.write_bytes(data)


def clear(path: Path) -> None:
    """Remove what stands at `path`."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


_PLANS = (
    "big(small:5)",
    "big(mid:8(small:3+(lookup:10), lookup:4, lenience=1.5), small:..14(lookup:10), lookup:10)",
    'bild(big, "org/small", fallback=0.6, rollback=inf, max_draft=5, stride=3, semantics=reference)',
    "big(mid:2x(small:3))",
)
_SIGNS = (
    *("(", ")", ":", ",", "=", "+", "x", "..", " ", '"', "\\", "\n", "\0", "²", "٣", "é", "{", "}", "null"),
    *("big", "small", "mid", "lookup", "a.b-c", "bild", "bild(", "lenience=", "fallback=", "rollback=", "max_draft="),
    *("stride=", "semantics=paper", "inf", "1", "24", "0.5", "1e999", "-1", "9" * 20, "9" * 5000),
    "big(a:1" + "(a:1" * 2000,
)

notations = st.lists(st.sampled_from(_SIGNS) | st.text(max_size=3), max_size=14).map("".join) | st.recursive(
    st.sampled_from(("a", "b", "c", "d", "lookup")),
    lambda inner: st.builds(
        lambda top, parts: f"{top.partition('(')[0]}({', '.join(parts)})",
        inner,
        st.lists(
            st.builds(
                lambda below, length: ":".join((below.partition("(")[0], length + "".join(below.partition("(")[1:]))),
                inner,
                st.sampled_from(("1", "5", "3+", "2x", "..9", "0", "007")),
            ),
            min_size=1,
            max_size=3,
        ),
    ),
    max_leaves=8,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(("level", "bild")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(("kind", "model", "row", "lenience", "level", "length", "stop", "draft", "tables", "plan")),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


def drawn(strategy: st.SearchStrategy[Any], count: int, start: int) -> list[Any]:
    """Return what hypothesis draws, in the order of drawing; nothing is tried here, so nothing is shrunk."""
    found: list[Any] = []

    @seed(start)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(strategy)
    def collect(value: object) -> None:
        found.append(value)

    collect()
    return found


def notation(folder: Path, count: int, start: int) -> Make:
    """Plans in notation: signs in any order, trees of names, and damaged plans."""
    waiting = drawn(notations, max(1, count // 2), start)

    def make(rng: random.Random) -> tuple[object, Callable[[], None]]:
        if waiting and rng.random() < 0.5:
            text = waiting.pop()
        else:
            base = rng.choice(_PLANS) if rng.random() < 0.8 else json.dumps(rng.choice(_PLAN_VALUES))
            text = damaged(base.encode(), rng).decode("utf-8", rng.choice(("replace", "surrogateescape", "ignore")))
        return text, lambda: same_plan(parse_plan(text))

    return make


def same_plan(plan: Plan) -> None:
    """Hold a plan that was taken to its own notation and JSON."""
    if parse_plan(format_plan(plan)) != plan:
        raise UncleanError("a plan that its own notation does not give back")
    if plan_from_json(json.loads(json.dumps(plan_to_json(plan), allow_nan=False))) != plan:
        raise UncleanError("a plan that its own JSON does not give back")
    str(plan)


_ADAPTIVE = {
    "kind": "adaptive",
    "model": "big",
    "draft": {"drafter": "mid", "length": 3},
    "tables": {"mid": [None, {"drafter": "lookup", "length": 4}, {"drafter": "lookup", "length": 4}]},
}
_PLAN_VALUES = [
    *(plan_to_json(parse_plan(text)) for text in _PLANS),
    {"format": "hsdopt-plan", "version": 1, "plan": _ADAPTIVE},
]


def plan_json(folder: Path, count: int, start: int) -> Make:
    """Plans in JSON, as values and as files."""
    waiting = drawn(json_values, max(1, count // 4), start)
    path = folder / "plan.json"

    def make(rng: random.Random) -> tuple[object, Callable[[], None]]:
        if waiting and rng.random() < 0.25:
            value = waiting.pop()
            whole = {"format": "hsdopt-plan", "version": 1, "plan": value} if rng.random() < 0.8 else value
            return whole, lambda: same_plan(plan_from_json(whole))
        clear(path)
        if not_a_file(path, rng):
            return "not a file", lambda: same_plan(load_plan(str(path)))
        value = rng.choice(_PLAN_VALUES)
        data = damaged_json({"plan_file": value} if rng.random() < 0.1 else value, rng)
        put(path, data)
        return data, lambda: same_plan(load_plan(str(path)))

    return make


def tiny_profile(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Save a small profile that has every field; return its JSON and its arrays."""
    speeds = {name: CPU[name] for name in ("lookup", "int4", "big")}
    made = traced_profile(prompts=3, length=8, milliseconds=speeds, agree={"int4": 0.8})
    few = {
        name: tuple(s for s in samples if s.tokens in (1, 2, 4, 8, 16, 32) and s.context != 32)
        for name, samples in made.samples.items()
    }
    rng = np.random.default_rng(0)
    size = len(made.traces or ())
    traces = replace(
        made.traces,
        probability={name: rng.uniform(0.1, 1, size) for name in ("int4", "big")},
        overlap={("int4", "big"): rng.uniform(0.3, 1, size)},
        ratio={("int4", "big"): rng.uniform(0.3, 1, size)},
    )
    made = replace(
        made,
        samples=few,
        traces=traces,
        setting=Setting(max_new_tokens=8),
        lookup={"previous": np.arange(4), "following": np.arange(4)[::-1].copy()},
        overhead={"draft": 1e-4, "verify": 2e-4},
        strays={("int4", "big"): Strays({(3, 3, 1): 4, (2, 2, 0): 3})},
        provenance={"threads": 1, "device": "cpu", "workload": {"name": "mixed"}},
    )
    made.save(path)
    with np.load(traces_path(path)) as arrays:
        return json.loads(path.read_text()), dict(arrays)


def solved(path: Path, family: str) -> None:
    """Load a profile, and solve it if it loads: the answer must be a number above 0."""
    profile = Profile.load(path)
    share = {"max_deviation": 0.5} if family == "bild" else {}
    found = hsdopt.solve(profile, family=family, max_draft_length=4, interval=2, **share)
    if not (math.isfinite(found.seconds_per_token) and found.seconds_per_token > 0):
        raise UncleanError(f"an answer of {found.seconds_per_token} seconds a token")
    if not (math.isfinite(found.speedup) and found.speedup > 0):
        raise UncleanError(f"an answer of a speed-up of {found.speedup}")


def profile_json(folder: Path, count: int, start: int) -> Make:
    """Profiles of which the JSON is damaged."""
    path = folder / "profile.json"
    value, _ = tiny_profile(path)

    def make(rng: random.Random) -> tuple[object, Callable[[], None]]:
        family = rng.choice(("all", "all", "bild", "speculative"))
        clear(path)
        if not_a_file(path, rng):
            return "not a file", lambda: solved(path, family)
        data = damaged_json(value, rng)
        put(path, data)
        return _difference(json.dumps(value).encode(), data), lambda: solved(path, family)

    return make


def _alike(one: bytes, other: bytes) -> int:
    """Return how many of the first bytes are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _difference(whole: bytes, data: bytes) -> bytes:
    """Return the damaged stretch of a long text, with a little of what stands round it."""
    start = _alike(whole, data)
    end = _alike(whole[start:][::-1], data[start:][::-1])
    return data[max(0, start - 60) : len(data) - end + 20]


def traces(folder: Path, count: int, start: int) -> Make:
    """Profiles of which the arrays are damaged; in most the checksum is made to fit."""
    path = folder / "profile.json"
    value, arrays = tiny_profile(path)
    beside = traces_path(path)
    whole = beside.read_bytes()

    def make(rng: random.Random) -> tuple[object, Callable[[], None]]:
        family = rng.choice(("all", "all", "bild", "speculative"))
        clear(beside)
        if not_a_file(beside, rng):
            path.write_text(json.dumps(value))
            return "not a file", lambda: solved(path, family)
        shown: object
        if rng.random() < 0.01:
            data = bomb(arrays, rng)
            shown = f"{len(data)} bytes that would be many"
        elif rng.random() < 0.75:
            found = damaged_arrays(arrays, rng)
            data = packed(found)
            shown = _changes(arrays, found)
        else:
            shown = data = damaged(whole, rng)
        sha = hashlib.sha256(data).hexdigest()
        kept = value["traces_sha256"]
        path.write_text(json.dumps({**value, "traces_sha256": kept if rng.random() < 0.05 else sha}))
        put(beside, data)
        return shown, lambda: solved(path, family)

    return make


def _changes(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> str:
    lost = [f"without {name}" for name in old if name not in new]
    changed = [
        f"{name}: {values.dtype} {values.shape} {values.ravel()[:4]}"
        for name, values in new.items()
        if name not in old or values.dtype != old[name].dtype or not np.array_equal(values, old[name])
    ]
    return "; ".join((*lost, *changed))


def journal(folder: Path, count: int, start: int) -> Make:
    """Journals: lines damaged in their values, and files in their bytes."""
    from hsdopt.profiling.journal import Journal  # noqa: PLC0415 - torch comes with it

    path = folder / "profile.json.partial"
    header = {"models": {"big": "a", "small": "b"}, "contexts": [32, 64], "temperature": 0.0, "plans": ["big"]}
    lines: list[dict[str, Any]] = [
        {"header": header},
        *({"cost": {"model": "big", "tokens": n, "context": 32, "repeat": 0, "seconds": n / 7}} for n in range(6)),
        {"trace": {"tokens": [1, 2, 3], "choice": {"big": [1, 2, 3]}}},
    ]
    whole = b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    def hand_over(data: bytes | None) -> None:
        try:
            found = Journal(path, header, resume=True)
        except HsdoptError:
            if data is not None and path.read_bytes() != data:
                raise UncleanError("a journal that was refused, and changed") from None
            raise
        if not all(isinstance(record, dict) for record in found.records):
            raise UncleanError("records that are no objects")
        if data is None:
            return
        found.add(note=1)
        if Journal(path, header, resume=True).records != found.records:
            raise UncleanError("a journal that reads otherwise after a line more")

    def make(rng: random.Random) -> tuple[object, Callable[[], None]]:
        clear(path)
        if not_a_file(path, rng):
            return "not a file", lambda: hand_over(None)
        if rng.random() < 0.5:
            index = rng.randrange(len(lines))
            texts = [json.dumps(line).encode() for line in lines]
            texts[index] = damaged_json(lines[index], rng)
            data = b"\n".join(texts) + b"\n"
        else:
            data = damaged(whole, rng)
        put(path, data)
        return _difference(whole, data), lambda: hand_over(data)

    return make


def prompts(folder: Path, count: int, start: int) -> Make:
    """Files of prompts, as JSON lines and as plain text."""
    from hsdopt.profiling.workload import load_workload  # noqa: PLC0415 - torch comes with it

    lines: list[dict[str, Any]] = [
        {"prompt": "Say 1 twice.", "id": 7, "task": "a"},
        {"prompt": "Say 2 twice.", "reference": "2 2"},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}], "id": "why"},
        {"prompt": "Grüße — 你好", "task": "b"},
    ]

    def hand_over(path: Path) -> None:
        found = load_workload(path)
        if not (len(found) and len(found.sha256) == 64):
            raise UncleanError("a workload of nothing")
        half = found.profiling
        if not half.tasks or len(found.take(2)) > 2:
            raise UncleanError("half a workload of nothing")

    def make(rng: random.Random) -> tuple[object, Callable[[], None]]:
        path = folder / rng.choice(("prompts.jsonl", "prompts.jsonl", "prompts.txt"))
        clear(path)
        if not_a_file(path, rng):
            return "not a file", lambda: hand_over(path)
        texts = [json.dumps(line, ensure_ascii=rng.random() < 0.5).encode() for line in lines]
        if rng.random() < 0.5:
            index = rng.randrange(len(lines))
            texts[index] = damaged_json(lines[index], rng)
            data = b"\n".join(texts) + b"\n"
        else:
            data = damaged(b"\n".join(texts), rng)
        put(path, data)
        return data, lambda: hand_over(path)

    return make


def cli(folder: Path, count: int, start: int) -> Make:
    """Profiles and plans as the command line takes them: exit code 0, or 2 and one line."""
    from hsdopt.cli.app import app  # noqa: PLC0415 - the other kinds do without

    whole, plan = folder / "whole" / "profile.json", folder / "plan.json"
    whole.parent.mkdir()
    tiny_profile(whole)
    inner = {kind: KINDS[kind](folder, 1, start) for kind in ("profile_json", "traces", "plan_json")}

    def hand_over(arguments: list[str]) -> None:
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
        if result.exit_code not in (0, 2):
            raise result.exception or UncleanError(f"exit code {result.exit_code}")
        if result.exit_code == 2:
            if result.stdout or "Traceback" in result.stderr or len(result.stderr.splitlines()) != 1:
                raise UncleanError("a refusal of other than one line on stderr")
            raise HsdoptError(result.stderr.strip())

    def make(rng: random.Random) -> tuple[object, Callable[[], None]]:
        kind = rng.choice(list(inner))
        if kind != "profile_json":  # what the last input left
            clear(folder / "profile.json")
            tiny_profile(folder / "profile.json")
        shown, _ = inner[kind](rng)
        profile = str(whole if kind == "plan_json" else folder / "profile.json")
        if kind == "plan_json" and isinstance(shown, dict):
            put(plan, json.dumps(shown).encode())
        simulate = ["simulate", profile, "--tokens", "200", "--json", "--plan"]
        others = (["solve", profile, "--json"], ["solve", profile], [*simulate, "big(int4:3)"])
        arguments = [*simulate, str(plan)] if kind == "plan_json" else rng.choice(others)
        return (kind, shown), lambda: hand_over(arguments)

    return make


KINDS: dict[str, Callable[[Path, int, int], Make]] = {
    "notation": notation,
    "plan_json": plan_json,
    "profile_json": profile_json,
    "traces": traces,
    "journal": journal,
    "prompts": prompts,
    "cli": cli,
}


# ----------------------------------------------------------------------------------------------------- running


def run(kind: str, count: int, start: int, *, only: int | None = None) -> Outcome:
    """Hand `count` inputs of a kind to its door, and say what came of them."""
    outcome = Outcome(kind, start)
    with tempfile.TemporaryDirectory() as name, _limits():
        make = KINDS[kind](Path(name), count, start)
        valid(kind, Path(name))
        before = _memory("VmRSS")
        for index in range(count) if only is None else (only,):
            shown, hand_over = make(random.Random(f"{start}/{kind}/{index}"))
            attempt(outcome, index, shown, hand_over)
            if (taken := _memory("VmHWM") - before) > outcome.memory:
                if taken > MOST_MEMORY:
                    outcome.fail("too much memory", index, shown, f"{taken // 2**20} MiB")
                outcome.memory, outcome.memory_index = taken, index
    return outcome


def valid(kind: str, folder: Path) -> None:
    """Take what is undamaged first: what that imports and keeps is no cost of the damaged."""
    if kind in ("profile_json", "traces", "cli"):
        for family in ("all", "bild", "speculative"):
            solved(folder / "profile.json", family)
    for value, text in zip(_PLAN_VALUES, _PLANS, strict=False):
        same_plan(plan_from_json(value))
        same_plan(parse_plan(text))
    with suppress(OSError):  # the peak so far is that of imports
        Path("/proc/self/clear_refs").write_text("5")


def attempt(outcome: Outcome, index: int, shown: object, hand_over: Callable[[], None]) -> None:
    """Hand one input over, and hold its door to a clean answer in time."""
    started = time.process_time()
    outcome.count += 1
    try:
        with _given_up_after(_STOP_AFTER):
            hand_over()
        outcome.taken += 1
    except HsdoptError as error:
        outcome.refused += 1
        lines = str(error).split("\n")
        if len(lines) not in ((1, 3) if outcome.kind in ("notation", "plan_json") else (1,)):
            outcome.fail(f"a message of several lines: {_inside(error)}", index, shown, error)
        if len(str(error)) > 20_000:
            outcome.fail(f"a message of {len(str(error)) // 1000},000 letters: {_inside(error)}", index, shown, error)
    except (Exception, GivenUpError) as error:  # noqa: BLE001 - whatever it is, it is counted
        said = error if isinstance(error, UncleanError) else ""
        outcome.fail(f"{type(error).__name__} {said} in {_inside(error)}", index, shown, error)
    taken = time.process_time() - started
    if taken > SLOWEST:
        outcome.fail("too slow", index, shown, f"{taken:.1f} s")
    if taken > outcome.slowest:
        outcome.slowest, outcome.slowest_index = taken, index


def _inside(error: BaseException) -> str:
    """Return the deepest place in the package, as module and function."""
    frames = traceback.extract_tb(error.__traceback__)
    root = str(Path(__file__).parents[1]) + "/"
    inside = [
        f for f in frames if f.filename.startswith(root) and not f.filename.startswith((root + "tests", root + "."))
    ]
    return f"{inside[-1].filename.removeprefix(root)}:{inside[-1].name}" if inside else "the test itself"


@contextmanager
def _limits() -> Iterator[None]:
    """Make warnings errors, and let an allocation without bounds fail before the machine suffers."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + _ROOM, before[1]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def _given_up_after(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise GivenUpError(f"no answer after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _memory(what: str) -> int:
    """Return bytes of this process by the kernel's count; getrusage would count the parent's as well."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    only = int(sys.argv[4]) if len(sys.argv) > 4 else None
    sys.stdout.write(json.dumps(vars(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), only=only))))
