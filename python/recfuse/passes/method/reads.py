"""Values that a method reads besides its arguments: plain attributes of the model, and functions by name."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch

from recfuse.errors import a_type
from recfuse.passes.method.source import Refused
from recfuse.passes.method.values import (
    PLAIN,
    TRAINING,
    Argument,
    Constant,
    Facts,
    Function,
    Getter,
    Model,
    Object,
    Test,
)

MISSING = object()


@dataclass
class Guards:
    """Conditions of a proof, compared before each call. A call that violates them runs the method itself."""

    flags: dict[str, Any] = field(default_factory=dict)  # plain attributes of the model or its class
    absent: set[str] = field(default_factory=set)  # attributes that the model must not have
    inherited: set[str] = field(default_factory=set)  # attributes that only the class may have
    code: dict[FunctionType, tuple[CodeType, Any]] = field(default_factory=dict)  # with the defaults
    members: dict[tuple[int, str], tuple[Any, Any]] = field(default_factory=dict)  # of classes and closures
    variables: dict[tuple[int, str], tuple[dict[str, Any], Any]] = field(default_factory=dict)  # of modules

    def code_is_same(self) -> bool:
        """Return whether every function is still the function that was read."""
        for function, (code, defaults) in self.code.items():
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return False
        for (_, name), (owner, value) in self.members.items():
            if getattr(owner, name, MISSING) is not value:
                return False
        return all(names.get(name, MISSING) is value for (_, name), (names, value) in self.variables.items())


class Reads:
    """Looks names up as Python does, without running code, and records the guards of each lookup."""

    def __init__(self, kind: type, attributes: Mapping[str, Any]) -> None:
        """``attributes`` are those of the object, submodules and tensors included; ``kind`` is its class."""
        self.kind, self.attributes = kind, attributes
        self.guards = Guards()
        self.own_tables = False  # whether the method reads self.emb_l

    def attribute(self, name: str, facts: Facts, default: Any = MISSING) -> Any:
        """Return ``self.<name>`` as a value or a function, or ``default`` if the model does not have it."""
        if self.kind.__getattribute__ is not object.__getattribute__:
            raise Refused(f"reads self.{name} of a class with __getattribute__")
        static = inspect.getattr_static(self.kind, name, MISSING)
        if isinstance(static, property):
            return Getter(self._function(static.fget, self.kind, name, static, (Model(),)))
        if static is not MISSING and hasattr(type(static), "__set__"):
            raise Refused(f"reads self.{name}, {a_type(static)} of its class")
        if name == TRAINING and static is MISSING:
            training = facts.get(TRAINING)
            return Test(((TRAINING, True),), ((TRAINING, False),)) if training is None else Constant(training)
        if name == "emb_l" and static is MISSING:
            self.own_tables = True
            return Argument("emb_l")
        value = self.attributes.get(name, static)
        if isinstance(value, PLAIN) and type(value) in PLAIN:
            self.guards.flags[name] = value
            return Constant(value)
        if name in self.attributes:
            raise Refused(f"reads self.{name}, {a_type(value)}, which may change")
        if static is MISSING:
            if (
                default is MISSING
                or getattr(self.kind, "__getattr__", None) is not torch.nn.Module.__getattr__
            ):
                raise Refused(f"reads self.{name}, which the model does not have")
            self.guards.absent.add(name)
            return default
        self.guards.inherited.add(name)
        return self.member(static, self.kind, name, (Model(),))

    def above(self, owner: type, name: str) -> Any:
        """Return ``super().<name>`` in a method of ``owner``."""
        above = self.kind.__mro__[self.kind.__mro__.index(owner) + 1 :] if owner in self.kind.__mro__ else ()
        for base in above:
            if name in vars(base):
                return self.member(vars(base)[name], base, name, (Model(),))
        raise Refused(f"reads super().{name}, which does not exist")

    def member(self, static: Any, owner: type, name: str, bound: tuple[Any, ...] = ()) -> Any:
        """Return a member of a class, read from an instance (``bound``) or from the class."""
        if isinstance(static, staticmethod):
            return self._function(static.__func__, owner, name, static.__func__, ())
        return self._function(static, owner, name, static, bound)

    def _function(
        self,
        function: Any,
        owner: type,
        name: str,
        guarded: Any,
        bound: tuple[Any, ...],
    ) -> Function:
        if type(function) is not FunctionType:
            raise Refused(
                f"reads {owner.__name__}.{name}, {a_type(function)}, which is no function of Python"
            )
        self.guards.members[id(owner), name] = owner, guarded
        return self._read(function, bound)

    def _read(self, function: FunctionType, bound: tuple[Any, ...]) -> Function:
        if _is_torch(function):
            raise Refused(f"calls {function.__qualname__}")
        self.guards.code[function] = function.__code__, function.__defaults__
        return Function(function, bound)

    def variable(self, function: FunctionType, name: str) -> Any:
        """Return a nonlocal variable of a function: from its closure, its module or builtins."""
        if name in function.__code__.co_freevars:
            cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
            try:
                value = cell.cell_contents
            except ValueError:
                raise Refused(f"reads {name} before it has a value") from None
            if type(value) is not FunctionType:
                raise Refused(f"reads {name} of its closure, {a_type(value)}, which may change")
            self.guards.members[id(cell), "cell_contents"] = cell, value
            return self._read(value, ())
        names = function.__globals__
        if name not in names:
            if not hasattr(builtins, name):
                raise Refused(f"reads {name}, which does not exist")
            return Object(getattr(builtins, name), name)
        value = names[name]
        if not isinstance(value, ModuleType):
            self.guards.variables[id(names), name] = names, value
        return self._object(value, name, f"the global {name}")

    def of_object(self, owner: Any, name: str, path: str) -> Any:
        """Return ``owner.<name>`` of a class or a module of Python."""
        if isinstance(owner, type):
            static = inspect.getattr_static(owner, name, MISSING)
            if static is not MISSING and isinstance(static, (staticmethod, FunctionType)):
                return self.member(static, owner, name)
            raise Refused(f"reads {path}.{name}, which may change")
        value = vars(owner).get(name, MISSING)
        if value is not MISSING and not isinstance(value, ModuleType) and not _is_torch(owner):
            self.guards.variables[id(owner), name] = vars(owner), value
        return self._object(value, f"{path}.{name}", f"{path}.{name}")

    def _object(self, value: Any, name: str, words: str) -> Any:
        if isinstance(value, FunctionType) and not _is_torch(value):
            return self._read(value, ())
        if isinstance(value, (ModuleType, type, FunctionType, BuiltinFunctionType, MethodDescriptorType)):
            return Object(value, name)
        raise Refused(f"reads {words}, {a_type(value)}, which may change")


def _is_torch(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0] == "torch"
