"""``embedding_bag``: a single table, as :func:`torch.nn.functional.embedding_bag`; gradients and shape."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_variadic

from recfuse._codes import DTYPES, MEAN, MODES, SUM
from recfuse._storage import check_storages
from recfuse.ops.bag_operators import define_gradients
from recfuse.ops.bags import Bag, pooled
from recfuse.ops.embedding_bag_arguments import (
    check_arguments,
    check_integers,
    check_tensors,
    fail,
    has_kernel,
    padding_row,
    renormalise,
    torch_embedding_bag,
)
from recfuse.ops.library import (
    below_autograd,
    call_below_autograd,
    check_1d,
    check_devices,
    dtype_code,
    is_compiled,
    is_transformed,
    library,
    needs_derivatives,
    register_fake,
)
from recfuse.ops.pending_updates import update_sinks
from recfuse.ops.traced_updates import Updates
from recfuse.ops.updates import check_finished, unfinished, update_of, updates_of

_ops = torch.ops.recfuse
_embedding_bag = _ops.embedding_bag.default
_pool = partial(call_below_autograd, _embedding_bag)
# Without a Python frame; its errors are plain RuntimeErrors.
plain: Any = _ops._embedding_bag.default._op.__wrapped__
library.impl("_embedding_bag", torch.library.fallthrough_kernel, "Autograd")
_WEIGHTS = torch.nn.Parameter, Tensor  # of a plain call: a subclass must see the public operator


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
    """Gather rows of a table and pool them, as :func:`torch.nn.functional.embedding_bag`.

    Args:
        input: int32 or int64; ``[lookups]`` with ``offsets``, or ``[bags, n]`` without.
        weight: ``[rows, dim]``, any strides (fast if the elements of a row are contiguous).
        offsets: int32 or int64 ``[bags]``, or ``[bags + 1]`` with ``include_last_offset``: the position
            at which each bag begins. Ascends from 0.
        max_norm: scale rows of this call with a larger norm down to it, in place, before pooling.
        norm_type: the p of that norm. Default: 2.
        scale_grad_by_freq: divide each row's gradient by the number of its lookups in this call. Not with
            "max". Default: False.
        mode: "sum", "mean" or "max". Default: "mean".
        sparse: make the gradient of ``weight`` a sparse tensor. Not with "max". Default: False.
        per_sample_weights: a factor per lookup, with the shape of ``input`` and the dtype of ``weight``; mode
            "sum" only.
        include_last_offset: ``offsets`` ends with the end of the last bag; later lookups are not used.
            Default: False.
        padding_idx: skip lookups of this row; a negative number counts from the end.
        prefetch_distance: the number of lookups between a prefetch and its use; 0 disables prefetching, -1
            selects the default. On CUDA, the distance of the schedule.
        bounds_check: "on" checks every index and offset; "off" makes a bad value undefined behaviour.
            Default: "on".
        schedule: parameters of the kernel, ``field=value`` with spaces between: station (where prefetched
            rows wait: none, register, shared, local or l1), distance (the number of prefetched rows),
            threads (of a bag), block (threads of a block), warps (the maximum on an SM), parts (of the
            table, through which bags sweep together), segment (lookups listed at a time); or, for sums and
            means of short bags, bags (of a warp), only with block and warps. Other fields have defaults;
            :func:`recfuse.tune` finds faster values. On the CPU only distance matters, if
            ``prefetch_distance`` is -1.

    Shape:
        - input: ``[lookups]`` or ``[bags, n]``.
        - weight: ``[rows, dim]``.
        - output: ``[bags, dim]``.

    Returns:
        Tensor: ``[bags, dim]`` in the dtype of ``weight``; zeros for empty bags.

    Raises:
        TypeError: a bad argument; like all errors here also of the class that torch raises.
        ValueError: a bad argument or offset.
        IndexError: an index outside the table. On a GPU the kernel skips it, without gradient, and the next
            call with this table, or :func:`check`, raises the error.
        NotImplementedError: forward-mode derivatives (``torch.func.jvp``, ``jacfwd``, dual tensors) and
            second derivatives, as in torch.

    Example:
        >>> weight = torch.randn(1000, 16)
        >>> indices, offsets = torch.tensor([1, 5, 7]), torch.tensor([0, 2])
        >>> recfuse.embedding_bag(indices, weight, offsets, mode="sum").shape
        torch.Size([2, 16])

    Note:
        float32, float16 and bfloat16 tables on the CPU or on a CUDA device, with all tensors on the same
        device, use recfuse's kernels with sums in float32. Other tables (float64, other devices) use torch's
        function. Gradients are dense or sparse, bit-identical from run to run. ``[bags, 0]`` input and
        tables of dim 0 work, where torch raises an internal error.

    Source: Jain et al., MICRO 2024.
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
    if (
        offsets is not None
        and per_sample_weights is None
        and max_norm is None
        and not schedule
        and prefetch_distance == -1
        and bounds_check == "on"
        and not torch.compiler.is_dynamo_compiling()
    ):
        output = _plain_call(
            input, weight, offsets, mode, include_last_offset, padding_idx, scale_grad_by_freq, sparse
        )
        if output is not None:
            return output
    check_tensors(input, weight, offsets, per_sample_weights)
    check_integers(input, weight, offsets)
    if not has_kernel(input, weight, offsets, per_sample_weights):
        if schedule:
            fail(
                f"schedule is {schedule!r}, but no kernel takes {weight.dtype} weight on {weight.device} "
                f"with {input.dtype} input on {input.device}; expected all on one CPU or CUDA device, "
                "weight of float32, float16 or bfloat16, input and offsets of int32 or int64. Pass such "
                'tensors, or schedule="".'
            )
        tensors = input, weight, offsets, per_sample_weights
        # torch's output would be uninitialized memory.
        if any(tensor is not None and tensor.is_meta for tensor in tensors):
            names = "input", "weight", "offsets", "per_sample_weights"
            check_devices("embedding_bag", zip(names, tensors, strict=True), follows="weight")
        torch_options: tuple[Any, ...] = (
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            per_sample_weights,
        )
        torch_options += include_last_offset, padding_idx
        return torch_embedding_bag(input, weight, offsets, *torch_options)
    check_arguments(input, weight, offsets, per_sample_weights, mode, scale_grad_by_freq, sparse)
    if input.dim() == 2:
        include_last_offset = False
        if not input.is_contiguous():  # then reshape() copies it
            check_storages("recfuse.embedding_bag", "input", (input,))
        if per_sample_weights is not None:
            if not per_sample_weights.is_contiguous():
                check_storages("recfuse.embedding_bag", "per_sample_weights", (per_sample_weights,))
            per_sample_weights = per_sample_weights.reshape(-1)
    if max_norm is not None:
        renormalise(weight.detach(), input.reshape(-1), max_norm, norm_type, bounds_check)
    row = padding_row(padding_idx, weight)
    arguments: tuple[Any, ...] = (
        weight, input, offsets, mode, per_sample_weights, include_last_offset, row, scale_grad_by_freq, sparse
    )  # fmt: skip
    if schedule or prefetch_distance != -1 or bounds_check != "on":  # to parse them takes time
        arguments += prefetch_distance, bounds_check, schedule
    updates = updates_of((weight,))
    if updates is not None and scale_grad_by_freq:
        fail(
            "scale_grad_by_freq is True and weight belongs to an optimizer of recfuse.optim, which has no "
            "such gradient. Pass scale_grad_by_freq=False."
        )
    if is_transformed():
        if updates is not None and is_compiled():
            return _embedding_bag_updated(*Updates.of(updates), *arguments)
        return _embedding_bag(*arguments)
    if unfinished:
        check_finished((weight,), "a call of tables")
    if updates is not None or needs_derivatives((weight, per_sample_weights)):
        sinks = (sparse,) if updates is None else update_sinks((weight,), updates, sparse)
        context = _bag_of(*arguments), mode == "max", sinks, None, per_sample_weights, weight
        return pooled(_pool, arguments, *context)  # type: ignore[no-any-return]
    with below_autograd():
        return _embedding_bag(*arguments)


