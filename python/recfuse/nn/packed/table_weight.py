"""``TableWeight``: the weight of a packed table, a view of the packed matrix."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse.errors import ArgumentValueError


class TableWeight(Tensor):
    """A table's rows of the packed matrix.

    It is a view: reads always return current values, and writes in place change the model. Operations on it
    return plain tensors. It counts as a ``torch.nn.Parameter``.

    ``weight.data = x`` copies into the rows, while a plain view would switch to other memory. ``weight.grad``
    is the table's part of the matrix's gradient. ``requires_grad_`` is the table's.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    _is_param = True  # for isinstance(weight, torch.nn.Parameter)
    _table: Any  # the PackedTable

    @property
    def data(self) -> Tensor:
        """The rows, without gradients."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy into the rows."""
        self._table._copy(value)

    @property
    def grad(self) -> Tensor | None:
        """The table's rows of the packed matrix's gradient, or None if that has no gradient.

        A sparse gradient has the table's own row numbers.
        """
        return self._table._grad()

    @grad.setter
    def grad(self, value: Tensor | None) -> NoReturn:
        """Raise an error: the gradient belongs to the packed matrix."""
        raise AttributeError(
            f"recfuse: the gradient of {self._table._said} cannot be set, since it is a part of the packed "
            "Parameter's. Set .grad of the packed Parameter, or call zero_grad() of the model."
        )

    @property
    def requires_grad(self) -> bool:
        """True if the table is trained."""
        return Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """Train or freeze the table, as ``requires_grad_``."""
        self._table.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> TableWeight:
        """Train or freeze only this table; see ``PackedTable.requires_grad_``. Returns its new weight."""
        return self._table.requires_grad_(requires_grad).weight  # type: ignore[return-value]

    @property
    def is_leaf(self) -> bool:
        """False, because the weight is a part of a Parameter."""
        return False

    @property
    def retains_grad(self) -> bool:
        """Raise an error, because optimizers of torch read this attribute of their Parameters."""
        raise ArgumentValueError(
            f"recfuse: the weight of {self._table._said} is a part of the Parameter "
            f"{self._table._matrix_name}, and an optimizer of torch cannot step it alone. Pass the packed "
            "Parameters, as model.parameters() has them, or make the optimizer before the swap and pass it "
            "to recfuse.swap(model, optimizers=[optimizer]), which keeps its groups, or pass "
            "recfuse.optim.embedding_parameters(table), which makes a Parameter for the table alone."
        )

    def register_hook(self, hook: Any) -> NoReturn:
        """Raise an error: calls read the packed matrix, not this view."""
        raise AttributeError(
            f"recfuse: a hook on the weight of {self._table._said} would never run, since calls read the "
            "packed matrix. Register it on the module's Parameter, or call recfuse.unswap(model)."
        )

    register_post_accumulate_grad_hook = register_hook

    def retain_grad(self) -> None:
        """Do nothing, as a Parameter: ``grad`` is kept."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        """Copy the weight to a separate Parameter, without the model."""
        return Parameter(self.detach().clone(), requires_grad=self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the weight as a separate Parameter, without the model."""
        return self.__deepcopy__({}).__reduce_ex__(protocol)
