"""Regrouped columns of collections: TorchRec's ``KeyedTensor.regroup`` and ``regroup_as_dict``.

Before::

    a      = cat([bag_1, bag_2], 1);  b = cat([bag_3, bag_4], 1)                  # values of KeyedTensors
    groups = split(fbgemm::permute_pooled_embs_auto_grad(cat([a, b], 1), dims, [0, 2, 1, 3], ...), sizes, 1)
    groups = split(cat([split(a, dims, 1)[0], split(b, dims, 1)[0], ...], 1), sizes, 1)   # keys used twice

After::

    groups = split(cat([bag_1, bag_3, bag_2, bag_4], 1), sizes, 1)

The new cat joins the bags themselves. If one call pools them (``patterns/bags.py``), the call writes this
layout directly: no value is copied or permuted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch.fx import Node

from recfuse.passes.graph.nodes import arguments_of, aten, is_call, operator_of, tensor_of
from recfuse.passes.graph.pattern import GraphPattern, Match, Part
from recfuse.passes.graph.program import Program

_PERMUTED = ("fbgemm::permute_pooled_embs_auto_grad", "fbgemm::permute_pooled_embs")
_CATS = (aten.cat, aten.concat)


def find(program: Program) -> Iterator[Match]:
    """Yield cats of columns of other cats, and permuted cats."""
    for node in program.nodes:
        if not node.users or not (is_call(node, *_CATS) or _is_permuted(node)):
            continue
        parts, between = _parts(program, node)
        if parts is None or len(parts) < 2 or not between:  # already a cat of these parts
            continue
        if not any(_is_pooled(part) for part in parts):
            continue
        report = [Part(node.name, f"regrouped, {len(parts)} parts")]
        if reason := _why_not(program, node, parts, between):
            yield Match(report, why_not=reason)
            continue

        def apply(node: Node = node, parts: list[Node] = parts, between: list[Node] = between) -> str:
            with program.at(node):
                program.replace(node, program.emit(aten.cat.default, parts, 1))
            for item in (*parts, *between):
                for user in item.users:
                    if is_call(user, aten._assert_tensor_metadata):  # the type is known from the graph
                        program.forget(user)
            return f"a cat of {len(parts)} parts as they come"

        yield Match(report, apply, key=node.name)


def _is_permuted(node: Node) -> bool:
    called = operator_of(node)
    return called is not None and called._schema.name in _PERMUTED


def _is_pooled(node: Node) -> bool:
    source = node.args[0] if node.args else None
    pools = (aten.embedding_bag, aten._embedding_bag, aten._embedding_bag_forward_only)
    return is_call(node, aten.embedding, aten.sum, aten.mean) or is_call(source, *pools)


def _why_not(program: Program, node: Node, parts: Sequence[Node], between: Sequence[Node]) -> str:
    types = {tensor_of(item).dtype for item in (*parts, node)}  # type: ignore[union-attr]
    if len(types) > 1:
        return f"parts are {', '.join(sorted(map(str, types)))}; expected a single dtype"
    for other in between:
        arguments = _flat(program, other, []) or []
        if is_call(other, *_CATS) and any(
            item not in parts and program.may_train(item) for item in arguments
        ):
            return "a key that no group contains has a gradient of zeros, and would have no gradient"
    return program.effects.why_not((node, *parts, *between))


def _parts(program: Program, node: Node) -> tuple[list[Node] | None, list[Node]]:
    """Return the tensors ``[B, width]`` that a node concatenates, and the nodes between them and it."""
    between: list[Node] = []
    return _flat(program, node, between, is_outer=True), between


def _flat(program: Program, node: Node, between: list[Node], is_outer: bool = False) -> list[Node] | None:
    """Return the parts of a node, the node itself if it has no parts, or None if they are unknown."""
    if _width(node) is None:
        return None
    parts: list[Node] | None = [node]
    if is_call(node, *_CATS) and arguments_of(node)["dim"] in (1, -1):
        items = [_flat(program, item, between) for item in node.args[0]]  # type: ignore[union-attr]
        parts = None if None in items else list(itertools.chain(*items))  # type: ignore[arg-type]
    elif _is_permuted(node):
        parts = _permuted(program, node, between)
        between.append(node)
        return parts
    elif _is_same(node):
        parts = _flat(program, node.args[0], between)  # type: ignore[arg-type]
    elif getattr(node.target, "__name__", "") == "getitem" and is_call(node.args[0], aten.split_with_sizes):
        parts = _piece(program, node, between)
    if parts is not None and parts != [node] and not is_outer:
        between.append(node)
    return parts


def _width(node: Node) -> int | None:
    tensor = tensor_of(node)
    is_fixed = tensor is not None and tensor.dim() == 2 and isinstance(tensor.shape[1], int)
    return int(tensor.shape[1]) if is_fixed else None  # type: ignore[union-attr]


def _is_same(node: Node) -> bool:
    """Return whether a conversion changes nothing: its argument already has this type."""
    before, after = tensor_of(node.args[0]) if node.args else None, tensor_of(node)
    if not is_call(node, aten.to) or before is None or after is None:
        return False
    arguments = arguments_of(node)
    same_type = (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout)
    return same_type and not arguments.get("copy") and arguments.get("memory_format") is None


def _permuted(program: Program, node: Node, between: list[Node]) -> list[Node] | None:
    """Return the permuted parts of the first argument if each key is exactly one part, else None."""
    values, ends, order = node.args[:3]
    parts = _flat(program, values, between)  # type: ignore[arg-type]
    ends, order = (program.constant_value(item) for item in (ends, order))  # type: ignore[arg-type]
    if parts is None or ends is None or order is None:
        return None
    own_ends = [0, *itertools.accumulate(_width(part) or 0 for part in parts)]
    numbers = order.tolist()
    if ends.tolist() != own_ends or not all(0 <= number < len(parts) for number in numbers):
        return None
    return [parts[number] for number in numbers]


def _piece(program: Program, node: Node, between: list[Node]) -> list[Node] | None:
    """Return the parts of an item of a split, or the item itself if it cuts a part."""
    arguments = arguments_of(node.args[0])  # type: ignore[arg-type]
    sizes, number = arguments["split_sizes"], node.args[1]
    if arguments["dim"] not in (1, -1) or not all(isinstance(size, int) for size in sizes):
        return [node]
    inner_between: list[Node] = []
    parts = _flat(program, arguments["self"], inner_between)
    if parts is None or not isinstance(number, int):
        return [node]
    start = sum(sizes[:number])
    end = start + sizes[number]
    ends = [0, *itertools.accumulate(_width(part) or 0 for part in parts)]
    if start not in ends or end not in ends or start == end:
        return [node]
    between += inner_between
    return parts[ends.index(start) : ends.index(end)]


PATTERN = GraphPattern("regroup", 20, find)
