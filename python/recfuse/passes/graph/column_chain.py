"""``Chain``: how a graph makes indices of raw values, as steps of ``recfuse::embedding_columns``.

Only steps whose every bit is torch's are taken: a logarithm, or a cast of floats, is left to torch, and what
it returns is the raw value. Constants alone are taken: boundaries that are a buffer may change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Node

from recfuse import _C
from recfuse.passes.graph.bags import Bag
from recfuse.passes.graph.nodes import arguments_of, aten, is_call, tensor_of, value_of
from recfuse.passes.graph.program import Program

_AFFINE, _CLIP, _CLIP_INTEGER, _MODULO, _BUCKETIZE, _BUCKETIZE_RIGHT = 0, 2, 4, 5, 6, 7  # RF_COLUMN_STEP_LIST
_INPUTS = (torch.float32, torch.int32, torch.int64)
ERROR, DROPPED = -2, -1
_LEAST, _MOST = -(2**63), 2**63 - 1


class Step(NamedTuple):
    """One step; ``boundaries`` of a bucketize."""

    operation: int
    a: int = 0
    b: int = 0
    boundaries: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chain:
    """Raw values and what is made of them."""

    input: Node  # [batch] or [batch, values]
    slot: int  # the first of a sample's values in it
    width: int  # values a sample
    steps: tuple[Step, ...] = ()
    invalid: int = ERROR  # what becomes of an index that is no row
    folded: int = 0  # nodes that are no more


@dataclass(frozen=True)
class Column:
    """An embedding bag with the chain of its indices, and the node that has its result."""

    bag: Bag
    chain: Chain
    result: Node = field(repr=False)


def chain_of(program: Program, bag: Bag) -> Chain | None:
    """The chain of a bag's indices; None where the operator cannot read the raw values."""
    width = bag.length
    steps: list[Step] = []
    node, folded = bag.indices, 0
    while not program.effects.is_written(node) and (found := _step(program, node)) is not None:
        step, node = found
        folded += 1
        if step is not None:
            steps.insert(0, step)
    chain = _input(node, width)
    if chain is None or program.effects.is_written(chain.input):
        return None
    if value_of(chain.input).dtype not in _INPUTS:
        return None
    return replace(chain, steps=tuple(steps), folded=folded)


def _step(program: Program, node: Node) -> tuple[Step | None, Node] | None:
    """What a node does to each value, and to whose."""
    tensor = tensor_of(node)
    if tensor is None or len(node.users) != 1:
        return None
    given = arguments_of(node) if is_call(node, *_KNOWN) else {}
    if is_call(node, aten.bucketize):
        boundaries = _constant(program, given["boundaries"])
        if boundaries is None or value_of(given["self"]).dtype is not torch.float32:
            return None
        edges = boundaries.astype(np.float32)
        if not np.array_equal(edges, boundaries) or np.isnan(edges).any() or (edges[1:] < edges[:-1]).any():
            return None
        kind = _BUCKETIZE_RIGHT if given["right"] else _BUCKETIZE
        return Step(kind, boundaries=tuple(edges.tolist())), given["self"]
    if is_call(node, aten.clamp, aten.clamp_min, aten.clamp_max):
        return _clip(tensor, given)
    if is_call(node, aten.remainder) and not tensor.is_floating_point():
        other = given["other"]
        is_modulo = isinstance(other, int) and not isinstance(other, bool) and other > 0
        return (Step(_MODULO, other), given["self"]) if is_modulo else None
    if is_call(node, aten.mul, aten.add, aten.sub) and tensor.dtype is torch.float32:
        return _affine(node, given)
    if is_call(node, aten.to, aten._to_copy) and not tensor.is_floating_point():
        before = tensor_of(node.args[0])
        widens = before is not None and (before.dtype, tensor.dtype) == (torch.int32, torch.int64)
        return (None, node.args[0]) if widens else None  # type: ignore[return-value]
    return None


_KNOWN = (
    aten.bucketize, aten.clamp, aten.clamp_min, aten.clamp_max, aten.remainder, aten.mul, aten.add, aten.sub,
)  # fmt: skip


