"""``PackedTable``: a table of a packed module."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse._storage import is_readable
from recfuse.errors import ArgumentTypeError, ArgumentValueError, a_type
from recfuse.nn.embedding_bag import EmbeddingBag
from recfuse.nn.memory import own_storage
from recfuse.nn.packed.by_table.distributed import follow_checkpoints
from recfuse.nn.packed.layout import TableSpec, is_sharded, table_rows
from recfuse.nn.packed.moving import train_table
from recfuse.nn.packed.pooling import table_call
from recfuse.nn.packed.state_dict import copy_rows
from recfuse.nn.packed.store import PackedStore
from recfuse.nn.packed.table_weight import TableWeight
from recfuse.nn.packed.taking_part import followed_table, rows_of
from recfuse.nn.refusals import (
    HOOKS,
    MOVES,
    UNSWAP,
    NoParameters,
    RefusedQconfig,
    refusing_hook,
    refusing_move,
)

_FIXED = frozenset((*torch.nn.EmbeddingBag.__constants__, "forward", "name", "sparse"))


class PackedTable(torch.nn.EmbeddingBag):
    """A table of a packed module, in its ``modules()``.

    Its weight is a view of the packed matrix, which is the Parameter: ``parameters()`` of the model has only
    the matrix; ``parameters()``, ``state_dict()`` and ``load_state_dict()`` of the table have the view. Calls
    of the packed module read the matrix and do not call the table. The table therefore refuses changes that
    act only in its own call (hooks, another ``forward``, another ``mode``, parametrizations).

    Attributes:
        name: as in the module's ``tables``.
        num_embeddings, embedding_dim, mode, padding_idx, include_last_offset, sparse, max_norm, norm_type,
            scale_grad_by_freq: as of ``torch.nn.EmbeddingBag``; they cannot be set.
        weight: ``[num_embeddings, embedding_dim]``, see :class:`TableWeight`. Assigning a tensor (or to
            ``weight.data``) copies its values into the rows; another shape raises.
    """

    name: str
    qconfig = RefusedQconfig()

    def __init__(self, store: PackedStore, number: int) -> None:
        """Create table ``number`` of a store."""
        torch.nn.Module.__init__(self)
        spec = store.layout.tables[number]
        vars(self).update(
            _store=store,
            _number=number,
            _parameters=NoParameters(),
            name=spec.name,
            num_embeddings=spec.num_embeddings,
            embedding_dim=spec.embedding_dim,
            mode=spec.mode,
            padding_idx=spec.padding_idx,
            include_last_offset=spec.include_last_offset,
            sparse=store.layout.sparse,
            max_norm=None,
            norm_type=2.0,
            scale_grad_by_freq=False,
        )

    @property
    def place(self) -> tuple[PackedStore, int]:
        """The store of its module, and its number in the store."""
        return self._store, self._number

    @property
    def spec(self) -> TableSpec:
        """The specification of the table, with its rows in the matrix."""
        return self._store.layout.tables[self._number]

    @property
    def matrix(self) -> Tensor:
        """The packed matrix with the rows."""
        return self._store.matrix(self._number)

    @property
    def _matrix_name(self) -> str:
        return self._store.layout.parameter_names[self.spec.matrix]

    @property
    def _said(self) -> str:
        return f"packed table {self.name!r}"

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The rows; see the class."""
        if is_sharded(matrix := self.matrix):
            self._refuse_rows()
        rows = rows_of(self.spec, matrix)
        # A fake tensor cannot change its class.
        if type(rows) is Tensor and not torch.compiler.is_compiling():
            rows = rows.as_subclass(TableWeight)
            rows._table = self
        return rows

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self._copy(value)
        if isinstance(value, Parameter) and value.requires_grad != self.matrix.requires_grad:
            self.requires_grad_(value.requires_grad)

    def _refuse_rows(self) -> None:
        """Raise ValueError for a read of rows of a sharded matrix.

        Does not raise for torch.distributed, which follows names to the weight when it creates a
        ``state_dict``.
        """
        if not str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.distributed."):
            raise ArgumentValueError(
                f"recfuse: the weight of {self._said} is no view, since fully_shard has cut its packed "
                f"matrix {self._matrix_name} over processes, and a write would be lost. Read "
                "table.state_dict()['weight'], write with table.weight = tensor or load_state_dict(), and "
                "initialise before fully_shard."
            )

    def _copy(self, value: Any) -> None:
        """Copy a tensor into the rows."""
        prefix = f"recfuse: the weight of table {self.name!r}"
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(f"{prefix} is set to {a_type(value)}; expected a tensor")
        shape = [self.num_embeddings, self.embedding_dim]
        if list(value.shape) != shape:
            raise ArgumentValueError(
                f"{prefix} is set to shape {list(value.shape)}; expected {shape}, since it is a part of a "
                "packed matrix"
            )
        if self._matrix_name not in self._store.parameters:
            raise ArgumentValueError(
                f"{prefix} cannot be set, since its packed matrix {self._matrix_name} is computed "
                "(parametrized or pruned) at each call. Set the tensors that it is computed from."
            )
        with torch.no_grad():
            copy_rows(self.spec, self.matrix, value)

    def _grad(self) -> Tensor | None:
        grad = self.matrix.grad
        if grad is None:
            return None
        first, rows = self.spec.first_row, self.num_embeddings
        if grad.layout is torch.strided:
            return grad.narrow(0, first, rows)
        coalesced = grad.coalesce()
        row = coalesced.indices()[0]
        in_table = (row >= first) & (row < first + rows)
        return torch.sparse_coo_tensor(
            row[in_table][None] - first,
            coalesced.values()[in_table],
            (rows, self.embedding_dim),
            check_invariants=False,
            is_coalesced=True,
        )

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pool only this table, as ``torch.nn.EmbeddingBag``; for all tables call the module."""
        store, number = self._store, self._number
        layout = store.layout
        matrix = store.matrix(number)
        pooled = table_call(layout.tables[number], matrix, layout.sparse, input, offsets, per_sample_weights)
        if not torch.compiler.is_compiling():
            return pooled
        return followed_table(pooled, store.number, number)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Iterate over the weight, a view; over nothing with ``recurse=False``.

        Tools use ``recurse=False`` to collect the Parameters that each module adds to a model. A table adds
        no Parameter.
        """
        if recurse:
            yield f"{prefix}.weight" if prefix else "weight", self.weight  # type: ignore[misc]
        else:
            follow_checkpoints()
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def requires_grad_(self, requires_grad: bool = True) -> PackedTable:
        """Train or freeze only this table.

        A frozen table moves to a matrix without a gradient: neither a backward pass nor an optimizer changes
        its rows, and ``weight.grad`` is None. When it is trained again, it returns to its rows, and an
        optimizer of the packed Parameter continues to step it.

        Raises:
            ValueError: the tables of its module cannot move: some stay in the host's memory, or the packed
                matrix is computed.
        """
        train_table(self._store, self._number, bool(requires_grad))
        return self

    def train(self, mode: bool = True) -> PackedTable:
        """Set the mode, as every module, without torch's checks: a model may have a thousand tables."""
        vars(self)["training"] = mode
        return super().train(mode) if self._modules else self  # type: ignore[return-value]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedTable:
        return super()._apply(fn, recurse) if self._modules or self._buffers else self  # type: ignore[return-value]

    # ---- state

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        key, rows = prefix + "weight", table_rows(self.spec, self.matrix)
        saved = destination.get(key)  # set by the module with all tables, if that is saved
        if saved is None or (is_readable(saved) and saved.data_ptr() != rows.data_ptr()):
            destination[key] = self.weight if keep_vars else own_storage(rows)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        unexpected: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected, error_msgs
        )
        key = prefix + "weight"
        unexpected_keys.extend(name for name in unexpected if name != key)
        if self._store.loading is error_msgs:  # the module with all tables has loaded this table
            return
        if key not in state_dict:
            if strict:
                missing_keys.append(key)
            return
        value = state_dict[key]
        if local_metadata.get("assign_to_params_buffers", False) and isinstance(value, Tensor):
            matrix = self.matrix
            if (value.dtype, value.device) != (matrix.dtype, matrix.device):
                error_msgs.append(
                    f"recfuse: assign=True for {key}, a {self._said}, found {value.dtype} on {value.device}; "
                    f"expected {matrix.dtype} on {matrix.device} as its packed matrix is. Load the whole "
                    "model."
                )
                return
        try:
            self._copy(value)
        except (ValueError, TypeError) as error:
            error_msgs.append(f"size mismatch for {key}: {error}")

    # ---- attributes that a table refuses

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as every module; refuse attributes that calls of the packed module ignore."""
        if name == "weight":
            object.__setattr__(self, name, value)
            return
        fixed = name in _FIXED
        if fixed and name in vars(self) and vars(self)[name] == value:
            return
        if fixed or isinstance(value, Parameter):
            self._refuse(f"{name} cannot be set, since tables of one packed module are pooled in one call")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute; refuse to delete the weight."""
        if name == "weight":
            self._refuse("the weight cannot be removed or computed")
        super().__delattr__(name)

    def register_parameter(self, name: str, param: Parameter | None) -> NoReturn:
        """Raise an error, for example for ``torch.nn.utils.prune``."""
        self._refuse(f"a Parameter {name!r} would not be used, since calls read the packed matrix")

    def share_memory(self) -> NoReturn:
        """Raise an error: the memory belongs to the matrix."""
        self._refuse("memory is shared by all tables of a matrix. Call share_memory() of the model.")

    def _refuse(self, operation: str) -> NoReturn:
        raise AttributeError(f"recfuse: {self._said}: {operation.removesuffix('.')}. {UNSWAP}")

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Copy the table with its module, or copy it alone to a :class:`recfuse.nn.EmbeddingBag`."""
        if memo:
            twin = type(self).__new__(type(self))
            memo[id(self)] = twin
            vars(twin).update(copy.deepcopy(vars(self), memo))
            return twin
        bag = EmbeddingBag(
            self.num_embeddings,
            self.embedding_dim,
            mode=self.mode,
            sparse=self.sparse,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
            _weight=table_rows(self.spec, self.matrix).detach().clone(),
        )
        bag.weight.requires_grad_(self.matrix.requires_grad)
        return bag.train(self.training)


for _method in HOOKS:
    setattr(PackedTable, _method, refusing_hook(_method))
for _method in MOVES:
    setattr(PackedTable, _method, refusing_move(_method))
