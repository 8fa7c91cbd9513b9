"""``Chain``: the steps of ``recfuse::embedding_columns`` that compute indices from raw values of a graph.

A step must give the same bits as torch. Torch still computes a logarithm or a cast of floats, and its result
is the raw value. Boundaries must be constants, because a buffer may change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Node

from recfuse.passes.graph.bags import FIXED, Bag
from recfuse.passes.graph.columns.hashes import hash_at
from recfuse.passes.graph.columns.slots import part_of
from recfuse.passes.graph.nodes import arguments_of, aten, is_call, same, tensor_of, value_of
from recfuse.passes.graph.program import Program

AFFINE, CLIP, CLIP_INTEGER, MODULO, BUCKETIZE, BUCKETIZE_RIGHT, HASH = (
    0,
    2,
    4,
    5,
    6,
    7,
    8,
)  # RF_COLUMN_STEP_LIST
_INPUTS = (torch.float32, torch.int32, torch.int64)
_LEAST, _MOST = -(2**63), 2**63 - 1


class Step(NamedTuple):
    """A step of a chain; only a bucketize has ``boundaries``."""

    operation: int
    a: int = 0
    b: int = 0
    boundaries: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chain:
    """Raw values and the steps from them to indices."""

    input: Node  # dense: [batch] or [batch, values]; jagged: [lookups]
    slot: int  # dense: position of the first value of a sample
    width: int  # dense: values per sample; jagged: 0
    steps: tuple[Step, ...] = ()
    folded: int = 0  # nodes that the chain replaces
    lookups_of: int = 0  # the input must be reshaped to [batch, lookups_of]; 0: no reshape
    turned: bool = False  # the input is [values, batch]


class Cross(NamedTuple):
    """The hash of two values of a sample."""

    left: Chain
    right: Chain
    buckets: int
    seed: int


def cross_of(program: Program, bag: Bag) -> Cross | None:
    """Return the cross that computes a bag's indices, or None.

    Each side must have a single value per sample, since the operator crosses all values with all values.
    """
    if bag.form != FIXED or bag.length != 1 or bag.weights is not None:
        return None
    node, views = bag.indices, 0
    while is_call(node, *_VIEWS) and (step := _step(program, node, bag)) is not None:
        _, node = step
        views += 1
    found_hash = hash_at(node)
    if found_hash is None or len(found_hash.words) != 2:
        return None
    if any(map(program.effects.is_written, (node, bag.indices, *found_hash.nodes))):
        return None
    if not all(same(value_of(word).shape[0], value_of(node).shape[0]) for word in found_hash.words):
        return None  # a value shared by all samples
    left, right = (chain_of(program, bag, word) for word in found_hash.words)
    if left is None or right is None:
        return None
    left = replace(left, folded=left.folded + right.folded + len(found_hash.nodes) - 2 + views)
    return Cross(left, right, found_hash.buckets, found_hash.seed)


def chain_of(program: Program, bag: Bag, indices: Node | None = None) -> Chain | None:
    """Return the chain of ``indices`` (default: the bag's), or None if the operator cannot read its input."""
    steps: list[Step] = []
    node, folded = indices or bag.indices, 0
    while not program.effects.is_written(node) and (step_and_input := _step(program, node, bag)) is not None:
        step, node = step_and_input
        folded += 1
        if step is not None:
            steps.insert(0, step)
    chain = _input(node, bag)
    if chain is None or program.effects.is_written(chain.input):
        return None
    if value_of(chain.input).dtype not in _INPUTS:
        return None
    return replace(chain, steps=tuple(steps), folded=folded)


def _step(program: Program, node: Node, bag: Bag) -> tuple[Step | None, Node] | None:
    """Return the step of a node (None for a view or a cast) and the node of its input, or None."""
    tensor = tensor_of(node)
    if tensor is None:
        return None
    if bag.form == FIXED and bag.length == 1 and is_call(node, *_VIEWS):  # a single value per sample
        arguments = tensor_of(node.args[0])
        is_same = arguments is not None and tensor.dtype == arguments.dtype
        is_same = is_same and _is_column(tensor) and _is_column(arguments)  # type: ignore[arg-type]
        return (None, node.args[0]) if is_same and same(tensor.shape[0], arguments.shape[0]) else None  # type: ignore[union-attr,return-value]
    if match := hash_at(node):
        is_taken = len(match.words) == 1 and not any(map(program.effects.is_written, match.nodes))
        return (Step(HASH, match.buckets, match.seed), match.words[0]) if is_taken else None
    arguments = arguments_of(node) if is_call(node, *_KNOWN) else {}
    if is_call(node, aten.bucketize):
        boundaries = _constant(program, arguments["boundaries"])
        if boundaries is None or getattr(value_of(arguments["self"]), "dtype", None) is not torch.float32:
            return None
        edges = boundaries.astype(np.float32)
        if not np.array_equal(edges, boundaries) or np.isnan(edges).any() or (edges[1:] < edges[:-1]).any():
            return None
        kind = BUCKETIZE_RIGHT if arguments["right"] else BUCKETIZE
        return Step(kind, boundaries=tuple(edges.tolist())), arguments["self"]
    if is_call(node, aten.clamp, aten.clamp_min, aten.clamp_max):
        return _clip(tensor, arguments)
    if is_call(node, aten.remainder) and not tensor.is_floating_point():
        other = arguments["other"]
        is_modulo = _is_integer(other, tensor.dtype) and other > 0 and _keeps_type(tensor, arguments)
        return (Step(MODULO, other), arguments["self"]) if is_modulo else None
    if is_call(node, aten.mul, aten.add, aten.sub) and tensor.dtype is torch.float32:
        return _affine(node, arguments)
    if is_call(node, aten.to, aten._to_copy) and not tensor.is_floating_point():
        before = tensor_of(node.args[0])
        widens = before is not None and (before.dtype, tensor.dtype) == (torch.int32, torch.int64)
        return (None, node.args[0]) if widens else None  # type: ignore[return-value]
    return None


_VIEWS = (
    aten.unsqueeze, aten.squeeze, aten.view, aten.reshape, aten.flatten, aten.contiguous, aten.slice,
    aten.alias, aten.detach,
)  # fmt: skip
_KNOWN = (
    aten.bucketize, aten.clamp, aten.clamp_min, aten.clamp_max, aten.remainder, aten.mul, aten.add, aten.sub,
)  # fmt: skip


def _is_column(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is [batch] or [batch, 1]."""
    return tensor.dim() == 1 or (tensor.dim() == 2 and same(tensor.shape[1], 1))


def _is_integer(value: Any, dtype: torch.dtype) -> bool:
    """Return whether a value is an integer that a dtype can represent."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    limits = torch.iinfo(dtype)
    return bool(limits.min <= value <= limits.max)


def _keeps_type(tensor: torch.Tensor, arguments: dict[str, Any]) -> bool:
    return (
        bool(value_of(arguments["self"]).dtype == tensor.dtype)
        if isinstance(arguments["self"], Node)
        else False
    )


def _clip(tensor: torch.Tensor, arguments: dict[str, Any]) -> tuple[Step, Node] | None:
    bounds = arguments.get("min"), arguments.get("max")
    if not _keeps_type(tensor, arguments):
        return None
    if tensor.is_floating_point():
        numbers = all(isinstance(bound, (int, float, type(None))) for bound in bounds)
        if tensor.dtype is not torch.float32 or not numbers or any(bound != bound for bound in bounds):
            return None
        low, high = _or_limits(bounds, -math.inf, math.inf)
        return Step(CLIP, bits(low), bits(high)), arguments["self"]
    if not all(bound is None or _is_integer(bound, tensor.dtype) for bound in bounds):
        return None
    return Step(CLIP_INTEGER, *_or_limits(bounds, _LEAST, _MOST)), arguments["self"]


def _or_limits(bounds: tuple[Any, Any], least: Any, most: Any) -> tuple[Any, Any]:
    low, high = bounds
    return least if low is None else low, most if high is None else high


def _affine(node: Node, arguments: dict[str, Any]) -> tuple[Step, Node] | None:
    """Return the step of a product or a sum with a number: each rounds once, as the step does."""
    other, first = arguments["other"], tensor_of(arguments["self"])
    if not isinstance(other, (int, float)) or arguments.get("alpha", 1) != 1 or first is None:
        return None
    if first.dtype is not torch.float32 or not math.isfinite(np.float32(other)):
        return None
    if is_call(node, aten.mul):  # then + -0.0, which changes nothing
        return Step(AFFINE, bits(other), bits(-0.0)), arguments["self"]
    return Step(AFFINE, bits(1.0), bits(-other if is_call(node, aten.sub) else other)), arguments["self"]


def _constant(program: Program, node: Any) -> NDArray[np.float64] | None:
    """Return the values of a constant vector of the program, which no user can change, or None."""
    values = program.constant_value(node) if isinstance(node, Node) else None
    return None if values is None or values.dim() != 1 else values.double().cpu().numpy()


def _input(node: Node, bag: Bag) -> Chain | None:
    """Return the chain without steps: columns of a wider tensor if a node is a view, else the node itself."""
    tensor, width = tensor_of(node), bag.length
    if tensor is None or tensor.dim() not in (1, 2):
        return None
    if bag.form != FIXED or bag.weights is not None:  # jagged, or passed as jagged
        return Chain(node, 0, 0)
    if tensor.dim() == 1 and width != 1:
        return Chain(node, 0, width, lookups_of=width)
    if tensor.dim() == 2 and not same(tensor.shape[1], width):
        return None
    if (slot := part_of(node)) is not None:
        return Chain(slot.base, slot.first, width, turned=slot.turned)
    return Chain(node, 0, width)


def bits(value: float) -> int:
    """Return the bits of a float32."""
    return int(np.float32(value).view(np.uint32))
