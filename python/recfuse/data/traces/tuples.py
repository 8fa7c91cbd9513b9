"""Reads tuples of tensors (indices, offsets, lengths) from files of torch.save, without running their code.

The pickle of such a file becomes descriptions of tensors. Their sizes are checked before memory is allocated:
a file of 2 KB can describe tensors of terabytes, which torch.load allocates, even with `weights_only=True`.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from recfuse.errors import ArgumentValueError, a_type

_NEEDED = "a tuple of 3 tensors of integers, dense and on the CPU or a GPU (indices, offsets, lengths)"
_NAMES = "indices", "offsets", "lengths"
_DTYPES = {
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
}
_OPCODES = frozenset(
    [
        *(
            "PROTO",
            "FRAME",
            "STOP",
            "MARK",
            "GLOBAL",
            "STACK_GLOBAL",
            "REDUCE",
            "BINPERSID",
            "NONE",
            "NEWTRUE",
        ),
        *("NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
        *(
            "EMPTY_TUPLE",
            "TUPLE",
            "TUPLE1",
            "TUPLE2",
            "TUPLE3",
            "EMPTY_LIST",
            "APPEND",
            "APPENDS",
            "EMPTY_DICT",
        ),
        *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "MEMOIZE"),
    ]
)
_MOST_READ = 1 << 20  # bytes of a read; also bounds an archive's directory, which has some hundred bytes
_MOST_PICKLE = 1 << 16  # bytes; the pickle of a tuple of 3 tensors has some 300
_MOST_RANK = 2
_MOST_OFFSET = 1 << 62
_TABLE_BYTES = 512  # of a Table with the headers of its two arrays
_OFFSET_BYTES = 48  # per offset: the value, its differences and comparisons, and its copy in a Table


@dataclass(frozen=True, eq=False)
class Table:
    """The lookups of one table of a trace file. Bag b is ``indices[offsets[b]:offsets[b + 1]]``.

    Attributes:
        indices: ``[lookups]``.
        offsets: ``[bags + 1]``, from 0; None if the file has no bags.

    Example:
        >>> import numpy
        >>> table = recfuse.traces.Table(numpy.array([5, 2, 7]), numpy.array([0, 1, 3]))
        >>> table.indices[table.offsets[1] : table.offsets[2]].tolist()
        [2, 7]
    """

    indices: NDArray[np.int64]
    offsets: NDArray[np.int64] | None


@dataclass(frozen=True)
class Bound:
    """Memory that reading a file may take."""

    whole: int
    used: int = 0

    def check(self, needed: int, contents: str) -> None:
        """Raise ArgumentValueError if `needed` more bytes exceed the bound."""
        if self.used + needed > self.whole:
            raise ArgumentValueError(
                f"{contents} need {self.used + needed:,} bytes of memory; expected {self.whole:,} at most. "
                "Pass most_bytes."
            )

    def less(self, used: int) -> Bound:
        """Return the bound that remains after the use of `used` bytes."""
        return Bound(self.whole, self.used + used)


@dataclass(frozen=True)
class _Storage:
    kind: str  # such as "LongStorage"
    key: str
    size: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(_DTYPES[self.storage.kind])

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_tuple(file: BinaryIO, bound: Bound) -> list[Table]:
    """Return the tables of a file of torch.save.

    Raises ArgumentValueError, and errors of zipfile and pickle.
    """
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        raise ArgumentValueError(
            "byte 0: it is not an archive of torch.save. Save a file of torch below 1.6 again."
        )
    with zipfile.ZipFile(_Archive(file)) as archive:  # type: ignore[call-overload]
        contents = {entry.filename: entry for entry in archive.infolist()}
        root, tensors = _described(archive, contents)
        _check_sizes(tensors, bound)
        order = _byte_order(archive, contents, root)
        arrays = [_array(archive, contents, root, order, tensor) for tensor in tensors]
    return _tables(*arrays)


class _Archive:
    """A file with a bound on each read, because zipfile reads a directory of any size in one read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tell = file.tell

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET and not 0 <= offset < _MOST_OFFSET:
            raise ArgumentValueError(f"its archive names byte {offset}, which no file has")
        return self._file.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(min(size, _MOST_READ + 1) if size >= 0 else _MOST_READ + 1)
        if len(content) > _MOST_READ:
            raise ArgumentValueError(
                f"its archive has a directory of more than {_MOST_READ:,} bytes, the most that is read"
            )
        return content


