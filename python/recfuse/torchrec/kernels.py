"""The compute kernels of TorchRec's lookups: for tables that the backward pass updates, and for
data-parallel tables.

Data-parallel tables have gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    DenseTableBatchedEmbeddingBagsCodegen,
    EmbeddingLocation,
)
from torch import Tensor
from torch.nn import Parameter
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbeddingBag,
    BatchedDenseEmbeddingBag,
    BatchedFusedEmbeddingBag,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.utils import append_prefix
from torchrec.modules.embedding_configs import data_type_to_sparse_type

from recfuse.errors import ArgumentValueError
from recfuse.torchrec.collection import PooledTables
from recfuse.torchrec.options import KERNELS, WHERE, Options
from recfuse.torchrec.tables import TableBatchedEmbeddingBags
from recfuse.torchrec.variable_batch import pool_batch


class FusedKernel(BatchedFusedEmbeddingBag):
    """TorchRec's kernel FUSED with :class:`TableBatchedEmbeddingBags` inside."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: Any = None,
        device: torch.device | None = None,
        sharding_type: Any = None,
        env: Any = None,
    ) -> None:
        """Create the tables of a rank's group, which :func:`check_kernels` has accepted."""
        BaseBatchedEmbeddingBag.__init__(self, config, pg, device, sharding_type)
        on_gpu = device is not None and device.type == "cuda"
        location = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
        computes = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
        self._emb_module = TableBatchedEmbeddingBags(
            [
                (rows, dim, location, computes)
                for rows, dim in zip(self._local_rows, self._local_cols, strict=True)
            ],
            feature_table_map=self._feature_table_map,
            table_names=[table.name for table in config.embedding_tables],
            pooling_mode=self._pooling,
            weights_precision=data_type_to_sparse_type(config.data_type),
            device=device,
            **(config.fused_params or {}),
        )
        self._optim = EmbeddingFusedOptimizer(config, self._emb_module, pg)
        self.init_parameters()

    @property
    def _param_per_table(self) -> dict[str, TableBatchedEmbeddingSlice]:  # type: ignore[override]
        slices = slices_by_table(self._config, self._emb_module.tables)
        weights = self._emb_module.split_embedding_weights()
        states = self._emb_module.get_optimizer_state()
        for name, weight in slices.items():
            weight._in_backward_optimizers = [  # type: ignore[attr-defined]
                EmbeddingFusedOptimizer(
                    config=self._config,
                    emb_module=self._emb_module,
                    pg=self._pg,
                    create_for_table=name,
                    param_weight_for_table=weight,
                    embedding_weights_by_table=weights,
                    all_optimizer_states=states,
                )
            ]
        return slices

    @_param_per_table.setter
    def _param_per_table(self, value: dict[str, TableBatchedEmbeddingSlice]) -> None:
        """Ignore TorchRec's empty dictionary, because slices are created on each read."""


class DenseTables(DenseTableBatchedEmbeddingBagsCodegen):
    """Tables with gradients: FBGEMM's ``DenseTableBatchedEmbeddingBagsCodegen`` with recfuse's kernels.

    It is a subclass only for ``isinstance``.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        names: list[str],
        feature_table_map: list[int],
        options: Options,
        device: torch.device | None,
    ) -> None:
        """Create tables with uninitialized rows."""
        torch.nn.Module.__init__(self)
        self.embedding_specs = shapes
        # DistributedDataParallel does not accept meta tensors.
        if device is None or device.type == "meta":
            on_gpu = device is not None and torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.tables = PooledTables(shapes, names, feature_table_map, options, device)

    def forward(  # type: ignore[override]
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
    ) -> Tensor:
        """Pool every feature, as :meth:`TableBatchedEmbeddingBags.forward` does."""
        if feature_requires_grad is not None:
            raise ArgumentValueError(f"{WHERE}: feature_requires_grad is not supported. Pass None.")
        lookups = indices, offsets, per_sample_weights
        return pool_batch(self.tables, lookups, batch_size_per_feature_per_rank)

    def split_embedding_weights(self) -> list[Tensor]:
        """Return each table's rows ``[rows, dim]``, as views."""
        return self.tables.table_rows()


class DenseKernel(BatchedDenseEmbeddingBag):
    """TorchRec's kernel DENSE, for data-parallel tables, with :class:`DenseTables` inside."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: Any = None,
        device: torch.device | None = None,
        sharding_type: Any = None,
    ) -> None:
        """Create the tables of a rank's group, as :class:`FusedKernel` does."""
        BaseBatchedEmbeddingBag.__init__(self, config, pg, device, sharding_type)
        names = [table.name for table in config.embedding_tables]
        options = Options.of(
            {
                "weights_precision": data_type_to_sparse_type(config.data_type),
                "output_dtype": (config.fused_params or {}).get("output_dtype", Options.output_dtype),
                "pooling_mode": self._pooling,
            },
            names,
        )
        shapes = list(zip(self._local_rows, self._local_cols, strict=True))
        self._emb_module = DenseTables(shapes, names, self._feature_table_map, options, device)
        self._param_per_table = slices_by_table(config, self._emb_module.tables)
        self.init_parameters()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield the packed Parameters, each named by its tables, in the form that
        DistributedDataParallel reduces.
        """
        tables = self._config.embedding_tables
        specs = self._emb_module.tables.layout.tables
        for number, parameter in enumerate(self._emb_module.tables.parameters()):
            names = [table.name for table, spec in zip(tables, specs, strict=True) if spec.matrix == number]
            yield append_prefix(prefix, f"{'/'.join(names)}.weight"), parameter


def slices_by_table(
    config: GroupedEmbeddingConfig, tables: PooledTables
) -> dict[str, TableBatchedEmbeddingSlice]:
    """Return the weight of each table, as TorchRec's Parameter type for a slice of another Parameter.

    The column shards of a table on a rank form a single slice. If their dims differ, the slice has the shards
    of the first shard's dim.
    """
    matrices = list(tables.parameters())
    slices: dict[str, TableBatchedEmbeddingSlice] = {}
    for table in config.embedding_tables:
        if table.name in slices:
            continue
        specs = [
            spec
            for other, spec in zip(config.embedding_tables, tables.layout.tables, strict=True)
            if other.name == table.name
        ]
        first = specs[0]
        last = next(spec for spec in reversed(specs) if spec.embedding_dim == first.embedding_dim)
        slices[table.name] = TableBatchedEmbeddingSlice(
            data=matrices[first.matrix],
            start_offset=first.first_row,
            end_offset=last.first_row + last.num_embeddings,
            num_embeddings=last.first_row + last.num_embeddings - first.first_row,
            embedding_dim=first.embedding_dim,
        )
    return slices


def check_kernels(config: GroupedEmbeddingConfig) -> None:
    """Raise ValueError if a table's compute kernel needs a cache or is not TorchRec's FUSED or DENSE."""
    for table in config.embedding_tables:
        if table.compute_kernel not in KERNELS:
            raise ArgumentValueError(
                f"{WHERE}: table {table.name} has compute kernel {table.compute_kernel.name}, which recfuse "
                "does not have (it keeps no cache). Plan it with FUSED, or leave its collection to "
                "TorchRec's own sharder."
            )
