"""A model of the shape of facebookresearch/dlrm's, its batches and its training."""

from __future__ import annotations

import torch
from torch import nn


class DLRM_Net(nn.Module):
    """A model of the shape of facebookresearch/dlrm's: the same attributes and the same apply_emb."""

    def __init__(self, sizes=(40, 7, 300, 20), dim=8, sparse=True, weighted=None, mode="sum"):
        super().__init__()
        self.quantize_emb = False
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(n, dim, mode=mode, sparse=sparse) for n in sizes])
        self.v_W_l = [None] * len(sizes)
        if weighted == "fixed":
            self.v_W_l = [torch.rand(n) for n in sizes]
        if weighted == "learned":
            self.v_W_l = nn.ParameterList([nn.Parameter(torch.rand(n)) for n in sizes])
        self.bot_l = nn.Sequential(nn.Linear(5, dim), nn.ReLU())
        self.top_l = nn.Sequential(
            nn.Linear(dim * (len(sizes) + 1), 6), nn.ReLU(), nn.Linear(6, 1), nn.Sigmoid()
        )

    def apply_emb(self, lS_o, lS_i, emb_l, v_W_l):
        ly = []
        for k, sparse_index_group_batch in enumerate(lS_i):
            sparse_offset_group_batch = lS_o[k]
            per_sample_weights = None
            if v_W_l[k] is not None:
                per_sample_weights = v_W_l[k].gather(0, sparse_index_group_batch)
            if self.quantize_emb:
                ly.append(torch.zeros(sparse_offset_group_batch.shape[0], 1))
            else:
                bag = emb_l[k]
                ly.append(
                    bag(
                        sparse_index_group_batch,
                        sparse_offset_group_batch,
                        per_sample_weights=per_sample_weights,
                    )
                )
        return ly

    def forward(self, dense_x, lS_o, lS_i):
        ly = self.apply_emb(lS_o, lS_i, self.emb_l, self.v_W_l)
        return self.top_l(torch.cat([self.bot_l(dense_x), *ly], dim=1))


def batch_of(model, bags=16, form="tensor"):
    """Input in a form of that script: offsets stacked or listed, indices listed or stacked."""
    sizes = [bag.num_embeddings for bag in model.emb_l]
    if form == "stacked":
        lS_i = torch.stack([torch.randint(0, n, (bags * 3,)) for n in sizes])
        return torch.randn(bags, 5), torch.arange(0, bags * 3, 3).repeat(len(sizes), 1), lS_i
    lengths = [torch.randint(0, 5, (bags,)) for _ in sizes]
    lS_o = [torch.cat((torch.zeros(1, dtype=torch.int64), one.cumsum(0)[:-1])) for one in lengths]
    lS_i = [torch.randint(0, n, (int(one.sum()),)) for n, one in zip(sizes, lengths, strict=True)]
    return torch.randn(bags, 5), (torch.stack(lS_o) if form == "tensor" else lS_o), lS_i


def train(model, optimizer, batches):
    losses = []
    for dense_x, lS_o, lS_i in batches:
        loss = (model(dense_x, lS_o, lS_i) - dense_x[:, :1].sigmoid()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
