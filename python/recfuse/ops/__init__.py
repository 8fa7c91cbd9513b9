"""The operators as Python functions: ``embedding_bag``, ``fused_embedding_bag`` and ``check``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from recfuse._arguments import check_fused_tensors
from recfuse._codes import DTYPES, INTEGERS, MAX, MODES
from recfuse.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    IndexRangeError,
    NotATensorError,
    translate,
)
from recfuse.ops import fakes  # noqa: F401  (registers them)
from recfuse.ops.autograd import EmbeddingBag, FusedEmbeddingBag, needs_derivatives, pooled, readable

HAS_CUDA_KERNELS = torch.version.hip is None  # on ROCm too, torch calls the device "cuda"

_DEFAULTS = (-1, "on", 0)
_below_autograd = torch._C._AutoDispatchBelowAutograd
_embedding_bag = torch.ops.recfuse.embedding_bag.default
_fused_embedding_bag = torch.ops.recfuse.fused_embedding_bag.default


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
        padding_idx: lookups of this row are skipped; negative counts from the end.
        prefetch_distance: lookups ahead to prefetch; 0: none, -1: a good default. On CUDA, the schedule's
            distance.
        bounds_check: "on" checks every index and offset; "off" trusts them: a bad one is then undefined
            behaviour.
        schedule: how the kernel works, ``field=value`` with spaces between: station (where rows in flight
            wait: none, register, shared, local or l1), distance (how many there are), threads (of a bag),
            block (threads of one), warps (the most an SM runs at once), parts (of the table that bags sweep
            through together), segment (lookups listed at a time). Fields left out have good defaults;
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

    Two calls on which torch raises an internal error give what they mean: ``[bags, 0]`` input, and a table
    of dim 0.

    Source: Jain et al., MICRO 2024 (software prefetching of embedding rows).
    """
    if has_torch_function_variadic(input, weight, offsets, per_sample_weights):
        return handle_torch_function(
            embedding_bag,
            (input, weight, offsets, per_sample_weights),
            input,
            weight,
            offsets=offsets,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            mode=mode,
            sparse=sparse,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
            prefetch_distance=prefetch_distance,
            bounds_check=bounds_check,
            schedule=schedule,
        )
    _check_tensors(input, weight, offsets, per_sample_weights)
    _check_integers(input, weight, offsets)
    if not _has_kernel(input, weight, offsets, per_sample_weights):
        if schedule:
            _fail(
                f"schedule is {schedule!r}, but no kernel takes {weight.dtype} weight on {weight.device} "
                f"with {input.dtype} input on {input.device}: all must be on one CPU or CUDA device, weight "
                "float32, float16 or bfloat16, input and offsets int32 or int64; pass such tensors, or "
                'schedule=""'
            )
        return torch.nn.functional.embedding_bag(
            input,
            weight,
            offsets,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            per_sample_weights,
            include_last_offset,
            padding_idx,
        )
    _check_arguments(input, weight, offsets, per_sample_weights, mode, scale_grad_by_freq, sparse)
    if input.dim() == 2:
        offsets = torch.arange(input.shape[0], dtype=torch.int64, device=input.device) * input.shape[1]
        include_last_offset = False
        input = input.reshape(-1)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.reshape(-1)
    if max_norm is not None:
        _renormalise(weight.detach(), input, max_norm, norm_type, bounds_check)
    if per_sample_weights is not None:
        _check_sample_weights(per_sample_weights, weight, mode)
    arguments = (
        weight,
        input,
        offsets,
        mode,
        per_sample_weights,
        include_last_offset,
        _padding_row(padding_idx, weight),
        scale_grad_by_freq,
        sparse,
    )
    if schedule or prefetch_distance != -1 or bounds_check != "on":  # parsing them takes time
        arguments += (prefetch_distance, bounds_check, schedule)
    if _is_transformed():
        return _embedding_bag(*arguments)
    try:
        if needs_derivatives((weight, per_sample_weights)):
            return pooled(EmbeddingBag, *arguments)
        with _below_autograd():
            return _embedding_bag(*arguments)
    except RuntimeError as error:
        raise_translated(error)


