"""``swap``: puts recfuse's modules into a model, in place; ``unswap`` takes them out again."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from recfuse._codes import DTYPES
from recfuse.errors import ArgumentTypeError
from recfuse.nn.embedding_bag import EmbeddingBag
from recfuse.nn.packed.fusable import has_hooks, why_not_fusable
from recfuse.nn.packed.holders import check_holders, gradient_hooks
from recfuse.nn.packed.memory import advise_huge_pages
from recfuse.nn.packed.module import PackedModule
from recfuse.nn.packed.optimizer_parts import given
from recfuse.nn.packed.optimizers import plan_move
from recfuse.nn.table_list import FusedEmbeddingBagList
from recfuse.passes.apply_emb import FusedApplyEmb, is_dlrm
from recfuse.passes.apply_emb_proof import why_not_proven
from recfuse.passes.report import SwapEntry, SwapReport
from recfuse.passes.unswap import unswap

__all__ = ["SwapEntry", "SwapReport", "swap", "unswap"]

_BY_HAND = (
    "its bags are called one by one; recfuse.nn.FusedEmbeddingBagList(bags).pool(offsets, indices) pools "
    "them in one call"
)


@dataclass(frozen=True)
class _Candidate:
    """A module whose tables can be pooled in one call."""

    name: str
    module: Any  # TorchRec's collection, or the model that has emb_l
    tables: list[torch.nn.EmbeddingBag]
    is_dlrm: bool

    @property
    def path(self) -> str:
        """The name of the module that has the tables."""
        if not self.is_dlrm:
            return self.name
        return f"{self.name}.emb_l" if self.name else "emb_l"

    @property
    def holder(self) -> torch.nn.Module:
        """The module whose children the tables are."""
        return self.module.emb_l if self.is_dlrm else self.module.embedding_bags


def swap(
    model: torch.nn.Module, *, fuse: bool = True, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> SwapReport:
    """Makes a model run on recfuse's operators, in place.

    - Every ``torch.nn.EmbeddingBag`` on the CPU or a CUDA device becomes a :class:`recfuse.nn.EmbeddingBag`.
    - With ``fuse``, every unsharded ``torchrec.EmbeddingBagCollection`` pools all its tables in one call.
    - With ``fuse``, a model shaped like facebookresearch/dlrm's ``DLRM_Net`` (``emb_l``, a ModuleList of
      EmbeddingBag, and a method ``apply_emb(lS_o, lS_i, emb_l, v_W_l)``) does so too. The method is tried on
      probe batches first, and replaced only where it does what one call does.

    Single bags change their class and stay the same objects, with their Parameters, names and hooks. Tables
    that are pooled together have one new Parameter for all tables of one dtype and dimension: make
    optimizers, and wrappers such as DistributedDataParallel, after the swap, or hand the optimizers over.
    ``state_dict`` keeps its names, so checkpoints load before and after. A reference to an old weight goes on
    showing the table's values, but has no gradient.

    What cannot be swapped is left, with the reason. Swapping again changes nothing. :func:`unswap` gives
    torch's and TorchRec's own modules back.

    Tables are pooled together on the CPU, or on one CUDA device; packing them takes the memory of two copies
    for a moment. Tables on several devices are replaced one by one.

    Args:
        model: any module; may itself be one of those above.
        fuse: pool tables together where the model allows it.
        optimizers: those that hold the tables' Parameters. Their entries and state go to the new Parameters,
            so that training continues as it would have. An optimizer whose state is not one number, or an
            element or row of it for each of the Parameter, is refused.

    Returns:
        What became of each module that is, or is named as, an embedding bag.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module, ``optimizers`` are none.
        ValueError: an optimizer or DistributedDataParallel holds a Parameter that would be replaced and was
            not handed over, or an optimizer cannot be moved. Nothing was changed.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"recfuse.swap: model is a {type(model).__name__}, must be a torch.nn.Module")
    optimizers = given(optimizers, "recfuse.passes.swap")
    report = SwapReport()
    if fuse:
        candidates = list(_candidates(model, report))
        weights = [table.weight for candidate in candidates for table in candidate.tables]
        check_holders(weights, optimizers, "recfuse.passes.swap")
        plan_move(optimizers, weights)
        for candidate in candidates:
            _fuse(candidate, optimizers, report)
        _name_other_lists(model, report)
    for name, module in model.named_modules():
        _replace(name, module, report)
    return report


def _candidates(model: torch.nn.Module, report: SwapReport) -> Iterator[_Candidate]:
    """Modules whose tables can be pooled in one call; reports why others cannot."""
    owners = _owners(model)
    for name, module in list(model.named_modules()):
        if type(module) is _torchrec_collection():
            candidate = _Candidate(name, module, list(module.embedding_bags.values()), is_dlrm=False)
            reason = _why_not_fused(candidate, owners) or _why_not_collection(candidate)
        elif is_dlrm(module):
            candidate = _Candidate(name, module, list(module.emb_l), is_dlrm=True)
            reason = _why_not_fused(candidate, owners) or _why_not_dlrm(candidate)
        else:
            continue
        if reason is None:
            yield candidate
        else:
            kind = type(candidate.holder if candidate.is_dlrm else module).__name__
            report.add(candidate.path, kind, "left", reason)


def _torchrec_collection() -> type | None:
    """TorchRec's class; None where no model can contain one, because nobody has imported it."""
    module = sys.modules.get("torchrec.modules.embedding_modules")
    return getattr(module, "EmbeddingBagCollection", None)


