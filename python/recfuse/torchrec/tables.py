"""``TableBatchedEmbeddingBags``: recfuse's fused lookup and update with the interface of FBGEMM's module."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from recfuse._codes import row_bytes
from recfuse.errors import ArgumentValueError
from recfuse.torchrec.collection import PooledTables
from recfuse.torchrec.optimizers import in_backward
from recfuse.torchrec.options import OPTIMIZERS, WHERE, Options
from recfuse.torchrec.variable_batch import pool_batch

_HYPER_PARAMETERS = ("lr", "eps", "weight_decay")


class TableBatchedEmbeddingBags(SplitTableBatchedEmbeddingBagsCodegen):
    """Tables that are looked up, pooled and updated in a single call each.

    The class has the constructor and the methods of FBGEMM's ``SplitTableBatchedEmbeddingBagsCodegen``, with
    recfuse's kernels. It is a subclass only for ``isinstance``; it has none of FBGEMM's state.

    Any dim is allowed, also dims that are not multiples of 4. ADAM also runs on the CPU. An invalid index
    raises ``IndexError`` for every ``bounds_check_mode``; FBGEMM replaces it by 0.

    Args:
        embedding_specs: ``(rows, dim, location, compute_device)`` of each table. Locations must be DEVICE or
            HOST.
        feature_table_map: the number of the table of each feature. Default: a feature for each table.
        table_names: names, for errors.
        device: the device of the tables.
        options: FBGEMM's other keyword arguments: ``optimizer`` (EXACT_SGD, EXACT_ADAGRAD,
            EXACT_ROWWISE_ADAGRAD, ADAM), ``learning_rate``, ``eps``, ``beta1``, ``beta2``, ``weight_decay``
            with ``weight_decay_mode`` L2, ``stochastic_rounding``, ``pooling_mode``, ``weights_precision``,
            ``output_dtype``.

    Shape:
        - indices: ``[lookups]``, feature by feature, bag by bag. - offsets: ``[features * bags + 1]``. -
        output: ``[bags, sum of dims]``.

    Raises:
        ValueError, TypeError: a location that needs a cache, an optimizer or option without a fused form.

    Example:
        >>> from fbgemm_gpu import split_table_batched_embeddings_ops_training as ops
        >>> spec = (1000, 16, ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
        >>> tables = recfuse.torchrec.TableBatchedEmbeddingBags([spec], device="cpu")
        >>> tables.init_embedding_weights_uniform(-0.1, 0.1)
        >>> tables(torch.tensor([3, 7, 2]), torch.tensor([0, 2, 3])).shape
        torch.Size([2, 16])

    Note:
        Works on the CPU and on CUDA. The backward pass updates the rows; tables have no gradients.

    Source: FBGEMM's ``SplitTableBatchedEmbeddingBagsCodegen``.
    """

    def __init__(
        self,
        embedding_specs: Sequence[tuple[int, int, EmbeddingLocation, ComputeDevice]],
        feature_table_map: Sequence[int] | None = None,
        *,
        table_names: Sequence[str] | None = None,
        device: torch.device | str | int | None = None,
        **options: Any,
    ) -> None:
        """Create tables with uninitialized rows; see the class."""
        torch.nn.Module.__init__(self)
        self.uuid = str(uuid.uuid4())
        self.options = Options.of(options, table_names or ())
        self.embedding_specs = list(embedding_specs)
        self.table_names = list(table_names or (f"table {n}" for n in range(len(self.embedding_specs))))
        for name, (*_, location, _) in zip(self.table_names, self.embedding_specs, strict=True):
            if location not in (EmbeddingLocation.DEVICE, EmbeddingLocation.HOST):
                raise ArgumentValueError(
                    f"{WHERE}: table {name} has location {EmbeddingLocation(location).name}, which needs a "
                    "cache that recfuse does not have. Place it on the device, or use TorchRec's own "
                    "sharder."
                )
        self.feature_table_map = list(feature_table_map or range(len(self.embedding_specs)))
        self.optimizer = self.options.optimizer
        self.weights_precision = self.options.weights_precision
        self.output_dtype = self.options.output_dtype.as_int()
        self.current_device = torch.device("cpu" if device is None else device)
        shapes = [(rows, dim) for rows, dim, *_ in self.embedding_specs]
        self.tables = PooledTables(
            shapes, self.table_names, self.feature_table_map, self.options, self.current_device
        )
        kind = OPTIMIZERS[self.optimizer]
        self._fused = in_backward(kind, list(self.tables.parameters()), self.options)

    # ---- calls

    def forward(  # type: ignore[override]
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        total_unique_indices: int | None = None,
        hash_zch_identities: Tensor | None = None,
        hash_zch_runtime_meta: Tensor | None = None,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Tensor | None = None,
    ) -> Tensor:
        """Pool every feature; the backward pass updates the rows.

        Args:
            indices: int32 or int64 ``[lookups]``, feature by feature.
            offsets: int32 or int64 ``[features * bags + 1]``.
            per_sample_weights: floating ``[lookups]``; not with pooling MEAN.
            feature_requires_grad, hash_zch_identities, hash_zch_runtime_meta: must be None.
            batch_size_per_feature_per_rank: bags of each feature from each rank, if they differ; the output
                is then flat, rank by rank.
            total_unique_indices: not read.
            vbe_output, vbe_output_offsets: flat output to write into, and the offsets ``[ranks, features]``
                at which to write.

        Returns:
            Tensor: ``[bags, columns]`` of ``output_dtype``, or flat with a batch size per feature.

        Raises:
            IndexError: an invalid index or offset; the message names table, feature and bag. On a GPU the
                next call raises it.
            ValueError: an argument that is not supported.
        """
        for name, value in (
            ("feature_requires_grad", feature_requires_grad),
            ("hash_zch_identities", hash_zch_identities),
            ("hash_zch_runtime_meta", hash_zch_runtime_meta),
        ):
            if value is not None:
                raise ArgumentValueError(f"{WHERE}: {name} is not supported. Pass None.")
        lookups = indices, offsets, per_sample_weights
        return pool_batch(
            self.tables, lookups, batch_size_per_feature_per_rank, vbe_output, vbe_output_offsets
        )

    def split_embedding_weights(self) -> list[Tensor]:
        """Return the rows ``[rows, dim]`` of each table, as views."""
        return self.tables.table_rows()

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """Return the states of each table, as views, in FBGEMM's order.

        A state is ``[rows, dim]``, for row-wise Adagrad ``[rows]``.
        """
        kind = OPTIMIZERS[self.optimizer]._kind
        states: list[list[Tensor]] = [[] for _ in self.embedding_specs] if kind.states else []
        for name in kind.states:
            matrices = [self._fused.state[weight][name] for weight in self.tables.parameters()]
            for table, rows in zip(states, self.tables.table_rows(matrices), strict=True):
                table.append(rows.view(-1) if kind.by_row else rows)
        return states

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """Return the states by the names of torch's optimizers."""
        names = OPTIMIZERS[self.optimizer]._kind.states
        return [dict(zip(names, states, strict=True)) for states in self.split_optimizer_states()]

    # ---- hyper-parameters

    def get_learning_rate(self) -> float:
        """Return the learning rate."""
        return float(self._fused.param_groups[0]["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate, from the next update on.

        Args:
            lr: the learning rate.
        """
        self._fused.param_groups[0]["lr"] = lr

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of past updates, on which Adam's corrections depend.

        Args:
            step: the number.
        """
        self._fused.set_steps(step)

    def update_hyper_parameters(self, params_dict: dict[str, float]) -> None:
        """Set parameters of the optimizer, from the next update on.

        Args:
            params_dict: values of ``lr``, ``eps``, ``beta1``, ``beta2`` or ``weight_decay``.

        Raises:
            NotImplementedError: a parameter that the optimizer does not have.
        """
        group = self._fused.param_groups[0]
        for name, value in params_dict.items():
            if name in ("beta1", "beta2") and "betas" in group:
                betas = list(group["betas"])
                betas[name == "beta2"] = value
                group["betas"] = tuple(betas)
            elif name in _HYPER_PARAMETERS and name in group:
                group[name] = value
            else:
                raise NotImplementedError(
                    f"{WHERE}: {self.optimizer.name} has no hyper-parameter {name!r}; expected "
                    f"{sorted(group)}"
                )

    # ---- for callers of FBGEMM's module: there is no cache

    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Draw all rows from a uniform distribution.

        Args:
            min_val: the least value.
            max_val: the largest value.
        """
        for rows in self.split_embedding_weights():
            rows.uniform_(min_val, max_val)

    def prefetch(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no cache to fill."""

    def flush(self) -> None:
        """Do nothing: all rows are in the tables."""

    def reset_cache_states(self) -> None:
        """Do nothing: there is no cache."""

    def reset_embedding_weight_momentum(
        self,
        pruned_indices: Tensor,
        pruned_indices_offsets: Tensor,
        logical_table_ids: Tensor,
        buffer_ids: Tensor,
    ) -> None:
        """Raise an error: rows that are pruned during training are not supported.

        Args:
            pruned_indices, pruned_indices_offsets, logical_table_ids, buffer_ids: as FBGEMM's.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"{WHERE}: tables that are pruned during training are not supported")

    def extra_repr(self) -> str:
        """Return sizes and optimizer."""
        rows = sum(rows for rows, *_ in self.embedding_specs)
        dtype = self.options.dtype
        size = sum(rows * row_bytes(dim, dtype) for rows, dim, *_ in self.embedding_specs)
        return f"tables={len(self.embedding_specs)}, rows={rows}, bytes={size}, {self.optimizer.name}"
