"""``MethodReader``: evaluates calls of tables, row weights, lists, functions of Python and builtins."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from recfuse.passes.method.expressions import Iterated, local_names
from recfuse.passes.method.reads import MISSING
from recfuse.passes.method.source import Refused, syntax_of
from recfuse.passes.method.statements import Statements
from recfuse.passes.method.values import (
    PLAIN,
    Constant,
    Frame,
    Function,
    Getter,
    Inner,
    Item,
    LookupWeights,
    Member,
    Model,
    Object,
    Pooled,
    Sequence,
    Super,
    Test,
    described,
)

_FORWARD = inspect.signature(lambda input, offsets=None, per_sample_weights=None: None)
_GATHERS = {
    "gather": inspect.signature(lambda dim, index: None),
    "index_select": inspect.signature(lambda dim, index: None),
    "take": inspect.signature(lambda index: None),
}
_TORCH_GATHERS = {id(getattr(torch, name)): name for name in _GATHERS}
_MOST_DEEP = 20


class MethodReader(Statements):
    """A reader that follows calls."""

    _depth = 0

    def call(self, node: ast.Call, frame: Frame) -> Any:
        """Return the value of a call. Iterators such as ``zip`` are refused outside a loop."""
        function = self.value(node.func, frame)
        if isinstance(function, Object) and (result := self._builtin(function, node, frame)) is not None:
            return result
        args: list[Any] = []
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                args += self.iterated(arg.value, frame)[0]
            else:
                args.append(self.value(arg, frame))
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            result = self.value(keyword.value, frame)
            if keyword.arg is not None:
                kwargs[keyword.arg] = result
            elif isinstance(result, dict):
                kwargs |= result
            else:
                raise Refused("passes **keywords of unknown names")
        return self.called(function, args, kwargs)

    def called(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return the value of a call with these values."""
        if isinstance(function, Item) and function.name == "emb_l":
            return self._pooled(function.table, args, kwargs)
        if isinstance(function, Member):
            return self._member_called(function.owner, function.name, args, kwargs)
        if isinstance(function, Function):
            node = syntax_of(function.function)
            frame = Frame(function.function, local_names(node))
            return self._entered(node, frame, [*function.bound, *args], kwargs, _defaults(function.function))
        if isinstance(function, Inner):
            frame = Frame(function.frame.function, local_names(function.node), function.frame)
            return self._entered(function.node, frame, args, kwargs, function.defaults)
        if isinstance(function, Object):
            if id(function.value) in _TORCH_GATHERS and args:
                return self._gathered(_TORCH_GATHERS[id(function.value)], args[0], args[1:], kwargs)
            raise Refused(f"calls {function.name}")
        raise Refused("calls a value that is neither a table nor a function")

    def attribute(self, owner: Any, name: str) -> Any:
        """Return ``owner.<name>``."""
        if name.startswith("__"):
            raise Refused(f"reads {name}, a private name")
        if isinstance(owner, Model):
            value = self.reads.attribute(name, self.facts)
        elif isinstance(owner, Super):
            value = self.reads.above(owner.owner, name)
        elif isinstance(owner, Object) and isinstance(owner.value, (type, types.ModuleType)):
            value = self.reads.of_object(owner.value, name, owner.name)
        else:
            value = Member(owner, name)
        return self.called(value.function, [], {}) if isinstance(value, Getter) else value

    def iterated(self, node: ast.expr, frame: Frame) -> Iterated:
        """Return the items of a loop over an expression; only here may it be ``zip`` or another iterator."""
        if isinstance(node, ast.GeneratorExp):
            with self.lazy():
                return self._listcomp(node, frame).items, []
        function = self.value(node.func, frame) if isinstance(node, ast.Call) else None
        iterator = _ITERATORS.get(id(function.value)) if isinstance(function, Object) else None
        if not isinstance(node, ast.Call) or not isinstance(function, Object) or iterator is None:
            value = self.value(node, frame)
            lists = [(value, value.writes)] if isinstance(value, Sequence) else []
            return self.items_of(value), lists
        if any(isinstance(arg, ast.Starred) for arg in node.args):
            raise Refused(f"passes *arguments to {function.name}")
        keywords = {keyword.arg: self.value(keyword.value, frame) for keyword in node.keywords}
        return iterator(self, node.args, keywords, frame)

    # ---- tables and row weights

    def _pooled(self, table: int, args: list[Any], kwargs: dict[str, Any]) -> Pooled:
        arguments = _bound(_FORWARD, args, kwargs, f"calls table {table}")
        lookups = arguments["input"], arguments["offsets"]
        if lookups != (Item("lS_i", table), Item("lS_o", table)):
            raise Refused(f"calls table {table} with other lookups than lS_i[{table}] and lS_o[{table}]")
        weights = arguments["per_sample_weights"]
        if weights in (None, Constant(None)) or (
            weights == Item("v_W_l", table) and self.facts.get(table) is True
        ):
            return Pooled(table, None)
        if weights != LookupWeights(table):
            raise Refused(f"calls table {table} with other row weights than v_W_l[{table}] of its lookups")
        return Pooled(table, weights)

    def _gathered(self, name: str, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> LookupWeights:
        if not isinstance(owner, Item) or owner.name != "v_W_l":
            raise Refused(f"calls {name} of a value that is no row weight")
        arguments = _bound(_GATHERS[name], args, kwargs, f"calls {name}")
        is_row = arguments.get("dim", Constant(0)) in (Constant(0), Constant(-1))
        if (
            not is_row
            or arguments["index"] != Item("lS_i", owner.table)
            or self.facts.get(owner.table) is True
        ):
            raise Refused(f"reads v_W_l[{owner.table}] at other rows than lS_i[{owner.table}]")
        return LookupWeights(owner.table)

    def _member_called(self, owner: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(owner, Item) and owner.name == "emb_l" and name == "forward":
            return self._pooled(owner.table, args, kwargs)
        if isinstance(owner, Item) and owner.name == "v_W_l" and name in _GATHERS:
            return self._gathered(name, owner, args, kwargs)
        if isinstance(owner, Sequence) and not owner.is_tuple and not kwargs:
            if name == "append" and len(args) == 1:
                self.written(owner).append(args[0])
                return Constant(None)
            if name == "extend" and len(args) == 1:
                added = self.items_of(args[0])
                self.written(owner).extend(added)
                return Constant(None)
        raise Refused(f"calls {name} of {described(owner)}")

    # ---- functions of Python

    def _entered(
        self, node: Any, frame: Frame, args: list[Any], kwargs: dict[str, Any], defaults: dict[str, Any]
    ) -> Any:
        """Return the value of a call of a function, which runs in this frame."""
        frame.names = _parameters(node.args, args, kwargs, defaults)
        self._depth += 1
        if self._depth > _MOST_DEEP:
            raise Refused("nests calls more deeply than the proof follows")
        try:
            if isinstance(node, ast.Lambda):
                return self.value(node.body, frame)
            kind, result = self.run(node.body, frame)
            return result if kind == "return" else Constant(None)
        finally:
            self._depth -= 1

    def _builtin(self, function: Object, node: ast.Call, frame: Frame) -> Any:
        """Return the value of a call of a supported builtin, else None."""
        builtin = function.value
        if builtin is super:
            return self._super(node, frame)
        if builtin in (list, tuple) and len(node.args) == 1 and not node.keywords:
            return Sequence(self.iterated(node.args[0], frame)[0], builtin is tuple)
        if builtin is list and not node.args and not node.keywords:
            return Sequence([])
        if builtin is len and len(node.args) == 1 and not node.keywords:
            return Constant(len(self.items_of(self.value(node.args[0], frame))))
        if (builtin is all or builtin is any) and len(node.args) == 1 and not node.keywords:
            return self._quantified(self.iterated(node.args[0], frame)[0], builtin is all)
        if (builtin is getattr and len(node.args) in (2, 3)) or (builtin is hasattr and len(node.args) == 2):
            return self._attribute_called(builtin is hasattr, [self.value(arg, frame) for arg in node.args])
        return None

    def _quantified(self, items: list[Any], is_all: bool) -> Any:
        result: Any = Constant(is_all)
        for item in items:
            test = self.truth(item)
            if isinstance(test, bool):
                if test is not is_all:
                    return Constant(not is_all)
            elif isinstance(result, Test):
                result = self.both(result, test, is_all)
            else:
                result = test
        return result

    def _attribute_called(self, is_hasattr: bool, args: list[Any]) -> Any:
        owner, name = args[:2]
        if not isinstance(owner, Model) or not isinstance(name, Constant) or type(name.value) is not str:
            raise Refused("reads an attribute of a value other than the model")
        default = MISSING if len(args) == 2 and not is_hasattr else args[2] if len(args) == 3 else None
        attribute = self.reads.attribute(name.value, self.facts, default)
        if is_hasattr:
            return Constant(attribute is not None)
        return self.called(attribute.function, [], {}) if isinstance(attribute, Getter) else attribute

    def _super(self, node: ast.Call, frame: Frame) -> Super:
        if node.keywords or len(node.args) not in (0, 2):
            raise Refused("calls super in a form that the proof does not follow")
        if node.args:
            owner, self_ = (self.value(arg, frame) for arg in node.args)
            if isinstance(owner, Object) and isinstance(owner.value, type) and isinstance(self_, Model):
                return Super(owner.value)
        function = frame.function
        names = function.__code__.co_freevars
        first = function.__code__.co_varnames[:1]
        if node.args or "__class__" not in names or not isinstance(frame.names.get(*first), Model):
            raise Refused("calls super in a form that the proof does not follow")
        return Super((function.__closure__ or ())[names.index("__class__")].cell_contents)


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    values = {
        **dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)),
        **(function.__kwdefaults__ or {}),
    }
    return {
        name: Constant(value) if type(value) in PLAIN else Object(value, f"its default {name}")
        for name, value in values.items()
    }


