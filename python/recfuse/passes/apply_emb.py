"""The pattern of facebookresearch/dlrm: ``emb_l``, a list of tables, and ``apply_emb``, which pools them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from recfuse.nn.packed.pooling import refuse_proxy
from recfuse.nn.table_list import FusedEmbeddingBagList

ARGUMENTS = ("lS_o", "lS_i", "emb_l", "v_W_l")
_FLAGS = (bool, int, float, str, type(None))
_MISSING = object()


def is_dlrm(module: torch.nn.Module) -> bool:
    """Whether a module looks like that script's ``DLRM_Net``."""
    tables = module._modules.get("emb_l")
    method = getattr(module, "apply_emb", None)
    if type(tables) is not torch.nn.ModuleList or not callable(method):
        return False
    try:
        return tuple(inspect.signature(method).parameters) == ARGUMENTS
    except (TypeError, ValueError):  # a callable without a signature
        return False


class FusedApplyEmb:
    """A DLRM's ``apply_emb``: one call for all tables, as long as ``emb_l`` is the packed list and the flags
    of the model that the method reads are what they were.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """For this model, whose class has the ``apply_emb`` to go back to."""
        self.model = model
        self.defaults = defaults_of(model)
        self.flags, self.absent, self.inherited = _flags(model)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model's own method."""
        return inspect.signature(method_of(self.model))

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Pools table k with offsets ``lS_o[k]``, lookups ``lS_i[k]`` and row weights ``v_W_l[k]`` (or
        None). Takes arguments as the model's own method, by place or name, with its defaults.
        """
        refuse_proxy(args[1] if len(args) > 1 else kwargs.get("lS_i"))
        placed = dict(zip(ARGUMENTS, args, strict=False))
        given = {**self.defaults, **placed, **kwargs}
        if (
            len(args) > len(ARGUMENTS)
            or len(given) != len(ARGUMENTS)
            or any(name not in given or (name in placed and name in kwargs) for name in ARGUMENTS)
            or not self._fused(given)
        ):
            return method_of(self.model)(*args, **kwargs)
        return self._tables(given).pool(given["lS_o"], given["lS_i"], given["v_W_l"])

    def _tables(self, given: dict[str, Any]) -> Any:
        is_default = given["emb_l"] is None and self.defaults.get("emb_l", self) is None
        return self.model.emb_l if is_default else given["emb_l"]

    def _fused(self, given: dict[str, Any]) -> bool:
        tables = self._tables(given)
        if not isinstance(tables, FusedEmbeddingBagList) or not tables.has_kernel:
            return False
        # Written as the compiler can follow it; it cannot look into __dict__.
        if not torch.compiler.is_dynamo_compiling() and not self.inherited.isdisjoint(vars(self.model)):
            return False
        return not any(hasattr(self.model, name) for name in self.absent) and all(
            getattr(self.model, name, self) == value for name, value in self.flags.items()
        )


def method_of(model: torch.nn.Module) -> Any:
    """The ``apply_emb`` of the model's class, bound to it."""
    static = inspect.getattr_static(type(model), "apply_emb")
    return static.__get__(model, type(model)) if hasattr(static, "__get__") else static


def defaults_of(model: torch.nn.Module) -> dict[str, Any]:
    """What the model's own method gives its arguments that are not given."""
    parameters = inspect.signature(method_of(model)).parameters
    return {
        name: parameters[name].default
        for name in ARGUMENTS
        if parameters[name].default is not inspect.Parameter.empty
    }


def _flags(model: torch.nn.Module) -> tuple[dict[str, Any], tuple[str, ...], frozenset[str]]:
    """Plain attributes of the model and its class that the method may read, by which it may branch; the names
    that it may read and the model has not, or not yet; and those that it has of its class alone.
    """
    function = getattr(method_of(model), "__func__", method_of(model))
    names: set[str] = set()
    _read_names(getattr(inspect.unwrap(function), "__code__", None), type(model), names)
    names -= {"training", "apply_emb"}
    attributes, flags = vars(model), {}
    for name in names:
        value = attributes.get(name, inspect.getattr_static(type(model), name, _MISSING))
        if isinstance(value, _FLAGS):
            flags[name] = value
    rest = {name for name in names if name not in attributes and name not in flags}
    absent = {name for name in rest if not hasattr(model, name)}
    return flags, tuple(sorted(absent)), frozenset(rest - absent)


def _read_names(code: Any, owner: type, names: set[str]) -> None:
    """Adds the names in a function: those of attributes, and texts that getattr may take; also of functions
    inside it, as comprehensions are, and of the class's methods that it may call.
    """
    if code is None:
        return
    new = {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))} - names
    names |= new
    for one in code.co_consts:
        if inspect.iscode(one):
            _read_names(one, owner, names)
    for name in new - set(dir(torch.nn.Module)):
        method = inspect.getattr_static(owner, name, None)
        method = getattr(method, "fget", None) or getattr(method, "__func__", method)
        _read_names(getattr(method, "__code__", None), owner, names)
