"""The state_dict of a packed module, with an entry for each table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse.nn.memory import own_storage
from recfuse.nn.packed.layout import TableSpec, is_sharded, table_rows
from recfuse.ops.updates import check_finished, unfinished


def table_keys(module: Any, prefix: str) -> list[str]:
    """Return the key of each table, in order."""
    return [f"{prefix}{spec.name}.weight" for spec in module.layout.tables]


def save(module: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Replace the packed matrices in a state_dict by tables, over the same memory.

    Each table has a separate storage; tied tables share a storage. With ``keep_vars`` the entries are plain
    views with gradients.
    """
    if unfinished:
        check_finished(module.packed_weights(), "state_dict()")
    for name in module.layout.parameter_names:
        destination.pop(prefix + name, None)
    matrices, entries = module.packed_weights(), {}
    for key, spec in zip(table_keys(module, prefix), module.layout.tables, strict=True):
        rows = table_rows(spec, matrices[spec.matrix])
        if not keep_vars:
            place = spec.matrix, spec.first_row, spec.num_embeddings
            rows = entries[place] = entries[place].detach() if place in entries else own_storage(rows)
        destination[key] = rows


def load(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    error_msgs: list[str],
) -> list[str]:
    """Copy tables into their rows, and return the keys of all tables, present or not.

    With ``assign`` the matrices take device and dtype of the loaded tensors.
    """
    keys = table_keys(module, prefix)
    loaded, wrong = [], False
    for key, spec in zip(keys, module.layout.tables, strict=True):
        if key not in state_dict:
            continue
        if message := _why_not(key, state_dict[key], (spec.num_embeddings, spec.embedding_dim)):
            error_msgs.append(message)
            wrong = True
        else:
            loaded.append((key, spec))
    matrices = module.packed_weights()
    replaced: dict[str, Parameter] = {}
    if local_metadata.get("assign_to_params_buffers", False) and not wrong:
        replaced = _of_new_forms(module, keys, state_dict, error_msgs)
        names = module.layout.parameter_names
        matrices = [replaced.get(name, old) for name, old in zip(names, matrices, strict=True)]
    with torch.no_grad():
        for key, spec in loaded:
            copy_rows(spec, matrices[spec.matrix], state_dict[key])
    # A single assignment of complete Parameters: a call of another thread reads the dictionary once.
    if replaced:
        module._parameters = module._store.parameters = {**module._parameters, **replaced}
    return keys


def copy_rows(spec: TableSpec, matrix: Tensor, value: Any) -> None:
    """Copy a table into its rows.

    Rows of a matrix that ``fully_shard`` has sharded are no view: each process copies its own rows.
    """
    if not is_sharded(matrix):
        table_rows(spec, matrix).copy_(value)
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    (rows, columns), (row, column) = compute_local_shape_and_global_offset(
        matrix.shape, matrix.device_mesh, matrix.placements
    )
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    first, end = max(spec.first_row, row), min(spec.first_row + spec.num_embeddings, row + rows)
    if first < end:
        local_rows = full[first - spec.first_row : end - spec.first_row, column : column + columns]
        matrix.to_local()[first - row : end - row].copy_(local_rows)


def _why_not(key: str, value: Any, shape: tuple[int, int]) -> str | None:
    if not isinstance(value, Tensor):
        return (
            f'While copying the parameter named "{key}", expected a torch.Tensor but received {type(value)}'
        )
    if tuple(value.shape) != shape:
        return (
            f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, the shape "
            f"in current model is {torch.Size(shape)}."
        )
    return None


def _of_new_forms(
    module: Any, keys: list[str], state_dict: dict[str, Any], error_msgs: list[str]
) -> dict[str, Parameter]:
    """Return new packed matrices, without values, for tables with another device or dtype."""
    new_matrices = {}
    for number, name in enumerate(module.layout.parameter_names):
        table_keys = [
            key for key, spec in zip(keys, module.layout.tables, strict=True) if spec.matrix == number
        ]
        values = [state_dict[key] for key in table_keys if key in state_dict]
        old = getattr(module, name)
        forms = {(value.dtype, value.device) for value in values}
        if forms <= {(old.dtype, old.device)}:
            continue
        if len(forms) > 1 or len(values) < len(table_keys):
            error_msgs.append(
                f"recfuse: assign=True for {name}, the packed matrix of {table_keys[0]} and "
                f"{len(table_keys) - 1} more tables, found {len(values)} entries with "
                f"{sorted(f'{dtype} on {device}' for dtype, device in forms)}; expected all entries with one "
                "dtype and device"
            )
            continue
        ((dtype, device),) = forms
        data = torch.zeros(old.shape, dtype=dtype, device=device)
        new_matrices[name] = Parameter(data, requires_grad=old.requires_grad)
    return new_matrices
