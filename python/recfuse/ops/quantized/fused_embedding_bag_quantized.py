"""``fused_embedding_bag_quantized``: tables of int8 and int4 rows, and of floats, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse._codes import DTYPE_NAMES
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.ops.gradients import bags_of
from recfuse.ops.library import (
    below_autograd,
    check_1d,
    check_tensor,
    is_transformed,
    needs_derivatives,
    register_fake,
)
from recfuse.ops.quantized.gradients import pooled_rows, refuse_table_gradients

_NAME = "fused_embedding_bag_quantized"
_operator = torch.ops.recfuse.fused_embedding_bag_quantized.default


def fused_embedding_bag_quantized(
    weights: Sequence[Tensor],
    parameters: Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    output_dim: int,
    per_sample_weights: Tensor | None = None,
    *,
    output_dtype: torch.dtype = torch.float32,
    prefetch_distance: int = -1,
    bounds_check: str = "on",
    schedules: Tensor | None = None,
    warps: int = 0,
    mapping: Tensor | None = None,
    stored: Tensor | None = None,
) -> Tensor:
    """Pool many tables, some of them quantised, in one call.

    A value of a quantised table is ``scale * code + bias``, with a scale and a bias a row. Rows are read
    where they lie: weights and parameters may be views of the same bytes.
    :class:`recfuse.nn.QuantizedEmbeddingBagCollection` creates the arguments.

    Args:
        weights: float32, float16 or bfloat16 matrices ``[rows, dim]``, contiguous; or codes, uint8
            ``[rows, dim]`` (int8) or ``[rows, dim / 2]`` (int4, the first in the low half of a byte), whose
            rows may have gaps. The dim of features tells int8 from int4.
        parameters: for each weight with codes float16 or, on the CPU, float32 ``[rows, 2]``, the scale and
            the bias of each row, whose rows may have gaps; for other weights an empty tensor.
        features, indices, offsets, output_dim, per_sample_weights: as in :func:`fused_embedding_bag`. An
            element of codes is a code.
        output_dtype: torch.float32, torch.float16 or torch.bfloat16. Default: torch.float32.
        prefetch_distance, bounds_check, schedules, warps, mapping: as in :func:`fused_embedding_bag`. Codes
            have kind "pool".
        stored: int64 ``[tables, 8]`` on the CPU, for tables that share memory with others, as those of
            FBGEMM's inference modules do. Then weights are that memory, contiguous uint8; parameters are
            the memory with the parameters, mostly the same tensors; and a feature has the number of a row
            of ``stored`` instead of a weight.
            The fields are the weight, the first byte, rows, dim, dtype, pitch in bytes, and the first byte
            and dtype of the parameters; dtypes are 0 (float32), 1 (float16), 2 (bfloat16), 4 (int8) and 5
            (int4).

    Shape:
        - indices: ``[lookups]``.
        - offsets: ``[features * bags + 1]``.
        - output: ``[bags, output_dim]``.

    Returns:
        Tensor: ``[bags, output_dim]`` of ``output_dtype``. Sums are in float32.

    Raises:
        TypeError: a bad argument.
        ValueError: a bad argument or offset; codes whose width fits no dim.
        IndexError: as :func:`fused_embedding_bag`.
        NotImplementedError: a weight or its parameters requires a gradient.

    Example:
        >>> table = torch.randn(1000, 16)
        >>> codes, parameters = recfuse.ops.quantize_rows(table, "int8")
        >>> features = torch.tensor([[0, 0, 1000, 16, 0, -1, 0]])
        >>> indices, offsets = torch.tensor([3, 999]), torch.tensor([0, 2])
        >>> recfuse.ops.fused_embedding_bag_quantized(
        ...     [codes], [parameters], features, indices, offsets, output_dim=16
        ... ).shape
        torch.Size([1, 16])

    Note:
        All tensors are on the CPU, or all on one CUDA device; ``features``, ``schedules`` and ``mapping`` are
        always on the CPU. Tables have no gradients here, but ``per_sample_weights`` has one.

    Source: Guan et al., Post-Training 4-bit Quantization on Embedding Tables, 2019 (a scale and a bias a
    row).
    """
    refuse_table_gradients((*weights, *parameters))
    arguments = weights, parameters, features, indices, offsets, output_dim, per_sample_weights
    options: tuple[Any, ...] = (
        dtype_name(output_dtype, f"recfuse.{_NAME}"),
        prefetch_distance,
        bounds_check,
        schedules,
        warps,
        mapping,
        stored,
    )
    if is_transformed() or torch.is_inference_mode_enabled():
        return _operator(*arguments, *options)
    if per_sample_weights is not None and needs_derivatives((per_sample_weights,)):
        output: Tensor = pooled_rows(_pool, (*arguments, *options), per_sample_weights)
        return output
    return _pool(*arguments, *options)


def _pool(*call: Any) -> Any:
    """Call the operator, outside of torch.func's transforms."""
    with below_autograd():
        return _operator(*call)


def dtype_name(dtype: Any, where: str) -> str:
    """Return the name of the dtype of an output; raise TypeError for others."""
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, torch.dtype) or name not in DTYPE_NAMES:
        raise ArgumentTypeError(
            f"{where}: output_dtype is {dtype!r}; expected torch.float32, torch.float16 or torch.bfloat16"
        )
    return name


