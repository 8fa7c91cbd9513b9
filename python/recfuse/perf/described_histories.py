"""Builds calls that look up rows without pooling, from sizes alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recfuse._codes import CODES
from recfuse.perf.described import DescribedCall
from recfuse.perf.described_training import training_calls
from recfuse.perf.reserved import Reserving, reserve

if TYPE_CHECKING:
    from recfuse.nn import Table
    from recfuse.perf.described_tables import Size

LAYOUTS = tuple(CODES["history_layout"])
_FORWARD = frozenset(("fused_embedding",))


class Histories(nn.Module):
    """The tables of a `FusedEmbeddingCollection`, with a call that returns one tensor in each layout."""

    def __init__(self, tables: Sequence[Table], layout: str, length: int, sparse: bool) -> None:
        """Create tables that take no memory."""
        from recfuse.nn import FusedEmbeddingCollection

        super().__init__()
        with Reserving():
            self.collection = FusedEmbeddingCollection(tables, sparse=sparse, device="cpu")
        self.form, self.length = layout, length

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """Look up the rows; with layout "jagged" all features have equally many lookups."""
        from recfuse.ops import fused_embedding

        layout = self.collection.layout
        columns, sizes = layout.output_dim, None
        if self.form == "jagged":
            each = indices.shape[0] // len(layout.dims)
            columns, sizes = each * columns, [each] * len(layout.dims)
        return fused_embedding(
            self.collection.packed_weights(), layout.features, indices, offsets, columns, layout=self.form,
            length=self.length, sizes=sizes, sparse=layout.sparse,
        )  # fmt: skip


def history_calls(
    name: str,
    tables: Sequence[Table],
    integer: torch.dtype,
    layouts: Iterable[str],
    sizes: Sequence[Size],
    kinds: Iterable[str] = (),
    stochastic_rounding: bool = False,
) -> Iterator[DescribedCall]:
    """Describe calls of a `FusedEmbeddingCollection`.

    Args:
        name: prefix of the names of calls.
        tables: the tables, each with the names of its features.
        integer: the dtype of indices and offsets.
        layouts: the layouts of the calls.
        sizes: bags and lookups of batches; the first is that of calls without training, whose kernels
            do not depend on it.
        kinds: kinds of training, as of `training_calls`.
        stochastic_rounding: as for optimizers.
    """
    features = sum(max(1, len(table.feature_names)) for table in tables)
    for layout in layouts:
        title = f"{name}, histories {layout}"
        batches = [(str(size), _batch(size, features, integer)) for size in sizes]
        length = max(1, sizes[0].lookups // (features * sizes[0].bags)) if layout == "padded" else 0

        def new(sparse: bool, layout: str = layout, length: int = length) -> nn.Module:
            return Histories(tables, layout, length, sparse)

        words, batch = batches[0]
        yield DescribedCall(f"{title}, {words}", new(False), batch)
        for kind in kinds:
            yield from training_calls(
                title, new, batches, kind, stochastic_rounding=stochastic_rounding, without=_FORWARD
            )


def _batch(size: Size, features: int, integer: torch.dtype) -> tuple[Any, ...]:
    lookups = max(features, size.lookups // features * features)  # equally many of each feature
    return reserve((lookups,), integer), reserve((features * size.bags + 1,), integer)