def _clip(tensor: torch.Tensor, given: dict[str, Any]) -> tuple[Step, Node] | None:
    bounds = given.get("min"), given.get("max")
    if value_of(given["self"]).dtype != tensor.dtype:
        return None
    if tensor.is_floating_point():
        numbers = all(isinstance(bound, (int, float, type(None))) for bound in bounds)
        if tensor.dtype is not torch.float32 or not numbers:
            return None
        low, high = _or_limits(bounds, -math.inf, math.inf)
        return Step(_CLIP, _bits(low), _bits(high)), given["self"]
    if not all(isinstance(bound, (int, type(None))) for bound in bounds):
        return None
    return Step(_CLIP_INTEGER, *_or_limits(bounds, _LEAST, _MOST)), given["self"]


def _or_limits(bounds: tuple[Any, Any], least: Any, most: Any) -> tuple[Any, Any]:
    low, high = bounds
    return least if low is None else low, most if high is None else high


def _affine(node: Node, given: dict[str, Any]) -> tuple[Step, Node] | None:
    """A product or a sum with a number: one rounding each, as the step's."""
    other, first = given["other"], tensor_of(given["self"])
    if not isinstance(other, (int, float)) or given.get("alpha", 1) != 1 or first is None:
        return None
    if first.dtype is not torch.float32 or not math.isfinite(np.float32(other)):
        return None
    if is_call(node, aten.mul):  # then + -0.0, which changes nothing
        return Step(_AFFINE, _bits(other), _bits(-0.0)), given["self"]
    return Step(_AFFINE, _bits(1.0), _bits(-other if is_call(node, aten.sub) else other)), given["self"]


def _constant(program: Program, node: Any) -> NDArray[np.float64] | None:
    """The values of a tensor that no user can change: a constant of the program."""
    found = program.constant_value(node) if isinstance(node, Node) else None
    return None if found is None or found.dim() != 1 else found.double().cpu().numpy()


def _input(node: Node, width: int) -> Chain | None:
    """Columns of a wider tensor where a node is such, else the node itself."""
    tensor = tensor_of(node)
    if tensor is None or tensor.dim() not in (1, 2):
        return None
    if is_call(node, aten.select) and tensor.dim() == 1:
        given = arguments_of(node)
        base = value_of(given["self"])
        if base.dim() == 2 and given["dim"] in (1, -1) and isinstance(base.shape[1], int):
            return Chain(given["self"], given["index"] % base.shape[1], 1)
    if is_call(node, aten.slice) and tensor.dim() == 2:
        given = arguments_of(node)
        base = value_of(given["self"])
        if given["dim"] in (1, -1) and given["step"] == 1 and isinstance(base.shape[1], int):
            start = given["start"] or 0
            return Chain(given["self"], start % base.shape[1] if start else 0, width)
    is_row = node.target is not None and getattr(node.target, "__name__", "") == "getitem"
    if is_row and is_call(node.args[0], aten.unbind) and tensor.dim() == 1:
        given = arguments_of(node.args[0])  # type: ignore[arg-type]
        if value_of(given["self"]).dim() == 2 and given["dim"] in (1, -1):
            return Chain(given["self"], int(node.args[1]), 1)  # type: ignore[arg-type]
    if tensor.dim() == 2 and tensor.shape[1] != width:
        return None
    return Chain(node, 0, width)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def words_of(columns: list[Column], inputs: list[Node], weights: list[Node]) -> NDArray[np.int64]:
    """The program of columns, in the order of the output; fields are those of recfuse/embedding_columns.h."""
    rows, sources, steps, edges = [], [], [], []
    column_at = 0
    for column in columns:
        chain, bag = column.chain, column.bag
        sources.append([inputs.index(chain.input), chain.slot, chain.width, len(steps), len(chain.steps)])
        for step in chain.steps:
            if step.boundaries or step.operation in (_BUCKETIZE, _BUCKETIZE_RIGHT):
                steps.append([step.operation, len(edges), len(step.boundaries)])
                edges.extend(step.boundaries)
            else:
                steps.append([step.operation, step.a, step.b])
        pooling = ("sum", "mean", "max").index(bag.mode)
        table = weights.index(bag.weight), 0, int(bag.table.shape[0]), bag.dim
        rest = chain.invalid, -1, _bits(0.0), 0, bag.dim, _bits(1.0), column_at
        rows.append([len(sources) - 1, -1, 0, 0, *table, pooling, 0, *rest])
        column_at += bag.dim
    return _C.embedding_columns_program(
        np.array(rows, np.int64).reshape(-1, 17),
        np.array(sources, np.int64).reshape(-1, 5),
        np.array(steps, np.int64).reshape(-1, 3),
        np.array(edges, np.float32),
        np.empty(0, np.int64),
    )
