"""Which tables of a packed Parameter a backward pass brings gradients to.

Torch leaves a table as it is whose call was no part of the loss: its gradient is None. A packed Parameter has
one gradient for all its tables, in which such a table has zeros, and an optimizer with a state or decay would
move it. So hooks of the backward graph note the tables that take part where these may not be all, and the
step of such an optimizer raises.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse.nn.packed.layout import TableSpec, table_rows


class _Window:
    """The tables of a Parameter that have taken part since it had no gradient."""

    def __init__(self, leaf: Tensor, task: int, is_wanted: bool) -> None:
        self.leaf = weakref.ref(leaf)
        self.task, self.is_wanted = task, is_wanted  # the last backward pass, and whether it accumulates
        self.first_rows: set[int] = set()


_windows: dict[int, _Window] = {}  # by the id of a Parameter


def _note(leaf: Tensor, first_rows: Iterable[int]) -> None:
    """Notes, inside a backward pass, that it brings gradients to these tables of a Parameter alone."""
    task = torch._C._current_graph_task_id()
    window = _windows.get(id(leaf))
    if window is not None and window.leaf() is not leaf:
        window = None
    if window is None or window.task != task:
        is_wanted = _is_accumulated(leaf)
        if leaf.grad is None and is_wanted:
            window = _windows[id(leaf)] = _Window(leaf, task, True)
        elif window is None:  # all tables have taken part before; or torch.autograd.grad, which leaves .grad
            return
        else:
            window.task, window.is_wanted = task, is_wanted
    if window.is_wanted:
        window.first_rows.update(first_rows)


def _is_accumulated(leaf: Tensor) -> bool:
    """Whether the running backward pass adds to ``leaf.grad``: not one of torch.autograd.grad."""
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node))
    except RuntimeError:
        return False


def _is_followed(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def note_table(result: Tensor, matrix: Tensor, spec: TableSpec) -> None:
    """Has it noted when a gradient comes to ``result``, which is computed from one table of ``matrix``."""
    if _is_followed(result) and matrix.is_leaf and result.grad_fn is not None:
        result.grad_fn.register_prehook(lambda _: _note(matrix, (spec.first_row,)))


def rows_of(spec: TableSpec, matrix: Tensor) -> Tensor:
    """A table's rows of its matrix, a view; gradients to it are noted."""
    rows = table_rows(spec, matrix)
    note_table(rows, matrix, spec)
    return rows


def columns_of(pooled: Tensor, module: Any) -> list[Tensor]:
    """The columns of each feature of what one call of a packed module has pooled, views. Features to which no
    gradient comes are noted, and the node of the call is told.
    """
    found = list(pooled.split(module.layout.dims, dim=1))
    if found and _is_followed(pooled):
        node, split = pooled.grad_fn, found[0].grad_fn
        if split is not None and isinstance(node, torch.autograd.function.BackwardCFunction):
            split.register_prehook(functools.partial(_note_columns, node, module))
    return found


def _note_columns(node: Any, module: Any, grads: Sequence[Tensor | None]) -> None:
    missing = [number for number, grad in enumerate(grads) if grad is None]
    node.features_without_gradients = missing
    if not missing:
        return
    layout = module.layout
    used = {table for number, table in enumerate(layout.table_of_feature) if grads[number] is not None}
    for number, matrix in enumerate(module.packed_weights()):
        own = [spec.first_row for spec in (layout.tables[table] for table in used) if spec.matrix == number]
        if own and matrix.is_leaf and matrix.requires_grad:
            _note(matrix, own)


def windows() -> list[tuple[Tensor, set[int]]]:
    """Parameters with a gradient of which not all tables may have taken part, and the first rows of those
    that have.
    """
    found = []
    for key, window in list(_windows.items()):
        leaf = window.leaf()
        if leaf is None or leaf.grad is None:
            _windows.pop(key, None)
        else:
            found.append((leaf, window.first_rows))
    return found


def has_rows(grad: Tensor, spec: TableSpec) -> bool:
    """Whether a gradient has anything but zeros in the rows of a table. Waits for its device."""
    if grad.layout is torch.strided:
        return bool(grad.narrow(0, spec.first_row, spec.num_embeddings).any())
    rows = grad._indices()[0]
    return bool(((rows >= spec.first_row) & (rows < spec.first_row + spec.num_embeddings)).any())
