"""Parts of a KeyedJaggedTensor in a graph: indices and offsets that belong to the same key.

TorchRec's ``to_dict`` and ``split`` give, for lengths ``[keys * bags]``::

    matrix    = view(lengths, [keys, bags])
    indices_k = split_with_sizes(values, [item(unbind(sum(matrix, 1))[0]), ...])[k]
    offsets_k = asynchronous_complete_cumsum(unbind(matrix)[k])

So the offsets of key k begin at 0 and end at the number of its indices.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.fx import Node

from recfuse.passes.graph.bags import Bag
from recfuse.passes.graph.nodes import arguments_of, aten, is_call, is_named, tensor_of, value_of
from recfuse.passes.graph.program import Program


class KeyedPart(NamedTuple):
    """The indices and lengths of a key."""

    key: int
    keys: int
    values: Node  # [lookups of all keys]
    lengths: Node  # [keys * bags]
    own_lengths: Node  # [bags]


def keyed_part(program: Program, bag: Bag) -> KeyedPart | None:
    """Return the part of a KeyedJaggedTensor that a bag reads, or None if the graph does not prove it."""
    offsets = bag.offsets
    if not is_named(offsets, "fbgemm::asynchronous_complete_cumsum"):
        return None
    own_lengths: Any = offsets.args[0]  # type: ignore[union-attr]
    row, split = row_of(own_lengths), _item_of(bag.indices)
    if row is None or split is None or not is_call(split[0], aten.split_with_sizes, aten.split):
        return None
    (matrix, key), (split_node, number) = row, split
    arguments = arguments_of(split_node)
    sizes = arguments.get("split_sizes", arguments.get("split_size"))
    lengths, keys = matrix_of(matrix)
    if lengths is None or number != key or not isinstance(sizes, (list, tuple)) or len(sizes) != keys:
        return None
    if arguments.get("dim", 0) != 0 or tensor_of(arguments["self"]).dim() != 1:  # type: ignore[union-attr]
        return None
    for at, size in enumerate(sizes):
        if _summed_row(size) != (lengths, keys, at):
            return None
    if any(program.effects.is_written(node) for node in (lengths, arguments["self"])):
        return None
    return KeyedPart(key, keys, arguments["self"], lengths, own_lengths)


def is_whole(parts: Sequence[KeyedPart]) -> bool:
    """Return whether parts are all keys of one tensor, in order."""
    first = parts[0]
    return len(parts) == first.keys and all(
        part.key == key and part.values is first.values and part.lengths is first.lengths
        for key, part in enumerate(parts)
    )


def _item_of(node: Any) -> tuple[Node, int] | None:
    """Return a call that returns several tensors, and the number of the tensor that a node takes, or None."""
    if isinstance(node, Node) and node.target is operator.getitem and isinstance(node.args[1], int):
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return None


def row_of(node: Any) -> tuple[Node, int] | None:
    """Return the tensor whose row along the first dim a node is, and the number of the row, or None."""
    if (item := _item_of(node)) is not None and is_call(item[0], aten.unbind):
        arguments = arguments_of(item[0])
        return (arguments["self"], item[1]) if arguments["dim"] == 0 else None
    if is_call(node, aten.select):
        arguments = arguments_of(node)
        if arguments["dim"] == 0 and isinstance(arguments["index"], int) and arguments["index"] >= 0:
            return arguments["self"], arguments["index"]
    return None


def matrix_of(node: Node) -> tuple[Node | None, int]:
    """Return the flat lengths whose view ``[keys, bags]`` a node is, and the number of keys; or None."""
    shape = value_of(node).shape
    if not is_call(node, aten.view, aten.reshape) or len(shape) != 2 or not isinstance(shape[0], int):
        return None, 0
    base: Any = node.args[0]
    return (base, shape[0]) if value_of(base).dim() == 1 else (None, 0)


def _summed_row(size: Any) -> tuple[Node | None, int, int] | None:
    """Return the lengths, the number of keys and the key whose lengths a number is the sum of, or None."""
    if not is_call(size, aten.item, aten._local_scalar_dense) or (row := row_of(size.args[0])) is None:
        return None
    summed, key = row
    if not is_call(summed, aten.sum) or "dim" not in arguments_of(summed):
        return None
    arguments = arguments_of(summed)
    if arguments["dim"] not in ([1], [-1], (1,), (-1,)) or arguments["keepdim"]:
        return None
    lengths, keys = matrix_of(arguments["self"])
    return None if lengths is None else (lengths, keys, key)
