"""``swap``: puts recfuse's modules into a model, in place."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recfuse.errors import ArgumentTypeError
from recfuse.nn.embedding_bag import EmbeddingBag
from recfuse.nn.packed.fusable import why_not_fusable
from recfuse.nn.packed.memory import advise_huge_pages
from recfuse.nn.packed.module import PackedModule
from recfuse.nn.table_list import FusedEmbeddingBagList, pool_or_call
from recfuse.ops import WEIGHT_DTYPES

_APPLY_EMB_ARGUMENTS = ["lS_o", "lS_i", "emb_l", "v_W_l"]


@dataclass(frozen=True)
class SwapEntry:
    """What became of one module."""

    name: str  # as in model.named_modules(); "" is the model
    kind: str  # its class before
    action: str  # "replaced", "fused" or "left"
    detail: str  # what it is now, or why it was left


@dataclass
class SwapReport:
    """What :func:`swap` did, module by module. ``print`` it for a table."""

    entries: list[SwapEntry] = field(default_factory=list)

    @property
    def replaced(self) -> list[SwapEntry]:
        """Modules that now run on recfuse's single-table operator."""
        return [entry for entry in self.entries if entry.action == "replaced"]

    @property
    def fused(self) -> list[SwapEntry]:
        """Collections whose tables are now pooled in one call."""
        return [entry for entry in self.entries if entry.action == "fused"]

    @property
    def left(self) -> list[SwapEntry]:
        """Modules left as they were, and why."""
        return [entry for entry in self.entries if entry.action == "left"]

    def names(self) -> set[str]:
        """Names of the modules that the report speaks of."""
        return {entry.name for entry in self.entries}

    def __str__(self) -> str:
        """A table, a line a module."""
        head = ("module", "kind", "action", "detail")
        rows = [
            head,
            *((entry.name or "(model)", entry.kind, entry.action, entry.detail) for entry in self.entries),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]))
            for row in rows
        ]
        summary = f"{len(self.replaced)} replaced, {len(self.fused)} fused, {len(self.left)} left"
        return "\n".join([*lines, summary])


def swap(model: torch.nn.Module, *, fuse: bool = True) -> SwapReport:
    """Makes a model run on recfuse's operators, in place.

    - Every ``torch.nn.EmbeddingBag`` on the CPU or a CUDA device becomes a :class:`recfuse.nn.EmbeddingBag`.
    - With ``fuse``, every unsharded ``torchrec.EmbeddingBagCollection`` pools all its tables in one call.
    - With ``fuse``, a model shaped like facebookresearch/dlrm's ``DLRM_Net`` (``emb_l``, a ModuleList of
      EmbeddingBag, and a method ``apply_emb(lS_o, lS_i, emb_l, v_W_l)``) does so too.

    Tables are pooled together on the CPU, or on one CUDA device; there, packing them takes the memory of two
    copies for a moment. Tables on several devices are replaced one by one.

    Modules change their class and stay the same objects, with their Parameters, names, hooks, state_dict,
    ``training`` and ``requires_grad``: an optimizer made before goes on working. What cannot be swapped is
    left, with the reason. Swapping again changes nothing.

    Args:
        model: any module; may itself be one of those above.
        fuse: pool tables together where the model allows it.

    Returns:
        What became of each module that is, or is named as, an embedding bag.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"recfuse.swap: model is a {type(model).__name__}, must be a torch.nn.Module")
    report = SwapReport()
    packed: dict[int, str] = {}
    if fuse:
        for name, module in list(model.named_modules()):
            if type(module) is _torchrec_collection():
                _fuse_collection(name, module, packed, report)
            elif _is_dlrm(module):
                _fuse_dlrm(name, module, packed, report)
    for name, module in model.named_modules():
        _replace(name, module, packed, report)
    return report


def _owners(model: torch.nn.Module) -> Iterator[tuple[str, PackedModule]]:
    """Modules of the model that have packed tables already."""
    for name, module in model.named_modules():
        if isinstance(module, PackedModule):
            yield name, module


def _torchrec_collection() -> type | None:
    """TorchRec's class; None where no model can contain one, because nobody has imported it."""
    module = sys.modules.get("torchrec.modules.embedding_modules")
    return getattr(module, "EmbeddingBagCollection", None)


def _is_dlrm(module: torch.nn.Module) -> bool:
    if type(module._modules.get("emb_l")) is not torch.nn.ModuleList or not callable(
        getattr(module, "apply_emb", None)
    ):
        return False
    return list(inspect.signature(module.apply_emb).parameters) == _APPLY_EMB_ARGUMENTS


