"""Creates models of any size without memory: large new tensors only have addresses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from recfuse.perf.described import reserve

FROM = 1 << 20
"""Least number of elements of a large tensor."""
_FACTORIES = frozenset(("empty", "zeros", "ones", "full", "rand", "randn", "empty_strided"))


class _Unallocated(TorchDispatchMode):
    """Reserves addresses for large new floating-point tensors, and never writes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._reserved: set[int] = set()
        self._keep: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(self._is_reserved(tensor) for tensor in inputs):
            return self._without_memory(func, args, kwargs, inputs)
        if func.overloadpacket.__name__ in _FACTORIES and isinstance(args[0], (list, tuple)):
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            on_cpu = torch.device(kwargs.get("device") or "cpu").type != "meta"
            if dtype.is_floating_point and on_cpu and math.prod(args[0]) >= FROM:
                return self._reserve(args[0], dtype)
        return func(*args, **kwargs)

    def _is_reserved(self, tensor: Tensor) -> bool:
        return (
            tensor.device.type == "cpu"
            and not tensor.is_sparse
            and tensor.untyped_storage()._cdata in self._reserved
        )

    def _reserve(self, shape: Any, dtype: torch.dtype) -> Tensor:
        tensor = reserve(tuple(shape), dtype)
        self._keep.append(tensor.untyped_storage())
        self._reserved.add(self._keep[-1]._cdata)
        return tensor

    def _without_memory(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """Return views as views, skip writes, and reserve addresses for other results."""
        if func.is_view or func.overloadpacket.__name__ in (
            "detach",
            "alias",
            "_unsafe_view",
            "set_",
            "device",
        ):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0]
        with self.fake:
            out = func(*pytree.tree_map_only(Tensor, self.fake.from_tensor, args),
                       **pytree.tree_map_only(Tensor, self.fake.from_tensor, kwargs))  # fmt: skip
        return pytree.tree_map_only(Tensor, lambda tensor: self._reserve(tensor.shape, tensor.dtype), out)


@contextmanager
def unallocated() -> Iterator[None]:
    """Create new floating-point tensors of at least 2**20 elements without memory, within the context.

    They are tensors on the CPU with addresses. Nothing is written to them, so that their values are zeros.
    Smaller tensors are as usual: random numbers that become indices keep their values.

    Example:
        >>> with recfuse.perf.tracing.unallocated.unallocated():
        ...     model = torch.nn.EmbeddingBag(4_000_000_000, 64)  # a terabyte
    """
    with _Unallocated():
        yield
