"""Rules for operators that work row by row; a call on copies for candidates becomes a call on users' rows.

A rule takes a node and its lifted inputs. It returns the dimension of candidates in the result and the number
of adjacent rows of each candidate, or None if the operator mixes rows of candidates.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch.fx import Node
from torch.fx.node import map_arg

from recfuse.passes.graph.nodes import arguments_of, aten, is_call, same, value_of
from recfuse.passes.graph.program import Program


class _Lift(Protocol):
    @property
    def dim(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def map(self) -> Any: ...


Place = tuple[int, int]  # dimension, and adjacent rows of a candidate
Rule = Callable[[Node, Mapping[Node, Any]], Place | None]


def _pointwise(node: Node, inputs: Mapping[Node, _Lift]) -> Place | None:
    """All lifted inputs have candidates in the same dimension from the end; others have size 1 there."""
    places = {(value_of(item).dim() - lift.dim, lift.block) for item, lift in inputs.items()}
    if len(places) != 1:
        return None
    from_end, block = places.pop()
    for item in node.all_input_nodes:
        shape = getattr(value_of(item), "shape", ())
        if item not in inputs and len(shape) >= from_end and shape[-from_end] != 1:
            return None
    return value_of(node).dim() - from_end, block


def _of_input(node: Node, inputs: Mapping[Node, _Lift]) -> tuple[Node, _Lift] | None:
    """Return the only lifted input if it is the first argument, else None."""
    first = node.args[0]
    return (first, inputs[first]) if len(inputs) == 1 and first in inputs else None  # type: ignore[return-value,index]


def _keeps_rows(*dims: int | str) -> Rule:
    """Return a rule for an operator that keeps rows, except along ``dims`` (numbers or argument names)."""

    def rule(node: Node, inputs: Mapping[Node, _Lift]) -> Place | None:
        operand = _of_input(node, inputs)
        if operand is None:
            return None
        item, lift = operand
        rank, arguments = value_of(item).dim(), arguments_of(node)
        closed = {(arguments[dim] if isinstance(dim, str) else dim) % rank for dim in dims}
        return None if lift.dim in closed else (lift.dim, lift.block)

    return rule


def _layer_norm(node: Node, inputs: Mapping[Node, _Lift]) -> Place | None:
    operand = _of_input(node, inputs)
    if operand is None:
        return None
    item, lift = operand
    free = value_of(item).dim() - len(arguments_of(node)["normalized_shape"])
    return (lift.dim, lift.block) if lift.dim < free else None


def _dropout(node: Node, inputs: Mapping[Node, _Lift]) -> Place | None:
    arguments = arguments_of(node)
    return _keeps_rows()(node, inputs) if arguments["train"] is False else None


def _permuted(node: Node, inputs: Mapping[Node, _Lift]) -> Place | None:
    operand = _of_input(node, inputs)
    if operand is None:
        return None
    item, lift = operand
    order, arguments = list(range(value_of(item).dim())), arguments_of(node)
    if is_call(node, aten.permute):
        order = [dim % len(order) for dim in arguments["dims"]]
    elif is_call(node, aten.transpose):
        a, b = arguments["dim0"] % len(order), arguments["dim1"] % len(order)
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    return order.index(lift.dim), lift.block


def _unsqueezed(node: Node, inputs: Mapping[Node, _Lift]) -> Place | None:
    operand = _of_input(node, inputs)
    if operand is None:
        return None
    _, lift = operand
    new = arguments_of(node)["dim"] % value_of(node).dim()
    return lift.dim + (new <= lift.dim), lift.block


def _without(node: Node, inputs: Mapping[Node, _Lift]) -> Place | None:
    """select, squeeze: a dimension is removed."""
    operand = _of_input(node, inputs)
    if operand is None:
        return None
    item, lift = operand
    arguments, rank = arguments_of(node), value_of(item).dim()
    if "dim" not in arguments or not isinstance(arguments["dim"], int) or value_of(node).dim() != rank - 1:
        return None
    gone = arguments["dim"] % rank
    return None if gone == lift.dim else (lift.dim - (gone < lift.dim), lift.block)


def _reduced(node: Node, inputs: Mapping[Node, _Lift]) -> Place | None:
    """sum, mean, amax: over other dimensions than the candidates'."""
    operand = _of_input(node, inputs)
    arguments = arguments_of(node)
    if operand is None or not arguments.get("dim"):
        return None
    item, lift = operand
    dims = arguments["dim"] if isinstance(arguments["dim"], (list, tuple)) else [arguments["dim"]]
    gone = {dim % value_of(item).dim() for dim in dims}
    if lift.dim in gone:
        return None
    before = 0 if arguments["keepdim"] else sum(dim < lift.dim for dim in gone)
    return lift.dim - before, lift.block


