"""``Ranges``: bounds of the integers of a node that hold for every batch.

Only tensors of integers have bounds: a float may be NaN, for which no comparison holds and which no clamp
changes.

Source: Pan et al., RECom, ASPLOS 2023, appendix D (the patterns map, keep and replace).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from recfuse.passes.graph.nodes import arguments_of, aten, is_call, operator_of, tensor_of, value_of
from recfuse.passes.graph.program import Program


class Range(NamedTuple):
    """The integers in [low, high]."""

    low: int
    high: int

    def within(self, other: Range) -> bool:
        """Return whether ``other`` contains this range."""
        return other.low <= self.low and self.high <= other.high

    def join(self, other: Range) -> Range:
        """Return the smallest range that contains both."""
        return Range(min(self.low, other.low), max(self.high, other.high))

    def meet(self, other: Range) -> Range:
        """Return the intersection, or this range if the intersection is empty."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Range(low, high) if low <= high else self


_COMPARED: dict[Any, Callable[[Range, int], bool | None]] = {
    aten.ge: lambda r, n: True if r.low >= n else False if r.high < n else None,
    aten.gt: lambda r, n: True if r.low > n else False if r.high <= n else None,
    aten.le: lambda r, n: True if r.high <= n else False if r.low > n else None,
    aten.lt: lambda r, n: True if r.high < n else False if r.low >= n else None,
    aten.eq: lambda r, n: True if r.low == r.high == n else False if not r.low <= n <= r.high else None,
    aten.ne: lambda r, n: False if r.low == r.high == n else True if not r.low <= n <= r.high else None,
}
_OPPOSITE = {aten.ge: aten.lt, aten.gt: aten.le, aten.eq: aten.ne}
_OPPOSITE |= {b: a for a, b in _OPPOSITE.items()}
_AND = (aten.logical_and, aten.bitwise_and, aten.__and__)
_OR = (aten.logical_or, aten.bitwise_or, aten.__or__)
_KEEP = (
    aten.view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.slice, aten.select, aten.expand, aten.flatten,
    aten.contiguous, aten.clone, aten.transpose, aten.permute, aten.t, aten.detach, aten.alias,
    aten.unflatten, aten.repeat, aten.repeat_interleave, aten.index_select, aten.index, aten.flip, aten.roll,
    aten.narrow,
)  # fmt: skip


