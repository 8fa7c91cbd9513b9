"""Refusal of quantisers of ``torch.ao`` and TorchRec, which know only torch's classes."""

from __future__ import annotations

from typing import Any, NoReturn

from recfuse.errors import ArgumentValueError, a_type


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
