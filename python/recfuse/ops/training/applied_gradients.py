"""``AppliedGradient``: the value of ``.grad`` of a Parameter after ``backward()`` has updated its rows.

Code of torch and of users reads ``.grad`` between ``backward()`` and ``step()``: clipping, norms, a
GradScaler, averages over processes, a second optimizer. Without a gradient it would skip the table and
compute wrong results. So ``.grad`` is a tensor without memory. It has the Parameter's shape, dtype and
device; each operator that reads or writes its values raises. Setting it to zeros sets ``.grad`` to None.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from recfuse.errors import ArgumentValueError

_aten = torch.ops.aten
_ZERO = (_aten.zero_.default, _aten._foreach_zero_.default)
_MOVES = (_aten._to_copy.default, _aten.empty_like.default)


class AppliedGradient(Tensor):
    """The gradient of a Parameter whose rows ``backward()`` has updated. Its values are not stored."""

    _update: weakref.ref[Any]

    @staticmethod
    def __new__(cls, update: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
        """Create a gradient with a Parameter's shape, dtype and device; ``update`` is its Update."""
        gradient = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        gradient._update = weakref.ref(update)
        torch._C._set_throw_on_mutable_data_ptr(gradient)  # for C code such as torch.utils.dlpack.to_dlpack
        return gradient

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise, except for operators that remove a gradient or move a module."""
        options = kwargs or {}
        tensors = list(_flat((*args, *options.values())))
        first, *rest = (tensor for tensor in tensors if isinstance(tensor, AppliedGradient))
        update = first._update()
        if func in _ZERO:
            for gradient in (first, *rest):
                gradient._clear()
            for tensor in tensors:  # gradients of other Parameters in a list
                if isinstance(tensor, Tensor) and not isinstance(tensor, AppliedGradient):
                    tensor.zero_()
            return first if func is _ZERO[0] else None
        if func in _MOVES and update is not None:
            dtype, device = options.get("dtype") or first.dtype, options.get("device") or first.device
            return AppliedGradient(update, first.shape, dtype, device)
        first._refuse(str(func))

    def _clear(self) -> None:
        update = self._update()
        if update is not None and (weight := update.weight) is not None:
            update.check_finished("zero_grad()")
            weight.grad = None

    def _refuse(self, reader: str) -> NoReturn:
        update = self._update()
        owner = None if update is None else update.updater.owner
        prefix = "recfuse.optim" if owner is None else owner._prefix
        instead = "Set .grad to None" if owner is None else owner._instead
        raise ArgumentValueError(
            f"{prefix}: {reader} reads the gradient of a Parameter of shape {list(self.shape)}, which is not "
            f"stored, since backward() has updated the table's rows by it already. {instead}, if clipping, "
            "a GradScaler, norms, averages over processes, accumulation, another optimizer or another use "
            "of the Parameter than lookups by recfuse's modules needs it."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return shape, dtype and device, without values."""
        return f"AppliedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def data_ptr(self) -> int:
        """Raise an error: the gradient has no memory."""
        self._refuse("data_ptr()")

    def share_memory_(self) -> AppliedGradient:
        """Return the gradient itself, which has no memory."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise an error: the gradient has no values to save."""
        self._refuse("pickle")

    def __dlpack__(self, **_: Any) -> Any:
        """Raise an error: the gradient has no memory."""
        self._refuse("__dlpack__()")

    def numpy(self, *, force: bool = False) -> Any:
        """Raise an error: the gradient has no memory."""
        self._refuse("numpy()")

    def tolist(self) -> Any:
        """Raise an error: the gradient has no values."""
        self._refuse("tolist()")


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