def _bound(
    signature: inspect.Signature, args: list[Any], kwargs: dict[str, Any], words: str
) -> dict[str, Any]:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise Refused(f"{words} with other arguments: {error}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def _parameters(
    spec: ast.arguments, args: list[Any], kwargs: dict[str, Any], defaults: dict[str, Any]
) -> dict[str, Any]:
    """Return the variables that a call gives to a function."""
    empty, kinds = inspect.Parameter.empty, inspect.Parameter
    parameters = [
        *(inspect.Parameter(arg.arg, kinds.POSITIONAL_ONLY) for arg in spec.posonlyargs),
        *(inspect.Parameter(arg.arg, kinds.POSITIONAL_OR_KEYWORD) for arg in spec.args),
        *([inspect.Parameter(spec.vararg.arg, kinds.VAR_POSITIONAL)] if spec.vararg else []),
        *(inspect.Parameter(arg.arg, kinds.KEYWORD_ONLY) for arg in spec.kwonlyargs),
        *([inspect.Parameter(spec.kwarg.arg, kinds.VAR_KEYWORD)] if spec.kwarg else []),
    ]
    signature = inspect.Signature(
        [parameter.replace(default=defaults.get(parameter.name, empty)) for parameter in parameters]
    )
    variables = _bound(signature, args, kwargs, "calls a function")
    if spec.vararg:
        variables[spec.vararg.arg] = Sequence(list(variables[spec.vararg.arg]), is_tuple=True)
    return variables


