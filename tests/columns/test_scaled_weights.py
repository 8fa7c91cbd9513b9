"""Weighted means and sqrtn of weights of any size: squares of float32 have no float32."""

from __future__ import annotations

import pytest
import torch

from support.columns.scaled import POOLINGS, SCALES, module_and_batch


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_of_scaled_weights(pooling, scale):
    module, batch = module_and_batch(pooling, scale)
    want = module.to_torch().double()(batch)
    with torch.no_grad():
        torch.testing.assert_close(module(batch).double(), want.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module.to_torch()(batch).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_gradients_of_scaled_weights(pooling, scale):
    module, batch = module_and_batch(pooling, scale)
    reference = module.to_torch().double()
    reference(batch).square().sum().backward()
    module(batch).square().sum().backward()
    (found,), (want,) = ([one.grad for one in own.parameters()] for own in (module, reference))
    torch.testing.assert_close(found[:60].double(), want[:60], rtol=1e-4, atol=1e-4)


def test_weights_without_a_normal_float32_give_no_nan():
    module, batch = module_and_batch("sqrtn", 1e-42)
    with torch.no_grad():
        torch.testing.assert_close(
            module(batch), module_and_batch("sqrtn", 1.0)[0](batch), rtol=0.1, atol=0.1
        )
        assert module(batch).isfinite().all()
