"""What may be moved in a program, and what may not: writes to memory, random numbers, states of torch.

The safety of every pattern rests on three facts. Memory that the program writes to: what reads it keeps its
place among the writes, and no pattern touches it. What draws random numbers or raises keeps its order. What
turns gradients or autocast on and off cuts the program into regions; nothing moves from one to another.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from recfuse.passes.graph.nodes import arguments_of, aten, is_call, operator_of, storage_of, tensors_of

_PURE_MODULES = {"_operator", "operator", "math", "builtins", "torch", "torch.fx.experimental.sym_node"}


class Effects:
    """The effects of the nodes of a program, as it was recorded."""

    def __init__(self, graph: Graph, user_inputs: Iterable[Node] = ()) -> None:
        """Looks at each node once; ``user_inputs`` may share memory with each other."""
        self.region: dict[Node, int] = {}
        self.written: set[int] = set()
        self.has_autocast = torch._C._is_any_autocast_enabled()
        self._ordered: list[Node] = []
        self._touching: dict[int, list[Node]] = {}
        region = 0
        for node in graph.nodes:
            called = operator_of(node)
            if called is None and not _is_pure(node):
                region += 1  # and the node itself is a region
                self.has_autocast = self.has_autocast or "autocast" in str(node.target)
            self.region[node] = region
            if called is None:
                region += not _is_pure(node)
                continue
            self.written |= _written_by(node)
            if torch.Tag.nondeterministic_seeded in called.tags or node.is_impure():
                self._ordered.append(node)
        inputs = {storage_of(tensor) for node in user_inputs for tensor in tensors_of(node)}
        if inputs & self.written:
            self.written |= inputs
        for node in graph.nodes if self.written else ():
            for storage in _storages_around(node) & self.written:
                self._touching.setdefault(storage, []).append(node)

    def is_written(self, node: Any) -> bool:
        """Whether something writes to the memory of what a node returns; a number has none."""
        if not self.written or not isinstance(node, Node):
            return False
        return any(storage_of(tensor) in self.written for tensor in tensors_of(node))

    def why_not(self, nodes: Iterable[Node]) -> str:
        """Why these nodes, what they read included, are not free to be computed elsewhere; "" if they are."""
        regions = set()
        for node in nodes:
            if self.is_written(node):
                return f"{node.name} is written to in place"
            if node.op == "call_function":
                regions.add(self.region.get(node))
        return "gradients or autocast are turned on or off between its parts" if len(regions) > 1 else ""

    def orders(self) -> Iterator[list[Node]]:
        """Lists of nodes that keep their order."""
        yield self._ordered
        yield from self._touching.values()


def draws(node: Node) -> bool:
    """Whether a call draws random numbers: dropout of no element does not."""
    called = operator_of(node)
    if called is None or torch.Tag.nondeterministic_seeded not in called.tags:
        return False
    given = arguments_of(node)
    is_off = given.get("dropout_p", 1) == 0 or given.get("train") is False or given.get("training") is False
    return not is_off


def is_fresh_constant(node: Node) -> bool:
    """Whether a call takes a constant out of autograd, as torch.tensor does: its elements stay."""
    return is_call(node, aten.detach_) and is_call(node.args[0], aten.lift_fresh_copy, aten.lift_fresh)


def _is_pure(node: Node) -> bool:
    if node.op != "call_function":
        return node.op != "call_module" and node.op != "call_method"
    if operator_of(node) is not None or node.target is operator.getitem:
        return True
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator) or not callable(target):
        return False
    module = getattr(target, "__module__", "") or ""
    return module in _PURE_MODULES and not target.__name__.startswith("_")


def _written_by(node: Node) -> set[int]:
    """Memory that a call writes to."""
    schema = node.target._schema  # type: ignore[union-attr]
    if not schema.is_mutable:
        return set()
    if is_fresh_constant(node):
        return set()
    found: set[int] = set()
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        for item in given if isinstance(given, (tuple, list)) else (given,):
            if isinstance(item, Node):
                found |= {storage_of(tensor) for tensor in tensors_of(item)}
    return found


def _storages_around(node: Node) -> set[int]:
    """Memory that a node reads, writes to or returns."""
    return {storage_of(tensor) for item in (node, *node.all_input_nodes) for tensor in tensors_of(item)}
