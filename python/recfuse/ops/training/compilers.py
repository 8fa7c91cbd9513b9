"""The torch whose compiler follows training of packed tables: an older one does not see the optimizer that a
Parameter belongs to, nor tell which tables a loss has used.
"""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

FIRST = "2.13"
IS_OLD = TorchVersion(torch.__version__) < FIRST


def with_old_compiler(text: str, what: str) -> str:
    """An error's text, and behind it, with an older torch, that compiled programs do not have ``what``."""
    if not IS_OLD:
        return text
    return (
        f"{text}. Found torch {torch.__version__}, whose torch.compile {what}; must be {FIRST} or later for "
        "compiled training of these tables: update torch, or leave the tables out of compiled programs by "
        "torch.compiler.disable(module)"
    )
