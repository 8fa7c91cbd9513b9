"""The gradient operators (`recfuse::fused_embedding_bag_*`) as backward passes call them, and their shapes.

Both operators share them, because `embedding_bag` is a fused call of a single feature. They are operators
themselves, so that the compiler does not trace into them. They have no gradients, and raise. Winners, the
rows of the maxima of a bag of mode max, come from the forward pass, so that the backward pass needs no
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._library.fake_impl import allocate_size
from torch.autograd import forward_ad

from recfuse._codes import DTYPES
from recfuse._storage import is_readable
from recfuse.errors import ArgumentValueError
from recfuse.ops.autograd import register
from recfuse.ops.library import below_autograd, register_fake

_ops = torch.ops.recfuse
_dense_weight_grad = _ops.fused_embedding_bag_backward.default
_sparse_weight_grad = _ops.fused_embedding_bag_sparse_backward.default
_sparse_weight_grads = _ops.fused_embedding_bag_sparse_gradients.default
_sample_weights_grad = _ops.fused_embedding_bag_sample_weights_backward.default
find_winners = _ops.fused_embedding_bag_winners.default

_FEW_ELEMENTS = 3 << 14
"""The size of a sparse gradient of a single table up to which a mark costs more than it saves optimizers."""


Form: TypeAlias = tuple[int, int, int, int]
"""A weight of a call, a matrix with the rows of tables: its number in the call, rows, dim, and the code of
its dtype, because the type of a ScalarType in a Python operator depends on torch's version.
"""
OutputGrad: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool]
"""The gradient of a call's output ``[bags, columns]``; features, indices and offsets of the call, whose last
offset may be missing on the CPU for a single feature; sample weights, winners ``[bags, columns]``, and
scale_grad_by_freq.
"""


def call_gradient(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Call a gradient operator from backward; through its autograd kernel only if that may have to raise."""
    if (
        torch.is_grad_enabled()
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    ):
        return operator(*arguments)
    with below_autograd():
        return operator(*arguments)


def dense_grad(output: OutputGrad, weight: Form) -> Tensor:
    """Return the gradient of a weight as a dense tensor."""
    return call_gradient(_dense_weight_grad, *output[:4], *weight, *output[4:])


def sparse_grads(output: OutputGrad, weights: Sequence[Form]) -> list[tuple[Tensor, Tensor]]:
    """Return gradients of the weights of a call as rows and values.

    Rows are int64 ``[rows]`` and ascend; values are ``[rows, dim]``. A GPU sorts the lookups of all weights
    together. In a traced program each gradient is a separate operator, whose output sizes depend on the
    contents.
    """
    grad, *_, by_freq = output
    if by_freq:
        raise ArgumentValueError(
            "recfuse.embedding_bag: scale_grad_by_freq is True with sparse, which has no such gradient. "
            "Pass sparse=False."
        )
    where, factors = output[:4], output[4:6]
    if len(weights) < 2 or not is_readable(grad):
        return [call_gradient(_sparse_weight_grad, *where, *weight, *factors) for weight in weights]
    forms = map(list, zip(*weights, strict=True))
    gradients = call_gradient(_sparse_weight_grads, *where, *forms, *factors)
    return list(zip(gradients[::2], gradients[1::2], strict=True))


def coalesced(weight: Form, rows: Tensor, values: Tensor) -> Tensor:
    """Return a gradient of :func:`sparse_grads` as a COO tensor."""
    return torch.sparse_coo_tensor(rows[None], values, weight[1:3], check_invariants=False, is_coalesced=True)


class Used(NamedTuple):
    """The features and matrices of a call that have gradients."""

    features: Tensor  # features without a gradient are in no matrix
    groups: Container[int]  # matrices with such a feature


def used_of(ctx: Any, features: Tensor, grad: Tensor) -> Used | None:
    """Return the features and matrices with gradients, which a packed module's hook has stored in the node.

    Lookups of other features are in no gradient and in no update. None means all features.
    """
    attributes = vars(ctx)
    mask = attributes.get("used_features")
    return None if mask is None else Used(mask(features, grad), attributes["used_groups"])


def are_few(elements: int) -> bool:
    """Return whether a sparse gradient of a single table is so small that a mark costs more than it saves."""
    return elements <= _FEW_ELEMENTS


def mark_later(ctx: Any, rows: Tensor, values: Tensor, argument: int) -> None:
    """Mark ``.grad`` of a Parameter, the tensor ``argument`` of the Function, as coalesced, after this pass.

    The mark must follow all other callbacks of this backward pass. DistributedDataParallel waits in a
    callback for threads that coalesce the gradient. A mark at that moment makes a thread fail, and other
    processes wait forever.
    """
    nodes = getattr(ctx, "next_functions", None)
    leaf = None if nodes is None else getattr(nodes[argument][0], "variable", None)  # of an AccumulateGrad
    if leaf is not None:
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(partial(queue, partial(_mark_coalesced, leaf, rows, values)))


def _mark_coalesced(leaf: Tensor, rows: Tensor, values: Tensor) -> None:
    """Mark `leaf.grad` as coalesced at the end of backward, if it is the gradient of these rows and values.

    torch moves a sparse gradient there without a copy, as a new tensor without the mark.
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
    """Return the gradient of the per-sample weights; `lookups` are features, indices and offsets."""
    return call_gradient(_sample_weights_grad, grad, weights, *lookups).to(dtype)


@register_fake("fused_embedding_bag_backward", follows="grad")
def _(grad: Tensor, features: Tensor, indices: Tensor, offsets: Tensor, *call: Any) -> Tensor:
    _, rows, dim, dtype, *_ = call
    return grad.new_empty((rows, dim), dtype=DTYPES[dtype])


@register_fake("fused_embedding_bag_sparse_backward", follows="grad")
def _(grad: Tensor, features: Tensor, indices: Tensor, offsets: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    _, _, dim, dtype, *_ = call
    count = _rows_found(indices)
    return grad.new_empty((count,), dtype=torch.int64), grad.new_empty((count, dim), dtype=DTYPES[dtype])


def _rows_found(indices: Tensor) -> Any:
    """Return a size that depends on the contents; outside of a trace, the maximum."""
    try:
        shape_env = torch.library.get_ctx()._shape_env
    except RuntimeError:  # a meta tensor
        shape_env = None
    if shape_env is None:
        return indices.shape[0]
    # new_dynamic_size() of the context refuses unless dynamo's capture_dynamic_output_shape_ops is set; a
    # gradient may have such a size in any case, because no code branches on it.
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
    """Return the number of bags of each feature."""
    count = features.shape[0]
    return (offsets.shape[0] - 1) // count if count else 0


@register_fake("fused_embedding_bag_sparse_gradients", follows="grad")
def _(grad: Tensor, features: Tensor, indices: Tensor, offsets: Tensor, *call: Any) -> list[Tensor]:
    gradients = []
    for dim, dtype in zip(call[2], call[3], strict=True):
        count = _rows_found(indices)
        gradients += [grad.new_empty((count,), dtype=torch.int64)]
        gradients += [grad.new_empty((count, dim), dtype=DTYPES[dtype])]
    return gradients


for _operator in (
    _dense_weight_grad,
    _sparse_weight_grad,
    _sparse_weight_grads,
    _sample_weights_grad,
    find_winners,
):
    register(_operator._schema.name.removeprefix("recfuse::"))
