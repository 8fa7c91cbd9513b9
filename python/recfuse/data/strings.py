"""Strings to integers, on the CPU: XXH64 of their bytes (UTF-8). A column `Hash` then takes the integers.

| strings | method |
| --- | --- |
| pyarrow: String, LargeString, Binary, LargeBinary | read in place, without a copy; views after a cast |
| pyarrow: ChunkedArray, DictionaryArray | by chunk; each word of the dictionary once |
| pyarrow: lists of these | only `hash_string_lists` |
| NumPy: `S`, `U` | zeros at the end are padding, as in NumPy; `U` is converted to UTF-8 |
| NumPy: objects, `StringDType`; lists, pandas Series | objects: `str` (as UTF-8) and `bytes`; copied first |

Missing strings are Python's None, Arrow's nulls, masked items of NumPy's masked arrays and, among objects,
NaN. The empty string is a string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recfuse import _C
from recfuse._arguments import integer
from recfuse._codes import INTEGER_NAMES
from recfuse.errors import ArgumentTypeError, ArgumentValueError, a_type

Integers: TypeAlias = NDArray[np.int64]
_MOST_SEED = 2**64 - 1
_MOST_THREADS = 256
_INT32, _INT64 = INTEGER_NAMES.index("int32"), INTEGER_NAMES.index("int64")
_LISTS = (list, tuple, np.ndarray)
_ALLOWED = "a pyarrow array of strings, a NumPy array of S, U or objects, or a list of str and bytes"


class StringLists(NamedTuple):
    """Hashes of the strings of each sample: a jagged feature ``(values, offsets)``.

    Attributes:
        values: int64 ``[strings]``.
        offsets: int64 ``[samples + 1]``.

    Example:
        >>> recfuse.data.hash_string_lists([["Oslo", "Lima"], None]).offsets
        tensor([0, 2, 2])
    """

    values: Tensor  # [strings] int64
    offsets: Tensor  # [samples + 1] int64


class _Found(NamedTuple):
    """Hashes of strings, which may be missing or in lists."""

    hashes: Integers  # [strings]; undefined for a missing string
    present: NDArray[np.bool_] | None = None  # [strings]; None: no string is missing
    offsets: Integers | None = None  # [samples + 1] into hashes; None: no lists


def hash_strings(strings: Any, seed: int = 0, threads: int | None = None) -> Tensor:
    """Return the XXH64 of each string, as a feature with one value per sample.

    Args:
        strings: strings in a form of the module's table.
        seed: the seed of the hash, 0 to 2^64 - 1. Default: 0.
        threads: the maximal number of threads. Default: ``torch.get_num_threads()``, which is 1 in a worker
            of a DataLoader.

    Returns:
        Tensor: int64 ``[strings]`` on the CPU.

    Raises:
        TypeError: no strings.
        ValueError: a missing string, or lists: use :func:`hash_string_lists`; a surrogate, which UTF-8 does
            not have.

    Example:
        >>> recfuse.data.hash_strings(["Oslo", "Lima"]).shape
        torch.Size([2])
    """
    hashes = _hashed(strings, *_numbers(seed, threads))
    if hashes.offsets is not None:
        raise ArgumentValueError("hash_strings: strings are lists. Use hash_string_lists.")
    if hashes.present is not None and not hashes.present.all():
        raise ArgumentValueError(
            f"hash_strings: strings[{int(hashes.present.argmin())}] is missing "
            f"({int((~hashes.present).sum())} of {hashes.present.size} are). Use hash_string_lists, which "
            "makes it an empty sample."
        )
    return torch.from_numpy(hashes.hashes)


def hash_string_lists(strings: Any, seed: int = 0, threads: int | None = None) -> StringLists:
    """Return the XXH64 of the strings of each sample, as a jagged feature.

    Args:
        strings: lists of strings: pyarrow's, or a list or NumPy array of lists, arrays and None. Missing
            strings are left out, and a missing list is empty. Or strings without lists, as in
            :func:`hash_strings`: a sample has one string, or zero strings if it is missing.
        seed: as in :func:`hash_strings`.
        threads: as in :func:`hash_strings`.

    Returns:
        StringLists: values and offsets, on the CPU.

    Raises:
        TypeError: no strings.
        ValueError: a surrogate.

    Example:
        >>> recfuse.data.hash_string_lists([["Oslo", "Lima"], [], ["Rome"]]).offsets
        tensor([0, 2, 2, 3])
    """
    hashes, present, offsets = _hashed(strings, *_numbers(seed, threads))
    if offsets is None:
        offsets = np.arange(hashes.size + 1)
    if present is not None:
        offsets = _sums(present)[offsets]
        hashes = hashes[present]
    return StringLists(torch.from_numpy(hashes), torch.from_numpy(offsets))


def _numbers(seed: int, threads: int | None) -> tuple[int, int]:
    if threads is None:
        threads = min(torch.get_num_threads(), _MOST_THREADS)
    return (
        integer("hash_strings: seed", seed, 0, _MOST_SEED),
        integer("hash_strings: threads", threads, 1, _MOST_THREADS),
    )


def _sums(counts: NDArray[Any]) -> Integers:
    """Return 0 and the cumulative sums of counts."""
    sums = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def _hashed(strings: Any, seed: int, threads: int) -> _Found:
    if type(strings).__module__.partition(".")[0] == "pyarrow":
        return _of_arrow(strings, seed, threads)
    if isinstance(strings, (str, bytes)) or not hasattr(strings, "__len__"):
        raise _wrong(a_type(strings))
    if type(strings).__module__.partition(".")[0] == "pandas":
        strings = strings.to_numpy(dtype=object, na_value=None)
    if isinstance(strings, np.ma.MaskedArray):  # np.asarray would drop the mask
        strings = np.where(np.ma.getmaskarray(strings), None, np.ma.getdata(strings).astype(object))
    if not isinstance(strings, (list, tuple)):
        strings = np.asarray(strings)
        if strings.ndim != 1:
            raise ArgumentValueError(
                f"hash_strings: strings has the shape {strings.shape}; expected one dimension"
            )
        if strings.dtype.kind in "SU":
            native = strings.astype(strings.dtype.newbyteorder("="), copy=False)
            return _Found(_C.hash_padded_strings(np.ascontiguousarray(native), seed, threads))
        if strings.dtype.kind not in "OT" and strings.size:
            raise _wrong(f"a NumPy array of {strings.dtype}")
        strings = strings.tolist()
    if isinstance(next((sample for sample in strings if sample is not None), None), _LISTS):
        return _of_lists(strings, seed, threads)
    return _of_objects(strings, seed, threads)


def _of_objects(strings: Sequence[Any], seed: int, threads: int) -> _Found:
    hashes, places = _C.hash_string_objects(list(strings), seed, threads)
    if hashes.size == len(strings):
        return _Found(hashes)
    present = np.diff(places).astype(bool)
    spread = np.zeros(len(strings), np.int64)
    spread[present] = hashes
    return _Found(spread, present)


def _of_lists(samples: Sequence[Any], seed: int, threads: int) -> _Found:
    """Return the hashes of Python's lists; a list that is None is empty."""
    for at, sample in enumerate(samples):
        if sample is not None and not isinstance(sample, _LISTS):
            raise ArgumentTypeError(
                f"hash_strings: strings[{at}] is {a_type(sample)} among lists; expected a list or None"
            )
    lists = [() if sample is None else sample for sample in samples]
    hashes = _of_objects([string for sample in lists for string in sample], seed, threads)
    return hashes._replace(offsets=_sums(np.array([len(sample) for sample in lists], np.int64)))


