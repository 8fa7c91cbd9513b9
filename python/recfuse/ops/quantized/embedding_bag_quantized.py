"""``embedding_bag_quantized``: one table of int8 or int4 rows, as :func:`recfuse.embedding_bag`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recfuse._codes import INTEGERS, MODES
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.ops.bags import feature_of, lookup_ends
from recfuse.ops.embedding_bag_arguments import check_lookups, padding_row
from recfuse.ops.library import check_tensor, is_transformed
from recfuse.ops.quantized.fused_embedding_bag_quantized import (
    code_bytes,
    fused_embedding_bag_quantized,
)

_NAME = "embedding_bag_quantized"


def embedding_bag_quantized(
    input: Tensor,
    codes: Tensor,
    parameters: Tensor,
    offsets: Tensor | None = None,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    *,
    dtype: str = "int8",
    output_dtype: torch.dtype = torch.float32,
    prefetch_distance: int = -1,
    bounds_check: str = "on",
) -> Tensor:
    """Gather rows of a quantised table and pool them, as :func:`recfuse.embedding_bag`.

    A value is ``scale * code + bias``, with a scale and a bias a row. Rows are read where they lie.
    :class:`recfuse.nn.QuantizedEmbeddingBag` is the module.

    Args:
        input: int32 or int64; ``[lookups]`` with ``offsets``, or ``[bags, n]`` without.
        codes, parameters: the table, as :func:`recfuse.ops.quantize_rows` returns it; or views of other
            memory, as :func:`recfuse.ops.fused_embedding_bag_quantized` takes them.
        offsets: int32 or int64 ``[bags]``, or ``[bags + 1]`` with ``include_last_offset``: the position
            at which each bag begins. Ascends from 0.
        mode: "sum", "mean" or "max". Default: "mean".
        per_sample_weights: a floating factor per lookup, with the shape of ``input``; mode "sum" only.
        include_last_offset: ``offsets`` ends with the end of the last bag, on the CPU the number of lookups.
            Default: False.
        padding_idx: skip lookups of this row; a negative number counts from the end.
        dtype: "int8" or "int4". Default: "int8".
        output_dtype: torch.float32, torch.float16 or torch.bfloat16. Default: torch.float32.
        prefetch_distance, bounds_check: as in :func:`recfuse.embedding_bag`.

    Shape:
        - input: ``[lookups]`` or ``[bags, n]``.
        - codes: ``[rows, dim]`` or, of int4, ``[rows, dim / 2]``.
        - output: ``[bags, dim]``.

    Returns:
        Tensor: ``[bags, dim]`` of ``output_dtype``; zeros for empty bags. Sums are in float32.

    Raises:
        TypeError: a bad argument.
        ValueError: a bad argument or offset.
        IndexError: as :func:`recfuse.embedding_bag`.
        NotImplementedError: codes or parameters require a gradient; ``per_sample_weights`` with another mode
            than "sum".

    Example:
        >>> codes, parameters = recfuse.ops.quantize_rows(torch.randn(1000, 16), "int4")
        >>> indices, offsets = torch.tensor([1, 5, 7]), torch.tensor([0, 2])
        >>> recfuse.ops.embedding_bag_quantized(indices, codes, parameters, offsets, dtype="int4").shape
        torch.Size([2, 16])

    Note:
        All tensors are on the CPU, or all on one CUDA device. ``per_sample_weights`` has a gradient.

    Source: Guan et al., Post-Training 4-bit Quantization on Embedding Tables, 2019 (a scale and a bias a
    row).
    """
    for name, value in (("codes", codes), ("parameters", parameters)):
        check_tensor(_NAME, name, value)
    if codes.dim() != 2:
        raise ArgumentValueError(f"recfuse.{_NAME}: codes has {codes.dim()} dimensions; expected 2")
    lookups = bag_lookups(_NAME, input, codes, offsets, per_sample_weights, mode, include_last_offset)
    code_bytes(0, dtype, f"recfuse.{_NAME}")
    rows, dim = codes.shape[0], codes.shape[1] * (2 if dtype == "int4" else 1)
    features = feature_of(rows, dim, MODES.index(mode), padding_row(padding_idx, codes), is_transformed())
    indices, ends, weights = lookups
    return fused_embedding_bag_quantized(
        [codes], [parameters], features, indices, ends, dim, weights,
        output_dtype=output_dtype, prefetch_distance=prefetch_distance, bounds_check=bounds_check,
    )  # fmt: skip


def bag_lookups(
    function: str,
    input: Any,
    codes: Tensor,
    offsets: Any,
    per_sample_weights: Any,
    mode: str,
    include_last_offset: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the lookups of a call of one table: indices, offsets with the end of the last bag, weights."""
    check_tensor(function, "input", input)
    for name, value in (("offsets", offsets), ("per_sample_weights", per_sample_weights)):
        if value is not None:
            check_tensor(function, name, value)
    for name, value in (("input", input), ("offsets", offsets)):
        if value is not None and value.dtype not in INTEGERS:
            found = str(value.dtype).removeprefix("torch.")
            raise ArgumentTypeError(f"recfuse.{function}: {name} is {found}; expected int32 or int64")
    check_lookups(input, codes, offsets, per_sample_weights, mode)
    if include_last_offset and offsets is None:
        raise ArgumentValueError(
            f"recfuse.{function}: include_last_offset is True without offsets; expected False"
        )
    ends = lookup_ends(input, offsets, include_last_offset)
    weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    return input.reshape(-1), ends, weights
