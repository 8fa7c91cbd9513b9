"""TorchRec's regroup after collections: the collections' call writes the groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recfuse
from support.graphs import assert_same, passed

torchrec = pytest.importorskip("torchrec")
KeyedTensor = torchrec.KeyedTensor
ONCE = [["f00", "f13", "f05"], ["f01", "f02", "f03", "f04", "f10", "f11", "f12", "f14", "f15"]]
TWICE = [["f00", "f13"], ["f00", "f01", "f02", "f03"]]
EXPECTED = {9: ["swapped"] * 4, 4: ["swapped", "swapped", "left"]}  # keys without a group have zero gradients


class Model(nn.Module):
    """Two collections of several dims, whose keys are grouped differently."""

    def __init__(self, groups, function=lambda groups, values: groups):
        super().__init__()
        self.groups, self.function = groups, function
        self.collections = nn.ModuleList(
            torchrec.EmbeddingBagCollection(
                tables=[
                    torchrec.EmbeddingBagConfig(
                        name=f"t{j}{k}", embedding_dim=4 + 4 * k, num_embeddings=50,
                        feature_names=[f"f{j}{2 * k}", f"f{j}{2 * k + 1}"],
                    )
                    for k in range(3)
                ]
            )
            for j in range(2)
        )  # fmt: skip

    def forward(self, *batch):
        tensors = []
        for j, collection in enumerate(self.collections):
            keys = [f"f{j}{k}" for k in range(6)]
            given = torchrec.KeyedJaggedTensor(keys=keys, values=batch[2 * j + 1], lengths=batch[2 * j])
            tensors.append(collection(given))
        groups = KeyedTensor.regroup_as_dict(tensors, self.groups, ["a", "b"])
        return self.function((groups["a"], groups["b"]), tensors[0].values())

    def batch(self, samples):
        given = []
        for _ in range(2):
            lengths = torch.randint(0, 4, (6 * samples,))
            given += [lengths, torch.randint(0, 50, (int(lengths.sum()),))]
        return tuple(given)


def names_of(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("groups", (ONCE, TWICE))
def test_groups_are_the_layout_of_the_call(groups):
    model = Model(groups).requires_grad_(False)
    some = {0: torch.export.Dim.AUTO}
    options = {"strict": False, "dynamic_shapes": ((some,) * 4,)}
    program = torch.export.export(model, model.batch(8), **options)
    report = recfuse.swap(program, check=[model.batch(5)])
    assert len(report.found("regroup")) >= 1 and not report.left
    assert len(report.found("bags")) == (12 if groups is ONCE else 5)  # others are unused
    names = names_of(program.graph)
    assert sum("fused_embedding_bag" in name for name in names) == 1
    copies = ("permute_pooled", "clone", "aten.cat.default")
    if groups is ONCE:
        written = names[next(at for at, name in enumerate(names) if "fused_embedding_bag" in name) :]
        assert not any(copy in name for name in written for copy in copies), written
    for samples in (2, 40):
        batch = model.batch(samples)
        assert_same(program.module()(*batch), model(*batch))


@pytest.mark.parametrize("way", ("eager", "aot_eager"))
@pytest.mark.parametrize("groups", (ONCE, TWICE))
def test_gradients_and_other_users(groups, way):
    model = Model(groups, lambda groups, values: (*groups, values * 2))
    batch = model.batch(8)
    swapped, report = passed(model, batch, way)
    assert [entry.action for entry in report.found("regroup")] == EXPECTED[len(groups[1])]
    gradients = []
    for call in (model, swapped):
        model.zero_grad()
        results = call(*batch)
        sum((result * torch.arange(result.shape[1])).sum() for result in results).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert_same(results, model(*batch))
    assert_same(*gradients)


def test_values_that_are_written_to_are_left():
    model = Model(ONCE, lambda groups, values: (groups[0] + 0, values.add_(1), groups[1])).requires_grad_(
        False
    )
    batch = model.batch(8)
    with torch.no_grad():
        swapped, _ = passed(model, batch, "aot_eager")
        assert_same(swapped(*batch), model(*batch))
