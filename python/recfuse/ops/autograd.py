"""Autograd kernels and vmap rules of operators, also for torch.func.

Eager calls apply an `autograd.Function` themselves. The same Function is the operator's autograd kernel, for
the compiler, exported programs and direct calls of an operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.utils import _pytree as pytree

from recfuse.ops.library import below_autograd, call_below_autograd, library, needs_derivatives


def refuse_jvp(operator: str) -> NoReturn:
    """Raise NotImplementedError for forward-mode derivatives."""
    raise NotImplementedError(
        f"recfuse.{operator}: forward-mode derivatives (torch.autograd.forward_ad, torch.func.jvp, jacfwd, "
        "hessian) are not implemented. Use reverse mode, such as backward(), torch.func.grad, vjp or "
        "jacrev."
    )


def refused_jvp(operator: str) -> Any:
    """Return the ``jvp`` of a Function of the operator, which raises."""
    return staticmethod(lambda *_: refuse_jvp(operator))


def eager_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` for calls outside of torch.func's transforms.

    torch's own ``apply`` looks up signatures, which takes longer than a small bag.
    """
    apply_in_c: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply_in_c


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call ``function.apply`` at the current level of torch.func's transforms.

    torch's own ``apply`` would begin again at the outermost transform, but the dispatcher calls this function
    level by level.
    """
    if not torch._C._are_functorch_transforms_active():
        return eager_apply(function)(*arguments)
    with enable_single_level_autograd_function():
        return _single_level(function).apply(*arguments)


@functools.cache
def _single_level(function: type[torch.autograd.Function]) -> Any:
    """Return a copy of a Function for a single level of torch.func's transforms.

    Since torch 2.14, every `apply` of an `autograd.Function` begins at the outermost transform.
    """
    methods = {name: value for name, value in vars(function).items() if isinstance(value, staticmethod)}
    return type(function.__name__, (torch.autograd.function._SingleLevelFunction,), methods)


class _Once(torch.autograd.Function):
    """A gradient operator, which refuses further derivatives. Arguments are flat, in pytree's order."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, operator: Callable[..., Any], refusal: str, tree: Any, *flat: Any
    ) -> Any:
        """Call the operator."""
        ctx.refusal = refusal
        return call_below_autograd(operator, *pytree.tree_unflatten(flat, tree))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError(ctx.refusal)

    jvp = refused_jvp("embedding_bag")


_SECOND = (
    "recfuse: second derivatives of embedding_bag, fused_embedding_bag, fused_embedding and ikbo_attention "
    "are not implemented"
)


def once_differentiable(operator: Callable[..., Any], refusal: str = _SECOND) -> Callable[..., Any]:
    """Return the autograd kernel of an operator without a gradient.

    Its ``backward`` raises NotImplementedError with the text ``refusal``.
    """

    def autograd(*arguments: Any) -> Any:
        flat, tree = pytree.tree_flatten(arguments)
        if needs_derivatives([value for value in flat if isinstance(value, Tensor)]):
            return apply(_Once, operator, refusal, tree, *flat)
        with below_autograd():
            return operator(*arguments)

    return autograd


def register(name: str, autograd: Callable[..., Any] | None = None) -> None:
    """Register an operator's autograd kernel (None: a kernel that refuses derivatives) and its vmap.

    The vmap makes calls in sequence, as torch does for its own operators.
    """
    operator = getattr(torch.ops.recfuse, name).default
    library.impl(name, autograd or once_differentiable(operator), "Autograd")

    def batched(info: Any, in_dims: tuple[Any, ...], *arguments: Any, **options: Any) -> Any:
        if info.batch_size == 0:
            raise NotImplementedError(f"{operator} has no vmap over a dimension of size 0")
        results = [
            operator(*_sliced(arguments, in_dims, number), **options) for number in range(info.batch_size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    torch.library.register_vmap(f"recfuse::{name}", batched, lib=library)


def _sliced(value: Any, dim: Any, number: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_sliced(*item, number) for item in zip(value, dim, strict=True)]
    return value if dim is None else value.select(dim, number)
