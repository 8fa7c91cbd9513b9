"""unswap: torch's own classes again, with today's weights."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import recfuse
from recfuse.nn import FusedEmbeddingBagList
from support.dlrm import DLRM_Net, batch_of, train


def test_unswap_restores_classes_and_current_weights():
    model = DLRM_Net(weighted="learned")
    model.single = nn.EmbeddingBag(11, 8, padding_idx=2)
    kinds = [type(module) for module in model.modules()]
    keys = list(model.state_dict())
    recfuse.swap(model)
    batch = batch_of(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.5), [batch] * 3)
    model.eval()
    gc.collect()
    want, state = model(*batch), copy.deepcopy(model.state_dict())
    report = recfuse.unswap(model)
    assert {entry.name for entry in report.restored} == {"emb_l", "single"}
    assert "2 restored, 0 left" in str(report)
    assert [type(module) for module in model.modules()] == kinds
    assert "apply_emb" not in vars(model)
    assert not model.emb_l[0].training
    assert list(model.state_dict()) == keys
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    torch.testing.assert_close(model(*batch), want)
    assert recfuse.unswap(model).entries == []
    assert len(recfuse.swap(model).fused) == 1


def test_unswap_lets_other_tools_work():
    model = DLRM_Net(sparse=False)
    recfuse.swap(model)
    with pytest.raises(TypeError, match=r"recfuse\.unswap\(model\)"):
        torch.fx.symbolic_trace(model)
    recfuse.unswap(model)
    quantized = torch.ao.quantization.quantize_dynamic(
        model, {nn.EmbeddingBag: torch.ao.quantization.float_qparams_weight_only_qconfig}
    )
    assert "quantized" in type(quantized.emb_l[0]).__module__
    torch.jit.script(model.emb_l[0])


def test_unswap_keeps_collections_that_the_user_made():
    model = nn.Module()
    model.tables = FusedEmbeddingBagList([nn.EmbeddingBag(5, 4, mode="sum")])
    (entry,) = recfuse.unswap(model).left
    assert "swap did not create this module" in entry.detail
    assert type(model.tables) is FusedEmbeddingBagList
