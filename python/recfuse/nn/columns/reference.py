"""Columns in plain PyTorch: the specification of ``recfuse.nn.EmbeddingColumns``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from recfuse.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError
from recfuse.nn.columns.batch import Reader
from recfuse.nn.columns.inputs import TYPES, Inputs, widened
from recfuse.nn.columns.kinds import Cross, Numeric
from recfuse.nn.columns.reference_values import hash_integers, scaled, stepped
from recfuse.nn.columns.specs import Column, FeatureRef, Source, TableColumn
from recfuse.ops.embedding_bag_arguments import torch_embedding_bag

# ---- bags


class Bags(NamedTuple):
    """Values of samples; sample b has the values from ``offsets[b]`` to ``offsets[b + 1]``."""

    values: Tensor  # [values] float32 or int64
    offsets: Tensor  # [batch + 1] int64
    weights: Tensor | None

    def lengths(self) -> Tensor:
        """Return the number of values of each sample."""
        return self.offsets.diff()

    def samples(self) -> Tensor:
        """Return the sample of each value."""
        lengths = self.lengths()
        samples = torch.arange(lengths.numel(), device=lengths.device)
        return samples.repeat_interleave(lengths, output_size=self.values.numel())


def _bags(inputs: Inputs, number: int) -> Bags:
    """Return the values that a use reads, before the steps."""
    place = inputs.places[number]
    if place.width:
        dense = inputs.dense[place.input]
        values = dense[:, None] if dense.dim() == 1 else dense[:, place.slot : place.slot + place.width]
        ends = torch.arange(inputs.batch + 1, device=values.device) * place.width
        return Bags(_of_type(values.reshape(-1)), ends, None)
    entry = inputs.jagged(place.input - len(inputs.dense))
    bounds = entry.offsets[place.slot * inputs.batch : (place.slot + 1) * inputs.batch + 1].long()
    first, end = (int(bound) for bound in bounds[[0, -1]])
    values = slice(first, end)
    weights = None if entry.weights is None else entry.weights[values].float()
    return Bags(_of_type(entry.values[values]), bounds - first, weights)


def _of_type(values: Tensor) -> Tensor:
    values = widened(values)
    if values.dtype not in TYPES:
        raise ArgumentTypeError(f"values are {values.dtype}; expected float32, int32 or int64")
    return values if values.is_floating_point() else values.to(torch.int64)


def _crossed(left: Bags, right: Bags) -> tuple[Tensor, Tensor, Tensor]:
    """Return all pairs of values of each sample: left values, right values, and the offsets of samples."""
    samples = left.samples()
    partners = right.lengths()[samples]  # of each left value
    ends = partners.cumsum(0)
    pairs = int(ends[-1]) if ends.numel() else 0
    of_left = torch.arange(samples.numel(), device=samples.device).repeat_interleave(
        partners, output_size=pairs
    )
    nth = torch.arange(pairs, device=samples.device) - (ends - partners)[of_left]
    of_right = right.offsets[samples[of_left]] + nth
    offsets = pad((left.lengths() * right.lengths()).cumsum(0), (1, 0))
    return left.values[of_left], right.values[of_right], offsets


# ---- columns


class _Tables(torch.nn.Module):
    """Modules with any names, stored in ``_modules``: ``add_module`` and a ModuleDict refuse some names."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute as on every object, although a module may have the name."""
        object.__setattr__(self, name, value)


