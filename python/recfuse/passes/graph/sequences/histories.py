"""One call for lookups without pooling: padded histories, and indices of one shape.

A history is a ``Bag`` whose result is not reduced: ``[bags, length, dim]``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from recfuse._codes import DTYPES
from recfuse.passes.graph.bags import (
    Bag,
    arithmetic,
    connected,
    features_of,
    integers,
    jagged_offsets,
    joined,
)
from recfuse.passes.graph.nodes import arguments_of, aten, value_of
from recfuse.passes.graph.program import Program
from recfuse.passes.graph.sequences.keyed import is_whole, keyed_part


def is_pad(node: Any) -> bool:
    """Return whether a node pads jagged rows, by an operator of FBGEMM or by torch's of nested tensors."""
    target = getattr(node, "target", None)
    return isinstance(target, torch._ops.OpOverload) and target._schema.name in (
        "fbgemm::jagged_to_padded_dense",
        "fbgemm::jagged_to_padded_dense_forward",
        "fbgemm::jagged_2d_to_dense",
        "aten::_jagged_to_padded_dense_forward",
    )


def pad_arguments(node: Node) -> tuple[Node, list[Node], list[Any], float]:
    """Return the rows, offsets, lengths and padding value of a call for which ``is_pad`` holds."""
    arguments = arguments_of(node)
    if "max_sequence_length" in arguments:
        return arguments["values"], [arguments["offsets"]], [arguments["max_sequence_length"]], 0.0
    return (
        arguments["values"],
        list(arguments["offsets"]),
        list(arguments["max_lengths"]),
        arguments["padding_value"],
    )


def emit_padded(program: Program, bags: Sequence[Bag], length: Any) -> Node:
    """Emit one call for padded histories: ``[bags, length, sum of dims]``, in order.

    The offsets of a feature may end before its lookups do: the rest is a history of its own, which is cut
    off. Offsets of a KeyedJaggedTensor end with the lookups.
    """
    histories = connected(program, bags)
    keyed = [keyed_part(program, bag) for bag in histories]
    parts = [part for part in keyed if part is not None]
    weights, features, columns = features_of(program, histories)
    if len(parts) < len(histories):
        indices = joined(program, [bag.indices for bag in histories])
        offsets = jagged_offsets(program, histories, "fused_embedding")
        padded = _call(program, histories, weights, features, indices, offsets, columns, "padded", length)
        return program.emit(aten.slice.Tensor, padded, 0, 0, -1)
    if is_whole(parts):
        indices, lengths = parts[0].values, parts[0].lengths
    else:
        indices = joined(program, [bag.indices for bag in histories])
        lengths = joined(program, [part.own_lengths for part in parts])
    offsets = program.emit(torch.ops.fbgemm.asynchronous_complete_cumsum.default, lengths)
    return _call(program, histories, weights, features, indices, offsets, columns, "padded", length)


def emit_joined(program: Program, bags: Sequence[Bag]) -> Node:
    """Emit one call for indices of one shape ``[..., length]``: ``[..., length, sum of dims]``, in order."""
    histories = connected(program, bags)
    weights, features, columns = features_of(program, histories)
    indices = joined(program, [flat(program, bag.indices) for bag in histories])
    offsets = _even_offsets(program, histories)
    rows = _call(program, histories, weights, features, indices, offsets, columns, "joined")
    return program.emit(aten.reshape.default, rows, [*_shape(program, histories[0].indices), columns])


def emit_apart(program: Program, bags: Sequence[Bag]) -> list[Node]:
    """Emit one call for indices of one shape and tables of one dim; returns views of its result for each."""
    histories = connected(program, bags)
    weights, features, _ = features_of(program, histories)
    indices = joined(program, [flat(program, bag.indices) for bag in histories])
    rows = _call(
        program,
        histories,
        weights,
        features,
        indices,
        _even_offsets(program, histories),
        histories[0].dim,
        "jagged",
    )
    shape = _shape(program, histories[0].indices)
    parts = program.emit(aten.reshape.default, rows, [len(histories), *shape, histories[0].dim])
    return [program.emit(aten.select.int, parts, 0, number) for number in range(len(histories))]


def _call(
    program: Program, bags: Sequence[Bag], weights: list[Node], features: Node, indices: Node,
    offsets: Node, columns: int, layout: str, length: Any = 0,
) -> Node:  # fmt: skip
    code = DTYPES.index(value_of(bags[0].result).dtype)
    call = weights, features, indices, offsets, columns, [], None, layout, length, code, bags[0].sparse
    return program.emit(torch.ops.recfuse.fused_embedding.default, *call)


def flat(program: Program, node: Node) -> Node:
    """Return indices as ``[lookups]``."""
    return node if value_of(node).dim() == 1 else program.emit(aten.reshape.default, node, [-1])


def _shape(program: Program, node: Node) -> list[Any]:
    return [program.size(node, dim) for dim in range(value_of(node).dim())]


def _even_offsets(program: Program, bags: Sequence[Bag]) -> Node:
    """Return the offsets of histories of one length, the last dim of the indices, for each feature."""
    *outer, length = _shape(program, bags[0].indices)
    count: Any = len(bags)
    for size in outer:
        count = arithmetic(program, operator.mul, count, size)
    end = arithmetic(program, operator.add, count, 1)
    numbers = program.emit(aten.arange.default, end, **integers(bags[0]))
    return program.emit(aten.mul.Tensor, numbers, length)
