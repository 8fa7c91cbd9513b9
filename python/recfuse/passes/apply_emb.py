"""The pattern of facebookresearch/dlrm: ``emb_l``, a list of tables, and ``apply_emb``, which pools them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse.nn.packed.pooling import refuse_proxy
from recfuse.nn.table_list import FusedEmbeddingBagList
from recfuse.passes.apply_emb_proof import ARGUMENTS, defaults_of, method_of, why_not_proven
from recfuse.passes.pattern import Pattern

BY_HAND = (
    "its bags are called one by one; recfuse.nn.FusedEmbeddingBagList(bags).pool(offsets, indices) pools "
    "them in one call"
)
_FLAGS = (bool, int, float, str, type(None))
_MISSING = object()


class ApplyEmb(Pattern):
    """A module that looks like that script's ``DLRM_Net``; its ``emb_l`` has the tables."""

    def __init__(self, name: str, model: Any) -> None:
        """The model, named so in the whole."""
        super().__init__(f"{name}.emb_l" if name else "emb_l", model.emb_l, model.emb_l)
        self.model = model

    @classmethod
    def find(cls, name: str, module: torch.nn.Module) -> ApplyEmb | None:
        """By the list, and the names of the method's arguments."""
        tables = module._modules.get("emb_l")
        method = getattr(module, "apply_emb", None)
        if type(tables) is not torch.nn.ModuleList or not callable(method):
            return None
        try:
            return cls(name, module) if tuple(inspect.signature(method).parameters) == ARGUMENTS else None
        except (TypeError, ValueError):  # a callable without a signature
            return None

    @classmethod
    def find_fused(cls, name: str, module: torch.nn.Module) -> ApplyEmb | None:
        """By the method that ``fuse`` gives it, where its list is still the packed one."""
        packed = isinstance(module._modules.get("emb_l"), FusedEmbeddingBagList)
        return cls(name, module) if packed and has_fused_method(module) else None

    def why_not(self) -> str | None:
        """Where the method does more, or something else, than one call for all tables does."""
        if any(table.include_last_offset for table in self.tables):
            return "a table has include_last_offset"
        reason = why_not_proven(self.model, self.tables)
        return f"{reason}; {BY_HAND}" if reason else None

    def fuse(self, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        """Packs the list, and gives the model a method that pools it."""
        tables = self.tables
        self.model.emb_l = FusedEmbeddingBagList(tables, optimizers=optimizers)
        self.model.apply_emb = FusedApplyEmb(self.model)
        return f"{len(tables)} tables in one call, by apply_emb"

    def restore(self, bags: Sequence[torch.nn.EmbeddingBag]) -> str:
        """Gives the model a list of tables, and its class's method again."""
        tables = torch.nn.ModuleList(bags)
        tables.training = self.owner.training
        del self.model.apply_emb
        self.model.emb_l = tables
        return f"torch.nn.ModuleList of {len(bags)} torch.nn.EmbeddingBag, and the model's own apply_emb"


def has_fused_method(module: torch.nn.Module) -> bool:
    """Whether ``fuse`` has given a module its method; the model may have given the tables up since."""
    return isinstance(vars(module).get("apply_emb"), FusedApplyEmb)


class FusedApplyEmb:
    """A DLRM's ``apply_emb``: one call, while ``emb_l`` is packed and the flags it reads are as before."""

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
        None). Takes arguments as the model's own method, by position or name, with its defaults.
        """
        refuse_proxy(args[1] if len(args) > 1 else kwargs.get("lS_i"))
        positional = dict(zip(ARGUMENTS, args, strict=False))
        bound = {**self.defaults, **positional, **kwargs}
        if (
            len(args) > len(ARGUMENTS)
            or len(bound) != len(ARGUMENTS)
            or any(name not in bound or (name in positional and name in kwargs) for name in ARGUMENTS)
            or not self._fused(bound)
        ):
            return method_of(self.model)(*args, **kwargs)
        return self._tables(bound).pool(bound["lS_o"], bound["lS_i"], bound["v_W_l"])

    def _tables(self, bound: dict[str, Any]) -> Any:
        is_default = bound["emb_l"] is None and self.defaults.get("emb_l", self) is None
        return self.model.emb_l if is_default else bound["emb_l"]

    def _fused(self, bound: dict[str, Any]) -> bool:
        tables = self._tables(bound)
        if not isinstance(tables, FusedEmbeddingBagList) or not tables.has_kernel:
            return False
        # Written as the compiler can follow it; it cannot look into __dict__.
        if not torch.compiler.is_dynamo_compiling() and not self.inherited.isdisjoint(vars(self.model)):
            return False
        return not any(hasattr(self.model, name) for name in self.absent) and all(
            getattr(self.model, name, self) == value for name, value in self.flags.items()
        )


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
    """Adds names that a function may read, also through getattr, inner functions and the class's methods."""
    if code is None:
        return
    new = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))} - names
    names |= new
    for constant in code.co_consts:
        if inspect.iscode(constant):
            _read_names(constant, owner, names)
    for name in new - set(dir(torch.nn.Module)):
        method = inspect.getattr_static(owner, name, None)
        method = getattr(method, "fget", None) or getattr(method, "__func__", method)
        _read_names(getattr(method, "__code__", None), owner, names)
