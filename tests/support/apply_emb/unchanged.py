"""Everything of a model and its process that a proof may not change."""

from __future__ import annotations

import random
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def unchanged(model):
    """Inside, the model must not change in any bit: values, versions, gradients, attributes, random
    states."""
    before = _state(model)
    yield
    after = _state(model)
    for name in before:
        assert before[name] == after[name], name


def _state(model):
    found = {
        "python": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "torch": _bits(torch.get_rng_state()),
    }
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[f"{path}.{name}"] = _seen(value)
    return found


def _seen(value, depth=0):
    """A value as it can be compared: tensors with bits, version and gradient; containers with contents."""
    if isinstance(value, torch.Tensor):
        grad = None if value.grad is None else _bits(value.grad)
        return id(value), value._version, _bits(value.detach()), grad, repr(value._backward_hooks)
    if isinstance(value, (list, tuple, set)) and depth < 3:
        return id(value), [_seen(item, depth + 1) for item in value]
    if isinstance(value, dict) and depth < 3:
        return id(value), [(key, _seen(item, depth + 1)) for key, item in value.items()]
    return (type(value), value) if isinstance(value, (bool, int, float, str)) else id(value)


def _bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
