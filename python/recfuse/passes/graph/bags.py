"""``Bag``: an embedding bag of a graph, computed by any operators; ``emit_call``: one call for many bags."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from recfuse._codes import MODES
from recfuse.data.joined import begin_with_0, or_negative
from recfuse.passes.graph.nodes import aten, tensor_of, value_of
from recfuse.passes.graph.program import Program

FIXED, JAGGED, LAST = "fixed", "jagged", "jagged, with the last offset"


@dataclass(frozen=True)
class Bag:
    """A pooling of one table: ``result[b]`` is the sum, mean or maximum of the rows of bag ``b``."""

    result: Node  # [bags, dim]
    weight: Node  # [rows, dim]
    indices: Node  # [lookups], or any shape with `length` lookups per bag
    mode: str
    operators: str  # operators of the graph, for the report
    inside: tuple[Node, ...]  # nodes between indices and result
    form: str  # FIXED, JAGGED or LAST
    length: int = 0  # FIXED: lookups of each bag
    offsets: Node | None = None  # start of each bag; None: `indices` is [bags, lookups of each]
    counted: Node | None = None  # without offsets: a tensor with a row for each bag
    weights: Node | None = None  # a factor for each lookup, in the shape of indices
    padding_idx: int = -1
    sparse: bool = False
    pads_gradient: bool = False  # a row is read but has no gradient, which no bag supports

    @property
    def table(self) -> Tensor:
        """The fake tensor of the weight."""
        return tensor_of(self.weight)  # type: ignore[return-value]

    @property
    def dim(self) -> int:
        """The number of columns of the result."""
        return int(self.table.shape[1])


def emit_call(program: Program, bags: Sequence[Bag]) -> Node:
    """Emit one call for features of one dtype with equal numbers of bags: ``[bags, sum of dims]``, in order.

    Either all features have a last offset, or no feature has it. If a bag receives no gradient, for example
    because the graph detaches it, its weight receives none either: an optimizer with a state or weight decay
    would move the weight for a gradient of zeros.
    """
    bags = connected(program, bags)
    weights, features, column = features_of(program, bags)
    offsets = (_fixed_offsets if all(bag.form == FIXED for bag in bags) else jagged_offsets)(program, bags)
    factors = None
    if bags[0].weights is not None:
        factors = joined(program, [factors_of(program, bag) for bag in bags])
    indices = joined(program, _indices(program, bags))
    call = weights, features, indices, offsets, column, factors, bags[0].sparse
    pooled = program.emit(torch.ops.recfuse.fused_embedding_bag.default, *call)
    if bags[0].form == LAST:  # the lookups after the last offset form an extra bag
        pooled = program.emit(aten.slice.Tensor, pooled, 0, 0, -1)
    return pooled


def features_of(program: Program, bags: Sequence[Bag]) -> tuple[list[Node], Node, int]:
    """Return the weights of a call, its features, and the columns of its result."""
    weights = list(dict.fromkeys(bag.weight for bag in bags))
    rows, column = [], 0
    for bag in bags:
        values = weights.index(bag.weight), 0, int(bag.table.shape[0]), bag.dim
        rows.append([*values, MODES.index(bag.mode), bag.padding_idx, column])
        column += bag.dim
    return weights, program.constant(rows, "cpu"), column


def connected(program: Program, bags: Sequence[Bag]) -> list[Bag]:
    """Return the bags, with detached weights and factors where a bag receives no gradient."""
    return [bag if program.receives_gradient(bag.result) else _detached(program, bag) for bag in bags]


def _detached(program: Program, bag: Bag) -> Bag:
    """Return the bag with a detached weight and detached factors."""
    factors = bag.weights
    if factors is not None and value_of(factors).dtype is not torch.bool:
        factors = program.emit(aten.detach.default, factors)
    return replace(bag, weight=program.emit(aten.detach.default, bag.weight), weights=factors)


def _indices(program: Program, bags: Sequence[Bag]) -> list[Node]:
    """Return the indices ``[lookups]`` of each bag.

    Unless the program compares sizes, each has the size that follows from the batch of the first bag.
    """
    flat = [_flat(program, bag.indices) for bag in bags]
    if program.compares_sizes or any(bag.form != FIXED for bag in bags):
        return flat
    count = program.size(bags[0].counted, 0)
    lengths = {
        length: arithmetic(program, operator.mul, count, length) for length in {b.length for b in bags}
    }
    return [
        program.emit(aten.reshape.default, flat_indices, [lengths[bag.length]])
        for bag, flat_indices in zip(bags, flat, strict=True)
    ]


def factors_of(program: Program, bag: Bag) -> Node:
    """Return the factors ``[lookups]`` in the table's dtype: a mask becomes 1 and 0."""
    factors = _flat(program, bag.weights)
    is_mask = value_of(factors).dtype is torch.bool
    return program.emit(aten.to.dtype, factors, bag.table.dtype) if is_mask else factors


