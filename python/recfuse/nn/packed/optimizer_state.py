"""Entries of an optimizer's state of a Parameter, and the gathering of rows of several Parameters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse.errors import a_type

_SCALARS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class Piece(NamedTuple):
    """Rows that a new Parameter takes from an old Parameter."""

    source: int  # number of the old Parameter
    source_row: int
    rows: int
    row: int  # first row in the new Parameter


class Target(NamedTuple):
    """A new Parameter, and the pieces from which it is gathered."""

    parameter: Parameter
    name: str  # as in named_parameters() of the module that owns it
    pieces: list[Piece]


@dataclass(frozen=True)
class Entry:
    """An entry of the state of an old Parameter."""

    value: Any
    kind: str  # "element" (shape of the Parameter), "row" (first dimension its rows), "scalar", or "whole":
    # of a Parameter that has a single table before and after: any value, which moves unchanged

    def tag(self) -> Hashable:
        """Return the facts that must be equal in all Parameters that are packed into one."""
        if self.kind == "whole":
            return self.kind
        if not isinstance(self.value, Tensor):
            return self.kind, type(self.value), self.value
        if self.kind == "scalar":
            content: Hashable = (tuple(self.value.shape), *self.value.reshape(-1).tolist())
        else:
            content = (self.value.layout, tuple(self.value.shape[1:]))
        return self.kind, self.value.dtype, self.value.device, content


def kinds_of(value: Any, weight: Tensor) -> list[str]:
    """Return the possible kinds of an entry of a state; the first that fits all Parameters counts."""
    if isinstance(value, _SCALARS):
        return ["scalar"]
    if not isinstance(value, Tensor) or type(value) not in (Tensor, Parameter):
        return []
    same_shape = value.shape == weight.shape
    if value.layout == torch.sparse_coo:
        return ["element"] if same_shape and value.sparse_dim() == 1 else []
    if value.layout != torch.strided:
        return []
    fits = {
        "element": same_shape,
        "row": value.dim() >= 1 and value.shape[0] == weight.shape[0],
        "scalar": value.numel() == 1 and value.dim() <= 1,
    }
    return [kind for kind, fit in fits.items() if fit]


def gathered(target: Target, entries: Any) -> Any:
    """Gather an entry from rows of the old Parameters' ``entries``, with zeros between pieces.

    Returns None if the first piece has no entry.
    """
    parts = [(piece, entries[piece.source]) for piece in sorted(target.pieces, key=lambda p: p.row)]
    first = parts[0][1] if parts else None
    if first is None:
        return None
    value = first.value
    if first.kind == "whole":
        return value
    if first.kind == "scalar":
        return value.clone() if isinstance(value, Tensor) else value
    shape = (target.parameter.shape[0], *value.shape[1:])
    if value.layout == torch.sparse_coo:
        return _gathered_sparse(parts, shape)
    result = value.new_zeros(shape)
    for piece, entry in parts:
        source = entry.value.narrow(0, piece.source_row, piece.rows)
        result.narrow(0, piece.row, piece.rows).copy_(source)
    return result


def _gathered_sparse(parts: Sequence[tuple[Piece, Entry]], shape: tuple[int, ...]) -> Tensor:
    """Gather the sparse rows of several tensors; the result is coalesced if all inputs are."""
    rows, values = [], []
    for piece, entry in parts:
        indices = entry.value._indices()
        inside = (indices[0] >= piece.source_row) & (indices[0] < piece.source_row + piece.rows)
        rows.append(indices[:, inside] - piece.source_row + piece.row)
        values.append(entry.value._values()[inside])
    return torch.sparse_coo_tensor(
        torch.cat(rows, dim=1),
        torch.cat(values),
        shape,
        is_coalesced=all(entry.value.is_coalesced() for _, entry in parts),
        check_invariants=False,
    )


def described(value: Any) -> str:
    """Return the description of a value, for errors."""
    if not isinstance(value, Tensor):
        return a_type(value)
    return f"{a_type(value)} of shape {tuple(value.shape)}, {value.layout}"
