"""Tables within memory that they share, such as an inference module of FBGEMM has: descriptions and views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recfuse._codes import CODES as LISTS
from recfuse._codes import FEATURE, MODES, STORED_TABLE, row_bytes
from recfuse.nn.packed.pooling import is_planned
from recfuse.nn.quantized.rows import CODES, Rows, write_floats
from recfuse.nn.tuning import Tuning
from recfuse.ops import fused_embedding_bag_quantized
from recfuse.ops.quantized.fused_embedding_bag_quantized import code_bytes


class StoredTable(NamedTuple):
    """A table whose rows have a pitch, with the scale and the bias of each row between them."""

    memory: int  # number of the memory
    first: int  # the first byte of row 0; of codes without their parameters
    kind: str  # "int8" or "int4", or the name of a dtype of floats
    rows: int
    dim: int
    pitch: int  # bytes from a row to the next
    parameters: int = 0  # the first byte of the parameters of row 0
    parameters_kind: str = "float32"  # their dtype

    @property
    def width(self) -> int:
        """The bytes of a row, without parameters."""
        if self.kind in CODES:
            return code_bytes(self.dim, self.kind, "recfuse.quantize")
        return row_bytes(self.dim, getattr(torch, self.kind))

    def _bytes(self, memory: Tensor, first: int, width: int) -> Tensor:
        return memory.as_strided((self.rows, width), (self.pitch, 1), memory.storage_offset() + first)

    def write(self, memory: Tensor, weight: Tensor) -> None:
        """Write a table of floats ``[rows, dim]``, which is quantised unless this table has floats."""
        data = self._bytes(memory, self.first, self.width)
        if self.kind not in CODES:
            data.copy_(weight.detach().to(getattr(torch, self.kind)).contiguous().view(torch.uint8))
            return
        parameters = torch.empty(self.rows, 2, dtype=torch.float16, device=memory.device)
        write_floats(weight, Rows(self.kind, self.dim, data, parameters))
        to = self._bytes(memory, self.parameters, 4)  # which may be at any byte
        to.copy_(parameters.view(torch.uint8))


def stored_features(lookups: Iterable[tuple[int, StoredTable, str]]) -> tuple[list[tuple[int, ...]], int]:
    """Return the rows of the argument ``features`` of the operator, and the columns of the output.

    ``lookups``: for each feature the number of its table, the table, and the mode.
    """
    rows, column = [], 0
    for number, table, mode in lookups:
        rows.append(
            FEATURE.row(
                buffer=number, weight_offset=0, rows=table.rows, dim=table.dim, pooling=MODES.index(mode),
                padding_idx=-1, output_column=column,
            )
        )  # fmt: skip
        column += table.dim
    return rows, column


def stored_rows(tables: Iterable[StoredTable]) -> list[tuple[int, ...]]:
    """Return the rows of the argument ``stored`` of the operator."""
    dtypes: Sequence[str] = LISTS["dtype"]
    return [
        STORED_TABLE.row(
            memory=one.memory,
            first=one.first,
            rows=one.rows,
            dim=one.dim,
            dtype=dtypes.index(one.kind),
            pitch=one.pitch,
            parameters=one.parameters,
            parameters_dtype=dtypes.index(one.parameters_kind),
        )
        for one in tables
    ]


def stored_tensor(tables: Iterable[StoredTable]) -> Tensor:
    """Return the argument ``stored`` of the operator."""
    return torch.tensor(stored_rows(tables), dtype=torch.int64, device="cpu").view(-1, len(STORED_TABLE))


def pool_quantized(
    weights: Sequence[Tensor],
    parameters: Sequence[Tensor],
    features: Tensor,
    output_dim: int,
    lookups: tuple[Tensor, Tensor, Tensor | None],
    output_dtype: torch.dtype,
    tuning: Tuning,
    stored: Tensor | None = None,
) -> Tensor:
    """Pool every feature of a collection in one call, on a GPU by the schedules of its batches."""
    indices, offsets, per_sample_weights = lookups
    options: dict[str, Any] = {} if stored is None else {"stored": stored}
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.mark_static(features)  # their number does not depend on the batch
        if stored is not None:
            torch._dynamo.mark_static(stored)
    if is_planned(weights):
        if tuning.schedules is None and type(offsets) is Tensor and not torch.compiler.is_compiling():
            tuning.learn(offsets)
        options["schedules"] = tuning.schedules
    return fused_embedding_bag_quantized(
        weights,
        parameters,
        features,
        indices,
        offsets,
        output_dim,
        per_sample_weights,
        output_dtype=output_dtype,
        **options,
    )
