"""Masks of padded histories: ``arange(length) < lengths`` for the lengths of the padding's offsets."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from recfuse.passes.graph.bags import Bag
from recfuse.passes.graph.nodes import arguments_of, aten, is_call, is_named, same, tensor_of, value_of
from recfuse.passes.graph.program import Program
from recfuse.passes.graph.sequences.keyed import matrix_of, row_of


def masked_history(program: Program, node: Node, history: Bag) -> bool:
    """Return whether a node sets nothing but the padding of a history to 0, which it is already.

    Such nodes are ``padded * mask.unsqueeze(-1)``, ``where(mask.unsqueeze(-1), padded, 0)`` and
    ``padded.masked_fill(~mask.unsqueeze(-1), 0)``.
    """
    result, mask = history.result, None
    if is_call(node, aten.mul) and len(node.args) == 2:
        mask = node.args[1] if node.args[0] is result else node.args[0]
        if is_call(mask, aten.to, aten._to_copy) and value_of(mask.args[0]).dtype.is_floating_point is False:
            mask = mask.args[0]
    elif is_call(node, aten.masked_fill):
        arguments = arguments_of(node)
        if arguments["self"] is result and _is_zero(arguments["value"]):
            mask = _negated(arguments["mask"])
    elif is_call(node, aten.where) and node.args[1:2] == (result,) and _is_zero(node.args[-1]):
        mask = node.args[0]
    masked, padded = tensor_of(node), tensor_of(result)
    if mask is None or masked is None or padded is None or masked.dtype != padded.dtype:
        return False
    if len(masked.shape) != 3 or not all(map(same, masked.shape, padded.shape)):
        return False
    return _is_mask(program, mask, history)


def _is_zero(value: Any) -> bool:
    return not isinstance(value, Node) and not isinstance(value, bool) and value == 0


def _negated(mask: Any) -> Any:
    """Return the mask whose negation a node is, through an ``unsqueeze``; or None."""
    if is_call(mask, aten.bitwise_not, aten.logical_not):
        return mask.args[0]
    return None


def _is_mask(program: Program, wide: Any, history: Bag) -> bool:
    """Return whether a node is ``(arange(length) < lengths[:, None]).unsqueeze(-1)`` of a history."""
    if not is_call(wide, aten.unsqueeze) or wide.args[1] not in (-1, 2):
        return False
    mask = wide.args[0]
    tensor = tensor_of(mask)
    if tensor is None or tensor.dim() != 2 or not is_call(mask, aten.lt, aten.gt):
        return False
    left, right = mask.args[:2]  # type: ignore[union-attr]
    positions, column = (left, right) if is_call(mask, aten.lt) else (right, left)
    if is_call(positions, aten.unsqueeze) and positions.args[1] == 0:
        positions = positions.args[0]
    if not is_call(positions, aten.arange) or value_of(positions).dim() != 1:
        return False
    arguments = arguments_of(positions)
    is_counted = arguments.get("start", 0) == 0 and arguments.get("step", 1) == 1
    if not is_counted or value_of(positions).is_floating_point():
        return False
    if not same(value_of(positions).shape[0], value_of(history.result).shape[1]):
        return False
    if not is_call(column, aten.unsqueeze) or column.args[1] not in (-1, 1):
        return False
    lengths = column.args[0]
    if any(program.effects.is_written(item) for item in (mask, lengths, positions)):
        return False
    return _are_lengths(lengths, history.offsets)


def _are_lengths(lengths: Any, offsets: Node | None) -> bool:
    """Return whether ``offsets`` are ``[0, *cumsum(lengths)]``, or the lengths are their differences."""
    if is_named(offsets, "fbgemm::asynchronous_complete_cumsum"):
        return _same_row(offsets.args[0], lengths)  # type: ignore[union-attr]
    if is_call(lengths, aten.diff):
        arguments = arguments_of(lengths)
        plain = arguments["n"] == 1 and arguments["prepend"] is None and arguments["append"] is None
        return plain and arguments["self"] is offsets
    if is_call(lengths, aten.sub) and len(lengths.args) == 2:
        later, earlier = lengths.args
        return _slice_of(later) == (offsets, 1, None) and _slice_of(earlier) == (offsets, 0, -1)
    return False


def _same_row(first: Any, second: Any) -> bool:
    """Return whether two nodes are the same tensor, or the same row of views of it."""
    if first is second:
        return True
    rows = row_of(first), row_of(second)
    if rows[0] is None or rows[1] is None or rows[0][1] != rows[1][1]:
        return False
    if rows[0][0] is rows[1][0]:
        return True
    matrices = matrix_of(rows[0][0]), matrix_of(rows[1][0])
    return matrices[0][0] is not None and matrices[0] == matrices[1]


def _slice_of(node: Any) -> tuple[Any, Any, Any] | None:
    """Return the tensor, begin and end of a slice of the first dim; an end beyond all sizes is None."""
    if not is_call(node, aten.slice):
        return None
    arguments = arguments_of(node)
    if arguments["dim"] != 0 or arguments["step"] != 1:
        return None
    end = arguments["end"]
    return arguments["self"], arguments["start"] or 0, None if isinstance(end, int) and end > 1 << 62 else end
