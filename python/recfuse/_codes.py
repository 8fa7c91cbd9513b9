"""Codes of the C library for dtypes, integer types and modes of pooling: positions in tuples of texts."""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch

from recfuse import _C

CODES = _C.codes()
"""The texts of the codes of each list of the C library."""

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
