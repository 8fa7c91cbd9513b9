"""``embedding_bag``: one table, as :func:`torch.nn.functional.embedding_bag`; its gradients and its shape."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from recfuse._codes import MAX, MODES
from recfuse.ops.autograd import eager_apply, pooled, refuse_forward_mode, register
from recfuse.ops.embedding_bag_arguments import (
    check_arguments,
    check_integers,
    check_tensors,
    fail,
    has_kernel,
    padding_row,
    renormalise,
)
from recfuse.ops.gradients import (
    WeightGradCall,
    define_with_winners,
    find_winners,
    sample_weights_grad,
    weight_grad,
)
from recfuse.ops.library import (
    below_autograd,
    call_below_autograd,
    check_1d,
    dtype_code,
    is_compiled,
    is_traced,
    is_transformed,
    library,
    needs_derivatives,
    raise_translated,
)
from recfuse.ops.updated_calls import Lookups, updated_call
from recfuse.ops.updated_traces import Family, Updates, define_updated
from recfuse.ops.updates import updates_of

_ops = torch.ops.recfuse
_embedding_bag = _ops.embedding_bag.default


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    *,
    prefetch_distance: int = -1,
    bounds_check: str = "on",
    schedule: str = "",
) -> Tensor:
    """Gathers rows of a table and pools them bag by bag, as :func:`torch.nn.functional.embedding_bag` does.

    Float32, float16 and bfloat16 tables on the CPU or on a CUDA device, with the other tensors on the same
    one, run on recfuse's kernels and are summed in float32; any other table (float64, on another device)
    goes to torch's own function.

    Args:
        input: int32 or int64; ``[lookups]`` with ``offsets``, or ``[bags, n]`` without.
        weight: ``[rows, dim]``, any strides (fast where a row's elements lie side by side).
        offsets: int32 or int64 ``[bags]``, or ``[bags + 1]`` with ``include_last_offset``: where each bag
            begins. Rises from 0.
        max_norm: rows used in this call whose norm is larger are scaled down to it, in place, before pooling.
        norm_type: the p of that norm.
        scale_grad_by_freq: divides each row's gradient by how often the row occurs in this call. Not with
            max.
        mode: "sum", "mean" or "max".
        sparse: the gradient of ``weight`` is a sparse tensor. Not with max.
        per_sample_weights: a factor a lookup, of the shape of ``input`` and the dtype of ``weight``; mode
            "sum" only.
        include_last_offset: ``offsets`` ends with the end of the last bag; lookups behind it are not used.
        padding_idx: lookups of this row are skipped; a negative number counts from the end.
        prefetch_distance: lookups ahead to prefetch; 0: none, -1: a good default. On CUDA, the schedule's
            distance.
        bounds_check: "on" checks every index and offset; "off" trusts them: a bad one is then undefined
            behaviour.
        schedule: how the kernel works, ``field=value`` with spaces between: station (where rows in flight
            wait: none, register, shared, local or l1), distance (how many there are), threads (of a bag),
            block (threads of one), warps (the most an SM runs at once), parts (of the table that bags sweep
            through together), segment (lookups listed at a time); or, for sums and means of short bags, bags
            (of a warp), with no other field but block and warps. Fields left out have good defaults;
            :func:`recfuse.tune` finds better ones. On the CPU only distance matters, where
            ``prefetch_distance`` is -1.

    Returns:
        ``[bags, dim]`` of the dtype of ``weight``; zeros where a bag is empty.

    Raises:
        ValueError, TypeError, NotImplementedError: a bad argument; each is also of the class that torch
            raises.
        IndexError: an index outside the table (also a RuntimeError, as torch's).

    Forward-mode derivatives (``torch.func.jvp``, ``jacfwd``, dual tensors) and second ones raise
    NotImplementedError, as torch's own do.

    The GPU works asynchronously: a bad index or offset found there counts as a row of zeros with
    no gradient, and is raised by the next call with that table, or by :func:`check`.

    Two calls on which torch raises an internal error work: ``[bags, 0]`` input, and a table of dim 0.

    Source: Jain et al., MICRO 2024 (software prefetching of embedding rows).
    """
    if has_torch_function_variadic(input, weight, offsets, per_sample_weights):
        options: dict[str, Any] = {"mode": mode, "sparse": sparse, "per_sample_weights": per_sample_weights}
        options |= {"include_last_offset": include_last_offset, "padding_idx": padding_idx}
        options |= {"prefetch_distance": prefetch_distance, "bounds_check": bounds_check}
        options |= {"max_norm": max_norm, "norm_type": norm_type, "scale_grad_by_freq": scale_grad_by_freq}
        tensors = input, weight, offsets, per_sample_weights
        return handle_torch_function(
            embedding_bag, tensors, input, weight, offsets=offsets, **options, schedule=schedule
        )
    check_tensors(input, weight, offsets, per_sample_weights)
    check_integers(input, weight, offsets)
    if not has_kernel(input, weight, offsets, per_sample_weights):
        if schedule:
            fail(
                f"schedule is {schedule!r}, but no kernel takes {weight.dtype} weight on {weight.device} "
                f"with {input.dtype} input on {input.device}: all must be on one CPU or CUDA device, weight "
                "float32, float16 or bfloat16, input and offsets int32 or int64; pass such tensors, or "
                'schedule=""'
            )
        rest: tuple[Any, ...] = max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights
        rest += include_last_offset, padding_idx
        return torch.nn.functional.embedding_bag(input, weight, offsets, *rest)
    check_arguments(input, weight, offsets, per_sample_weights, mode, scale_grad_by_freq, sparse)
    if input.dim() == 2:
        include_last_offset = False
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.reshape(-1)
    if max_norm is not None:
        renormalise(weight.detach(), input.reshape(-1), max_norm, norm_type, bounds_check)
    row = padding_row(padding_idx, weight)
    arguments: tuple[Any, ...] = (
        weight, input, offsets, mode, per_sample_weights, include_last_offset, row, scale_grad_by_freq, sparse
    )  # fmt: skip
    if schedule or prefetch_distance != -1 or bounds_check != "on":  # parsing them takes time
        arguments += prefetch_distance, bounds_check, schedule
    updates = updates_of((weight,))
    if updates is not None and scale_grad_by_freq:
        fail(
            "scale_grad_by_freq is True and weight belongs to an optimizer of recfuse.optim, which has no "
            "such gradient; pass scale_grad_by_freq=False"
        )
    if is_transformed():
        if updates is not None and is_compiled():
            return _embedding_bag_updated(*Updates.of(updates), *arguments)
        return _embedding_bag(*arguments)
    try:
        if updates is not None:
            complete = mode == "max" or not input.is_cpu or per_sample_weights is not None
            ends = _ends_of(offsets, input, include_last_offset or not complete)
            feature = _feature_of(weight.shape[0], weight.shape[1], MODES.index(mode), row)
            flat = input if input.dim() == 1 else input.reshape(-1)
            lookups = Lookups(feature, flat, ends, weight.shape[1], mode == "max", sparse)
            return updated_call(_embedding_bag, arguments, lookups, updates, per_sample_weights, (weight,))
        if needs_derivatives((weight, per_sample_weights)):
            found = _apply(*arguments)
            return found[0] if mode == "max" else found
        with below_autograd():
            return _embedding_bag(*arguments)
    except RuntimeError as error:
        raise_translated(error)


# ---- winners: a bag of mode max as a fused call of one feature


def _ends_of(offsets: Tensor | None, indices: Tensor, include_last_offset: bool) -> Tensor:
    """[bags + 1] where bags begin, and where the last one ends."""
    if offsets is None:
        bags, lookups = indices.shape
        return torch.arange(bags + 1, dtype=torch.int64, device=indices.device) * lookups
    if include_last_offset:
        return offsets
    return torch.cat((offsets, offsets.new_full((1,), indices.shape[0])))


def _new_feature(rows: int, dim: int, pooling: int, padding_idx: int) -> Tensor:
    return torch.tensor([[0, 0, rows, dim, pooling, padding_idx, 0]], dtype=torch.int64, device="cpu")


_cached_feature = lru_cache(maxsize=1024)(_new_feature)
library.define("_feature(SymInt rows, SymInt dim, int pooling, int padding_idx) -> Tensor")
library.impl("_feature", _new_feature, "CompositeExplicitAutograd")


@torch.library.register_fake("recfuse::_feature", lib=library)
def _(rows: int, dim: int, pooling: int, padding_idx: int) -> Tensor:
    return torch.empty((1, 7), dtype=torch.int64, device="cpu")


def _feature_of(rows: int, dim: int, pooling: int, padding_idx: int) -> Tensor:
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
    feature = _feature_of(weight.shape[0], weight.shape[1], MAX, padding_idx)
    ends = _ends_of(offsets, indices, include_last_offset)
    lookups = feature, indices.reshape(-1), ends
    return call_below_autograd(find_winners, [weight.contiguous()], *lookups, weight.shape[1])


# ---- shape, and gradients


@torch.library.register_fake("recfuse::embedding_bag", lib=library)
def _shape(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    *_: Any,
) -> Tensor:
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


_embedding_bag_with_winners = define_with_winners("embedding_bag", _shape, _bag_winners)


class EmbeddingBag(torch.autograd.Function):
    """``embedding_bag`` with its gradients: arguments as in its schema."""

    @staticmethod
    def forward(*call: Any) -> Any:
        """Pools; with max also gives the winners."""
        if call[3] != "max":
            return call_below_autograd(_embedding_bag, *call)
        if is_traced():
            return call_below_autograd(_embedding_bag_with_winners, *call)
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
        feature = _feature_of(rows, dim, mode, padding_idx)
        ends = _ends_of(offsets, indices, last or (indices.is_cpu and not of_factors))
        lookups = feature, indices if indices.dim() == 1 else indices.reshape(-1), ends
        grads: list[Tensor | None] = [None] * count
        if of_weight:
            factors = sample_weights, winners, by_freq
            call = WeightGradCall(grad, *lookups, 0, rows, dim, dtype, *factors)
            grads[0] = weight_grad(ctx, call, sparse, 0, mark_small=False)
        if of_factors:
            grads[4] = sample_weights_grad(grad, [weight], lookups, sample_weights.dtype)
        return tuple(grads)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        """Refuses."""
        refuse_forward_mode("embedding_bag")


_apply = eager_apply(EmbeddingBag)
_DEFAULTS = tuple(argument.default_value for argument in _embedding_bag._schema.arguments)


def _autograd(*given: Any) -> Tensor:
    """The operator's autograd kernel; ``given`` are the arguments that are not the defaults."""
    arguments = given + _DEFAULTS[len(given) :]
    if needs_derivatives((arguments[0], arguments[4])):
        return pooled(EmbeddingBag, *arguments)
    with below_autograd():
        return _embedding_bag(*given)


register("embedding_bag", _autograd)


# ---- with a weight that a fused optimizer updates


def _lookups_of(*call: Any) -> tuple[tuple[Tensor], Lookups, Tensor | None]:
    arguments = call + _DEFAULTS[len(call) :]
    weight, indices, offsets, mode, sample_weights, last, padding_idx, _, sparse, *_ = arguments
    features = _feature_of(weight.shape[0], weight.shape[1], MODES.index(mode), padding_idx)
    ends = _ends_of(offsets, indices, last)
    return (
        (weight,),
        Lookups(features, indices.reshape(-1), ends, weight.shape[1], mode == "max", sparse),
        sample_weights,
    )


_family = Family(_embedding_bag, _embedding_bag_with_winners, _lookups_of)
_embedding_bag_updated = define_updated("embedding_bag", _family, _shape)
