"""The tables of a packed Parameter that a backward pass computes gradients for.

Torch does not change a table whose call was no part of the loss: its gradient is None. A packed Parameter has
one gradient for all its tables, in which such a table has zeros, and an optimizer with a state or decay would
move it. So hooks of the backward graph record the tables that take part if some may not, and the step of such
an optimizer raises.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse.nn.packed.layout import TableSpec, table_rows
from recfuse.ops.library import implement, is_transformed, library, register_fake
from recfuse.ops.training import compilers


class _Window:
    """The tables of a Parameter that have taken part since its gradient was None."""

    def __init__(self, leaf: Tensor, task: int, is_wanted: bool) -> None:
        self.leaf = weakref.ref(leaf)
        self.task, self.is_wanted = task, is_wanted  # the last backward pass; True if it accumulates
        self.first_rows: set[int] = set()
        self.gradient: weakref.ref[Tensor] | None = None  # the result of the last backward pass

    def keep_gradient(self) -> None:
        """Record the gradient at the end of a backward pass."""
        leaf = self.leaf()
        self.gradient = None if leaf is None or leaf.grad is None else weakref.ref(leaf.grad)

    def is_over(self) -> bool:
        """Return whether the gradient was replaced, so that all tables may take part in it."""
        leaf = self.leaf()
        return leaf is None or leaf.grad is None or self.gradient is None or self.gradient() is not leaf.grad


_windows: dict[int, _Window] = {}  # by the id of a Parameter


def _note(leaf: Tensor, first_rows: Iterable[int]) -> None:
    """Record, inside a backward pass, that it computes gradients only for these tables of a Parameter."""
    task = torch._C._current_graph_task_id()
    window = _windows.get(id(leaf))
    if window is not None and window.leaf() is not leaf:
        window = None
    if window is None or window.task != task:
        if window is not None and window.is_over():
            window = None
        is_wanted = _is_accumulated(leaf)
        if leaf.grad is None and is_wanted:
            window = _windows[id(leaf)] = _Window(leaf, task, True)
        elif window is None:  # all tables have taken part before; or torch.autograd.grad, which leaves .grad
            return
        else:
            window.task, window.is_wanted = task, is_wanted
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(functools.partial(queue, window.keep_gradient))  # after callbacks that replace gradients
    if window.is_wanted:
        window.first_rows.update(first_rows)


def _is_accumulated(leaf: Tensor) -> bool:
    """Return whether the running backward pass adds to ``leaf.grad``, unlike torch.autograd.grad."""
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node))
    except RuntimeError:
        return False


def _is_followed(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def note_table(result: Tensor, matrix: Tensor, spec: TableSpec) -> None:
    """Record gradients of ``result``, which is computed from a table of ``matrix``, when they arrive."""
    if _is_followed(result) and matrix.is_leaf and result.grad_fn is not None:
        result.grad_fn.register_prehook(lambda _: _note(matrix, (spec.first_row,)))


def followed_table(result: Tensor, module: int, table: int) -> Tensor:
    """Return the pooled result of a table; the backward pass of a compiled program records the table."""
    if torch.is_grad_enabled() and not torch.compiler.is_exporting():
        if compilers.IS_OLD:
            _note_compiled(module)
        followed: Tensor = _followed_table(result, module, table)
        return followed
    return result


def rows_of(spec: TableSpec, matrix: Tensor) -> Tensor:
    """Return a table's rows of its matrix, a view; gradients of the view are recorded."""
    rows = table_rows(spec, matrix)
    note_table(rows, matrix, spec)
    return rows


def columns_of(pooled: Tensor, module: Any) -> list[Tensor]:
    """Return the columns of each feature from the pooled result of a packed module, as views.

    Features without a gradient are recorded in the node of the call.
    """
    dims = module.layout.dims
    if not torch.compiler.is_compiling():
        return _split(pooled, dims, module.number)
    if torch.is_grad_enabled() and not torch.compiler.is_exporting():
        if compilers.IS_OLD:
            _note_compiled(module.number)
        columns: list[Tensor] = _columns(pooled, dims, module.number)
        return columns
    return list(pooled.split(dims, dim=1))


def lookups_of(flat: Tensor, sizes: Sequence[int], module: Any) -> list[Tensor]:
    """Return the rows ``[lookups, dim]`` of each feature from the flat result of a packed module, as views.

    Features without a gradient are recorded in the node of the call. Features of one dim are split by a
    single call of torch. Rows without a gradient have version counters of their own, since they do not
    overlap and nothing else refers to ``flat``.
    """
    dims = module.layout.dims
    if torch.compiler.is_compiling() or dims.count(dims[0]) != len(dims):
        elements = [size * dim for size, dim in zip(sizes, dims, strict=True)]
        if torch.compiler.is_compiling():
            parts = list(flat.split(elements))
        else:
            parts = _split(flat, elements, module.number, 0)
        return [part.view(size, dim) for part, size, dim in zip(parts, sizes, dims, strict=True)]
    rows = flat.view(sum(sizes), dims[0])
    if flat.requires_grad or is_transformed():
        return _split(rows, sizes, module.number, 0, flat.grad_fn)
    return list(torch.unsafe_split_with_sizes(rows, sizes))


_untold: set[int] = set()
"""Numbers of modules whose tables programs of an old compiler look up, which may drop the records."""


def _note_compiled(module: int) -> bool:
    """Record a module while a program is traced."""
    _untold.add(module)
    return True


