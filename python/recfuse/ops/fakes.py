"""Shapes of what the operators return, for the compiler and for meta tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.fake_impl import allocate_size

from recfuse._codes import DTYPES
from recfuse.ops import autograd  # noqa: F401  (defines operators)


@torch.library.register_fake("recfuse::embedding_bag")
def _bag_shape(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    *_: Any,
) -> Tensor:
    torch._check(
        weight.dim() == 2, lambda: f"recfuse.embedding_bag: weight has {weight.dim()} dimensions, must have 2"
    )
    _check_1d("embedding_bag", indices, offsets)
    return weight.new_empty((offsets.shape[0] - int(include_last_offset), weight.shape[1]))


@torch.library.register_fake("recfuse::fused_embedding_bag")
def _fused_shape(
    weights: Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    output_dim: int,
    *_: Any,
) -> Tensor:
    count = features.shape[0]
    _check_1d("fused_embedding_bag", indices, offsets)
    bags = (offsets.shape[0] - 1) // count if count else 0
    return indices.new_empty((bags, output_dim), dtype=fused_dtype([weight.dtype for weight in weights]))


def fused_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """dtype of a fused call's output: that of the weights where they agree, else float32."""
    return dtypes[0] if dtypes and len(set(dtypes)) == 1 else torch.float32


def _check_1d(operator: str, indices: Tensor, offsets: Tensor) -> None:
    torch._check(
        offsets.dim() == 1 and indices.dim() == 1,
        lambda: (
            f"recfuse.{operator}: indices and offsets have {indices.dim()} and {offsets.dim()} dimensions, "
            "must have 1"
        ),
    )


@torch.library.register_fake("recfuse::fused_embedding_bag_backward")
def _(
    grad: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    group: int,
    rows: int,
    dim: int,
    dtype: int,
    *_: Any,
) -> Tensor:
    return grad.new_empty((rows, dim), dtype=DTYPES[dtype])


@torch.library.register_fake("recfuse::fused_embedding_bag_sparse_backward")
def _(
    grad: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    group: int,
    rows: int,
    dim: int,
    dtype: int,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    count = _rows_found(indices)
    return grad.new_empty((count,), dtype=torch.int64), grad.new_empty((count, dim), dtype=DTYPES[dtype])


def _rows_found(indices: Tensor) -> Any:
    """A size that only the contents tell; outside of a trace, as many as there may be."""
    try:
        shape_env = torch.library.get_ctx()._shape_env
    except RuntimeError:  # a meta tensor
        shape_env = None
    if shape_env is None:
        return indices.shape[0]
    # new_dynamic_size() of the context refuses unless dynamo's capture_dynamic_output_shape_ops is set; a
    # gradient, which nobody branches on, may have such a size in any case.
    return allocate_size(shape_env)


@torch.library.register_fake("recfuse::_embedding_bag_with_winners")
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    output = _bag_shape(*arguments)
    return output, output.new_empty(output.shape, dtype=torch.int64)


@torch.library.register_fake("recfuse::_fused_embedding_bag_with_winners")
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    output = _fused_shape(*arguments)
    return output, output.new_empty(output.shape, dtype=torch.int64)


@torch.library.register_fake("recfuse::fused_embedding_bag_winners")
def _(
    weights: Sequence[Tensor], features: Tensor, indices: Tensor, offsets: Tensor, output_dim: int
) -> Tensor:
    count = features.shape[0]
    bags = (offsets.shape[0] - 1) // count if count else 0
    return indices.new_empty((bags, output_dim), dtype=torch.int64)


@torch.library.register_fake("recfuse::fused_embedding_bag_sample_weights_backward")
def _(grad: Tensor, weights: Sequence[Tensor], features: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
    return grad.new_empty((indices.shape[0],), dtype=torch.float32)


@torch.library.register_fake("recfuse::_feature")
def _(rows: int, dim: int, pooling: int, padding_idx: int) -> Tensor:
    return torch.empty((1, 7), dtype=torch.int64, device="cpu")
