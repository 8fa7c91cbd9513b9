"""Lookups of indices of one shape whose rows are not pooled.

Before, for each of many tables::

    rows_k = embedding(weight_k, indices_k [batch, length])     # any shape of 2 dims or more
    out    = cat([rows_1, ..., rows_n], -1)                     # or the rows are used apart

After, for all lookups of that shape that do not depend on each other::

    indices = cat([indices_1, ...])
    out     = recfuse::fused_embedding([weight_1, ...], features, indices, offsets, layout="joined")

Rows that no cat reads come from a call with layout "jagged", as views of its result, if no table trains:
the gradient of such a call is computed for each weight from all lookups. This pattern runs after ``bags``,
which pools rows that are only summed.

Source: Pan et al., RecFlex, SC 2024 (one kernel for heterogeneous features).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.fx import Node

from recfuse.passes.graph.bags import FIXED, Bag
from recfuse.passes.graph.joins import is_join, join
from recfuse.passes.graph.nodes import arguments_of, aten, is_call, value_of
from recfuse.passes.graph.pattern import GraphPattern, Match
from recfuse.passes.graph.program import Program
from recfuse.passes.graph.sequences.histories import emit_apart, emit_joined
from recfuse.passes.patterns.bags import symbol, why_no_kernel
from recfuse.passes.patterns.sequences import chunks, count_text, forget_lookups, part_of

_OPERATORS = "embedding of histories"
_ALONE = "no other lookup has indices of this shape"
_TRAINS = "the rows are used apart and a table trains, so one call would gain nothing"
_RETURNED = "the rows are used apart and the program returns them or a view of them"


def find(program: Program) -> Iterator[Match]:
    """Yield groups of lookups, and those that are left."""
    histories = []
    for node in program.nodes:
        if (history := _history_at(node)) is None:
            continue
        if reason := why_no_kernel(program, history):
            yield Match([part_of(program, history)], why_not=reason)
        else:
            histories.append(history)
    depths = program.depths({history.result for history in histories}.__contains__)
    groups: dict[tuple[object, ...], list[Bag]] = {}
    for history in histories:
        result = value_of(history.result)
        key = (
            depths[history.result], program.effects.region[history.result], result.device, result.dtype,
            history.sparse, tuple(map(symbol, result.shape[:-1])),
        )  # fmt: skip
        groups.setdefault(key, []).append(history)
    for group in groups.values():
        side_by_side = [history for history in group if any(map(is_join, history.result.users))]
        if len(side_by_side) == 1:
            side_by_side = []
        for part in chunks(side_by_side):
            yield _joined(program, part)
        yield from _apart(program, [history for history in group if history not in side_by_side])


def _joined(program: Program, group: Sequence[Bag]) -> Match:
    def apply() -> str:
        suffix = join(
            program,
            [(history.result, history.dim) for history in group],
            lambda order: emit_joined(program, [group[number] for number in order]),
        )
        return f"{count_text(group)} in one call{suffix}"

    return Match([part_of(program, history) for history in group], apply, key=group[0].result.name)


def _apart(program: Program, group: Sequence[Bag]) -> Iterator[Match]:
    """Yield matches of lookups whose rows are used apart, with the tables of one dim in a call."""
    returned: set[int] = set()
    for node in program.graph.nodes:
        if node.op == "output":
            for item in node.all_input_nodes:
                returned |= program.effects.memory_of(item)
    by_dim: dict[int, list[Bag]] = {}
    for history in group:
        reason = ""
        if program.may_train_later(history.weight):
            reason = _TRAINS
        elif not returned.isdisjoint(program.effects.memory_of(history.result)):
            reason = _RETURNED
        if reason and len(group) > 1:
            yield Match([part_of(program, history)], why_not=reason)
        elif not reason:
            by_dim.setdefault(history.dim, []).append(history)
    for same_dim in by_dim.values():
        for part in chunks(same_dim):
            yield _separate(program, part)


def _separate(program: Program, group: Sequence[Bag]) -> Match:
    parts = [part_of(program, history) for history in group]
    if len(group) == 1:
        return Match(parts, why_not=_ALONE)

    def apply() -> str:
        with program.at(group[0].result):
            results = emit_apart(program, group)
        for history, result in zip(group, results, strict=True):
            program.replace(history.result, result)
        forget_lookups(program, [history.result for history in group])
        return f"{count_text(group)} in one call"

    return Match(parts, apply, key=group[0].result.name)


def _history_at(node: Node) -> Bag | None:
    """Return the lookups whose rows are ``node``, or None; a single lookup for each sample is a bag."""
    if not is_call(node, aten.embedding) or not node.users:
        return None
    arguments = arguments_of(node)
    if value_of(arguments["indices"]).dim() < 2:
        return None
    return Bag(
        node, arguments["weight"], arguments["indices"], "sum", _OPERATORS, (), FIXED,
        counted=arguments["indices"], padding_idx=arguments["padding_idx"], sparse=bool(arguments["sparse"]),
    )  # fmt: skip


PATTERN = GraphPattern("sequences", 55, find)
