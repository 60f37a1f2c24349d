"""Files that come from outside and files that people keep: one reader of JSON, one atomic writer.

What is read is bounded in size before it is parsed; what is written replaces regular files only, in one step.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from hsdopt.errors import HsdoptError

__all__ = [
    "LARGEST_DOCUMENT",
    "excerpt",
    "is_stream",
    "parse_json",
    "prepared",
    "read_document",
    "read_json",
    "require_regular",
    "write_document",
]

LARGEST_DOCUMENT = 32 * 2**20
"""Bytes of the largest JSON document (or line of a journal) that is parsed."""

_STREAMS = ("/dev/", "/proc/self/fd/")


def read_document(
    path: str | os.PathLike[str], *, limit: int = LARGEST_DOCUMENT, error: type[HsdoptError] = HsdoptError
) -> bytes:
    """Return the bytes of a file, of which no more than `limit` are read.

    Raises
    ------
    HsdoptError
        Of the class `error`, if the file is larger.
    OSError
        If it cannot be read.
    """
    with open(path, "rb") as stream:  # noqa: PTH123 -- also a device or a pipe
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise error(f"expected at most {limit // 2**20} MiB in {path}; got more: is it the right file?")
    return data


def parse_json(data: bytes | str, what: str, *, error: type[HsdoptError] = HsdoptError) -> Any:  # noqa: ANN401
    """Return the value of a JSON text; a byte order mark before it is passed over.

    Parameters
    ----------
    data : bytes or str
        Of bounded size: see `read_document`.
    what : str
        What the text is, for messages, such as a path or "path, line 3".
    error : type
        The class of the error.

    Raises
    ------
    HsdoptError
        Of the class `error`, in one line: if it is no JSON in UTF-8, is nested too deeply, or holds NaN, Infinity or an
        integer of thousands of digits.

    Examples
    --------
    >>> parse_json('{"a": [1, 2.5]}', "an example")
    {'a': [1, 2.5]}
    """
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data.removeprefix("\ufeff")
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise error(f"expected JSON in {what}; it is nested too deeply") from None
    except UnicodeDecodeError as fault:
        raise error(f"expected JSON in UTF-8 in {what}; got other bytes at {fault.start}") from None
    except json.JSONDecodeError as fault:
        raise error(f"expected JSON in {what}; {fault}: was it cut short?") from None
    except ValueError as fault:
        raise error(f"expected JSON in {what}; {str(fault).partition(';')[0]}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"got {name}, which is no number of JSON")


def read_json(
    path: str | os.PathLike[str], *, limit: int = LARGEST_DOCUMENT, error: type[HsdoptError] = HsdoptError
) -> Any:  # noqa: ANN401
    """Return the value of a JSON file; errors as in `read_document` and `parse_json`."""
    return parse_json(read_document(path, limit=limit, error=error), str(path), error=error)


def excerpt(value: object, *, limit: int = 60) -> str:
    """Return one printable line for a value found where another was expected, cut to `limit` letters.

    Examples
    --------
    >>> excerpt("a long text", limit=7)
    "'a long..."
    """
    text = repr(value[: limit + 1]) if isinstance(value, str) else " ".join(_BRIEF.repr(value).split())
    return text if len(text) <= limit else f"{text[:limit]}..."


class _Brief(reprlib.Repr):
    """Short forms that cost little, however large the value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 60, 100

    def repr_int(self, x: int, level: int) -> str:
        """Return the digits: Python refuses to write thousands of them."""
        return super().repr_int(x, level) if abs(x) < 10**self.maxstring else "a number of many digits"


_BRIEF = _Brief()


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Return whether a FIFO, a device or a socket stands at `path`, to be written through and never replaced."""
    if os.path.abspath(path).startswith(_STREAMS):  # noqa: PTH100 -- links are followed below
        return True
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def require_regular(path: str | os.PathLike[str], what: str) -> None:
    """Raise HsdoptError if `path` is a FIFO or a device, where `what` (more than one document) cannot be kept."""
    if is_stream(path):
        raise HsdoptError(f"expected a regular file for {what}; {path} is a pipe or a device: name a file with -o")


def write_document(path: str | os.PathLike[str], write: bytes | Callable[[BinaryIO], object]) -> None:
    """Write one document: a regular file in one step, a FIFO or device by writing through it.

    A link stays and its target is replaced; a replaced file keeps its permissions.

    Raises
    ------
    OSError
        If it cannot be written; a regular file is as it was then.
    """
    fill = (lambda stream: stream.write(write)) if isinstance(write, bytes) else write
    if is_stream(path):
        with open(path, "wb") as stream:  # noqa: PTH123 -- also a device
            fill(stream)
        return
    with prepared(path, fill) as put:
        put()


@contextmanager
def prepared(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> Iterator[Callable[[], None]]:
    """Let `write` fill a new file beside `path`, safe on disk; yield what puts it there in one step.

    Raises
    ------
    OSError
        If it cannot be written, or something stands at `path` that is no regular file.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        raise OSError(f"{path} is no regular file")
    handle, name = tempfile.mkstemp(prefix=place.name[:100] + ".", suffix=".part", dir=place.parent)
    whole = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        _take_permissions(whole, place)
        yield lambda: os.replace(whole, place)  # noqa: PTH105
    finally:
        whole.unlink(missing_ok=True)


def _take_permissions(new: Path, old: Path) -> None:
    """Give `new` the mode and owner of the file that it replaces, or what a plain new file would have."""
    try:
        known = old.stat()
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        new.chmod(0o666 & ~mask)
        return
    with suppress(PermissionError):
        os.chown(new, known.st_uid, known.st_gid)
    new.chmod(stat.S_IMODE(known.st_mode))
