"""Lookups whose rows are only padded.

Before, for each of many features::

    rows_k = embedding(weight_k, indices_k [n_k])                     # and .to(float32), as TorchRec's
    rows_k = split_with_sizes(embedding(weight, values), sizes)[k]    # of one table
    out_k  = jagged_to_padded_dense(rows_k, [offsets_k], [length])    # JaggedTensor.to_padded_dense
    out    = cat([out_1, ..., out_n], -1)

After, for all features with as many histories of the same length that do not depend on each other::

    indices = cat([indices_1, ...]);  offsets = cat([offsets_1, offsets_2 + len(indices_1), ...])
    out     = recfuse::fused_embedding([weight_1, ...], features, indices, offsets, layout="padded")

All keys of a KeyedJaggedTensor are read where they lie. A product with the mask of the same lengths, or a
``where`` or ``masked_fill`` to 0, changes nothing and is removed.

Source: Pan et al., RecFlex, SC 2024 (one kernel for heterogeneous features).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from recfuse._codes import DTYPES
from recfuse.passes.graph.bags import LAST, Bag
from recfuse.passes.graph.joins import join
from recfuse.passes.graph.nodes import arguments_of, aten, is_call, tensor_of, value_of
from recfuse.passes.graph.pattern import GraphPattern, Match, Part
from recfuse.passes.graph.program import Program
from recfuse.passes.graph.sequences.histories import emit_padded, is_pad, pad_arguments
from recfuse.passes.graph.sequences.masks import masked_history
from recfuse.passes.patterns.bags import symbol, why_no_kernel

MOST_FEATURES = 448
"""The features of a call on a GPU."""
_CASTS = aten.to, aten._to_copy
_METADATA = aten._assert_tensor_metadata


def find(program: Program) -> Iterator[Match]:
    """Yield groups of padded lookups, those that are left, and masks that change nothing."""
    groups: dict[tuple[object, ...], list[Bag]] = {}
    histories = []
    for node in program.nodes:
        if not is_pad(node) or not node.users or (history := _history_at(node)) is None:
            continue
        if reason := _why_not(program, node, history):
            yield Match([part_of(program, history)], why_not=reason)
        else:
            histories.append(history)
    for history in histories:
        yield from _masks(program, history)
    depths = program.depths({history.result for history in histories}.__contains__)
    for history in histories:
        result = value_of(history.result)
        key = (
            depths[history.result], program.effects.region[history.result], result.device, result.dtype,
            history.sparse, symbol(result.shape[0]), symbol(result.shape[1]),
        )  # fmt: skip
        groups.setdefault(key, []).append(history)
    for group in groups.values():
        for part in chunks(group):
            yield _match(program, part)


def _match(program: Program, group: Sequence[Bag]) -> Match:
    def apply() -> str:
        _, _, (length,), _ = pad_arguments(group[0].result)
        inside = [node for history in group for node in reversed(history.inside)]
        splits: dict[Node, Node] = {}

        def call(order: Sequence[int]) -> Node:
            histories = [_with_own_indices(program, group[number], splits) for number in order]
            return emit_padded(program, histories, length)

        suffix = join(program, [(history.result, history.dim) for history in group], call)
        forget_lookups(program, inside)
        return f"{count_text(group)} in one call{suffix}"

    return Match([part_of(program, history) for history in group], apply, key=group[0].result.name)


def chunks(group: Sequence[Bag]) -> Iterator[Sequence[Bag]]:
    """Yield the lookups of each call: on a GPU at most ``MOST_FEATURES``."""
    most = MOST_FEATURES if group and group[0].table.is_cuda else max(len(group), 1)
    for first in range(0, len(group), most):
        yield group[first : first + most]


def count_text(group: Sequence[Bag]) -> str:
    """Return the numbers of lookups and of their tables, for the report."""
    tables = len({history.weight for history in group})
    return f"{len(group)} histories of {tables} table{'s' * (tables > 1)}"


def forget_lookups(program: Program, inside: Sequence[Node]) -> None:
    """Remove lookups that a call replaces, with torch's assertions about their dtypes."""
    for node in inside:
        for user in list(node.users):
            if is_call(user, _METADATA):
                program.forget(user)
        program.forget(node)


