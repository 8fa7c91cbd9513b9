"""Embedding columns on a GPU, compared with the CPU's; bit-identical repeats, streams, graphs, invalid
contents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import recfuse
from support import gpu
from support.raw_columns.problem import BFLOAT16, BUCKETIZE, FLOAT16, FLOAT32, Problem
from support.raw_columns.random import Maker
from support.raw_columns.tensors import arguments

pytestmark = gpu.MARKS

OPS = torch.ops.recfuse
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def both(problem: Problem) -> tuple[Tensor, Tensor]:
    found = OPS.embedding_columns(*arguments(problem, gpu.DEVICE))
    return found.cpu(), OPS.embedding_columns(*arguments(problem, CPU))


def compare(problem: Problem) -> None:
    found, wanted = both(problem)
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def buckets(columns: int, batch: int, dim: int = 8, boundaries: int = 100) -> Problem:
    """Columns with tables and boundaries of their own, of the values of one matrix."""
    draw = np.random.default_rng(columns)
    problem = Problem(batch)
    problem.inputs.append(draw.standard_normal((batch, columns)).astype(np.float32))
    rows = boundaries + 1
    problem.buffers.append((draw.standard_normal(columns * rows * dim).astype(np.float32), FLOAT32))
    for column in range(columns):
        first = len(problem.boundaries)
        problem.boundaries += np.sort(draw.standard_normal(boundaries)).tolist()
        left = problem.source(0, column, 1, [(BUCKETIZE, first, boundaries)])
        problem.add(left=left, rows=rows, dim=dim, n_dims=dim, weight_offset=column * rows * dim)
    return problem


@pytest.mark.parametrize("batch", (1, 7, 256, 1000))
@pytest.mark.parametrize("seed", range(4))
def test_columns_of_all_kinds(seed: int, batch: int) -> None:
    compare(Maker(seed, batch=batch).make(60))


@pytest.mark.parametrize("seed", range(3))
def test_long_bags(seed: int) -> None:
    compare(Maker(seed, batch=100, longest=150, long=0.1, dims=(1, 4, 8, 70, 128)).make(30))


@pytest.mark.parametrize("types", (((FLOAT16,), FLOAT16), ((BFLOAT16,), BFLOAT16),
                                   ((FLOAT32, FLOAT16, BFLOAT16), FLOAT32)), ids=str)  # fmt: skip
def test_types(types: Any) -> None:
    compare(Maker(5, batch=90).make(40, *types))


@pytest.mark.parametrize("batch", (1, 32, 256, 2048))
def test_a_thousand_columns(batch: int) -> None:
    found, wanted = both(buckets(1000, batch))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dim", (1, 2, 3, 5, 8, 50, 128, 300))
def test_widths(dim: int) -> None:
    found, wanted = both(buckets(37, 70, dim))
    assert torch.equal(found, wanted)


def test_the_same_bits_each_time() -> None:
    given = arguments(Maker(3, batch=200, longest=100, long=0.2, whole=False).make(40), gpu.DEVICE)
    first = OPS.embedding_columns(*given)
    for _ in range(5):
        assert torch.equal(OPS.embedding_columns(*given).nan_to_num(), first.nan_to_num())


@pytest.mark.parametrize("seed", range(4))
def test_lookups(seed: int) -> None:
    problem = Maker(seed, batch=120, longest=40).make(40)
    _, program, *rest = arguments(problem, gpu.DEVICE)
    found = OPS._embedding_columns_lookups(program, *rest[:-1])
    _, _, *rest = arguments(problem, CPU)
    wanted = OPS._embedding_columns_lookups(program, *rest[:-1])
    assert torch.equal(found[1].cpu(), wanted[1])
    count = int(wanted[1][-1])
    assert torch.equal(found[0][:count].cpu(), wanted[0])
    torch.testing.assert_close(found[2][:count].cpu(), wanted[2], rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_program_on_the_device_and_other_streams() -> None:
    problem = Maker(1, batch=300).make(50)
    given, wanted = arguments(problem, gpu.DEVICE), both(problem)[1]
    for program in (None, given[1].to(gpu.DEVICE)):
        stream = torch.cuda.Stream(gpu.DEVICE)
        stream.wait_stream(torch.cuda.current_stream(gpu.DEVICE))
        with torch.cuda.stream(stream):
            found = OPS.embedding_columns(*given, program)
        stream.synchronize()
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    with pytest.raises(RuntimeError, match="a copy of program"):
        OPS.embedding_columns(*given, given[1].to(gpu.DEVICE)[1:])


@pytest.mark.parametrize("on_device", (True, False))
def test_graphs(on_device: bool) -> None:
    """Replays read the inputs and tables at the time of the replay."""
    problem = buckets(200, 64)
    given = arguments(problem, gpu.DEVICE)
    program = given[1].to(gpu.DEVICE) if on_device else None
    OPS.embedding_columns(*given, program)
    gpu.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = OPS.embedding_columns(*given, program)
    for _ in range(3):
        given[2][0].normal_()
        given[0][0].normal_()
        graph.replay()
        cpu = [[one.cpu() for one in part] if isinstance(part, list) else part for part in given]
        assert torch.equal(found.cpu(), OPS.embedding_columns(*cpu))


def test_bad_indices_and_offsets_are_raised_later() -> None:
    problem = Problem(6)
    problem.inputs.append((np.array([1, 2, 9, 1, 0, 3]), np.arange(7), None))
    problem.buffers.append((np.ones(40, np.float32), FLOAT32))
    problem.add(left=problem.source(0, 0, 0, []), rows=5, dim=8, n_dims=8, fill=0)
    given = arguments(problem, gpu.DEVICE)
    found = OPS.embedding_columns(*given)
    assert found[:, 0].tolist() == [1, 1, 0, 1, 1, 1]
    with pytest.raises(IndexError, match=r"values\[2\] is 9, of column 0 and sample 2; expected 0 to 4"):
        recfuse.check(gpu.DEVICE)
    given[4][0][3] = 77
    assert OPS.embedding_columns(*given)[:, 0].tolist()[4:] == [1, 1]
    with pytest.raises(ValueError, match=r"offsets\[3\] is 77"):
        recfuse.check(gpu.DEVICE)
    gpu.forget_errors()
    given[4][0][3] = 3
    OPS.embedding_columns(*given, None, "off")
    recfuse.check(gpu.DEVICE)
