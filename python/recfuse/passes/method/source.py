"""Returns the syntax tree of a function, and verifies that the function was compiled from it."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from types import CodeType, FunctionType

FunctionNode = ast.FunctionDef | ast.Lambda
_MOST_TEXT = 60


class Refused(Exception):
    """The reason why a method is not proven. Its text continues "apply_emb", with the line if known."""

    is_placed = False

    def at(self, node: ast.stmt, function: FunctionType) -> Refused:
        """Return the same reason with the statement that caused it, unless it has a statement."""
        if self.is_placed:
            return self
        text = ast.unparse(node).split("\n")[0]
        text = text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."
        file = function.__code__.co_filename.rpartition("/")[2]
        placed = Refused(f"{self} ({file}:{node.lineno}: {text})")
        placed.is_placed = True
        return placed


def syntax_of(function: FunctionType) -> FunctionNode:
    """Return the tree of a function. Raises Refused if its source is missing, or changed after the import."""
    code = function.__code__
    node = _syntax(code, "".join(linecache.getlines(code.co_filename, function.__globals__)))
    if node is None:
        raise Refused(f"calls {function.__qualname__}, whose source is missing or differs from its code")
    return node


@functools.lru_cache(maxsize=64)
def _syntax(code: CodeType, source: str) -> FunctionNode | None:
    try:
        tree = ast.parse(source)
        compiled = compile(source, code.co_filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    nodes = [node for node in ast.walk(tree) if isinstance(node, FunctionNode) and _is_at(node, code)]
    if len(nodes) != 1 or not any(_same_code(code, other) for other in _codes_in(compiled)):
        return None
    return nodes[0]


def _is_at(node: FunctionNode, code: CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return node.name == code.co_name and first == code.co_firstlineno


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_in(constant)


def _same_code(a: CodeType, b: CodeType) -> bool:
    """Return whether two code objects are equal, also if they come from different compilations."""
    names = ("co_name", "co_firstlineno", "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars",
             "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags")  # fmt: skip
    if any(getattr(a, name) != getattr(b, name) for name in names) or len(a.co_consts) != len(b.co_consts):
        return False
    return all(
        _same_code(constant, compiled) if isinstance(constant, CodeType) and isinstance(compiled, CodeType)
        else type(constant) is type(compiled) and repr(constant) == repr(compiled)
        for constant, compiled in zip(a.co_consts, b.co_consts, strict=True)
    )  # fmt: skip
