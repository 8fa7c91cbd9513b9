"""Joins separate lookups of tables, table after table, into the arguments of one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse import _C
from recfuse._arguments import integers_on
from recfuse._codes import INTEGERS
from recfuse._storage import check_storages, join_offsets
from recfuse.errors import ArgumentTypeError, ArgumentValueError, OffsetError, a_type

_aten = torch.ops.aten


def join_tables(
    offsets: Tensor | Sequence[Tensor],
    indices: Tensor | Sequence[Tensor],
    row_weights: Sequence[Tensor | None] | None = None,
    *,
    tables: int,
    prefix: str,
    rows: Callable[[int], int] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the indices, offsets and weights of one call for tables with separate lookups.

    See `FusedEmbeddingBagList.pool`. A table has `rows(table)` rows.
    """
    try:
        if len(indices) != tables or len(offsets) != tables:
            raise ArgumentValueError(
                f"{prefix}: offsets has {len(offsets)} tensors and indices {len(indices)} for {tables} "
                "tables; expected one tensor of each a table"
            )
        if not isinstance(offsets, Tensor):
            check_storages(prefix, "offsets", offsets)
            offsets = torch.stack(list(offsets))
        joined = join_offsets(offsets, indices)
        if joined is None:
            check_storages(prefix, "offsets", (offsets,))
            check_storages(prefix, "indices", (indices,) if isinstance(indices, Tensor) else indices)
            joined = _joined(offsets, indices, prefix)
        weights = _sample_weights(indices, row_weights, rows, prefix)
        flat = indices.reshape(-1) if isinstance(indices, Tensor) else torch.cat(list(indices))
        return flat, joined, weights
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
        _explain(offsets, indices, prefix)
        raise


def _explain(offsets: Tensor | Sequence[Tensor], indices: Tensor | Sequence[Tensor], prefix: str) -> None:
    """Raise an error that names the first tensor, and its table, that cannot be joined with the others."""
    order = ". Pass (offsets, indices) in this order."
    for name, tensors in (("offsets", offsets), ("indices", indices)):
        if not are_tensors(tensors):
            raise ArgumentTypeError(
                f"{prefix}: {name} is {a_type(tensors)}; expected a tensor or a list with one tensor a table"
            )
    if len(indices) != len(offsets):
        return
    for name, tensors in (("offsets", offsets), ("indices", indices)):
        if isinstance(tensors, Tensor) and tensors.dim() != 2:
            raise ArgumentValueError(
                f"{prefix}: {name} has {tensors.dim()} dimensions; expected 2, with a row a table{order}"
            )
        if isinstance(tensors, Tensor):
            continue
        for table, tensor in enumerate(tensors):
            if tensor.dim() != 1:
                raise ArgumentValueError(
                    f"{prefix}: {name}[{table}] has {tensor.dim()} dimensions; expected 1{order}"
                )
            if tensor.device != tensors[0].device:
                devices = f"{name}[{table}] is on {tensor.device}, {name}[0] is on {tensors[0].device}"
                raise ArgumentValueError(f"{prefix}: {devices}; expected one device")
    counts = [tensor.shape[0] for tensor in offsets]
    for table, count in enumerate(counts):
        if count != counts[0]:
            raise ArgumentValueError(
                f"{prefix}: offsets[{table}] has {count} bags, offsets[0] has {counts[0]}; expected equal "
                f"numbers{order}"
            )


def _joined(offsets: Tensor, indices: Tensor | Sequence[Tensor], prefix: str) -> Tensor:
    """Do the same as `join_offsets` in torch: for a GPU, for traced programs, and for errors."""
    if offsets.dtype not in INTEGERS:
        raise ArgumentTypeError(f"{prefix}: offsets are {offsets.dtype}; expected int32 or int64")
    offsets = offsets.to(torch.int64)
    if isinstance(indices, Tensor):
        tables, each = indices.shape
        ends = torch.arange(tables + 1, device=offsets.device) * each
    else:
        lengths = [of_table.shape[0] for of_table in indices]
        ends = integers_on([0, *itertools.accumulate(lengths)], offsets.device)
    if offsets.is_cuda or (not torch.compiler.is_compiling() and _C.explain_lowers()):
        return _moved_on_gpu(offsets, ends)
    _check_first(offsets, prefix)
    return torch.cat(((offsets + ends[:-1, None]).reshape(-1), ends[-1:]))


