"""Tables that stay in the host's memory.

A GPU reads a few rows of frozen tables itself, in page-locked memory. CPU threads look up many rows; only the
GPU's stream waits for them. Rows of tables that train are looked up within the call. The rows that threads
pool become a further input of the GPU's call, which writes them next to its own columns.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recfuse.errors import ArgumentValueError
from recfuse.nn.columns.groups import ColumnGroup, InputSubset
from recfuse.nn.columns.inputs import Inputs
from recfuse.nn.columns.lowering import InputRef
from recfuse.nn.columns.packed import PackedColumns
from recfuse.nn.columns.packing import Packer
from recfuse.nn.columns.placement import PinnedReaders
from recfuse.nn.columns.programs import is_captured
from recfuse.nn.columns.specs import Column, FeatureRef, Source, TableColumn
from recfuse.nn.memo import LastResult
from recfuse.nn.packed.layout import TableSpec
from recfuse.ops.embedding_columns import OF_HOST, embedding_columns_split, fits_a_gpu
from recfuse.ops.fused_embedding_bag import fused_dtype
from recfuse.ops.library import is_transformed, needs_derivatives

_CPU = torch.device("cpu")


MOST_ROWS, MOST_SAMPLES = 4096, 512
"""Limits of a batch for which a GPU reads the host's tables.

A GPU gets the addresses of some 45 rows in a microsecond, and to wake CPU threads takes as long as a few
thousand rows. Samples are counted if the batch is only on the GPU, because to count its rows would
synchronize."""


class Lookup(enum.Enum):
    """The device that looks up rows of the host's tables."""

    GPU = "the GPU reads page-locked memory"
    STREAM = "CPU threads, which the GPU's stream alone waits for"
    CALL = "CPU threads, within the call"


def is_frozen(table: Tensor) -> bool:
    """Return whether a table on the host may be read after a call: no optimizer may change it."""
    return not table.requires_grad


@dataclass(frozen=True)
class _Pooled(Column):
    """A column of the host for the GPU: numbers, which are already pooled."""

    kind = ""
    width: int

    def _check(self) -> None:
        pass

    @property
    def use(self) -> FeatureRef:
        """A use that no feature of a batch has."""
        return FeatureRef(self.name, "", True)

    def sources(self) -> tuple[Source, ...]:
        """Return the single source."""
        return (Source(self.use, ()),)

    @property
    def output_dim(self) -> int:
        """The number of columns of the output."""
        return self.width


