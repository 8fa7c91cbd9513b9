"""``fused_embedding_bag``: many tables in one call; its gradients and its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse._storage import is_readable
from recfuse.errors import ArgumentValueError
from recfuse.ops.bag_operators import define_gradients
from recfuse.ops.bags import pooled, pools_max
from recfuse.ops.gradients import bags_of
from recfuse.ops.library import (
    below_autograd,
    check_1d,
    check_call,
    is_compiled,
    is_transformed,
    needs_derivatives,
    register_fake,
)
from recfuse.ops.pending_updates import update_sinks
from recfuse.ops.traced_updates import Updates
from recfuse.ops.updates import check_finished, unfinished, updates_of

_DEFAULTS = (-1, "on", 0)
_fused_embedding_bag = torch.ops.recfuse.fused_embedding_bag.default
_call = _fused_embedding_bag._op  # as a call of the operator, without its Python frame


def fused_embedding_bag(
    weights: Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    output_dim: int,
    per_sample_weights: Tensor | None = None,
    *,
    sparse: bool = False,
    prefetch_distance: int = -1,
    bounds_check: str = "on",
    schedules: Tensor | None = None,
    warps: int = 0,
    mapping: Tensor | None = None,
    any_max: bool = True,
) -> Tensor:
    """Pool many tables in one call.

    :class:`recfuse.nn.FusedEmbeddingBagCollection` creates the arguments ``weights`` and ``features`` and, on
    a GPU, ``schedules``, ``warps`` and ``mapping``.

    Args:
        weights: contiguous float32, float16 or bfloat16 matrices ``[rows, dim]``; a table is a range of rows.
            Gradients have their shape.
        features: int64 ``[features, 7]`` on the CPU: number of the weight, first element in it (a multiple of
            dim), rows of the table, dim, pooling (0 sum, 1 mean, 2 max), padding_idx (a row of the table, or
            -1), first column in the output (where the previous feature ends). Features may share a table.
        indices: int32 or int64 ``[lookups]``, feature by feature.
        offsets: int32 or int64 ``[features * bags + 1]``: bag b of feature f pools the lookups from
            ``offsets[f * bags + b]`` to ``offsets[f * bags + b + 1]``. Ascends from 0, on the CPU to the
            number of lookups; on a GPU, where a graph may have room for more, later lookups belong to no bag.
        output_dim: columns of the output, the sum of the features' dims.
        per_sample_weights: float32, float16 or bfloat16 ``[lookups]``; every feature must be a sum.
        sparse: make gradients coalesced sparse tensors. Not with a feature of pooling max. Default: False.
        prefetch_distance, bounds_check: as in :func:`embedding_bag`.
        schedules: int32 ``[features, 5]`` on the CPU, the schedule of each feature on a GPU; 0 is a default.
            Columns: kind (1 pool, 2 columns, 3 staged), threads (lanes that share a bag; where 32 share long
            bags, 64 do in batches of at most 256 bags), distance (prefetched rows a lane), split (blocks that
            share a bag), expected pooling factor times 16 (-1: empty). Of staged tables only threads, 2 to
            32, and the pooling factor matter. If all pooling factors are given, the host computes the
            partition from the batch size; otherwise a small kernel computes it from the offsets.
        warps: the maximum of warps that an SM runs at once; 0 for the default.
        mapping: int32 ``[rows, 8]`` on the CPU, best in page-locked memory: the partition of this batch, from
            ``map`` of a collection with the same schedules and warps. A mapping without exactly one entry for
            each bag of each feature raises ``ValueError``. CUDA graphs keep a copy.
        any_max: False promises that no feature pools by max. This saves a read of ``features``, and in traced
            and compiled training the rows of the maxima. Default: True.

    Shape:
        - indices: ``[lookups]``.
        - offsets: ``[features * bags + 1]``.
        - output: ``[bags, output_dim]``.

    Returns:
        Tensor: ``[bags, output_dim]``, in the dtype of the weights if they agree, else float32.

    Raises:
        TypeError: a bad argument.
        ValueError: a bad argument or offset.
        IndexError: an index outside its table; names feature and bag. On a GPU the kernel skips it, without
            gradient, and the next call with these tables, or :func:`check`, raises the error.
        NotImplementedError: forward-mode and second derivatives.

    Example:
        >>> weights = [torch.randn(1000, 16), torch.randn(50, 8)]
        >>> features = torch.tensor([[0, 0, 1000, 16, 0, -1, 0], [1, 0, 50, 8, 0, -1, 16]])
        >>> indices, offsets = torch.tensor([3, 999, 7, 49]), torch.tensor([0, 1, 2, 3, 4])
        >>> recfuse.fused_embedding_bag(weights, features, indices, offsets, output_dim=24).shape
        torch.Size([2, 24])

    Note:
        All tensors are on the CPU, or all on one CUDA device; ``features``, ``schedules`` and ``mapping`` are
        always on the CPU, because the host plans the work without waiting for the GPU. Gradients,
        ``torch.func.grad``, ``vjp`` and ``vmap`` (one call after another) work.

    Source: Pan et al., RecFlex, SC 2024 (one kernel for heterogeneous features).
    """
    try:
        derivatives = needs_derivatives((*weights, per_sample_weights))
        updates = updates_of(weights) if derivatives else None
        look = any_max and (derivatives or sparse) and is_readable(features)
    except (TypeError, AttributeError):
        check_call(
            "fused_embedding_bag", weights, features, indices, offsets, per_sample_weights=per_sample_weights
        )
        raise
    if look:
        any_max = pools_max(features)
        if any_max and sparse:
            raise ArgumentValueError(
                "recfuse.fused_embedding_bag: sparse is True and a feature pools by max, which has no "
                "sparse gradient. Pass sparse=False."
            )
    arguments = features, indices, offsets, output_dim, per_sample_weights, sparse
    options: tuple[Any, ...] = prefetch_distance, bounds_check, schedules, warps, mapping, any_max
    if is_transformed():
        if updates is not None and is_compiled():
            return _fused_embedding_bag_updated(*Updates.of(updates), weights, *arguments, *options)
        return _fused_embedding_bag(weights, *arguments, *options)
    if unfinished:
        check_finished(weights, "a call of tables")
    if mapping is None:  # omit defaults, because to pass them takes time
        if schedules is None and (prefetch_distance, bounds_check, warps) == _DEFAULTS:
            options = ()
        else:
            options = options[:4]
    try:
        if derivatives:
            call = weights, *arguments, *options
            sinks = (sparse,) * len(weights) if updates is None else update_sinks(weights, updates, sparse)
            output: Tensor = pooled(_pool, call, None, any_max, sinks, None, per_sample_weights, *weights)
            return output
        if torch.is_inference_mode_enabled():  # autograd is left out already
            return _call(weights, *arguments, *options)  # type: ignore[no-any-return]
        with below_autograd():
            return _call(weights, *arguments, *options)  # type: ignore[no-any-return]
    except TypeError:
        check_call(
            "fused_embedding_bag", weights, features, indices, offsets, per_sample_weights=per_sample_weights
        )
        raise


# ---- shape, and gradients


def _pool(*call: Any) -> Any:
    """Call the operator from the Function of an eager call, outside of torch.func's transforms."""
    with below_autograd():
        return _call(*call)


def fused_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the dtype of a fused call's output.

    Args:
        dtypes: the dtypes of the weights.

    Returns:
        torch.dtype: the weights' dtype if they agree, else float32.

    Example:
        >>> recfuse.ops.fused_dtype([torch.float16, torch.float16])
        torch.float16
    """
    return dtypes[0] if dtypes and len(set(dtypes)) == 1 else torch.float32


@register_fake("fused_embedding_bag", follows="weights")
def _shape(
    weights: Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    output_dim: int,
    per_sample_weights: Tensor | None = None,
    *_: Any,
) -> Tensor:
    check_1d("fused_embedding_bag", indices, offsets)
    dtype = fused_dtype([weight.dtype for weight in weights])
    like = weights[0] if weights else indices
    return like.new_empty((bags_of(features, offsets), output_dim), dtype=dtype)


_fused_embedding_bag_updated = define_gradients("fused_embedding_bag", "weights", _shape)
