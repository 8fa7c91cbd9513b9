"""Readers of trace files: indices as text, and the tuples of Meta's dlrm_datasets."""

from __future__ import annotations

import gzip
import io
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from recfuse._arguments import integer, path_of
from recfuse._files import parsing
from recfuse._progress import hidden
from recfuse.data.traces.tuples import Bound, Table, read_tuple
from recfuse.errors import ArgumentTypeError, ArgumentValueError, FileFormatError, a_type

MOST_BYTES = 4 << 30
"""Default bound of the memory that reading a file may take."""
_FORMS = "row ids as .txt or .txt.gz, or (indices, offsets, lengths) as .pt or .pt.gz"
_CHUNK = 1 << 20
_MOST_LINE = 1000  # bytes; int refuses text of more than 4,300 digits
_ROW_BYTES = 16  # per index of a text: in the array of a chunk, and in the array of all chunks


def read(
    path: str | PathLike[str], table: int | None = None, *, most_bytes: int = MOST_BYTES
) -> NDArray[np.int64]:
    """Read the indices of one table of a trace file.

    Args:
        path: a file of a format that :func:`read_tables` reads.
        table: the number of the table. Default: the only table.
        most_bytes: as in :func:`read_tables`.

    Returns:
        ndarray: int64 ``[lookups]``.

    Raises:
        ValueError: as :func:`read_tables`; several tables and no number.
        TypeError: a number that is not whole.
        IndexError: no such table.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "trace.txt")
        ...     _ = path.write_text("5" + chr(10) + "2" + chr(10))
        ...     recfuse.traces.read(path).tolist()
        [5, 2]
    """
    tables = read_tables(path, most_bytes=most_bytes)
    if table is None:
        if len(tables) > 1:
            raise ArgumentValueError(
                f"traces: {path} has {len(tables)} tables. Pass table or use read_tables."
            )
        table = 0
    try:
        table = operator.index(table)
    except TypeError as error:
        raise ArgumentTypeError(
            f"traces: table is {a_type(table)}; expected a whole number or None"
        ) from error
    if not 0 <= table < len(tables):
        raise IndexError(f"traces: table is {table}, {path} has 0...{len(tables) - 1}")
    return tables[table].indices


def read_tables(path: str | PathLike[str], *, most_bytes: int = MOST_BYTES) -> list[Table]:
    """Read all tables of a trace file.

    The end of the name gives the format. `.txt`, `.txt.gz`: an index per line, one table without bags. `.pt`,
    `.pt.gz`: the tuple of tensors (indices, offsets, lengths) of facebookresearch/dlrm_datasets, tables in
    order, offsets ``[tables * batch + 1]``, lengths ``[tables, batch]`` (``[batch]``: a single table).
    Reading runs no code of a `.pt` file. Its tensors must be dense integers, in the format of torch.save
    since 1.6.

    Args:
        path: the file.
        most_bytes: about the maximal memory of reading, checked before allocation; a file that needs more is
            refused. Default: 4 GiB.

    Returns:
        list: a :class:`Table` for each table.

    Raises:
        recfuse.errors.FileFormatError: a ValueError that names the file and the line, tensor or byte: an
            unknown format, indices that are negative or not numbers, a damaged or cut file, another tuple, a
            file that needs more memory than `most_bytes`.
        OSError: the file cannot be opened.
        MemoryError: not enough free memory within the bound.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "trace.pt")
        ...     torch.save((torch.tensor([3, 4, 5]), torch.tensor([0, 1, 3]), torch.tensor([[1], [2]])), path)
        ...     [table.indices.tolist() for table in recfuse.traces.read_tables(path)]
        [[3], [4, 5]]
    """
    path = Path(path_of(path, "recfuse.data.traces.read"))
    bound = Bound(integer("traces: most_bytes", most_bytes, 0, 2**63 - 1))
    name = path.name.removesuffix(".gz")
    if not name.endswith((".txt", ".pt")):
        raise FileFormatError(f"traces: {path} has an unknown form; expected one of {_FORMS}")
    with parsing(f"traces: {path}"), _opened(path) as file:
        tables = [Table(_read_text(file, bound), None)] if name.endswith(".txt") else _read_pt(file, bound)
        if not any(len(table.indices) for table in tables):
            raise ArgumentValueError("it holds no row ids; expected at least one row id")
    return tables


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Yield the unpacked file. Long reads show a progress bar on a terminal."""
    with (
        path.open("rb") as file,
        tqdm.wrapattr(
            file,
            "read",
            total=path.stat().st_size,
            desc=path.name,
            delay=2,
            leave=False,
            bytes=True,
            disable=hidden(),
        ) as counted,
    ):
        if path.suffix != ".gz":
            yield counted
            return
        with gzip.GzipFile(fileobj=counted) as unpacked:
            yield cast(BinaryIO, unpacked)


def _read_text(file: BinaryIO, bound: Bound) -> NDArray[np.int64]:
    chunks: list[NDArray[np.int64]] = []
    rows, rest = 0, b""
    while chunk := file.read(_CHUNK):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        chunks.append(_row_indices(lines, rows + 1))
        rows += len(lines)
        bound.check(rows * _ROW_BYTES, f"line {rows}: the row ids up to it")
        if len(rest) > _MOST_LINE:
            raise _bad_line(rows + 1, rest)
    if rest.strip():
        chunks.append(_row_indices([rest], rows + 1))
    return np.concatenate([np.empty(0, np.int64), *chunks])


def _row_indices(lines: list[bytes], first: int) -> NDArray[np.int64]:
    """Return the indices of lines; the first line has the number `first` in errors.

    A blank line is an error, and so is an underscore, which int accepts between digits.
    """
    try:
        rows = np.fromiter(map(int, lines), np.int64, len(lines))
        if len(rows) == 0 or (rows.min() >= 0 and not any(b"_" in line for line in lines)):
            return rows
    except (ValueError, OverflowError):
        pass
    raise _bad_line(
        *next(
            (number, line)
            for number, line in enumerate(lines, first)
            if not line.strip().isdigit() or len(line) > _MOST_LINE or int(line) >= 2**63
        )
    )


def _bad_line(number: int, line: bytes) -> ArgumentValueError:
    text = line[:60].decode(errors="replace")
    size = f", {len(line):,} bytes and more" if len(line) > _MOST_LINE else ""
    return ArgumentValueError(
        f"line {number}: found {text!r}{size}; expected one row id, a number from 0 to 2^63 - 1"
    )


def _read_pt(file: BinaryIO, bound: Bound) -> list[Table]:
    """Read a zip archive. A compressed file is unpacked first, because an archive needs random access."""
    if not isinstance(file, gzip.GzipFile):
        return read_tuple(file, bound)
    contents = io.BytesIO()
    while chunk := file.read(_CHUNK):
        bound.check(contents.tell() + len(chunk), f"byte {contents.tell():,}: the unpacked bytes")
        contents.write(chunk)
    return read_tuple(contents, bound.less(contents.tell()))