def _flat(program: Program, node: Node | None) -> Node:
    assert node is not None
    return node if value_of(node).dim() == 1 else program.emit(aten.reshape.default, node, [-1])


def joined(program: Program, nodes: Sequence[Node]) -> Node:
    """Return the cat of flat tensors."""
    return nodes[0] if len(nodes) == 1 else program.emit(aten.cat.default, list(nodes))


def arithmetic(program: Program, function: Any, a: Any, b: Any) -> Any:
    """Compute with sizes, which are numbers or nodes."""
    return program.emit(function, a, b) if isinstance(a, Node) or isinstance(b, Node) else function(a, b)


def integers(bag: Bag) -> dict[str, Any]:
    """Return the options of int64 tensors on the device of a bag."""
    return {"dtype": torch.int64, "device": bag.table.device, "pin_memory": False}


def _fixed_offsets(program: Program, bags: Sequence[Bag]) -> Node:
    """Return the offsets of features whose bags have a fixed length, feature after feature."""
    options, lengths = integers(bags[0]), [bag.length for bag in bags]
    count = program.size(bags[0].counted, 0)
    if len(set(lengths)) == 1:
        ends = arithmetic(program, operator.mul, count, len(bags))
        numbers = program.emit(aten.arange.default, arithmetic(program, operator.add, ends, 1), **options)
        return numbers if lengths[0] == 1 else program.emit(aten.mul.Tensor, numbers, lengths[0])
    before, total = [], 0
    for length in lengths:
        before.append([total])
        total += length
    numbers = program.emit(aten.arange.default, count, **options)
    first = program.emit(aten.mul.Tensor, program.constant(before, bags[0].table.device), count)
    steps = program.constant([[length] for length in lengths], bags[0].table.device)
    starts = program.emit(aten.add.Tensor, program.emit(aten.mul.Tensor, steps, numbers), first)
    end = program.emit(aten.full.default, [1], arithmetic(program, operator.mul, count, total), **options)
    return program.emit(aten.cat.default, [program.emit(aten.reshape.default, starts, [-1]), end])


def jagged_offsets(program: Program, bags: Sequence[Bag], name: str = "fused_embedding_bag") -> Node:
    """Return the offsets of all features, each shifted by the lookups of the previous features.

    ``name`` is the operator in the message about offsets that do not begin with 0.
    """
    options = integers(bags[0])
    stacked = program.emit(aten.stack.default, [_own_offsets(program, bag) for bag in bags])
    starts: list[Any] = [0]
    for bag in bags:
        starts.append(arithmetic(program, operator.add, starts[-1], _lookups(program, bag.indices)))
    if any(isinstance(start, Node) for start in starts):
        one_by_one = [program.emit(aten.full.default, [1], start, **options) for start in starts]
        all_starts = program.emit(aten.cat.default, one_by_one)
    else:
        all_starts = program.constant(starts, bags[0].table.device)
    column = program.emit(aten.slice.Tensor, all_starts, 0, 0, -1)
    column = program.emit(aten.unsqueeze.default, column, 1)
    end = program.emit(aten.slice.Tensor, all_starts, 0, -1)
    good = begin_with_0(stacked, program.size(stacked, 1), bags[0].table.device, program.emit)
    moved = program.emit(aten.add.Tensor, stacked, column)
    if bags[0].table.device.type == "cpu":
        message = f"recfuse.{name}: offsets of a table begin with another number; expected 0"
        program.emit(aten._assert_async.msg, program.emit(aten.all.default, good), message)
    else:
        moved = or_negative(good, moved, stacked, program.emit)
    return program.emit(aten.cat.default, [program.emit(aten.reshape.default, moved, [-1]), end])


def _lookups(program: Program, indices: Node) -> Any:
    """Return the number of lookups as an argument of a call."""
    shape = value_of(indices).shape
    if all(isinstance(size, int) for size in shape):
        return math.prod(shape)
    return program.size(indices, 0) if len(shape) == 1 else program.emit(aten.sym_numel.default, indices)


def _own_offsets(program: Program, bag: Bag) -> Node:
    """Return int64 ``[bags]``: the start of each bag among the lookups of its feature."""
    if bag.offsets is None:
        numbers = program.emit(aten.arange.default, program.size(bag.counted, 0), **integers(bag))
        length = bag.length or program.size(bag.indices, 1)
        return program.emit(aten.mul.Tensor, numbers, length)
    if value_of(bag.offsets).dtype is torch.int64:
        return bag.offsets
    return program.emit(aten.to.dtype, bag.offsets, torch.int64)
