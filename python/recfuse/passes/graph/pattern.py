"""``GraphPattern``: the pattern of a file in ``passes/patterns``; ``Match``: one occurrence of it."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from recfuse.passes.graph.program import Program


@dataclass
class Part:
    """A line of the report: an embedding bag, a column, a broadcast."""

    name: str  # of the weight, or of the node
    operators: str  # "embedding_bag", "embedding + sum", "linear over a broadcast"


@dataclass
class Match:
    """An occurrence of a pattern. ``apply`` rewrites it and returns a description; None: it is left."""

    parts: list[Part]
    apply: Callable[[], str] | None = None
    why_not: str = ""
    key: str = field(default="")
    """Identifies the match in every copy of its graph: the name of its last node."""


@dataclass(frozen=True)
class GraphPattern:
    """A pattern: ``kind`` is its name in reports; patterns run in ascending ``order``."""

    kind: str
    order: int
    find: Callable[[Program], Iterable[Match]]
    """Yields matches; each is applied before the search continues."""


@functools.cache
def graph_patterns() -> tuple[GraphPattern, ...]:
    """Return the patterns of the files in ``recfuse.passes.patterns``, by ``order``."""
    package = importlib.import_module("recfuse.passes.patterns")
    files = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    patterns = [importlib.import_module(f"{package.__name__}.{file}").PATTERN for file in files]
    return tuple(sorted(patterns, key=lambda pattern: pattern.order))
