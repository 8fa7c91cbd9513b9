"""Writes to memory that values do not show: loaded programs, nested graphs, regions."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recfuse
from support.graphs import assert_same, gradients, passed

USERS, CANDIDATES = 3, 24


class Model(nn.Module):
    """A function of the module, of users' rows, candidates' rows and the map."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.layer, self.inner = nn.Linear(16, 4), nn.Linear(8, 8)
        self.tables = nn.ModuleList(nn.Embedding(30, 8) for _ in range(2))
        self.register_buffer("factors", torch.ones(8))

    def forward(self, x_user, x_cand, cand_to_user):
        return self.function(self, x_user, x_cand, cand_to_user)


def arguments():
    torch.manual_seed(1)
    return torch.randn(USERS, 8), torch.randn(CANDIDATES, 8), torch.arange(CANDIDATES) % USERS


def bags_of_written_indices(m, x, c, i):
    copied = i.clone()
    flat = copied.view(-1)
    first = m.tables[0](copied[:, None]).sum(1)
    flat.mul_(0)
    return torch.cat([first, m.tables[1]((i + flat[0])[:, None]).sum(1)], 1)


def bags_of_a_written_weight(m, x, c, i):
    first = m.tables[0](i[:, None]).sum(1)
    weight = m.tables[0].weight.detach().view(-1)
    weight.mul_(0.5)
    return torch.cat([first, m.tables[1]((i + (weight[0] > 9).long())[:, None]).sum(1)], 1)


def bag_written_through_a_view(m, x, c, i):
    first = m.tables[0](i[:, None]).sum(1)
    view = first.view(-1)
    second = m.tables[1](i[:, None]).sum(1)
    view.add_(1)
    return torch.cat([first, second], 1)


def indices_written_through_a_dropout(m, x, c, i):
    factors = m.factors * c.sum()
    same = F.dropout(factors, 0.5, training=False)  # it is its argument, although no schema says so
    copied = x[i] * factors
    same.add_(1)
    return m.layer(torch.cat([copied, c], 1))


def factors_written_later(m, x, c, i):
    factors = m.factors * c.sum()
    copied = x[i] * factors
    factors.add_(1)
    return m.layer(torch.cat([copied, c], 1))


def buffer_written_later(m, x, c, i):
    copied = (x[i] * m.factors).relu()
    m.factors.add_(1)
    return m.layer(torch.cat([copied, c], 1))


def buffer_written_without_gradients(m, x, c, i):
    copied = x[i] * m.factors
    with torch.no_grad():
        total = m.factors.add_(1).sum()  # torch loads no graph that has no result
    return m.layer(torch.cat([copied, c], 1)) + total


def view_made_without_gradients(m, x, c, i):
    factors = m.factors * c.sum()
    with torch.no_grad():
        view = factors.view(2, 4)
    copied = x[i] * factors
    view.add_(1)
    return m.layer(torch.cat([copied, c], 1))


def users_written_without_gradients(m, x, c, i):
    users = x.clone()
    copied = users[i]
    with torch.no_grad():
        total = users.mul_(2).sum()
    return m.layer(torch.cat([copied, c], 1)) + total


WRITING = (
    bags_of_written_indices,
    bags_of_a_written_weight,
    bag_written_through_a_view,
    indices_written_through_a_dropout,
    factors_written_later,
    buffer_written_later,
    buffer_written_without_gradients,
    view_made_without_gradients,
    users_written_without_gradients,
)


@pytest.mark.parametrize("way", ("aot_eager", "exported", "loaded"))
@pytest.mark.parametrize("function", WRITING, ids=lambda function: function.__name__)
def test_reads_come_before_later_writes(function, way):
    model, batch = Model(function).requires_grad_(False), arguments()
    twin = copy.deepcopy(model)
    if way == "loaded":
        file = io.BytesIO()
        torch.export.save(torch.export.export(twin, batch), file)
        file.seek(0)
        program = torch.export.load(file)
        recfuse.swap(program)
        swapped = program.module()
    else:
        swapped, _ = passed(twin, batch, way)
        for name, buffer in model.named_buffers():  # as before the first run
            twin.get_buffer(name).copy_(buffer)
        twin.load_state_dict(model.state_dict())
    assert_same(swapped(*batch), model(*batch), rtol=1e-5, atol=1e-5)


def test_a_loaded_program_that_writes_to_nothing_is_swapped():
    model, batch = Model(lambda m, x, c, i: m.layer(torch.cat([m.inner(x)[i].relu(), c], 1))), arguments()
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, batch), file)
    file.seek(0)
    program = torch.export.load(file)
    assert recfuse.swap(program).found("ikbo_linear")[0].action == "swapped"
    assert_same(program.module()(*batch), model(*batch), rtol=1e-5, atol=1e-5)


def guard_and_its_argument(m, x, c, i):
    bucket = torch.bucketize(x[:, 0], torch.tensor([0.0, 1.0]))
    return torch.clamp(bucket, 0, 9).view(-1, 1), bucket


def test_results_of_a_loaded_program_share_no_memory():
    file, batch = io.BytesIO(), arguments()
    torch.export.save(torch.export.export(Model(guard_and_its_argument), batch), file)
    file.seek(0)
    program = torch.export.load(file)
    recfuse.swap(program)
    first, second = program.module()(*batch)
    expected = second.clone()
    first.add_(1)
    assert_same(second, expected)


# ---- gradients


def projected_without_gradients(m, x, c, i):
    with torch.no_grad():
        copied = m.inner(m.inner(x)[i])
    return m.layer(torch.cat([copied, c], 1))


def test_broadcasts_without_gradient_stay_without_gradient():
    model, batch = Model(projected_without_gradients), arguments()
    expected = gradients(model, model, batch)
    swapped, report = passed(model, batch, "aot_eager")
    assert report.found("ikbo_linear")[0].action == "left"
    assert_same(gradients(model, swapped, batch), expected)


# ---- graphs inside of graphs


class Frozen(Model):
    """Under ``torch.no_grad``, which an exported program has a graph of its own for."""

    @torch.no_grad()
    def forward(self, x_user, x_cand, cand_to_user):
        return torch.cat([table(cand_to_user[:, None]).sum(1) for table in self.tables], 1)


def test_a_graph_inside_of_a_program_is_reported():
    model, batch = Frozen(None), arguments()
    program = torch.export.export(model, batch)
    report = recfuse.swap(program)
    (left,) = report.left
    assert not report.swapped and "run_decompositions({})" in left.detail
    inlined = program.run_decompositions({})
    assert len(recfuse.swap(inlined).swapped) == 2
    assert_same(inlined.module()(*batch), model(*batch))
