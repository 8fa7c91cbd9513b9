"""``swap_graph``: graph passes over an exported program or a graph module, checked on the user's batches."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from recfuse.passes.graph.checks import agrees, call_of, outputs_of
from recfuse.passes.graph.exported import ExportedGraph
from recfuse.passes.graph.nodes import storage_of
from recfuse.passes.graph.program import Program
from recfuse.passes.graph.progress import uncollected
from recfuse.passes.graph.rewrite import chosen, rewrite
from recfuse.passes.report import SwapReport


def swap_graph(
    program: ExportedProgram | GraphModule,
    patterns: Sequence[str] | None = None,
    check: Iterable[Any] = (),
) -> SwapReport:
    """Rewrite a graph in place; see :func:`recfuse.swap`."""
    chosen(patterns, "recfuse.swap")
    batches = [call_of(batch) for batch in check]
    report = SwapReport()
    if not batches:
        with uncollected():
            rewrite(_program(program), report, patterns)
        return report
    expected = outputs_of(_callable(_copied(program)), batches)
    refused = _refused(program, batches, expected, patterns)
    rewrite(_program(program), report, patterns, refused=refused)
    return report


def _refused(
    program: Any, batches: Sequence[Any], expected: Sequence[Any], patterns: Sequence[str] | None
) -> Collection[tuple[str, str]]:
    """Return the matches that change a result of a batch.

    All matches are tried together and, if a result differs, each match separately.
    """

    def agree(**which: Any) -> tuple[bool, list[tuple[str, str]]]:
        copied = _copied(program)
        swapped = rewrite(_program(copied), SwapReport(), patterns, **which)
        return agrees(_callable(copied), batches, expected), swapped

    good, matches = agree()
    if good:
        return ()
    refused = {match for match in matches if not agree(only=match)[0]}
    good, remaining = agree(refused=refused)
    return refused if good else refused | set(remaining)


def _program(program: ExportedProgram | GraphModule) -> Program:
    return ExportedGraph(program) if isinstance(program, ExportedProgram) else Program(program)


def _callable(program: ExportedProgram | GraphModule) -> nn.Module:
    return program.module(check_guards=False) if isinstance(program, ExportedProgram) else program


def _copied(program: Any) -> Any:
    """Return a copy that may be rewritten and run.

    Tensors that a call may write to are copied; other weights are shared with the original.
    """
    if isinstance(program, GraphModule):
        copied: Any = GraphModule(program, copy.deepcopy(program.graph))
        tensors = {**dict(copied.named_parameters()), **dict(copied.named_buffers())}
        for name, tensor in _own_tensors(tensors, _program(copied)).items():
            owner, _, attribute = name.rpartition(".")
            setattr(copied.get_submodule(owner), attribute, tensor)
        return copied
    graph_module = GraphModule(program.graph_module, copy.deepcopy(program.graph_module.graph))
    copied = ExportedProgram(
        graph_module, graph_module.graph, copy.deepcopy(program.graph_signature), dict(program.state_dict),
        program.range_constraints, copy.deepcopy(program.module_call_graph), program.example_inputs,
        dict(program.constants), verifiers=program.verifiers,
    )  # fmt: skip
    tensors = {**copied.constants, **copied.state_dict}
    for name, tensor in _own_tensors(tensors, _program(copied)).items():
        (copied.state_dict if name in copied.state_dict else copied.constants)[name] = tensor
    return copied


def _own_tensors(tensors: dict[str, Any], program: Program) -> dict[str, Tensor]:
    """Return copies of the buffers and of the written Parameters; copies share memory as the originals do."""
    written = {program.name(node) for node in program.nodes if program.effects.is_written(node)}
    tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    memory = {
        storage_of(tensor)
        for name, tensor in tensors.items()
        if name in written or not isinstance(tensor, nn.Parameter)
    }
    memo: dict[int, Any] = {}
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if storage_of(tensor) in memory:
            copied = copy.deepcopy(tensor.detach(), memo)
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[name] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
    return copies
