"""Facts of the tensors of operators, and the record of an operator that the models read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

PHASES = ("inference", "forward", "backward", "optimizer")


class TensorFacts:
    """Shape, strides, element size of a tensor, and whether it is sparse."""

    __slots__ = ("dtype", "is_float", "itemsize", "shape", "sparse", "stride")

    def __init__(self, tensor: Tensor) -> None:
        """Read the facts of a tensor."""
        self.shape = tuple(int(size) for size in tensor.shape)
        self.sparse = tensor.is_sparse
        self.stride = () if self.sparse else tuple(int(step) for step in tensor.stride())
        self.dtype = tensor.dtype
        self.itemsize = tensor.element_size()
        self.is_float = tensor.dtype.is_floating_point

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def words(self) -> float:
        """Size in units of four bytes."""
        return self.numel * self.itemsize / 4

    @property
    def is_contiguous(self) -> bool:
        """Whether the memory order of the elements is that of the indices."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True

    @property
    def is_transposed(self) -> bool:
        """Whether the last two dimensions are stored in reverse order."""
        if self.shape[-1] == 1 and self.stride[-2] == 1:
            return False
        return self.stride[-1] != 1 and self.stride[-2] == 1


@dataclass(frozen=True)
class Lookups:
    """The lookups of a bag or an embedding.

    Attributes:
        count: number of lookups.
        bags: number of bags.
        dim: elements of a row.
        rows: rows of the table.
        unique: distinct rows among the lookups; an expectation if the indices are unknown.
        hottest: lookups of the most frequent row.
        itemsize: bytes of an element of the table.
        known: whether the indices were known.
        dense: whether their gradient is dense.
        indices: the rows looked up; None: unknown.
    """

    count: int
    bags: int
    dim: int
    rows: int
    unique: float
    hottest: float
    itemsize: int = 4
    known: bool = True
    dense: bool = False
    indices: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def row_words(self) -> float:
        """Size of a row in units of four bytes."""
        return self.dim * self.itemsize / 4


def lookups_of(
    indices: Tensor | None, count: int, bags: int, weight: Tensor, rows: int, dim: int, dense: bool = False
) -> Lookups:
    """Return the facts of lookups; indices None: a uniform distribution over the rows is assumed."""
    itemsize = weight.element_size()
    if indices is None or not count:
        unique = rows * -math.expm1(count * math.log1p(-1 / rows)) if rows > 1 else min(count, 1)
        return Lookups(count, bags, dim, rows, unique, max(1.0, 3 * count / rows), itemsize, not count, dense)
    unique, hottest = _repetition(indices.detach().reshape(-1), rows)
    return Lookups(count, bags, dim, rows, unique, hottest, itemsize, True, dense, indices)


def _repetition(indices: Tensor, rows: int) -> tuple[int, int]:
    """Return the number of distinct indices, and the count of the most frequent index."""
    if rows <= 4 * indices.numel() and int(indices.min()) >= 0:
        counts = torch.bincount(indices)
    else:
        _, counts = torch.unique(indices, return_counts=True)
    return int((counts > 0).sum()), int(counts.max())


@dataclass
class Operator:
    """An operator that a step dispatches.

    Attributes:
        name: of the operator, without its namespace.
        phase: an element of `PHASES`.
        kind: of its kernels, see `kinds`; None if it launches nothing.
        sizes: the sizes on which the time of its kind depends.
        module: path of the module that called it.
        reads, writes: numbers of the storages that it reads and writes, for fusion.
    """

    name: str
    phase: str
    kind: str | None = None
    sizes: tuple[float, ...] = ()
    module: str = ""
    reads: tuple[int, ...] = field(default=(), repr=False)
    writes: tuple[int, ...] = field(default=(), repr=False)
    fusable: bool = field(default=False, repr=False)
