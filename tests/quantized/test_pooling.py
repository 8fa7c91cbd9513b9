"""fused_embedding_bag_quantized: against float64 sums of the values, in every layout; bad arguments."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import recfuse
from support.reference import Feature
from support.tables.quantized import FLOATS, LAYOUTS, Stored, Tables, stored

KINDS = ("int8", "int4", *FLOATS)
DIMS = (2, 4, 6, 8, 10, 16, 18, 30, 32, 48, 64, 100, 128, 130, 256, 300)


def every_kind(dims=DIMS, layout="planar", kinds=KINDS) -> list[Stored]:
    generator = torch.Generator().manual_seed(7)
    return [
        stored(torch.randn(20 + dim % 37, dim, generator=generator), kind, layout, gap=8)
        for dim in dims
        for kind in kinds
    ]


def every_mode(tables) -> list[Feature]:
    return [
        Feature(number, mode, padding)
        for number in range(len(tables))
        for mode in ("sum", "mean", "max")
        for padding in (None, 3)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("integer", (torch.int32, torch.int64))
def test_agrees_with_float64(layout, integer):
    tables = every_kind(layout=layout)
    problem = Tables(tables, every_mode(tables))
    for bags in (1, 3):
        problem.check(*problem.lookups(bags, integer=integer))


@pytest.mark.parametrize("dtype", FLOATS.values())
def test_output_dtypes_and_weights(dtype):
    problem = Tables(every_kind((2, 16, 34, 128)))
    indices, offsets = problem.lookups(7)
    got = problem.check(indices, offsets, torch.randn(indices.numel()), output_dtype=dtype)
    assert got.dtype == dtype
    problem.check(indices, offsets, output_dtype=dtype)


def test_any_dim_of_int8():
    problem = Tables(every_kind(range(1, 70), kinds=("int8",)))
    problem.check(*problem.lookups(4))


def test_float32_parameters_after_the_codes():
    """torch's embedding_bag_byte_prepack: codes, scale and bias as floats."""
    weight = torch.randn(30, 24)
    memory = torch.ops.quantized.embedding_bag_byte_prepack(weight)
    parameters = memory[:, 24:].view(torch.float32)
    values = memory[:, :24].double() * parameters[:, :1].double() + parameters[:, 1:].double()
    problem = Tables([Stored(memory[:, :24], parameters, values)])
    problem.check(*problem.lookups(9))


def test_torch_4bit_rows():
    weight = torch.randn(30, 24)
    memory = torch.ops.quantized.embedding_bag_4bit_prepack(weight)
    parameters = memory[:, 12:].view(torch.float16)
    elements = torch.stack((memory[:, :12] & 15, memory[:, :12] >> 4), -1).flatten(1)
    values = elements.double() * parameters[:, :1].double() + parameters[:, 1:].double()
    problem = Tables([Stored(memory[:, :12], parameters, values)])
    indices, offsets = problem.lookups(9)
    got = problem.check(indices, offsets)
    theirs = torch.ops.quantized.embedding_bag_4bit_rowwise_offsets(memory, indices, offsets[:-1])
    torch.testing.assert_close(got, theirs, atol=1e-4, rtol=1e-4)


def test_bags_of_any_length():
    problem = Tables(every_kind((16, 130)))
    for mean in (0, 1, 90):
        problem.check(*problem.lookups(5, mean))


def test_a_table_within_a_weight():
    """weight_offset counts codes."""
    whole = stored(torch.randn(50, 6), "int4", "before", 6)
    rows = torch.tensor([[0, 20 * 6, 30, 6, 0, -1, 0]])
    indices, offsets = torch.tensor([0, 29, 4]), torch.tensor([0, 2, 3])
    got = recfuse.ops.fused_embedding_bag_quantized(
        [whole.weight], [whole.parameters], rows, indices, offsets, 6
    )
    values = whole.values[20:]
    torch.testing.assert_close(
        got.double(), torch.stack((values[0] + values[29], values[4])), atol=1e-5, rtol=0
    )


def test_same_bits_for_any_number_of_threads_and_prefetching(threads):
    tables = every_kind()
    problem = Tables(tables, every_mode(tables))
    indices, offsets = problem.lookups(20, 20)
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(problem.run(indices, offsets))
    assert all(torch.equal(results[0], other) for other in results[1:])
    for options in ({"prefetch_distance": 0}, {"prefetch_distance": 9}, {"bounds_check": "off"}):
        assert torch.equal(problem.run(indices, offsets, **options), results[0])


def factors_gradient(**options) -> torch.Tensor:
    problem = Tables(every_kind(**options))
    lookups = problem.lookups(4, 9)
    factors = torch.linspace(-1, 1, lookups[0].numel(), requires_grad=True)
    return torch.autograd.grad(problem.run(*lookups, factors).square().sum(), factors)[0]


