"""``fused_embedding_bag``: many tables in one call; its gradients and its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse._codes import MAX
from recfuse._storage import is_readable
from recfuse.errors import ArgumentValueError, NotATensorError, a_type
from recfuse.ops.autograd import eager_apply, pooled, refused_jvp, register
from recfuse.ops.gradients import (
    WeightGradCall,
    bags_of,
    define_with_winners,
    find_winners,
    sample_weights_grad,
    used_of,
    weight_grads,
)
from recfuse.ops.library import (
    below_autograd,
    call_below_autograd,
    check_1d,
    check_tensor,
    dtype_code,
    is_compiled,
    is_traced,
    is_transformed,
    needs_derivatives,
    register_fake,
)
from recfuse.ops.updated_calls import Lookups, updated_call
from recfuse.ops.updated_traces import Family, Updates, define_updated
from recfuse.ops.updates import check_finished, unfinished, updates_of

_DEFAULTS = (-1, "on", 0)
_fused_embedding_bag = torch.ops.recfuse.fused_embedding_bag.default


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

    :class:`recfuse.nn.FusedEmbeddingBagCollection` makes the arguments ``weights`` and ``features`` and, on a
    GPU, ``schedules``, ``warps`` and ``mapping``.

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
        IndexError: an index outside its table; names feature and bag. On a GPU it is left out, without
            gradient, and the next call with these tables, or :func:`check`, raises it.
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
        _check_tensors(weights, features, indices, offsets, per_sample_weights)
        raise
    if look:
        any_max = bool((features[:, 4] == MAX).any())
        if any_max and sparse:
            raise ArgumentValueError(
                "recfuse.fused_embedding_bag: sparse is True and a feature pools by max, which has no sparse "
                "gradient; pass sparse=False"
            )
    arguments = features, indices, offsets, output_dim, per_sample_weights, sparse
    options: tuple[Any, ...] = prefetch_distance, bounds_check, schedules, warps, mapping, any_max
    if is_transformed():
        if updates is not None and is_compiled():
            return _fused_embedding_bag_updated(*Updates.of(updates), weights, *arguments, *options)
        return _fused_embedding_bag(weights, *arguments, *options)
    if unfinished:
        check_finished(weights, "a call of tables")
    if mapping is None:  # what takes time to hand over, and is the default
        if schedules is None and (prefetch_distance, bounds_check, warps) == _DEFAULTS:
            options = ()
        else:
            options = options[:4]
    try:
        if updates is not None:
            call = weights, *arguments, *options
            lookups = Lookups(features, indices, offsets, output_dim, any_max, sparse)
            return updated_call(_fused_embedding_bag, call, lookups, updates, per_sample_weights, weights)
        if derivatives:
            made = _apply(*arguments, any_max, options, *weights)
            return made[0] if any_max else made
        if torch.is_inference_mode_enabled():  # autograd is left out already
            return _fused_embedding_bag(weights, *arguments, *options)
        with below_autograd():
            return _fused_embedding_bag(weights, *arguments, *options)
    except TypeError:
        _check_tensors(weights, features, indices, offsets, per_sample_weights)
        raise


def _check_tensors(weights: Any, features: Any, indices: Any, offsets: Any, sample_weights: Any) -> None:
    """Raises where an argument of a call that failed is no tensor."""
    if not isinstance(weights, (list, tuple)):
        raise NotATensorError(
            f"recfuse.fused_embedding_bag: weights is {a_type(weights)}, must be a list of tensors"
        )
    given = {f"weights[{number}]": weight for number, weight in enumerate(weights)}
    given |= {"features": features, "indices": indices, "offsets": offsets}
    if sample_weights is not None:
        given["per_sample_weights"] = sample_weights
    for name, value in given.items():
        check_tensor("fused_embedding_bag", name, value)


# ---- shape, and gradients


def fused_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """dtype of a fused call's output: that of the weights where they agree, else float32."""
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


def _fused_winners(*call: Any) -> Tensor:
    return call_below_autograd(find_winners, *call[:5])


_fused_embedding_bag_with_winners = define_with_winners(
    "fused_embedding_bag", _shape, _fused_winners, "weights"
)


