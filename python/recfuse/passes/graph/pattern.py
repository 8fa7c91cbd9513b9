"""``GraphPattern``: what a file of ``passes/patterns`` has, and ``Match``: one place that it has found."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from recfuse.passes.graph.program import Program


@dataclass
class Part:
    """One line of the report: an embedding bag, a column, a broadcast."""

    name: str  # of the weight, or of the node
    found: str  # "embedding_bag", "embedding + sum", "linear over a broadcast"


@dataclass
class Match:
    """One place of a graph. ``apply`` rewrites it, and says what it is now; None: it is left."""

    parts: list[Part]
    apply: Callable[[], str] | None = None
    why_not: str = ""
    key: str = field(default="")
    """Names the match in every copy of its graph: the node that it ends in."""


@dataclass(frozen=True)
class GraphPattern:
    """A pattern: ``kind`` is its name in reports; patterns are looked for by rising ``order``."""

    kind: str
    order: int
    find: Callable[[Program], Iterable[Match]]
    """Matches, one at a time: each is applied before the next is looked for."""


@functools.cache
def graph_patterns() -> tuple[GraphPattern, ...]:
    """Those of the files of ``recfuse.passes.patterns``, in their order."""
    package = importlib.import_module("recfuse.passes.patterns")
    files = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    found = [importlib.import_module(f"{package.__name__}.{file}").PATTERN for file in files]
    return tuple(sorted(found, key=lambda pattern: pattern.order))