def _moved_on_gpu(offsets: Tensor, ends: Tensor) -> Tensor:
    good = begin_with_0(offsets, offsets.shape[1], offsets.device)
    moved = or_negative(good, offsets + ends[:-1, None], offsets)
    return torch.cat((moved.reshape(-1), ends[-1:]))


def _call(operator: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return operator(*arguments, **options)


def begin_with_0(offsets: Any, bags: Any, device: torch.device, call: Callable[..., Any] = _call) -> Any:
    """Return bools ``[tables, bags]``, false only at a table's first offset if it is not 0.

    Reads all offsets, since the compiler turns a slice ``[:, :1]`` into a read of the first offset even
    without bags. ``call`` calls an operator, or emits the call into a graph, in which offsets and bags are
    nodes.
    """
    later = call(_aten.gt.Scalar, call(_aten.arange.default, bags, dtype=torch.int64, device=device), 0)
    return call(_aten.logical_or.default, call(_aten.eq.Scalar, offsets, 0), later)


def or_negative(good: Any, moved: Any, offsets: Any, call: Callable[..., Any] = _call) -> Any:
    """Return ``moved``, or a negative offset where ``begin_with_0`` is false.

    The kernel of a GPU reports the negative offset; an assertion would wait for the GPU. ``call`` is as in
    ``begin_with_0``.
    """
    negative = call(_aten.neg.default, call(_aten.abs.default, offsets))
    return call(_aten.where.self, good, moved, negative)


def _check_first(offsets: Tensor, prefix: str) -> None:
    """Raise if a table's first offset is not 0: for the kernel, it would end the previous table."""
    if torch.compiler.is_compiling():
        good = begin_with_0(offsets, offsets.shape[1], offsets.device)
        torch._assert_async(torch.all(good), f"{prefix}: offsets begin with another number; expected 0")
    elif not offsets.is_meta and torch.count_nonzero(first := offsets[:, :1]):
        wrong = int(first.reshape(-1).nonzero()[0])
        raise OffsetError(
            f"{prefix}: offsets of table {wrong} begin with {int(first[wrong])}; expected 0. Pass (offsets, "
            "indices) in this order."
        )


def _sample_weights(
    indices: Tensor | Sequence[Tensor],
    row_weights: Sequence[Tensor | None] | None,
    rows: Callable[[int], int] | None,
    prefix: str,
) -> Tensor | None:
    """Return a weight for each lookup if any table has weights; tables without weights have 1."""
    if row_weights is None:
        return None
    if len(row_weights) != len(indices):
        raise ArgumentValueError(
            f"{prefix}: row_weights has {len(row_weights)} elements for {len(indices)} tables; expected one "
            "tensor or None a table"
        )
    if all(weights is None for weights in row_weights):
        return None
    for table, weights in enumerate(row_weights):
        if weights is not None and (
            weights.dim() != 1 or (rows is not None and weights.shape[0] < rows(table))
        ):
            needed = "rows" if rows is None else rows(table)
            raise ArgumentValueError(
                f"{prefix}: row_weights[{table}] is {list(weights.shape)}; expected [{needed}], one weight "
                "for each row of its table"
            )
        if weights is not None:
            check_storages(prefix, f"row_weights[{table}]", (weights,))
    first = next(weights for weights in row_weights if weights is not None)
    return torch.cat(
        [
            first.new_ones(of_table.shape[0])
            if weights is None
            else _gathered(weights, of_table.to(torch.int64))
            for of_table, weights in zip(indices, row_weights, strict=True)
        ]
    )


def _gathered(weights: Tensor, rows: Tensor) -> Tensor:
    """Return a weight for each row; an invalid row gets any weight, as torch's GPU kernel would abort."""
    if not rows.is_cuda:
        return weights.gather(0, rows)
    if weights.shape[0] == 0:
        return weights.new_ones(rows.shape[0])
    return weights.gather(0, torch.where((rows >= 0) & (rows < weights.shape[0]), rows, 0))


def are_tensors(value: Any) -> bool:
    """Return whether an object is a tensor or a non-empty list of tensors."""
    if isinstance(value, (tuple, list)):
        return len(value) > 0 and all(isinstance(item, Tensor) for item in value)
    return isinstance(value, Tensor)
