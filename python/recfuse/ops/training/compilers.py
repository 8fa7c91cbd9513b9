"""The version of torch whose compiler supports training of packed tables.

An older compiler sees neither the optimizer of a Parameter nor the tables that a loss has used.
"""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

FIRST = "2.13"
IS_OLD = TorchVersion(torch.__version__) < FIRST


def with_old_compiler(text: str, defect: str) -> str:
    """Return an error's text; with an older torch, add the remedy to update it.

    ``defect`` states the defect of its torch.compile, such as "does not see the optimizer".
    """
    if not IS_OLD:
        return text
    return (
        f"{text} Update torch {torch.__version__}, whose torch.compile {defect}, to {FIRST} or later for "
        "compiled training of these tables, or leave the tables out of compiled programs by "
        "torch.compiler.disable(module)."
    )
