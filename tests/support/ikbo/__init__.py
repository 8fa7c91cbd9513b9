"""Layers over users and candidates: random layers in any layout, their reference, and comparisons."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import recfuse
from support.reference import assert_close_to_reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ACTIVATIONS = {"none": lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}
STEEPEST = 1.13
"""The largest factor of an activation on an error."""


def reference(weights, inputs, maps, bias=None, activation="none"):
    """The layer in plain PyTorch, in the tensors' own dtype: [items, M, N] or [items, M]."""
    total = None
    for level, (weight, given) in enumerate(zip(weights, inputs, strict=True)):
        products = torch.einsum("mk,bkn->bmn" if given.dim() == 3 else "mk,bk->bm", weight, given)
        total = products if level == 0 else products + total[maps[level - 1].long()]
    if bias is not None:
        total = total + (bias[:, None] if total.dim() == 3 else bias)
    return ACTIVATIONS[activation](total)


def _poisoned(values: Tensor) -> Tensor:
    """The values with NaN all around, in every dimension."""
    storage = values.new_full([size + 2 for size in values.shape], torch.nan)
    view = storage[tuple(slice(1, 1 + size) for size in values.shape)]
    return view.copy_(values)


def _spread(values: Tensor) -> Tensor:
    """The values with NaN between those of the last dimension."""
    return torch.stack((values, torch.full_like(values, torch.nan)), -1)[..., 0]


def _odd(values: Tensor) -> Tensor:
    """The values at an address that is aligned to one element only."""
    storage = values.new_full((values.numel() + 1,), torch.nan)
    storage[1:] = values.reshape(-1)
    return storage[1:].view(values.shape)


def _framed(values: Tensor) -> Tensor:
    """Returns the same with gaps between rows and items, in multiples of 16 bytes."""
    storage = values.new_full([*(size + 3 for size in values.shape[:-1]), values.shape[-1] + 16], torch.nan)
    return storage[(*(slice(1, 1 + size) for size in values.shape[:-1]), slice(8, -8))].copy_(values)


LAYOUTS = {
    "plain": lambda values: values,
    "transposed": lambda values: values.mT.contiguous().mT,
    "items last": lambda values: values.movedim(0, -1).contiguous().movedim(-1, 0),
    "poisoned": _poisoned,
    "framed": _framed,
    "rows first": lambda values: values.transpose(0, 1).contiguous().transpose(0, 1),
    "spread": _spread,
    "odd": _odd,
    "expanded": lambda values: values[:1].expand_as(values) if values.shape[0] else values,
}


@dataclass(frozen=True)
class Case:
    """A layer: `items` and `features` of its levels; n is None for inputs of two dimensions."""

    m: int = 7
    n: int | None = 6
    features: tuple[int, ...] = (5, 3)
    items: tuple[int, ...] = (4, 9)
    dtype: torch.dtype = torch.float32
    map_dtype: torch.dtype = torch.int64
    weight_layout: str = "plain"
    input_layout: str = "plain"
    bias: bool = False
    activation: str = "none"
    chain: bool = False
    """Calls ikbo_linear_chain, as required for more than two levels."""


def random_case(draw: random.Random, largest: int = 20, **fixed: Any) -> Case:
    """Returns a random small case: sometimes empty, and one in eight times a chain."""
    levels = draw.choice((2, 2, 2, 3, 4))

    def size() -> int:
        return draw.choice((0, 1, 2, 8, draw.randint(1, largest), draw.randint(1, largest)))

    items = [draw.randint(1, 9) for _ in range(levels)]
    if draw.random() < 0.1:
        items[-1] = 0
    given = {
        "m": size(),
        "n": draw.choice((None, size())),
        "features": tuple(size() for _ in range(levels)),
        "items": tuple(items),
        "dtype": draw.choice(DTYPES),
        "map_dtype": draw.choice((torch.int32, torch.int64)),
        "weight_layout": draw.choice(list(LAYOUTS)),
        "input_layout": draw.choice(list(LAYOUTS)),
        "bias": draw.random() < 0.5,
        "activation": draw.choice(list(ACTIVATIONS)),
        "chain": levels > 2 or draw.random() < 0.2,
    }
    return Case(**{**given, **fixed})


