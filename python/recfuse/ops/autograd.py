"""Gradients of the operators, and what torch.func needs to know of them; importing this registers both.

There is one gradient for both operators: `embedding_bag` is a fused
call of one feature. Eager calls apply an `autograd.Function` themselves; the same Function is the operators'
autograd kernel, which the compiler, exported programs and calls of a bare operator come through.

The gradients are operators themselves (`recfuse::fused_embedding_bag_*`), so that the compiler takes them as
they are: in C on the CPU, in `gradients` on CUDA. They have no gradients, and say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from recfuse._codes import DTYPES, MAX, MODES
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.ops import gradients
from recfuse.ops.winners import bag_winners, below, ends_of, feature_of, library, traced

_ops = torch.ops.recfuse
_below_autograd = torch._C._AutoDispatchBelowAutograd

_embedding_bag = _ops.embedding_bag.default
_fused_embedding_bag = _ops.fused_embedding_bag.default
_weight_grad = _ops.fused_embedding_bag_backward.default
_sparse_weight_grad = _ops.fused_embedding_bag_sparse_backward.default
_winners = _ops.fused_embedding_bag_winners.default
_embedding_bag_with_winners = _ops._embedding_bag_with_winners.default
_fused_embedding_bag_with_winners = _ops._fused_embedding_bag_with_winners.default
_sample_weights_grad = _ops.fused_embedding_bag_sample_weights_backward.default
_GRADIENTS = {
    "fused_embedding_bag_backward": gradients.weight_grad,
    "fused_embedding_bag_sparse_backward": gradients.sparse_weight_grad,
    "fused_embedding_bag_winners": gradients.winners,
    "fused_embedding_bag_sample_weights_backward": gradients.sample_weights_grad,
}


def readable(tensor: Tensor) -> bool:
    """Whether the contents of a tensor are there to be looked at: not while a program is traced."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or tensor.is_meta
        or type(tensor) not in (Tensor, torch.nn.Parameter)
    )


def needs_derivatives(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a call must go through a Function: something may need a derivative, or refuse to have one."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def no_forward_mode(operator: str) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError(
        f"recfuse.{operator}: forward-mode derivatives (torch.autograd.forward_ad, torch.func.jvp, jacfwd, "
        "hessian) are not implemented; use reverse mode: backward(), torch.func.grad, vjp or jacrev"
    )


def dtype_code(tensor: Tensor, operator: str, argument: str) -> int:
    """The number of a dtype; the compiler asks for it before the operator has looked at its arguments."""
    if tensor.dtype not in DTYPES:
        name = str(tensor.dtype).removeprefix("torch.")
        raise ArgumentTypeError(
            f"recfuse.{operator}: {argument} is {name}, must be float32, float16 or bfloat16"
        )
    return DTYPES.index(tensor.dtype)


# ---- torch.func.vmap: one call after another, as torch does for its own


def _one_by_one(operator: Callable[..., Any]) -> Callable[..., Any]:
    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        if info.batch_size == 0:
            raise NotImplementedError(f"{operator} has no vmap over a dimension of size 0")
        found = [
            operator(*[_one_of(value, dim, number) for value, dim in zip(arguments, in_dims, strict=True)])
            for number in range(info.batch_size)
        ]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * len(found[0])

    return rule


def _one_of(value: Any, dim: Any, number: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_one_of(*one, number) for one in zip(value, dim, strict=True)]
    return value if dim is None else value.select(dim, number)


# ---- the gradients