def code_bytes(dim: int, dtype: str, where: str) -> int:
    """Return the bytes of a row of codes, dtype "int8" or "int4"; raise ValueError for part of a byte."""
    if dtype not in ("int8", "int4"):
        raise ArgumentValueError(f'{where}: dtype is {dtype!r}; expected "int8" or "int4"')
    if dtype == "int4" and dim % 2:
        raise ArgumentValueError(
            f"{where}: a row has {dim} columns, of int4 not a whole number of bytes. Use int8 for this table."
        )
    return dim if dtype == "int8" else dim // 2


def quantize_rows(
    weight: Tensor, dtype: str = "int8", *, codes: Tensor | None = None, parameters: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise the rows of a table to int8 or int4 codes, with a scale and a bias a row.

    The bias is the least value of a row, rounded down to float16, and the scale is rounded up. So each value
    differs from ``scale * code + bias`` by at most ``scale / 2``.

    Args:
        weight: float32, float16 or bfloat16 ``[rows, dim]`` on the CPU, with finite values of float16's
            range.
        dtype: "int8" or "int4". Default: "int8".
        codes, parameters: the results, as views of other memory for other layouts. Default: new tensors.

    Shape:
        - codes: uint8 ``[rows, dim]`` or, of int4, ``[rows, dim / 2]``.
        - parameters: float16 ``[rows, 2]``, scale and bias.

    Returns:
        tuple: codes and parameters.

    Raises:
        TypeError: a bad argument.
        ValueError: a value that is not finite or outside of float16's range, with its row and column; a dim
        that
            is not a whole number of bytes.

    Example:
        >>> codes, parameters = recfuse.ops.quantize_rows(torch.randn(1000, 16), "int4")
        >>> codes.shape, parameters.dtype
        (torch.Size([1000, 8]), torch.float16)
    """
    check_tensor("quantize_rows", "weight", weight)
    if weight.dim() != 2:
        raise ArgumentValueError(f"recfuse.quantize_rows: weight has {weight.dim()} dimensions; expected 2")
    width = code_bytes(weight.shape[1], dtype, "recfuse.quantize_rows")
    if codes is None:
        codes = torch.empty(weight.shape[0], width, dtype=torch.uint8)
    if parameters is None:
        parameters = torch.empty(weight.shape[0], 2, dtype=torch.float16)
    check_tensor("quantize_rows", "codes", codes)
    check_tensor("quantize_rows", "parameters", parameters)
    if parameters.dtype != torch.float16:
        raise ArgumentTypeError(
            f"recfuse.quantize_rows: parameters is {parameters.dtype}; expected torch.float16"
        )
    if codes.dim() != 2:
        raise ArgumentValueError(f"recfuse.quantize_rows: codes has {codes.dim()} dimensions; expected 2")
    if codes.shape[1] != width:
        raise ArgumentValueError(
            f"recfuse.quantize_rows: codes has rows of {codes.shape[1]} bytes; expected {width}, for {dtype}"
        )
    torch.ops.recfuse.quantize_rows(weight.detach(), codes, parameters)
    return codes, parameters


def dequantize_rows(
    codes: Tensor, parameters: Tensor, dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Compute the values of quantised rows.

    Args:
        codes, parameters: as :func:`quantize_rows` returns them.
        dim: the columns of the table.
        dtype: torch.float32, torch.float16 or torch.bfloat16. Default: torch.float32.

    Returns:
        Tensor: ``[rows, dim]`` of ``dtype``, on the CPU.

    Raises:
        TypeError: a bad argument.
        ValueError: codes or parameters of another shape.

    Example:
        >>> codes, parameters = recfuse.ops.quantize_rows(torch.ones(10, 16), "int4")
        >>> recfuse.ops.dequantize_rows(codes, parameters, 16).unique()
        tensor([1.])
    """
    check_tensor("dequantize_rows", "codes", codes)
    check_tensor("dequantize_rows", "parameters", parameters)
    if codes.dim() != 2:
        raise ArgumentValueError(f"recfuse.dequantize_rows: codes has {codes.dim()} dimensions; expected 2")
    dtype_name(dtype, "recfuse.dequantize_rows")
    weight = torch.empty(codes.shape[0], dim, dtype=dtype)
    torch.ops.recfuse.dequantize_rows(codes, parameters, weight)
    return weight


@register_fake(_NAME, follows="weights")
def _shape(
    weights: Sequence[Tensor],
    parameters: Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    output_dim: int,
    per_sample_weights: Tensor | None = None,
    output_dtype: str = "float32",
    *_: Any,
) -> Tensor:
    check_1d(_NAME, indices, offsets)
    if output_dtype not in DTYPE_NAMES:
        raise ArgumentValueError(
            f"recfuse.{_NAME}: output_dtype is {output_dtype!r}; expected float32, float16 or bfloat16"
        )
    like = weights[0] if weights else indices
    return like.new_empty((bags_of(features, offsets), output_dim), dtype=getattr(torch, output_dtype))


@register_fake("quantize_rows")
def _error_shape(weight: Tensor, codes: Tensor, parameters: Tensor) -> Tensor:
    return weight.new_empty((1,), dtype=torch.float64)


@register_fake("dequantize_rows")
def _no_output(codes: Tensor, parameters: Tensor, weight: Tensor) -> None:
    return None
