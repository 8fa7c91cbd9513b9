"""Records the calls of a traced step, and repeats them with real tensors of the same shapes and strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from recfuse._codes import FEATURE
from recfuse.ops.library import is_of_host
from recfuse.perf.tracing.operators import Lookups
from recfuse.perf.tracing.sparse_rows import SparseRows

aten = torch.ops.aten
_BAGS = "_embedding_bag", "_embedding_bag_forward_only", "embedding_bag"
_LOOKUPS = (
    *_BAGS, "_embedding_bag_backward", "embedding", "fused_embedding_bag", "fused_embedding",
    "_fused_embedding_rows",
)  # fmt: skip


@dataclass(frozen=True)
class Description:
    """A tensor of a recorded call.

    Attributes:
        storage: tensors of the same number share memory.
        offset: first element in its storage.
        value: the tensor itself if its elements are known.
        rows: lookups that are the rows of a sparse tensor.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    offset: int = 0
    value: Tensor | None = None
    rows: Lookups | None = None
    coalesced: bool = False

    @property
    def extent(self) -> int:
        """The number of elements from the first to the last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


@dataclass
class RecordedCall:
    """A call of an operator, with the kind and sizes of its kernels, and with descriptions of its tensors."""

    kind: str
    sizes: tuple[float, ...]
    function: Any
    args: Any
    kwargs: Any

    @property
    def name(self) -> str:
        """Name of the operator."""
        return str(self.function.overloadpacket.__name__)

    def nbytes(self) -> int:
        """Return an estimate of the bytes that the call needs: its tensors, and results of their size."""
        total = 0
        for description in self._descriptions():
            extent = (
                description.rows.count * (description.rows.dim + 2) * 3
                if description.rows is not None
                else description.extent
            )
            total += extent * description.dtype.itemsize
        table = next(self._descriptions()).extent if self.kind.startswith(("bag", "sparse_step")) else 0
        return max(2 * total - table, 0)

    def _descriptions(self) -> Iterator[Description]:
        leaves = pytree.tree_leaves((self.args, self.kwargs), is_leaf=_is_description)
        return (leaf for leaf in leaves if isinstance(leaf, Description))

    def on(self, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
        """Return the call on tensors of a device, and a call that brings its first operand into the cache.

        Floating-point tensors are random numbers from 0 to 1, which losses, logarithms and roots accept.
        """
        tensors = _Tensors(device, self._descriptions())
        args, kwargs = [*self.args], {**self.kwargs}
        names = [argument.name for argument in self.function._schema.arguments]
        for number, value in enumerate(args):
            on_host = self.function.namespace == "recfuse" and is_of_host(names[number])
            args[number] = tensors.real(value, torch.device("cpu") if on_host else device)
        kwargs = {name: tensors.real(value, device) for name, value in kwargs.items()}
        self._spread_unknown(names, args, kwargs, device)
        if self.name == "_embedding_bag_backward":
            args[3:6] = _facts_of_bags(names, args, kwargs)
        function, operand = self.function, _operand(self.kind, args)
        if self.name.startswith("_scaled_dot_product") and "backward" not in self.name:
            function, args, kwargs = torch.nn.functional.scaled_dot_product_attention, args[:3], {}
        touch = None if operand is None else (lambda: operand.add_(0))
        return lambda: function(*args, **kwargs), touch

    def _spread_unknown(
        self, names: list[str], args: list[Any], kwargs: dict[str, Any], device: torch.device
    ) -> None:
        """Set integers of lookups that were unknown: uniform rows, and bags of equal lengths."""
        if self.name not in _LOOKUPS:
            return
        of = dict(zip(names, self.args, strict=False))
        for number, (name, description) in enumerate(zip(names, self.args, strict=False)):
            if not isinstance(description, Description) or description.value is not None:
                continue
            if name == "indices":
                rows = min(_row_counts(of))
                args[number] = torch.randint(rows, description.shape, dtype=description.dtype, device=device)
            elif name == "offsets":
                count, last = of["indices"].shape[0], description.shape[0]
                bags = last - 1 if "fused" in self.name or _last_offset(of, kwargs) else last
                steps = torch.arange(last, device=device) * count // max(bags, 1)
                args[number] = steps.to(description.dtype)


def _row_counts(of: dict[str, Any]) -> list[int]:
    features = of.get("features")
    if isinstance(features, Description) and features.value is not None and features.shape[0]:
        return [int(features.value[:, FEATURE.at("rows")].min())]  # tables lie in the same weight
    if "weights" in of:
        return [weight.shape[0] for weight in of["weights"]]
    return [int(of["num_weights"]) if "num_weights" in of else of["weight"].shape[0]]


def _last_offset(of: dict[str, Any], kwargs: dict[str, Any]) -> bool:
    return bool(of.get("include_last_offset", kwargs.get("include_last_offset", False)))


def _facts_of_bags(names: list[str], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the tensors that the forward pass of bags saves for the backward pass, without pooled rows."""
    of = {**dict(zip(names, args, strict=False)), **kwargs}
    grad, indices = of["grad"], of["indices"]
    row = torch.zeros((1, grad.shape[1]), dtype=grad.dtype, device=grad.device)
    weights = of.get("per_sample_weights")
    padding = -1 if of.get("padding_idx", -1) < 0 else 0
    mode = int(of["mode"])
    outputs = aten._embedding_bag(
        row, torch.zeros_like(indices), of["offsets"], False, mode, False, weights, False, padding
    )
    return outputs[1:4]