def _cat(node: Node, inputs: Mapping[Node, _Lift]) -> Place | None:
    items = node.args[0]
    places = {(lift.dim, lift.block) for lift in inputs.values()}
    if len(places) != 1 or any(item not in inputs for item in items):  # type: ignore[union-attr,operator]
        return None
    position = places.pop()
    return None if arguments_of(node)["dim"] % value_of(node).dim() == position[0] else position


def _matmul(node: Node, inputs: Mapping[Node, _Lift]) -> Place | None:
    """A product with a matrix that all rows share."""
    operand = _of_input(node, inputs)
    if operand is None or value_of(node.args[1]).dim() != 2:
        return None
    item, lift = operand
    return None if lift.dim == value_of(item).dim() - 1 else (lift.dim, lift.block)


def _viewed(node: Node, inputs: Mapping[Node, _Lift]) -> Place | None:
    """A view: the rows of a candidate stay adjacent, after the same number of elements."""
    operand = _of_input(node, inputs)
    if operand is None:
        return None
    item, lift = operand
    if value_of(item).dtype != value_of(node).dtype:  # a view of the bits as another dtype
        return None
    before, after = value_of(item).shape, value_of(node).shape
    leading, trailing = math.prod(before[: lift.dim]), lift.block * math.prod(before[lift.dim + 1 :])
    for dim in range(len(after)):
        if not same(math.prod(after[:dim]), leading):
            continue
        inner = math.prod(after[dim + 1 :])
        block = _quotient(trailing, inner)
        if block is not None and same(after[dim] * lift.block, before[lift.dim] * block):
            other_sizes = [size for number, size in enumerate(after) if number != dim]
            return (dim, block) if _sizes(node, dim) is not None or not other_sizes else None
    return None


def _quotient(a: Any, b: Any) -> int | None:
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    for times in (1, *range(2, 129)):
        if same(a, b * times):
            return times
    return None


def _sizes(node: Node, dim: int) -> list[Any] | None:
    """Return the sizes of a view, with None for the candidates; None if another size is not available."""
    arguments = arguments_of(node)
    shape = value_of(node).shape
    spelled = arguments.get("size", arguments.get("shape"))
    spelled = spelled if spelled is not None and len(spelled) == len(shape) else [-1] * len(shape)
    sizes: list[Any] = []
    for number, (size, written) in enumerate(zip(shape, spelled, strict=True)):
        if number == dim:
            sizes.append(None)
        elif isinstance(size, int):
            sizes.append(size)
        elif isinstance(written, Node) or (written == -1 and -1 not in sizes):
            sizes.append(written)
        else:
            return None
    return sizes


_VIEWS = (aten.view, aten.reshape, aten._unsafe_view, aten.unflatten, aten.flatten)

RULES: dict[Any, Rule] = {
    "pointwise": _pointwise,
    aten.linear: _keeps_rows(-1),
    aten.matmul: _matmul,
    aten.mm: _matmul,
    aten.layer_norm: _layer_norm,
    aten.softmax: _keeps_rows("dim"),
    aten._softmax: _keeps_rows("dim"),
    aten.slice: _keeps_rows("dim"),
    aten.contiguous: _keeps_rows(),
    aten.clone: _keeps_rows(),
    aten.to: _keeps_rows(),
    aten._to_copy: _keeps_rows(),
    aten.dropout: _dropout,
    aten.transpose: _permuted,
    aten.permute: _permuted,
    aten.t: _permuted,
    aten.unsqueeze: _unsqueezed,
    aten.select: _without,
    aten.squeeze: _without,
    aten.cat: _cat,
    aten.sum: _reduced,
    aten.mean: _reduced,
    aten.amax: _reduced,
    **dict.fromkeys(_VIEWS, _viewed),
}
"""Rules by operator; "pointwise" is for all operators with torch's tag."""


def _rows(program: Program, lift: _Lift) -> Any:
    """Return the number of users times the adjacent rows of each."""
    users = program.size(lift.map.users, lift.map.dim)
    if isinstance(users, Node) and lift.block > 1:
        return program.emit(operator.mul, users, lift.block)
    return users if lift.block == 1 else users * lift.block


def lifted_call(program: Program, node: Node, lift: _Lift, inputs: Mapping[Node, Node]) -> Node:
    """Emit the call of a node with users' rows instead of candidates' rows."""
    if is_call(node, *_VIEWS):
        sizes = _sizes(node, lift.dim)
        assert sizes is not None
        sizes[lift.dim] = _rows(program, lift) if -1 in sizes else -1
        return program.emit(aten.reshape.default, inputs[node.args[0]], sizes)  # type: ignore[index]

    def swapped(item: Node) -> Node:
        return inputs.get(item, item)

    return program.emit(node.target, *map_arg(node.args, swapped), **map_arg(node.kwargs, swapped))  # type: ignore[arg-type]
