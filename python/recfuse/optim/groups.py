"""Param groups that report changes to their optimizer, and the options that fused optimizers lack."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recfuse._arguments import real, wrong_type
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.ops.training.optimizers import BOUNDS

# Options of torch's optimizers that change the computation of a step, not its result; a state_dict may have
# any value.
HOW = ("foreach", "fused", "capturable")
# Options that change the result of a step, with the value that disables them.
OFF: dict[str, Any] = {
    "momentum": 0,
    "dampening": 0,
    "nesterov": False,
    "lr_decay": 0,
    "amsgrad": False,
    "differentiable": False,
    "decoupled_weight_decay": False,
}
_READ = ("params", "lr", "eps", "betas", "weight_decay", "maximize")  # options of a group that kernels read
_WHY = {
    "momentum": ", since momentum moves rows that a batch does not look up",
    "lr_decay": ". Use a scheduler of torch.optim.lr_scheduler.",
    "amsgrad": ", as torch.optim.SparseAdam has none either",
    "differentiable": ", since a step has no gradient",
}
_LARGEST = torch.finfo(torch.float32).max  # kernels read float32


class ParamGroup(dict[str, Any]):
    """A param group whose changes reach the kernels immediately."""

    def __init__(self, group: Mapping[str, Any], watcher: Any) -> None:
        """Create a group with the entries of ``group``; see :meth:`watch`."""
        super().__init__(group)
        self._tables: list[tuple[int, int]] = []
        self.watch(watcher)

    def watch(self, watcher: Any) -> None:
        """Set the object that receives changes; None makes the group a plain dict.

        ``watcher`` must have ``_check_option(key, value)`` and ``_group_changed(group)``.
        """
        self._watcher: Callable[[], Any] = (lambda: None) if watcher is None else weakref.ref(watcher)

    def keep(self, tables: Iterable[Tensor]) -> None:
        """Record the positions in ``params`` of the tables whose steps follow this group."""
        numbers = {id(table) for table in tables}
        self._tables = [(at, id(p)) for at, p in enumerate(self["params"]) if id(p) in numbers]

    def __setitem__(self, key: str, value: Any) -> None:
        """Check and set an option."""
        watcher = self._watcher()
        if watcher is not None:
            watcher._check_option(key, value)
        super().__setitem__(key, value)
        if watcher is not None:
            watcher._group_changed(self)

    def __delitem__(self, key: str) -> None:
        """Remove an entry; raise ValueError for an option of a step."""
        if key in _READ and self._watcher() is not None:
            raise ArgumentValueError(
                f"recfuse.optim: {key} cannot be removed from a param group, which kernels read. Set it."
            )
        super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        """Remove an entry and return it; raise ValueError for an option of a step."""
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        """Remove the last entry and return it; raise ValueError for an option of a step."""
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        """Raise ValueError, because a group has options of a step."""
        for key in list(self):
            del self[key]

    def belongs_to(self, watcher: Any) -> bool:
        """Return whether changes reach ``watcher``, and the tables of ``params`` have not changed."""
        is_same, params = self._watcher() is watcher, self["params"]
        for at, table in self._tables:  # a plain loop, for speed: each backward pass and each step call this
            is_same = is_same and at < len(params) and id(params[at]) == table
        return is_same

    def update(self, *mappings: Any, **options: Any) -> None:
        """Set several options."""
        for key, value in dict(*mappings, **options).items():
            self[key] = value

    def __ior__(self, other: Any) -> ParamGroup:  # type: ignore[override,misc]
        """Set several options."""
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Set an option if it is absent, and return it."""
        if key not in self:
            self[key] = default
        return self[key]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy to a plain dict, which an optimizer converts to a ParamGroup."""
        return dict, (dict(self),)


def refuse(prefix: str, options: Mapping[str, Any]) -> None:
    """Raise an error for unknown options, and for options of torch's optimizers that fused optimizers lack.

    Options of the computation have no effect here: a single call of a kernel makes the step of all tables.
    """
    for key, value in options.items():
        if key in HOW:
            continue
        if key not in OFF:
            raise ArgumentTypeError(f"{prefix}: there is no option {key!r}")
        check_off(prefix, key, value)


def check_off(prefix: str, key: str, value: Any) -> None:
    """Raise ValueError if an option that must be off is on."""
    if key == "differentiable" and value is None:
        return
    if key in OFF and (isinstance(value, Tensor) or value != OFF[key]):
        why = _WHY.get(key, "")
        raise ArgumentValueError(f"{prefix}: {key} is {value!r}; expected {OFF[key]!r}{why}")


def check_number(prefix: str, key: str, value: Any) -> None:
    """Raise an error unless a value of a group is a finite number that is not negative."""
    if isinstance(value, Tensor):
        raise ArgumentTypeError(
            f"{prefix}: {key} is a Tensor; expected a number, which the classes of lr_scheduler change too, "
            "since each change is written to the tables' device, where a CUDA graph reads it"
        )
    number, (least, end) = real(f"{prefix}: {key}", value), BOUNDS.get(key, (0.0, math.inf))
    if not number >= least:  # NaN is not, either
        raise ArgumentValueError(f"{prefix}: {key} is {value!r}; expected >= {least:g}")
    if number > _LARGEST or number >= end:
        raise ArgumentValueError(
            f"{prefix}: {key} is {value!r}; expected a finite float32, at most {_LARGEST:.8g}"
        )


def check_betas(prefix: str, value: Any) -> None:
    """Raise an error unless betas are two numbers in [0, 1)."""
    if isinstance(value, (str, Tensor)) or not isinstance(value, Iterable) or len(betas := list(value)) != 2:
        raise wrong_type(f"{prefix}: betas", value, "two numbers")
    for number, beta in enumerate(betas):
        least, end = BOUNDS[f"beta{number + 1}"]
        if isinstance(beta, Tensor) or not least <= real(f"{prefix}: betas[{number}]", beta) < end:
            raise ArgumentValueError(
                f"{prefix}: betas[{number}] is {beta!r}; expected a number in [{least:g}, {end:g})"
            )
        if np.float32(beta) == end:
            raise ArgumentValueError(
                f"{prefix}: betas[{number}] is {beta!r}, which is 1 in float32, so that no step would move a "
                "row; expected at most 1 - 2**-24"
            )


def check_groups(groups: Sequence[Any], count: int, watcher: Any, prefix: str) -> None:
    """Raise ValueError if the ``count`` param groups of tables, or their Parameters, were replaced.

    Such a change would not reach the kernels.
    """
    if len(groups) == count:
        for group in groups:
            if not (isinstance(group, ParamGroup) and group.belongs_to(watcher)):
                break
        else:
            return
    raise ArgumentValueError(
        f"{prefix}: param_groups was replaced, or one of its groups or its params, and nothing of that would "
        "reach the kernels that update the tables. Change the groups that are there (group['lr'] = ...), "
        "use add_param_group(), load_state_dict() or requires_grad_(False), or make another optimizer."
    )
