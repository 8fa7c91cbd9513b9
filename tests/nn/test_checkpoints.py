"""Checkpoints of packed tables, by the tools that write them: saved by torch's modules or packed modules
and loaded by the other, they are equal."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint import state_dict as dcp_state

import recfuse
from recfuse.nn import FusedEmbeddingBagCollection, FusedEmbeddingBagList
from recfuse.nn.columns import Bucketize, EmbeddingColumns, Hash, Identity
from recfuse.nn.memory import own_storage
from support.dlrm import DLRM_Net

ROWS = (40, 7, 300)


class Loop(nn.Module):
    """torch's modules under the names of a collection's state_dict."""

    def __init__(self):
        super().__init__()
        self.embedding_bags = nn.ModuleDict(
            {f"t{n}": nn.EmbeddingBag(rows, 8) for n, rows in enumerate(ROWS)}
        )


def of_list(packed):
    model = DLRM_Net(ROWS, sparse=False)
    if packed:
        assert "fused" in {entry.action for entry in recfuse.swap(model).entries}
    return model


def of_collection(packed):
    return FusedEmbeddingBagCollection([(rows, 8) for rows in ROWS]) if packed else Loop()


def of_keyed(packed):
    modules = pytest.importorskip("torchrec.modules.embedding_modules")
    configs = pytest.importorskip("torchrec.modules.embedding_configs")
    tables = [
        configs.EmbeddingBagConfig(
            name=f"t{number}", num_embeddings=rows, embedding_dim=8, feature_names=[f"f{number}"]
        )
        for number, rows in enumerate(ROWS)
    ]
    model = nn.Sequential(modules.EmbeddingBagCollection(tables))
    if packed:
        recfuse.swap(model)
    return model


def of_columns(packed):
    columns = EmbeddingColumns(
        [
            Bucketize("age", boundaries=[18, 30], embedding_dim=8),
            Hash("city", num_embeddings=50, embedding_dim=8),
            Identity("tags", num_embeddings=20, embedding_dim=4, pooling="sum"),
        ]
    )
    return columns if packed else columns.to_torch()


SUBJECTS = {"list": of_list, "collection": of_collection, "keyed": of_keyed, "columns": of_columns}


def with_torch(folder):
    path = folder / "model.pt"
    return lambda model: torch.save(model.state_dict(), path), lambda model: model.load_state_dict(
        torch.load(path)
    )


def with_safetensors_model(folder):
    safetensors = pytest.importorskip("safetensors.torch")
    path = str(folder / "model.safetensors")
    return (
        lambda model: safetensors.save_model(model, path),
        lambda model: safetensors.load_model(model, path),
    )


def with_safetensors_file(folder):
    safetensors = pytest.importorskip("safetensors.torch")
    path = str(folder / "model.safetensors")
    return (
        lambda model: safetensors.save_file(model.state_dict(), path),
        lambda model: model.load_state_dict(safetensors.load_file(path)),
    )


def with_accelerate(folder):
    accelerate = pytest.importorskip("accelerate")

    def of(model):
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(model)
        return accelerator

    return lambda model: of(model).save_state(str(folder)), lambda model: of(model).load_state(str(folder))


def with_dcp(folder):
    def load(model):
        state = dcp_state.get_model_state_dict(model)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        dcp_state.set_model_state_dict(model, state)

    return lambda model: dcp.save(
        dcp_state.get_model_state_dict(model), checkpoint_id=folder, no_dist=True
    ), load


TOOLS = {
    "torch": with_torch,
    "safetensors save_model": with_safetensors_model,
    "safetensors save_file": with_safetensors_file,
    "accelerate": with_accelerate,
    "DCP": with_dcp,
}


def equal(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("saved, loaded", ((False, True), (True, False), (True, True)))
def test_a_checkpoint_has_each_table(subject, tool, saved, loaded, tmp_path):
    torch.manual_seed(1)
    source, target = SUBJECTS[subject](saved), SUBJECTS[subject](loaded)
    want = copy.deepcopy(source.state_dict())
    assert any(not torch.equal(value, want[name]) for name, value in target.state_dict().items())
    save, load = TOOLS[tool](tmp_path)
    save(source)
    load(target)
    equal(target.state_dict(), want)
    equal(source.state_dict(), want)


class Ranked(nn.Module):
    """A model that transformers' Trainer can train: it returns its loss."""

    def __init__(self, packed):
        super().__init__()
        self.bags = of_list(packed)

    def forward(self, dense, indices, labels):
        offsets = torch.arange(len(labels)).repeat(len(ROWS), 1)
        out = self.bags(dense, offsets, indices.t())
        return {"loss": (out[:, 0] - labels).square().mean()}


def samples():
    generator = torch.Generator().manual_seed(3)
    for _ in range(8):
        yield {
            "dense": torch.randn(5, generator=generator),
            "indices": torch.randint(0, 7, (len(ROWS),), generator=generator),
            "labels": torch.rand((), generator=generator),
        }


