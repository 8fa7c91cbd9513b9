"""Memory for large tables."""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref

import torch
from torch import Tensor
from torch.utils import dlpack

from recfuse._storage import is_readable

_HUGE_PAGE = 2 << 20  # bytes; smaller tensors have no huge page


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(torch.ops.recfuse.library_path())
    library.rf_advise_huge_pages.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.rf_advise_huge_pages.restype = ctypes.c_int
    return library


def advise_huge_pages(tensor: Tensor) -> None:
    """Request huge pages for the memory of a large CPU tensor; most effective before it is filled."""
    nbytes = tensor.numel() * tensor.dtype.itemsize
    if type(tensor) is not Tensor or tensor.device.type != "cpu":  # a fake tensor, for example
        return
    if nbytes >= _HUGE_PAGE and tensor.is_contiguous():  # an expanded tensor has less memory
        _library().rf_advise_huge_pages(tensor.data_ptr(), nbytes)


def own_storage(view: Tensor) -> Tensor:
    """Return the same memory without gradients, as a separate storage that ends where the view ends.

    Tools that look at storages (``torch.save``, safetensors, accelerate) then see a tensor, not a part of
    another tensor. The storage keeps the owner of the memory alive, and a write in place counts as a write
    to ``view``: both share a version counter. The function copies nothing and does not synchronize. While a
    program is traced, and for tensors without memory, the result is ``view.detach()``.
    """
    entry = view.detach()
    if is_readable(entry) and entry.device.type in ("cpu", "cuda"):
        owner = view.detach()  # not `entry`: the storage would keep itself instead of the memory
        entry.data = dlpack.from_dlpack(dlpack.to_dlpack(owner))
    return entry


def redirect(tensor: Tensor, rows: Tensor) -> None:
    """Replace the memory of ``tensor`` by ``rows``, which has its shape and its values.

    Another thread may be in a call that reads the old memory, so with several threads the old memory stays
    until nothing refers to the tensor any more.
    """
    if len(sys._current_frames()) > 1:
        weakref.finalize(tensor, id, tensor.detach()).atexit = False
    tensor.data = own_storage(rows)