def fused_embedding_bag(
    weights: Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    output_dim: int,
    per_sample_weights: Tensor | None = None,
    *,
    sparse: bool = False,
    prefetch_distance: int = -1,
    bounds_check: str = "on",
    schedules: Tensor | None = None,
    warps: int = 0,
    mapping: Tensor | None = None,
    any_max: bool = True,
) -> Tensor:
    """Pools many tables in one call. :class:`recfuse.nn.FusedEmbeddingBagCollection` makes the first two
    arguments, and on a GPU the last three.

    All tensors are on the CPU, or all on one CUDA device but for ``features`` and ``schedules``, which stay
    on the CPU: the host plans the work by them without waiting for the GPU.

    Args:
        weights: contiguous float32, float16 or bfloat16 matrices ``[rows, dim]``, a table is a range of rows
            of one. Their gradients are of their shape.
        features: int64 ``[features, 7]`` on the CPU: which of the weights, first element in it (a multiple of
            dim), rows of the table, dim, pooling (0 sum, 1 mean, 2 max), padding_idx (a row of the table; -1:
            none), first column in the output (where the feature before ends). Features may share a table.
        indices: int32 or int64 ``[lookups]``, feature by feature.
        offsets: int32 or int64 ``[features * bags + 1]``: bag b of feature f pools the lookups from
            ``offsets[f * bags + b]`` to ``offsets[f * bags + b + 1]``. Rises from 0.
        output_dim: columns of the output, the sum of the features' dims.
        per_sample_weights: float32, float16 or bfloat16 ``[lookups]``; every feature must then be a sum.
        sparse: gradients of the weights are coalesced sparse tensors. Not with a feature of pooling max.
        prefetch_distance, bounds_check: as in :func:`embedding_bag`.
        schedules: int32 ``[features, 5]`` on the CPU, how the GPU works on each feature; 0 anywhere: a good
            default. Columns: kind (1 pool, 2 columns, 3 staged), threads (lanes that share a bag; where 32
            share long ones, 64 do in batches of 256 bags and fewer), distance (rows in flight a lane),
            split (blocks that share a bag), expected lookups of a bag times 16 (-1: none). Of staged tables
            only threads, 2 to 32, and what is expected matter. With every feature's expectation the work is
            shared out on the host by the batch's size alone; without one, by a small kernel from the offsets.
            The CPU needs none of these three.
        warps: the most warps that an SM runs at once; 0: the default.
        mapping: int32 ``[rows, 8]`` on the CPU, best in page-locked memory: this batch's work shared out
            ahead, by ``map`` of a collection with the same schedules and warps. One that was changed raises
            ``ValueError`` unless it still has each bag of each feature once; a CUDA graph keeps a copy of it.
        any_max: False says that no feature pools by max, which spares a look at ``features``, and traced and
            compiled training the rows that won.

    Returns:
        ``[bags, output_dim]``; of the weights' dtype where they agree, else float32.

    Raises:
        ValueError, TypeError: a bad argument. IndexError: an index outside its table; names feature and bag.

    ``torch.func.grad``, ``vjp`` and ``vmap`` (one call after another) work; forward-mode and second
    derivatives raise NotImplementedError.

    A bad index or offset found on a GPU counts as a row of zeros with no gradient, and is raised by the next
    call with these tables, or by :func:`check`.

    Source: Pan et al., RecFlex, SC 2024 (one kernel for heterogeneous features).
    """
    try:
        derivatives = needs_derivatives((*weights, per_sample_weights))
        look = any_max and (derivatives or sparse) and readable(features)
    except (TypeError, AttributeError):
        check_fused_tensors(weights, features, indices, offsets, per_sample_weights)
        raise
    if look:
        any_max = bool((features[:, 4] == MAX).any())
        if any_max and sparse:
            raise ArgumentValueError(
                "recfuse.fused_embedding_bag: sparse is True and a feature pools by max, which has no sparse "
                "gradient; pass sparse=False"
            )
    arguments = features, indices, offsets, output_dim, per_sample_weights, sparse
    options = prefetch_distance, bounds_check, schedules, warps, mapping, any_max
    if _is_transformed():
        return _fused_embedding_bag(weights, *arguments, *options)
    try:
        if derivatives:
            return pooled(FusedEmbeddingBag, *arguments, any_max, options, *weights)
        if schedules is None and mapping is None and (prefetch_distance, bounds_check, warps) == _DEFAULTS:
            options = ()  # which take time to hand over
        elif mapping is None:
            options = options[:4]
        if torch.is_inference_mode_enabled():  # autograd is left out already
            return _fused_embedding_bag(weights, *arguments, *options)
        with _below_autograd():
            return _fused_embedding_bag(weights, *arguments, *options)
    except RuntimeError as error:
        check_fused_tensors(weights, features, indices, offsets, per_sample_weights)
        raise_translated(error)


