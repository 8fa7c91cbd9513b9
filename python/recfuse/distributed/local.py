"""``LocalTables``: the parts of tables that a rank holds, and the fused calls that pool them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recfuse.distributed.placements import Part, Placed
from recfuse.nn.packed.layout import (
    Layout,
    Matrix,
    TableSpec,
    WeightForm,
    arrange,
    feature_tensor,
    table_rows,
)
from recfuse.nn.packed.pooling import is_planned
from recfuse.nn.packed.store import PackedStore
from recfuse.nn.tuning import Tuning
from recfuse.ops import fused_embedding_bag

_MOST_CHOICES = 64  # of the ways of features, of which each batch may have another


class LocalPart(NamedTuple):
    """A part that this rank holds."""

    table: int  # number of the table in the module
    part: Part
    form: WeightForm
    spec: TableSpec


class _Call(NamedTuple):
    """A fused call of some features of this rank."""

    features: Tensor
    output_dim: int
    any_max: bool
    tuning: Tuning


def parts_of(
    specs: Sequence[TableSpec], placed: Sequence[Placed], forms: Sequence[WeightForm], rank: int
) -> list[LocalPart]:
    """Return the parts of a rank. ``forms`` are those of whole tables.

    A part of rows is pooled by sum where its table is pooled by mean, because the mean divides the sum of all
    parts.
    """
    found = []
    for number, (spec, table, form) in enumerate(zip(specs, placed, forms, strict=True)):
        part = table.part_of(rank)
        if part is None:
            continue
        padding = spec.padding_idx
        if padding is not None:
            padding = padding - part.row if part.row <= padding < part.row + part.rows else None
        mode = "sum" if table.kind == "rows" and spec.mode == "mean" else spec.mode
        own = TableSpec(spec.name, part.rows, part.columns, mode, padding)
        found.append(LocalPart(number, part, form._replace(rows=part.rows, dim=part.columns), own))
    return found


def arranged(parts: Sequence[LocalPart], like: WeightForm) -> list[Matrix]:
    """Return the matrices of parts; a rank without parts has a matrix without rows, in the form ``like``.

    Its optimizers then have a Parameter, and a script is the same on all ranks.
    """
    return arrange([part.form for part in parts] or [like._replace(rows=0, requires_grad=False)])


def with_features(layout: Layout, tables: Sequence[int]) -> Layout:
    """Return a layout with a feature for each of these tables of this rank."""
    used = [layout.tables[number] for number in tables]
    dims = tuple(spec.embedding_dim for spec in used)
    return layout._replace(
        table_of_feature=tuple(tables),
        features=feature_tensor(used),
        dims=dims,
        output_dim=sum(dims),
        any_max=any(spec.mode == "max" for spec in used),
    )


class LocalTables:
    """The fused calls over a rank's parts; they read the packed Parameters of the store at each call.

    ``modes_of_features`` are those of the whole tables. A feature stands for the part of its table.
    """

    def __init__(
        self,
        store: PackedStore,
        parts: Sequence[LocalPart],
        table_of_feature: Sequence[int],
        modes_of_features: Sequence[str],
        pooled_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Create the calls of a module's features; ``parts`` are those of this rank."""
        self._store, self.device, self.pooled_dtype = store, device, pooled_dtype
        self.modes_of_features = tuple(modes_of_features)
        self.modes = set(modes_of_features)
        number_of = {part.table: number for number, part in enumerate(parts)}
        self._number = {
            feature: number_of[table] for feature, table in enumerate(table_of_feature) if table in number_of
        }
        with torch.inference_mode(False):
            # A fused call of matrices of different dtypes returns float32.
            self._marker = torch.empty((0, 4), dtype=torch.float32, device=device)
            self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._calls: dict[tuple[int, ...], _Call] = {}

    def _call(self, features: tuple[int, ...]) -> _Call:
        if features not in self._calls:
            drop_oldest(self._calls)
            tables = [self._number[feature] for feature in features]
            found = with_features(self._store.layout, tables)
            tuning = Tuning(len(tables))
            self._calls[features] = _Call(found.features, found.output_dim, found.any_max, tuning)
        return self._calls[features]

    def rows(self, feature: int) -> Tensor:
        """Return this rank's rows of a feature's table, a view without gradients."""
        spec = self._store.layout.tables[self._number[feature]]
        return table_rows(spec, self._store.matrix(self._number[feature]).detach())

    def anchor(self) -> Tensor:
        """Return an empty tensor that requires a gradient."""
        return self._anchor

    def weights(self) -> list[Tensor]:
        """Return the packed Parameters, with the marker that makes sums of halves float32."""
        parameters = self._store.parameters
        weights: list[Tensor] = [parameters[name] for name in self._store.layout.parameter_names]
        if any(weight.dtype != self.pooled_dtype for weight in weights):
            weights.append(self._marker)
        return weights

    def pool(
        self, own: tuple[int, ...], indices: Tensor, offsets: Tensor, weights: Tensor | None, bags: int
    ) -> Tensor:
        """Pool some features: ``[bags, columns]``."""
        features, output_dim, any_max, tuning = self._call(own)
        if not len(features):
            empty = torch.zeros((bags, 0), dtype=self.pooled_dtype, device=self.device)
            # The backward pass exchanges gradients of weights on every rank, also on one without tables.
            return empty if weights is None else empty + weights.sum().to(empty.dtype)
        matrices = self.weights()
        options = {}
        if is_planned(matrices):
            if tuning.schedules is None:
                tuning.learn(offsets)
            options = {"schedules": tuning.schedules, "warps": tuning.warps}
        return fused_embedding_bag(
            matrices,
            features,
            indices,
            offsets,
            output_dim,
            weights,
            sparse=self._store.layout.sparse,
            any_max=any_max,
            **options,
        )

    def pool_rows(
        self, tables: Sequence[Tensor], specs: Sequence[TableSpec], indices: Tensor, offsets: Tensor,
        weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Pool tables of the caller, one a feature, whose specs name them: ``[bags, columns]``."""
        matrices = [*tables, self._marker] if self.pooled_dtype == torch.float32 else list(tables)
        return fused_embedding_bag(
            matrices,
            feature_tensor(specs),
            indices,
            offsets,
            sum(spec.embedding_dim for spec in specs),
            weights,
            any_max=any(spec.mode == "max" for spec in specs),
        )


def drop_oldest(cache: dict[Any, Any]) -> None:
    """Make room for another choice."""
    while len(cache) >= _MOST_CHOICES:
        del cache[next(iter(cache))]
