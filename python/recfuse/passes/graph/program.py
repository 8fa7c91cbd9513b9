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
"""Operators that equal another operator with the same arguments."""
_NEEDED = "ATen operators and fake values, as torch.export and recfuse.backend() record them"


class Program:
    """A graph of ATen operators with fake values in ``node.meta["val"]``.

    torch.export returns such graphs, and ``recfuse.backend`` records them from graphs of torch.compile. New
    nodes may be emitted at any place: ``finish`` sorts all nodes into an order that keeps every effect. Sizes
    are those of torch's ShapeEnv; no method guards on a size.
    """

    is_guarded = False
    """Whether torch compiles again before a frozen weight is trained."""
    compares_sizes = False
    """Whether torch compares sizes that the ShapeEnv knows to be equal before each call of the program."""

    def __init__(
        self,
        module: GraphModule,
        user_inputs: Iterable[Node] | None = None,
        same_memory: Iterable[Iterable[Node]] = (),
    ) -> None:
        """Read a graph. Raises ValueError if it calls modules or methods, or lacks fake values.

        ``same_memory``: groups of inputs whose tensors share memory, even if their fake values do not.
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
        self._dropped: set[Node] = set()
        self._new: list[Node] = []
        self._constants = 0

    def _name_attributes(self, nodes: list[Node]) -> None:
        """Set the fake values of nodes that read tensors of the module."""
        for node in nodes:
            if node.op == "get_attr" and "val" not in node.meta:
                attribute: Any = self.module
                for name in str(node.target).split("."):
                    attribute = getattr(attribute, name)
                if isinstance(attribute, Tensor):
                    node.meta["val"] = self.mode.from_tensor(attribute, static_shapes=True)

    # ---- reading

    @property
    def nodes(self) -> Iterator[Node]:
        """The nodes, in order, without nodes that a rewrite removes during the iteration."""
        return (node for node in list(self.graph.nodes) if not node._erased)

    def name(self, node: Node) -> str:
        """Return the name of a node in reports; a Parameter has its own name."""
        return str(node.meta.get("recfuse_name") or (node.target if node.op == "get_attr" else node.name))

    def weight_is_parameter(self, node: Node) -> bool:
        """Return whether a node is a Parameter or a buffer of the model."""
        if node.op == "get_attr" or node.meta.get("recfuse_is_parameter"):
            return True
        return node.op == "placeholder" and node not in self.user_inputs

    def trains(self, node: Node) -> bool:
        """Return whether a weight requires a gradient."""
        requires_grad, tensor = node.meta.get("recfuse_requires_grad"), tensor_of(node)
        return bool(tensor is not None and tensor.requires_grad if requires_grad is None else requires_grad)

    def may_train(self, node: Node) -> bool:
        """Return whether a call may have to compute a tensor's gradient; never under torch.no_grad()."""
        return self.gradients and node in self._trained()

    def may_train_later(self, node: Node) -> bool:
        """Return ``may_train(node)``, or whether an input may require a gradient later.

        The latter holds for a program with trained weights that torch does not recompile for other inputs.
        """
        return self.may_train(node) or (not self.is_guarded and self.gradients and bool(self._trained()))

    def receives_gradient(self, node: Node) -> bool:
        """Return whether a node's result may receive a gradient from its present users."""
        return receives_gradient(node, self.effects.region, self._no_gradients)

    def _trained(self) -> set[Node]:
        """Return the nodes that depend on a tensor with a gradient."""
        if self._gradient_nodes is None:
            self._gradient_nodes = nodes = set()
            for node in self.graph.nodes:
                is_given = node.op in ("placeholder", "get_attr")
                if self.trains(node) if is_given else any(item in nodes for item in node.all_input_nodes):
                    nodes.add(node)
        return self._gradient_nodes

    def constant_value(self, node: Node) -> Tensor | None:
        """Return the values of a literal ``torch.tensor([...])``, which no user can change, or None."""
        dtype, is_literal = getattr(value_of(node), "dtype", None), False
        while is_call(node, *_COPIES) and not self.effects.is_written(node):
            is_literal = is_call(node, aten.lift_fresh_copy, aten.lift_fresh)
            node = node.args[0]  # type: ignore[assignment]
            if getattr(value_of(node), "dtype", None) != dtype:
                return None
        if self.effects.is_written(node) or not is_literal:  # other tensors belong to the model
            return None
        constant = self._constant_at(node)
        return constant.constant if isinstance(constant, FakeTensor) else constant

    def constant_tensor(self, node: Any) -> Tensor | None:
        """Return the values of a constant of the program that it never writes to, or None.

        A constant is stored with the program and has no name in a ``state_dict``.
        """
        if not isinstance(node, Node) or self.effects.is_written(node):
            return None
        return self._constant_at(node)

    def _constant_at(self, node: Node) -> Tensor | None:
        is_constant = node.op == "get_attr" and str(node.target).startswith("_tensor_constant")
        return getattr(self.module, str(node.target)) if is_constant else None

    def depths(self, marked: Callable[[Node], bool]) -> dict[Node, int]:
        """Return, for each marked node, the longest chain of marked nodes before it.

        A node depends on its inputs and on previous nodes of its effects.
        """
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
        """Return whether a node's value depends on random numbers."""
        if self._random_nodes is None:
            self._random_nodes = nodes = set()
            for other in self.graph.nodes:
                if draws(other) or any(item in nodes for item in other.all_input_nodes):
                    nodes.add(other)
        return node in self._random_nodes

    # ---- rewriting

    @contextmanager
    def at(self, node: Node) -> Iterator[None]:
        """Emit new nodes before this node, within the context."""
        before, self._cursor = self._cursor, node
        try:
            with torch.no_grad(), self.mode:
                yield
        finally:
            self._cursor = before

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Emit a call, and return its node. The call runs on fake values, which checks its shapes."""
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
        """Return a size as an argument of a call: a number, or a node that computes it."""
        value = value_of(node).shape[dim]
        if isinstance(value, int):
            return value
        key = (node, dim)
        if key not in self._sizes or self._order[self._sizes[key]] > self._order[self._cursor]:  # type: ignore[index]
            self._sizes[key] = self.emit(aten.sym_size.int, node, dim)
        return self._sizes[key]

    def constant(self, values: Sequence[Any], device: torch.device | str) -> Node:
        """Return the node of a new int64 constant, which the program stores."""
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
        """Replace all uses of a node by another node, and remove the old node."""
        old.replace_all_uses_with(new, propagate_meta=False)
        self._dead.append(old)
        self.changed = True

    def set_args(self, node: Node, args: tuple[Any, ...]) -> None:
        """Set other arguments of a call with the same result, and remove the old arguments if unused."""
        self._dead += node.all_input_nodes
        node.args = args
        node.kwargs = {}

    def forget(self, node: Node) -> None:
        """Remove a node later if it is unused."""
        self._dead.append(node)

    def drop(self, node: Node) -> None:
        """Remove a node later, although it writes to memory."""
        self._dropped.add(node)
        self._dead.append(node)

    def finish(self) -> None:
        """Remove unused nodes, sort the others and recompile the module."""
        if not self.changed:
            return
        self._dead += [node for node in self._new if not (node._erased or node.is_impure())]
        self.erase_dead()
        self._sort()
        self.graph.lint()
        self.module.recompile()

    def erase_dead(self) -> None:
        """Remove replaced and forgotten nodes that are unused, and their unused inputs."""
        while self._dead:
            node = self._dead.pop()
            for item in [user for user in node.users if user.target is operator.getitem and not user.users]:
                self.graph.erase_node(item)
                del self._order[item]
            if node.users or node.op in ("placeholder", "output") or node not in self._order:
                continue
            if node not in self._dropped and self._must_stay(node):
                continue
            needed = node.all_input_nodes
            self.graph.erase_node(node)
            del self._order[node]
            self._dead += needed

    def _must_stay(self, node: Node) -> bool:
        """Return whether a call stays without users: it writes, or draws random numbers."""
        called = operator_of(node)
        if called is None or is_fresh_constant(node):
            return False
        return draws(node) or may_write(called, node.args, node.kwargs)

    def _sort(self) -> None:
        """Sort nodes into the first order that their inputs, effects and regions allow."""
        alive = [node for node in self.graph.nodes]
        pending = dict.fromkeys(alive, 0)
        successors: dict[Node, list[Node]] = {}

        def edge(first: Node, second: Node) -> None:
            successors.setdefault(first, []).append(second)
            pending[second] += 1

        for node in alive:
            for needed in node.all_input_nodes:
                edge(needed, node)
        for chain in self.effects.orders():
            in_order = [node for node in chain if node in pending]
            for first, second in itertools.pairwise(in_order):
                edge(first, second)
        region = self.effects.region

        def key(node: Node) -> tuple[int, tuple[float, int]]:
            outside = node.op in ("placeholder", "get_attr")
            last = node.op == "output"
            return (-1 if outside else 2**31 if last else region[node], self._order[node])

        by_key = {key(node): node for node in alive}
        ready = [key(node) for node in alive if not pending[node]]
        heapq.heapify(ready)
        ordered = []
        while ready:
            node = by_key[heapq.heappop(ready)]
            ordered.append(node)
            for other in successors.get(node, ()):
                pending[other] -= 1
                if not pending[other]:
                    heapq.heappush(ready, key(other))
        if len(ordered) != len(alive):
            raise AssertionError("recfuse: a rewritten graph has a cycle")
        for node in ordered:
            self.graph._root.prepend(node)  # to the end


def _spell(node: Node) -> None:
    """Replace the operator of a call by the equivalent operator that patterns match."""
    if node.op != "call_function":
        return
    node.target = _SPELLINGS.get(node.target, node.target)
    if node.target is aten.hstack.default and value_of(node).dim() > 1:
        node.target, node.args = aten.cat.default, (arguments_of(node)["tensors"], 1)
        node.kwargs = {}


def _unreadable(reason: str) -> ArgumentValueError:
    return ArgumentValueError(f"recfuse: the graph cannot be read, since {reason}; expected {_NEEDED}")
