"""`CollectionPlan`: what tuning a collection of tables found, as a small readable file.

>>> plan = recfuse.tune(collection, batches)
>>> plan.save("model.json")
>>> recfuse.Plan.load("model.json").apply(collection)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from recfuse._arguments import path_of
from recfuse.data.collection import CollectionTrace, jagged_batches, mean_lengths, trace_of
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn.packed.module import PackedModule
from recfuse.ops.schedules import ALWAYS_EMPTY, FIELDS, SIXTEENTHS, FusedSchedule, expectations
from recfuse.plan.collection_parts import (
    CallForm,
    FeatureTable,
    Occupancy,
    kernel_of,
    of_runs,
    runs,
    tables_of,
)
from recfuse.plan.file import VERSION, PlanError, read, read_file, shown, write_file
from recfuse.plan.parts import (
    Decision,
    Device,
    check_sizes,
    check_times,
    describe_device,
    differences,
)
from recfuse.plan.table import Match

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND = "fused_embedding_bag"
"""What plans of this class are for, in their files."""
_PER_FEATURE = ("schedule_of", "table_of", "expected")  # lists that are runs in the file
_MOST_WARPS = 64
# How far batches may move from those a plan was tuned on before it is worth tuning again.
_LENGTH_DRIFT = 1.5  # of a feature's mean lookups of a bag, as a factor
_WORK_DRIFT = 0.2  # of the bytes gathered, those of features that moved so far
_BAGS_DRIFT = 2.0  # of the median batch size, as a factor
_UNIQUE_DRIFT = 0.2  # of the share of different rows, relative


@dataclass(frozen=True)
class CollectionDrift:
    """Whether batches have moved away from those that a plan was tuned on."""

    moved: bool
    reasons: list[str]
    work_moved: float
    """Share of the bytes gathered that belongs to features whose bags are not as long as they were."""
    before: CollectionTrace
    now: CollectionTrace


@dataclass
class CollectionPlan:
    """How to run a collection of tables on one device, and how that was found. ``print`` it for the story.

    Source: Pan et al., RecFlex, SC 2024 (a schedule a feature, tuned under interference).
    """

    schedules: list[str]
    """Different schedules, as text; "" is the default."""
    schedule_of: list[int]
    """[features]: the place in `schedules` of each feature's."""
    expected: list[int]
    """[features]: mean lookups of a bag times 16; -1: always empty."""
    warps: int
    """The most that an SM runs at once; 0: the default."""
    tables: list[FeatureTable]
    """Different tables."""
    table_of: list[int]
    """[features]: the place in `tables` of each feature's."""
    form: CallForm
    trace: CollectionTrace
    device: Device
    default_us: float
    """Microseconds a batch by the defaults."""
    best_us: float
    """The same by the plan, in the same run."""
    seconds: float
    """That tuning took."""
    created: str
    occupancies: list[Occupancy] = field(default_factory=list)
    """What was timed at each number of warps an SM."""
    decisions: list[Decision] = field(default_factory=list)

    @property
    def features(self) -> int:
        """Number of features."""
        return len(self.table_of)

    @property
    def speedup(self) -> float:
        """Default's time over the plan's."""
        return self.default_us / self.best_us if self.best_us else 1.0

    def rows(self) -> NDArray[np.int32]:
        """The schedule of each feature with its expected lookups, as the operator takes them: int32
        ``[features, 5]``.
        """
        own = np.array([FusedSchedule.parse(text).row() for text in self.schedules], np.int32)
        found = own.reshape(-1, FIELDS)[np.array(self.schedule_of, np.int64)]
        found[:, -1] = self.expected
        return found

    def compile_arguments(
        self, *, check: bool = True, mapped: bool = False, huge: bool = False
    ) -> tuple[Any, ...]:
        """Arguments of `_C.fused_embedding_bag_compile` for the plan's kernel, but for the architecture. No
        tables are needed: they are taken to be packed as those of a collection are. `mapped`: for calls that
        bring a mapping, which the kernel checks. `huge`: for batches of 2**30 lookups and more.

        Raises:
            ValueError: no kernel for the plan's tables.
        """
        return (*kernel_of(self), check, self.rows()[None], self.warps, False, mapped, huge)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, or leaves the one that is there as it is."""
        where = path_of(path, "recfuse.Plan.save")
        record = {"recfuse_plan": VERSION, "kind": KIND, **asdict(self)}
        record |= {name: runs(record[name]) for name in _PER_FEATURE}
        write_file(where, record)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CollectionPlan:
        """Reads a file, as :meth:`recfuse.Plan.load` does; one for a single table is refused."""
        path = path_of(path, "recfuse.Plan.load")
        return cls.of_record(read_file(path), path)

    @classmethod
    def of_record(cls, record: dict[str, Any], path: str) -> CollectionPlan:
        """The plan that the contents of a file are.

        Raises:
            ValueError: they are none; names the file and the key.
        """
        if record.get("kind") != KIND:
            found = shown(record.get("kind"))
            raise PlanError(f'recfuse.Plan: {path} is a plan for {found}, not for "{KIND}"')
        given = {name: of_runs(record[name], f"{path}: {name}") for name in _PER_FEATURE if name in record}
        plan = read(cls, record, f"{path}: ", given)
        try:
            plan._check()
        except ValueError as error:
            raise PlanError(f"recfuse.Plan: {path}: {error}") from error
        return plan

    def _check(self) -> None:
        if not self.features:
            raise ValueError("table_of is empty, must have a table for each feature")
        for name, values in (("schedule_of", self.schedule_of), ("expected", self.expected)):
            if len(values) != self.features:
                raise ValueError(f"{name} has {len(values)} features, table_of has {self.features}")
        for name, places, what, known in (
            ("schedule_of", self.schedule_of, "schedules", self.schedules),
            ("table_of", self.table_of, "tables", self.tables),
        ):
            if len(known) > self.features:
                raise ValueError(
                    f"{what} has {len(known)} items, must have {self.features} at most: one a feature"
                )
            if wrong := [place for place in places if not 0 <= place < len(known)]:
                raise ValueError(f"{name} has {wrong[0]}, must be below {len(known)}")
        if wrong := [value for value in self.expected if value < ALWAYS_EMPTY or value >= 2**31]:
            raise ValueError(f"expected has {wrong[0]}, must be from -1 to {2**31 - 1}")
        if not 0 <= self.warps <= _MOST_WARPS:
            raise ValueError(f"warps is {self.warps}, must be from 0 to {_MOST_WARPS}")
        check_times(self.default_us, self.best_us)
        own = [(f"tables[{at}]", one.rows, one.dim, one.dtype) for at, one in enumerate(self.tables)]
        check_sizes(own[place] for place in self.table_of)
        for number, text in enumerate(self.schedules):
            try:
                FusedSchedule.parse(text)
            except ValueError as error:
                raise ValueError(f"schedules[{number}]: {error}") from error

    def apply(self, collection: torch.nn.Module) -> None:
        """Makes a collection run by this plan. Warns where it was made for other rows or another device.

        Args:
            collection: a :class:`recfuse.nn.FusedEmbeddingBagCollection` or ``FusedEmbeddingBagList``; its
                ``plan`` is set. On the CPU a plan changes nothing.

        Raises:
            TypeError: another module. ValueError: other features than the plan has schedules for.
        """
        packed = packed_of(collection, "recfuse.Plan.apply")
        now = tables_of(packed)
        self._check_features(packed, "recfuse.Plan.apply")
        for number, (place, table) in enumerate(zip(self.table_of, now, strict=True)):
            before = self.tables[place]
            if (before.dim, before.dtype) != (table.dim, table.dtype):
                raise ArgumentValueError(
                    f"recfuse.Plan.apply: feature {number} was of dim {before.dim} in {before.dtype}, is of "
                    f"dim {table.dim} in {table.dtype}; tune again"
                )
        if not (match := self.matches(collection)):
            warnings.warn(f"recfuse.Plan: made for something else: {'; '.join(match.reasons)}", stacklevel=2)
        packed.set_plan(torch.from_numpy(self.rows()), self.warps)
        collection.plan = self

    def _check_features(self, packed: PackedModule, function: str) -> None:
        count = len(packed.layout.dims)
        if count != self.features:
            raise ArgumentValueError(
                f"{function}: the plan has {self.features} features, the collection has {count}; tune again"
            )

    def matches(self, collection: torch.nn.Module) -> Match:
        """Whether the plan was made for tables like this collection's, on a device like its one."""
        packed = packed_of(collection, "recfuse.Plan.matches")
        now = tables_of(packed)
        here = describe_device(packed.packed_weights()[0].device)
        if len(now) != self.features:
            reasons = [f"features was {self.features}, is {len(now)}"]
        else:
            pairs = zip((self.tables[place] for place in self.table_of), now, strict=True)
            changed = [(number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]]
            reasons = []
            if changed:
                number, was, table = changed[0]
                more = f" ({len(changed)} features differ)" if len(changed) > 1 else ""
                names = [name for name in asdict(was) if getattr(was, name) != getattr(table, name)]
                reasons = [
                    f"{name} of feature {number} was {getattr(was, name)}, is {getattr(table, name)}{more}"
                    for name in names
                ]
        return Match(reasons + differences(self.device, here))

    def drift(self, batches: Iterable[Any], collection: torch.nn.Module | None = None) -> CollectionDrift:
        """Whether batches have moved enough to tune again.

        They have where features whose bags are 1.5x longer or shorter than they were gather more than 20 %
        of the bytes, where batches have twice or half the bags, or where the share of different rows is 20 %
        off.

        Args:
            batches: in the form that :func:`recfuse.tune` takes for ``collection``; without it tuples
                ``(indices, offsets)`` or ``(indices, offsets, per_sample_weights)``, feature by feature.
            collection: the module that batches are for.

        Raises:
            ValueError, TypeError: batches of another form, or another number of features.
        """
        function, lookups_of = "recfuse.Plan.drift", None
        if collection is not None:
            packed = packed_of(collection, function)
            self._check_features(packed, function)
            lookups_of = packed._lookups_of
        given = jagged_batches(batches, self.features, None, lookups_of, function)
        tables = [self.tables[place] for place in self.table_of]
        before, now = self.trace, trace_of(given, tables)
        was = np.maximum(np.array(self.expected), 0)
        is_now = np.maximum(expectations(mean_lengths(given, self.features)), 0)
        work = np.maximum(was, is_now) * np.array([table.row_bytes for table in tables], np.float64)
        factor = (np.maximum(was, is_now) + 1) / (np.minimum(was, is_now) + 1)
        share = float(work[factor > _LENGTH_DRIFT].sum() / work.sum()) if work.any() else 0.0
        reasons = []
        if share > _WORK_DRIFT:
            moved = int((factor > _LENGTH_DRIFT).sum())
            reasons.append(
                f"bags of {moved} features, with {share:.1%} of the bytes gathered, are more than "
                f"{_LENGTH_DRIFT:g}x longer or shorter than they were"
            )
        fewest, most = sorted((before.bags, now.bags))
        if most >= _BAGS_DRIFT * fewest and most > 0:
            reasons.append(f"a batch had {before.bags:,.0f} bags a feature, has {now.bags:,.0f}")
        if abs(now.unique_share - before.unique_share) > _UNIQUE_DRIFT * before.unique_share:
            reasons.append(
                f"{before.unique_share:.1%} of the bytes of a batch were of different rows, "
                f"{now.unique_share:.1%} are"
            )
        return CollectionDrift(bool(reasons), reasons, share, before, now)

    @property
    def pooling(self) -> float:
        """Mean lookups of a bag, over all features."""
        return float(np.maximum(np.array(self.expected), 0).mean()) / SIXTEENTHS

    def report(self) -> str:
        """All of it as text: the result, what it was measured on, and every decision in order."""
        from recfuse.plan.collection_views import report

        return report(self)

    def __str__(self) -> str:
        """The report."""
        return self.report()

    def plot(self) -> Figure:
        """Chosen schedules of each class of features, and times by occupancy; needs matplotlib (the extra
        `bench`).
        """
        from recfuse.plan.collection_views import plot

        return plot(self)


def packed_of(collection: Any, function: str) -> PackedModule:
    """The collection; TypeError for another module."""
    if not isinstance(collection, PackedModule):
        raise ArgumentTypeError(
            f"{function}: module is a {type(collection).__name__}, must be a "
            "recfuse.nn.FusedEmbeddingBagCollection or FusedEmbeddingBagList"
        )
    return collection
