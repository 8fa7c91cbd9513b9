"""``FusedEmbeddingBagCollection``: many tables, pooled in one call."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse._arguments import wrong_type
from recfuse.data.forms import Lookups, is_keyed, of_collection, of_keys
from recfuse.errors import ArgumentValueError
from recfuse.nn.descriptions import POOLED, Table, names_of, pack_new_tables, specs_of
from recfuse.nn.mapping import Mapping
from recfuse.nn.packed.module import PackedModule
from recfuse.nn.packed.pooling import refuse_proxy
from recfuse.nn.packed.table_dict import Tables


class FusedEmbeddingBagCollection(PackedModule):
    """Pool many tables in one call, each with its own rows, dim, mode, padding_idx and dtype.

    Tables of the same dtype and dim share a Parameter ``[rows, dim]``; calls, compiled and exported programs
    and optimizers use it. ``tables[name].weight`` is a view of a table's rows. The ``state_dict`` has an
    entry per table, ``embedding_bags.<table>.weight``, as TorchRec's.

    On a GPU, blocks share the work by the expected pooling factor of each feature:

    - Without a plan, the first call reads the pooling factors of its own batch, and waits once for that. Call
      ``calibrate(batches)`` before to use several batches.
    - A call in a CUDA graph under capture, or in a compiled or exported program, computes the partition on
      the GPU and never waits.
    - ``map(offsets)`` computes the partition of a batch on the host, for example in the thread that loads
      it; pass the result to ``forward`` as ``mapping``.

    New tables are drawn from a normal distribution, and padding rows are zero, as in torch.nn.EmbeddingBag.

    Args:
        tables: for each table a :class:`Table`, a ``(rows, dim)`` pair, or TorchRec's EmbeddingBagConfig.
        sparse: make gradients sparse COO tensors, coalesced. Not with mode "max". Tables that are pooled
            separately have dense gradients. The optimizers of :mod:`recfuse.optim` do not need it. Default:
            False.
        device: the device of the tables.

    Attributes:
        tables: the tables by name, in order; each has ``weight``, ``num_embeddings``, ``embedding_dim``,
            ``mode`` and ``padding_idx``. Also ``embedding_bags``.
        feature_names: the names of the features, in the order of the input and the output.
        feature_dims: the columns of each feature in the output.
        plan: the plan that was applied, a :class:`recfuse.CollectionPlan`, or None.

    Shape:
        - indices: ``[lookups]``, feature by feature, bag by bag.
        - offsets: ``[features * bags + 1]``.
        - output: ``[bags, sum(feature_dims)]``.

    Raises:
        ValueError: a name that occurs twice, an unknown mode, a table that cannot be pooled with the others.

    Example:
        >>> collection = recfuse.nn.FusedEmbeddingBagCollection([(1000, 16), (50, 8)])
        >>> indices, offsets = torch.tensor([3, 999, 7, 49]), torch.tensor([0, 1, 2, 3, 4])
        >>> collection(indices, offsets).shape  # two features of two bags
        torch.Size([2, 24])

    Note:
        Tables on the CPU, or on one CUDA device, are pooled in one call. Tables on several devices, and
        collections with a float64 table, are pooled by torch in separate calls. Gradients are dense or
        sparse. A bad index or offset on a GPU is left out; the next call with these tables, or
        :func:`recfuse.check`, raises the error.

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
            needed = "recfuse.nn.Table, (num_embeddings, embedding_dim) pairs or EmbeddingBagConfigs"
            raise wrong_type(f"{POOLED}: tables", tables, f"an iterable of {needed}")
        configs = list(tables)
        new = [Table.of(config) for config in configs]
        names, specs = specs_of(new, sparse, POOLED)
        pack_new_tables(self, configs, new, names, specs, sparse, device)

    @classmethod
    def from_embedding_bags(
        cls,
        embedding_bags: Iterable[torch.nn.EmbeddingBag],
        names: Sequence[str] | None = None,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> FusedEmbeddingBagCollection:
        """Create a collection from existing tables, each with a single feature, in order.

        The weights move into the Parameters of the collection. The given modules keep views of them, which do
        not train.

        Args:
            embedding_bags: tables with the same ``sparse``, without features that a fused call lacks (hooks,
                max_norm, scale_grad_by_freq, a computed weight, another forward).
            names: the names of the tables. Default: t0, t1, ...
            optimizers: optimizers of the tables; their entries and state move to the new Parameters. Or
                create optimizers afterwards.

        Returns:
            FusedEmbeddingBagCollection: the collection.

        Raises:
            TypeError: ``embedding_bags`` is a mapping or not iterable.
            ValueError: a table that cannot be pooled with the others; an optimizer that has a table and was
                not passed, because it would train nothing.
        """
        if isinstance(embedding_bags, (abc.Mapping, torch.nn.ModuleDict)) or not isinstance(
            embedding_bags, abc.Iterable
        ):
            values = "an iterable of tables. Pass its values(), and its keys() as names."
            needed = values if hasattr(embedding_bags, "values") else "an iterable of tables"
            raise wrong_type("recfuse.nn.FusedEmbeddingBagCollection: embedding_bags", embedding_bags, needed)
        bags = list(embedding_bags)
        own_names = names_of(len(bags), names, POOLED)
        collection = cls.__new__(cls)
        torch.nn.Module.__init__(collection)
        collection._pack(own_names, bags, range(len(bags)), optimizers)
        collection.feature_names = own_names
        collection.feature_dims = list(collection.layout.dims)
        return collection

    @property
    def embedding_bags(self) -> Tables:
        """The tables, under their name in TorchRec and in the ``state_dict``."""
        return self.tables

    def forward(
        self,
        indices: Any,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        mapping: Mapping | None = None,
    ) -> Tensor:
        """Pool every feature.

        Args:
            indices: int32 or int64 ``[lookups]``, feature by feature; or only a TorchRec KeyedJaggedTensor,
                with a key for each feature, in any order.
            offsets: int32 or int64 ``[features * bags + 1]``: bag b of feature f pools the lookups from
                ``offsets[f * bags + b]`` to ``offsets[f * bags + b + 1]``. On the CPU the last offset must be
                the number of lookups; on a GPU later lookups belong to no bag.
            per_sample_weights: floating ``[lookups]``; every table must have mode "sum".
            mapping: the partition of this batch, from ``map(offsets)``. The CPU does not use it.

        Returns:
            Tensor: ``[bags, sum(feature_dims)]``, features side by side, in the dtype of the tables if they
            agree, else float32 (float64 if a table is).

        Raises:
            TypeError: a bad argument.
            ValueError: a bad argument.
            IndexError: an index outside its table; names feature and bag. On a GPU the next call, or
                :func:`recfuse.check`, raises it.
        """
        if not isinstance(indices, Tensor):
            indices, offsets, per_sample_weights = self._jagged(indices, offsets, per_sample_weights)
        elif offsets is None:
            raise _value_error(
                "offsets is None; expected a 1-D tensor of features * bags + 1 elements when indices is a "
                "tensor"
            )
        return self._pool(indices, offsets, per_sample_weights, mapping)

    def _lookups_of(self, batch: Any, prefix: str) -> Lookups:
        return of_collection(batch, self.feature_names, prefix)

    def _jagged(
        self, keyed: Any, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        refuse_proxy(keyed)
        if not is_keyed(keyed):
            raise wrong_type(f"{POOLED}: indices", keyed, "a torch.Tensor or a KeyedJaggedTensor")
        if offsets is not None or per_sample_weights is not None:
            raise _value_error(
                "offsets or per_sample_weights is given with a KeyedJaggedTensor, which has its own; "
                "expected None"
            )
        return of_keys(keyed, self.feature_names)

    def extra_repr(self) -> str:
        """Return the numbers of features, rows, columns and bytes."""
        rows = sum(table.num_embeddings for table in self.layout.tables)
        size = sum(weight.numel() * weight.dtype.itemsize for weight in self.packed_weights())
        features, columns = len(self.feature_names), self.layout.output_dim
        return f"features={features}, rows={rows}, output_dim={columns}, bytes={size}"


def _value_error(detail: str) -> ArgumentValueError:
    return ArgumentValueError(f"{POOLED}: {detail}")
