"""Codes of the C library for dtypes, integer types and modes of pooling: positions in these tuples."""

from __future__ import annotations

from typing import Literal, get_args

import torch

DType = Literal["float32", "float16", "bfloat16"]
"""The dtypes of a table, in the order of rf_dtype."""
Integer = Literal["int32", "int64"]
"""The dtypes of indices and offsets."""
Mode = Literal["sum", "mean", "max"]
"""The modes of pooling."""

DTYPE_NAMES: tuple[DType, ...] = get_args(DType)
INTEGER_NAMES: tuple[Integer, ...] = get_args(Integer)
MODES: tuple[Mode, ...] = get_args(Mode)
SUM, MEAN, MAX = range(len(MODES))

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in DTYPE_NAMES)
INTEGERS: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in INTEGER_NAMES)
