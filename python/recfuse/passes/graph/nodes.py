"""The operator of a node in a graph of ATen operators, its arguments and values, and its writes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten


def operator_of(node: Any) -> OpOverload | None:
    """Return the operator that a node calls, or None."""
    if isinstance(node, Node) and node.op == "call_function" and isinstance(node.target, OpOverload):
        return node.target
    return None


def is_named(node: Any, *names: str) -> bool:
    """Return whether a node calls an operator of one of these names, whose library may be missing."""
    called = operator_of(node)
    return called is not None and called._schema.name in names


def is_call(node: Any, *packets: Any) -> bool:
    """Return whether a node calls an overload of these operators, as in ``is_call(node, aten.cat)``."""
    operator = operator_of(node)
    return operator is not None and operator.overloadpacket in packets


@functools.cache
def _arguments(operator: OpOverload) -> tuple[tuple[str, Any], ...]:
    return tuple((argument.name, argument.default_value) for argument in operator._schema.arguments)


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments of a call by their names in the schema, with the defaults of missing arguments."""
    names = _arguments(node.target)  # type: ignore[arg-type]
    arguments = {
        name: node.args[at] if at < len(node.args) else default for at, (name, default) in enumerate(names)
    }
    return arguments | node.kwargs


def value_of(node: Any) -> Any:
    """Return the fake value of a node; an object that is no node is its own value."""
    return node.meta.get("val") if isinstance(node, Node) else node


def tensor_of(node: Any) -> Tensor | None:
    """Return the fake tensor of a node, or None if it has another value."""
    value = value_of(node) if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def tensors_of(node: Node) -> Iterator[Tensor]:
    """Yield the fake tensors that a node returns; there may be several or zero."""
    value = node.meta.get("val")
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, Tensor):
            yield item


def storage_of(tensor: Tensor) -> int:
    """Return the number of a fake tensor's memory; a view has the memory of its base."""
    return tensor.untyped_storage()._cdata


def nested_graph_of(node: Node) -> tuple[Graph, Sequence[Any]] | None:
    """Return the graph that a higher-order operator runs, and the argument for each of its placeholders.

    Returns None if it has several graphs, or passes the arguments in another way.
    """
    graphs = [
        (at, subgraph) for at, item in enumerate(node.args) if (subgraph := _graph_at(item)) is not None
    ]
    if len(graphs) != 1 or node.kwargs:
        return None
    at, graph = graphs[0]
    operands = node.args[at + 1 :]
    placeholders = [item for item in graph.nodes if item.op == "placeholder"]
    return (graph, operands) if len(placeholders) == len(operands) else None


def graphs_of(node: Node) -> list[Graph]:
    """Return all graphs that a higher-order operator may run; an empty list for other nodes."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    return [graph for item in node.all_input_nodes if (graph := _graph_at(item)) is not None]


def _graph_at(node: Any) -> Graph | None:
    attribute: Any = node.graph.owning_module if isinstance(node, Node) and node.op == "get_attr" else None
    for name in str(node.target).split(".") if attribute is not None else ():
        attribute = getattr(attribute, name, None)
    return attribute.graph if isinstance(attribute, GraphModule) else None


def turned(node: Any) -> Node | None:
    """Return the matrix whose transpose a node is, or None."""
    tensor = tensor_of(node)
    if tensor is None or tensor.dim() != 2:
        return None
    if is_call(node, aten.permute):
        is_turned = [dim % 2 for dim in node.args[1]] == [1, 0]
    elif is_call(node, aten.transpose):
        is_turned = sorted(dim % 2 for dim in node.args[1:]) == [0, 1]
    else:
        is_turned = is_call(node, aten.t, aten.numpy_T, aten.mT)
    return node.args[0] if is_turned else None


def same(a: Any, b: Any) -> bool:
    """Return whether torch's ShapeEnv knows that two sizes are equal for every batch; adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))


def hint(size: Any) -> int | None:
    """Return a size in the example with which a program was recorded, or None if it is unknown."""
    if isinstance(size, int):
        return size
    size_hint = size.node.hint
    return int(size_hint) if size_hint is not None else None


class HiddenWrite(NamedTuple):
    """Arguments that an operator writes to although its schema does not declare it."""

    arguments: tuple[str, ...]
    only_if: str | None  # a bool argument that must be true for the write; None: it always writes
    reason: str


_STATISTICS = ("running_mean", "running_var")
_TRAINING = HiddenWrite(_STATISTICS, "training", "moves the running statistics in training")
_ALWAYS = HiddenWrite(_STATISTICS, None, "moves the running statistics")
HIDDEN_WRITES: dict[str, HiddenWrite] = {
    "aten::batch_norm": _TRAINING,
    "aten::_batch_norm_impl_index": _TRAINING,
    "aten::native_batch_norm": _TRAINING,
    "aten::cudnn_batch_norm": _TRAINING,
    "aten::miopen_batch_norm": _TRAINING,
    "aten::instance_norm": HiddenWrite(_STATISTICS, "use_input_stats", "moves the running statistics"),
    "aten::batch_norm_update_stats": _ALWAYS,
    "aten::batch_norm_gather_stats": _ALWAYS,
    "aten::batch_norm_gather_stats_with_counts": _ALWAYS,
    "aten::_cudnn_rnn_flatten_weight": HiddenWrite(
        ("weight_arr",), None, "gives the weights of an RNN other memory"
    ),
    "recfuse::fused_embedding_bag_update": HiddenWrite(
        ("weights", "states", "numbers"), None, "updates tables; the compiler would refuse it with a schema"
    ),
}
"""Hidden writes by the name of the operator. ``tests/passes/test_hidden_writes.py`` searches for others."""


class _Writes(NamedTuple):
    places: tuple[tuple[int, str], ...]  # positions and names of arguments in the schema
    only_if: tuple[int, str, Any] | None  # the position, name and default of a bool
    hidden: tuple[tuple[int, str], ...]


def written_arguments(called: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the value of each argument that a call writes to."""
    writes = _writes_of(called)
    places = writes.places
    if writes.hidden and (writes.only_if is None or _given(*writes.only_if, args, kwargs) is not False):
        places += writes.hidden
    for at, name in places:
        yield _given(at, name, None, args, kwargs)


def may_write(called: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call may write to an argument."""
    return any(argument is not None for argument in written_arguments(called, args, kwargs))


def _given(at: int, name: str, default: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[at] if at < len(args) else kwargs.get(name, default)


@functools.cache
def _writes_of(called: OpOverload) -> _Writes:
    schema = called._schema
    arguments = list(enumerate(schema.arguments))
    places = tuple(
        (at, argument.name)
        for at, argument in arguments
        if argument.alias_info and argument.alias_info.is_write
    )
    hides = HIDDEN_WRITES.get(schema.name)
    if hides is None:
        return _Writes(places, None, ())
    only_if = [
        (at, argument.name, argument.default_value)
        for at, argument in arguments
        if argument.name == hides.only_if
    ]
    hidden = tuple((at, argument.name) for at, argument in arguments if argument.name in hides.arguments)
    return _Writes(places, only_if[0] if only_if else None, hidden)
