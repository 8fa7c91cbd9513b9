"""Row-wise functions of users' rows that were copied to candidates.

Before::

    y = f(x_user[cand_to_user])            # f: elementwise, linear, layer_norm, views, ... of each row

After::

    y = f(x_user)[cand_to_user]

This holds if the result of ``f`` is not larger than its argument. The readers of ``y``, such as a dot
interaction or an elementwise operator with candidates' features, get the copied operand as late as possible.

Source: IKBO (in-kernel broadcast optimization), the inference-time transformation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.fx import Node

from recfuse.passes.graph.broadcasts import AUTOCAST, Broadcasts, Lift
from recfuse.passes.graph.nodes import aten, hint, is_call, value_of
from recfuse.passes.graph.pattern import GraphPattern, Match, Part
from recfuse.passes.graph.program import Program


def find(program: Program) -> Iterator[Match]:
    """Yield the last nodes of functions of a single broadcast."""
    broadcasts = Broadcasts(program)
    for node in program.nodes:
        lift = broadcasts.lift(node)
        if lift is None or not lift.computes or lift.block != 1 or not node.users:
            continue
        if all(broadcasts.lift(user) is not None for user in node.users):
            continue
        part = [Part(node.name, "computed from a broadcast")]
        if reason := _why_not(program, node, lift, _source(broadcasts, node)):
            yield Match(part, why_not=reason)
            continue

        def apply(node: Node = node, lift: Lift = lift) -> str:
            with program.at(node):
                rows, index = broadcasts.of_users(node), broadcasts.map_of(lift)
                copied = program.emit(aten.index_select.default, rows, lift.dim, index)
            program.replace(node, copied)
            return f"computed for users, then copied to candidates ({index.name})"

        yield Match(part, apply, key=node.name)


def _source(broadcasts: Broadcasts, node: Node) -> Node:
    """Return the largest broadcast from which a node is computed."""
    lift = broadcasts.lift(node)
    if lift is not None and lift.source is not None:
        return node
    sources = [_source(broadcasts, item) for item in node.all_input_nodes if broadcasts.lift(item)]
    return max(sources, key=_elements)


def _elements(node: Node) -> int:
    return math.prod(hint(size) or 1 for size in value_of(node).shape)


def _why_not(program: Program, node: Node, lift: Lift, source: Node) -> str:
    if lift.map.why_not:
        return lift.map.why_not
    has_matmul = any(
        is_call(item, aten.linear, aten.matmul, aten.mm) for item in (node, *node.all_input_nodes)
    )
    if _elements(node) > _elements(source) and not has_matmul:
        return "the result has more values than the copied input, so that a later copy is larger"
    if value_of(node).dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        return f"the result is {value_of(node).dtype}; expected float16, bfloat16, float32 or float64"
    if program.effects.has_autocast:
        return AUTOCAST
    if program.effects.is_written(node):
        return "the result is written to in place"
    return "" if value_of(node).is_contiguous() else "the result is not contiguous"


PATTERN = GraphPattern("late_gather", 80, find)