class Ranges:
    """The ranges of a program's nodes, computed on demand."""

    def __init__(self, program: Program) -> None:
        """``program`` is the program of the nodes."""
        self.program = program
        self._found: dict[Node, Range] = {}

    def of(self, node: Any) -> Range | None:
        """Return the range of a tensor of integers or of a number; None for other values."""
        if isinstance(node, (bool, int)):
            return Range(int(node), int(node))
        tensor = tensor_of(node)
        if tensor is None or tensor.is_floating_point() or tensor.is_complex():
            return None
        if node not in self._found:
            every = _every(tensor.dtype)
            self._found[node] = every  # also during the search
            if not self.program.effects.is_written(node):
                interval = self._find(node)
                self._found[node] = interval if interval is not None and interval.within(every) else every
        return self._found[node]

    def truth(self, node: Any) -> bool | None:
        """Return the constant truth of a condition, or None if it varies."""
        if isinstance(node, bool):
            return node
        if self.program.effects.is_written(node):
            return None
        if is_call(node, *_COMPARED):
            number, interval = node.args[1], self.of(node.args[0])
            if interval is None or not is_of(node.args[0], number):
                return None
            return _COMPARED[operator_of(node).overloadpacket](interval, number)  # type: ignore[union-attr]
        if is_call(node, aten.logical_not, aten.bitwise_not):
            inner = self.truth(node.args[0])
            return None if inner is None else not inner
        if is_call(node, *_AND, *_OR):
            if value_of(node).dtype is not torch.bool:
                return None
            both = [self.truth(item) for item in node.args[:2]]
            decisive = is_call(node, *_OR)
            return decisive if decisive in both else None if None in both else not decisive
        return None

    def given(self, node: Any, condition: Any, holds: bool) -> Range | None:
        """Return the range of a node's elements for which a condition holds, or does not hold."""
        elements, is_written = self.of(node), self.program.effects.is_written
        if elements is None or not isinstance(condition, Node) or is_written(condition) or is_written(node):
            return elements
        if value_of(condition).dtype is not torch.bool:  # ~5 is true as well
            return elements
        if is_call(condition, aten.logical_not, aten.bitwise_not):
            return self.given(node, condition.args[0], not holds)
        if is_call(condition, *(_AND if holds else _OR)):
            for part in condition.args[:2]:
                elements = elements.meet(self.given(node, part, holds) or elements)
            return elements
        if not is_call(condition, *_COMPARED) or condition.args[0] is not node:
            return elements
        number = condition.args[1]
        packet = operator_of(condition).overloadpacket  # type: ignore[union-attr]
        packet = packet if holds else _OPPOSITE[packet]
        if not is_of(node, number):
            return elements
        bounds = {
            aten.ge: (number, elements.high), aten.gt: (number + 1, elements.high),
            aten.le: (elements.low, number), aten.lt: (elements.low, number - 1), aten.eq: (number, number),
        }.get(packet)  # fmt: skip
        return elements.meet(Range(*bounds)) if bounds else elements

    def _find(self, node: Node) -> Range | None:
        if operator_of(node) is None:
            return None
        arguments = arguments_of(node)
        if is_call(node, *_KEEP):
            is_count = node.target is aten.repeat_interleave.Tensor  # its argument holds counts
            is_same = value_of(node).dtype == getattr(value_of(node.args[0]), "dtype", None)  # same bits
            return self.of(node.args[0]) if is_same and not is_count else None
        if is_call(node, aten.bucketize, aten.searchsorted):
            edges = arguments.get("boundaries", arguments.get("sorted_sequence"))
            size = value_of(edges).shape[-1] if isinstance(edges, Node) else None
            return Range(0, size) if isinstance(size, int) else None
        if is_call(node, aten.clamp, aten.clamp_min, aten.clamp_max, aten.clip):
            return self._clamped(node, arguments)
        if is_call(node, aten.where):
            return _joined(self.given(arguments["self"], arguments["condition"], True),
                           self.given(arguments["other"], arguments["condition"], False))  # fmt: skip
        if is_call(node, aten.masked_fill):
            return _joined(
                self.given(arguments["self"], arguments["mask"], False), self.of(arguments["value"])
            )
        if is_call(node, aten.cat, aten.stack):
            intervals = [self.of(item) for item in arguments["tensors"]]
            return _joined(*intervals)
        if is_call(node, aten.to, aten._to_copy):
            return self.of(node.args[0])
        if is_call(node, aten.full, aten.full_like, aten.zeros, aten.ones, aten.zeros_like, aten.ones_like):
            return self.of(arguments.get("fill_value", int("ones" in str(node.target))))
        return self._computed(node, arguments)

    def _clamped(self, node: Node, arguments: dict[str, Any]) -> Range | None:
        interval, low, high = self.of(arguments["self"]), arguments.get("min"), arguments.get("max")
        if interval is None or any(
            bound is not None and not is_of(arguments["self"], bound) for bound in (low, high)
        ):
            return None
        a, b = interval
        if low is not None:
            a, b = max(a, low), max(b, low)
        if high is not None:
            a, b = min(a, high), min(b, high)
        return Range(a, b)

    def _computed(self, node: Node, arguments: dict[str, Any]) -> Range | None:
        """Return the range after arithmetic with a number, or None."""
        interval, other = self.of(node.args[0]) if node.args else None, arguments.get("other")
        if interval is None:
            return None
        if is_call(node, aten.abs):
            ends = sorted(map(abs, interval))
            return Range(0 if interval.low <= 0 <= interval.high else ends[0], ends[1])
        if is_call(node, aten.relu):
            return Range(max(interval.low, 0), max(interval.high, 0))
        if isinstance(other, bool) or not is_of(node.args[0], other) or arguments.get("alpha", 1) != 1:
            return None
        if is_call(node, aten.remainder) and other > 0:
            return interval if interval.low >= 0 and interval.high < other else Range(0, other - 1)
        if is_call(node, aten.bitwise_and) and other >= 0:
            return Range(0, other)
        if is_call(node, aten.floor_divide) and other > 0:
            return Range(interval.low // other, interval.high // other)
        for packet, function in (
            (aten.add, operator.add),
            (aten.sub, operator.sub),
            (aten.mul, operator.mul),
        ):
            if is_call(node, packet):
                return Range(*sorted((function(interval.low, other), function(interval.high, other))))
        return None


def is_of(node: Any, number: Any) -> bool:
    """Return whether a tensor's dtype can represent a number; torch wraps other numbers."""
    tensor = tensor_of(node)
    if not isinstance(number, int) or tensor is None or tensor.is_floating_point() or tensor.is_complex():
        return False
    return Range(int(number), int(number)).within(_every(tensor.dtype))


def _joined(*ranges: Range | None) -> Range | None:
    known = [item for item in ranges if item is not None]
    if len(known) < len(ranges) or not known:
        return None
    return Range(min(item.low for item in known), max(item.high for item in known))


def _every(dtype: torch.dtype) -> Range:
    if dtype is torch.bool:
        return Range(0, 1)
    limits = torch.iinfo(dtype)
    return Range(limits.min, limits.max)
