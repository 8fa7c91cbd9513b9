"""Checks of indices that always hold, because a previous operator bounds the indices.

Before::

    bucket = bucketize(x, boundaries)                  # in [0, len(boundaries)]
    index  = clamp(bucket, 0, rows - 1)                # or where(bucket < rows, bucket, 0), masked_fill,
                                                       # remainder, with rows > len(boundaries)

After::

    index  = bucketize(x, boundaries)

``graph/ranges.py`` follows ranges through bucketize, clamp, remainder, where, masks and arithmetic with
numbers.

Source: Pan et al., RECom, ASPLOS 2023, section 5.1 and appendix D.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from recfuse.passes.graph.nodes import arguments_of, aten, is_call, same, value_of
from recfuse.passes.graph.pattern import GraphPattern, Match, Part
from recfuse.passes.graph.program import Program
from recfuse.passes.graph.ranges import Ranges, is_of

_GUARDS = (aten.clamp, aten.clamp_min, aten.clamp_max, aten.where, aten.masked_fill, aten.remainder)


def find(program: Program) -> Iterator[Match]:
    """Yield guards of indices."""
    ranges = Ranges(program)
    for node in program.nodes:
        if not is_call(node, *_GUARDS) or not node.users:
            continue
        argument = _kept(ranges, node)
        if argument is None or not _is_same(node, argument):
            continue
        part = [Part(node.name, f"guard, {node.target._schema.name.removeprefix('aten::')}")]  # type: ignore[union-attr]
        if reason := _why_not(program, node, argument):
            yield Match(part, why_not=reason)
            continue

        def apply(node: Node = node, argument: Node = argument) -> str:
            program.replace(node, argument)
            return f"always holds: {argument.name} is in {list(ranges.of(argument) or ())}"

        yield Match(part, apply, key=node.name)


def _kept(ranges: Ranges, node: Node) -> Node | None:
    """Return the argument that a guard always returns, or None."""
    arguments = arguments_of(node)
    argument: Any = None
    if is_call(node, aten.where):
        if "other" not in arguments:  # where(condition) returns positions
            return None
        truth = ranges.truth(arguments["condition"])
        argument = None if truth is None else arguments["self" if truth else "other"]
    elif is_call(node, aten.masked_fill):
        argument = arguments["self"] if ranges.truth(arguments["mask"]) is False else None
    else:
        before = ranges.of(arguments["self"])
        if before is not None and _changes_nothing(node, arguments, before):
            argument = arguments["self"]
    return argument if isinstance(argument, Node) and ranges.of(argument) is not None else None


def _changes_nothing(node: Node, arguments: dict[str, Any], before: tuple[int, int]) -> bool:
    low, high = before
    if is_call(node, aten.remainder):
        other = arguments["other"]
        return is_of(arguments["self"], other) and low >= 0 and high < other
    bounds = arguments.get("min"), arguments.get("max")
    if any(bound is not None and not is_of(arguments["self"], bound) for bound in bounds):
        return False
    return (bounds[0] is None or bounds[0] <= low) and (bounds[1] is None or high <= bounds[1])


def _is_same(node: Node, argument: Node) -> bool:
    a, b = value_of(node), value_of(argument)
    return a.dtype == b.dtype and a.dim() == b.dim() and all(map(same, a.shape, b.shape))


def _returned(program: Program) -> set[int]:
    """Return the memory of the program's results, views included."""
    output = next(iter(reversed(program.graph.nodes)))
    return {memory for item in output.all_input_nodes for memory in program.effects.memory_of(item)}


def _why_not(program: Program, node: Node, argument: Node) -> str:
    if program.effects.memory_of(node) & _returned(program):
        return "the result is returned, and is never the memory of an argument"
    if any(program.depends_on_random(item) for item in node.all_input_nodes if item is not argument):
        return "an argument that has no effect draws random numbers, on which later random numbers depend"
    if program.effects.is_written(argument):
        return "the guarded tensor is written to in place"
    return program.effects.why_not((node,))


PATTERN = GraphPattern("guards", 30, find)
