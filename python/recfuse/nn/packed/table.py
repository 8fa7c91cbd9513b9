"""``PackedTable``: one table of a packed module, and its weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse.errors import ArgumentTypeError, ArgumentValueError, a_type
from recfuse.nn.packed.layout import TableSpec, table_rows
from recfuse.nn.packed.parameters import PackedParameters
from recfuse.nn.packed.pooling import table_call

_NAMES_SHOWN = 8
_SPEC_FIELDS = frozenset(TableSpec._fields) - {"matrix", "first_row"}


class TableWeight(Tensor):
    """A table's rows of the packed matrix: a view, so what is read is always today's and what is written in
    place changes the model. Operations on it give plain tensors.

    ``weight.data = x`` copies into the rows, where a plain view would be led away from them; ``weight.grad``
    is the table's part of the matrix's gradient.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    _table: PackedTable

    @property
    def data(self) -> Tensor:
        """The rows, without gradients."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copies into the rows."""
        self._table.weight = value

    @property
    def grad(self) -> Tensor | None:
        """The table's rows of the packed matrix's gradient; None: it has none. A sparse one has the table's
        own row numbers.
        """
        return self._table._grad()

    @grad.setter
    def grad(self, value: Tensor | None) -> NoReturn:
        """Refuses: the gradient belongs to the packed matrix."""
        raise AttributeError(
            "recfuse: the gradient of one packed table cannot be set; it is a part of the packed "
            "Parameter's: set that one's .grad, or call zero_grad() of the module"
        )

    def register_hook(self, hook: Any) -> NoReturn:
        """Refuses: calls read the packed matrix, not this view."""
        raise AttributeError(
            "recfuse: a hook on the weight of one packed table would never run, since calls read the packed "
            "matrix: register it on the module's Parameter"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        """A Parameter of its own, without the model."""
        return Parameter(self.detach().clone(), requires_grad=self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A Parameter of its own, without the model."""
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    def requires_grad_(self, requires_grad: bool = True) -> NoReturn:
        """Refuses: tables of one packed matrix are trained or frozen together."""
        raise AttributeError(
            f"recfuse: requires_grad_({requires_grad}) of one packed table is not possible; tables of "
            "one packed matrix are trained or frozen together: set it on the tables before they are packed "
            "(frozen tables get a matrix of their own), or on the module's Parameters"
        )


class PackedTable:
    """One table of a packed module. A new object at each look; only ``weight`` can be set.

    Attributes:
        name: as in the module's ``tables``.
        num_embeddings, embedding_dim, mode, padding_idx, include_last_offset, sparse: as of
            ``torch.nn.EmbeddingBag``.
        weight: ``[num_embeddings, embedding_dim]``, a view into the module's packed Parameter. Assigning a
            tensor (or to ``weight.data``) copies its values into the rows; another shape raises.
    """

    __slots__ = ("_module", "_spec")
    name: str  # these are the spec's, by __getattr__
    num_embeddings: int
    embedding_dim: int
    mode: str
    padding_idx: int | None
    include_last_offset: bool

    def __init__(self, module: PackedParameters, spec: TableSpec) -> None:
        """The table ``spec`` of ``module``."""
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_spec", spec)

    @property
    def sparse(self) -> bool:
        """Whether the packed matrix's gradient is sparse."""
        return self._module.layout.sparse

    @property
    def matrix(self) -> Tensor:
        """The packed matrix that has the rows."""
        return self._module.packed_weights()[self._spec.matrix]

    @property
    def weight(self) -> Tensor:
        """The rows; see the class."""
        rows = table_rows(self._spec, self.matrix)
        if type(rows) is Tensor:  # not a fake one, which cannot become another class
            rows = rows.as_subclass(TableWeight)
            rows._table = self
        return rows

    @weight.setter
    def weight(self, value: Tensor) -> None:
        where = f"recfuse: the weight of table {self.name!r}"
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(f"{where} is set to {a_type(value)}, must be a tensor")
        shape = [self.num_embeddings, self.embedding_dim]
        if list(value.shape) != shape:
            raise ArgumentValueError(
                f"{where} is set to shape {list(value.shape)}, must have {shape}: it is a part of a packed "
                "matrix"
            )
        name = self._module.layout.parameter_names[self._spec.matrix]
        if name not in self._module._parameters:
            raise ArgumentValueError(
                f"{where} cannot be set: its packed matrix {name} is computed (parametrized or pruned) at "
                "each call; set what it is computed from"
            )
        with torch.no_grad():
            table_rows(self._spec, self.matrix).copy_(value)

    def _grad(self) -> Tensor | None:
        grad = self.matrix.grad
        if grad is None:
            return None
        first, rows = self._spec.first_row, self._spec.num_embeddings
        if grad.layout is torch.strided:
            return grad.narrow(0, first, rows)
        whole = grad.coalesce()
        row = whole.indices()[0]
        own = (row >= first) & (row < first + rows)
        return torch.sparse_coo_tensor(
            row[own][None] - first,
            whole.values()[own],
            (rows, self.embedding_dim),
            check_invariants=False,
            is_coalesced=True,
        )

    def __call__(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pools this table alone, as ``torch.nn.EmbeddingBag`` does; for all tables call the module."""
        return table_call(self._spec, self.matrix, self.sparse, input, offsets, per_sample_weights)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets ``weight`` alone."""
        if name == "weight":
            object.__setattr__(self, name, value)
            return
        raise AttributeError(
            f"recfuse: {name} of the packed table {self.name!r} cannot be set; it is fixed when tables are "
            "packed: recfuse.unswap(model) gives modules back that can be changed; or make a new module"
        )

    def __getattr__(self, name: str) -> Any:
        """What the spec says of the table; else says why a packed table has no such thing."""
        if name in _SPEC_FIELDS:
            return getattr(self._spec, name)
        raise AttributeError(
            f"recfuse: a packed table has no {name}; it is a range of rows of a module, not a module: "
            "recfuse.unswap(model) gives the modules back"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy's module is a copy too."""
        return PackedTable, (self._module, self._spec)

    def __repr__(self) -> str:
        """As torch's."""
        more = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"PackedTable({self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}{more})"


def refuse_replacement(key: Any) -> NoReturn:
    """Raises: a packed table is no module in whose place another could be."""
    raise TypeError(
        f"recfuse: the packed table {key!r} cannot be replaced by another object: calls would not use it. "
        "Assign to its weight, or recfuse.unswap(model) first"
    )


class Tables(Mapping[str, PackedTable]):
    """The tables of a packed module by name, in order; also as attributes."""

    __slots__ = ("_module",)

    def __init__(self, module: PackedParameters) -> None:
        """Of this module."""
        self._module = module

    def __getitem__(self, name: str) -> PackedTable:
        """By name; KeyError."""
        for spec in self._module.layout.tables:
            if spec.name == name:
                return PackedTable(self._module, spec)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Names."""
        return (spec.name for spec in self._module.layout.tables)

    def __len__(self) -> int:
        """How many."""
        return len(self._module.layout.tables)

    def values(self) -> list[PackedTable]:  # type: ignore[override]
        """The tables, in order."""
        return [PackedTable(self._module, spec) for spec in self._module.layout.tables]

    def items(self) -> list[tuple[str, PackedTable]]:  # type: ignore[override]
        """Names and tables, in order."""
        return [(table.name, table) for table in self.values()]

    def __setitem__(self, name: str, table: Any) -> NoReturn:
        """Refuses; see :func:`refuse_replacement`."""
        refuse_replacement(name)

    def __getattr__(self, name: str) -> PackedTable:
        """By name, as of a ModuleDict."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"recfuse: there is no table {name!r}") from None

    def __repr__(self) -> str:
        """Some names, and the Parameters that have the tables: a thousand lines help nobody."""
        names = list(self)
        some = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        parameters = ", ".join(self._module.layout.parameter_names)
        return f"<{len(names)} packed tables: {some}; their Parameters: {parameters}>"
