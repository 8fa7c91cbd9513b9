"""The autograd Function and kernel of ``fused_embedding_bag_quantized``: gradients of per-sample weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recfuse.ops.autograd import apply, eager_apply, refused_jvp, register
from recfuse.ops.gradients import call_gradient
from recfuse.ops.library import below_autograd, call_below_autograd, needs_derivatives, register_fake

_NAME = "fused_embedding_bag_quantized"
_operator = torch.ops.recfuse.fused_embedding_bag_quantized.default
_gradient = torch.ops.recfuse.fused_embedding_bag_quantized_sample_weights_backward.default
_names = [argument.name for argument in _operator._schema.arguments]
_defaults = tuple(argument.default_value for argument in _operator._schema.arguments)
_SAMPLE_WEIGHTS, _STORED = _names.index("per_sample_weights"), _names.index("stored")


class PooledRows(torch.autograd.Function):
    """A call of ``operator`` with all its arguments, ``call``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, operator: Callable[..., Tensor], call: tuple[Any, ...], sample_weights: Tensor
    ) -> Tensor:
        """Call the operator."""
        weights, parameters, *lookups = call[:5]
        ctx.dtype = sample_weights.dtype
        ctx.save_for_backward(*lookups, call[_STORED], *weights, *parameters)
        return operator(*call)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradient of the per-sample weights."""
        features, indices, offsets, stored, *tables = ctx.saved_tensors
        weights, parameters = tables[: len(tables) // 2], tables[len(tables) // 2 :]
        gradient = call_gradient(_gradient, grad, weights, parameters, features, indices, offsets, stored)
        return None, None, gradient.to(ctx.dtype)

    jvp = refused_jvp(_NAME)


pooled_rows = eager_apply(PooledRows)


def refuse_table_gradients(tensors: Iterable[Tensor]) -> None:
    """Raise NotImplementedError if a weight, or its parameters, requires a gradient."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise NotImplementedError(
            f"recfuse.{_NAME}: a weight or its parameters has requires_grad, but only per_sample_weights has "
            "a gradient. Pass tensor.detach()."
        )


def _differentiate(*call: Any) -> Any:
    """Call the operator for the compiler and torch.func."""
    complete = *call, *_defaults[len(call) :]
    refuse_table_gradients((*complete[0], *complete[1]))
    sample_weights = complete[_SAMPLE_WEIGHTS]
    if sample_weights is None or not needs_derivatives((sample_weights,)):
        with below_autograd():
            return _operator(*call)
    return apply(PooledRows, partial(call_below_autograd, _operator), complete, sample_weights)


@register_fake(_gradient._schema.name.removeprefix("recfuse::"), follows="grad")
def _shape(grad: Tensor, weights: Any, parameters: Any, features: Tensor, indices: Tensor, *_: Any) -> Tensor:
    return grad.new_empty((indices.shape[0],), dtype=torch.float32)


register(_NAME, _differentiate)
register(_gradient._schema.name.removeprefix("recfuse::"))
