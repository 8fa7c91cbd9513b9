"""The gradients of ``embedding_bag``, in which a bag is a fused call of one feature, and its shape."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recfuse._codes import DTYPES, MAX, MODES
from recfuse._storage import check_storages, is_readable
from recfuse.ops.autograd import eager_apply, pooled, refused_jvp, register
from recfuse.ops.gradients import (
    WeightGradCall,
    define_with_winners,
    find_winners,
    mark_large,
    sample_weights_grad,
    weight_grad,
)
from recfuse.ops.library import (
    below_autograd,
    call_below_autograd,
    check_1d,
    dtype_code,
    is_traced,
    library,
    needs_derivatives,
    register_fake,
)

_ops = torch.ops.recfuse
_embedding_bag = _ops.embedding_bag.default
plain: Any = _ops._embedding_bag.default._op.__wrapped__  # with no frame of Python; its errors have no class
_plain_gradient: Any = _ops._embedding_bag_gradient.default._op
for _name in ("_embedding_bag", "_embedding_bag_gradient"):  # which come from below autograd
    library.impl(_name, torch.library.fallthrough_kernel, "Autograd")

# ---- a bag as a fused call of one feature


def ends_of(offsets: Tensor | None, indices: Tensor, include_last_offset: bool) -> Tensor:
    """[bags + 1] where bags begin, and where the last one ends."""
    if offsets is None:
        bags, lookups = indices.shape
        return torch.arange(bags + 1, dtype=torch.int64, device=indices.device) * lookups
    if include_last_offset:
        return offsets
    if offsets.is_cpu:
        check_storages("recfuse.embedding_bag", "offsets", (offsets,))
    return torch.cat((offsets, offsets.new_full((1,), indices.shape[0])))


def _new_feature(rows: int, dim: int, pooling: int, padding_idx: int) -> Tensor:
    return torch.tensor([[0, 0, rows, dim, pooling, padding_idx, 0]], dtype=torch.int64, device="cpu")


_cached_feature = lru_cache(maxsize=1024)(_new_feature)
library.define("_feature(SymInt rows, SymInt dim, int pooling, int padding_idx) -> Tensor")
library.impl("_feature", _new_feature, "CompositeExplicitAutograd")


@register_fake("_feature")
def _(rows: int, dim: int, pooling: int, padding_idx: int) -> Tensor:
    return torch.empty((1, 7), dtype=torch.int64, device="cpu")


def feature_of(rows: int, dim: int, pooling: int, padding_idx: int) -> Tensor:
    """int64 [1, 7] on the host: one table as the feature of a fused call."""
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()  # a tensor of one of its levels must not be kept
        or type(rows) is not int
        or type(dim) is not int
    ):
        return _ops._feature(rows, dim, pooling, padding_idx)
    return _cached_feature(rows, dim, pooling, padding_idx)


def _bag_winners(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    mode: str,
    sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    *_: Any,
) -> Tensor:
    """The rows that win each element of a bag of mode max."""
    feature = feature_of(weight.shape[0], weight.shape[1], MAX, padding_idx)
    ends = ends_of(offsets, indices, include_last_offset)
    lookups = feature, indices.reshape(-1), ends
    return call_below_autograd(find_winners, [weight.contiguous()], *lookups, weight.shape[1])


# ---- shape, and gradients


@register_fake("embedding_bag", follows="weight")
def shape_of(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    *_: Any,
) -> Tensor:
    """An empty output."""
    torch._check(
        weight.dim() == 2, lambda: f"recfuse.embedding_bag: weight has {weight.dim()} dimensions, must have 2"
    )
    if offsets is None:
        torch._check(
            indices.dim() == 2 and not include_last_offset,
            lambda: (
                f"recfuse.embedding_bag: indices has {indices.dim()} dimensions, must have 2 without offsets"
            ),
        )
        return weight.new_empty((indices.shape[0], weight.shape[1]))
    check_1d("embedding_bag", indices, offsets)
    return weight.new_empty((offsets.shape[0] - int(include_last_offset), weight.shape[1]))


embedding_bag_with_winners = define_with_winners("embedding_bag", shape_of, _bag_winners, "weight")


class EmbeddingBag(torch.autograd.Function):
    """``embedding_bag`` with its gradients: arguments as in its schema."""

    @staticmethod
    def forward(*call: Any) -> Any:
        """Pools; with max also gives the winners."""
        if call[3] != "max":
            return call_below_autograd(_embedding_bag, *call)
        if is_traced():
            return call_below_autograd(embedding_bag_with_winners, *call)
        return call_below_autograd(_embedding_bag, *call), _bag_winners(*call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps what the gradients need: of the weight only its shape, unless factors need a gradient."""
        weight, indices, offsets, mode, sample_weights, last, padding_idx, by_freq, sparse, *_ = inputs
        winners = kept = None
        if mode == "max":
            winners = output[1]
            ctx.set_materialize_grads(False)
        if sample_weights is not None and ctx.needs_input_grad[4]:
            kept = weight.contiguous()
        ctx.save_for_backward(indices, offsets, sample_weights, winners, kept)
        rows, dim = weight.shape
        table = rows, dim, dtype_code(weight, "embedding_bag", "weight")
        ctx.call = table, MODES.index(mode), last, padding_idx, by_freq, sparse, len(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """Gradients of weight and of per_sample_weights."""
        table, mode, last, padding_idx, by_freq, sparse, count = ctx.call
        if grad is None:
            return (None,) * count
        indices, offsets, sample_weights, winners, weight = ctx.saved_tensors
        of_weight, of_factors = True, False
        if sample_weights is not None:  # else it is the gradient of the weight alone that is asked for
            needed = ctx.needs_input_grad
            of_weight, of_factors = needed[0], needed[4]
        rows, dim, dtype = table
        feature = feature_of(rows, dim, mode, padding_idx)
        ends = ends_of(offsets, indices, last or (indices.is_cpu and not of_factors))
        lookups = feature, indices if indices.dim() == 1 else indices.reshape(-1), ends
        grads: list[Tensor | None] = [None] * count
        if of_weight:
            factors = sample_weights, winners, by_freq
            call = WeightGradCall(grad, *lookups, 0, rows, dim, dtype, *factors)
            grads[0] = weight_grad(ctx, call, sparse, 0, mark_small=False)
        if of_factors:
            grads[4] = sample_weights_grad(grad, [weight], lookups, sample_weights.dtype)
        return tuple(grads)

    jvp = refused_jvp("embedding_bag")


apply_eagerly = eager_apply(EmbeddingBag)


# Pooling, include_last_offset, padding_idx, scale_grad_by_freq, sparse.
PlainCall: TypeAlias = tuple[int, bool, int, bool, bool]


class PlainBag(torch.autograd.Function):
    """The same of a plain call, outside of transforms: a sum or mean of bags that begin at offsets, without
    sample weights. A step of a small bag takes as long as the Python in it, so here is little.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, weight: Tensor, indices: Tensor, offsets: Tensor, call: PlainCall
    ) -> Tensor:
        """Pools."""
        ctx.save_for_backward(indices, offsets)
        pooling, last, padding_idx, _, sparse = call
        leaf = weight if sparse and weight.is_leaf else None
        ctx.call = call, weight.shape, DTYPES.index(weight.dtype), leaf
        return plain(weight, indices, offsets, pooling, last, padding_idx)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradient of weight."""
        indices, offsets = ctx.saved_tensors
        (pooling, last, padding_idx, by_freq, sparse), (rows, dim), dtype, leaf = ctx.call
        found: Tensor
        if (
            sparse
            and not by_freq
            and is_readable(grad)
            and not torch.is_grad_enabled()
            and forward_ad._current_level < 0  # a tangent of grad is refused
        ):
            found = _plain_gradient(grad, indices, offsets, pooling, last, padding_idx, rows, dim, dtype)
            if leaf is not None:
                mark_large(leaf, found, dim)
        else:
            feature = feature_of(rows, dim, pooling, padding_idx)
            of_weight = WeightGradCall(
                grad, feature, indices, offsets, 0, rows, dim, dtype, None, None, by_freq
            )
            found = weight_grad(ctx, of_weight, sparse, 0, mark_small=False)
        return found, None, None, None

    jvp = refused_jvp("embedding_bag")


apply_plainly = eager_apply(PlainBag)
DEFAULTS = tuple(argument.default_value for argument in _embedding_bag._schema.arguments)


def _autograd(*given: Any) -> Tensor:
    """The operator's autograd kernel; ``given`` are the arguments that are not the defaults."""
    arguments = given + DEFAULTS[len(given) :]
    if needs_derivatives((arguments[0], arguments[4])):
        return pooled(EmbeddingBag, *arguments)
    with below_autograd():
        return _embedding_bag(*given)


register("embedding_bag", _autograd)
