"""``part_of``: finds the columns of a wider tensor ``[batch, values]`` that a node views, by any operators.

All columns of a tensor are one input of a call, whose number of inputs is limited; the views are removed.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node

from recfuse.passes.graph.nodes import arguments_of, aten, is_call, same, tensor_of, turned, value_of

_MOST = 2**63 - 1
_PIECES = (aten.unbind, aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split)


class Slot(NamedTuple):
    """The columns of ``base`` from ``first`` on that a node views; the rows if ``base`` is ``turned``."""

    base: Node
    first: int
    turned: bool


def part_of(node: Node) -> Slot | None:
    """Return the position of a node ``[batch]`` or ``[batch, width]`` in a wider tensor, or None."""
    slice_of = _taken(node)
    if slice_of is None:
        return None
    base, dim, first = slice_of
    while True:
        inner = _taken(base) if _is_matrix(base) else None
        if is_call(base, aten.slice) and _takes_all(base):
            base = base.args[0]  # type: ignore[assignment]
        elif (straight := turned(base)) is not None:
            base, dim = straight, 1 - dim
        elif inner is not None and inner[1] == dim and _is_matrix(inner[0]):
            base, first = inner[0], first + inner[2]
        else:
            return Slot(base, first, dim == 0)


def _is_matrix(node: Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.dim() == 2


def _taken(node: Node) -> tuple[Node, int, int] | None:
    """Return the matrix whose columns or rows a node takes, the dimension, and the first position."""
    tensor = tensor_of(node)
    view = None if tensor is None else _view(node, tensor)
    if view is None:
        return None
    base, dim, first = view
    wide = tensor_of(base)
    if wide is None or wide.dim() != 2 or type(dim) is not int or type(first) is not int:
        return None
    values = wide.shape[dim]
    if isinstance(values, int):
        return (base, dim % 2, first % values) if -values <= first < values else None
    # The size varies with the batch: torch's own operator has checked that the position exists.
    return (base, dim % 2, first) if first >= 0 else None


def _view(node: Node, tensor: Tensor) -> tuple[Node, Any, Any] | None:
    """Return the values of :func:`_taken` as the operator has them, unchecked."""
    if node.target is operator.getitem:
        return _piece(node)
    arguments = arguments_of(node) if is_call(node, aten.select, aten.slice, aten.narrow) else {}
    if is_call(node, aten.select) and tensor.dim() == 1:
        return arguments["self"], arguments["dim"], arguments["index"]
    if is_call(node, aten.slice) and tensor.dim() == 2 and arguments["step"] == 1:
        return arguments["self"], arguments["dim"], arguments["start"] or 0
    if is_call(node, aten.narrow) and tensor.dim() == 2:
        return arguments["self"], arguments["dim"], arguments["start"]
    return None


def _piece(node: Node) -> tuple[Node, Any, Any] | None:
    """Return the values of :func:`_taken` for an item of an unbind or a split."""
    pieces, at = node.args
    if not is_call(pieces, *_PIECES) or type(at) is not int:
        return None
    arguments, values = arguments_of(pieces), value_of(pieces)  # type: ignore[arg-type]
    at, dim = at % len(values), arguments["dim"]
    if is_call(pieces, aten.unbind):
        return arguments["self"], dim, at
    before = [piece.shape[dim] for piece in values[:at]]
    return (arguments["self"], dim, sum(before)) if all(isinstance(size, int) for size in before) else None


def _takes_all(node: Node) -> bool:
    arguments = arguments_of(node)
    end, taken, source = arguments["end"], tensor_of(node), tensor_of(arguments["self"])
    if arguments["start"] not in (None, 0) or arguments["step"] != 1 or taken is None or source is None:
        return False
    return end is None or end == _MOST or all(map(same, taken.shape, source.shape))
