"""``swap`` and ``unswap`` of TorchRec's quantised ``EmbeddingBagCollection``."""

from __future__ import annotations

from typing import Any

import torch

from recfuse._codes import DTYPES
from recfuse.nn.packed.fusable import has_hooks
from recfuse.nn.quantized.tbe import memory_name, why_not_readable
from recfuse.passes.report import SwapReport
from recfuse.passes.torchrec_collection import class_of

_FILE = "torchrec.quant.embedding_modules"
_SWAPPED = "recfuse.nn.quantized.torchrec", "FusedQuantEmbeddingBagCollection"


def swap_quantized(model: torch.nn.Module, report: SwapReport) -> None:
    """Swap the collections of a model that TorchRec has quantised. No table moves."""
    kind = class_of(_FILE, "EmbeddingBagCollection")
    if kind is None:
        return
    for name, module in list(model.named_modules()):
        if type(module) is kind:
            if reason := _why_not(module):
                report.add(name, "EmbeddingBagCollection", "left", reason)
                continue
            from recfuse.nn.quantized.torchrec import FusedQuantEmbeddingBagCollection

            module.__class__ = FusedQuantEmbeddingBagCollection
            try:
                module.take_tables()
            except BaseException:
                module.__class__ = kind
                raise
            tables = sum(len(tbe.embedding_specs) for tbe in module._emb_modules)
            detail = f"{tables} quantised tables, {len(module._feature_names)} features in one call"
            report.add(name, "EmbeddingBagCollection", "fused", detail)


def is_swapped(module: torch.nn.Module) -> bool:
    """Return whether ``swap_quantized`` has swapped a module."""
    return type(module) is class_of(*_SWAPPED)


def unswap_quantized(model: torch.nn.Module, report: SwapReport) -> None:
    """Restore TorchRec's class."""
    for name, module in list(model.named_modules()):
        if not is_swapped(module):
            continue
        moved = [tbe for tbe in module._emb_modules if getattr(tbe, memory_name(tbe)).device.type
                 != torch.device(tbe.current_device).type]  # fmt: skip
        if moved:
            actual, expected = getattr(moved[0], memory_name(moved[0])).device, moved[0].current_device
            reason = f"tables are on {actual}; expected {expected}, where FBGEMM made them. Move the model."
            report.add(name, type(module).__name__, "left", reason)
            continue
        module.leave_tables()  # type: ignore[operator]
        module.__class__ = type(module).__mro__[1]
        report.add(
            name, "FusedQuantEmbeddingBagCollection", "restored", "torchrec.quant.EmbeddingBagCollection"
        )


def _why_not(module: Any) -> str | None:
    """Return why one call cannot replace the calls of the collection, or None."""
    if "forward" in vars(module):
        return "forward was replaced on the object"
    bags = module.embedding_bags
    if has_hooks(bags) or any(map(has_hooks, (*bags.children(), *module._emb_modules))):
        return "a table of the collection has hooks"
    if module._output_dtype not in DTYPES:
        return f"output_dtype is {module._output_dtype}; expected float32, float16 or bfloat16"
    if module._is_weighted and any(pooling.value != "SUM" for pooling, _ in module._key_to_tables):
        return 'a table of a weighted collection has another mode; expected "sum"'
    for tbe, configs in zip(module._emb_modules, module._key_to_tables.values(), strict=True):
        for config in configs:
            rows = getattr(config, "num_embeddings_post_pruning", None)
            if rows is not None and rows != config.num_embeddings:
                return (
                    f"table {config.name!r} is pruned to {rows} rows; expected every row. Make the model "
                    "without pruning."
                )
        if reason := why_not_readable(tbe):
            return reason
        memory = getattr(tbe, memory_name(tbe)).untyped_storage().data_ptr()
        for config in configs:
            weight = bags[config.name].weight
            weight = getattr(weight, "elem", weight)
            if weight.untyped_storage().data_ptr() != memory:
                return (
                    f"weight of table {config.name!r} is a copy of its rows; expected a view. Swap before "
                    "the model moves."
                )
    return None
