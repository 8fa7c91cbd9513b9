"""Candidates over the tables of a model, with the same codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import recfuse
from common.batches import Batch
from recfuse.nn import FusedEmbeddingBagCollection, Table
from recfuse.ops import dequantize_rows, fused_embedding_bag_quantized, quantize_rows

HALF, OURS, ROWS, NBIT, TORCH = (
    "recfuse float16",
    "recfuse {}",
    "recfuse {}, FBGEMM's rows",
    "FBGEMM nbit {}",
    "torch {}",
)
KINDS = ("int8", "int4")


def collection_of(weights: Sequence[Tensor], dtype: torch.dtype) -> FusedEmbeddingBagCollection:
    """A collection of floats on the host, with copies of the weights."""
    collection = FusedEmbeddingBagCollection([Table(*weight.shape, dtype=dtype) for weight in weights])
    with torch.no_grad():
        for table, weight in zip(collection.tables.values(), weights, strict=True):
            table.weight.copy_(weight)
    return collection


class Quantized:
    """The tables of a model as codes of one kind, and the candidates that pool them."""

    def __init__(self, weights: Sequence[Tensor], kind: str, device: torch.device) -> None:
        """`weights`: float32 [rows, dim] on the host."""
        self.kind, self.device = kind, device
        self.dims = [weight.shape[1] for weight in weights]
        self.rows = [weight.shape[0] for weight in weights]
        self.codes = [quantize_rows(weight, kind) for weight in weights]
        self.ours: Any = collection_of(weights, torch.float32)
        recfuse.quantize(self.ours, kind)
        self.ours = self.ours.to(device)

    def right(self, batch: Batch) -> Tensor:
        """[size, columns] float64: sums of the values of the codes."""
        pooled = []
        for (codes, parameters), dim, (rows, starts) in zip(self.codes, self.dims, batch.parts, strict=True):
            values = dequantize_rows(codes, parameters, dim).double().to(self.device)
            pooled.append(torch.nn.functional.embedding_bag(rows, values, starts, mode="sum"))
        return torch.cat(pooled, 1)

    def runs(self) -> dict[str, Callable[[Batch], Tensor]]:
        """Candidates by name, each takes a batch."""
        runs_by_name: dict[str, Callable[[Batch], Tensor]] = {
            OURS.format(self.kind): lambda batch: self.ours(batch.indices, batch.offsets)
        }
        try:
            module = self._nbit()
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            print(f"FBGEMM is left out: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        else:
            runs_by_name[NBIT.format(self.kind)] = lambda batch: module(batch.indices, batch.offsets)
            runs_by_name[ROWS.format(self.kind)] = self._on_rows(module)
        if self.device.type == "cpu":
            runs_by_name[TORCH.format(self.kind)] = self._torch()
        return runs_by_name

    def _nbit(self) -> Any:
        """FBGEMM's module with these codes."""
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
            IntNBitTableBatchedEmbeddingBagsCodegen,
        )

        location = EmbeddingLocation.HOST if self.device.type == "cpu" else EmbeddingLocation.DEVICE
        kind = SparseType.INT8 if self.kind == "int8" else SparseType.INT4
        module = IntNBitTableBatchedEmbeddingBagsCodegen(
            [
                (str(number), rows, dim, kind, location)
                for number, (rows, dim) in enumerate(zip(self.rows, self.dims, strict=True))
            ],
            device=self.device,
            output_dtype=SparseType.FP32,
            bounds_check_mode=BoundsCheckMode.NONE,
            indices_dtype=torch.int32,
            row_alignment=16,
        )
        module.fill_random_weights()
        for (table, _), (codes, parameters) in zip(self._memory(module), self.codes, strict=True):
            host = torch.zeros(table.shape, dtype=torch.uint8)
            host[:, :4] = parameters.view(torch.uint8)
            host[:, 4 : 4 + codes.shape[1]] = codes
            table.copy_(host)
        return module

    @staticmethod
    def _memory(module: Any) -> list[tuple[Tensor, Any]]:
        return list(module.split_embedding_weights(split_scale_shifts=False))

    def _on_rows(self, module: Any) -> Callable[[Batch], Tensor]:
        """The operator on the memory of FBGEMM's module."""
        weights, parameters = [], []
        for (table, _), (codes, _) in zip(self._memory(module), self.codes, strict=True):
            weights.append(table[:, 4 : 4 + codes.shape[1]])
            parameters.append(table[:, :4].view(torch.float16))
        layout = self.ours.layout
        features = layout.features.clone()
        features[:, 0], features[:, 1] = torch.arange(len(weights)), 0

        def run(batch: Batch) -> Tensor:
            return fused_embedding_bag_quantized(
                weights,
                parameters,
                features,
                batch.indices,
                batch.offsets,
                layout.output_dim,
                schedules=self.ours._tuning.schedules,
            )

        return run

    def _torch(self) -> Callable[[Batch], Tensor]:
        """A loop of torch's operators, on rows with the same codes and parameters behind them."""
        packed = []
        for codes, parameters in self.codes:
            behind = parameters.float() if self.kind == "int8" else parameters
            packed.append(torch.cat((codes, behind.contiguous().view(torch.uint8)), 1))
        operators = torch.ops.quantized
        if self.kind == "int8":
            operator = operators.embedding_bag_byte_rowwise_offsets
        else:
            operator = operators.embedding_bag_4bit_rowwise_offsets

        def run(batch: Batch) -> Tensor:
            return torch.cat(
                [
                    operator(rows, indices, starts)
                    for rows, (indices, starts) in zip(packed, batch.parts, strict=True)
                ],
                1,
            )

        return run