def _of_arrow(array: Any, seed: int, threads: int) -> _Found:
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(array, pa.ChunkedArray):
        return _joined([_of_arrow(chunk, seed, threads) for chunk in array.chunks])
    kind = getattr(array, "type", None)
    if not isinstance(array, pa.Array) or kind is None:
        raise _wrong(a_type(array))
    if pa.types.is_null(kind):
        return _Found(np.zeros(len(array), np.int64), np.zeros(len(array), bool))
    if isinstance(array, pa.DictionaryArray):
        words = _of_arrow(array.dictionary, seed, threads)
        places = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        if not words.hashes.size:
            return _Found(np.zeros(len(array), np.int64), valid)
        return _Found(words.hashes[places], valid if words.present is None else valid & words.present[places])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        hashes = _of_arrow(array.flatten(), seed, threads)
        if hashes.offsets is not None:
            raise ArgumentTypeError("hash_strings: strings are lists of lists; expected lists of strings")
        return hashes._replace(offsets=_sums(lengths))
    if kind in (pa.string_view(), pa.binary_view()):
        array = array.cast(pa.large_string() if kind == pa.string_view() else pa.large_binary())
    elif kind not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        raise _wrong(f"a pyarrow array of {kind}")
    valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    return _Found(
        _of_buffers(array, array.type in (pa.large_string(), pa.large_binary()), seed, threads), valid
    )


def _of_buffers(array: Any, wide: bool, seed: int, threads: int) -> Integers:
    """Return the hashes of an Arrow array with offsets (`wide`: int64, else int32), read in place."""
    if not len(array):
        return np.zeros(0, np.int64)
    _, offsets, data = array.buffers()
    first = offsets.address + array.offset * (8 if wide else 4)
    address, n_bytes = (0, 0) if data is None else (data.address, data.size)
    return _C.hash_strings(address, n_bytes, first, _INT64 if wide else _INT32, len(array), seed, threads)


def _joined(parts: list[_Found]) -> _Found:
    """Return the joined hashes of an array's chunks, which have the same type."""
    if not parts:
        return _Found(np.zeros(0, np.int64))
    hashes = np.concatenate([part.hashes for part in parts])
    present = None
    if any(part.present is not None for part in parts):
        ones = [np.ones(part.hashes.size, bool) if part.present is None else part.present for part in parts]
        present = np.concatenate(ones)
    if parts[0].offsets is None:
        return _Found(hashes, present)
    lengths = np.concatenate([np.diff(part.offsets) for part in parts if part.offsets is not None])
    return _Found(hashes, present, _sums(lengths))


def _wrong(actual: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"hash_strings: strings is {actual}; expected {_ALLOWED}")
