"""`Plan`: what tuning one table found, as a small readable file.

>>> plan = recfuse.tune(module, batches)
>>> plan.save("table.json")
>>> recfuse.Plan.load("table.json").apply(module)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from recfuse._arguments import path_of
from recfuse.data.table import Hotness, batches_of, hotness
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.ops.schedules import Schedule
from recfuse.plan.file import VERSION, PlanError, read, read_file, shown, write_file
from recfuse.plan.parts import (
    Decision,
    Device,
    Pinned,
    Table,
    check_sizes,
    check_times,
    describe_device,
    differences,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from recfuse.plan.collection import CollectionPlan

KIND = "embedding_bag"
"""What plans of this class are for, in their files."""
# How far batches may move from those a plan was tuned on before it is worth tuning again.
_UNIQUE_DRIFT = 0.2  # of the share of different rows, relative
_COVERAGE_DRIFT = 0.1  # of the lookups that go to the hottest tenth, absolute
_SIZE_DRIFT = 2.0  # of the number of lookups, as a factor


@dataclass(frozen=True)
class Match:
    """Whether a plan was made for a module; true if so."""

    reasons: list[str]
    """What differs."""

    def __bool__(self) -> bool:
        """Nothing differs."""
        return not self.reasons


@dataclass(frozen=True)
class Drift:
    """Whether batches have moved away from those that a plan was tuned on."""

    moved: bool
    reasons: list[str]
    before: Hotness
    now: Hotness


@dataclass
class Plan:
    """How to run one table on one device, and how that was found. ``print`` it for the whole story."""

    schedule: str
    """See :func:`recfuse.embedding_bag`; "" where the defaults won."""
    table: Table
    trace: Hotness
    device: Device
    default_us: float
    """Microseconds a batch by the defaults."""
    best_us: float
    """The same by the plan, in the same run."""
    floor_us: float | None
    """What moving each byte once would take at the speed of a copy; None: not known."""
    seconds: float
    """That tuning took."""
    created: str
    pinned: Pinned | None = None
    decisions: list[Decision] = field(default_factory=list)
    hottest: Any = field(default=None, repr=False, compare=False)
    """The rows behind `pinned`, where this process found them; not saved."""

    @property
    def distance(self) -> int | None:
        """Rows in flight; None: the default."""
        return Schedule.parse(self.schedule).distance

    @property
    def speedup(self) -> float:
        """Default's time over the plan's."""
        return self.default_us / self.best_us if self.best_us else 1.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, or leaves the one that is there as it is."""
        where = path_of(path, "recfuse.Plan.save")
        record = {"recfuse_plan": VERSION, "kind": KIND, **asdict(self)}
        del record["hottest"]
        write_file(where, record)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan | CollectionPlan:
        """Reads a file; one that is of a collection gives a :class:`recfuse.CollectionPlan`.

        A file has 16 MiB at most, and lists of 100,000 items at most.

        Raises:
            OSError: it cannot be read. ValueError: it is no plan, or a newer one; names the file and the key.
        """
        from recfuse.plan import collection

        path = path_of(path, "recfuse.Plan.load")
        record = read_file(path)
        if record.get("kind") == collection.KIND:
            return collection.CollectionPlan.of_record(record, path)
        if record.get("kind") != KIND:
            raise PlanError(
                f"recfuse.Plan: {path} is a plan for {shown(record.get('kind'))}, this recfuse knows "
                f'"{KIND}" and "{collection.KIND}"'
            )
        plan = read(cls, record, f"{path}: ")
        try:
            plan._check()
        except ValueError as error:
            raise PlanError(f"recfuse.Plan: {path}: {error}") from error
        return plan

    def _check(self) -> None:
        check_times(self.default_us, self.best_us)
        check_sizes([("table", self.table.rows, self.table.dim, self.table.dtype)])
        if self.pinned is not None and not 0 < self.pinned.l2_fraction <= 1:
            raise ValueError(f"pinned.l2_fraction is {self.pinned.l2_fraction}, must lie in (0, 1]")
        try:
            Schedule.parse(self.schedule)
        except ValueError as error:
            raise ValueError(f"schedule: {error}") from error

    def apply(self, module: torch.nn.Module, trace: Any = None) -> None:
        """Makes a module run by this plan. Warns where the plan was made for another table or device.

        Args:
            module: a :class:`recfuse.nn.EmbeddingBag`; its ``schedule`` and ``pinned`` are set.
            trace: row ids ``[lookups]``, of which the hottest are pinned; only for a plan that pins rows, and
                comes from a file, which does not hold them.

        Raises:
            TypeError: another module. ValueError: the trace is needed and not given.
        """
        from recfuse.nn import EmbeddingBag
        from recfuse.nn.pinning import PinnedRows

        if not isinstance(module, EmbeddingBag):
            raise ArgumentTypeError(
                f"recfuse.Plan.apply: module is a {type(module).__name__}, must be a "
                "recfuse.nn.EmbeddingBag; recfuse.swap makes one of a torch.nn.EmbeddingBag"
            )
        if not (match := self.matches(module)):
            warnings.warn(f"recfuse.Plan: made for something else: {'; '.join(match.reasons)}", stacklevel=2)
        pinned = None
        if self.pinned is not None:
            if trace is None and self.hottest is None:
                raise ArgumentValueError(
                    f"recfuse.Plan.apply: the plan pins the hottest {self.pinned.rows:,} rows, which its "
                    "file does not hold; pass trace=, row ids as the table is read"
                )
            rows = {"rows": self.hottest} if trace is None else {"trace": trace}
            pinned = PinnedRows(module.weight, **rows, l2_fraction=self.pinned.l2_fraction)
        if module.pinned is not None:
            module.pinned.close()
        module.schedule, module.pinned = self.schedule, pinned

    def matches(self, module: torch.nn.Module) -> Match:
        """Whether the plan was made for a table like this module's, on a device like its one."""
        weight = _bag_of(module, "recfuse.Plan.matches").weight
        now = {
            "rows": weight.shape[0],
            "dim": weight.shape[1],
            "dtype": str(weight.dtype).removeprefix("torch."),
            "mode": module.mode,
            "padded": module.padding_idx is not None,
        }
        pairs = [(name, getattr(self.table, name), value) for name, value in now.items()]
        changed = [f"{name} was {before}, is {value}" for name, before, value in pairs if before != value]
        return Match(changed + differences(self.device, describe_device(weight.device)))

    def drift(self, batches: Iterable[Any], module: torch.nn.EmbeddingBag | None = None) -> Drift:
        """Whether batches, in the form that :func:`recfuse.tune` takes, have moved enough to tune again.

        ``module`` is the one that they are for: it says whether offsets include the last one; None: not.
        """
        function, last = "recfuse.Plan.drift", False
        if module is not None:
            last = _bag_of(module, function).include_last_offset
        before, now = self.trace, hotness(batches_of(batches, last, None, function))
        reasons = []
        if not 1 / _SIZE_DRIFT <= (now.lookups + 1) / (before.lookups + 1) <= _SIZE_DRIFT:
            reasons.append(f"a batch had {before.lookups:,.0f} lookups, has {now.lookups:,.0f}")
        if abs(now.unique_share - before.unique_share) > _UNIQUE_DRIFT * before.unique_share:
            reasons.append(
                f"{before.unique_share:.1%} of a batch's lookups were of different rows, "
                f"{now.unique_share:.1%} are"
            )
        if abs(now.coverage - before.coverage) > _COVERAGE_DRIFT:
            reasons.append(
                f"the hottest tenth of a batch's rows had {before.coverage:.1%} of its lookups, has "
                f"{now.coverage:.1%}"
            )
        return Drift(bool(reasons), reasons, before, now)

    def report(self) -> str:
        """All of it as text: the result, what it was measured on, and every decision in order."""
        from recfuse.plan.views import report

        return report(self)

    def __str__(self) -> str:
        """The report."""
        return self.report()

    def plot(self) -> Figure:
        """Times by station and distance, and by warps; needs matplotlib (the extra `bench`)."""
        from recfuse.plan.views import plot

        return plot(self)


def _bag_of(module: Any, function: str) -> torch.nn.EmbeddingBag:
    """The module; TypeError for one that is no table."""
    if not isinstance(module, torch.nn.EmbeddingBag):
        raise ArgumentTypeError(
            f"{function}: module is a {type(module).__name__}, must be a recfuse.nn.EmbeddingBag or a "
            "torch.nn.EmbeddingBag: the plan is for a single table"
        )
    return module
