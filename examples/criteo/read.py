"""Reads Criteo's click logs: tab-separated text, or the NumPy files of the DLRM reference.

A line of text has 40 fields: the label (0 or 1), 13 integers and 26 categories of up to 8 hexadecimal digits.
A missing integer or category is an empty field and counts as 0.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
DENSE, TABLES = 13, 26
FIELDS = 1 + DENSE + TABLES
TAB, NEWLINE, RETURN, MINUS = b"\t\n\r-"
CHUNK_BYTES = 4 << 20  # of text that is parsed at once
MOST_LINE_BYTES = 1 << 16  # a longer line is no line of Criteo
PARTS = ("dense", "sparse", "labels")

# The value of each character as a digit. 99 is no digit of any base.
DIGITS = np.full(256, 99, np.int64)
DIGITS[list(b"0123456789")] = range(10)
DIGITS[list(b"abcdef")] = DIGITS[list(b"ABCDEF")] = range(10, 16)


class Batch(NamedTuple):
    """Samples of one call."""

    dense: Array  # [batch, 13] float32, log(1 + x)
    indices: Array  # [batch, 26] int64, below the rows of each table
    labels: Array  # [batch] float32, 0 or 1


def read(paths: Iterable[str | Path], rows: Sequence[int], batch: int) -> Iterator[Batch]:
    """Yields batches of `batch` samples of all files in turn; the last batch may be smaller.

    A path is a text file (also ending in .gz), a file `*_dense.npy`, or a folder of such files. `rows` are
    the rows of the 26 tables: the index of a category is its value modulo the rows.

    Raises ValueError with the file and the line, or the row of an array, of the first bad value.
    """
    moduli = np.asarray(rows, np.int64)
    if moduli.shape != (TABLES,) or moduli.min() < 1:
        raise ValueError(f"rows are {list(rows)}; expected {TABLES} positive numbers")
    rest = Batch(np.empty((0, DENSE), np.float32), np.empty((0, TABLES), np.int64), np.empty(0, np.float32))
    for path in (file for given in paths for file in files_of(Path(given))):
        chunks = read_arrays(path, moduli, batch) if path.suffix == ".npy" else read_text(path, moduli)
        for chunk in chunks:
            both = Batch(*map(np.concatenate, zip(rest, chunk, strict=True)))
            whole = len(both.labels) // batch * batch
            for begin in range(0, whole, batch):
                yield Batch(*(part[begin : begin + batch] for part in both))
            rest = Batch(*(part[whole:] for part in both))
    if len(rest.labels):
        yield rest


def files_of(path: Path) -> list[Path]:
    """Returns the file itself, or the `*_dense.npy` of a folder, with day_2 before day_10."""
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*_dense.npy"), key=lambda file: (len(file.name), file.name))
    if not found:
        raise FileNotFoundError(f"{path}: no *_dense.npy in this folder")
    return found


def read_text(path: Path, rows: Array, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Batch]:
    """Yields the samples of a text file in chunks of whole lines. A last line may lack its newline."""
    line, rest = 1, b""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        while piece := read_piece(file, chunk_bytes, path, line):
            lines, newline, rest = (rest + piece).rpartition(b"\n")
            if newline:
                yield parse(lines + newline, rows, path, line)
                line += lines.count(b"\n") + 1
            if len(rest) > MOST_LINE_BYTES:
                raise ValueError(
                    f"{path}: line {line}: more than {MOST_LINE_BYTES:,} bytes were read without a newline"
                )
    if rest:
        yield parse(rest + b"\n", rows, path, line)


def read_piece(file: BinaryIO | gzip.GzipFile, size: int, path: Path, line: int) -> bytes:
    """Returns the next bytes of a file, or none at its end. A damaged .gz raises with the line."""
    try:
        return file.read(size)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: after line {line - 1}: {error}") from error


def parse(text: bytes, rows: Array, path: Path, first_line: int) -> Batch:
    """Returns the samples of whole lines; the first line of `text` has the number `first_line`."""
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero((data == TAB) | (data == NEWLINE))
    fields = np.diff(np.flatnonzero(data[ends] == NEWLINE), prepend=-1)
    for at in np.flatnonzero(fields != FIELDS)[:1]:
        if at:  # a line before this one may have a bad value
            parse(text[: ends[fields[:at].sum() - 1] + 1], rows, path, first_line)
        raise ValueError(
            f"{path}: line {first_line + at}: found {fields[at]} fields; expected {FIELDS} (a label, "
            f"{DENSE} integers and {TABLES} categories, with a tab between them)"
        )
    begins = np.concatenate([[0], ends[:-1] + 1]).reshape(-1, FIELDS)
    ends = ends.reshape(-1, FIELDS)
    ends[:, -1] -= data[ends[:, -1] - 1] == RETURN

    labels, label_ok = numbers(data, begins[:, :1], ends[:, :1], base=10, most=1)
    label_ok &= (labels < 2) & (begins[:, :1] < ends[:, :1])
    split = 1 + DENSE
    negative = (begins[:, 1:split] < ends[:, 1:split]) & (data[begins[:, 1:split]] == MINUS)
    digits = begins[:, 1:split] + negative
    integers, integers_ok = numbers(data, digits, ends[:, 1:split], base=10, most=18)
    integers_ok &= ~negative | (digits < ends[:, 1:split])
    categories, categories_ok = numbers(data, begins[:, split:], ends[:, split:], base=16, most=8)

    for at in np.flatnonzero(~np.hstack([label_ok, integers_ok, categories_ok]))[:1]:
        row, field = divmod(int(at), FIELDS)
        value = text[begins[row, field] : ends[row, field]].decode("latin-1")
        raise ValueError(f"{path}: line {first_line + row}: {wrong_value(field, value)}")
    dense = np.log1p(np.where(negative, 0, integers)).astype(np.float32)
    return Batch(dense, categories % rows, labels[:, 0].astype(np.float32))


def numbers(data: Array, begins: Array, ends: Array, base: int, most: int) -> tuple[Array, Array]:
    """Returns the numbers of at most `most` digits in `data[begins:ends]`, and a mask of the valid fields.

    An empty field is a valid 0. All fields advance together, a digit in each pass.
    """
    values = np.zeros(begins.shape, np.int64)
    valid = ends - begins <= most
    for position in range(min(int((ends - begins).max(initial=0)), most)):
        inside = begins + position < ends
        digit = DIGITS[data[np.where(inside, begins + position, 0)]]
        valid &= ~inside | (digit < base)
        values = np.where(inside, values * base + digit, values)
    return values, valid


def wrong_value(field: int, value: str) -> str:
    """Returns the text of an error for the value of a field, numbered from 0."""
    shown = repr(value if len(value) <= 40 else f"{value[:40]}...")
    if field == 0:
        return f"the label is {shown}; expected 0 or 1"
    if field <= DENSE:
        return f"integer {field} is {shown}; expected an integer of up to 18 digits or an empty field"
    allowed = "up to 8 hexadecimal digits or an empty field"
    return f"category {field - DENSE} is {shown}; expected {allowed}"


def read_arrays(path: Path, rows: Array, batch: int) -> Iterator[Batch]:
    """Yields batches of `X_dense.npy`, `X_sparse.npy` and `X_labels.npy`, which stay on disk (memory maps).

    Dense values are used as they are: the files hold their logarithm. A category is 32 bits, signed or not.
    """
    if not path.name.endswith("_dense.npy"):
        raise ValueError(
            f"{path}: the name has another end; expected _dense.npy. Put X_sparse.npy and X_labels.npy into "
            "the same folder."
        )
    files = {part: path.with_name(path.name.replace("_dense.npy", f"_{part}.npy")) for part in PARTS}
    dense, sparse, labels = (open_array(file) for file in files.values())
    expected = {"dense": (len(dense), DENSE), "sparse": (len(dense), TABLES), "labels": (len(dense), 1)}
    kinds = {"dense": "f", "sparse": "iu", "labels": "iuf"}
    for (part, file), array in zip(files.items(), (dense, sparse, labels), strict=True):
        if array.shape != expected[part] and array.shape != expected[part][: 1 + (part != "labels")]:
            raise ValueError(f"{file}: shape is {list(array.shape)}; expected {list(expected[part])}")
        if array.dtype.kind not in kinds[part]:
            raise ValueError(f"{file}: dtype is {array.dtype}; expected a kind of {kinds[part]}")
    for begin in range(0, len(dense), batch):
        chunk = slice(begin, begin + batch)
        values = dense[chunk].astype(np.float32)
        bits = sparse[chunk].astype(np.int64) & 0xFFFFFFFF
        clicks = labels[chunk].reshape(-1).astype(np.float32)
        for row, column in np.argwhere(~np.isfinite(values))[:1]:
            raise ValueError(
                f"{files['dense']}: row {begin + row}: column {column} is {values[row, column]}; expected a "
                "finite number"
            )
        for row in np.flatnonzero((clicks != 0) & (clicks != 1))[:1]:
            raise ValueError(
                f"{files['labels']}: row {begin + row}: the label is {clicks[row]}; expected 0 or 1"
            )
        yield Batch(values, bits % rows, clicks)


def open_array(path: Path) -> Array:
    """Returns a memory map of an array, or the array itself if it has no elements."""
    try:
        return np.load(path, mmap_mode="r")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
