"""Reports of ``swap`` and ``unswap``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from recfuse.optim.base import FusedOptimizer

if TYPE_CHECKING:
    from recfuse.perf.gain import Gain

_NEXT = (
    "next: recfuse.nn.FusedEmbeddingBagList(bags) pools them in one call, fuse_optimizers=True updates them "
    "inside backward(): docs/swap.md"
)

_MOST_LINES = 8  # for entries that differ only in their names; more entries become a single line


@dataclass(frozen=True)
class SwapEntry:
    """The action for one module, or for one match in a graph.

    Attributes:
        name: the name as in ``model.named_modules()``; "" is the model.
        kind: the class before the swap.
        action: "replaced", "fused", "left", "optimizer", "already" (by an earlier swap), "restored" (by
            unswap); in a graph "swapped" or "left".
        detail: the result of the action, or the reason why the module was left.
        pattern: in a graph, the pattern that matched.

    Example:
        >>> report = recfuse.swap(torch.nn.Sequential(torch.nn.EmbeddingBag(10, 4)))
        >>> report.entries[0].name, report.entries[0].action
        ('0', 'replaced')
    """

    name: str  # as in model.named_modules(); "" is the model
    kind: str  # class before the swap
    action: (
        str  # "replaced", "fused", "left"; "optimizer"; "already", by an earlier swap; "restored" by unswap
    )
    detail: str  # result of the action, or the reason why it was left
    pattern: str = ""  # of a graph: the pattern that matched; action is "swapped" or "left"


@dataclass
class SwapReport:
    """Report of :func:`recfuse.swap` or :func:`recfuse.unswap`: an entry a module, or of a graph a match.

    ``print`` shows a table. The properties select entries by action.

    Attributes:
        entries: all entries, in the order of the model.
        fused_optimizers: with ``fuse_optimizers``, the optimizer that updates the tables of each given
            optimizer.
        gain: with ``predict``, the model before and after the swap, predicted.

    Example:
        >>> print(recfuse.swap(torch.nn.Sequential(torch.nn.EmbeddingBag(10, 4))))
        module  kind          action    detail
        0       EmbeddingBag  replaced  recfuse.nn.EmbeddingBag
        1 replaced, 0 fused, 0 left
    """

    entries: list[SwapEntry] = field(default_factory=list)
    fused_optimizers: list[FusedOptimizer] = field(default_factory=list)
    gain: Gain | None = None

    def add(self, name: str, kind: str, action: str, detail: str, pattern: str = "") -> None:
        """Append an entry.

        Args:
            name, kind, action, detail, pattern: the fields of :class:`SwapEntry`.
        """
        self.entries.append(SwapEntry(name, kind, action, detail, pattern))

    def leave(self, reason: str) -> None:
        """Mark all entries as left, for a swap that was undone.

        Args:
            reason: the reason.
        """
        self.entries = [
            entry if entry.action in ("left", "already") else replace(entry, action="left", detail=reason)
            for entry in self.entries
        ]
        self.fused_optimizers.clear()

    def found(self, pattern: str) -> list[SwapEntry]:
        """Return the entries of a pattern, swapped and left.

        Args:
            pattern: the name of the pattern.
        """
        return [entry for entry in self.entries if entry.pattern == pattern]

    @property
    def swapped(self) -> list[SwapEntry]:
        """Parts of a graph that recfuse's operators compute now."""
        return [entry for entry in self.entries if entry.action == "swapped"]

    @property
    def replaced(self) -> list[SwapEntry]:
        """Modules that use recfuse's operator for one table now."""
        return [entry for entry in self.entries if entry.action == "replaced"]

    @property
    def fused(self) -> list[SwapEntry]:
        """Collections that pool their tables in one call now."""
        return [entry for entry in self.entries if entry.action == "fused"]

    @property
    def left(self) -> list[SwapEntry]:
        """Modules and matches that were left, with the reason."""
        return [entry for entry in self.entries if entry.action == "left"]

    @property
    def already(self) -> list[SwapEntry]:
        """Modules that were recfuse's before: swapped earlier, or made by hand."""
        return [entry for entry in self.entries if entry.action == "already"]

    @property
    def restored(self) -> list[SwapEntry]:
        """Modules that :func:`recfuse.unswap` has restored."""
        return [entry for entry in self.entries if entry.action == "restored"]

    def names(self) -> set[str]:
        """Return the names of all modules in the report."""
        return {entry.name for entry in self.entries}

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield the cells of the table; entries that differ only in their names share a row."""
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
        """The table, the counts, and the next step after single replacements."""
        rows = [("module", "kind", "action", "detail"), *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]))
            for row in rows
        ]
        if not self.entries:
            lines = ["recfuse found no module to replace; the model is unchanged"]
        if self.restored:
            return "\n".join([*lines, f"{len(self.restored)} restored, {len(self.left)} left"])
        already = f", {len(self.already)} already swapped" if self.already else ""
        numbers = f"{len(self.replaced)} replaced, {len(self.fused)} fused, {len(self.left)} left"
        if any(entry.pattern for entry in self.entries):
            return "\n".join([*lines, f"{len(self.swapped)} swapped, {len(self.left)} left"])
        lines.append(numbers + already)
        if self.gain is not None:
            lines.append(str(self.gain))
        if len(self.replaced) > 1:
            lines.append(_NEXT)
        return "\n".join(lines)
