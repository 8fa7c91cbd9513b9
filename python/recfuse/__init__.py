"""recfuse: fast embedding operators for recommendation models in PyTorch.

Importing it loads ``librecfuse.so``, which registers ``torch.ops.recfuse.*``, and the Python side of those
operators (shapes for the compiler, gradients). The tools for data and measurement are imported at first use.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch

_MODULES_AT_FIRST_USE = {  # and where each is
    "cli": "recfuse.cli",
    "info": "recfuse.info",
    "timing": "recfuse.timing",
    "traces": "recfuse.data.traces",
    "workloads": "recfuse.data.workloads",
}
_NAMES_AT_FIRST_USE = {  # and the module of each
    "CollectionPlan": "recfuse.plan.collection",
    "Plan": "recfuse.plan.table",
    "tune": "recfuse.tuner",
}


def library_path() -> str:
    """Path of ``librecfuse.so``, for ``torch.ops.load_library`` in a process that needs no Python package.

    The environment variable ``RECFUSE_LIBRARY`` names another one; else it lies beside this file.
    """
    return os.environ.get("RECFUSE_LIBRARY") or str(Path(__file__).with_name("librecfuse.so"))


def _load_library() -> str:
    """Registers the operators; returns the library's version.

    Raises:
        ImportError: the library is missing or does not load; says which file, why, and what to do.
    """
    path = library_path()
    source = "named by RECFUSE_LIBRARY" if os.environ.get("RECFUSE_LIBRARY") else "part of the package"
    if not os.path.isfile(path):
        raise ImportError(
            f"recfuse: {path} ({source}) does not exist; install the package (pip install .) or build it in "
            "place (python setup.py build_ext --inplace), or unset RECFUSE_LIBRARY"
        )
    try:
        in_use = torch.ops.recfuse.library_path()
    except AttributeError:
        in_use = path  # none yet
    if not os.path.samefile(in_use, path):
        raise ImportError(
            f"recfuse: {path} ({source}) would be a second copy of the library: this process has the "
            f"operators of {in_use} already. Set RECFUSE_LIBRARY={in_use}, or load no other file before the "
            "package"
        )
    try:
        torch.ops.load_library(path)
        return str(torch.ops.recfuse.library_version())
    except (OSError, AttributeError, RuntimeError) as error:
        raise ImportError(
            f"recfuse: {path} ({source}) does not load beside torch {torch.__version__}: {error}. recfuse "
            "needs torch >= 2.11 on Linux and a library built for this kind of machine; reinstall it"
        ) from error


__version__ = _load_library()

from recfuse import nn  # noqa: E402  (the operators must be registered first)
from recfuse.nn.pinning import PinnedRows, pin_rows, unpin  # noqa: E402
from recfuse.ops import check, embedding_bag, fused_embedding_bag  # noqa: E402
from recfuse.passes.swap import SwapReport, swap, unswap  # noqa: E402

__all__ = [
    "PinnedRows",
    "SwapReport",
    "__version__",
    "check",
    "embedding_bag",
    "fused_embedding_bag",
    "library_path",
    "nn",
    "pin_rows",
    "swap",
    "unpin",
    "unswap",
    *_MODULES_AT_FIRST_USE,
    *_NAMES_AT_FIRST_USE,
]


def __getattr__(name: str) -> Any:
    """Imports a tool at first use."""
    if name in _MODULES_AT_FIRST_USE:
        return importlib.import_module(_MODULES_AT_FIRST_USE[name])
    if name in _NAMES_AT_FIRST_USE:
        return getattr(importlib.import_module(_NAMES_AT_FIRST_USE[name]), name)
    raise AttributeError(f"module 'recfuse' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names, including the modules that are not imported yet."""
    return sorted({*globals(), *_MODULES_AT_FIRST_USE, *_NAMES_AT_FIRST_USE})
