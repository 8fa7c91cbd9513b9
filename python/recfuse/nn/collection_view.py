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
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recfuse.data.forms import Lookups
from recfuse.errors import ArgumentTypeError
from recfuse.nn.collection import FusedEmbeddingBagCollection
from recfuse.nn.packed.layout import Layout, PackedSpec, Wanted, feature_tensor, group_weights
from recfuse.nn.packed.module import PackedModule
from recfuse.nn.table_list import FusedEmbeddingBagList
from recfuse.nn.tuning import Tuning
from recfuse.ops.fakes import fused_dtype
from recfuse.ops.gradients import DTYPES

NativeCall: TypeAlias = tuple[list[tuple[int, int, int]], NDArray[np.int64], int, int]
"""The first argument of `_C.fused_embedding_bag_*`: address, elements and dtype code of each packed matrix;
the features; dtype code and columns of the output.
"""

SAVED_CLASSES = (FusedEmbeddingBagCollection, FusedEmbeddingBagList, Layout, PackedSpec, Tuning)
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
                weights[spec.group].dtype,
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


def native_call(weights: Sequence[Tensor], features: NDArray[np.int64], output_dim: int) -> NativeCall:
    """What the C library wants to know of tables: matrices, features ``[features, 7]``, columns of the
    output. The matrices must outlive its use.
    """
    buffers = [(weight.data_ptr(), weight.numel(), DTYPES.index(weight.dtype)) for weight in weights]
    return buffers, features, DTYPES.index(fused_dtype([weight.dtype for weight in weights])), output_dim


def native_call_of(tables: Sequence[FeatureForm]) -> NativeCall:
    """The same for tables that do not exist, a feature each, packed as a collection packs them: to compile a
    kernel for them, with no memory behind it.
    """
    cpu = torch.device("cpu")
    groups = group_weights([Wanted(table.rows, table.dim, table.dtype, cpu) for table in tables])
    places = {number: (at, row) for at, group in enumerate(groups) for number, row in group.members}
    specs = [
        PackedSpec("", table.rows, table.dim, table.mode, 0 if table.padded else None, True, *places[number])
        for number, table in enumerate(tables)
    ]
    features = feature_tensor(specs, range(len(specs))).numpy()
    dtypes = [group.like.dtype for group in groups]
    buffers = [(_ADDRESS, group.rows * group.like.dim, DTYPES.index(group.like.dtype)) for group in groups]
    return buffers, features, DTYPES.index(fused_dtype(dtypes)), sum(table.dim for table in tables)