class HostSplit:
    """The columns of a module in two parts: tables on the device, and tables on the host."""

    def __init__(
        self,
        columns: Sequence[Column],
        tables: Sequence[TableSpec],
        matrices: Sequence[int],
        packer: Packer,
    ) -> None:
        """Split columns; ``matrices`` are the numbers of those on the host."""
        on_host = {spec.name for spec in tables if spec.matrix in matrices}
        is_host = [isinstance(column, TableColumn) and column.table_name in on_host for column in columns]
        both = list(zip(columns, is_host, strict=True))
        kinds = [[column for column, host in both if host == kind] for kind in (False, True)]
        self._packer, self._matrices = packer, list(matrices)
        self.device, self.host = (ColumnGroup(kind, tables, packer.uses) if kind else None for kind in kinds)
        self._near = InputSubset(packer.uses, self.host.used() if self.host is not None else set())
        columns_of_device = [
            _Pooled(column.name, column.output_dim) if host else column for column, host in both
        ]
        columns_of_device = [
            column for column in columns_of_device if not isinstance(column, _Pooled) or column.width > 0
        ]
        self._widths = [column.width for column in columns_of_device if isinstance(column, _Pooled)]
        # The GPU's columns, and the pooled columns of the host.
        self._merging = ColumnGroup(columns_of_device, tables, packer.uses)
        self._waits = True  # the GPU's streams can wait for the host
        self._readers = PinnedReaders()
        self._counts = LastResult(self._count_reads)
        self._merged_places = LastResult(self._place_pooled)
        self._fits = LastResult(self._compare_dtypes)
        widths = [(host, column.output_dim) for column, host in both]
        self._runs = [
            (kind, sum(width for _, width in run))
            for kind, run in itertools.groupby(widths, lambda pair: pair[0])
        ]

    def __call__(
        self,
        weights: Sequence[Tensor],
        inputs: Inputs,
        on_host: Inputs | None,
        device: torch.device,
        sparse: bool,
        bounds_check: str,
    ) -> Tensor:
        """Return ``[batch, output_dim]`` on ``device``.

        ``on_host`` is the same batch on the host, if known.
        """
        if not torch.compiler.is_compiling():
            why = "tables are on the host: keep them on the GPU (host_tables=None)"
            _refuse_capture(device, why)
        near = inputs if on_host is None else on_host
        if self._merges(weights):
            return self._merged(weights, inputs, near, device, bounds_check)
        pieces: dict[bool, Tensor] = {}
        if self.device is not None:
            pieces[False] = self.device(
                weights, inputs_to_device(inputs, self._packer, device, len(weights)), sparse, bounds_check
            )
        if self.host is not None:
            output = self.host(weights, self._near(near, _CPU), sparse, bounds_check)
            pieces[True] = output.to(device, non_blocking=True)
        dtype = fused_dtype([weight.dtype for weight in weights])
        at, slices = {False: 0, True: 0}, []
        for kind, width in self._runs:
            slices.append(pieces[kind].narrow(1, at[kind], width).to(dtype))
            at[kind] += width
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim=1)

    def rows(self, near: Inputs) -> int:
        """Return the number of rows that a batch looks up in the host's tables.

        Assumes that the features of an input have equal numbers of values.
        """

        def values_of(number: int, width: int) -> float:
            if width > 0:
                return width
            jagged = number - len(near.dense)
            return near.values[jagged].shape[0] / max(near.offsets[jagged].shape[0] - 1, 1)

        each = sum(
            count * math.prod(values_of(*key) for key in read)
            for read, count in self._counts(near.places).items()
        )
        return int(each * near.batch)

    def _count_reads(self, places: Sequence[InputRef]) -> Counter[tuple[tuple[int, int], ...]]:
        """Count the host's columns by the inputs that they read, with their widths (0: jagged).

        A cross reads two inputs, and looks up each pair of their values.
        """
        at = dict(zip(self._packer.uses, places, strict=True))
        columns = self.host.columns if self.host is not None else ()
        read = [[at[source.use] for source in column.sources()] for column in columns]
        return Counter(tuple((place.input, place.width) for place in places) for places in read)

    def keep(self, weights: Sequence[Tensor], device: torch.device) -> None:
        """Keep page-locked tables until the device's current stream has read them."""
        self._readers.add(((number, weights[number]) for number in self._matrices), device)

    def lookup(
        self, weights: Sequence[Tensor], inputs: Inputs, on_host: Inputs | None, device: torch.device
    ) -> Lookup:
        """Return the kind of lookup; ``on_host`` is the batch on the host, if known."""
        if torch.compiler.is_compiling() or device.type != "cuda" or needs_derivatives(weights):
            return Lookup.CALL
        tables = [weights[number] for number in self._matrices]
        if not all(map(is_frozen, tables)):
            return Lookup.CALL
        near = inputs if on_host is None and inputs.device.type == "cpu" else on_host
        captured = is_captured()  # a graph has no CPU threads
        few = inputs.batch <= MOST_SAMPLES if near is None else self.rows(near) <= MOST_ROWS
        if (captured or few) and all(table.is_pinned() for table in tables):
            return Lookup.GPU
        if captured or near is None or not self._waits or is_transformed():
            return Lookup.CALL
        return Lookup.STREAM if all(self._dtypes_fit(weights)) else Lookup.CALL

    def _merges(self, weights: Sequence[Tensor]) -> bool:
        """Return whether one call on the device writes all columns: without gradients, and if dtypes fit."""
        if torch.compiler.is_compiling() or is_transformed() or needs_derivatives(weights):
            return False
        return self._dtypes_fit(weights)[0]

    def _dtypes_fit(self, weights: Sequence[Tensor]) -> tuple[bool, bool]:
        """Return two facts of dtypes.

        The first: the tables of the device's call give the output its dtype. The second: the host's rows,
        pooled to float32, are equal to those of a separate call of the host's columns.
        """
        return self._fits(*[weight.dtype for weight in weights])

    def _compare_dtypes(self, *dtypes: torch.dtype) -> tuple[bool, bool]:
        common = fused_dtype(dtypes)
        merges = fused_dtype([dtypes[number] for number in self._merging.matrices]) == common
        is_exact = fused_dtype([dtypes[number] for number in self._matrices]) in (torch.float32, common)
        return merges, is_exact

    def _merged(
        self, weights: Sequence[Tensor], batch: Inputs, near: Inputs, device: torch.device, bounds_check: str
    ) -> Tensor:
        """Compute all columns on the device; the host pools its columns while the batch is copied.

        The pooled columns are a further input of the device's call.
        """
        batch = inputs_to_device(batch, self._packer, device, len(weights), 1)
        dense = list(batch.dense)
        if self.host is not None:
            pooled = self.host(weights, self._near(near, _CPU), False, bounds_check)
            if self._widths:
                dense.append(pooled.to(torch.float32))
        matrices = [weights[number] for number in self._merging.matrices]
        inputs = batch._replace(places=self._merged_places(batch.places, len(batch.dense)), dense=dense)
        return self._merging.programs.compute(matrices, inputs, bounds_check, device)

    def deferred(
        self,
        weights: Sequence[Tensor],
        inputs: Inputs,
        on_host: Inputs | None,
        device: torch.device,
        bounds_check: str,
    ) -> Tensor:
        """Compute all columns without a wait for the host's threads; see ``Lookup.STREAM``."""
        if on_host is None and inputs.device != device:  # the caller's tensors may change: these are copies
            packed = self._packer(inputs, True).to(device, non_blocking=True)
            inputs, on_host = packed.inputs(self._packer.uses), packed.on_host
        inputs = inputs_to_device(inputs, self._packer, device, len(weights), 1)
        host, part = self.host, self._merging
        assert on_host is not None and host is not None
        near = self._near(on_host, _CPU)
        program, on_device = part.programs.of(self._merged_places(inputs.places, len(inputs.dense)), device)
        host_program, _ = host.programs.of(near.places, _CPU)
        try:
            return embedding_columns_split(
                [weights[number] for number in part.matrices],
                program,
                (*inputs[2:], inputs.batch),
                part.output_dim,
                on_device,
                [weights[number] for number in host.matrices],
                host_program,
                (*near[2:], near.batch),
                bounds_check,
            )
        except NotImplementedError as error:
            if "cannot wait" not in str(error):
                raise
            self._waits = False  # no work has begun
            return self(weights, inputs, on_host, device, False, bounds_check)
        except (ValueError, TypeError, IndexError) as error:
            of_host = OF_HOST in str(error)
            (host if of_host else part).programs.raise_named(error, near if of_host else inputs)

    def _place_pooled(self, places: tuple[InputRef, ...], number: int) -> tuple[InputRef, ...]:
        """Return the places of all uses if the host's pooled columns are dense input `number`, the last."""
        more = int(bool(self._widths))
        slots = itertools.accumulate(self._widths, initial=0)
        inputs = (
            place if place.input < number else place._replace(input=place.input + more) for place in places
        )
        pooled = (InputRef(number, slot, width) for slot, width in zip(slots, self._widths, strict=False))
        return (*inputs, *pooled)


