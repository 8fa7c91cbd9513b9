"""recfuse: fast embedding operators for recommendation models in PyTorch.

An import loads ``librecfuse.so``, which registers ``torch.ops.recfuse.*``, and the Python side of those
operators (shapes for the compiler, gradients). Tools for data and measurement are imported at first use.
"""

from __future__ import annotations

import importlib
import os as _os
import warnings as _warnings
from typing import TYPE_CHECKING, Any

from recfuse._library import VERSION as __version__
from recfuse._library import include_dir, library_path

# isort: split
from recfuse import nn, optim  # the library must be loaded first
from recfuse.nn.pinning import PinnedRows
from recfuse.ops import (
    check,
    embedding_bag,
    fused_embedding,
    fused_embedding_bag,
    history_mask,
    ikbo_attention,
    ikbo_attention_path,
    ikbo_linear,
    ikbo_linear_chain,
    ikbo_linear_chain_path,
    ikbo_linear_path,
    pin_rows,
    unpin,
)
from recfuse.passes.quantize import QuantizeReport, dequantize, quantize
from recfuse.passes.swap import SwapReport, swap, unswap

if TYPE_CHECKING:
    from recfuse import cli, distributed, info, timing
    from recfuse.data import traces, workloads
    from recfuse.passes.graph.compiling import backend
    from recfuse.perf.explain import explain
    from recfuse.perf.predict import predict
    from recfuse.plan.collection import CollectionPlan
    from recfuse.plan.table import Plan
    from recfuse.tuner import tune

__all__ = [
    "CollectionPlan",
    "PinnedRows",
    "Plan",
    "QuantizeReport",
    "SwapReport",
    "__version__",
    "backend",
    "check",
    "cli",
    "dequantize",
    "distributed",
    "embedding_bag",
    "explain",
    "fused_embedding",
    "fused_embedding_bag",
    "history_mask",
    "ikbo_attention",
    "ikbo_attention_path",
    "ikbo_linear",
    "ikbo_linear_chain",
    "ikbo_linear_chain_path",
    "ikbo_linear_path",
    "include_dir",
    "info",
    "library_path",
    "nn",
    "optim",
    "pin_rows",
    "predict",
    "quantize",
    "swap",
    "timing",
    "traces",
    "tune",
    "unpin",
    "unswap",
    "workloads",
]

_AT_FIRST_USE = {  # names above, each with the module that it is, or that contains it
    "CollectionPlan": "recfuse.plan.collection",
    "Plan": "recfuse.plan.table",
    "backend": "recfuse.passes.graph.compiling",
    "cli": "recfuse.cli",
    "distributed": "recfuse.distributed",
    "explain": "recfuse.perf.explain",
    "info": "recfuse.info",
    "predict": "recfuse.perf.predict",
    "timing": "recfuse.timing",
    "traces": "recfuse.data.traces",
    "tune": "recfuse.tuner",
    "workloads": "recfuse.data.workloads",
}

if not TYPE_CHECKING:  # hidden from type checkers, for which every name would have type Any

    def __getattr__(name: str) -> Any:
        """Import a tool at first use."""
        if name not in _AT_FIRST_USE:
            raise AttributeError(f"module 'recfuse' has no attribute {name!r}")
        path = _AT_FIRST_USE[name]
        module = importlib.import_module(path)
        return module if path.endswith(f".{name}") and not hasattr(module, name) else getattr(module, name)


def __dir__() -> list[str]:
    """Return the public names, including names that are not imported yet."""
    return sorted({*__all__, "data", "errors"})


if _os.environ.get("RECFUSE_CPU_ISA"):  # with a misspelt name, a measurement would use other kernels
    from recfuse.info import isa_unknown as _isa_unknown

    if _reason := _isa_unknown():
        _warnings.warn(f"recfuse: {_reason}", stacklevel=2)
