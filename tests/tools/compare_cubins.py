"""Compares the machine code of two built checkouts: `python tests/tools/compare_cubins.py OLD NEW`.

`recfuse.explain` lists the kernels of default calls of every operator, forward and training, for an H100 and
an A100. NVRTC compiles them, which needs no GPU. Both checkouts share one cache of kernels: a kernel whose
sources are equal is compiled once. The exit status is 1 if the machine code of a call differs; the names of
functions and variables within a kernel are not compared.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

Kernel = tuple[str, str, str, str]  # architecture, file, name, -D options: an item of Launches.kernels()
BAGS, POOLING, ROWS = 64, 20, 4000
SYMBOLS, NAMES, ZEROS = (
    2,
    3,
    8,
)  # types of an ELF section: a symbol table, its strings, memory without contents


class Call(NamedTuple):
    """A call of the CPU's tensors."""

    name: str
    make: Callable[[], tuple[Any, ...]]  # the function and its arguments
    training: bool = False


def calls() -> Iterator[Call]:
    """Yield default calls of every operator in each dtype, forward and training."""
    import torch

    for dtype in torch.float32, torch.float16, torch.bfloat16:
        for call in (
            *_bags(dtype),
            *_collections(dtype),
            *_histories(dtype),
            *_columns(dtype),
            *_ikbo(dtype),
        ):
            yield call._replace(name=f"{call.name} {str(dtype).removeprefix('torch.')}")


def _lookups(tables: int = 1, bags: int = BAGS, pooling: int = POOLING) -> tuple[Any, Any]:
    import torch

    indices = torch.arange(tables * bags * pooling) * 7919 % ROWS
    return indices, torch.arange(tables * bags + 1) * pooling


def _bags(dtype: Any) -> Iterator[Call]:
    import torch

    import recfuse

    def bag(mode: str, training: bool = False, schedule: str = "", weighted: bool = False) -> tuple[Any, ...]:
        indices, offsets = _lookups()
        weight = torch.zeros(ROWS, 64, dtype=dtype, requires_grad=training)
        weights = torch.ones(indices.numel(), dtype=dtype) if weighted else None
        options = {"mode": mode, "per_sample_weights": weights, "schedule": schedule}
        options |= {"include_last_offset": True, "sparse": training and mode == "sum"}
        return lambda *batch: recfuse.embedding_bag(*batch, **options), indices, weight, offsets

    for mode in "sum", "mean", "max":
        yield Call(f"embedding_bag {mode}", functools.partial(bag, mode))
        yield Call(f"embedding_bag {mode} training", functools.partial(bag, mode, True), True)
    yield Call("embedding_bag weighted", lambda: bag("sum", weighted=True))
    for schedule in "station=shared", "threads=64", "bags=4", "parts=2":
        yield Call(f"embedding_bag {schedule}", functools.partial(bag, "sum", schedule=schedule))


