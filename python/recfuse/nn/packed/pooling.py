"""The calls that pool packed tables where one kernel cannot, and what a call is checked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from recfuse._codes import DTYPES
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn.mapping import Mapping
from recfuse.nn.packed.layout import Layout, PackedSpec, feature_tensor, rows_of
from recfuse.ops import HAS_CUDA_KERNELS, embedding_bag, fused_embedding_bag


def has_kernel(weights: Sequence[Tensor]) -> bool:
    """Whether one call can pool tables of these matrices: all on one device that has kernels for them."""
    for weight in weights:
        if weight.dtype not in DTYPES:
            return False
    if all_on_cpu(weights):
        return True
    if not weights[0].is_cuda:
        return all(weight.is_meta for weight in weights)
    ordinal = weights[0].get_device()
    for weight in weights:  # comparing devices takes three times as long, and each call comes here
        if weight.get_device() != ordinal:
            return False
    return HAS_CUDA_KERNELS


def all_on_cpu(weights: Sequence[Tensor]) -> bool:
    """Whether these matrices are all on the CPU."""
    for weight in weights:  # noqa: SIM110  (any() takes three times as long)
        if not weight.is_cpu:
            return False
    return True


def on_gpu(weights: Sequence[Tensor]) -> bool:
    """Whether these matrices, if one call pools them, are on a GPU, whose work is planned by schedules."""
    return len(weights) > 0 and weights[0].is_cuda


def pool_one_by_one(
    layout: Layout,
    weights: Sequence[Tensor],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
) -> Tensor:
    """As one call, by torch's own function, table by table: for dtypes and devices without a kernel."""
    count = len(layout.table_of_feature)
    if (offsets.numel() - 1) % count:
        raise ArgumentValueError(
            f"recfuse.fused_embedding_bag: offsets has {offsets.numel()} elements, must have "
            f"features * bags + 1 with {count} features"
        )
    bags = (offsets.numel() - 1) // count
    if offsets.is_meta:
        return weights[0].new_empty((bags, layout.output_dim), device="meta")
    bounds = offsets[::bags].tolist() if bags else [0] * (count + 1)
    pooled = []
    for feature, number in enumerate(layout.table_of_feature):
        spec = layout.tables[number]
        start, end = bounds[feature], bounds[feature + 1]
        pooled.append(
            functional.embedding_bag(
                indices[start:end],
                rows_of(spec, weights[spec.group]),
                offsets[feature * bags : (feature + 1) * bags + 1] - start,
                mode=spec.mode,
                per_sample_weights=None if per_sample_weights is None else per_sample_weights[start:end],
                include_last_offset=True,
                padding_idx=spec.padding_idx,
            )
        )
    return torch.cat(pooled, dim=1)


def table_call(
    spec: PackedSpec,
    weight: Tensor,
    sparse: bool,
    input: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
) -> Tensor:
    """One table of the matrix ``weight``, called as a ``torch.nn.EmbeddingBag``. Its gradient is the
    matrix's, dense or sparse.
    """
    rows = rows_of(spec, weight)
    if not weight.requires_grad or not torch.is_grad_enabled() or not has_kernel([weight]):
        return embedding_bag(
            input,
            rows,
            offsets,
            mode=spec.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=spec.include_last_offset,
            padding_idx=spec.padding_idx,
        )
    where = f"recfuse: table {spec.name!r}: "
    if isinstance(input, Tensor) and input.dim() == 2:
        if offsets is not None:
            raise ArgumentValueError(
                f"{where}offsets is given with a 2-D input {list(input.shape)}, whose rows are the bags; "
                "pass offsets=None, or a 1-D input"
            )
        if per_sample_weights is not None and per_sample_weights.shape != input.shape:
            raise ArgumentValueError(
                f"{where}per_sample_weights has shape {list(per_sample_weights.shape)}, must have that of "
                f"input: {list(input.shape)}"
            )
        ends = torch.arange(input.shape[0] + 1, dtype=torch.int64, device=input.device) * input.shape[1]
        per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        input = input.reshape(-1)
    elif offsets is None:
        raise ArgumentValueError(f"{where}offsets is None, must be a 1-D tensor with a 1-D input")
    elif spec.include_last_offset:
        ends = offsets
    else:
        ends = torch.cat((offsets, offsets.new_full((1,), input.numel())))
    features = feature_tensor([spec._replace(group=0)], [0])
    return fused_embedding_bag(
        [weight], features, input, ends, spec.embedding_dim, per_sample_weights, sparse=sparse
    )


def check_mapping(mapping: Mapping, layout: Layout, offsets: Tensor) -> None:
    """Raises where a mapping is none, or of other tables or another batch."""
    if not isinstance(mapping, Mapping):
        raise ArgumentTypeError(
            f"recfuse: mapping is a {type(mapping).__name__}, must be what map(offsets) of this module gave"
        )
    count = len(layout.dims)
    bags = (offsets.numel() - 1) // max(count, 1)
    if mapping.bags != bags or mapping.features.shape[0] != count:
        raise ArgumentValueError(
            f"recfuse: mapping is for {mapping.features.shape[0]} features and {mapping.bags} bags, this "
            f"batch has {count} features and {bags} bags; make it by map(offsets) of this batch"
        )
    if mapping.features is not layout.features and not torch.equal(mapping.features, layout.features):
        raise ArgumentValueError(
            "recfuse: mapping was made for other tables; make it by map(offsets) of this module as it is now"
        )
