"""TorchRec's quantised ``EmbeddingBagCollection``, with its tables pooled in one call.

Only programs with TorchRec import this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchrec.quant.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.tensor_types import UInt4Tensor

from recfuse.data.forms import of_keys
from recfuse.errors import refuse_scripting
from recfuse.nn.packed.pooling import refuse_proxy
from recfuse.nn.quantized.rows import CODES
from recfuse.nn.quantized.stored import StoredTable, pool_quantized, stored_features, stored_tensor
from recfuse.nn.quantized.tbe import memory_name, tables_of
from recfuse.nn.tuning import Tuning
from recfuse.ops import quantize_rows

_PARTS = "weight", "weight_qscale", "weight_qbias"
_LARGEST = torch.finfo(torch.float16).max


class FusedQuantEmbeddingBagCollection(EmbeddingBagCollection):
    """TorchRec's quantised ``EmbeddingBagCollection``, pooled by one call from the memory of its TBEs.

    :func:`recfuse.swap` creates it from a model's own collection by a change of class. The tables stay where
    they lie: rows of int8 and int4 codes with two halves, and rows of floats, with gaps between them. Input,
    output and ``state_dict`` stay TorchRec's. ``load_state_dict`` also takes the floats of an
    ``EmbeddingBagCollection``, and quantises them.

    The TBEs stay in ``_emb_modules`` for :func:`recfuse.unswap`, and an in-place update of their tables is
    visible to the next call. As children of the module (``register_tbes``) they have a stand-in with their
    buffers: programs that torch exports must not contain their script objects.
    """

    def take_tables(self) -> None:
        """Describe the tables of the TBEs. Requires that ``why_not_readable`` has no reason."""
        tables: list[StoredTable] = []
        lookups: list[tuple[int, StoredTable, str]] = []
        for number, (tbe, (pooling, _)) in enumerate(
            zip(self._emb_modules, self._key_to_tables, strict=True)
        ):
            tables_of_module = tables_of(tbe, number)
            mode = pooling.value.lower()
            lookups += [(len(tables) + at, tables_of_module[at], mode) for at in tbe.feature_table_map]
            tables += tables_of_module
        rows, column = stored_features(lookups)
        attributes = vars(self)
        with torch.inference_mode(False):
            attributes["_features"] = torch.tensor(rows, dtype=torch.int64, device="cpu")
            attributes["_stored"] = stored_tensor(tables)
        attributes["_tables"], attributes["_output_dim"] = tables, column
        attributes["_tuning"] = Tuning(len(rows))
        attributes["_memory_names"] = [f"_memory_{number}" for number in range(len(self._emb_modules))]
        for name, tbe in zip(self._memory_names, self._emb_modules, strict=True):
            self.register_buffer(name, getattr(tbe, memory_name(tbe)), persistent=False)
        names = [config.name for configs in self._key_to_tables.values() for config in configs]
        for name, table in zip(names, tables, strict=True):
            self.embedding_bags[name].__class__ = TableRows
            self.embedding_bags[name].take(self, table)
        if "tbes" in self._modules:
            attributes["_own_tbes"] = self._modules["tbes"]
            self._modules["tbes"] = torch.nn.ModuleList(map(_buffers_of, self._emb_modules))

    def leave_tables(self) -> None:
        """Undo ``take_tables``."""
        attributes = vars(self)
        for name in self._memory_names:
            del self._buffers[name]
            self._non_persistent_buffers_set.discard(name)
        for table in self.embedding_bags.children():
            table.leave()
        if "_own_tbes" in attributes:
            self._modules["tbes"] = attributes.pop("_own_tbes")
        for name in ("_features", "_stored", "_tables", "_output_dim", "_tuning", "_memory_names"):
            del attributes[name]

    def memories(self) -> list[Tensor]:
        """Return the memory of each TBE."""
        return [self._buffers[name] for name in self._memory_names]  # type: ignore[misc]

    @property
    def tbes(self) -> Any:
        """The TBEs of a collection that registers them."""
        registered = vars(self).get("_own_tbes")
        if registered is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'tbes'")
        return registered

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every feature.

        Args:
            features: a KeyedJaggedTensor with a key for each feature, in any order. With a batch size per
                key, or with inverse indices, it goes to TorchRec's own forward, a call for each pooling.

        Returns:
            KeyedTensor ``[batch, sum of dims]``, of the output dtype of the collection.

        Raises:
            ValueError: a key is missing. IndexError: an index outside its table; names feature and bag (on a
                GPU, by the next call, or by :func:`recfuse.check`).
        """
        refuse_proxy(features)
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            return EmbeddingBagCollection.forward(self, features)
        try:
            memories = self.memories()
            described, columns, tuning, stored = self._features, self._output_dim, self._tuning, self._stored
        except (AttributeError, KeyError):
            if isinstance(self, FusedQuantEmbeddingBagCollection):
                raise
            return EmbeddingBagCollection.forward(self, features)  # another thread has unswapped the module
        indices, offsets, weights = of_keys(features, self._feature_names)
        if self._is_weighted and weights is None:
            features.weights()  # raises TorchRec's own error
        device = memories[0].device
        if indices.device != device:  # as FBGEMM moves them
            indices, offsets = indices.to(device, non_blocking=True), offsets.to(device, non_blocking=True)
            weights = None if weights is None else weights.to(device, non_blocking=True)
        values = pool_quantized(
            memories,
            memories,
            described,
            columns,
            (indices, offsets, weights if self._is_weighted else None),
            self._output_dtype,
            tuning,
            stored,
        )
        return KeyedTensor(keys=self._embedding_names, values=values, length_per_key=self._length_per_key)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> FusedQuantEmbeddingBagCollection:
        """Move the memory, and with it the entries of the ``state_dict``, which keep their dtypes."""
        before = self.memories()
        for name in self._memory_names:
            moved = fn(self._buffers[name])  # type: ignore[arg-type]
            if moved.dtype == torch.uint8:
                self._buffers[name] = moved
        if any(now is not then for now, then in zip(self.memories(), before, strict=True)):
            self._bind()
        for child in self._modules.values():
            if child is not None and recurse:
                child._apply(fn)
        return self

    def _bind(self) -> None:
        """Make the memory the TBEs', and the entries of the ``state_dict`` views of it."""
        for memory, tbe, configs in zip(
            self.memories(), self._emb_modules, self._key_to_tables.values(), strict=True
        ):
            setattr(tbe, memory_name(tbe), memory)
            entries_of_tables = [self.embedding_bags[config.name].entries for config in configs]
            is_split = any(entries.get(_PARTS[1]) is not None for entries in entries_of_tables)
            splits = tbe.split_embedding_weights_with_scale_bias(split_scale_bias_mode=2 if is_split else 0)
            for entries, views in zip(entries_of_tables, splits, strict=True):
                for part, view in zip(_PARTS, views, strict=True):
                    if (before := entries.get(part)) is not None:
                        entries[part] = UInt4Tensor(view) if isinstance(before, UInt4Tensor) else view

    def __prepare_scriptable__(self) -> None:
        """Raise NotImplementedError for torch.jit.script."""
        refuse_scripting(self)


