"""Columns as JSON: a list with a mapping per column.

``{"kind": "bucketize", "name": "age", "boundaries": [18, 25, 35], "embedding_dim": 8}``: "kind" is
"bucketize", "hash", "identity", "vocabulary", "cross" or "numeric"; the other entries are the fields of the
class that differ from the defaults. A step is ``{"step": "affine", "scale": 0.01}``. A key of a cross is a
name or ``{"feature": "age", "preprocess": [...]}``. A dtype is its name. Infinite boundaries and bounds are
the texts "Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recfuse._arguments import path_of, wrong_type
from recfuse._codes import DTYPE_NAMES
from recfuse._files import parsing, read_json, write_whole
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn.columns.kinds import COLUMNS
from recfuse.nn.columns.specs import Column, Key
from recfuse.nn.columns.steps import STEPS, Step

MOST_BYTES = 64 << 20
"""The largest size of a file."""
MOST_VALUES = 4_000_000
"""The largest number of values of a file, including words of vocabularies and boundaries.

Together with `MOST_BYTES` it bounds the memory to 2 GiB."""
_WHERE = "recfuse.nn.EmbeddingColumns.from_json"
_INFINITE = {"Infinity": math.inf, "-Infinity": -math.inf}  # JSON has no numbers for them


def read(columns: str | Path | Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return columns from a list of mappings, or from a file with such a list.

    Raises:
        ValueError, TypeError: a mapping is no column; names the mapping. OSError: the file cannot be read.
        FileFormatError: a ValueError for every error in a file; names the file too.
    """
    if not isinstance(columns, (str, Path)):
        return _columns(columns, f"{_WHERE}: ")
    path = path_of(columns, _WHERE)
    with parsing(f"{_WHERE}: {path}"):
        return _columns(read_json(path, _WHERE, MOST_BYTES, MOST_VALUES), "")


def write(columns: Sequence[Column], path: str | Path | None) -> list[dict[str, Any]]:
    """Return the list of columns, and write it to a file if ``path`` is given."""
    records = [{"kind": column.kind, **_plain(column)} for column in columns]
    if path is not None:
        function = "recfuse.nn.EmbeddingColumns.to_json"
        write_whole(path_of(path, function), lambda: _lines(records), function)
    return records


def _lines(columns: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a file, with a line per column."""
    return ["[\n", ",\n".join(json.dumps(column, allow_nan=False) for column in columns), "\n]\n"]


def _columns(records: Any, prefix: str) -> list[Column]:
    if not isinstance(records, Sequence) or isinstance(records, (str, bytes)):
        raise wrong_type(f"{prefix}columns", records, "a list of columns")
    return [_column(f"{prefix}columns[{number}]", record) for number, record in enumerate(records)]


def _column(prefix: str, record: Any) -> Column:
    if not isinstance(record, Mapping):
        raise wrong_type(prefix, record, "a mapping")
    if isinstance(record.get("name"), str):
        prefix += f" ({record['name']!r})"
    try:
        kind = _kind("kind", record, COLUMNS)
        column = _made(kind, {name: _field(name, value) for name, value in record.items() if name != "kind"})
    except (TypeError, ValueError) as error:
        wrong = ArgumentTypeError if isinstance(error, TypeError) else ArgumentValueError
        raise wrong(f"{prefix}: {error}") from None
    return column  # type: ignore[no-any-return]


def _kind(field: str, record: Mapping[str, Any], kinds: Mapping[str, Any]) -> Any:
    name = record.get(field)
    if not isinstance(name, str) or name not in kinds:
        raise ArgumentValueError(f"{field} is {name!r}; expected one of {', '.join(kinds)}")
    return kinds[name]


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    allowed = [member.name for member in fields(kind) if member.init]
    for name in values:
        if name not in allowed:
            raise ArgumentValueError(f"{kind.__name__} has no field {name!r}; expected {', '.join(allowed)}")
    return kind(**values)


def _field(name: str, value: Any) -> Any:
    if name == "preprocess":
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise wrong_type("preprocess", value, "a list of steps")
        return tuple(_step(item) for item in value)
    if name == "keys" and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_key(item) for item in value)
    if name == "dtype" and value is not None:
        if value not in DTYPE_NAMES:
            raise ArgumentValueError(f"dtype is {value!r}; expected one of {', '.join(DTYPE_NAMES)}")
        return getattr(torch, value)
    if name in ("min", "max"):
        return _number(value)
    if name == "boundaries" and isinstance(value, Sequence) and not isinstance(value, str):
        return [_number(item) for item in value]
    return value


def _number(value: Any) -> Any:
    return _INFINITE.get(value, value) if isinstance(value, str) else value


def _key(key: Any) -> Any:
    if not isinstance(key, Mapping):
        return key
    return _made(Key, {name: _field(name, value) for name, value in key.items()})


def _step(record: Any) -> Step:
    if not isinstance(record, Mapping):
        raise wrong_type("a step of preprocess", record, "a mapping")
    kind = _kind("step", record, STEPS)
    step: Step = _made(kind, {name: _field(name, value) for name, value in record.items() if name != "step"})
    return step


def _plain(spec: Any) -> dict[str, Any]:
    """Return the fields that differ from the defaults, as JSON values."""
    return {name: _value(value) for name, value in _given_fields(spec).items()}


def _value(value: Any) -> Any:
    if isinstance(value, Step):
        return {"step": value.kind, **_plain(value)}
    if isinstance(value, Key):
        return _plain(value)
    if isinstance(value, tuple):
        return [_value(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _given_fields(spec: Any) -> dict[str, Any]:
    """Return the fields of a specification or step that differ from the defaults, by name."""
    changed = {}
    for member in fields(spec):
        if member.init and getattr(spec, member.name) != member.default:
            changed[member.name] = getattr(spec, member.name)
    return changed
