"""Numbers and options of param groups that float32 or a fused step does not have."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import recfuse
from recfuse import optim
from support.collection import collection_of, lookups_of


@pytest.mark.parametrize("beta", (1 - 2**-25, 1 - 1e-8, 1 - 1e-16))
@pytest.mark.parametrize("number", (0, 1))
def test_a_beta_that_is_one_in_float32_is_refused(beta, number):
    betas = [0.9, 0.999]
    betas[number] = beta
    with pytest.raises(ValueError, match=rf"betas\[{number}\] is .*, which is 1 in float32"):
        optim.Adam(collection_of([(20, 4)]), betas=betas)
    model = nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True))
    theirs = torch.optim.SparseAdam(list(model.parameters()), betas=tuple(betas))
    with pytest.raises(ValueError, match="which is 1 in float32"):
        recfuse.swap(model, optimizers=[theirs], fuse_optimizers=True)
    assert type(model[0]) is nn.EmbeddingBag


def test_the_largest_beta_moves_rows():
    model = collection_of([(20, 4)], sparse=True)
    before = copy.deepcopy(model.state_dict())
    optimizer = optim.Adam(model, lr=0.1, betas=(0.9, 1 - 2**-24))
    model(*lookups_of(model)).square().sum().backward()
    optimizer.step()
    moved = max(float((value - before[key]).abs().max()) for key, value in model.state_dict().items())
    assert 0.09 < moved < 0.11


@pytest.mark.parametrize("key", ("lr", "eps", "weight_decay"))
@pytest.mark.parametrize("value", (1e39, float("inf")))
def test_numbers_beyond_float32_are_refused(key, value):
    with pytest.raises(ValueError, match=f"{key} is .*; expected a finite float32"):
        optim.Adam(collection_of([(20, 4)]), **{key: value})


def test_options_of_how_torch_computes_are_ignored():
    collection = collection_of([(20, 4)], sparse=True)
    optimizer = optim.SGD(collection, lr=0.1, foreach=True, fused=True, differentiable=None)
    optimizer.param_groups[0]["foreach"] = False
    optimizer.param_groups[0]["differentiable"] = None
    optim.Adam(collection, foreach=True, capturable=True)
    with pytest.raises(ValueError, match="differentiable is True"):
        optim.SGD(collection, differentiable=True)