# As torch.compiler.assume_constant_result, which imports the compiler: the call runs during tracing.
_note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _split(pooled: Tensor, dims: Sequence[int], number: int, dim: int = 1, node: Any = None) -> list[Tensor]:
    """Split a result; ``node`` is the node of the call if ``pooled`` is a view of its result."""
    columns = list(pooled.split_with_sizes(dims, dim))
    if columns and pooled.requires_grad and not torch._C._are_functorch_transforms_active():
        node, split = node or pooled.grad_fn, columns[0].grad_fn
        if split is not None and isinstance(node, torch.autograd.function.BackwardCFunction):
            split.register_prehook(functools.partial(_tell, node, number))
    return columns


def _tell(node: Any, number: int, grads: Sequence[Tensor | None]) -> None:
    """Store the features with gradients in the node of a call, for :func:`recfuse.ops.gradients.used_of`."""
    missing = [feature for feature, grad in enumerate(grads) if grad is None]
    module = numbered.get(number)
    if not missing or module is None:
        node.used_groups = node.used_features = None
        return
    tables = (table for at, table in enumerate(module.layout.table_of_feature) if grads[at] is not None)
    node.used_groups = {module.layout.tables[table].matrix for table in tables}
    node.used_features = functools.partial(_used_features, missing=missing, module=number)


# ---- operators: a compiled program runs them in its backward pass, which executes no Python

numbered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The packed modules by their number, a constant in compiled programs."""
_numbers = itertools.count()


def give_number(module: Any) -> None:
    """Give a packed module, or a copy, a unique number."""
    vars(module)["number"] = module._store.number = number = next(_numbers)
    numbered[number] = module


def take_number(module: Any) -> None:
    """Remove the number of a module whose tables are no longer packed.

    Programs that were compiled with it record nothing from then on.
    """
    numbered.pop(vars(module).pop("number"), None)


library.define("_columns(Tensor pooled, int[] dims, int module) -> Tensor[]")
library.impl("_columns", _split, "CompositeImplicitAutograd")
_columns = torch.ops.recfuse._columns.default


def _follow_table(result: Tensor, module: int, table: int) -> Tensor:
    node = result.grad_fn
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        node.used_groups = {0}
        node.used_features = functools.partial(_used_table, module=module, table=table)
    return result


library.define("_followed_table(Tensor result, int module, int table) -> Tensor")
library.impl("_followed_table", _follow_table, "CompositeImplicitAutograd")
_followed_table = torch.ops.recfuse._followed_table.default

library.define("_used_table(Tensor features, Tensor grad, int module, int table) -> Tensor")
_used_table = torch.ops.recfuse._used_table.default

library.define("_used_features(Tensor features, Tensor grad, int[] missing, int module) -> Tensor")
_used_features = torch.ops.recfuse._used_features.default


def _mask(features: Tensor, grad: Tensor, missing: Sequence[int], module: int) -> Tensor:
    """Record the tables that take part, and remove the features without gradients from their matrices.

    The argument ``grad`` keeps the operator out of the forward graph.
    """
    owner = numbered.get(module)
    if owner is not None:
        layout = owner.layout
        used = {table for at, table in enumerate(layout.table_of_feature) if at not in missing}
        for number, matrix in enumerate(owner.packed_weights()):
            specs = (layout.tables[table] for table in used)
            first_rows = [spec.first_row for spec in specs if spec.matrix == number]
            if first_rows and matrix.is_leaf and matrix.requires_grad:
                _note(matrix, first_rows)
    masked = features.clone()
    masked[list(missing), 0] = -1
    return masked


def _note_table(features: Tensor, grad: Tensor, module: int, table: int) -> Tensor:
    """Record a table that takes part; the argument ``grad`` keeps the operator out of the forward graph."""
    owner = numbered.get(module)
    if owner is not None:
        spec = owner.layout.tables[table]
        matrix = owner.packed_weights()[spec.matrix]
        if matrix.is_leaf and matrix.requires_grad:
            _note(matrix, (spec.first_row,))
    return features.clone()


def _like_features(features: Tensor, grad: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(features, device=grad.device if grad.is_meta else features.device)


for _name, _run in (("_used_features", _mask), ("_used_table", _note_table)):
    implement(_name, _run, "CompositeExplicitAutograd")
    register_fake(_name)(_like_features)


def has_windows() -> bool:
    """Return whether ``windows`` may return any. Each step of an optimizer calls this."""
    return bool(_windows or _untold)


def may_miss_notes() -> bool:
    """Return whether an old compiler may have dropped records of tables that take part."""
    return bool(_untold)


def windows() -> list[tuple[Tensor, set[int]]]:
    """Return Parameters with a gradient in which some tables may not have taken part.

    Each Parameter comes with the first rows of the tables that have taken part. The set is empty if an old
    compiler may have dropped the records.
    """
    taking_part = []
    for key, window in list(_windows.items()):
        leaf = window.leaf()
        if leaf is None or window.is_over():
            _windows.pop(key, None)
        else:
            taking_part.append((leaf, window.first_rows))
    for number in list(_untold):
        if (module := numbered.get(number)) is None:
            _untold.discard(number)
            continue
        for leaf in module.packed_weights():
            if leaf.is_leaf and leaf.grad is not None and id(leaf) not in _windows:
                taking_part.append((leaf, set()))
    return taking_part


def has_rows(grad: Tensor, spec: TableSpec) -> bool:
    """Return whether a gradient has a value other than 0 in the rows of a table. Waits for its device."""
    if grad.layout is torch.strided:
        return bool(grad.narrow(0, spec.first_row, spec.num_embeddings).any())
    rows = grad._indices()[0]
    return bool(((rows >= spec.first_row) & (rows < spec.first_row + spec.num_embeddings)).any())