def _collections(dtype: Any) -> Iterator[Call]:
    import torch

    import recfuse

    def collection(
        dims: tuple[int, ...], mode: str = "sum", weighted: bool = False, optimizer: str = "",
        rows: int = ROWS, **options: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        tables = [recfuse.nn.Table(rows, dim, mode=mode, dtype=dtype) for dim in dims]
        module = recfuse.nn.FusedEmbeddingBagCollection(tables, sparse=options.pop("sparse", False))
        indices, offsets = _lookups(len(dims))
        module.map(offsets)
        if optimizer:
            module.optimizer = getattr(recfuse.optim, optimizer)(module, lr=0.1, **options)
        own = (torch.ones(indices.numel(), dtype=dtype, requires_grad=True),) if weighted else ()
        return module, indices % rows, offsets, *own

    dims = (4, 16, 64, 128, 72)
    for mode in "sum", "mean", "max":
        yield Call(f"collection {mode}", lambda mode=mode: collection(dims, mode))
        yield Call(f"collection {mode} training", lambda mode=mode: collection(dims, mode), True)
    yield Call("collection weighted", lambda: collection(dims, weighted=True))
    yield Call("collection weighted training", lambda: collection(dims, weighted=True), True)
    yield Call("collection sparse", lambda: collection(dims, sparse=True), True)
    yield Call("collection staged", lambda: _staged(dtype))
    for optimizer in "SGD", "Adagrad", "RowWiseAdagrad", "Adam":
        yield Call(f"collection {optimizer}", lambda name=optimizer: collection(dims, optimizer=name), True)
    rounded = {"stochastic_rounding": dtype != torch.float32}
    for optimizer in "Adagrad", "Adam":
        options = {"optimizer": optimizer, **rounded}
        small = functools.partial(collection, (8, 64), rows=500, **options)
        yield Call(f"collection small {optimizer}", small, True)
        grouped = functools.partial(collection, (64, 128), rows=40_000, **options)
        yield Call(f"collection grouped {optimizer}", grouped, True)
    deferred = functools.partial(collection, (8, 64), optimizer="Adam", deferred=True)
    yield Call("collection deferred", lambda: _deferred(*deferred()))


def _histories(dtype: Any) -> Iterator[Call]:
    import recfuse

    def histories(layout: str, **options: Any) -> tuple[Any, ...]:
        tables = [recfuse.nn.Table(ROWS, dim, dtype=dtype) for dim in (16, 72)]
        module = recfuse.nn.FusedEmbeddingCollection(tables)
        return functools.partial(module, layout=layout, **options), *_lookups(len(tables))

    for layout, options in ("jagged", {}), ("joined", {}), ("padded", {"length": POOLING + 2}):
        made = functools.partial(histories, layout, **options)
        yield Call(f"histories {layout}", made)
        yield Call(f"histories {layout} training", made, True)


def _staged(dtype: Any) -> tuple[Any, ...]:
    import torch

    import recfuse

    features = torch.tensor([[0, 0, ROWS, 8, 0, -1, 0], [1, 0, ROWS, 32, 0, -1, 8]])
    tables = [torch.zeros(ROWS, dim, dtype=dtype) for dim in (8, 32)]
    staged = recfuse.ops.schedules.FusedSchedule.parse("kind=staged").row()
    schedules = torch.tensor([[*staged[:4], 16 * POOLING], [0, 0, 0, 0, 16 * POOLING]], dtype=torch.int32)
    indices, offsets = _lookups(2)
    return (lambda: recfuse.fused_embedding_bag(tables, features, indices, offsets, 40, schedules=schedules),)


def _deferred(module: Any, *batch: Any) -> tuple[Any, ...]:
    import torch

    def step() -> None:
        with torch.enable_grad():
            module(*batch).sum().backward()
        module.optimizer.step()

    return (step,)


def _columns(dtype: Any) -> Iterator[Call]:
    import torch

    import recfuse
    from recfuse.nn.columns import Bucketize, Cross, Hash, Identity, Numeric

    def columns(pooling: str) -> tuple[Any, ...]:
        weighted = {"weights": "w"} if pooling != "max" else {}
        module = recfuse.nn.EmbeddingColumns(
            [
                Bucketize("age", [18, 25, 35], 8, dtype=dtype),
                Hash("city", 1000, 4, dtype=dtype),
                Identity("tags", ROWS, 64, pooling=pooling, invalid="drop", dtype=dtype),
                Identity("more", ROWS, 16, feature="tags", pooling=pooling, dtype=dtype, **weighted),
                Cross("pairs", ("tags", "city"), 30, 4, dtype=dtype),
                Numeric("price", 2),
            ]
        )
        tags, offsets = _lookups()
        entries = {"age": torch.rand(BAGS), "city": torch.arange(BAGS), "tags": (tags, offsets)}
        entries |= {"price": torch.rand(BAGS, 2)} | ({"w": torch.ones(tags.numel())} if weighted else {})
        return module, entries

    for pooling in "sum", "mean", "max":
        yield Call(f"columns {pooling}", lambda pooling=pooling: columns(pooling))
        yield Call(f"columns {pooling} training", lambda pooling=pooling: columns(pooling), True)


def _ikbo(dtype: Any) -> Iterator[Call]:
    import torch

    import recfuse

    def linear(
        users: int, candidates: int, ks: tuple[int, int], grad: bool = False, **options: Any
    ) -> tuple[Any, ...]:
        weights = (torch.zeros(433, k, dtype=dtype, requires_grad=grad) for k in ks)
        sizes = zip((users, candidates), ks, strict=True)
        inputs = (torch.zeros(count, k, 64, dtype=dtype, requires_grad=grad) for count, k in sizes)
        parents = torch.arange(candidates) % users
        return lambda *batch: recfuse.ikbo_linear(*batch, **options), *weights, *inputs, parents

    def attention(queries: int, dim: int, grad: bool = False, **options: Any) -> tuple[Any, ...]:
        shapes = (60, queries, 2, dim), (6, 100, 2, dim), (6, 100, 2, dim)
        inputs = (torch.zeros(shape, dtype=dtype, requires_grad=grad) for shape in shapes)
        return lambda *batch: recfuse.ikbo_attention(*batch, **options), *inputs, torch.arange(60) % 6

    for size in (20, 5000, (200, 100)), (20, 300, (100, 61)), (1, 4, (64, 64)):
        yield Call(f"ikbo_linear {size}", functools.partial(linear, *size))
    yield Call("ikbo_linear training", lambda: linear(2, 30, (64, 64), grad=True), True)
    yield Call("ikbo_linear decomposed", lambda: linear(2, 30, (64, 64), path="decomposed"))
    for size in (1, 64), (3, 128), (1, 20):
        yield Call(f"ikbo_attention {size}", functools.partial(attention, *size))
    yield Call("ikbo_attention training", lambda: attention(1, 64, grad=True), True)
    yield Call("ikbo_attention packed", lambda: attention(1, 64, path="packed"))


def kernels(gpus: list[str], only: str) -> dict[str, list[Kernel]]:
    """Return the kernels of each call on each GPU, of this process's package."""
    import recfuse

    return {
        f"{call.name} on {gpu}": recfuse.explain(*call.make(), gpu=gpu, training=call.training).kernels()
        for call in calls()
        if only in call.name
        for gpu in gpus
    }


def sections(cubin: bytes) -> Iterator[bytes]:
    """Yield the sections of a cubin except those with the names and sizes of symbols."""
    offset = struct.unpack_from("<Q", cubin, 0x28)[0]
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    for number in range(count):
        header = cubin[offset + number * size :]
        kind, begin, length = *struct.unpack_from("<I", header, 4), *struct.unpack_from("<QQ", header, 0x18)
        if kind not in (SYMBOLS, NAMES):
            yield struct.pack("<IQ", kind, length) + (b"" if kind == ZEROS else cubin[begin : begin + length])


def digest(kernel: Kernel) -> str:
    """Compile a kernel, or read it from the cache; return the hash of its machine code."""
    from recfuse import _C

    entry = Path(_C.kernel_compile(*kernel)["path"]).read_bytes()
    return hashlib.sha256(b"".join(sections(entry[entry.index(b"\x7fELF") :]))).hexdigest()


def record(arguments: argparse.Namespace) -> None:
    """Print as JSON the kernels of each call and the hash of their machine code."""
    listed = kernels(arguments.gpu, arguments.only)
    each = list(dict.fromkeys(kernel for some in listed.values() for kernel in some))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        digests = dict(zip(each, pool.map(digest, each), strict=True))
    print(json.dumps({name: [(*one, digests[one]) for one in some] for name, some in listed.items()}))


def recorded(checkout: Path, arguments: argparse.Namespace, cache: str) -> dict[str, list[list[str]]]:
    """Returns the output of `record` with a checkout's package."""
    options = ["--gpu", *arguments.gpu, "--only", arguments.only, "--jobs", str(arguments.jobs)]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "python"), "RECFUSE_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, __file__, *options], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    read: dict[str, list[list[str]]] = json.loads(done.stdout)
    return read


