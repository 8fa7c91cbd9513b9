"""The gradients of ``ikbo_linear`` and ``ikbo_linear_chain``: a Function and two autograd kernels."""

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

    ``tensors`` are weights, inputs and maps of `levels` levels, and the bias. Each tensor is an argument,
    because only arguments have gradients.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, chain: bool, levels: int, options: dict[str, str], *tensors: Tensor | None
    ) -> Tensor:
        """Call the operator, and save the factors of the required gradients."""
        *operands, bias = tensors
        lists = operands[:levels], operands[levels : 2 * levels], operands[2 * levels :]
        operator, call = (_chain, lists) if chain else (_linear, operands)
        output = call_below_autograd(operator, *call, bias, **options)
        needs = ctx.needs_input_grad[3:]
        saved: list[Tensor | None] = list(tensors[:-1])
        for level in range(levels):
            if not needs[levels + level]:
                saved[level] = None
            if not needs[level]:
                saved[levels + level] = None
        ctx.save_for_backward(*saved)
        ctx.levels, ctx.checked = levels, options.get("bounds_check", "on") == "on"
        ctx.items = [item.shape[0] for item in lists[1]]
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return gradients of weights, inputs and bias, computed from the last level to the first."""
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
            if ctx.checked and not parent.is_cpu:  # the forward pass does not raise bad elements there
                parent = good_parents(parent, items)
            if any(needs[:level]):
                is_read = has_children(parent, items, is_read)
            total = _sum_of_children(total, parent, items)
        return None, None, None, *grads

    jvp = refused_jvp("ikbo_linear")


def _weight_grad(grad: Tensor, inputs: Tensor, is_read: Tensor | None) -> Tensor:
    """Return [M, K] from [items, M, N] and [items, K, N], or without N, summed over items that are read."""
    if is_read is not None:
        inputs = torch.where(is_read.view(-1, *(1,) * (inputs.dim() - 1)), inputs, 0)
    if grad.dim() == 2:
        return grad.t() @ inputs
    return torch.tensordot(grad, inputs, dims=([0, 2], [0, 2]))


def _input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """Return [items, K, N] from [items, M, N] and [M, K], or without N."""
    if grad.dim() == 2:
        return grad @ weight
    # Not matmul, which copies `grad` transposed if the weight requires a gradient.
    return torch.bmm(weight.t().expand(grad.shape[0], -1, -1), grad)


def _sum_of_children(grad: Tensor, parent: Tensor, items: int) -> Tensor:
    """Sum grad [children, ...] over the children of each item, to [items, ...], in float32 or better."""
    if grad.dtype in (torch.float16, torch.bfloat16):
        grad = grad.float()
    return grad.new_zeros((items + 1, *grad.shape[1:])).index_add(0, parent, grad)[:items]


def _differentiable(
    chain: bool, levels: int, tensors: Sequence[Tensor | None], options: dict[str, str]
) -> Any:
    """Call the Function, then torch's activation."""
    options = dict(options)
    activate = _ACTIVATIONS.get(options.get("activation", "none"))
    if activate is None:  # "none", or an activation that the operator refuses
        return apply(IKBOLinear, chain, levels, options, *tensors)
    options.pop("activation")
    return activate(apply(IKBOLinear, chain, levels, options, *tensors))


def call_linear(*tensors: Tensor | None, **options: str) -> Any:
    """Call `ikbo_linear`, with gradients if required: the autograd kernel of the operator."""
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
    """Call `ikbo_linear_chain`, with gradients if required: the autograd kernel of the operator."""
    tensors = *weights, *inputs, *maps, bias
    if needs_derivatives(tensors) and 2 <= len(weights) == len(inputs) == len(maps) + 1:
        return _differentiable(True, len(weights), tensors, options)
    with below_autograd():
        return _chain(weights, inputs, maps, bias, **options)


register("ikbo_linear", call_linear)
register("ikbo_linear_chain", call_chain)
