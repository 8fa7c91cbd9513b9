"""Bounded reads of untrusted files, with a single class of errors, and atomic writes of recfuse's files.

A reader states its bound and checks it before it allocates. Only `parsing` turns exceptions of a parser into
a `FileFormatError`, so that no reader lists the exceptions of the libraries that it calls.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recfuse.errors import (
    AllocationError,
    ArgumentTypeError,
    ArgumentValueError,
    FileFormatError,
    IndexRangeError,
)

TEXT_BYTES, VALUE_BYTES = 6, 384
"""The most memory of a byte of a JSON text, and the most additional memory of a value of any type."""
_MOST_DIGITS = 30  # of a whole number: the time of int() grows with their square
_MOST_REAL_DIGITS = 1000  # the longest finite number in full has 309 digits before the point
_MOST_SHOWN = 600  # of the characters of an exception


@contextmanager
def parsing(subject: str) -> Iterator[None]:
    """Turn exceptions of a parser into a FileFormatError that begins with `subject`: reader and file.

    A FileFormatError and an OSError of the system pass unchanged. Errors of recfuse's own checks keep their
    text, which names the position in the file.
    """
    try:
        yield
    except FileFormatError:
        raise
    except (ArgumentValueError, ArgumentTypeError, IndexRangeError) as error:
        raise FileFormatError(f"{subject}: {_short(str(error))}") from error
    except MemoryError as error:
        raise AllocationError(f"{subject}: the memory for its contents is not free") from error
    except RecursionError as error:
        raise FileFormatError(f"{subject} nests lists or objects too deeply") from error
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise
        cause = _short(f"{type(error).__name__}: {error}")
        raise FileFormatError(f"{subject} is damaged or cut: {cause}") from error


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def read_json(path: str, function: str, most_bytes: int, most_values: int) -> Any:
    """Return the contents of a JSON file; refuse duplicate names in an object, NaN and infinities.

    The function needs at most `TEXT_BYTES * most_bytes + VALUE_BYTES * most_values` bytes of memory.

    Raises:
        OSError: the file cannot be read.
        FileFormatError: it is not JSON, has more than `most_bytes` bytes, or more than `most_values` values.
    """
    with open(path, "rb") as file:
        text = file.read(most_bytes + 1)
    if len(text) > most_bytes:
        raise FileFormatError(
            f"{function}: {path} is larger than {most_bytes:,} bytes, the most that is read"
        )
    # Each value except the first follows one of these characters. Strings may only increase the count.
    values = sum(map(text.count, (b",", b"[", b"{")))
    if values > most_values:
        raise FileFormatError(
            f"{function}: {path} has {values:,} commas and opening brackets; expected {most_values:,} at most"
        )
    with parsing(f"{function}: {path}"):
        try:
            return json.loads(
                text.decode("utf-8"),
                parse_int=_whole,
                parse_float=_real,
                parse_constant=_no_constant,
                object_pairs_hook=_once,
            )
        except ValueError as error:  # from json, UTF-8, or the functions below
            raise FileFormatError(f"{function}: {path} is not JSON: {_short(str(error))}") from error


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(text):,} digits; expected {_MOST_DIGITS} at most")
    return int(text)


def _real(text: str) -> float:
    if len(text) > _MOST_REAL_DIGITS:
        raise ValueError(f"a number has {len(text):,} digits; expected {_MOST_REAL_DIGITS} at most")
    if not math.isfinite(value := float(text)):
        raise ValueError(f"a number is {text[:_MOST_DIGITS]}; expected a finite float64")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"a number is {name}; expected finite numbers")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; raise ValueError for a duplicate name, for which a dict would keep the last value."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has {_short(twice)!r} twice")
    return entries


def write_json(path: str, record: Any, function: str) -> None:
    """Write a record as JSON, by `write_whole`."""
    encoder = json.JSONEncoder(indent=2, allow_nan=False)
    write_whole(path, lambda: itertools.chain(encoder.iterencode(record), "\n"), function)


def write_whole(path: str, pieces: Callable[[], Iterable[str]], function: str) -> None:
    """Write the whole text of `pieces()`, or keep the existing file unchanged.

    The text goes to a new file in the same folder, which then replaces the old file. A link stays valid, and
    the file keeps its mode; a new file has the mode of the umask, as by open().

    Raises:
        OSError: it cannot be written; names `path`.
        ArgumentValueError, ArgumentTypeError: `pieces` raises ValueError or TypeError; `path` is a device or
            a pipe, which cannot be replaced.
    """
    where = Path(os.path.realpath(path))
    if where.exists() and not (where.is_file() or where.is_dir()):
        raise ArgumentValueError(
            f"{function}: {path} is no regular file; expected a regular file or a new path"
        )
    temporary = where.with_name(f".{where.name[:100]}.{secrets.token_hex(8)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            try:
                file.writelines(pieces())
            except (ValueError, TypeError) as error:
                kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentValueError
                raise kind(f"{function}: {path} is not written: {error}") from error
            file.flush()
            os.fsync(handle)  # a full disk may raise only here
        if where.exists():
            os.chmod(temporary, stat.S_IMODE(where.stat().st_mode))
        os.replace(temporary, where)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):  # the error names no file (full disk) or the temporary file
            raise OSError(error.errno, error.strerror, path) from error
        raise
