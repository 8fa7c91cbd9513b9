"""``Program``: a graph of ATen operators that patterns read and rewrite."""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from recfuse.errors import ArgumentValueError
from recfuse.passes.graph.effects import (
    Effects,
    draws,
    is_fresh_constant,
    receives_gradient,
    regions_without_gradients,
)
from recfuse.passes.graph.nodes import (
    arguments_of,
    aten,
    is_call,
    may_write,
    operator_of,
    tensor_of,
    value_of,
)

_COPIES = (
    aten.lift_fresh_copy, aten.lift_fresh, aten.detach, aten.detach_, aten.clone, aten.alias, aten.to,
    aten._to_copy,
)  # fmt: skip
_SPELLINGS = {
    aten.concat.default: aten.cat.default,
    aten.concatenate.default: aten.cat.default,
    aten.broadcast_to.default: aten.expand.default,
}
"""Operators that are others by another name, of the same arguments."""
_NEEDED = "ATen operators and fake values, as torch.export and recfuse.backend() record them"


class Program:
    """A graph of ATen operators with fake values in ``node.meta["val"]``: what torch.export gives, and what
    ``recfuse.backend`` makes of a graph of torch.compile.

    New nodes may be made at any place: ``finish`` brings all nodes into an order that keeps every effect.
    Sizes are those of torch's ShapeEnv; nothing here guards on one.
    """

    is_guarded = False
    """Whether torch compiles again where a frozen weight is to be trained."""
    compares_sizes = False
    """Whether torch compares sizes that the ShapeEnv knows to be equal before each call of the program."""

    def __init__(
        self,
        module: GraphModule,
        user_inputs: Iterable[Node] | None = None,
        same_memory: Iterable[Iterable[Node]] = (),
    ) -> None:
        """Reads a graph. Raises ValueError where it is no such program.

        ``same_memory``: inputs whose tensors share memory, whatever their fake values say.
        """
        self.module, self.graph = module, module.graph
        nodes = list(self.graph.nodes)
        for node in nodes:
            _spell(node)
            if node.op in ("call_module", "call_method"):
                raise _unreadable(f"{node.name} calls a {node.op.removeprefix('call_')}")
            called = operator_of(node)
            if called is not None and called._schema.returns and "val" not in node.meta:
                raise _unreadable(f"{node.name} has no value")
        self.mode = torch._guards.detect_fake_mode([node.meta.get("val") for node in nodes])
        if self.mode is None:
            raise _unreadable("it has no fake values")
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self._name_attributes(nodes)
        inputs = placeholders if user_inputs is None else list(user_inputs)
        self.user_inputs = set(inputs)
        self.effects = Effects(self.graph, inputs, same_memory)
        self.changed = False
        self.gradients = torch.is_grad_enabled()
        self._no_gradients = regions_without_gradients(self.graph, self.effects.region, self.gradients)
        self._order: dict[Node, tuple[float, int]] = {node: (at, 0) for at, node in enumerate(nodes)}
        self._numbers = itertools.count(1)
        self._cursor: Node | None = None
        self._gradient_nodes: set[Node] | None = None
        self._random_nodes: set[Node] | None = None
        self._sizes: dict[tuple[Node, int], Node] = {}
        self._dead: list[Node] = []
        self._new: list[Node] = []
        self._constants = 0

    def _name_attributes(self, nodes: list[Node]) -> None:
        """Gives tensors of the module that nodes read a fake value."""
        for node in nodes:
            if node.op == "get_attr" and "val" not in node.meta:
                found: Any = self.module
                for name in str(node.target).split("."):
                    found = getattr(found, name)
                if isinstance(found, Tensor):
                    node.meta["val"] = self.mode.from_tensor(found, static_shapes=True)

    # ---- what it is

    @property
    def nodes(self) -> Iterator[Node]:
        """The nodes, in order, except for those that a rewrite has taken away by then."""
        return (node for node in list(self.graph.nodes) if not node._erased)

    def name(self, node: Node) -> str:
        """What a report calls a node: a Parameter by its own name."""
        return str(node.meta.get("recfuse_name") or (node.target if node.op == "get_attr" else node.name))

    def weight_is_parameter(self, node: Node) -> bool:
        """Whether a node is a Parameter or a buffer of the model."""
        if node.op == "get_attr" or node.meta.get("recfuse_is_parameter"):
            return True
        return node.op == "placeholder" and node not in self.user_inputs

    def trains(self, node: Node) -> bool:
        """Whether a weight may be given a gradient."""
        given, tensor = node.meta.get("recfuse_requires_grad"), tensor_of(node)
        return bool(tensor is not None and tensor.requires_grad if given is None else given)

    def may_train(self, node: Node) -> bool:
        """Whether a call may have to give a tensor a gradient: not under torch.no_grad()."""
        return self.gradients and node in self._trained()

    def may_train_later(self, node: Node) -> bool:
        """The same, or an input may be given a gradient later: of a program that has trained weights, and is
        not compiled again for other inputs.
        """
        return self.may_train(node) or (not self.is_guarded and self.gradients and bool(self._trained()))

    def receives_gradient(self, node: Node) -> bool:
        """Whether a gradient may come back to what a node returns, as its users are now."""
        return receives_gradient(node, self.effects.region, self._no_gradients)

    def _trained(self) -> set[Node]:
        """The nodes that depend on a tensor with a gradient."""
        if self._gradient_nodes is None:
            self._gradient_nodes = found = set()
            for node in self.graph.nodes:
                is_given = node.op in ("placeholder", "get_attr")
                if self.trains(node) if is_given else any(item in found for item in node.all_input_nodes):
                    found.add(node)
        return self._gradient_nodes

    def constant_value(self, node: Node) -> Tensor | None:
        """The values of a literal, ``torch.tensor([...])``: a constant that no user can change."""
        dtype, is_literal = getattr(value_of(node), "dtype", None), False
        while is_call(node, *_COPIES) and not self.effects.is_written(node):
            is_literal = is_call(node, aten.lift_fresh_copy, aten.lift_fresh)
            node = node.args[0]  # type: ignore[assignment]
            if getattr(value_of(node), "dtype", None) != dtype:
                return None
        if self.effects.is_written(node) or not is_literal:  # others are the model's own tensors
            return None
        found = self._constant_at(node)
        return found.constant if isinstance(found, FakeTensor) else found

    def _constant_at(self, node: Node) -> Tensor | None:
        is_constant = node.op == "get_attr" and str(node.target).startswith("_tensor_constant")
        return getattr(self.module, str(node.target)) if is_constant else None

    def depths(self, marked: Callable[[Node], bool]) -> dict[Node, int]:
        """For each marked node, how many marked ones stand one behind the other before it; effects count."""
        before: dict[Node, list[Node]] = {}
        for chain in self.effects.orders():
            for first, second in itertools.pairwise(chain):
                before.setdefault(second, []).append(first)
        depths: dict[Node, int] = {}
        for node in self.graph.nodes:
            depth = 0
            for needed in (*node.all_input_nodes, *before.get(node, ())):
                depth = max(depth, depths.get(needed, 0) + marked(needed))
            depths[node] = depth
        return {node: depth for node, depth in depths.items() if marked(node)}

    def depends_on_random(self, node: Node) -> bool:
        """Whether random numbers are drawn for what a node computes."""
        if self._random_nodes is None:
            self._random_nodes = found = set()
            for other in self.graph.nodes:
                if draws(other) or any(item in found for item in other.all_input_nodes):
                    found.add(other)
        return node in self._random_nodes

    # ---- rewriting

    @contextmanager
    def at(self, node: Node) -> Iterator[None]:
        """Nodes made inside belong before this one."""
        before, self._cursor = self._cursor, node
        try:
            with torch.no_grad(), self.mode:
                yield
        finally:
            self._cursor = before

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A new call. Its shapes are checked here, by running it on fake values."""
        assert self._cursor is not None
        with self.graph.inserting_before(self._cursor):
            node = self.graph.call_function(target, args, kwargs)
        try:
            node.meta["val"] = target(*map_arg(args, value_of), **map_arg(kwargs, value_of))
        except BaseException:
            self.graph.erase_node(node)
            raise
        if trace := self._cursor.meta.get("stack_trace"):
            node.meta["stack_trace"] = trace
        self._place(node)
        return node

    def _place(self, node: Node) -> None:
        assert self._cursor is not None
        self._new.append(node)
        at, _ = self._order[self._cursor]
        self._order[node] = (at - 0.5 if at == int(at) else at, next(self._numbers))
        self.effects.region[node] = self.effects.region[self._cursor]
        self.changed = True

    def size(self, node: Node, dim: int) -> Any:
        """A size as an argument of a call: a number, or the node that has it."""
        value = value_of(node).shape[dim]
        if isinstance(value, int):
            return value
        key = (node, dim)
        if key not in self._sizes or self._order[self._sizes[key]] > self._order[self._cursor]:  # type: ignore[index]
            self._sizes[key] = self.emit(aten.sym_size.int, node, dim)
        return self._sizes[key]

    def constant(self, values: Sequence[Any], device: torch.device | str) -> Node:
        """An int64 tensor that the program keeps."""
        with unset_fake_temporarily():
            tensor = torch.tensor(values, dtype=torch.int64, device=device)
        while hasattr(self.module, name := f"recfuse_constant_{self._constants}"):
            self._constants += 1
        node = self._keep(name, tensor)
        self._constants += 1
        node.meta["val"] = self.mode.from_tensor(tensor, static_shapes=True)
        return node

    def _keep(self, name: str, tensor: Tensor) -> Node:
        self.module.register_buffer(name, tensor, persistent=False)
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            node = self.graph.get_attr(name)
        self._order[node] = (-1.0, next(self._numbers))
        self.effects.region[node] = 0
        self.changed = True
        return node

    def replace(self, old: Node, new: Node) -> None:
        """Everything that used a node uses another one; the old one goes."""
        old.replace_all_uses_with(new, propagate_meta=False)
        self._dead.append(old)
        self.changed = True

    def set_args(self, node: Node, args: tuple[Any, ...]) -> None:
        """Gives a call other arguments with the same result; the old ones go where nobody needs them."""
        self._dead += node.all_input_nodes
        node.args = args
        node.kwargs = {}

    def forget(self, node: Node) -> None:
        """A node goes where nobody needs it any more."""
        self._dead.append(node)

    def finish(self) -> None:
        """Takes away what nobody needs any more, brings nodes into order and compiles the module."""
        if not self.changed:
            return
        self._dead += [node for node in self._new if not (node._erased or node.is_impure())]
        self.erase_dead()
        self._sort()
        self.graph.lint()
        self.module.recompile()

    def erase_dead(self) -> None:
        """Takes away what nobody needs any more."""
        while self._dead:
            node = self._dead.pop()
            for item in [user for user in node.users if user.target is operator.getitem and not user.users]:
                self.graph.erase_node(item)
                del self._order[item]
            if node.users or node.op in ("placeholder", "output") or node not in self._order:
                continue
            if self._must_stay(node):
                continue
            needed = node.all_input_nodes
            self.graph.erase_node(node)
            del self._order[node]
            self._dead += needed

    def _must_stay(self, node: Node) -> bool:
        """Whether a call counts though nobody uses its result: it writes, or draws random numbers."""
        called = operator_of(node)
        if called is None or is_fresh_constant(node):
            return False
        return draws(node) or may_write(called, node.args, node.kwargs)

    def _sort(self) -> None:
        """Brings nodes into the first order that their inputs, effects and regions allow."""
        alive = [node for node in self.graph.nodes]
        waiting = dict.fromkeys(alive, 0)
        behind: dict[Node, list[Node]] = {}

        def edge(first: Node, second: Node) -> None:
            behind.setdefault(first, []).append(second)
            waiting[second] += 1

        for node in alive:
            for needed in node.all_input_nodes:
                edge(needed, node)
        for chain in self.effects.orders():
            kept = [node for node in chain if node in waiting]
            for first, second in itertools.pairwise(kept):
                edge(first, second)
        region = self.effects.region

        def key(node: Node) -> tuple[int, tuple[float, int]]:
            outside = node.op in ("placeholder", "get_attr")
            last = node.op == "output"
            return (-1 if outside else 2**31 if last else region[node], self._order[node])

        by_key = {key(node): node for node in alive}
        ready = [key(node) for node in alive if not waiting[node]]
        heapq.heapify(ready)
        ordered = []
        while ready:
            node = by_key[heapq.heappop(ready)]
            ordered.append(node)
            for other in behind.get(node, ()):
                waiting[other] -= 1
                if not waiting[other]:
                    heapq.heappush(ready, key(other))
        if len(ordered) != len(alive):
            raise AssertionError("recfuse: a rewritten graph has a cycle")
        for node in ordered:
            self.graph._root.prepend(node)  # to the end


def _spell(node: Node) -> None:
    """Gives a call the one name that patterns know."""
    if node.op != "call_function":
        return
    node.target = _SPELLINGS.get(node.target, node.target)
    if node.target is aten.hstack.default and value_of(node).dim() > 1:
        node.target, node.args = aten.cat.default, (arguments_of(node)["tensors"], 1)
        node.kwargs = {}


def _unreadable(reason: str) -> ArgumentValueError:
    return ArgumentValueError(f"recfuse: the graph cannot be read, since {reason}; expected {_NEEDED}")
