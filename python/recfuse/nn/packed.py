"""Tables in packed buffers, pooled in one call, and the mixin for modules that own such tables."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse._backward import POOLING
from recfuse.errors import ArgumentValueError
from recfuse.nn import packing
from recfuse.ops import WEIGHT_DTYPES, call

_fused_embedding_bag = torch.ops.recfuse.fused_embedding_bag.default
_fused_tables = torch.ops.recfuse.fused_tables.default
_weight_of: Callable[[dict[str, Any]], Any] = operator.itemgetter("weight")

# How many tables' addresses a call without gradients looks at; the next call looks at the next ones. A
# thousand tables cost 0.1 ms to look at, which is a good part of the call.
_ADDRESSES_PER_CALL = 64

# Before 2.13 a graph that is compiled, not exported, takes is_exporting() for True too.
_KNOWS_EXPORT_IN_GRAPHS = torch.__version__ >= (2, 13)


def _exporting() -> bool:
    return torch.compiler.is_exporting() and (
        _KNOWS_EXPORT_IN_GRAPHS or not torch.compiler.is_dynamo_compiling()
    )


def why_not_fusable(tables: Sequence[torch.nn.EmbeddingBag]) -> str | None:
    """Why tables cannot be pooled in one call; None if they can."""
    for number, table in enumerate(tables):
        if table.max_norm is not None:
            return f"table {number} has max_norm, which changes rows during the call"
        if table.scale_grad_by_freq:
            return f"table {number} has scale_grad_by_freq"
        if table.mode not in POOLING:
            return f"table {number} has mode {table.mode!r}"
        if table.sparse and table.mode == "max":
            return f'table {number} has sparse gradients with mode "max"'
        if table.sparse != tables[0].sparse:
            return f"table {number} has sparse={table.sparse}, table 0 has sparse={tables[0].sparse}"
    return None


class PackedTables:
    """Tables whose weights are views into one buffer per dtype, and the call that pools them.

    The tables' Parameter objects stay the same; only where they keep their data changes. A weight that
    several tables share is packed once.
    """

    def __init__(self, tables: Sequence[torch.nn.EmbeddingBag], table_of_feature: Sequence[int]) -> None:
        """Packs ``tables``; feature f looks rows up in table ``table_of_feature[f]``."""
        self.tables = list(tables)
        self.table_of_feature = list(table_of_feature)
        self.dims = [self.tables[table].embedding_dim for table in table_of_feature]
        self.output_dim = sum(self.dims)
        self.sparse = bool(tables) and tables[0].sparse
        self.any_max = any(table.mode == "max" for table in tables)
        self._warned = False
        self.pack()

    def pack(self) -> None:
        """Brings the weights together again, wherever they are; copies nothing that is in its place."""
        self._dicts = [table._parameters for table in self.tables]
        self._expected = list(map(_weight_of, self._dicts))
        numbers: dict[int, int] = {}
        self.weights: list[Parameter] = []
        for weight in self._expected:
            if numbers.setdefault(id(weight), len(self.weights)) == len(self.weights):
                self.weights.append(weight)
        devices = {weight.device for weight in self.weights}
        self.has_kernel = all(weight.dtype in WEIGHT_DTYPES for weight in self.weights) and (
            {device.type for device in devices} == {"cpu"}
        )
        self.buffers: list[Tensor] = []
        if not self.has_kernel:
            return
        packed = packing.plan([tuple(w.shape) for w in self.weights], [w.dtype for w in self.weights])
        with torch.no_grad():
            found = packing.adopt(packed, self.weights)
            if found is None:
                found = packing.allocate(packed, torch.device("cpu"))
                for weight, view in zip(self.weights, packing.views(packed, found), strict=True):
                    view.copy_(weight.data)
                    weight.data = view
        self.buffers, self._plan = found, packed
        self.features = self._feature_tensor(packed, numbers)
        self._note_addresses()

    def _feature_tensor(self, packed: packing.Plan, numbers: dict[int, int]) -> Tensor:
        rows, column = [], 0
        for number in self.table_of_feature:
            table = self.tables[number]
            slot = packed.slots[numbers[id(self._expected[number])]]
            padding_idx = -1 if table.padding_idx is None else table.padding_idx
            rows.append([*slot, POOLING[table.mode], padding_idx, column])
            column += slot.dim
        return torch.tensor(rows, dtype=torch.int64).view(-1, 7)

    def _note_addresses(self) -> None:
        self._addresses = list(map(Tensor.data_ptr, self.weights))
        self._next_address = 0

    def in_place(self, tables: Iterable[torch.nn.Module]) -> bool:
        """Whether these are still the packed tables, and their weights still lie in the buffers."""
        if not self.has_kernel:
            return False
        if torch.compiler.is_compiling():
            return True  # the compiler guards on the module itself
        if list(tables) != self.tables or not all(
            map(operator.is_, map(_weight_of, self._dicts), self._expected)
        ):
            return self._moved()
        if torch.is_grad_enabled() or len(self.weights) <= _ADDRESSES_PER_CALL:
            in_place = list(map(Tensor.data_ptr, self.weights)) == self._addresses
        else:
            start = self._next_address
            part = slice(start, start + _ADDRESSES_PER_CALL)
            in_place = list(map(Tensor.data_ptr, self.weights[part])) == self._addresses[part]
            if in_place:  # else the next call looks at the same ones, and finds the same
                self._next_address = part.stop if part.stop < len(self.weights) else 0
        return in_place or self._moved_together() or self._moved()

    def _moved_together(self) -> bool:
        """Whether the whole storage moved, as into shared memory; then nothing is lost."""
        dtypes = [self._plan.dtypes[slot.buffer] for slot in self._plan.slots]
        if [weight.dtype for weight in self.weights] != dtypes or any(
            w.device.type != "cpu" for w in self.weights
        ):
            return False
        found = packing.adopt(self._plan, self.weights)
        if found is None:
            return False
        self.buffers = found
        self._note_addresses()
        return True

    def _moved(self) -> bool:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "recfuse: a table's weight was replaced from outside and no longer lies in the packed "
                "buffer; the "
                "tables are pooled one by one, from their own weights, until repack() is called on their "
                "module",
                stacklevel=4,
            )
        return False

    def __call__(
        self,
        tables: Iterable[torch.nn.Module],
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pools feature-major jagged lookups; see :class:`recfuse.nn.FusedEmbeddingBagCollection`.

        ``tables`` are the owner's modules now: where they are not the packed ones, they are called one by
        one.
        """
        tables = list(tables)
        if not self.in_place(tables):
            return self._one_by_one(tables, indices, offsets, per_sample_weights)
        # An exported program holds the buffers as constants, which are not trained.
        if (
            torch.is_grad_enabled()
            and not _exporting()
            and (
                any(weight.requires_grad for weight in self.weights)
                or (per_sample_weights is not None and per_sample_weights.requires_grad)
            )
        ):
            arguments = self.buffers, self.features, indices, offsets, self.output_dim, per_sample_weights
            options = self.sparse, self.any_max
            return call(_fused_tables, (self.weights, *arguments, *options), differentiable=True)
        arguments = self.buffers, self.features, indices, offsets, self.output_dim, per_sample_weights
        return call(_fused_embedding_bag, arguments, differentiable=False)

    def _one_by_one(
        self,
        tables: Sequence[torch.nn.Module],
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
    ) -> Tensor:
        count = len(self.table_of_feature)
        if (offsets.numel() - 1) % count:
            raise ArgumentValueError(
                f"recfuse.fused_embedding_bag: offsets has {offsets.numel()} elements, must have "
                f"features * bags + 1 with {count} features"
            )
        bags = (offsets.numel() - 1) // count
        bounds = offsets[::bags].tolist() if bags else [0] * (count + 1)
        pooled = []
        for feature, number in enumerate(self.table_of_feature):
            start, end = bounds[feature], bounds[feature + 1]
            own = offsets[feature * bags : (feature + 1) * bags + 1] - start
            table = tables[number]
            pooled.append(
                table(
                    indices[start:end],
                    own if getattr(table, "include_last_offset", False) else own[:-1],
                    per_sample_weights=None if per_sample_weights is None else per_sample_weights[start:end],
                )
            )
        return torch.cat(pooled, dim=1)


