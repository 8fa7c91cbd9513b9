"""Effects that restrict how nodes of a program may move: writes to memory, random numbers, states of torch.

The safety of every pattern rests on three rules. First, nodes that read written memory keep their order among
the writes, and no pattern matches them. Second, nodes that draw random numbers or raise keep their order.
Third, nodes that turn gradients or autocast on or off cut the program into regions, and no node moves from
one region to another. This file also computes whether autograd may bring a gradient to a node.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from recfuse.passes.graph.aliases import Aliases
from recfuse.passes.graph.nodes import (
    arguments_of,
    aten,
    graphs_of,
    is_call,
    nested_graph_of,
    operator_of,
    tensors_of,
    written_arguments,
)

_PURE_MODULES = {"_operator", "operator", "math", "builtins", "torch", "torch.fx.experimental.sym_node"}
_NO_GRADIENT = (
    aten.detach, aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.rand_like,
    aten.randn_like, aten.randint_like, aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full,
)  # fmt: skip
"""Operators that return floating-point tensors but pass no gradient to their arguments."""


class Effects:
    """The effects of the nodes of a program, as it was recorded."""

    def __init__(
        self, graph: Graph, user_inputs: Iterable[Node] = (), same_memory: Iterable[Iterable[Node]] = ()
    ) -> None:
        """Read each node once.

        ``user_inputs`` may share memory with each other; the inputs of each group in ``same_memory`` do.
        """
        self.region: dict[Node, int] = {}
        self._graph, self._same_memory = graph, same_memory
        self.written: set[int] = set()
        self.has_autocast = torch._C._is_any_autocast_enabled()
        self._ordered: list[Node] = []
        self._touching: dict[int, list[Node]] = {}
        region = 0
        for node in graph.nodes:
            called = operator_of(node)
            if called is None and not _is_pure(node):
                region += 1  # the node itself is a region
                self.has_autocast = self.has_autocast or "autocast" in str(node.target)
            self.region[node] = region
            if called is None:
                region += not _is_pure(node)
                if isinstance(node.target, torch._ops.HigherOrderOperator):
                    self.written |= self._written_inside(node)
                continue
            self.written |= self._written_by(node)
            if torch.Tag.nondeterministic_seeded in called.tags or node.is_impure():
                self._ordered.append(node)
        if self.written:
            inputs = {memory for node in user_inputs for memory in self.memory_of(node)}
            self.written |= inputs if inputs & self.written else set()
        for node in graph.nodes if self.written else ():
            for memory in self._memory_around(node) & self.written:
                self._touching.setdefault(memory, []).append(node)

    @functools.cached_property
    def _aliases(self) -> Aliases:
        return Aliases(self._graph, self._same_memory)

    def memory_of(self, node: Node) -> set[int]:
        """Return the memory of a node's tensors; a view has the memory of its base."""
        return {self._aliases.memory_of(tensor) for tensor in tensors_of(node)}

    def _memory_around(self, node: Node) -> set[int]:
        """Return the memory that a node reads, writes to or returns."""
        return {memory for item in (node, *node.all_input_nodes) for memory in self.memory_of(item)}

    def _written_by(self, node: Node) -> set[int]:
        """Return the memory that a call writes to."""
        if is_fresh_constant(node):
            return set()
        written: set[int] = set()
        for argument in written_arguments(node.target, node.args, node.kwargs):  # type: ignore[arg-type]
            for item in argument if isinstance(argument, (tuple, list)) else (argument,):
                written |= self.memory_of(item) if isinstance(item, Node) else set()
        return written

    def _written_inside(self, node: Node) -> set[int]:
        """Return the memory that the graphs of a higher-order operator write to."""
        nested = nested_graph_of(node)
        if nested is None:  # the graph that runs and its arguments are unknown
            if graphs_of(node) and not any(Effects(graph).written for graph in graphs_of(node)):
                return set()
            return {memory for item in node.all_input_nodes for memory in self.memory_of(item)}
        graph, operands = nested
        inside, written = Effects(graph), set[int]()
        placeholders = [item for item in graph.nodes if item.op == "placeholder"]
        for placeholder, operand in zip(placeholders, operands, strict=True):
            if inside.is_written(placeholder):
                written |= self.memory_of(operand) if isinstance(operand, Node) else set()
        return written

    def is_written(self, node: Any) -> bool:
        """Return whether the program writes to the memory of a node's result; a number has no memory."""
        if not self.written or not isinstance(node, Node):
            return False
        return not self.written.isdisjoint(self.memory_of(node))

    def writers_of(self, node: Node) -> list[Node]:
        """Return the nodes that write to the memory of a node's result."""
        memory = self.memory_of(node)
        if self.written.isdisjoint(memory):
            return []
        writers = []
        for other in self._graph.nodes:
            if isinstance(other.target, torch._ops.HigherOrderOperator):
                written = self._written_inside(other)
            else:
                written = self._written_by(other) if operator_of(other) is not None else set()
            if not written.isdisjoint(memory):
                writers.append(other)
        return writers

    def why_not(self, nodes: Iterable[Node]) -> str:
        """Return why these nodes, which include their inputs, cannot be computed elsewhere, or ""."""
        regions = set()
        for node in nodes:
            if self.is_written(node):
                return f"{node.name} is written to in place"
            if node.op == "call_function":
                regions.add(self.region.get(node))
        return "gradients or autocast are switched between the parts" if len(regions) > 1 else ""

    def orders(self) -> Iterator[list[Node]]:
        """Yield lists of nodes that must keep their order."""
        yield self._ordered
        yield from self._touching.values()


def draws(node: Node) -> bool:
    """Return whether a call draws random numbers; dropout that is off does not."""
    called = operator_of(node)
    if called is None or torch.Tag.nondeterministic_seeded not in called.tags:
        return False
    arguments = arguments_of(node)
    is_off = (
        arguments.get("dropout_p", 1) == 0
        or arguments.get("train") is False
        or arguments.get("training") is False
    )
    return not is_off


def is_fresh_constant(node: Node) -> bool:
    """Return whether a call only detaches a new constant, as torch.tensor does; it changes no element."""
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


def regions_without_gradients(graph: Graph, region: dict[Node, int], enabled: bool) -> set[int]:
    """Return the regions (see `Effects`) without gradients; ``enabled`` is the state at the beginning."""
    regions = set()
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        if not enabled:
            regions.add(region[node])
    return regions


def receives_gradient(node: Node, region: dict[Node, int], without: Iterable[int]) -> bool:
    """Return whether a node's result may receive a gradient.

    Returns False if every use of it ends in a detach, in integers, or in a region without gradients. Returns
    True if that is unknown.
    """
    seen, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if _keeps(user):
                return True
            if region.get(user) not in without and _passes(user):
                pending.append(user)
    return False


def _keeps(user: Node) -> bool:
    """Return whether a use may bring a gradient on an unknown path.

    Such uses are the output of the program, writes to memory, and higher-order operators.
    """
    if user.op == "output" or isinstance(user.target, torch._ops.HigherOrderOperator):
        return True
    called: Any = operator_of(user)
    return called is not None and called._schema.is_mutable and not is_fresh_constant(user)


def _passes(user: Node) -> bool:
    if is_call(user, *_NO_GRADIENT):
        return False
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors_of(user))
