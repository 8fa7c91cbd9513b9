"""Calls that pool packed tables without a fused kernel, and checks of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse import _C
from recfuse._arguments import wrong_type
from recfuse._codes import DTYPES, FEATURE
from recfuse._storage import is_readable
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn.mapping import Mapping
from recfuse.nn.packed.layout import Layout, TableSpec, feature_tensor
from recfuse.nn.packed.taking_part import note_table, rows_of
from recfuse.ops import HAS_CUDA_KERNELS, embedding_bag, fused_embedding_bag
from recfuse.ops.embedding_bag_arguments import torch_embedding_bag

_UNREAD = [FEATURE.at(name) for name in FEATURE.fields if name not in ("rows", "padding_idx")]


def has_kernel(matrices: Sequence[Tensor]) -> bool:
    """Return whether a fused call can pool tables of these matrices.

    All matrices must be on one device that has kernels for their dtypes.
    """
    on_cpu = True  # plain loops: any() and all() take three times as long, and each call executes this
    for matrix in matrices:
        if matrix.dtype not in DTYPES:
            return False
        on_cpu = on_cpu and matrix.is_cpu
    if on_cpu:
        return True
    if not matrices[0].is_cuda:
        return all(matrix.is_meta for matrix in matrices)
    ordinal = matrices[0].get_device()
    for matrix in matrices:  # comparing devices takes three times as long too
        if matrix.get_device() != ordinal:
            return False
    return HAS_CUDA_KERNELS


def on_gpu(matrices: Sequence[Tensor]) -> bool:
    """Return whether these matrices, if a fused call pools them, are on a GPU, where schedules apply."""
    return len(matrices) > 0 and matrices[0].is_cuda


def is_planned(matrices: Sequence[Tensor]) -> bool:
    """Return whether schedules apply to a call with these matrices: on a GPU, or inside `explain`."""
    if not matrices or not matrices[0].is_cpu:
        return on_gpu(matrices)
    if torch.compiler.is_dynamo_compiling():  # which cannot trace the call below
        return False
    return _C.explain_lowers() and not torch.compiler.is_compiling()


def refuse_proxy(value: Any) -> None:
    """Raise TypeError in torch.fx.symbolic_trace: a fused call depends on the batch."""
    if not torch.compiler.is_compiling() and isinstance(value, torch.fx.Proxy):
        raise ArgumentTypeError(
            "recfuse: torch.fx.symbolic_trace cannot follow tables that are pooled in one call. Call "
            "recfuse.unswap(model) before it, or use torch.export."
        )


def pool_one_by_one(
    layout: Layout,
    matrices: Sequence[Tensor],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
) -> list[Tensor]:
    """Pool table by table with torch's own function, for dtypes and devices without a kernel.

    Returns the columns of each feature. Gradients are dense.
    """
    count = len(layout.table_of_feature)
    if (offsets.numel() - 1) % count:
        raise ArgumentValueError(
            f"recfuse.fused_embedding_bag: offsets has {offsets.numel()} elements; expected features * bags "
            f"+ 1 with {count} features"
        )
    bags = (offsets.numel() - 1) // count
    if offsets.is_meta:
        return [matrices[0].new_empty((bags, dim), device="meta") for dim in layout.dims]
    if is_readable(offsets) and is_readable(indices):
        _check_contents(layout.features, indices, offsets)
    bounds = offsets[::bags].tolist() if bags else offsets.tolist() * (count + 1)
    pooled = []
    for feature, number in enumerate(layout.table_of_feature):
        spec = layout.tables[number]
        start, end = bounds[feature], bounds[feature + 1]
        rows = rows_of(spec, matrices[spec.matrix])
        pooled.append(
            torch_embedding_bag(
                indices[start:end],
                rows,
                offsets[feature * bags : (feature + 1) * bags + 1] - start,
                mode=spec.mode,
                per_sample_weights=None
                if per_sample_weights is None
                else per_sample_weights[start:end].to(rows.dtype),
                include_last_offset=True,
                padding_idx=spec.padding_idx,
            )
        )
    return pooled


def _check_contents(features: Tensor, indices: Tensor, offsets: Tensor) -> None:
    """Raise the errors of a fused call for bad indices and offsets.

    It makes such a call, for tables with the same numbers of rows and without columns.
    """
    tables = features.clone()
    tables[:, _UNREAD] = 0
    fused_embedding_bag([torch.empty(0)], tables, indices.cpu(), offsets.cpu(), 0, any_max=False)


def table_call(
    spec: TableSpec,
    matrix: Tensor,
    sparse: bool,
    input: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
) -> Tensor:
    """Call a table of a matrix as a ``torch.nn.EmbeddingBag``; the matrix gets the gradient."""
    with_gradients = torch.is_grad_enabled()
    if not (with_gradients and matrix.requires_grad and has_kernel([matrix])):
        first = spec.first_row
        rows = rows_of(spec, matrix) if with_gradients else matrix[first : first + spec.num_embeddings]
        return embedding_bag(
            input,
            rows,
            offsets,
            mode=spec.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=spec.include_last_offset,
            padding_idx=spec.padding_idx,
        )
    prefix = f"recfuse: table {spec.name!r}: "
    if isinstance(input, Tensor) and input.dim() == 2:
        if offsets is not None:
            raise ArgumentValueError(
                f"{prefix}offsets is given with a 2-D input {list(input.shape)}, whose rows are the bags. "
                "Pass offsets=None, or a 1-D input."
            )
        if per_sample_weights is not None and per_sample_weights.shape != input.shape:
            raise ArgumentValueError(
                f"{prefix}per_sample_weights has shape {list(per_sample_weights.shape)}; expected that of "
                f"input: {list(input.shape)}"
            )
        ends = torch.arange(input.shape[0] + 1, dtype=torch.int64, device=input.device) * input.shape[1]
        per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        input = input.reshape(-1)
    elif offsets is None:
        raise ArgumentValueError(f"{prefix}offsets is None; expected a 1-D tensor with a 1-D input")
    elif spec.include_last_offset:
        ends = offsets
        # torch accepts lookups without a bag here.
        if offsets.is_cpu and offsets.numel() and is_readable(offsets):
            end = max(int(offsets[-1]), 0)
            input = input[:end]
            per_sample_weights = None if per_sample_weights is None else per_sample_weights[:end]
    else:
        ends = torch.cat((offsets, offsets.new_full((1,), input.numel())))
    features = feature_tensor([spec._replace(matrix=0)])
    pooled = fused_embedding_bag(
        [matrix],
        features,
        input,
        ends,
        spec.embedding_dim,
        per_sample_weights,
        sparse=sparse,
        any_max=spec.mode == "max",
    )
    note_table(pooled, matrix, spec)
    return pooled


def check_mapping(mapping: Mapping, layout: Layout, offsets: Tensor) -> None:
    """Raise an error if ``mapping`` is no mapping, or belongs to other tables or another batch."""
    if not isinstance(mapping, Mapping):
        raise wrong_type("recfuse: mapping", mapping, "the result of map(offsets) of this module")
    count = len(layout.dims)
    bags = (offsets.numel() - 1) // max(count, 1)
    if mapping.bags != bags or mapping.features.shape[0] != count:
        raise ArgumentValueError(
            f"recfuse: mapping is for {mapping.features.shape[0]} features and {mapping.bags} bags, this "
            f"batch has {count} features and {bags} bags. Create it by map(offsets) of this batch."
        )
    if mapping.features is not layout.features and not torch.equal(mapping.features, layout.features):
        raise ArgumentValueError(
            "recfuse: mapping is for other tables. Create it by map(offsets) of this module as it is now."
        )
