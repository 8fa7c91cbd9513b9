"""``PackedTables``: packed Parameters that are spoken of as tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from recfuse.errors import a_type, refuse_scripting
from recfuse.nn.packed import state_dict as state_dicts
from recfuse.nn.packed.parameters import PackedParameters
from recfuse.nn.packed.pooling import has_kernel, on_gpu
from recfuse.nn.packed.table import Tables


class PackedTables(PackedParameters):
    """Mixin for modules with packed tables: ``tables`` by name, and a ``state_dict`` that speaks of them.

    Calls, compiled and exported programs and optimizers all read and write the packed Parameters alone.
    """

    def _weights_changed(self) -> None:
        """Called when dtypes or device of the weights may have changed."""

    def __setattr__(self, name: str, value: Any) -> None:
        """As of any module; what the class computes, such as ``tables``, is not hidden behind a module."""
        if isinstance(value, torch.nn.Module) and isinstance(getattr(type(self), name, None), property):
            raise AttributeError(
                f"recfuse: {name} of {a_type(self)} cannot be set: calls would not use it. Assign "
                f"to the weights, as in {name}[key].weight = ..., or recfuse.unswap(model) first"
            )
        super().__setattr__(name, value)

    @property
    def tables(self) -> Tables:
        """The tables by name, each with ``weight`` (a view), rows, dim and mode."""
        return Tables(self)

    @property
    def has_kernel(self) -> bool:
        """Whether one call can pool all tables: on one device that has kernels for their dtypes."""
        return has_kernel(self.packed_weights())

    @property
    def on_cuda(self) -> bool:
        """Whether they are all on one CUDA device."""
        weights = self.packed_weights()
        return on_gpu(weights) and has_kernel(weights)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws new tables, in order, from a normal distribution; padding rows are zero."""
        for table in self.tables.values():
            torch.nn.init.normal_(table.weight)
            if table.padding_idx is not None:
                table.weight[table.padding_idx].fill_(0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedTables:
        super()._apply(fn, recurse)
        self._weights_changed()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state_dicts.save(self, destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        missing: list[str] = []
        unexpected: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing, unexpected, error_msgs
        )
        tables = state_dicts.load(self, state_dict, prefix, local_metadata, error_msgs)
        packed, own = {prefix + name for name in self.layout.parameter_names}, set(tables)
        missing_keys.extend(key for key in missing if key not in packed)
        unexpected_keys.extend(key for key in unexpected if key not in own)
        if strict:
            missing_keys.extend(key for key in tables if key not in state_dict)
        self._weights_changed()

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses."""
        refuse_scripting(self)
