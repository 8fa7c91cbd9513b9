"""The states of a ``state_dict``, with all checks before any change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from recfuse._arguments import integer, real, wrong_type
from recfuse.errors import ArgumentTypeError, ArgumentValueError

_MOST_STEPS = 2**63 - 1


def states_by_parameter(
    state_dict: Mapping[str, Any], groups: Iterable[Mapping[str, Any]], prefix: str
) -> dict[Any, Mapping[str, Any]]:
    """Return the states in a ``state_dict``, without torch's rounding for half-precision Parameters."""
    saved = state_dict.get("state", {})
    if not isinstance(saved, Mapping):
        raise wrong_type(f"{prefix}: state in the state_dict", saved, "a dict")
    numbers = chain.from_iterable(group["params"] for group in state_dict.get("param_groups", ()))
    parameters = chain.from_iterable(group["params"] for group in groups)
    return {parameter: saved.get(number, {}) for parameter, number in zip(parameters, numbers, strict=False)}


def check_state(state: Any, names: Sequence[str], shape: Sequence[int], prefix: str) -> None:
    """Raise an error unless a state of a Parameter is empty, or has the tensors ``names`` of ``shape``.

    A state with these tensors must also have a number of steps. ``[rows, 1]`` may be ``[rows]``.
    """
    if not isinstance(state, Mapping):
        raise wrong_type(f"{prefix}: the state of a Parameter", state, "a dict")
    present = {name for name, value in state.items() if value is not None}
    if not names:  # torch's SGD does not read it with a momentum of 0
        present.discard("momentum_buffer")
    if present and present - {"step"} != set(names):
        raise ArgumentValueError(
            f"{prefix}: the state of a Parameter has {sorted(map(str, present))}; expected "
            f"{sorted([*names, 'step'])}, since this is the state of another optimizer"
        )
    for name in present:
        if name == "step":
            check_step(state[name], prefix)
        else:
            _check_tensor(state[name], name, list(shape), prefix)


def check_step(value: Any, prefix: str) -> int:
    """Return the number of steps in a state as an int; raise unless it is a whole number in range."""
    prefix = f"{prefix}: step in the state of a Parameter"
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.is_meta or value.dtype == torch.bool:
            kind = f"a {value.dtype} Tensor of shape {list(value.shape)} on {value.device}"
            raise ArgumentTypeError(f"{prefix} is {kind}; expected one real number")
        value = value.item()
    if isinstance(value, float) or not hasattr(value, "__index__"):
        number = real(prefix, value)
        if not math.isfinite(number) or number != math.floor(number):
            raise ArgumentValueError(f"{prefix} is {number}; expected a whole number from 0 to {_MOST_STEPS}")
        value = int(number)
    return integer(prefix, value, 0, _MOST_STEPS)


def _check_tensor(value: Any, name: str, shape: list[int], prefix: str) -> None:
    prefix = f"{prefix}: {name} in the state of a Parameter"
    if not isinstance(value, Tensor):
        raise wrong_type(prefix, value, "a Tensor")
    if not value.is_floating_point() or value.layout is not torch.strided or value.is_meta:
        kind = f"{value.dtype}, {value.layout}, on {value.device}"
        raise ArgumentTypeError(
            f"{prefix} is {kind}; expected a real, floating-point, strided tensor with memory"
        )
    if list(value.shape) != shape and [*value.shape, 1] != shape:
        raise ArgumentValueError(f"{prefix} has shape {list(value.shape)}; expected {shape}")
