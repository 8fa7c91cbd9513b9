"""Builds calls of a table and of collections from sizes alone."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from recfuse._codes import row_bytes
from recfuse.perf.described import DescribedCall
from recfuse.perf.described_training import training_calls
from recfuse.perf.reserved import Reserving, reserve

if TYPE_CHECKING:
    from recfuse.nn import Table
    from recfuse.nn.collection_view import FeatureForm

_FORWARD = frozenset(("embedding_bag", "fused_embedding_bag"))
_MOST_MAPPED = 1 << 22  # most bags of all features in a mapping that the host creates
_HUGE = (1 << 30) + 1  # lookups that kernels number with 64 bits
_FULL = 16  # lookups of a bag, if other tables have no lookups


class Size(NamedTuple):
    """The size of a batch."""

    bags: int  # of a feature
    lookups: int  # of all features

    def __str__(self) -> str:
        """Format in words."""
        return f"{self.bags:,} bags, {self.lookups:,} lookups"


ANY_BAGS = tuple(4**power for power in range(10))
"""Numbers of bags whose range covers all variants of a collection's forward kernel."""
ANY_SIZE = tuple(
    Size(bags, lookups)
    for bags in (1, 1 << 8, 1 << 10, 1 << 12, 1 << 14, 1 << 17)
    for lookups in (1, 1 << 12, 1 << 16, 1 << 20, 1 << 24)
)
"""Batches whose range covers all variants of the kernels of training."""


@dataclass(frozen=True)
class Tables:
    """A table, or the tables of a collection, and the types of their calls.

    Attributes:
        name: prefix of the names of calls.
        new: creates the module, on the CPU; its argument is ``sparse``.
        row_bytes: of each feature's table, of a collection; None for a single table.
        indices, offsets: types of a batch.
        weights: type of the per-sample weights; None: no weights.
        has_max: whether a table is of mode "max".
    """

    name: str
    new: Callable[[bool], nn.Module]
    row_bytes: Sequence[int] | None
    indices: torch.dtype
    offsets: torch.dtype
    weights: torch.dtype | None
    has_max: bool

    def batch(self, size: Size, training: bool = False) -> tuple[Tensor, ...]:
        """Return a batch of unknown lengths: offsets are zeros."""
        bags = size.bags if self.row_bytes is None else len(self.row_bytes) * size.bags + 1
        batch = reserve((size.lookups,), self.indices), reserve((bags,), self.offsets)
        if self.weights is None:
            return batch
        return *batch, reserve((size.lookups,), self.weights).requires_grad_(training)

    def training(
        self, kind: str, sizes: Iterable[Size], stochastic_rounding: bool = False
    ) -> Iterator[DescribedCall]:
        """Describe the launches after the forward pass in steps of training; see `training_calls`."""
        batches = [(str(size), self.batch(size, training=True)) for size in sizes]
        return training_calls(
            self.name, self.new, batches, kind,
            stochastic_rounding=stochastic_rounding, has_max=self.has_max, without=_FORWARD,
        )  # fmt: skip


def table_of(form: FeatureForm, integers: tuple[torch.dtype, torch.dtype], weighted: bool = False) -> Tables:
    """Return a single table."""
    from recfuse.nn import EmbeddingBag

    def new(sparse: bool) -> nn.Module:
        padding_idx = 0 if form.padded else None
        options: dict[str, Any] = {
            "mode": form.mode,
            "sparse": sparse,
            "padding_idx": padding_idx,
            "dtype": form.dtype,
        }
        with Reserving():
            return EmbeddingBag(form.rows, form.dim, device="cpu", **options)

    dtype, integer = (str(kind).removeprefix("torch.") for kind in (form.dtype, integers[0]))
    name = f"table of {form.rows:,} x {form.dim} {dtype}, {form.mode}, {integer}"
    return Tables(name, new, None, *integers, form.dtype if weighted else None, form.mode == "max")


def tables_like(collection: Any) -> list[Table]:
    """Return the tables of a collection, each with its number of features in the collection."""
    from recfuse.nn import Table

    weights, layout = collection.packed_weights(), collection.layout
    features = Counter(layout.table_of_feature)
    return [
        Table(
            table.num_embeddings, table.embedding_dim, mode=table.mode, padding_idx=table.padding_idx,
            dtype=weights[table.matrix].dtype, feature_names=[f"f{n}_{i}" for i in range(features[n])],
        )
        for n, table in enumerate(layout.tables)
    ]  # fmt: skip


def expecting(features: int, lookups: int) -> Tensor:
    """Return the default schedules ``[features, 5]`` for bags with a mean of ``lookups`` lookups."""
    from recfuse.ops.schedules import FIELDS, SIXTEENTHS

    rows = torch.zeros(features, FIELDS, dtype=torch.int32)
    rows[:, -1] = max(1, SIXTEENTHS * lookups)
    return rows


