"""Mutations of files: of bytes, of JSON, of archives and of compressed data."""

from __future__ import annotations

import copy
import io
import json
import random
import re
import struct
import zipfile
from collections.abc import Callable
from typing import Any

from support.fuzz.corpus import Form, gzipped

NUMBERS = [
    0,
    1,
    2,
    7,
    255,
    256,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
UNITS = [
    b"0",
    b"9",
    b"[",
    b"]",
    b"{",
    b'{"a":',
    b"[],",
    b"0,",
    b'"a",',
    b'"',
    b" ",
    b"\n",
    b"1\n",
    b"\0",
    b"_",
    b"e9",
    b"\\u0041",
]
VALUES: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**18,
    10**29,
    -0.0,
    0.5,
    1e300,
    "",
    "a",
    "x" * 3000,
    [],
    [[]],
    {},
    [0] * 300,
]
VALUES += [
    "0*99999",
    "0*100001",
    "1*99999999",
    "kind=pool threads=9",
    "distance=65536",
    "cuda",
    "\u0663",
    "\x1b[2J",
    "Infinity",
    {"a": [{}]},
]
_MOST_REPEATS = 1 << 18
_MOST_BYTES = 20 << 20


def _flip(case: random.Random, data: bytes) -> bytes:
    found = bytearray(data or b"\0")
    for _ in range(case.choice((1, 1, 2, 8))):
        found[case.randrange(len(found))] ^= 1 << case.randrange(8)
    return bytes(found)


def _cut(case: random.Random, data: bytes) -> bytes:
    return data[: case.randrange(len(data) + 1)]


def _drop(case: random.Random, data: bytes) -> bytes:
    first = case.randrange(len(data) + 1)
    return data[:first] + data[first + case.choice((1, 2, 8, 100)) :]


def _double(case: random.Random, data: bytes) -> bytes:
    first = case.randrange(len(data) + 1)
    piece = data[first : first + case.choice((1, 4, 30, 500, 10**6))]
    return (data[:first] + piece * case.choice((2, 2, 3, 50)) + data[first + len(piece) :])[:_MOST_BYTES]


def _number(case: random.Random, data: bytes) -> bytes:
    """Replaces a number of 1, 2, 4 or 8 bytes at a possible position."""
    form = case.choice(("<B", "<H", "<I", "<Q", ">I", ">Q"))
    text = struct.pack(form, case.choice(NUMBERS) % 2 ** (8 * struct.calcsize(form)))
    first = case.randrange(len(data) + 1)
    return data[:first] + text + data[first + len(text) :]


def _digits(case: random.Random, data: bytes) -> bytes:
    """Replaces a number in the text."""
    found = list(re.finditer(rb"-?\d+(\.\d+)?", data[:20000]))
    if not found:
        return data
    own = case.choice(found)
    text = str(case.choice([*NUMBERS, -1, "1e400", "1e308", "-0", "01", ".5", "NaN", "9" * 5000])).encode()
    return data[: own.start()] + text + data[own.end() :]


def _repeat(case: random.Random, data: bytes) -> bytes:
    """A short text again and again: seldom so often that bounds are reached."""
    unit, first = case.choice(UNITS), case.randrange(len(data) + 1)
    number = case.choice((3, 40, 5000)) if case.random() < 0.97 else case.choice((_MOST_REPEATS, 1 << 24))
    return data[:first] + unit * min(number, _MOST_BYTES // len(unit)) + data[first:]


BYTES: list[Callable[[random.Random, bytes], bytes]] = [
    _flip,
    _cut,
    _drop,
    _double,
    _number,
    _digits,
    _repeat,
]


def _places(record: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs = (
        record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    )
    found = []
    for key, value in pairs:
        found += [(*place, key), *_places(value, (*place, key))]
    return found


def _json(case: random.Random, data: bytes) -> bytes:
    """Values that are others, missing, twice, deeper, or elsewhere."""
    try:
        record = json.loads(data)
        places = _places(record)
    except (ValueError, RecursionError):
        return data
    if not places or len(places) > 20000:
        return data
    for turn in range(case.choice((1, 1, 2, 3))):
        *way, last = case.choice(places)
        inner = record
        try:
            for key in way:
                inner = inner[key]
            match case.choice(("value", "value", "drop", "twice", "deeper", "move", "many")):
                case "value":
                    inner[last] = copy.deepcopy(case.choice(VALUES))
                case "drop":
                    del inner[last]
                case "twice" if isinstance(inner, list):
                    inner.insert(last, inner[last])
                case "deeper":
                    for _ in range(case.choice((1, 3, 400))):
                        inner[last] = [inner[last]] if case.random() < 0.5 else {"a": inner[last]}
                case "many":
                    inner[last] = [inner[last]] * case.choice((10, 1000) if turn == 0 else (2,))
                case _:
                    inner[last] = copy.deepcopy(_at(record, case.choice(places)))
        except (KeyError, IndexError, TypeError, RecursionError):
            continue
    try:
        return json.dumps(record).encode()
    except (ValueError, RecursionError):
        return data


def _at(record: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        record = record[key]
    return record


def _archive(case: random.Random, data: bytes) -> bytes:
    """Returns an archive whose members are mutated, missing, duplicated or compressed, with correct
    checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    except Exception:
        return data
    for _ in range(case.choice((1, 1, 2))):
        if not members:
            break
        at = case.randrange(len(members)) if case.random() < 0.4 else 0  # the first is the pickle
        name, text = members[at]
        match case.choice(("bytes", "bytes", "bytes", "drop", "twice", "rename", "empty")):
            case "bytes":
                members[at] = name, case.choice(BYTES)(case, text)
            case "drop":
                del members[at]
            case "twice":
                members.append((name, text))
            case "rename":
                members[at] = (
                    case.choice(("data.pkl", "archive/data/0", "a/b/data.pkl", name + "x", "")),
                    text,
                )
            case _:
                members[at] = name, b""
    file, packing = io.BytesIO(), case.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    try:
        with zipfile.ZipFile(file, "w", packing) as archive:
            for name, text in members:
                archive.writestr(name, text)
    except (ValueError, IndexError):  # an empty name
        return data
    return file.getvalue()


def mutated(case: random.Random, form: Form, others: list[Form]) -> bytes:
    """Returns the contents of a file of a form: a valid file, changed in one to four ways."""
    data = case.choice(form.valid)
    for _ in range(case.choice((0, 1, 1, 1, 2, 4)) if form.kind == "pt" else case.choice((1, 1, 1, 2, 4))):
        draw = case.random()
        if draw < 0.05:
            other = case.choice(case.choice(others).valid)
            data = data[: case.randrange(len(data) + 1)] + other[case.randrange(len(other) + 1) :]
        elif form.kind == "json" and draw < 0.6:
            data = _json(case, data)
        elif form.kind == "pt" and draw < 0.6:
            data = _archive(case, data)
        else:
            data = case.choice(BYTES)(case, data)
    if not form.packed:
        return data
    draw = case.random()
    if draw < 0.01:
        data = case.choice((b"\0", b"0\n", b"1", b"PK\3\4")) * (1 << case.randrange(20, 26))
    packed = gzipped(data)
    if draw > 0.8:
        return case.choice(BYTES)(case, packed)
    return packed + gzipped(b"1\n") * (draw > 0.75)
