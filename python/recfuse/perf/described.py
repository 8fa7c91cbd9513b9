"""Builds calls from sizes alone, for `explain`: tables of any size, whose memory is never accessed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recfuse._lowering import Kernel, kernels_of
from recfuse.perf.launches import Launches
from recfuse.perf.reserved import Reserving, reserve

if TYPE_CHECKING:
    from recfuse.nn.columns.specs import Column


@dataclass(frozen=True)
class DescribedCall:
    """A call with tensors on the CPU; `explain` reads only the sizes of its tables."""

    name: str
    call: Callable[..., Any]
    batch: tuple[Any, ...] = field(repr=False)
    training: bool = False
    without: Collection[str] = field(default=(), repr=False)  # operators that other calls describe
    optional: bool = False  # an unsupported call is no error, because other calls are described too

    def explain(self, gpu: str) -> Launches:
        """Return its launches on a GPU, as `recfuse.explain` does."""
        return Launches(self._record(gpu))

    def kernels(self, gpu: str) -> list[Kernel]:
        """Return the distinct kernels of its launches."""
        return kernels_of(self._record(gpu))

    def _record(self, gpu: str) -> list[dict[str, Any]]:
        from recfuse.perf.explain import record

        recorded = record(self.call, self.batch, gpu, self.training)
        return [launch for launch in recorded if launch["operator"] not in self.without]


def bag_call(
    rows: int,
    dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    mode: str = "sum",
    integer: torch.dtype = torch.int64,
    bags: int = 2048,
    pooling: int = 150,
    weighted: bool = False,
    padded: bool = False,
    schedule: str = "",
    check: bool = True,
) -> DescribedCall:
    """Return a call of a table, with ``bags * pooling`` lookups; ``check``: whether it checks bounds."""
    from recfuse.ops import embedding_bag

    weight = reserve((rows, dim), dtype)
    indices = torch.zeros(bags * pooling, dtype=integer)
    offsets = torch.arange(bags, dtype=integer) * pooling
    weights = torch.ones(bags * pooling, dtype=dtype) if weighted else None

    def call(indices: Tensor, offsets: Tensor) -> Tensor:
        return embedding_bag(
            indices, weight, offsets, mode=mode, per_sample_weights=weights,
            padding_idx=0 if padded else None, schedule=schedule, bounds_check="on" if check else "off",
        )  # fmt: skip

    table = f"table of {rows:,} x {dim} {_name(dtype)}, {mode}, {_name(integer)}"
    name = f"{table}, {bags:,} bags of {pooling}"
    return DescribedCall(name, call, (indices, offsets))


def columns_call(columns: Sequence[Column], batch: int, training: bool = False) -> DescribedCall:
    """Return a call of columns; each feature has a dense value per sample."""
    name = f"{len(columns)} columns of {batch} samples"
    return DescribedCall(name, new_columns(columns), columns_batch(columns, batch), training)


def new_columns(columns: Sequence[Column], sparse: bool = False) -> nn.Module:
    """Return columns whose tables take no memory."""
    from recfuse.nn.columns.module import EmbeddingColumns

    with Reserving():
        return EmbeddingColumns(columns, device="cpu", host_tables=None, sparse=sparse)


def columns_batch(columns: Sequence[Column], batch: int, jagged: bool = False) -> tuple[dict[str, Any]]:
    """Return the argument of a call of columns, with a value per sample.

    ``jagged``: with offsets for features that may have several values per sample.
    """
    uses = {source.use for column in columns for source in column.sources()}
    floats = {source.use.feature for column in columns if column.kind in ("bucketize", "numeric")
              for source in column.sources()}  # fmt: skip
    entries: dict[str, Any] = {}
    for use in uses:
        values = torch.zeros(batch, dtype=torch.float32 if use.feature in floats else torch.int64)
        entries[use.feature] = values
        if use.weighted:
            entries[use.feature] = values, torch.arange(batch + 1), torch.ones(batch)
        elif jagged and use.feature not in floats:
            entries[use.feature] = values, torch.arange(batch + 1)
        if use.weights is not None:
            entries[use.weights] = torch.ones(batch)
    return (entries,)


def linear_call(
    m: int, user_k: int, candidate_k: int, n: int, *, users: int, candidates: int, dtype: torch.dtype
) -> DescribedCall:
    """Return a call of `recfuse.ikbo_linear`: weights ``[m, k]``, inputs ``[items, k, n]``."""
    from recfuse.ops import ikbo_linear

    weights = reserve((m, user_k), dtype), reserve((m, candidate_k), dtype)
    inputs = reserve((users, user_k, n), dtype), reserve((candidates, candidate_k, n), dtype)
    parents = torch.arange(candidates) % max(users, 1)
    name = f"ikbo_linear {m} x ({user_k} + {candidate_k}) x {n} {_name(dtype)}"
    return DescribedCall(f"{name}, {users} users, {candidates} candidates", ikbo_linear,
                         (*weights, *inputs, parents))  # fmt: skip


def attention_call(
    heads: int,
    kv_heads: int,
    dim: int,
    queries: int,
    keys: int,
    *,
    users: int,
    candidates: int,
    dtype: torch.dtype,
) -> DescribedCall:
    """Return a call of `recfuse.ikbo_attention`: ``queries`` of each candidate, ``keys`` of each user."""
    from recfuse.ops import ikbo_attention

    q = reserve((candidates, queries, heads, dim), dtype)
    k, v = (reserve((users, keys, kv_heads, dim), dtype) for _ in range(2))
    parents = torch.arange(candidates) % max(users, 1)
    name = (
        f"ikbo_attention of {heads}:{kv_heads} heads of {dim} {_name(dtype)}, {queries} queries, {keys} keys"
    )
    return DescribedCall(
        f"{name}, {users} users, {candidates} candidates", ikbo_attention, (q, k, v, parents)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
