"""``Packer``: a batch as few inputs, dense inputs of a type side by side, jagged inputs in sequence."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recfuse import _C
from recfuse._arguments import integers_on
from recfuse._storage import check_storages
from recfuse.errors import ArgumentValueError
from recfuse.nn.columns.addresses import Addresses, addresses_of
from recfuse.nn.columns.inputs import TYPES, Inputs, Jagged, width_of
from recfuse.nn.columns.lowering import InputRef
from recfuse.nn.columns.packed import BufferPart, PackedColumns, encoded, of_buffer
from recfuse.nn.columns.specs import FeatureRef
from recfuse.nn.memo import LastResult
from recfuse.ops.library import is_transformed

_WHERE = "recfuse.nn.EmbeddingColumns"

Kind = Sequence[Any]
"""The type of an input, its width (0: jagged), and for a jagged input its features and a flag for weights."""


class _Plan(NamedTuple):
    """The groups of inputs that are packed together."""

    groups: list[list[int]]  # numbers of inputs, dense groups first
    places: tuple[InputRef, ...]  # of the uses in the packed inputs
    text: str  # the encoded places
    group_of: NDArray[Any] | None  # int32 [inputs]


class Packer:
    """Packs batches for the columns of a module.

    Caches the form of the last batch, so that batches of the same form share one ``places`` object.
    """

    def __init__(self, uses: tuple[FeatureRef, ...]) -> None:
        """Create a packer for ``uses``, the features that the columns read."""
        self.uses = uses
        self._plan = LastResult(_plan_of)
        self._plan_at = LastResult(_plan_at)

    def __call__(self, inputs: Inputs, pin: bool = False) -> PackedColumns:
        """Return the packed inputs. CPU inputs share one buffer, with ``pin`` in page-locked memory.

        Raises:
            NotImplementedError: a tensor needs a gradient.
        """
        if torch.compiler.is_compiling():
            return self._joined(inputs)
        tensors = [tensor for each in inputs[2:] for tensor in each]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise NotImplementedError(
                f"{_WHERE}: a tensor of the batch needs a gradient, which a packed batch has not. Call "
                "detach()."
            )
        for name, each in zip(("dense", "values", "offsets", "weights"), inputs[2:], strict=True):
            check_storages(_WHERE, name, each)
        is_read = inputs.device.type == "cpu" and not is_transformed()
        addresses = addresses_of(inputs) if is_read and not torch._C._len_torch_dispatch_stack() else None
        return self._joined(inputs) if addresses is None else self.at(addresses, pin)

    def at(self, inputs: Addresses, pin: bool = False) -> PackedColumns:
        """Return the packed batch of CPU tensors that the library has read."""
        plan = self._plan_at(inputs.places, inputs.forms.tobytes(), inputs.n_dense, inputs.batch == 0)
        form = inputs.owner, plan.group_of, len(plan.groups)
        size, _ = _C.embedding_columns_pack(*form, 0, 0)
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
        _, fields = _C.embedding_columns_pack(*form, buffer.data_ptr(), size)
        parts = [
            BufferPart(field, TYPES[kind], (rows,) if columns < 0 else (rows, columns), first)
            for field, kind, rows, columns, first in fields
        ]
        return of_buffer(self.uses, plan.places, inputs.batch, buffer, parts, plan.text)

    def _joined(self, batch: Inputs) -> PackedColumns:
        """Return the packed inputs as separate tensors, computed by torch: in the compiler or on a GPU."""
        jagged = [batch.jagged(number) for number in range(len(batch.values))]
        kinds: list[Kind] = [(tensor.dtype, width_of(tensor), 0, False) for tensor in batch.dense]
        for entry, features in zip(jagged, _features(batch, jagged), strict=True):
            kinds.append((entry.values.dtype, 0, features, entry.weights is not None))
        plan = self._plan(batch.places, kinds)
        n_dense, dense, bags = len(batch.dense), [], []
        for numbers in plan.groups:
            if numbers[0] < n_dense:
                dense.append(_side_by_side([batch.dense[number] for number in numbers], batch.batch))
            else:
                bags.append(_one_after_the_other([jagged[number - n_dense] for number in numbers]))
        weights = []
        if any(bag.weights is not None for bag in bags):
            none = bags[0].offsets.new_empty(0, dtype=torch.float32)
            weights = [none if bag.weights is None else bag.weights for bag in bags]
        values, offsets = [bag.values for bag in bags], [bag.offsets for bag in bags]
        inputs = Inputs(plan.places, batch.batch, dense, values, offsets, weights)
        return PackedColumns(self.uses, inputs, form=plan.text or None)


def _plan_at(places: tuple[InputRef, ...], forms: bytes, n_dense: int, is_empty: bool) -> _Plan:
    """Return the plan for the ``forms`` of `Addresses`, as bytes.

    Without samples, a jagged input has the number of features that columns read.
    """
    kinds = np.frombuffer(forms, np.int64).reshape(-1, 4).tolist()
    if is_empty:
        for kind, features in zip(
            kinds[n_dense:], _least_features(places, n_dense, len(kinds) - n_dense), strict=True
        ):
            kind[2] = features
    return _plan_of(places, kinds)


def _plan_of(places: tuple[InputRef, ...], kinds: Sequence[Kind]) -> _Plan:
    groups: dict[Hashable, list[int]] = {}
    slots: dict[Hashable, int] = {}
    first = []  # slot of each input in its group
    for number, (kind, width, features, weighted) in enumerate(kinds):
        key = (kind, width > 0) if width else (kind, features, weighted)
        groups.setdefault(key, []).append(number)
        first.append(slots.get(key, 0))
        slots[key] = first[-1] + (width or features)
    numbers = list(groups.values())
    group_of = {number: at for at, group in enumerate(numbers) for number in group}
    packed_places = tuple(
        InputRef(group_of[place.input], first[place.input] + place.slot, place.width) for place in places
    )
    if torch.compiler.is_compiling():
        return _Plan(numbers, packed_places, "", None)
    array = np.array([group_of[number] for number in range(len(kinds))], np.int32)
    return _Plan(numbers, packed_places, encoded(packed_places), array)


def _least_features(places: Sequence[InputRef], n_dense: int, count: int) -> list[int]:
    """Return the number of features of each jagged input that the uses read."""
    least = [1] * count
    for place in places:
        if place.width == 0:
            number = place.input - n_dense
            least[number] = max(least[number], place.slot + 1)
    return least


def _features(inputs: Inputs, jagged: Sequence[Jagged]) -> list[int]:
    """Return the number of features of each jagged input.

    Raises:
        ValueError: offsets have another size.
    """
    batch = inputs.batch
    counts = _least_features(inputs.places, len(inputs.dense), len(jagged))
    if batch > 0:
        counts = [
            max((entry.offsets.shape[0] - 1) // batch, least)
            for entry, least in zip(jagged, counts, strict=True)
        ]
    for entry, count in zip(jagged, counts, strict=True):
        if entry.offsets.dim() != 1 or entry.offsets.shape[0] != count * batch + 1:
            raise ArgumentValueError(
                f"{_WHERE}: offsets of a jagged entry are {list(entry.offsets.shape)}; expected "
                f"[{count * batch + 1}] for {batch} samples"
            )
    return counts


def _side_by_side(tensors: list[Tensor], batch: int) -> Tensor:
    """Return dense inputs as one ``[batch, values]``, stored by value: all samples' first values first."""
    if any(tensor.dim() == 2 for tensor in tensors):
        return torch.cat([tensor[None] if tensor.dim() == 1 else tensor.t() for tensor in tensors]).t()
    return torch.cat(tensors).view(len(tensors), batch).t()


