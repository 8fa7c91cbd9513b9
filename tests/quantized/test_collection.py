"""recfuse.quantize and the collections that it makes."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import recfuse
from recfuse.nn import FusedEmbeddingBagCollection, QuantizedEmbeddingBagCollection, Table
from support.reference import Feature
from support.reference import fused_embedding_bag as reference

TABLES = [
    Table(100, 64, "a", feature_names=("x", "y")),
    Table(70, 16, "b", "mean", 3),
    Table(50, 8, "c", "max"),
    Table(60, 16, "d"),
]
FEATURES = [
    Feature(0, "sum", None),
    Feature(0, "sum", None),
    Feature(1, "mean", 3),
    Feature(2, "max", None),
    Feature(3, "sum", None),
]


def collection(tables=TABLES) -> FusedEmbeddingBagCollection:
    torch.manual_seed(1)
    return FusedEmbeddingBagCollection(tables)


def batch(features: int = 5, bags: int = 9):
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, 7, (features * bags,), generator=generator)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    return torch.randint(0, 50, (int(offsets[-1]),), generator=generator), offsets


@pytest.mark.parametrize("dtype", ("int8", "int4", {"a": "int8", "c": "int4"}), ids=str)
def test_pools_the_values_of_its_tables(dtype):
    model = torch.nn.Sequential(collection())
    module, floats = model[0], [table.weight.detach().clone() for table in model[0].tables.values()]
    report = recfuse.quantize(model, dtype)
    assert model[0] is module and type(module) is QuantizedEmbeddingBagCollection
    assert not list(module.parameters()) and module.feature_names == ["x", "y", "b", "c", "d"]
    values = [table.weight for table in module.tables.values()]
    indices, offsets = batch()
    expected = reference(values, FEATURES, indices, offsets)
    torch.testing.assert_close(module(indices, offsets).double(), expected, atol=1e-5, rtol=1e-5)
    for entry, before, after, table in zip(
        report.entries, floats, values, module.tables.values(), strict=True
    ):
        assert entry.name == f"0.{table.name}" and entry.dtype == table.dtype
        assert entry.largest_error == pytest.approx(float((after - before).abs().max()), abs=1e-6)
        if table.dtype == "float32":
            assert torch.equal(before, after) and entry.bytes_before == entry.bytes_after
        else:
            limit = table.parameters[:, :1].float() / 2 + 1e-6
            assert bool(((after - before).abs() <= limit).all())
            bits = 8 if table.dtype == "int8" else 4
            assert entry.bytes_after == table.num_embeddings * (table.embedding_dim * bits // 8 + 4)
    assert "0.a" in str(report) and str(report).splitlines()[-1].startswith("all")
    assert report.bytes_after == sum(entry.bytes_after for entry in report.entries) < report.bytes_before


def test_an_int8_table_takes_a_quarter():
    model = collection([(1000, 128)])
    report = recfuse.quantize(model)
    assert report.bytes_after / report.bytes_before == pytest.approx(0.258, abs=1e-3)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_output_dtype(dtype):
    model = collection()
    recfuse.quantize(model, output_dtype=dtype)
    assert model(*batch()).dtype == model.output_dtype == dtype
    halves = collection([Table(60, 8, dtype=dtype)])
    recfuse.quantize(halves)
    assert halves(*batch(1)).dtype == dtype  # as before


def test_weights_of_lookups():
    model = collection([Table(60, 16, "a"), Table(60, 6, "b")])
    recfuse.quantize(model, "int4")
    indices, offsets = batch(2)
    factors = torch.rand(indices.numel())
    values = [table.weight for table in model.tables.values()]
    expected = reference(
        values, [Feature(0, "sum", None), Feature(1, "sum", None)], indices, offsets, factors
    )
    torch.testing.assert_close(model(indices, offsets, factors).double(), expected, atol=1e-5, rtol=1e-5)
    model(indices, offsets, factors.requires_grad_()).sum().backward()
    assert factors.grad is not None and bool(factors.grad.any())


def test_dequantize_gives_a_collection_that_trains():
    model = torch.nn.Sequential(collection())
    recfuse.quantize(model, {"a": "int8", "b": "int4"})
    values = {name: table.weight for name, table in model[0].tables.items()}
    expected = model[0](*batch())
    recfuse.dequantize(model)
    assert type(model[0]) is FusedEmbeddingBagCollection
    for name, table in model[0].tables.items():
        assert torch.equal(table.weight, values[name])
    got = model[0](*batch())
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    got.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ValueError, match="has no quantised collection"):
        recfuse.dequantize(model)


def test_compile_and_export():
    model = collection()
    recfuse.quantize(model, {"a": "int8", "b": "int4"})
    indices, offsets = batch()
    expected = model(indices, offsets)
    assert torch.equal(torch.compile(model, fullgraph=True)(indices, offsets), expected)
    program = torch.export.export(
        model,
        (indices, offsets),
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC}),
    )
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert sum("fused_embedding_bag_quantized" in call for call in calls) == 1
    assert not any("fbgemm" in call for call in calls)
    assert torch.equal(program.module()(indices, offsets), expected)
    other = batch(bags=4)
    assert torch.equal(program.module()(*other), model(*other))


def test_copies_and_moves_keep_the_format():
    model = collection()
    recfuse.quantize(model, {"a": "int8", "b": "int4"})
    lookups = batch()
    expected = model(*lookups)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
    assert all(torch.equal(one(*lookups), expected) for one in copies)
    for moved in (copies[0].half(), copies[1].to(torch.bfloat16), copies[2].double()):
        assert torch.equal(moved(*lookups), expected)
    meta = model.to("meta")
    assert all(buffer.is_meta for buffer in meta.buffers())


def test_state_dict_of_tables():
    model = collection()
    recfuse.quantize(model, {"a": "int8", "b": "int4"})
    state = model.state_dict()
    assert {name: (list(value.shape), value.dtype) for name, value in state.items()} == {
        "embedding_bags.a.weight": ([100, 64], torch.uint8),
        "embedding_bags.a.parameters": ([100, 2], torch.float16),
        "embedding_bags.a.bits": ([], torch.uint8),
        "embedding_bags.b.weight": ([70, 8], torch.uint8),
        "embedding_bags.b.parameters": ([70, 2], torch.float16),
        "embedding_bags.b.bits": ([], torch.uint8),
        "embedding_bags.c.weight": ([50, 8], torch.float32),
        "embedding_bags.d.weight": ([60, 16], torch.float32),
    }
    other = QuantizedEmbeddingBagCollection(TABLES, {"a": "int8", "b": "int4"})
    assert float(other(*batch()).abs().sum()) == 0
    other.load_state_dict(state)
    assert torch.equal(other(*batch()), model(*batch()))


def test_loads_floats():
    floats = collection()
    other = QuantizedEmbeddingBagCollection(TABLES, "int8")
    other.load_state_dict(floats.state_dict())
    recfuse.quantize(floats, "int8")
    assert torch.equal(other(*batch()), floats(*batch()))


def test_a_state_dict_of_another_format():
    model = collection()
    recfuse.quantize(model, "int8")
    int4 = collection()
    recfuse.quantize(int4, "int4")
    before = model.state_dict()["embedding_bags.b.weight"].clone()
    with pytest.raises(RuntimeError, match=r"b\.weight is int4 \[70, 8\]; expected int8 rows of 16 columns"):
        model.load_state_dict(int4.state_dict())
    old = {key: value for key, value in int4.state_dict().items() if "bits" not in key}
    with pytest.raises(
        RuntimeError, match=r"b\.weight is torch\.uint8 \[70, 8\]; expected torch\.uint8 \[70, 16\]"
    ):
        model.load_state_dict(old)
    assert torch.equal(model.state_dict()["embedding_bags.b.weight"], before)
    state = model.state_dict()
    del state["embedding_bags.a.parameters"]
    with pytest.raises(RuntimeError, match=r"a\.weight has parameters no tensor; expected \[100, 2\]"):
        model.load_state_dict(state)
    state = model.state_dict()
    state["embedding_bags.a.parameters"] = state["embedding_bags.a.parameters"].float() * 1e6
    with pytest.raises(
        RuntimeError, match=r"a\.weight has parameters of torch\.float32; expected torch\.float16"
    ):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**model.state_dict(), "embedding_bags.e.weight": torch.zeros(1)})
    bad = collection().state_dict()
    bad["embedding_bags.a.weight"][3, 1] = torch.nan
    with pytest.raises(RuntimeError, match=r"a\.weight cannot be quantised: .*\[3, 1\] is nan"):
        model.load_state_dict(bad)


def test_codes_of_the_same_shape_in_another_format():
    int4, int8 = collection([Table(20, 32, "a")]), collection([Table(20, 16, "a")])
    recfuse.quantize(int4, "int4")
    recfuse.quantize(int8, "int8")
    before = int8.state_dict()["embedding_bags.a.weight"].clone()
    with pytest.raises(RuntimeError, match=r"a\.weight is int4 \[20, 16\]; expected int8 rows of 16 columns"):
        int8.load_state_dict(int4.state_dict())
    with pytest.raises(RuntimeError, match=r"a\.weight is int8 \[20, 16\]; expected int4 rows of 32 columns"):
        int4.load_state_dict(int8.state_dict())
    assert torch.equal(int8.state_dict()["embedding_bags.a.weight"], before)
    earlier = {key: value for key, value in int8.state_dict().items() if "bits" not in key}
    int8.load_state_dict(earlier)  # of a version without this entry


def test_an_optimizer_of_the_floats_is_refused():
    model = torch.nn.Sequential(collection(), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="SGD holds a Parameter of tables, of shape"):
        recfuse.quantize(model)
    assert type(model[0]) is FusedEmbeddingBagCollection
    fused = recfuse.optim.SGD(recfuse.optim.embedding_parameters(model), lr=0.1)
    del optimizer
    with pytest.raises(ValueError, match="SGD holds a Parameter of tables"):
        recfuse.quantize(model)
    del fused
    dense = torch.optim.SGD(model[1].parameters(), lr=0.1)
    recfuse.quantize(model)
    dense.step()


def test_bad_input_changes_nothing():
    model = torch.nn.ModuleDict({"first": collection(), "second": collection()})
    with torch.no_grad():
        model["second"].tables["b"].weight[5, 2] = torch.inf
    with pytest.raises(ValueError, match=r"table 'second\.b': weight\[5, 2\] is inf; expected finite values"):
        recfuse.quantize(model)
    assert all(type(one) is FusedEmbeddingBagCollection for one in model.values())
    assert torch.isinf(model["second"].tables["b"].weight[5, 2])
    with pytest.raises(ValueError, match=r"dtype has 'e'; expected names of tables"):
        recfuse.quantize(model, {"e": "int8"})
    with pytest.raises(ValueError, match=r"dtype is 'int2'; expected \"int8\" or \"int4\""):
        recfuse.quantize(model, "int2")
    with pytest.raises(TypeError, match="dtype is"):
        recfuse.quantize(model, 8)
    with pytest.raises(TypeError, match=r"output_dtype is torch\.float64"):
        recfuse.quantize(model, output_dtype=torch.float64)
    with pytest.raises(ValueError, match="a row has 7 columns, of int4 not a whole number of bytes"):
        recfuse.quantize(collection([(9, 7)]), "int4")
    with pytest.raises(ValueError, match="the model has no collection of recfuse"):
        recfuse.quantize(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model is a str"):
        recfuse.quantize("model")
    with pytest.raises(TypeError, match="model is a str"):
        recfuse.dequantize("model")
    double = collection([Table(9, 8, "a", dtype=torch.float64)])
    with pytest.raises(TypeError, match="float64"):
        recfuse.quantize(double)


def test_bad_calls():
    model = QuantizedEmbeddingBagCollection(TABLES)
    with pytest.raises(ValueError, match="offsets is None"):
        model(torch.tensor([1]))
    with pytest.raises(TypeError, match="indices is a list"):
        model([1])
    with pytest.raises(IndexError, match=r"indices\[0\] is 100, for feature 0, bag 0; expected 0 to 99"):
        model(torch.tensor([100]), torch.tensor([0, 1, 1, 1, 1, 1]))


def test_loads_floats_of_another_dtype_into_a_table_without_rows():
    model = collection([Table(0, 8, "a", dtype=torch.float16), Table(9, 8, "b")])
    recfuse.quantize(model, {"b": "int8"})
    model.load_state_dict(collection([Table(0, 8, "a"), Table(9, 8, "b")]).state_dict())


@pytest.mark.parametrize("assign", (False, True))
def test_tables_without_memory_refuse_to_load(assign):
    real = QuantizedEmbeddingBagCollection(TABLES)
    bare = QuantizedEmbeddingBagCollection(TABLES, device="meta")
    with pytest.raises(RuntimeError, match=r"a\.weight has a table on meta; expected memory"):
        bare.load_state_dict(real.state_dict(), assign=assign)
    bare.to_empty(device="cpu").load_state_dict(real.state_dict(), assign=assign)
    assert torch.equal(bare(*batch()), real(*batch()))


def test_hooks_of_calls_stay():
    model, calls = collection(), []
    before = model.register_forward_pre_hook(lambda module, arguments: calls.append("before"))
    model.register_forward_hook(lambda module, arguments, output: output * 2)
    recfuse.quantize(model)
    doubled = model(*batch())
    assert torch.equal(doubled, 2 * model.forward(*batch())) and calls == ["before"]
    before.remove()
    recfuse.dequantize(model)
    assert torch.equal(model(*batch()), 2 * model.forward(*batch())) and calls == ["before"]


def test_a_subclass_is_left():
    class Doubled(FusedEmbeddingBagCollection):
        def forward(self, *arguments):
            return 2 * super().forward(*arguments)

    doubled = Doubled(TABLES)
    expected = doubled(*batch())
    report = recfuse.quantize(torch.nn.ModuleList([doubled, collection()]))
    assert report.left[0][0] == "0" and "Doubled is a subclass" in report.left[0][1]
    assert torch.equal(doubled(*batch()), expected)
    with pytest.raises(ValueError, match="Doubled is a subclass"):
        recfuse.quantize(doubled)


def test_optimizers_refuse_codes():
    model = collection()
    recfuse.quantize(model)
    with pytest.raises(TypeError, match="codes of a quantised table"):
        recfuse.optim.SGD(list(model.buffers()), lr=0.1)
    assert recfuse.optim.embedding_parameters(model) == []


def test_other_packed_modules_are_left():
    bags = [torch.nn.EmbeddingBag(9, 4) for _ in range(2)]
    model = torch.nn.ModuleList([recfuse.nn.FusedEmbeddingBagList(bags), collection()])
    report = recfuse.quantize(model)
    assert report.left == [("0", "FusedEmbeddingBagList has no quantised form")]
    assert "FusedEmbeddingBagList has no quantised form" in str(report)


def keyed(weighted: bool = False):
    pytest.importorskip("torchrec")
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

    torch.manual_seed(3)
    tables = [
        EmbeddingBagConfig(name="a", num_embeddings=90, embedding_dim=16, feature_names=["x", "y"]),
        EmbeddingBagConfig(
            name="b", num_embeddings=70, embedding_dim=8, feature_names=["z"],
            pooling=PoolingType.SUM if weighted else PoolingType.MEAN,
        ),
    ]  # fmt: skip
    model = torch.nn.Sequential(EmbeddingBagCollection(tables=tables, is_weighted=weighted))
    recfuse.swap(model)
    indices, offsets = batch(3)
    weights = torch.rand(indices.numel()) if weighted else None
    return model, KeyedJaggedTensor(keys=["z", "x", "y"], values=indices, offsets=offsets, weights=weights)


@pytest.mark.parametrize("weighted", (False, True))
def test_torchrec_s_collection(weighted):
    model, features = keyed(weighted)
    before = model(features)
    weights = {name: table.weight.detach().clone() for name, table in model[0].embedding_bags.items()}
    report = recfuse.quantize(model, "int8")
    assert [entry.name for entry in report.entries] == ["0.a", "0.b"]
    after = model(features)
    assert type(after) is type(before) and after.keys() == before.keys()
    assert float((after.values() - before.values()).detach().abs().max()) < 0.5
    for name in list(before.keys()):
        assert after[name].shape == before[name].shape
    recfuse.dequantize(model)
    again = model(features)
    torch.testing.assert_close(again.values().detach(), after.values(), atol=1e-5, rtol=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(model[0].embedding_bags[name].weight.detach(), weight, atol=0.02, rtol=0)


def test_torchrec_s_collection_compiled_and_exported():
    model, features = keyed()
    recfuse.quantize(model, "int4")

    class Values(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, features):
            return self.model(features).values()

    expected = Values()(features)
    assert torch.equal(torch.compile(Values())(features), expected)