def _operand(kind: str, args: list[Any]) -> Tensor | None:
    """Return the operand that the previous operator of a step leaves in the cache."""
    if kind.startswith(("bag", "sparse", "coalesce", "foreach", "fill", "recfuse")):
        return None
    tensors = [tensor for tensor in args if isinstance(tensor, Tensor) and tensor.is_floating_point()]
    tensors = tensors[1:] if kind.startswith("addmm") else tensors
    first = tensors[0] if tensors else None
    return first if first is not None and not first.is_sparse and first.is_contiguous() else None


class _Tensors:
    """Makes the tensors of a call; tensors of a storage share a buffer of the elements that they cover."""

    def __init__(self, device: torch.device, descriptions: Iterator[Description]) -> None:
        self._device = device
        self._ranges: dict[tuple[int, torch.dtype], tuple[int, int]] = {}
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}
        for description in descriptions:
            if description.rows is None and description.value is None:
                key, end = (description.storage, description.dtype), description.offset + description.extent
                low, high = self._ranges.get(key, (description.offset, end))
                self._ranges[key] = min(low, description.offset), max(high, end)

    def real(self, value: Any, device: torch.device) -> Any:
        """Return an argument with real tensors on a device."""
        return pytree.tree_map(lambda leaf: self._leaf(leaf, device), value, is_leaf=_is_description)

    def _leaf(self, leaf: Any, device: torch.device) -> Any:
        if isinstance(leaf, torch.device):
            return device
        if not isinstance(leaf, Description):
            return leaf
        if leaf.rows is not None:
            return self._sparse(leaf)
        if leaf.value is not None:  # numbers without dimensions stay on the host
            return (
                leaf.value.detach().clone() if not leaf.shape else leaf.value.detach().to(device, copy=True)
            )
        key = leaf.storage, leaf.dtype
        low, high = self._ranges[key]
        if key not in self._buffers:
            self._buffers[key] = _elements(high - low, leaf.dtype, self._device)
        return self._buffers[key].as_strided(leaf.shape, leaf.stride, leaf.offset - low)

    def _sparse(self, description: Description) -> Tensor:
        rows = description.rows
        assert rows is not None
        indices = rows.indices
        if indices is None:
            indices = torch.randint(rows.rows, (rows.count,))
        values = _elements(rows.count * rows.dim, description.dtype, self._device).view(rows.count, rows.dim)
        places = indices.detach().reshape(1, -1).long().to(self._device)
        tensor = torch.sparse_coo_tensor(places, values, description.shape, check_invariants=False)
        return tensor.coalesce() if description.coalesced else tensor


def _elements(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype.is_floating_point:
        return torch.rand(count, device=device).to(dtype)
    return torch.zeros(count, dtype=dtype, device=device)


def _is_description(value: Any) -> bool:
    return isinstance(value, Description)


class CallRecorder:
    """The calls of a step, one for each kind and sizes."""

    def __init__(self) -> None:
        """Create an empty record."""
        self.calls: dict[tuple[str, tuple[float, ...]], RecordedCall] = {}

    def note(
        self,
        kind: tuple[str, tuple[float, ...]],
        function: Any,
        args: Any,
        kwargs: Any,
        rows: SparseRows,
        to_fake: Callable[[Tensor], Tensor],
    ) -> None:
        """Record a call if none of its kind and sizes is recorded.

        ``to_fake`` returns the fake of a floating-point tensor, whose storage its views share.
        """
        sparse = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_sparse
        ]
        if kind in self.calls or any(rows.of(tensor) is None for tensor in sparse):
            return
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda tensor: _described(tensor, rows, to_fake), (args, kwargs)
        )
        self.calls[kind] = RecordedCall(*kind, function, args, kwargs)


def _described(tensor: Tensor, rows: SparseRows, to_fake: Callable[[Tensor], Tensor]) -> Description:
    if tensor.is_sparse:
        coalesced = rows.is_coalesced(tensor)
        of = rows.of(tensor)
        return Description(tuple(tensor.shape), (), tensor.dtype, id(tensor), rows=of, coalesced=coalesced)
    is_known = not isinstance(tensor, FakeTensor) and not (tensor.is_floating_point() and tensor.dim())
    value = tensor if is_known else None
    key = (tensor if is_known else to_fake(tensor)).untyped_storage()._cdata
    return Description(
        tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, key, int(tensor.storage_offset()), value
    )
