"""Tables in packed buffers, pooled in one call."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse._backward import POOLING
from recfuse._fused_autograd import DTYPES, fused_dtype
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn import packing
from recfuse.nn.mapping import Mapper, Mapping
from recfuse.nn.tuning import Tuning
from recfuse.nn.watched import latest_change, watched
from recfuse.ops import HAS_CUDA_KERNELS, WEIGHT_DTYPES, call

_fused_embedding_bag = torch.ops.recfuse.fused_embedding_bag.default
_fused_tables = torch.ops.recfuse.fused_tables.default
_weight_of: Callable[[dict[str, Any]], Any] = operator.itemgetter("weight")

# How many tables' addresses a call without gradients looks at; the next call looks at the next ones. A
# thousand cost 0.1 ms to look at, several times what the rest of a call takes on a GPU's host.
_ADDRESSES_PER_CALL = 16
_CPU = torch.device("cpu")

# Before 2.13 a graph that is compiled, not exported, takes is_exporting() for True too.
_KNOWS_EXPORT_IN_GRAPHS = torch.__version__ >= (2, 13)


def _exporting() -> bool:
    return torch.compiler.is_exporting() and (
        _KNOWS_EXPORT_IN_GRAPHS or not torch.compiler.is_dynamo_compiling()
    )


class PackedTables:
    """Tables whose weights are views into one buffer per dtype, and the call that pools them.

    The tables' Parameter objects stay the same; only where they keep their data changes. A weight that
    several tables share is packed once.
    """

    def __init__(
        self,
        holder: torch.nn.Module,
        table_of_feature: Sequence[int],
        tuning: Tuning | None = None,
    ) -> None:
        """Packs the tables in ``holder``; feature f looks rows up in table ``table_of_feature[f]``."""
        self._modules = watched(holder, "_modules")
        self.tables: list[torch.nn.EmbeddingBag] = list(self._modules.values())
        self.table_of_feature = list(table_of_feature)
        self.dims = [self.tables[table].embedding_dim for table in table_of_feature]
        self.output_dim = sum(self.dims)
        self.sparse = bool(self.tables) and self.tables[0].sparse
        self.any_max = any(table.mode == "max" for table in self.tables)
        self.tuning = Tuning(len(self.dims)) if tuning is None else tuning
        self._mapper = Mapper()
        self._warned = False
        self.pack()

    def pack(self) -> None:
        """Brings the weights together again, wherever they are; copies nothing that is in its place.

        For a moment, what is copied is there twice.
        """
        self._seen = latest_change()
        self._dicts = [watched(table, "_parameters") for table in self.tables]
        self._expected = list(map(_weight_of, self._dicts))
        numbers: dict[int, int] = {}
        self.weights: list[Parameter] = []
        for weight in self._expected:
            if numbers.setdefault(id(weight), len(self.weights)) == len(self.weights):
                self.weights.append(weight)
        self.has_kernel = self._one_kernel()
        self.on_cuda = self.has_kernel and self.weights[0].is_cuda
        self._device = self.weights[0].device if self.on_cuda else None
        self._mapper.use(self._device)
        self.buffers: list[Tensor] = []
        if not self.has_kernel:
            return
        packed = packing.plan([tuple(w.shape) for w in self.weights], [w.dtype for w in self.weights])
        with torch.no_grad():
            found = packing.adopt(packed, self.weights)
            if found is None:
                found = packing.allocate(packed, self.weights[0].device)
                for weight, view in zip(self.weights, packing.views(packed, found), strict=True):
                    view.copy_(weight.data)
                    weight.data = view
        self.buffers, self._plan = found, packed
        self.features = self._feature_tensor(packed, numbers)
        dtypes = [self._expected[number].dtype for number in self.table_of_feature]
        self.tuning.fit(list(zip(self.dims, dtypes, strict=True)))
        self._note_addresses()

    def _one_kernel(self) -> bool:
        """Whether one call can pool all tables: on one device that has kernels for their dtypes."""
        devices = {weight.device for weight in self.weights}
        return (
            len(devices) == 1
            and all(weight.dtype in WEIGHT_DTYPES for weight in self.weights)
            and (devices <= {_CPU} or (HAS_CUDA_KERNELS and next(iter(devices)).type == "cuda"))
        )

    def _feature_tensor(self, packed: packing.Plan, numbers: dict[int, int]) -> Tensor:
        """int64 [features, 7], on the host wherever the tables are: it plans the work."""
        rows, column = [], 0
        for number in self.table_of_feature:
            table = self.tables[number]
            slot = packed.slots[numbers[id(self._expected[number])]]
            padding_idx = -1 if table.padding_idx is None else table.padding_idx
            rows.append([*slot, POOLING[table.mode], padding_idx, column])
            column += slot.dim
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 7)

    def _note_addresses(self) -> None:
        self._addresses = list(map(Tensor.data_ptr, self.weights))
        self._next_address = 0

    def move(self, convert: Callable[[Tensor], Tensor]) -> None:
        """Moves all weights to the device that ``convert`` moves tensors to, buffer by buffer, so that they
        are never twice there. Does nothing where it does more than that, or where weights are not in place.
        """
        if not self.has_kernel or not self._same(self._modules) or not self._all_in_place():
            return
        device = packing.destination(convert, self.buffers)
        if device is None:
            return
        with torch.no_grad():
            found = packing.allocate(self._plan, device)
            for new, old in zip(found, self.buffers, strict=True):
                new.copy_(old)
            for weight, view in zip(self.weights, packing.views(self._plan, found), strict=True):
                weight.data = view
        self.buffers = found
        self.on_cuda = device.type == "cuda"
        self._device = device if self.on_cuda else None
        self._note_addresses()

    def in_place(self, modules: dict[str, torch.nn.Module]) -> bool:
        """Whether these are still the packed tables, and their weights still lie in the buffers."""
        if not self.has_kernel:
            return False
        if torch.compiler.is_compiling():
            return True  # the compiler guards on the module itself
        if not self._same(modules):
            return self._moved()
        if torch.is_grad_enabled() or len(self.weights) <= _ADDRESSES_PER_CALL:
            in_place = self._all_in_place()
        else:
            start = self._next_address
            part = slice(start, start + _ADDRESSES_PER_CALL)
            in_place = list(map(Tensor.data_ptr, self.weights[part])) == self._addresses[part]
            if in_place:  # else the next call looks at the same ones, and finds the same
                self._next_address = part.stop if part.stop < len(self.weights) else 0
        return in_place or self._moved_together() or self._moved()

    def _same(self, modules: dict[str, torch.nn.Module]) -> bool:
        """Whether these are the tables that were packed, and their weights the very Parameters."""
        change = latest_change()
        if change is self._seen and modules is self._modules:
            return True
        if list(modules.values()) != self.tables or not all(
            map(operator.is_, map(_weight_of, self._dicts), self._expected)
        ):
            return False
        if modules is self._modules:
            self._seen = change
        return True

    def _all_in_place(self) -> bool:
        return list(map(Tensor.data_ptr, self.weights)) == self._addresses

    def _moved_together(self) -> bool:
        """Whether the whole storage moved, as into shared memory; then nothing is lost."""
        dtypes = [self._plan.dtypes[slot.buffer] for slot in self._plan.slots]
        device = self.buffers[0].device
        if [weight.dtype for weight in self.weights] != dtypes or any(
            weight.device != device for weight in self.weights
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
        modules: dict[str, torch.nn.Module],
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        mapping: Mapping | None = None,
    ) -> Tensor:
        """Pools feature-major jagged lookups; see :class:`recfuse.nn.FusedEmbeddingBagCollection`.

        ``modules`` are the owner's tables now: where they are not the packed ones, they are called one by
        one.
        """
        if mapping is not None:
            self._check(mapping, offsets)
        if not self.in_place(modules):
            return self._one_by_one(list(modules.values()), indices, offsets, per_sample_weights)
        work = self._work(offsets, mapping) if self.on_cuda else ()
        arguments = self.buffers, self.features, indices, offsets, self.output_dim, per_sample_weights
        # An exported program holds the buffers as constants, which are not trained.
        if (
            torch.is_grad_enabled()
            and not _exporting()
            and (
                any(weight.requires_grad for weight in self.weights)
                or (per_sample_weights is not None and per_sample_weights.requires_grad)
            )
        ):
            options = self.sparse, self.any_max, *work
            return call(_fused_tables, (self.weights, *arguments, *options), differentiable=True)
        if work:
            arguments = (*arguments, False, -1, "on", *work)
        return call(_fused_embedding_bag, arguments, differentiable=False)

    def _work(self, offsets: Tensor, mapping: Mapping | None) -> tuple[Tensor | None, int, Tensor | None]:
        """schedules, warps and mapping of a call on a GPU."""
        if mapping is not None:
            return mapping.schedules, mapping.warps, mapping.tensor
        tuning = self.tuning
        if tuning.schedules is None and type(offsets) is Tensor and not torch.compiler.is_compiling():
            tuning.learn(offsets)
        return tuning.schedules, tuning.warps, None

    def map(self, offsets: Any) -> Mapping:
        """See :meth:`PackedModule.map`."""
        return self._mapper.map(self.tuning, self._call(), self.features, offsets, self._device)

    def set_plan(self, schedules: Any, warps: int = 0) -> None:
        """See :meth:`PackedModule.set_plan`."""
        self.tuning.set(schedules, warps)

    @property
    def schedules(self) -> Tensor | None:
        """int32 ``[features, 6]`` on the host; None: nothing is known yet. Not in the state_dict."""
        return self.tuning.schedules

    @property
    def warps(self) -> int:
        """The most warps that an SM runs at once; 0: the default."""
        return self.tuning.warps

    def _call(self) -> tuple[Any, ...]:
        """What the C library wants to know of these tables."""
        dtypes = [buffer.dtype for buffer in self.buffers]
        buffers = [(one.data_ptr(), one.numel(), DTYPES.index(one.dtype)) for one in self.buffers]
        return buffers, self.features.numpy(), DTYPES.index(fused_dtype(dtypes)), self.output_dim

    def _check(self, mapping: Mapping, offsets: Tensor) -> None:
        if not isinstance(mapping, Mapping):
            raise ArgumentTypeError(
                f"recfuse: mapping is a {type(mapping).__name__}, must be what map(offsets) of this module "
                "gave"
            )
        bags = (offsets.numel() - 1) // max(len(self.dims), 1)
        if mapping.bags != bags or mapping.features.shape[0] != len(self.dims):
            raise ArgumentValueError(
                f"recfuse: mapping is for {mapping.features.shape[0]} features and {mapping.bags} bags, this "
                f"batch has {len(self.dims)} features and {bags} bags; make it by map(offsets) of this batch"
            )
        if (
            self.has_kernel
            and mapping.features is not self.features
            and not torch.equal(mapping.features, self.features)
        ):
            raise ArgumentValueError(
                "recfuse: mapping was made for other tables; make it by map(offsets) of this module as it is "
                "now"
            )

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
