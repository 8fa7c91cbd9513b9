"""Problems of embedding columns as arguments of torch's operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.raw_columns.problem import Problem

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def tensor_of(values: Any, device: torch.device) -> Tensor:
    if any(stride < 0 for stride in values.strides):  # torch has no negative strides
        values = np.ascontiguousarray(values)
    given = torch.from_numpy(values.copy(order="K"))
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=device).copy_(given)


def arguments(problem: Problem, device: torch.device) -> tuple[Any, ...]:
    """Returns the arguments of `embedding_columns` up to output_dim. Inputs are in the operator's order:
    dense ones first."""
    dense = [given for given in problem.inputs if not isinstance(given, tuple)]
    jagged = [given for given in problem.inputs if isinstance(given, tuple)]
    weights = [
        torch.from_numpy(elements.copy()).view(DTYPES[dtype]).to(device)
        for elements, dtype in problem.buffers
    ]
    none = np.zeros(0, np.float32)
    return (
        weights,
        torch.from_numpy(problem.program()),
        [tensor_of(given, device) for given in dense],
        [tensor_of(values, device) for values, _, _ in jagged],
        [tensor_of(offsets, device) for _, offsets, _ in jagged],
        [tensor_of(none if own is None else own, device) for _, _, own in jagged],
        problem.batch,
        problem.output_dim,
    )