def check(device: torch.device | str | int | None = None) -> None:
    """Waits for a CUDA device, and raises what recfuse's kernels have found wrong there.

    On the GPU a bad index or offset does no harm: its row counts as zero, so its bag's output is wrong. It
    is found after the call that brought it has returned, since no call waits for the GPU. The next call with
    the same table, or the same collection, raises it instead of running, on whatever stream it comes; calls
    of other models run. Of one table the first error is kept until it is raised. What nobody has raised comes
    here, one error a call, whose text says how many other tables left one too: call it again until it
    returns. A replay of a CUDA graph leaves its errors in the same way. Do not call it while a stream is
    captured. On the CPU the call itself raises, and there is nothing to do.

    Args:
        device: a CUDA device; by default the current one.

    Raises:
        IndexError, ValueError: as :func:`embedding_bag`.
    """
    if isinstance(device, int):
        device = torch.device("cuda", device)
    where = torch.device("cuda" if device is None else device)
    if where.type != "cuda" or not torch.cuda.is_initialized():  # nothing has run there
        return
    try:
        torch.ops.recfuse.check(torch.cuda.current_device() if where.index is None else where.index)
    except RuntimeError as error:
        raise_translated(error)


def call(operator: Any, arguments: tuple[Any, ...], differentiable: bool) -> Tensor:
    """Calls an operator and gives its errors the class that their text names."""
    if _is_transformed():
        return operator(*arguments)
    try:
        if differentiable:
            return operator(*arguments)
        with _below_autograd():
            return operator(*arguments)
    except RuntimeError as error:
        raise_translated(error)


