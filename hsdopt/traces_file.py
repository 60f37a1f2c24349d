"""The traces file of a profile: its arrays, packed for one .npz and checked before anything believes them."""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from hsdopt.acceptance import Traces
from hsdopt.errors import ProfileError
from hsdopt.files import read_document

__all__ = ["compressed", "pack_traces", "read_arrays", "sha256", "unpack_traces"]

LARGEST_FILE = 256 * 2**20
"""Bytes of the largest traces file that is read."""

LARGEST_ARRAYS = 2**30
"""Bytes that the arrays of one traces file may take in memory."""

_PLAIN = ("tokens", "prompt", "context", "proposed")
_BY_MODEL = ("choice", "probability", "top", "lookup_accepted")
_BY_PAIR = ("surprise", "overlap", "ratio")
_INTEGERS = ("tokens", "prompt", "context", "proposed", "choice", "lookup_accepted")
_LARGEST_INDEX = 2**31 - 1
_ROUNDING = 1e-6  # what a probability summed in float32 may be off by


def sha256(data: bytes | None) -> str | None:
    """Return the checksum by which a profile names its traces."""
    return None if data is None else hashlib.sha256(data).hexdigest()


def compressed(arrays: Mapping[str, NDArray[Any]]) -> bytes | None:
    """Return the bytes of a traces file; None if there is nothing to write."""
    if not arrays:
        return None
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **arrays)
    return stream.getvalue()


def pack_traces(traces: Traces | None) -> dict[str, NDArray[Any]]:
    """Return the traces as flat arrays; mapping keys become path-like names."""
    if traces is None:
        return {}
    packed: dict[str, NDArray[Any]] = {
        name: getattr(traces, name) for name in _PLAIN if getattr(traces, name) is not None
    }
    for name in (*_BY_MODEL, *_BY_PAIR):
        for index, (key, values) in enumerate(getattr(traces, name).items()):
            packed[f"{name}/{index}"] = values
            packed[f"{name}/{index}/key"] = np.array(key if isinstance(key, tuple) else (key,))
    return packed


