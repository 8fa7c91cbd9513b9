"""`CollectionPlan`: the result of tuning a collection of tables, as a small readable file.

>>> plan = recfuse.tune(collection, batches)
>>> plan.save("model.json")
>>> recfuse.Plan.load("model.json").apply(collection)
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from recfuse import _C
from recfuse._arguments import path_of
from recfuse.data.collection import CollectionTrace, jagged_batches, mean_lengths, trace_of
from recfuse.errors import ArgumentValueError
from recfuse.nn.collection_view import CollectionView, native_call_of, view_of
from recfuse.ops.schedules import ALWAYS_EMPTY, EXPECTED, FIELDS, SIXTEENTHS, FusedSchedule, expectations
from recfuse.plan import figures
from recfuse.plan.base import BasePlan, Match, check_sizes, unique_drift
from recfuse.plan.device import describe_device
from recfuse.plan.features import CallForm, FeatureTable, Occupancy, of_runs, runs, tables_of
from recfuse.plan.file import read_file
from recfuse.plan.report import Line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PER_FEATURE = ("schedule_of", "table_of", "expected")  # lists that the file stores as runs
_MOST_WARPS = 64
_MOST_LISTED = 40  # pairs of class and schedule that a report lists
# Limits of the difference between batches and those of the tuning; beyond them, tuning again is worthwhile.
_LENGTH_DRIFT = 1.5  # of a feature's mean pooling factor, as a factor
_WORK_DRIFT = 0.2  # share of the bytes gathered by features beyond _LENGTH_DRIFT
_BAGS_DRIFT = 2.0  # of the median batch size, as a factor


@dataclass(frozen=True)
class CollectionDrift:
    """The difference between batches and those that a plan was tuned on."""

    moved: bool
    reasons: list[str]
    work_moved: float
    """Share of the gathered bytes that belongs to features whose pooling factor has changed."""
    before: CollectionTrace
    now: CollectionTrace


@dataclass
class CollectionPlan(BasePlan):
    """Schedules of a collection of tables on one device, as :func:`recfuse.tune` found them.

    ``print`` shows each decision. A plan is a small JSON file: :meth:`save`, :meth:`load`.

    Attributes:
        schedules: the different schedules, as text; "" is the default.
        schedule_of: ``[features]``, the position in ``schedules`` of each feature's schedule.
        expected: ``[features]``, the mean pooling factor times 16; -1 if always empty.
        warps: the maximum of warps that an SM runs at once; 0 for the default.
        tables: the different tables.
        table_of: ``[features]``, the position in ``tables`` of each feature's table.
        form: the types of the calls.
        trace: statistics of the batches that the plan was tuned on.
        occupancies: times at each number of warps an SM.
        device: the device.
        default_us, best_us: microseconds a batch with the defaults and with the plan, in one run.
        seconds: the time that tuning took.
        created: when, and by which versions.
        decisions: each candidate with its time and the reason for its result.

    Example:
        >>> collection = recfuse.nn.FusedEmbeddingBagCollection([(1000, 16)], device="cuda")  # doctest: +SKIP
        >>> plan = recfuse.tune(collection, batches)  # doctest: +SKIP
        >>> plan.apply(collection)  # doctest: +SKIP

    Note:
        A plan fits one GPU and one kind of batches. The kernel of the CPU needs no tuning.

    Source: Pan et al., RecFlex, SC 2024 (a schedule a feature, tuned under interference).
    """

    KIND: ClassVar[str] = "fused_embedding_bag"

    schedules: list[str]
    schedule_of: list[int]
    expected: list[int]
    warps: int
    tables: list[FeatureTable]
    table_of: list[int]
    form: CallForm
    trace: CollectionTrace
    occupancies: list[Occupancy] = field(default_factory=list)

    @property
    def features(self) -> int:
        """The number of features."""
        return len(self.table_of)

    @property
    def pooling(self) -> float:
        """The mean pooling factor of all features."""
        return float(np.maximum(np.array(self.expected), 0).mean()) / SIXTEENTHS

    @property
    def feature_tables(self) -> list[FeatureTable]:
        """The table of each feature."""
        return [self.tables[number] for number in self.table_of]

    def rows(self) -> NDArray[np.int32]:
        """Return schedules and expected pooling factors in the form of the operator.

        Returns:
            ndarray: int32 ``[features, 5]``.
        """
        rows = np.array([FusedSchedule.parse(text).row() for text in self.schedules], np.int32)
        schedules = rows.reshape(-1, FIELDS)[np.array(self.schedule_of, np.int64)]
        schedules[:, EXPECTED] = self.expected
        return schedules

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CollectionPlan:
        """Read a plan of a collection from a file.

        Args:
            path: a file of :meth:`save`.

        Returns:
            CollectionPlan: the plan.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is a plan of one table, no plan, or has a newer version.
        """
        path = path_of(path, "recfuse.Plan.load")
        return cls.of_record(read_file(path), path)

    def _record(self) -> dict[str, Any]:
        record = super()._record()
        return record | {name: runs(record[name]) for name in _PER_FEATURE}

    @classmethod
    def _decoded(cls, record: Mapping[str, Any]) -> dict[str, Any]:
        return {name: of_runs(record[name], name) for name in _PER_FEATURE if name in record}

    def _check(self) -> None:
        if not self.features:
            raise ArgumentValueError("table_of is empty; expected a table for each feature")
        for name, values in (("schedule_of", self.schedule_of), ("expected", self.expected)):
            if len(values) != self.features:
                raise ArgumentValueError(f"{name} has {len(values)} features, table_of has {self.features}")
        for name, numbers, what, items in (
            ("schedule_of", self.schedule_of, "schedules", len(self.schedules)),
            ("table_of", self.table_of, "tables", len(self.tables)),
        ):
            if items > self.features:
                most = f"{self.features} at most, an item a feature"
                raise ArgumentValueError(f"{what} has {items} items; expected {most}")
            if wrong := [number for number in numbers if not 0 <= number < items]:
                raise ArgumentValueError(f"{name} has {wrong[0]}; expected [0, {items})")
        if wrong := [value for value in self.expected if value < ALWAYS_EMPTY or value >= 2**31]:
            raise ArgumentValueError(f"expected has {wrong[0]}; expected -1 to {2**31 - 1}")
        if not 0 <= self.warps <= _MOST_WARPS:
            raise ArgumentValueError(f"warps is {self.warps}; expected 0 to {_MOST_WARPS}")
        super()._check()
        sizes = [(f"tables[{n}]", table.rows, table.dim, table.dtype) for n, table in enumerate(self.tables)]
        check_sizes(sizes[number] for number in self.table_of)
        for number, text in enumerate(self.schedules):
            try:
                FusedSchedule.parse(text)
            except ValueError as error:
                raise ArgumentValueError(f"schedules[{number}]: {error}") from error

    def apply(self, collection: torch.nn.Module) -> None:
        """Set the schedules of a collection. Warns if rows or device differ from the plan's.

        Args:
            collection: a :class:`recfuse.nn.FusedEmbeddingBagCollection` or ``FusedEmbeddingBagList``; its
                ``plan`` is set. On the CPU a plan has no effect.

        Raises:
            TypeError: another module.
            ValueError: other features than the plan's.
        """
        view = self._view_of(collection, "recfuse.Plan.apply")
        rows = self.rows()
        for number, (before, now) in enumerate(zip(self.feature_tables, tables_of(view), strict=True)):
            if (before.dim, before.dtype) != (now.dim, now.dtype):
                raise ArgumentValueError(
                    f"recfuse.Plan.apply: feature {number} was of dim {before.dim} in {before.dtype}, is of "
                    f"dim {now.dim} in {now.dtype}. Tune again."
                )
        try:
            call = native_call_of([table.form for table in self.feature_tables])
            _C.fused_embedding_bag_describe(call, rows, self.warps)
        except ValueError as error:
            raise ArgumentValueError(f"recfuse.Plan.apply: the plan does not fit: {error}") from error
        self.matches(collection).warn()
        view.set_plan(self, torch.from_numpy(rows), self.warps)

    def _view_of(self, collection: torch.nn.Module, function: str) -> CollectionView:
        """Return the view of a collection; raises if it has another number of features."""
        view = view_of(collection, function)
        if view.features != self.features:
            raise ArgumentValueError(
                f"{function}: the plan has {self.features} features, the collection has {view.features}. "
                "Tune again."
            )
        return view

    def matches(self, collection: torch.nn.Module) -> Match:
        """Compare the plan's tables and device with those of a collection.

        Args:
            collection: a collection.

        Returns:
            Match: true if nothing differs; ``reasons`` lists the differences.
        """
        view = view_of(collection, "recfuse.Plan.matches")
        device = self.device.differences(describe_device(view.device))
        if view.features != self.features:
            return Match([f"features was {self.features}, is {view.features}", *device])
        pairs = zip(self.feature_tables, tables_of(view), strict=True)
        changed = [(number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]]
        more = f" ({len(changed)} features differ)" if len(changed) > 1 else ""
        reasons = [
            f"{name} of feature {number} was {value}, is {getattr(now, name)}{more}"
            for number, before, now in changed[:1]
            for name, value in vars(before).items()
            if value != getattr(now, name)
        ]
        return Match(reasons + device)

    def drift(self, batches: Iterable[Any], collection: torch.nn.Module | None = None) -> CollectionDrift:
        """Compare batches with those that the plan was tuned on.

        Batches have moved if features whose pooling factor changed by 1.5x gather more than 20 % of the
        bytes, if batches have twice or half the bags, or if the share of different rows changed by 20 %.

        Args:
            batches: batches in the form that :func:`recfuse.tune` takes for ``collection``; without a
                collection tuples ``(indices, offsets)`` or ``(indices, offsets, per_sample_weights)``,
                feature by feature.
            collection: the module of the batches.

        Returns:
            CollectionDrift: ``moved`` is true if the difference justifies tuning again; ``reasons`` lists it.

        Raises:
            TypeError: batches of another form.
            ValueError: another number of features.
        """
        function = "recfuse.Plan.drift"
        lookups_of = None if collection is None else self._view_of(collection, function).lookups_of
        lookups = jagged_batches(batches, self.features, None, lookups_of, function)
        before, now = self.trace, trace_of(lookups, self.feature_tables)
        lengths = np.array(self.expected), expectations(mean_lengths(lookups, self.features))
        least, most = np.sort(np.maximum(lengths, 0), axis=0)
        work = most * np.array([table.row_bytes for table in self.feature_tables], np.float64)
        moved = (most + 1) / (least + 1) > _LENGTH_DRIFT
        share = float(work[moved].sum() / work.sum()) if work.any() else 0.0
        reasons = []
        if share > _WORK_DRIFT:
            reasons.append(
                f"bags of {int(moved.sum())} features, with {share:.1%} of the bytes gathered, are more than "
                f"{_LENGTH_DRIFT:g}x longer or shorter than they were"
            )
        fewest_bags, most_bags = sorted((before.bags, now.bags))
        if most_bags >= _BAGS_DRIFT * fewest_bags and most_bags > 0:
            reasons.append(f"a batch had {before.bags:,.0f} bags a feature, has {now.bags:,.0f}")
        reasons += unique_drift(before.unique_share, now.unique_share, "the bytes of a batch")
        return CollectionDrift(bool(reasons), reasons, share, before, now)

    def by_class(self) -> dict[str, Counter[str]]:
        """Count the features with each schedule, for each class of tables.

        Returns:
            dict: for each class, narrow rows first, the number of features by schedule.
        """
        classes: dict[tuple[int, str], Counter[str]] = {}
        for table, schedule in zip(self.feature_tables, self.schedule_of, strict=True):
            name = table.row_bytes, f"{table.dim} {table.dtype} {table.mode}"
            classes.setdefault(name, Counter())[self.schedules[schedule]] += 1
        return {name: classes[row_bytes, name] for row_bytes, name in sorted(classes)}

    def _chosen(self) -> str:
        if self.best_us == self.default_us:
            return ""
        chosen = [text for text in self.schedules if text]
        warps = f"{self.warps} warps an SM" if self.warps else "the default warps an SM"
        return f"{len(chosen)} schedule{'s' * (len(chosen) != 1)} and the default, {warps}"

    def _summary(self) -> list[Line]:
        form, trace, tables = self.form, self.trace, self.feature_tables
        rows, columns = sum(table.rows for table in tables), sum(table.dim for table in tables)
        weighted = ", weights" if form.weighted else ""
        counts = self.by_class().items()
        chosen = [
            f"{name}: {n} x {text or 'default'}"
            for name, schedules in counts
            for text, n in schedules.most_common()
        ]
        if len(chosen) > _MOST_LISTED:
            chosen[_MOST_LISTED:] = [f"and {len(chosen) - _MOST_LISTED} more"]
        return [
            ("a batch", self._times(3)),
            ("warps an SM", f"{self.warps}" if self.warps else "the default"),
            (
                "features",
                f"{self.features:,}, {len(self.tables)} kinds of tables, {rows:,} rows, {columns:,} columns; "
                f"{form.indices} indices, {form.offsets} offsets{weighted}",
            ),
            (
                "trace",
                f"{trace.batches} batches of {trace.lookups:,.0f} lookups, {self.pooling:.1f} a bag, in "
                f"{trace.bags:,.0f} bags a feature (median); {trace.unique_share:.1%} of a batch's bytes are "
                f"of different rows; {trace.sha256}",
            ),
            *self._origin(),
            *(("chosen", line) for line in chosen),
        ]

    def plot(self) -> Figure:
        """Draw the schedules of each class of features, and times by occupancy.

        Needs matplotlib (the extra ``bench``).

        Returns:
            Figure: matplotlib's figure.
        """
        times = self.default_us, self.best_us
        return figures.of_collection(self.by_class(), self.occupancies, *times, self.warps)
