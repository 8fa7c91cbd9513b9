"""A `Plan` for a reader: as a table, and as a figure."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from recfuse.ops.schedules import STATIONS, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from recfuse.plan.parts import Decision, Device
    from recfuse.plan.table import Plan

_WIDTH = 140  # columns of the report
_MOST_DECISIONS = 2000  # that a report lists
# Control characters, which a terminal would obey, and halves of surrogate pairs, which have no UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def report(plan: Plan) -> str:
    """The result, what it was measured on, and every decision in order."""
    return render(_summary(plan), plan.decisions)


def render(summary: Iterable[tuple[str, str]], decisions: Sequence[Decision]) -> str:
    """Lines of name and text, and a table of decisions, as text."""
    from rich.console import Console
    from rich.table import Table

    head = Table(show_header=False, box=None, pad_edge=False)
    head.add_column(style="bold", no_wrap=True)
    head.add_column(overflow="fold")
    for name, line in summary:
        head.add_row(name, _printable(line))
    steps = Table("step", "candidate", "us", "kept", "why", title="decisions")
    steps.columns[2].justify = "right"
    for one in decisions[:_MOST_DECISIONS]:
        steps.add_row(
            _printable(one.step),
            _printable(one.candidate) or "default",
            "" if one.us is None else f"{one.us:.2f}",
            "kept" if one.kept else "",
            _printable(one.why),
        )
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, highlight=False, markup=False, emoji=False)
    console.print(head)
    if decisions:
        console.print(steps)
    if len(decisions) > _MOST_DECISIONS:
        console.print(f"and {len(decisions) - _MOST_DECISIONS:,} more, in decisions of the plan")
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().split("\n"))


def _printable(text: str) -> str:
    """The text with escapes for characters that do not print."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def device_lines(device: Device, created: str, seconds: float) -> list[tuple[str, str]]:
    """The device of a plan, when it was made, and with what."""
    known = filter(None, [device.name, device.arch, device.driver and f"driver {device.driver}"])
    made = f"{created}, in {seconds:.1f} s; recfuse {device.recfuse}, torch {device.torch}"
    return [("device", ", ".join(known)), ("made", made)]


def _summary(plan: Plan) -> list[tuple[str, str]]:
    table, trace = plan.table, plan.trace
    extras = [name for name, there in (("padding", table.padded), ("weights", table.weighted)) if there]
    pinned = "no rows"
    if plan.pinned is not None:
        share = f"{plan.pinned.l2_fraction:.0%} of L2"
        pinned = f"the hottest {plan.pinned.rows:,} rows, at most {share}, before every call"
    times = f"default {plan.default_us:.2f} us, plan {plan.best_us:.2f} us: {plan.speedup:.2f}x"
    if plan.floor_us and plan.best_us:
        times += f"; each byte once at copy speed {plan.floor_us:.2f} us ({plan.floor_us / plan.best_us:.0%})"
    return [
        ("schedule", plan.schedule or "the defaults"),
        ("pinned", pinned),
        ("a batch", times),
        (
            "table",
            ", ".join(
                [
                    f"{table.rows:,} x {table.dim} {table.dtype}",
                    table.mode,
                    f"{table.indices} indices",
                    f"{table.offsets} offsets",
                    *extras,
                ]
            ),
        ),
        (
            "trace",
            f"{trace.batches} batches of {trace.lookups:,.0f} lookups in {trace.bags:,.0f} bags; "
            f"{trace.unique_share:.1%} of a batch's lookups are of different rows, its hottest tenth of "
            f"rows has {trace.coverage:.1%} of them; {trace.rows_in_use:,} rows in use; {trace.sha256}",
        ),
        *device_lines(plan.device, plan.created, plan.seconds),
    ]


def plot(plan: Plan) -> Figure:
    """Best time by distance and by warps, a line a station; the winner marked."""
    from matplotlib.figure import Figure

    on_gpu = plan.device.type == "cuda"
    figure = Figure(figsize=(11 if on_gpu else 6, 4), layout="constrained")
    first, *second = figure.subplots(1, 2 if on_gpu else 1, sharey=True, squeeze=False)[0]
    _lines(first, plan, "rows in flight" if on_gpu else "lookups ahead", lambda schedule: schedule.distance)
    for axes in second:
        _lines(axes, plan, "warps an SM", lambda schedule: schedule.warps)
    first.set_ylabel("us a batch")
    first.legend(fontsize="small")
    return figure


def _lines(axes: Axes, plan: Plan, label: str, place: Callable[[Schedule], int | None]) -> None:
    timed = [
        (_schedule_of(one.candidate), one.us)
        for one in plan.decisions
        if one.us is not None and one.step != "confirm"
    ]
    for station in (*STATIONS, None):
        best: dict[int, float] = {}
        for schedule, us in timed:
            at = None if schedule is None else place(schedule)
            if at is not None and schedule.station == station:
                best[at] = min(us, best.get(at, us))
        if best:
            axes.plot(*zip(*sorted(best.items()), strict=True), "o-", label=station or "prefetching")
    axes.axhline(plan.default_us, color="gray", linestyle="--", label="default")
    if plan.floor_us:
        axes.axhline(plan.floor_us, color="black", linestyle=":", label="each byte once")
    winner = place(Schedule.parse(plan.schedule))
    if winner is not None:
        axes.plot([winner], [plan.best_us], "k*", markersize=14, label="plan")
    axes.set(xlabel=label)
    axes.grid(alpha=0.3)


def _schedule_of(candidate: str) -> Schedule | None:
    """The schedule of a candidate that is nothing else."""
    try:
        return Schedule.parse(candidate)
    except ValueError:
        return None
