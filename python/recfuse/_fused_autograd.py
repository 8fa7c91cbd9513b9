"""What the compiler and autograd need to know of ``fused_embedding_bag``, as in ``_autograd``.

Registers ``fused_tables`` too: the same call, with gradients for the weights that the buffers are packed
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse import _fused_backward_cuda
from recfuse._autograd import as_given, kernel, library, wanted
from recfuse._backward import sparse_grad
from recfuse._fused_backward import FusedLayout, flat_elements, slot_weights
from recfuse.errors import ArgumentTypeError

_ops = torch.ops.recfuse

# fused_embedding_bag whose buffers are packed from `weights`, in order: the gradients are those of the
# weights.
library.define(
    "fused_tables(Tensor[] weights, Tensor[] buffers, Tensor features, Tensor indices, Tensor offsets, "
    "SymInt output_dim, Tensor? per_sample_weights, bool sparse, bool any_max, Tensor? schedules=None, "
    "int warps=0, Tensor? mapping=None) -> Tensor"
)
library.define(
    "fused_buffers_backward(Tensor grad, Tensor[] buffers, SymInt[] numels, int[] dtypes, "
    "Tensor features, Tensor indices, Tensor offsets, Tensor? per_sample_weights) -> Tensor[]"
)
library.define(
    "fused_tables_backward(Tensor grad, Tensor[] weights, SymInt[] rows, SymInt[] dims, int[] dtypes, "
    "Tensor features, Tensor indices, Tensor offsets, Tensor? per_sample_weights) -> Tensor[]"
)
library.define(
    "fused_buffers_sparse_backward(Tensor grad, int[] dtypes, Tensor features, Tensor indices, "
    "Tensor offsets, Tensor? per_sample_weights) -> Tensor[]"
)
library.define(
    "fused_tables_sparse_backward(Tensor grad, SymInt[] dims, int[] dtypes, Tensor features, "
    "Tensor indices, Tensor offsets, Tensor? per_sample_weights) -> Tensor[]"
)
library.define(
    "fused_buffers_sample_weights_backward(Tensor grad, Tensor[] buffers, Tensor features, "
    "Tensor indices, Tensor offsets) -> Tensor"
)
library.define(
    "fused_tables_sample_weights_backward(Tensor grad, Tensor[] weights, Tensor features, Tensor indices, "
    "Tensor offsets) -> Tensor"
)


# In the order of rf_dtype. Operators take dtypes as their places here: how a ScalarType[] reaches a Python
# operator, as dtypes or as bare integers, depends on torch's version.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _dtype_codes(tensors: Sequence[Tensor]) -> list[int]:
    # The compiler asks for the gradients before the operator itself has looked at its arguments.
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            name = str(tensor.dtype).removeprefix("torch.")
            raise ArgumentTypeError(
                f"recfuse.fused_embedding_bag: buffers is {name}, must be float32, float16 or bfloat16"
            )
    return [DTYPES.index(tensor.dtype) for tensor in tensors]


def _from_codes(codes: Sequence[int]) -> list[torch.dtype]:
    return [DTYPES[code] for code in codes]


def fused_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """dtype of a fused call's output: that of the buffers where they agree, else float32."""
    return dtypes[0] if dtypes and len(set(dtypes)) == 1 else torch.float32


@torch.library.register_fake("recfuse::fused_embedding_bag")
def _fused_fake(
    buffers: Sequence[Tensor], features: Tensor, indices: Tensor, offsets: Tensor, output_dim: int, *_: Any
) -> Tensor:
    count = features.shape[0]
    torch._check(
        offsets.dim() == 1 and indices.dim() == 1,
        lambda: (
            f"recfuse.fused_embedding_bag: indices and offsets have {indices.dim()} and {offsets.dim()} "
            "dimensions, must have 1"
        ),
    )
    bags = (offsets.shape[0] - 1) // count if count else 0
    return indices.new_empty((bags, output_dim), dtype=fused_dtype([buffer.dtype for buffer in buffers]))


def _fused_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    buffers, features, indices, offsets, _, sample_weights, sparse, *_ = inputs
    ctx.save_for_backward(features, indices, offsets, sample_weights, *buffers)
    ctx.sparse = sparse


def _fused_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    features, indices, offsets, sample_weights, *buffers = ctx.saved_tensors
    buffer_grads: list[Tensor | None] = [None] * len(buffers)
    sample_weights_grad = None
    needed_grads = ctx.needs_input_grad[0]
    dtypes = _dtype_codes(buffers)
    if any(needed_grads):
        numels = [buffer.numel() for buffer in buffers]
        if ctx.sparse:
            parts = _ops.fused_buffers_sparse_backward(
                grad, dtypes, features, indices, offsets, sample_weights
            )
            found = [sparse_grad(parts[2 * i], parts[2 * i + 1], (numel,)) for i, numel in enumerate(numels)]
        else:
            found = _ops.fused_buffers_backward(
                grad, buffers, numels, dtypes, features, indices, offsets, sample_weights
            )
        buffer_grads = [one if needed else None for one, needed in zip(found, needed_grads, strict=True)]
    if wanted(ctx, 5):
        sample_weights_grad = _ops.fused_buffers_sample_weights_backward(
            grad, buffers, features, indices, offsets
        ).to(sample_weights.dtype)
    return as_given(ctx, (buffer_grads, None, None, None, None, sample_weights_grad, *[None] * 6))


