"""``Aliases``: the nodes of a program that share memory, also if their fake values do not show it.

Values that were recorded together share storages as the tensors would. The values of a program that was
loaded from a file do not, because each was saved separately. There, the schemas of the operators show shared
memory. If a schema is silent (torch composes ``reshape``, ``to`` and dropout of other operators), the
operator runs on the fake values.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from recfuse.passes.graph.nodes import aten, nested_graph_of, operator_of, storage_of, tensors_of, value_of

_SILENT = (aten._unsafe_view, aten.lift)
"""Operators that return memory of their argument, and are no compositions."""


class Aliases:
    """Numbers of memory: tensors that share memory have the same number."""

    def __init__(self, graph: Graph, same_memory: Iterable[Iterable[Node]] = ()) -> None:
        """Read each node once; ``same_memory``: groups of inputs that are known to share memory."""
        self._parent: dict[int, int] = {}
        for group in same_memory:
            self._join(storage_of(tensor) for node in group for tensor in tensors_of(node))
        for node in graph.nodes:
            for first, second in _shared_by(node):
                self._join((storage_of(first), storage_of(second)))

    def memory_of(self, tensor: Tensor) -> int:
        """Return the number of a fake tensor's memory; a view has the memory of its base."""
        storage = storage_of(tensor)
        while (parent := self._parent.get(storage, storage)) != storage:
            storage = parent
        return storage

    def _join(self, storages: Iterable[int]) -> None:
        roots = [self._root(storage) for storage in storages]
        for root in roots:
            self._parent[root] = roots[0]

    def _root(self, storage: int) -> int:
        while (parent := self._parent.setdefault(storage, storage)) != storage:
            storage = parent
        return storage


def _shared_by(node: Node) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of an input and a result of a node that share memory."""
    if node.target is operator.getitem:
        items, at = value_of(node.args[0]), node.args[1]
        if isinstance(items, (tuple, list)) and type(at) is int and isinstance(items[at], Tensor):
            yield from ((items[at], tensor) for tensor in tensors_of(node))
        return
    called = operator_of(node)
    if called is None and isinstance(node.target, torch._ops.HigherOrderOperator):
        yield from _by_nested_graph(node)
    if called is None or not any(True for _ in tensors_of(node)):
        return
    if _is_silent(called):
        yield from _by_running(node)
        return
    written = [argument.alias_info is not None for argument in called._schema.arguments]
    if any(result.alias_info is not None for result in called._schema.returns):
        for operand in (item for item, is_shared in zip(_given(node), written, strict=True) if is_shared):
            yield from _pairs(_tensors(operand), tensors_of(node))


def _is_silent(called: OpOverload) -> bool:
    """Return whether a schema may hide that a result is an argument or a view of an argument."""
    if called._schema.is_mutable:
        return False
    key = "CompositeImplicitAutograd"
    return called.overloadpacket in _SILENT or torch._C._dispatch_has_kernel_for_dispatch_key(
        called.name(), key
    )


def _by_running(node: Node) -> Iterator[tuple[Tensor, Tensor]]:
    inputs = [tensor for item in node.all_input_nodes for tensor in tensors_of(item)]
    mode = torch._guards.detect_fake_mode([*inputs, node.meta.get("val")])
    try:
        outputs = _run(node, mode)
    except Exception:  # a call that cannot run may return any of its arguments
        yield from _pairs(inputs, tensors_of(node))
        return
    memory: dict[int, list[Tensor]] = {}
    for tensor in inputs:
        memory.setdefault(storage_of(tensor), []).append(tensor)
    for again, result in zip(outputs, tensors_of(node), strict=False):
        yield from ((argument, result) for argument in memory.get(storage_of(again), ()))


def _by_nested_graph(node: Node) -> Iterator[tuple[Tensor, Tensor]]:
    nested = nested_graph_of(node)
    if nested is None:
        inputs = [tensor for item in node.all_input_nodes for tensor in tensors_of(item)]
        yield from _pairs(inputs, tensors_of(node))
        return
    graph, operands = nested
    inside = Aliases(graph)
    placeholders = [item for item in graph.nodes if item.op == "placeholder"]
    output = next(iter(reversed(graph.nodes)))
    for output_item, result in zip(_flat(output.args[0]), tensors_of(node), strict=False):
        memory = set(map(inside.memory_of, _tensors(output_item)))
        for placeholder, operand in zip(placeholders, operands, strict=True):
            if not memory.isdisjoint(map(inside.memory_of, tensors_of(placeholder))):
                yield from _pairs(_tensors(operand), [result])


def _run(node: Node, mode: FakeTensorMode | None) -> list[Tensor]:
    assert mode is not None
    shapes = mode.shape_env
    with torch.no_grad(), mode:
        args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
        if shapes is None:
            outputs = node.target(*args, **kwargs)  # type: ignore[operator]
        else:
            with shapes.ignore_fresh_unbacked_symbols():
                outputs = node.target(*args, **kwargs)  # type: ignore[operator]
    return list(_tensors(outputs))


def _given(node: Node) -> Iterator[Any]:
    """Yield the value of each argument of a call, in the order of its schema."""
    for at, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        yield node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _tensors(value: Any) -> Iterator[Tensor]:
    for item in _flat(value):
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, Node):
            yield from tensors_of(item)


def _pairs(arguments: Iterable[Tensor], results: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    results = list(results)
    yield from ((argument, result) for argument in arguments for result in results)