@pytest.mark.parametrize("saved, loaded", ((False, True), (True, False)))
def test_torch_and_recfuse_load_the_same_checkpoint(saved, loaded, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def trainer(packed, steps):
        arguments = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=steps, save_steps=2, per_device_train_batch_size=4,
            report_to=[], disable_tqdm=True, seed=5, learning_rate=0.1, remove_unused_columns=False,
            save_only_model=True,
        )  # fmt: skip
        return transformers.Trainer(Ranked(packed), arguments, train_dataset=list(samples()))

    first = trainer(saved, 2)
    first.train()
    want = copy.deepcopy(first.model.state_dict())
    second = trainer(loaded, 2)
    second._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    equal(second.model.state_dict(), want)


def saved_bytes(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.tell()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_part_that_is_saved_is_a_part(subject):
    model = SUBJECTS[subject](True)
    state = model.state_dict()
    for name, value in state.items():
        assert saved_bytes(value) < value.nbytes + 3000, name
        assert value.untyped_storage().nbytes() == value.nbytes and not value.storage_offset()
        assert copy.deepcopy(value).untyped_storage().nbytes() == value.nbytes


def test_a_module_with_packed_weights_saves_only_its_rows():
    bags = [nn.EmbeddingBag(50_000, 4), nn.EmbeddingBag(5, 4)]
    packed = FusedEmbeddingBagList(bags)
    assert saved_bytes(bags[1].state_dict()) < 3000
    packed[1].weight = torch.full((5, 4), 2.0)
    assert bags[1].weight.eq(2).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8))
@pytest.mark.parametrize("rows", (4, 1, 0))
def test_a_storage_of_its_own_is_the_same_memory(dtype, rows):
    data = np.zeros(40 * dtype.itemsize, dtype=np.int8)
    owner = weakref.ref(data)
    data = torch.from_numpy(data).view(dtype).view(10, 4)
    matrix = nn.Parameter(data, requires_grad=dtype.is_floating_point)
    entry = own_storage(matrix.narrow(0, 3, rows))
    assert (entry.dtype, list(entry.shape), entry.requires_grad) == (dtype, [rows, 4], False)
    assert entry.untyped_storage().nbytes() == rows * 4 * dtype.itemsize and entry.storage_offset() == 0
    version = matrix._version
    entry.fill_(2)
    assert matrix._version > version, "a write that the backward pass must see"
    with torch.no_grad():
        assert matrix.sum() == 8 * rows
        matrix.fill_(3)
    assert entry.eq(3).all()
    del matrix, data
    gc.collect()
    assert owner() is not None or not rows, "the entry keeps the memory"
    assert entry.eq(3).all()
    del entry
    gc.collect()
    assert owner() is None


def test_a_write_to_an_entry_before_the_backward_pass_is_found():
    collection = FusedEmbeddingBagCollection([(5, 4), (6, 4)])
    factors = torch.rand(2, requires_grad=True)
    out = collection(torch.tensor([1, 2]), torch.tensor([0, 1, 2]), factors)
    collection.state_dict()["embedding_bags.t1.weight"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_entries_of_tied_tables_are_tied():
    bags = [nn.EmbeddingBag(5, 4) for _ in range(3)]
    bags[2].weight = bags[0].weight
    state = FusedEmbeddingBagList(bags).state_dict()
    first, other, last = (value.untyped_storage()._cdata for value in state.values())
    assert first == last != other
    assert saved_bytes(state) < saved_bytes({name: value.clone() for name, value in state.items()})


def test_entries_that_have_gradients_are_parts_of_the_graph():
    collection = FusedEmbeddingBagCollection([(5, 4), (6, 4)])
    entries = collection.state_dict(keep_vars=True)
    entries["embedding_bags.t1.weight"].sum().backward()
    assert collection.embedding_bags.packed_dim4.grad.sum() == 24


def test_a_state_dict_of_no_memory_and_of_inference():
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = FusedEmbeddingBagCollection([(5, 4), (6, 4)]).state_dict()
    assert [list(value.shape) for value in fake.values()] == [[5, 4], [6, 4]]
    meta = FusedEmbeddingBagCollection([(5, 4), (6, 4)], device="meta").state_dict()
    assert all(value.is_meta for value in meta.values())
    with torch.inference_mode():
        collection = FusedEmbeddingBagCollection([(5, 4), (6, 4)])
        collection.state_dict()["embedding_bags.t1.weight"].fill_(2)
    assert collection.tables["t1"].weight.eq(2).all()


def test_a_state_dict_in_a_program():
    collection = FusedEmbeddingBagCollection([(5, 4), (6, 4)])

    @torch.compile(backend="aot_eager")
    def total():
        return sum(value.sum() for value in collection.state_dict().values())

    torch.testing.assert_close(total(), sum(value.sum() for value in collection.state_dict().values()))


@pytest.mark.parametrize("assign", (False, True))
def test_an_unswapped_model_that_loads_the_entries_is_as_torchs(assign):
    """Copied or, with assign, the same memory, as of two models of torch."""
    packed, plain = of_collection(True), of_collection(False)
    plain.load_state_dict(packed.state_dict(), assign=assign)
    with torch.no_grad():
        packed.embedding_bags.packed_dim8.fill_(2)
    assert bool(plain.embedding_bags["t1"].weight.eq(2).all()) == assign


def test_a_tables_weight_compares_with_a_parameter():
    weight = FusedEmbeddingBagCollection([(5, 4)]).tables["t0"].weight
    other = nn.Parameter(weight.detach().clone())
    torch.testing.assert_close(weight, other)
    torch.testing.assert_close(other, weight)
