"""``Addresses``: a batch's tensors, read by the library. To pass a thousand tensors takes twice as long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray
from torch import Tensor

from recfuse import _C
from recfuse._storage import CELL
from recfuse.nn.columns.inputs import Inputs
from recfuse.nn.columns.lowering import InputRef
from recfuse.nn.columns.specs import FeatureRef

MOST_FORMS = 256
"""The number of forms of batches whose places are cached. The number of widths has no bound."""


class Addresses(NamedTuple):
    """The inputs of a batch, which the operator finds by a number."""

    places: tuple[InputRef, ...]  # a place per use
    batch: int
    number: int  # under which the operator finds the inputs
    forms: NDArray[Any]  # int64 [inputs, 4]: type, width, features, weighted or not; dense inputs first
    n_dense: int
    device: tuple[str, int | None]
    owner: Any  # keeps the number valid
    entries: Any  # keeps the tensors

    def inputs(self) -> Inputs:
        """Return the inputs as tensors."""
        dense = [entry for entry in self.entries if type(entry) is Tensor]
        jagged = [entry for entry in self.entries if type(entry) is tuple]
        return Inputs(
            self.places, self.batch, dense, [entry[0] for entry in jagged], [entry[1] for entry in jagged]
        )


class AddressReader:
    """Reads dicts of plain tensors and of pairs of tensors, for the columns of a module."""

    def __init__(self, uses: Sequence[FeatureRef]) -> None:
        """Create a reader for ``uses``, the features that the columns read."""
        self._names = tuple(use.feature for use in uses)
        self._is_plain = all(use.weights is None and not use.weighted for use in uses)
        self._places: dict[bytes, tuple[tuple[InputRef, ...], int]] = {}  # places and n_dense, by widths

    def __call__(self, batch: dict[str, Any]) -> Addresses | None:
        """Return the addresses, or None if an entry is missing, wrong, or neither a plain tensor nor a pair.

        A slower reader then finds the error.
        """
        try:
            entries = tuple(map(batch.__getitem__, self._names)) if self._is_plain else ()
        except KeyError:
            return None
        inputs = _C.embedding_columns_inputs(Tensor, CELL, entries, -1) if entries else None
        if inputs is None:
            return None
        widths = inputs[3]
        key = widths.tobytes()
        places = self._places.get(key)
        if places is None:
            if len(self._places) >= MOST_FORMS:
                self._places.clear()
            places = self._places[key] = _places(widths), _n_dense(widths)
        return _addresses(*places, entries, inputs)


def addresses_of(batch_inputs: Inputs) -> Addresses | None:
    """Return the addresses of inputs, or None if a tensor is not plain or has another type."""
    lists = [
        [tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor) for tensor in each]
        for each in batch_inputs[2:]
    ]
    dense, values, offsets, weights = lists
    entries = (*dense, *zip(values, offsets, weights or [None] * len(values), strict=True))
    inputs = _C.embedding_columns_inputs(Tensor, CELL, entries, batch_inputs.batch)
    return None if inputs is None else _addresses(batch_inputs.places, _n_dense(inputs[3]), entries, inputs)


def _addresses(places: tuple[InputRef, ...], n_dense: int, entries: Any, inputs: Any) -> Addresses:
    owner, number, forms, _, batch, on_gpu, index = inputs
    device = ("cuda", index) if on_gpu else ("cpu", None)
    return Addresses(places, batch, number, forms, n_dense, device, owner, entries)


def _n_dense(widths: NDArray[Any]) -> int:
    """Return the number of dense inputs; a jagged input has width 0."""
    return int((widths > 0).sum())


def _places(widths: NDArray[Any]) -> tuple[InputRef, ...]:
    """Return the place of each use. Dense inputs come first."""
    numbers = sorted(range(len(widths)), key=lambda number: widths[number] == 0)
    input_of = {number: at for at, number in enumerate(numbers)}
    return tuple(InputRef(input_of[number], 0, int(width)) for number, width in enumerate(widths))