def _plain_call(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor,
    mode: str,
    include_last_offset: bool,
    padding_idx: int | None,
    by_freq: bool,
    sparse: bool,
) -> Tensor | None:
    """Return the output of a sum or mean on the CPU, or None for calls that need the full path.

    Python dominates the time of a small bag, so this only checks facts that the operator cannot see, and
    calls it. It returns None for other kinds of calls and for bad arguments, which the full checks explain.
    """
    if not (
        type(weight) in _WEIGHTS
        and type(input) is Tensor
        and type(offsets) is Tensor
        and weight.is_cpu
        and weight.dtype in DTYPES
        and (mode == "sum" or mode == "mean")
        and type(sparse) is bool
        and type(by_freq) is bool
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and not torch._C._len_torch_dispatch_stack()
    ):
        return None
    if unfinished:
        check_finished((weight,), "a call of tables")
    try:
        row = -1 if padding_idx is None else padding_row(padding_idx, weight)
        pooling = SUM if mode == "sum" else MEAN
        call = weight, input, offsets, pooling, include_last_offset, row
        output: Tensor
        if not weight.requires_grad or not torch.is_grad_enabled():
            output = plain(*call)
            return output
        update = update_of(weight)
        if update is not None and by_freq:
            return None
        sinks = (sparse,) if update is None else update_sinks((weight,), (update,), sparse)
        rows, dim = weight.shape
        bag = rows, dim, DTYPES.index(weight.dtype), pooling, row, include_last_offset, by_freq
        output = pooled(plain, call, bag, False, sinks, None, None, weight)
        return output
    except Exception:
        return None


# ---- shape and gradients


@register_fake("embedding_bag", follows="weight")
def _shape(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    *_: Any,
) -> Tensor:
    """Return an empty output."""
    torch._check(
        weight.dim() == 2, lambda: f"recfuse.embedding_bag: weight has {weight.dim()} dimensions; expected 2"
    )
    if offsets is None:
        torch._check(
            indices.dim() == 2 and not include_last_offset,
            lambda: (
                f"recfuse.embedding_bag: indices has {indices.dim()} dimensions; expected 2 without offsets"
            ),
        )
        return weight.new_empty((indices.shape[0], weight.shape[1]))
    check_1d("embedding_bag", indices, offsets)
    return weight.new_empty((offsets.shape[0] - int(include_last_offset), weight.shape[1]))


def _bag_of(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    mode: str,
    sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int,
    by_freq: bool,
    *_: Any,
) -> Bag:
    rows, dim = weight.shape
    dtype = dtype_code(weight, "embedding_bag", "weight")
    return rows, dim, dtype, MODES.index(mode), padding_idx, include_last_offset, by_freq


_embedding_bag_updated = define_gradients("embedding_bag", "weight", _shape, _bag_of)
