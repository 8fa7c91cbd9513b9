"""What ``torch.fx.symbolic_trace`` meets in modules with packed tables."""

from __future__ import annotations

from typing import Any

import torch

from recfuse.errors import ArgumentTypeError


def refuse_proxy(value: Any) -> None:
    """Raises where a symbolic trace comes by: how tables are pooled in one call depends on the batch."""
    if not torch.compiler.is_compiling() and isinstance(value, torch.fx.Proxy):
        raise ArgumentTypeError(
            "recfuse: torch.fx.symbolic_trace cannot follow tables that are pooled in one call; call "
            "recfuse.unswap(model) before it, or use torch.export"
        )
