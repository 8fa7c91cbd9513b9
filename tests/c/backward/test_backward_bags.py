"""Winners of maxima and gradients of sample weights: the GPU's kernels against the CPU's functions.

The kernels run on the host as blocks of threads, in random order.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import recfuse  # noqa: F401 (loads the operators)
from recfuse._codes import CODES as RF_CODES
from support.backward.simulated import CPP_COMPILER, simulated
from support.fused import Groups
from support.reference import DTYPES, Feature
from support.tables.quantized import LAYOUTS, Tables, stored

OPS = torch.ops.recfuse
BLOCK = 128

pytestmark = pytest.mark.skipif(CPP_COMPILER is None, reason="no C++ compiler")


class Described(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "parameters")),
        *((name, ctypes.c_int64) for name in ("pitch", "parameters_pitch")),
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
        pitch = dim * weight.element_size()
        found.append(Described(place, None, pitch, 0, rows, padding, column, dim, dtype, pooling, blocks))
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
        found = weights_gradient(lib, described(problem, bags)[0], grad, indices, offsets, turn)
        torch.testing.assert_close(
            found, want, rtol=1e-4, atol=1e-4, msg=lambda text, bad=bad: f"{bad}: {text}"
        )


def weights_gradient(
    lib: ctypes.CDLL,
    features: Any,
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    turn: int,
) -> torch.Tensor:
    """Runs sample_weights.cu."""
    found = torch.zeros(indices.numel())
    args = Args(
        indices=indices.data_ptr(), offsets=offsets.data_ptr(), features=ctypes.addressof(features),
        grad=grad.data_ptr(), output=found.data_ptr(), lookups=indices.numel(), bags=grad.shape[0],
        n_features=len(features), output_dim=grad.shape[1],
    )  # fmt: skip
    slots = len(features) * grad.shape[0]
    lib.bags_weights(ctypes.byref(args), -(-slots // (BLOCK // 32)), 1 + turn % 2, ctypes.c_uint64(turn))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_sample_weights_of_quantised_tables(layout: str) -> None:
    """Rows of any pitch, with codes that are aligned and codes that are not."""
    torch.manual_seed(5)
    tables = [
        stored(torch.randn(9 + dim % 7, dim), kind, layout, gap, align=4)
        for dim, gap in ((2, 0), (6, 4), (16, 8), (36, 8), (132, 0), (300, 4))
        for kind in ("int8", "int4", "float16")
    ]
    tables.append(stored(torch.randn(8, 5), "int8", layout, 0, align=4))
    problem = Tables(tables, [Feature(number, "sum", (None, 0)[number % 2]) for number in range(len(tables))])
    features = []
    for number, _, rows, dim, pooling, padding, column in problem.rows.tolist():
        one = tables[number]
        kind = RF_CODES["dtype"].index("float16") if one.weight.dtype != torch.uint8 else None
        kind = kind or RF_CODES["dtype"].index("int8" if one.weight.shape[1] == dim else "int4")
        pitch = one.weight.stride(0) * one.weight.element_size()
        between = one.parameters.stride(0) * 2
        places = one.weight.data_ptr(), one.parameters.data_ptr(), pitch, between
        features.append(Described(*places, rows, padding, column, dim, kind, pooling, 0))
    described_features = (Described * len(features))(*features)
    lib = simulated(
        "backward_bags.cu", RF_INDEX="rf_i64", RF_OFFSET="rf_i64", RF_GRAD_DTYPE=0, RF_QUANTIZED=1
    )
    for turn, (bad, change) in enumerate(BAD.items()):
        bags, longest = (9, 7) if turn != 0 else (3, 90)
        indices, offsets = problem.lookups(bags, longest, seed=turn)
        change(indices, offsets)
        grad = torch.randn(bags, problem.output_dim)
        want = OPS.fused_embedding_bag_quantized_sample_weights_backward(
            grad, *problem.lists(), problem.rows, indices, offsets
        )
        found = weights_gradient(lib, described_features, grad, indices, offsets, turn)
        torch.testing.assert_close(
            found, want, rtol=1e-4, atol=1e-4, msg=lambda text, bad=bad: f"{bad}: {text}"
        )
