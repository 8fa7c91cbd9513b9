"""Symbolic values of the expressions of a method, and the merge of two branches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from recfuse.passes.method.source import FunctionNode, Refused

PLAIN = (bool, int, float, str, type(None))
Facts = Mapping[Any, bool]
"""Known facts about the input: whether the row weights of table k are None (key k), and whether the model is
in training mode (TRAINING)."""
TRAINING = "training"


@dataclass(frozen=True)
class Constant:
    """A plain Python value."""

    value: Any

    def __eq__(self, other: object) -> bool:
        """Compare by representation: 1 is not True, -0.0 is not 0.0, NaN is NaN."""
        return type(other) is Constant and repr(self) == repr(other)

    def __hash__(self) -> int:
        """Hash the representation, as ``__eq__`` compares it."""
        return hash(repr(self))


@dataclass(frozen=True)
class Argument:
    """An argument of the method with one item per table: lS_o, lS_i, emb_l or v_W_l."""

    name: str


@dataclass(frozen=True)
class Item:
    """The item of a table in an argument."""

    name: str
    table: int


@dataclass(frozen=True)
class LookupWeights:
    """A table's row weights, gathered for each lookup; None if the table has no row weights."""

    table: int


@dataclass(frozen=True)
class Pooled:
    """The result of a table for its own lookups."""

    table: int
    weights: LookupWeights | None


@dataclass(frozen=True)
class Test:
    """A bool that depends on the input, with the facts that hold if it is true, and if it is false."""

    if_true: tuple[tuple[Any, bool], ...]
    if_false: tuple[tuple[Any, bool], ...]


_numbers = itertools.count()


@dataclass(eq=False)
class Sequence:
    """A list or a tuple that the method makes."""

    items: list[Any]
    is_tuple: bool = False
    writes: int = 0  # number of writes; an undone branch does not reset it
    number: int = field(default_factory=lambda: next(_numbers))  # ascends with creation


@dataclass(frozen=True)
class Model:
    """The model itself."""


@dataclass(frozen=True)
class Super:
    """``super()`` in a method of a class."""

    owner: type


@dataclass(frozen=True, eq=False)
class Object:
    """A class, a module of Python, or a function that is not read; compared by identity."""

    value: Any
    name: str


@dataclass(frozen=True)
class Member:
    """An attribute of another value, which only a call uses."""

    owner: Any
    name: str


@dataclass(frozen=True, eq=False)
class Function:
    """A function of Python; ``bound`` is its first argument."""

    function: FunctionType
    bound: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Getter:
    """A property: a read calls its function."""

    function: Function


@dataclass(eq=False)
class Frame:
    """The variables of a call. Python looks ``local_names`` up only here."""

    function: FunctionType
    local_names: frozenset[str]
    parent: Frame | None = None
    names: dict[str, Any] = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_numbers))  # ascends with creation


@dataclass(frozen=True, eq=False)
class Inner:
    """A function defined inside another, with the variables of the outer function."""

    node: FunctionNode
    frame: Frame
    defaults: dict[str, Any]


@dataclass(frozen=True)
class Differs:
    """A variable with different values after two branches; a read of it is refused."""


Contents = list[Any] | dict[str, Any]


def contents_of(container: Sequence | Frame) -> Contents:
    """Return a copy of the contents of a list or a frame."""
    return (container.items if isinstance(container, Sequence) else container.names).copy()


def put_back(container: Sequence | Frame, contents: Contents) -> None:
    """Restore the contents of a list or a frame."""
    if isinstance(container, Sequence):
        assert isinstance(contents, list)
        container.items = contents
    else:
        assert isinstance(contents, dict)
        container.names = contents


class Merger:
    """Merges the values of two branches, each with its own facts."""

    def __init__(self, facts: tuple[Facts, Facts]) -> None:
        """Must be created before the branches run, with all facts of the first and of the second."""
        self.facts, self.begin = facts, next(_numbers)
        self._pairs: dict[tuple[int, int], Sequence] = {}
        self._partner: dict[tuple[int, int], int] = {}
        self._alive: list[Any] = []

    def merge(self, a: Any, b: Any) -> Any:
        """Return the value that is correct in both branches, or Differs if there is no such value."""
        if a is b or a == b:
            return a
        if isinstance(a, Sequence) and isinstance(b, Sequence):
            return self._sequence(a, b)
        for facts, value, weighted in ((self.facts[0], a, b), (self.facts[1], b, a)):
            table = getattr(weighted, "table", None)
            if (
                table is None or facts.get(table) is not True
            ):  # row weights are None, and so are gathered ones
                continue
            is_none = value == Constant(None) or value == Item("v_W_l", table)
            if is_none and weighted in (LookupWeights(table), Item("v_W_l", table)):
                return weighted
            if value == Pooled(table, None) and weighted == Pooled(table, LookupWeights(table)):
                return weighted
        return Differs()

    def contents(self, a: Contents, b: Contents) -> Contents:
        """Merge the contents of a list or a frame after each branch."""
        if isinstance(a, list):
            assert isinstance(b, list)
            if len(a) != len(b):
                raise Refused("makes a list whose length depends on the input")
            return [
                item_a if item_a is item_b else self.merge(item_a, item_b)
                for item_a, item_b in zip(a, b, strict=True)
            ]
        assert isinstance(b, dict)
        return {name: self.merge(a.get(name, Differs()), b.get(name, Differs())) for name in {**a, **b}}

    def _sequence(self, a: Sequence, b: Sequence) -> Any:
        pair = (id(a), id(b))
        if pair not in self._pairs:
            # If two names refer to the same list in one branch, they must do so in the other branch too.
            partners = [self._partner.setdefault((side, item), partner) == partner
                        for side, item, partner in ((0, id(a), id(b)), (1, id(b), id(a)))]  # fmt: skip
            are_new = min(a.number, b.number) > self.begin or a.is_tuple
            if not all(partners) or not are_new or (len(a.items), a.is_tuple) != (len(b.items), b.is_tuple):
                return Differs()
            self._alive += (a, b)
            merged = self._pairs[pair] = Sequence([], a.is_tuple)
            merged.items = [
                self.merge(item_a, item_b) for item_a, item_b in zip(a.items, b.items, strict=True)
            ]
        return self._pairs[pair]


def negated(test: Test) -> Test:
    """Return ``not test``."""
    return Test(test.if_false, test.if_true)


def described(value: Any) -> str:
    """Return the description of a value for messages."""
    if isinstance(value, Item):
        return f"{value.name}[{value.table}]"
    if isinstance(value, Argument):
        return value.name
    if isinstance(value, Pooled):
        return f"the result of table {value.table}"
    if isinstance(value, LookupWeights):
        return f"the row weights of table {value.table}"
    if isinstance(value, Member):
        return f"{described(value.owner)}.{value.name}"
    return "an unknown value"
