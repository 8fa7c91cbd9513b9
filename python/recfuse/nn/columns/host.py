"""Tables that stay in the host's memory. A GPU reads those that are frozen, in page-locked memory. Columns of
others are looked up by the CPU while the GPU computes the rest, and copied into the output.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recfuse._arguments import integer
from recfuse.errors import ArgumentValueError
from recfuse.nn.columns.inputs import Inputs
from recfuse.nn.columns.packed import PackedColumns
from recfuse.nn.columns.packing import Packer
from recfuse.nn.columns.parts import Part, Restriction
from recfuse.nn.columns.programs import is_captured
from recfuse.nn.columns.specs import Column, TableColumn
from recfuse.nn.packed.layout import TableSpec
from recfuse.ops.embedding_columns import fits_a_gpu

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class MemoryReport:
    """Where the tables of an ``EmbeddingColumns`` are."""

    device: str
    device_bytes: int  # of tables that are, or go, where the module is
    host_bytes: int  # of tables that stay in the host's memory when the module is on a GPU
    host_tables: tuple[str, ...]

    @property
    def saved(self) -> float:
        """The share of all tables' bytes that a GPU does not need."""
        whole = self.device_bytes + self.host_bytes
        return self.host_bytes / whole if whole else 0.0

    def __str__(self) -> str:
        """One line."""
        names = ", ".join(self.host_tables[:8]) + (", ..." if len(self.host_tables) > 8 else "")
        text = f"{self.device_bytes / 2**20:.1f} MiB of tables on {self.device}"
        if not self.host_tables:
            return text
        return f"{text}, {self.host_bytes / 2**20:.1f} MiB ({self.saved:.1%}) stay on the host: {names}"


def size_of(text: str | int | None, where: str) -> int | None:
    """Bytes, from a number or a text as "256MiB"; None: no bound.

    Raises:
        TypeError, ValueError: it is none of these.
    """
    if text is None:
        return None
    if not isinstance(text, str):
        return integer(where, text, 0, 2**62)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]iB|B|)\s*", text)
    if found is None:
        raise ArgumentValueError(f'{where} is {text!r}, must be a number of bytes or a text as "256MiB"')
    return int(float(found[1]) * _UNITS[found[2]])


def stays(column: TableColumn, nbytes: int, threshold: int | None) -> bool:
    """Whether a table stays on the host when the module moves to a GPU."""
    if column.placement == "auto":
        return threshold is not None and nbytes > threshold
    return column.placement == "host"


def page_locked(table: Tensor) -> Tensor:
    """A copy that a GPU can read; the same where it is one, other processes share it, or there is no room."""
    if not torch.cuda.is_available() or table.is_pinned() or table.is_shared():
        return table
    try:
        return table.pin_memory()
    except RuntimeError as error:
        warnings.warn(
            f"recfuse.nn.EmbeddingColumns: {table.nbytes / 2**20:.0f} MiB of tables could not be page-locked "
            f"({str(error).splitlines()[0]}); CPU threads look their rows up, which takes longer",
            stacklevel=2,
        )
        return table


MOST_READ_BY_GPU = 512
"""Samples of a batch for which a GPU reads the host's tables: of more it waits for their pages' addresses."""


def is_read_by_gpu(table: Tensor) -> bool:
    """Whether a GPU reads a host's table: not where an optimizer could change it before a kernel has run."""
    return not table.requires_grad and table.is_pinned()


class Split:
    """The columns of a module in two parts, by where their tables are."""

    def __init__(
        self,
        columns: Sequence[Column],
        tables: Sequence[TableSpec],
        matrices: Sequence[int],
        packer: Packer,
    ) -> None:
        """``matrices``: those on the host; ``packer``: of the module's uses."""
        on_host = {spec.name for spec in tables if spec.matrix in matrices}
        is_host = [isinstance(one, TableColumn) and one.table_name in on_host for one in columns]
        kinds = [
            [one for one, host in zip(columns, is_host, strict=True) if host == kind]
            for kind in (False, True)
        ]
        self._packer = packer
        self.device, self.host = (Part(kind, tables, packer.uses) if kind else None for kind in kinds)
        self._near = Restriction(packer.uses, self.host.used() if self.host is not None else set())
        widths = [(host, one.output_dim) for one, host in zip(columns, is_host, strict=True)]
        self._runs = [
            (kind, sum(width for _, width in run))
            for kind, run in itertools.groupby(widths, lambda one: one[0])
        ]

    def __call__(
        self,
        weights: Sequence[Tensor],
        given: Inputs,
        on_host: Inputs | None,
        device: torch.device,
        sparse: bool,
        bounds_check: str,
    ) -> Tensor:
        """``[batch, output_dim]`` on ``device``; ``on_host``: the same batch there, if it is known."""
        cpu = torch.device("cpu")
        pieces: dict[bool, Tensor] = {}
        if self.device is not None:
            pieces[False] = self.device(
                weights, moved(given, self._packer, device, len(weights)), sparse, bounds_check
            )
        if self.host is not None:
            _refuse_capture(device, "tables are on the host: keep them on the GPU (host_tables=None)")
            near = self._near(given if on_host is None else on_host, cpu)
            pieces[True] = _sent(self.host(weights, near, sparse, bounds_check), device)
        dtypes = {weight.dtype for weight in weights}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        at, slices = {False: 0, True: 0}, []
        for kind, width in self._runs:
            slices.append(pieces[kind].narrow(1, at[kind], width).to(dtype))
            at[kind] += width
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim=1)


def sent(packed: PackedColumns, device: torch.device) -> PackedColumns:
    """A packed batch on the device, if that is a GPU."""
    if device.type != "cuda":
        return packed
    if packed.device.type == "cpu":
        _refuse_capture(device, "the batch is on the host: move it to the GPU before")
    return packed.to(device, non_blocking=True)


def moved(given: Inputs, packer: Packer, device: torch.device, n_weights: int) -> Inputs:
    """The inputs on a device: packed, and copied at once, where they are elsewhere, or too many."""
    many = device.type == "cuda" and not fits_a_gpu(len(given.dense), len(given.values), n_weights)
    if given.device == device and not many:
        return given
    if given.device.type == "cpu":
        _refuse_capture(device, "the batch is on the host: move it to the GPU before")
    pin = device.type == "cuda" and given.device.type == "cpu" and not torch.compiler.is_compiling()
    return packer(given, pin).to(device, non_blocking=pin).inputs(packer.uses)


def _refuse_capture(device: torch.device, why: str) -> None:
    """A graph would copy what the host has now, each time: the host's work is no part of it."""
    if device.type == "cuda" and not torch.compiler.is_compiling() and is_captured():
        raise ArgumentValueError(f"recfuse.nn.EmbeddingColumns: a CUDA graph is being captured, and {why}")


def _sent(found: Tensor, device: torch.device) -> Tensor:
    """On a device, without waiting for the copy."""
    if device.type != "cuda":
        return found.to(device)
    if torch.compiler.is_compiling() or found.requires_grad:
        return found.to(device, non_blocking=True)
    pinned = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(found).to(device, non_blocking=True)
