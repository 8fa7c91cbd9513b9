"""Whether tensors have their memory: a storage may be freed or made smaller under them, and torch's own
functions read past its end then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from recfuse import _C


def _find_cell() -> int:
    """The byte of a torch.Tensor object at which its at::Tensor is."""
    probes = [torch.empty(shape, device="cpu") for shape in ((1,), (2, 3))]
    found = {_C.tensor_cell(one, one._cdata, Tensor.__basicsize__) for one in probes}
    if len(found) != 1 or -1 in found:
        raise ImportError(f"recfuse: torch {torch.__version__} keeps tensors in a form that is not known")
    return found.pop()


CELL = _find_cell()


def check_storages(where: str, name: str, tensors: Iterable[Any]) -> None:
    """Raises ValueError where the storage of a tensor is too small for it; ``where`` and ``name`` open the
    text. Nothing is checked while a program is traced.
    """
    if not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack():
        _C.check_storages(Tensor, CELL, where, name, tuple(tensors))
