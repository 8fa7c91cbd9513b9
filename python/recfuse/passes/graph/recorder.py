"""``Recorder`` and ``RecordingMode``: run a captured graph for torch's tracer, without redundant work.

Torch has run the same operators on fake values when it captured the graph, so that its checks need no
repetition.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.functional import embedding

from recfuse.ops.embedding_bag_arguments import torch_embedding_bag
from recfuse.passes.graph.nodes import aten
from recfuse.passes.graph.progress import Progress

_ALL = slice(None)
_DATA = getattr(torch._C._autograd, "_get_data_attr", None)  # from dynamo
_MAX_NORM, _NORM_TYPE = 3, 4  # positions in both functions of _NORMED
_PLACES = {"max_norm": _MAX_NORM, "norm_type": _NORM_TYPE}
_NORMED = (embedding, torch_embedding_bag)


class Recorder(Interpreter):
    """Runs a captured graph; recorded nodes keep the source lines of the model."""

    def __init__(self, module: GraphModule) -> None:
        """``module`` is a captured graph, which does not change."""
        super().__init__(module)
        self._unread = {node for node in module.graph.nodes if _is_unread(node)}

    def run_node(self, n: Node) -> Any:
        """Run a node as any interpreter does, unless its value is not read."""
        return None if n in self._unread else super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, with two replacements.

        ``x[:, 3]`` becomes a select: with symbolic sizes, torch would also record a slice of all rows.
        ``x.data``, which the tracer does not record, becomes a detach.
        """
        if target is _DATA:
            return args[0].detach()
        if target is operator.getitem and isinstance(args[0], Tensor) and isinstance(args[1], tuple):
            tensor, index = args
            if all(type(at) is int or at == _ALL for at in index) and any(at != _ALL for at in index):
                dim = 0
                for at in index:
                    if at == _ALL:
                        dim += 1
                    else:
                        tensor = tensor.select(dim, at)
                return tensor
        return super().call_function(target, args, kwargs)


def _is_unread(node: Node) -> bool:
    """Return whether a node reads a float of a module without effect.

    With dynamic shapes, torch makes a tensor of the norm_type of each table and reads it in every call, also
    without max_norm.
    """
    if node.op != "call_method" or node.target != "item" or not isinstance(_example(node), torch.SymFloat):
        return False
    return all(user.target in _NORMED and _uses(user, node) == [_NORM_TYPE] for user in node.users)


def _example(node: Node) -> Any:
    return node.meta.get("example_value")


def _uses(call: Node, node: Node) -> list[Any]:
    """Return the positions of a node in a call without max_norm; an empty list for a call with max_norm."""
    arguments: dict[Any, Any] = dict(enumerate(call.args))
    arguments |= {_PLACES.get(name, name): value for name, value in call.kwargs.items()}
    return (
        [at for at, value in arguments.items() if value is node] if arguments.get(_MAX_NORM) is None else []
    )


class RecordingMode(FakeTensorMode):
    """A mode that shows the number of operators so far, and computes views of a column quickly."""

    progress: Progress | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator as the base mode does, with a fast path for selects."""
        if self.progress is not None:
            self.progress.update(1)
        if func is aten.select.int and (view := _view_of(*args)) is not None:
            was_enabled, self.cache_enabled = self.cache_enabled, False  # each view has another offset
            try:
                return super().__torch_dispatch__(aten.as_strided.default, types, view, {})
            finally:
                self.cache_enabled = was_enabled
        return super().__torch_dispatch__(func, types, args, kwargs)


def _view_of(tensor: Tensor, dim: int, index: Any) -> tuple[Any, ...] | None:
    """Return the arguments of as_strided for a select, or None.

    With symbolic sizes, torch proves that a select lies inside its memory, which costs ten times as much.
    """
    if type(tensor) is not FakeTensor or type(index) is not int or index < 0 or tensor.is_complex():
        return None
    if tensor.layout is not torch.strided:
        return None
    sizes, strides = list(tensor.shape), list(tensor.stride())
    offset = tensor.storage_offset() + index * strides[dim]
    del sizes[dim], strides[dim]
    return tensor, sizes, strides, offset
