"""The gradient operators (`recfuse::fused_embedding_bag_*`) as backward passes call them, and their shapes.

There is one set for both operators: `embedding_bag` is a fused call of one feature. They are operators
themselves, so that the compiler takes them as they are. They have no gradients, and say so. Winners, the rows
that win a bag of mode max, come from the forward pass, so that the backward pass needs no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.fake_impl import allocate_size
from torch.autograd import forward_ad

from recfuse._codes import DTYPES
from recfuse._storage import is_readable
from recfuse.errors import ArgumentValueError
from recfuse.ops.autograd import register
from recfuse.ops.library import below_autograd, library, register_fake

_ops = torch.ops.recfuse
_dense_weight_grad = _ops.fused_embedding_bag_backward.default
_sparse_weight_grad = _ops.fused_embedding_bag_sparse_backward.default
_sparse_weight_grads = _ops.fused_embedding_bag_sparse_gradients.default
_sample_weights_grad = _ops.fused_embedding_bag_sample_weights_backward.default
find_winners = _ops.fused_embedding_bag_winners.default


# Of a single bag's sparse gradient: a mark would cost a step more than it saves optimizers that coalesce.
_FEW_ELEMENTS = 3 << 14


class WeightGradCall(NamedTuple):
    """Arguments of the gradient of one group: a matrix whose rows are those of tables."""

    grad: Tensor  # [bags, columns]
    features: Tensor  # [features, 7], as fused_embedding_bag has them
    indices: Tensor
    offsets: Tensor  # [features * bags + 1]; [bags] of one feature on the CPU
    group: int
    rows: int
    dim: int
    dtype: int  # its code: how a ScalarType reaches a Python operator depends on torch's version
    per_sample_weights: Tensor | None
    winners: Tensor | None  # int64 [bags, columns]
    scale_grad_by_freq: bool = False


def _gradient(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a gradient operator from backward; its own autograd kernel only where it may have to refuse."""
    if (
        torch.is_grad_enabled()
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    ):
        return operator(*arguments)
    with below_autograd():
        return operator(*arguments)


def weight_grad(
    ctx: Any, call: WeightGradCall, sparse: bool, argument: int, mark_small: bool = True
) -> Tensor:
    """Gradient of a group, dense or coalesced COO; of the tensor `argument` of the Function, among those that
    are tensors. `mark_small`: a Parameter's is marked as coalesced even where it has few elements.
    """
    if not sparse:
        return _gradient(_dense_weight_grad, *call)
    if call.scale_grad_by_freq:
        raise ArgumentValueError(
            "recfuse.embedding_bag: scale_grad_by_freq is True with sparse, which has no such gradient; pass "
            "sparse=False"
        )
    return _listed(ctx, call, *_gradient(_sparse_weight_grad, *call[:-1]), argument, mark_small)


def weight_grads(
    ctx: Any, calls: Sequence[WeightGradCall], sparse: Sequence[bool], arguments: Sequence[int]
) -> list[Tensor]:
    """Gradients of several groups of one call, as `weight_grad` gives them. A GPU sorts the lookups of all
    sparse ones at once; in a program that is traced each is an operator of its own, whose outputs have sizes
    that only the contents tell.
    """
    together = [number for number, is_sparse in enumerate(sparse) if is_sparse]
    if len(together) < 2 or not is_readable(calls[0].grad):
        return [weight_grad(ctx, *each) for each in zip(calls, sparse, arguments, strict=True)]
    first, *forms = calls[0], *zip(*(calls[number][4:8] for number in together), strict=True)
    lookups = first.grad, first.features, first.indices, first.offsets
    found = _gradient(_sparse_weight_grads, *lookups, *forms, first.per_sample_weights, first.winners)
    listed = dict(zip(together, zip(found[::2], found[1::2], strict=True), strict=True))
    return [
        _listed(ctx, call, *listed[number], arguments[number])
        if number in listed
        else weight_grad(ctx, call, False, arguments[number])
        for number, call in enumerate(calls)
    ]


def _listed(
    ctx: Any, call: WeightGradCall, rows: Tensor, values: Tensor, argument: int, mark_small: bool = True
) -> Tensor:
    """Rows and values as a coalesced tensor, see `weight_grad`."""
    shape = call.rows, call.dim
    found = torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False, is_coalesced=True)
    if (
        is_readable(values)
        and (mark_small or values.numel() > _FEW_ELEMENTS)
        and (nodes := getattr(ctx, "next_functions", None)) is not None
    ):
        leaf = getattr(nodes[argument][0], "variable", None)  # of an AccumulateGrad
        if leaf is not None:
            _mark_later(leaf, rows, values)
    return found


class Used(NamedTuple):
    """What of a call has gradients."""

    features: Tensor  # those without one are in no matrix
    groups: Container[int]  # matrices with such a feature


