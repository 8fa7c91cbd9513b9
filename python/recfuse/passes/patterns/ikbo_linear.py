"""A linear layer over users' features, copied to candidates, and the features of the candidates.

Before::

    copied = x_user[cand_to_user]          # or index_select, repeat_interleave, tile, expand
    y      = linear(cat([copied, x_cand], 1), weight, bias)          # [B, Ku], [B, Kc]
    y      = matmul(weight, cat([copied, x_cand], 1))                # [B, Ku, N], [B, Kc, N]; or bmm, einsum

After::

    y      = recfuse::ikbo_linear(weight[:, :Ku], weight[:, Ku:], x_user, x_cand, cand_to_user, bias)

The weight is split by views. Row-wise functions between the copy and the cat are computed once per user.

Source: IKBO (in-kernel broadcast optimization), section 2, and its inference-time transformation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch.fx import Node

from recfuse.passes.graph.broadcasts import AUTOCAST, Broadcasts, Lift
from recfuse.passes.graph.nodes import arguments_of, aten, is_call, same, tensor_of, turned, value_of
from recfuse.passes.graph.pattern import GraphPattern, Match, Part
from recfuse.passes.graph.program import Program

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def find(program: Program) -> Iterator[Match]:
    """Yield layers whose input is a cat that contains a broadcast."""
    broadcasts = Broadcasts(program)
    for node in program.nodes:
        parts = _parts(node)
        if parts is None or not node.users:
            continue
        joined, weight, bias = parts
        lifts = [broadcasts.lift(item) for item in joined.args[0]]  # type: ignore[union-attr]
        lifts = [lift if lift is not None and (lift.dim, lift.block) == (0, 1) else None for lift in lifts]
        maps = [lift.map.key for lift in lifts if lift is not None]
        if not maps or (len(maps) == len(lifts) and len(set(maps)) == 1):
            continue  # no broadcast, or only one: the whole layer runs per user
        key = max(maps, key=maps.count)
        of_users = [lift is not None and lift.map.key == key for lift in lifts]
        lift = next(lift for lift in lifts if lift is not None and lift.map.key == key)
        part = [Part(program.name(weight), "linear over a broadcast")]
        if reason := _why_not(program, node, joined, weight, bias, of_users, lift):
            yield Match(part, why_not=reason)
            continue

        def apply(
            node: Node = node,
            joined: Node = joined,
            weight: Node = weight,
            bias: Any = bias,
            of_users: list[bool] = of_users,
            lift: Lift = lift,
        ) -> str:
            return _swap(program, broadcasts, node, joined, weight, bias, of_users, lift)

        yield Match(part, apply, key=node.name)


def _parts(node: Node) -> tuple[Node, Node, Any] | None:
    """Return the cat, the weight and the bias of a layer, or None."""
    bias, rank = None, 2
    if is_call(node, aten.linear):
        arguments = arguments_of(node)
        joined, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    elif is_call(node, aten.addmm):
        if len(node.args) > 3 or node.kwargs:
            return None
        bias, joined, right = node.args
        weight = turned(right)
    elif is_call(node, aten.einsum):
        equation = _EQUATIONS.get(_canonical(node.args[0]))
        if equation is None or len(node.args[1]) != 2:  # type: ignore[arg-type]
            return None
        (weight, joined), rank = node.args[1][:: -1 if equation else 1], 3  # type: ignore[index]
    elif is_call(node, aten.matmul, aten.mm, aten.bmm):
        left, right = node.args
        if (weight := turned(right)) is not None:
            joined = left
        else:
            weight, joined, rank = _matrix(left), right, 3
    else:
        return None
    if weight is None:
        return None
    if not is_call(joined, aten.cat) or value_of(joined).dim() != rank or value_of(weight).dim() != 2:
        return None
    dim = arguments_of(joined)["dim"] % rank  # type: ignore[arg-type]
    return (joined, weight, bias) if dim == 1 else None  # type: ignore[return-value]


_EQUATIONS = {"ab,cbd->cad": False, "abc,db->adc": True}
"""Equations of einsum, with letters in order of occurrence: whether the cat is the first operand."""


def _canonical(equation: Any) -> str:
    letters: dict[str, str] = {}
    spelled = str(equation).replace(" ", "")
    return "".join(
        letters.setdefault(character, chr(ord("a") + len(letters))) if character.isalpha() else character
        for character in spelled
    )


def _matrix(node: Any) -> Node | None:
    """Return the matrix that all samples share in ``weight`` or ``weight.expand(batch, -1, -1)``, or None."""
    wide = tensor_of(node)
    if wide is None or wide.dim() == 2:
        return None if wide is None else node  # type: ignore[no-any-return]
    if not is_call(node, aten.expand):
        return None
    narrow = node.args[0]
    if is_call(narrow, aten.unsqueeze) and arguments_of(narrow)["dim"] in (0, -3):
        narrow = narrow.args[0]
    matrix = value_of(narrow)
    is_matrix = matrix.dim() == 2 and all(map(same, matrix.shape, wide.shape[1:]))
    return narrow if is_matrix else None


def _why_not(
    program: Program,
    node: Node,
    joined: Node,
    weight: Node,
    bias: Any,
    of_users: list[bool],
    lift: Lift,
) -> str:
    tensors = [value_of(item) for item in (*joined.args[0], weight, bias) if item is not None]  # type: ignore[misc]
    if lift.map.why_not:
        return lift.map.why_not
    if len({tensor.dtype for tensor in tensors}) > 1 or tensors[0].dtype not in DTYPES:
        return f"inputs, weight and bias are {_types(tensors)}; expected a single floating-point dtype"
    if bias is not None and (
        value_of(bias).dim() != 1 or not same(value_of(bias).shape[0], tensors[-2].shape[0])
    ):
        return "bias has another shape; expected a number for each row of weight"
    if program.effects.has_autocast:
        return AUTOCAST
    if any(not isinstance(item.shape[1], int) for item in tensors[: len(joined.args[0])]):  # type: ignore[arg-type]
        return "the number of features is dynamic; expected a fixed number. Make dimension 0 alone dynamic."
    inputs = [item for item in (*joined.args[0], weight, bias) if isinstance(item, Node)]  # type: ignore[misc]
    if any(program.effects.is_written(item) for item in inputs):
        return "an input is written to in place"
    if program.effects.is_written(node):
        return "the result is written to in place"
    copied = (item for item, is_user in zip(joined.args[0], of_users, strict=True) if is_user)  # type: ignore[arg-type]
    return program.effects.why_not((joined, node, *copied))


def _types(tensors: list[Any]) -> str:
    return ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))


def _swap(
    program: Program,
    broadcasts: Broadcasts,
    node: Node,
    joined: Node,
    weight: Node,
    bias: Any,
    of_users: list[bool],
    lift: Lift,
) -> str:
    items: Sequence[Node] = joined.args[0]  # type: ignore[assignment]
    with program.at(node):
        users = [broadcasts.of_users(item) for item, is_user in zip(items, of_users, strict=True) if is_user]
        out = emit_linear(program, items, of_users, users, weight, bias, broadcasts.map_of(lift))
    program.replace(node, out)
    return f"recfuse::ikbo_linear, {sum(of_users)} of {len(items)} inputs for users alone"


def emit_linear(
    program: Program,
    items: Sequence[Node],
    of_users: Sequence[bool],
    users: Sequence[Node],
    weight: Node,
    bias: Any,
    index: Node,
    candidates: Sequence[Node] | None = None,
) -> Node:
    """Emit the call of a layer over the concatenated ``items``.

    ``users`` replace the items that are copies; ``candidates``, if given, replace the others.
    """
    columns: dict[bool, list[Node]] = {True: [], False: []}
    end = 0
    for is_user, run in groupby(zip(items, of_users, strict=True), lambda item: item[1]):
        start, end = end, end + sum(value_of(item).shape[-1 if candidates else 1] for item, _ in run)
        columns[is_user].append(program.emit(aten.slice.Tensor, weight, 1, start, end))
    candidate_items = [item for item, is_user in zip(items, of_users, strict=True) if not is_user]
    return program.emit(
        torch.ops.recfuse.ikbo_linear.default,
        _concatenated(program, columns[True]),
        _concatenated(program, columns[False]),
        _concatenated(program, users),
        _concatenated(program, candidate_items if candidates is None else candidates),
        index,
        bias,
    )


def _concatenated(program: Program, nodes: Sequence[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else program.emit(aten.cat.default, list(nodes), 1)


PATTERN = GraphPattern("ikbo_linear", 60, find)