def collection_of(
    name: str,
    tables: Sequence[Table],
    integers: tuple[torch.dtype, torch.dtype],
    weighted: bool = False,
    schedules: Any = None,
    warps: int = 0,
) -> Tables:
    """Return the tables of a collection with schedules ``[features, 5]``."""
    from recfuse.nn import FusedEmbeddingBagCollection

    def new(sparse: bool) -> nn.Module:
        with Reserving():
            module = FusedEmbeddingBagCollection(tables, sparse=sparse, device="cpu")
        module.set_plan(schedules, warps)
        return module

    sizes = [
        row_bytes(table.embedding_dim, table.dtype)
        for table in tables
        for _ in range(max(1, len(table.feature_names)))
    ]
    has_max = any(table.mode == "max" for table in tables)
    return Tables(name, new, sizes, *integers, torch.float32 if weighted else None, has_max)


def collection_calls(
    tables: Tables, lengths: Sequence[float], bags: Iterable[int], *, check: bool = True, huge: bool = False
) -> Iterator[DescribedCall]:
    """Describe forward calls of a collection.

    Args:
        tables: the result of `collection_of`.
        lengths: mean lookups of a bag, of each feature.
        bags: bags of a feature, in each batch.
        check: whether the calls check bounds.
        huge: batches have so many lookups that kernels number them with 64 bits.
    """
    collection: Any = tables.new(False)
    pool = collection if check else _unchecked(collection)
    for count in bags:
        size = Size(count, max(1, count * sum(_each(lengths, count, huge))))
        yield DescribedCall(f"{tables.name}, {size}", pool, tables.batch(size))


def mapped_calls(
    tables: Tables, lengths: Sequence[float], *, check: bool = True, huge: bool = False
) -> Iterator[DescribedCall]:
    """Describe the same calls with mappings, which the host creates.

    The batches have any size; in some, only tables that may be staged have lookups.
    """
    collection: Any = tables.new(False)
    pool = collection if check else _unchecked(collection)

    def call(indices: Tensor, offsets: Tensor, *weights: Tensor) -> Tensor:
        return pool(indices, offsets, *weights, mapping=collection.map(offsets))

    most = max(1, _MOST_MAPPED // len(lengths))
    batches = [(bags, lengths) for bags in ANY_BAGS if bags <= most]
    staged = [
        row_bytes * may for row_bytes, may in zip(tables.row_bytes or (), _stageable(collection), strict=True)
    ]
    for widest in sorted(set(staged) - {0}):
        batches.append((batches[-1][0], [_FULL * (0 < row_bytes <= widest) for row_bytes in staged]))
    for bags, lengths_of_batch in batches:
        each = _each(lengths_of_batch, bags, huge)
        size = Size(bags, max(1, bags * sum(each)))
        indices, _, *weights = tables.batch(size)
        ends = torch.tensor(each, dtype=tables.offsets).repeat_interleave(bags)
        offsets = torch.cat((ends.new_zeros(1), ends.cumsum(0, dtype=tables.offsets)))
        name = f"{tables.name}, with a mapping, {size}"
        yield DescribedCall(name, call, (indices, offsets, *weights))


def _stageable(collection: Any) -> list[bool]:
    """Return whether the schedule of each feature lets its table be staged."""
    from recfuse.ops.schedules import FusedSchedule

    if collection.schedules is None:
        return [True] * len(collection.layout.dims)
    return [FusedSchedule.of_row(row).kind in (None, "staged") for row in collection.schedules.tolist()]


def _each(lengths: Sequence[float], bags: int, huge: bool) -> list[int]:
    """Return the lookups of a bag of each feature; `huge`: so many that kernels number the batch
    with 64 bits.
    """
    each = [math.ceil(length) for length in lengths]
    times = -(-_HUGE // max(1, bags * sum(each))) if huge else 1
    return [times * length for length in each]


def _unchecked(collection: Any) -> Callable[..., Tensor]:
    """Return the collection's call without a check of bounds."""
    from recfuse.nn.collection_view import view_of
    from recfuse.ops import fused_embedding_bag

    view = view_of(collection, "recfuse.perf")
    features = torch.from_numpy(view.feature_rows)

    def pool(indices: Tensor, offsets: Tensor, weights: Tensor | None = None, mapping: Any = None) -> Tensor:
        work = collection if mapping is None else mapping
        return fused_embedding_bag(
            view.weights, features, indices, offsets, view.output_dim, weights, schedules=work.schedules,
            warps=work.warps, mapping=None if mapping is None else mapping.tensor, bounds_check="off",
        )  # fmt: skip

    return pool


def pin_calls() -> Iterator[DescribedCall]:
    """Describe calls that pin rows of any table in L2, and calls that unpin them."""
    weight = torch.zeros(1, 1)
    for name, integer in itertools.product(("pin_rows", "unpin"), (torch.int32, torch.int64)):
        yield DescribedCall(
            f"{name} of {integer}", getattr(torch.ops.recfuse, name), (weight, reserve((1,), integer))
        )