def _dense_grads(
    features: Tensor,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    weights: Sequence[Tensor],
) -> tuple[FusedLayout, list[Tensor]]:
    """Gradient of each slot, on the device of `grad`."""
    if grad.is_cuda:
        return _fused_backward_cuda.dense_grads(features, grad, indices, offsets, per_sample_weights, weights)
    layout = FusedLayout(features)
    return layout, layout.dense_grads(grad, indices, offsets, per_sample_weights, weights)


def _sparse_grads(
    features: Tensor, grad: Tensor, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None
) -> tuple[FusedLayout, list[tuple[Tensor, Tensor]]]:
    """Rows and values of each slot's gradient, on the device of `grad`."""
    if grad.is_cuda:
        return _fused_backward_cuda.sparse_grads(features, grad, indices, offsets, per_sample_weights)
    layout = FusedLayout(features)
    return layout, layout.sparse_grads(grad, indices, offsets, per_sample_weights)


def _sample_weights_grad(
    features: Tensor, grad: Tensor, indices: Tensor, offsets: Tensor, weights: Sequence[Tensor]
) -> Tensor:
    if grad.is_cuda:
        return _fused_backward_cuda.sample_weights_grad(features, grad, indices, offsets, weights)
    return FusedLayout(features).sample_weights_grad(grad, indices, offsets, weights)


@kernel("fused_buffers_backward")
def _(
    grad: Tensor,
    buffers: Sequence[Tensor],
    numels: Sequence[int],
    dtypes: Sequence[int],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
) -> list[Tensor]:
    weights = slot_weights(FusedLayout(features), buffers)
    layout, found = _dense_grads(features, grad, indices, offsets, per_sample_weights, weights)
    flat = [
        grad.new_zeros(numel, dtype=dtype) for numel, dtype in zip(numels, _from_codes(dtypes), strict=True)
    ]
    for slot, slot_grad in zip(layout.slots, found, strict=True):
        flat[slot.buffer].narrow(0, slot.offset, slot.rows * slot.dim).add_(slot_grad.reshape(-1))
    return flat


@torch.library.register_fake("recfuse::fused_buffers_backward")
def _(
    grad: Tensor, buffers: Sequence[Tensor], numels: Sequence[int], dtypes: Sequence[int], *_: Any
) -> list[Tensor]:
    return [
        grad.new_empty((numel,), dtype=dtype)
        for numel, dtype in zip(numels, _from_codes(dtypes), strict=True)
    ]


@kernel("fused_buffers_sparse_backward")
def _(
    grad: Tensor,
    dtypes: Sequence[int],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
) -> list[Tensor]:
    """Elements and values of each buffer's gradient, one pair after the other."""
    layout, found = _sparse_grads(features, grad, indices, offsets, per_sample_weights)
    out = []
    for number, dtype in enumerate(_from_codes(dtypes)):
        own = [(s, *part) for s, part in zip(layout.slots, found, strict=True) if s.buffer == number]
        out.extend(flat_elements(own, dtype, grad.device))
    return out


@torch.library.register_fake("recfuse::fused_buffers_sparse_backward")
def _(grad: Tensor, dtypes: Sequence[int], features: Tensor, *_: Any) -> list[Tensor]:
    out = []
    for dtype in _from_codes(dtypes):
        count = torch.library.get_ctx().new_dynamic_size()
        out += [grad.new_empty((count,), dtype=torch.int64), grad.new_empty((count,), dtype=dtype)]
    return out


@kernel("fused_tables_sparse_backward")
def _(
    grad: Tensor,
    dims: Sequence[int],
    dtypes: Sequence[int],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
) -> list[Tensor]:
    """Rows and values of each table's gradient, one pair after the other."""
    found = _sparse_grads(features, grad, indices, offsets, per_sample_weights)[1]
    out = []
    for (rows, values), dtype in zip(found, _from_codes(dtypes), strict=True):
        out += [rows, values.to(dtype)]
    return out


@torch.library.register_fake("recfuse::fused_tables_sparse_backward")
def _(grad: Tensor, dims: Sequence[int], dtypes: Sequence[int], features: Tensor, *_: Any) -> list[Tensor]:
    out = []
    for dim, dtype in zip(dims, _from_codes(dtypes), strict=True):
        count = torch.library.get_ctx().new_dynamic_size()
        out += [grad.new_empty((count,), dtype=torch.int64), grad.new_empty((count, dim), dtype=dtype)]
    return out


