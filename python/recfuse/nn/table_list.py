"""``FusedEmbeddingBagList``: the list of tables of a DLRM, pooled in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, overload

import torch
from torch import Tensor

from recfuse.data.forms import Lookups, of_list
from recfuse.data.joined import join_tables
from recfuse.errors import ArgumentValueError
from recfuse.nn import mapping as work
from recfuse.nn.packed.module import PackedModule
from recfuse.nn.packed.table import PackedTable
from recfuse.nn.packed.table_dict import TableHolder, refuse_change, refuse_replacement


class FusedEmbeddingBagList(PackedModule, TableHolder):
    """Pool a list of tables in one call, a feature each: the replacement of a DLRM's ``emb_l``.

    :func:`recfuse.swap` puts it in the place of a model's list of ``nn.EmbeddingBag``; you may also create
    it. As in a ModuleList, ``emb_l[k]`` is a table, which can be called, and the ``state_dict`` has
    ``<k>.weight``. The weights are in a few Parameters; see :class:`recfuse.nn.FusedEmbeddingBagCollection`.

    Args:
        embedding_bags: tables, as in ``FusedEmbeddingBagCollection.from_embedding_bags``.
        optimizers: optimizers of the tables, as in ``FusedEmbeddingBagCollection.from_embedding_bags``.

    Shape:
        - offsets: ``[tables, bags]``, or ``[bags]`` per table.
        - indices: ``[lookups]`` per table, or ``[tables, lookups]``.
        - output: a list with ``[bags, dim]`` per table.

    Raises:
        ValueError: as ``FusedEmbeddingBagCollection.from_embedding_bags``.

    Example:
        >>> bags = [torch.nn.EmbeddingBag(100, dim, mode="sum") for dim in (4, 8)]
        >>> tables = recfuse.nn.FusedEmbeddingBagList(bags)
        >>> indices, offsets = torch.randint(100, (2, 6)), torch.tensor([[0, 3], [0, 3]])
        >>> [pooled.shape for pooled in tables.pool(offsets, indices)]
        [torch.Size([2, 4]), torch.Size([2, 8])]

    Note:
        Devices and gradients are those of :class:`recfuse.nn.FusedEmbeddingBagCollection`.

    Source: Pan et al., RecFlex, SC 2024 (one kernel for heterogeneous features).
    """

    _tables_name = ""

    def __init__(
        self,
        embedding_bags: Iterable[torch.nn.EmbeddingBag],
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """Take over the tables; see the class."""
        super().__init__()
        bags = list(embedding_bags)
        if not bags:
            raise ArgumentValueError(
                "recfuse.nn.FusedEmbeddingBagList: embedding_bags is empty; expected at least one table"
            )
        self._pack([str(number) for number in range(len(bags))], bags, range(len(bags)), optimizers)
        self._with_last_offset = [at for at, bag in enumerate(bags) if bag.include_last_offset]

    def __len__(self) -> int:
        """Return the number of tables."""
        return len(self.layout.tables)

    @overload
    def __getitem__(self, number: int) -> PackedTable: ...
    @overload
    def __getitem__(self, number: slice) -> list[PackedTable]: ...

    def __getitem__(self, number: int | slice) -> PackedTable | list[PackedTable]:
        """Return a table, or the tables of a slice."""
        try:
            return list(self._modules.values())[number]  # type: ignore[return-value]
        except IndexError:
            raise IndexError(
                f"recfuse.nn.FusedEmbeddingBagList: there is no table {number}; expected {-len(self)} to "
                f"{len(self) - 1}"
            ) from None

    def __setitem__(self, number: int, table: Any) -> NoReturn:
        """Raise an error: a table is a range of rows, so it cannot be replaced."""
        refuse_replacement(number)

    @property
    def tables(self) -> Mapping[str, PackedTable]:  # type: ignore[override]
        """The tables by their names in the ``state_dict``: "0", "1", ..."""
        return MappingProxyType(self._modules)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[PackedTable]:
        """Iterate over the tables, in order."""
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __repr__(self) -> str:
        """Return the sizes of the whole list on a single line, because it may have a thousand tables."""
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        """Return the numbers of tables, rows and columns."""
        rows = sum(table.num_embeddings for table in self.layout.tables)
        return f"tables={len(self)}, rows={rows}, output_dim={self.layout.output_dim}"

    def _lookups_of(self, batch: Any, prefix: str) -> Lookups:
        self._check_last_offset()
        return of_list(batch, len(self), prefix)

    def _check_last_offset(self) -> None:
        if self._with_last_offset:
            raise ArgumentValueError(
                "recfuse.nn.FusedEmbeddingBagList: include_last_offset of table "
                f"{self._with_last_offset[0]} is True; expected False, since offsets of pool are the "
                "beginnings of bags. Make the list from tables without it and pass offsets[:-1], or call "
                "each table."
            )

    def _rows(self, table: int) -> int:
        return self.layout.tables[table].num_embeddings

    def pool(
        self,
        offsets: Tensor | Sequence[Tensor],
        indices: Tensor | Sequence[Tensor],
        row_weights: Sequence[Tensor | None] | None = None,
        *,
        mapping: work.Mapping | None = None,
    ) -> list[Tensor]:
        """Pool each table with its own lookups.

        Args:
            offsets: ``[tables, bags]``, or a tensor ``[bags]`` per table: the position in the table's lookups
                at which each bag begins.
            indices: a tensor ``[lookups of the table]`` per table, or ``[tables, lookups]``.
            row_weights: for each table a weight per row, ``[rows]``, or None.
            mapping: the partition of this batch, from ``map((offsets, indices))``. The CPU does not use it.

        Returns:
            list: a tensor ``[bags, dim]`` per table; all are views of one tensor.

        Raises:
            ValueError: tables with include_last_offset; a first offset of a table that is not 0. On a GPU the
                bags on both sides of such an offset are zeros, and :func:`recfuse.check` shows it with a
                minus sign.
            IndexError: as :class:`recfuse.nn.FusedEmbeddingBagCollection`.
        """
        prefix = "recfuse.nn.FusedEmbeddingBagList"
        self._check_last_offset()
        lookups = join_tables(offsets, indices, row_weights, tables=len(self), prefix=prefix, rows=self._rows)
        return self._pool_apart(*lookups, mapping)


for _method in ("__delitem__", "__iadd__", "append", "extend", "insert", "pop"):
    setattr(FusedEmbeddingBagList, _method, refuse_change(_method))