def _owners(model: torch.nn.Module) -> dict[int, list[tuple[str, torch.nn.Module]]]:
    """For each Parameter and module of the model, by id, the modules that have it, and their names."""
    found: dict[int, list[tuple[str, torch.nn.Module]]] = {}
    for name, module in model.named_modules():
        for part in (*module._parameters.values(), *module._modules.values()):
            if part is not None:
                found.setdefault(id(part), []).append((name, module))
    return found


def _why_not_fused(candidate: _Candidate, owners: dict[int, list[tuple[str, torch.nn.Module]]]) -> str | None:
    """Why these tables cannot be packed; None if they can."""
    tables, holder = candidate.tables, candidate.holder
    if not tables:
        return "no tables"
    if reason := why_not_fusable(tables):
        return reason
    if has_hooks(holder) or len(owners.get(id(holder), ())) > 1:
        return "the list of its tables has hooks, or is a part of another module too"
    for number, table in enumerate(tables):
        if reason := _why_not_replaceable(table) or gradient_hooks(table.weight):
            return f"table {number}: {reason}"
        if type(table.weight) is not Parameter:
            return f"table {number} has a weight that is a {type(table.weight).__name__}"
        if table.weight.device != tables[0].weight.device:
            return (
                f"table {number} is on {table.weight.device}, table 0 on {tables[0].weight.device}; the "
                "tables are replaced one by one"
            )
        for name, owner in owners.get(id(table.weight), ()):
            if not any(owner is one for one in tables):
                return f"table {number} shares its weight with {name or 'the model'}"
        for name, owner in owners.get(id(table), ()):
            if owner is not holder:
                return f"table {number} is a part of {name or 'the model'} too"
    return None


def _why_not_collection(candidate: _Candidate) -> str | None:
    if "forward" in vars(candidate.module):
        return "its forward was replaced on the object"
    if candidate.module.is_weighted() and any(table.mode != "sum" for table in candidate.tables):
        return 'weighted, and a table is not of mode "sum"'
    return None


def _why_not_dlrm(candidate: _Candidate) -> str | None:
    if any(table.include_last_offset for table in candidate.tables):
        return "a table has include_last_offset"
    if reason := why_not_proven(candidate.module, candidate.tables):
        return f"{reason}; {_BY_HAND}"
    return None


def _fuse(candidate: _Candidate, optimizers: Sequence[torch.optim.Optimizer], report: SwapReport) -> None:
    module, tables = candidate.module, candidate.tables
    kind = type(candidate.holder if candidate.is_dlrm else module).__name__
    try:
        if candidate.is_dlrm:
            module.emb_l = FusedEmbeddingBagList(tables, optimizers=optimizers)
            module.apply_emb = FusedApplyEmb(module)
            detail = f"{len(tables)} tables in one call, by apply_emb"
        else:
            _fuse_collection(module, optimizers)
            detail = f"{len(tables)} tables, {len(module.layout.dims)} features in one call"
    except torch.OutOfMemoryError as error:
        reason = f"no memory to pack the tables, which takes a second copy for a moment: {error}"
        report.add(candidate.path, kind, "left", reason)
    else:
        report.add(candidate.path, kind, "fused", detail)


def _fuse_collection(module: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Packs TorchRec's collection; it is as before where that fails."""
    from recfuse.nn.keyed import FusedKeyedEmbeddingBagCollection

    before, parameters = vars(module).copy(), module._parameters.copy()
    module.__class__ = FusedKeyedEmbeddingBagCollection
    try:
        module.pack_features(optimizers)
    except BaseException:
        module.__class__ = _torchrec_collection()
        vars(module).clear()
        vars(module).update(before)
        module._parameters.clear()
        module._parameters.update(parameters)
        raise


def _name_other_lists(model: torch.nn.Module, report: SwapReport) -> None:
    """Reports the lists of bags that no rule above knows how to pool, and what to do."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or name in report.names():
            continue
        bags = [child for child in module if isinstance(child, torch.nn.EmbeddingBag)]
        if len(bags) > 1:
            report.add(name, type(module).__name__, "left", _BY_HAND)


def _replace(name: str, module: torch.nn.Module, report: SwapReport) -> None:
    kind = type(module).__name__
    if type(module) is torch.nn.EmbeddingBag:
        if reason := _why_not_replaceable(module):
            report.add(name, kind, "left", reason)
            return
        # A change of class keeps the object, and with it everything that refers to it: hooks, other
        # parents, tied parameters. The new class adds no state.
        module.__class__ = EmbeddingBag
        advise_huge_pages(module.weight.detach())
        report.add(name, kind, "replaced", "recfuse.nn.EmbeddingBag")
    elif isinstance(module, (EmbeddingBag, PackedModule)):
        return
    elif isinstance(module, torch.nn.EmbeddingBag):
        parametrized = hasattr(module, "parametrizations")
        report.add(
            name, kind, "left", "parametrized" if parametrized else "a subclass, whose forward may differ"
        )
    elif "EmbeddingBag" in kind and name not in report.names():
        report.add(name, kind, "left", "not a torch.nn.EmbeddingBag; its children are looked at")


def _why_not_replaceable(table: torch.nn.EmbeddingBag) -> str | None:
    if "forward" in table.__dict__:
        return "its forward was replaced on the object"
    weight = table.weight
    if weight.dtype not in DTYPES:
        return f"{weight.dtype} has no kernel; float32, float16 and bfloat16 have"
    if weight.device.type not in ("cpu", "cuda", "meta"):
        return f"its weight is on {weight.device}, where there are no kernels"
    return None
