"""The contestants: from a batch's values to the concatenated columns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import recfuse
from embedding_columns import bench
from embedding_columns.models import BOUNDARIES, Batch, Jagged, Kind, Subject, rows_of
from recfuse._clock import clock
from recfuse.nn.columns import Bucketize, Column, EmbeddingColumns, Hash, Identity, Modulo, Numeric

TORCH, BAGS, BY_HAND = "torch", "torch, bags", "torch, similar columns joined"
COMPILED, TUNED, COMPILED_BY_HAND = "compiled", "compiled, max-autotune", "compiled, similar columns joined"
COLLECTION, COMPILED_COLLECTION = "collection after torch", "collection after compiled"
RECFUSE, FROM_DICT, HASHED = "recfuse", "recfuse, dict", "recfuse, XXH64"
COMPILED_RECFUSE = "recfuse, compiled"
NAMES = (
    *(TORCH, BAGS, BY_HAND, COMPILED, TUNED, COMPILED_BY_HAND, COLLECTION, COMPILED_COLLECTION),
    *(RECFUSE, FROM_DICT, HASHED, COMPILED_RECFUSE),
)
PEERS = (TORCH, BAGS, COMPILED, TUNED)
"""Those that write each column on its own, as a model's source does."""
SLOW = (TORCH, BAGS, COLLECTION)
NEED_COMPILER = (COMPILED, TUNED, COMPILED_BY_HAND, COMPILED_COLLECTION, COMPILED_RECFUSE)
TUNED_OPTIONS = {"max_autotune": True, "combo_kernels": True}

# Ablations.
WITHOUT_PRUNING, WITHOUT_FUSION = "one-hot columns as bags", "translated by torch"
ABLATIONS = (WITHOUT_PRUNING, WITHOUT_FUSION)

Run = Callable[[Batch], Tensor]
Feature = Tensor | Jagged


class Separate(torch.nn.Module):
    """Column by column, as a model's source writes them."""

    def __init__(self, subject: Subject, bags: bool = False) -> None:
        """`bags`: uses nn.EmbeddingBag's operator even for one row per sample."""
        super().__init__()
        self.tables = torch.nn.ParameterList(
            [torch.nn.Parameter(table, requires_grad=False) for table in subject.tables]
        )
        self.kinds, self.boundaries, self.bags = list(subject.columns), subject.boundaries, bags

    def rows(self, features: list[Feature]) -> list[Tensor]:
        """Returns the rows of each column's values."""
        return [
            rows_of(kind, feature[0] if isinstance(feature, tuple) else feature, self.boundaries)
            for kind, feature in zip(self.kinds, features, strict=True)
        ]

    def forward(self, features: list[Feature]) -> Tensor:
        """Returns the concatenated columns."""
        pooled = []
        for kind, table, rows, feature in zip(
            self.kinds, self.tables, self.rows(features), features, strict=True
        ):
            if kind.numeric:
                pooled.append(rows[:, None])
            elif isinstance(feature, tuple):
                pooled.append(
                    functional.embedding_bag(
                        rows, table, feature[1], mode=kind.pooling, include_last_offset=True
                    )
                )
            elif self.bags:
                pooled.append(functional.embedding_bag(rows[:, None], table, mode=kind.pooling))
            else:
                pooled.append(functional.embedding(rows, table))
        return torch.cat(pooled, dim=1)


