"""The contestants: modules with the same tables, and the peers that are installed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import recfuse

TORCH, TORCHREC, FBGEMM, RECFUSE = "torch", "TorchRec", "FBGEMM", "recfuse"
LAYOUTS = ("padded", "joined", "jagged")


@dataclass(frozen=True)
class Batch:
    """Histories of many features, on the device of the tables; the sizes are known on the host."""

    indices: Tensor  # int64 [lookups], feature by feature
    offsets: Tensor  # int64 [features * bags + 1]
    sizes: tuple[int, ...]  # lookups of each feature
    keyed: Any  # the same as a KeyedJaggedTensor that knows the sizes; None without TorchRec

    @property
    def bags(self) -> int:
        """The histories of a feature."""
        return (len(self.offsets) - 1) // len(self.sizes)


def names_of(features: int) -> list[str]:
    """The names of the features and of their tables."""
    return [f"f{number}" for number in range(features)]


def batch_of(lengths: Sequence[Tensor], indices: Sequence[Tensor], device: torch.device) -> Batch:
    """A batch of lengths and indices for each feature, on the CPU."""
    joined = torch.cat(list(lengths))
    offsets = torch.cat((joined.new_zeros(1), joined.cumsum(0))).to(device)
    values, sizes = torch.cat(list(indices)).to(device), [len(lookups) for lookups in indices]
    keyed = None
    with contextlib.suppress(ImportError):
        from torchrec import KeyedJaggedTensor

        keyed = KeyedJaggedTensor(
            names_of(len(sizes)), values, lengths=joined.to(device), offsets=offsets, length_per_key=sizes,
            stride=len(joined) // len(sizes),
        )  # fmt: skip
    return Batch(values, offsets, tuple(sizes), keyed)


def collection_of(weights: Sequence[Tensor], sparse: bool = False) -> recfuse.nn.FusedEmbeddingCollection:
    """recfuse's module with copies of these tables."""
    tables = [nn.Embedding(*weight.shape, sparse=sparse, _weight=weight.clone()) for weight in weights]
    return recfuse.nn.FusedEmbeddingCollection.from_embeddings(tables, names_of(len(tables)))


def torchrec_of(weights: Sequence[Tensor]) -> Any:
    """TorchRec's module with copies of these tables; raises ImportError without TorchRec."""
    from torchrec import EmbeddingCollection
    from torchrec.modules.embedding_configs import EmbeddingConfig

    configs = [
        EmbeddingConfig(
            name=name, num_embeddings=len(weight), embedding_dim=weight.shape[1], feature_names=[name]
        )
        for name, weight in zip(names_of(len(weights)), weights, strict=True)
    ]
    module = EmbeddingCollection(tables=configs, device=weights[0].device)
    with torch.no_grad():
        for table, weight in zip(module.embeddings.values(), weights, strict=True):
            table.weight.copy_(weight)
    return module


def fbgemm_of(weights: Sequence[Tensor], optimizer: str = "EXACT_SGD", learning_rate: float = 0.01) -> Any:
    """FBGEMM's module with copies of these tables, of one dim; raises ImportError without FBGEMM."""
    logging.disable(logging.WARNING)
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    cuda = weights[0].is_cuda
    location = EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if cuda else ComputeDevice.CPU
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(*weight.shape, location, compute) for weight in weights],
        optimizer=getattr(EmbOptimType, optimizer),
        pooling_mode=PoolingMode.NONE,
        learning_rate=learning_rate,
        eps=1e-8,
        stochastic_rounding=False,
        bounds_check_mode=BoundsCheckMode.NONE,
        device=weights[0].device,
    )
    for table, weight in zip(module.split_embedding_weights(), weights, strict=True):
        table.detach().copy_(weight)
    return module


def rows_by_torch(weights: Sequence[Tensor], batch: Batch) -> list[Tensor]:
    """The rows of each feature."""
    parts = batch.indices.split(batch.sizes)
    return [functional.embedding(lookups, weight) for lookups, weight in zip(parts, weights, strict=True)]


def padded_by_torch(rows: Sequence[Tensor], batch: Batch, length: int) -> Tensor:
    """The padded histories, by the positions of their slots."""
    bags, parts = batch.bags, []
    position = torch.arange(length, device=batch.offsets.device)
    for number, table_rows in enumerate(rows):
        ends = batch.offsets[number * bags : (number + 1) * bags + 1]
        begins = ends[:-1] - ends[0]
        inside = position < ends.diff()[:, None]
        slots = (begins[:, None] + position).clamp(max=len(table_rows) - 1)
        parts.append(torch.where(inside[..., None], table_rows[slots], table_rows.new_zeros(())))
    return torch.cat(parts, -1)


def padded_by_fbgemm(rows: Sequence[Tensor], batch: Batch, length: int) -> Tensor:
    """The padded histories, by an operator of FBGEMM for each feature."""
    bags, pad = batch.bags, torch.ops.fbgemm.jagged_to_padded_dense
    parts = []
    for number, table_rows in enumerate(rows):
        ends = batch.offsets[number * bags : (number + 1) * bags + 1]
        parts.append(pad(table_rows, [ends - ends[0]], [length], 0.0))
    return torch.cat(parts, -1)


def laid_out(
    rows: Callable[[Batch], Sequence[Tensor]],
    layout: str,
    length: int,
    pad: Callable[[Sequence[Tensor], Batch, int], Tensor],
) -> Callable[[Batch], Tensor]:
    """A contestant that looks up the rows of each feature, and brings them into a layout."""
    if layout == "padded":
        return lambda batch: pad(rows(batch), batch, length)
    if layout == "joined":
        return lambda batch: torch.cat(list(rows(batch)), 1)
    return lambda batch: torch.cat(list(rows(batch)))


def contestants(weights: Sequence[Tensor], layout: str, length: int) -> tuple[dict[str, Any], list[str]]:
    """The contestants of a layout, and notes on the peers that are missing."""
    runs = {TORCH: laid_out(lambda batch: rows_by_torch(weights, batch), layout, length, padded_by_torch)}
    notes = []
    try:
        theirs = torchrec_of(weights)
        runs[TORCHREC] = laid_out(
            lambda batch: [own.values() for own in theirs(batch.keyed).values()],
            layout,
            length,
            padded_by_fbgemm,
        )
        if weights[0].is_cuda:  # PoolingMode.NONE has no CPU kernel
            fbgemm = fbgemm_of(weights)

            def rows(batch: Batch) -> Sequence[Tensor]:
                return fbgemm(batch.indices, batch.offsets).split(batch.sizes)

            runs[FBGEMM] = laid_out(rows, layout, length, padded_by_fbgemm)
            if layout == "jagged":
                runs[FBGEMM] = lambda batch: fbgemm(batch.indices, batch.offsets)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        notes.append(f"A peer is left out: {str(error).partition(chr(10))[0]}")
    ours = collection_of(weights)
    options = {"layout": layout, "length": length if layout == "padded" else 0}
    if layout == "jagged":
        matrices, features = ours.packed_weights(), ours.layout.features
        dim = weights[0].shape[1]
        runs[RECFUSE] = lambda batch: recfuse.fused_embedding(
            matrices, features, batch.indices, batch.offsets, dim
        )
    else:
        runs[RECFUSE] = lambda batch: ours(batch.indices, batch.offsets, **options)
    return runs, notes
