"""The files of plans: JSON of a bounded size, read into dataclasses field by field."""

from __future__ import annotations

import functools
import reprlib
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from recfuse._files import read_json
from recfuse.errors import ArgumentValueError, FileFormatError

VERSION = 1
"""Version of the file format."""
MOST_ITEMS = 100_000
"""Largest number of items of a list in a file: features, tables, schedules, decisions."""
MOST_BYTES = 16 << 20
"""Largest size of a file."""
MOST_VALUES = 1_000_000
"""Largest number of values in a file; with `MOST_BYTES` it bounds the memory of reading to 512 MiB."""
MOST_TEXT = 2 << 20
"""Largest number of characters of a text in a file: enough for the longest list of features."""
MOST = 10**18
"""The largest number in a file; the smallest is 0."""
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})

_repr = reprlib.Repr()
_repr.maxlevel = _repr.maxlist = _repr.maxdict = 3
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


def shown(value: Any) -> str:
    """Return a value of a file as text, short enough for an error message."""
    return _repr.repr(value)


def read_file(path: str) -> dict[str, Any]:
    """Return the contents of the file of any kind of plan, of a known version.

    Raises:
        OSError: the file cannot be read. FileFormatError: the file is no plan, or has a newer version.
    """
    record: dict[str, Any] = read_json(path, "recfuse.Plan", MOST_BYTES, MOST_VALUES)
    version = record.get("recfuse_plan") if isinstance(record, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise FileFormatError(f'recfuse.Plan: {path} has no number under "recfuse_plan"; expected a plan')
    if 1 <= version <= VERSION:
        return record
    must = f"expected 1 to {VERSION}. Tune again."
    if version > VERSION:
        must = f"expected 1 to {VERSION}. Update recfuse, or tune again with this version."
    raise FileFormatError(f"recfuse.Plan: {path} is of format {shown(version)}; {must}")


class _Wrong(ValueError):
    """An invalid value of a field; `place` is its path, to which each caller adds its part."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.place = ""


def read(kind: Any, record: Any, defaults: Mapping[str, Any] = _NOTHING) -> Any:
    """Return an object of a dataclass from decoded JSON.

    `given` has the values of fields that were read before. A field of type Any is not in the file. Other
    fields are a str, a bool, a number from 0 to `MOST`, a word of a Literal, a dataclass, a union of one of
    these with None, or a list of these with at most `MOST_ITEMS` items.

    Raises:
        ArgumentValueError: a field is missing or has another value; names the field.
    """
    try:
        return _object(kind, record, defaults)
    except _Wrong as wrong:
        raise ArgumentValueError(f"{wrong.place.removeprefix('.')} {wrong}") from None


@functools.cache
def _fields_of(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return the names and types of the fields in a file."""
    types_of = get_type_hints(kind)
    return tuple(
        (member.name, types_of[member.name]) for member in fields(kind) if types_of[member.name] is not Any
    )


def _object(kind: Any, record: Any, defaults: Mapping[str, Any] = _NOTHING) -> Any:
    if not isinstance(record, dict):
        raise _Wrong(f"is {shown(record)}; expected an object")
    values = dict(defaults)
    for name, own in _fields_of(kind):
        if name in values:
            continue
        try:
            if name not in record:
                raise _Wrong("is missing")
            values[name] = _value(own, record[name])
        except _Wrong as wrong:
            wrong.place = f".{name}{wrong.place}"
            raise
    return kind(**values)


def _value(kind: Any, value: Any, or_null: str = "") -> Any:
    if kind is str and type(value) is str:
        if len(value) > MOST_TEXT:
            raise _Wrong(f"has {len(value):,} characters; expected {MOST_TEXT:,} at most")
        return value
    if get_origin(kind) is types.UnionType:
        return None if value is None else _value(get_args(kind)[0], value, " | null")
    if is_dataclass(kind):
        return _object(kind, value)
    if get_origin(kind) is list:
        return _list(get_args(kind)[0], value)
    if get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise _Wrong(f"is {shown(value)}; expected {' or '.join(map(repr, get_args(kind)))}")
        return value
    expected = (int, float) if kind is float else kind
    if not isinstance(value, expected) or (isinstance(value, bool) and kind is not bool):
        raise _Wrong(f"is {shown(value)}; expected {kind.__name__}{or_null}")
    if kind in (int, float):
        if not 0 <= value <= MOST:
            raise _Wrong(f"is {shown(value)}; expected 0 to {MOST}")
        return kind(value)
    return value


def _list(kind: Any, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _Wrong(f"is {shown(value)}; expected a list")
    if len(value) > MOST_ITEMS:
        raise _Wrong(f"has {len(value):,} items; expected {MOST_ITEMS:,} at most")
    items = []
    try:
        for item in value:
            items.append(_value(kind, item))
    except _Wrong as wrong:
        wrong.place = f"[{len(items)}]{wrong.place}"
        raise
    return items