class ByHand:
    """Columns of a kind at once: where a model's columns are alike, and somebody has put them together."""

    def __init__(self, subject: Subject) -> None:
        """Row numbers in the matrices of kinds."""
        self.subject, self.device = subject, subject.device
        self.first = [torch.arange(kind.count, device=subject.device) * kind.rows for kind in subject.kinds]

    def inputs(self, batch: Batch) -> list[Feature]:
        """Returns a tensor [size, columns] per kind, or values and offsets of all of its columns."""
        features_read: list[Feature] = []
        features = iter(batch.features)
        for kind in self.subject.kinds:
            group = [next(features) for _ in range(kind.count)]
            features_read.append(joined(group) if kind.several else torch.stack(group, dim=1))  # type: ignore[arg-type]
        return features_read

    def __call__(self, inputs: list[Feature]) -> Tensor:
        """Returns the concatenated columns."""
        parts = []
        for kind, first, table, given in zip(
            self.subject.kinds, self.first, self.subject.stacked, inputs, strict=True
        ):
            if kind.numeric:
                parts.append(given)
            elif isinstance(given, tuple):
                values, offsets = given
                size = (offsets.shape[0] - 1) // kind.count
                bags = offsets[::size].diff()
                rows = rows_of(kind, values, self.subject.boundaries)
                rows = rows + first.repeat_interleave(bags, output_size=values.shape[0])
                pooled = functional.embedding_bag(
                    rows, table, offsets, mode=kind.pooling, include_last_offset=True
                )
                parts.append(pooled.view(kind.count, size, kind.dim).transpose(0, 1).reshape(size, -1))
            else:
                rows = rows_of(kind, given, self.subject.boundaries) + first
                parts.append(functional.embedding(rows, table).flatten(1))
        return torch.cat(parts, dim=1)


def joined(features: Iterable[Any]) -> Jagged:
    """Concatenates jagged features."""
    values, ends, last = [], [], 0
    for own, offsets in features:
        values.append(own)
        ends.append(offsets[:-1] + last)
        last += own.shape[0]
    return torch.cat(values), torch.cat([*ends, ends[0].new_tensor([last])])


class Collection:
    """recfuse's collection; rows are computed by torch, column by column."""

    def __init__(self, subject: Subject) -> None:
        """Copies the tables."""
        self.subject = subject
        bags = [
            torch.nn.EmbeddingBag.from_pretrained(table.clone(), mode=kind.pooling)
            for kind, table in zip(subject.columns, subject.tables, strict=True)
        ]
        self.fused = recfuse.nn.FusedEmbeddingBagCollection.from_embedding_bags(bags)

    def offsets(self, batch: Batch) -> Tensor:
        """Returns the offsets of all columns."""
        one = torch.arange(batch.size + 1, device=self.subject.device)
        return joined(
            feature if isinstance(feature, tuple) else (feature, one) for feature in batch.features
        )[1]


def specifications(subject: Subject, hashed: bool = False, translated: bool = False) -> list[Column]:
    """Returns the columns for recfuse. `hashed`: integers by XXH64, not modulo; `translated`: values are
    rows."""

    def column(name: str, kind: Kind) -> Column:
        if kind.numeric:
            return Numeric(name)
        if translated:
            return Identity(name, kind.rows, kind.dim, pooling=kind.pooling)
        if kind.buckets:
            return Bucketize(name, BOUNDARIES, kind.dim, pooling=kind.pooling)
        if hashed:
            return Hash(name, kind.rows, kind.dim, pooling=kind.pooling)
        return Identity(name, kind.rows, kind.dim, pooling=kind.pooling, preprocess=[Modulo(kind.rows)])

    return [column(f"c{number}", kind) for number, kind in enumerate(subject.columns)]


def make_columns(subject: Subject, **how: bool) -> EmbeddingColumns:
    """Creates the module with copies of the subject's tables; cached."""
    key = f"columns {sorted(how.items())}"
    if key not in subject.kept:
        # Tables stay where contestants' are; figure host_tables moves them.
        module = EmbeddingColumns(specifications(subject, **how), device=subject.device, host_tables=None)
        with torch.no_grad():
            for name, view in module.tables.items():
                view.weight.copy_(subject.tables[int(name[1:])])
        subject.kept[key] = module.requires_grad_(False).eval()
    return subject.kept[key]


def named(features: list[Feature]) -> dict[str, Feature]:
    """Returns the features by the names of columns."""
    return {f"c{number}": feature for number, feature in enumerate(features)}


def as_bags(batch: Batch, device: torch.device) -> dict[str, Feature]:
    """Returns the same values, all jagged."""
    one = torch.arange(batch.size + 1, device=device)
    return named([given if isinstance(given, tuple) else (given, one) for given in batch.features])


@dataclass
class Form:
    """A contestant: the conversion of a batch, untimed, and the timed call."""

    prepare: Callable[[Batch], Any]
    compute: Callable[[Any], Tensor]
    options: dict[str, Any] | None = None  # of the compiler; None: not compiled


