"""Winners of maxima and gradients of sample weights: the GPU's kernels against the CPU's functions.

The kernels run on the host as blocks of threads, in random order.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import recfuse  # noqa: F401 (loads the operators)
from support.backward.simulated import CPP_COMPILER, simulated
from support.fused import Groups
from support.reference import DTYPES, Feature

OPS = torch.ops.recfuse
BLOCK = 128

pytestmark = pytest.mark.skipif(CPP_COMPILER is None, reason="no C++ compiler")


class Described(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "padding_idx", "output_column", "dim")),
        ("dtype", ctypes.c_int32),
        ("pooling", ctypes.c_int32),
        ("first_block", ctypes.c_int64),
    )


class Args(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("indices", "offsets", "features", "grad", "output")),
        ("winners", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("lookups", "bags", "n_features", "output_dim")),
    )


def described(problem: Groups, bags: int) -> tuple[Any, int]:
    """Features as the host writes them, and the blocks of winners.cu."""
    blocks, found = 0, []
    for buffer, offset, rows, dim, pooling, padding, column in problem.rows.tolist():
        weight = problem.weights[buffer]
        lanes = 1
        while lanes < BLOCK and lanes * 4 < dim:
            lanes *= 2
        place = weight.data_ptr() + offset * weight.element_size()
        dtype = DTYPES.index(weight.dtype)
        found.append(Described(place, rows, padding, column, dim, dtype, pooling, blocks))
        blocks += -(-bags // (BLOCK // lanes)) if dim > 0 else 0
    return (Described * len(found))(*found), blocks


GROUPS = {
    "dims": [(torch.float32, dim, (5 + dim % 7, 12)) for dim in (1, 4, 16, 17, 64, 300)],
    "half": [(torch.float16, 12, (9, 7)), (torch.bfloat16, 40, (6, 5)), (torch.float16, 5, (8, 3))],
    "wide": [(torch.bfloat16, 600, (5, 8)), (torch.float32, 0, (4, 3)), (torch.float32, 132, (9, 6))],
}
BAD = {
    "nothing": lambda i, o: None,
    "indices": lambda i, o: i.index_fill_(0, torch.arange(0, i.numel(), 5), -3),
    "far indices": lambda i, o: i.index_fill_(0, torch.arange(0, i.numel(), 7), 2**31 - 1),
    "an offset": lambda i, o: o.__setitem__(4, 10**6),
    "a negative offset": lambda i, o: o.__setitem__(7, -3),
    "the first offset": lambda i, o: o.__setitem__(0, min(1, int(o[1]))),
}


@pytest.mark.parametrize("integer", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_winners(name: str, integer: torch.dtype) -> None:
    torch.manual_seed(3)
    tables = sum(len(sizes) for _, _, sizes in GROUPS[name])
    modes = [Feature(n, ("max", "sum", "max", "mean")[n % 4], (None, 0)[n % 2]) for n in range(tables)]
    problem = Groups(GROUPS[name], [*modes, Feature(0, "max", 1)])
    for weight in problem.weights:  # equal values, and NaNs
        weight[weight.isnan()] = 9.0
        weight[torch.rand_like(weight, dtype=torch.float32) < 0.3] = 0.5
        weight[torch.rand_like(weight, dtype=torch.float32) < 0.05] = torch.nan
    word = "rf_i64" if integer == torch.int64 else "int"
    lib = simulated("backward_bags.cu", RF_INDEX=word, RF_OFFSET=word)
    for turn, (bad, change) in enumerate(BAD.items()):
        bags = (1, 9, 40)[turn % 3] if bad == "nothing" else 9
        indices, offsets = problem.lookups(bags, 7, integer)
        change(indices, offsets)
        want = OPS.fused_embedding_bag_winners(
            problem.weights, problem.rows, indices, offsets, problem.output_dim
        )
        found = torch.full_like(want, 77)
        features, blocks = described(problem, bags)
        args = Args(
            indices=indices.data_ptr(), offsets=offsets.data_ptr(), features=ctypes.addressof(features),
            winners=found.data_ptr(), lookups=indices.numel(), bags=bags, n_features=len(problem.rows),
            output_dim=problem.output_dim,
        )  # fmt: skip
        lib.bags_winners(ctypes.byref(args), blocks, ctypes.c_uint64(turn))
        assert torch.equal(found, want), bad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_gradients_of_sample_weights(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    tables = sum(len(sizes) for _, _, sizes in GROUPS[name])
    features = [Feature(n, "sum", (None, 0)[n % 2]) for n in range(tables)]
    problem = Groups(GROUPS[name], [*features, Feature(0, "sum", None)])
    lib = simulated(
        "backward_bags.cu", RF_INDEX="rf_i64", RF_OFFSET="rf_i64", RF_GRAD_DTYPE=DTYPES.index(dtype)
    )
    for turn, (bad, change) in enumerate(BAD.items()):
        bags, longest = (9, 7) if turn != 0 else (3, 90)
        indices, offsets = problem.lookups(bags, longest)
        change(indices, offsets)
        grad = torch.randn(bags, problem.output_dim).to(dtype)
        want = OPS.fused_embedding_bag_sample_weights_backward(
            grad, problem.weights, problem.rows, indices, offsets
        )
        found = torch.zeros(indices.numel())
        kept, _ = described(problem, bags)
        args = Args(
            indices=indices.data_ptr(), offsets=offsets.data_ptr(), features=ctypes.addressof(kept),
            grad=grad.data_ptr(), output=found.data_ptr(), lookups=indices.numel(), bags=bags,
            n_features=len(problem.rows), output_dim=problem.output_dim,
        )  # fmt: skip
        slots = len(problem.rows) * bags
        lib.bags_weights(ctypes.byref(args), -(-slots // (BLOCK // 32)), 1 + turn % 2, ctypes.c_uint64(turn))
        torch.testing.assert_close(
            found, want, rtol=1e-4, atol=1e-4, msg=lambda text, bad=bad: f"{bad}: {text}"
        )
