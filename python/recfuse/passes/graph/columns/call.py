"""``Column``: a bag with the steps that compute its indices; ``emit_columns``: the call for many columns."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Node

from recfuse import _C
from recfuse._codes import COLUMN, COLUMN_EMPTY, COLUMN_INVALID, COLUMN_SOURCE, COLUMN_STEP, MODES
from recfuse.ops.embedding_columns import fits_a_gpu
from recfuse.passes.graph.bags import FIXED, LAST, Bag
from recfuse.passes.graph.columns.chain import BUCKETIZE, BUCKETIZE_RIGHT, Chain, Cross, bits
from recfuse.passes.graph.nodes import aten, value_of
from recfuse.passes.graph.program import Program

ERROR, DROPPED = COLUMN_INVALID["error"], COLUMN_INVALID["drop"]
FILLED = COLUMN_EMPTY["fill"]


@dataclass(frozen=True)
class Column:
    """An embedding bag with the chain of its indices, and the node that has its result."""

    bag: Bag
    chain: Chain
    result: Node = field(repr=False)
    invalid: int = ERROR  # treatment of an invalid index
    empty: int = FILLED  # row of a sample without an index; FILLED: `fill`
    fill: float = 0.0
    folded: int = 0  # nodes after the bag that the column replaces
    cross: Cross | None = None  # its left chain is `chain`


class _Input(NamedTuple):
    """An input of the operator; equal inputs are passed once."""

    values: Node
    lookups_of: int = 0
    turned: bool = False
    offsets: Node | None = None  # jagged
    last: bool = False  # whether offsets include the last offset
    length: int = 0  # jagged with this fixed number of values per sample
    weights: Node | None = None


def _inputs_of(column: Column) -> list[_Input]:
    chains = [column.chain] if column.cross is None else [column.cross.left, column.cross.right]
    return [_input_of(chain, column.bag) for chain in chains]


def _input_of(chain: Chain, bag: Bag) -> _Input:
    if chain.width:
        return _Input(chain.input, chain.lookups_of, chain.turned)
    length = bag.length if bag.form == FIXED else 0
    offsets = bag.counted if length else bag.offsets
    return _Input(chain.input, 0, False, offsets, bag.form == LAST, length, bag.weights)


def pieces(columns: Sequence[Column]) -> Iterator[list[Column]]:
    """Yield the columns in pieces that fit one call on a GPU."""
    piece: list[Column] = []
    dense: set[_Input] = set()
    jagged: set[_Input] = set()
    weights: set[Node] = set()
    for column in columns:
        for _ in range(2):  # a second time if it begins a new piece
            for each in _inputs_of(column):
                (dense if each.offsets is None else jagged).add(each)
            weights.add(column.bag.weight)
            if not piece or fits_a_gpu(len(dense), len(jagged), len(weights)):
                break
            yield piece
            piece = []
            for inputs in (dense, jagged, weights):
                inputs.clear()
        piece.append(column)
    if piece:
        yield piece


def emit_columns(program: Program, columns: Sequence[Column]) -> Node:
    """Emit one call for columns of one dtype and batch: ``[samples, sum of dims]``, in order."""
    distinct = dict.fromkeys(each for column in columns for each in _inputs_of(column))
    inputs = sorted(distinct, key=lambda each: each.offsets is not None)
    weights = list(dict.fromkeys(column.bag.weight for column in columns))
    words = _words(columns, {each: at for at, each in enumerate(inputs)}, weights).tolist()
    dense = [_values(program, each) for each in inputs if each.offsets is None]
    jagged = [each for each in inputs if each.offsets is not None]
    values = [_flat(program, each.values) for each in jagged]
    device = columns[0].bag.table.device
    offsets = [_offsets(program, each, device) for each in jagged]
    factors = _factors(program, jagged, device)
    batch = program.size(dense[0], 0) if dense else _samples(program, jagged[0])
    if not program.compares_sizes:  # the operator also takes offsets of several features
        is_source = not dense  # whether the first offsets define the batch
        ends = _ends(program, batch)
        offsets[is_source:] = [
            program.emit(aten.reshape.default, item, [ends]) for item in offsets[is_source:]
        ]
    host = program.constant(words, "cpu")
    call = weights, host, dense, values, offsets, factors, batch, sum(column.bag.dim for column in columns)
    on_device = (program.constant(words, device),) if device.type == "cuda" else ()
    return program.emit(torch.ops.recfuse.embedding_columns.default, *call, *on_device)


def _values(program: Program, each: _Input) -> Node:
    if each.lookups_of:
        return program.emit(aten.reshape.default, each.values, [-1, each.lookups_of])
    return program.emit(aten.t.default, each.values) if each.turned else each.values


def _flat(program: Program, node: Node) -> Node:
    """Return contiguous values ``[lookups]``: the operator makes no copies."""
    tensor = value_of(node)
    values = node if tensor.dim() == 1 else program.emit(aten.reshape.default, node, [-1])
    return program.emit(aten.contiguous.default, values)


def _offsets(program: Program, each: _Input, device: torch.device) -> Node:
    """Return offsets ``[samples + 1]``."""
    assert each.offsets is not None
    if each.last:
        return program.emit(aten.contiguous.default, each.offsets)
    samples = program.size(each.offsets, 0)
    if each.length:
        options: dict[str, Any] = {"dtype": torch.int64, "device": device, "pin_memory": False}
        numbers = program.emit(aten.arange.default, _ends(program, samples), **options)
        return program.emit(aten.mul.Tensor, numbers, each.length)
    options = {"dtype": value_of(each.offsets).dtype, "device": device, "pin_memory": False}
    end = program.emit(aten.full.default, [1], program.size(each.values, 0), **options)
    return program.emit(aten.cat.default, [each.offsets, end])


def _ends(program: Program, samples: Any) -> Any:
    return program.emit(operator.add, samples, 1) if isinstance(samples, Node) else samples + 1


def _samples(program: Program, each: _Input) -> Any:
    assert each.offsets is not None
    ends = program.size(each.offsets, 0)
    if not each.last:
        return ends
    return program.emit(operator.sub, ends, 1) if isinstance(ends, Node) else ends - 1


def _factors(program: Program, jagged: Sequence[_Input], device: torch.device) -> list[Node]:
    if all(each.weights is None for each in jagged):
        return []
    options: dict[str, Any] = {"dtype": torch.float32, "device": device, "pin_memory": False}
    none = program.emit(aten.full.default, [0], 0.0, **options)
    factors = [none if each.weights is None else _flat(program, each.weights) for each in jagged]
    return [
        program.emit(aten.to.dtype, node, torch.float32) if value_of(node).dtype is torch.bool else node
        for node in factors
    ]


def _words(
    columns: Sequence[Column], number: dict[_Input, int], weights: Sequence[Node]
) -> NDArray[np.int64]:
    """Return the program of columns, in the order of the output; see recfuse/embedding_columns.h."""
    rows, sources, steps, edges = [], [], [], []
    buffer = {weight: at for at, weight in enumerate(weights)}
    column_at = 0
    for column in columns:
        bag, cross = column.bag, column.cross
        first_source = len(sources)
        for chain in (column.chain,) if cross is None else (cross.left, cross.right):
            at = number[_input_of(chain, bag)]
            fields = {"input": at, "slot": chain.slot, "width": chain.width}
            sources.append(COLUMN_SOURCE.row(**fields, first_step=len(steps), n_steps=len(chain.steps)))
            for step in chain.steps:
                a, b = step.a, step.b
                if step.operation in (BUCKETIZE, BUCKETIZE_RIGHT):
                    a, b = len(edges), len(step.boundaries)
                    edges.extend(step.boundaries)
                steps.append(COLUMN_STEP.row(operation=step.operation, a=a, b=b))
        right, buckets, seed = (-1, 0, 0) if cross is None else (first_source + 1, cross.buckets, cross.seed)
        row = COLUMN.row(
            left=first_source, right=right, cross_buckets=buckets, cross_seed=seed, buffer=buffer[bag.weight],
            weight_offset=0, rows=int(bag.table.shape[0]), dim=bag.dim, pooling=MODES.index(bag.mode),
            weighted=bag.weights is not None, invalid=column.invalid, empty=column.empty,
            fill=bits(column.fill), first_dim=0, n_dims=bag.dim, scale=bits(1.0), output_column=column_at,
        )  # fmt: skip
        rows.append(row)
        column_at += bag.dim
    return _C.embedding_columns_program(
        np.array(rows, np.int64).reshape(-1, len(COLUMN)),
        np.array(sources, np.int64).reshape(-1, len(COLUMN_SOURCE)),
        np.array(steps, np.int64).reshape(-1, len(COLUMN_STEP)),
        np.array(edges, np.float32),
        np.empty(0, np.int64),
    )
