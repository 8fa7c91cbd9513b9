"""Readers of trace files with valid, damaged and hostile files."""

from __future__ import annotations

import gzip
import io
import os
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from recfuse.data import traces
from recfuse.errors import FileFormatError
from support.fuzz.corpus import hostile_tuples


@pytest.mark.parametrize("name", ["trace.txt", "trace.txt.gz"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_read_text(tmp_path: Path, name: str, end: str) -> None:
    path = tmp_path / name
    contents = ("\n".join(map(str, [5, 0, 17, 2**40, 5])) + end).encode()
    path.write_bytes(gzip.compress(contents) if name.endswith("gz") else contents)
    row_ids = traces.read(path)
    assert row_ids.dtype == np.int64 and row_ids.tolist() == [5, 0, 17, 2**40, 5]
    (table,) = traces.read_tables(os.fspath(path))
    assert table.offsets is None and table.indices.tolist() == row_ids.tolist()


def test_read_text_longer_than_a_chunk(tmp_path: Path) -> None:
    row_ids = traces.generate("random", lookups=800_000)
    path = tmp_path / "trace.txt"
    path.write_text("\n".join(map(str, row_ids.tolist())))
    assert path.stat().st_size > 5_000_000
    assert np.array_equal(traces.read(path), row_ids)
    with path.open("a") as file:
        file.write("\n1\nx\n")
    with pytest.raises(ValueError, match="line 800002: found 'x'"):
        traces.read(path)


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        (b"", "holds no row ids"),
        (b"\n", "line 1: found ''"),
        (b"3\n\n4\n", "line 2: found ''"),
        (b"3\n-4\n", "line 2: found '-4'"),
        (b"3\n4\nfive\n", "line 3: found 'five'"),
        (b"3\n4 5\n", "line 2: found '4 5'"),
        (b"3\n1.5", "line 2: found '1.5'"),
        (b"3\n9223372036854775808\n", "line 2: found '9223372036854775808'"),
        (b"\xff\xfe", "line 1: found"),
        (b"3\n12_34\n", "line 2: found '12_34'"),
        (b"3\n" + b"9" * 5000, "line 2: found '9999"),
    ],
)
def test_malformed_text(tmp_path: Path, contents: bytes, text: str) -> None:
    path = tmp_path / "trace.txt"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=text) as error:
        traces.read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["trace.txt.gz", "trace.pt.gz"])
