"""Comparing a module with its reference."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from recfuse.nn.columns import EmbeddingColumns
from support.columns.random_programs import Case
from support.reference import assert_close_to_reference, tolerance

REFUSED = (IndexError, TypeError)


def magnitude(module: EmbeddingColumns, batch: Any) -> Tensor:
    """Returns the reference of rounding errors; ``batch`` has absolute weights."""
    absolute = module.to_torch().double()
    with torch.no_grad():
        for parameter in absolute.parameters():
            parameter.abs_()
        return absolute(batch).abs()


def check_case(case: Case, draw: Random | None = None, gradients: bool = False) -> str:
    """Compares a case in every way of calling; returns its outcome, for statistics."""
    module = case.module()
    batch = case.batch(draw)
    reference = module.to_torch().double()
    try:
        want = reference(case.batch())
    except REFUSED as error:
        kind = REFUSED if isinstance(error, IndexError) else TypeError  # types of all columns come first
        with pytest.raises(kind), torch.no_grad():
            module(batch)
        if gradients:  # columns pooled by max are looked at last
            with pytest.raises(REFUSED):
                module(batch)
        return type(error).__name__
    rounded = want.to(want_dtype(module)).double()
    want = torch.where(rounded.isinf(), rounded, want)
    allowed = tolerance(magnitude(module, case.absolute()), case.lookups, want_dtype(module))
    with torch.no_grad():
        got = module(batch)
        assert got.dtype == want_dtype(module)
        assert_close_to_reference(got, want, allowed)
        assert torch.equal(module(module.pack(batch)).nan_to_num(), got.nan_to_num())
    if gradients:
        _check_gradients(module, reference, batch, got, want, allowed)
    return "compared"


def want_dtype(module: EmbeddingColumns) -> torch.dtype:
    """The dtype of the output."""
    dtypes = {weight.dtype for weight in module.packed_weights()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _check_gradients(
    module: EmbeddingColumns, reference: Any, batch: Any, got: Tensor, want: Tensor, allowed: Tensor
) -> None:
    """Checks the gradients of a weighted sum of the output, and the output against that without gradients."""
    out = module(batch)
    assert_close_to_reference(out, want, allowed * 3)
    if not out.requires_grad:
        return
    factor = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    out.backward(factor)
    want.backward(factor.double())
    for name, table in module.tables.items():
        mine, theirs = table.weight.grad, reference.tables._modules[name].weight.grad
        theirs = torch.zeros_like(reference.tables._modules[name].weight) if theirs is None else theirs
        mine = torch.zeros_like(table.weight) if mine is None else mine
        if not theirs.isfinite().all():
            continue
        eps = torch.finfo(mine.dtype).eps
        size = max(float(theirs.abs().max()) if theirs.numel() else 0.0, 1.0)
        assert_close_to_reference(mine, theirs, 64 * max(eps, 1e-6) * size)
