"""Attention of candidates to keys and values that were copied from their users.

Before::

    k, v = row-wise functions of history[cand_to_user]          # projections, heads, before or after the copy
    y    = scaled_dot_product_attention(q, k, v)                # [B, H, Sq, D], [B, Hkv, S, D]
    y    = softmax(q @ k^T * scale, -1) @ v                     # the same, or [B * H, Sq, D]

After::

    k, v = the same functions of history
    y    = recfuse::ikbo_attention(q^T, k^T, v^T, cand_to_user)^T

``torch.nn.MultiheadAttention`` has the first form if it returns no weights (``need_weights=False``), else the
second, which matches if the weights are unused. Attention with a mask or dropout and causal attention are
left.

Source: IKBO (in-kernel broadcast optimization), section 3, and its inference-time transformation.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from recfuse.passes.graph.attention import Attention, attention_at
from recfuse.passes.graph.broadcasts import AUTOCAST, Broadcasts, Lift
from recfuse.passes.graph.nodes import aten, same, value_of
from recfuse.passes.graph.pattern import GraphPattern, Match, Part
from recfuse.passes.graph.program import Program

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def find(program: Program) -> Iterator[Match]:
    """Yield attention whose keys and values come from the same broadcast."""
    broadcasts = Broadcasts(program)
    for node in program.nodes:
        attention = attention_at(node) if node.users else None
        if attention is None:
            continue
        q, k, v = (broadcasts.lift(item) for item in (attention.query, attention.key, attention.value))
        if k is None or v is None or (q is not None and q.map.key == k.map.key):
            continue
        part = [Part(node.name, "attention to a broadcast")]
        if reason := attention.why_not or _why_not(program, attention, k, v):
            yield Match(part, why_not=reason)
            continue

        def apply(attention: Attention = attention, lift: Lift = k) -> str:
            return _swap(program, broadcasts, attention, lift)

        yield Match(part, apply, key=node.name)


def _why_not(program: Program, attention: Attention, k: Lift, v: Lift) -> str:
    q, keys, values = tensors = [value_of(item) for item in (attention.query, attention.key, attention.value)]
    rank = q.dim()
    is_like = k.map.key == v.map.key and (k.dim, k.block) == (v.dim, v.block)
    if not is_like or k.dim != 0 or (rank > 3 and k.block > 1):
        return "keys and values are copied by different maps, or not along their first dimension"
    if any(
        t.dim() not in ((3, 4) if attention.is_by_hand else (4,)) or t.dtype not in _DTYPES for t in tensors
    ):
        shapes = ", ".join(f"{tensor.dtype} of {tensor.dim()} dimensions" for tensor in tensors)
        return f"inputs are {shapes}; expected [batch, heads, positions, dim] in float32, float16 or bfloat16"
    if len({tensor.dtype for tensor in tensors}) > 1:
        types = ", ".join(str(tensor.dtype) for tensor in tensors)
        return f"queries, keys and values are {types}; expected a single dtype"
    if not same(q.shape[-1], values.shape[-1]):
        return f"values have dim {values.shape[-1]}; expected {q.shape[-1]}, as of queries and keys"
    if attention.is_by_hand and rank == 4 and not all(same(q.shape[1], t.shape[1]) for t in (keys, values)):
        return f"keys have {keys.shape[1]} heads; expected {q.shape[1]}, as of queries"
    if not same(q.shape[0], keys.shape[0]):
        return "queries and keys differ in their batch"
    if k.map.why_not:
        return k.map.why_not
    if program.effects.has_autocast:
        return AUTOCAST
    return program.effects.why_not(
        (attention.result, *attention.inside, attention.query, attention.key, attention.value)
    )


def _swap(program: Program, broadcasts: Broadcasts, attention: Attention, lift: Lift) -> str:
    node = attention.result
    rank = value_of(node).dim()
    with program.at(node):
        k, v = (broadcasts.of_users(item) for item in (attention.key, attention.value))
        if attention.is_by_hand:
            k = program.emit(aten.transpose.int, k, -2, -1)
        items = [attention.query, k, v]
        if rank == 3:  # the heads are part of the batch dimension
            items = [_with_heads(program, item, lift.block) for item in items]
        q, k, v = (program.emit(aten.transpose.int, item, 1, 2) for item in items)
        call = q, k, v, broadcasts.map_of(lift), attention.scale
        out = program.emit(torch.ops.recfuse.ikbo_attention.default, *call)
        out = program.emit(aten.transpose.int, out, 1, 2)
        if rank == 3:
            out = program.emit(aten.flatten.using_ints, out, 0, 1)
        if value_of(node).is_contiguous():
            out = program.emit(aten.contiguous.default, out)
    program.replace(node, out)
    for item in attention.unused:
        program.forget(item)
    return "recfuse::ikbo_attention, keys and values for users alone"


def _with_heads(program: Program, node: Node, heads: int) -> Node:
    """View ``[batch * heads, positions, dim]`` as ``[batch, heads, positions, dim]``."""
    return program.emit(aten.unflatten.int, node, 0, [-1, heads])


PATTERN = GraphPattern("ikbo_attention", 70, find)
