"""The gradients of ``ikbo_linear`` and ``ikbo_linear_chain``: one Function and two autograd kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recfuse.ops.autograd import apply, refused_jvp, register
from recfuse.ops.ikbo.reads import good_parents, has_children
from recfuse.ops.library import below_autograd, call_below_autograd, needs_derivatives

_linear = torch.ops.recfuse.ikbo_linear.default
_chain = torch.ops.recfuse.ikbo_linear_chain.default
_LINEAR_TENSORS = 6
_ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class IKBOLinear(torch.autograd.Function):
    """Both operators, without an activation, with their gradients.

    ``tensors``: weights, inputs and maps of `levels` levels, and the bias; each an argument, since only these
    have gradients.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, chain: bool, levels: int, options: dict[str, str], *tensors: Tensor | None
    ) -> Tensor:
        """Calls the operator; keeps the factors of what needs a gradient."""
        *rest, bias = tensors
        lists = rest[:levels], rest[levels : 2 * levels], rest[2 * levels :]
        operator, given = (_chain, lists) if chain else (_linear, rest)
        output = call_below_autograd(operator, *given, bias, **options)
        needs = ctx.needs_input_grad[3:]
        kept: list[Tensor | None] = list(tensors[:-1])
        for level in range(levels):
            if not needs[levels + level]:
                kept[level] = None
            if not needs[level]:
                kept[levels + level] = None
        ctx.save_for_backward(*kept)
        ctx.levels, ctx.checked = levels, options.get("bounds_check", "on") == "on"
        ctx.items = [given.shape[0] for given in lists[1]]
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Gradients of weights, inputs and bias, from the last level to the first."""
        levels, needs = ctx.levels, ctx.needs_input_grad[3:]
        saved = ctx.saved_tensors
        weights, inputs, maps = saved[:levels], saved[levels : 2 * levels], saved[2 * levels :]
        grads: list[Tensor | None] = [None] * len(needs)
        if needs[-1]:
            grads[-1] = grad.sum((0, 2) if grad.dim() == 3 else 0)
        dtype, total = grad.dtype, grad
        is_read: Tensor | None = None  # bool [items] of the level; None: every item has a gradient
        for level in reversed(range(levels)):
            of_products = total.to(dtype)
            if needs[level]:
                grads[level] = _weight_grad(of_products, inputs[level], is_read)
            if needs[levels + level]:
                grads[levels + level] = _input_grad(of_products, weights[level])
            if not any(needs[:level]) and not any(needs[levels : levels + level]):
                break
            items = ctx.items[level - 1]
            parent = maps[level - 1].long()
            if ctx.checked and not parent.is_cpu:  # where the forward pass does not raise what it finds
                parent = good_parents(parent, items)
            if any(needs[:level]):
                is_read = has_children(parent, items, is_read)
            total = _sum_of_children(total, parent, items)
        return None, None, None, *grads

    jvp = refused_jvp("ikbo_linear")


def _weight_grad(grad: Tensor, given: Tensor, is_read: Tensor | None) -> Tensor:
    """[M, K] from [items, M, N] and [items, K, N], or without N, of the items that are read."""
    if is_read is not None:
        given = torch.where(is_read.view(-1, *(1,) * (given.dim() - 1)), given, 0)
    if grad.dim() == 2:
        return grad.t() @ given
    return torch.tensordot(grad, given, dims=([0, 2], [0, 2]))


def _input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """[items, K, N] from [items, M, N] and [M, K], or without N."""
    if grad.dim() == 2:
        return grad @ weight
    # Not matmul: beside a weight that requires a gradient it copies `grad` transposed.
    return torch.bmm(weight.t().expand(grad.shape[0], -1, -1), grad)


def _sum_of_children(grad: Tensor, parent: Tensor, items: int) -> Tensor:
    """[items, ...] sums of grad [children, ...] over the children of each item, in float32 or better."""
    if grad.dtype in (torch.float16, torch.bfloat16):
        grad = grad.float()
    return grad.new_zeros((items + 1, *grad.shape[1:])).index_add(0, parent, grad)[:items]


def _differentiable(
    chain: bool, levels: int, tensors: Sequence[Tensor | None], options: dict[str, str]
) -> Any:
    """A call of the Function, and torch's activation."""
    options = dict(options)
    activate = _ACTIVATIONS.get(options.get("activation", "none"))
    if activate is None:  # none, or one that the operator refuses
        return apply(IKBOLinear, chain, levels, options, *tensors)
    options.pop("activation")
    return activate(apply(IKBOLinear, chain, levels, options, *tensors))


def call_linear(*tensors: Tensor | None, **options: str) -> Any:
    """`ikbo_linear`, with gradients where they are wanted: the autograd kernel of the operator."""
    tensors = (*tensors, None)[:_LINEAR_TENSORS]  # the dispatcher leaves out a bias that is None
    if needs_derivatives(tensors):
        return _differentiable(False, 2, tensors, options)
    with below_autograd():
        return _linear(*tensors, **options)


def call_chain(
    weights: Sequence[Tensor],
    inputs: Sequence[Tensor],
    maps: Sequence[Tensor],
    bias: Tensor | None = None,
    **options: str,
) -> Any:
    """The same for `ikbo_linear_chain`."""
    tensors = *weights, *inputs, *maps, bias
    if needs_derivatives(tensors) and 2 <= len(weights) == len(inputs) == len(maps) + 1:
        return _differentiable(True, len(weights), tensors, options)
    with below_autograd():
        return _chain(weights, inputs, maps, bias, **options)


register("ikbo_linear", call_linear)
register("ikbo_linear_chain", call_chain)
