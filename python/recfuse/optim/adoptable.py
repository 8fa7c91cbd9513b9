"""Optimizers of torch and of facebookresearch/dlrm that have a fused step, and the forms of their states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from recfuse.errors import ArgumentValueError
from recfuse.optim.base import FusedOptimizer
from recfuse.optim.groups import check_betas, check_number, check_off
from recfuse.optim.kinds import SGD, Adagrad, Adam, RowWiseAdagrad
from recfuse.optim.states import check_state

_DENSE_ADAM = (
    "moves each row of a table at each step, looked up or not, which a fused optimizer never does. Use "
    "torch.optim.SparseAdam for the tables (with sparse=True), make recfuse.optim.Adam of them, or pass "
    "fuse_optimizers=False."
)
_PASS = "Pass fuse_optimizers=False."
_WHY_NOT = {torch.optim.Adam: _DENSE_ADAM, torch.optim.AdamW: _DENSE_ADAM}


class Form(NamedTuple):
    """The form of the state of a class of optimizers, in comparison with a fused optimizer.

    Attributes:
        fused: the fused class with the same steps.
        dlrm: True for RWSAdagrad of facebookresearch/dlrm. It stores the sums of a sparse gradient as
            ``momentum`` [rows] in float32, and resets them at its first step, even after a load.
    """

    fused: type[FusedOptimizer]
    dlrm: bool = False

    @property
    def step_type(self) -> Callable[[int], Any] | None:
        """The type of ``step`` in a state."""
        return int if self.dlrm else self.fused._kind.step

    def check(self, state: Any, parameter: Tensor, prefix: str) -> None:
        """Raise an error unless a state of the optimizer is complete."""
        if not self.dlrm:
            check_state(state, self.fused._kind.states, parameter.shape, prefix)
        elif isinstance(state, Mapping) and set(state) <= {"step"}:
            check_state(state, (), (), prefix)
        else:
            check_state(state, ("momentum",), (parameter.shape[0], 1), prefix)

    def to_fused(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state for the fused optimizer."""
        if not self.dlrm:
            return state
        fused = {"step": state.get("step", 0)}
        if "momentum" in state and getattr(optimizer, "momentum_initialized", True):
            fused["sum"] = state["momentum"]
        return fused

    def from_fused(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a fused optimizer's state, with this optimizer's names."""
        tensors = {name: value for name, value in state.items() if name != "step"}
        return {"momentum": tensors["sum"].view(-1)} if self.dlrm else tensors

    def tensors(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the tensors of a state of the optimizer, with the fused optimizer's names."""
        return {"sum": state.get("momentum")} if self.dlrm else state


_FORMS = {
    torch.optim.SGD: Form(SGD),
    torch.optim.Adagrad: Form(Adagrad),
    torch.optim.SparseAdam: Form(Adam),
}
_FUSED = "SGD, Adagrad, SparseAdam and dlrm's RWSAdagrad"
_DLRM = Form(RowWiseAdagrad, dlrm=True)


def form_of(optimizer: Optimizer) -> Form | None:
    """Return the form of an optimizer whose steps can be fused, or None for other classes."""
    kind = type(optimizer)
    if f"{kind.__module__}.{kind.__qualname__}" == "optim.rwsadagrad.RWSAdagrad":
        return _DLRM
    return _FORMS.get(kind)


def check_option(prefix: str, key: str, value: Any) -> None:
    """Raise an error if a fused step would differ from torch's step with this option."""
    if key == "weight_decay" and value != 0:
        raise ArgumentValueError(
            f"{prefix}: weight_decay is {value!r}, by which torch changes each row of a table at each step, "
            "and a fused optimizer the rows that are looked up. Give the tables a param group without it, "
            "or make an optimizer of recfuse.optim."
        )
    if key in ("lr", "eps"):
        check_number(prefix, key, value)
    elif key == "betas":
        check_betas(prefix, value)
    elif key not in ("dampening", "nesterov"):  # these have no effect without momentum
        check_off(prefix, key, value)


def check_group(group: Mapping[str, Any], prefix: str) -> None:
    """Raise an error if a fused step would differ from torch's step with the options of a group."""
    for key, value in group.items():
        if key not in ("params", "param_names"):
            check_option(prefix, key, value)


def check_adoptable(
    optimizers: Sequence[Optimizer], weights: Iterable[Tensor], dense: Collection[int], prefix: str
) -> None:
    """Check, without changes, that the steps of optimizers with some of the weights can be fused.

    ``dense`` are the ids of the weights with dense gradients.

    Raises:
        ValueError, TypeError: an optimizer has another class, options with which a fused step would differ,
            or a state that does not fit its class.
    """
    tables = {id(weight) for weight in weights}
    for optimizer in optimizers:
        groups = [group for group in optimizer.param_groups if any(id(p) in tables for p in group["params"])]
        form, name = form_of(optimizer), type(optimizer).__name__
        if form is None:
            if groups and not isinstance(optimizer, FusedOptimizer):
                why = _WHY_NOT.get(type(optimizer), f"has no fused step, which {_FUSED} have. {_PASS}")
                raise ArgumentValueError(f"{prefix}: {name} cannot be fused, since it {why}")
            continue
        for group in groups:
            check_group(group, f"{prefix}: {name} of tables")
            for parameter in group["params"]:
                if id(parameter) not in tables:
                    continue
                if form.dlrm and id(parameter) in dense:
                    raise ArgumentValueError(
                        f"{prefix}: {name} of a table with sparse=False makes another step, of each element "
                        "and not of each row. Make the table with sparse=True, or pass "
                        "fuse_optimizers=False."
                    )
                form.check(optimizer.state.get(parameter, {}), parameter, f"{prefix}: {name} of tables")
