"""``Addresses``: where a dict's tensors lie, read at once: handing a thousand over takes twice as long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray
from torch import Tensor

from recfuse import _C
from recfuse._storage import CELL
from recfuse.nn.columns.lowering import Place
from recfuse.nn.columns.specs import Use

MOST_FORMS = 256
"""Of batches, whose places are remembered; there is no end of widths."""
_DEVICES = {1: "cpu", 2: "cuda"}  # of DLPack


class Addresses(NamedTuple):
    """What the operator is told of a batch."""

    places: tuple[Place, ...]  # one a use
    batch: int
    number: int  # by which the operator finds the inputs
    forms: NDArray[Any]  # int64 [inputs, 2]: type and width
    n_dense: int
    device: tuple[str, int | None]
    owner: Any  # of the number
    entries: Any  # keeps the tensors


class AddressReader:
    """Reads dicts of plain tensors, and of pairs of them, for the columns of one module."""

    def __init__(self, uses: Sequence[Use]) -> None:
        """``uses``: what the columns read."""
        self._names = tuple(use.feature for use in uses)
        self._exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
        self._is_plain = all(use.weights is None and not use.weighted for use in uses)
        self._places: dict[bytes, tuple[tuple[Place, ...], int]] = {}  # and how many are dense, by widths

    def __call__(self, batch: dict[str, Any]) -> Addresses | None:
        """None: it has something else, or something wrong, which is found where tensors are looked at."""
        if self._exchange is None or not self._is_plain:
            return None
        found = _C.embedding_columns_addresses(batch, self._names, Tensor, CELL, self._exchange)
        if found is None:
            return None
        owner, number, forms, widths, entries, size, kind, index = found
        key = widths.tobytes()
        known = self._places.get(key)
        if known is None:
            if len(self._places) >= MOST_FORMS:
                self._places.clear()
            known = self._places[key] = _places(widths), int((widths > 0).sum())
        places, n_dense = known
        name = _DEVICES.get(kind, "")
        device = name, index if name == "cuda" else None
        return Addresses(places, size, number, forms, n_dense, device, owner, entries)


def _places(widths: NDArray[Any]) -> tuple[Place, ...]:
    """Dense inputs come first."""
    numbers = sorted(range(len(widths)), key=lambda number: widths[number] == 0)
    input_of = {number: at for at, number in enumerate(numbers)}
    return tuple(Place(input_of[number], 0, int(width)) for number, width in enumerate(widths))
