"""The tables of a sharded module: their names and facts on every rank, their rows where a rank holds them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse.distributed.sharding import Sharding
from recfuse.errors import ArgumentValueError
from recfuse.nn.packed.by_table.distributed import follow_checkpoints
from recfuse.nn.packed.store import PackedStore
from recfuse.nn.packed.table_dict import Tables
from recfuse.ops.updates import check_finished, unfinished


class ShardedTable(torch.nn.Module):
    """A table of a sharded module; its module pools it.

    Attributes:
        name, num_embeddings, embedding_dim, mode, padding_idx: those of the whole table.
        placement: the ranks that hold the table, as text.
        weight: the rows that this rank holds, a Tensor of a whole table, or a DTensor; read-only.
    """

    def __init__(self, sharding: Sharding, number: int) -> None:
        """Create table ``number`` of a sharded module."""
        super().__init__()
        spec = sharding.specs[number]
        self._sharding, self._number = sharding, number
        self.name, self.mode, self.padding_idx = spec.name, spec.mode, spec.padding_idx
        self.num_embeddings, self.embedding_dim = spec.num_embeddings, spec.embedding_dim
        self.include_last_offset = spec.include_last_offset
        self.placement = str(sharding.placed[number])

    def __getattr__(self, name: str) -> Any:
        """Return the weight, or an attribute as every module."""
        if name == "weight":
            return self._weight()
        return super().__getattr__(name)

    def _weight(self) -> Tensor | None:
        found = self._sharding.entry(self._number)
        reader = str(sys._getframe(2).f_globals.get("__name__"))
        if found is None and not reader.startswith("torch.distributed."):
            raise ArgumentValueError(
                f"recfuse.distributed: table {self.name!r} has no rows on rank {self._sharding.rank}; "
                f"expected a read on {self.placement}"
            )
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuse the weight."""
        if name == "weight":
            raise ArgumentValueError(
                f"recfuse.distributed: the weight of table {self.name!r} cannot be set, since ranks hold "
                "parts of it. Load it with load_state_dict() of the model on every rank."
            )
        super().__setattr__(name, value)

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ValueError: only the module of all tables exchanges lookups."""
        raise ArgumentValueError(
            f"recfuse.distributed: table {self.name!r} is sharded and cannot be called alone. Call its "
            "module on every rank."
        )

    def requires_grad_(self, requires_grad: bool = True) -> NoReturn:
        """Raise ValueError: tables are trained or frozen before they are sharded."""
        raise ArgumentValueError(
            f"recfuse.distributed: table {self.name!r} is sharded and cannot be trained or frozen alone. "
            "Call requires_grad_() of the table before shard()."
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Iterate over nothing; a tool that collects the Parameters of a model then names states by table."""
        follow_checkpoints()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def extra_repr(self) -> str:
        """Return the sizes and the placement."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.mode}, {self.placement}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        entry = self._sharding.entry(self._number)
        if entry is not None and prefix + "weight" not in destination:
            destination[prefix + "weight"] = entry

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        key = prefix + "weight"
        if self._sharding.loading is error_msgs:  # the holder has loaded this table
            return
        self._sharding.load(self._number, key, state_dict, strict, missing_keys, error_msgs)


class ShardedHolder(torch.nn.Module):
    """Mixin for the module that has the sharded tables and this rank's packed Parameters."""

    _store: PackedStore

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        sharding: Sharding = self._store.sharding
        if unfinished:
            check_finished(sharding.matrices(), "state_dict()")
        torch.nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        for name in self._store.layout.parameter_names:
            destination.pop(prefix + name, None)
        for number, spec in enumerate(sharding.specs):
            entry = sharding.entry(number)
            if entry is not None:
                destination[f"{prefix}{spec.name}.weight"] = entry

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        sharding: Sharding = self._store.sharding
        missing: list[str] = []
        torch.nn.Module._load_from_state_dict(
            self, state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )
        packed = {prefix + name for name in self._store.layout.parameter_names}
        missing_keys.extend(key for key in missing if key not in packed)
        if local_metadata.get("assign_to_params_buffers", False):
            error_msgs.append(
                "recfuse.distributed: assign is True for sharded tables; expected False, since their rows "
                "are a part of packed Parameters"
            )
            return
        sharding.loading = error_msgs
        for number, spec in enumerate(sharding.specs):
            key = f"{prefix}{spec.name}.weight"
            sharding.load(number, key, state_dict, strict, missing_keys, error_msgs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._store.sharding.check_move(fn)
        return super()._apply(fn, recurse)


class ShardedTables(ShardedHolder, Tables):
    """The sharded tables of a collection by name, with this rank's packed Parameters."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._store.sharding.check_move(fn)
        return torch.nn.Module._apply(self, fn, recurse)
