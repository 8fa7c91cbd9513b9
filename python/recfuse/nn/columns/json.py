"""Columns as JSON: a list with a mapping a column.

``{"kind": "bucketize", "name": "age", "boundaries": [18, 25, 35], "embedding_dim": 8}``: "kind" is
"bucketize", "hash", "identity", "vocabulary", "cross" or "numeric", the others are the fields of the class,
where they are not the defaults. A step is ``{"step": "affine", "scale": 0.01}``, a key of a cross a name, or
``{"feature": "age", "preprocess": [...]}``, a dtype its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from recfuse._arguments import path_of, wrong_type
from recfuse._codes import DTYPE_NAMES
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn.columns.kinds import COLUMNS
from recfuse.nn.columns.specs import Column, Key
from recfuse.nn.columns.steps import STEPS, Step

_WHERE = "recfuse.nn.EmbeddingColumns.from_json"


def read(columns: str | Path | Sequence[Mapping[str, Any]]) -> list[Column]:
    """Columns from a list of mappings, or from the file that has it.

    Raises:
        ValueError, TypeError: a mapping that is no column; names it. OSError: no such file.
    """
    if isinstance(columns, (str, Path)):
        path = path_of(columns, _WHERE)
        try:
            columns = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_once)
        except ValueError as error:  # JSONDecodeError, UnicodeDecodeError and that of _once
            raise ArgumentValueError(f"{_WHERE}: {path} is not JSON: {error}") from None
        except RecursionError:
            raise ArgumentValueError(f"{_WHERE}: {path} nests lists or objects too deeply") from None
    if not isinstance(columns, Sequence):
        raise wrong_type(f"{_WHERE}: columns", columns, "a list of columns")
    return [_column(number, given) for number, given in enumerate(columns)]


def write(columns: Sequence[Column], path: str | Path | None) -> list[dict[str, Any]]:
    """The list of columns, written to a file where one is named."""
    found = [{"kind": column.kind, **_plain(column)} for column in columns]
    if path is not None:
        lines = ",\n".join(json.dumps(one) for one in found)
        Path(path_of(path, "recfuse.nn.EmbeddingColumns.to_json")).write_text(
            f"[\n{lines}\n]\n", encoding="utf-8"
        )
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; of two values with one name it would have the last."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"an object has {name!r} twice")
    return dict(pairs)


def _column(number: int, given: Any) -> Column:
    where = f"{_WHERE}: columns[{number}]"
    if not isinstance(given, Mapping):
        raise wrong_type(where, given, "a mapping")
    if isinstance(given.get("name"), str):
        where += f" ({given['name']!r})"
    try:
        kind = _kind("kind", given, COLUMNS)
        found = _made(kind, {name: _field(name, value) for name, value in given.items() if name != "kind"})
    except (TypeError, ValueError) as error:
        wrong = ArgumentTypeError if isinstance(error, TypeError) else ArgumentValueError
        raise wrong(f"{where}: {error}") from None
    return found  # type: ignore[no-any-return]


def _kind(field: str, given: Mapping[str, Any], kinds: Mapping[str, Any]) -> Any:
    name = given.get(field)
    if not isinstance(name, str) or name not in kinds:
        raise ArgumentValueError(f"{field} is {name!r}, must be one of {', '.join(kinds)}")
    return kinds[name]


def _made(kind: Any, given: Mapping[str, Any]) -> Any:
    allowed = [one.name for one in fields(kind) if one.init]
    for name in given:
        if name not in allowed:
            raise ArgumentValueError(f"there is no field {name!r}; {kind.__name__} has {', '.join(allowed)}")
    return kind(**given)


def _field(name: str, value: Any) -> Any:
    if name == "preprocess":
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise wrong_type("preprocess", value, "a list of steps")
        return tuple(_step(one) for one in value)
    if name == "keys" and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_key(one) for one in value)
    if name == "dtype" and value is not None:
        if value not in DTYPE_NAMES:
            raise ArgumentValueError(f"dtype is {value!r}, must be one of {', '.join(DTYPE_NAMES)}")
        return getattr(torch, value)
    return value


def _key(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    return _made(Key, {name: _field(name, value) for name, value in given.items()})


def _step(given: Any) -> Step:
    if not isinstance(given, Mapping):
        raise wrong_type("a step of preprocess", given, "a mapping")
    kind = _kind("step", given, STEPS)
    found: Step = _made(kind, {name: value for name, value in given.items() if name != "step"})
    return found


def _plain(spec: Any) -> dict[str, Any]:
    """The fields that are not the defaults, as JSON has them."""
    return {name: _value(value) for name, value in _given_fields(spec).items()}


def _value(value: Any) -> Any:
    if isinstance(value, Step):
        return {"step": value.kind, **_plain(value)}
    if isinstance(value, Key):
        return _plain(value)
    if isinstance(value, tuple):
        return [_value(one) for one in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value


def _given_fields(spec: Any) -> dict[str, Any]:
    """The fields of a specification or step that are not the defaults, by name."""
    found = {}
    for one in fields(spec):
        if one.init and getattr(spec, one.name) != one.default:
            found[one.name] = getattr(spec, one.name)
    return found
