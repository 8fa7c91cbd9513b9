"""``PackedParameters``: the Parameters of a module with packed tables, and how they are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse.errors import ArgumentValueError
from recfuse.nn.memory import advise_huge_pages, redirect
from recfuse.nn.packed.fusable import why_not_fusable
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
from recfuse.nn.packed.row_wise import watch
from recfuse.ops.embedding_bag_arguments import padding_row


class PackedParameters(torch.nn.Module):
    """Tables that are ranges of rows of a few Parameters ``[rows, dim]``: one for each dtype, dim and device
    of the tables; tables that are frozen, or in another group of an optimizer, have one of their own.
    """

    layout: Layout
    """Where the tables lie. Another layout is another object."""

    _table_prefix = "embedding_bags."
    """What the names of tables begin with in the state_dict."""

    def packed_weights(self) -> list[Tensor]:
        """The Parameters now: ``[rows, dim]`` each, in the order of the layout's matrices."""
        parameters = self._parameters
        try:
            return [parameters[name] for name in self.layout.parameter_names]
        except KeyError:  # parametrized or pruned: computed by the class or by a hook
            return [getattr(self, name) for name in self.layout.parameter_names]

    def _pack(
        self,
        names: Sequence[str],
        bags: Sequence[torch.nn.EmbeddingBag],
        table_of_feature: Sequence[int],
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        """Takes over the weights of ``bags``: copies each into its rows and makes the old Parameter a view of
        them, matrix by matrix, so that little is there twice. ``optimizers`` go on with the new Parameters.

        Raises:
            ValueError: a table that cannot be packed; an optimizer that cannot go on, or that holds an old
                Parameter and was not given. Nothing has changed then.
        """
        where = f"recfuse.nn.{type(self).__name__}"
        if reason := why_not_fusable(bags):
            raise ArgumentValueError(f"{where}: {reason}; use recfuse.nn.EmbeddingBag for it")
        specs = []
        for name, bag in zip(names, bags, strict=True):
            row = None if bag.padding_idx is None else padding_row(bag.padding_idx, bag.weight)
            specs.append(TableSpec(name, *bag.weight.shape, bag.mode, row, bag.include_last_offset))
        old_weights = [bag.weight for bag in bags]
        weights = list({id(weight): weight for weight in old_weights}.values())
        numbers = {id(weight): number for number, weight in enumerate(weights)}
        move = Move(optimizers, weights, where)
        matrices = arrange(
            [
                WeightForm(*weight.shape, weight.dtype, weight.device, weight.requires_grad, tag)
                for weight, tag in zip(weights, move.tags, strict=True)
            ]
        )
        targets = []
        for name, parameter, matrix in self._allocate(matrices):
            pieces = []
            for number, first_row in matrix.members:
                old = weights[number]
                rows = parameter.data.narrow(0, first_row, old.shape[0])
                with torch.no_grad():
                    rows.copy_(old)
                    if not old.is_inference():
                        redirect(old, rows)
                pieces.append(Piece(number, 0, old.shape[0], first_row))
            targets.append(Target(parameter, name, pieces))
        weight_of_table = [numbers[id(weight)] for weight in old_weights]
        sparse = bags[0].sparse if bags else False
        self._set_layout(layout_of(specs, weight_of_table, table_of_feature, matrices, sparse))
        move.apply(targets)

    def _pack_new(
        self,
        specs: Sequence[TableSpec],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        table_of_feature: Sequence[int],
        sparse: bool,
    ) -> None:
        """Makes new tables, whose values are not set yet."""
        matrices = arrange(
            [
                WeightForm(spec.num_embeddings, spec.embedding_dim, dtype, device)
                for spec, dtype in zip(specs, dtypes, strict=True)
            ]
        )
        for _ in self._allocate(matrices):
            pass
        self._set_layout(layout_of(specs, range(len(specs)), table_of_feature, matrices, sparse))

    def _allocate(self, matrices: Sequence[Matrix]) -> Iterator[tuple[str, Parameter, Matrix]]:
        """Registers a Parameter a matrix, one after the other; gap rows are zero, others not set."""
        for name, matrix in zip(parameter_names(matrices), matrices, strict=True):
            form = matrix.form
            with torch.inference_mode(False), torch.no_grad():
                data = torch.empty((matrix.rows, form.dim), dtype=form.dtype, device=form.device)
                advise_huge_pages(data)
                for first, end in matrix.gaps:
                    data[first:end].zero_()
                parameter = Parameter(data, requires_grad=form.requires_grad)
            self.register_parameter(name, parameter)
            yield name, parameter, matrix

    def _set_layout(self, layout: Layout) -> None:
        self.layout = layout
        watch(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy."""
        super().__setstate__(state)
        watch(self)
