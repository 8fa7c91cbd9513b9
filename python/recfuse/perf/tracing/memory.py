"""Counts the memory of a step: the bytes of its tensors during the trace, and their peak."""

from __future__ import annotations

import weakref

from torch import Tensor

_BLOCK = 512  # bytes to which the allocator rounds


class MemoryCount:
    """Bytes of the tensors that a traced step holds.

    A fake sparse tensor has no values, so the caller passes the bytes of its values. A tensor counts until
    its storage is freed, as in torch's allocator.

    Attributes:
        bytes: of the tensors that live now.
        peak: the largest sum of bytes since `restart`.
        resident: bytes of tensors that existed before the trace and that it used.
    """

    def __init__(self) -> None:
        """Start from zero bytes."""
        self.bytes = self.peak = self.resident = 0
        self._live: dict[object, int] = {}
        self._met: set[int] = set()

    def restart(self) -> None:
        """Reset the peak to the current bytes."""
        self.peak = self.bytes

    def _key(self, tensor: Tensor) -> tuple[object, object]:
        if tensor.is_sparse:
            return ("sparse", id(tensor)), tensor
        storage = tensor.untyped_storage()
        return storage._cdata, storage

    def note(self, tensor: Tensor) -> None:
        """Count a tensor that existed before the trace, once."""
        key, holder = self._key(tensor)
        if key in self._live or tensor.is_sparse:
            return
        size = _rounded(holder.nbytes())  # type: ignore[attr-defined]
        self._live[key] = size
        self.bytes += size
        self.resident += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(holder, self._free, key)

    def add(self, tensor: Tensor, sparse_bytes: int = 0) -> None:
        """Count a new tensor until it is freed."""
        key, holder = self._key(tensor)
        if key in self._live:
            return
        nbytes = sparse_bytes if tensor.is_sparse else holder.nbytes()  # type: ignore[attr-defined]
        self._live[key] = _rounded(nbytes)
        self.bytes += self._live[key]
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(holder, self._free, key)

    def used(self, tensor: Tensor) -> bool:
        """Return whether the trace has used a tensor that existed before it."""
        return id(tensor) in self._met

    def meet(self, tensor: Tensor) -> None:
        """Record the use of a tensor that existed before the trace, which must live as long as
        this object.
        """
        self._met.add(id(tensor))

    def use(self, nbytes: int) -> None:
        """Count bytes that live during a single operator."""
        self.peak = max(self.peak, self.bytes + nbytes)

    def size(self, tensor: Tensor) -> int:
        """Return the bytes counted for a tensor."""
        return self._live.get(self._key(tensor)[0], 0)

    def _free(self, key: object) -> None:
        size = self._live.pop(key, 0)
        self.bytes -= size


def _rounded(nbytes: int) -> int:
    return (nbytes + _BLOCK - 1) // _BLOCK * _BLOCK
