"""Bags of graphs: matches, their replacements, and graphs that stay."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import recfuse
from support.dlrm import DLRM_Net, batch_of
from support.graphs import WAYS, Bags, assert_same, gradients, jagged, passed

pytestmark = pytest.mark.long

each_way = pytest.mark.parametrize("way", WAYS)


def calls_of(graph, name):
    return sum(name in str(node.target) for node in graph.nodes)


@each_way
def test_bags_of_every_form_are_swapped(way):
    model = Bags()
    batch = model.batch(8)
    swapped, report = passed(model, batch, way)
    assert len(report.found("bags")) == len(report.swapped) == model.bags
    assert_same(swapped(*batch), model(*batch))
    # Inductor compiles for seconds, and its input for one bag is the input of aot_eager.
    others = {"eager": (3, 1, 50), "aot_eager": (3, 1, 50), "inductor": (3, 50)}
    for bags in others.get(way, ()):
        batch = model.batch(bags)
        assert_same(swapped(*batch), model(*batch))


@each_way
def test_gradients_are_the_models(way):
    if way == "decomposed":
        pytest.skip("a decomposed program is for inference")
    model = Bags()
    batch = model.batch(8)
    swapped, _ = passed(model, batch, way)
    expected = gradients(model, model, batch)
    if way == "exported":
        names = [name for name, _ in model.named_parameters()]
        own = dict(swapped.named_parameters())
        gradients(swapped, swapped, batch)
        found = [own[name].grad for name in names]
    else:
        found = gradients(model, swapped, batch)
    assert_same(found, expected)


def change(way, model):
    with torch.no_grad():
        if way == "in place":
            for parameter in model.parameters():
                parameter.mul_(-2)
        elif way == ".data":
            for parameter in model.parameters():
                parameter.data = torch.randn_like(parameter)
        elif way.startswith("load"):
            state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=way.endswith("assign"))
    if way == "optimizer":
        model.zero_grad()
        model(*model.batch(5)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()


@pytest.mark.parametrize("form", ("eager", "aot_eager", "exported"))
@pytest.mark.parametrize("way", ("in place", ".data", "load", "load assign", "optimizer"))
def test_changed_weights_are_read(form, way):
    model = Bags(tables=2)
    batch = model.batch(8)
    swapped, report = passed(model, batch, form)
    assert not report.left
    before = model(*batch)
    if form == "exported":
        model.load_state_dict(swapped.state_dict())
        if way == "optimizer":
            swapped(*batch).sum().backward()
            torch.optim.SGD(swapped.parameters(), lr=0.5).step()
        else:
            torch.manual_seed(5)
            change(way, swapped)
        model.load_state_dict(swapped.state_dict())
    else:
        change(way, model)
    assert not torch.equal(model(*batch), before)
    assert_same(swapped(*batch), model(*batch))


def test_functional_call_of_a_compiled_model():
    model = Bags(tables=2)
    batch = model.batch(8)
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}

    def call(state, batch):
        return functional_call(model, state, batch)

    backend = recfuse.backend("aot_eager")
    compiled = torch.compile(call, backend=backend)
    assert_same(compiled(state, batch), call(state, batch))
    assert len(backend.reports[-1].swapped) == model.bags


def test_a_program_that_was_exported_for_any_batch():
    model = Bags()
    program = torch.export.export(model, model.batch(8), dynamic_shapes=model.dynamic())
    report = recfuse.swap(program, check=[model.batch(4), model.batch(30)])
    assert len(report.swapped) == model.bags and not report.left
    assert calls_of(program.graph, "fused_embedding_bag") == 1
    assert not calls_of(program.graph, "aten.embedding")
    for bags in (2, 33, 1000):
        batch = model.batch(bags)
        assert_same(program.module()(*batch), model(*batch))


def test_a_swapped_program_is_saved_and_loaded(tmp_path):
    model = Bags()
    program = torch.export.export(model, model.batch(8), dynamic_shapes=model.dynamic())
    recfuse.swap(program)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    batch = model.batch(20)
    assert_same(loaded.module()(*batch), model(*batch))
    assert_same(loaded.run_decompositions().module()(*batch), model(*batch))
    assert not recfuse.swap(loaded).entries


def test_other_batch_sizes_do_not_recompile():
    model = Bags()
    for inner in ("eager", "aot_eager"):
        torch.compiler.reset()
        backend = recfuse.backend(inner)
        compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
        no_recompilation = torch._dynamo.config.patch(error_on_recompile=True)
        with no_recompilation, torch.fx.experimental._config.patch(use_duck_shape=False):
            compiled(*model.batch(32))
            first = len(backend.reports)  # torch may start again, to read the floats of modules as constants
            for bags in (64, 500, 2048):
                batch = model.batch(bags)
                assert_same(compiled(*batch), model(*batch))
        assert len(backend.reports) == first and len(backend.reports[-1].swapped) == model.bags


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision_and_int32(dtype):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(20, 8, mode="sum", dtype=dtype) for _ in range(3))

        def forward(self, calls):
            return torch.stack([t(i, o) for t, (i, o) in zip(self.tables, calls, strict=True)], 1)

    model = Half()
    batch = [jagged(6, 20, dtype=torch.int32), jagged(6, 20), jagged(6, 20, dtype=torch.int32)]
    swapped, report = passed(model, (batch,), "aot_eager")
    assert len(report.swapped) == 3
    assert_same(swapped(batch), model(batch))


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("trailing", (0, 5))
def test_last_offsets_with_further_lookups(trailing, weighted):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(
                nn.EmbeddingBag(20, 4 + k, mode="sum", include_last_offset=True) for k in range(3)
            )

        def forward(self, calls, factors):
            pooled = []
            for table, (indices, offsets), own in zip(self.tables, calls, factors, strict=True):
                pooled.append(table(indices, offsets, own if weighted else None))
            return torch.cat(pooled[::-1], 1), pooled[1] * 2

    model = Last()
    calls = [jagged(6, 20, last=True, trailing=trailing) for _ in range(3)]
    factors = [torch.randn(indices.numel()) for indices, _ in calls]
    swapped, report = passed(model, (calls, factors), "aot_eager")
    assert len(report.swapped) == 3
    assert_same(swapped(calls, factors), model(calls, factors))
    if not trailing:  # torch's own gradients of it have no row
        assert_same(gradients(model, swapped, (calls, factors)), gradients(model, model, (calls, factors)))


@pytest.mark.parametrize("start", (0, 1))
def test_bags_of_one_lookup_by_their_offsets(start):
    """``arange(batch)``; from 1 on, the first bag is another bag, and torch refuses it on the CPU."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(20, 4 + k, mode="sum") for k in range(3))

        def forward(self, x, weights):
            numbers = torch.arange(start, x.shape[0] + start)
            pooled = [table(x[:, k], numbers) for k, table in enumerate(self.tables[:2])]
            return torch.cat([*pooled, self.tables[2](x[:, 2], torch.arange(x.shape[0]), weights)], 1)

    model, batch = Model(), torch.export.Dim("batch", min=2)
    given = torch.randint(0, 20, (8, 3)), torch.rand(8)
    swapped, report = passed(model, given, "exported", dynamic_shapes=({0: batch}, {0: batch}))
    assert len(report.swapped) == 3
    for samples in (8, 33):
        given = torch.randint(0, 20, (samples, 3)), torch.rand(samples)
        for run in (model, swapped):
            if start:
                with pytest.raises(RuntimeError):
                    run(*given)
        if not start:
            assert_same(swapped(*given), model(*given))
            assert_same(gradients(swapped, swapped, given), gradients(model, model, given))


