"""Conditions for tables to be pooled in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from recfuse._codes import MODES
from recfuse.errors import a_type
from recfuse.nn.embedding_bag import EmbeddingBag


def why_not_fusable(tables: Sequence[Any], others: Iterable[tuple[str, Tensor]] = ()) -> str | None:
    """Return why tables cannot be packed and pooled in one call with the same results, or None if they can.

    ``others`` are tensors of their model, with names.
    """
    for number, table in enumerate(tables):
        if reason := _why_not_packable(table):
            return f"table {number} {reason}"
        if table.sparse != tables[0].sparse:
            return f"table {number} has sparse={table.sparse}, table 0 has sparse={tables[0].sparse}"
    return _shared_memory([table.weight for table in tables], others)


def _shared_memory(weights: Sequence[Tensor], others: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return a text about a weight that shares memory with another tensor, or None.

    A Parameter of two tables is a single tensor. Two Parameters with the same ``.data`` are different
    tensors, tied only by memory.
    """
    named = {id(weight): (weight, f"table {at}", True) for at, weight in reversed(list(enumerate(weights)))}
    for name, tensor in others:
        named.setdefault(id(tensor), (tensor, name, False))
    last, last_name, last_is_table = 0, "", False
    for first, end, name, is_table in sorted(
        (*_memory_of(tensor), name, is_table)
        for tensor, name, is_table in named.values()
        if type(tensor) in (Tensor, Parameter) and tensor.device.type in ("cpu", "cuda") and tensor.numel()
    ):
        if first < last and (is_table or last_is_table):
            table, other = (name, last_name) if is_table else (last_name, name)
            return f"{table} shares memory with {other}, which packing would separate"
        if end > last:
            last, last_name, last_is_table = end, name, is_table
    return None


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the start and the end of a tensor's elements."""
    if tensor.layout is not torch.strided:
        return 0, 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.itemsize


def _why_not_packable(table: Any) -> str | None:
    if not isinstance(table, torch.nn.EmbeddingBag):
        return f"is {a_type(table)}; expected a torch.nn.EmbeddingBag"
    if not isinstance(table._parameters.get("weight"), Parameter):
        return "has a weight that is computed (parametrized, pruned) or absent"
    if type(table) not in (torch.nn.EmbeddingBag, EmbeddingBag):
        return f"is {a_type(table)}; expected torch.nn.EmbeddingBag, as a subclass may have another forward"
    if "forward" in table.__dict__:
        return "has a forward that was replaced on the object"
    if has_hooks(table):
        return "has hooks, which one call for all tables would not run"
    if (
        len(table._parameters) > 1
        or any(value is not None for value in table._buffers.values())
        or table._modules
    ):
        return "has parameters, buffers or modules besides its weight"
    if table.weight.is_cpu and table.weight.is_shared():
        return "lies in memory that processes share; expected its own memory, as of copy.deepcopy(model)"
    if getattr(table, "pinned", None) is not None:
        return "has pinned rows"
    if table.max_norm is not None:
        return "has max_norm, which changes rows during the call"
    if table.scale_grad_by_freq:
        return "has scale_grad_by_freq"
    if table.mode not in MODES:
        return f"has mode {table.mode!r}"
    if table.sparse and table.mode == "max":
        return 'has sparse gradients with mode "max"'
    return None


def is_fake_parameter(weight: Any) -> bool:
    """Return whether a weight is a Parameter without memory, of a model under tracing."""
    return isinstance(weight, FakeTensor) and isinstance(weight, Parameter)


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether the module has hooks, which extend its calls or change its state_dict."""
    return any(value for name, value in vars(module).items() if name.endswith("_hooks"))


def gradient_hooks(weight: Tensor) -> str | None:
    """Return a text about hooks on a Parameter's gradient, which packing would lose, or None."""
    if applied := getattr(weight, "_in_backward_optimizers", None):
        return f"{type(applied[0]).__name__} was applied in the backward pass to its weight"
    if getattr(weight, "_backward_hooks", None) or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "weight has gradient hooks"
    return None