def differences(old: dict[str, list[list[str]]], new: dict[str, list[list[str]]]) -> list[str]:
    """Returns a line for each call and each kernel, by its position in the call, whose machine code
    differs."""
    lines = []
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name, []), new.get(name, [])
        if len(before) != len(after):
            lines.append(f"{name}: {len(before)} kernels before, {len(after)} after")
        for one, other in zip(before, after, strict=False):
            if one[-1] != other[-1]:
                lines.append(f"{name}: {one[1]} {one[2]} {one[3]}\n    now {other[1]} {other[2]} {other[3]}")
    return lines


def main() -> int:
    """Compares two checkouts, or records this process's package without arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="OLD NEW", help="built checkouts")
    parser.add_argument("--gpu", nargs="+", default=["H100", "A100"], help="(default: H100 A100)")
    parser.add_argument("--only", default="", metavar="TEXT", help="calls whose name contains TEXT")
    parser.add_argument("--jobs", type=int, default=2, help="kernels that compile at once (default: 2)")
    parser.add_argument("--cache", help="folder of compiled kernels, to be used again (default: a new one)")
    arguments = parser.parse_args()
    if not arguments.checkouts:
        record(arguments)
        return 0
    if len(arguments.checkouts) != 2:
        parser.error("expected two checkouts")
    with tempfile.TemporaryDirectory() as folder:
        cache = str(Path(arguments.cache or folder).absolute())
        old, new = (recorded(checkout.absolute(), arguments, cache) for checkout in arguments.checkouts)
    lines = differences(old, new)
    print(
        *lines, f"{len(new)} calls, {sum(map(len, new.values()))} kernels, {len(lines)} differences", sep="\n"
    )
    return 1 if lines or not new else 0


if __name__ == "__main__":
    sys.exit(main())
