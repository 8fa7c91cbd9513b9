"""What Python does with CUDA tensors, as far as a machine without a GPU can show it.

Fake tensors refuse to be mixed over devices. The gradients for the GPU run on any device.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import recfuse
from conftest import ragged
from recfuse import _backward, _backward_cuda
from recfuse._backward import MAX, MEAN, SUM
from recfuse.nn import FusedEmbeddingBagCollection
from recfuse.nn.table_list import _gathered, _moved_on_gpu
from recfuse.ops import _renormalise

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.fixture
def fake():
    with FakeTensorMode(), torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("mode", ("sum", "mean", "max"))
@pytest.mark.parametrize("max_norm", (None, 1.0))
def test_every_call_stays_on_its_device(fake, dtype, mode, max_norm):
    weight = torch.empty(10, 4, dtype=dtype, device="cuda")
    flat = torch.zeros(6, dtype=torch.int32, device="cuda")
    offsets = torch.zeros(3, dtype=torch.int64, device="cuda")
    square = torch.zeros(3, 2, dtype=torch.int64, device="cuda")
    options = {"mode": mode, "max_norm": max_norm, "padding_idx": -1}
    for pooled in (
        recfuse.embedding_bag(flat, weight, offsets, **options),
        recfuse.embedding_bag(
            flat,
            weight,
            torch.zeros(4, dtype=torch.int32, device="cuda"),
            include_last_offset=True,
            **options,
        ),
        recfuse.embedding_bag(square, weight, **options),
    ):
        assert (pooled.shape, pooled.dtype, pooled.device.type) == ((3, 4), dtype, "cuda")
    if mode == "sum":
        factors = torch.empty(6, dtype=dtype, device="cuda")
        assert recfuse.embedding_bag(flat, weight, offsets, per_sample_weights=factors, mode=mode).is_cuda


def test_a_schedule_needs_a_kernel(fake):
    indices = torch.zeros(2, 3, dtype=torch.int64, device="cuda")
    for weight, given in (
        (torch.empty(10, 4, dtype=torch.float64, device="cuda"), indices),
        (torch.empty(10, 4, device="cuda"), torch.zeros(2, 3, dtype=torch.int64)),
        (torch.empty(10, 4), indices),
    ):
        with pytest.raises(ValueError, match=r"schedule is 'distance=4', but no kernel takes"):
            recfuse.embedding_bag(given, weight, schedule="distance=4")


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_collection_on_a_gpu_is_one_call(fake):
    collection = FusedEmbeddingBagCollection([(40, 8), (7, 16), (300, 8)])
    for name, weight in list(collection.named_parameters()):  # without a GPU it cannot be copied there
        there = torch.empty(weight.shape, device="cuda")
        setattr(collection, name, torch.nn.Parameter(there, requires_grad=False))
    assert collection.has_kernel and collection.on_cuda
    assert collection.layout.features.device.type == "cpu"
    indices, offsets = (torch.zeros(size, dtype=torch.int64, device="cuda") for size in (24, 13))
    pooled = collection(indices, offsets)
    assert (pooled.shape, pooled.device.type) == ((4, 32), "cuda")
    assert collection.schedules is None  # nothing can be learned here


@pytest.mark.parametrize("first", (0, 1, -3))
def test_a_first_offset_that_is_wrong_is_one_that_the_kernel_finds(first):
    offsets, ends = torch.tensor([[0, 2], [first, 1], [0, 5]]), torch.tensor([0, 4, 6, 12])
    want = [0, 2, -abs(first) if first else 4, 5, 6, 11, 12]
    assert _moved_on_gpu(offsets, ends).tolist() == want


def test_weights_of_rows_that_do_not_exist_are_never_read():
    rows = torch.tensor([2, -1, 7, 2**40]).as_subclass(OnCuda)
    assert _gathered(torch.arange(1.0, 4), rows).tolist() == [3, 1, 1, 1]
    assert _gathered(torch.empty(0), rows).tolist() == [1] * 4


@pytest.mark.parametrize("columns", (slice(None), slice(1, 4)))
def test_a_bad_index_never_reaches_the_renorm(columns):
    table = torch.randn(6, 5)[:, columns]
    want = table.clone()
    torch.embedding_renorm_(want, torch.tensor([1, 4]), 0.5, 2.0)
    _renormalise(table.as_subclass(OnCuda), torch.tensor([1, -7, 4, 6, 4]), 0.5, 2.0, "on")
    torch.testing.assert_close(table, want)
    for indices, weight in (
        (torch.tensor([3]), torch.empty(0, 4)),
        (torch.empty(0, dtype=torch.int64), want),
    ):
        _renormalise(weight.as_subclass(OnCuda), indices, 0.5, 2.0, "on")


def problems():
    """Calls with empty bags, lookups behind the last offset, strided integers and padding."""
    for dtype, last, padding_idx in itertools.product(TOLERANCE, (False, True), (-1, 0, 8)):
        indices, offsets = ragged(9, 12, 5, torch.int32 if last else torch.int64)
        if last:
            indices = torch.cat((indices, indices[:2]))
        else:
            offsets = offsets[:-1]
        yield torch.randn(9, 3).to(dtype), torch.randn(12, 3).to(dtype), indices, offsets, last, padding_idx


def close(ours, theirs):
    tolerance = TOLERANCE[theirs.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pooling", (SUM, MEAN, MAX))
def test_dense_gradients_for_the_gpu_are_those_of_the_cpu(pooling):
    for weight, grad, indices, offsets, last, padding_idx in problems():
        for factors in (None, torch.randn(len(indices)).to(grad.dtype)) if pooling == SUM else (None,):
            options = (grad, weight, 9, indices, offsets, factors, pooling, last, padding_idx, False)
            close(_backward_cuda.dense_weight_grad(*options), _backward.dense_weight_grad(*options))


@pytest.mark.parametrize("pooling", (SUM, MEAN))
def test_sparse_gradients_for_the_gpu_are_those_of_the_cpu(pooling):
    for _, grad, indices, offsets, last, padding_idx in problems():
        for factors in (None, torch.randn(len(indices)).to(grad.dtype)) if pooling == SUM else (None,):
            options = (grad, 9, indices, offsets, factors, pooling, last, padding_idx, False)
            ours, theirs = (one.sparse_weight_grad(*options) for one in (_backward_cuda, _backward))
            close(ours.to_dense(), theirs.to_dense())
            assert ours._nnz() <= theirs._nnz()


def test_sample_weight_gradients_for_the_gpu_are_those_of_the_cpu(monkeypatch):
    monkeypatch.setattr(_backward_cuda, "_CHUNK", 7)
    for weight, grad, indices, offsets, last, padding_idx in problems():
        options = (grad, weight, indices, offsets, last, padding_idx)
        close(_backward_cuda.sample_weights_grad(*options), _backward.sample_weights_grad(*options))


@pytest.mark.parametrize("rows", (0, 1, 5))
@pytest.mark.parametrize("last", (False, True))
def test_bad_contents_have_no_gradient(rows, last):
    """ATen raises on the CPU what it asserts on the GPU: nothing may be raised here."""
    for _ in range(50):
        indices, offsets = torch.randint(-4, rows + 5, (11,)), torch.randint(-4, 16, (4 + last,))
        weight, grad = torch.randn(rows, 3), torch.randn(4, 3)
        bad = (indices < 0) | (indices >= rows)
        for pooling in (SUM, MEAN, MAX):
            options = (indices, offsets, None, pooling, last, -1, False)
            assert _backward_cuda.dense_weight_grad(grad, weight, rows, *options).isfinite().all()
            if pooling != MAX:
                assert _backward_cuda.sparse_weight_grad(grad, rows, *options)._nnz() <= int((~bad).sum())
        found = _backward_cuda.sample_weights_grad(grad, weight, indices, offsets, last, -1)
        assert not found[bad].any()


def test_a_bad_lookup_adds_no_nan():
    grad, indices = torch.tensor([[1.0], [torch.nan]]), torch.tensor([2, 0, 7])
    options = (indices, torch.tensor([0, 2]), None, SUM, False, -1, False)
    found = _backward_cuda.dense_weight_grad(grad, None, 3, *options)
    assert found.tolist() == [[1.0], [0.0], [1.0]]


def test_the_same_row_wins_a_maximum_of_equals():
    weight, grad = torch.ones(4, 2), torch.ones(1, 2)
    options = (grad, weight, 4, torch.tensor([3, 1, 3, 2]), torch.tensor([0]), None, MAX, False, -1, False)
    assert (
        _backward_cuda.dense_weight_grad(*options).tolist() == _backward.dense_weight_grad(*options).tolist()
    )