# ---- iterators of loops


def _zip(reader: MethodReader, args: list[ast.expr], keywords: dict[Any, Any], frame: Frame) -> Iterated:
    if set(keywords) - {"strict"}:
        raise Refused("calls zip with other arguments")
    iterables = [reader.iterated(arg, frame) for arg in args]
    if (
        keywords.get("strict", Constant(False)) != Constant(False)
        and len({len(items) for items, _ in iterables}) > 1
    ):
        raise Refused("zips lists of different lengths")
    rows = zip(*(items for items, _ in iterables), strict=False)
    return [Sequence(list(row), is_tuple=True) for row in rows], [
        read for _, lists in iterables for read in lists
    ]


def _enumerate(
    reader: MethodReader, args: list[ast.expr], keywords: dict[Any, Any], frame: Frame
) -> Iterated:
    if len(args) not in (1, 2) or set(keywords) - {"start"}:
        raise Refused("calls enumerate with other arguments")
    items, lists = reader.iterated(args[0], frame)
    start = reader.value(args[1], frame) if len(args) == 2 else keywords.get("start", Constant(0))
    if type(getattr(start, "value", None)) is not int:
        raise Refused("calls enumerate with other arguments")
    numbered = enumerate(items, start.value)
    return [Sequence([Constant(number), item], is_tuple=True) for number, item in numbered], lists


def _reversed(reader: MethodReader, args: list[ast.expr], keywords: dict[Any, Any], frame: Frame) -> Iterated:
    if len(args) != 1 or keywords or isinstance(args[0], ast.GeneratorExp):
        raise Refused("calls reversed with other arguments")
    items, lists = reader.iterated(args[0], frame)
    return items[::-1], lists


def _range(reader: MethodReader, args: list[ast.expr], keywords: dict[Any, Any], frame: Frame) -> Iterated:
    ends = [reader.value(arg, frame) for arg in args]
    if keywords or not all(isinstance(end, Constant) and type(end.value) is int for end in ends):
        raise Refused("counts to a value that is known only in a call")
    try:
        numbers = range(*(end.value for end in ends))
    except (TypeError, ValueError) as error:
        raise Refused(f"raises {type(error).__name__}") from None
    if len(numbers) > 1 << 20:
        raise Refused("takes more steps than the proof follows")
    return [Constant(number) for number in numbers], []


def _map(reader: MethodReader, args: list[ast.expr], keywords: dict[Any, Any], frame: Frame) -> Iterated:
    if len(args) < 2 or keywords:
        raise Refused("calls map with other arguments")
    function = reader.value(args[0], frame)
    rows, lists = _zip(reader, args[1:], {}, frame)
    with reader.lazy():
        return [reader.called(function, list(row.items), {}) for row in rows], lists


_Iterator = Callable[[MethodReader, list[ast.expr], dict[Any, Any], Frame], Iterated]
_ITERATORS: dict[int, _Iterator] = {
    id(zip): _zip, id(enumerate): _enumerate, id(reversed): _reversed, id(range): _range, id(map): _map,
}  # fmt: skip
