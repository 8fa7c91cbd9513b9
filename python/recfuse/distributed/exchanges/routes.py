"""The route of a batch: which lookups go to which rank, and where the pooled columns come from.

A *segment* is the lookups of a feature for a holder of its table. All holders of a table that is not cut by
rows take the same lookups, so the feature is one segment. A table that is cut by rows has a segment a part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from recfuse.distributed.placements import Part, Placed


class RowCut(NamedTuple):
    """A feature whose table is cut by rows."""

    feature: int
    begins: tuple[int, ...]  # the first row of each part
    ranks: tuple[int, ...]  # the holder of each part
    first_segment: int
    padding_idx: int | None
    mode: str


class Source(NamedTuple):
    """Pooled columns of a feature that come from a rank."""

    rank: int
    column: int  # the first column in the rows of that rank
    columns: int


class Local(NamedTuple):
    """A feature that this rank pools."""

    feature: int
    part: Part
    segment: int


class Route(NamedTuple):
    """The route of all batches of a module. ``exchanged`` features are those whose table has no copies."""

    features: int
    segments: int
    row_cuts: tuple[RowCut, ...]
    exchanged: tuple[tuple[Local, ...], ...]  # by rank; features whose pooled rows the rank sends
    copies: tuple[Local, ...]  # features that every rank pools for its own samples
    sources: tuple[tuple[Source, ...], ...]  # by feature; empty for copies
    widths: tuple[int, ...]  # by rank: columns of the exchanged features
    copied_width: int

    def segments_to(self, rank: int) -> list[int]:
        """Return the segments that a rank pools, in the order of its call."""
        return [local.segment for local in (*self.exchanged[rank], *self.copies)]

    def without(self, features: Collection[int]) -> Route:
        """Return the route without some features, which then have no sources."""
        exchanged = tuple(
            tuple(local for local in own if local.feature not in features) for own in self.exchanged
        )
        copies = tuple(local for local in self.copies if local.feature not in features)
        columns: dict[tuple[int, int], int] = {}
        widths = []
        for rank, own in enumerate(exchanged):
            width = 0
            for local in own:
                columns[local.feature, rank] = width
                width += local.part.columns
            widths.append(width)
        sources = tuple(
            tuple(
                source._replace(column=columns[feature, source.rank])
                for source in own
                if (feature, source.rank) in columns
            )
            for feature, own in enumerate(self.sources)
        )
        copied_width = sum(local.part.columns for local in copies)
        return self._replace(
            exchanged=exchanged,
            copies=copies,
            sources=sources,
            widths=tuple(widths),
            copied_width=copied_width,
        )


def route_of(
    table_of_feature: Sequence[int],
    tables: Sequence[Placed],
    modes: Sequence[str],
    padding: Sequence[int | None],
    ranks: int,
) -> Route:
    """Return the route of features whose tables are placed."""
    exchanged: list[list[Local]] = [[] for _ in range(ranks)]
    copies: list[Local] = []
    sources: list[tuple[Source, ...]] = []
    row_cuts: list[RowCut] = []
    widths = [0] * ranks
    segments = len(table_of_feature)
    for feature, number in enumerate(table_of_feature):
        table = tables[number]
        if table.kind == "copies":
            copies.append(Local(feature, table.parts[0], feature))
            sources.append(())
            continue
        if table.kind == "rows":
            begins = tuple(part.row for part in table.parts)
            holders = tuple(part.rank for part in table.parts)
            row_cuts.append(RowCut(feature, begins, holders, segments, padding[number], modes[number]))
        own = []
        for part in table.parts:
            segment = feature
            if table.kind == "rows":
                segment, segments = segments, segments + 1
            exchanged[part.rank].append(Local(feature, part, segment))
            own.append(Source(part.rank, widths[part.rank], part.columns))
            widths[part.rank] += part.columns
        sources.append(tuple(own))
    return Route(
        len(table_of_feature),
        segments,
        tuple(row_cuts),
        tuple(map(tuple, exchanged)),
        tuple(copies),
        tuple(sources),
        tuple(widths),
        sum(local.part.columns for local in copies),
    )
