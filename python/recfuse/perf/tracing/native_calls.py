"""Lowers recfuse's own operators in a traced step for a described GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from recfuse import _C
from recfuse.perf.described import reserve


class NativeCalls:
    """Lowers recfuse's operators for a GPU while a step is traced; for the CPU, reads the sizes
    of their tensors.
    """

    def __init__(self, gpu: str | None) -> None:
        """For a GPU by its name in `recfuse.explain`; ``count``: calls so far."""
        self.gpu, self.count = gpu, 0

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """Lower calls for the GPU within the context, so that modules plan as on that GPU."""
        if self.gpu is None:
            yield
            return
        _C.explain_begin(self.gpu)
        try:
            yield
        finally:
            _C.explain_end()

    def explain(self, func: Any, args: Any, kwargs: Any) -> tuple[str, tuple[float, ...]] | None:
        """Return the kind and sizes of an operator's launches; None if it launches nothing."""
        self.count += 1
        name = f"recfuse_{func.overloadpacket.__name__.strip('_')}"
        if self.gpu is None:
            tensors = [tensor for tensor in pytree.tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
            moved = sum(
                tensor.numel() * tensor.element_size() for tensor in tensors if not tensor.is_floating_point()
            )
            return name, (max(moved, 1), max(moved, 1), 1)
        _C.explain_end()
        _C.explain_begin(self.gpu)
        try:
            with torch.no_grad():
                func(*pytree.tree_map_only(FakeTensor, _with_memory, args),
                     **pytree.tree_map_only(FakeTensor, _with_memory, kwargs))  # fmt: skip
        except (NotImplementedError, RuntimeError, ValueError, TypeError, IndexError):
            pass  # the operator exists for the CPU alone, or reads results of another operator
        recorded = _C.explain_end()
        _C.explain_begin(self.gpu)
        return (name, sizes_of(recorded)) if recorded else None


def sizes_of(recorded: Any) -> tuple[float, float, float]:
    """Return bytes, operations and blocks of recorded launches."""
    moved = sum(launch["read_bytes"] + launch["written_bytes"] for launch in recorded)
    operations = sum(launch["flops"] + launch["tensor_flops"] for launch in recorded)
    blocks = sum(launch["grid"][0] * launch["grid"][1] * launch["grid"][2] for launch in recorded)
    return max(float(moved), 1.0), max(float(operations), 1.0), max(float(blocks), 1.0)


def _with_memory(fake: Tensor) -> Tensor:
    """Return a tensor on the CPU with the shape of the fake, whose memory is not accessed."""
    return reserve(fake.shape, fake.dtype)
