"""Conversion of batches to the operator's inputs: entries by name, keyed tensors, packed batches.

An entry of a mapping is

| a sample has | an entry |
| --- | --- |
| one value | a tensor ``[batch]`` |
| ``width`` values | a tensor ``[batch, width]`` |
| any number of values | a jagged ``torch.nested`` tensor, a TorchRec JaggedTensor, ``(values, offsets)``, |
| | ``(values, offsets, weights)``, or a mapping with "values", "offsets" or "lengths", and "weights" |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from recfuse._arguments import wrong_type
from recfuse.data.forms import is_keyed, jagged_offsets, unshared
from recfuse.errors import ArgumentTypeError, ArgumentValueError, a_type
from recfuse.nn.columns.addresses import MOST_FORMS, Addresses, AddressReader
from recfuse.nn.columns.inputs import Inputs, Jagged, contiguous, offsets_of, widened, width_of
from recfuse.nn.columns.lowering import InputRef
from recfuse.nn.columns.packed import PackedColumns
from recfuse.nn.columns.packing import Packer
from recfuse.nn.columns.specs import FeatureRef
from recfuse.ops.library import is_transformed

_ENTRY = (
    "a tensor, a jagged tensor, (values, offsets) or (values, offsets, weights) of tensors. Use "
    "recfuse.data.hash_strings for strings."
)
_MAPPING = "a mapping of names to tensors, a KeyedJaggedTensor or recfuse.nn.columns.PackedColumns"


def entry_of(value: Any, prefix: str) -> Tensor | Jagged:
    """Return an entry of a mapping: dense ``[batch]`` or ``[batch, width]``, or jagged.

    Raises:
        TypeError, ValueError: the entry has no known form; ``prefix`` names it.
    """
    if isinstance(value, Tensor):
        if value.layout is torch.jagged:
            if value.lengths() is not None or value.dim() != 2:
                raise ArgumentValueError(
                    f"{prefix} is a nested tensor with gaps, or of {value.dim()} dimensions; expected 2 "
                    "dimensions and no gaps. Call .contiguous()."
                )
            return Jagged(value.values(), value.offsets())
        if value.layout is not torch.strided or value.is_nested:
            raise ArgumentTypeError(
                f"{prefix} is a {value.layout} tensor; expected a dense or a jagged tensor"
            )
        if value.dim() not in (1, 2):
            raise ArgumentValueError(f"{prefix} is {list(value.shape)}; expected [batch] or [batch, width]")
        return value
    if isinstance(value, Jagged):
        return value
    if is_keyed(value) and len(value.keys()) != 1:
        raise ArgumentValueError(
            f"{prefix} is a KeyedJaggedTensor with the keys {value.keys()[:8]}; expected one key, or the "
            "whole batch"
        )
    if all(hasattr(value, name) for name in ("values", "offsets", "weights_or_none")):
        return _whole(value)
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - {"values", "offsets", "lengths", "weights"})
        if unknown or "values" not in value or ("offsets" in value) == ("lengths" in value):
            raise ArgumentValueError(
                f'{prefix} is a mapping with {sorted(value)}; expected "values", one of "offsets" and '
                '"lengths", and optionally "weights"'
            )
        offsets = value["offsets"] if "offsets" in value else offsets_of(value["lengths"])
        value = value["values"], offsets, value.get("weights")
    if not isinstance(value, (tuple, list)) or len(value) not in (2, 3):
        raise wrong_type(prefix, value, _ENTRY)
    for at, item in enumerate(value):
        if not isinstance(item, Tensor) and not (at == 2 and item is None):
            raise ArgumentTypeError(f"{prefix} is {a_type(value)} with {a_type(item)}; expected {_ENTRY}")
    return Jagged(*value)


class Reader:
    """Reads batches for the columns of a module, and caches the form of the last batch.

    Attributes:
        uses: the features that the columns read.
        packer: copies inputs into one buffer.
    """

    def __init__(self, uses: Sequence[FeatureRef], users: Mapping[FeatureRef, str]) -> None:
        """Create a reader for ``uses``; ``users`` has the name of a column that reads each use."""
        self.uses = tuple(uses)
        self.packer = Packer(self.uses)
        self._users = dict(users)
        self._address_reader = AddressReader(self.uses)
        self._plain = all(use.weights is None and not use.weighted for use in self.uses)
        # Of the last batch with all features.
        self._keys: tuple[list[str], tuple[InputRef, ...]] | None = None
        self._interned: dict[tuple[InputRef, ...], tuple[InputRef, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without caches."""
        return {"uses": self.uses, "_users": self._users}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state, with empty caches."""
        self.__init__(state["uses"], state["_users"])  # type: ignore[misc]

    def addresses(self, batch: Any) -> Addresses | None:
        """Return addresses of a dict's tensors, or None if a tensor is not plain or a program is traced."""
        if type(batch) is not dict or is_transformed():
            return None
        return None if torch._C._len_torch_dispatch_stack() else self._address_reader(batch)

    def read(self, batch: Any, dense: Mapping[str, Any] | None = None) -> Inputs:
        """Return the operator's inputs.

        Raises:
            TypeError, ValueError: ``batch`` is no batch, or a feature is missing; names feature and column.
        """
        addresses = self.addresses(batch) if dense is None else None
        if addresses is not None:
            return addresses.inputs()
        if isinstance(batch, PackedColumns):
            if dense is not None:
                raise ArgumentValueError(
                    "recfuse.nn.EmbeddingColumns: dense is given with a packed batch; expected None"
                )
            return batch.inputs(self.uses)
        if is_keyed(batch):
            return self._of_keys(batch, {} if dense is None else dense)
        if not isinstance(batch, Mapping):
            raise wrong_type("recfuse.nn.EmbeddingColumns: batch", batch, _MAPPING)
        if dense is not None:
            batch = {**batch, **dense}
        return self._gather([self._entry(batch, use) for use in self.uses])

    def _same(self, places: tuple[InputRef, ...]) -> tuple[InputRef, ...]:
        """Return the first object that is equal to these places, because caches compare identities first."""
        if len(self._interned) >= MOST_FORMS:
            self._interned.clear()
        return self._interned.setdefault(places, places)

    def _gather(self, entries: Sequence[Tensor | Jagged]) -> Inputs:
        places, dense, jagged = [], [], []
        n_dense = sum(isinstance(entry, Tensor) for entry in entries)
        for entry in entries:
            if isinstance(entry, Tensor):
                width = width_of(entry)
                places.append(InputRef(len(dense), 0, width))
                dense.append(widened(entry))
            else:
                places.append(InputRef(n_dense + len(jagged), 0, 0))
                jagged.append(entry)
        return self._inputs(places, dense, jagged, [1] * len(jagged))

    def _inputs(
        self,
        places: Sequence[InputRef],
        dense: list[Tensor],
        jagged: Sequence[Jagged],
        features: Sequence[int],
    ) -> Inputs:
        if dense:
            batch = dense[0].shape[0]
        else:
            whole = next((at for at, count in enumerate(features) if count > 0), 0)
            batch = max(jagged[whole].offsets.numel() - 1, 0) // max(features[whole], 1)
        # A check would exclude batches of 1 sample from an exported program.
        if not torch.compiler.is_exporting():
            self._check_sizes(places, dense, jagged, features, batch)
        weights = []
        if any(entry.weights is not None for entry in jagged):
            weights = [
                entry.values.new_empty(0, dtype=torch.float32)
                if entry.weights is None
                else widened(entry.weights)
                for entry in jagged
            ]
        stored_places = places if isinstance(places, tuple) else tuple(places)
        if stored_places is not places and not torch.compiler.is_compiling():
            stored_places = self._same(stored_places)
        weights = [contiguous(weight) for weight in weights]
        values = [contiguous(widened(entry.values)) for entry in jagged]
        offsets = [contiguous(entry.offsets) for entry in jagged]
        return Inputs(stored_places, batch, dense, values, offsets, weights)

    def _check_sizes(
        self,
        places: Sequence[InputRef],
        dense: Sequence[Tensor],
        jagged: Sequence[Jagged],
        features: Sequence[int],
        batch: int,
    ) -> None:
        """Raise ValueError if an entry has another number of samples.

        ``features`` has the number of features of each jagged entry.
        """

        def refuse(number: int, text: str) -> NoReturn:
            use = next(use for use, place in zip(self.uses, places, strict=True) if place.input == number)
            raise ArgumentValueError(f"{self._where(use)} {text}")

        for number, tensor in enumerate(dense):
            if tensor.shape[0] != batch:
                refuse(number, f"has {tensor.shape[0]} samples, the batch has {batch}")
            if tensor.dim() == 2 and tensor.shape[1] == 0:
                refuse(number, f"is {list(tensor.shape)}; expected a value a sample or more")
        for number, (entry, count) in enumerate(zip(jagged, features, strict=True), len(dense)):
            shape = entry.offsets.shape
            if entry.values.dim() != 1:
                refuse(number, f"has values {list(entry.values.shape)}; expected [values]")
            if len(shape) != 1 or shape[0] == 0:
                refuse(number, f"has offsets {list(shape)}; expected one offset more than samples")
            if shape[0] != count * batch + 1:
                refuse(
                    number, f"has offsets {list(shape)}; expected [{count * batch + 1}] for {batch} samples"
                )
            if entry.weights is not None and entry.weights.shape != entry.values.shape:
                actual, expected = list(entry.weights.shape), list(entry.values.shape)
                refuse(number, f"has weights {actual}; expected {expected}, a weight for each value")

    def _of_keys(self, keyed: Any, others: Mapping[str, Any]) -> Inputs:
        """Return the inputs of a KeyedJaggedTensor, whose keys are slots of one input, and of ``others``."""
        if keyed.variable_stride_per_key():
            raise ArgumentValueError(
                "recfuse.nn.EmbeddingColumns: a KeyedJaggedTensor has a batch size per key; expected one "
                "batch size for all keys"
            )
        keys = keyed.keys()
        if self._keys is not None and not torch.compiler.is_compiling() and self._keys[0] == keys:
            return self._inputs(self._keys[1], [], [_whole(keyed)._replace(weights=None)], [len(keys)])
        slots = {key: number for number, key in enumerate(keys)}
        whole = _whole(keyed)
        entries: list[Tensor | Jagged | int] = []
        for use in self.uses:
            if use.feature not in slots:
                entries.append(self._entry(others, use, f"; the KeyedJaggedTensor has {keys[:8]}"))
            elif use.weights is not None:
                values = self._weighted(entry_of(unshared(keyed)[use.feature], self._where(use)), others, use)
                entries.append(values)
            else:
                if use.weighted and whole.weights is None:
                    self._fail_weights(use)
                entries.append(slots[use.feature])
        dense = [widened(entry) for entry in entries if isinstance(entry, Tensor)]
        jagged, features, places = [whole], [len(keys)], []
        n_dense = 0
        for entry in entries:
            if isinstance(entry, Tensor):
                places.append(InputRef(n_dense, 0, width_of(entry)))
                n_dense += 1
            elif isinstance(entry, Jagged):
                places.append(InputRef(len(dense) + len(jagged), 0, 0))
                jagged.append(entry)
                features.append(1)
            else:
                places.append(InputRef(len(dense), entry, 0))
        inputs = self._inputs(places, dense, jagged, features)
        if self._plain and len(jagged) == 1 and not dense and not torch.compiler.is_compiling():
            self._keys = list(keys), inputs.places
        return inputs

    def _entry(self, batch: Mapping[str, Any], use: FeatureRef, more: str = "") -> Tensor | Jagged:
        """Return the entry of a mapping that a use reads."""
        if use.feature not in batch:
            raise ArgumentValueError(f"{self._where(use)} is not in the batch{more}")
        entry = entry_of(batch[use.feature], self._where(use))
        if use.weights is None and not use.weighted:
            return entry._replace(weights=None) if isinstance(entry, Jagged) else entry
        return self._weighted(entry, batch, use)

    def _weighted(self, entry: Tensor | Jagged, batch: Mapping[str, Any], use: FeatureRef) -> Jagged:
        """Return the entry with its weights. A dense entry becomes jagged."""
        shape = entry.shape if isinstance(entry, Tensor) else None
        if isinstance(entry, Tensor):
            width = 1 if entry.dim() == 1 else entry.shape[1]
            ends = torch.arange(entry.shape[0] + 1, device=entry.device) * width
            entry = Jagged(entry.reshape(-1), ends)
        if use.weights is None:
            if entry.weights is None:
                self._fail_weights(use)
            return entry
        if use.weights not in batch:
            raise ArgumentValueError(
                f"{self._where(use)}: its weights, {use.weights!r}, are not in the batch"
            )
        prefix = f"{self._where(use)}: its weights, {use.weights!r}"
        weights = entry_of(batch[use.weights], prefix)
        if isinstance(weights, Jagged):
            _check_offsets(weights.offsets, entry.offsets, prefix)
            return entry._replace(weights=widened(weights.values))
        if weights.dim() == 2 and weights.shape != shape:
            raise ArgumentValueError(
                f"{prefix}, are {list(weights.shape)}; expected the shape of the feature's values"
            )
        return entry._replace(weights=widened(weights.reshape(-1)))

    def _where(self, use: FeatureRef) -> str:
        return f"recfuse.nn.EmbeddingColumns: feature {use.feature!r} of column {self._users[use]!r}"

    def _fail_weights(self, use: FeatureRef) -> None:
        raise ArgumentValueError(f"{self._where(use)} has no weights, but its column has weighted=True")


def _whole(keyed: Any) -> Jagged:
    return Jagged(keyed.values(), jagged_offsets(keyed), keyed.weights_or_none())


def _check_offsets(offsets: Tensor, expected: Tensor, prefix: str) -> None:
    """Raise ValueError if a sample has another number of weights than of values.

    On a GPU only sizes are compared, which needs no synchronization.
    """
    same = offsets.shape == expected.shape
    if (
        same
        and offsets is not expected
        and offsets.is_cpu
        and expected.is_cpu
        and not torch.compiler.is_compiling()
    ):
        same = torch.equal(offsets.to(torch.int64), expected.to(torch.int64))
    if not same:
        raise ArgumentValueError(f"{prefix}, have other offsets; expected the offsets of its values")
