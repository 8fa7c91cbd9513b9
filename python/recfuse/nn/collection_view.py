"""The interface of collections for plans and the tuner, which import this file, never ``recfuse.nn.packed``.

>>> view = view_of(module, "recfuse.tune")  # TypeError, in this function's name, for another module
>>> view.features, view.device, view.has_kernel
>>> view.tables[0].rows, view.tables[0].dim  # the table of feature 0
>>> view.lookups_of(batch, "recfuse.tune: batches[0]")  # a batch as the module's call takes it
>>> native_call(view.weights, view.feature_rows, view.output_dim)  # for the functions of `_C`
>>> view.set_plan(plan, rows, warps)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recfuse._arguments import wrong_type
from recfuse._codes import DTYPES
from recfuse.data.forms import Lookups
from recfuse.nn.collection import FusedEmbeddingBagCollection
from recfuse.nn.lookups.collection import FusedEmbeddingCollection
from recfuse.nn.lookups.table import PackedEmbedding
from recfuse.nn.packed.layout import (
    Layout,
    NativeCall,
    TableSpec,
    WeightForm,
    arrange,
    layout_of,
    native_call,
)
from recfuse.nn.packed.module import PackedModule
from recfuse.nn.packed.table_dict import TABLE_CLASSES
from recfuse.nn.table_list import FusedEmbeddingBagList
from recfuse.nn.tuning import Tuning
from recfuse.ops import fused_dtype

__all__ = [
    "SAVED_CLASSES",
    "CollectionView",
    "FeatureForm",
    "NativeCall",
    "is_collection",
    "native_call",
    "native_call_of",
    "view_of",
]

SAVED_CLASSES = (
    FusedEmbeddingBagCollection,
    FusedEmbeddingBagList,
    FusedEmbeddingCollection,
    *TABLE_CLASSES,
    PackedEmbedding,
    Layout,
    TableSpec,
    Tuning,
)
"""The classes that `torch.save` of a collection writes, for ``torch.serialization.safe_globals``."""

_ADDRESS = 1 << 20  # of matrices that do not exist: aligned as real matrices, and never read


class FeatureForm(NamedTuple):
    """The table of a feature."""

    rows: int
    dim: int
    dtype: torch.dtype
    mode: str
    padded: bool


class CollectionView(NamedTuple):
    """The facts of a collection for plans and the tuner, from the call of :func:`view_of`."""

    module: PackedModule
    features: int  # their number
    tables: list[FeatureForm]  # of each feature
    weights: list[Tensor]  # the packed matrices, without gradients
    feature_rows: NDArray[np.int64]  # [features, 7], as of recfuse.fused_embedding_bag
    output_dim: int
    device: torch.device  # of the first matrix
    has_kernel: bool  # True: one call pools all tables

    def lookups_of(self, batch: Any, prefix: str) -> Lookups:
        """Return a batch in the form that the module's call takes.

        Raises:
            TypeError, ValueError: ``batch`` is no batch.
        """
        return self.module._lookups_of(batch, prefix)

    def set_plan(self, plan: Any, schedules: Any, warps: int) -> None:
        """Set the module's schedules to those of a plan, int32 ``[features, 5]``, and store the plan."""
        self.module.set_plan(schedules, warps)
        self.module.plan = plan


def is_collection(module: Any) -> bool:
    """Return whether :func:`view_of` takes the module."""
    return isinstance(module, PackedModule)


def view_of(module: Any, function: str) -> CollectionView:
    """Return a collection's view; raise TypeError, which names ``function``, for another module."""
    if not isinstance(module, PackedModule):
        needed = "a recfuse.nn.FusedEmbeddingBagCollection or FusedEmbeddingBagList"
        raise wrong_type(f"{function}: module", module, needed)
    layout, weights = module.layout, [weight.detach() for weight in module.packed_weights()]
    tables = [
        FeatureForm(*spec[1:3], weights[spec.matrix].dtype, spec.mode, spec.padding_idx is not None)
        for spec in (layout.tables[number] for number in layout.table_of_feature)
    ]
    rows, device = layout.features.numpy(), weights[0].device
    return CollectionView(
        module, len(tables), tables, weights, rows, layout.output_dim, device, module.has_kernel
    )


def native_call_of(tables: Sequence[FeatureForm]) -> NativeCall:
    """Return the `native_call` of tables that do not exist, to compile a kernel for them; a feature each."""
    cpu = torch.device("cpu")
    matrices = arrange([WeightForm(table.rows, table.dim, table.dtype, cpu) for table in tables])
    specs = [TableSpec("", *table[:2], table.mode, 0 if table.padded else None) for table in tables]
    layout = layout_of(specs, range(len(specs)), range(len(specs)), matrices)
    dtypes = [matrix.form.dtype for matrix in matrices]
    buffers = [
        (_ADDRESS, matrix.rows * matrix.form.dim, DTYPES.index(dtype))
        for matrix, dtype in zip(matrices, dtypes, strict=True)
    ]
    return buffers, layout.features.numpy(), DTYPES.index(fused_dtype(dtypes)), layout.output_dim