def _gradient(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a gradient operator from backward; its own autograd kernel only where it may have to refuse."""
    if (
        torch.is_grad_enabled()
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    ):
        return operator(*arguments)
    with _below_autograd():
        return operator(*arguments)


def _group_grad(
    grad: Tensor,
    lookups: tuple[Tensor, Tensor, Tensor],
    group: int,
    shape: tuple[int, int],
    dtype: int,
    sample_weights: Tensor | None,
    winners: Tensor | None,
    by_freq: bool,
    sparse: bool,
    node: Any,
) -> Tensor:
    """Gradient of a group, dense or coalesced COO. ``lookups``: features, indices, offsets; ``node``: where
    the gradient goes, or None.
    """
    if not sparse:
        return _gradient(_weight_grad, grad, *lookups, group, *shape, dtype, sample_weights, winners, by_freq)
    if by_freq:
        raise ArgumentValueError(
            "recfuse.embedding_bag: scale_grad_by_freq is True with sparse, which has no such gradient; pass "
            "sparse=False"
        )
    rows, values = _gradient(
        _sparse_weight_grad, grad, *lookups, group, *shape, dtype, sample_weights, winners, by_freq
    )
    found = torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False, is_coalesced=True)
    if node is not None and readable(values):
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad
        if leaf is not None:
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: _say_coalesced(leaf, rows, values)
            )
    return found


def _say_coalesced(leaf: Tensor, rows: Tensor, values: Tensor) -> None:
    """Says so of `leaf.grad` at the end of backward, if it is the gradient of these rows and values: torch
    brings a sparse gradient there without a copy, as a new tensor that does not know that it is coalesced.
    """
    grad = leaf.grad
    if (
        grad is not None
        and grad.layout is torch.sparse_coo
        and not grad.is_coalesced()
        and grad._nnz() == rows.shape[0]
        and grad._indices().data_ptr() == rows.data_ptr()
        and grad._values().data_ptr() == values.data_ptr()
    ):
        grad._coalesced_(True)


def _next_node(ctx: Any, argument: int) -> Any:
    """Where the gradient of an argument goes to; counted are those that are tensors. None: not known."""
    if not hasattr(ctx, "next_functions"):
        return None
    return ctx.next_functions[argument][0]


class EmbeddingBag(torch.autograd.Function):
    """``embedding_bag`` with its gradients: arguments as in its schema."""

    @staticmethod
    def forward(
        weight: Tensor,
        indices: Tensor,
        offsets: Tensor,
        mode: str,
        sample_weights: Tensor | None,
        include_last_offset: bool,
        padding_idx: int,
        scale_grad_by_freq: bool,
        sparse: bool,
        *options: Any,
    ) -> Any:
        """Pools; with max also gives the winners."""
        call = weight, indices, offsets, mode, sample_weights, include_last_offset, padding_idx
        more = scale_grad_by_freq, sparse, *options
        if mode != "max":
            return below(_embedding_bag, *call, *more)
        if traced():
            return below(_embedding_bag_with_winners, *call, *more)
        output = below(_embedding_bag, *call, *more)
        return output, bag_winners(*call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps what the gradients need: of the weight only its shape, unless factors need a gradient."""
        weight, indices, offsets, mode, sample_weights, last, padding_idx, by_freq, sparse, *_ = inputs
        winners = None
        if mode == "max":
            winners = output[1]
            ctx.set_materialize_grads(False)
        kept = weight.contiguous() if ctx.needs_input_grad[4] else None
        ctx.save_for_backward(indices, offsets, sample_weights, winners, kept)
        ctx.options = weight.shape, dtype_code(weight, "embedding_bag", "weight"), mode, last, padding_idx
        ctx.by_freq, ctx.sparse = by_freq, sparse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """Gradients of weight and of per_sample_weights."""
        indices, offsets, sample_weights, winners, weight = ctx.saved_tensors
        shape, dtype, mode, last, padding_idx = ctx.options
        weight_grad = sample_weights_grad = None
        if grad is not None:
            feature = feature_of(*shape, MODES.index(mode), padding_idx)
            lookups = feature, indices, ends_of(offsets, indices, last)
            if ctx.needs_input_grad[0]:
                weight_grad = _group_grad(
                    grad,
                    lookups,
                    0,
                    shape,
                    dtype,
                    sample_weights,
                    winners,
                    ctx.by_freq,
                    ctx.sparse,
                    _next_node(ctx, 0) if ctx.sparse else None,
                )
            if ctx.needs_input_grad[4]:
                found = _gradient(_sample_weights_grad, grad, [weight], *lookups)
                sample_weights_grad = found.to(sample_weights.dtype)
        return (
            weight_grad,
            None,
            None,
            None,
            sample_weights_grad,
            *[None] * (len(ctx.needs_input_grad) - 5),
        )

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        """Refuses."""
        no_forward_mode("embedding_bag")


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
        call = features, indices, offsets, output_dim
        if any_max and traced():
            return below(_fused_embedding_bag_with_winners, weights, *call, sample_weights, sparse, *options)
        output = below(_fused_embedding_bag, weights, *call, sample_weights, sparse, *options)
        if not any_max:
            return output
        return output, below(_winners, weights, *call)

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
            (weight.shape, dtype_code(weight, "fused_embedding_bag", "weights")) for weight in weights
        ]
        ctx.sparse = sparse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """Gradients of per_sample_weights and of the weights."""
        features, indices, offsets, sample_weights, winners, *weights = ctx.saved_tensors
        lookups = features, indices, offsets
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if grad is None:
            return tuple(grads)
        for group, (shape, dtype) in enumerate(ctx.groups):
            if ctx.needs_input_grad[_FIRST_WEIGHT + group]:
                node = _next_node(ctx, group - len(ctx.groups)) if ctx.sparse else None
                grads[_FIRST_WEIGHT + group] = _group_grad(
                    grad, lookups, group, shape, dtype, sample_weights, winners, False, ctx.sparse, node
                )
        if ctx.needs_input_grad[4]:
            grads[4] = _gradient(_sample_weights_grad, grad, weights, *lookups).to(sample_weights.dtype)
        return tuple(grads)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        """Refuses."""
        no_forward_mode("fused_embedding_bag")