class ReferenceColumns(torch.nn.Module):
    """The columns of an ``EmbeddingColumns`` in plain PyTorch, from its ``to_torch``.

    Batches and state_dict are the same. ``.double()`` sums in float64; values before the tables stay float32
    and int64.

    Args:
        columns: the specifications.
        reader: the reader of batches.
        weights: the weight of each table; copied.

    Example:
        >>> columns = recfuse.nn.EmbeddingColumns([recfuse.nn.columns.Hash("city", 1000, 8)])
        >>> batch = {"city": torch.tensor([3, 4])}
        >>> torch.equal(columns(batch), columns.to_torch()(batch))
        True
    """

    def __init__(self, columns: Sequence[Column], reader: Reader, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights; see the class."""
        super().__init__()
        self._columns, self._reader = tuple(columns), reader
        self.tables = _Tables()
        for name, weight in weights.items():
            table = torch.nn.Embedding(*weight.shape, _weight=weight.detach().clone())
            table.weight.requires_grad_(weight.requires_grad)
            self.tables._modules[name] = table

    def forward(self, batch: Any, dense: Mapping[str, Any] | None = None) -> Tensor:
        """Compute all columns, as ``EmbeddingColumns.forward``.

        Args:
            batch: the entries of the batch by name.
            dense: further entries by name.

        Returns:
            Tensor: ``[batch, sum of the columns' widths]``.
        """
        weights = {name: table.weight for name, table in self.tables._modules.items()}
        return evaluate(self._columns, self._reader.uses, weights, self._reader.read(batch, dense))


def evaluate(
    columns: Sequence[Column], uses: Sequence[FeatureRef], weights: Mapping[str, Tensor], inputs: Inputs
) -> Tensor:
    """Return ``[batch, output_dim]``: the columns side by side.

    Raises:
        IndexError: an invalid index, of a column with ``invalid="error"``. TypeError: floats instead of
            integers. ValueError: an entry has another number of samples.
    """
    for use, place in zip(uses, inputs.places, strict=True):
        if place.width and inputs.dense[place.input].shape[0] != inputs.batch:
            raise ArgumentValueError(
                f"recfuse.nn.EmbeddingColumns: feature {use.feature!r} has "
                f"{inputs.dense[place.input].shape[0]} samples, the batch has {inputs.batch}"
            )
    number_of = {use: number for number, use in enumerate(uses)}
    read: dict[FeatureRef, Bags] = {}
    bags_by_source: dict[Source, Bags] = {}

    def bags_of(source: Source) -> Bags:
        if source not in bags_by_source:
            if source.use not in read:
                read[source.use] = _bags(inputs, number_of[source.use])
            bags = read[source.use]
            for step in source.steps:
                bags = bags._replace(values=stepped(step, bags.values))
            bags_by_source[source] = bags
        return bags_by_source[source]

    dtypes = {weight.dtype for weight in weights.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    dtype = torch.float64 if torch.float64 in dtypes else dtype
    pieces = []
    for column in columns:
        try:
            sources = [bags_of(source) for source in column.sources()]
            if isinstance(column, TableColumn):
                pieces.append(_looked_up(column, sources, weights[column.table_name], inputs.batch).to(dtype))
            else:
                pieces.append(_numeric(column, sources[0], inputs).to(dtype))
        except (TypeError, ValueError, IndexError) as error:
            raise type(error)(f"recfuse.nn.EmbeddingColumns: column {column.name!r}: {error}") from None
    return torch.cat(pieces, dim=1)


def _numeric(column: Column, bags: Bags, inputs: Inputs) -> Tensor:
    assert isinstance(column, Numeric)
    place_width = bags.values.numel() // max(inputs.batch, 1)
    if inputs.batch and place_width != column.width:
        raise ArgumentValueError(f"a sample has {place_width} values; expected {column.width}")
    return bags.values.float().reshape(inputs.batch, column.width)


def _looked_up(column: TableColumn, sources: Sequence[Bags], table: Tensor, batch: int) -> Tensor:
    """Return the output of a column with a table."""
    if isinstance(column, Cross):
        for bags in sources:
            _check_integers(bags.values)
        left, right, offsets = _crossed(*sources)
        indices = scaled(hash_integers([left, right], column.seed), column.buckets)
        bags = Bags(indices, offsets, None)
    else:
        (bags,) = sources
        _check_integers(bags.values)
        if not (column.weighted or column.weights is not None):  # type: ignore[attr-defined]
            bags = bags._replace(weights=None)
    bags = _safe(column, bags)
    pooled, empty = _pooled(column, bags, table), (bags.lengths() == 0)[:, None]
    if isinstance(column.empty, int):
        pooled = torch.where(empty, table[column.empty], pooled)
    first, end = column.dims
    scale = torch.tensor(column.scale, dtype=torch.float32, device=pooled.device).to(pooled.dtype)
    out = pooled[:, first:end] * scale
    if column.empty == "fill":
        fill = torch.tensor(column.fill_value, dtype=torch.float32, device=pooled.device).to(pooled.dtype)
        out = torch.where(empty, fill, out)
    return out


def _check_integers(values: Tensor) -> None:
    if values.is_floating_point():
        raise ArgumentTypeError("its values are floats, which are no indices. Put a Cast into preprocess.")


def _safe(column: TableColumn, bags: Bags) -> Bags:
    """Return the bags with valid indices only, as ``invalid`` demands."""
    indices = bags.values
    valid = (indices >= 0) & (indices < column.rows)
    if isinstance(column.invalid, int):
        return bags._replace(values=torch.where(valid, indices, column.invalid))
    if column.invalid == "error":
        if not bool(valid.all()):
            at = int((~valid).nonzero()[0])
            raise IndexRangeError(
                f"index {int(indices[at])} of sample {int(bags.samples()[at])} is no row; expected a row "
                f"of {column.rows}"
            )
        return bags
    kept = pad(valid.cumsum(0), (1, 0))
    weights = None if bags.weights is None else bags.weights[valid]
    return Bags(indices[valid], kept[bags.offsets], weights)


def _pooled(column: TableColumn, bags: Bags, table: Tensor) -> Tensor:
    """Return the pooled rows, [batch, dim]; zeros for empty bags."""
    mode = {"sqrtn": "sum"}.get(column.pooling, column.pooling)
    weights = bags.weights
    if weights is not None:
        weights, mode = weights.to(table.dtype), "sum"
    if bags.values.numel() == 0:
        return (table.sum() * 0).expand(bags.offsets.numel() - 1, column.embedding_dim)
    pooled = torch_embedding_bag(
        bags.values, table, bags.offsets, mode=mode, per_sample_weights=weights, include_last_offset=True
    )
    if column.pooling == "sqrtn" or (column.pooling == "mean" and weights is not None):
        # In float64, which represents the square of each float32 exactly.
        each = torch.ones_like(bags.values, dtype=torch.float64) if weights is None else weights.double()
        each = each * each if column.pooling == "sqrtn" else each
        count = torch.zeros(pooled.shape[0], dtype=torch.float64, device=table.device)
        count = count.index_add(0, bags.samples(), each)
        count = torch.where(bags.lengths() == 0, 1.0, count)
        pooled = pooled / (count.sqrt() if column.pooling == "sqrtn" else count)[:, None]
        pooled = pooled.to(table.dtype)
    return pooled
