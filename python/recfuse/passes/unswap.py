"""``unswap`` restores the modules of torch and TorchRec."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import Parameter

from recfuse._arguments import wrong_type
from recfuse.errors import ArgumentValueError
from recfuse.nn.embedding_bag import EmbeddingBag
from recfuse.nn.lookups.module import PackedLookups
from recfuse.nn.packed.frozen_alone import check_counts
from recfuse.nn.packed.holders import check_optimizers, with_wrapped
from recfuse.nn.packed.layout import is_sharded, table_rows
from recfuse.nn.packed.module import PackedModule
from recfuse.nn.packed.optimizer_state import Piece, Target
from recfuse.nn.packed.optimizers import Move
from recfuse.nn.packed.tables import PackedTables
from recfuse.optim.adoption import release
from recfuse.passes.apply_emb import ApplyEmb, has_fused_method
from recfuse.passes.pattern import Pattern
from recfuse.passes.report import SwapReport
from recfuse.passes.torchrec_collection import TorchRecCollection, TorchRecEmbeddings
from recfuse.passes.torchrec_quantized import unswap_quantized

_PATTERNS: tuple[type[Pattern], ...] = (ApplyEmb, TorchRecCollection, TorchRecEmbeddings)


def unswap(model: torch.nn.Module, *, optimizers: Iterable[torch.optim.Optimizer] = ()) -> SwapReport:
    """Restore the modules that :func:`recfuse.swap` has replaced, in place, with the current weights.

    The model has torch's and TorchRec's own classes again, for tools that look for them (quantisers,
    sharding, scripting, ONNX). Every table has its own Parameter again, a copy. Modules made by hand, such as
    a :class:`recfuse.nn.FusedEmbeddingBagCollection`, have no counterpart in torch and are left.

    Args:
        model: a swapped module.
        optimizers: optimizers of the packed Parameters. Their entries and state move to the tables'
            Parameters. Optimizers that ``fuse_optimizers`` has fused make their steps themselves again.

    Returns:
        SwapReport: each module with its action.

    Raises:
        TypeError: as :func:`recfuse.swap`.
        ValueError: as :func:`recfuse.swap`. Nothing was changed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 16), torch.nn.Linear(16, 1))
        >>> report = recfuse.swap(model)
        >>> len(recfuse.unswap(model).restored), type(model[0])
        (1, <class 'torch.nn.modules.sparse.EmbeddingBag'>)

    Note:
        Works on the CPU and on GPUs. Tables that ``fully_shard`` has cut are refused.
    """
    if not isinstance(model, torch.nn.Module):
        raise wrong_type("recfuse.unswap: model", model, "a torch.nn.Module")
    optimizers = check_optimizers(optimizers, "recfuse.unswap")
    report = SwapReport()
    patterns = _fused_patterns(model, report)
    matrices = [matrix for pattern in patterns for matrix in pattern.owner.packed_weights()]
    if any(map(is_sharded, matrices)):
        raise ArgumentValueError(
            "recfuse.unswap: fully_shard has cut packed matrices of the model over processes, and would "
            "not know of new Parameters. Unswap before fully_shard, or load the state_dict into a model "
            "that was not swapped."
        )
    for optimizer in with_wrapped(optimizers):
        for pattern in patterns:
            check_counts(optimizer, pattern.owner._store, all_tables=True)
    for optimizer in optimizers:
        release(optimizer)
    move = Move(optimizers, matrices, "recfuse.unswap")
    targets: list[Target] = []
    bags, first = [], 0
    for pattern in patterns:
        bags.append(_unpacked(pattern.owner, first, targets))
        first += len(pattern.owner.packed_weights())
    move.apply(targets)
    for target in targets:
        if not target.parameter.requires_grad:
            target.parameter.grad = None
    for pattern, own_bags in zip(patterns, bags, strict=True):
        report.add(pattern.path, pattern.kind, "restored", pattern.restore(own_bags))
    unswap_quantized(model, report)
    for name, module in model.named_modules():
        if has_fused_method(module):  # the model has replaced its packed tables
            del module.apply_emb
        if type(module) is EmbeddingBag:
            for attribute in ("schedule", "pinned"):  # set by a plan
                vars(module).pop(attribute, None)
            module.__class__ = torch.nn.EmbeddingBag
            report.add(name, "EmbeddingBag", "restored", "torch.nn.EmbeddingBag")
    return report


def _fused_patterns(model: torch.nn.Module, report: SwapReport) -> list[Pattern]:
    """Return the patterns that ``swap`` has packed; report packed modules that it has not made."""
    patterns: list[Pattern] = []
    for name, module in model.named_modules():
        pattern = next(filter(None, (kind.find_fused(name, module) for kind in _PATTERNS)), None)
        if pattern is not None:
            patterns.append(pattern)
        elif isinstance(module, (PackedModule, PackedLookups)) and not any(
            module is pattern.owner for pattern in patterns
        ):
            reason = (
                "swap did not create this module, and torch has no module with its call. Read the weights "
                "from its .tables."
            )
            report.add(name, type(module).__name__, "left", reason)
    return patterns


def _unpacked(owner: PackedTables, first_matrix: int, targets: list[Target]) -> list[torch.nn.EmbeddingBag]:
    """Return torch's modules, with shared weights as before; add each Parameter's source to ``targets``."""
    matrices = owner.packed_weights()
    parameters: dict[tuple[int, int, int], Parameter] = {}
    bags = []
    for spec, table in zip(owner.layout.tables, owner.tables.values(), strict=True):
        matrix = matrices[spec.matrix]
        shared = (spec.matrix, spec.first_row, spec.num_embeddings)
        if shared not in parameters or spec.num_embeddings == 0:
            rows = table_rows(spec, matrix.detach()).clone()
            parameters[shared] = Parameter(rows, requires_grad=matrix.requires_grad)
            origin, first_row = owner.origin_of(table)  # optimizers keep the state of a frozen table here
            piece = Piece(first_matrix + origin, first_row, spec.num_embeddings, 0)
            name = owner._below(f"{spec.name}.weight")
            targets.append(Target(parameters[shared], name, [piece]))
        bag = torch.nn.EmbeddingBag(
            spec.num_embeddings,
            spec.embedding_dim,
            mode=spec.mode,
            sparse=owner.layout.sparse,
            include_last_offset=spec.include_last_offset,
            padding_idx=spec.padding_idx,
            _weight=parameters[shared].detach(),
        )
        bag.weight = parameters[shared]
        bags.append(bag.train(table.training))
    return bags
