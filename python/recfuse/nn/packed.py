"""The mixin for modules that own packed tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse._backward import POOLING
from recfuse.errors import ArgumentValueError
from recfuse.nn.mapping import Mapping
from recfuse.nn.packed_tables import PackedTables
from recfuse.nn.tuning import Tuning


def why_not_fusable(tables: Sequence[torch.nn.EmbeddingBag]) -> str | None:
    """Why tables cannot be pooled in one call; None if they can."""
    for number, table in enumerate(tables):
        if table.max_norm is not None:
            return f"table {number} has max_norm, which changes rows during the call"
        if table.scale_grad_by_freq:
            return f"table {number} has scale_grad_by_freq"
        if table.mode not in POOLING:
            return f"table {number} has mode {table.mode!r}"
        if table.sparse and table.mode == "max":
            return f'table {number} has sparse gradients with mode "max"'
        if table.sparse != tables[0].sparse:
            return f"table {number} has sparse={table.sparse}, table 0 has sparse={tables[0].sparse}"
    return None


class PackedModule(torch.nn.Module):
    """Mixin for modules that own packed tables: keeps them packed through ``.to()``, ``load_state_dict``,
    deepcopy, pickling and ``share_memory``.
    """

    _packed: PackedTables | None = None

    def _packed_holder(self) -> torch.nn.Module:
        """The module that has the tables as its children, in order."""
        raise NotImplementedError

    def _packed_modules(self) -> dict[str, torch.nn.Module]:
        """The tables, in order."""
        return self._packed_holder()._modules

    def pack(self, table_of_feature: Sequence[int]) -> None:
        """Packs the tables; ``table_of_feature`` says which one each feature uses."""
        self._packed = PackedTables(self._packed_holder(), table_of_feature)
        self.register_load_state_dict_post_hook(_repack_after_loading)

    def repack(self) -> None:
        """Brings the tables together again after a weight was replaced from outside.

        Needed only after ``table.weight = ...`` or ``table.weight.data = ...``; everything that
        torch.nn.Module offers does it by itself.
        """
        if self._packed is not None:
            if self._packed_modules() is self._packed._modules and (
                list(self._packed_modules().values()) == self._packed.tables
            ):
                self._packed.pack()
            else:
                before = self._packed
                self._packed = PackedTables(self._packed_holder(), before.table_of_feature, before.tuning)

    @property
    def plan(self) -> Any:
        """The plan that was applied to this module, as long as it fits its tables; None: none."""
        return None if self._packed is None else self._packed.tuning.plan

    @plan.setter
    def plan(self, plan: Any) -> None:
        self._tuning().plan = plan

    def set_plan(self, schedules: Any, warps: int = 0) -> None:
        """Says how the GPU works on each feature, instead of the defaults; None: the defaults again.

        Args:
            schedules: int32 ``[features, 6]`` (kind, threads, distance, station, split, expected lookups of a
                bag times 16 with 0 for unknown and -1 for none), or a sequence of texts, one a feature; see
                :func:`recfuse.fused_embedding_bag`.
            warps: the most warps that an SM runs at once; 0: the default.

        What it sets belongs to a machine, not to a model: it is not in the state_dict.

        Raises:
            ValueError, TypeError: schedules of another shape or kind, a text that is none. What a kernel
                cannot do is raised by the next call on a GPU.
        """
        self._tuning().set(schedules, warps)

    def calibrate(self, batches: Iterable[Any]) -> None:
        """Learns how many lookups a bag of each feature has, which says how much work a batch is for a GPU.

        Without it the first call on a GPU learns that from its own batch, and waits for it once. The
        results do not depend on it, other than in the order of sums; with the same batches it is always the
        same.

        Args:
            batches: batches as ``forward`` takes them, ``(indices, offsets)`` or ``(indices, offsets,
                per_sample_weights)``; on any device.

        Raises:
            ValueError: no batch has a lookup, or none fits the features.
        """
        self._tuning().calibrate(self._offsets_of(batch) for batch in batches)

    def map(self, offsets: Any) -> Mapping:
        """Shares out one batch's work by its own lengths, on the host: best in the thread that loads it.

        Takes neither the GIL, while it works, nor the GPU. Where nothing was learned yet, it learns as
        :meth:`calibrate` does, from this batch.

        Args:
            offsets: int32 or int64 ``[features * bags + 1]`` of the batch, a CPU tensor or a NumPy array.

        Returns:
            What ``forward`` takes as ``mapping`` with this batch; page-locked where the tables are on a GPU.

        Raises:
            ValueError, TypeError: offsets that are no such array, that do not rise from 0; tables that one
                call does not pool.
        """
        if self._packed is None or not self._packed.has_kernel:
            raise ArgumentValueError(
                "recfuse: these tables are not pooled in one call, so there is no work to share out: all "
                "must be on the CPU or on one CUDA device, and float32, float16 or bfloat16"
            )
        return self._packed.map(offsets)

    def _tuning(self) -> Tuning:
        if self._packed is None:
            raise ArgumentValueError("recfuse: the tables of this module are not packed")
        return self._packed.tuning

    def _offsets_of(self, batch: Any) -> Tensor:
        """``[features * bags + 1]`` of a batch."""
        return torch.as_tensor(batch[1])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        if self._packed is not None and recurse:
            self._packed.move(fn)
        super()._apply(fn, recurse)
        self.repack()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """State without the buffers, whose contents are the weights'."""
        state = self.__dict__.copy()
        if self._packed is not None:
            state["_packed"] = self._packed.table_of_feature, self._packed.tuning.copy()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the state and packs the weights again."""
        super().__setstate__(state)
        if isinstance(self._packed, tuple):
            self._packed = PackedTables(self._packed_holder(), *self._packed)


def _repack_after_loading(module: PackedModule, incompatible_keys: Any) -> None:
    module.repack()
