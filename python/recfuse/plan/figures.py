"""Plans as figures, by matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from recfuse.ops.schedules import STATIONS, Schedule
from recfuse.plan.features import Occupancy
from recfuse.plan.report import Decision

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NAMED = 12  # schedules that a legend names
_MOST_CLASSES = 60  # classes with a bar in a figure


def of_table(
    decisions: Iterable[Decision],
    best: Schedule,
    default_us: float,
    best_us: float,
    floor_us: float | None,
    on_gpu: bool,
) -> Figure:
    """Draw the best time by distance and by warps, with a line for each station; marks the winner."""
    from matplotlib.figure import Figure

    timed = [
        (schedule, decision.us)
        for decision in decisions
        if decision.us is not None and decision.step != "confirm"
        if (schedule := _schedule_of(decision.candidate)) is not None
    ]

    def lines(axes: Axes, label: str, field: Callable[[Schedule], int | None]) -> None:
        for station in (*STATIONS, None):
            least: dict[int, float] = {}
            for schedule, us in timed:
                value = field(schedule)
                if value is not None and schedule.station == station:
                    least[value] = min(us, least.get(value, us))
            if least:
                axes.plot(*zip(*sorted(least.items()), strict=True), "o-", label=station or "prefetching")
        axes.axhline(default_us, color="gray", linestyle="--", label="default")
        if floor_us:
            axes.axhline(floor_us, color="black", linestyle=":", label="each byte once")
        _mark(axes, field(best), best_us)
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)

    figure = Figure(figsize=(11 if on_gpu else 6, 4), layout="constrained")
    first, *second = figure.subplots(1, 2 if on_gpu else 1, sharey=True, squeeze=False)[0]
    lines(first, "rows in flight" if on_gpu else "lookups ahead", lambda schedule: schedule.distance)
    for axes in second:
        lines(axes, "warps an SM", lambda schedule: schedule.warps)
    first.set_ylabel("µs a batch")
    first.legend(fontsize="small")
    return figure


def _schedule_of(candidate: str) -> Schedule | None:
    """Return the schedule of a candidate, or None if the candidate is not a plain schedule."""
    try:
        return Schedule.parse(candidate)
    except ValueError:
        return None


def _mark(axes: Axes, x: int | None, us: float) -> None:
    if x is not None:
        axes.plot([x], [us], "k*", markersize=14, label="plan")


def of_collection(
    by_class: Mapping[str, Counter[str]],
    occupancies: Iterable[Occupancy],
    default_us: float,
    best_us: float,
    warps: int,
) -> Figure:
    """Draw bars of the features of each class by schedule, and lines of times by warps; marks the plan."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    bars, curve = figure.subplots(1, 2)
    _bars(bars, by_class)
    ordered = sorted(occupancies, key=lambda occupancy: occupancy.warps)
    for label, name in (("default schedules", "default_us"), ("tuned schedules", "tuned_us")):
        timed = [
            (occupancy.warps, us) for occupancy in ordered if (us := getattr(occupancy, name)) is not None
        ]
        if timed:
            curve.plot(*zip(*timed, strict=True), "o-", label=label)
    curve.axhline(default_us, color="gray", linestyle="--", label="default")
    _mark(curve, warps or None, best_us)
    curve.set(xlabel="warps an SM", ylabel="µs a batch", title="occupancy")
    curve.grid(alpha=0.3)
    curve.legend(fontsize="small")
    return figure


def _bars(axes: Axes, by_class: Mapping[str, Counter[str]]) -> None:
    total: Counter[str] = Counter()
    for counts in by_class.values():
        total.update(counts)
    title = "schedules of each class"
    if len(by_class) > _MOST_CLASSES:
        title += f" ({_MOST_CLASSES} of {len(by_class):,}, those with the most features)"
        most = set(sorted(by_class, key=lambda name: -by_class[name].total())[:_MOST_CLASSES])
        by_class = {name: counts for name, counts in by_class.items() if name in most}
    named = [text for text, _ in total.most_common(_MOST_NAMED)]
    layers = {text or "default": [counts[text] for counts in by_class.values()] for text in named}
    remaining = [sum(n for text, n in counts.items() if text not in named) for counts in by_class.values()]
    if any(remaining):
        layers["others"] = remaining
    below = [0] * len(by_class)
    for label, heights in layers.items():
        color = "lightgray" if heights is remaining else None
        axes.bar(list(by_class), heights, bottom=below, label=label, color=color)
        below = [sum(pair) for pair in zip(below, heights, strict=True)]
    axes.set(ylabel="features", title=title)
    axes.tick_params(axis="x", rotation=30)
    axes.legend(fontsize="x-small")
