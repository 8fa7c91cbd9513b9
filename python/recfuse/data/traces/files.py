"""Readers of trace files: row ids as text, and the tuples of Meta's dlrm_datasets."""

from __future__ import annotations

import gzip
import io
import operator
import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from recfuse._arguments import path_of
from recfuse.errors import ArgumentTypeError, a_type

if TYPE_CHECKING:
    from torch import Tensor

_FORMS = "row ids as .txt or .txt.gz, or (indices, offsets, lengths) as .pt or .pt.gz"
_CHUNK = 1 << 22
_MOST_DIGITS = 1000  # far fewer than int refuses


@dataclass(frozen=True, eq=False)
class Table:
    """The lookups of one table. Bag b is `indices[offsets[b]:offsets[b + 1]]`."""

    indices: NDArray[np.int64]
    """[lookups]: row ids."""
    offsets: NDArray[np.int64] | None
    """[bags + 1], from 0; None where the file has no bags."""


def read(path: str | PathLike[str], table: int | None = None) -> NDArray[np.int64]:
    """Row ids, int64 [lookups], of one table of a trace file.

    Args:
        path: a file of any form that `read_tables` reads.
        table: which of its tables; may be None where it has only one.

    Raises:
        ValueError: as `read_tables`; several tables and no choice.
        IndexError: no such table.
    """
    tables = read_tables(path)
    if table is None:
        if len(tables) > 1:
            raise ValueError(f"traces: {path} has {len(tables)} tables; pass table or use read_tables")
        table = 0
    try:
        table = operator.index(table)
    except TypeError as error:
        raise ArgumentTypeError(
            f"traces: table is {a_type(table)}, must be a whole number or None"
        ) from error
    if not 0 <= table < len(tables):
        raise IndexError(f"traces: table is {table}, {path} has 0...{len(tables) - 1}")
    return tables[table].indices


def read_tables(path: str | PathLike[str]) -> list[Table]:
    """The tables of a trace file.

    The forms, by the end of the name: `.txt`, `.txt.gz`, one row id a line, one table without bags;
    `.pt`, `.pt.gz`, the tuple of tensors (indices, offsets, lengths) of facebookresearch/dlrm_datasets: the
    tables one after another, offsets [tables * batch + 1], lengths [tables, batch] ([batch]: one table).
    A `.pt` file is loaded with `weights_only=True`: it cannot run code.

    Raises:
        ValueError: a form that is not known, no row ids, ids that are negative or no numbers (with the line),
            a damaged or cut file, a tuple that is not as above.
        OSError: the file cannot be opened.
    """
    path = Path(path_of(path, "recfuse.data.traces.read"))
    name = path.name.removesuffix(".gz")
    if name.endswith(".txt"):
        tables = [Table(_read_text(path), None)]
    elif name.endswith(".pt"):
        tables = _read_tuple(path)
    else:
        raise ValueError(f"traces: {path} has an unknown form, must be one of {_FORMS}")
    if not any(len(table.indices) for table in tables):
        raise ValueError(f"traces: {path} holds no row ids")
    return tables


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's contents, unpacked; a damaged gzip file is a ValueError. Long reads show a progress bar."""
    with (
        path.open("rb") as file,
        tqdm.wrapattr(
            file, "read", total=path.stat().st_size, desc=path.name, delay=2, leave=False, bytes=True
        ) as counted,
    ):
        if path.suffix != ".gz":
            yield counted
            return
        try:
            with gzip.GzipFile(fileobj=counted) as unpacked:
                yield cast(BinaryIO, unpacked)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"traces: {path} is a damaged or cut gzip file: {error}") from error


def _read_text(path: Path) -> NDArray[np.int64]:
    chunks: list[NDArray[np.int64]] = []
    line, rest = 1, b""
    with _opened(path) as file:
        while chunk := file.read(_CHUNK):
            text = rest + chunk
            lines = text.split(b"\n")
            rest = lines.pop()
            underscores = text.find(b"_", 0, len(text) - len(rest)) >= 0
            chunks.append(_row_indices(path, lines, line, underscores))
            line += len(lines)
    chunks.append(_row_indices(path, [rest] if rest.strip() else [], line, b"_" in rest))
    return np.concatenate(chunks)


def _row_indices(path: Path, lines: list[bytes], first: int, underscores: bool) -> NDArray[np.int64]:
    """Numbers of lines, the first of which has the number `first`; a blank line is an error, and so is an
    underscore, which int takes between digits.
    """
    try:
        rows = np.fromiter(map(int, lines), np.int64, len(lines))
        if len(rows) == 0 or (rows.min() >= 0 and not underscores):
            return rows
    except (ValueError, OverflowError):
        pass
    number, text = next(
        (number, text)
        for number, text in enumerate(lines, first)
        if not text.strip().isdigit() or len(text) > _MOST_DIGITS or int(text) >= 2**63
    )
    found = text[:60].decode(errors="replace")
    raise ValueError(
        f"traces: {path}, line {number}: found {found!r}, needed is one row id, a number from 0 on"
    )


def _read_tuple(path: Path) -> list[Table]:
    import torch

    # torch.load seeks: unpack the whole file first.
    with _opened(path) as file:
        contents = io.BytesIO(file.read())
    try:
        loaded = torch.load(contents, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(
            f"traces: {path} is not a file of tensors that torch.load can read: {error}"
        ) from error

    if not isinstance(loaded, (tuple, list)) or len(loaded) != 3:
        size = f" of {len(loaded)}" if hasattr(loaded, "__len__") else ""
        raise ValueError(
            f"traces: {path} holds {a_type(loaded)}{size}, needed is a tuple of 3 tensors: indices, "
            "offsets, lengths"
        )
    indices, offsets, lengths = (
        _integers(path, name, value)
        for name, value in zip(("indices", "offsets", "lengths"), loaded, strict=True)
    )
    if lengths.ndim == 1:
        lengths = lengths[None]
    if indices.ndim != 1 or offsets.ndim != 1 or lengths.ndim != 2:
        raise ValueError(
            f"traces: {path} has indices {indices.shape}, offsets {offsets.shape}, lengths {lengths.shape}; "
            "needed are [lookups], [tables * batch + 1], [tables, batch]"
        )
    if len(offsets) != lengths.size + 1:
        raise ValueError(
            f"traces: {path} has {len(offsets)} offsets and lengths {lengths.shape}; needed are "
            f"{lengths.size + 1} offsets"
        )
    rises = np.array_equal(np.diff(offsets), lengths.ravel())
    if offsets[0] != 0 or offsets[-1] != len(indices) or not rises:
        raise ValueError(
            f"traces: {path}: offsets go from {offsets[0]} to {offsets[-1]}; they must begin at 0, rise by "
            f"lengths and end at the {len(indices)} indices"
        )
    if lengths.size and lengths.min() < 0:
        raise ValueError(f"traces: {path}: lengths has {lengths.min()}, allowed is >= 0")
    if len(indices) and indices.min() < 0:
        wrong = int(np.argmax(indices < 0))
        raise ValueError(f"traces: {path}: indices[{wrong}] is {indices[wrong]}, allowed is >= 0")
    batch = lengths.shape[1]
    ends_of = (offsets[number * batch : (number + 1) * batch + 1] for number in range(len(lengths)))
    return [Table(indices[ends[0] : ends[-1]], ends - ends[0]) for ends in ends_of]


def _integers(path: Path, name: str, value: Tensor) -> NDArray[np.int64]:
    import torch

    kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
    if kind not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"traces: {path}: {name} is {kind}, needed is a tensor of integers")
    return value.to(torch.int64).numpy()
