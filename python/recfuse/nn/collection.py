"""``FusedEmbeddingBagCollection``: many tables, pooled in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn import packing
from recfuse.nn.embedding_bag import EmbeddingBag
from recfuse.nn.mapping import Mapping
from recfuse.nn.packed import PackedModule, why_not_fusable
from recfuse.ops import MODES


@dataclass(frozen=True)
class Table:
    """One table of a collection."""

    num_embeddings: int
    embedding_dim: int
    name: str | None = None  # default: t0, t1, ... by its place
    mode: str = "sum"
    padding_idx: int | None = None
    dtype: torch.dtype = torch.float32
    feature_names: Sequence[str] = ()  # features that look rows up in it; default: one, named as the table

    @staticmethod
    def of(config: Any) -> Table:
        """From a Table, a ``(num_embeddings, embedding_dim)`` pair, or an object like TorchRec's
        EmbeddingBagConfig.
        """
        if isinstance(config, Table):
            return config
        if isinstance(config, (tuple, list)) and len(config) == 2:
            return Table(*config)
        if not hasattr(config, "num_embeddings") or not hasattr(config, "embedding_dim"):
            raise ArgumentTypeError(
                f"recfuse.nn.FusedEmbeddingBagCollection: a table is a {type(config).__name__}, must be a "
                "recfuse.nn.Table, a (num_embeddings, embedding_dim) pair or an EmbeddingBagConfig"
            )
        half = getattr(getattr(config, "data_type", None), "value", "FP32") == "FP16"
        return Table(
            config.num_embeddings,
            config.embedding_dim,
            name=config.name,
            mode=getattr(getattr(config, "pooling", None), "value", "SUM").lower(),
            dtype=torch.float16 if half else torch.float32,
            feature_names=tuple(config.feature_names),
        )


class FusedEmbeddingBagCollection(PackedModule):
    """Many tables, each with its own rows, dim, mode, padding_idx and dtype, pooled in one call.

    The weights live in one packed buffer per dtype; each table's Parameter is a view into it, under the name
    ``embedding_bags.<table>.weight``. They stay views through everything that torch.nn.Module offers.
    Because they share storage, ``torch.save`` of one table's weight alone writes the whole buffer: save
    ``weight.clone()``.

    Args:
        tables: a :class:`Table` (or a ``(rows, dim)`` pair, or TorchRec's EmbeddingBagConfig) a table.
        sparse: gradients of the weights are sparse tensors. Not with mode "max".
        device: where the tables are. On the CPU, and on a CUDA device, they are pooled in one call;
            elsewhere one by one, by torch.

    Attributes:
        embedding_bags: the tables, a ModuleDict of :class:`EmbeddingBag`.
        feature_names: names of the features, in the order in which ``forward`` takes and returns them.
        feature_dims: columns of each feature in the output.
        plan: the plan that was applied, a :class:`recfuse.Plan` of this kind; None: none.

    On a GPU the work is shared out among its blocks by how many lookups a bag of each feature has. Of that:

    - Without a plan the first call there reads the lengths of its own batch, for which it waits once. That
      batch should be a typical one: ``calibrate(batches)`` learns from several instead, ahead.
    - A call in a CUDA graph that is being captured, or in a program that was compiled or exported before,
      shares out its batch on the GPU, and never waits.
    - ``map(offsets)`` shares out one batch on the host, as in the thread that loads it; ``forward`` takes the
      result as ``mapping``.

    A bad index or offset found on the GPU counts as a row of zeros with no gradient; it is raised by the next
    call on that device, or by :func:`recfuse.check`.

    New tables are drawn from a normal distribution, padding rows are zero, as in torch.nn.EmbeddingBag.

    Raises:
        ValueError: names that occur twice, an unknown mode, a table that cannot be pooled with the others.

    Source: Pan et al., RecFlex, SC 2024 (one kernel for heterogeneous features).
    """

    def __init__(
        self,
        tables: Iterable[Any],
        *,
        sparse: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """Makes new tables; see the class."""
        super().__init__()
        specs = [Table.of(config) for config in tables]
        names = [spec.name if spec.name is not None else f"t{number}" for number, spec in enumerate(specs)]
        for name, spec in zip(names, specs, strict=True):
            _check_spec(name, spec)
        packed = packing.plan([(s.num_embeddings, s.embedding_dim) for s in specs], [s.dtype for s in specs])
        where = torch.empty(0, device=device).device
        weights = packing.views(packed, packing.allocate(packed, where))
        bags = []
        for spec, weight in zip(specs, weights, strict=True):
            bag = EmbeddingBag(
                spec.num_embeddings,
                spec.embedding_dim,
                mode=spec.mode,
                sparse=sparse,
                padding_idx=spec.padding_idx,
                _weight=weight,
            )
            bag.reset_parameters()
            bags.append(bag)
        self._own(names, bags, [tuple(spec.feature_names) for spec in specs])
        for config, bag in zip(tables if isinstance(tables, Sequence) else (), bags, strict=False):
            if callable(init := getattr(config, "init_fn", None)):
                with torch.no_grad():
                    init(bag.weight)

    @classmethod
    def from_embedding_bags(
        cls, embedding_bags: Iterable[torch.nn.EmbeddingBag], names: Sequence[str] | None = None
    ) -> FusedEmbeddingBagCollection:
        """Takes over existing tables, one feature each, in order.

        Keeps their very Parameter objects, so that an optimizer made before goes on working, and moves their
        data into the packed buffers. ``names`` default to t0, t1, ...

        Raises:
            ValueError: a table cannot be pooled with the others (max_norm, scale_grad_by_freq, differing
                sparse).
        """
        given = list(embedding_bags)
        bags = []
        for table in given:
            bag = EmbeddingBag.__new__(EmbeddingBag)
            bag.__dict__.update(table.__dict__)
            bag._parameters = dict(table._parameters)
            bags.append(bag)
        collection = cls.__new__(cls)
        torch.nn.Module.__init__(collection)
        if names is not None and len(names) != len(bags):
            raise ArgumentValueError(
                f"recfuse.nn.FusedEmbeddingBagCollection: {len(names)} names for {len(bags)} tables"
            )
        own_names = list(names) if names is not None else [f"t{number}" for number in range(len(bags))]
        collection._own(own_names, bags, [()] * len(bags))
        return collection

    def _own(
        self, names: Sequence[str], bags: Sequence[EmbeddingBag], feature_names: Sequence[tuple[str, ...]]
    ) -> None:
        if not bags:
            raise ArgumentValueError(
                "recfuse.nn.FusedEmbeddingBagCollection: tables is empty, must have at least one"
            )
        if len(set(names)) < len(names):
            twice = next(name for name in names if list(names).count(name) > 1)
            raise ArgumentValueError(
                f"recfuse.nn.FusedEmbeddingBagCollection: two tables are named {twice!r}"
            )
        if reason := why_not_fusable(bags):
            raise ArgumentValueError(
                f"recfuse.nn.FusedEmbeddingBagCollection: {reason}; use recfuse.nn.EmbeddingBag for it"
            )
        self.embedding_bags = torch.nn.ModuleDict(dict(zip(names, bags, strict=True)))
        self.feature_names: list[str] = []
        self.feature_dims: list[int] = []
        table_of_feature: list[int] = []
        for number, (name, bag, features) in enumerate(zip(names, bags, feature_names, strict=True)):
            for feature in features or (name,):
                self.feature_names.append(feature)
                self.feature_dims.append(bag.embedding_dim)
                table_of_feature.append(number)
        self.pack(table_of_feature)

    def _packed_holder(self) -> torch.nn.Module:
        return self._modules["embedding_bags"]

    def forward(
        self,
        indices: Any,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        mapping: Mapping | None = None,
    ) -> Tensor:
        """Pools every feature.

        Args:
            indices: int32 or int64 ``[lookups]``, feature by feature; or a TorchRec KeyedJaggedTensor,
                alone, with a key for each feature, in any order.
            offsets: int32 or int64 ``[features * bags + 1]``: bag b of feature f pools the lookups from
                ``offsets[f * bags + b]`` to ``offsets[f * bags + b + 1]``.
            per_sample_weights: floating ``[lookups]``; every table must then be of mode "sum".
            mapping: how the GPU's work on this batch is shared out, from ``map(offsets)``. The CPU needs
                none.

        Returns:
            ``[bags, sum(feature_dims)]``, features side by side; of the tables' dtype where they agree, else
            float32.

        Raises:
            ValueError, TypeError: a bad argument. IndexError: an index outside its table; names feature and
                bag. On a GPU, bad contents are raised by the next call, or by :func:`recfuse.check`.
        """
        if not isinstance(indices, Tensor):
            indices, offsets, per_sample_weights = self._jagged(indices, offsets, per_sample_weights)
        elif offsets is None:
            raise ArgumentValueError(
                "recfuse.nn.FusedEmbeddingBagCollection: offsets is None, must be a 1-D tensor of "
                "features * bags + 1 elements when indices is a tensor"
            )
        return self._packed(self._packed_modules(), indices, offsets, per_sample_weights, mapping)

    def _offsets_of(self, batch: Any) -> Tensor:
        if isinstance(batch, Sequence):
            return super()._offsets_of(batch)
        return self._jagged(batch, None, None)[1]

    def _jagged(
        self, keyed: Any, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if not all(hasattr(keyed, name) for name in ("keys", "values", "offsets", "weights_or_none")):
            raise ArgumentTypeError(
                f"recfuse.nn.FusedEmbeddingBagCollection: indices is a {type(keyed).__name__}, must be a "
                f"torch.Tensor "
                "or a KeyedJaggedTensor"
            )
        if offsets is not None or per_sample_weights is not None:
            raise ArgumentValueError(
                "recfuse.nn.FusedEmbeddingBagCollection: offsets and per_sample_weights must be None with a "
                "KeyedJaggedTensor, which has its own"
            )
        return jagged_of(keyed, self.feature_names)

    def extra_repr(self) -> str:
        """Sizes of the whole."""
        weights = self._packed.weights
        rows, size = sum(w.shape[0] for w in weights), sum(w.numel() * w.dtype.itemsize for w in weights)
        features, columns = len(self.feature_names), self._packed.output_dim
        return f"features={features}, rows={rows}, output_dim={columns}, bytes={size}"


def jagged_of(keyed: Any, feature_names: Sequence[str]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Indices, offsets and weights of a KeyedJaggedTensor, its keys brought into the order of
    ``feature_names``.

    Raises:
        ValueError: a key is missing, or batch sizes differ between keys.
    """
    if keyed.variable_stride_per_key():
        raise ArgumentValueError(
            "recfuse: the KeyedJaggedTensor has a batch size per key, must have one for all"
        )
    keys = keyed.keys()
    if keys != feature_names:
        place = {key: number for number, key in enumerate(keys)}
        missing = [name for name in feature_names if name not in place]
        if missing:
            raise ArgumentValueError(
                f"recfuse: the KeyedJaggedTensor has no key {missing[0]!r} ({len(missing)} of "
                f"{len(feature_names)} "
                f"features are missing); it has {keys[:8]}"
            )
        keyed = keyed.permute([place[name] for name in feature_names])
    return keyed.values(), keyed.offsets(), keyed.weights_or_none()


def _check_spec(name: str, spec: Table) -> None:
    if spec.mode not in MODES:
        raise ArgumentValueError(
            f'recfuse.nn.FusedEmbeddingBagCollection: mode of {name} is {spec.mode!r}, must be "sum", '
            f'"mean" or "max"'
        )
    for field in ("num_embeddings", "embedding_dim"):
        if getattr(spec, field) < 0:
            raise ArgumentValueError(
                f"recfuse.nn.FusedEmbeddingBagCollection: {field} of {name} is {getattr(spec, field)}, "
                f"must be >= 0"
            )
