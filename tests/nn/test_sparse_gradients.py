"""Sparse gradients on their way to a Parameter: without a copy, and coalesced."""

from __future__ import annotations

import pytest
import torch

import recfuse
from recfuse.ops import bags, gradients


def sparse_call(weight):
    """A sum of rows 3 (twice), 5 and 1 of `weight`, in two bags, with a sparse gradient."""
    return recfuse.embedding_bag(
        torch.tensor([3, 5, 3, 1]), weight, torch.tensor([0, 2]), mode="sum", sparse=True
    )


@pytest.fixture(autouse=True)
def none_are_few(monkeypatch):
    """Gradients of these tests are marked like large gradients."""
    monkeypatch.setattr(gradients, "_FEW_ELEMENTS", 0)


def test_a_small_gradient_has_each_row_once(monkeypatch):
    monkeypatch.setattr(gradients, "_FEW_ELEMENTS", 12)
    weight = torch.nn.Parameter(torch.randn(7, 4))
    sparse_call(weight).sum().backward()
    assert not weight.grad.is_coalesced() and weight.grad._indices().tolist() == [[1, 3, 5]]
    torch.optim.SparseAdam([weight]).step()


@pytest.fixture
def made_values(monkeypatch):
    """Records where the values of sparse gradients were written."""
    places, operator = [], gradients._sparse_weight_grad

    def watched(*arguments):
        rows, values = operator(*arguments)
        places.append(values.data_ptr())
        return rows, values

    plain = bags._plain_gradient

    def watched_plain(*arguments):
        found = plain(*arguments)
        places.append(found._values().data_ptr())
        return found

    made_together = gradients._sparse_weight_grads

    def watched_together(*arguments):
        pairs = made_together(*arguments)
        places.extend(values.data_ptr() for values in pairs[1::2])
        return pairs

    monkeypatch.setattr(gradients, "_sparse_weight_grad", watched)
    monkeypatch.setattr(bags, "_plain_gradient", watched_plain)
    monkeypatch.setattr(gradients, "_sparse_weight_grads", watched_together)
    return places


def test_a_sparse_gradient_reaches_the_parameter_without_a_copy(made_values):
    weight = torch.nn.Parameter(torch.randn(7, 4))
    output = sparse_call(weight)
    for _ in range(2):
        weight.grad = None
        output.sum().backward(retain_graph=True)
        assert weight.grad.is_coalesced() and weight.grad._values().data_ptr() == made_values[-1]
        assert weight.grad.indices().tolist() == [[1, 3, 5]]
        assert torch.equal(weight.grad.values(), torch.tensor([[1.0], [2.0], [1.0]]).expand(3, 4))


def test_a_list_of_weights_has_coalesced_gradients_without_copies(made_values):
    tables = [recfuse.nn.Table(9, 4), recfuse.nn.Table(9, 8)]
    collection = recfuse.nn.FusedEmbeddingBagCollection(tables, sparse=True)
    first, second = collection.parameters()
    second.requires_grad_(False)
    collection(torch.tensor([3, 5, 3, 1]), torch.tensor([0, 2, 4])).sum().backward()
    assert second.grad is None and first.grad.is_coalesced()
    second.requires_grad_(True)
    first.grad = None
    collection(torch.tensor([3, 5, 3, 1]), torch.tensor([0, 2, 4])).sum().backward()
    assert first.grad.is_coalesced() and second.grad.is_coalesced()
    assert {first.grad._values().data_ptr(), second.grad._values().data_ptr()} == set(made_values[1:])


def test_a_gradient_is_marked_after_all_other_callbacks():
    """DistributedDataParallel waits at the end of backward for threads that coalesce gradients."""
    weight, seen = torch.nn.Parameter(torch.randn(7, 4)), []

    def queue(parameter):
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: seen.append(parameter.grad.is_coalesced())
        )

    weight.register_post_accumulate_grad_hook(queue)
    sparse_call(weight).sum().backward()
    assert seen == [False] and weight.grad.is_coalesced()


def test_sparse_gradients_that_add_up_are_right():
    weight, dense = (torch.nn.Parameter(torch.ones(7, 4)) for _ in range(2))
    for _ in range(2):
        sparse_call(weight).sum().backward()
    (sparse_call(weight) + sparse_call(weight)).sum().backward()
    (4 * sparse_call(dense)).sum().backward()
    assert torch.equal(weight.grad.to_dense(), dense.grad.to_dense())


def test_a_sparse_gradient_that_a_hook_replaces_is_not_said_to_be_coalesced():
    doubled, replaced = (torch.nn.Parameter(torch.ones(7, 4)) for _ in range(2))
    doubled.register_hook(lambda grad: grad * 2)
    sparse_call(doubled).sum().backward()
    assert torch.equal(doubled.grad.to_dense()[3], torch.full((4,), 4.0))

    def same_row(weight):
        indices = torch.full_like(weight.grad._indices(), 3)
        weight.grad = torch.sparse_coo_tensor(indices, weight.grad._values(), weight.shape)

    replaced.register_post_accumulate_grad_hook(same_row)
    sparse_call(replaced).sum().backward()
    assert not replaced.grad.is_coalesced()
    assert torch.equal(replaced.grad.to_dense()[3], torch.full((4,), 4.0))


def test_sparse_gradients_of_other_calls_are_not_marked():
    weight = torch.nn.Parameter(torch.ones(7, 4))
    other = torch.sparse_coo_tensor([[3, 3]], torch.ones(2, 4), (7, 4))
    weight.grad = other
    (found,) = torch.autograd.grad(sparse_call(weight).sum(), weight)
    assert found.is_coalesced() and weight.grad is other and not other.is_coalesced()
    sparse_call(weight * 2).sum().backward()  # of a tensor that is not a Parameter
    assert torch.equal(weight.grad.to_dense()[3], torch.full((4,), 6.0))
