"""Quantised tables in every layout, and their values in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import recfuse
from recfuse._codes import MODES
from recfuse.ops import quantize_rows
from support.reference import Feature
from support.reference import fused_embedding_bag as reference

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LAYOUTS = ("planar", "before", "behind")


def nibbles(codes: Tensor) -> Tensor:
    """Codes of int4, one an element: the low half of a byte first."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def exact_values(codes: Tensor, parameters: Tensor, dim: int) -> Tensor:
    """[rows, dim] float64: scale * code + bias, exactly."""
    elements = codes if codes.shape[1] == dim else nibbles(codes)
    return parameters[:, :1].double() * elements.double() + parameters[:, 1:].double()


@dataclass
class Stored:
    """A table as the operator takes it, and its values."""

    weight: Tensor
    parameters: Tensor
    values: Tensor  # float64 [rows, dim]


def stored(weight: Tensor, kind: str, layout: str = "planar", gap: int = 0, align: int = 2) -> Stored:
    """Stores a table; parameters apart, before the codes or behind them, `gap` bytes after each row."""
    if kind in FLOATS:
        table = weight.to(FLOATS[kind])
        return Stored(table, torch.empty(0, 2, dtype=torch.float16), table.double())
    codes, parameters = quantize_rows(weight, kind)
    values = exact_values(codes, parameters, weight.shape[1])
    if layout == "planar":
        return Stored(codes, parameters, values)
    width, even = codes.shape[1], -(-codes.shape[1] // align) * align
    behind = layout == "behind"
    memory = torch.full((codes.shape[0], 4 + even + gap), 0xFF, dtype=torch.uint8)
    own = memory[:, :width] if behind else memory[:, 4 : 4 + width]
    of_rows = (memory[:, even : even + 4] if behind else memory[:, :4]).view(torch.float16)
    own.copy_(codes)
    of_rows.copy_(parameters)
    return Stored(own, of_rows, values)


class Tables:
    """Tables of any kinds, each a weight of its own, and features that look them up."""

    def __init__(self, tables: Sequence[Stored], features: Sequence[Feature] | None = None) -> None:
        """By default a sum a table."""
        self.tables = list(tables)
        self.features = list(features or (Feature(number, "sum", None) for number in range(len(tables))))
        self.dims = [self.tables[one.table].values.shape[1] for one in self.features]
        self.output_dim = sum(self.dims)
        rows, column = [], 0
        for one, dim in zip(self.features, self.dims, strict=True):
            padding = -1 if one.padding_idx is None else one.padding_idx
            count = self.tables[one.table].values.shape[0]
            rows.append([one.table, 0, count, dim, MODES.index(one.mode), padding, column])
            column += dim
        self.rows = torch.tensor(rows)

    def lookups(self, bags: int, mean: int = 5, integer: torch.dtype = torch.int64, seed: int = 1):
        """Indices and offsets of bags of any length, some empty."""
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 2 * mean + 1, (len(self.features) * bags,), generator=generator)
        indices = [
            torch.randint(0, max(count, 1), (int(length),), generator=generator)
            for number, length in enumerate(lengths)
            if (count := self.tables[self.features[number // bags].table].values.shape[0]) or not length
        ]
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        return torch.cat(indices).to(integer), offsets.to(integer)

    def run(self, indices: Tensor, offsets: Tensor, factors: Tensor | None = None, device="cpu", **options):
        """The operator."""
        on = (
            [[one.to(device) for one in list_] for list_ in self.lists()] if device != "cpu" else self.lists()
        )
        moved = [None if one is None else one.to(device) for one in (indices, offsets, factors)]
        return recfuse.ops.fused_embedding_bag_quantized(
            *on, self.rows, *moved[:2], self.output_dim, moved[2], **options
        )

    def lists(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and parameters."""
        return [one.weight for one in self.tables], [one.parameters for one in self.tables]

    def reference(self, indices: Tensor, offsets: Tensor, factors: Tensor | None = None) -> Tensor:
        """[bags, output_dim] float64."""
        values = [one.values for one in self.tables]
        return reference(values, self.features, indices.long(), offsets.long(), factors)

    def check(self, indices: Tensor, offsets: Tensor, factors: Tensor | None = None, **options) -> Tensor:
        """Runs the operator and compares: within 1e-6 of the sums of magnitudes, or an output's rounding."""
        got = self.run(indices, offsets, factors, **options)
        expected = self.reference(indices, offsets, factors)
        self.compare(got, expected, indices, offsets, factors)
        return got

    def compare(self, got, expected, indices, offsets, factors) -> None:
        """Allows the rounding of float32 sums, relative to the sums of magnitudes with their biases."""
        # The parts of a sum, codes and biases, may be much larger than the sum.
        bounds = [one.values.abs().max() if one.values.numel() else 0 for one in self.tables]
        bags = got.shape[0]
        lengths = offsets.long().diff().view(len(self.features), bags)
        most = 1.0 if factors is None or not factors.numel() else max(float(factors.abs().max()), 1.0)
        columns = []
        for number, (one, dim) in enumerate(zip(self.features, self.dims, strict=True)):
            large = 3 * float(bounds[one.table]) * lengths[number].clamp(min=1).double() * most
            columns.append(large[:, None].expand(bags, dim))
        scale = torch.cat(columns, 1)
        rounding = {torch.float32: 0, torch.float16: 1e-3, torch.bfloat16: 8e-3}[got.dtype]
        distance = (got.cpu().double() - expected).abs()
        allowed = 1e-6 * scale + rounding * expected.abs() + (6e-8 if rounding else 0)
        assert bool((distance <= allowed).all()), (
            f"{float((distance / allowed).max())} of the allowed distance"
        )


def gradient_check(
    problem: Tables,
    lookups: tuple[Tensor, Tensor],
    run: Callable[[Tensor], Tensor],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compares the gradient of per-sample weights, which `run` takes, with that of the float64 reference."""
    generator = torch.Generator().manual_seed(2)
    factors = torch.randn(lookups[0].numel(), generator=generator).to(dtype).requires_grad_()
    output = run(factors)
    grad = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
    (got,) = torch.autograd.grad(output, factors, grad)
    assert got.dtype == dtype
    values = [one.values for one in problem.tables]
    want = _exact_gradient(problem, values, lookups, factors, grad.cpu().double())
    # Codes and biases may be much larger than their sums.
    sizes = [one.abs() + 2 * one.abs().amax(1, keepdim=True) if one.numel() else one for one in values]
    allowed = 1e-6 * _exact_gradient(problem, sizes, lookups, factors, grad.cpu().double().abs())
    if dtype != torch.float32:
        allowed += torch.finfo(dtype).eps * want.abs()
    distance = (got.cpu().double() - want).abs()
    assert bool((distance <= allowed).all()), f"{float((distance - allowed).max())} too far"


def _exact_gradient(
    problem: Tables, values: list[Tensor], lookups: tuple[Tensor, Tensor], factors: Tensor, grad: Tensor
) -> Tensor:
    exact = factors.detach().cpu().double().requires_grad_()
    indices, offsets = (one.cpu().long() for one in lookups)
    output = reference(values, problem.features, indices, offsets, exact)
    return torch.autograd.grad(output, exact, grad)[0]
