"""Embedding columns: from raw values of features to pooled rows.

Before, for each of many tables::

    index_k = clamp(bucketize(x[:, k] * 0.1, boundaries), 0, rows - 1)   # or remainder, affine, clamp, ...
    row_k   = embedding(weight_k, index_k)                               # or a bag of [batch, L]
    row_k   = where(x[:, k] >= 0, row_k, 0)                              # zeros where there is no value
    out     = cat([row_1, ..., row_n], 1)

After::

    out     = recfuse::embedding_columns([weight_1, ...], program, [x], ...)

Where at least one of the columns has a step to fold, and no weight is trained: the operator has no gradient,
and bags (``patterns/bags.py``) have one. Boundaries are part of the program where they are constants.

Source: Pan et al., RECom, ASPLOS 2023, sections 3.1.2 and 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from recfuse.ops.embedding_columns import MOST_TENSORS
from recfuse.passes.graph.bags import FIXED
from recfuse.passes.graph.column_chain import DROPPED, Column, chain_of, words_of
from recfuse.passes.graph.joins import join
from recfuse.passes.graph.nodes import arguments_of, aten, is_call, operator_of
from recfuse.passes.graph.pattern import GraphPattern, Match, Part
from recfuse.passes.graph.program import Program
from recfuse.passes.graph.ranges import Ranges
from recfuse.passes.patterns.bags import bags_of, groups_of

_BELOW_ZERO = {aten.ge: 0, aten.gt: -1}  # x >= 0, x > -1


def find(program: Program) -> Iterator[Match]:
    """Groups of columns, in calls of as many tensors as the operator takes."""
    ranges = Ranges(program)
    bags = [bag for bag, reason in bags_of(program) if not reason and bag.form == FIXED]
    columns = {}
    for bag in bags:
        if bag.weights is not None or bag.padding_idx >= 0 or program.may_train(bag.weight):
            continue
        chain = chain_of(program, bag)
        if chain is not None:
            columns[bag.result] = _zeroed(program, ranges, Column(bag, chain, bag.result))
    for group in groups_of(program, [column.bag for column in columns.values()]):
        for start in range(0, len(group), MOST_TENSORS):
            part = [columns[bag.result] for bag in group[start : start + MOST_TENSORS]]
            if any(column.chain.folded for column in part):
                yield _match(program, part)


def _match(program: Program, columns: Sequence[Column]) -> Match:
    def apply() -> str:
        results = [(column.result, column.bag.dim) for column in columns]
        where = join(program, results, lambda order: _call(program, [columns[at] for at in order]))
        folded = sum(column.chain.folded for column in columns)
        return f"{len(columns)} columns in one call, {folded} operators folded{where}"

    parts = [Part(program.name(column.bag.weight), _found(column)) for column in columns]
    return Match(parts, apply, key=columns[0].result.name)


def _found(column: Column) -> str:
    return f"column, {column.bag.found}, {len(column.chain.steps)} steps"


def _call(program: Program, columns: list[Column]) -> Node:
    inputs = list(dict.fromkeys(column.chain.input for column in columns))
    weights = list(dict.fromkeys(column.bag.weight for column in columns))
    words = words_of(columns, inputs, weights).tolist()
    device = columns[0].bag.table.device
    constant = program.constant(words, "cpu")
    call = weights, constant, inputs, [], [], [], program.size(inputs[0], 0), sum(c.bag.dim for c in columns)
    on_device = (program.constant(words, device),) if device.type == "cuda" else ()
    return program.emit(torch.ops.recfuse.embedding_columns.default, *call, *on_device)


def _zeroed(program: Program, ranges: Ranges, column: Column) -> Column:
    """A column whose rows are zeros where the value is negative: such values are dropped instead."""
    result = column.bag.result
    chain = column.chain
    if len(result.users) != 1 or chain.width != 1 or chain.steps[1:]:
        return column
    user = next(iter(result.users))
    if not is_call(user, aten.where) or arguments_of(user)["self"] is not result:
        return column
    given = arguments_of(user)
    condition = given["condition"]
    if not is_call(condition, aten.unsqueeze) or arguments_of(condition)["dim"] not in (1, -1):
        return column
    compared = condition.args[0]
    packet = getattr(operator_of(compared), "overloadpacket", None)
    if _BELOW_ZERO.get(packet, object()) != compared.args[1] or not _is_zero(given["other"]):
        return column
    clips = [step for step in chain.steps if step == (4, 0, 2**63 - 1, ())]  # clamp(min=0)
    if len(clips) != len(chain.steps) or not chain.steps or compared.args[0] is not _raw(column):
        return column
    bounds = ranges.of(compared.args[0])
    if bounds is None or bounds.high >= column.bag.table.shape[0]:  # which must raise, not be dropped
        return column
    if program.effects.is_written(user) or program.effects.why_not((result, user, compared)):
        return column
    folded = chain.folded + 3
    return replace(column, chain=replace(chain, steps=(), invalid=DROPPED, folded=folded), result=user)


def _raw(column: Column) -> Node | None:
    """The values before the steps."""
    node = column.bag.indices
    for _ in column.chain.steps:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_zero(node: object) -> bool:
    if isinstance(node, (int, float)):
        return node == 0
    if is_call(node, aten.zeros_like, aten.zeros, aten.new_zeros):
        return True
    return is_call(node, aten.full, aten.scalar_tensor) and node.args[-1] == 0  # type: ignore[attr-defined]


PATTERN = GraphPattern("columns", 40, find)
