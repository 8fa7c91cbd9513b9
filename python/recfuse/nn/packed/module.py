"""``PackedModule``: the common base of modules with packed tables."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recfuse.data.forms import Lookups, each_batch
from recfuse.errors import ArgumentValueError
from recfuse.nn.mapping import Mapper, Mapping
from recfuse.nn.packed.layout import Layout, native_call
from recfuse.nn.packed.pooling import check_mapping, has_kernel, is_planned, on_gpu, pool_one_by_one
from recfuse.nn.packed.tables import PackedTables
from recfuse.nn.packed.taking_part import columns_of
from recfuse.nn.packed.wrappers import check_parallel
from recfuse.nn.tuning import Tuning
from recfuse.ops import fused_embedding_bag


class PackedModule(PackedTables):
    """Mixin for modules that pool packed tables in one call."""

    def _publish(self, layout: Layout, *arguments: Any) -> None:
        self._tuning = Tuning(len(layout.dims))
        self._mapper = Mapper()
        super()._publish(layout, *arguments)  # last: a call of another thread may begin with it

    def _layout_changed(self) -> None:
        self._weights_changed()

    def _weights_changed(self) -> None:
        """Update the tuning and the mapper from dtypes and device of the weights."""
        weights = self.packed_weights()
        dtypes = [weights[self.layout.tables[number].matrix].dtype for number in self.layout.table_of_feature]
        self._tuning.fit(list(zip(self.layout.dims, dtypes, strict=True)))
        self._mapper.use(weights[0].device if self.on_cuda else None)

    def _pool(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        mapping: Mapping | None = None,
        is_apart: bool = False,
    ) -> Any:
        """Pool feature-major jagged lookups; see :class:`recfuse.nn.FusedEmbeddingBagCollection`.

        Returns a list with the columns of each feature if ``is_apart`` and no kernel pools all tables in one
        call, else a tensor.
        """
        weights = self.packed_weights()  # first: it may change the layout
        layout = self._store.layout
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.mark_static(layout.features)  # their number does not depend on the batch
        if layout.sparse and not torch.compiler.is_compiling():
            check_parallel(weights)
        if mapping is not None:
            check_mapping(mapping, layout, offsets)
        if not has_kernel(weights):
            columns = pool_one_by_one(layout, weights, indices, offsets, per_sample_weights)
            return columns if is_apart else torch.cat(columns, dim=1)
        arguments = weights, layout.features, indices, offsets, layout.output_dim, per_sample_weights
        if not is_planned(weights):
            return fused_embedding_bag(*arguments, sparse=layout.sparse, any_max=layout.any_max)
        schedules, warps, rows = self._gpu_work(offsets, mapping)
        return fused_embedding_bag(
            *arguments,
            sparse=layout.sparse,
            schedules=schedules,
            warps=warps,
            mapping=rows,
            any_max=layout.any_max,
        )

    def _pool_apart(self, *lookups: Any) -> list[Tensor]:
        """Pool, and return the columns of each feature.

        A feature whose columns get no gradient gives no gradient to its table.
        """
        pooled = self._pool(*lookups, is_apart=True)
        return pooled if isinstance(pooled, list) else columns_of(pooled, self)

    def _gpu_work(self, offsets: Tensor, mapping: Mapping | None) -> tuple[Tensor | None, int, Tensor | None]:
        """Return schedules, warps and mapping of a call on a GPU."""
        if mapping is not None:
            return mapping.schedules, mapping.warps, mapping.tensor
        tuning = self._tuning
        if tuning.schedules is None and type(offsets) is Tensor and not torch.compiler.is_compiling():
            tuning.learn(offsets)
        return tuning.schedules, tuning.warps, None

    @property
    def plan(self) -> Any:
        """The applied plan, as long as it fits the tables, or None."""
        return self._tuning.plan

    @plan.setter
    def plan(self, plan: Any) -> None:
        self._tuning.plan = plan

    @property
    def schedules(self) -> Tensor | None:
        """The schedules, int32 ``[features, 5]`` on the host, not in the state_dict; None if unknown."""
        return self._tuning.schedules

    @property
    def warps(self) -> int:
        """The maximum of warps that an SM runs at once; 0 for the default."""
        return self._tuning.warps

    def set_plan(self, schedules: Any, warps: int = 0) -> None:
        """Set the schedule of each feature on a GPU; None restores the defaults.

        Schedules belong to a machine, not to a model, so the state_dict does not contain them.

        Args:
            schedules: int32 ``[features, 5]`` (kind, threads, distance, split, expected pooling factor times
                16, with 0 for unknown and -1 for empty), or a sequence with a text per feature; see
                :func:`recfuse.fused_embedding_bag`.
            warps: the maximum of warps that an SM runs at once; 0 for the default.

        Raises:
            TypeError: schedules of another type.
            ValueError: schedules of another shape, a text that is not a schedule. The next call on a GPU
                raises schedules that its kernel cannot run.
        """
        self._tuning.set(schedules, warps)

    def calibrate(self, batches: Iterable[Any]) -> None:
        """Read the pooling factor of each feature from batches, for the partition of calls on a GPU.

        Without it, the first call on a GPU reads them from its own batch, and waits once for that. Pooling
        factors change results only in the order of sums. The same batches always give the same partition.

        Args:
            batches: batches as ``forward`` (of a list: ``pool``) takes them, on any device.

        Raises:
            TypeError: a batch of another form.
            ValueError: no batch has a lookup.
        """
        function = f"recfuse.nn.{type(self).__name__}.calibrate"
        self._tuning.calibrate(
            self._lookups_of(batch, prefix).offsets for prefix, batch in each_batch(batches, function)
        )

    def map(self, batch: Any) -> Mapping:
        """Compute the partition of a batch on the host, for example in the thread that loads it.

        It uses no GPU, and releases the GIL while it works. Without earlier calibration it calibrates with
        this batch.

        Args:
            batch: int32 or int64 offsets ``[features * bags + 1]``, a CPU tensor or a NumPy array; or the
                batch as ``forward`` (of a list: ``pool``) takes it, on the CPU.

        Returns:
            Mapping: the argument ``mapping`` of ``forward`` for this batch; page-locked if the tables are on
            a GPU.

        Raises:
            TypeError: offsets that are not such an array.
            ValueError: offsets that do not ascend from 0; tables that one call cannot pool.
        """
        offsets = batch
        if not isinstance(batch, (Tensor, np.ndarray)):
            offsets = self._lookups_of(batch, f"recfuse.nn.{type(self).__name__}.map: batch").offsets
        weights = self.packed_weights()
        if not has_kernel(weights):
            raise ArgumentValueError(
                "recfuse: these tables are not pooled in one call, so there is no work to share out; "
                "expected all on the CPU or on one CUDA device, and float32, float16 or bfloat16"
            )
        device = weights[0].device if on_gpu(weights) else None
        features = self.layout.features
        call = native_call(weights, features.numpy(), self.layout.output_dim)
        return self._mapper.map(self._tuning, call, features, offsets, device)

    def _lookups_of(self, batch: Any, prefix: str) -> Lookups:
        """Return a batch in the form that a call of this class takes.

        Raises:
            TypeError, ValueError: ``batch`` is no batch of this class.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without objects of this process."""
        state = self.__dict__.copy()
        state["_mapper"], state["_tuning"] = None, copy.copy(self._tuning)  # its tensors are never written to
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state."""
        super().__setstate__(state)
        self._mapper = Mapper()
        self._weights_changed()
