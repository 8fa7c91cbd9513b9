"""``Statements``: runs the statements of a method on symbolic values."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from recfuse.passes.method.expressions import Expressions, operated
from recfuse.passes.method.source import Refused
from recfuse.passes.method.values import Constant, Frame, Sequence

Completion = tuple[str, Any]
"""The end of a block of statements: "next", "break", "continue", or "return" with a value."""
_NEXT: Completion = ("next", None)
_STATEMENTS = {
    ast.With: "a with block", ast.Try: "a try block", ast.Raise: "raise", ast.Global: "global",
    ast.Nonlocal: "nonlocal", ast.Import: "import", ast.ImportFrom: "import", ast.Delete: "del",
}  # fmt: skip


class Statements(Expressions):
    """Runs statements on symbolic values."""

    def run(self, statements: list[ast.stmt], frame: Frame) -> Completion:
        """Run a list of statements. After an ``if``, both branches continue with the rest of the list."""
        for at, statement in enumerate(statements):
            try:
                if isinstance(statement, ast.If):
                    following = statements[at + 1 :]
                    test = self.truth(self.value(statement.test, frame))
                    ways = [[*branch, *following] for branch in (statement.body, statement.orelse)]
                    return self.either(test, *(lambda way=way: self.run(way, frame) for way in ways))  # type: ignore[misc]
                completion = self._statement(statement, frame)
            except Refused as refused:
                raise refused.at(statement, frame.function) from None
            if completion[0] != "next":
                return _NEXT if completion[0] == "continue" else completion
        return _NEXT

    def _statement(self, node: ast.stmt, frame: Frame) -> Completion:
        if isinstance(node, ast.Expr):
            self.value(node.value, frame)
        elif isinstance(node, ast.Assign):
            value = self.value(node.value, frame)
            for target in node.targets:
                self.assign_to(target, value, frame)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign_to(node.target, self.value(node.value, frame), frame)
        elif isinstance(node, ast.AugAssign):
            self._assign_in_place(node, frame)
        elif isinstance(node, ast.Return):
            return "return", Constant(None) if node.value is None else self.value(node.value, frame)
        elif isinstance(node, ast.Continue):
            return "continue", None
        elif isinstance(node, ast.Break):
            return "break", None
        elif isinstance(node, (ast.For, ast.While)):
            return self._loop(node, frame)
        elif isinstance(node, ast.Assert):
            if self.truth(self.value(node.test, frame)) is not True:
                raise Refused("asserts a property of the input")
        elif isinstance(node, ast.FunctionDef):
            self.assign(frame, node.name, self.inner(node, frame))
        elif not isinstance(node, (ast.Pass, ast.AnnAssign)):
            raise Refused(f"uses {_STATEMENTS.get(type(node), type(node).__name__)}")
        return _NEXT

    def _loop(self, node: ast.For | ast.While, frame: Frame) -> Completion:
        for item in self._rounds(node, frame):
            if isinstance(node, ast.For):
                self.assign_to(node.target, item, frame)
            completion = self.run(node.body, frame)
            if completion[0] == "break":
                return _NEXT
            if completion[0] == "return":
                return completion
        return self.run(node.orelse, frame)

    def _rounds(self, node: ast.For | ast.While, frame: Frame) -> Iterator[Any]:
        if isinstance(node, ast.For):
            items, lists = self.iterated(node.iter, frame)
            for item in items:
                yield item
                if any(read.writes != writes for read, writes in lists):
                    raise Refused("writes to a list while it iterates over it")
            return
        while (test := self.truth(self.value(node.test, frame))) is True:
            yield None
        if test is not False:
            raise Refused("repeats a loop as often as the input decides")

    def _assign_in_place(self, node: ast.AugAssign, frame: Frame) -> None:
        if not isinstance(node.target, ast.Name):
            raise Refused(f"writes to {ast.unparse(node.target)}")
        before = self.name(node.target.id, frame)
        if isinstance(before, Sequence) and not before.is_tuple and isinstance(node.op, ast.Add):
            added = self.iterated(node.value, frame)[0]
            self.written(before).extend(added)
        else:
            self.assign(frame, node.target.id, operated(node.op, before, self.value(node.value, frame)))
