"""``Expressions``: evaluates the expressions of a method on symbolic values."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable
from typing import Any

from recfuse.passes.method.branches import Branches
from recfuse.passes.method.reads import Reads
from recfuse.passes.method.source import FunctionNode, Refused
from recfuse.passes.method.values import (
    PLAIN,
    Argument,
    Constant,
    Differs,
    Frame,
    Inner,
    Item,
    LookupWeights,
    Member,
    Pooled,
    Sequence,
    Test,
    described,
    negated,
)

Iterated = tuple[list[Any], list[tuple[Sequence, int]]]
"""The items of a loop, and the lists that it iterates over, each with its number of writes so far."""
_LOOKUPS = Argument("lS_o"), Argument("lS_i")
_MOST_NUMBER, _MOST_ITEMS = 1 << 40, 1 << 20
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


@functools.lru_cache(maxsize=256)
def local_names(node: ast.AST) -> frozenset[str]:
    """Return the names that a function may assign to; includes those of functions inside it."""
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)):
            raise Refused(f"uses {type(inner).__name__.lower()}")
        if isinstance(inner, ast.arg):
            names.add(inner.arg)
        elif isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
            names.add(inner.id)
        elif isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and inner is not node:
            names.add(inner.name)
    return frozenset(names)


class Expressions(Branches):
    """Evaluates expressions. Raises Refused unless an expression is known to be pure and unambiguous."""

    def __init__(self, reads: Reads, tables: int) -> None:
        """See Branches."""
        super().__init__(reads, tables)
        self._steps = 500 * (tables + 20)

    def call(self, node: ast.Call, frame: Frame) -> Any:
        """Return the value of a call."""
        raise NotImplementedError

    def iterated(self, node: ast.expr, frame: Frame) -> Iterated:
        """Return the items of a loop over an expression."""
        raise NotImplementedError

    def called(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return the value of a call of a symbolic value with symbolic arguments."""
        raise NotImplementedError

    def attribute(self, owner: Any, name: str) -> Any:
        """Return ``owner.<name>``."""
        raise NotImplementedError

    def assign_to(self, target: ast.expr, value: Any, frame: Frame) -> None:
        """Assign a value to the target of an assignment or a loop."""
        if isinstance(target, ast.Name):
            self.assign(frame, target.id, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            items = self.items_of(value)
            if len(items) != len(target.elts):
                raise Refused(f"takes {len(target.elts)} values of {len(items)}")
            for part, item in zip(target.elts, items, strict=True):
                self.assign_to(part, item, frame)
        elif isinstance(target, ast.Subscript):
            owner, at = self.value(target.value, frame), self.value(target.slice, frame)
            if (
                not isinstance(owner, Sequence)
                or owner.is_tuple
                or type(getattr(at, "value", None)) is not int
            ):
                raise Refused(f"writes to {ast.unparse(target)}")
            if not -len(owner.items) <= at.value < len(owner.items):
                raise Refused("writes past the end of a list")
            self.written(owner)[at.value] = value
        else:
            raise Refused(f"writes to {ast.unparse(target)}")

    def value(self, node: ast.expr, frame: Frame) -> Any:
        """Return the value of an expression."""
        self._steps -= 1
        if self._steps < 0:
            raise Refused("takes more steps than the proof follows")
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise Refused(f"has an expression ({type(node).__name__}) that the proof does not follow")
        return method(node, frame)

    def name(self, name: str, frame: Frame) -> Any:
        """Return a variable, looked up in the order of Python's scopes."""
        if name.startswith("__") and not name.endswith("__"):
            raise Refused(f"reads {name}, a private name")
        inner: Frame | None = frame
        while inner is not None:
            if name in inner.names:
                value = inner.names[name]
                if isinstance(value, Differs):
                    raise Refused(f"reads {name}, whose value depends on the input")
                return value
            if name in inner.local_names:
                raise Refused(f"reads {name} before it has a value")
            inner = inner.parent
        return self.reads.variable(frame.function, name)

    def items_of(self, value: Any) -> list[Any]:
        """Return the items of a loop over a value."""
        if isinstance(value, Sequence):
            return list(value.items)
        if isinstance(value, Argument):
            return [Item(value.name, table) for table in range(self.tables)]
        raise Refused("iterates over a value that is neither an argument nor its own list")

    def _constant(self, node: ast.Constant, frame: Frame) -> Any:
        if type(node.value) not in PLAIN:
            raise Refused(f"uses {node.value!r}")
        return Constant(node.value)

    def _name(self, node: ast.Name, frame: Frame) -> Any:
        return self.name(node.id, frame)

    def _attribute(self, node: ast.Attribute, frame: Frame) -> Any:
        return self.attribute(self.value(node.value, frame), node.attr)

    def _call(self, node: ast.Call, frame: Frame) -> Any:
        return self.call(node, frame)

    def _list(self, node: ast.List | ast.Tuple, frame: Frame) -> Any:
        items: list[Any] = []
        for item in node.elts:
            if isinstance(item, ast.Starred):
                items += self.iterated(item.value, frame)[0]
            else:
                items.append(self.value(item, frame))
        return Sequence(items, isinstance(node, ast.Tuple))

    _tuple = _list

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp, frame: Frame) -> Any:
        targets = frozenset().union(*(local_names(generator.target) for generator in node.generators))
        inner = Frame(frame.function, targets, frame)
        items: list[Any] = []

        def rounds(generators: list[ast.comprehension]) -> None:
            if not generators:
                items.append(self.value(node.elt, inner))
                return
            first, *inner_generators = generators
            iterable, lists = self.iterated(first.iter, frame if first is node.generators[0] else inner)
            for item in iterable:
                self.assign_to(first.target, item, inner)
                tests = [self.truth(self.value(test, inner)) for test in first.ifs]
                if not all(isinstance(test, bool) for test in tests):
                    raise Refused("makes a list whose length depends on the input")
                if all(tests):
                    rounds(inner_generators)
                if any(read.writes != writes for read, writes in lists):
                    raise Refused("writes to a list while it iterates over it")

        rounds(node.generators)
        return Sequence(items)

    def _ifexp(self, node: ast.IfExp, frame: Frame) -> Any:
        test = self.truth(self.value(node.test, frame))
        return self.either(test, lambda: self.value(node.body, frame), lambda: self.value(node.orelse, frame))

    def _boolop(self, node: ast.BoolOp, frame: Frame) -> Any:
        is_and = isinstance(node.op, ast.And)
        result = self.value(node.values[0], frame)
        for operand in node.values[1:]:
            test = self.truth(result)
            if test is not is_and and isinstance(test, bool):
                return result
            if isinstance(test, bool):
                result = self.value(operand, frame)
                continue
            before = self.facts
            self.facts = {**before, **dict(test.if_true if is_and else test.if_false)}
            try:
                with self.lazy():
                    result = self.both(test, self.value(operand, frame), is_and)
            finally:
                self.facts = before
        return result

    def both(self, test: Test, other: Any, is_and: bool) -> Any:
        """Return ``test and other``, or ``test or other``."""
        if isinstance(other, Constant) and type(other.value) is bool:
            return test if other.value is is_and else other
        if not isinstance(other, Test):
            raise Refused("branches on a value that is known only in a call")
        if is_and:
            return Test((*test.if_true, *other.if_true), ())
        return Test((), (*test.if_false, *other.if_false))

    def _unaryop(self, node: ast.UnaryOp, frame: Frame) -> Any:
        operand = self.value(node.operand, frame)
        if isinstance(node.op, ast.Not):
            test = self.truth(operand)
            return negated(test) if isinstance(test, Test) else Constant(not test)
        if (
            isinstance(node.op, ast.USub)
            and isinstance(operand, Constant)
            and type(operand.value) in (int, float)
        ):
            return Constant(-operand.value)
        raise Refused(_changes(operand))

    def _binop(self, node: ast.BinOp, frame: Frame) -> Any:
        return operated(node.op, self.value(node.left, frame), self.value(node.right, frame))

    def _compare(self, node: ast.Compare, frame: Frame) -> Any:
        if len(node.ops) != 1:
            raise Refused("has a chain of comparisons")
        op, left, right = node.ops[0], self.value(node.left, frame), self.value(node.comparators[0], frame)
        if isinstance(op, (ast.Is, ast.IsNot)):
            is_same = self._is(left, right)
            return is_same if isinstance(op, ast.Is) else self._unary_not(is_same)
        if isinstance(op, (ast.In, ast.NotIn)):
            items = right.items if isinstance(right, Sequence) else [right]
            if not all(isinstance(item, Constant) for item in (left, *items)) or items == [right]:
                raise Refused("compares values that are known only in a call")
            return Constant((left.value in [item.value for item in items]) is isinstance(op, ast.In))
        if not isinstance(left, Constant) or not isinstance(right, Constant) or type(op) not in _OPERATORS:
            raise Refused("compares values that are known only in a call")
        return operated(op, left, right)

    def _unary_not(self, operand: Any) -> Any:
        return negated(operand) if isinstance(operand, Test) else Constant(not operand.value)

    def _is(self, left: Any, right: Any) -> Any:
        if not isinstance(right, Constant) or not (right.value is None or type(right.value) is bool):
            raise Refused("compares objects")
        if isinstance(left, Constant):
            return Constant(left.value is right.value)
        if right.value is None and (isinstance(left, LookupWeights) or _is_row_weights(left)):
            has_weights = self.facts.get(left.table)
            return (
                Test(((left.table, True),), ((left.table, False),))
                if has_weights is None
                else Constant(has_weights)
            )
        if isinstance(left, (Argument, Item, Pooled, Sequence)):
            return Constant(False)
        raise Refused("compares objects")

    def _lambda(self, node: ast.Lambda, frame: Frame) -> Any:
        return self.inner(node, frame)

    def inner(self, node: FunctionNode, frame: Frame) -> Inner:
        """Return a function that is defined inside another."""
        if getattr(node, "decorator_list", ()):
            raise Refused("has a function with a decorator")
        local_names(node)  # raises if it is a generator
        args = node.args
        names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
        defaults = dict(zip(names[len(names) - len(args.defaults) :], args.defaults, strict=True))
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
            if default is not None:
                defaults[arg.arg] = default
        return Inner(node, frame, {name: self.value(default, frame) for name, default in defaults.items()})

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        owner = self.value(node.value, frame)
        if isinstance(node.slice, ast.Slice) and isinstance(owner, Sequence):
            parts = (node.slice.lower, node.slice.upper, node.slice.step)
            ends = [None if part is None else self.value(part, frame) for part in parts]
            if all(
                end is None or (isinstance(end, Constant) and type(end.value) in (int, type(None)))
                for end in ends
            ):
                chosen = slice(*(None if end is None else end.value for end in ends))
                if chosen.step != 0:
                    return Sequence(owner.items[chosen], owner.is_tuple)
        at = node.slice
        if isinstance(at, ast.Tuple) and owner in _LOOKUPS and [*map(ast.unparse, at.elts[1:])] == [":"]:
            at = at.elts[0]  # lS_o[k, :]
        if isinstance(at, (ast.Slice, ast.Tuple)):
            raise Refused(f"takes a slice, {ast.unparse(node)}")
        index = self.value(at, frame)
        if _is_row_weights(owner):
            return self.called(self.attribute(owner, "take"), [index], {})
        number = getattr(index, "value", None)
        size = len(owner.items) if isinstance(owner, Sequence) else self.tables
        if isinstance(owner, (Sequence, Argument)) and type(number) is int and -size <= number < size:
            if isinstance(owner, Argument):
                return Item(owner.name, number % size)
            if not isinstance(owner.items[number], Differs):
                return owner.items[number]
        raise Refused(f"takes {ast.unparse(node)}")


