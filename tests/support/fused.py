"""Problems of the fused operators, with the results of the reference."""

from __future__ import annotations

import torch

import recfuse
from support.inputs import ragged
from support.reference import DTYPES, Feature, assert_close_to_reference, tolerance
from support.reference import fused_embedding_bag as reference

POOLING = {"sum": 0, "mean": 1, "max": 2}
MIXED_DIMS = (4, 8, 16, 32, 64, 128, 1, 3, 17, 100, 0, 300)


class Problem:
    """Tables, features over them, and the two arguments that describe both to the operator."""

    def __init__(self, specs, features=None, lead=3, gap=5):
        """specs: (rows, dim, dtype) per table; features: Feature's, by default a sum per table. Tables of
        one dtype and dim are ranges of rows of one matrix, which begins `lead` elements after an
        aligned address; before each are rows of at least `gap` elements."""
        self.tables = [torch.randn(rows, dim).to(dtype) for rows, dim, dtype in specs]
        self.features = features or [Feature(number, "sum", None) for number in range(len(specs))]
        groups = list(dict.fromkeys((dim, dtype) for _, dim, dtype in specs))
        sizes = [0] * len(groups)
        self.places = []
        for table in self.tables:
            group = groups.index((table.shape[1], table.dtype))
            first = sizes[group] + -(-gap // max(table.shape[1], 1))
            self.places.append((group, first * table.shape[1], *table.shape))
            sizes[group] = first + table.shape[0]
        self.weights = [
            torch.full((lead + rows * dim,), torch.nan, dtype=dtype)[lead:].view(rows, dim)
            for rows, (dim, dtype) in zip(sizes, groups, strict=True)
        ]
        columns, self.output_dim = [], 0
        for feature in self.features:
            columns.append(self.output_dim)
            self.output_dim += self.tables[feature.table].shape[1]
        self.rows = torch.tensor(
            [
                [
                    *self.places[f.table],
                    POOLING[f.mode],
                    -1 if f.padding_idx is None else f.padding_idx,
                    column,
                ]
                for f, column in zip(self.features, columns, strict=True)
            ]
        ).view(-1, 7)
        self.put_tables()

    def put_tables(self):
        """Writes the tables' values to the matrices."""
        for (group, start, *_), table in zip(self.places, self.tables, strict=True):
            self.weights[group].view(-1)[start : start + table.numel()] = table.reshape(-1)

    def lookups(self, bags, longest=6, integer=torch.int64):
        parts = [ragged(self.tables[f.table].shape[0], bags, longest) for f in self.features]
        counts = torch.cat([offsets.diff() for _, offsets in parts])
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        return torch.cat([indices for indices, _ in parts]).to(integer), offsets.to(integer)

    def run(self, indices, offsets, per_sample_weights=None, weights=None, **options):
        weights = weights or self.weights
        return recfuse.fused_embedding_bag(
            weights, self.rows, indices, offsets, self.output_dim, per_sample_weights, **options
        )

    def expected(self, indices, offsets, factors=None, tables=None):
        tables = tables or self.tables
        bags = (offsets.numel() - 1) // len(self.features)
        if not self.output_dim or not bags:
            return torch.zeros(bags, self.output_dim, dtype=torch.float64)
        return reference(tables, self.features, indices, offsets, factors)

    def check(self, indices, offsets, factors=None):
        got = self.run(indices, offsets, factors)
        magnitude = self.expected(
            indices,
            offsets,
            None if factors is None else factors.abs(),
            [table.abs() for table in self.tables],
        )
        want = self.expected(indices, offsets, factors)
        assert_close_to_reference(got, want, tolerance(magnitude, indices.numel(), got.dtype))
        return got


def every_mode(specs):
    """Features of every pooling over the tables, some sharing a table, some with a padding row."""
    features = [
        Feature(n, ("sum", "mean", "max")[n % 3], 0 if n % 4 == 1 else None) for n in range(len(specs))
    ]
    return [*features, Feature(0, "mean", None), Feature(len(specs) // 2, "sum", 1)]


class Groups:
    """Tables as ranges of rows of matrices, with NaN rows between them, and features over the tables."""

    def __init__(self, groups, features, gap=2):
        """groups: (dtype, dim, rows of each table); features: Feature's over all tables in order."""
        self.weights, self.places, self.tables = [], [], []
        for number, (dtype, dim, sizes) in enumerate(groups):
            first, parts = gap, []
            for rows in sizes:
                self.places.append((number, first, rows, dim))
                first += rows + gap
            weight = torch.full((first, dim), torch.nan, dtype=dtype)
            for _, begin, rows, _ in self.places[-len(sizes) :] if sizes else ():
                weight[begin : begin + rows] = torch.randn(rows, dim)
                parts.append(weight[begin : begin + rows])
            self.weights.append(weight)
            self.tables += parts
        described, column, self.features = [], 0, []
        for table, mode, padding in features:
            number, first, rows, dim = self.places[table]
            padding = None if padding is None or padding >= rows else padding
            self.features.append(Feature(table, mode, padding))
            described.append(
                [number, first * dim, rows, dim, POOLING[mode], -1 if padding is None else padding, column]
            )
            column += dim
        self.rows = torch.tensor(described, dtype=torch.int64).view(-1, 7)
        self.output_dim = column

    def lookups(self, bags, longest=6, integer=torch.int64):
        parts = [ragged(self.places[f.table][2], bags, longest) for f in self.features]
        counts = torch.cat([offsets.diff() for _, offsets in parts])
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        return torch.cat([indices for indices, _ in parts]).to(integer), offsets.to(integer)

    def winners(self, indices, offsets):
        if not any(feature.mode == "max" for feature in self.features):
            return None
        return torch.ops.recfuse.fused_embedding_bag_winners(
            self.weights, self.rows, indices, offsets, self.output_dim
        )

    def dense(self, grad, indices, offsets, factors=None, dtypes=None, by_freq=False):
        winners = self.winners(indices, offsets)
        given = self.rows, indices, offsets
        return [
            torch.ops.recfuse.fused_embedding_bag_backward(
                grad, *given, number, *weight.shape, DTYPES.index(weight.dtype), factors, winners, by_freq
            )
            for number, weight in enumerate(self.weights)
        ]

    def sparse(self, grad, indices, offsets, factors=None, by_freq=False):
        winners = self.winners(indices, offsets)
        given = self.rows, indices, offsets
        return [
            torch.ops.recfuse.fused_embedding_bag_sparse_backward(
                grad, *given, number, *weight.shape, DTYPES.index(weight.dtype), factors, winners, by_freq
            )
            for number, weight in enumerate(self.weights)
        ]

    def expected(self, grad, indices, offsets, factors=None, by_freq=False):
        """Gradients of the weights and of the factors, float64."""
        tables = [table.double().requires_grad_() for table in self.tables]
        if factors is not None:
            factors = factors.double().requires_grad_()
        out = [torch.zeros(weight.shape, dtype=torch.float64) for weight in self.weights]
        if grad.numel():
            pooled = reference(tables, self.features, indices, offsets, factors)
            pooled.backward(grad.double())
        if by_freq:
            self._divide(tables, indices, offsets)
        for (number, first, rows, _), table in zip(self.places, tables, strict=True):
            if table.grad is not None:
                out[number][first : first + rows] = table.grad
        return out, None if factors is None else factors.grad

    def _divide(self, tables, indices, offsets):
        counts = [torch.zeros(table.shape[0]) for table in tables]
        bags = (offsets.numel() - 1) // len(self.features)
        for number, feature in enumerate(self.features):
            own = indices[offsets[number * bags] : offsets[(number + 1) * bags]]
            counts[feature.table] += torch.bincount(own, minlength=counts[feature.table].numel())
        for table, count in zip(tables, counts, strict=True):
            if table.grad is not None:
                table.grad /= count.clamp(min=1)[:, None]

    def check(self, grad, indices, offsets, factors=None, by_freq=False):
        want, want_factors = self.expected(grad, indices, offsets, factors, by_freq)
        size, _ = self.expected(
            grad.abs(), indices, offsets, None if factors is None else factors.abs(), by_freq
        )
        dense = self.dense(grad, indices, offsets, factors, by_freq=by_freq)
        sparse = self.sparse(grad, indices, offsets, factors, by_freq=by_freq)
        for weight, found, (rows, values), expected, magnitude in zip(
            self.weights, dense, sparse, want, size, strict=True
        ):
            eps = torch.finfo(weight.dtype).eps + torch.finfo(torch.float32).eps * (indices.numel() + 3)
            assert found.dtype == values.dtype == weight.dtype and rows.dtype == torch.int64
            least = torch.finfo(weight.dtype).smallest_normal
            assert_close_to_reference(found, expected, eps * magnitude + least)
            assert (rows.diff() > 0).all()
            scattered = torch.zeros_like(found)
            scattered[rows] = values
            assert torch.equal(scattered, found)
        if want_factors is not None:
            found = torch.ops.recfuse.fused_embedding_bag_sample_weights_backward(
                grad, self.weights, self.rows, indices, offsets
            )
            assert found.dtype == torch.float32
            assert_close_to_reference(found, want_factors, 1e-4)
        return dense
