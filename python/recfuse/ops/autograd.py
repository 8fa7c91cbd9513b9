"""What makes operators differentiable, and known to torch.func.

Eager calls apply an `autograd.Function` themselves; the same Function is the operator's autograd kernel,
which the compiler, exported programs and calls of a bare operator come through.
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
    """Raises NotImplementedError."""
    raise NotImplementedError(
        f"recfuse.{operator}: forward-mode derivatives (torch.autograd.forward_ad, torch.func.jvp, "
        "jacfwd, hessian) are not implemented; use reverse mode: backward(), torch.func.grad, vjp or "
        "jacrev"
    )


def refused_jvp(operator: str) -> Any:
    """The ``jvp`` of a Function of the operator."""
    return staticmethod(lambda *_: refuse_jvp(operator))


def eager_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` outside of torch.func's transforms. Of itself it looks up signatures, which costs
    more than a small bag.
    """
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply``, which of itself would begin again at the outermost of torch.func's transforms: the
    dispatcher brings them here level by level.
    """
    if not torch._C._are_functorch_transforms_active():
        return eager_apply(function)(*arguments)
    with enable_single_level_autograd_function():
        return _single_level(function).apply(*arguments)


@functools.cache
def _single_level(function: type[torch.autograd.Function]) -> Any:
    """The same for one level of torch.func's transforms: since torch 2.14 an `autograd.Function` itself
    begins at the outermost, whichever `apply` is called.
    """
    own = {name: value for name, value in vars(function).items() if isinstance(value, staticmethod)}
    return type(function.__name__, (torch.autograd.function._SingleLevelFunction,), own)


class _Once(torch.autograd.Function):
    """A gradient operator, which refuses derivatives of its own. Arguments flat, as pytree has them."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, operator: Callable[..., Any], refusal: str, tree: Any, *flat: Any
    ) -> Any:
        """Calls the operator."""
        ctx.refusal = refusal
        return call_below_autograd(operator, *pytree.tree_unflatten(flat, tree))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        """Refuses."""
        raise NotImplementedError(ctx.refusal)

    jvp = refused_jvp("embedding_bag")


_SECOND = (
    "recfuse: second derivatives of embedding_bag, fused_embedding_bag and ikbo_attention are not implemented"
)


def once_differentiable(operator: Callable[..., Any], refusal: str = _SECOND) -> Callable[..., Any]:
    """The autograd kernel of an operator that has no gradient; ``refusal`` says so in ``backward``."""

    def autograd(*arguments: Any) -> Any:
        flat, tree = pytree.tree_flatten(arguments)
        if needs_derivatives([value for value in flat if isinstance(value, Tensor)]):
            return apply(_Once, operator, refusal, tree, *flat)
        with below_autograd():
            return operator(*arguments)

    return autograd


def register(name: str, autograd: Callable[..., Any] | None = None) -> None:
    """Gives an operator its autograd kernel (None: it refuses derivatives), and vmap: one call after another,
    as torch does for its own.
    """
    operator = getattr(torch.ops.recfuse, name).default
    library.impl(name, autograd or once_differentiable(operator), "Autograd")

    def batched(info: Any, in_dims: tuple[Any, ...], *arguments: Any, **options: Any) -> Any:
        if info.batch_size == 0:
            raise NotImplementedError(f"{operator} has no vmap over a dimension of size 0")
        found = [
            operator(*_sliced(arguments, in_dims, number), **options) for number in range(info.batch_size)
        ]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * len(found[0])

    torch.library.register_vmap(f"recfuse::{name}", batched, lib=library)


def _sliced(value: Any, dim: Any, number: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_sliced(*item, number) for item in zip(value, dim, strict=True)]
    return value if dim is None else value.select(dim, number)
