"""``rewrite``: runs the patterns over a program, and writes what became of each match into a report."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from recfuse.errors import ArgumentValueError
from recfuse.passes.graph.pattern import GraphPattern, Match, graph_patterns
from recfuse.passes.graph.program import Program
from recfuse.passes.graph.progress import Progress
from recfuse.passes.report import SwapReport


def chosen(names: Sequence[str] | None, where: str) -> tuple[GraphPattern, ...]:
    """The patterns of these kinds; ValueError for a name that none has."""
    known = graph_patterns()
    if names is None:
        return known
    if isinstance(names, str) or not set(names) <= {pattern.kind for pattern in known}:
        allowed = ", ".join(repr(pattern.kind) for pattern in known)
        raise ArgumentValueError(f"{where}: patterns is {names!r}, must be a list of {allowed}")
    return tuple(pattern for pattern in known if pattern.kind in names)


def rewrite(
    program: Program,
    report: SwapReport,
    patterns: Sequence[str] | None = None,
    *,
    refused: Collection[tuple[str, str]] = (),
    only: tuple[str, str] | None = None,
) -> list[tuple[str, str]]:
    """Rewrites a program in place; returns the kind and key of each match that was swapped.

    ``refused`` are left; with ``only``, all others are.
    """
    swapped: list[tuple[str, str]] = []
    with Progress("recfuse: graph passes", len(program.graph.nodes)) as progress:
        for pattern in chosen(patterns, "recfuse"):
            progress.describe(pattern.kind)
            for match in pattern.find(program):
                name = (pattern.kind, match.key)
                left = match.why_not
                if not left and name in refused:
                    left = "its result differs from the original's on the batches of check"
                if not left and only is not None and name != only:
                    continue
                if left or match.apply is None:
                    _add(report, pattern, match, "left", left)
                    continue
                _add(report, pattern, match, "swapped", match.apply())
                program.erase_dead()
                swapped.append(name)
                progress.update(len(match.parts))
        program.finish()
    return swapped


def _add(report: SwapReport, pattern: GraphPattern, match: Match, action: str, detail: str) -> None:
    for part in match.parts:
        report.add(part.name, part.found, action, detail, pattern.kind)
