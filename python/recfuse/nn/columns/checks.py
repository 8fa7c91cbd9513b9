"""Checks of a list of columns, and facts that follow from the list."""

from __future__ import annotations

from collections.abc import Sequence

from recfuse._arguments import wrong_type
from recfuse.errors import ArgumentValueError
from recfuse.nn.columns.inputs import Inputs
from recfuse.nn.columns.kinds import Numeric
from recfuse.nn.columns.specs import Column, FeatureRef, TableColumn

_WHERE = "recfuse.nn.EmbeddingColumns"


def check_columns(columns: Sequence[Column], sparse: bool) -> None:
    """Raise ValueError or TypeError unless ``columns`` is a valid list of columns."""
    if not columns:
        raise ArgumentValueError(f"{_WHERE}: columns is empty; expected at least one column")
    names: set[str] = set()
    for number, column in enumerate(columns):
        if not isinstance(column, Column):
            raise wrong_type(f"{_WHERE}: columns[{number}]", column, "a column of recfuse.nn.columns")
        if column.name in names:
            raise ArgumentValueError(f"{_WHERE}: two columns are named {column.name!r}")
        names.add(column.name)
        if sparse and isinstance(column, TableColumn) and column.pooling == "max":
            raise ArgumentValueError(
                f'{_WHERE}: sparse is True and pooling of column {column.name!r} is "max", which has no '
                "sparse gradient. Pass sparse=False."
            )


def tables_of(columns: Sequence[Column]) -> dict[str, TableColumn]:
    """Return the first column of each table, by the table's name.

    Raises:
        ValueError: columns that share a table do not agree.
    """
    tables: dict[str, TableColumn] = {}
    for column in columns:
        if not isinstance(column, TableColumn):
            continue
        first = tables.setdefault(column.table_name, column)
        for field in ("rows", "embedding_dim", "dtype", "trainable", "placement"):
            if getattr(first, field) != getattr(column, field):
                shown = {"rows": "num_embeddings"}.get(field, field)
                raise ArgumentValueError(
                    f"{_WHERE}: columns {first.name!r} and {column.name!r} share table {first.table_name!r}, "
                    f"but {shown} is {getattr(first, field)} in the first and {getattr(column, field)} in "
                    "the second"
                )
    return tables


def differentiable(columns: Sequence[Column], uses: Sequence[FeatureRef]) -> list[int]:
    """Return the numbers of uses for which the output has a derivative: numeric values and weights."""
    number_of = {use: number for number, use in enumerate(uses)}
    names = []
    for column in columns:
        for source in column.sources():
            use = source.use
            if isinstance(column, Numeric) or use.weighted or use.weights is not None:
                names.append(number_of[use])
    return sorted(set(names))


def check_values(numbers: Sequence[int], uses: Sequence[FeatureRef], inputs: Inputs) -> None:
    """Raise NotImplementedError if a batch has a tensor whose gradient would be missing.

    ``numbers`` are those of the differentiable uses.
    """
    for number in numbers:
        place, use = inputs.places[number], uses[number]
        if place.width:
            tensors = inputs.dense[place.input : place.input + 1]
        else:
            jagged = place.input - len(inputs.dense)
            tensors = (*inputs.values[jagged : jagged + 1], *inputs.weights[jagged : jagged + 1])
        if any(tensor.requires_grad for tensor in tensors):
            raise NotImplementedError(
                f"{_WHERE}: feature {use.feature!r} needs a gradient, which columns have for their tables "
                "alone. Call detach(), or concatenate the feature to the output yourself."
            )