class TableRows(torch.nn.Module):
    """The entries of a table in the ``state_dict``, views of the memory of its collection.

    They are no buffers: a program that torch exports has the memory, and would have each table again.

    Attributes:
        entries: "weight", and of a collection with split parameters "weight_qscale" and "weight_qbias".
    """

    entries: dict[str, Tensor | None]

    def take(self, owner: FusedQuantEmbeddingBagCollection, table: StoredTable) -> None:
        """Take the buffers of TorchRec's module, whose class was changed to this class."""
        attributes = vars(self)
        attributes["_owner"], attributes["_table"] = owner, table
        attributes["entries"], attributes["_buffers"] = self._buffers, {}

    def leave(self) -> None:
        """Undo ``take``."""
        attributes = vars(self)
        attributes["_buffers"] = attributes.pop("entries")
        del attributes["_owner"], attributes["_table"]
        self.__class__ = torch.nn.Module  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Return an entry by its name."""
        entries = vars(self).get("entries", {})
        return entries[name] if name in entries else super().__getattr__(name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, entry in self.entries.items():
            if entry is not None:
                destination[prefix + name] = entry if keep_vars else entry.detach()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Copy entries into the memory, and quantise floats; entries of another format are errors."""
        entries = {prefix + name: entry for name, entry in self.entries.items() if entry is not None}
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in entries]
        weight, table = state_dict.get(f"{prefix}weight"), self._table
        is_floats = isinstance(weight, Tensor) and weight.is_floating_point()
        if is_floats and weight.shape == (table.rows, table.dim):
            if reason := self._quantise(weight):
                error_msgs.append(f"recfuse: {prefix}weight cannot be quantised: {reason}")
            return
        for key, entry in entries.items():
            value = state_dict.get(key)
            if value is None:
                missing_keys.append(key)
            elif _form(value) != _form(entry):
                error_msgs.append(
                    f"recfuse: {key} is {_form(value)}; expected {_form(entry)} for rows of {table.kind}, or "
                    f"floats of {table.dim} columns"
                )
            else:
                with torch.no_grad():
                    entry.copy_(value)

    def _quantise(self, weight: Tensor) -> str | None:
        """Write floats into the rows; returns why that is impossible, and then nothing has changed."""
        table = self._table
        try:
            with torch.no_grad():
                if table.kind in CODES and weight.numel():
                    low, high = weight.aminmax()
                    if not (low >= -_LARGEST and high <= _LARGEST):
                        quantize_rows(weight.cpu(), table.kind)  # raises an error with row and column
                table.write(self._owner.memories()[table.memory], weight)
        except (TypeError, ValueError) as error:
            return str(error)
        return None


def _form(entry: Any) -> str:
    if not isinstance(entry, Tensor):
        return type(entry).__name__
    kind = "int4" if isinstance(entry, UInt4Tensor) else str(entry.dtype).removeprefix("torch.")
    return f"{kind} {list(entry.shape)}"


def _buffers_of(tbe: torch.nn.Module) -> torch.nn.Module:
    """Return a module with the buffers of a TBE, and with nothing else."""
    holder = torch.nn.Module()
    vars(holder)["_buffers"] = tbe._buffers
    vars(holder)["_non_persistent_buffers_set"] = tbe._non_persistent_buffers_set
    return holder.train(tbe.training)
