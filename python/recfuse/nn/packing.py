"""Tables packed into one buffer per dtype: where each goes, and the memory behind it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recfuse._fused_backward import Slot

_TABLE_ALIGNMENT = 64  # bytes; a cache line, and the widest vector load
_HUGE_PAGE = 2 << 20  # bytes; below it the advice cannot help


class Plan(NamedTuple):
    """Places of tables in buffers."""

    slots: list[Slot]  # one a table
    dtypes: list[torch.dtype]  # one a buffer
    numels: list[int]  # one a buffer


def plan(shapes: Sequence[tuple[int, int]], dtypes: Sequence[torch.dtype]) -> Plan:
    """Places tables one after another, each at a cache line, in a buffer per dtype."""
    buffer_dtypes = list(dict.fromkeys(dtypes))
    numels = [0] * len(buffer_dtypes)
    slots = []
    for (rows, dim), dtype in zip(shapes, dtypes, strict=True):
        buffer = buffer_dtypes.index(dtype)
        step = _TABLE_ALIGNMENT // dtype.itemsize
        start = -(-numels[buffer] // step) * step
        slots.append(Slot(buffer, start, rows, dim))
        numels[buffer] = start + max(rows * dim, 1)  # so that an empty table has a place of its own too
    return Plan(slots, buffer_dtypes, numels)


def allocate(packed: Plan, device: torch.device) -> list[Tensor]:
    """Buffers for a plan; their contents are not set, but for the gaps between tables, which are never
    read.
    """
    buffers = []
    for numel, dtype in zip(packed.numels, packed.dtypes, strict=True):
        buffer = torch.empty(numel, dtype=dtype, device=device)
        advise_huge_pages(buffer)
        buffers.append(buffer)
    return buffers


def views(packed: Plan, buffers: Sequence[Tensor]) -> list[Tensor]:
    """Each table, ``[rows, dim]``, inside its buffer."""
    return [
        buffers[slot.buffer].narrow(0, slot.offset, slot.rows * slot.dim).view(slot.rows, slot.dim)
        for slot in packed.slots
    ]


def adopt(packed: Plan, tables: Sequence[Tensor]) -> list[Tensor] | None:
    """The buffers that tables already lie in just as planned; None if they do not."""
    buffers: list[Tensor | None] = [None] * len(packed.numels)
    for slot, table in zip(packed.slots, tables, strict=True):
        if not table.is_contiguous() or (table.numel() and table.storage_offset() != slot.offset):
            return None
        storage = table.untyped_storage()
        known = buffers[slot.buffer]
        if known is not None:
            if known.untyped_storage()._cdata != storage._cdata:
                return None
        elif storage.nbytes() < packed.numels[slot.buffer] * table.dtype.itemsize:
            return None
        else:
            whole = torch.empty(0, dtype=table.dtype, device=table.device)
            buffers[slot.buffer] = whole.set_(storage, 0, (packed.numels[slot.buffer],))
    return [buffer for buffer in buffers if buffer is not None]


def destination(convert: Callable[[Tensor], Tensor], buffers: Sequence[Tensor]) -> torch.device | None:
    """The device that a conversion of modules, as ``.to()`` makes it, moves buffers to; None: it does not
    move them from where they are to one device, or it does more.
    """
    found = set()
    for buffer in buffers:
        before = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        after = convert(before)
        if after.dtype != before.dtype or after.layout != before.layout or convert(after) is not after:
            return None
        found.add(after.device)
    if len(found) != 1 or buffers[0].device in found:
        return None
    device = found.pop()
    return device if device.type in ("cpu", "cuda") else None


@functools.cache
def _library() -> ctypes.CDLL:
    from recfuse import library_path

    library = ctypes.CDLL(library_path())
    library.rf_advise_huge_pages.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.rf_advise_huge_pages.restype = ctypes.c_int
    return library


def advise_huge_pages(buffer: Tensor) -> None:
    """Asks for huge pages behind a large CPU tensor; best before it is filled."""
    nbytes = buffer.numel() * buffer.dtype.itemsize
    if type(buffer) is not Tensor:  # a fake one has no memory
        return
    if buffer.device.type == "cpu" and nbytes >= _HUGE_PAGE:
        _library().rf_advise_huge_pages(buffer.data_ptr(), nbytes)
