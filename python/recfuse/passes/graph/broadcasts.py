"""``Broadcasts``: nodes that hold a copy of the user's rows for each candidate, and their forms for users.

A broadcast copies rows of users to candidates. A row-wise function of the copies could be computed from the
users' rows and copied later, or never: ``lift`` follows such computations, dimension by dimension.

Source: IKBO (in-kernel broadcast optimization), the inference-time transformation.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.nn import Parameter

from recfuse._codes import INTEGERS
from recfuse.passes.graph.lifting import RULES, lifted_call
from recfuse.passes.graph.nodes import (
    arguments_of,
    aten,
    hint,
    is_call,
    operator_of,
    same,
    tensor_of,
    value_of,
)
from recfuse.passes.graph.program import Program

WORTH = 2
"""Smallest ratio of candidates to users: below it, copies cost little."""
_READ_ROWS = "recfuse_read_rows"
"""Key in the metadata of a node of rows of users with candidates: it is no broadcast."""
AUTOCAST = (
    "autocast is on, which chooses dtypes. Convert the model instead, or leave autocast before this part."
)


@dataclass(frozen=True)
class Map:
    """The map from candidates to users; equal maps have equal keys."""

    key: tuple[Any, ...]
    users: Node  # a tensor whose size in `dim` is the number of users
    dim: int
    emit: Callable[[], Node]  # int32 or int64 [candidates]
    why_not: str  # why a swap is not worthwhile for the example; "": it is

    @property
    def may_skip(self) -> bool:
        """Whether a user may have zero candidates."""
        return self.key[0] in ("index", "counts")


@dataclass(frozen=True)
class Lift:
    """A node with a copy for each candidate along ``dim``; a candidate has ``block`` adjacent rows."""

    map: Map
    dim: int
    block: int = 1
    source: Node | None = None  # of a broadcast itself: the node that it copies
    computes: bool = False  # whether the path from the broadcast has more than views


class Broadcasts:
    """The broadcasts of a program, searched on demand."""

    def __init__(self, program: Program) -> None:
        """The object is valid as long as no other pattern rewrites ``program``."""
        self.program = program
        self._lifts: dict[Node, Lift | None] = {}
        self._users: dict[tuple[Node, bool], Node] = {}
        self._maps: dict[tuple[Any, ...], Node] = {}

    def lift(self, node: Any) -> Lift | None:
        """Return how a node copies a value of users, or None if it is no copy."""
        if not isinstance(node, Node):
            return None
        if node not in self._lifts:
            self._lifts[node] = None  # also during the search
            self._lifts[node] = self._find(node)
        return self._lifts[node]

    def _find(self, node: Node) -> Lift | None:
        called, tensor = operator_of(node), tensor_of(node)
        if called is None or tensor is None or self.program.effects.is_written(node):
            return None
        if node.meta.get(_READ_ROWS):
            return None
        broadcast = _broadcast(self.program, node)
        if broadcast is not None:
            return broadcast if self._is_free(node, broadcast) else None
        inputs = {item: lift for item in node.all_input_nodes if (lift := self.lift(item)) is not None}
        if not inputs or len({(lift.map.key) for lift in inputs.values()}) != 1:
            return None
        rule = RULES.get(called.overloadpacket)
        if rule is None and torch.Tag.pointwise in called.tags and not _is_random(called):
            rule = RULES["pointwise"]
        position = rule(node, inputs) if rule else None
        if position is None or self.program.effects.why_not((node, *inputs)):
            return None
        if any(map(self.program.effects.is_written, node.all_input_nodes)):  # their values change later
            return None
        first = next(iter(inputs.values()))
        is_view = called.is_view or called.overloadpacket in (aten.reshape, aten.contiguous)
        computes = not is_view or any(lift.computes for lift in inputs.values())
        return Lift(first.map, *position, computes=computes)

    def _is_free(self, node: Node, lift: Lift) -> bool:
        """Return whether a broadcast may be computed elsewhere, and its source is no weight."""
        source = lift.source
        assert source is not None
        if isinstance(value_of(source), Parameter) or self.program.weight_is_parameter(source):
            return False
        return not self.program.effects.why_not((node, *node.all_input_nodes))

    # ---- rewriting: inside `program.at`

    def of_users(self, node: Node) -> Node:
        """Emit a node that has, for users, the values that a lifted node has for candidates.

        In training, only users with candidates are computed: for the rows of other users, zero times a slope
        of NaN or infinity would reach the gradients.
        """
        lift = self.lift(node)
        assert lift is not None
        reads_only = lift.computes and lift.map.may_skip and self.program.may_train_later(node)
        return self._of_users(node, reads_only)

    def _of_users(self, node: Node, reads_only: bool) -> Node:
        key = node, reads_only
        if key not in self._users:
            lift = self.lift(node)
            assert lift is not None
            if lift.source is not None:
                self._users[key] = self._read_rows(lift) if reads_only else lift.source
            else:
                lifted = [item for item in node.all_input_nodes if self.lift(item)]
                inputs = {item: self._of_users(item, reads_only) for item in lifted}
                self._users[key] = lifted_call(self.program, node, lift, inputs)
        return self._users[key]

    def _read_rows(self, lift: Lift) -> Node:
        """Emit the rows that a broadcast copies; users without candidates get the first candidate's row."""
        emit, source, index = self.program.emit, lift.source, self.map_of(lift)
        assert source is not None
        if value_of(index).dtype != torch.int64:
            index = emit(aten.to.dtype, index, torch.int64)
        options = {"dtype": torch.int64, "device": value_of(source).device, "pin_memory": False}
        some = emit(aten.cat.default, [index, emit(aten.full.default, [1], 0, **options)], 0)
        first = emit(aten.slice.Tensor, some, 0, 0, 1)
        rows = emit(aten.expand.default, first, [self.program.size(source, lift.dim)])
        rows = emit(aten.scatter.src, rows, 0, index, index)
        rows_read = emit(aten.index_select.default, source, lift.dim, rows)
        rows_read.meta[_READ_ROWS] = True
        return rows_read

    def map_of(self, lift: Lift) -> Node:
        """Return the map ``[candidates]`` as a node, emitted once."""
        if lift.map.key not in self._maps:
            self._maps[lift.map.key] = lift.map.emit()
        return self._maps[lift.map.key]


