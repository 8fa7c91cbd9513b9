"""Memory for large tables."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20  # bytes; below it the advice cannot help


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(torch.ops.recfuse.library_path())
    library.rf_advise_huge_pages.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.rf_advise_huge_pages.restype = ctypes.c_int
    return library


def advise_huge_pages(tensor: Tensor) -> None:
    """Asks for huge pages behind a large CPU tensor; best before it is filled."""
    nbytes = tensor.numel() * tensor.dtype.itemsize
    if type(tensor) is not Tensor or tensor.device.type != "cpu":  # or a fake one
        return
    if nbytes >= _HUGE_PAGE and tensor.is_contiguous():  # an expanded one has less memory
        _library().rf_advise_huge_pages(tensor.data_ptr(), nbytes)
