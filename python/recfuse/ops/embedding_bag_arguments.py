"""The arguments of ``embedding_bag``: their checks, and the scaling of rows to a norm before pooling."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import torch
from torch import Tensor

from recfuse._codes import DTYPES, INTEGERS, MODES
from recfuse._storage import check_storages, is_readable
from recfuse.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError, a_type
from recfuse.ops.library import HAS_CUDA_KERNELS, check_tensor

torch_embedding_bag = torch.nn.functional.embedding_bag
"""Torch's own function, stored here because a script may replace it by recfuse's, which must not recurse."""

_DTYPES, _INTEGERS = frozenset(DTYPES), frozenset(INTEGERS)  # sets, for fast checks in each call


def fail(detail: str) -> NoReturn:
    """Raise ValueError."""
    raise ArgumentValueError(f"recfuse.embedding_bag: {detail}")


def _fail_type(detail: str) -> NoReturn:
    raise ArgumentTypeError(f"recfuse.embedding_bag: {detail}")


def check_tensors(input: Any, weight: Any, offsets: Any, per_sample_weights: Any) -> None:
    """Raise TypeError if an argument is no tensor."""
    if (
        isinstance(input, Tensor)
        and isinstance(weight, Tensor)
        and (offsets is None or isinstance(offsets, Tensor))
        and (per_sample_weights is None or isinstance(per_sample_weights, Tensor))
    ):
        return
    arguments = {
        "input": input,
        "weight": weight,
        "offsets": offsets,
        "per_sample_weights": per_sample_weights,
    }
    for name, value in arguments.items():
        if value is not None or name in ("input", "weight"):
            check_tensor("embedding_bag", name, value)


def check_integers(input: Tensor, weight: Tensor, offsets: Tensor | None) -> None:
    """Raise TypeError if indices or offsets are no integers."""
    if input.dtype in _INTEGERS and (offsets is None or offsets.dtype in _INTEGERS):
        return
    if not weight.dtype.is_floating_point:  # torch's function takes input and weight in either order
        return
    for name, tensor in (("input", input), ("offsets", offsets)):
        if tensor is not None and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            _fail_type(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')}; expected int32 or int64. Pass "
                f"{name}.long()."
            )


def has_kernel(
    input: Tensor, weight: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
) -> bool:
    """Return whether recfuse has a kernel for these tensors; torch's function takes all others."""
    device = weight.device
    return (
        (weight.is_cpu or (weight.is_cuda and HAS_CUDA_KERNELS))
        and weight.dtype in _DTYPES
        and weight.layout is torch.strided
        and input.dtype in _INTEGERS
        and input.device == device
        and not input.is_nested
        and (offsets is None or (offsets.dtype in _INTEGERS and offsets.device == device))
        and (per_sample_weights is None or per_sample_weights.device == device)
    )


def check_arguments(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    mode: str,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> None:
    """Raise an error for arguments that a kernel does not take."""
    check_lookups(input, weight, offsets, per_sample_weights, mode)
    for name, value in (("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if not isinstance(value, bool):
            _fail_type(f"{name} is {a_type(value)}; expected a bool")
    if mode == "max" and scale_grad_by_freq:
        fail(
            'scale_grad_by_freq is True with mode "max", which has no such gradient. Pass False, or '
            "another mode."
        )
    if mode == "max" and sparse:
        fail('sparse is True with mode "max", which has no sparse gradient. Pass False, or another mode.')
    if per_sample_weights is not None and mode != "sum":
        raise NotImplementedError(
            f'recfuse.embedding_bag: per_sample_weights is given with mode "{mode}"; expected mode "sum"'
        )
    if per_sample_weights is not None and per_sample_weights.dtype != weight.dtype:
        _fail_type(
            f"per_sample_weights is {per_sample_weights.dtype}; expected the dtype of weight. Pass "
            f"per_sample_weights.to({weight.dtype})."
        )


def check_lookups(
    input: Tensor, weight: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None, mode: str
) -> None:
    """Raise an error for lookups and a mode that no kernel takes."""
    if per_sample_weights is not None and per_sample_weights.shape != input.shape:
        fail(
            f"per_sample_weights has shape {list(per_sample_weights.shape)}; expected the shape of input, "
            f"{list(input.shape)}"
        )
    if weight.dim() != 2:
        fail(f"weight has {weight.dim()} dimensions; expected 2, [rows, dim]")
    if input.dim() == 2:
        if offsets is not None:
            fail(
                f"offsets is given with a 2-D input {list(input.shape)}, whose rows are the bags. Pass "
                "offsets=None, or a 1-D input."
            )
    elif input.dim() != 1:
        fail(f"input has {input.dim()} dimensions; expected 1 (with offsets) or 2")
    elif offsets is None:
        fail("offsets is None; expected a 1-D tensor with a 1-D input")
    elif offsets.dim() != 1:
        fail(f"offsets has {offsets.dim()} dimensions; expected 1")
    if mode not in MODES:
        fail(f'mode is {mode!r}; expected "sum", "mean" or "max"')


def padding_row(padding_idx: int | None, weight: Tensor) -> int:
    """Return the row to skip, counted from the start; -1 for no row."""
    if padding_idx is None:
        return -1
    rows = weight.shape[0]
    is_plain = isinstance(padding_idx, (int, torch.SymInt))  # for dynamo, a dynamic int is an int
    if isinstance(padding_idx, bool) or not (is_plain or hasattr(padding_idx, "__index__")):
        _fail_type(f"padding_idx is {a_type(padding_idx)}; expected an int or None")
    if not is_plain:  # NumPy's integers, which torch takes too
        padding_idx = operator.index(padding_idx)
    if not -rows <= padding_idx < rows:
        fail(f"padding_idx is {padding_idx}; expected [{-rows}, {rows}) with a table of {rows} rows")
    return padding_idx % rows


def renormalise(
    weight: Tensor, indices: Tensor, max_norm: float, norm_type: float, bounds_check: str
) -> None:
    """Scale rows in place.

    A bad index never reaches torch. On the CPU it raises first, and the table does not change. On CUDA torch
    would assert, and a check would wait. So another row of the call replaces a bad index there (row 0 if all
    indices are bad), and the kernel reports it.
    """
    check_storages("recfuse.embedding_bag", "weight", (weight,))
    check_storages("recfuse.embedding_bag", "input", (indices,))
    if weight.is_cuda:
        if indices.numel() == 0 or weight.numel() == 0:
            return
        if bounds_check != "off":
            good = (indices >= 0) & (indices < weight.shape[0])
            indices = torch.where(good, indices, torch.where(good, indices, 0).amax())
        if weight.stride() != (weight.shape[1], 1):  # torch's kernel takes a row's stride for its length
            packed = weight.clone(memory_format=torch.contiguous_format)
            torch.embedding_renorm_(packed, indices, max_norm, norm_type)
            weight.copy_(packed)
            return
    elif is_readable(indices) and indices.numel():
        low, high = indices.aminmax()
        if low < 0 or high >= weight.shape[0]:
            wrong = int(((indices < 0) | (indices >= weight.shape[0])).nonzero()[0])
            raise IndexRangeError(
                f"recfuse.embedding_bag: input[{wrong}] is {int(indices[wrong])}; expected [0, "
                f"{weight.shape[0]})"
            )
    torch.embedding_renorm_(weight, indices, max_norm, norm_type)
