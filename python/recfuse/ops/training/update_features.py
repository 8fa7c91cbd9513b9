"""The features of some matrices of a call, for the update of these matrices."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from recfuse._codes import FEATURE
from recfuse.ops.library import implement, library, register_fake

_ops = torch.ops.recfuse
_BUFFER = FEATURE.at("buffer")
_CACHED = 256  # the most cached features; more than the collections of a model
_cache: dict[tuple[int, tuple[int, ...]], tuple[weakref.ref[Tensor], Tensor]] = {}


def matrices_only(features: Tensor, numbers: Sequence[int]) -> Tensor:
    """Return features renumbered for the matrices ``numbers``; features of other matrices have -1.

    The result is cached for the next call of the same features, which belong to a layout and never change.
    """
    key = id(features), tuple(numbers)
    cached = _cache.get(key)
    if cached is not None and cached[0]() is features:
        return cached[1]
    renumbered = _ops._features_of(features, list(numbers))
    if len(_cache) >= _CACHED:
        _cache.clear()
    _cache[key] = weakref.ref(features), renumbered
    return renumbered


def _features_of(features: Tensor, numbers: list[int]) -> Tensor:
    renumbered = features.clone()
    renumbered[:, _BUFFER] = -1
    for place, number in enumerate(numbers):
        renumbered[features[:, _BUFFER] == number, _BUFFER] = place
    return renumbered


library.define("_features_of(Tensor features, int[] numbers) -> Tensor")
implement("_features_of", _features_of, "CompositeExplicitAutograd")


@register_fake("_features_of")
def _(features: Tensor, numbers: list[int]) -> Tensor:
    return torch.empty_like(features)
