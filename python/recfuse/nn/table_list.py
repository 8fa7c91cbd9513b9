"""``FusedEmbeddingBagList``: the list of tables of a DLRM, pooled in one call."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from recfuse._upload import integers_on
from recfuse.errors import ArgumentValueError, IndexRangeError
from recfuse.nn.packed.fusable import why_not_fusable
from recfuse.nn.packed.module import PackedModule
from recfuse.nn.packed.table import PackedTable


class FusedEmbeddingBagList(PackedModule):
    """A list of tables, a feature each, that are pooled in one call: what a DLRM's ``emb_l`` becomes.

    :func:`recfuse.swap` puts it in the place of a model's own list of ``nn.EmbeddingBag``; it can be made by
    hand as well. As of a ModuleList, ``emb_l[k]`` is a table, which can be called, and the state_dict has
    ``<k>.weight``. The weights lie in a few Parameters; see :class:`recfuse.nn.FusedEmbeddingBagCollection`.

    Args:
        embedding_bags, optimizers: as of ``FusedEmbeddingBagCollection.from_embedding_bags``.

    Raises:
        ValueError: as there.
    """

    _table_prefix = ""

    def __init__(
        self,
        embedding_bags: Iterable[torch.nn.EmbeddingBag],
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """Takes over the tables; see the class."""
        super().__init__()
        bags = list(embedding_bags)
        if not bags:
            raise ArgumentValueError(
                "recfuse.nn.FusedEmbeddingBagList: embedding_bags is empty, must have at least one"
            )
        if reason := why_not_fusable(bags):
            raise ArgumentValueError(
                f"recfuse.nn.FusedEmbeddingBagList: {reason}; use recfuse.nn.EmbeddingBag for it"
            )
        self._pack([str(number) for number in range(len(bags))], bags, range(len(bags)), optimizers)

    def __len__(self) -> int:
        """How many tables."""
        return len(self.layout.tables)

    @overload
    def __getitem__(self, number: int) -> PackedTable: ...
    @overload
    def __getitem__(self, number: slice) -> list[PackedTable]: ...

    def __getitem__(self, number: int | slice) -> PackedTable | list[PackedTable]:
        """A table, or several."""
        specs = self.layout.tables[number]
        if isinstance(number, slice):
            return [PackedTable(self, spec) for spec in specs]
        return PackedTable(self, specs)

    def __iter__(self) -> Iterator[PackedTable]:
        """The tables, in order."""
        return iter(self.tables.values())

    def extra_repr(self) -> str:
        """Sizes of the whole."""
        rows = sum(table.num_embeddings for table in self.layout.tables)
        return f"tables={len(self)}, rows={rows}, output_dim={self.layout.output_dim}"

    def _offsets_of(self, batch: Any) -> Tensor:
        return _feature_major(batch[0], batch[1])[1]

    def pool(
        self,
        offsets: Tensor | Sequence[Tensor],
        indices: Tensor | Sequence[Tensor],
        row_weights: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor]:
        """Pools each table with its own lookups.

        Args:
            offsets: ``[tables, bags]``, or a tensor ``[bags]`` a table: where each bag begins among the
                table's lookups.
            indices: a tensor ``[lookups of it]`` a table, or ``[tables, lookups]``.
            row_weights: a weight a row, ``[rows]``, or None, for each table.

        Returns:
            A tensor ``[bags, dim]`` a table (views of one tensor).

        Raises:
            As :class:`recfuse.nn.FusedEmbeddingBagCollection`. The first offset of a table must be 0. Where
            it is another on a GPU, which nothing here waits for, the bags on both sides of it are zeros, and
            the error that :func:`recfuse.check` raises shows it with a minus sign.
        """
        if len(indices) != len(self) or len(offsets) != len(self):
            raise ArgumentValueError(
                f"recfuse.nn.FusedEmbeddingBagList: {len(offsets)} offsets and {len(indices)} indices for "
                f"{len(self)} tables, must be one of each a table"
            )
        weights = _sample_weights(indices, row_weights)
        pooled = self._pool(*_feature_major(offsets, indices), weights)
        return list(pooled.split(self.layout.dims, dim=1))


def _feature_major(
    offsets: Tensor | Sequence[Tensor], indices: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """One tensor of lookups, table after table, and one of offsets into it."""
    stacked = offsets if isinstance(offsets, Tensor) else torch.stack(list(offsets))
    if stacked.dtype != torch.int64:
        stacked = stacked.to(torch.int64)
    if isinstance(indices, Tensor):
        tables, each = indices.shape
        ends = torch.arange(tables + 1, device=stacked.device) * each
    else:
        lengths = [own.shape[0] for own in indices]
        ends = integers_on([0, *itertools.accumulate(lengths)], stacked.device)
    if stacked.is_cuda:
        moved = _moved_on_gpu(stacked, ends)
    else:
        _check_first(stacked)
        moved = torch.cat(((stacked + ends[:-1, None]).reshape(-1), ends[-1:]))
    together = indices.reshape(-1) if isinstance(indices, Tensor) else torch.cat(list(indices))
    return together, moved


def _moved_on_gpu(offsets: Tensor, ends: Tensor) -> Tensor:
    """A first offset that is not 0 becomes a negative one, which the kernel finds and survives; asking for
    it here would wait for the GPU.
    """
    first, starts = offsets[:, :1], ends[:-1, None]
    first = torch.where(first == 0, starts, -first.abs())
    return torch.cat((torch.cat((first, offsets[:, 1:] + starts), dim=1).reshape(-1), ends[-1:]))


def _check_first(offsets: Tensor) -> None:
    """The kernel sees offsets of all tables in a row, where a first one above 0 would look like lookups of
    the table before; the other ways to be wrong it finds by itself. For the CPU.
    """
    first = offsets[:, :1]
    if torch.compiler.is_compiling():
        torch._assert_async(
            torch.all(first == 0), "recfuse.nn.FusedEmbeddingBagList: offsets must begin with 0"
        )
    elif torch.count_nonzero(first):
        wrong = int(first.reshape(-1).nonzero()[0])
        raise IndexRangeError(
            f"recfuse.nn.FusedEmbeddingBagList: offsets of table {wrong} begin with {int(first[wrong])}, "
            f"must begin "
            "with 0"
        )


def _sample_weights(
    indices: Tensor | Sequence[Tensor], row_weights: Sequence[Tensor | None] | None
) -> Tensor | None:
    """One weight a lookup, where any table has weights; those of the other tables are one."""
    if row_weights is None or all(weights is None for weights in row_weights):
        return None
    known = next(weights for weights in row_weights if weights is not None)
    parts = [
        known.new_ones(own.shape[0]) if weights is None else _gathered(weights, own.to(torch.int64))
        for own, weights in zip(indices, row_weights, strict=True)
    ]
    return torch.cat(parts)


def _gathered(weights: Tensor, rows: Tensor) -> Tensor:
    """A weight a row. Of a row that does not exist torch's GPU kernel would end the process's use of the GPU;
    ours reports it later.
    """
    if not rows.is_cuda:
        return weights.gather(0, rows)
    if weights.shape[0] == 0:
        return weights.new_ones(rows.shape[0])
    return weights.gather(0, torch.where((rows >= 0) & (rows < weights.shape[0]), rows, 0))