class _Descriptions(pickle.Unpickler):
    """Reads the tensors of a pickle as descriptions; calls no function that the pickle chooses."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return name
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
            ("collections", "OrderedDict"): OrderedDict,
        }.get((module, name))
        if known is None:
            raise ArgumentValueError(f"data.pkl: it holds {module}.{name}; expected {_NEEDED}")
        return known

    def persistent_load(self, pid: Any) -> _Storage:
        word, kind, key, _, size = pid
        if word != "storage" or not isinstance(kind, str) or not isinstance(key, str):
            raise ArgumentValueError(f"data.pkl: it refers to {word!r:.60}; expected storages")
        return _Storage(kind, key, _sizes("a storage's size", (size,))[0])


def _rebuilt(storage: Any, first: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    if not isinstance(storage, _Storage):
        raise ArgumentValueError(f"data.pkl: a tensor has {a_type(storage)}; expected a storage")
    tensor = _Tensor(storage, *_sizes("offset", (first,)), _sizes("shape", shape), _sizes("strides", strides))
    if len(tensor.shape) != len(tensor.strides):
        raise ArgumentValueError(
            f"data.pkl: a tensor has {len(tensor.shape)} sizes and {len(tensor.strides)} strides"
        )
    return tensor


def _sizes(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(
        type(value) is int and 0 <= value < 2**63 for value in values
    ):
        raise ArgumentValueError(f"data.pkl: {name} is {values!r:.60}; expected 0 to 2^63 - 1")
    return values


def _described(archive: zipfile.ZipFile, contents: dict[str, zipfile.ZipInfo]) -> tuple[str, list[_Tensor]]:
    """Return the folder in the archive, and the descriptions of the three tensors."""
    name = next((name for name in contents if name.endswith("/data.pkl") and name.count("/") == 1), None)
    if name is None:
        raise ArgumentValueError("its archive has no data.pkl; expected a file of torch.save")
    text = _record(archive, contents[name], _MOST_PICKLE)
    for opcode, argument, at in pickletools.genops(text):
        if opcode.name not in _OPCODES or (opcode.name == "LONG_BINPUT" and argument > len(text)):
            raise ArgumentValueError(f"data.pkl at byte {at}: found {opcode.name}; expected {_NEEDED}")
    value = _Descriptions(io.BytesIO(text)).load()
    if not isinstance(value, (tuple, list)) or len(value) != len(_NAMES):
        size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
        kind = "a tensor" if isinstance(value, _Tensor) else a_type(value)
        raise ArgumentValueError(f"data.pkl: it holds {kind}{size}; expected {_NEEDED}")
    for own, tensor in zip(_NAMES, value, strict=True):
        if not isinstance(tensor, _Tensor):
            raise ArgumentValueError(f"{own} is {a_type(tensor)}; expected a tensor of integers")
        if tensor.storage.kind not in _DTYPES:
            kind = tensor.storage.kind.removesuffix("Storage").lower()
            raise ArgumentValueError(
                f"{own} is of {kind:.60}; expected a tensor of {', '.join(_DTYPES.values())}"
            )
    return name.removesuffix("data.pkl"), list(value)


def _check_sizes(tensors: list[_Tensor], bound: Bound) -> None:
    """Raise ArgumentValueError for tensors that do not fit together, or exceed the bound of memory."""
    for name, tensor in zip(_NAMES, tensors, strict=True):
        last = tensor.first + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)
        )
        if tensor.elements and (last >= tensor.storage.size or tensor.elements > tensor.storage.size):
            raise ArgumentValueError(
                f"{name} has shape {list(tensor.shape)} and strides {list(tensor.strides)}, for a storage "
                f"of {tensor.storage.size:,} elements; expected a dense tensor. Save tensor.contiguous()."
            )
    indices, offsets, lengths = (tensor.shape for tensor in tensors)
    if len(indices) != 1 or len(offsets) != 1 or len(lengths) not in (1, _MOST_RANK):
        raise ArgumentValueError(
            f"indices {list(indices)}, offsets {list(offsets)}, lengths {list(lengths)} have these shapes; "
            "expected [lookups], [tables * batch + 1], [tables, batch]"
        )
    bags = math.prod(lengths)
    if offsets[0] != bags + 1:
        raise ArgumentValueError(
            f"there are {offsets[0]} offsets and lengths {list(lengths)}; expected {bags + 1} offsets"
        )
    if 0 in indices or 0 in lengths:
        raise ArgumentValueError("it holds no row ids; expected at least one row id")
    raw = sum(tensor.storage.size * tensor.dtype.itemsize for tensor in tensors)
    tables = lengths[0] if len(lengths) == _MOST_RANK else 1
    needed = raw + indices[0] * 8 + offsets[0] * _OFFSET_BYTES + tables * _TABLE_BYTES
    bound.check(needed, "its tensors")


def _byte_order(archive: zipfile.ZipFile, contents: dict[str, zipfile.ZipInfo], root: str) -> str:
    entry = contents.get(f"{root}byteorder")
    order = b"little" if entry is None else _record(archive, entry, len(b"little"))
    if order not in (b"little", b"big"):
        raise ArgumentValueError(f"byteorder: found {order!r}; expected little or big")
    return "<" if order == b"little" else ">"


def _record(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, most: int) -> bytes:
    if entry.file_size > most:
        raise ArgumentValueError(
            f"{entry.filename!r:.60} has {entry.file_size:,} bytes; expected {most:,} at most"
        )
    with archive.open(entry) as file:
        return file.read(most)


def _array(
    archive: zipfile.ZipFile,
    contents: dict[str, zipfile.ZipInfo],
    root: str,
    order: str,
    tensor: _Tensor,
) -> NDArray[np.int64]:
    """Return the elements of a tensor whose description was checked."""
    dtype, name = tensor.dtype.newbyteorder(order), f"{root}data/{tensor.storage.key}"
    needed, entry = tensor.storage.size * dtype.itemsize, contents.get(name)
    size = None if entry is None else entry.file_size
    if entry is None or size != needed:
        actual = "missing" if entry is None else f"of {size:,} bytes"
        raise ArgumentValueError(f"{name!r:.60} is {actual}; expected {needed:,} bytes")
    values = np.empty(tensor.storage.size, dtype)
    room, at = memoryview(values).cast("B"), 0
    with archive.open(entry) as file:
        while at < needed:
            piece = file.read(min(_MOST_READ, needed - at))
            if not piece:
                raise ArgumentValueError(f"{name!r:.60} ends at byte {at:,}; expected {needed:,}")
            room[at : at + len(piece)] = piece
            at += len(piece)
    steps = [stride * dtype.itemsize for stride in tensor.strides]
    view = np.lib.stride_tricks.as_strided(values[tensor.first :], tensor.shape, steps, writeable=False)
    return np.ascontiguousarray(view, np.int64)


def _tables(
    indices: NDArray[np.int64], offsets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> list[Table]:
    for name, values, most in (("indices", indices, 2**63 - 1), ("lengths", lengths.ravel(), len(indices))):
        if values.min() < 0 or values.max() > most:
            at = int(np.argmax((values < 0) | (values > most)))
            raise ArgumentValueError(f"{name}[{at}] is {values[at]}; expected 0 to {most}")
    expected = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths.ravel())])
    if (wrong := offsets != expected).any():
        at = int(np.argmax(wrong))
        raise ArgumentValueError(
            f"offsets[{at}] is {offsets[at]}; expected {expected[at]}, since offsets begin at 0 and rise by "
            "lengths"
        )
    if offsets[-1] != len(indices):
        raise ArgumentValueError(f"offsets end at {offsets[-1]}; expected the {len(indices)} indices")
    batch = lengths.shape[-1]
    ends_of = (offsets[first : first + batch + 1] for first in range(0, lengths.size, batch))
    return [Table(indices[ends[0] : ends[-1]], ends - ends[0]) for ends in ends_of]
