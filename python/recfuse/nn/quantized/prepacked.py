"""Tables of torch's ``embedding_bag_byte_prepack`` and ``embedding_bag_4bit_prepack``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse._arguments import wrong_type
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn.quantized.rows import Rows

_WHERE = "recfuse.nn.QuantizedEmbeddingBagCollection.from_prepacked"
_FORMS = {8: ("int8", torch.float32), 4: ("int4", torch.float16)}


def prepacked_rows(tables: Any, bits: Any) -> dict[str, Rows]:
    """Return the rows of prepacked tables by name, as views; codes are not copied.

    Parameters whose bytes have no alignment are copied.
    """
    if bits not in _FORMS:
        raise ArgumentValueError(f"{_WHERE}: bits is {bits!r}; expected 8 or 4")
    if isinstance(tables, Tensor) or not isinstance(tables, (Mapping, Sequence)):
        raise wrong_type(f"{_WHERE}: tables", tables, "a sequence of tensors, or a dict of them by name")
    named = tables if isinstance(tables, Mapping) else {f"t{n}": table for n, table in enumerate(tables)}
    return {name: _rows(name, table, bits) for name, table in named.items()}


def _rows(name: str, packed: Any, bits: int) -> Rows:
    kind, dtype = _FORMS[bits]
    if not isinstance(packed, Tensor):
        raise wrong_type(f"{_WHERE}: table {name!r}", packed, "a torch.Tensor")
    if packed.dtype != torch.uint8:
        raise ArgumentTypeError(f"{_WHERE}: table {name!r} is {packed.dtype}; expected torch.uint8")
    size = 2 * dtype.itemsize
    if packed.dim() != 2 or packed.shape[1] <= size or (packed.shape[1] > 1 and packed.stride(1) != 1):
        raise ArgumentValueError(
            f"{_WHERE}: table {name!r} has shape {list(packed.shape)} and strides {list(packed.stride())}; "
            f"expected contiguous rows of codes and {size} bytes of parameters"
        )
    width = packed.shape[1] - size
    codes, parameter_bytes = packed[:, :width], packed[:, width:]
    is_aligned = not (
        parameter_bytes.storage_offset() % dtype.itemsize or parameter_bytes.stride(0) % dtype.itemsize
    )
    parameters = (parameter_bytes if is_aligned else parameter_bytes.contiguous()).view(dtype)
    return Rows(kind, width * 8 // bits, codes, parameters)