@kernel("fused_tables_backward")
def _(
    grad: Tensor,
    weights: Sequence[Tensor],
    rows: Sequence[int],
    dims: Sequence[int],
    dtypes: Sequence[int],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
) -> list[Tensor]:
    found = _dense_grads(features, grad, indices, offsets, per_sample_weights, weights)[1]
    # Tables of one group are slices of one tensor: they do not overlap, so no copies are made.
    return [slot_grad.to(dtype) for slot_grad, dtype in zip(found, _from_codes(dtypes), strict=True)]


@torch.library.register_fake("recfuse::fused_tables_backward")
def _(
    grad: Tensor,
    weights: Sequence[Tensor],
    rows: Sequence[int],
    dims: Sequence[int],
    dtypes: Sequence[int],
    *_: Any,
) -> list[Tensor]:
    return [
        grad.new_empty((r, d), dtype=dtype)
        for r, d, dtype in zip(rows, dims, _from_codes(dtypes), strict=True)
    ]


@kernel("fused_buffers_sample_weights_backward")
def _(grad: Tensor, buffers: Sequence[Tensor], features: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
    weights = slot_weights(FusedLayout(features), buffers)
    return _sample_weights_grad(features, grad, indices, offsets, weights)


@torch.library.register_fake("recfuse::fused_buffers_sample_weights_backward")
def _(grad: Tensor, buffers: Sequence[Tensor], features: Tensor, indices: Tensor, *_: Any) -> Tensor:
    return grad.new_empty((indices.shape[0],))


torch.library.register_autograd("recfuse::fused_embedding_bag", _fused_backward, setup_context=_fused_setup)


@kernel("fused_tables_sample_weights_backward")
def _(grad: Tensor, weights: Sequence[Tensor], features: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
    return _sample_weights_grad(features, grad, indices, offsets, weights)


@torch.library.register_fake("recfuse::fused_tables_sample_weights_backward")
def _(grad: Tensor, weights: Sequence[Tensor], features: Tensor, indices: Tensor, *_: Any) -> Tensor:
    return grad.new_empty((indices.shape[0],))


@kernel("fused_tables")
def _(
    weights: Sequence[Tensor],
    buffers: Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    output_dim: int,
    per_sample_weights: Tensor | None,
    sparse: bool,
    any_max: bool,
    schedules: Tensor | None = None,
    warps: int = 0,
    mapping: Tensor | None = None,
) -> Tensor:
    arguments = buffers, features, indices, offsets, output_dim, per_sample_weights
    if schedules is None and mapping is None and not warps:
        return _ops.fused_embedding_bag.default(*arguments)
    return _ops.fused_embedding_bag.default(*arguments, False, -1, "on", schedules, warps, mapping)


@torch.library.register_fake("recfuse::fused_tables")
def _(weights: Sequence[Tensor], *arguments: Any) -> Tensor:
    return _fused_fake(*arguments)


def _tables_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, _, features, indices, offsets, _, sample_weights, sparse, any_max, *_ = inputs
    # Without need of their values the weights are not kept: they may change before backward, as torch allows.
    kept = weights if any_max or sample_weights is not None else []
    ctx.save_for_backward(features, indices, offsets, sample_weights, *kept)
    ctx.shapes = [weight.shape for weight in weights]
    ctx.dtypes = _dtype_codes(weights)
    ctx.sparse = sparse


def _tables_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    features, indices, offsets, sample_weights, *weights = ctx.saved_tensors
    needed_grads, count = ctx.needs_input_grad[0], len(ctx.shapes)
    rows, dims = [shape[0] for shape in ctx.shapes], [shape[1] for shape in ctx.shapes]
    grads: list[Tensor | None] = [None] * count
    sample_weights_grad = None
    if any(needed_grads):
        if ctx.sparse:
            parts = _ops.fused_tables_sparse_backward(
                grad, dims, ctx.dtypes, features, indices, offsets, sample_weights
            )
            found = [sparse_grad(parts[2 * i], parts[2 * i + 1], tuple(ctx.shapes[i])) for i in range(count)]
        else:
            found = _ops.fused_tables_backward(
                grad, weights, rows, dims, ctx.dtypes, features, indices, offsets, sample_weights
            )
        grads = [one if needed else None for one, needed in zip(found, needed_grads, strict=True)]
    if wanted(ctx, 6):
        sample_weights_grad = _ops.fused_tables_sample_weights_backward(
            grad, weights, features, indices, offsets
        ).to(sample_weights.dtype)
    buffer_grads = [None] * len(ctx.needs_input_grad[1])
    return as_given(ctx, (grads, buffer_grads, None, None, None, None, sample_weights_grad, *[None] * 5))


torch.library.register_autograd("recfuse::fused_tables", _tables_backward, setup_context=_tables_setup)
