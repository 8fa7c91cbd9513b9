"""The peers for many tables on a GPU: torch, FBGEMM, a stand-in for older libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.batches import Batch
from common.ceilings import compiled
from common.peers import fbgemm_module
from fused_embedding_bag.setting import Subject
from fused_embedding_bag.streams import Run

ONE_WARP_KERNEL = "one_warp_bag.cu"


def loop_run(tables: Sequence[Tensor]) -> Run:
    """The loop of torch's modules, and the concatenation."""
    bags = [torch.nn.EmbeddingBag.from_pretrained(table, mode="sum") for table in tables]

    @torch.inference_mode()
    def run(batch: Batch) -> Tensor:
        return torch.cat([bag(*part) for bag, part in zip(bags, batch.parts, strict=True)], 1)

    return run


def compiled_run(tables: Sequence[Tensor], behind: Callable[[Tensor], Tensor] = lambda pooled: pooled) -> Run:
    """The loop under torch.compile, followed by `behind`; for any number of lookups."""

    @torch.compile(dynamic=True)
    def pool(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        pooled = [
            torch.nn.functional.embedding_bag(rows, table, starts, mode="sum")
            for table, (rows, starts) in zip(tables, parts, strict=True)
        ]
        return behind(torch.cat(pooled, 1))

    @torch.inference_mode()
    def run(batch: Batch) -> Tensor:
        return pool(batch.parts)

    return run


def padded_run(subject: Subject, dtype: torch.dtype) -> Run:
    """weight[indices].sum(1) for bags with a bound, with a row of zeros for padding; a module for the others.

    The padded indices [size, bound] of a batch are computed at its first call, which is not timed.
    """
    tables = subject.tables(dtype)
    widened = [
        None if bound is None else torch.cat([table, table.new_zeros(1, table.shape[1])])
        for table, bound in zip(tables, subject.bounds, strict=True)
    ]
    bags = [torch.nn.EmbeddingBag.from_pretrained(table, mode="sum") for table in tables]
    prepared: dict[int, tuple[Batch, list[Tensor]]] = {}

    def prepare(batch: Batch) -> list[Tensor]:
        return [
            rows if bound is None else padded_indices(rows, starts, bound, len(table))
            for (rows, starts), bound, table in zip(batch.parts, subject.bounds, tables, strict=True)
        ]

    @torch.inference_mode()
    def run(batch: Batch) -> Tensor:
        if id(batch) not in prepared:
            prepared[id(batch)] = batch, prepare(batch)
        pooled = []
        features = zip(widened, bags, prepared[id(batch)][1], batch.parts, strict=True)
        for weight, bag, indices, (_, starts) in features:
            if weight is None:
                pooled.append(bag(indices, starts))
            else:
                pooled.append(torch.nn.functional.embedding(indices, weight).sum(1))
        return torch.cat(pooled, 1)

    return run


def padded_indices(rows: Tensor, starts: Tensor, bound: int, nothing: int) -> Tensor:
    """Bags as rows of a matrix [bags, bound], filled up with `nothing`."""
    if not len(rows):
        return rows.new_full((len(starts), bound), nothing)
    ends = torch.cat([starts[1:], starts.new_full((1,), len(rows))])
    positions = starts[:, None] + torch.arange(bound, device=rows.device, dtype=starts.dtype)
    return torch.where(positions < ends[:, None], rows[positions.clamp(max=len(rows) - 1)], nothing)


def one_warp_run(subject: Subject, dtype: torch.dtype) -> Run:
    """benchmarks/kernels/one_warp_bag.cu."""
    tables, columns = subject.tables(dtype), subject.output_dim
    rows, column = [], 0
    for table, dim in zip(tables, subject.dims, strict=True):
        rows.append([table.data_ptr(), dim, column])
        column += dim
    features = torch.tensor(rows, dtype=torch.int64, device=subject.device)

    def run(batch: Batch) -> Tensor:
        output = torch.empty(batch.size, columns, dtype=dtype, device=subject.device)
        wide = batch.indices.dtype == torch.int64
        grid = ((len(tables) * batch.size + 7) // 8, 1, 1)
        arguments = [features, batch.indices, batch.offsets, output, len(tables), batch.size, columns]
        kernel = compiled(ONE_WARP_KERNEL, tuple(one_warp_options(dtype == torch.float16, wide)))
        kernel(grid=grid, block=(256, 1, 1), args=arguments)
        return output

    return run


def one_warp_options(half: bool, wide: bool) -> list[str]:
    """The compiler's options."""
    return [f"-DHALF={int(half)}", f"-DINDEX={'long long' if wide else 'int'}", "-DIN_FLIGHT=8"]


def fbgemm_run(kind: str, subject: Subject, dtype: torch.dtype, output: torch.dtype) -> Run:
    """FBGEMM's module `kind` with tables of `dtype` and an output of its own type."""
    module = fbgemm_module(kind, subject.tables(dtype), subject.index_dtype, output)

    @torch.no_grad()
    def run(batch: Batch) -> Tensor:
        return module(batch.indices, batch.offsets)

    return run