CHILD = """
import sys, torch, recfuse
sys.path.insert(0, sys.argv[1])
from quantized.test_pooling import every_kind, every_mode, factors_gradient
from support.tables.quantized import Tables
tables = every_kind(kinds=("int8", "int4"))
problem = Tables(tables, every_mode(tables))
lookups = problem.lookups(4, 9)
problem.check(*lookups)
torch.save([problem.run(*lookups), factors_gradient(kinds=("int8", "int4"))], sys.argv[2])
print(torch.ops.recfuse.cpu_isa())
"""


@pytest.mark.parametrize("isa", ("avx2", "scalar"))
def test_every_instruction_set_gives_the_same_bits(isa, tmp_path):
    tables = every_kind(kinds=("int8", "int4"))
    problem = Tables(tables, every_mode(tables))
    ours = [problem.run(*problem.lookups(4, 9)), factors_gradient(kinds=("int8", "int4"))]
    tests, to = os.path.dirname(os.path.dirname(__file__)), str(tmp_path / "result")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, tests, to],
        env={**os.environ, "RECFUSE_CPU_ISA": isa}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if done.stdout.split()[-1] != isa:
        pytest.skip(f"no {isa} here")
    assert all(map(torch.equal, torch.load(to), ours))


def test_maximum_of_nan_free_rows_and_empty_bags():
    problem = Tables([stored(torch.randn(5, 8) - 100, "int8")], [Feature(0, "max", 2)])
    indices, offsets = torch.tensor([2, 2, 1, 2]), torch.tensor([0, 0, 2, 4])
    got = problem.check(indices, offsets)
    assert torch.equal(got[:2], torch.zeros(2, 8))


@pytest.mark.parametrize("kind", ("int8", "int4"))
def test_bad_indices_and_offsets(kind):
    problem = Tables([stored(torch.randn(5, 8), kind), stored(torch.randn(9, 8), "float32")])
    offsets = torch.tensor([0, 1, 2, 3, 4])
    with pytest.raises(IndexError, match=r"indices\[1\] is 5, for feature 0, bag 1; expected 0 to 4"):
        problem.run(torch.tensor([0, 5, 0, 0]), offsets)
    with pytest.raises(IndexError, match=r"is -1, for feature 0, bag 0"):
        problem.run(torch.tensor([-1, 0, 0, 0]), offsets)
    with pytest.raises(ValueError, match=r"offsets\[2\] is 9"):
        problem.run(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 1, 9, 3, 4]))


def call(weights, parameters, rows, dim, **options):
    lookups = torch.tensor([0]), torch.tensor([0, 1])
    return recfuse.ops.fused_embedding_bag_quantized(
        weights, parameters, torch.tensor(rows), *lookups, dim, **options
    )


def test_bad_arguments():
    one = stored(torch.randn(5, 8), "int8")
    weight, parameters = one.weight, one.parameters
    rows = [[0, 0, 5, 8, 0, -1, 0]]
    assert call([weight], [parameters], rows, 8).shape == (1, 8)
    with pytest.raises(ValueError, match="parameters has 0 tensors; expected as many as the 1 weights"):
        call([weight], [], rows, 8)
    with pytest.raises(
        ValueError, match=r"rows of 8 bytes of codes; expected 10 bytes \(int8\) or half as many"
    ):
        call([weight], [parameters], [[0, 0, 4, 10, 0, -1, 0]], 10)
    with pytest.raises(
        ValueError, match=r"parameters is float16 \[4, 2\]; expected float16 or float32 \[5, 2\]"
    ):
        call([weight], [parameters[:4]], rows, 8)
    with pytest.raises(ValueError, match="parameters is int64"):
        call([weight], [parameters.long()], rows, 8)
    with pytest.raises(ValueError, match="an empty tensor for weights"):
        call([torch.randn(5, 8)], [parameters], rows, 8)
    with pytest.raises(ValueError, match="expected contiguous rows"):
        call([weight.t().contiguous().t()], [parameters], rows, 8)
    with pytest.raises(ValueError, match="begins at element 3"):
        call([weight], [parameters], [[0, 3, 2, 8, 0, -1, 0]], 8)
    with pytest.raises(ValueError, match="is a table of 6 x 8"):
        call([weight], [parameters], [[0, 0, 6, 8, 0, -1, 0]], 8)
    with pytest.raises(ValueError, match="pitch of 4 bytes"):
        call([weight.flatten().as_strided((5, 8), (4, 1))], [parameters], rows, 8)
    with pytest.raises(TypeError, match="int8"):
        call([weight.to(torch.int8)], [parameters], rows, 8)
    with pytest.raises(TypeError, match=r"output_dtype is torch\.float64"):
        call([weight], [parameters], rows, 8, output_dtype=torch.float64)
    with pytest.raises(ValueError, match=r"is on meta|no memory"):
        call([weight], [parameters.to("meta")], rows, 8)
