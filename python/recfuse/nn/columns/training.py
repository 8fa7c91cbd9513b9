"""Columns with gradients.

``fused_embedding_bag`` pools the rows that they look up, so columns have its autograd, sparse gradients and
optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recfuse._codes import FEATURE, MAX, SUM
from recfuse.nn.columns.inputs import Inputs
from recfuse.nn.columns.lowering import InputRef, TableRef
from recfuse.nn.columns.programs import Programs, static
from recfuse.nn.columns.specs import Column, FeatureColumn, FeatureRef, TableColumn
from recfuse.ops.fused_embedding_bag import fused_dtype, fused_embedding_bag


class _Group(NamedTuple):
    """Columns that a single fused call pools: by max, or by sums of rows times factors."""

    programs: Programs
    features: Tensor  # int64 [columns, 7]
    count: int  # the number of columns
    matrices: tuple[int, ...]  # the numbers of the weights with their tables
    dim: int
    is_max: bool
    weighted: bool
    divided: list[tuple[int, ...]]  # the uses of each column whose sum is divided

    def has_factors(self, places: Sequence[InputRef]) -> bool:
        """Return whether lookups have factors: weights, or a division by more than 1 row."""
        return self.weighted or any(places[use].width != 1 for uses in self.divided for use in uses)


class _Constants(NamedTuple):
    """Tensors that turn the pooled columns into the output: tables' whole dims, then numeric columns."""

    order: Tensor | None  # int64 [output_dim]: the source column; None: all, in order
    factors: Tensor | None  # float32 [columns pooled by sums], of their lookups; None: factors of 1
    scale: Tensor | None  # float32 [output_dim], of other columns; None: factors of 1
    fill: Tensor | None  # float32 [output_dim], for samples without lookups; None: zeros
    bags: Tensor | None  # int64 [output_dim]: the column whose bag is tested for lookups


class Training:
    """Calls of columns whose tables have gradients."""

    def __init__(
        self, columns: Sequence[Column], place_of: Mapping[str, TableRef], programs: Programs
    ) -> None:
        """Create the calls; ``place_of`` has the places of tables by name."""
        kinds: tuple[list[int], list[int], list[int]] = [], [], []  # pooled by sums, by max, numeric
        for number, column in enumerate(columns):
            kinds[_is_max(column) if isinstance(column, TableColumn) else 2].append(number)
        uses = {use: number for number, use in enumerate(programs.uses)}
        self._groups = [
            _group([columns[number] for number in kind], programs.chosen(kind), place_of, uses, is_max)
            for is_max, kind in ((False, kinds[0]), (True, kinds[1]))
            if kind
        ]
        self._numeric = programs.chosen(kinds[2]) if kinds[2] else None
        self._constants = {torch.device("cpu"): _constants(columns, [*kinds[0], *kinds[1], *kinds[2]])}

    def __call__(self, weights: Sequence[Tensor], inputs: Inputs, sparse: bool, bounds_check: str) -> Tensor:
        """Return ``[batch, output_dim]``, as the operator."""
        pieces: list[Tensor] = []
        ends: list[tuple[Tensor, int]] = []  # offsets, and the number of columns
        constants = self._on(inputs.device)
        dtype = fused_dtype([weight.dtype for weight in weights])
        for group in self._groups:
            indices, offsets, factors = group.programs.look_up(inputs, bounds_check)
            has_factors = group.has_factors(inputs.places)
            if torch.compiler.is_compiling():
                torch._check(offsets.shape[0] == group.count * inputs.batch + 1)
                torch._check(factors.shape[0] == (indices.shape[0] if has_factors else 0))
            if not group.is_max and constants.factors is not None and inputs.batch > 0:
                scales = _of_lookups(constants.factors, offsets, inputs.batch, indices.shape[0])
                factors = factors * scales if has_factors else scales
                has_factors = True
            matrices = [weights[number] for number in group.matrices]
            # A further weight keeps sums in float32.
            if fused_dtype([weight.dtype for weight in matrices]) != dtype:
                matrices.append(
                    next(weight for weight in weights if weight.dtype != matrices[0].dtype).detach()
                )
            pooled = fused_embedding_bag(
                matrices,
                group.features,
                indices,
                offsets,
                group.dim,
                factors if has_factors else None,
                sparse=sparse,
                any_max=group.is_max,
            )
            pieces.append(pooled)
            ends.append((offsets, group.count))
        if self._numeric is not None:
            pieces.append(self._numeric.compute([], inputs, bounds_check))
        return self._assembled(pieces, ends, inputs.batch, constants).to(dtype)

    def _assembled(
        self, pieces: list[Tensor], ends: list[tuple[Tensor, int]], batch: int, constants: _Constants
    ) -> Tensor:
        output = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        if constants.order is not None:
            output = output.index_select(1, constants.order)
        if constants.scale is not None:
            output = output * constants.scale
        if constants.fill is not None and constants.bags is not None:
            empty = torch.cat(
                [(ends_of_input.diff() == 0).view(count, batch) for ends_of_input, count in ends]
            )
            empty = empty.t().index_select(1, constants.bags)
            output = torch.where(empty & (constants.fill != 0), constants.fill, output)
        return output

    def _on(self, device: torch.device) -> _Constants:
        host = self._constants[torch.device("cpu")]
        if device.type == "cpu":
            return host
        if torch.compiler.is_compiling():
            return _Constants(*(None if tensor is None else tensor.to(device) for tensor in host))
        if device not in self._constants:
            self._constants[device] = _Constants(
                *(None if tensor is None else tensor.to(device) for tensor in host)
            )
        return self._constants[device]

    def __deepcopy__(self, memo: Any) -> Training:
        """Return the same object: it never changes."""
        return self