class FusedEmbeddingBag(torch.autograd.Function):
    """``fused_embedding_bag`` with its gradients; the weights last, since only arguments that are tensors
    themselves have gradients. ``options`` are the schema's arguments behind ``sparse``.
    """

    @staticmethod
    def forward(
        features: Tensor,
        indices: Tensor,
        offsets: Tensor,
        output_dim: int,
        sample_weights: Tensor | None,
        sparse: bool,
        any_max: bool,
        options: tuple[Any, ...],
        *weights: Tensor,
    ) -> Any:
        """Pools; with any_max also gives the winners."""
        call = weights, features, indices, offsets, output_dim, sample_weights, sparse, *options
        if any_max and is_traced():
            return call_below_autograd(_fused_embedding_bag_with_winners, *call)
        output = call_below_autograd(_fused_embedding_bag, *call)
        return (output, _fused_winners(*call)) if any_max else output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps what the gradients need: of the weights only shapes, unless factors need a gradient."""
        features, indices, offsets, _, sample_weights, sparse, any_max, _, *weights = inputs
        winners = None
        if any_max:
            winners = output[1]
            ctx.set_materialize_grads(False)
        kept = weights if ctx.needs_input_grad[4] else []
        ctx.save_for_backward(features, indices, offsets, sample_weights, winners, *kept)
        ctx.groups = [
            (*weight.shape, dtype_code(weight, "fused_embedding_bag", "weights")) for weight in weights
        ]
        ctx.sparse = sparse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """Gradients of per_sample_weights and of the weights."""
        features, indices, offsets, sample_weights, winners, *weights = ctx.saved_tensors
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if grad is None:
            return tuple(grads)
        lookups, count = (features, indices, offsets), len(ctx.groups)
        needed = ctx.needs_input_grad  # computed again each time that it is read
        places = [group - count for group in range(count) if needed[group - count]]
        used_lookups = lookups
        if (used := used_of(ctx, features, grad)) is not None:
            places = [place for place in places if place + count in used.groups]
            used_lookups = used.features, indices, offsets
        calls = [
            WeightGradCall(grad, *used_lookups, place + count, *ctx.groups[place], sample_weights, winners)
            for place in places
        ]
        found = weight_grads(ctx, calls, [ctx.sparse] * len(calls), places)
        for place, gradient in zip(places, found, strict=True):
            grads[place] = gradient
        if needed[4]:
            grads[4] = sample_weights_grad(grad, weights, lookups, sample_weights.dtype)
        return tuple(grads)

    jvp = refused_jvp("fused_embedding_bag")


_apply = eager_apply(FusedEmbeddingBag)
_SCHEMA_DEFAULTS = tuple(argument.default_value for argument in _fused_embedding_bag._schema.arguments)


def _autograd(*given: Any) -> Tensor:
    """The operator's autograd kernel; ``given`` are the arguments that are not the defaults."""
    weights, *call = given + _SCHEMA_DEFAULTS[len(given) :]
    if needs_derivatives((*weights, call[4])):  # per_sample_weights
        features, any_max = call[0], call[-1]
        if any_max and is_readable(features):
            any_max = bool((features[:, 4] == MAX).any())
        return pooled(FusedEmbeddingBag, *call[:6], any_max, tuple(call[6:]), *weights)
    with below_autograd():
        return _fused_embedding_bag(*given)


register("fused_embedding_bag", _autograd)


# ---- with weights that a fused optimizer updates, in compiled programs


def _lookups_of(*call: Any) -> tuple[Sequence[Tensor], Lookups, Tensor | None]:
    weights, features, indices, offsets, output_dim, sample_weights, sparse, *_, any_max = (
        call + _SCHEMA_DEFAULTS[len(call) :]
    )
    return weights, Lookups(features, indices, offsets, output_dim, any_max, sparse), sample_weights


_family = Family(_fused_embedding_bag, _fused_embedding_bag_with_winners, _lookups_of)
_fused_embedding_bag_updated = define_updated("fused_embedding_bag", _family, _shape, "weights")
