"""``Attention``: attention in a graph, by torch's operator or by hand: ``softmax(q @ k^T * scale) @ v``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch.fx import Node

from recfuse.passes.graph.nodes import (
    arguments_of,
    aten,
    is_call,
    may_write,
    operator_of,
    same,
    value_of,
)

_PRODUCTS = (aten.matmul, aten.bmm)
_WEIGHTS_USED = (
    "the weights of the attention are used, which the kernel does not return. Pass need_weights=False to a "
    "MultiheadAttention."
)


@dataclass(frozen=True)
class Attention:
    """Attention of ``[batch, heads, positions, dim]``; by hand also ``[batch * heads, positions, dim]``."""

    result: Node
    query: Node
    key: Node  # by hand [..., dim, positions]
    value: Node
    scale: float | None  # None: 1 / sqrt(dim)
    is_by_hand: bool = False
    why_not: str = ""
    inside: tuple[Node, ...] = ()  # nodes between the arguments and the result
    unused: tuple[Node, ...] = field(default=(), repr=False)  # unread results of `inside`


def attention_at(node: Node) -> Attention | None:
    """Return the attention whose result is ``node``, or None."""
    if is_call(node, aten.scaled_dot_product_attention):
        arguments = arguments_of(node)
        return Attention(
            node,
            arguments["query"],
            arguments["key"],
            arguments["value"],
            arguments["scale"],
            why_not=_why_not(node),
        )
    return _by_hand(node) if is_call(node, *_PRODUCTS) else None


def _why_not(node: Node) -> str:
    arguments = arguments_of(node)
    if arguments["attn_mask"] is not None or arguments["is_causal"]:
        return "attn_mask or is_causal is set, and no kernel has a mask. Omit the mask if all keys count."
    if arguments["dropout_p"] != 0:
        return f"dropout_p is {arguments['dropout_p']}; expected 0. Call model.eval()."
    scale = arguments["scale"]
    if scale is not None and not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
        return f"scale is {scale}; expected a positive number"
    q, k = (value_of(arguments[name]) for name in ("query", "key"))
    if not arguments["enable_gqa"] and q.dim() == k.dim() == 4 and not same(q.shape[1], k.shape[1]):
        return f"keys have {k.shape[1]} heads, queries {q.shape[1]}. Pass enable_gqa=True."
    return ""


def _by_hand(node: Node) -> Attention | None:
    weights, value = node.args[:2]
    inside, softmax = [weights], weights
    while is_call(softmax, aten.dropout) and arguments_of(softmax)["train"] is False:  # type: ignore[arg-type]
        softmax = softmax.args[0]  # type: ignore[union-attr]
        inside.append(softmax)
    if not is_call(softmax, aten.softmax, aten._softmax) or not isinstance(value, Node):
        return None
    scores, rank = softmax.args[0], value_of(softmax).dim()  # type: ignore[union-attr]
    if arguments_of(softmax)["dim"] % rank != rank - 1 or value_of(softmax).dtype != value_of(scores).dtype:  # type: ignore[arg-type]
        return None
    scale = 1.0
    while (factor := _factor(scores)) is not None:  # type: ignore[arg-type]
        inside.append(scores)
        scale, scores = scale * factor, scores.args[0]  # type: ignore[union-attr]
    if not is_call(scores, *_PRODUCTS) or rank not in (3, 4):
        return None
    query, key = scores.args[:2]  # type: ignore[union-attr]
    nodes = (*inside, scores)
    if not isinstance(query, Node) or not isinstance(key, Node):
        return None
    if any(value_of(item).dim() != rank for item in (query, key, value)):
        return None
    unused = tuple(leaf for item in nodes for user in item.users for leaf in _unused(user))  # type: ignore[union-attr]
    matched = {node, *nodes}
    is_used = any(user not in matched and not _unused(user) for item in nodes for user in item.users)  # type: ignore[union-attr]
    why_not = _WEIGHTS_USED if is_used else ""
    if not 0 < scale < math.inf:
        why_not = f"scale is {scale}; expected a positive number"
    return Attention(node, query, key, value, scale, True, why_not, nodes, unused)  # type: ignore[arg-type]


def _factor(node: Node) -> float | None:
    """Return the number by which a node multiplies, or None."""
    if node.target not in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        return None
    number = node.args[1]
    if not isinstance(number, (int, float)) or isinstance(number, bool) or not number:
        return None
    return 1 / number if is_call(node, aten.div) else float(number)


def _unused(node: Node) -> tuple[Node, ...]:
    """Return the last nodes computed from a node if all operators are pure and no result is read, else ()."""
    if node.op != "call_function" or node.is_impure():
        return ()
    called = operator_of(node)
    if called is None or may_write(called, node.args, node.kwargs):
        return ()
    if not node.users:
        return (node,)
    leaves_of_users = [_unused(user) for user in node.users]
    return tuple(leaf for leaves in leaves_of_users for leaf in leaves) if all(leaves_of_users) else ()