def _one_after_the_other(group: list[Jagged]) -> Jagged:
    """Concatenate jagged inputs."""
    bags = torch.stack([entry.offsets for entry in group])
    narrow = all(entry.offsets.dtype == torch.int32 for entry in group)
    lengths = [entry.values.shape[0] for entry in group]
    offsets = _joined_offsets(bags, lengths, narrow) if len(group) > 1 else bags[0]
    weights = [entry.weights.to(torch.float32) for entry in group if entry.weights is not None]
    values = torch.cat([entry.values for entry in group])
    return Jagged(values, offsets, torch.cat(weights) if weights else None)


def _joined_offsets(bags: Tensor, lengths: Sequence[int], narrow: bool) -> Tensor:
    """Return the offsets of concatenated jagged inputs; ``bags`` has a row per input.

    Offsets that do not begin with 0, or do not end with the number of values, become negative. The operator
    reports them, because a read here would wait for a GPU.
    """
    bases = [0]
    for length in lengths:
        bases.append(bases[-1] + length)
    ends = integers_on(bases, bags.device)
    bags = bags.to(torch.int64)
    right = (bags[:, 0] == 0) & (bags[:, -1] == ends.diff())
    starts = torch.where(right, ends[:-1], -ends[-1] - 1)
    offsets = torch.cat([ends[:1], (bags[:, 1:] + starts[:, None]).flatten()])
    return offsets.to(torch.int32) if narrow and bases[-1] < 2**31 else offsets
