"""The tables of FBGEMM's ``IntNBitTableBatchedEmbeddingBagsCodegen`` (TBE), read where they lie.

A TBE is read by its attributes, so this file does not import FBGEMM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recfuse.nn.quantized.rows import CODES
from recfuse.nn.quantized.stored import StoredTable

_KINDS = {"fp32": "float32", "fp16": "float16", "int8": "int8", "int4": "int4"}
OUTPUTS = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}
"""Output dtypes by the number of FBGEMM's SparseType."""
POOLINGS = {0: "sum", 1: "mean"}
"""Modes by the number of FBGEMM's PoolingMode."""
_READ = "HOST", "DEVICE"
_PARAMETERS = 4  # bytes: two halves


def memory_name(tbe: Any) -> str:
    """Return the attribute with the memory of the tables, as the module's own call chooses it."""
    return "weights_host" if tbe.host_size > 0 else "weights_dev"


def why_not_readable(tbe: Any) -> str | None:
    """Return why the tables cannot be read where they lie, or None."""
    if type(tbe).__name__ != "IntNBitTableBatchedEmbeddingBagsCodegen":
        return (
            f"tables are in a {type(tbe).__name__}; expected IntNBitTableBatchedEmbeddingBagsCodegen. Use "
            "tables without use_virtual_table."
        )
    if not tbe.weight_initialized:
        return "tables have no memory yet. Call initialize_weights() of their module, then swap."
    remapped = tbe.index_remappings_array.numel() or tbe.index_remapping_hash_table.numel()
    if remapped or tbe.index_remapping_hash_table_cpu is not None:
        return "rows are pruned (index_remapping is set); expected every row. Make the model without pruning."
    for name, _, _, kind, placement in tbe.embedding_specs:
        if placement.name not in _READ:
            return (
                f"table {name!r} has placement {placement.name}; expected {' or '.join(_READ)}, since UVM "
                "memory and its cache have no kernels. Place them on the device."
            )
        if kind.value not in _KINDS:
            return (
                f"table {name!r} has dtype {kind.value}; expected int8, int4, fp16 or fp32. Use "
                "per_table_weight_dtype of the QuantConfig."
            )
        if kind.value in CODES and tbe.scale_bias_size_in_bytes != _PARAMETERS:
            return (
                f"table {name!r} has {tbe.scale_bias_size_in_bytes} bytes of scale and bias; expected "
                f"{_PARAMETERS}, two halves"
            )
    memory = getattr(tbe, memory_name(tbe))
    if memory.device.type not in ("cpu", "cuda"):
        return f"tables are on {memory.device}; expected cpu or cuda"
    if memory.is_cuda:
        for table in tables_of(tbe, 0):
            if (table.first | table.pitch | table.parameters) % _PARAMETERS and table.kind in CODES:
                return (
                    f"rows are {table.pitch} bytes apart; expected a multiple of 4 on a GPU. Set "
                    "quant_prep_customize_row_alignment(model, types, 16)."
                )
    return None


def tables_of(tbe: Any, number: int) -> list[StoredTable]:
    """Return the tables of a module whose memory has this number."""
    memory: Tensor = getattr(tbe, memory_name(tbe))
    tables = []
    splits = tbe.split_embedding_weights_with_scale_bias(split_scale_bias_mode=0)
    for (_, rows, dim, kind, _), (view, _, _) in zip(tbe.embedding_specs, splits, strict=True):
        first = view.storage_offset() - memory.storage_offset()
        table = StoredTable(number, first, _KINDS[kind.value], rows, dim, view.shape[1])
        if table.kind in CODES:
            parameters_follow = tbe.reverse_qparam
            table = table._replace(
                first=first if parameters_follow else first + _PARAMETERS,
                parameters=first + table.width if parameters_follow else first,
                parameters_kind="float16",
            )
        tables.append(table)
    return tables
