"""``rewrite``: runs the patterns over a program, and reports the action for each match."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence

from recfuse.errors import ArgumentValueError
from recfuse.passes.graph.nodes import graphs_of
from recfuse.passes.graph.pattern import GraphPattern, Match, Part, graph_patterns
from recfuse.passes.graph.program import Program
from recfuse.passes.graph.progress import Progress
from recfuse.passes.report import SwapReport

_log = logging.getLogger("recfuse")
_NESTED = (
    "the operator has a graph of its own, which is not read. Leave torch.no_grad() and autocast to the "
    "caller, or swap exported_program.run_decompositions({})."
)


def chosen(names: Sequence[str] | None, prefix: str) -> tuple[GraphPattern, ...]:
    """Return the patterns of these kinds; raises ValueError for an unknown kind."""
    patterns = graph_patterns()
    if names is None:
        return patterns
    if isinstance(names, str) or not set(names) <= {pattern.kind for pattern in patterns}:
        allowed = ", ".join(repr(pattern.kind) for pattern in patterns)
        raise ArgumentValueError(f"{prefix}: patterns is {names!r}; expected a list of {allowed}")
    return tuple(pattern for pattern in patterns if pattern.kind in names)


def rewrite(
    program: Program,
    report: SwapReport,
    patterns: Sequence[str] | None = None,
    *,
    refused: Collection[tuple[str, str]] = (),
    only: tuple[str, str] | None = None,
) -> list[tuple[str, str]]:
    """Rewrite a program in place; returns the kind and key of each swapped match.

    Matches in ``refused`` are left; with ``only``, all other matches are.
    """
    swapped: list[tuple[str, str]] = []
    for node in program.nodes:
        if graphs_of(node):
            report.add(node.name, str(node.target), "left", _NESTED)
    with Progress("recfuse: graph passes", len(program.graph.nodes)) as progress:
        try:
            for pattern in chosen(patterns, "recfuse"):
                progress.describe(pattern.kind)
                for match in _found(pattern, program):
                    name = (pattern.kind, match.key)
                    reason = match.why_not
                    if not reason and name in refused:
                        reason = "the result differs from the original's on the batches of check"
                    if not reason and only is not None and name != only:
                        continue
                    detail, reason = ("", reason) if reason else _applied(match)
                    _add(report, pattern, match, "left" if reason else "swapped", reason or detail)
                    program.erase_dead()
                    if not reason:
                        swapped.append(name)
                        progress.update(len(match.parts))
        finally:  # each replacement is complete, so that the graph is valid after any error
            program.finish()
    return swapped


def _found(pattern: GraphPattern, program: Program) -> Iterator[Match]:
    """Yield the matches of a pattern; an error becomes a match that is left, with the error as reason."""
    try:
        yield from pattern.find(program)
    except Exception as error:
        _log.warning("recfuse: the pattern %s cannot read a graph", pattern.kind, exc_info=True)
        yield Match([Part("(graph)", "graph")], why_not=f"the graph cannot be read: {error!r}")


def _applied(match: Match) -> tuple[str, str]:
    """Apply a match; returns its description, or the reason why the new call refuses its arguments."""
    assert match.apply is not None
    try:
        return match.apply(), ""
    except Exception as error:
        return "", f"the match cannot be rewritten: {error!r}"


def _add(report: SwapReport, pattern: GraphPattern, match: Match, action: str, detail: str) -> None:
    for part in match.parts:
        report.add(part.name, part.operators, action, detail, pattern.kind)