def packed_to_device(packed: PackedColumns, device: torch.device) -> PackedColumns:
    """Return a packed batch on the device, if the device is a GPU."""
    if device.type != "cuda":
        return packed
    if packed.device.type == "cpu":
        _refuse_capture(device, "the batch is on the host: move it to the GPU before")
    return packed.to(device, non_blocking=True)


def inputs_to_device(
    inputs: Inputs, packer: Packer, device: torch.device, n_weights: int, n_more: int = 0
) -> Inputs:
    """Return the inputs on a device.

    Inputs on another device, or too many together with ``n_more`` further dense inputs, are packed and copied
    in one call.
    """
    many = device.type == "cuda" and not fits_a_gpu(len(inputs.dense) + n_more, len(inputs.values), n_weights)
    if inputs.device == device and not many:
        return inputs
    if inputs.device.type == "cpu":
        _refuse_capture(device, "the batch is on the host: move it to the GPU before")
    pin = device.type == "cuda" and inputs.device.type == "cpu" and not torch.compiler.is_compiling()
    return packer(inputs, pin).to(device, non_blocking=pin).inputs(packer.uses)


def _refuse_capture(device: torch.device, why: str) -> None:
    """Raise ValueError during capture of a CUDA graph.

    The host's work is no part of a graph, which would copy the present batch in every replay.
    """
    if device.type == "cuda" and not torch.compiler.is_compiling() and is_captured():
        raise ArgumentValueError(f"recfuse.nn.EmbeddingColumns: a CUDA graph is being captured, and {why}")
