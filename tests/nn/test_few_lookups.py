"""Small bags on the CPU with a sparse gradient: torch's own bag, where that makes the faster step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import recfuse
from recfuse import _C
from recfuse.ops import few_lookups

ROWS, DIM, COUNT = 40, 5, 30
PLAIN = {"mode": "sum", "sparse": True}


@pytest.fixture
def torchs(monkeypatch):
    """Calls of torch's own bag."""
    calls, own = [], torch.embedding_bag

    def watched(*given):
        calls.append(given)
        return own(*given)

    monkeypatch.setattr(torch, "embedding_bag", watched)
    return calls


def some(dtype=torch.int64):
    """Indices of five bags, and where they begin."""
    return torch.randint(0, ROWS, (COUNT,), dtype=dtype), torch.tensor([0, 7, 7, 12, 29], dtype=dtype)


def called(function, *call, **options):
    """The output, and the gradient of a table of always the same values."""
    weight = torch.nn.Parameter(torch.linspace(-3, 5, ROWS * DIM).view(ROWS, DIM).sin())
    output = function(call[0], weight, *call[1:], **options)
    output.backward(torch.linspace(-1, 2, output.numel()).view_as(output))
    return output.detach(), weight.grad


@pytest.mark.parametrize("mode", ("sum", "mean"))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("form", ("offsets", "last", "matrix"))
def test_output_and_gradient_are_torchs(mode, dtype, form, torchs, monkeypatch):
    indices, offsets = some(dtype)
    options = {"mode": mode, "sparse": True}
    if form == "last":
        offsets = torch.cat((offsets, offsets.new_tensor([COUNT])))
        options["include_last_offset"] = True
    call = (indices.view(5, 6),) if form == "matrix" else (indices, offsets)
    output, grad = called(recfuse.embedding_bag, *call, **options)
    assert len(torchs) == 1
    theirs, of_theirs = called(F.embedding_bag, *call, **options)
    assert torch.equal(output, theirs)
    assert torch.equal(grad._indices(), of_theirs._indices())
    assert torch.equal(grad._values(), of_theirs._values())
    monkeypatch.setattr(few_lookups, "MOST_LOOKUPS", -1)
    ours, of_ours = called(recfuse.embedding_bag, *call, **options)
    assert len(torchs) == 2 and of_ours._nnz() == indices.unique().numel()
    torch.testing.assert_close(output, ours)
    torch.testing.assert_close(grad.to_dense(), of_ours.to_dense())


@pytest.mark.parametrize(
    "options",
    (
        {"sparse": False},
        {"padding_idx": 3},
        {"per_sample_weights": torch.ones(COUNT)},
        {"max_norm": 2.0},
        {"bounds_check": "off"},
        {"prefetch_distance": 4},
        {"schedule": "distance=4"},
    ),
    ids=lambda options: next(iter(options)),
)
def test_other_calls_are_recfuses(options, torchs):
    called(recfuse.embedding_bag, *some(), **PLAIN | options)
    assert not torchs


def test_other_tensors_are_recfuses(torchs):
    indices, offsets = some()
    wide, half = torch.randn(ROWS, 2 * DIM), torch.randn(ROWS, DIM, dtype=torch.float16)
    of = [wide[:, ::2], half, torch.randn(ROWS, DIM)]
    for weight in of:
        recfuse.embedding_bag(indices, weight.requires_grad_(), offsets.int(), **PLAIN)
    recfuse.embedding_bag(torch.stack((indices, indices), 1)[:, 0], of[2], offsets, **PLAIN)
    with torch.no_grad():
        recfuse.embedding_bag(indices, of[2], offsets, **PLAIN)
    recfuse.embedding_bag(indices, of[2].detach(), offsets, **PLAIN)
    recfuse.embedding_bag(indices[:0], of[2], offsets[:0], **PLAIN)
    assert not torchs


@pytest.mark.parametrize("bad", (-1, ROWS, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)))
def test_bad_indices_raise_as_ever(bad, torchs):
    dtype = torch.int32 if abs(bad) <= 2**31 else torch.int64
    indices, offsets = some(dtype)
    indices[11] = bad
    with pytest.raises(IndexError, match=f"{bad}"):
        called(recfuse.embedding_bag, indices, offsets, **PLAIN)
    assert not torchs


@pytest.mark.parametrize(
    ("offsets", "last"),
    (
        ([1, 7], False),
        ([0, 9, 8], False),
        ([0, COUNT + 1], False),
        ([0, -1], False),
        ([0, 3, COUNT - 1], True),
    ),
)
def test_odd_offsets_are_recfuses(offsets, last, torchs):
    """One that is bad raises; lookups behind the last bag's end are not used."""
    weight, call = torch.ones(ROWS, DIM, requires_grad=True), (some()[0], torch.tensor(offsets))
    if last:
        indices, ends = call
        found = recfuse.embedding_bag(indices, weight, ends, include_last_offset=True, **PLAIN)
        assert found[:, 0].tolist() == ends.diff().tolist()
    else:
        with pytest.raises((ValueError, IndexError), match="offsets"):
            called(recfuse.embedding_bag, *call, **PLAIN)
    assert not torchs


def test_a_table_of_a_fused_optimizer_is_updated(torchs):
    weight = torch.nn.Parameter(torch.ones(ROWS, DIM))
    optimizer = recfuse.optim.SGD([weight], lr=0.5)  # the weight is its own as long as it lives
    recfuse.embedding_bag(torch.tensor([3, 3]), weight, torch.tensor([0]), **PLAIN).sum().backward()
    assert not torchs and weight.grad is None and weight[3, 0] == 0
    optimizer.step()


def test_few_lookups_or_distinct_rows_suit_torch():
    def suits(indices):
        offsets = torch.tensor([0])
        places = indices.data_ptr(), indices.numel(), offsets.data_ptr(), 1
        return _C.lookups_suit_torch(*places, False, 1, int(indices.max()) + 1)

    assert suits(torch.zeros(2048, dtype=torch.int64)) and not suits(torch.zeros(2049, dtype=torch.int64))
    distinct = torch.randperm(8192)
    assert suits(distinct)
    assert suits(distinct % 7000) and not suits(distinct % 300)
    assert not suits(torch.cat((distinct[:4], torch.zeros(8188, dtype=torch.int64))))
