"""Buffers with the rows of quantised tables: moves to devices, and entries of a ``state_dict``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recfuse.nn.memory import own_storage
from recfuse.nn.quantized.rows import CODE_BITS, CODES, Rows, write_floats

ENTRIES = ("weight", "parameters", "bits")
"""The entries of a quantised table; a table of floats has only the first."""


def move_buffers(module: torch.nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply a function of ``Module._apply`` to the bytes of buffers: dtypes are a part of the format."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer.view(torch.uint8)).view(buffer.dtype)


def save_rows(rows: Rows, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Write the entries of a table, whose names begin with ``prefix``."""
    destination[f"{prefix}weight"] = rows.data if keep_vars else own_storage(rows.data)
    if rows.kind in CODES:
        destination[f"{prefix}parameters"] = rows.parameters if keep_vars else own_storage(rows.parameters)
        bits = CODE_BITS[rows.kind]
        destination[f"{prefix}bits"] = torch.tensor(bits, dtype=torch.uint8, device="cpu")


def load_rows(
    rows: Rows, state_dict: dict[str, Any], prefix: str, missing_keys: list[str], error_msgs: list[str]
) -> None:
    """Copy the entries of a table into its rows; floats are quantised."""
    weight, parameters, bits = (state_dict.get(prefix + name) for name in ENTRIES)
    if weight is None:
        missing_keys.append(f"{prefix}weight")
    elif message := _load(f"{prefix}weight", rows, weight, parameters, bits):
        error_msgs.append(message)


def _load(key: str, rows: Rows, weight: Any, parameters: Any, bits: Any) -> str | None:
    """Copy an entry into rows; return the reason if it has another format."""
    expected = f"{rows.data.dtype} {list(rows.data.shape)}"
    if not isinstance(weight, Tensor):
        return f"recfuse: {key} is {type(weight).__name__}; expected {expected}"
    found = f"{weight.dtype} {list(weight.shape)}"
    if rows.data.is_meta and not weight.is_meta:
        return f"recfuse: {key} has a table on meta; expected memory. Call to_empty(device=...) first."
    if weight.is_floating_point() and weight.shape == (rows.data.shape[0], rows.dim):
        try:
            with torch.no_grad():
                write_floats(weight, rows)
        except (TypeError, ValueError) as error:
            return f"recfuse: {key} cannot be quantised: {error}"
        return None
    if rows.kind not in CODES:
        return f"recfuse: {key} is {found}; expected {expected}"
    if isinstance(bits, Tensor) and not bits.is_meta and int(bits) != CODE_BITS[rows.kind]:
        found = f"int{int(bits)} {list(weight.shape)}"
        return f"recfuse: {key} is {found}; expected {rows.kind} rows of {rows.dim} columns"
    if weight.dtype != torch.uint8 or weight.shape != rows.data.shape:
        return f"recfuse: {key} is {found}; expected {expected}, or floats of {rows.dim} columns"
    if not isinstance(parameters, Tensor) or parameters.shape != rows.parameters.shape:
        shape = list(parameters.shape) if isinstance(parameters, Tensor) else "no tensor"
        return f"recfuse: {key} has parameters {shape}; expected {list(rows.parameters.shape)}"
    if parameters.dtype != rows.parameters.dtype:
        return f"recfuse: {key} has parameters of {parameters.dtype}; expected {rows.parameters.dtype}"
    with torch.no_grad():
        rows.data.copy_(weight)
        rows.parameters.copy_(parameters)
    return None
