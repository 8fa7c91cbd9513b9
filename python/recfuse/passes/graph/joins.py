"""``join``: results become columns (the last dim) of one tensor, which their users and their cats read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from recfuse.passes.graph.nodes import arguments_of, aten, is_call, value_of
from recfuse.passes.graph.program import Program


def join(program: Program, results: Sequence[tuple[Node, int]], call: Callable[[Sequence[int]], Node]) -> str:
    """Replace results ``[..., dim]`` by columns of one call; returns a text for the report.

    Args:
        program: the program, which is rewritten.
        results: nodes with their numbers of columns.
        call: emits the call for the results with these numbers, in this order.
    """
    number = {node: at for at, (node, _) in enumerate(results)}
    joins = _joins(program, number)
    order: dict[int, None] = {}
    for node in joins:
        for item in node.args[0]:  # type: ignore[union-attr]
            if item in number:
                order.setdefault(number[item])
    order |= dict.fromkeys(range(len(results)))
    with program.at(results[min(order)][0]):
        joined = call(list(order))
        columns, end = {}, 0
        for at in order:
            node, dim = results[at]
            columns[node] = (end, end + dim)
            end += dim
        is_free = True  # no node is the whole result yet: distinct results must not share memory
        for node in joins:
            is_free = not _rejoin(program, node, joined, columns, end, is_free) and is_free
        for node, _ in results:
            if any(user not in joins for user in node.users):
                piece = _piece(program, joined, columns[node], end)
                if piece is not joined or not is_free:
                    piece = program.emit(aten.clone.default, piece, memory_format=torch.contiguous_format)
                is_free = False
                program.replace(node, piece)
            else:
                program.forget(node)
    return ", which is the cat" if any(not node.users for node in joins) else ""


def _joins(program: Program, number: dict[Node, int]) -> list[Node]:
    """Return the nodes that join results: cats of columns, and stacks."""
    joins: dict[Node, None] = {}
    for result in number:
        for user in result.users:
            if not is_join(user) or program.effects.is_written(user):
                continue
            if is_call(user, aten.cat) or all(item in number for item in user.args[0]):  # type: ignore[union-attr]
                joins.setdefault(user)
    return list(joins)


def is_join(node: Node) -> bool:
    """Return whether a node joins results ``[..., dim]``: a cat of columns, or a stack of ``[B, dim]``."""
    if not is_call(node, aten.cat, aten.stack):
        return False
    rank = value_of(node.args[0][0]).dim()  # type: ignore[index]
    dim = arguments_of(node)["dim"]
    if is_call(node, aten.stack):
        return rank == 2 and dim in (1, -2)
    return rank >= 2 and dim in (rank - 1, -1)


def _piece(program: Program, result: Node, columns: tuple[int, int], end: int) -> Node:
    """Return columns of the call's result, or the result itself if these are all columns."""
    return result if columns == (0, end) else program.emit(aten.slice.Tensor, result, _last(result), *columns)


def _last(node: Node) -> int:
    return int(value_of(node).dim()) - 1


def _rejoin(
    program: Program,
    node: Node,
    result: Node,
    columns: dict[Node, tuple[int, int]],
    end: int,
    is_free: bool,
) -> bool:
    """Rewrite a cat or a stack to read the call's result; returns whether it is that result itself."""
    runs = _runs(node.args[0], columns)  # type: ignore[arg-type]
    items = [_piece(program, result, run, end) if isinstance(run, tuple) else run for run in runs]
    is_whole = items == [result] and is_free
    if is_call(node, aten.stack):
        joined = result if is_whole else program.emit(aten.cat.default, items, 1)  # which copies
        shape = [-1, *value_of(node).shape[1:]]
        program.replace(node, program.emit(aten.reshape.default, joined, shape))
    elif is_whole:
        program.replace(node, result)
    else:
        program.set_args(node, (items, _last(node)))
    return is_whole


def _runs(items: Sequence[Node], columns: dict[Node, tuple[int, int]]) -> list[Any]:
    """Return the items of a cat, with adjacent columns of the call's result merged into ranges."""
    runs: list[Any] = []
    for item in items:
        if item not in columns:
            runs.append(item)
        elif runs and isinstance(runs[-1], tuple) and runs[-1][1] == columns[item][0]:
            runs[-1] = (runs[-1][0], columns[item][1])
        else:
            runs.append(columns[item])
    return runs