def _is_row_weights(value: Any) -> bool:
    return isinstance(value, Item) and value.name == "v_W_l"


def operated(op: ast.operator | ast.cmpop, left: Any, right: Any) -> Any:
    """Return the result of an operator on plain numbers and texts, or of joining or repeating lists."""
    if isinstance(left, Sequence) and not left.is_tuple:
        is_list = isinstance(right, Sequence) and not right.is_tuple
        if isinstance(op, ast.Add) and is_list:
            return Sequence(left.items + right.items)
        number = right.value if isinstance(right, Constant) else None
        if isinstance(op, ast.Mult) and type(number) is int and len(left.items) * number < _MOST_ITEMS:
            return Sequence(left.items * number)
    if not isinstance(left, Constant) or not isinstance(right, Constant):
        raise Refused(_changes(left, right))
    function = _OPERATORS.get(type(op))
    is_number = all(type(item.value) in (int, float, bool) for item in (left, right))
    if function is None or not (is_number or type(op) in (ast.Eq, ast.NotEq)):
        raise Refused("computes a value that the proof does not follow")
    try:
        result = function(left.value, right.value)
    except (ArithmeticError, TypeError) as error:
        raise Refused(f"raises {type(error).__name__}") from None
    if type(result) in (int, float) and not abs(result) < _MOST_NUMBER:
        raise Refused("computes a value that the proof does not follow")
    return Constant(result)


def _changes(*values: Any) -> str:
    for value in values:
        if isinstance(value, (Pooled, Item, LookupWeights, Member)):
            return f"changes {described(value)}"
    return "computes a value that the proof does not follow"
