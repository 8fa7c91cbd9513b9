"""``swap_graph``: graph passes over an exported program or a graph module, tried on the user's batches."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from recfuse.passes.graph.checks import agrees, call_of, outputs_of
from recfuse.passes.graph.exported import ExportedGraph
from recfuse.passes.graph.program import Program
from recfuse.passes.graph.progress import uncollected
from recfuse.passes.graph.rewrite import chosen, rewrite
from recfuse.passes.report import SwapReport


def swap_graph(
    given: ExportedProgram | GraphModule,
    patterns: Sequence[str] | None = None,
    check: Iterable[Any] = (),
) -> SwapReport:
    """Rewrites a graph in place; see :func:`recfuse.swap`."""
    chosen(patterns, "recfuse.swap")
    batches = [call_of(batch) for batch in check]
    report = SwapReport()
    if not batches:
        with uncollected():
            rewrite(_program(given), report, patterns)
        return report
    expected = [outputs_of(_callable(given), batch) for batch in batches]
    refused = _refused(given, batches, expected, patterns)
    rewrite(_program(given), report, patterns, refused=refused)
    return report


def _refused(
    given: Any, batches: Sequence[Any], expected: Sequence[Any], patterns: Sequence[str] | None
) -> Collection[tuple[str, str]]:
    """The matches after which a batch has another result: all are tried at once, then each alone."""

    def agree(**which: Any) -> tuple[bool, list[tuple[str, str]]]:
        copied = _copied(given)
        swapped = rewrite(_program(copied), SwapReport(), patterns, **which)
        return all(map(agrees(_callable(copied)), batches, expected)), swapped

    good, matches = agree()
    if good:
        return ()
    refused = {match for match in matches if not agree(only=match)[0]}
    good, rest = agree(refused=refused)
    return refused if good else refused | set(rest)


def _program(given: ExportedProgram | GraphModule) -> Program:
    return ExportedGraph(given) if isinstance(given, ExportedProgram) else Program(given)


def _callable(given: ExportedProgram | GraphModule) -> nn.Module:
    return given.module(check_guards=False) if isinstance(given, ExportedProgram) else given


def _copied(given: Any) -> Any:
    """A copy whose graph may be rewritten; weights are the same ones."""
    if isinstance(given, GraphModule):
        return GraphModule(given, copy.deepcopy(given.graph))
    graph_module = GraphModule(given.graph_module, copy.deepcopy(given.graph_module.graph))
    return ExportedProgram(
        graph_module, graph_module.graph, copy.deepcopy(given.graph_signature), given.state_dict,
        given.range_constraints, copy.deepcopy(given.module_call_graph), given.example_inputs,
        dict(given.constants), verifiers=given.verifiers,
    )  # fmt: skip
