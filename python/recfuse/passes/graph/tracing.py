"""A graph that torch.compile has captured, recorded again as ATen operators, before autograd.

Torch's own tracer maps every spelling of a computation to one operator, so that no table of functions,
methods and modules is needed; the schema of each operator states its writes. A backend gets its graph before
AOTAutograd: gradients are computed from the rewritten graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from recfuse.errors import ArgumentValueError
from recfuse.passes.graph.program import Program
from recfuse.passes.graph.progress import Progress
from recfuse.passes.graph.recorder import Recorder, RecordingMode


def why_not_recorded(module: GraphModule) -> str:
    """Return why a captured graph must be left unchanged, or ""."""
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return f"the graph calls {node.target}, whose own graphs and gradients are not read"
        if node.op == "get_attr" and not isinstance(getattr(module, str(node.target), None), Tensor):
            return f"the attribute {node.target} is no tensor"
    return ""


@contextlib.contextmanager
def recorded(module: GraphModule, inputs: Sequence[Any]) -> Iterator[Program]:
    """Yield a captured graph as a Program, with the same inputs, outputs and symbols for sizes."""
    context = TracingContext.try_get()
    captured = (context.fake_mode if context else None) or torch._guards.detect_fake_mode(inputs)
    # A separate mode: changes of a trace to its fake tensors must not reach later users of the captured mode.
    shapes = captured.shape_env if captured is not None else None
    mode = RecordingMode(shape_env=shapes, allow_non_fake_inputs=True, static_shapes=shapes is None)
    fakes = [_faked(mode, item, context) for item in inputs]
    patch = mock.patch.object(context, "fake_mode", mode) if context else contextlib.nullcontext()
    with patch, mode, Progress("recfuse: recording a graph", unit="operators") as mode.progress:
        trace = make_fx(
            Recorder(module).run, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True
        )
        graph = trace(*fakes)
        _check_attributes(graph)
        _copy_metadata(module, graph, inputs)
    with patch:
        inputs_of_user = [node for node in graph.graph.nodes if node.op == "placeholder"]
        program = Program(graph, [node for node in inputs_of_user if not node.meta["recfuse_is_state"]])
        program.compares_sizes = program.is_guarded = True
        yield program


def _check_attributes(module: GraphModule) -> None:
    """Raise if the tracer has lost the source of a fake tensor, and keeps it as a constant."""
    for node in module.graph.nodes:
        attribute = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(attribute, FakeTensor) and attribute.constant is None:
            raise ArgumentValueError(
                f"recfuse: the tracer does not see the function that computes {node.name}"
            )


def _faked(mode: FakeTensorMode, item: Any, context: TracingContext | None) -> Any:
    if not isinstance(item, Tensor):
        return item
    if isinstance(item, FakeTensor):  # as AOTAutograd treats its inputs
        return mode.from_tensor(item, static_shapes=False)
    symbols = context.tensor_to_context.get(item) if context is not None else None
    return mode.from_tensor(item, symbolic_context=symbols, source=getattr(symbols, "tensor_source", None))


def _copy_metadata(before: GraphModule, after: GraphModule, inputs: Sequence[Any]) -> None:
    """Copy the metadata that AOTAutograd and inductor read: sources of inputs, and static addresses."""
    after.meta.update(before.meta)
    olds = [node for node in before.graph.nodes if node.op == "placeholder"]
    news = [node for node in after.graph.nodes if node.op == "placeholder"]
    for old, new, value in zip(olds, news, inputs, strict=True):
        new.meta = {**old.meta, **new.meta}
        new.meta["recfuse_name"] = _spelled(old.meta.get("grapharg"), old.name)
        new.meta["recfuse_is_state"] = _is_state(old.meta.get("grapharg"))
        new.meta["recfuse_is_parameter"] = isinstance(value, torch.nn.Parameter)
        new.meta["recfuse_requires_grad"] = isinstance(value, Tensor) and value.requires_grad
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source


def _source(argument: Any) -> str:
    """Return the source of an input in torch's notation, or "" if it is unknown."""
    text = getattr(getattr(argument, "source", None), "name", "")
    return str(text() if callable(text) else text)


def _is_state(argument: Any) -> bool:
    """Return whether an input is a Parameter or a buffer of a module."""
    return any(part in _source(argument) for part in ("._parameters[", "._buffers["))


def _spelled(argument: Any, name: str) -> str:
    """Return the name of an input in the model: ``tables.0.weight``."""
    text = _source(argument) or name
    for part in ("_modules", "_parameters", "_buffers"):
        text = text.replace(f".{part}[", "[")
    return text.replace("L['self']", "").replace("']['", ".").replace("']", "").replace("['", "").lstrip(".")
