"""``hash_at``: integers hashed by XXH64 in torch's own operators, as ``EmbeddingColumns.to_torch`` does.

The computation must match node for node: a hash by other operators has other values. The template for the
comparison is recorded from the functions of ``recfuse.nn.columns.reference``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from recfuse.nn.columns.reference_values import hash_integers, scaled
from recfuse.passes.graph.nodes import arguments_of, operator_of, tensor_of

_BUCKETS = 1_000_003
"""The number of buckets in the template; a graph has its own number at this position."""
_OF_INT64 = 2**64


class Hash(NamedTuple):
    """``XXH64(words, seed) * buckets / 2^64``."""

    words: tuple[Node, ...]  # int64 tensors of the same shape; a cross has two
    buckets: int
    seed: int  # as int64 with the same bits
    nodes: tuple[Node, ...]  # nodes of the computation, words included


def hash_at(node: Node) -> Hash | None:
    """Return the hash whose result is ``node``, or None."""
    if str(getattr(operator_of(node), "overloadpacket", "")) != "aten.__rshift__":
        return None
    for count in (1, 2):
        template = _template(count)
        bound: dict[Any, Any] = {}
        if _is_alike(template.result, node, template, bound):
            words = tuple(bound[word] for word in template.words)
            buckets = bound["buckets"]
            if not 1 <= buckets < 2**31 or any(not _is_word(word, node) for word in words):
                return None
            seed = (bound["start"] - template.start) % _OF_INT64
            nodes = tuple(item for item in bound.values() if isinstance(item, Node))
            return Hash(words, buckets, seed - _OF_INT64 if seed >= 2**63 else seed, nodes)
    return None


def _is_word(word: Node, node: Node) -> bool:
    a, b = tensor_of(word), tensor_of(node)
    return a is not None and b is not None and a.dtype is torch.int64 and a.dim() == b.dim()


class _Template(NamedTuple):
    words: tuple[Node, ...]
    result: Node
    start: int  # initial value of a hash with seed 0


@functools.cache
def _template(count: int) -> _Template:
    def hashed(*words: torch.Tensor) -> torch.Tensor:
        return scaled(hash_integers(words, 0), _BUCKETS)

    with unset_fake_temporarily(), disable_proxy_modes_tracing(), torch.no_grad():
        words = [torch.arange(3) for _ in range(count)]
        graph = make_fx(hashed, tracing_mode="fake", pre_dispatch=True)(*words).graph
    nodes = list(graph.nodes)
    start = next(node for node in nodes if "full_like" in str(node.target)).args[1]
    return _Template(tuple(nodes[:count]), nodes[-1].args[0], start)  # type: ignore[arg-type]


def _is_alike(expected: Any, actual: Any, template: _Template, bound: dict[Any, Any]) -> bool:
    """Return whether an argument of the template matches an argument of a graph.

    ``bound`` maps nodes of the template to nodes of the graph, and the names of its numbers to their values.
    """
    if not isinstance(expected, Node):
        if type(expected) is not type(actual):
            return False
        name = "buckets" if expected == _BUCKETS else "start" if expected == template.start else None
        return bool(expected == actual) if name is None else bound.setdefault(name, actual) == actual
    if expected in bound:
        return bound[expected] is actual
    if not isinstance(actual, Node):
        return False
    if expected.op != "placeholder":
        if expected.op != actual.op or expected.target is not actual.target:
            return False
        expected_arguments, actual_arguments = arguments_of(expected), arguments_of(actual)
        names = [name for name in expected_arguments if name != "pin_memory"]
        if not all(
            _is_alike(expected_arguments[name], actual_arguments[name], template, bound) for name in names
        ):
            return False
    bound[expected] = actual
    return True
