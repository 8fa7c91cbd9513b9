"""Codes of the C library, as positions in tuples of texts, and its records, as rows of integers."""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch

from recfuse import _C

CODES = _C.codes()
"""The texts of the codes of each list of the C library."""

_RECORDS = _C.records()


class Record:
    """A struct of the C library whose array is an array of integers ``[n, fields]``.

    Attributes:
        fields: names of its fields, in order.
    """

    def __init__(self, name: str) -> None:
        """Take the fields of the struct ``name``."""
        self.fields = _RECORDS[name]

    def __len__(self) -> int:
        """The number of fields."""
        return len(self.fields)

    def at(self, field: str) -> int:
        """Return the position of a field."""
        return self.fields.index(field)

    def row(self, **values: int) -> tuple[int, ...]:
        """Return a row from the values of all fields."""
        row = tuple(values[field] for field in self.fields)
        assert len(row) == len(values), f"{sorted(values)} has other fields than {self.fields}"
        return row


FEATURE = Record("rf_feature")
"""A feature of `fused_embedding_bag`: its table within a weight, and its columns of the output."""
STORED_TABLE = Record("rf_stored_table")
"""A table of `fused_embedding_bag_quantized` within memory that it shares with others."""
FUSED_SCHEDULE = Record("rf_fused_schedule")
"""The schedule of a feature of `fused_embedding_bag` on a GPU."""
COLUMN, COLUMN_SOURCE, COLUMN_STEP = map(Record, ("rf_column", "rf_column_source", "rf_column_step"))
"""Of a program of `embedding_columns`: a column, the values that it reads, a step on a value."""


def negative_codes(name: str) -> dict[str, int]:
    """Return the codes of a list that ends at -1, by their texts."""
    texts = CODES[name]
    return {text: code - len(texts) for code, text in enumerate(texts)}


COLUMN_INVALID, COLUMN_EMPTY = negative_codes("column_invalid"), negative_codes("column_empty")

DType = Literal["float32", "float16", "bfloat16"]
"""The dtypes of a table."""
Integer = Literal["int32", "int64"]
"""The dtypes of indices and offsets."""
Mode = Literal["sum", "mean", "max"]
"""The modes of pooling."""

DTYPE_NAMES = cast(tuple[DType, ...], CODES["dtype"][:3])  # tables have one of the first three
INTEGER_NAMES = cast(tuple[Integer, ...], CODES["int_type"])
MODES = cast(tuple[Mode, ...], CODES["pooling"])
SUM, MEAN, MAX = map(MODES.index, get_args(Mode))

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in DTYPE_NAMES)
INTEGERS: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in INTEGER_NAMES)


def row_bytes(dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a row of ``dim`` elements."""
    return dim * dtype.itemsize
