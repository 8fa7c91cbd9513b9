"""``swap`` and ``unswap`` of TorchRec's quantised collections, and of FBGEMM's module without TorchRec."""

from __future__ import annotations

from typing import Any

import torch

from recfuse._codes import DTYPES
from recfuse.nn.packed.fusable import has_hooks
from recfuse.nn.quantized.tbe import OUTPUTS, POOLINGS, memory_name, why_not_readable
from recfuse.passes.report import SwapReport
from recfuse.passes.torchrec_collection import class_of

_FILE = "torchrec.quant.embedding_modules"
_SWAPPED = "recfuse.nn.quantized.torchrec", "FusedQuantEmbeddingBagCollection"
_INFERENCE = "fbgemm_gpu.split_table_batched_embeddings_ops_inference"
_TABLES = "IntNBitTableBatchedEmbeddingBagsCodegen"
_SWAPPED_TABLES = "recfuse.nn.quantized.nbit", "FusedIntNBitTables"


def swap_quantized(model: torch.nn.Module, report: SwapReport) -> None:
    """Swap the collections of a model that TorchRec has quantised, and FBGEMM's modules. No table moves."""
    _swap_tables(model, report)
    kind = class_of(_FILE, "EmbeddingBagCollection")
    if kind is None:
        return
    for name, module in list(model.named_modules()):
        if type(module) is kind:
            if reason := _why_not(module):
                report.add(name, "EmbeddingBagCollection", "left", reason)
                continue
            from recfuse.nn.quantized.torchrec import FusedQuantEmbeddingBagCollection

            FusedQuantEmbeddingBagCollection.take_tables(module)
            module.__class__ = FusedQuantEmbeddingBagCollection  # last: for calls of other threads
            tables = sum(len(tbe.embedding_specs) for tbe in module._emb_modules)
            detail = f"{tables} quantised tables, {len(module._feature_names)} features in one call"
            report.add(name, "EmbeddingBagCollection", "fused", detail)


def _swap_tables(model: torch.nn.Module, report: SwapReport) -> None:
    """Swap FBGEMM's modules, except for those that a module of TorchRec calls."""
    kind = class_of(_INFERENCE, _TABLES)
    if kind is None:
        return
    modules = list(model.named_modules())
    callers = [
        f"{name}." if name else "" for name, module in modules if "torchrec" in type(module).__module__
    ]
    for name, module in modules:
        if type(module) is not kind or any(name.startswith(caller) for caller in callers):
            continue
        if reason := _why_no_tables(module):
            report.add(name, _TABLES, "left", reason)
            continue
        from recfuse.nn.quantized.nbit import FusedIntNBitTables

        FusedIntNBitTables.take_tables(module)
        module.__class__ = FusedIntNBitTables  # last: for calls of other threads
        counts = len(module.embedding_specs), len(module.feature_table_map)
        report.add(name, _TABLES, "fused", f"{counts[0]} quantised tables, {counts[1]} features in one call")


def _why_no_tables(module: Any) -> str | None:
    """Return why recfuse cannot serve the calls of FBGEMM's module, or None."""
    if "forward" in vars(module):
        return "forward was replaced on the object"
    if int(module.pooling_mode) not in POOLINGS:
        return f"pooling_mode is {module.pooling_mode.name}; expected SUM or MEAN"
    if module.output_dtype not in OUTPUTS:
        return f"output_dtype is SparseType {module.output_dtype}; expected fp32 (0), fp16 (1) or bf16 (5)"
    return why_not_readable(module)


def is_swapped(module: torch.nn.Module) -> bool:
    """Return whether ``swap_quantized`` has swapped a module."""
    return type(module) in (class_of(*_SWAPPED), class_of(*_SWAPPED_TABLES))


def unswap_quantized(model: torch.nn.Module, report: SwapReport) -> None:
    """Restore the classes of TorchRec and FBGEMM."""
    for name, module in list(model.named_modules()):
        if not is_swapped(module):
            continue
        tbes = [module] if type(module) is class_of(*_SWAPPED_TABLES) else module._emb_modules
        moved = [tbe for tbe in tbes if getattr(tbe, memory_name(tbe)).device.type
                 != torch.device(tbe.current_device).type]  # fmt: skip
        if moved:
            actual, expected = getattr(moved[0], memory_name(moved[0])).device, moved[0].current_device
            reason = f"tables are on {actual}; expected {expected}, where FBGEMM made them. Move the model."
            report.add(name, type(module).__name__, "left", reason)
            continue
        swapped: Any = type(module)
        module.__class__ = swapped.__mro__[1]  # first: for calls of other threads
        swapped.leave_tables(module)
        package = module.__class__.__module__.partition(".")[0]
        origin = "torchrec.quant" if package == "torchrec" else package
        report.add(name, swapped.__name__, "restored", f"{origin}.{module.__class__.__name__}")


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
