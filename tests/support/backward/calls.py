"""Calls of gradients and updates on a GPU or its replacement, and their expected results."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from support import gpu
from support.fused import POOLING, Groups
from support.reference import DTYPES, Feature, Hyper, assert_close_to_reference, updated

OPS = torch.ops.recfuse
KINDS = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam")
STATES = (0, 1, 1, 2)  # of each kind
HYPER = Hyper(weight_decay=0.01)


def numbers_of(hyper: Hyper = HYPER, step: int = 1, scale: float = 1.0, skip: float = 0.0) -> Tensor:
    numbers = [hyper.lr, hyper.weight_decay, hyper.eps, *hyper.betas, step, scale, skip]
    return torch.tensor(numbers, device=gpu.DEVICE)


def there(tensors: Any) -> Any:
    """On the GPU."""
    if isinstance(tensors, Tensor):
        return tensors.to(gpu.DEVICE, copy=True)
    return None if tensors is None else [there(one) for one in tensors]


class Call:
    """A problem's call on ``gpu.DEVICE``."""

    def __init__(
        self, problem: Groups, grad: Tensor, indices: Tensor, offsets: Tensor, factors: Tensor | None = None
    ) -> None:
        self.problem, self.given = problem, (grad, indices, offsets, factors)
        self.weights = there(problem.weights)
        self.grad, self.indices, self.offsets, self.factors = map(there, self.given)
        self.winners = None
        if any(feature.mode == "max" for feature in problem.features):
            lookups = problem.rows, self.indices, self.offsets, problem.output_dim
            self.winners = OPS.fused_embedding_bag_winners(self.weights, *lookups)

    def gradients(self, sparse: bool, by_freq: bool = False) -> list[Any]:
        """Returns sparse gradients of all weights at once, if possible."""
        if sparse and not by_freq:
            forms = [(at, *w.shape, DTYPES.index(w.dtype)) for at, w in enumerate(self.weights)]
            lists = [list(of) for of in zip(*forms, strict=True)]
            lookups = self.grad, self.problem.rows, self.indices, self.offsets
            found = OPS.fused_embedding_bag_sparse_gradients(*lookups, *lists, self.factors, self.winners)
            return list(zip(found[::2], found[1::2], strict=True))
        name = "fused_embedding_bag_sparse_backward" if sparse else "fused_embedding_bag_backward"
        given = self.grad, self.problem.rows, self.indices, self.offsets
        return [
            getattr(OPS, name)(
                *given, at, *weight.shape, DTYPES.index(weight.dtype), self.factors, self.winners, by_freq
            )
            for at, weight in enumerate(self.weights)
        ]

    def states(self, kind: int) -> list[Tensor]:
        torch.manual_seed(1)
        shapes = [w.shape[: 1 if KINDS[kind] == "RowWiseAdagrad" else 2] for w in self.weights]
        return [there(0.1 + torch.rand(shape)) for shape in shapes for _ in range(STATES[kind])]

    def update(self, kind: int, states: list[Tensor], numbers: Tensor, *rounding: Any) -> None:
        with torch.no_grad():
            OPS.fused_embedding_bag_update(
                self.grad, self.weights, states, self.problem.rows, self.indices, self.offsets, self.factors,
                self.winners, numbers, [], kind, *rounding,
            )  # fmt: skip

    def expected(self, by_freq: bool = False) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Returns for each weight the gradient, the reference of its rounding, and the lookups of each
        row; float64."""
        grad, indices, offsets, factors = self.given
        bags = grad.shape[0]
        shapes = [weight.shape for weight in self.weights]
        sums, sizes = ([torch.zeros(shape, dtype=torch.float64) for shape in shapes] for _ in range(2))
        counts = [torch.zeros(shape[0], dtype=torch.int64) for shape in shapes]
        winners = None if self.winners is None else self.winners.cpu()
        for at, (number, offset, rows, dim, pooling, padding, column) in enumerate(
            self.problem.rows.tolist()
        ):
            first, ends = (offset // dim if dim else 0), offsets[at * bags : (at + 1) * bags + 1].long()
            own = indices[ends[0] : ends[-1]].long()
            bag = torch.arange(bags).repeat_interleave(ends.diff())
            counted = (own >= 0) & (own < rows) & (own != padding)
            own, bag = own[counted] + first, bag[counted]
            values = grad[:, column : column + dim].double()
            counts[number].index_add_(0, own, torch.ones_like(own))
            if pooling == POOLING["max"]:
                won = winners[:, column : column + dim]
                place = won.clamp(min=0) + first
                values = torch.where(won >= 0, values, 0.0)
                sums[number].scatter_add_(0, place, values)
                sizes[number].scatter_add_(0, place, values.abs())
                continue
            scale = torch.ones(own.numel(), dtype=torch.float64)
            if pooling == POOLING["mean"]:
                scale = 1.0 / torch.bincount(bag, minlength=bags).clamp(min=1)[bag]
            if factors is not None:
                scale = factors[ends[0] : ends[-1]][counted].double()
            added = values[bag] * scale[:, None]
            sums[number].index_add_(0, own, added)
            sizes[number].index_add_(0, own, added.abs())
        if by_freq:
            for total, size, count in zip(sums, sizes, counts, strict=True):
                total /= count.clamp(min=1)[:, None]
                size /= count.clamp(min=1)[:, None]
        return sums, sizes, counts

    def allowed(self, weight: Tensor, size: Tensor, counts: Tensor) -> Tensor:
        """Returns the tolerance of a gradient: sequential additions, and a rounding."""
        adding = torch.finfo(torch.float32).eps * (counts[:, None] + 4)
        return (adding + torch.finfo(weight.dtype).eps) * size + torch.finfo(weight.dtype).smallest_normal

    def check_gradients(self, by_freq: bool = False, sparse: bool = True) -> None:
        sums, sizes, counts = self.expected(by_freq)
        listed = self.gradients(True, by_freq) if sparse else [None] * len(sums)
        for weight, dense, rows_and_values, total, size, count in zip(
            self.weights, self.gradients(False, by_freq), listed, sums, sizes, counts, strict=True
        ):
            assert dense.dtype == weight.dtype and dense.shape == weight.shape
            assert_close_to_reference(dense.cpu(), total, self.allowed(weight, size, count))
            if rows_and_values is None:
                continue
            rows, values = rows_and_values
            assert torch.equal(rows.cpu(), count.nonzero()[:, 0] if weight.numel() else rows.cpu())
            scattered = torch.zeros_like(dense)
            scattered[rows] = values
            torch.testing.assert_close(scattered, dense, rtol=1e-3, atol=1e-4 * (1 + float(size.sum())))

    def check_update(self, kind: int, step: int = 3) -> None:
        sums, sizes, counts = self.expected()
        states, before = self.states(kind), [weight.cpu().clone() for weight in self.weights]
        kept = [state.cpu().clone() for state in states]
        self.update(kind, states, numbers_of(step=step))
        for number, weight in enumerate(self.weights):
            mine = slice(number * STATES[kind], (number + 1) * STATES[kind])
            by_row = [state.view(weight.shape[0], -1) for state in kept[mine]]
            own = counts[number] > 0
            want, want_states = updated(KINDS[kind], before[number], by_row, sums[number], own, step, HYPER)
            found = weight.cpu()
            assert torch.equal(found[~own].nan_to_num(), before[number][~own].nan_to_num())
            if weight.numel() == 0:
                continue
            loose = 2e-6 * (counts[number][own, None] + 20) * (1 + sizes[number][own])
            rounding = torch.finfo(weight.dtype).eps * (1 + want[own].abs())
            assert_close_to_reference(found[own], want[own], loose + rounding)
            for state, old, right in zip(states[mine], by_row, want_states, strict=True):
                state = state.cpu().view(weight.shape[0], -1)
                most = loose.amax(1, keepdim=True) * (1 + sizes[number][own].amax(1, keepdim=True))
                assert_close_to_reference(state[own], right[own], most)
                assert torch.equal(state[~own], old[~own])


CHUNKS = 10


def check_random_calls(chunk: int, cases: int) -> None:
    """Few variants of kernels per chunk: sizes, sharing, poolings, padding and lookups vary."""
    draw = random.Random(chunk)
    dims = (4, 8, 16, 32, 64, 128) if chunk % 2 else (1, 3, 17, 32)
    dtype, integer = DTYPES[chunk % 3], (torch.int64, torch.int32)[chunk // 5]
    weighted, most_rows = chunk in (3, 6), (600, 2000, 5000)[chunk % 3]
    for number in range(cases):
        torch.manual_seed(1000 * chunk + number)
        sizes = [draw.choice((1, 2, 3, 9, 40)) for _ in range(draw.randint(1, 4))]
        spec = [(dtype, draw.choice(dims), (*sizes, most_rows))]
        tables = range(len(sizes))
        modes = ("sum",) if weighted else ("sum", "mean", "max") if chunk % 4 == 2 else ("sum", "mean")
        features = [
            Feature(draw.choice(tables), draw.choice(modes), draw.choice((None, None, 0)))
            for _ in range(draw.randint(1, 6))
        ]
        problem, bags = Groups(spec, features), draw.randint(1, 20)
        indices, offsets = problem.lookups(bags, draw.choice((1, 2, 12)), integer)
        if draw.random() < 0.2:
            indices.zero_()
        factors = torch.randn(indices.numel()) if weighted else None
        call = Call(problem, torch.randn(bags, problem.output_dim), indices, offsets, factors)
        call.check_gradients(sparse=number % 10 == 0)
        call.check_update(number % 4)


def features_of(tables: int, summed: bool) -> list[Feature]:
    """Every pooling; some tables are shared, some features padded."""
    if summed:
        return [Feature(table, "sum", (None, 1)[table % 2]) for table in range(tables)]
    modes = [Feature(t, ("sum", "mean", "max")[t % 3], (None, 0, 2)[t % 3]) for t in range(tables)]
    return [*modes, Feature(0, "max", 1), Feature(1, "sum", None), Feature(0, "mean", None)]


def crowded(rows: int) -> Tensor:
    """Rows of a table that end with the same nine bits: the first pass of the sort has them in one digit."""
    return torch.arange(5, rows, 512)


def drawn(size: int, most: int) -> Tensor:
    return torch.randint(most, (size,))


HOT = {  # rows with this many lookups: digits with as many entries as fit, and with more
    "any": lambda rows, size: drawn(size, rows),
    "one": lambda rows, size: torch.where(drawn(size, 10) < 4, 7, drawn(size, rows)),
    "one alone": lambda rows, size: torch.full((size,), rows - 1),
    "few": lambda rows, size: torch.where(drawn(size, 10) < 9, drawn(size, 5) * 100, drawn(size, rows)),
    "few of a digit": lambda rows, size: crowded(rows)[
        torch.where(drawn(size, 10) < 9, drawn(size, 2), drawn(size, 8))
    ],
    "many of a digit": lambda rows, size: (own := crowded(rows))[drawn(size, len(own))],
}


def check_repeated_calls(make: Any, name: str, bags: int, longest: int) -> None:
    """Makes the same call twice and compares the bits; `make`: Call, or a similar function."""
    torch.manual_seed(8)
    rows = 300_000, 4100, 3
    problem = Groups(
        [(torch.float32, 32, rows[:2]), (torch.float32, 36, rows[2:])],
        [Feature(table, ("sum", "mean")[table % 2], None) for table in range(3)],
    )
    indices, offsets = problem.lookups(bags, longest)
    ends = offsets[::bags].tolist()
    for table in range(2):
        own = slice(ends[table], ends[table + 1])
        indices[own] = HOT[name](rows[table], own.stop - own.start)
    grad, updated = torch.randn(bags, problem.output_dim), []
    for _ in range(2):
        call = make(problem, grad, indices, offsets)
        call.check_update(0)
        updated.append([weight.nan_to_num() for weight in call.weights])
    assert all(torch.equal(*pair) for pair in zip(*updated, strict=True))


BAD = {
    "negative": lambda i, o: i.__setitem__(3, -7),
    "beyond": lambda i, o: i.__setitem__(5, 2**40),
    "largest": lambda i, o: i.__setitem__(5, 2**63 - 1),
    "falling": lambda i, o: o.__setitem__(4, 10**6),
    "below": lambda i, o: o.__setitem__(4, -3),
    "last": lambda i, o: o.__setitem__(-1, 10**9),
}
