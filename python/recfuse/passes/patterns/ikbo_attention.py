"""Attention of candidates to keys and values that were copied from their users.

Before::

    k, v = row by row of history[cand_to_user]                  # projections, heads, before or after the copy
    y    = scaled_dot_product_attention(q, k, v)                # [B, H, Sq, D], [B, Hkv, S, D]

After::

    k, v = the same of history
    y    = recfuse::ikbo_attention(q^T, k^T, v^T, cand_to_user)^T

``torch.nn.MultiheadAttention`` is such a call where it needs no weights (``need_weights=False``). A mask,
dropout and causal attention are left.

Source: IKBO (in-kernel broadcast optimization), section 3, and its inference-time transformation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from recfuse.passes.graph.broadcasts import AUTOCAST, Broadcasts, Lift
from recfuse.passes.graph.nodes import arguments_of, aten, is_call, same, value_of
from recfuse.passes.graph.pattern import GraphPattern, Match, Part
from recfuse.passes.graph.program import Program

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def find(program: Program) -> Iterator[Match]:
    """Attention whose keys and values are one broadcast."""
    broadcasts = Broadcasts(program)
    for node in program.nodes:
        if not is_call(node, aten.scaled_dot_product_attention) or not node.users:
            continue
        given = arguments_of(node)
        q, k, v = (broadcasts.lift(given[name]) for name in ("query", "key", "value"))
        if k is None or v is None or (q is not None and q.map.key == k.map.key):
            continue
        part = [Part(node.name, "attention to a broadcast")]
        if reason := _why_not(program, node, given, k, v):
            yield Match(part, why_not=reason)
            continue

        def apply(node: Node = node, given: dict[str, Any] = given, lift: Lift = k) -> str:
            return _swap(program, broadcasts, node, given, lift)

        yield Match(part, apply, key=node.name)


def _why_not(program: Program, node: Node, given: dict[str, Any], k: Lift, v: Lift) -> str:
    tensors = [value_of(given[name]) for name in ("query", "key", "value")]
    if k.map.key != v.map.key or (k.dim, k.block, v.dim, v.block) != (0, 1, 0, 1):
        return "keys and values are copied by different maps, or along another dimension than the first"
    if given["attn_mask"] is not None or given["is_causal"]:
        return "it has a mask, for which there is no kernel; pass none where all keys of a user count"
    if given["dropout_p"] != 0:
        return "it has dropout, for which there is no kernel; dropout_p must be 0: model.eval()"
    if any(tensor.dim() != 4 or tensor.dtype not in _DTYPES for tensor in tensors):
        shapes = ", ".join(f"{tensor.dtype} of {tensor.dim()} dimensions" for tensor in tensors)
        return f"{shapes}; must be [batch, heads, positions, dim] in float32, float16 or bfloat16"
    if len({tensor.dtype for tensor in tensors}) > 1:
        types = ", ".join(str(tensor.dtype) for tensor in tensors)
        return f"queries, keys and values are {types}, must be of one dtype"
    if not same(tensors[0].shape[3], tensors[2].shape[3]):
        return (
            f"values of dim {tensors[2].shape[3]}, must be {tensors[0].shape[3]} as that of queries and keys"
        )
    if not given["enable_gqa"] and not same(tensors[0].shape[1], tensors[1].shape[1]):
        return (
            f"keys of {tensors[1].shape[1]} heads and queries of {tensors[0].shape[1]}; pass enable_gqa=True"
        )
    if not same(tensors[0].shape[0], tensors[1].shape[0]):
        return "queries of another batch than keys"
    scale = given["scale"]
    if scale is not None and not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
        return f"the scale is {scale}, must be a positive number"
    if k.map.why_not:
        return k.map.why_not
    if program.effects.has_autocast:
        return AUTOCAST
    return program.effects.why_not((node, *node.all_input_nodes))


def _swap(program: Program, broadcasts: Broadcasts, node: Node, given: dict[str, Any], lift: Lift) -> str:
    with program.at(node):
        k, v = (broadcasts.of_users(given[name]) for name in ("key", "value"))
        q, k, v = (program.emit(aten.transpose.int, item, 1, 2) for item in (given["query"], k, v))
        call = q, k, v, broadcasts.map_of(lift), given["scale"]
        found = program.emit(torch.ops.recfuse.ikbo_attention.default, *call)
        found = program.emit(aten.transpose.int, found, 1, 2)
        if value_of(node).is_contiguous():
            found = program.emit(aten.contiguous.default, found)
    program.replace(node, found)
    return "recfuse::ikbo_attention, keys and values for users alone"


PATTERN = GraphPattern("ikbo_attention", 70, find)
