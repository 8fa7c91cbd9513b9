"""Valid files of every form that recfuse reads, and how each is read."""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from recfuse import _C, Plan
from recfuse._files import TEXT_BYTES, VALUE_BYTES, parsing
from recfuse.data import traces
from recfuse.errors import FileFormatError
from recfuse.nn import EmbeddingBag
from recfuse.nn.columns import json as columns_json
from recfuse.plan import file as plan_file
from recfuse.tuner.collection.local_stage import Group
from recfuse.tuner.collection.state import Finished, rows_of
from support import bag_plan, collection_plan
from support.kernels import compile_bag

TRACE_BYTES = 32 << 20
"""The bound of memory that trace readers are given here."""
PLAN_BYTES = TEXT_BYTES * plan_file.MOST_BYTES + VALUE_BYTES * plan_file.MOST_VALUES
COLUMNS_BYTES = TEXT_BYTES * columns_json.MOST_BYTES + VALUE_BYTES * columns_json.MOST_VALUES
KERNEL_BYTES = 128 << 20
"""Of an entry of the cache of kernels: a file of 64 MiB, and the code in it."""
FEATURES = 5
"""Of a record of finished measurements."""

Bytes = list[bytes]


@dataclass(frozen=True)
class Form:
    """Files of one form."""

    name: str
    """Of a file."""
    kind: str
    """Of its contents: "text", "pt", "json" or "binary"."""
    valid: Bytes
    """Contents of valid files, unpacked."""
    read: Callable[[Path], Any]
    bound: int
    """Bytes of memory that reading may take, as is stated."""

    @property
    def packed(self) -> bool:
        """By gzip."""
        return self.name.endswith(".gz")


def _trace(path: Path) -> None:
    tables = traces.read_tables(path, most_bytes=TRACE_BYTES)
    for table in tables:
        assert table.indices.dtype == np.int64 and table.indices.ndim == 1
        assert not len(table.indices) or table.indices.min() >= 0
        if table.offsets is not None:
            assert table.offsets[0] == 0 and table.offsets[-1] == len(table.indices)
            assert (np.diff(table.offsets) >= 0).all()
    if path.suffix == ".txt":
        lines = path.read_bytes().split(b"\n")
        assert tables[0].indices.tolist() == [int(line) for line in lines if line.strip()]


def _measurements(path: Path) -> None:
    finished = Finished(path, "identity")
    for warps in (8, 16, 64):
        if (record := finished.get(warps)) is not None:
            with parsing(f"recfuse.tune: {path}"):
                rows_of(record["schedules"], (FEATURES, 5))
                [Group.of(group, FEATURES) for group in record["groups"]]


def _tensors(lengths: Any, dtype: torch.dtype) -> bytes:
    shaped = torch.tensor(lengths, dtype=dtype)
    offsets = torch.cat([torch.zeros(1, dtype=dtype), shaped.reshape(-1).cumsum(0).to(dtype)])
    return saved((torch.arange(int(offsets[-1]), dtype=dtype), offsets, shaped))


def saved(value: Any, **options: Any) -> bytes:
    """By torch.save."""
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


