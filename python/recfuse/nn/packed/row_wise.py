"""The optimizers that may step several tables in one Parameter, and the error for the others.

Only classes of `by_table.known_optimizers`, and optimizers that the user has marked, count as row-wise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer, optimizer

from recfuse.errors import ArgumentValueError
from recfuse.nn.packed.by_table.dicts import speak_of_tables
from recfuse.nn.packed.by_table.known_optimizers import KNOWN, Known, name_of
from recfuse.nn.packed.frozen_alone import group_of, keep_states, left
from recfuse.nn.packed.layout import TableSpec
from recfuse.nn.packed.taking_part import (
    give_number,
    has_rows,
    has_windows,
    may_miss_notes,
    numbered,
    windows,
)
from recfuse.ops.training.compilers import with_old_compiler

VOUCHED = "recfuse_row_wise"
"""Attribute of an optimizer, or of its class: True marks it as row-wise; with False each table must keep a
separate Parameter.
"""


def is_row_wise(optimizer: Optimizer) -> bool:
    """Return whether the step of packed tables equals separate steps of the tables; False if unknown."""
    vouched = getattr(optimizer, VOUCHED, None)
    return _known(type(optimizer)) is not None if vouched is None else bool(vouched)


@functools.lru_cache(maxsize=256)
def _known(kind: type) -> Known | None:
    """Return the facts of a known class, also for a subclass that overrides only ``__init__``."""
    for at, member in enumerate(kind.__mro__):
        if (known := KNOWN.get(name_of(member))) is not None:
            return known
        bases = kind.__mro__[at + 1 : -1]
        for name, value in vars(member).items():
            inherited = next((vars(base)[name] for base in bases if name in vars(base)), None)
            is_method = callable(value) and callable(inherited) and name != "__init__"
            if is_method and _unhooked(value) is not _unhooked(inherited):
                return None
    return None


def _unhooked(step: Any) -> Any:
    """Return a method without the wrappers that torch adds to ``step`` of each class of optimizers."""
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


# ---- optimizers that are created later

_hooks: list[Any] = []  # hooks of all optimizers' steps; at most one, after a module was packed


def watch(module: Any) -> None:
    """Watch the Parameters of ``module`` that have several tables.

    An optimizer that has such a Parameter and is not row-wise raises at its first step.
    """
    give_number(module)
    speak_of_tables()
    if not _hooks:
        _hooks.append(optimizer.register_optimizer_step_pre_hook(_before_step))


def has_other_hooks() -> bool:
    """Return whether other code than this file hooks the steps of all optimizers."""
    return len(optimizer._global_optimizer_pre_hooks) > len(_hooks) or bool(
        optimizer._global_optimizer_post_hooks
    )


def shared_matrices(least: int = 2) -> dict[int, dict[int, TableSpec]]:
    """Return the tables of Parameters with ``least`` or more tables, by id and by first row."""
    shared: dict[int, dict[int, TableSpec]] = {}
    for module in list(numbered.values()):
        if (store := vars(module).get("_store")) is None:  # unswapped in the meantime
            continue
        layout, parameters = store.layout, store.parameters
        for number, name in enumerate(layout.parameter_names):
            parameter = parameters.get(name)
            tables = {spec.first_row: spec for spec in layout.tables if spec.matrix == number}
            if parameter is not None and len(tables) >= least:
                shared[id(parameter)] = tables
    return shared


def _moves_idle_rows(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a step with a group changes rows without a gradient, or their state."""
    options = _idle_options(optimizer)
    return options is None or any(group.get(option) for option in options)


def _idle_options(optimizer: Optimizer) -> tuple[str, ...] | None:
    known = _known(type(optimizer))
    return None if known is None else known.moves_idle


def _before_step(optimizer: Optimizer, args: Any, options: Any) -> Any:
    if left:
        keep_states(optimizer, functools.partial(_moves_idle_rows, optimizer))
    if torch.compiler.is_dynamo_compiling() or has_windows() or not is_row_wise(optimizer):
        _check_step(optimizer)
    if len(args) > 1 and args[1] is not None:
        return (args[0], _checked(optimizer, args[1]), *args[2:]), options
    if options and options.get("closure") is not None:
        return args, {**options, "closure": _checked(optimizer, options["closure"])}
    return None


def _checked(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure of ``step()`` that checks the step after it has computed gradients."""

    @functools.wraps(closure)
    def checked() -> Any:
        result = closure()
        if has_windows():
            _check_step(optimizer)
        return result

    return checked


@torch._disable_dynamo
def _check_step(optimizer: Optimizer) -> None:
    if is_row_wise(optimizer):
        if has_windows():
            _check_taking_part(optimizer)
        return
    shared = shared_matrices()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if tables := shared.get(id(parameter)):
                kind = type(optimizer).__name__
                raise ArgumentValueError(
                    f"recfuse: {kind} is about to make a step of a packed Parameter of shape "
                    f"{list(parameter.shape)}, in which {len(tables)} tables lie, and may scale the step by "
                    "the whole Parameter and not by each row. Create it before the swap and pass it to "
                    "recfuse.swap(model, optimizers=[optimizer]), so that each table keeps a Parameter of "
                    f"its own. Set {kind}.{VOUCHED} = True if the step of a row depends on that row alone."
                )


def _check_taking_part(optimizer: Optimizer) -> None:
    """Raise ValueError if the step would change a packed table without a gradient, or its state."""
    options = _idle_options(optimizer)
    shared = shared_matrices(1 if may_miss_notes() else 2)
    for parameter, first_rows in windows():
        group = group_of(optimizer, parameter)
        tables = shared.get(id(parameter), {})
        if group is None or not _moves_idle_rows(optimizer, group):
            continue
        for first_row, spec in tables.items():
            if first_row not in first_rows and not has_rows(parameter.grad, spec):
                with_options = f" with {' or '.join(options)}" if options else ""
                text = (
                    f"recfuse: table {spec.name!r} took no part in this step, and others of its packed "
                    f"Parameter of shape {list(parameter.shape)} did, and "
                    f"{type(optimizer).__name__}{with_options} would move it or its state, which torch "
                    f"leaves as they are. Set optimizer.{VOUCHED} = False before recfuse.swap(model, "
                    "optimizers=[optimizer]), or call recfuse.swap(model, fuse=False), so that each table "
                    "has a Parameter of its own."
                )
                hidden = "does not tell a table without lookups from one that took no part"
                raise ArgumentValueError(with_old_compiler(text, hidden) if may_miss_notes() else text)
