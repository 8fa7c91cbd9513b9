"""What plans and the tuner see of a module that pools many tables in one call. They import this file, never
``recfuse.nn.packed``.

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

from recfuse._codes import DTYPES
from recfuse.data.forms import Lookups
from recfuse.errors import ArgumentTypeError
from recfuse.nn.collection import FusedEmbeddingBagCollection
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

SAVED_CLASSES = (FusedEmbeddingBagCollection, FusedEmbeddingBagList, Layout, TableSpec, Tuning)
"""What `torch.save` of a collection writes, for ``torch.serialization.safe_globals``."""

_ADDRESS = 1 << 20  # of matrices that do not exist: aligned as real ones are; nothing is read there


class FeatureForm(NamedTuple):
    """The table of a feature."""

    rows: int
    dim: int
    dtype: torch.dtype
    mode: str
    padded: bool


class CollectionView:
    """A collection as plans and the tuner see it; holds nothing of its own."""

    def __init__(self, module: PackedModule) -> None:
        """Of this module; see :func:`view_of`."""
        self._module = module

    @property
    def features(self) -> int:
        """Number of features."""
        return len(self._module.layout.dims)

    @property
    def tables(self) -> list[FeatureForm]:
        """The table of each feature."""
        layout, weights = self._module.layout, self.weights
        specs = [layout.tables[number] for number in layout.table_of_feature]
        return [
            FeatureForm(
                spec.num_embeddings,
                spec.embedding_dim,
                weights[spec.matrix].dtype,
                spec.mode,
                spec.padding_idx is not None,
            )
            for spec in specs
        ]

    @property
    def weights(self) -> list[Tensor]:
        """The packed matrices, without gradients."""
        return [weight.detach() for weight in self._module.packed_weights()]

    @property
    def feature_rows(self) -> NDArray[np.int64]:
        """``[features, 7]``, as of :func:`recfuse.fused_embedding_bag`."""
        return self._module.layout.features.numpy()

    @property
    def output_dim(self) -> int:
        """Columns of the output."""
        return self._module.layout.output_dim

    @property
    def device(self) -> torch.device:
        """Where the first matrix is."""
        return self._module.packed_weights()[0].device

    @property
    def has_kernel(self) -> bool:
        """Whether one call pools all tables."""
        return self._module.has_kernel

    def lookups_of(self, batch: Any, where: str) -> Lookups:
        """A batch in the form that the module's call takes; TypeError, ValueError where it is none."""
        return self._module._lookups_of(batch, where)

    def set_plan(self, plan: Any, schedules: Any, warps: int) -> None:
        """Makes the module run by a plan's schedules, int32 ``[features, 5]``, and notes the plan."""
        self._module.set_plan(schedules, warps)
        self._module.plan = plan


def is_collection(module: Any) -> bool:
    """Whether :func:`view_of` takes it."""
    return isinstance(module, PackedModule)


def view_of(module: Any, function: str) -> CollectionView:
    """A collection's view; TypeError, which names ``function``, for another module."""
    if not isinstance(module, PackedModule):
        raise ArgumentTypeError(
            f"{function}: module is a {type(module).__name__}, must be a "
            "recfuse.nn.FusedEmbeddingBagCollection or FusedEmbeddingBagList"
        )
    return CollectionView(module)


def native_call_of(tables: Sequence[FeatureForm]) -> NativeCall:
    """As `native_call` for tables that do not exist, a feature each, packed as a collection packs them: to
    compile a kernel for them, with no memory behind it.
    """
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
