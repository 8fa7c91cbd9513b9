"""What a model returns for the user's own batches, before and after."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recfuse.errors import ArgumentTypeError, a_type

_EPSILONS = 64
"""How many units of the last place results may differ: sums in another order."""


def call_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch of ``check`` as the arguments of a call."""
    if (
        isinstance(batch, tuple)
        and len(batch) == 2
        and isinstance(batch[0], tuple)
        and isinstance(batch[1], dict)
    ):
        return batch
    if isinstance(batch, dict):
        return (), batch
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, Tensor):
        return (batch,), {}
    raise ArgumentTypeError(
        f"recfuse.swap: a batch of check is {a_type(batch)}, must be a tuple of the model's "
        "arguments, a dict of them by name, or a pair of both"
    )


def outputs_of(model: torch.nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
    """What a model returns for copies of a batch, with the same random numbers and buffers; flat."""
    args, kwargs = pytree.tree_map_only(Tensor, Tensor.clone, call)
    devices = list(
        {item.device for item in pytree.tree_leaves(call) if isinstance(item, Tensor) and item.is_cuda}
    )
    with torch.random.fork_rng(devices), torch.no_grad(), _same_buffers(model):
        torch.manual_seed(0)
        found = pytree.tree_leaves(model(*args, **kwargs))
        return [item.clone() if isinstance(item, Tensor) else item for item in found]


@contextlib.contextmanager
def _same_buffers(model: torch.nn.Module) -> Iterator[None]:
    """What a call does to buffers, as counters and running means do, is undone."""
    before = [
        (module, name, buffer, _version(buffer), buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, version, values in before:
            module._buffers[name] = buffer
            if _version(buffer) != version or (version is None and not torch.equal(buffer, values)):
                with torch.inference_mode(version is None):
                    buffer.copy_(values)


def _version(buffer: Tensor) -> int | None:
    """How often it was written to; an inference tensor does not count."""
    return None if buffer.is_inference() else buffer._version


def agrees(model: torch.nn.Module) -> Callable[[Any, list[Any]], bool]:
    """A function of a call and what it must return."""

    def agrees_on(call: Any, expected: list[Any]) -> bool:
        try:
            return alike(outputs_of(model, call), expected)
        except Exception:  # where the original has none
            return False

    return agrees_on


class Checked:
    """What a module returns for batches, in eval mode, to be compared with what it returns later."""

    def __init__(self, model: torch.nn.Module, batches: Iterable[Any]) -> None:
        """Runs them."""
        self.model, self.calls = model, [call_of(batch) for batch in batches]
        with _in_eval_mode(model):
            self.expected = [outputs_of(model, call) for call in self.calls]

    def agrees(self) -> bool:
        """Whether it returns the same again."""
        with _in_eval_mode(self.model):
            return all(map(agrees(self.model), self.calls, self.expected))


@contextlib.contextmanager
def _in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for module in model.modules():  # new ones have their owner's mode
            if module not in modes:
                module.training = model.training


def alike(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether results agree up to the order of their sums; NaN equals NaN."""
    return len(found) == len(expected) and all(map(_alike, found, expected))


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = b.double().nan_to_num(0, 0, 0).abs().amax() if b.numel() else 0
    near = _EPSILONS * torch.finfo(a.dtype).eps * float(scale)
    return torch.allclose(a.double(), b.double(), rtol=0, atol=near, equal_nan=True)
