"""Embedding columns: from raw values of features to pooled rows.

Before, for each of many tables::

    index_k = clamp(bucketize(x[:, k] * 0.1, boundaries), 0, rows - 1)   # or remainder, affine, clamp, ...
    row_k   = embedding(weight_k, index_k)                               # or a bag of [batch, L]
    row_k   = where(x[:, k] >= 0, row_k, 0)                              # zeros where there is no value
    out     = cat([row_1, ..., row_n], 1)

After::

    out     = recfuse::embedding_columns([weight_1, ...], program, [x], ...)

At least one of the columns must have a step to fold, and no weight may be trained: the operator has no
gradient, unlike bags (``patterns/bags.py``). In a program that could be trained later, a frozen embedding
with a ``padding_idx`` is a column too: no bag has its gradient, which excludes that row. Constant boundaries
become part of the program.

Source: Pan et al., RECom, ASPLOS 2023, sections 3.1.2 and 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from recfuse.passes.graph.bags import JAGGED, Bag
from recfuse.passes.graph.columns.call import Column, emit_columns, pieces
from recfuse.passes.graph.columns.chain import chain_of, cross_of
from recfuse.passes.graph.columns.ends import with_end
from recfuse.passes.graph.joins import join
from recfuse.passes.graph.pattern import GraphPattern, Match, Part
from recfuse.passes.graph.program import Program
from recfuse.passes.graph.ranges import Ranges
from recfuse.passes.patterns.bags import bags_of, groups_of, needs_frozen


def find(program: Program) -> Iterator[Match]:
    """Yield groups of columns, cut at the number of tensors that one call takes."""
    ranges = Ranges(program)
    columns = {}
    for bag, reason in bags_of(program):
        if reason or not _is_taken(program, bag):
            continue
        cross = cross_of(program, bag)
        chain = chain_of(program, bag) if cross is None else cross.left
        if chain is not None:
            columns[bag.result] = with_end(program, ranges, Column(bag, chain, bag.result, cross=cross))
    for group in groups_of(program, [column.bag for column in columns.values()], mixed=True):
        for piece in pieces([columns[bag.result] for bag in group]):
            if any(map(_has_a_step, piece)) or any(needs_frozen(program, each.bag) for each in piece):
                yield _match(program, piece)


def _has_a_step(column: Column) -> bool:
    return bool(column.chain.folded or column.folded)


def _is_taken(program: Program, bag: Bag) -> bool:
    """Return whether the operator supports such a bag, and no gradient is required."""
    if bag.padding_idx >= 0 or program.may_train(bag.weight):
        return False
    if bag.form == JAGGED and bag.offsets is None:
        return False
    is_weighted = bag.weights is not None
    return not is_weighted or (bag.table.dtype is torch.float32 and not program.may_train(bag.weights))


def _match(program: Program, columns: Sequence[Column]) -> Match:
    def apply() -> str:
        results = [(column.result, column.bag.dim) for column in columns]
        suffix = join(program, results, lambda order: emit_columns(program, [columns[at] for at in order]))
        folded = sum(column.chain.folded + column.folded for column in columns)
        return f"{len(columns)} columns in one call, {folded} operators folded{suffix}"

    parts = [Part(program.name(column.bag.weight), _found(column)) for column in columns]
    return Match(parts, apply, key=columns[0].result.name)


def _found(column: Column) -> str:
    steps = f"{len(column.chain.steps)} steps"
    if column.cross is not None:
        steps = f"a cross of {len(column.cross.left.steps)} and {len(column.cross.right.steps)} steps"
    return f"column, {column.bag.operators}, {steps}"


PATTERN = GraphPattern("columns", 40, find)
