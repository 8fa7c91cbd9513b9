"""``PackedColumns``: a batch in one buffer, which a single copy moves to a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recfuse.errors import ArgumentValueError
from recfuse.nn.columns.inputs import Inputs
from recfuse.nn.columns.lowering import InputRef
from recfuse.nn.columns.specs import FeatureRef
from recfuse.nn.memory import own_storage


class BufferPart(NamedTuple):
    """The type and position of a tensor in the buffer."""

    field: int  # the number of its list in Inputs
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int  # byte


class PackedColumns:
    """A batch in one buffer, from ``EmbeddingColumns.pack``: a single copy moves it to a GPU.

    Args:
        uses: the features that it was packed for.
        inputs: its tensors, views of the buffer if there is one.
        buffer, parts: the buffer and its parts, or None.
        form: encoded places, or None.

    Attributes:
        batch_size: the number of samples.
        device: the device.
        nbytes: the size of the buffer.

    Example:
        >>> columns = recfuse.nn.EmbeddingColumns([recfuse.nn.columns.Hash("city", 1000, 8)])
        >>> packed = columns.pack({"city": torch.tensor([3, 4])})
        >>> packed.batch_size, columns(packed).shape
        (2, torch.Size([2, 8]))
    """

    def __init__(
        self,
        uses: tuple[FeatureRef, ...],
        inputs: Inputs,
        buffer: Tensor | None = None,
        parts: Sequence[BufferPart] = (),
        form: str | None = None,
    ) -> None:
        """Create a packed batch; see the class."""
        self._uses, self._inputs, self._buffer, self._parts = uses, inputs, buffer, tuple(parts)
        # A text, because the compiler would treat numbers of an object as variables.
        self._form = encoded(inputs.places) if form is None else form
        self.on_host: Inputs | None = None  # the source of the copy

    def inputs(self, uses: tuple[FeatureRef, ...]) -> Inputs:
        """Return the tensors of the batch.

        Args:
            uses: the features that the columns read.

        Raises:
            ValueError: the batch was packed for other features.
        """
        if self._uses is not uses and self._uses != uses:
            raise ArgumentValueError(
                "recfuse.nn.EmbeddingColumns: the batch was packed for other columns. Pack it by this module."
            )
        if not torch.compiler.is_dynamo_compiling():
            return self._inputs
        lists = self._inputs[2:]
        return Inputs(_decoded(self._form), _batch_of(self._inputs.places, *lists[:3]), *lists)

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return self._inputs.batch

    @property
    def device(self) -> torch.device:
        """The device."""
        return self._inputs.device

    @property
    def nbytes(self) -> int:
        """The bytes that a copy moves."""
        tensors = [tensor for each in self._inputs[2:] for tensor in each]
        return sum(tensor.nbytes for tensor in tensors) if self._buffer is None else self._buffer.nbytes

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedColumns:
        """Return a copy on a device.

        Args:
            device: the device.
            non_blocking: do not wait for a copy from page-locked memory.
        """
        target, source = torch.empty(0, device=device).device, self._inputs  # with an explicit number
        if target == source.device:
            return self
        if self._buffer is None:
            lists = [[tensor.to(target, non_blocking=non_blocking) for tensor in each] for each in source[2:]]
            inputs = Inputs(source.places, source.batch, *lists)
            packed = PackedColumns(self._uses, inputs, form=self._form)
        else:
            buffer = self._buffer.to(target, non_blocking=non_blocking)
            packed = of_buffer(self._uses, source.places, source.batch, buffer, self._parts, self._form)
        packed.on_host = source if source.device.type == "cpu" else self.on_host
        return packed

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the buffer without its views, or the tensors with separate storages.

        torch.save refuses views of one storage with several types.
        """
        packed_inputs = self._inputs
        if self._buffer is None:
            lists = [[own_storage(tensor) for tensor in each] for each in packed_inputs[2:]]
            inputs = Inputs(packed_inputs.places, packed_inputs.batch, *lists)
            return PackedColumns, (self._uses, inputs, None, (), self._form)
        return of_buffer, (
            self._uses,
            packed_inputs.places,
            packed_inputs.batch,
            self._buffer,
            self._parts,
            self._form,
        )

    def __repr__(self) -> str:
        """Return sizes and device."""
        return f"PackedColumns(batch_size={self.batch_size}, nbytes={self.nbytes}, device='{self.device}')"


def of_buffer(
    uses: tuple[FeatureRef, ...],
    places: tuple[InputRef, ...],
    batch: int,
    buffer: Tensor,
    parts: Sequence[BufferPart],
    form: str,
) -> PackedColumns:
    """Return a packed batch whose inputs are views of the buffer's parts."""
    lists: tuple[list[Tensor], ...] = [], [], [], []
    for part in parts:
        view = view_of(buffer, part)
        lists[part.field].append(view.t() if part.field == 0 else view)
    return PackedColumns(uses, Inputs(places, batch, *lists), buffer, parts, form)


def view_of(buffer: Tensor, part: BufferPart) -> Tensor:
    """Return the view of a part; dense parts are ``[values, batch]``."""
    size = math.prod(part.shape) * part.dtype.itemsize
    return buffer[part.first : part.first + size].view(part.dtype).view(part.shape)


def _flatten(packed: PackedColumns) -> tuple[list[Any], Any]:
    inputs = packed._inputs
    return [list(each) for each in inputs[2:]], (packed._uses, inputs.places)


def _unflatten(lists: Any, context: Any) -> PackedColumns:
    uses, places = context
    return PackedColumns(uses, Inputs(places, _batch_of(places, *lists[:3]), *lists))


def _batch_of(
    places: Sequence[InputRef], dense: Sequence[Tensor], values: Sequence[Tensor], offsets: Sequence[Tensor]
) -> int:
    """Return the number of samples."""
    if dense:
        return dense[0].shape[0]
    return (offsets[0].shape[0] - 1) // (max(place.slot for place in places if place.input == 0) + 1)


def encoded(places: Sequence[InputRef]) -> str:
    """Return places as a text."""
    return " ".join(str(number) for place in places for number in place)


def _decoded(text: str) -> tuple[InputRef, ...]:
    numbers = [int(number) for number in text.split()]
    return tuple(InputRef(*numbers[at : at + 3]) for at in range(0, len(numbers), 3))


torch.utils._pytree.register_pytree_node(
    PackedColumns, _flatten, _unflatten, serialized_type_name="recfuse.nn.columns.PackedColumns"
)
