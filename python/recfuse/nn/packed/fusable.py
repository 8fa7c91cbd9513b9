"""Which tables can be pooled in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse._codes import MODES
from recfuse.errors import a_type
from recfuse.nn.embedding_bag import EmbeddingBag


def why_not_fusable(tables: Sequence[Any]) -> str | None:
    """Why tables cannot be packed and pooled in one call with the same results; None if they can."""
    for number, table in enumerate(tables):
        if reason := _why_not_packable(table):
            return f"table {number} {reason}"
        if table.sparse != tables[0].sparse:
            return f"table {number} has sparse={table.sparse}, table 0 has sparse={tables[0].sparse}"
    return None


def _why_not_packable(table: Any) -> str | None:
    if not isinstance(table, torch.nn.EmbeddingBag):
        return f"is {a_type(table)}, not a torch.nn.EmbeddingBag"
    if not isinstance(table._parameters.get("weight"), torch.nn.Parameter):
        return "has a computed weight (parametrized, pruned or none)"
    if type(table) not in (torch.nn.EmbeddingBag, EmbeddingBag):
        return f"is {a_type(table)}, a subclass, whose forward may differ"
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


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module does more than its forward, or its state_dict is another than it seems."""
    return any(value for name, value in vars(module).items() if name.endswith("_hooks"))


def gradient_hooks(weight: Tensor) -> str | None:
    """What acts on a Parameter's gradient and would be lost with it, in words; None: nothing."""
    if getattr(weight, "_in_backward_optimizers", None):
        return "an optimizer is applied to its weight in the backward"
    if getattr(weight, "_backward_hooks", None) or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "its weight has gradient hooks"
    return None
