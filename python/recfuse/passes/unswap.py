"""``unswap``: gives torch's and TorchRec's own modules back."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from recfuse.errors import ArgumentTypeError
from recfuse.nn.embedding_bag import EmbeddingBag
from recfuse.nn.packed.holders import check_holders
from recfuse.nn.packed.module import PackedModule
from recfuse.nn.packed.optimizer_parts import given
from recfuse.nn.packed.optimizer_state import Piece
from recfuse.nn.packed.optimizers import Move, Target
from recfuse.nn.table_list import FusedEmbeddingBagList
from recfuse.passes.apply_emb import FusedApplyEmb
from recfuse.passes.report import SwapReport

_WHAT = "recfuse.unswap"


def unswap(model: torch.nn.Module, *, optimizers: Iterable[torch.optim.Optimizer] = ()) -> SwapReport:
    """Undoes :func:`recfuse.swap`, in place: the model has torch's and TorchRec's own classes again, with
    today's weights, for tools that look for them (quantisers, sharding, scripting, ONNX).

    Every table has a Parameter of its own again, a copy. Modules that were made by hand, such as a
    :class:`recfuse.nn.FusedEmbeddingBagCollection`, have no counterpart in torch and are left.

    Args:
        model: what was swapped.
        optimizers: those that hold the packed Parameters. Their entries and state go to the tables'
            Parameters.

    Returns:
        What became of each module.

    Raises:
        TypeError, ValueError: as :func:`recfuse.swap`. Nothing was changed.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"{_WHAT}: model is a {type(model).__name__}, must be a torch.nn.Module")
    optimizers = given(optimizers, _WHAT)
    report = SwapReport()
    packed = _swapped(model, report)
    groups = [group for one in packed for group in one.owner.packed_weights()]
    check_holders(groups, optimizers, _WHAT)
    move = Move(optimizers, groups, _WHAT)
    first = 0
    bags, targets = [], []
    for one in packed:
        own_bags, own_targets = _unpacked(one.owner, first)
        first += len(one.owner.packed_weights())
        bags.append(own_bags)
        targets.extend(own_targets)
    move.apply_targets(targets)
    for one, own_bags in zip(packed, bags, strict=True):
        _restore(one, own_bags, report)
    for name, module in model.named_modules():
        if type(module) is EmbeddingBag:
            for attribute in ("schedule", "pinned"):  # what a plan has set
                module.__dict__.pop(attribute, None)
            module.__class__ = torch.nn.EmbeddingBag
            report.add(name, "EmbeddingBag", "restored", "torch.nn.EmbeddingBag")
    return report


class _Packed(NamedTuple):
    """A module that ``swap`` has packed."""

    name: str
    module: torch.nn.Module  # TorchRec's collection, or the model that has emb_l
    owner: PackedModule  # the same, or emb_l


def _swapped(model: torch.nn.Module, report: SwapReport) -> list[_Packed]:
    found: list[_Packed] = []
    for name, module in model.named_modules():
        if isinstance(vars(module).get("apply_emb"), FusedApplyEmb):
            tables = module._modules.get("emb_l")
            if isinstance(tables, FusedEmbeddingBagList):
                found.append(_Packed(f"{name}.emb_l" if name else "emb_l", module, tables))
            else:  # the model gave its tables up
                del module.apply_emb
        elif isinstance(module, PackedModule) and not any(module is one.owner for one in found):
            if _is_keyed(module):
                found.append(_Packed(name, module, module))
            else:
                reason = "made by hand; torch has no module with its call. Its tables' weights: .tables"
                report.add(name, type(module).__name__, "left", reason)
    return found


def _is_keyed(module: torch.nn.Module) -> bool:
    keyed = sys.modules.get("recfuse.nn.keyed")
    return keyed is not None and type(module) is keyed.FusedKeyedEmbeddingBagCollection


def _unpacked(owner: PackedModule, first_group: int) -> tuple[list[torch.nn.EmbeddingBag], list[Target]]:
    """torch's modules for the tables, and what each one's Parameter is made of. Tables that shared a weight
    share one again.
    """
    weights = owner.packed_weights()
    parameters: dict[tuple[int, int, int], Parameter] = {}
    bags, targets = [], []
    for spec in owner.layout.tables:
        group = weights[spec.group]
        place = (spec.group, spec.first_row, spec.num_embeddings)
        if place not in parameters or spec.num_embeddings == 0:
            rows = group.detach()[spec.first_row : spec.first_row + spec.num_embeddings].clone()
            parameters[place] = Parameter(rows, requires_grad=group.requires_grad)
            piece = Piece(first_group + spec.group, spec.first_row, spec.num_embeddings, 0)
            name = f"{owner._table_prefix}{spec.name}.weight"
            targets.append(Target(parameters[place], name, [piece]))
        bag = torch.nn.EmbeddingBag(
            spec.num_embeddings,
            spec.embedding_dim,
            mode=spec.mode,
            sparse=owner.layout.sparse,
            include_last_offset=spec.include_last_offset,
            padding_idx=spec.padding_idx,
            _weight=parameters[place].detach(),
        )
        bag.weight = parameters[place]
        bags.append(bag.train(owner.training))
    return bags, targets


def _restore(one: _Packed, bags: Sequence[torch.nn.EmbeddingBag], report: SwapReport) -> None:
    owner: Any = one.owner
    names = [spec.name for spec in owner.layout.tables]
    if one.module is not owner:
        tables = torch.nn.ModuleList(bags)
        tables.training = owner.training
        del one.module.apply_emb
        one.module.emb_l = tables
        detail = f"torch.nn.ModuleList of {len(bags)} torch.nn.EmbeddingBag, and the model's own apply_emb"
        report.add(one.name, type(owner).__name__, "restored", detail)
        return
    kind = type(owner)
    for name in owner.layout.parameter_names:
        del owner._parameters[name]
    owner.__class__ = kind.__mro__[1]
    for attribute in ("layout", "_tuning", "_mapper", "_flat_feature_names"):
        vars(owner).pop(attribute, None)
    owner.embedding_bags = torch.nn.ModuleDict(dict(zip(names, bags, strict=True)))
    owner.embedding_bags.training = owner.training
    report.add(one.name, kind.__name__, "restored", "torchrec.EmbeddingBagCollection")
