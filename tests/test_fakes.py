"""Python's treatment of CUDA tensors, as far as a machine without a GPU can show it.

Fake tensors refuse to be mixed over devices.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import recfuse
from recfuse.data.joined import _gathered, _moved_on_gpu
from recfuse.nn import EmbeddingColumns, FusedEmbeddingBagCollection
from recfuse.nn.columns import Identity, Numeric
from recfuse.ops.embedding_bag_arguments import renormalise


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
    """A CPU tensor that reports a GPU as its device."""

    is_cuda = True


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_collection_on_a_gpu_is_one_call(fake):
    collection = FusedEmbeddingBagCollection([(40, 8), (7, 16), (300, 8)])
    for name, weight in list(collection.named_parameters()):  # without a GPU it cannot be copied there
        there = torch.empty(weight.shape, device="cuda")
        setattr(collection.holder, name.split(".")[-1], torch.nn.Parameter(there, requires_grad=False))
    assert collection.has_kernel and collection.on_cuda
    assert collection.layout.features.device.type == "cpu"
    indices, offsets = (torch.zeros(size, dtype=torch.int64, device="cuda") for size in (24, 13))
    pooled = collection(indices, offsets)
    assert (pooled.shape, pooled.device.type) == ((4, 32), "cuda")
    assert collection.schedules is None  # nothing can be learned here


MAP, OFFSETS = torch.tensor([0, 1, 1]), torch.arange(4)
COLUMNS = EmbeddingColumns([Identity("a", 9, 4), Numeric("b")])
W, X, Q = torch.rand(5, 4), torch.rand(3, 4), torch.rand(3, 2, 4, 8)
CALLS = {  # of tensors that must be on one device
    "ikbo_linear": (
        lambda w, x, given, cand_to_user, bias: recfuse.ikbo_linear(w, w, x, given, cand_to_user, bias=bias),
        (W, X[:2], X, MAP, torch.rand(5)),
    ),
    "ikbo_linear_chain": (
        lambda w, x, given, cand_to_user, bias: recfuse.ikbo_linear_chain(
            [w, w], [x, given], [cand_to_user], bias=bias
        ),
        (W, X[:2], X, MAP, torch.rand(5)),
    ),
    "ikbo_attention": (
        lambda q, k, v, cand_to_user, kv_lengths, q_user: recfuse.ikbo_attention(
            q, k, v, cand_to_user, kv_lengths=kv_lengths, q_user=q_user
        )[0],
        (Q, Q[:2], Q[:2], MAP, torch.tensor([1, 2]), Q[:2]),
    ),
    "embedding_bag": (
        lambda weight, input, offsets, factors: recfuse.embedding_bag(
            input, weight, offsets, mode="sum", per_sample_weights=factors
        ),
        (W, MAP, torch.arange(3), torch.rand(3)),
    ),
    "fused_embedding_bag": (
        lambda weight, indices, offsets, factors: recfuse.fused_embedding_bag(
            [weight], torch.tensor([[0, 0, 5, 4, 0, -1, 0]]), indices, offsets, 4, factors
        ),
        (W, MAP, OFFSETS, torch.rand(3)),
    ),
    "embedding_columns": (
        lambda weight, a, offsets, b: torch.func.functional_call(
            COLUMNS, {"tables.packed_dim4": weight}, ({"a": (a, offsets), "b": b},)
        ),
        (torch.rand(9, 4), MAP, OFFSETS, torch.rand(3)),
    ),
}
LOOKUPS = "embedding_bag", "fused_embedding_bag", "embedding_columns"


@pytest.mark.parametrize("gradients", (False, True))
@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_several_devices_are_refused(name, gradients):
    call, tensors = CALLS[name]
    tensors = list(tensors)
    tensors[0] = tensors[0].clone().requires_grad_(gradients)
    assert call(*tensors).device.type == "cpu"
    assert call(*(one.to("meta") for one in tensors)).is_meta
    for number in range(len(tensors)):
        for wrong, right in (("meta", "cpu"), ("cpu", "meta")):
            given = [one.to(wrong if at == number else right) for at, one in enumerate(tensors)]
            if name in LOOKUPS and given[0].is_meta:  # as torch's lookups
                assert call(*given).is_meta
                continue
            with pytest.raises(ValueError, match=r"on (meta|cpu), .* on (cpu|meta). Move all tensors"):
                call(*given)


def test_a_collection_on_meta_takes_any_indices_and_has_meta_gradients():
    collection = FusedEmbeddingBagCollection([(9, 4), (5, 4)]).to("meta")
    pooled = collection(torch.tensor([1, 2, 3, 4]), torch.arange(5))
    assert pooled.is_meta and pooled.shape == (2, 8)
    pooled.sum().backward()
    assert all(one.grad.is_meta for one in collection.parameters())


@pytest.mark.parametrize("first", (0, 1, -3))
def test_wrong_first_offsets_stay_wrong_after_joining(first):
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
    renormalise(table.as_subclass(OnCuda), torch.tensor([1, -7, 4, 6, 4]), 0.5, 2.0, "on")
    torch.testing.assert_close(table, want)
    for indices, weight in (
        (torch.tensor([3]), torch.empty(0, 4)),
        (torch.empty(0, dtype=torch.int64), want),
    ):
        renormalise(weight.as_subclass(OnCuda), indices, 0.5, 2.0, "on")