@functools.cache
def hostile_tuples() -> tuple[bytes, ...]:
    """Tuples that torch.save writes and no reader of traces may take at their word; some are right."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested and quantized tensors are experimental
        return tuple(_hostile_tuples())


def _hostile_tuples() -> Bytes:
    ids, ends, sizes = torch.arange(6), torch.tensor([0, 2, 6]), torch.tensor([[2, 4]])
    one = torch.tensor([0])
    values: list[Any] = [
        (ids[:0], one, torch.empty(2**40, 0, dtype=torch.int64)),
        (ids[:0], one, torch.empty(0, 2**40, dtype=torch.int64)),
        (one.expand(2**40), ends, sizes),
        (ids, one.expand(2**30), sizes),
        (ids, ends, one.expand(2**20, 2**20)),
        (ids.to_sparse(), ends, sizes),
        (ids.to("meta"), ends, sizes),
        (torch.empty(2**50, dtype=torch.int64, device="meta"), ends, sizes),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ends, sizes),
        (torch.nn.Parameter(ids.float()), ends, sizes),
        (ids[::2], torch.tensor([0, 1, 3]), torch.tensor([[1, 2]])),
        (ids.flip(0), ends, sizes.t().contiguous().t()),
        (ids.float(), ends, sizes),
        (ids.bool(), ends, sizes),
        (torch.quantize_per_tensor(ids.float(), 0.1, 0, torch.quint8), ends, sizes),
        (ids, ends, [2, 4]),
        (ids, ends),
        [ids, ends, sizes],
        {"indices": ids, "offsets": ends},
        (ids.numpy(), ends, sizes),
        (ids, torch.tensor([0, 2**63 - 1, 6]), torch.tensor([[2**63 - 1, -(2**63) + 7]])),
        (ids, ends, torch.tensor(6)),
        (bytearray(9), ends, sizes),
        ids,
        3,
        None,
    ]
    return [
        *map(saved, values),
        saved((ids, ends, sizes), pickle_protocol=4),
        saved((ids, ends, sizes), pickle_protocol=5),
        saved((ids, ends, sizes), _use_new_zipfile_serialization=False),
    ]


def _columns() -> Bytes:
    column = {"embedding_dim": 4, "pooling": "sum", "invalid": "drop", "scale": 0.5}
    steps = [{"step": "log1p"}, {"step": "affine", "scale": 0.1}, {"step": "clip", "min": "-Infinity"}]
    given = [
        {"kind": "bucketize", "name": "a", "boundaries": [1, 2.5, "Infinity"], "preprocess": steps, **column},
        {"kind": "vocabulary", "name": "b", "vocabulary": [3, -1, 2**62], **column},
        {"kind": "hash", "name": "c", "num_embeddings": 10, "seed": 3, **column},
        {
            "kind": "identity",
            "name": "d",
            "num_embeddings": 10,
            "slice": [1, 3],
            "dtype": "float16",
            **column,
        },
        {
            "kind": "cross",
            "name": "e",
            "keys": ["c", {"feature": "d"}],
            "num_embeddings": 9,
            "embedding_dim": 2,
        },
        {"kind": "numeric", "name": "f", "width": 2},
    ]
    return [json.dumps(given).encode(), json.dumps(given[:2], indent=1).encode()]


KERNEL = "sm_90a", 8, 8, 16, 0, 1, 1, 0, False, False, True, 4096, 64, "threads=32 block=64 warps=32"


def _kernel(valid: bytes) -> Callable[[Path], None]:
    """Reads an entry of the cache of kernels; only the valid entry may be used, and others are removed."""

    def read(path: Path) -> None:
        given = path.read_bytes()
        try:
            with mock.patch.dict(os.environ, RECFUSE_CACHE_DIR=str(path.parent), RECFUSE_JIT="off"):
                assert compile_bag(*KERNEL)["cached"] and given == valid
        except NotImplementedError as error:
            assert given != valid and not path.exists() and "is not in the cache" in str(error)
            raise FileFormatError(f"{path}: a damaged entry is removed") from error

    return read


def _kernel_forms(folder: Path) -> list[Form]:
    """Empty without NVRTC."""
    if _C.jit_status()["nvrtc"] is None:
        return []
    with mock.patch.dict(os.environ, RECFUSE_CACHE_DIR=str(folder)):
        os.environ.pop("RECFUSE_JIT", None)
        path = Path(compile_bag(*KERNEL)["path"])
    valid = path.read_bytes()
    path.unlink()
    return [Form(path.name, "binary", [valid], _kernel(valid), KERNEL_BYTES)]


def forms(folder: Path) -> list[Form]:
    """Returns all forms, with files that are created in a folder."""
    random = np.random.default_rng(0)
    ids = [b"\n".join(b"%d" % row for row in random.integers(0, 2**40, count)) for count in (1, 7, 3000)]
    ids += [b" 5 \n7\r\n9\n", b"0\n" * 5000]
    tuples = [
        _tensors(lengths, dtype)
        for dtype in (torch.int64, torch.int32, torch.uint8)
        for lengths in ([[1, 0, 2], [3, 1, 0]], [2, 1], [[1] * 50] * 2)
    ]
    tuples += hostile_tuples()
    module = EmbeddingBag(100, 4, mode="sum")
    plans: list[Bytes] = []
    for plan in (bag_plan.plan_for(module), collection_plan.plan_for(collection_plan.collection_of())):
        plan.save(folder / "plan")
        plans.append([(folder / "plan").read_bytes()])
    rows = {"rows": [[1, 16, 4, 1, 16], [0, 0, 0, 0, -1]], "of": "0*3 1 0"}
    group = {"name": "4 float32", "features": [0, 1], "ranked": [[1, 16, 4, 1, 16]], "cycles": 10.5}
    record = {"schedules": rows, "groups": [group]}
    whole = {"recfuse_tuning": 2, "identity": "identity", "occupancies": {"8": record, "64": record}}
    measurements = [json.dumps(whole).encode()]
    return [
        Form("trace.txt", "text", ids, _trace, TRACE_BYTES),
        Form("trace.txt.gz", "text", ids, _trace, TRACE_BYTES),
        Form("trace.pt", "pt", tuples, _trace, TRACE_BYTES),
        Form("trace.pt.gz", "pt", tuples, _trace, TRACE_BYTES),
        Form("plan.json", "json", plans[0], Plan.load, PLAN_BYTES),
        Form("collection.json", "json", plans[1], Plan.load, PLAN_BYTES),
        Form("columns.json", "json", _columns(), columns_json.read, COLUMNS_BYTES),
        Form("measurements.json", "json", measurements, _measurements, PLAN_BYTES),
        *_kernel_forms(folder),
    ]


def gzipped(data: bytes) -> bytes:
    """Packed quickly."""
    return gzip.compress(data, 1, mtime=0)
