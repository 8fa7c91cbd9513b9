"""Tables that stay in the host's memory. Of frozen ones a GPU reads a few rows itself, in page-locked memory;
many rows are looked up by CPU threads, for which only the GPU's stream waits. Rows of tables that train are
looked up within the call. What threads pool is one more input of the GPU's call, which writes it beside its
own columns.
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
"""Of a batch for which a GPU reads the host's tables: it gets the addresses of some 45 rows in a microsecond,
and to wake CPU threads takes as long as a few thousand rows. Samples are counted where the batch is on the
GPU alone, which would be waited for."""


class Lookup(enum.Enum):
    """Who looks rows of the host's tables up."""

    GPU = "the GPU reads page-locked memory"
    STREAM = "CPU threads, which the GPU's stream alone waits for"
    CALL = "CPU threads, within the call"


def is_frozen(table: Tensor) -> bool:
    """Whether a host's table may be read after a call: not where an optimizer could have changed it."""
    return not table.requires_grad


@dataclass(frozen=True)
class _Pooled(Column):
    """A column of the host's as the GPU sees it: numbers, which are pooled already."""

    kind = ""
    width: int

    def _check(self) -> None:
        pass

    @property
    def use(self) -> FeatureRef:
        """As no feature of a batch is used."""
        return FeatureRef(self.name, "", True)

    def sources(self) -> tuple[Source, ...]:
        """The one."""
        return (Source(self.use, ()),)

    @property
    def output_dim(self) -> int:
        """How many columns of the output it has."""
        return self.width