def _group(
    columns: Sequence[Any],
    programs: Programs,
    place_of: Mapping[str, TableRef],
    number_of: Mapping[FeatureRef, int],
    is_max: bool,
) -> _Group:
    places = [place_of[column.table_name] for column in columns]
    matrices = sorted({place.buffer for place in places})
    rows, at = [], 0
    for place in places:
        matrix, mode = matrices.index(place.buffer), MAX if is_max else SUM
        rows.append(
            FEATURE.row(
                buffer=matrix,
                weight_offset=place.offset,
                rows=place.rows,
                dim=place.dim,
                pooling=mode,
                padding_idx=-1,
                output_column=at,
            )
        )
        at += place.dim
    table = np.array(rows, dtype=np.int64).reshape(-1, len(FEATURE))
    features = torch.from_numpy(table)  # not a view of another tensor
    divided = [
        tuple(number_of[source.use] for source in column.sources())
        for column in columns
        if column.pooling in ("mean", "sqrtn")
    ]
    weighted = any(_is_weighted(column) for column in columns)
    return _Group(programs, static(features), len(places), tuple(matrices), at, is_max, weighted, divided)


def _of_lookups(of_columns: Tensor, offsets: Tensor, batch: int, lookups: int) -> Tensor:
    """Return the value of its column for each lookup.

    Lookups are scaled before the sum, so that a float16 sum is rounded once.
    """
    ends = offsets[::batch][1:-1].contiguous()
    numbers = torch.arange(lookups, device=offsets.device)
    return of_columns[torch.bucketize(numbers, ends, right=True)]


def _is_weighted(column: TableColumn) -> bool:
    return isinstance(column, FeatureColumn) and (column.weighted or column.weights is not None)


def _is_max(column: TableColumn) -> bool:
    return column.pooling == "max"


def _constants(columns: Sequence[Column], pooled: Sequence[int]) -> _Constants:
    """Return the constants of columns.

    ``pooled`` has the numbers of columns in the order of computation: tables first.
    """
    first = [0] * len(columns)
    bag_of = [0] * len(columns)
    at = 0
    for bag, number in enumerate(pooled):
        column = columns[number]
        first[number], bag_of[number] = at, bag
        at += column.embedding_dim if isinstance(column, TableColumn) else column.output_dim
    order, scale, fill, bags = [], [], [], []
    sums = [one for number in pooled if isinstance(one := columns[number], TableColumn) and not _is_max(one)]
    factors = [column.scale for column in sums]
    for number, column in enumerate(columns):
        count, begin = column.output_dim, first[number]
        factor, empty = 1.0, 0.0
        if isinstance(column, TableColumn):
            begin, empty = begin + column.dims[0], column.fill_value
            factor = column.scale if _is_max(column) else 1.0
        order.extend(range(begin, begin + count))
        scale.extend([factor] * count)
        fill.extend([empty] * count)
        bags.extend([bag_of[number] if empty else 0] * count)
    in_order = order == list(range(at))
    return _Constants(
        None if in_order else _tensor(order, torch.int64),
        _tensor(factors, torch.float32) if set(factors) - {1.0} else None,
        _tensor(scale, torch.float32) if set(scale) - {1.0} else None,
        _tensor(fill, torch.float32) if any(fill) else None,
        _tensor(bags, torch.int64) if any(fill) else None,
    )


def _tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    return static(torch.tensor(values, dtype=dtype, device="cpu"))
