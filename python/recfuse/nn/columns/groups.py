"""``ColumnGroup``: columns that one call computes, with or without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recfuse.nn.columns.addresses import Addresses
from recfuse.nn.columns.inputs import Inputs
from recfuse.nn.columns.lowering import InputRef, Lowered, TableRef
from recfuse.nn.columns.programs import Programs
from recfuse.nn.columns.specs import Column, FeatureRef, TableColumn
from recfuse.nn.columns.training import Training
from recfuse.nn.memo import LastResult
from recfuse.nn.packed.layout import TableSpec
from recfuse.ops.library import needs_derivatives


class ColumnGroup:
    """A subset of the columns of a module.

    Attributes:
        columns: their specifications, in the order of the output.
        matrices: the numbers of the module's packed matrices that contain their tables.
        programs: the programs of calls without gradients.
    """

    def __init__(
        self, columns: Sequence[Column], tables: Sequence[TableSpec], uses: Sequence[FeatureRef] = ()
    ) -> None:
        """Create a group.

        ``tables`` are those of the whole module; ``uses`` come first in the order of places.
        """
        self.columns = tuple(columns)
        spec_of = {spec.name: spec for spec in tables}
        read_specs = [
            spec_of[column.table_name] for column in self.columns if isinstance(column, TableColumn)
        ]
        self.matrices = sorted({spec.matrix for spec in read_specs})
        place_of = {
            spec.name: TableRef(
                self.matrices.index(spec.matrix),
                spec.first_row * spec.embedding_dim,
                spec.num_embeddings,
                spec.embedding_dim,
            )
            for spec in read_specs
        }
        lowered = Lowered(self.columns, place_of, uses)
        self.programs = Programs([column.name for column in self.columns], lowered)
        self._training = Training(self.columns, place_of, self.programs)

    @property
    def output_dim(self) -> int:
        """The number of columns of the output."""
        return self.programs.output_dim

    def used(self) -> set[FeatureRef]:
        """Return the uses that the columns read."""
        return {source.use for column in self.columns for source in column.sources()}

    def __call__(self, weights: Sequence[Tensor], inputs: Inputs, sparse: bool, bounds_check: str) -> Tensor:
        """Return ``[batch, output_dim]``.

        ``weights`` are all packed matrices of the module; ``inputs`` must be on their device.
        """
        matrices = [weights[number] for number in self.matrices]
        if needs_derivatives(matrices):
            return self._training(matrices, inputs, sparse, bounds_check)
        return self.programs.compute(matrices, inputs, bounds_check)

    def at(self, weights: Sequence[Tensor], inputs: Addresses, bounds_check: str) -> Tensor:
        """Return ``[batch, output_dim]`` without gradients, from the addresses of inputs."""
        matrices = [weights[number] for number in self.matrices]
        return self.programs.compute_at(matrices, inputs, matrices[0].device, bounds_check)


class _Chosen(NamedTuple):
    """The numbers of the inputs that are read, or None for all inputs."""

    places: tuple[InputRef, ...]  # positions of the uses among these inputs
    dense: list[int] | None
    jagged: list[int] | None


class InputSubset:
    """Selects the inputs that some uses read, and caches the form of the last batch."""

    def __init__(self, uses: Sequence[FeatureRef], selected: set[FeatureRef]) -> None:
        """Select ``selected`` from all uses."""
        self._wanted = [use in selected for use in uses]
        self._chosen = LastResult(self._choose)

    def __call__(self, inputs: Inputs, device: torch.device) -> Inputs:
        """Return the selected inputs on a device. Places of the other uses have no meaning."""
        places, dense, jagged = self._chosen(inputs.places, len(inputs.dense), len(inputs.values))
        lists: list[Sequence[Tensor]] = list(inputs[2:])
        if dense is not None:
            lists[0] = [inputs.dense[number] for number in dense]
        if jagged is not None:
            lists[1:] = [[each[number] for number in jagged] if each else () for each in inputs[3:]]
        if inputs.device != device:
            lists = [[tensor.to(device) for tensor in each] for each in lists]
        return Inputs(places, inputs.batch, *lists)

    def _choose(self, places: Sequence[InputRef], n_dense: int, n_jagged: int) -> _Chosen:
        both = list(zip(self._wanted, places, strict=True))
        numbers = sorted({place.input for is_wanted, place in both if is_wanted})
        new = {number: at for at, number in enumerate(numbers)}
        chosen = tuple(
            place._replace(input=new[place.input]) if is_wanted else InputRef(0, 0, 1)
            for is_wanted, place in both
        )
        dense = [number for number in numbers if number < n_dense]
        jagged = [number - n_dense for number in numbers if number >= n_dense]
        return _Chosen(
            chosen, None if len(dense) == n_dense else dense, None if len(jagged) == n_jagged else jagged
        )
