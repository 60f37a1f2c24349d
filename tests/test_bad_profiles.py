"""Profiles, traces and journals that are not what they should be: one line that names file and field."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traced import traced_profile

from hsdopt.errors import ProfileError
from hsdopt.profiles import Profile, traces_path
from hsdopt.profiling.cost import CostRecord
from hsdopt.profiling.journal import Journal
from hsdopt.profiling.validate import MeasuredRun

INFINITE = 1e999
Change = Callable[[dict[str, Any]], object]
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "p.json"
    traced_profile(0, prompts=4, length=24).save(path)
    return path


def copied(good: Path, folder: Path) -> Path:
    path = folder / "p.json"
    path.write_bytes(good.read_bytes())
    traces_path(path).write_bytes(traces_path(good).read_bytes())
    return path


def put(*where: object) -> Change:
    """Return a change of one value, ``put("costs", 0, "seconds", [-1])``."""
    *steps, last, value = where

    def change(stored: dict[str, Any]) -> None:
        at: Any = stored
        for step in steps:
            at = at[step]
        at[last] = value

    return change


FIELDS: dict[str, tuple[Change, str]] = {
    "negative timing": (put("costs", 0, "seconds", 0, -1.0), r"field costs\.0\.seconds\.0: .*got -1"),
    "infinite timing": (put("costs", 0, "seconds", 0, "INF"), r"field costs\.0\.seconds\.0: .*got inf"),
    "no timing": (put("costs", 0, "seconds", []), r"field costs\.0\.seconds"),
    "a timing that is a word": (put("costs", 0, "seconds", ["fast"]), r"field costs\.0\.seconds\.0: .*'fast'"),
    "no tokens": (put("costs", 0, "tokens", 0), r"field costs\.0\.tokens: .*got 0"),
    "a truth value": (put("costs", 0, "tokens", bool(1)), r"field costs\.0\.tokens: .*got True"),
    "half a context": (put("costs", 0, "context", 0.5), r"field costs\.0\.context"),
    "an unknown model": (put("costs", 0, "model", "x"), r"field costs: expected a model out of .*; got x"),
    "negative overhead": (put("overhead", {"round": -1e-3}), r"field overhead\.round: .*got -0\.001"),
    "infinite overhead": (put("overhead", {"round": "INF"}), r"field overhead\.round: .*got inf"),
    "a switch of nobody": (put("switches", {"x": 0.1}), r"field switches: expected a model out of .*; got x"),
    "temperature": (put("setting", "temperature", "INF"), r"field setting\.temperature: .*got inf"),
    "top_p": (put("setting", "top_p", 0.0), r"field setting\.top_p: .*got 0"),
    "kind": (put("models", "int4", "kind", "junk"), r"field models\.int4\.kind: .*got 'junk'"),
    "context": (put("models", "int4", "context", -5), r"field models\.int4\.context: .*got -5"),
    "bytes": (put("models", "int4", "bytes", -5), r"field models\.int4\.bytes: .*got -5"),
    "a lookup that is none": (put("models", "lookup", "kind", "transformers"), r"field models\.lookup\.kind"),
    "a lookup as target": (put("target", "lookup"), r"field target: expected a language model .*got lookup"),
    "a target that is not there": (put("target", "x"), r"field target: .*got x"),
    "another target": (put("target", "skip"), r"along the output of the target skip"),
    "an unknown field": (put("extra", 1), r"field extra"),
    "a newer schema": (put("schema", 99), r"expected schema 1 .*got 99"),
    "a schema of many digits": (put("schema", 10**4000), r"expected schema 1 .*many digits"),
    "models as a list": (put("models", []), r"field models"),
}


@pytest.mark.parametrize("kind", FIELDS)
def test_a_field_outside_its_domain_is_named(good: Path, tmp_path: Path, kind: str) -> None:
    change, message = FIELDS[kind]
    path = copied(good, tmp_path)
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored).replace('"INF"', "1e999"))
    with pytest.raises(ProfileError, match=message) as caught:
        Profile.load(path)
    assert path.stem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


TEXTS = {
    "deep": (b"[" * 2_000_000, "nested too deeply"),
    "long integer": (b'{"schema": ' + b"1" * 5000 + b"}", "digits"),
    "NaN": (b'{"schema": NaN}', "NaN, which is no number"),
    "not UTF-8": (b"\xff\xfe{}", "UTF-8"),
    "empty": (b"", "expected JSON"),
    "a list": (b"[]", "expected schema 1"),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_that_is_no_profile_is_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(TEXTS[kind][0])
    with pytest.raises(ProfileError, match=TEXTS[kind][1]) as caught:
        Profile.load(path)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_passed_over(good: Path, tmp_path: Path) -> None:
    path = copied(good, tmp_path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert Profile.load(path).target == "big"


def with_(name: str, value: Callable[[np.ndarray], object]) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.update({name: np.asarray(value(arrays[name]))})


def renamed(arrays: Arrays) -> None:
    arrays["choice/0/key"] = np.array(["nobody"])


def at(position: int, number: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        changed = values.copy()
        changed[position] = number
        return changed

    return change


ARRAYS: dict[str, tuple[Callable[[Arrays], object], str]] = {
    "a model renamed": (renamed, r"choice/0: expected a model out of .*got nobody"),
    "a choice missing": (lambda a: (a.pop("choice/1"), a.pop("choice/1/key")), "expected choice of every"),
    "a key missing": (lambda a: a.pop("top/0/key"), "top/0/key: expected a name"),
    "a key too many": (with_("surprise/0/key", lambda _: ["a", "b", "c"]), "surprise/0/key: expected one or two names"),
    "contexts missing": (lambda a: a.pop("context"), "context is missing"),
    "proposals missing": (lambda a: a.pop("proposed"), "lookup_accepted of .*: expected at most what was proposed"),
    "a row cut short": (with_("context", lambda v: v[:-1]), r"context: expected .* entries"),
    "a table": (with_("tokens", lambda v: v.reshape(2, -1)), "tokens: expected"),
    "tokens that are no whole numbers": (with_("tokens", lambda v: v + 0.5), "tokens: expected whole numbers"),
    "words": (with_("top/0", lambda v: v.astype(str)), "top/0: expected numbers"),
    "complex numbers": (with_("top/0", lambda v: v + 1j), "plain numbers"),
    "objects": (with_("top/0", lambda v: v.astype(object)), "plain numbers"),
    "a negative token": (with_("tokens", at(0, -1)), "tokens: expected numbers 0 to .*got -1"),
    "a huge token": (with_("choice/0", at(0, 2**40)), "choice/0: expected numbers 0 to"),
    "a negative prompt": (with_("prompt", at(0, -1)), "prompt: expected numbers 0 to"),
    "prompts with gaps": (with_("prompt", lambda v: v * 3), "prompt: expected prompts counted from 0"),
    "a probability above 1": (with_("top/0", at(3, 1.5)), "top/0: expected numbers from 0 to 1; got 1.5"),
    "no number": (with_("top/0", at(3, np.nan)), "top/0: expected numbers from 0 to 1; got nan"),
    "negative surprise": (with_("surprise/0", at(3, -4.0)), "surprise/0: expected numbers at least 0; got -4"),
    "more accepted than proposed": (with_("lookup_accepted/0", lambda v: v + 99), "lookup_accepted of"),
    "another array": (lambda a: a.update(other=np.zeros(96)), "other: expected an array that traces have"),
    "a torn table": (lambda a: a.update({"lookup/previous": np.arange(3)}), "lookup: expected two rows"),
    "a table that falls": (
        lambda a: a.update({"lookup/previous": np.array([3, 1]), "lookup/following": np.array([1, 1])}),
        "previous rising",
    ),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_traces_that_do_not_fit_are_named(good: Path, tmp_path: Path, kind: str) -> None:
    change, message = ARRAYS[kind]
    path = copied(good, tmp_path)
    with np.load(traces_path(path)) as stored:
        arrays = dict(stored)
    change(arrays)
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    named(path, stream.getvalue())
    with pytest.raises(ProfileError, match=message) as caught:
        Profile.load(path)
    assert "\n" not in str(caught.value)
    assert traces_path(path).name in str(caught.value)


def named(path: Path, data: bytes) -> None:
    """Put traces beside a profile, and their checksum into it."""
    traces_path(path).write_bytes(data)
    stored = json.loads(path.read_text())
    stored["traces_sha256"] = hashlib.sha256(data).hexdigest()
    path.write_text(json.dumps(stored))


def test_an_archive_is_refused_by_the_sizes_that_it_states(good: Path, tmp_path: Path) -> None:
    path = copied(good, tmp_path)
    stream = io.BytesIO()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tokens.npy", header.getvalue())
    named(path, stream.getvalue())
    with pytest.raises(ProfileError, match=r"tokens\.npy: expected an array .* got float64 of 8000"):
        Profile.load(path)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x93NUMPY", bytes(200)])
def test_a_file_that_is_no_archive_is_one_line(good: Path, tmp_path: Path, data: bytes) -> None:
    path = copied(good, tmp_path)
    named(path, data)
    with pytest.raises(ProfileError, match="expected traces written by hsdopt"):
        Profile.load(path)


RECORDS = {
    "an empty object": {},
    "a model that is a number": {"model": 1, "tokens": 1, "context": 0, "repeat": 0, "seconds": 0.1},
    "negative seconds": {"model": "m", "tokens": 1, "context": 0, "repeat": 0, "seconds": -0.1},
    "infinite seconds": {"model": "m", "tokens": 1, "context": 0, "repeat": 0, "seconds": INFINITE},
    "a truth value": {"model": "m", "tokens": True, "context": 0, "repeat": 0, "seconds": 0.1},
    "a field too many": {"model": "m", "tokens": 1, "context": 0, "repeat": 0, "seconds": 0.1, "more": 1},
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_line_that_is_no_record_is_named_and_the_rest_kept(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "j.partial"
    journal = Journal(path, {"a": 1}, resume=False)
    journal.add(model="m", tokens=1, context=0, repeat=0, seconds=0.5)
    with path.open("a") as stream:
        stream.write(json.dumps(RECORDS[kind]).replace("Infinity", "1e999") + "\n")
    before = path.read_bytes()
    again = Journal(path, {"a": 1}, resume=True)
    with pytest.raises(ProfileError, match=r"j\.partial, line 3: expected .*delete that line to keep the rest"):
        again.read(lambda record: CostRecord(**record))
    assert path.read_bytes() == before


def test_a_run_that_is_none_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.partial", {}, resume=False)
    journal.add(plan="t", prompt=0, repeat=0, order=0, seconds=-1.0)
    with pytest.raises(ProfileError, match="line 2"):
        journal.read(MeasuredRun.from_record)
