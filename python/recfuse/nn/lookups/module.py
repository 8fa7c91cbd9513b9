"""``PackedLookups``: the common base of modules that look up rows of packed tables."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse._codes import INTEGERS
from recfuse._storage import is_readable
from recfuse.errors import ArgumentTypeError, ArgumentValueError, OffsetError
from recfuse.nn.lookups.table import PackedEmbedding, as_bag, why_not_packable
from recfuse.nn.packed.pooling import has_kernel
from recfuse.nn.packed.tables import PackedTables
from recfuse.nn.packed.taking_part import lookups_of
from recfuse.nn.packed.wrappers import check_parallel
from recfuse.ops import fused_embedding


class PackedLookups(PackedTables):
    """Mixin for modules that look up rows of packed tables in one call."""

    _tables_name = "embeddings"
    _table_class = PackedEmbedding
    _remedy = "Call such a table alone."

    def _pack_embeddings(
        self,
        names: Sequence[str],
        tables: Sequence[torch.nn.Embedding],
        table_of_feature: Sequence[int],
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """Take over the weights of tables; see ``_pack``."""
        if reason := why_not_packable(tables):
            raise ArgumentValueError(f"recfuse.nn.{type(self).__name__}: {reason}. {self._remedy}")
        self._pack(names, list(map(as_bag, tables)), table_of_feature, optimizers)

    def _look_up(
        self, indices: Tensor, offsets: Tensor, sizes: Sequence[int] | None = None, **options: Any
    ) -> Any:
        """Look up rows of feature-major histories.

        Returns a list with the rows of each feature with ``sizes``, the lookups of each feature; else the
        output of the layout in ``options``.
        """
        if sizes is not None and torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
            return _outside_of_graphs(self, indices, offsets, sizes, options)
        weights = self.packed_weights()  # first: it may change the layout
        layout = self._store.layout
        if not has_kernel(weights):
            raise ArgumentValueError(
                f"recfuse.nn.{type(self).__name__}: the tables are not in one call; expected all on the CPU "
                "or on one CUDA device, and float32, float16 or bfloat16. Move the module."
            )
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.mark_static(layout.features)  # their number does not depend on the batch
        elif layout.sparse:
            check_parallel(weights)
        arguments = weights, layout.features, indices, offsets
        if sizes is None:
            return fused_embedding(*arguments, layout.output_dim, sparse=layout.sparse, **options)
        elements = sum(map(operator.mul, sizes, layout.dims))
        flat = fused_embedding(*arguments, elements, sizes=sizes, sparse=layout.sparse, **options)
        return lookups_of(flat, sizes, self)


@torch._disable_dynamo
def _outside_of_graphs(
    module: PackedLookups, indices: Tensor, offsets: Tensor, sizes: Sequence[int], options: dict[str, Any]
) -> Any:
    """Look up rows in a graph break, so that tables whose rows get no gradient are recorded."""
    return module._look_up(indices, offsets, sizes, **options)


def sizes_of(offsets: Tensor, features: int, lookups: int, where: str) -> list[int]:
    """Return the lookups of each feature. Waits for the device of the offsets.

    Raises:
        TypeError: offsets that are no integers. ValueError: offsets that are not those of ``lookups``.
    """
    if offsets.dtype not in INTEGERS:
        raise ArgumentTypeError(f"{where}: offsets is {str(offsets.dtype)[6:]}; expected int32 or int64")
    bags = (offsets.shape[0] - 1) // features
    if bags == 0:
        return [0] * features
    ends = offsets[::bags].tolist()
    if is_readable(offsets) and (ends[0] != 0 or ends[-1] != lookups):
        raise OffsetError(
            f"{where}: offsets begin at {ends[0]} and end at {ends[-1]}; expected 0 and {lookups}, the "
            "number of indices"
        )
    return [end - begin for begin, end in itertools.pairwise(ends)]
