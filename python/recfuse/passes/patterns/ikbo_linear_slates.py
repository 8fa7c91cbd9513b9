"""A linear layer over users' features and the features of a slate of candidates per user.

Before::

    copied = x_user.unsqueeze(1).expand(-1, S, -1)                   # or expand_as, repeat(1, S, 1)
    y      = linear(cat([copied, x_cand], -1), weight, bias)         # [B, S, Ku], [B, S, Kc]

After::

    y      = recfuse::ikbo_linear(weight[:, :Ku], weight[:, Ku:], x_user, x_cand [B * S, Kc], users, bias)

Source: IKBO (in-kernel broadcast optimization), section 2, and its inference-time transformation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from recfuse.passes.graph.broadcasts import AUTOCAST, WORTH
from recfuse.passes.graph.nodes import arguments_of, aten, hint, is_call, same, value_of
from recfuse.passes.graph.pattern import GraphPattern, Match, Part
from recfuse.passes.graph.program import Program
from recfuse.passes.patterns.ikbo_linear import DTYPES, emit_linear


def find(program: Program) -> Iterator[Match]:
    """Yield layers over a cat of slates that contains a copy of users' features."""
    for node in program.nodes:
        if not is_call(node, aten.linear) or not node.users:
            continue
        arguments = arguments_of(node)
        joined, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
        if not is_call(joined, aten.cat) or value_of(joined).dim() != 3 or value_of(weight).dim() != 2:
            continue
        items = list(arguments_of(joined)["tensors"])
        rows = [_copied(item) for item in items]
        if arguments_of(joined)["dim"] not in (-1, 2) or None not in rows or not any(rows):
            continue
        part = [Part(program.name(weight), "linear over slates")]
        if reason := _why_not(program, node, items, rows, weight, bias):
            yield Match(part, why_not=reason)
            continue

        def apply(
            node: Node = node,
            items: list[Node] = items,
            rows: list[Node | None] = rows,
            weight: Node = weight,
            bias: Any = bias,
        ) -> str:
            return _swap(program, node, items, rows, weight, bias)

        yield Match(part, apply, key=node.name)


def _copied(node: Node) -> Node | None:
    """Return ``[B, 1, K]`` if a node ``[B, S, K]`` repeats each of its rows S times, else None."""
    is_repeat = is_call(node, aten.repeat) and [*node.args[1]][::2] == [1, 1]  # type: ignore[misc]
    if not is_repeat and not is_call(node, aten.expand, aten.expand_as):
        return None
    narrow = node.args[0]
    before, after = value_of(narrow).shape, value_of(node).shape
    if len(before) != 3 or len(after) != 3 or not same(before[1], 1) or same(after[1], 1):
        return None
    return narrow if same(before[0], after[0]) and same(before[2], after[2]) else None  # type: ignore[return-value]


def _why_not(
    program: Program, node: Node, items: list[Node], rows: list[Node | None], weight: Node, bias: Any
) -> str:
    read = [*items, weight, *([bias] if isinstance(bias, Node) else [])]
    dtypes = sorted({str(value_of(item).dtype) for item in read})
    if len(dtypes) > 1 or value_of(weight).dtype not in DTYPES:
        return f"inputs, weight and bias are {', '.join(dtypes)}; expected a single floating-point dtype"
    candidates = hint(value_of(node).shape[1])
    if candidates is not None and candidates < WORTH:
        return f"the example has {candidates} candidates a user; expected {WORTH} or more"
    if any(not isinstance(value_of(item).shape[2], int) for item in items):
        return "the number of features is dynamic; expected a fixed number"
    if program.effects.has_autocast:
        return AUTOCAST
    if any(program.effects.is_written(item) for item in (*read, *filter(None, rows))):
        return "an input is written to in place"
    copies = [item for item, row in zip(items, rows, strict=True) if row is not None]
    return program.effects.why_not((node, node.all_input_nodes[0], *copies))


def _swap(
    program: Program, node: Node, items: list[Node], rows: list[Node | None], weight: Node, bias: Any
) -> str:
    of_users = [row is not None for row in rows]
    slates = [item for item, is_user in zip(items, of_users, strict=True) if not is_user]
    with program.at(node):
        batch, slate = program.size(slates[0], 0), program.size(slates[0], 1)
        options = {"dtype": torch.int64, "device": value_of(node).device, "pin_memory": False}
        numbers = program.emit(aten.arange.default, batch, **options)
        wide = program.emit(
            aten.expand.default, program.emit(aten.unsqueeze.default, numbers, 1), [batch, slate]
        )
        index = program.emit(aten.reshape.default, wide, [-1])
        users = [program.emit(aten.select.int, row, 1, 0) for row in rows if row is not None]
        candidates = [program.emit(aten.flatten.using_ints, item, 0, 1) for item in slates]
        out = emit_linear(program, items, of_users, users, weight, bias, index, candidates)
        out = program.emit(aten.reshape.default, out, [batch, slate, value_of(node).shape[2]])
    program.replace(node, out)
    return f"recfuse::ikbo_linear, {sum(of_users)} of {len(items)} inputs for users alone"


PATTERN = GraphPattern("ikbo_linear", 65, find)