@pytest.mark.parametrize("damage", ["cut", "not gzip", "flipped"])
def test_damaged_gzip(tmp_path: Path, name: str, damage: str) -> None:
    packed = bytearray(gzip.compress("\n".join(map(str, range(5000))).encode()))
    if damage == "cut":
        packed = packed[:-20]
    elif damage == "flipped":
        packed[len(packed) // 2] ^= 0xFF
    else:
        packed = bytearray(b"1\n2\n3\n")
    path = tmp_path / name
    path.write_bytes(packed)
    with pytest.raises(ValueError, match=r"is damaged or cut: |line \d+: found"):
        traces.read(path)


def save(path: Path, value: object) -> Path:
    contents = io.BytesIO()
    torch.save(value, contents)
    path.write_bytes(gzip.compress(contents.getvalue()) if path.suffix == ".gz" else contents.getvalue())
    return path


def tuple_of(
    lengths: list, dtype: torch.dtype = torch.int64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indices 10, 11, 12 ..., offsets, lengths)."""
    shaped = torch.tensor(lengths, dtype=dtype)
    offsets = torch.cat([torch.zeros(1, dtype=dtype), shaped.reshape(-1).cumsum(0).to(dtype)])
    return torch.arange(10, 10 + int(offsets[-1]), dtype=dtype), offsets, shaped


@pytest.mark.parametrize("name", ["trace.pt", "trace.pt.gz"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_read_tuple(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    path = save(tmp_path / name, tuple_of([[1, 0, 2], [3, 1, 0]], dtype))
    first, second = traces.read_tables(path)
    assert first.indices.tolist() == [10, 11, 12] and first.offsets.tolist() == [0, 1, 1, 3]
    assert second.indices.tolist() == [13, 14, 15, 16] and second.offsets.tolist() == [0, 3, 4, 4]
    assert first.indices.dtype == first.offsets.dtype == np.int64
    assert traces.read(path, table=1).tolist() == [13, 14, 15, 16]
    with pytest.raises(ValueError, match="has 2 tables"):
        traces.read(path)
    with pytest.raises(IndexError, match="table is 2"):
        traces.read(path, table=2)


@pytest.mark.parametrize("lengths", [[[2, 1]], [2, 1]])
def test_read_tuple_of_one_table(tmp_path: Path, lengths: list) -> None:
    path = save(tmp_path / "trace.pt", tuple_of(lengths))
    assert traces.read(path).tolist() == [10, 11, 12]
    assert traces.read_tables(path)[0].offsets.tolist() == [0, 2, 3]


def test_malformed_tuples(tmp_path: Path) -> None:
    indices, offsets, lengths = tuple_of([[1, 2], [0, 3]])
    cases = {
        "holds a tuple of 2": (indices, offsets),
        "holds a tensor; expected": indices,
        "holds an int; expected": 5,
        "indices is of float; expected": (indices.float(), offsets, lengths),
        "lengths is a list; expected": (indices, offsets, [1, 2]),
        "expected 5 offsets": (indices, offsets[:-1], lengths),
        r"indices \[1, 6\]": (indices[None], offsets, lengths),
        "offsets end at 6; expected the 5 indices": (indices[:-1].clone(), offsets, lengths),
        r"offsets\[0\] is 1; expected 0": (indices, offsets + 1, lengths),
        r"lengths\[1\] is -1": (indices[:3], torch.tensor([0, 2, 1]), torch.tensor([[2, -1]])),
        r"indices\[2\] is -1": (torch.tensor([0, 3, -1, 2, 1, 1]), offsets, lengths),
        "holds no row ids": (indices[:0], torch.tensor([0, 0]), torch.tensor([[0]])),
    }
    for text, value in cases.items():
        with pytest.raises(ValueError, match=text):
            traces.read(save(tmp_path / "trace.pt", value))


def test_a_tuple_file_cannot_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = save(tmp_path / "trace.pt", (Evil(), 1, 2))
    with pytest.raises(ValueError, match=r"holds posix\.mkdir|is not an archive"):
        traces.read(path)
    assert not (tmp_path / "ran").exists()


def test_a_line_without_an_end_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt.gz"
    path.write_bytes(gzip.compress(b"3\n" + b"1" * (64 << 20), 1))
    tracemalloc.start()
    try:
        with pytest.raises(
            FileFormatError, match=r"line 2: found '1+', [\d,]+ bytes and more; expected"
        ) as error:
            traces.read(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20  # a chunk or two, not the line
    finally:
        tracemalloc.stop()
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["trace.txt.gz", "trace.pt.gz"])
def test_oversized_compressed_files_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress((b"0" * 30 + b"7\n") * (1 << 20), 1))
    tracemalloc.start()
    try:
        with pytest.raises(
            FileFormatError, match=r"bytes of memory; expected 1,048,576 at most. Pass most_bytes"
        ):
            traces.read(path, most_bytes=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(ValueError, match="traces: most_bytes is -1"):
        traces.read(path, most_bytes=-1)


def test_hostile_tuples_are_refused_by_one_class(tmp_path: Path) -> None:
    """Lengths [2^40, 0], expanded, sparse, meta, nested and other tensors; torch's own errors and
    allocations do not matter."""
    path, read = tmp_path / "trace.pt", 0
    for contents in hostile_tuples():
        path.write_bytes(contents)
        tracemalloc.start()
        try:
            assert [table.indices.tolist() for table in traces.read_tables(path)]
            read += 1
        except FileFormatError as error:
            assert str(path) in str(error)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 4 << 20
    assert read == 5  # strided ones, a list, other protocols of pickle: unchanged


def test_tuples_of_any_layout_and_packing(tmp_path: Path) -> None:
    indices, offsets, lengths = tuple_of([[1, 2], [0, 3]])
    for value in (
        (indices.repeat_interleave(2)[::2], offsets, lengths),
        (indices, offsets, lengths.t().contiguous().t()),
        (torch.cat([offsets, indices])[len(offsets) :], offsets, lengths),
    ):
        tables = traces.read_tables(save(tmp_path / "trace.pt", value))
        assert [table.indices.tolist() for table in tables] == [[10, 11, 12], [13, 14, 15]]
        assert [table.offsets.tolist() for table in tables] == [[0, 1, 3], [0, 0, 3]]
    with zipfile.ZipFile(tmp_path / "trace.pt") as archive:
        members = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    swapped = {"byteorder": b"big"}
    with zipfile.ZipFile(tmp_path / "other.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, contents in members:
            own = np.frombuffer(contents, "<i8").astype(">i8").tobytes() if "/data/" in name else contents
            archive.writestr(name, swapped.get(name.rpartition("/")[2], own))
    assert traces.read(tmp_path / "other.pt", table=1).tolist() == [13, 14, 15]


def test_offsets_that_wrap_around_are_refused(tmp_path: Path) -> None:
    """Their differences are the lengths, modulo 2^64."""
    most = 2**63 - 1
    value = torch.arange(5), torch.tensor([0, most, -2, 5]), torch.tensor([[most, most, 7]])
    with pytest.raises(FileFormatError, match=r"lengths\[0\] is 9223372036854775807; expected 0 to 5"):
        traces.read(save(tmp_path / "trace.pt", value))


def test_a_damaged_storage_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "trace.pt", tuple_of([[1000]]))
    contents = bytearray(path.read_bytes())
    contents[contents.index(bytes([200, 0, 0, 0, 0, 0, 0, 0]))] = 201
    path.write_bytes(contents)
    with pytest.raises(FileFormatError, match="Bad CRC-32"):
        traces.read(path)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "trace.pt"
    path.write_bytes(b"not a tensor")
    with pytest.raises(ValueError, match=r"holds posix\.mkdir|is not an archive"):
        traces.read(path)
    with pytest.raises(ValueError, match=r"expected one of row ids as \.txt"):
        traces.read(tmp_path / "trace.csv")
    with pytest.raises(FileNotFoundError):
        traces.read(tmp_path / "absent.txt")