class PackedModule(torch.nn.Module):
    """Mixin for modules that own packed tables: keeps them packed through ``.to()``, ``load_state_dict``,
    deepcopy, pickling and ``share_memory``.
    """

    _packed: PackedTables | None = None

    def _packed_modules(self) -> Iterable[torch.nn.Module]:
        """The modules that hold the tables, in order."""
        raise NotImplementedError

    def pack(self, table_of_feature: Sequence[int]) -> None:
        """Packs the tables; ``table_of_feature`` says which one each feature uses."""
        self._packed = PackedTables(list(self._packed_modules()), table_of_feature)
        self.register_load_state_dict_post_hook(_repack_after_loading)

    def repack(self) -> None:
        """Brings the tables together again after a weight was replaced from outside.

        Needed only after ``table.weight = ...`` or ``table.weight.data = ...``; everything that
        torch.nn.Module offers does it by itself.
        """
        if self._packed is not None:
            tables = list(self._packed_modules())
            if tables == self._packed.tables:
                self._packed.pack()
            else:
                self._packed = PackedTables(tables, self._packed.table_of_feature)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        super()._apply(fn, recurse)
        self.repack()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """State without the buffers, whose contents are the weights'."""
        state = self.__dict__.copy()
        if self._packed is not None:
            state["_packed"] = self._packed.table_of_feature
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the state and packs the weights again."""
        super().__setstate__(state)
        if isinstance(self._packed, list):
            self._packed = PackedTables(list(self._packed_modules()), self._packed)


def _repack_after_loading(module: PackedModule, incompatible_keys: Any) -> None:
    module.repack()
