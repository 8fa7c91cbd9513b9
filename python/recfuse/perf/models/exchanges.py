"""Bytes that ranks exchange for a table, by placement: for plans, and for the choice of a way in a call.

A rank holds a share of ``1 / ranks`` of each exchange itself. The numbers are sums over all ranks.
"""

from __future__ import annotations

_FLOAT = 4  # bytes of a gradient that is added


def gathered_bytes(
    lookups: float, bags: float, columns: float, index: float, element: float, ranks: int
) -> float:
    """Returns the bytes of a copied table's training step that sends lookups and gradients to every rank.

    ``lookups`` and ``bags`` are those of all ranks; ``index`` and ``element`` the bytes of an index and of a
    gradient. A bag sends its length.
    """
    return (ranks - 1) * (lookups * index + bags * (index + columns * element))


def dense_bytes(rows: float, columns: float, ranks: int) -> float:
    """Returns the bytes of a copied table's training step that adds dense gradients of all ranks.

    Each rank sends its gradient once and receives the sum once, both less its own share. A row also sends a
    byte, whether it has lookups, in both directions.
    """
    return 2 * (ranks - 1) * rows * (columns * _FLOAT + 1)
