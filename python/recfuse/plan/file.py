"""The files of plans: JSON of a bounded size, read into dataclasses field by field."""

from __future__ import annotations

import json
import os
import reprlib
import secrets
import stat
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from recfuse.errors import ArgumentTypeError, ArgumentValueError

VERSION = 1
"""Of the file format."""
MOST_ITEMS = 100_000
"""Of a list in a file: features, tables, schedules, decisions."""
MOST_BYTES = 16 << 20
"""Of a file."""
MOST = 10**18
"""The largest number in a file; the smallest is 0."""
_MOST_DIGITS = 30
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class PlanError(ArgumentValueError):
    """A file is no plan, or not one that this version understands."""


_repr = reprlib.Repr()
_repr.maxlevel = _repr.maxlist = _repr.maxdict = 3
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


def shown(value: Any) -> str:
    """What was found in a file, short enough for an error."""
    return _repr.repr(value)


def read_json(path: str, function: str = "recfuse.Plan") -> Any:
    """What a file of JSON holds.

    Raises:
        OSError: it cannot be read. PlanError: it is not JSON, or larger than `MOST_BYTES`.
    """
    with open(path, "rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise PlanError(f"{function}: {path} is larger than {MOST_BYTES:,} bytes, the most that is read")
    try:
        return json.loads(text.decode("utf-8"), parse_int=_integer, parse_constant=_no_constant)
    except RecursionError as error:
        raise PlanError(f"{function}: {path} nests lists or objects too deeply") from error
    except ValueError as error:
        raise PlanError(f"{function}: {path} is not JSON: {error}") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"it has {name}, must have finite numbers")


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:  # it would take time that grows with the square of them
        raise ValueError(f"it has a number of {len(text):,} digits, must have {_MOST_DIGITS} at most")
    return int(text)


def read_file(path: str) -> dict[str, Any]:
    """What the file of a plan of any kind holds, of a version that is known.

    Raises:
        OSError: it cannot be read. PlanError: it is no plan, or a newer one.
    """
    record: dict[str, Any] = read_json(path)
    version = record.get("recfuse_plan") if isinstance(record, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise PlanError(f'recfuse.Plan: {path} has no number under "recfuse_plan": it is no plan')
    if 1 <= version <= VERSION:
        return record
    must = f"must be from 1 to {VERSION}; tune again"
    if version > VERSION:
        must = f"this recfuse knows up to {VERSION}; update recfuse, or tune again with this one"
    raise PlanError(f"recfuse.Plan: {path} is of format {shown(version)}, {must}")


def write_file(path: str, record: dict[str, Any], function: str = "recfuse.Plan.save") -> None:
    """Writes JSON whole, or leaves the file that is there as it is. A link goes on to lead to the file, which
    keeps its mode; a new one has that of the umask, as by open().

    Raises:
        OSError: it cannot be written. ValueError, TypeError: JSON has no form for a value; what is there is
            a device or a pipe, which cannot be replaced.
    """
    where = Path(os.path.realpath(path))
    if where.exists() and not (where.is_file() or where.is_dir()):
        raise ArgumentValueError(f"{function}: {path} is no regular file, must be one or not be there yet")
    temporary = where.with_name(f".{where.name}.{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "w") as file:
            try:
                json.dump(record, file, indent=2, allow_nan=False)
            except (ValueError, TypeError) as error:
                kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentValueError
                raise kind(f"{function}: {path} is not written: {error}") from error
            file.write("\n")
        if where.exists():
            os.chmod(temporary, stat.S_IMODE(where.stat().st_mode))
        os.replace(temporary, where)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):  # of a full disk it names no file, else the temporary one
            raise OSError(error.errno, error.strerror, path) from error
        raise


def read(kind: Any, record: Any, where: str, given: Mapping[str, Any] = _NOTHING) -> Any:
    """An object of a dataclass from what JSON gave; `where` leads to it in an error.

    `given` has the values of fields that were read before; a field whose type is Any is not in the file. The
    others are a str, a bool, a number from 0 to `MOST`, one of some words (Literal), a dataclass, one of
    these or None, or a list of these with `MOST_ITEMS` items at most.

    Raises:
        PlanError: a field is missing or has another value.
    """
    if not isinstance(record, dict):
        raise PlanError(f"recfuse.Plan: {where.rstrip('.')} is {shown(record)}, must be an object")
    types_of, values = get_type_hints(kind), dict(given)
    for name in (field.name for field in fields(kind)):
        if types_of[name] is Any or name in given:
            continue
        if name not in record:
            raise PlanError(f"recfuse.Plan: {where}{name} is missing")
        values[name] = _value(types_of[name], record[name], f"{where}{name}")
    return kind(**values)


def _value(kind: Any, value: Any, where: str, or_null: str = "") -> Any:
    if get_origin(kind) is types.UnionType:
        return None if value is None else _value(get_args(kind)[0], value, where, " | null")
    if is_dataclass(kind):
        return read(kind, value, f"{where}.")
    if get_origin(kind) is list:
        return _list(get_args(kind)[0], value, where)
    if get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            allowed = " or ".join(map(repr, get_args(kind)))
            raise PlanError(f"recfuse.Plan: {where} is {shown(value)}, must be {allowed}")
        return value
    given = (int, float) if kind is float else kind
    if not isinstance(value, given) or (isinstance(value, bool) and kind is not bool):
        raise PlanError(f"recfuse.Plan: {where} is {shown(value)}, must be {kind.__name__}{or_null}")
    if kind in (int, float):
        if not 0 <= value <= MOST:
            raise PlanError(f"recfuse.Plan: {where} is {shown(value)}, must be from 0 to {MOST}")
        return kind(value)
    return value


def _list(kind: Any, value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise PlanError(f"recfuse.Plan: {where} is {shown(value)}, must be a list")
    if len(value) > MOST_ITEMS:
        raise PlanError(f"recfuse.Plan: {where} has {len(value):,} items, must have {MOST_ITEMS:,} at most")
    return [_value(kind, item, f"{where}[{at}]") for at, item in enumerate(value)]
