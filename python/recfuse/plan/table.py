"""`Plan`: the result of tuning a single table, as a small readable file.

>>> plan = recfuse.tune(module, batches)
>>> plan.save("table.json")
>>> recfuse.Plan.load("table.json").apply(module)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from recfuse import _C
from recfuse._arguments import path_of
from recfuse._codes import DTYPES, INTEGER_NAMES, MODES, Integer, row_bytes
from recfuse.data.table import Hotness, batches_of, hotness
from recfuse.errors import ArgumentTypeError, ArgumentValueError, FileFormatError, a_type
from recfuse.nn import EmbeddingBag
from recfuse.nn.pinning import PinnedRows
from recfuse.ops import embedding_bag
from recfuse.ops.schedules import Schedule
from recfuse.plan import figures
from recfuse.plan.base import BasePlan, Match, check_sizes, unique_drift
from recfuse.plan.collection import CollectionPlan
from recfuse.plan.device import describe_device
from recfuse.plan.features import FeatureTable, dtype_name
from recfuse.plan.file import read_file, shown
from recfuse.plan.report import Line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Limits of the difference between batches and those of the tuning; beyond them, tuning again is worthwhile.
_COVERAGE_DRIFT = 0.1  # of the lookups that go to the hottest tenth, absolute
_SIZE_DRIFT = 2.0  # of the number of lookups, as a factor


@dataclass(frozen=True)
class Table(FeatureTable):
    """The table of a plan, and the types of its calls."""

    weighted: bool
    indices: Integer
    offsets: Integer


@dataclass(frozen=True)
class Pinned:
    """Rows to pin in L2: the most frequent rows of a trace, as many as fit."""

    rows: int
    l2_fraction: float
    sha256: str
    """Hash of the trace, as in `Hotness`."""


@dataclass(frozen=True)
class Drift:
    """The difference between batches and those that a plan was tuned on."""

    moved: bool
    reasons: list[str]
    before: Hotness
    now: Hotness


@dataclass
class Plan(BasePlan):
    """Schedule of one table on one device, as :func:`recfuse.tune` found it.

    ``print`` shows each decision. A plan is a small JSON file: :meth:`save`, :meth:`load`.

    Attributes:
        schedule: the schedule, see :func:`recfuse.embedding_bag`; "" if the defaults won.
        table: the table and the types of its calls.
        trace: statistics of the batches that the plan was tuned on.
        floor_us: microseconds to move each byte once at the speed of a copy; None if unknown.
        pinned: rows to pin in L2, or None.
        hottest: the rows of ``pinned``, if this process found them; not saved.
        device: the device.
        default_us, best_us: microseconds a batch with the defaults and with the plan, in one run.
        seconds: the time that tuning took.
        created: when, and by which versions.
        decisions: each candidate with its time and the reason for its result.

    Example:
        >>> table = recfuse.nn.EmbeddingBag(1000, 16, mode="sum")
        >>> plan = recfuse.tune(table, [torch.randint(1000, (64, 5))], budget_s=0)
        >>> plan.apply(table)
        >>> plan.table.rows, plan.schedule
        (1000, '')

    Note:
        A plan fits one device and one kind of batches. On the CPU the only field is the prefetch distance.

    Source: Jain et al., MICRO 2024, section VII.
    """

    KIND: ClassVar[str] = "embedding_bag"

    schedule: str
    table: Table
    trace: Hotness
    floor_us: float | None
    pinned: Pinned | None = None
    hottest: Any = field(default=None, repr=False, compare=False)

    @property
    def distance(self) -> int | None:
        """Prefetched rows; None for the default."""
        return Schedule.parse(self.schedule).distance

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan | CollectionPlan:
        """Read a plan from a file.

        A file has at most 16 MiB, and lists of at most 100,000 items.

        Args:
            path: a file of :meth:`save`.

        Returns:
            Plan: the plan; for a collection a :class:`recfuse.CollectionPlan`.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not a plan, or has a newer version; names the file and the key.
        """
        path = path_of(path, "recfuse.Plan.load")
        record = read_file(path)
        kind = record.get("kind")
        if kind not in (cls.KIND, CollectionPlan.KIND):
            raise FileFormatError(
                f"recfuse.Plan: {path} is a plan for {shown(kind)}, this recfuse knows "
                f'"{cls.KIND}" and "{CollectionPlan.KIND}"'
            )
        return (cls if kind == cls.KIND else CollectionPlan).of_record(record, path)

    def _record(self) -> dict[str, Any]:
        return {name: value for name, value in super()._record().items() if name != "hottest"}

    def _check(self) -> None:
        super()._check()
        check_sizes([("table", self.table.rows, self.table.dim, self.table.dtype)])
        if self.pinned is not None and not 0 < self.pinned.l2_fraction <= 1:
            raise ArgumentValueError(f"pinned.l2_fraction is {self.pinned.l2_fraction}; expected (0, 1]")
        none = torch.zeros(0, dtype=torch.int64)
        try:
            Schedule.parse(self.schedule)
            # The library checks the bounds of a schedule, also in a call with zero bags.
            embedding_bag(none, torch.zeros(1, 1), none, mode="sum", schedule=self.schedule)
        except ValueError as error:
            raise ArgumentValueError(f"schedule: {error}") from error

    def apply(self, module: torch.nn.Module, trace: Any = None) -> None:
        """Set the schedule and the pinned rows of a module. Warns if table or device differ from the plan's.

        Args:
            module: a :class:`recfuse.nn.EmbeddingBag`; its ``schedule`` and ``pinned`` are set.
            trace: indices ``[lookups]``; the most frequent rows are pinned. Needed only for a plan that pins
                rows and comes from a file, which does not contain them.

        Raises:
            TypeError: another module.
            ValueError: a missing trace; a schedule that the GPU cannot run on this table.
        """
        if not isinstance(module, EmbeddingBag):
            raise ArgumentTypeError(
                f"recfuse.Plan.apply: module is {a_type(module)}; expected a recfuse.nn.EmbeddingBag. Call "
                "recfuse.swap to convert a torch.nn.EmbeddingBag."
            )
        self._check_fit(module)
        self.matches(module).warn()
        pinned = None
        if self.pinned is not None:
            if trace is None and self.hottest is None:
                raise ArgumentValueError(
                    f"recfuse.Plan.apply: the plan pins the hottest {self.pinned.rows:,} rows, which its "
                    "file does not hold. Pass trace=, row ids as the table is read."
                )
            rows = {"rows": self.hottest} if trace is None else {"trace": trace}
            pinned = PinnedRows(module.weight, **rows, l2_fraction=self.pinned.l2_fraction)
        if module.pinned is not None:
            module.pinned.close()
        module.schedule, module.pinned = self.schedule, pinned

    def _check_fit(self, module: EmbeddingBag) -> None:
        """Raise ArgumentValueError if the schedule is for a GPU and does not fit the table."""
        weight, size = module.weight, row_bytes(module.embedding_dim, module.weight.dtype)
        if weight.dtype not in DTYPES or not size or "cuda" not in (self.device.type, weight.device.type):
            return
        codes = (
            DTYPES.index(weight.dtype),
            *map(INTEGER_NAMES.index, (self.table.indices, self.table.offsets)),
        )
        form = self.table.weighted, module.padding_idx is not None, True
        lookups, bags = round(self.trace.lookups), max(1, round(self.trace.bags))
        try:
            _C.embedding_bag_lower(
                "sm_90a", module.embedding_dim, module.embedding_dim, min(size & -size, 16), *codes,
                MODES.index(module.mode), *form, lookups, bags, self.schedule, len(weight),
            )  # fmt: skip
        except ValueError as error:
            raise ArgumentValueError(f"recfuse.Plan.apply: the plan does not fit: {error}") from error

    def matches(self, module: torch.nn.Module) -> Match:
        """Compare the plan's table and device with those of a module.

        Args:
            module: a ``torch.nn.EmbeddingBag``, also recfuse's.

        Returns:
            Match: true if nothing differs; ``reasons`` lists the differences.
        """
        bag = _bag_of(module, "recfuse.Plan.matches")
        rows, dim = bag.weight.shape
        now = {
            "rows": rows,
            "dim": dim,
            "dtype": dtype_name(bag.weight.dtype),
            "mode": bag.mode,
            "padded": bag.padding_idx is not None,
        }
        pairs = [(name, getattr(self.table, name), value) for name, value in now.items()]
        changed = [f"{name} was {before}, is {value}" for name, before, value in pairs if before != value]
        return Match(changed + self.device.differences(describe_device(bag.weight.device)))

    def drift(self, batches: Iterable[Any], module: torch.nn.EmbeddingBag | None = None) -> Drift:
        """Compare batches with those that the plan was tuned on.

        Args:
            batches: batches, in the form that :func:`recfuse.tune` takes.
            module: the table of the batches; its ``include_last_offset`` applies. Default: None, offsets
                without the last.

        Returns:
            Drift: ``moved`` is true if the difference justifies tuning again; ``reasons`` lists it.
        """
        function, last = "recfuse.Plan.drift", False
        if module is not None:
            last = _bag_of(module, function).include_last_offset
        before, now = self.trace, hotness(batches_of(batches, last, None, function))
        reasons = []
        if not 1 / _SIZE_DRIFT <= (now.lookups + 1) / (before.lookups + 1) <= _SIZE_DRIFT:
            reasons.append(f"a batch had {before.lookups:,.0f} lookups, has {now.lookups:,.0f}")
        reasons += unique_drift(before.unique_share, now.unique_share, "a batch's lookups")
        if abs(now.coverage - before.coverage) > _COVERAGE_DRIFT:
            reasons.append(
                f"the hottest tenth of a batch's rows had {before.coverage:.1%} of its lookups, has "
                f"{now.coverage:.1%}"
            )
        return Drift(bool(reasons), reasons, before, now)

    def _chosen(self) -> str:
        pinned = [] if self.pinned is None else [f"the hottest {self.pinned.rows:,} rows pinned in L2"]
        return ", ".join([*filter(None, [self.schedule]), *pinned])

    def _summary(self) -> list[Line]:
        table, trace = self.table, self.trace
        sizes = f"{table.rows:,} x {table.dim} {table.dtype}, {table.mode}"
        form = f"{table.indices} indices, {table.offsets} offsets"
        extras = ", padding" * table.padded + ", weights" * table.weighted
        pinned = "no rows"
        if self.pinned is not None:
            share = f"{self.pinned.l2_fraction:.0%} of L2"
            pinned = f"the hottest {self.pinned.rows:,} rows, at most {share}, before every call"
        times = self._times(2)
        if self.floor_us and self.best_us:
            floor_share = self.floor_us / self.best_us
            times += f"; each byte once at copy speed {self.floor_us:.2f} µs ({floor_share:.0%})"
        return [
            ("schedule", self.schedule or "the defaults"),
            ("pinned", pinned),
            ("a batch", times),
            ("table", f"{sizes}, {form}{extras}"),
            (
                "trace",
                f"{trace.batches} batches of {trace.lookups:,.0f} lookups in {trace.bags:,.0f} bags; "
                f"{trace.unique_share:.1%} of a batch's lookups are of different rows, its hottest tenth of "
                f"rows has {trace.coverage:.1%} of them; {trace.rows_in_use:,} rows in use; {trace.sha256}",
            ),
            *self._origin(),
        ]

    def plot(self) -> Figure:
        """Draw times by station and distance, and by warps. Needs matplotlib (the extra ``bench``).

        Returns:
            Figure: matplotlib's figure.
        """
        times = self.default_us, self.best_us, self.floor_us
        on_gpu = self.device.type == "cuda"
        return figures.of_table(self.decisions, Schedule.parse(self.schedule), *times, on_gpu)


def _bag_of(module: Any, function: str) -> torch.nn.EmbeddingBag:
    """Return the module; raises TypeError if it is no table."""
    if not isinstance(module, torch.nn.EmbeddingBag):
        raise ArgumentTypeError(
            f"{function}: module is {a_type(module)}; expected a recfuse.nn.EmbeddingBag or a "
            "torch.nn.EmbeddingBag, since the plan is for a single table"
        )
    return module
