"""``with_end``: folds the ``where`` after a bag that sets zeros, or a default, for samples without values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from recfuse.passes.graph.bags import FIXED, LAST, Bag
from recfuse.passes.graph.columns.call import DROPPED, Column
from recfuse.passes.graph.columns.chain import CLIP_INTEGER
from recfuse.passes.graph.nodes import arguments_of, aten, is_call, operator_of, same, tensor_of
from recfuse.passes.graph.program import Program
from recfuse.passes.graph.ranges import Ranges

_HOLDS_BELOW = {aten.lt: 0, aten.le: -1}
"""Comparisons that hold below a bound, which is the compared number minus this value."""
_FAILS_BELOW = {aten.ge: 0, aten.gt: 1}
_NOT = (aten.logical_not, aten.bitwise_not)
_MOST = 2**63 - 1


def with_end(program: Program, ranges: Ranges, column: Column) -> Column:
    """Fold the ``where`` or ``masked_fill`` after the bag into a column, if the column supports it."""
    result = column.bag.result
    users = [user for user in result.users if not is_call(user, aten.zeros_like)]
    if len(users) != 1:
        return column
    (user,) = users
    choice = _choice(user, result)
    if choice is None or not _like(user, result):
        return column
    condition, other, has_value = choice
    compared = _below(condition)
    if compared is None:
        return column
    values, bound, holds_below = compared
    if holds_below == has_value:  # the pooled row must be taken above the bound
        return column
    extended = _dropped(ranges, column, values, bound, other) or _filled(column, values, bound, other)
    if any(list(other.users) != [user] for other in result.users if other is not user):
        return column
    read = [node for node in (condition, other, values) if isinstance(node, Node)]
    if extended is None or program.effects.why_not((result, user, *read)):
        return column
    return replace(extended, result=user, folded=column.folded + 3)


def _like(node: Node, result: Node) -> bool:
    a, b = tensor_of(node), tensor_of(result)
    if a is None or b is None or a.dtype != b.dtype or a.dim() != 2:
        return False
    return all(map(same, a.shape, b.shape))


def _choice(user: Node, result: Node) -> tuple[Node, Any, bool] | None:
    """Return the condition, the other value, and whether the result is taken if the condition holds."""
    if is_call(user, aten.masked_fill):
        arguments = arguments_of(user)
        return (arguments["mask"], arguments["value"], False) if arguments["self"] is result else None
    if not is_call(user, aten.where) or "condition" not in (arguments := arguments_of(user)):
        return None
    if (arguments["self"] is result) == (arguments["other"] is result):
        return None
    has_value = arguments["self"] is result
    return arguments["condition"], arguments["other" if has_value else "self"], has_value


def _below(condition: Any) -> tuple[Node, int, bool] | None:
    """Split a condition ``[batch, 1]``: values ``[batch]``, a bound, and whether it holds below the bound."""
    holds, tensor = True, tensor_of(condition)
    if tensor is None or tensor.dim() != 2 or not same(tensor.shape[1], 1):
        return None
    has_view = False
    while is_call(condition, *_NOT) or (not has_view and is_call(condition, aten.unsqueeze)):
        if is_call(condition, aten.unsqueeze):
            if arguments_of(condition)["dim"] not in (1, -1):
                return None
            has_view = True
        else:
            holds = not holds
        condition = condition.args[0]
    called = operator_of(condition)
    if called is None or not has_view or len(condition.args) != 2:
        return None
    values, number = condition.args
    tensor = tensor_of(values)
    if tensor is None or tensor.is_floating_point() or tensor.dim() != 1:
        return None
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    packet = called.overloadpacket
    if packet in _HOLDS_BELOW:
        return values, number - _HOLDS_BELOW[packet], holds
    if packet in _FAILS_BELOW:
        return values, number + _FAILS_BELOW[packet], not holds
    is_equal = packet is aten.eq
    if number != 0 or not (is_equal or packet is aten.ne):
        return None
    return values, 1, holds == is_equal  # for lengths, which are never below 0


def _dropped(ranges: Ranges, column: Column, values: Node, bound: int, other: Any) -> Column | None:
    """Drop lookups of negative values, if the graph clamps these to a row and then replaces it by zeros."""
    chain, bag, zero = column.chain, column.bag, _number(other)
    if (
        column.cross is not None
        or bound != 0
        or bag.form != FIXED
        or chain.width != 1
        or len(chain.steps) != 1
        or zero != 0
    ):
        return None
    if chain.steps[0][:3] != (CLIP_INTEGER, 0, _MOST) or _clamped(bag.indices) is not values:
        return None
    bounds = ranges.of(values)
    if bounds is None or bounds.high >= bag.table.shape[0]:  # too large values must raise
        return None
    return replace(column, chain=replace(chain, steps=()), invalid=DROPPED, fill=float(zero))


def _clamped(node: Node) -> Node | None:
    """Return the argument of the clamp before a chain of views, or None."""
    while not is_call(node, aten.clamp, aten.clamp_min) and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.args[0] if is_call(node, aten.clamp, aten.clamp_min) else None  # type: ignore[return-value]


def _filled(column: Column, values: Node, bound: int, other: Any) -> Column | None:
    """Fill samples without values with a number or a row of the table, if the graph does so."""
    bag = column.bag
    if bound != 1 or bag.form != LAST or not _are_lengths(values, bag):
        return None
    number, dtype = _number(other), bag.table.dtype
    if number is not None:
        is_exact = dtype is torch.float32 or float(torch.tensor(number, dtype=dtype)) == number
        return replace(column, fill=float(number)) if is_exact else None
    if not is_call(other, aten.select):
        return None
    arguments = arguments_of(other)
    row, rows = arguments["index"], int(bag.table.shape[0])
    if arguments["self"] is not bag.weight or arguments["dim"] != 0 or not isinstance(row, int):
        return None
    return replace(column, empty=row % rows) if -rows <= row < rows else None


def _are_lengths(node: Any, bag: Bag) -> bool:
    """Return whether a node is the number of lookups of each bag, computed from its offsets."""
    offsets = bag.offsets
    if is_call(node, aten.diff):
        arguments = arguments_of(node)
        return (
            arguments["self"] is offsets
            and arguments["n"] == 1
            and arguments["prepend"] is arguments["append"] is None
        )
    if is_call(node, aten.sub) and len(node.args) == 2:
        return _is_slice(node.args[0], offsets, 1, None) and _is_slice(node.args[1], offsets, 0, -1)
    sums = _with_leading_zero(offsets)
    return is_call(sums, aten.cumsum) and sums.args[0] is node and arguments_of(sums)["dim"] in (0, -1)


def _is_slice(node: Any, of: Any, start: int, end: int | None) -> bool:
    if not is_call(node, aten.slice):
        return False
    arguments = arguments_of(node)
    ends = (None, _MOST) if end is None else (end,)
    return (
        arguments["self"] is of
        and (arguments["dim"], arguments["start"] or 0, arguments["step"]) == (0, start, 1)
        and arguments["end"] in ends
    )


def _with_leading_zero(offsets: Any) -> Any:
    """Return the offsets after the first, if the first is known to be 0, else None."""
    if is_call(offsets, aten.pad, aten.constant_pad_nd):
        arguments = arguments_of(offsets)
        is_zero = arguments.get("mode", "constant") == "constant" and not arguments["value"]
        return arguments["self"] if list(arguments["pad"]) == [1, 0] and is_zero else None
    if is_call(offsets, aten.cat) and len(offsets.args[0]) == 2 and arguments_of(offsets)["dim"] == 0:
        first, rest = offsets.args[0]
        tensor = tensor_of(first)
        return rest if tensor is not None and tuple(tensor.shape) == (1,) and _number(first) == 0 else None
    return None


def _number(node: Any) -> float | None:
    """Return the number that all elements equal, or None if it is unknown."""
    if isinstance(node, bool):
        return None
    if isinstance(node, (int, float)):
        return node
    if is_call(node, aten.zeros, aten.zeros_like, aten.new_zeros):
        return 0
    tensor = tensor_of(node)
    if tensor is None or not is_call(node, aten.full, aten.full_like, aten.new_full, aten.scalar_tensor):
        return None
    arguments = arguments_of(node)
    number = _number(arguments["s"] if "s" in arguments else arguments["fill_value"])
    with unset_fake_temporarily():  # rounded to its dtype
        return None if number is None else torch.tensor(number).to(tensor.dtype).item()