def _is_random(operator: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


def _broadcast(program: Program, node: Node) -> Lift | None:
    """Return the lift of a node that is itself a broadcast, or None."""
    if is_call(node, aten.index_select):
        arguments = arguments_of(node)
        return _by_index(program, node, arguments["self"], arguments["dim"], arguments["index"], wraps=False)
    if is_call(node, aten.index):
        source, indices = node.args[0], list(node.args[1])  # type: ignore[arg-type]
        arguments = [item for item in indices if item is not None]
        if len(arguments) != 1:
            return None
        return _by_index(program, node, source, indices.index(arguments[0]), arguments[0], wraps=True)
    if node.target is aten.repeat_interleave.self_Tensor:
        return _counted(program, node)
    if is_call(node, aten.repeat_interleave) and len(node.args) > 1 and isinstance(node.args[1], int):
        arguments = arguments_of(node)
        return (
            _repeated(program, node, arguments["self"], arguments["dim"], int(arguments["repeats"]))
            if arguments["dim"] is not None
            else None
        )
    if is_call(node, aten.repeat, aten.tile):
        return _tiled(program, node)
    if is_call(node, aten.expand, aten.expand_as):
        return _of_one_user(program, node)
    return _expanded(program, node) if is_call(node, aten.reshape, aten.view) else None


def _lift(node: Node, key: tuple[Any, ...], source: Any, dim: int, emit: Callable[[], Node]) -> Lift | None:
    dim %= max(value_of(source).dim(), 1)
    users, candidates = (hint(value_of(item).shape[dim]) for item in (source, node))
    if not value_of(source).is_floating_point():
        return None
    why_not = ""
    if users is not None and candidates is not None and candidates < WORTH * users:
        why_not = (
            f"the example has {candidates} candidates of {users} users; expected {WORTH} a user or more. "
        )
        why_not += "Pass a batch as in serving."
    return Lift(Map(key, source, dim, emit, why_not), dim, source=source)


def _by_index(program: Program, node: Node, source: Any, dim: int, index: Any, *, wraps: bool) -> Lift | None:
    arguments = tensor_of(index)
    if (
        arguments is None
        or arguments.dim() != 1
        or arguments.dtype not in INTEGERS
        or tensor_of(source) is None
    ):
        return None
    if program.effects.is_written(index):
        return None

    def emit() -> Node:
        if not wraps:
            return index  # type: ignore[no-any-return]
        negative = program.emit(aten.lt.Scalar, index, 0)  # as x[-1] is the last row
        from_end = program.emit(aten.add.Tensor, index, program.size(source, dim))
        return program.emit(aten.where.self, negative, from_end, index)

    size = value_of(source).shape[dim]
    return _lift(node, ("index", wraps, index, str(size)), source, dim, emit)


def _repeated(program: Program, node: Node, source: Any, dim: int, times: int) -> Lift | None:
    if tensor_of(source) is None or times < 1:
        return None

    def emit() -> Node:
        return program.emit(
            aten.div.Tensor_mode, _numbers(program, source, dim, times), times, rounding_mode="floor"
        )

    return _lift(node, ("repeat", times, str(value_of(source).shape[dim])), source, dim, emit)


def _counted(program: Program, node: Node) -> Lift | None:
    """Match ``x.repeat_interleave(counts, 0, output_size=n)``: users have different numbers of candidates."""
    arguments = arguments_of(node)
    source, counts, dim, size = (arguments[name] for name in ("self", "repeats", "dim", "output_size"))
    numbers, users = tensor_of(counts), tensor_of(source)
    if numbers is None or users is None or dim is None or size is None or program.effects.is_written(counts):
        return None
    if numbers.dim() != 1 or not same(numbers.shape[0], users.shape[dim]):
        return None

    def emit() -> Node:
        return program.emit(aten.repeat_interleave.Tensor, counts, output_size=size)

    return _lift(node, ("counts", counts, str(users.shape[dim])), source, dim, emit)


def _tiled(program: Program, node: Node) -> Lift | None:
    source, times = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    tensor = tensor_of(source)
    if tensor is None or tensor.dim() != len(times) or not isinstance(times[0], int):
        return None
    if times[0] < 1 or any(time != 1 for time in times[1:]):
        return None

    def emit() -> Node:
        numbers = _numbers(program, source, 0, times[0])
        return program.emit(aten.remainder.Scalar, numbers, program.size(source, 0))  # type: ignore[arg-type]

    return _lift(node, ("tile", times[0], str(tensor.shape[0])), source, 0, emit)


def _of_one_user(program: Program, node: Node) -> Lift | None:
    source, wide = node.args[:2]
    before, after = value_of(source).shape, value_of(node).shape
    if len(before) != len(after) or not len(before) or before[0] != 1 or after[0] == 1:
        return None
    if any(not (a is b or str(a) == str(b)) for a, b in zip(before[1:], after[1:], strict=True)):
        return None

    def emit() -> Node:
        options = {"dtype": torch.int64, "device": value_of(node).device, "pin_memory": False}
        size = program.size(wide, 0) if isinstance(wide, Node) else next(iter(wide))  # type: ignore[arg-type]
        return program.emit(aten.full.default, [size], 0, **options)

    return _lift(node, ("one", str(after[0])), source, 0, emit)


def _expanded(program: Program, node: Node) -> Lift | None:
    """Match ``x[:, None].expand(users, n, ...).reshape(users * n, ...)``."""
    wide = node.args[0]
    if not is_call(wide, aten.expand):
        return None
    narrow = wide.args[0]  # type: ignore[union-attr]
    if not is_call(narrow, aten.unsqueeze) or arguments_of(narrow)["dim"] != 1:
        return None
    source, times = narrow.args[0], value_of(wide).shape[1]
    before, after = value_of(source).shape, value_of(node).shape
    if not isinstance(times, int) or len(before) != len(after):
        return None
    if str(before[0] * times) != str(after[0]) or list(map(str, before[1:])) != list(map(str, after[1:])):
        return None
    return _repeated(program, node, source, 0, times)


def _numbers(program: Program, source: Any, dim: int, times: int) -> Node:
    """Emit the numbers of all candidates, from 0."""
    users = program.size(source, dim)
    count = program.emit(operator.mul, users, times) if isinstance(users, Node) else math.prod((users, times))
    options = {"dtype": torch.int64, "device": value_of(source).device, "pin_memory": False}
    return program.emit(aten.arange.default, count, **options)
