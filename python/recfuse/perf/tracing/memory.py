"""Counts the memory of a step: the bytes of its tensors during the trace, and their peak."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

from torch import Tensor

from recfuse.perf.known import data_sheet
from recfuse.perf.tracing.operators import Operator

_BLOCK = 512  # bytes to which the allocator rounds
_PRODUCTS = "addmm", "mm", "bmm"
# Bytes that torch sets: of cuBLAS on Hopper and on other GPUs, and of cuBLASLt, which computes linear layers.
_HOPPER_WORKSPACE, _WORKSPACE, _LINEAR_WORKSPACE = 32 << 20, 8_519_680, 1 << 20


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
        self._held: dict[object, tuple[int, ...]] = {}  # numbers of the counted memory of each tensor
        self._sizes: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._numbers = itertools.count()
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
        if key not in self._held and not tensor.is_sparse:
            self.resident += self._count(key, holder, holder.nbytes())  # type: ignore[attr-defined]

    def add(self, tensor: Tensor, sparse_bytes: int = 0) -> None:
        """Count a new tensor until it is freed."""
        key, holder = self._key(tensor)
        if key not in self._held:
            nbytes = sparse_bytes if tensor.is_sparse else holder.nbytes()  # type: ignore[attr-defined]
            self._count(key, holder, nbytes)

    def share(self, tensor: Tensor, sources: Iterable[Tensor]) -> None:
        """Count a new tensor as holder of the memory of others, such as the values of a sparse tensor."""
        key, holder = self._key(tensor)
        if key not in self._held:
            self._hold(key, holder, [storage for source in sources for storage in self._held_by(source)])

    def _held_by(self, tensor: Tensor) -> tuple[int, ...]:
        return self._held.get(self._key(tensor)[0], ())

    def _count(self, key: object, holder: object, nbytes: int) -> int:
        """Count new memory; returns its rounded bytes."""
        number, size = next(self._numbers), _rounded(nbytes)
        self._sizes[number], self._holders[number] = size, 0
        self._hold(key, holder, [number])
        self.use(size)
        self.bytes += size
        return size

    def _hold(self, key: object, holder: object, numbers: Iterable[int]) -> None:
        self._held[key] = tuple(numbers)
        for number in self._held[key]:
            self._holders[number] += 1
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

    def _free(self, key: object) -> None:
        for number in self._held.pop(key):
            self._holders[number] -= 1
            if not self._holders[number]:
                del self._holders[number]
                self.bytes -= self._sizes.pop(number)


def workspace_bytes(operators: Iterable[Operator], gpu: str | None) -> int:
    """Return the memory that torch keeps for the matrix products of a step on a GPU.

    cuBLAS has a workspace for each thread that calls it: the thread of the step, and the thread of its
    backward pass.
    """
    products = [operator for operator in operators if operator.kind and operator.kind.startswith(_PRODUCTS)]
    if gpu is None or not products:
        return 0
    threads = 1 + any(product.phase == "backward" for product in products)
    linear = any(product.kind and product.kind.startswith("addmm") for product in products)
    large = data_sheet(gpu)["arch"].startswith("sm_90")
    return threads * (_HOPPER_WORKSPACE if large else _WORKSPACE) + linear * _LINEAR_WORKSPACE


def _rounded(nbytes: int) -> int:
    return (nbytes + _BLOCK - 1) // _BLOCK * _BLOCK
