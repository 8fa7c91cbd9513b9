"""``PackedParameters``: the Parameters of a module with packed tables, and their creation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse._codes import row_bytes
from recfuse.errors import AllocationError, ArgumentValueError
from recfuse.nn.memory import advise_huge_pages, redirect
from recfuse.nn.packed.fusable import gradient_hooks, why_not_fusable
from recfuse.nn.packed.layout import (
    Layout,
    Matrix,
    TableSpec,
    WeightForm,
    arrange,
    layout_of,
    parameter_names,
)
from recfuse.nn.packed.optimizer_state import Piece
from recfuse.nn.packed.optimizers import Move, Target
from recfuse.nn.packed.store import PackedStore, matrices_of
from recfuse.nn.refusals import RefusedQconfig
from recfuse.ops.embedding_bag_arguments import padding_row


class PackedParameters(torch.nn.Module):
    """A module whose tables are ranges of rows of a few Parameters ``[rows, dim]``.

    It has a Parameter for each dtype, dim and device of the tables. Tables that are frozen, or in another
    group of an optimizer, have a separate Parameter.
    """

    qconfig = RefusedQconfig()
    _store: PackedStore

    _tables_name = "embedding_bags"
    """The name of the submodule with the tables and the Parameters; "" for the module itself."""

    _remedy = "Use recfuse.nn.EmbeddingBag for it."
    """The end of the error for a table that cannot be packed."""

    @property
    def layout(self) -> Layout:
        """The positions of the tables. A change creates a new object."""
        return self._store.layout

    @property
    def holder(self) -> torch.nn.Module:
        """The module that has the tables as children, and the packed Parameters."""
        return self._modules[self._tables_name] if self._tables_name else self  # type: ignore[return-value]

    def packed_weights(self) -> list[Tensor]:
        """Return the current Parameters, each ``[rows, dim]``, in the order of the layout's matrices."""
        holder, store = self._modules[self._tables_name] if self._tables_name else self, self._store
        if store.origins:
            self._check_frozen()
        parameters, names = holder._parameters, store.layout.parameter_names  # type: ignore[union-attr]
        try:  # inlined matrices_of: each call executes this
            return [parameters[name] for name in names]  # type: ignore[misc]
        except KeyError:
            return matrices_of(holder, names)  # type: ignore[arg-type]

    def _check_frozen(self) -> None:
        """Check whether matrices of frozen tables have had gradients enabled."""

    def _pack(
        self,
        names: Sequence[str],
        bags: Sequence[torch.nn.EmbeddingBag],
        table_of_feature: Sequence[int],
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        """Take over the weights of ``bags``, with entries and state of ``optimizers``.

        Copies each weight into its rows and makes the old Parameter a view of them, matrix by matrix, so that
        little memory is allocated twice. ``optimizers`` continue with the new Parameters.

        Raises:
            ValueError: a table cannot be packed; an optimizer cannot continue; an optimizer that is not in
                ``optimizers`` holds an old Parameter. Nothing has changed then.
        """
        prefix = f"recfuse.nn.{type(self).__name__}"
        hooked = (
            f"table {at}: {found}" for at, bag in enumerate(bags) if (found := gradient_hooks(bag.weight))
        )
        if reason := why_not_fusable(bags) or next(hooked, None):
            raise ArgumentValueError(f"{prefix}: {reason}. {self._remedy}")
        specs = []
        for name, bag in zip(names, bags, strict=True):
            row = None if bag.padding_idx is None else padding_row(bag.padding_idx, bag.weight)
            specs.append(TableSpec(name, *bag.weight.shape, bag.mode, row, bag.include_last_offset))
        old_weights = [bag.weight for bag in bags]
        weights = list({id(weight): weight for weight in old_weights}.values())
        numbers = {id(weight): number for number, weight in enumerate(weights)}
        move = Move(optimizers, weights, prefix)
        matrices = arrange(
            [
                WeightForm(*weight.shape, weight.dtype, weight.device, weight.requires_grad, tag)
                for weight, tag in zip(weights, move.tags, strict=True)
            ]
        )
        targets, parameters = [], {}
        for name, parameter, matrix in self._allocate(matrices):
            parameters[name] = parameter
            pieces = []
            for number, first_row in matrix.members:
                old = weights[number]
                rows = parameter.data.narrow(0, first_row, old.shape[0])
                with torch.no_grad():
                    rows.copy_(old)
                    if not old.is_inference():
                        redirect(old, rows)
                pieces.append(Piece(number, 0, old.shape[0], first_row))
            targets.append(Target(parameter, self._below(name), pieces))
        weight_of_table = [numbers[id(weight)] for weight in old_weights]
        sparse = bags[0].sparse if bags else False
        layout = layout_of(specs, weight_of_table, table_of_feature, matrices, sparse)
        self._publish(layout, parameters, [bag.training for bag in bags])
        move.apply(targets)

    def _pack_new(
        self,
        specs: Sequence[TableSpec],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        table_of_feature: Sequence[int],
        sparse: bool,
    ) -> None:
        """Create new tables, without values."""
        matrices = arrange(
            [
                WeightForm(spec.num_embeddings, spec.embedding_dim, dtype, device)
                for spec, dtype in zip(specs, dtypes, strict=True)
            ]
        )
        parameters = {
            name: parameter for name, parameter, _ in self._allocate(matrices, [spec.name for spec in specs])
        }
        self._publish(layout_of(specs, range(len(specs)), table_of_feature, matrices, sparse), parameters)

    def _allocate(
        self, matrices: Sequence[Matrix], names: Sequence[str] = ()
    ) -> Iterator[tuple[str, Parameter, Matrix]]:
        """Create a Parameter per matrix, in sequence; gap rows are zero, other rows are not initialized.

        ``names`` are those of the weights, for errors.

        Raises:
            AllocationError: memory does not suffice; names the matrix and its largest weight.
        """
        for name, matrix in zip(parameter_names(matrices), matrices, strict=True):
            form = matrix.form
            with torch.inference_mode(False), torch.no_grad():
                try:
                    data = torch.empty((matrix.rows, form.dim), dtype=form.dtype, device=form.device)
                except RuntimeError as error:  # torch has no class for it on the CPU, nor for 2^63 bytes
                    raise self._out_of_memory(matrix, names) from error
                advise_huge_pages(data)
                for first, end in matrix.gaps:
                    data[first:end].zero_()
                parameter = Parameter(data, requires_grad=form.requires_grad)
            yield name, parameter, matrix

    def _out_of_memory(self, matrix: Matrix, names: Sequence[str]) -> AllocationError:
        form, firsts = matrix.form, [first for _, first in matrix.members]
        sizes = [end - first for first, end in zip(firsts, [*firsts[1:], matrix.rows], strict=True)]
        rows, (number, _) = max(zip(sizes, matrix.members, strict=True))
        table = repr(names[number]) if names else f"number {number}"
        needed = matrix.rows * row_bytes(form.dim, form.dtype)
        return AllocationError(
            f"recfuse.nn.{type(self).__name__}: {len(sizes)} tables of dim {form.dim} in {form.dtype} on "
            f"{form.device} need {needed:,} bytes of memory, which are not free, and the largest is table "
            f"{table} with {rows:,} rows"
        )

    def _publish(
        self, layout: Layout, parameters: Mapping[str, Parameter], training: Sequence[bool] = ()
    ) -> None:
        """Give the module its complete Parameters and tables.

        ``training`` is the mode of each table, by default the module's.
        """
        raise NotImplementedError

    def _below(self, name: str) -> str:
        """Return the name in this module of the holder's ``name``."""
        return f"{self._tables_name}.{name}" if self._tables_name else name
