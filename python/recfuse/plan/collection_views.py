"""A `CollectionPlan` for a reader: as text, and as a figure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from recfuse.plan.views import device_lines, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from recfuse.plan.collection import CollectionPlan

_MOST_NAMED = 12  # schedules that the legend of a figure names
_MOST_LISTED = 40  # pairs of class and schedule that a report lists
_MOST_CLASSES = 60  # that a figure has bars of


def report(plan: CollectionPlan) -> str:
    """The result, what it was measured on, and every decision in order."""
    return render([*_summary(plan), *_chosen(plan)], plan.decisions)


def _summary(plan: CollectionPlan) -> list[tuple[str, str]]:
    form, trace = plan.form, plan.trace
    rows = sum(plan.tables[place].rows for place in plan.table_of)
    columns = sum(plan.tables[place].dim for place in plan.table_of)
    times = f"default {plan.default_us:.2f} us, plan {plan.best_us:.2f} us: {plan.speedup:.3f}x"
    weighted = ", weights" if form.weighted else ""
    return [
        ("a batch", times),
        ("warps an SM", f"{plan.warps}" if plan.warps else "the default"),
        (
            "features",
            f"{plan.features:,}, {len(plan.tables)} kinds of tables, {rows:,} rows, {columns:,} columns; "
            f"{form.indices} indices, {form.offsets} offsets{weighted}",
        ),
        (
            "trace",
            f"{trace.batches} batches of {trace.lookups:,.0f} lookups, {plan.pooling:.1f} a bag, in "
            f"{trace.bags:,.0f} bags a feature (median); {trace.unique_share:.1%} of a batch's bytes are of "
            f"different rows; {trace.sha256}",
        ),
        *device_lines(plan.device, plan.created, plan.seconds),
    ]


def _chosen(plan: CollectionPlan) -> list[tuple[str, str]]:
    """How many features of each class have which schedule."""
    counts = by_class(plan)
    pairs = [(name, text, n) for name, own in counts.items() for text, n in own.most_common()]
    lines = [("chosen", f"{name}: {n} x {text or 'default'}") for name, text, n in pairs[:_MOST_LISTED]]
    if len(pairs) > _MOST_LISTED:
        lines.append(("chosen", f"and {len(pairs) - _MOST_LISTED} more"))
    return lines


def by_class(plan: CollectionPlan) -> dict[str, Counter[str]]:
    """Features that have each schedule, for each class of tables, the narrowest rows first."""
    found: dict[tuple[int, str], Counter[str]] = {}
    for table_place, schedule_place in zip(plan.table_of, plan.schedule_of, strict=True):
        table = plan.tables[table_place]
        key = table.row_bytes, f"{table.dim} {table.dtype} {table.mode}"
        found.setdefault(key, Counter())[plan.schedules[schedule_place]] += 1
    return {name: found[row_bytes, name] for row_bytes, name in sorted(found)}


def plot(plan: CollectionPlan) -> Figure:
    """Bars: features of each class by their schedule. Lines: times by warps an SM; the plan marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    bars, curve = figure.subplots(1, 2)
    _bars(bars, plan)
    _curve(curve, plan)
    return figure


def _bars(axes: Axes, plan: CollectionPlan) -> None:
    counts = by_class(plan)
    total: Counter[str] = Counter()
    for own in counts.values():
        total.update(own)
    title = "schedules of each class"
    if len(counts) > _MOST_CLASSES:
        title += f" ({_MOST_CLASSES} of {len(counts):,}, those with the most features)"
        most = set(sorted(counts, key=lambda name: -counts[name].total())[:_MOST_CLASSES])
        counts = {name: own for name, own in counts.items() if name in most}
    below = dict.fromkeys(counts, 0)
    named = [text for text, _ in total.most_common(_MOST_NAMED)]
    for text in [*named, None]:
        heights = [
            sum(count for other, count in own.items() if other not in named) if text is None else own[text]
            for own in counts.values()
        ]
        if text is None and not any(heights):
            continue
        label = {"label": "others", "color": "lightgray"} if text is None else {"label": text or "default"}
        axes.bar(list(counts), heights, bottom=list(below.values()), **label)
        below = {name: below[name] + height for name, height in zip(counts, heights, strict=True)}
    axes.set(ylabel="features", title=title)
    axes.tick_params(axis="x", rotation=30)
    axes.legend(fontsize="x-small")


def _curve(axes: Axes, plan: CollectionPlan) -> None:
    ordered = sorted(plan.occupancies, key=lambda one: one.warps)
    for label, name in (("default schedules", "default_us"), ("tuned schedules", "tuned_us")):
        points = [(one.warps, getattr(one, name)) for one in ordered if getattr(one, name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", label=label)
    axes.axhline(plan.default_us, color="gray", linestyle="--", label="default")
    if plan.warps:
        axes.plot([plan.warps], [plan.best_us], "k*", markersize=14, label="plan")
    axes.set(xlabel="warps an SM", ylabel="us a batch", title="occupancy")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
