"""The placement of tables: their sizes, page-locked memory, and the streams of GPUs that read it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recfuse._arguments import integer
from recfuse._codes import row_bytes
from recfuse._storage import is_readable
from recfuse.errors import ArgumentValueError
from recfuse.nn.columns.programs import is_captured
from recfuse.nn.columns.specs import TableColumn
from recfuse.nn.packed.layout import WeightForm
from recfuse.nn.packed.tables import PackedTables

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class MemoryReport:
    """The bytes of the tables of an ``EmbeddingColumns``, by device."""

    device: str
    device_bytes: int  # of tables that are on the module's device, or move with it
    host_bytes: int  # of tables that stay in the host's memory when the module is on a GPU
    host_tables: tuple[str, ...]

    @property
    def saved(self) -> float:
        """The share of all tables' bytes that a GPU does not store."""
        whole = self.device_bytes + self.host_bytes
        return self.host_bytes / whole if whole else 0.0

    def __str__(self) -> str:
        """Return a line of text."""
        names = ", ".join(self.host_tables[:8]) + (", ..." if len(self.host_tables) > 8 else "")
        text = f"{self.device_bytes / 2**20:.1f} MiB of tables on {self.device}"
        if not self.host_tables:
            return text
        return f"{text}, {self.host_bytes / 2**20:.1f} MiB ({self.saved:.1%}) stay on the host: {names}"


def size_of(text: str | int | None, prefix: str) -> int | None:
    """Return bytes from a number or a text such as "256MiB"; None means no bound.

    Raises:
        TypeError, ValueError: ``text`` has another form.
    """
    if text is None:
        return None
    if not isinstance(text, str):
        return integer(prefix, text, 0, 2**62)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]iB|B|)\s*", text)
    if match is None:
        raise ArgumentValueError(f'{prefix} is {text!r}; expected a number of bytes or a text as "256MiB"')
    return int(float(match[1]) * _UNITS[match[2]])


def stays(column: TableColumn, nbytes: int, threshold: int | None) -> bool:
    """Return whether a table stays on the host when the module moves to a GPU."""
    if column.placement == "auto":
        return threshold is not None and nbytes > threshold
    return column.placement == "host"


class Tag(NamedTuple):
    """Properties that all tables of a matrix share, in addition to their form."""

    is_max: bool  # pooled by max, in a separate call if they have gradients
    on_host: bool


def form_of(
    column: TableColumn, dtype: torch.dtype, device: torch.device, threshold: int | None
) -> WeightForm:
    """Return the form of a column's table in a module on ``device``; ``dtype`` is the column's default."""
    dtype = column.dtype or dtype
    on_host = stays(column, column.rows * row_bytes(column.embedding_dim, dtype), threshold)
    table_device = torch.device("cpu") if on_host and device.type == "cuda" else device
    tag = Tag(column.pooling == "max", on_host)
    return WeightForm(column.rows, column.embedding_dim, dtype, table_device, column.trainable, tag)


def page_locked(table: Tensor) -> Tensor:
    """Return a page-locked copy, which a GPU can read.

    Returns the table itself if it is page-locked, if other processes share it, or if memory does not suffice.
    """
    if not torch.cuda.is_available() or table.is_pinned() or table.is_shared():
        return table
    try:
        return table.pin_memory()
    except RuntimeError as error:
        warnings.warn(
            f"recfuse.nn.EmbeddingColumns: {table.nbytes / 2**20:.0f} MiB of tables could not be "
            f"page-locked ({str(error).splitlines()[0]}), so CPU threads look their rows up, which takes "
            "longer",
            stacklevel=2,
        )
        return table


class PinnedReaders:
    """Keeps page-locked tables until the streams that read them have passed, even if all owners drop them.

    torch frees such memory when the streams that it knows as readers have passed. It knows only the streams
    of its own copies.
    """

    def __init__(self) -> None:
        """Begin without streams."""
        self._streams: dict[int, tuple[tuple[int, int], set[int]]] = {}  # by matrix: its memory and streams

    def add(self, tables: Iterable[tuple[int, Tensor]], device: torch.device) -> None:
        """Record that the device's current stream reads these tables, each with its number."""
        if is_captured():
            return
        stream = torch.cuda.current_stream(device).cuda_stream
        for number, weight in tables:
            table = weight.detach()
            if not is_readable(table):
                continue
            memory = table.data_ptr(), table.untyped_storage()._cdata
            known_memory, streams = self._streams.get(number, (None, set()))
            if known_memory != memory:
                streams = set()
            if stream not in streams and table.numel() > 0:
                first = table[:1, :1]
                torch.empty_like(first, device=device).copy_(first, non_blocking=True)
                streams.add(stream)
            self._streams[number] = memory, streams


class HostTables(PackedTables):
    """Packed tables with matrices on the host, page-locked if the others are on a GPU."""

    _host_matrices: list[int]
    """The numbers of the matrices on the host."""
    _home: Tensor
    """An empty buffer on the device of the module, if a matrix is on the host."""
    _always_split = False
    """For tests: split a call although both parts are on one device."""

    def _why_not_movable(self) -> str | None:
        return "some tables of its module stay in the host's memory" if self._host_matrices else None

    def _lock_pages(self) -> None:
        """Page-lock the host's tables, if the others are on a GPU."""
        weights = self.packed_weights()
        if self._host_matrices and self._home.device.type == "cuda":
            for number in self._host_matrices:
                if weights[number].is_cpu:
                    weights[number].data = page_locked(weights[number].data)

    def _is_split(self, weights: Sequence[Tensor]) -> bool:
        """Return whether some tables are on the host and the module on another device."""
        on_host = all(weights[number].is_cpu for number in self._host_matrices)
        return on_host and (self._always_split or self._home.device.type == "cuda")

    def memory_report(self) -> MemoryReport:
        """Return the memory of the tables on the GPU and on the host.

        Returns:
            MemoryReport: bytes by device, and the names of the tables on the host.
        """
        sizes, names = [0, 0], []
        weights = self.packed_weights()
        for spec in self.layout.tables:
            on_host = spec.matrix in self._host_matrices
            size = row_bytes(spec.embedding_dim, weights[spec.matrix].dtype)
            sizes[on_host] += spec.num_embeddings * size
            if on_host:
                names.append(spec.name)
        home = self._home.device if self._host_matrices else weights[0].device if weights else "cpu"
        return MemoryReport(str(home), *sizes, tuple(names))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HostTables:
        """Apply a function, as every module.

        If the others move to a GPU, tables that stay on the host only take the new dtype.
        """
        weights = self.packed_weights()
        host_weights = [weights[number] for number in self._host_matrices]
        unmoved = {
            id(tensor)
            for weight in host_weights
            if weight.is_cpu
            for tensor in (weight, weight.grad)
            if tensor is not None
        }

        def moved_or_kept(tensor: Tensor) -> Tensor:
            if id(tensor) not in unmoved:
                return fn(tensor)
            probe = fn(torch.empty(0, dtype=tensor.dtype))
            if not probe.is_cuda:
                return fn(tensor)
            cast = tensor.to(probe.dtype)
            return page_locked(cast) if any(tensor is weight for weight in host_weights) else cast

        super()._apply(moved_or_kept if unmoved else fn, recurse)
        return self
