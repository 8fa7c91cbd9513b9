"""Refusals of tables: changes that act only in a table's own call or on its weight, and quantisers.

Quantisers of ``torch.ao`` and TorchRec know only torch's classes.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.nn import Parameter

from recfuse.errors import ArgumentValueError, a_type

UNSWAP = "Call recfuse.unswap(model) for modules that can be changed."
MOVES = (
    "bfloat16",
    "cpu",
    "cuda",
    "double",
    "float",
    "half",
    "ipu",
    "mtia",
    "to",
    "to_empty",
    "type",
    "xpu",
)
HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
    "register_load_state_dict_pre_hook",
    "_register_load_state_dict_pre_hook",
)


class RefusedQconfig:
    """The attribute ``qconfig`` of a class that quantisers cannot convert: an assignment raises."""

    def __get__(self, module: Any, kind: type) -> NoReturn:
        """Raise AttributeError, because the attribute is never set."""
        raise AttributeError("qconfig")

    def __set__(self, module: Any, value: Any) -> None:
        """Accept None, which means no quantisation; raise ValueError for all other values."""
        if value is not None:
            raise ArgumentValueError(
                f"recfuse: qconfig of {a_type(module)} is set; expected None, since quantisers convert only "
                "classes of torch and TorchRec, and would skip this module. Call recfuse.unswap(model) "
                "first."
            )


class NoParameters(dict[str, Any]):
    """The empty dictionary of Parameters of a table; it refuses torch's functions that replace the weight."""

    def __contains__(self, name: object) -> bool:
        """Return whether a name is present; raise for the weight."""
        if name == "weight":
            self._refuse()
        return super().__contains__(name)

    def __missing__(self, name: str) -> NoReturn:
        """Raise KeyError; for the weight, an error that explains the packed Parameter."""
        if name == "weight":
            self._refuse()
        raise KeyError(name)

    def __delitem__(self, name: str) -> None:
        """Delete a name; raise for the weight."""
        if name == "weight":
            self._refuse()
        super().__delitem__(name)

    def _refuse(self) -> NoReturn:
        raise ArgumentValueError(
            "recfuse: the weight of a packed table is a part of a packed Parameter and cannot be replaced, "
            "parametrized or pruned alone. Pass torch.func.functional_call the names of "
            f"named_parameters(), as emb_l.packed_dim16. {UNSWAP}"
        )


def refusing_hook(method: str) -> Any:
    """Return a method that refuses a hook of a table."""

    def register(self: Any, *_: Any, **__: Any) -> NoReturn:
        self._refuse(f"{method} is refused, since one call pools all tables, and one load fills them")

    register.__name__, register.__doc__ = method, "Refuses: one call pools all tables, one load fills them."
    return register


def refusing_move(method: str) -> Any:
    """Return a method that refuses another dtype or device than that of the matrix."""

    def move(self: Any, *arguments: Any, **options: Any) -> Any:
        matrix, probe = self.matrix, torch.nn.Module()
        probe.weight = Parameter(matrix.detach()[:0])
        getattr(probe, method)(*arguments, **options)
        if (probe.weight.dtype, probe.weight.device) != (matrix.dtype, matrix.device):
            self._refuse(
                f"{method}() of one table is not supported, since dtype and device are the model's. Move "
                "the model."
            )
        return self

    move.__name__, move.__doc__ = method, "Refuses another dtype or device than that of the matrix."
    return move
