"""What ``swap`` and ``unswap`` return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from recfuse.optim.base import FusedOptimizer

_NEXT = (
    "next: recfuse.nn.FusedEmbeddingBagList(bags) pools them in one call, fuse_optimizers=True updates them "
    "inside backward(): docs/swap.md"
)

_MOST_LINES = 8  # of entries that differ in their name alone; more are one line


@dataclass(frozen=True)
class SwapEntry:
    """What happened to one module."""

    name: str  # as in model.named_modules(); "" is the model
    kind: str  # its class before
    action: (
        str  # "replaced", "fused", "left"; "optimizer"; "already", by an earlier swap; "restored" by unswap
    )
    detail: str  # what it is now, or why it was left
    pattern: str = ""  # of a graph: which pattern has found it; action is "swapped" or "left"


@dataclass
class SwapReport:
    """What :func:`recfuse.swap` or :func:`recfuse.unswap` did, module by module. ``print`` it for a table."""

    entries: list[SwapEntry] = field(default_factory=list)
    fused_optimizers: list[FusedOptimizer] = field(default_factory=list)
    """With ``fuse_optimizers``: of each optimizer that has tables, the one that updates them."""

    def add(self, name: str, kind: str, action: str, detail: str, pattern: str = "") -> None:
        """Adds a line."""
        self.entries.append(SwapEntry(name, kind, action, detail, pattern))

    def leave(self, reason: str) -> None:
        """Records that the swap was undone."""
        self.entries = [
            entry if entry.action in ("left", "already") else replace(entry, action="left", detail=reason)
            for entry in self.entries
        ]
        self.fused_optimizers.clear()

    def found(self, pattern: str) -> list[SwapEntry]:
        """Of a graph: what a pattern has found, swapped and left."""
        return [entry for entry in self.entries if entry.pattern == pattern]

    @property
    def swapped(self) -> list[SwapEntry]:
        """Parts of a graph that recfuse's operators now compute."""
        return [entry for entry in self.entries if entry.action == "swapped"]

    @property
    def replaced(self) -> list[SwapEntry]:
        """Modules that now run on recfuse's single-table operator."""
        return [entry for entry in self.entries if entry.action == "replaced"]

    @property
    def fused(self) -> list[SwapEntry]:
        """Collections whose tables are now pooled in one call."""
        return [entry for entry in self.entries if entry.action == "fused"]

    @property
    def left(self) -> list[SwapEntry]:
        """Modules left as they were, and why."""
        return [entry for entry in self.entries if entry.action == "left"]

    @property
    def already(self) -> list[SwapEntry]:
        """Modules that were recfuse's before, by an earlier swap or made by hand; nothing was changed."""
        return [entry for entry in self.entries if entry.action == "already"]

    @property
    def restored(self) -> list[SwapEntry]:
        """Modules that are torch's or TorchRec's again, by :func:`recfuse.unswap`."""
        return [entry for entry in self.entries if entry.action == "restored"]

    def names(self) -> set[str]:
        """Names of the modules in the report."""
        return {entry.name for entry in self.entries}

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Cells of the table; many entries that differ in their names alone are one row."""
        names: dict[tuple[str, str, str], list[str]] = {}
        folded: set[tuple[str, str, str]] = set()
        for entry in self.entries:
            names.setdefault((entry.kind, entry.action, entry.detail), []).append(entry.name or "(model)")
        for entry in self.entries:
            cells = (entry.kind, entry.action, entry.detail)
            alike = names[cells]
            if len(alike) <= _MOST_LINES:
                yield (entry.name or "(model)", *cells)
            elif cells not in folded:
                folded.add(cells)
                yield (f"{alike[0]} and {len(alike) - 1} more", *cells)

    def __str__(self) -> str:
        """A table, a line a module or for many alike; numbers; the next step after single replacements."""
        rows = [("module", "kind", "action", "detail"), *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]))
            for row in rows
        ]
        if not self.entries:
            lines = ["nothing that recfuse knows was found; nothing was changed"]
        if self.restored:
            return "\n".join([*lines, f"{len(self.restored)} restored, {len(self.left)} left"])
        already = f", {len(self.already)} already swapped" if self.already else ""
        numbers = f"{len(self.replaced)} replaced, {len(self.fused)} fused, {len(self.left)} left"
        if any(entry.pattern for entry in self.entries):
            return "\n".join([*lines, f"{len(self.swapped)} swapped, {len(self.left)} left"])
        lines.append(numbers + already)
        if len(self.replaced) > 1:
            lines.append(_NEXT)
        return "\n".join(lines)