def part_of(program: Program, history: Bag) -> Part:
    """Return the entry of lookups in the report."""
    return Part(program.name(history.weight), history.operators)


def _masks(program: Program, history: Bag) -> Iterator[Match]:
    for user in list(history.result.users):
        if not masked_history(program, user, history):
            continue

        def apply(user: Node = user) -> str:
            program.replace(user, history.result)
            return "the positions of the mask are those of the padding, which is 0"

        part = [Part(user.name, "mask of a padded history")]
        yield Match(part, apply, program.effects.why_not((user, history.result)), key=user.name)


def _history_at(node: Node) -> Bag | None:
    """Return the padded lookups whose result is ``node``, or None if its rows are no lookups.

    Rows of a split have the indices of the whole lookup, until the match is applied.
    """
    rows, offsets, lengths, _ = pad_arguments(node)
    inside: list[Any] = [rows]
    if is_call(inside[0], *_CASTS):
        inside.insert(0, inside[0].args[0])
    if _split_of(inside[0]) is not None:
        inside[:0] = [inside[0].args[0].args[0], inside[0].args[0]]
        if is_call(inside[0], *_CASTS):
            inside.insert(0, inside[0].args[0])
    if not is_call(inside[0], aten.embedding) or len(offsets) != 1 or len(lengths) != 1:
        return None
    arguments = arguments_of(inside[0])
    if value_of(arguments["indices"]).dim() != 1:
        return None
    operators = "embedding + padding" if len(inside) < 3 else "embedding + split + padding"
    return Bag(
        node, arguments["weight"], arguments["indices"], "sum", operators, tuple(inside), LAST,
        offsets=offsets[0], counted=offsets[0], padding_idx=arguments["padding_idx"],
        sparse=bool(arguments["sparse"]),
    )  # fmt: skip


def _split_of(node: Any) -> tuple[Node, int] | None:
    """Return the split of rows ``[lookups, dim]`` that a node is a part of, and the number of the part."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return None
    split, number = node.args
    if not is_call(split, aten.split_with_sizes) or arguments_of(split)["dim"] != 0:  # type: ignore[arg-type]
        return None
    return split, number  # type: ignore[return-value]


def _with_own_indices(program: Program, history: Bag, splits: dict[Node, Node]) -> Bag:
    """Return a history with the indices of its part of a split; ``splits`` are those that were emitted."""
    for node in history.inside:
        if (part := _split_of(node)) is not None:
            split, number = part
            if split not in splits:
                sizes = arguments_of(split)["split_sizes"]
                splits[split] = program.emit(aten.split_with_sizes.default, history.indices, sizes)
            return replace(history, indices=program.emit(operator.getitem, splits[split], number))
    return history


def _why_not(program: Program, node: Node, history: Bag) -> str:
    *_, value = pad_arguments(node)
    result = tensor_of(node)
    if result is None or result.dtype not in DTYPES or result.dim() != 3:
        kind = "no tensor" if result is None else f"{result.dtype} of {result.dim()} dims"
        return f"the padded rows are {kind}; expected 3 dims of float32, float16 or bfloat16"
    if value != 0:
        return f"padding_value is {value!r}; expected 0"
    casts = [inside for inside in history.inside if is_call(inside, *_CASTS)]
    if len(casts) > 1 or result.device != history.table.device:
        return "the rows are converted twice or to another device, which one call does not"
    for inside in history.inside:
        for user in inside.users:
            if not (is_pad(user) or user in history.inside or is_call(user, _METADATA) or _is_padded(user)):
                return f"the rows have another use, {user.name}, before the padding"
    return why_no_kernel(program, history)


def _is_padded(node: Node) -> bool:
    """Return whether a part of a split, or its cast, is only padded."""
    if _split_of(node) is None and not is_call(node, *_CASTS):
        return False
    return all(is_pad(user) or is_call(user, _METADATA) or _is_padded(user) for user in node.users)


PATTERN = GraphPattern("sequences", 35, find)