NOTHING: tuple[dict[str, Any], ...] = (
    {"items": (4, 0)},
    {"items": (0, 0)},
    {"m": 0},
    {"features": (0, 3)},
    {"features": (5, 0)},
    {"features": (0, 0)},
    {"features": (0, 2, 0), "items": (2, 3, 4), "chain": True},
    {"items": (0, 0, 0), "features": (2, 2, 2), "chain": True},
    {"items": (1, 1), "m": 1, "features": (1, 1)},
)
"""The empty sizes of a case; the last is empty nowhere."""


class Problem:
    """The tensors of a case."""

    def __init__(self, case: Case, device: Any = "cpu") -> None:
        self.case = case
        weight_of, input_of = LAYOUTS[case.weight_layout], LAYOUTS[case.input_layout]
        tail = () if case.n is None else (case.n,)
        self.weights = [weight_of(self._random(case.m, k).to(device)) for k in case.features]
        self.inputs = [
            input_of(self._random(items, k, *tail).to(device))
            for items, k in zip(case.items, case.features, strict=True)
        ]
        self.maps = [
            torch.randint(0, max(parents, 1), (items,)).to(device, case.map_dtype)
            for parents, items in zip(case.items, case.items[1:], strict=False)
        ]
        self.bias = self._random(case.m).to(device) if case.bias else None

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.float64).to(self.case.dtype)

    def tensors(self) -> list[Tensor]:
        """Those that may have gradients."""
        return [*self.weights, *self.inputs, *([] if self.bias is None else [self.bias])]

    def run(self, **options: Any) -> Tensor:
        """The function."""
        given = {"bias": self.bias, "activation": self.case.activation, **options}
        if self.case.chain:
            return recfuse.ikbo_linear_chain(self.weights, self.inputs, self.maps, **given)
        return recfuse.ikbo_linear(*self.weights, *self.inputs, *self.maps, **given)

    def path(self, **options: Any) -> str:
        """Returns the path of "auto"."""
        given = {"bias": self.bias, "activation": self.case.activation, **options}
        if self.case.chain:
            return recfuse.ikbo_linear_chain_path(self.weights, self.inputs, self.maps, **given)
        return recfuse.ikbo_linear_path(*self.weights, *self.inputs, *self.maps, **given)

    def expected(self, magnitude: bool = False) -> Tensor:
        """The reference in float64 on the CPU, or that of the absolute values."""

        def read(tensor: Tensor) -> Tensor:
            wide = tensor.detach().cpu().double()
            return wide.abs() if magnitude else wide

        bias = None if self.bias is None else read(self.bias)
        maps = [one.cpu() for one in self.maps]
        activation = "none" if magnitude else self.case.activation
        return reference([*map(read, self.weights)], [*map(read, self.inputs)], maps, bias, activation)

    def allowed(self, unit: float | None = None) -> Tensor:
        """Returns the tolerance of a result: factors rounded to `unit` (TF32's, for example), sums in
        float32 or better, and one rounding of each level's products and of each level's sum."""
        case, wide = self.case, torch.float64 if self.case.dtype == torch.float64 else torch.float32
        terms = sum(case.features) + len(case.features) + 3
        rounding = (2 * len(case.features) + 1) * torch.finfo(case.dtype).eps
        summing = terms * torch.finfo(wide).eps + (0.0 if unit is None else 3 * unit)
        smallest = torch.finfo(case.dtype).smallest_normal
        return STEEPEST * ((rounding + summing) * self.expected(magnitude=True) + 4 * smallest)

    def check(self, got: Tensor, unit: float | None = None) -> None:
        """Compares with the reference."""
        assert got.dtype == self.case.dtype and got.is_contiguous()
        assert_close_to_reference(got.cpu(), self.expected(), self.allowed(unit))


def kernels_of(problem: Problem) -> list[str]:
    """Runs a problem on a GPU; returns the paths that use only this library's kernels."""
    found = []
    for path in ("small", "fused"):
        with contextlib.suppress(NotImplementedError):
            problem.run(path=path)
            found.append(path)
    return found
