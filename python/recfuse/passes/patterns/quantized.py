"""Lookups of FBGEMM's inference modules, as torch.export records them from TorchRec's quantised models.

Before, for the tables of one pooling::

    bounds_check_indices(rows_per_table, indices, offsets, mode, warning)       # writes to indices
    out = int_nbit_split_embedding_codegen_lookup_function(memory, ..., indices, offsets, ...)

After::

    out = recfuse::fused_embedding_bag_quantized([memory], [memory], features, indices, offsets, ..., stored)

The memory stays the program's constant or buffer. The description of its tables must be constants of the
program, which no user can change; it becomes two constants of the call. A bad index raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from recfuse._codes import INTEGERS
from recfuse.nn.quantized.rows import CODES
from recfuse.nn.quantized.stored import StoredTable, stored_features, stored_rows
from recfuse.nn.quantized.tbe import OUTPUTS, POOLINGS
from recfuse.ops import HAS_CUDA_KERNELS
from recfuse.passes.graph.nodes import arguments_of, is_named, tensor_of
from recfuse.passes.graph.pattern import GraphPattern, Match, Part
from recfuse.passes.graph.program import Program

_LOOKUP = "fbgemm::int_nbit_split_embedding_codegen_lookup_function"
_CHECK = "fbgemm::bounds_check_indices"
# Numbers of FBGEMM's SparseType and EmbeddingLocation.
_KINDS = {0: "float32", 1: "float16", 2: "int8", 3: "int4"}
_DEVICE, _HOST = 0, 3
_DESCRIPTION = "weights_placements", "weights_offsets", "weights_tys", "D_offsets"
_PARAMETERS = 4  # bytes: two halves


def find(program: Program) -> Iterator[Match]:
    """Yield each lookup."""
    for node in program.nodes:
        if is_named(node, _LOOKUP):
            yield _match(program, node)


def _match(program: Program, node: Node) -> Match:
    arguments = arguments_of(node)
    parts = [Part(program.name(arguments["dev_weights"]), "int_nbit lookup")]
    check = next((user for user in arguments["indices"].users if _checks(user, arguments)), None)
    if check is None:
        return Match(
            parts, why_not="rows of the tables are unknown, since no bounds_check_indices has these indices"
        )
    layout: dict[str, list[int]] = {}
    rows = arguments_of(check)["rows_per_table"]
    for name, item in (*((name, arguments[name]) for name in _DESCRIPTION), ("rows_per_table", rows)):
        values = program.constant_tensor(item)
        if values is None:
            return Match(
                parts,
                why_not=f"{name} is no constant of the program; expected a tensor that never changes",
            )
        layout[name] = values.tolist()
    if reason := _why_not(program, node, arguments, layout):
        return Match(parts, why_not=reason)

    def apply() -> str:
        tables = _tables(arguments, layout)
        with program.at(node):
            program.replace(node, _call(program, arguments, tables))
        program.drop(check)
        return f"{len(tables)} features of quantised tables in one call"

    return Match(parts, apply, key=node.name)


def _checks(user: Node, arguments: dict[str, Any]) -> bool:
    if not is_named(user, _CHECK):
        return False
    checked = arguments_of(user)
    return checked["indices"] is arguments["indices"] and checked["offsets"] is arguments["offsets"]


def _why_not(program: Program, node: Node, arguments: dict[str, Any], layout: dict[str, list[int]]) -> str:
    """Return why the call cannot replace a lookup, or ""."""
    memory, cache = tensor_of(arguments["dev_weights"]), tensor_of(arguments["lxu_cache_weights"])
    if memory is None or memory.dtype is not torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        return "dev_weights are no vector; expected contiguous uint8"
    if memory.device.type != "cpu" and not (memory.is_cuda and HAS_CUDA_KERNELS):
        return f"dev_weights are on {memory.device}, which has no kernels"
    if not program.weight_is_parameter(arguments["dev_weights"]):
        return "dev_weights are an input or a result; expected a constant or a buffer of the program"
    if any(placement not in (_DEVICE, _HOST) for placement in layout["weights_placements"]):
        return "a table has a UVM placement; expected DEVICE or HOST"
    if cache is not None and cache.numel():
        return "lxu_cache_weights is a cache; expected tables without a cache"
    if bad := [kind for kind in layout["weights_tys"] if kind not in _KINDS]:
        return f"a table has SparseType {bad[0]}; expected int8 (2), int4 (3), fp16 (1) or fp32 (0)"
    if arguments["pooling_mode"] not in POOLINGS:
        return f"pooling_mode is {arguments['pooling_mode']}; expected sum (0) or mean (1)"
    if arguments["output_dtype"] not in OUTPUTS:
        return (
            f"output_dtype is SparseType {arguments['output_dtype']}; expected fp32 (0), fp16 (1) or bf16 (5)"
        )
    if not isinstance(arguments["row_alignment"], int) or arguments["row_alignment"] < 1:
        return f"row_alignment is {arguments['row_alignment']}; expected a number"
    if memory.is_cuda and arguments["row_alignment"] % _PARAMETERS:
        return f"row_alignment is {arguments['row_alignment']}; expected a multiple of 4 on a GPU"
    for number, table in enumerate(_tables(arguments, layout)):
        first = min(table.first, table.parameters) if table.kind in CODES else table.first
        if first < 0 or first + table.rows * table.pitch > memory.numel():
            return f"table {number} ends beyond dev_weights; expected tables within {memory.numel()} bytes"
    return _why_not_lookups(program, node, arguments)


def _why_not_lookups(program: Program, node: Node, arguments: dict[str, Any]) -> str:
    weights = arguments["indice_weights"]
    if weights is not None and arguments["pooling_mode"]:
        return "indice_weights are given with mean pooling; expected sum"
    if weights is not None and program.may_train_later(weights):
        return "indice_weights have a gradient, which FBGEMM's lookup does not compute"
    lookups = [item for item in (arguments["indices"], arguments["offsets"], weights) if item is not None]
    device = tensor_of(arguments["dev_weights"]).device  # type: ignore[union-attr]
    tensors = [tensor_of(item) for item in lookups]
    if any(tensor is None or tensor.device != device for tensor in tensors):
        return f"indices, offsets or weights are on another device; expected {device}, as the tables"
    if any(tensor.dtype not in INTEGERS for tensor in tensors[:2]):  # type: ignore[union-attr]
        return "indices or offsets are no integers; expected int32 or int64"
    if program.effects.is_written(arguments["dev_weights"]):
        return "dev_weights are written to in place"
    for item in lookups:
        if other := [writer for writer in program.effects.writers_of(item) if not is_named(writer, _CHECK)]:
            return f"{item.name} is written to in place by {other[0].name}"
    return program.effects.why_not((node,))


def _tables(arguments: dict[str, Any], layout: dict[str, list[int]]) -> list[StoredTable]:
    """Return the table of each feature."""
    tables = []
    ends, alignment = layout["D_offsets"], arguments["row_alignment"]
    columns = zip(layout["weights_tys"], layout["weights_offsets"], layout["rows_per_table"], strict=True)
    for number, (kind, first, rows) in enumerate(columns):
        table = StoredTable(0, first, _KINDS[kind], rows, ends[number + 1] - ends[number], 0)
        is_codes = table.kind in CODES
        size = table.width + _PARAMETERS * is_codes
        table = table._replace(pitch=-(-size // alignment) * alignment)
        if is_codes:
            table = table._replace(first=first + _PARAMETERS, parameters=first, parameters_kind="float16")
        tables.append(table)
    return tables


def _call(program: Program, arguments: dict[str, Any], tables: list[StoredTable]) -> Node:
    mode = POOLINGS[arguments["pooling_mode"]]
    features, column = stored_features((number, table, mode) for number, table in enumerate(tables))
    memory = [arguments["dev_weights"]]
    weights = arguments["indice_weights"]
    return program.emit(
        torch.ops.recfuse.fused_embedding_bag_quantized.default,
        memory,
        memory,
        program.constant(features, "cpu"),
        arguments["indices"],
        arguments["offsets"],
        column,
        weights,
        str(OUTPUTS[arguments["output_dtype"]]).removeprefix("torch."),
        stored=program.constant(stored_rows(tables), "cpu"),
    )


PATTERN = GraphPattern("quantized", 55, find)