def _is_transformed() -> bool:
    """Whether the call must be that of the operator itself: for the compiler, torch.jit.trace, torch.func."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
    )


def raise_translated(error: RuntimeError) -> NoReturn:
    """Raises what :func:`recfuse.errors.translate` makes of ``error``."""
    translated = translate(error)
    if translated is error:
        raise error
    raise translated from None


def _check_tensors(input: Any, weight: Any, offsets: Any, per_sample_weights: Any) -> None:
    if (
        isinstance(input, Tensor)
        and isinstance(weight, Tensor)
        and (offsets is None or isinstance(offsets, Tensor))
        and (per_sample_weights is None or isinstance(per_sample_weights, Tensor))
    ):
        return
    given = {"input": input, "weight": weight, "offsets": offsets, "per_sample_weights": per_sample_weights}
    for name, value in given.items():
        if not isinstance(value, Tensor) and (value is not None or name in ("input", "weight")):
            raise NotATensorError(
                f"recfuse.embedding_bag: {name} is a {type(value).__name__}, must be a torch.Tensor"
            )


def _check_integers(input: Tensor, weight: Tensor, offsets: Tensor | None) -> None:
    if input.dtype in INTEGERS and (offsets is None or offsets.dtype in INTEGERS):
        return
    if not weight.dtype.is_floating_point:  # torch's function takes input and weight in either order
        return
    for name, given in (("input", input), ("offsets", offsets)):
        if given is not None and (given.dtype.is_floating_point or given.dtype.is_complex):
            raise ArgumentTypeError(
                f"recfuse.embedding_bag: {name} is {str(given.dtype).removeprefix('torch.')}, must be int32 "
                f"or int64: pass {name}.long()"
            )


def _has_kernel(
    input: Tensor, weight: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
) -> bool:
    device = weight.device
    return (
        (weight.is_cpu or (weight.is_cuda and HAS_CUDA_KERNELS))
        and weight.dtype in DTYPES
        and weight.layout is torch.strided
        and input.dtype in INTEGERS
        and input.device == device
        and not input.is_nested
        and (offsets is None or (offsets.dtype in INTEGERS and offsets.device == device))
        and (per_sample_weights is None or per_sample_weights.device == device)
    )


def _check_arguments(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    mode: str,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> None:
    if per_sample_weights is not None and per_sample_weights.shape != input.shape:
        _fail(
            f"per_sample_weights has shape {list(per_sample_weights.shape)}, must have that of input: "
            f"{list(input.shape)}"
        )
    if weight.dim() != 2:
        _fail(f"weight has {weight.dim()} dimensions, must have 2: [rows, dim]")
    if input.dim() == 2:
        if offsets is not None:
            _fail(
                f"offsets is given with a 2-D input {list(input.shape)}, whose rows are the bags; pass "
                f"offsets=None, "
                "or a 1-D input"
            )
    elif input.dim() != 1:
        _fail(f"input has {input.dim()} dimensions, must have 1 (with offsets) or 2")
    elif offsets is None:
        _fail("offsets is None, must be a 1-D tensor with a 1-D input")
    elif offsets.dim() != 1:
        _fail(f"offsets has {offsets.dim()} dimensions, must have 1")
    if mode not in MODES:
        _fail(f'mode is {mode!r}, must be "sum", "mean" or "max"')
    for name, value in (("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if not isinstance(value, bool):
            raise ArgumentTypeError(
                f"recfuse.embedding_bag: {name} is a {type(value).__name__}, must be a bool"
            )
    if mode == "max" and scale_grad_by_freq:
        _fail(
            'scale_grad_by_freq is True with mode "max", which has no such gradient; pass False, or '
            "another mode"
        )
    if mode == "max" and sparse:
        _fail('sparse is True with mode "max", which has no sparse gradient; pass False, or another mode')


def _check_sample_weights(per_sample_weights: Tensor, weight: Tensor, mode: str) -> None:
    if mode != "sum":
        raise NotImplementedError(
            f'recfuse.embedding_bag: per_sample_weights is given with mode "{mode}", is only defined for '
            f'mode "sum"'
        )
    if per_sample_weights.dtype != weight.dtype:
        raise ArgumentTypeError(
            f"recfuse.embedding_bag: per_sample_weights is {per_sample_weights.dtype}, must have the dtype "
            f"of weight: "
            f"pass per_sample_weights.to({weight.dtype})"
        )


def _padding_row(padding_idx: int | None, weight: Tensor) -> int:
    """The row to skip, counted from the start; -1: none."""
    if padding_idx is None:
        return -1
    rows = weight.shape[0]
    if not isinstance(padding_idx, (int, torch.SymInt)) or isinstance(padding_idx, bool):
        raise ArgumentTypeError(
            f"recfuse.embedding_bag: padding_idx is a {type(padding_idx).__name__}, must be an int or None"
        )
    if not -rows <= padding_idx < rows:
        _fail(f"padding_idx is {padding_idx}, must lie in [{-rows}, {rows}) with a table of {rows} rows")
    return padding_idx % rows


def _renormalise(
    weight: Tensor, indices: Tensor, max_norm: float, norm_type: float, bounds_check: str
) -> None:
    """Scales rows in place. A bad index never reaches torch: on the CPU it is raised first, with the table
    as it was; on CUDA, where torch would assert and looking would wait, a row that is used anyway stands in
    for it (row 0 where every index is bad), and the kernel reports it.
    """
    if weight.is_cuda:
        if indices.numel() == 0 or weight.numel() == 0:
            return
        if bounds_check != "off":
            good = (indices >= 0) & (indices < weight.shape[0])
            indices = torch.where(good, indices, torch.where(good, indices, 0).amax())
        if weight.stride() != (
            weight.shape[1],
            1,
        ):  # torch's kernel takes a row's stride for its length
            packed = weight.clone(memory_format=torch.contiguous_format)
            torch.embedding_renorm_(packed, indices, max_norm, norm_type)
            weight.copy_(packed)
            return
    elif readable(indices) and indices.numel():
        low, high = indices.aminmax()
        if low < 0 or high >= weight.shape[0]:
            wrong = int(((indices < 0) | (indices >= weight.shape[0])).nonzero()[0])
            raise IndexRangeError(
                f"recfuse.embedding_bag: input[{wrong}] is {int(indices[wrong])}, must lie in [0, "
                f"{weight.shape[0]})"
            )
    torch.embedding_renorm_(weight, indices, max_norm, norm_type)


def _fail(detail: str) -> NoReturn:
    raise ArgumentValueError(f"recfuse.embedding_bag: {detail}")
