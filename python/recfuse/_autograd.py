"""What the compiler and autograd need to know of ``embedding_bag``: its shapes, and its gradients.

Importing this module registers both. The gradients are operators themselves (``recfuse::*_backward``), so
that the compiler takes them as they are. Sparse gradients leave them as rows and values and are put together
outside.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recfuse import _backward, _backward_cuda
from recfuse._backward import POOLING, sparse_grad

_ops = torch.ops.recfuse

# Kept alive for the life of the process: dropping it would take the operators away.
library = torch.library.Library("recfuse", "FRAGMENT")
library.define(
    "embedding_bag_backward(Tensor grad, Tensor? weight, SymInt rows, Tensor indices, Tensor offsets, "
    "str mode, Tensor? per_sample_weights, bool include_last_offset, int padding_idx, bool "
    "scale_grad_by_freq) "
    "-> Tensor"
)
library.define(
    "embedding_bag_sparse_backward(Tensor grad, SymInt rows, Tensor indices, Tensor offsets, str mode, "
    "Tensor? per_sample_weights, bool include_last_offset, int padding_idx, bool scale_grad_by_freq) "
    "-> (Tensor, Tensor)"
)
library.define(
    "embedding_bag_sample_weights_backward(Tensor grad, Tensor weight, Tensor indices, Tensor offsets, "
    "bool include_last_offset, int padding_idx) -> Tensor"
)


def wanted(ctx: Any, argument: int) -> bool:
    """Whether an argument needs a gradient. The dispatcher leaves out trailing arguments at their
    defaults.
    """
    return argument < len(ctx.needs_input_grad) and bool(ctx.needs_input_grad[argument])


def as_given(ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients of the arguments that the dispatcher did not leave out."""
    return grads[: len(ctx.needs_input_grad)]


@torch.library.register_fake("recfuse::embedding_bag")
def _embedding_bag_fake(
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
    torch._check(
        offsets.dim() == 1 and indices.dim() == 1,
        lambda: (
            f"recfuse.embedding_bag: indices and offsets have {indices.dim()} and {offsets.dim()} "
            "dimensions, must have 1"
        ),
    )
    bags = offsets.shape[0] - int(include_last_offset)
    return weight.new_empty((bags, weight.shape[1]))


def _embedding_bag_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, indices, offsets, mode, sample_weights, include_last_offset, padding_idx, by_freq, sparse, *_ = (
        inputs
    )
    kept = weight if mode == "max" or sample_weights is not None else None
    ctx.save_for_backward(kept, indices, offsets, sample_weights)
    ctx.rows = weight.shape[0]
    ctx.options = mode, include_last_offset, padding_idx, by_freq, sparse


def _embedding_bag_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, indices, offsets, sample_weights = ctx.saved_tensors
    mode, include_last_offset, padding_idx, by_freq, sparse = ctx.options
    weight_grad = sample_weights_grad = None
    if wanted(ctx, 0) and sparse:
        rows, values = _ops.embedding_bag_sparse_backward(
            grad, ctx.rows, indices, offsets, mode, sample_weights, include_last_offset, padding_idx, by_freq
        )
        weight_grad = sparse_grad(rows, values, (ctx.rows, grad.shape[1]))
    elif wanted(ctx, 0):
        weight_grad = _ops.embedding_bag_backward(
            grad,
            weight if mode == "max" else None,
            ctx.rows,
            indices,
            offsets,
            mode,
            sample_weights,
            include_last_offset,
            padding_idx,
            by_freq,
        )
    if wanted(ctx, 4):
        sample_weights_grad = _ops.embedding_bag_sample_weights_backward(
            grad, weight, indices, offsets, include_last_offset, padding_idx
        ).to(sample_weights.dtype)
    return as_given(ctx, (weight_grad, None, None, None, sample_weights_grad, *[None] * 7))


def kernel(operator: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function for CPU and CUDA tensors."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for key in ("CPU", "CUDA"):
            library.impl(operator, function, key)
        return function

    return register


def _gradients(grad: Tensor) -> ModuleType:
    """The functions for the device that a gradient is on."""
    return _backward_cuda if grad.is_cuda else _backward


@kernel("embedding_bag_backward")
def _(
    grad: Tensor,
    weight: Tensor | None,
    rows: int,
    indices: Tensor,
    offsets: Tensor,
    mode: str,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    return _gradients(grad).dense_weight_grad(
        grad,
        weight,
        rows,
        indices,
        offsets,
        per_sample_weights,
        POOLING[mode],
        include_last_offset,
        padding_idx,
        scale_grad_by_freq,
    )


@torch.library.register_fake("recfuse::embedding_bag_backward")
def _(grad: Tensor, weight: Tensor | None, rows: int, *_: Any) -> Tensor:
    return grad.new_empty((rows, grad.shape[1]))


@kernel("embedding_bag_sparse_backward")
def _(
    grad: Tensor,
    rows: int,
    indices: Tensor,
    offsets: Tensor,
    mode: str,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> tuple[Tensor, Tensor]:
    found = _gradients(grad).sparse_weight_grad(
        grad,
        rows,
        indices,
        offsets,
        per_sample_weights,
        POOLING[mode],
        include_last_offset,
        padding_idx,
        scale_grad_by_freq,
    )
    return found._indices()[0].clone(), found._values()


@torch.library.register_fake("recfuse::embedding_bag_sparse_backward")
def _(grad: Tensor, rows: int, indices: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return indices.new_empty((count,), dtype=torch.int64), grad.new_empty((count, grad.shape[1]))


@kernel("embedding_bag_sample_weights_backward")
def _(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    include_last_offset: bool,
    padding_idx: int,
) -> Tensor:
    return _gradients(grad).sample_weights_grad(
        grad, weight, indices, offsets, include_last_offset, padding_idx
    )


@torch.library.register_fake("recfuse::embedding_bag_sample_weights_backward")
def _(grad: Tensor, weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
    return grad.new_empty((indices.shape[0],))


class EmbeddingBagFunction(torch.autograd.Function):
    """The operator with its gradients, as Python calls it: arguments as in its schema.

    What is registered below serves the compiler and calls of the bare operator; its wrappers cost several
    times what a small bag does.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Pools, and keeps what the gradients need."""
        with torch._C._AutoDispatchBelowAutograd():
            output = _ops.embedding_bag.default(*arguments)
        _embedding_bag_setup(ctx, arguments, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of weight and of per_sample_weights."""
        weight, indices, offsets, sample_weights = ctx.saved_tensors
        mode, include_last_offset, padding_idx, by_freq, sparse = ctx.options
        gradients = _gradients(grad)
        common = indices, offsets, sample_weights, POOLING[mode], include_last_offset, padding_idx, by_freq
        weight_grad = sample_weights_grad = None
        if wanted(ctx, 0) and sparse:
            weight_grad = gradients.sparse_weight_grad(grad, ctx.rows, *common)
        elif wanted(ctx, 0):
            kept = weight if mode == "max" else None
            weight_grad = gradients.dense_weight_grad(grad, kept, ctx.rows, *common)
        if wanted(ctx, 4):
            sample_weights_grad = gradients.sample_weights_grad(
                grad, weight, indices, offsets, include_last_offset, padding_idx
            ).to(sample_weights.dtype)
        return as_given(ctx, (weight_grad, None, None, None, sample_weights_grad, *[None] * 7))


torch.library.register_autograd(
    "recfuse::embedding_bag", _embedding_bag_backward, setup_context=_embedding_bag_setup
)