def read_arrays(path: Path, checksum: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of the traces file at `path`, which a profile names by its checksum.

    Size, checksum, and the size that every array says it has are checked before the arrays are read.

    Raises
    ------
    ProfileError
        If the file is missing, is another profile's, is damaged, or is too large.
    """
    try:
        data = read_document(path, limit=LARGEST_FILE, error=ProfileError)
    except FileNotFoundError:
        raise ProfileError(
            f"expected the profile's traces in {path}; there is no such file: keep the two files together"
        ) from None
    except OSError as error:
        raise ProfileError(f"expected traces written by hsdopt in {path}; {error}") from error
    if checksum != sha256(data):
        raise ProfileError(
            f"expected the traces that this profile was saved with in {path}; got others: "
            "put its own .traces.npz there, or profile again"
        )
    try:
        _check_headers(data, path)
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except ProfileError:
        raise
    # a damaged archive shows itself in many ways, each a class of its own
    except (ValueError, OSError, EOFError, KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise ProfileError(f"expected traces written by hsdopt in {path}; {_first_line(error)}") from error
    except Exception as error:
        if type(error).__module__ != "zlib":
            raise
        raise ProfileError(f"expected traces written by hsdopt in {path}; {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


def _check_headers(data: bytes, path: Path) -> None:
    """Refuse an archive whose arrays are not what their sizes say, or are too large to be read."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > LARGEST_ARRAYS:
            raise ProfileError(f"expected arrays of at most {LARGEST_ARRAYS // 2**20} MiB in {path}; got more")
        sizes: dict[str, tuple[int, ...]] = {}
        for member in members:
            with archive.open(member) as stream:
                version = npy.read_magic(stream)
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = read(stream)
                size = stream.tell() + math.prod(shape) * dtype.itemsize
            if dtype.hasobject or dtype.kind not in "biufU" or size != member.file_size:
                raise ProfileError(
                    f"{path}, {member.filename}: expected an array of plain numbers or names of {member.file_size}"
                    f" bytes; got {dtype} of {size}"
                )
            sizes[member.filename.removesuffix(".npy")] = shape
    _check_sizes(sizes, path)


def _check_sizes(sizes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Refuse arrays of unlike lengths before they are read, so that none of them fills the memory."""
    rows = {"tokens": sizes.get("tokens", (0,)), "lookup": sizes.get("lookup/previous", (0,))}
    for name, shape in sizes.items():
        if name.endswith("/key"):
            expected, fits = "one or two names", math.prod(shape) <= 2
        else:
            like = rows["lookup" if name.startswith("lookup/") else "tokens"]
            expected, fits = f"{like} entries", shape == like and len(shape) == 1
        if not fits:
            raise ProfileError(f"{path}, {name}: expected {expected}; got {shape}")


def unpack_traces(
    arrays: Mapping[str, NDArray[Any]], path: Path, *, target: str, verifiers: tuple[str, ...], greedy: bool
) -> Traces | None:
    """Return the traces in `arrays`, None if there are none.

    Parameters
    ----------
    arrays : mapping of str to ndarray
        Of `read_arrays`.
    path : Path
        Of the traces file, for messages.
    target : str
        Whose text the traces follow.
    verifiers : tuple of str
        The language models of the profile, the target among them.
    greedy : bool
        Whether the target took its most likely tokens.

    Raises
    ------
    ProfileError
        Naming file and array, if an array is missing, has another shape or type, holds a number outside its domain,
        or speaks of a model that the profile does not have.
    """
    _check_table(arrays, path)
    if "tokens" not in arrays:
        return None
    missing = next((name for name in ("prompt", "context") if name not in arrays), None)
    if missing is not None:
        raise ProfileError(f"{path}: expected complete traces; {missing} is missing")
    mappings: dict[str, Any] = {name: {} for name in (*_BY_MODEL, *_BY_PAIR)}
    size = arrays["tokens"].shape
    for full, values in arrays.items():
        name, _, rest = full.partition("/")
        if name in _PLAIN and not rest:
            _check_array(full, name, values, size, path)
        elif name in mappings and rest.isdigit():
            _check_array(full, name, values, size, path)
            mappings[name][_key(arrays, full, verifiers, path)] = values
        elif name != "lookup" and not (name in mappings and full.removesuffix("/key") in arrays):
            raise ProfileError(f"{path}, {full[:60]}: expected an array that traces have; got another")
    fields: dict[str, Any] = {name: arrays[name] for name in _PLAIN if name in arrays}
    traces = Traces(**fields, **mappings)
    _check_together(traces, path, target=target, verifiers=verifiers, greedy=greedy)
    return traces


def _key(
    arrays: Mapping[str, NDArray[Any]], full: str, verifiers: tuple[str, ...], path: Path
) -> str | tuple[str, ...]:
    """Return the model, or the pair of models, that the array `full` speaks of."""
    pair = full.partition("/")[0] in _BY_PAIR
    names = arrays.get(full + "/key")
    if names is None or names.shape != (1 + pair,):
        raise ProfileError(f"{path}, {full}/key: expected {'two names' if pair else 'a name'} of models; got none")
    key = tuple(str(part) for part in names)
    odd = next((name for name in key if name not in verifiers), None)
    if odd is not None:
        raise ProfileError(f"{path}, {full}: expected a model out of {', '.join(verifiers)}; got {odd[:60]}")
    return key if pair else key[0]


def _check_array(full: str, name: str, values: NDArray[Any], size: tuple[int, ...], path: Path) -> None:
    """Refuse an array of another shape or type, or with a number outside its domain."""
    if values.shape != size or len(size) != 1:
        raise ProfileError(f"{path}, {full}: expected {size} entries; got {values.shape}")
    if values.dtype.kind not in ("iu" if name in _INTEGERS else "f"):
        kind = "whole numbers" if name in _INTEGERS else "numbers"
        raise ProfileError(f"{path}, {full}: expected {kind}; got {values.dtype}")
    if name in _INTEGERS:
        domain, fits = f"0 to {_LARGEST_INDEX}", (values >= 0) & (values <= _LARGEST_INDEX)
    elif name == "surprise":
        domain, fits = "at least 0", values >= -_ROUNDING
    else:
        domain, fits = "from 0 to 1", (values >= -_ROUNDING) & (values <= 1 + _ROUNDING)
    if not fits.all():
        raise ProfileError(f"{path}, {full}: expected numbers {domain}; got {values[~fits][0]}")


def _check_together(traces: Traces, path: Path, *, target: str, verifiers: tuple[str, ...], greedy: bool) -> None:
    """Refuse arrays that are each right and do not belong together."""
    steps = np.diff(traces.prompt, prepend=0)
    if len(traces) and (traces.prompt[0] != 0 or not np.isin(steps, (0, 1)).all()):
        raise ProfileError(f"{path}, prompt: expected prompts counted from 0 on, one after the other; got gaps")
    fields: dict[str, Mapping[str, Any]] = {"choice": traces.choice}
    if traces.proposed is not None:
        fields["lookup_accepted"] = traces.lookup_accepted
    for field, mapping in fields.items():
        missing = next((name for name in verifiers if name not in mapping), None)
        if missing is not None:
            raise ProfileError(f"{path}: expected {field} of every language model of the profile; none of {missing}")
    for name, accepted in traces.lookup_accepted.items():
        if traces.proposed is None or (accepted > traces.proposed).any():
            raise ProfileError(f"{path}, lookup_accepted of {name}: expected at most what was proposed; got more")
    other = next((pair[1] for pair in traces.ratio if pair[1] != target), None)
    # in a greedy profile the realised token stands as the target's choice, so that rounding moves none of them
    if other is not None or (greedy and not np.array_equal(traces.choice[target], traces.tokens)):
        raise ProfileError(
            f"{path}: expected traces along the output of the target {target}; got another model's: profile again"
        )


def _check_table(arrays: Mapping[str, NDArray[Any]], path: Path) -> None:
    """Refuse a lookup table that is none: two rows of tokens of one length, the first rising."""
    table = {key.removeprefix("lookup/"): values for key, values in arrays.items() if key.startswith("lookup/")}
    if not table:
        return
    shapes = {values.shape for values in table.values()}
    plain = all(values.dtype.kind in "iu" and values.ndim == 1 for values in table.values())
    if set(table) != {"previous", "following"} or len(shapes) != 1 or not plain:
        raise ProfileError(f"{path}, lookup: expected two rows of token ids, previous and following; got another table")
    previous, following = table["previous"], table["following"]
    sound = all(((row >= 0) & (row <= _LARGEST_INDEX)).all() for row in (previous, following))
    if not sound or not (np.diff(previous.astype(np.int64)) > 0).all():
        raise ProfileError(f"{path}, lookup: expected token ids of at least 0, previous rising; got others")
