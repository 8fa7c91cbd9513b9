"""Whether tensors may be looked at, and have their memory: a storage may be freed or made smaller under them,
and torch's own functions read past its end then.
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


def is_readable(tensor: Tensor) -> bool:
    """Whether the contents of a tensor are there to be looked at: not while a program is traced."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or tensor.is_meta
        or type(tensor) not in (Tensor, torch.nn.Parameter)
    )


def check_storages(where: str, name: str, tensors: Iterable[Any]) -> None:
    """Raises ValueError where the storage of a tensor is too small for it; ``where`` and ``name`` open the
    text. Nothing is checked while a program is traced.
    """
    if not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack():
        _C.check_storages(Tensor, CELL, where, name, tuple(tensors))


_MOST_JOINED = 32768
"""Offsets that one thread joins; torch shares more than that among threads."""


def join_offsets(offsets: Tensor, indices: Any) -> Tensor | None:
    """int64 ``[tables * bags + 1]``, the offsets of the lookups of all tables; by those of each, ``[tables,
    bags]``. ``indices``: a tensor ``[lookups of it]`` a table, or ``[tables, lookups]``. All have their
    memory then. None: torch's functions are needed, or an error.
    """
    if not is_readable(offsets) or not offsets.is_cpu or offsets.is_neg() or offsets.numel() > _MOST_JOINED:
        return None
    joined = torch.empty(offsets.numel() + 1, dtype=torch.int64, device="cpu")
    return joined if _C.join_offsets(Tensor, CELL, offsets, indices, joined) else None