class HostSplit:
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
        both = list(zip(columns, is_host, strict=True))
        kinds = [[one for one, host in both if host == kind] for kind in (False, True)]
        self._packer, self._matrices = packer, list(matrices)
        self.device, self.host = (ColumnGroup(kind, tables, packer.uses) if kind else None for kind in kinds)
        self._near = InputSubset(packer.uses, self.host.used() if self.host is not None else set())
        seen = [_Pooled(one.name, one.output_dim) if host else one for one, host in both]
        seen = [one for one in seen if not isinstance(one, _Pooled) or one.width > 0]
        self._widths = [one.width for one in seen if isinstance(one, _Pooled)]
        self._merging = ColumnGroup(
            seen, tables, packer.uses
        )  # the GPU's columns, and what the host has pooled
        self._waits = True  # the GPU's streams can wait for the host
        self._readers = PinnedReaders()
        self._counts = LastResult(self._count_reads)
        self._merged_places = LastResult(self._place_pooled)
        self._fits = LastResult(self._compare_dtypes)
        widths = [(host, one.output_dim) for one, host in both]
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
        if not torch.compiler.is_compiling():
            why = "tables are on the host: keep them on the GPU (host_tables=None)"
            _refuse_capture(device, why)
        near = given if on_host is None else on_host
        if self._merges(weights):
            return self._merged(weights, given, near, device, bounds_check)
        pieces: dict[bool, Tensor] = {}
        if self.device is not None:
            pieces[False] = self.device(
                weights, inputs_to_device(given, self._packer, device, len(weights)), sparse, bounds_check
            )
        if self.host is not None:
            found = self.host(weights, self._near(near, _CPU), sparse, bounds_check)
            pieces[True] = found.to(device, non_blocking=True)
        dtype = fused_dtype([weight.dtype for weight in weights])
        at, slices = {False: 0, True: 0}, []
        for kind, width in self._runs:
            slices.append(pieces[kind].narrow(1, at[kind], width).to(dtype))
            at[kind] += width
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim=1)

    def rows(self, near: Inputs) -> int:
        """How many rows of the host's tables a batch looks up, if the features of an input are alike."""

        def values_of(number: int, width: int) -> float:
            if width > 0:
                return width
            jagged = number - len(near.dense)
            return near.values[jagged].shape[0] / max(near.offsets[jagged].shape[0] - 1, 1)

        each = sum(
            count * math.prod(values_of(*one) for one in read)
            for read, count in self._counts(near.places).items()
        )
        return int(each * near.batch)

    def _count_reads(self, places: Sequence[InputRef]) -> Counter[tuple[tuple[int, int], ...]]:
        """How many of the host's columns read the same inputs, with their widths, 0: jagged. A cross reads
        two, and looks up each pair of their values.
        """
        at = dict(zip(self._packer.uses, places, strict=True))
        columns = self.host.columns if self.host is not None else ()
        read = [[at[source.use] for source in column.sources()] for column in columns]
        return Counter(tuple((place.input, place.width) for place in places) for places in read)

    def keep(self, weights: Sequence[Tensor], device: torch.device) -> None:
        """Keeps page-locked tables until the device's current stream has read them."""
        self._readers.add(((number, weights[number]) for number in self._matrices), device)

    def lookup(
        self, weights: Sequence[Tensor], given: Inputs, on_host: Inputs | None, device: torch.device
    ) -> Lookup:
        """Who looks rows up; ``on_host``: the batch there, if it is known."""
        if torch.compiler.is_compiling() or device.type != "cuda" or needs_derivatives(weights):
            return Lookup.CALL
        tables = [weights[number] for number in self._matrices]
        if not all(map(is_frozen, tables)):
            return Lookup.CALL
        near = given if on_host is None and given.device.type == "cpu" else on_host
        captured = is_captured()  # a graph has no CPU threads
        few = given.batch <= MOST_SAMPLES if near is None else self.rows(near) <= MOST_ROWS
        if (captured or few) and all(table.is_pinned() for table in tables):
            return Lookup.GPU
        if captured or near is None or not self._waits or is_transformed():
            return Lookup.CALL
        return Lookup.STREAM if all(self._dtypes_fit(weights)) else Lookup.CALL

    def _merges(self, weights: Sequence[Tensor]) -> bool:
        """Whether one call on the device writes all columns: without gradients, and if dtypes fit."""
        if torch.compiler.is_compiling() or is_transformed() or needs_derivatives(weights):
            return False
        return self._dtypes_fit(weights)[0]

    def _dtypes_fit(self, weights: Sequence[Tensor]) -> tuple[bool, bool]:
        """Whether the tables of the device's call give the output its dtype; and whether the host's rows,
        pooled to float32, are those of a call of the host's columns alone.
        """
        return self._fits(*[weight.dtype for weight in weights])

    def _compare_dtypes(self, *dtypes: torch.dtype) -> tuple[bool, bool]:
        whole = fused_dtype(dtypes)
        merges = fused_dtype([dtypes[number] for number in self._merging.matrices]) == whole
        is_exact = fused_dtype([dtypes[number] for number in self._matrices]) in (torch.float32, whole)
        return merges, is_exact

    def _merged(
        self, weights: Sequence[Tensor], given: Inputs, near: Inputs, device: torch.device, bounds_check: str
    ) -> Tensor:
        """What the host has pooled, while the batch is copied, is one more input of the device's call."""
        given = inputs_to_device(given, self._packer, device, len(weights), 1)
        dense = list(given.dense)
        if self.host is not None:
            pooled = self.host(weights, self._near(near, _CPU), False, bounds_check)
            if self._widths:
                dense.append(pooled.to(torch.float32))
        own = [weights[number] for number in self._merging.matrices]
        inputs = given._replace(places=self._merged_places(given.places, len(given.dense)), dense=dense)
        return self._merging.programs.compute(own, inputs, bounds_check, device)

    def deferred(
        self,
        weights: Sequence[Tensor],
        given: Inputs,
        on_host: Inputs | None,
        device: torch.device,
        bounds_check: str,
    ) -> Tensor:
        """The same without waiting for the host's threads: see ``Lookup.STREAM``."""
        if on_host is None and given.device != device:  # the caller's tensors may change: these are copies
            packed = self._packer(given, True).to(device, non_blocking=True)
            given, on_host = packed.inputs(self._packer.uses), packed.on_host
        given = inputs_to_device(given, self._packer, device, len(weights), 1)
        host, part = self.host, self._merging
        assert on_host is not None and host is not None
        near = self._near(on_host, _CPU)
        program, on_device = part.programs.of(self._merged_places(given.places, len(given.dense)), device)
        host_program, _ = host.programs.of(near.places, _CPU)
        try:
            return embedding_columns_split(
                [weights[number] for number in part.matrices],
                program,
                (*given[2:], given.batch),
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
            self._waits = False  # nothing was begun
            return self(weights, given, on_host, device, False, bounds_check)
        except (ValueError, TypeError, IndexError) as error:
            of_host = OF_HOST in str(error)
            (host if of_host else part).programs.raise_named(error, near if of_host else given)

    def _place_pooled(self, places: tuple[InputRef, ...], number: int) -> tuple[InputRef, ...]:
        """Where uses are when what is pooled has become dense input `number`, the last one."""
        more = int(bool(self._widths))
        slots = itertools.accumulate(self._widths, initial=0)
        given = (one if one.input < number else one._replace(input=one.input + more) for one in places)
        pooled = (InputRef(number, slot, width) for slot, width in zip(slots, self._widths, strict=False))
        return (*given, *pooled)


def packed_to_device(packed: PackedColumns, device: torch.device) -> PackedColumns:
    """A packed batch on the device, if that is a GPU."""
    if device.type != "cuda":
        return packed
    if packed.device.type == "cpu":
        _refuse_capture(device, "the batch is on the host: move it to the GPU before")
    return packed.to(device, non_blocking=True)


def inputs_to_device(
    given: Inputs, packer: Packer, device: torch.device, n_weights: int, n_more: int = 0
) -> Inputs:
    """The inputs on a device: packed, and copied at once, where they are elsewhere, or too many with
    ``n_more`` dense ones.
    """
    many = device.type == "cuda" and not fits_a_gpu(len(given.dense) + n_more, len(given.values), n_weights)
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
