"""Rows of a table pinned in a GPU's L2 cache, because a trace reads them often.

>>> pinned = recfuse.PinnedRows(module.weight, trace)      # the most frequent rows that fit in half of L2
>>> module.pinned = pinned                                 # refreshed before every call of the module

A pinned row is read into L2 and marked to be evicted last. The mark is a preference of the hardware: other
work weakens it, so it is refreshed. All tables of a device share its L2. Pinning that saves time for a single
table may cost time for fifty: measure it. :func:`recfuse.tune` does, with the cost of the refresh included.

The CPU has no pinning: all methods do nothing, and :attr:`PinnedRows.active` is false.

Source: Jain et al., MICRO 2024, section IV-C.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recfuse._arguments import integer, real, row_indices, wrong_type
from recfuse._codes import row_bytes
from recfuse.errors import ArgumentValueError
from recfuse.ops.library import check_tensor
from recfuse.ops.pin_rows import on_gpu, pin_rows, unpin

_CACHE_LINE = 128  # bytes


def rows_that_fit(weight: Tensor, l2_fraction: float) -> int:
    """Return how many rows of a table fit in a share of its GPU's L2, each on separate cache lines."""
    lines = max(1, -(-row_bytes(weight.shape[1], weight.dtype) // _CACHE_LINE))
    l2_bytes = torch.cuda.get_device_properties(weight.device).L2_cache_size
    return int(l2_fraction * l2_bytes) // (lines * _CACHE_LINE)


class PinnedRows:
    """Pin the most frequent rows of a table in L2, and refresh them.

    The first refresh pins them. The end of a ``with`` block, or :meth:`close`, unpins them. Set
    ``module.pinned`` to refresh them in each call of a :class:`recfuse.nn.EmbeddingBag`. A model compiled by
    ``torch.compile`` does not refresh: call :meth:`refresh` yourself. A CUDA graph captures the refresh with
    the call of the module.

    Args:
        weight: ``[rows, dim]``; follows the module's ``.to()``.
        trace: indices ``[lookups]``; the most frequent rows are pinned.
        statistics: instead of ``trace``, its statistics by :func:`recfuse.traces.statistics`.
        rows: instead of ``trace``, rows of the table, the most important first.
        l2_fraction: the maximal share of L2. The paper uses 0.75; the rest serves all other data. Default:
            0.5.
        every: calls between two refreshes by :meth:`step`. Default: 1.

    Raises:
        ValueError: not exactly one of trace, statistics and rows; a row outside the table; a bad number.

    Example:
        >>> table = recfuse.nn.EmbeddingBag(1000, 16, mode="sum")
        >>> pinned = recfuse.PinnedRows(table.weight, trace=torch.randint(1000, (500,)))
        >>> pinned.active  # this table is on the CPU
        False

    Note:
        Works on CUDA devices. On the CPU all methods do nothing. Results and gradients do not change.

    Source: Jain et al., MICRO 2024, section IV-C.
    """

    def __init__(
        self,
        weight: Tensor,
        trace: Any = None,
        *,
        statistics: Any = None,
        rows: Any = None,
        l2_fraction: float = 0.5,
        every: int = 1,
    ) -> None:
        """Choose the rows; the first refresh pins them."""
        check_tensor("PinnedRows", "weight", weight)
        if weight.dim() != 2:
            _fail(f"weight has shape {list(weight.shape)}; expected [rows, dim]")
        l2_fraction = real("recfuse.PinnedRows: l2_fraction", l2_fraction)
        if not 0 < l2_fraction <= 1:
            _fail(f"l2_fraction is {l2_fraction}; expected (0, 1]")
        every = integer("recfuse.PinnedRows: every", every, 1, 2**63 - 1)
        self.weight = weight
        self.l2_fraction = l2_fraction
        self.every = every
        self._hottest = _choice(weight, trace, statistics, rows)
        self._rows: Tensor | None = None  # the chosen rows that fit, on the GPU
        self._overlap = False
        self._stream: torch.cuda.Stream | None = None
        self._closed = False
        self._calls_left = 0  # until the next refresh

    @property
    def active(self) -> bool:
        """True if rows are pinned: on a GPU, with chosen rows, before ``close``."""
        return not self._closed and len(self._hottest) > 0 and on_gpu(self.weight)

    @property
    def rows(self) -> Tensor:
        """The pinned rows, int64 ``[n]``, on the table's GPU; on the CPU, all chosen rows."""
        device = self.weight.device
        if self._rows is None or self._rows.device != device:
            chosen = self._hottest
            if on_gpu(self.weight):
                chosen = chosen[: rows_that_fit(self.weight, self.l2_fraction)]
            self._rows = chosen.to(device)
        return self._rows

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def overlap(self, on: bool = True) -> PinnedRows:
        """Refresh on a separate stream from now on, in parallel to the current stream.

        Args:
            on: False: refresh on the current stream again.

        Returns:
            PinnedRows: this object.
        """
        self._overlap = on
        return self

    def refresh(self, stream: torch.cuda.Stream | None = None) -> None:
        """Pin the rows now.

        Args:
            stream: the stream of the refresh. Default: a separate stream after :meth:`overlap`, else the
                current stream. During capture of a CUDA graph it is always the current stream.
        """
        if not self.active:
            return
        rows = self.rows
        stream = stream or self._own_stream()
        if stream is None or torch.cuda.is_current_stream_capturing():
            pin_rows(self.weight, rows)
            return
        # Needs no wait: no value is read, and the rows are already on the GPU. They must stay there.
        rows.record_stream(stream)
        with torch.cuda.stream(stream):
            pin_rows(self.weight, rows)

    def step(self) -> None:
        """Count a call of the table; refresh before the first and every ``every``-th call."""
        if self._calls_left == 0:
            self.refresh()
            self._calls_left = self.every
        self._calls_left -= 1

    def update(self, trace: Any = None, *, statistics: Any = None, rows: Any = None) -> None:
        """Unpin the rows, and pin other rows.

        Args:
            trace: indices ``[lookups]``; the most frequent rows are pinned.
            statistics: instead of ``trace``, its statistics by :func:`recfuse.traces.statistics`.
            rows: instead of ``trace``, rows of the table, the most important first.

        Raises:
            ValueError: not exactly one of trace, statistics and rows; a row outside the table.
        """
        chosen = _choice(self.weight, trace, statistics, rows)
        self._release()
        self._hottest, self._calls_left = chosen, 0
        self.refresh()

    def close(self) -> None:
        """Unpin the rows, and stop refreshing."""
        self._release()
        self._closed = True

    def __enter__(self) -> PinnedRows:
        """Pin the rows."""
        self.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unpin the rows."""
        self.close()

    def __repr__(self) -> str:
        """Return the number of pinned rows, the device and the interval of refreshes."""
        where = f"on {self.weight.device}" if self.active else "nothing: no GPU, no rows, or closed"
        return f"PinnedRows({len(self):,} rows, every {self.every} calls, {where})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without tensors and streams of a device."""
        return {**self.__dict__, "_rows": None, "_stream": None, "_calls_left": 0}

    def _own_stream(self) -> torch.cuda.Stream | None:
        if self._overlap and (self._stream is None or self._stream.device != self.weight.device):
            self._stream = torch.cuda.Stream(self.weight.device)
        return self._stream if self._overlap else None

    def _release(self) -> None:
        """Unpin the pinned rows, if any, after all earlier refreshes."""
        if self.active and self._rows is not None and self._rows.device == self.weight.device:
            current = torch.cuda.current_stream(self.weight.device)
            if self._stream is not None:
                current.wait_stream(self._stream)
            self._rows.record_stream(current)
            unpin(self.weight, self._rows)
        self._rows = None


def _choice(weight: Tensor, trace: Any, statistics: Any, rows: Any) -> Tensor:
    """Return the chosen rows of the table, int64 ``[n]`` on the CPU, the most frequent first."""
    if sum(source is not None for source in (trace, statistics, rows)) != 1:
        _fail("several or no arguments of trace, statistics and rows are given; expected exactly one of them")
    if trace is not None:
        from recfuse.data import traces

        rows = traces.hottest(row_indices("recfuse.PinnedRows: trace", trace))
    elif statistics is not None:
        if not hasattr(statistics, "hottest"):
            needed = "the result of recfuse.traces.statistics"
            raise wrong_type("recfuse.PinnedRows: statistics", statistics, needed)
        rows = statistics.hottest
    chosen = torch.from_numpy(row_indices("recfuse.PinnedRows: rows", rows).astype(np.int64))
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < weight.shape[0]:
        _fail(
            f"rows lie in [{int(chosen.min())}, {int(chosen.max())}]; expected [0, {weight.shape[0]}), the "
            "rows of the table"
        )
    return chosen


def _fail(detail: str) -> None:
    raise ArgumentValueError(f"recfuse.PinnedRows: {detail}")
