"""``Mapping``: the partition of a batch over the blocks of a GPU, which the host computes before the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recfuse import _C
from recfuse._storage import check_storages
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn.tuning import Tuning
from recfuse.ops.schedules import FIELDS

MAPPING_FIELDS = 8
"""The number of columns of a mapping."""

_STAGING = (9, 10)  # compute capabilities of GPUs whose SMs have memory for tables


def size_of(device: torch.device) -> tuple[int, bool]:
    """Return the number of SMs of a GPU, and whether their shared memory can hold tables."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major in _STAGING


def rows_before_lists(rows: NDArray[np.int32] | Tensor) -> int:
    """Return the number of rows of a mapping ``[rows, 8]`` before the lists of staged tables.

    These rows are the head, the tasks and the tiles.
    """
    return _C.fused_embedding_bag_rows(np.asarray(rows))


def staged_features(rows: NDArray[np.int32]) -> list[int]:
    """Return the features whose tables a mapping ``[rows, 8]`` stages: the features of its lists."""
    lists = rows[rows_before_lists(rows) + 1 :]
    return [int(feature) for feature in np.unique(lists[:, 0]) if feature >= 0]


@dataclass(frozen=True)
class Mapping:
    """The partition of a batch: the assignment of bags to the blocks of a GPU.

    ``collection.map(offsets)`` creates it, and ``forward`` takes it as ``mapping``.

    Attributes:
        tensor: int32 ``[rows, 8]`` on the CPU; page-locked if the tables are on a GPU.
        bags: the bags of each feature.
        features: int64 ``[features, 7]``, the features of the partition, as in
            :func:`recfuse.fused_embedding_bag`.
        schedules: int32 ``[features, 5]``, the schedules of the partition; the call uses them.
        warps: the maximum of warps that an SM runs at once; 0 for the default.

    Example:
        >>> collection = recfuse.nn.FusedEmbeddingBagCollection([(1000, 16), (50, 8)])
        >>> collection.map(torch.tensor([0, 1, 2, 3, 4])).bags
        2
    """

    tensor: Tensor
    bags: int
    features: Tensor
    schedules: Tensor
    warps: int

    def pin_memory(self) -> Mapping:
        """Return the partition in page-locked memory, as torch's DataLoader requests."""
        return self if self.tensor.is_pinned() else replace(self, tensor=self.tensor.pin_memory())


class _Description(NamedTuple):
    """A handle of the C library for features, and the arguments from which it was created."""

    features: Tensor
    schedules: Tensor
    warps_and_buffers: Any
    handle: Any


class Mapper:
    """Creates the mappings of a module. Reads tables and schedules once, not for each batch."""

    def __init__(self) -> None:
        """Begin without tables."""
        self._description: _Description | None = None
        self._sms, self._stages = 132, False  # defaults for an unknown GPU: no staging

    def use(self, device: torch.device | None) -> None:
        """Store properties of the tables' GPU, also for processes of a loader, which must not start CUDA."""
        if device is not None and torch.cuda.is_initialized():
            self._sms, self._stages = size_of(device)

    def map(
        self,
        tuning: Tuning,
        call: tuple[Any, ...],
        features: Tensor,
        offsets: Any,
        device: torch.device | None,
    ) -> Mapping:
        """Return the mapping of offsets, as :meth:`PackedModule.map`.

        ``call`` is the native call of the tables, and ``device`` is their GPU, or None.
        """
        batch = _checked(offsets, tuning.features)
        if tuning.schedules is None:
            tuning.learn(torch.from_numpy(batch))
        schedules, warps = tuning.schedules, tuning.warps
        if schedules is None:
            schedules = torch.zeros(tuning.features, FIELDS, dtype=torch.int32, device="cpu")
        bags = (batch.size - 1) // max(tuning.features, 1)
        if not bags:
            work = torch.zeros(0, MAPPING_FIELDS, dtype=torch.int32, device="cpu")
            return Mapping(work, bags, features, schedules, warps)
        arguments = (self._describe(call, features, schedules, warps), batch, *self._size())
        if device is None or not torch.cuda.is_initialized():  # no GPU, or a process of a loader
            work = torch.from_numpy(_C.fused_embedding_bag_map(*arguments))
        else:
            work = _pinned(lambda memory: _C.fused_embedding_bag_map(*arguments, memory))
        return Mapping(work, bags, features, schedules, warps)

    def _size(self) -> tuple[int, bool]:
        """Return the GPU's SMs, and whether they can hold tables; during an explanation, those of its GPU."""
        gpu = _C.explain_gpu()
        return (self._sms, self._stages) if gpu is None else (gpu["sms"], gpu["major"] in _STAGING)

    def _describe(self, call: tuple[Any, ...], features: Tensor, schedules: Tensor, warps: int) -> Any:
        last = self._description  # other threads may replace it
        if (
            last is None
            or last.features is not features  # a change replaces these tensors and never writes to them
            or last.schedules is not schedules
            or last.warps_and_buffers != (warps, call[0])
        ):
            handle = _C.fused_embedding_bag_describe(call, schedules.numpy(), warps)
            last = self._description = _Description(features, schedules, (warps, call[0]), handle)
        return last.handle


def _checked(offsets: Any, features: int) -> NDArray[np.integer]:
    if isinstance(offsets, Tensor):
        if offsets.device.type != "cpu":
            raise ArgumentValueError(
                f"recfuse: offsets is on {offsets.device}; expected the CPU, since the host reads them"
            )
        check_storages("recfuse", "offsets", (offsets,))
        offsets = offsets.detach().numpy()
    if not isinstance(offsets, np.ndarray) or offsets.dtype not in (np.int32, np.int64):
        kind = offsets.dtype if isinstance(offsets, np.ndarray) else type(offsets).__name__
        raise ArgumentTypeError(f"recfuse: offsets is {kind}; expected an int32 or int64 array or tensor")
    if offsets.ndim != 1 or offsets.size == 0 or (offsets.size - 1) % max(features, 1):
        raise ArgumentValueError(
            f"recfuse: offsets has shape {list(offsets.shape)}; expected features * bags + 1 elements with "
            f"{features} features"
        )
    return np.ascontiguousarray(offsets)


def _pinned(write: Callable[[Callable[[int], NDArray[np.int32]]], object]) -> Tensor:
    """Return page-locked memory that ``write`` fills without a copy."""
    tensors: list[Tensor] = []

    def memory(rows: int) -> NDArray[np.int32]:
        tensors.append(torch.empty(rows, MAPPING_FIELDS, dtype=torch.int32, device="cpu", pin_memory=True))
        return tensors[0].numpy()

    write(memory)
    return tensors[0]
