"""What expressions of a method may be worth, and what two branches of it make of one variable."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from recfuse.passes.method.source import FunctionNode, Refused

PLAIN = (bool, int, float, str, type(None))
Facts = Mapping[Any, bool]
"""What is known of the input: whether the row weights of table k are None (key k), whether the model is in
training (TRAINING)."""
TRAINING = "training"


@dataclass(frozen=True)
class Constant:
    """A plain Python value."""

    value: Any

    def __eq__(self, other: object) -> bool:
        """Of one class, and written the same: 1 is not True, -0.0 is not 0.0, NaN is NaN."""
        return type(other) is Constant and repr(self) == repr(other)

    def __hash__(self) -> int:
        """As it is written."""
        return hash(repr(self))


@dataclass(frozen=True)
class Argument:
    """An argument of the method, with an item a table: lS_o, lS_i, emb_l or v_W_l."""

    name: str


@dataclass(frozen=True)
class Item:
    """The item of a table."""

    name: str
    table: int


@dataclass(frozen=True)
class LookupWeights:
    """A table's row weights, gathered for each lookup; None where it has none."""

    table: int


@dataclass(frozen=True)
class Pooled:
    """What a table returns for its own lookups."""

    table: int
    weights: LookupWeights | None


@dataclass(frozen=True)
class Test:
    """A bool that depends on the input: what is known where it is true, and where it is false."""

    if_true: tuple[tuple[Any, bool], ...]
    if_false: tuple[tuple[Any, bool], ...]


_numbers = itertools.count()


@dataclass(eq=False)
class Sequence:
    """A list or a tuple of the method's own."""

    items: list[Any]
    is_tuple: bool = False
    writes: int = 0  # how often it was written to; never put back
    number: int = field(default_factory=lambda: next(_numbers))  # rises


@dataclass(frozen=True)
class Model:
    """The model itself."""


@dataclass(frozen=True)
class Super:
    """``super()`` in a method of a class."""

    owner: type


@dataclass(frozen=True, eq=False)
class Object:
    """A class, a module of Python, or a function that is not read: known by its identity."""

    value: Any
    name: str


@dataclass(frozen=True)
class Member:
    """An attribute of one of the values above, which only a call uses."""

    owner: Any
    name: str


@dataclass(frozen=True, eq=False)
class Function:
    """A function of Python; ``bound`` is its first argument."""

    function: FunctionType
    bound: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Getter:
    """A property, whose function is called where it is read."""

    function: Function


@dataclass(eq=False)
class Frame:
    """The variables of a call. ``local_names`` are those that Python looks up nowhere else."""

    function: FunctionType
    local_names: frozenset[str]
    parent: Frame | None = None
    names: dict[str, Any] = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_numbers))  # rises


@dataclass(frozen=True, eq=False)
class Inner:
    """A function that was made inside another, with the variables of that one."""

    node: FunctionNode
    frame: Frame
    defaults: dict[str, Any]


@dataclass(frozen=True)
class Differs:
    """A variable that two branches have left as different things; an error to read."""


Contents = list[Any] | dict[str, Any]


def contents_of(container: Sequence | Frame) -> Contents:
    """A copy of what is in a list or a frame."""
    return (container.items if isinstance(container, Sequence) else container.names).copy()


def put_back(container: Sequence | Frame, contents: Contents) -> None:
    """Gives a list or a frame what it had."""
    if isinstance(container, Sequence):
        assert isinstance(contents, list)
        container.items = contents
    else:
        assert isinstance(contents, dict)
        container.names = contents


class Merger:
    """Makes one value of those of two branches, of which each knows other facts."""

    def __init__(self, facts: tuple[Facts, Facts]) -> None:
        """Before the branches run; with all facts of the first and of the second."""
        self.facts, self.begin = facts, next(_numbers)
        self._pairs: dict[tuple[int, int], Sequence] = {}
        self._partner: dict[tuple[int, int], int] = {}
        self._alive: list[Any] = []

    def merge(self, a: Any, b: Any) -> Any:
        """The value that is right in both branches; Differs where there is none."""
        if a is b or a == b:
            return a
        if isinstance(a, Sequence) and isinstance(b, Sequence):
            return self._sequence(a, b)
        for known, one, other in ((self.facts[0], a, b), (self.facts[1], b, a)):
            table = getattr(other, "table", None)
            if (
                table is None or known.get(table) is not True
            ):  # row weights are None, and so are gathered ones
                continue
            is_none = one == Constant(None) or one == Item("v_W_l", table)
            if is_none and other in (LookupWeights(table), Item("v_W_l", table)):
                return other
            if one == Pooled(table, None) and other == Pooled(table, LookupWeights(table)):
                return other
        return Differs()

    def contents(self, a: Contents, b: Contents) -> Contents:
        """Of a list, or of a frame, after each branch."""
        if isinstance(a, list):
            assert isinstance(b, list)
            if len(a) != len(b):
                raise Refused("makes a list whose length depends on the input")
            return [one if one is other else self.merge(one, other) for one, other in zip(a, b, strict=True)]
        assert isinstance(b, dict)
        return {name: self.merge(a.get(name, Differs()), b.get(name, Differs())) for name in {**a, **b}}

    def _sequence(self, a: Sequence, b: Sequence) -> Any:
        pair = (id(a), id(b))
        if pair not in self._pairs:
            # Two names of one list in a branch must be two names of one list in the other as well.
            partners = [self._partner.setdefault((side, own), other) == other
                        for side, own, other in ((0, id(a), id(b)), (1, id(b), id(a)))]  # fmt: skip
            are_new = min(a.number, b.number) > self.begin or a.is_tuple
            if not all(partners) or not are_new or (len(a.items), a.is_tuple) != (len(b.items), b.is_tuple):
                return Differs()
            self._alive += (a, b)
            merged = self._pairs[pair] = Sequence([], a.is_tuple)
            merged.items = [self.merge(one, other) for one, other in zip(a.items, b.items, strict=True)]
        return self._pairs[pair]


def negated(test: Test) -> Test:
    """``not test``."""
    return Test(test.if_false, test.if_true)


def described(value: Any) -> str:
    """A value in messages."""
    if isinstance(value, Item):
        return f"{value.name}[{value.table}]"
    if isinstance(value, Argument):
        return value.name
    if isinstance(value, Pooled):
        return f"what table {value.table} returns"
    if isinstance(value, LookupWeights):
        return f"the row weights of table {value.table}"
    if isinstance(value, Member):
        return f"{described(value.owner)}.{value.name}"
    return "something that is not followed"