_FIRST_WEIGHT = 8  # in the arguments of FusedEmbeddingBag


def pooled(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Applies a Function, which may give winners too."""
    found = _applied(function, *arguments)
    return found[0] if isinstance(found, tuple) else found


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    # `Function.apply` of itself looks up signatures, which costs more than a small bag, and would begin again
    # at the outermost of torch.func's transforms, where the dispatcher brings them here one level at a time.
    apply = super(torch.autograd.Function, function).apply
    if not torch._C._are_functorch_transforms_active():
        return apply(*arguments)
    with enable_single_level_autograd_function():
        return apply(*arguments)


# ---- the operators' autograd kernels


def _embedding_bag_autograd(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *options: Any,
) -> Tensor:
    arguments = (
        weight,
        indices,
        offsets,
        mode,
        per_sample_weights,
        include_last_offset,
        padding_idx,
        scale_grad_by_freq,
        sparse,
        *options,
    )
    if needs_derivatives((weight, per_sample_weights)):
        return pooled(EmbeddingBag, *arguments)
    with _below_autograd():
        return _embedding_bag(*arguments)


def _fused_autograd(
    weights: Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    output_dim: int,
    per_sample_weights: Tensor | None = None,
    sparse: bool = False,
    prefetch_distance: int = -1,
    bounds_check: str = "on",
    schedules: Tensor | None = None,
    warps: int = 0,
    mapping: Tensor | None = None,
    any_max: bool = True,
) -> Tensor:
    options = prefetch_distance, bounds_check, schedules, warps, mapping, any_max
    call = features, indices, offsets, output_dim, per_sample_weights, sparse
    if needs_derivatives((*weights, per_sample_weights)):
        if any_max and readable(features):
            any_max = bool((features[:, 4] == MAX).any())
        return pooled(FusedEmbeddingBag, *call, any_max, options, *weights)
    with _below_autograd():
        return _fused_embedding_bag(weights, *call, *options)


class _Once(torch.autograd.Function):
    """A gradient operator, which refuses derivatives of its own. Arguments flat, as pytree has them."""

    @staticmethod
    def forward(operator: Callable[..., Any], arguments: Any, *flat: Any) -> Any:
        """Calls the operator."""
        return below(operator, *pytree.tree_unflatten(flat, arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        """Refuses."""
        raise NotImplementedError(
            "recfuse: second derivatives of embedding_bag and fused_embedding_bag are not implemented"
        )

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        """Refuses."""
        no_forward_mode("embedding_bag")


def _once_differentiable(operator: Callable[..., Any]) -> Callable[..., Any]:
    def autograd(*arguments: Any) -> Any:
        flat, tree = pytree.tree_flatten(arguments)
        if needs_derivatives([one for one in flat if isinstance(one, Tensor)]):
            return _applied(_Once, operator, tree, *flat)
        with _below_autograd():
            return operator(*arguments)

    return autograd


for _operator, _autograd in (
    ("embedding_bag", _embedding_bag_autograd),
    ("fused_embedding_bag", _fused_autograd),
    *[(name, None) for name in _GRADIENTS],
):
    _default = getattr(_ops, _operator).default
    library.impl(_operator, _autograd or _once_differentiable(_default), "Autograd")
    torch.library.register_vmap(f"recfuse::{_operator}", _one_by_one(_default), lib=library)
for _operator, _kernel in _GRADIENTS.items():
    library.impl(_operator, _kernel, "CUDA")