def used_of(ctx: Any, features: Tensor, grad: Tensor) -> Used | None:
    """What of a call has gradients, as a packed module's hook has told the call's node: lookups of other
    features are in no gradient and in no update. None: all of it.
    """
    told = vars(ctx)
    mask = told.get("used_features")
    return None if mask is None else Used(mask(features, grad), told["used_groups"])


def mark_large(leaf: Tensor, grad: Tensor, dim: int) -> None:
    """Has a single bag's sparse gradient marked, unless it has few elements."""
    if grad._nnz() * dim > _FEW_ELEMENTS:
        _mark_later(leaf, grad._indices(), grad._values())


def _mark_later(leaf: Tensor, rows: Tensor, values: Tensor) -> None:
    """Has `leaf.grad` marked behind what others queue in this backward pass: DistributedDataParallel waits
    there for threads that coalesce the gradient. Marked just then, one failed in its thread, and other
    processes waited for ever.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(partial(queue, partial(_mark_coalesced, leaf, rows, values)))


def _mark_coalesced(leaf: Tensor, rows: Tensor, values: Tensor) -> None:
    """Marks `leaf.grad` at the end of backward, if it is the gradient of these rows and values: torch brings
    a sparse gradient there without a copy, as a new tensor that does not know that it is coalesced.
    """
    grad = leaf.grad
    if (
        grad is not None
        and grad.is_sparse
        and grad._nnz() == values.shape[0]
        and grad._indices().data_ptr() == rows.data_ptr()
        and grad._values().data_ptr() == values.data_ptr()
    ):
        grad._coalesced_(True)


def sample_weights_grad(
    grad: Tensor, weights: Sequence[Tensor], lookups: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """Gradient of the per-sample weights; `lookups`: features, indices, offsets."""
    return _gradient(_sample_weights_grad, grad, weights, *lookups).to(dtype)


def define_with_winners(
    name: str, shape: Callable[..., Tensor], winners: Callable[..., Tensor], follows: str
) -> Any:
    """Defines an operator like `name` that gives the winners beside the output: a compiled program computes
    what only its backward asks for in its backward, from weights that may have changed by then.
    """
    operator, both = getattr(_ops, name).default, f"_{name}_with_winners"
    arguments = str(operator._schema).partition("(")[2].rpartition(" -> ")[0]
    library.define(f"{both}({arguments} -> (Tensor, Tensor)")
    for key in ("CPU", "CUDA"):
        library.impl(both, lambda *given: (operator(*given), winners(*given)), key)

    @register_fake(both, follows)
    def _(*given: Any) -> tuple[Tensor, Tensor]:
        output = shape(*given)
        return output, output.new_empty(output.shape, dtype=torch.int64)

    return getattr(_ops, both).default


@register_fake("fused_embedding_bag_backward", follows="grad")
def _(*arguments: Any) -> Tensor:
    call = WeightGradCall(*arguments)
    return call.grad.new_empty((call.rows, call.dim), dtype=DTYPES[call.dtype])


@register_fake("fused_embedding_bag_sparse_backward", follows="grad")
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = WeightGradCall(*arguments)
    count = _rows_found(call.indices)
    rows = call.grad.new_empty((count,), dtype=torch.int64)
    return rows, call.grad.new_empty((count, call.dim), dtype=DTYPES[call.dtype])


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


@register_fake("fused_embedding_bag_winners", follows="weights")
def _(
    weights: Sequence[Tensor], features: Tensor, indices: Tensor, offsets: Tensor, output_dim: int
) -> Tensor:
    like = weights[0] if weights else indices
    return like.new_empty((bags_of(features, offsets), output_dim), dtype=torch.int64)


@register_fake("fused_embedding_bag_sample_weights_backward", follows="grad")
def _(grad: Tensor, weights: Sequence[Tensor], features: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
    return grad.new_empty((indices.shape[0],), dtype=torch.float32)


def bags_of(features: Tensor, offsets: Tensor) -> int:
    """Bags of each feature."""
    count = features.shape[0]
    return (offsets.shape[0] - 1) // count if count else 0


@register_fake("fused_embedding_bag_sparse_gradients", follows="grad")
def _(grad: Tensor, features: Tensor, indices: Tensor, offsets: Tensor, *call: Any) -> list[Tensor]:
    found = []
    for dim, dtype in zip(call[2], call[3], strict=True):
        count = _rows_found(indices)
        found += [grad.new_empty((count,), dtype=torch.int64)]
        found += [grad.new_empty((count, dim), dtype=DTYPES[dtype])]
    return found


for _operator in (
    _dense_weight_grad,
    _sparse_weight_grad,
    _sparse_weight_grads,
    _sample_weights_grad,
    find_winners,
):
    register(_operator._schema.name.removeprefix("recfuse::"))
