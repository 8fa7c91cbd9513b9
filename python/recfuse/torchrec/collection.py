"""``PooledTables``: the packed tables of a table-batched embedding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from recfuse.errors import ArgumentValueError, IndexRangeError, OffsetError
from recfuse.nn.packed.layout import TableSpec, WeightForm, arrange, layout_of, table_rows
from recfuse.nn.packed.module import PackedModule
from recfuse.torchrec.options import DEVICES, WHERE, Options, named


class PooledTables(PackedModule):
    """Tables in packed Parameters, with uninitialized rows and a separate dtype for the pooled output.

    A fused call returns float32 if its matrices differ in dtype. Half tables with a float32 output therefore
    have an additional empty float32 matrix, so that sums are not rounded to half before the output.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        names: Sequence[str],
        feature_table_map: Sequence[int],
        options: Options,
        device: torch.device,
    ) -> None:
        """Allocate tables of shapes ``(rows, dim)``.

        Tables of the same name and dim are column shards of a table. They are contiguous, because TorchRec
        has one Parameter for them.

        Raises:
            ValueError: a device without recfuse's kernels.
        """
        if device.type not in DEVICES:
            raise ArgumentValueError(
                f"{WHERE}: {named(names)}: the device is {device}, where recfuse has no kernels; expected "
                f"{', '.join(DEVICES)}. Use TorchRec's own sharder."
            )
        super().__init__()
        self._names, self._out_dtype = list(names), options.out_dtype
        rounds = options.dtype is not torch.float32 and options.out_dtype is torch.float32
        self._dtype_marker = [torch.empty((0, 4), device=device)] if rounds else []
        specs = [TableSpec(f"t{n}", rows, dim, options.mode, None) for n, (rows, dim) in enumerate(shapes)]
        shards: dict[tuple[str, int], list[int]] = {}
        for number, (name, (_, dim)) in enumerate(zip(names, shapes, strict=True)):
            shards.setdefault((name, dim), []).append(number)
        tables, forms = list(shards.values()), []
        for numbers in tables:
            rows = sum(shapes[number][0] for number in numbers)
            forms.append(WeightForm(rows, shapes[numbers[0]][1], options.dtype, device))
        matrices = arrange(forms)
        parameters = {name: parameter for name, parameter, _ in self._allocate(matrices, names)}
        placed = []
        for matrix in matrices:
            members: list[tuple[int, int]] = []
            for table, first in matrix.members:
                begins = accumulate((shapes[number][0] for number in tables[table]), initial=first)
                members += zip(tables[table], begins, strict=False)
            placed.append(matrix._replace(members=members))
        self._publish(layout_of(specs, range(len(specs)), feature_table_map, placed, False), parameters)

    def packed_weights(self) -> list[Tensor]:
        """Return the matrices that the operator takes."""
        return [*super().packed_weights(), *self._dtype_marker]

    def pooled(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        """Pool every feature: ``[bags, columns]`` of the output's dtype.

        Raises:
            IndexError: an invalid index or offset; the message names the tables, and the rank of a process
                group.
        """
        try:
            pooled: Tensor = self._pool(indices, offsets, per_sample_weights)
        except (IndexRangeError, OffsetError) as error:
            names = [self._names[table] for table in self.layout.table_of_feature]
            rank = f" of rank {dist.get_rank()}" if dist.is_available() and dist.is_initialized() else ""
            raise type(error)(f"{error}, where the features' tables{rank} are {', '.join(names)}") from error
        return pooled.to(self._out_dtype)

    def table_rows(self, matrices: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the rows of each table, as detached views of the Parameters or of equal matrices."""
        matrices = list(self.parameters()) if matrices is None else matrices
        return [table_rows(spec, matrices[spec.matrix].detach()) for spec in self.layout.tables]
