"""Tracks the lookups of bags in a traced step, and the rows of the sparse gradients that they produce."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from recfuse.perf.tracing.operators import Lookups, lookups_of

_BAGS = ("_embedding_bag", "_embedding_bag_forward_only")


class SparseRows:
    """The lookups of operators, and the rows of sparse tensors.

    A fake sparse tensor has no elements; the lookups that produced it represent its rows.

    Attributes:
        unknown: whether indices of a lookup were unknown.
    """

    def __init__(self) -> None:
        """Create an empty record."""
        self.unknown = False
        self._repetition: dict[Any, Lookups] = {}
        self._tables: dict[int, Lookups] = {}
        self._sparse: dict[int, Lookups] = {}
        self._coalesced: set[int] = set()
        self._keep: list[Any] = []  # objects whose ids are used above

    def lookups(self, name: str, args: Any) -> Lookups | None:
        """Return the lookups that an operator reads, or the lookups of its gradient."""
        if name in _BAGS or name == "embedding":
            weight, indices = args[:2]
            bags = indices if name == "embedding" else args[2]
            lookups = self._facts(indices, indices.numel(), bags.numel(), weight, *weight.shape)
            self._tables[id(weight)] = lookups
            self._keep.append(weight)
            return lookups
        if name == "_embedding_bag_backward":
            grad, indices, offsets = args[:3]
            sizes = indices.numel(), offsets.numel(), grad, int(args[6]), grad.shape[1]
            return self._facts(indices, *sizes, dense=not args[9])
        if name == "embedding_dense_backward":
            grad, indices, rows = args[:3]
            sizes = indices.numel(), indices.numel(), grad, int(rows), grad.shape[-1]
            return self._facts(indices, *sizes, dense=True)
        sparse = args[1:2] if name in ("sparse_mask", "add_") else args[:1]
        if sparse and isinstance(sparse[0], Tensor) and sparse[0].is_sparse:
            return self.of(sparse[0])
        return None

    def of(self, tensor: Tensor) -> Lookups | None:
        """Return the lookups of a sparse tensor: its own, else the lookups of the last table of its shape."""
        if id(tensor) in self._sparse:
            return self._sparse[id(tensor)]
        shape = tuple(tensor.shape)
        return next((of for of in reversed(self._tables.values()) if (of.rows, of.dim) == shape), None)

    def is_coalesced(self, tensor: Tensor) -> bool:
        """Return whether a sparse tensor has each row once."""
        return id(tensor) in self._coalesced

    def run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operator on fakes."""
        first = args[0] if args else None
        if name == "add_" and isinstance(args[1], Tensor) and args[1].is_sparse:
            return first
        if not isinstance(first, Tensor) or not (first.is_sparse or name == "sparse_mask"):
            return func(*args, **kwargs)
        if name in ("sparse_mask", "_coalesce"):  # these have no fake functions
            return self._coalesced_clone(args[1] if name == "sparse_mask" else first)
        if name == "is_coalesced":
            return self.is_coalesced(first)
        of = self.of(first)
        if name in ("_values", "_indices") and of is not None:
            count = max(int(of.unique if id(first) in self._coalesced else of.count), 1)
            if name == "_values":
                return torch.empty((count, of.dim), dtype=first.dtype, device=first.device)
            return torch.empty((1, count), dtype=torch.int64, device=first.device)
        return func(*args, **kwargs)

    def note(
        self, name: str, lookups: Lookups | None, tensors: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """Record the lookups whose rows a sparse result has."""
        of = lookups or next(
            (self._sparse[id(tensor)] for tensor in tensors if id(tensor) in self._sparse), None
        )
        if name.startswith("_sparse_coo_tensor") and len(tensors) == 2 and tensors[1].dim() == 2:
            count, dim = tensors[1].shape
            of = Lookups(count, count, dim, results[0].shape[0], count, 1.0, tensors[1].element_size())
        for tensor in results:
            if tensor.is_sparse and of is not None and id(tensor) not in self._sparse:
                self._sparse[id(tensor)] = of
                weakref.finalize(tensor, self._sparse.pop, id(tensor), None)

    def _coalesced_clone(self, tensor: Tensor) -> Tensor:
        clone = tensor.clone()
        self._coalesced.add(id(clone))
        weakref.finalize(clone, self._coalesced.discard, id(clone))
        return clone

    def _facts(
        self, indices: Any, count: int, bags: int, weight: Tensor, rows: int, dim: int, dense: bool = False
    ) -> Lookups:
        is_real = isinstance(indices, Tensor) and not isinstance(indices, FakeTensor)
        key = (indices.data_ptr() if is_real else None, count, bags, rows, dim, dense)
        if key not in self._repetition:
            source = indices if is_real else None
            self._repetition[key] = lookups_of(source, count, bags, weight, rows, dim, dense)
            self._keep.append(indices)
        lookups = self._repetition[key]
        self.unknown |= not lookups.known
        return lookups
