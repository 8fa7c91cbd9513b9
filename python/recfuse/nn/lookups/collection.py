"""``FusedEmbeddingCollection``: many tables, looked up in one call without pooling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse._arguments import wrong_type
from recfuse.data.forms import is_keyed, lookups_per_key, of_keys
from recfuse.errors import ArgumentValueError, a_type
from recfuse.nn.descriptions import names_of, pack_new_tables, specs_of, table_of
from recfuse.nn.lookups.module import PackedLookups, sizes_of
from recfuse.nn.packed.pooling import refuse_proxy
from recfuse.nn.packed.table_dict import Tables

_WHERE = "recfuse.nn.FusedEmbeddingCollection"


class FusedEmbeddingCollection(PackedLookups):
    """Look up rows of many tables in one call, each with its own rows, dim, padding_idx and dtype.

    It is the counterpart of :class:`recfuse.nn.FusedEmbeddingBagCollection` for histories, whose rows are not
    pooled. Tables of the same dtype and dim share a Parameter ``[rows, dim]``. ``tables[name].weight`` is a
    view of a table's rows. The ``state_dict`` has an entry per table, ``embeddings.<table>.weight``, as
    TorchRec's.

    Args:
        tables: for each table a :class:`Table` of mode "sum", a ``(rows, dim)`` pair, or TorchRec's
            EmbeddingConfig.
        sparse: make gradients sparse COO tensors, coalesced. The optimizers of :mod:`recfuse.optim` do not
            need it. Default: False.
        device: the device of the tables.

    Attributes:
        tables: the tables by name, in order; each can be called as ``torch.nn.Embedding``, and has
            ``weight``, ``num_embeddings``, ``embedding_dim`` and ``padding_idx``. Also ``embeddings``.
        feature_names: the names of the features, in the order of the input and the output.
        feature_dims: the columns of each feature.

    Shape:
        - indices: ``[lookups]``, feature by feature, history by history.
        - offsets: ``[features * bags + 1]``.
        - output: see :meth:`forward`.

    Raises:
        TypeError: a table of another type.
        ValueError: a name that occurs twice, another mode than "sum".

    Example:
        >>> collection = recfuse.nn.FusedEmbeddingCollection([(1000, 16), (50, 8)])
        >>> indices, offsets = torch.tensor([3, 999, 5, 7, 49]), torch.tensor([0, 2, 3, 4, 5])
        >>> [rows.shape for rows in collection(indices, offsets)]  # two features of two histories
        [torch.Size([3, 16]), torch.Size([2, 8])]
        >>> collection(indices, offsets, layout="padded", length=4).shape
        torch.Size([2, 4, 24])

    Note:
        Tables are on the CPU, or on one CUDA device. Gradients are dense or sparse. A bad index on a GPU
        gives a row of zeros; the next call with these tables, or :func:`recfuse.check`, raises the error.

    Source: Pan et al., RecFlex, SC 2024 (one kernel for heterogeneous features).
    """

    feature_names: list[str]
    feature_dims: list[int]

    def __init__(
        self,
        tables: Iterable[Any],
        *,
        sparse: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """Create new tables; see the class."""
        super().__init__()
        if not isinstance(tables, Iterable):
            needed = "recfuse.nn.Table, (num_embeddings, embedding_dim) pairs or EmbeddingConfigs"
            raise wrong_type(f"{_WHERE}: tables", tables, f"an iterable of {needed}")
        configs = list(tables)
        new = [table_of(config, _WHERE, "EmbeddingConfig") for config in configs]
        names, specs = specs_of(new, False, _WHERE)
        for name, table in zip(names, new, strict=True):
            if table.mode != "sum":
                raise ArgumentValueError(
                    f'{_WHERE}: mode of {name} is {table.mode!r}; expected "sum", since nothing is pooled'
                )
        pack_new_tables(self, configs, new, names, specs, sparse, device)

    @classmethod
    def from_embeddings(
        cls,
        embeddings: Iterable[torch.nn.Embedding],
        names: Sequence[str] | None = None,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> FusedEmbeddingCollection:
        """Create a collection from existing tables, each with a single feature, in order.

        The weights move into the Parameters of the collection. The given modules keep views of them, which do
        not train.

        Args:
            embeddings: tables with the same ``sparse``, without features that one call lacks (hooks,
                max_norm, scale_grad_by_freq, a computed weight, another forward).
            names: the names of the tables. Default: t0, t1, ...
            optimizers: optimizers of the tables; their entries and state move to the new Parameters. Or
                create optimizers afterwards.

        Returns:
            FusedEmbeddingCollection: the collection.

        Raises:
            TypeError: ``embeddings`` is a mapping or not iterable.
            ValueError: a table that cannot be packed with the others; an optimizer that has a table and was
                not passed, because it would train nothing.
        """
        if isinstance(embeddings, (Mapping, torch.nn.ModuleDict)) or not isinstance(embeddings, Iterable):
            values = "an iterable of tables. Pass its values(), and its keys() as names."
            needed = values if hasattr(embeddings, "values") else "an iterable of tables"
            raise wrong_type(f"{_WHERE}: embeddings", embeddings, needed)
        tables = list(embeddings)
        own_names = names_of(len(tables), names, _WHERE)
        collection = cls.__new__(cls)
        torch.nn.Module.__init__(collection)
        collection._pack_embeddings(own_names, tables, range(len(tables)), optimizers)
        collection.feature_names = own_names
        collection.feature_dims = list(collection.layout.dims)
        return collection

    @property
    def embeddings(self) -> Tables:
        """The tables, under their name in TorchRec and in the ``state_dict``."""
        return self.tables

    def forward(
        self,
        indices: Any,
        offsets: Tensor | None = None,
        *,
        layout: str = "jagged",
        length: int = 0,
        sizes: Sequence[int] | None = None,
        fill: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Look up the rows of every feature.

        Args:
            indices: int32 or int64 ``[lookups]``, feature by feature; or only a TorchRec KeyedJaggedTensor,
                with a key for each feature, in any order.
            offsets: int32 or int64 ``[features * bags + 1]``: history b of feature f has the lookups from
                ``offsets[f * bags + b]`` to ``offsets[f * bags + b + 1]``.
            layout, length, fill, dtype: as in :func:`recfuse.fused_embedding`.
            sizes: the lookups of each feature, for layout "jagged". Default: those of ``offsets``, for which
                the call waits for a GPU; or those of the KeyedJaggedTensor, which waits unless it knows them.

        Returns:
            list or Tensor: with "jagged" a tensor ``[lookups of the feature, dim]`` for each feature, all
            views of one buffer; with "joined" ``[lookups of a feature, sum(feature_dims)]``; with "padded"
            ``[bags, length, sum(feature_dims)]``.

        Raises:
            TypeError: a bad argument.
            ValueError: a bad argument; histories of different lengths with "joined".
            IndexError: an index outside its table; names feature, bag and position in the history. On a GPU
                the next call, or :func:`recfuse.check`, raises it.
        """
        count = len(self.feature_names)
        if not isinstance(indices, Tensor):
            refuse_proxy(indices)
            if not is_keyed(indices):
                raise wrong_type(f"{_WHERE}: indices", indices, "a torch.Tensor or a KeyedJaggedTensor")
            if offsets is not None:
                raise ArgumentValueError(
                    f"{_WHERE}: offsets is given with a KeyedJaggedTensor, which has its own; expected None"
                )
            keyed = indices
            indices, offsets, _ = of_keys(keyed, self.feature_names, _WHERE)
            if sizes is None and layout == "jagged":
                of_key = dict(zip(keyed.keys(), lookups_per_key(keyed, _WHERE), strict=True))
                sizes = [of_key[name] for name in self.feature_names]
        elif not isinstance(offsets, Tensor):
            raise wrong_type(f"{_WHERE}: offsets", offsets, "a torch.Tensor when indices is a tensor")
        if layout == "jagged" and sizes is None:
            if offsets.dim() != 1 or (offsets.shape[0] - 1) % count or offsets.shape[0] == 0:
                raise ArgumentValueError(
                    f"{_WHERE}: offsets has shape {list(offsets.shape)}; expected [features * bags + 1] with "
                    f"{count} features"
                )
            sizes = sizes_of(offsets, count, indices.numel(), _WHERE)
        elif sizes is not None and not (isinstance(sizes, (list, tuple)) and len(sizes) == count):
            actual = (
                f"has {len(sizes)} elements" if isinstance(sizes, (list, tuple)) else f"is {a_type(sizes)}"
            )
            raise ArgumentValueError(f"{_WHERE}: sizes {actual}; expected a list of {count} integers")
        return self._look_up(indices, offsets, sizes, layout=layout, length=length, fill=fill, dtype=dtype)

    def extra_repr(self) -> str:
        """Return the numbers of features, rows and columns."""
        rows = sum(table.num_embeddings for table in self.layout.tables)
        return f"features={len(self.feature_names)}, rows={rows}, output_dim={self.layout.output_dim}"