def _replace(name: str, module: torch.nn.Module, packed: dict[int, str], report: SwapReport) -> None:
    kind = type(module).__name__
    if type(module) is torch.nn.EmbeddingBag:
        reason = _why_not_replaceable(module)
        if reason is None:
            # A change of class keeps the object, and with it everything that refers to it: hooks, other
            # parents, tied parameters. The new class adds no state.
            module.__class__ = EmbeddingBag
            if id(module.weight) not in packed:  # the buffers of packed tables have been advised about
                advise_huge_pages(module.weight.detach())
            report.entries.append(SwapEntry(name, kind, "replaced", "recfuse.nn.EmbeddingBag"))
        else:
            report.entries.append(SwapEntry(name, kind, "left", reason))
    elif isinstance(module, EmbeddingBag):
        return
    elif isinstance(module, torch.nn.EmbeddingBag):
        reason = (
            "parametrized" if hasattr(module, "parametrizations") else "a subclass, whose forward may differ"
        )
        report.entries.append(SwapEntry(name, kind, "left", reason))
    elif "EmbeddingBag" in kind and not isinstance(module, PackedModule) and name not in report.names():
        reason = "not a torch.nn.EmbeddingBag; its children are looked at"
        report.entries.append(SwapEntry(name, kind, "left", reason))


def _why_not_replaceable(table: torch.nn.EmbeddingBag) -> str | None:
    if "forward" in table.__dict__:
        return "its forward was replaced on the object"
    weight = table.weight
    if weight.dtype not in WEIGHT_DTYPES:
        return f"{weight.dtype} has no kernel; float32, float16 and bfloat16 have"
    if weight.device.type not in ("cpu", "cuda", "meta"):
        return f"its weight is on {weight.device}, where there are no kernels"
    return None


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _why_not_fused(tables: Sequence[torch.nn.Module], packed: dict[int, str]) -> str | None:
    """Why these tables cannot be packed; None if they can."""
    if not tables:
        return "no tables"
    for number, table in enumerate(tables):
        if type(table) not in (torch.nn.EmbeddingBag, EmbeddingBag):
            return f"table {number} is a {type(table).__name__}"
        if not isinstance(table._parameters.get("weight"), torch.nn.Parameter):
            return f"table {number} has a computed weight"
        if reason := _why_not_replaceable(table):
            return f"table {number}: {reason}"
        if table.weight.device != tables[0].weight.device:
            return (
                f"table {number} is on {table.weight.device}, table 0 on {tables[0].weight.device}; the "
                "tables are replaced one by one"
            )
        if _has_hooks(table):
            return f"table {number} has hooks, which one call for all tables would not run"
        if (other := packed.get(id(table.weight))) is not None:
            return f"table {number} shares its weight with {other or 'the model'}, which has packed it"
    return why_not_fusable(tables)


def _fuse_collection(name: str, module: Any, packed: dict[int, str], report: SwapReport) -> None:
    from recfuse.nn.keyed import FusedKeyedEmbeddingBagCollection

    tables = list(module.embedding_bags.values())
    reason = _why_not_fused(tables, packed)
    if reason is None and module.is_weighted() and any(table.mode != "sum" for table in tables):
        reason = 'weighted, and a table is not of mode "sum"'
    if reason is None and "forward" in module.__dict__:
        reason = "its forward was replaced on the object"
    if reason is not None:
        report.entries.append(SwapEntry(name, type(module).__name__, "left", reason))
        return
    kind = type(module).__name__
    module.__class__ = FusedKeyedEmbeddingBagCollection
    try:
        module.pack_features()
    except torch.OutOfMemoryError as error:
        module.__class__ = _torchrec_collection()
        report.entries.append(SwapEntry(name, kind, "left", _no_memory(error)))
        return
    detail = f"{len(tables)} tables, {len(module.layout.dims)} features in one call"
    report.entries.append(SwapEntry(name, kind, "fused", detail))


def _no_memory(error: torch.OutOfMemoryError) -> str:
    return f"no memory on the GPU to pack the tables, which takes a second copy for a moment: {error}"


def _fuse_dlrm(name: str, module: Any, packed: dict[int, str], report: SwapReport) -> None:
    tables = list(module.emb_l)
    path = f"{name}.emb_l" if name else "emb_l"
    reason = _why_not_fused(tables, packed)
    if reason is None and any(table.include_last_offset for table in tables):
        reason = "a table has include_last_offset"
    if reason is None and "apply_emb" in module.__dict__:
        reason = "its apply_emb was replaced on the object"
    if reason is not None:
        report.entries.append(SwapEntry(path, "ModuleList", "left", reason))
        return
    try:
        module.emb_l = FusedEmbeddingBagList(tables)
    except torch.OutOfMemoryError as error:
        report.entries.append(SwapEntry(path, "ModuleList", "left", _no_memory(error)))
        return
    module.apply_emb = FusedApplyEmb(module)
    report.entries.append(
        SwapEntry(path, "ModuleList", "fused", f"{len(tables)} tables in one call, by apply_emb")
    )


class FusedApplyEmb:
    """A DLRM's ``apply_emb``: one call for all tables, as long as ``emb_l`` is the packed list."""

    def __init__(self, model: torch.nn.Module) -> None:
        """For this model, whose class has the ``apply_emb`` to go back to."""
        self.model = model

    def __call__(self, lS_o: Any, lS_i: Any, emb_l: Any, v_W_l: Any) -> list[Tensor]:
        """Pools table k with offsets ``lS_o[k]``, lookups ``lS_i[k]`` and row weights ``v_W_l[k]`` (or
        None).
        """
        otherwise = functools.partial(type(self.model).apply_emb, self.model)
        return pool_or_call(emb_l, lS_o, lS_i, v_W_l, otherwise)