def test_bad_contents_raise():
    model = Bags(tables=2)
    fixed, indices, offsets, *rest = model.batch(8)
    swapped, _ = passed(model, (fixed, indices, offsets, *rest), "eager")
    wrong = copy.deepcopy(fixed)
    wrong[1][3, 1] = 21
    with pytest.raises(IndexError, match=r" for feature 1"):
        swapped(wrong, indices, offsets, *rest)
    moved = [offsets[0], torch.clamp(offsets[1], min=1)]
    with pytest.raises(RuntimeError, match="begin with another number; expected 0"):
        swapped(fixed, indices, moved, *rest)


class One(nn.Module):
    """A table, and a function of it and of inputs."""

    def __init__(self, function, **options):
        super().__init__()
        self.table = nn.Embedding(20, 4, **options)
        self.function = function

    def forward(self, *inputs):
        return self.function(self.table, *inputs)


def bag(table, indices, **options):
    return F.embedding_bag(indices, table.weight, mode="sum", **options)


def written(table, indices):
    pooled = bag(table, indices)
    pooled.add_(1)
    return pooled


def written_index(table, indices):
    indices = indices.clone()
    before = bag(table, indices)
    indices.fill_(0)
    return before + bag(table, indices)


LEFT = {
    "by_freq": (
        lambda t, i: bag(t, i, scale_grad_by_freq=True),
        "no kernel divides gradients",
    ),
    "float64": (
        lambda t, i: F.embedding_bag(i, t.weight.double(), mode="sum"),
        "weight is torch.float64, torch.strided; expected strided float32",
    ),
    "written": (written, "written to"),
    "index": (written_index, "written to"),
    "renormalised": (lambda t, i: bag(t, i, max_norm=0.5), "written to"),
    "lookup": (lambda t, i: t(i[:, 0]), "no other table"),
    "transposed": (
        lambda t, i: F.embedding_bag(i % 4, t.weight.t(), mode="sum"),
        "weight has shape [4, 20] and strides [1, 4]",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_skipped_matches_have_a_reason(name):
    function, reason = LEFT[name]
    model = One(function)
    batch = (torch.randint(0, 20, (6, 3)),)
    with torch.no_grad():
        expected = copy.deepcopy(model)(*batch)
        swapped, report = passed(copy.deepcopy(model), batch, "aot_eager")
        assert not report.swapped and reason in report.left[0].detail
        assert_same(swapped(*batch), expected)


def test_a_padding_row_of_an_embedding_keeps_its_gradient_away():
    model = One(lambda table, i: table(i).sum(1), padding_idx=3)
    batch = (torch.randint(0, 20, (6, 3)),)
    _, report = passed(model, batch, "aot_eager")
    assert "padding_idx" in report.left[0].detail
    model.requires_grad_(False)
    with torch.no_grad():
        model.table.weight[3] = 7.0  # the sum reads it, unlike an EmbeddingBag
    batch[0][0] = 3
    swapped, report = passed(model, batch, "aot_eager")
    assert report.swapped
    assert_same(swapped(*batch), model(*batch))


@pytest.mark.parametrize("way", ("eager", "aot_eager", "exported"))
def test_dlrm(way):
    model = DLRM_Net(sizes=range(10, 36), sparse=False)
    dense, offsets, indices = batch_of(model, form="list")
    swapped, report = passed(model, (dense, offsets, indices), way)
    assert len(report.found("bags")) == len(report.swapped) == 26
    assert_same(swapped(dense, offsets, indices), model(dense, offsets, indices))


def test_torchrec():
    torchrec = pytest.importorskip("torchrec")
    configs = [
        torchrec.EmbeddingBagConfig(name=f"t{k}", embedding_dim=8, num_embeddings=50, feature_names=[f"f{k}"])
        for k in range(6)
    ]
    model = torchrec.EmbeddingBagCollection(tables=configs)

    def batch(bags):
        lengths = torch.randint(0, 4, (6 * bags,))
        values = torch.randint(0, 50, (int(lengths.sum()),))
        return torchrec.KeyedJaggedTensor(keys=[f"f{k}" for k in range(6)], values=values, lengths=lengths)

    torch.compiler.reset()
    backend = recfuse.backend("eager")
    compiled = torch.compile(model, backend=backend)
    for bags in (8, 40):
        given = batch(bags)
        assert_same(compiled(given).values(), model(given).values())
    found = [len(report.found("bags")) for report in backend.reports if report.entries]
    assert found and set(found) == {6}
    assert not any(report.left for report in backend.reports)


def test_training_steps_of_sparse_tables_in_eager_graphs():
    model = Bags(tables=2, sparse=True)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend=recfuse.backend("eager"))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    for _ in range(3):
        batch = model.batch(8)
        for one, optimizer in zip((model, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            one(*batch).square().sum().backward()
            optimizer.step()
    assert twin.fixed[0].weight.grad.is_sparse
    assert_same(list(twin.parameters()), list(model.parameters()))
