"""Checks that the contents of tensors may be read, and that their storages are large enough.

A storage may be freed or shrunk after the creation of a tensor. torch's own functions then read past its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from recfuse import _C


def _find_cell() -> int:
    """Return the position, in bytes, of the at::Tensor in a torch.Tensor object."""
    probes = [torch.empty(shape, device="cpu") for shape in ((1,), (2, 3))]
    positions = {_C.tensor_cell(probe, probe._cdata, Tensor.__basicsize__) for probe in probes}
    if len(positions) != 1 or -1 in positions:
        raise ImportError(f"recfuse: torch {torch.__version__} keeps tensors in a form that is not known")
    return positions.pop()


CELL = _find_cell()


def is_readable(tensor: Tensor) -> bool:
    """Return whether the contents of a tensor may be read; False while a program is traced."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or tensor.is_meta
        or type(tensor) not in (Tensor, torch.nn.Parameter)
    )


def check_storages(prefix: str, name: str, tensors: Iterable[Any]) -> None:
    """Raise ValueError if the storage of a tensor is too small for it.

    The text of the error begins with ``prefix`` and ``name``. Checks nothing while a program is traced.
    """
    if not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack():
        _C.check_storages(Tensor, CELL, prefix, name, tuple(tensors))


_MOST_JOINED = 32768
"""The most offsets that a single thread joins; torch splits more offsets between threads."""


def join_offsets(offsets: Tensor, indices: Any) -> Tensor | None:
    """Join the offsets of all tables, ``[tables, bags]``, to int64 ``[tables * bags + 1]``.

    ``indices`` is a tensor ``[lookups of the table]`` per table, or ``[tables, lookups]``. The storages of
    all tensors are checked. Returns None if torch's functions must join the offsets, or raise an error.
    """
    if not is_readable(offsets) or not offsets.is_cpu or offsets.is_neg() or offsets.numel() > _MOST_JOINED:
        return None
    joined = torch.empty(offsets.numel() + 1, dtype=torch.int64, device="cpu")
    return joined if _C.join_offsets(Tensor, CELL, offsets, indices, joined) else None