@bench.peer(TORCH, BAGS, COMPILED, TUNED)
def separate(name: str, subject: Subject) -> Form:
    """Column by column."""
    return Form(lambda batch: batch.features, Separate(subject, bags=name == BAGS), compiler_options(name))


@bench.peer(BY_HAND, COMPILED_BY_HAND)
def by_hand(name: str, subject: Subject) -> Form:
    """Alike columns at once."""
    joined = ByHand(subject)
    return Form(joined.inputs, joined, compiler_options(name))


@bench.peer(COLLECTION, COMPILED_COLLECTION)
def behind_torch(name: str, subject: Subject) -> Form:
    """Rows by torch, then recfuse's collection."""
    collection, columns = Collection(subject), Separate(subject)
    return Form(
        lambda batch: (batch.features, collection.offsets(batch)),
        lambda given: collection.fused(torch.cat(columns.rows(given[0])), given[1]),
        compiler_options(name),
    )


@bench.peer(RECFUSE, HASHED, COMPILED_RECFUSE)
def packed(name: str, subject: Subject) -> Form:
    """recfuse, of a packed batch."""
    module = make_columns(subject, hashed=name == HASHED)
    return Form(lambda batch: module.pack(named(batch.features)), module, compiler_options(name))


@bench.peer(FROM_DICT)
def from_dict(subject: Subject) -> Form:
    """recfuse, of a dict of tensors."""
    return Form(lambda batch: named(batch.features), make_columns(subject))


@bench.peer(WITHOUT_PRUNING)
def without_pruning(subject: Subject) -> Form:
    """recfuse without its fast path for columns of one value."""
    module = make_columns(subject)
    return Form(lambda batch: module.pack(as_bags(batch, subject.device)), module)


@bench.peer(WITHOUT_FUSION)
def without_fusion(subject: Subject) -> Form:
    """recfuse, where torch translates values to rows, column by column."""
    module, columns = make_columns(subject, translated=True), Separate(subject)
    return Form(lambda batch: batch.features, lambda features: module(named(translated(columns, features))))


def compiler_options(name: str) -> dict[str, Any] | None:
    """Returns the options of the compiler; None: not compiled."""
    return TUNED_OPTIONS if name == TUNED else {} if name in NEED_COMPILER else None


class Runs:
    """Contestants by name. Their inputs are converted to the best form for each, and cached."""

    def __init__(self, subject: Subject, model: torch.nn.Module | None = None) -> None:
        """`model`: the layers after the columns, with the batch's dense features."""
        self.subject, self.model = subject, model
        self.first_call: dict[str, float] = {}  # seconds of the first call, with compilation
        self._inputs: dict[tuple[str, int], Any] = {}
        self._batches: list[Batch] = []  # kept: an identity names a batch

    def make(self, name: str) -> Run:
        """Creates a contestant."""
        form, model = bench.peers[name](self.subject), self.model
        compute: Callable[[Any, Tensor], Tensor] = lambda given, dense: form.compute(given)  # noqa: E731
        if model is not None:
            compute = lambda given, dense: model(form.compute(given), dense)  # noqa: E731
        if form.options is not None:
            # Shapes that do not change are the compiler's best case.
            compute = torch.compile(compute, dynamic=False, fullgraph=True, options=form.options)

        @torch.inference_mode()
        def run(batch: Batch) -> Tensor:
            key = name, id(batch)
            if key not in self._inputs:
                self._inputs[key] = form.prepare(batch)
                self._batches.append(batch)
            if name in self.first_call:
                return compute(self._inputs[key], batch.dense)
            start = time.perf_counter()
            output = compute(self._inputs[key], batch.dense)
            clock(self.subject.device).finish()
            self.first_call[name] = time.perf_counter() - start
            return output

        return run


def translated(columns: Separate, features: list[Feature]) -> list[Feature]:
    """Returns rows instead of values, column by column."""
    return [
        (rows, feature[1]) if isinstance(feature, tuple) else rows
        for rows, feature in zip(columns.rows(features), features, strict=True)
    ]
