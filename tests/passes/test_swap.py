"""swap: replaced, fused and remaining modules; and training continues unchanged."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import recfuse
from recfuse.nn import EmbeddingBag, FusedEmbeddingBagList
from recfuse.nn.packed import holders
from support.dlrm import DLRM_Net, batch_of, train


@pytest.mark.parametrize("weighted", (None, "fixed", "learned"))
@pytest.mark.parametrize("sparse", (True, False))
def test_dlrm_trains_with_the_same_losses(weighted, sparse):
    model = DLRM_Net(sparse=sparse, weighted=weighted)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, twin)]
    keys = list(twin.state_dict())
    report = recfuse.swap(twin, optimizers=optimizers[1:])
    assert [entry.name for entry in report.fused] == ["emb_l"]
    assert report.left == report.replaced == []
    assert sorted(twin.state_dict()) == sorted(keys)
    assert [name for name, _ in twin.named_parameters() if "emb_l" in name] == ["emb_l.packed_dim8"]
    batches = [batch_of(model, form=form) for form in ("tensor", "list", "stacked") * 3]
    torch.testing.assert_close(train(twin, optimizers[1], batches), train(model, optimizers[0], batches))
    state = model.state_dict()
    for name, ours in twin.state_dict().items():
        torch.testing.assert_close(ours, state[name])
    model.load_state_dict(twin.state_dict())
    twin.load_state_dict(model.state_dict())


def test_dlrm_makes_one_call_for_all_tables():
    model = DLRM_Net()
    recfuse.swap(model)
    with torch.profiler.profile() as profile:
        model(*batch_of(model))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["recfuse::fused_embedding_bag"] == 1
    assert not {"recfuse::embedding_bag", "aten::_embedding_bag"} & set(counts)


def test_apply_emb_gives_a_tensor_a_table():
    model = DLRM_Net(mode="mean", sparse=False)
    _, lS_o, lS_i = batch_of(model)
    want = model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)
    recfuse.swap(model)
    got = model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)
    assert isinstance(got, list)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(
            model.apply_emb(lS_o.int(), [i.int() for i in lS_i], model.emb_l, model.v_W_l), got
        )
    assert model.apply_emb(lS_o[:, :0], [i[:0] for i in lS_i], model.emb_l, model.v_W_l)[0].shape == (0, 8)


def test_bad_offsets_of_one_table_do_not_reach_another():
    model = DLRM_Net()
    recfuse.swap(model)
    _, lS_o, lS_i = batch_of(model)
    good = lS_o.clone()
    lS_o[2, 0] = 1
    with pytest.raises(IndexError, match="table 2 begin with 1"):
        model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)
    with pytest.raises(ValueError, match="expected one tensor of each a table"):
        model.apply_emb(good[:3], lS_i, model.emb_l, model.v_W_l)
    good[1, 5] = 10**6
    with pytest.raises(ValueError, match="feature 1"):
        model.apply_emb(good, lS_i, model.emb_l, model.v_W_l)
    lS_i[3][:] = 20
    with pytest.raises(IndexError, match="feature 3"):
        model.apply_emb(batch_of(model, form="stacked")[1][:, :1], lS_i, model.emb_l, model.v_W_l)


def _saved(model):
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("way", (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved))
def test_copies_of_a_swapped_dlrm_stay_fused(way):
    model = DLRM_Net()
    recfuse.swap(model)
    batch = batch_of(model)
    other = way(model)
    assert other.apply_emb.model is other
    assert other.emb_l[0].weight.data_ptr() == other.emb_l.packed_weights()[0].data_ptr()
    want = model(*batch)
    assert torch.equal(other(*batch), want)
    with torch.no_grad():
        other.emb_l[0].weight.zero_()
    assert torch.equal(model(*batch), want)
    other.half().float()
    assert other(*batch).shape == want.shape


def test_a_dlrm_without_its_tables_uses_its_own_apply_emb():
    model = DLRM_Net()
    recfuse.swap(model)
    _, lS_o, lS_i = batch_of(model)
    fused = model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)
    plain = model.apply_emb(lS_o, lS_i, list(model.emb_l), model.v_W_l)
    torch.testing.assert_close(plain, fused)
    torch.testing.assert_close(model.apply_emb(lS_o[:2], lS_i[:2], model.emb_l[:2], model.v_W_l), fused[:2])
    zeros = nn.EmbeddingBag.from_pretrained(torch.zeros(7, 8), mode="sum")
    others = [model.emb_l[0], zeros, *model.emb_l[2:]]
    assert model.apply_emb(lS_o, lS_i, others, model.v_W_l)[1].abs().sum() == 0
    model.emb_l, model.quantize_emb = None, True
    assert model.apply_emb(lS_o, lS_i, None, model.v_W_l)[0].shape == (16, 1)


class QREmbeddingBag(nn.Module):
    """Another kind of table."""

    def __init__(self):
        super().__init__()
        self.num_embeddings = 40

    def forward(self, indices, offsets, per_sample_weights=None):
        return torch.zeros(offsets.shape[0], 8)


def _hooked(model):
    model.emb_l[0].register_forward_hook(lambda *_: None)


def _set(number, bag):
    return lambda model: model.emb_l.__setitem__(number, bag)


@pytest.mark.parametrize(
    ("change", "words"),
    (
        (_set(0, QREmbeddingBag()), "table 0 is a QREmbeddingBag"),
        (_set(1, nn.EmbeddingBag(7, 8, mode="sum", sparse=True, dtype=torch.float64)), "float64"),
        (_set(1, nn.EmbeddingBag(7, 8, mode="sum", max_norm=1.0)), "max_norm"),
        (_set(1, nn.EmbeddingBag(7, 8, mode="sum", scale_grad_by_freq=True)), "scale_grad_by_freq"),
        (_set(1, nn.EmbeddingBag(7, 8, mode="sum", sparse=False)), "sparse"),
        (
            lambda model: [setattr(bag, "include_last_offset", True) for bag in model.emb_l],
            "include_last_offset",
        ),
        (_hooked, "hooks"),
        (lambda model: setattr(model, "apply_emb", model.apply_emb), "apply_emb"),
    ),
)
def test_dlrms_that_cannot_be_fused_are_swapped_table_by_table(change, words):
    model = DLRM_Net()
    change(model)
    report = recfuse.swap(model)
    (entry,) = [entry for entry in report.left if entry.name == "emb_l"]
    assert words in entry.detail
    assert type(model.emb_l) is nn.ModuleList
    assert type(model.emb_l[3]) is EmbeddingBag
    if "include_last_offset" not in words and "float64" not in words:
        model(*batch_of(model))


def test_every_embedding_bag_at_any_depth():
    table = nn.EmbeddingBag(5, 3, mode="max")
    model = nn.ModuleDict(
        {"deep": nn.Sequential(nn.Sequential(table, nn.ReLU())), "tied": nn.EmbeddingBag(5, 3)}
    )
    model["tied"].weight = table.weight
    model["frozen"] = nn.EmbeddingBag(4, 2).requires_grad_(False).eval()
    weights, seen = [p for p in model.parameters()], []
    table.register_forward_hook(lambda *_: seen.append(1))
    want = model["deep"](torch.tensor([[1, 2]]))
    report = recfuse.swap(model)
    assert {entry.name for entry in report.replaced} == {"deep.0.0", "tied", "frozen"}
    assert report.left == report.fused == []
    assert type(table) is EmbeddingBag
    assert model["tied"].weight is table.weight
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    assert torch.equal(model["deep"](torch.tensor([[1, 2]])), want)
    assert len(seen) == 2
    assert not model["frozen"].training
    assert not model["frozen"].weight.requires_grad
    again = recfuse.swap(model)
    assert {entry.name: entry.detail for entry in again.already} == dict.fromkeys(
        ("deep.0.0", "tied", "frozen"), "already swapped"
    )
    assert again.replaced == again.fused == again.left == []


def test_a_second_swap_reports_and_changes_nothing():
    model = nn.ModuleDict({"dlrm": DLRM_Net(), "one": nn.EmbeddingBag(6, 3)})
    first = str(recfuse.swap(model))
    assert "already" not in first
    state, modules = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    report = recfuse.swap(model)
    assert {entry.name for entry in report.already} == {"dlrm.emb_l", "one"} == report.names()
    assert "0 replaced, 0 fused, 0 left, 2 already swapped" in str(report)
    assert [type(module) for module in model.modules()] == modules
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    model["late"] = nn.EmbeddingBag(4, 2)
    assert "1 replaced, 0 fused, 0 left, 2 already swapped" in str(recfuse.swap(model))


def test_equal_entries_of_a_report_share_a_line():
    model = nn.ModuleList([*(nn.EmbeddingBag(6, 3) for _ in range(9)), Halving(4, 2), nn.EmbeddingBag(6, 3)])
    report = recfuse.swap(model)
    lines = str(report).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["(model)", "0", "9"]
    assert lines[2].startswith("0 and 9 more  EmbeddingBag") and lines[4].startswith("10 replaced")
    assert {entry.name for entry in report.replaced} == {*map(str, range(9)), "10"}
    assert str(recfuse.swap(nn.Linear(2, 2))).startswith("recfuse found no module to replace")


def test_a_swapped_model_shows_it():
    model = nn.ModuleDict({"dlrm": DLRM_Net(), "one": nn.EmbeddingBag(6, 3, mode="sum")})
    before = str(model)
    assert "(one): EmbeddingBag(6, 3, mode='sum')\n" in before
    recfuse.swap(model)
    assert "(one): EmbeddingBag(6, 3, mode='sum', recfuse)\n" in str(model)
    assert "(emb_l): FusedEmbeddingBagList(" in str(model)
    model["one"].schedule = "distance=4"
    assert "mode='sum', recfuse, schedule='distance=4')" in str(model)
    recfuse.unswap(model)
    assert str(model) == before


def test_the_model_may_be_the_table():
    table = nn.EmbeddingBag(5, 3)
    report = recfuse.swap(table)
    assert type(table) is EmbeddingBag
    assert [entry.name for entry in report.replaced] == [""]


class Halving(nn.EmbeddingBag):
    """A subclass with a forward of its own."""

    def forward(self, *arguments):
        return super().forward(*arguments) / 2


def test_skipped_modules_have_a_reason():
    own_forward = nn.EmbeddingBag(4, 2)
    own_forward.forward = lambda indices: indices
    parametrized = nn.EmbeddingBag(4, 2)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    model = nn.ModuleDict(
        {
            "subclass": Halving(4, 2),
            "wide": nn.EmbeddingBag(4, 2, dtype=torch.float64),
            "own": own_forward,
            "parametrized": parametrized,
            "other": QREmbeddingBag(),
        }
    )
    kinds = {name: type(module) for name, module in model.items()}
    report = recfuse.swap(model)
    reasons = {entry.name: entry.detail for entry in report.left}
    words = {
        "subclass": "subclass",
        "wide": "float64",
        "own": "forward",
        "parametrized": "parametrized",
        "other": "expected torch.nn.EmbeddingBag",
    }
    assert set(reasons) == set(words)
    assert all(word in reasons[name] for name, word in words.items())
    assert {name: type(module) for name, module in model.items()} == kinds
    text = str(report)
    assert "subclass" in text
    assert "0 replaced, 0 fused, 5 left" in text


def test_without_fusing():
    model = DLRM_Net()
    report = recfuse.swap(model, fuse=False)
    (line,) = [line for line in str(report).splitlines() if line.startswith("next: ")]
    assert "FusedEmbeddingBagList(bags)" in line and "fuse_optimizers=True" in line and len(line) < 150
    whole = str(recfuse.swap(DLRM_Net()))
    assert "next: " not in whole and all(len(line) < 150 for line in whole.splitlines())
    assert len(report.replaced) == 4
    assert report.fused == []
    assert type(model.emb_l) is nn.ModuleList
    model(*batch_of(model))
    assert len(recfuse.swap(model).fused) == 1
    assert type(model.emb_l) is FusedEmbeddingBagList


def _tied_to_a_table(model):
    model.emb_l[0].weight.data = model.emb_l[2].weight.data[:40]


def _tied_to_a_layer(model):
    table = model.emb_l[0]
    model.layer = nn.Linear(table.embedding_dim, table.num_embeddings)
    model.layer.weight.data = table.weight.data


def _row_of_a_table(model):
    model.register_buffer("row", model.emb_l[1].weight.detach()[2])


def _shared_with_processes(model):
    model.share_memory()


@pytest.mark.parametrize(
    ("tie", "words"),
    (
        (_tied_to_a_table, "table 2 shares memory with table 0"),
        (_tied_to_a_layer, "table 0 shares memory with layer.weight"),
        (_row_of_a_table, "table 1 shares memory with row"),
        (_shared_with_processes, "table 0 lies in memory that processes share"),
    ),
)
def test_shared_memory_is_not_packed(tie, words):
    model = DLRM_Net()
    tie(model)
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    reasons = {entry.name: entry.detail for entry in recfuse.swap(model).left}
    assert re.search(words, reasons["emb_l"])
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == places
    model(*batch_of(model))


def test_tables_in_one_tensor_are_packed():
    model = DLRM_Net()
    sizes = [table.weight.numel() for table in model.emb_l]
    for table, own in zip(model.emb_l, torch.randn(sum(sizes)).split(sizes), strict=True):
        table.weight.data = own.view_as(table.weight)
    assert recfuse.swap(model).fused


def test_shared_weights_are_not_packed():
    model = nn.ModuleDict({"a": DLRM_Net(), "b": DLRM_Net(), "c": DLRM_Net()})
    model["b"].emb_l[0].weight = model["a"].emb_l[0].weight
    model["c"].first = model["c"].emb_l[0]
    reasons = {entry.name: entry.detail for entry in recfuse.swap(model).left}
    assert "table 0 shares its weight with b.emb_l.0" in reasons["a.emb_l"]
    assert "table 0 shares its weight with a.emb_l.0" in reasons["b.emb_l"]
    assert "table 0 belongs to c too" in reasons["c.emb_l"]
    assert model["b"].emb_l[0].weight is model["a"].emb_l[0].weight
    for one in model.values():
        one(*batch_of(one))


def test_tables_of_one_list_may_share_a_weight():
    model = DLRM_Net(sizes=(40, 7, 40, 20), sparse=False)
    model.emb_l[2].weight = model.emb_l[0].weight
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (model, twin)]
    batches = [batch_of(model) for _ in range(6)]
    torch.testing.assert_close(
        train(twin, optimizers[1], batches[:2]), train(model, optimizers[0], batches[:2])
    )
    assert len(recfuse.swap(twin, optimizers=optimizers[1:]).fused) == 1
    torch.testing.assert_close(
        train(twin, optimizers[1], batches[2:4]), train(model, optimizers[0], batches[2:4])
    )
    recfuse.unswap(twin, optimizers=optimizers[1:])
    assert twin.emb_l[2].weight is twin.emb_l[0].weight
    torch.testing.assert_close(
        train(twin, optimizers[1], batches[4:]), train(model, optimizers[0], batches[4:])
    )


def test_gradient_hooks_and_other_parameters_are_not_lost():
    model = nn.ModuleDict({"hook": DLRM_Net(), "after": DLRM_Net()})
    model["hook"].emb_l[0].weight.register_hook(lambda gradient: gradient * 2)
    model["after"].emb_l[0].weight.register_post_accumulate_grad_hook(lambda weight: None)
    report = recfuse.swap(model)
    assert report.fused == []
    assert all("gradient hooks" in e.detail for e in report.left)


def test_huge_pages_are_requested_once_a_matrix(monkeypatch):
    asked = []
    for module in ("recfuse.passes.swap", "recfuse.nn.packed.parameters"):
        monkeypatch.setattr(sys.modules[module], "advise_huge_pages", lambda data: asked.append(data.numel()))
    model = DLRM_Net()
    model.single = nn.EmbeddingBag(11, 8)
    report = recfuse.swap(model)
    assert len(report.fused) == 1
    assert asked == [model.emb_l.packed_weights()[0].numel(), 11 * 8]


def test_the_heap_is_searched_once(monkeypatch):
    walks, objects = [], gc.get_objects
    monkeypatch.setattr(holders.gc, "get_objects", lambda: walks.append(1) or objects())
    model = nn.ModuleList([DLRM_Net((20, 30), 8) for _ in range(3)])
    recfuse.swap(model)
    assert all(isinstance(net.emb_l, FusedEmbeddingBagList) for net in model) and len(walks) == 1
    holder = torch.optim.SGD(model[0].emb_l.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="an optimizer, SGD, holds"):
        recfuse.unswap(model)
    assert holder.param_groups and len(walks) == 3  # the heap is searched again after a garbage collection


def test_wrong_argument():
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        recfuse.swap([nn.EmbeddingBag(3, 2)])


def test_lists_without_a_pooling_call_are_reported_with_a_remedy():
    model = nn.Module()
    model.tables = nn.ModuleList([nn.EmbeddingBag(n, 4, mode="sum") for n in (5, 9)])
    model.mixed = nn.ModuleList([nn.Linear(2, 2), nn.EmbeddingBag(3, 2), nn.EmbeddingBag(3, 2)])
    model.one = nn.ModuleList([nn.EmbeddingBag(3, 2)])
    indices, offsets = [torch.tensor([1, 2, 4]), torch.tensor([8, 0])], torch.tensor([[0, 1], [0, 2]])
    want = [bag(i, o) for bag, i, o in zip(model.tables, indices, offsets, strict=True)]
    report = recfuse.swap(model)
    assert {entry.name for entry in report.left} == {"tables", "mixed"}
    assert all("FusedEmbeddingBagList(bags)" in entry.detail for entry in report.left)
    assert len(report.replaced) == 5
    torch.testing.assert_close(FusedEmbeddingBagList(model.tables).pool(offsets, indices), want)


def test_pruned_and_parametrized_tables_are_left():
    pruned, parametrized = DLRM_Net(), DLRM_Net()
    prune.l1_unstructured(pruned.emb_l[1], "weight", 0.3)
    nn.utils.parametrize.register_parametrization(parametrized.emb_l[1], "weight", nn.Identity())
    for model, words in ((pruned, "pruned"), (parametrized, "parametrized")):
        batch = batch_of(model)
        want = model(*batch)
        report = recfuse.swap(model)
        assert report.fused == []
        assert words in next(entry.detail for entry in report.left if entry.name == "emb_l")
        torch.testing.assert_close(model(*batch), want)


def test_no_memory_leaves_everything_as_it_was(monkeypatch):
    def fail(data):
        raise torch.OutOfMemoryError("no memory")

    model = DLRM_Net()
    batch = batch_of(model)
    want, parameters = model(*batch), list(model.parameters())
    monkeypatch.setattr(sys.modules["recfuse.nn.packed.parameters"], "advise_huge_pages", fail)
    report = recfuse.swap(model)
    assert "no memory" in next(entry.detail for entry in report.left if entry.name == "emb_l")
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(model(*batch), want)
