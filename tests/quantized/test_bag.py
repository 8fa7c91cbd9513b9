"""One quantised table: embedding_bag_quantized, QuantizedEmbeddingBag, and quantize of torch's modules."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.nn.utils import prune

import recfuse
from recfuse.nn import QuantizedEmbeddingBag
from recfuse.ops import embedding_bag_quantized, quantize_rows
from support.reference import embedding_bag as reference
from support.tables.quantized import exact_values

FLOATS = torch.nn.EmbeddingBag, recfuse.nn.EmbeddingBag
INDICES, OFFSETS = torch.arange(24) * 7 % 30, torch.tensor([0, 3, 3, 10, 23])


def bag(kind=torch.nn.EmbeddingBag, rows=30, dim=16, **options):
    torch.manual_seed(4)
    return kind(rows, dim, **options)


def close(got, want):
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ("sum", "mean", "max"))
@pytest.mark.parametrize("dtype", ("int8", "int4"))
@pytest.mark.parametrize("integer", (torch.int32, torch.int64))
def test_the_operator_agrees_with_float64(mode, dtype, integer):
    codes, parameters = quantize_rows(torch.randn(30, 18), dtype)
    values = exact_values(codes, parameters, 18)
    ends = torch.cat((OFFSETS, torch.tensor([24])))
    for padding in (None, 3, -1):
        options = {"mode": mode, "dtype": dtype, "padding_idx": padding}
        own = None if padding is None else padding % 30
        want = reference(INDICES, values, ends, mode, None, True, own)
        indices, offsets = INDICES.to(integer), OFFSETS.to(integer)
        close(embedding_bag_quantized(indices, codes, parameters, offsets, **options), want)
        last = ends.to(integer)
        got = embedding_bag_quantized(
            indices, codes, parameters, last, include_last_offset=True, bounds_check="off", **options
        )
        close(got, want)
        rows = embedding_bag_quantized(indices.view(4, 6), codes, parameters, **options)
        close(rows, reference(INDICES, values, torch.arange(0, 25, 6), mode, None, True, own))


def test_weights_of_lookups_have_a_gradient():
    codes, parameters = quantize_rows(torch.randn(30, 18), "int4")
    values = exact_values(codes, parameters, 18)
    factors = torch.randn(4, 6, requires_grad=True)
    got = embedding_bag_quantized(
        INDICES.view(4, 6), codes, parameters, mode="sum", per_sample_weights=factors, dtype="int4"
    )
    exact = factors.detach().double().requires_grad_()
    want = reference(INDICES, values, torch.arange(0, 25, 6), "sum", exact.view(-1), True, None)
    close(got, want)
    grad = torch.randn(4, 18)
    got.backward(grad)
    want.backward(grad.double())
    close(factors.grad, exact.grad)


def test_views_of_rows_and_dtypes_of_outputs():
    memory = torch.ops.quantized.embedding_bag_byte_prepack(torch.randn(30, 16))
    codes, parameters = memory[:, :16], memory[:, 16:].view(torch.float32)
    got = embedding_bag_quantized(INDICES, codes, parameters, OFFSETS, "sum", output_dtype=torch.float16)
    theirs = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(memory, INDICES, OFFSETS)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.float(), theirs, atol=2e-2, rtol=2e-3)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("dtype", ("int8", "int4"))
@pytest.mark.parametrize("options", ({}, {"mode": "sum", "padding_idx": -2}, {"include_last_offset": True}))
def test_modules_are_quantised_in_place(kind, dtype, options):
    module = bag(kind, sparse=True, **options)
    floats, offsets = module.weight.detach().clone(), OFFSETS
    module.note = "kept"
    report = recfuse.quantize(module, dtype)
    assert type(module) is QuantizedEmbeddingBag and not list(module.parameters())
    assert module.note == "kept" and module.mode == options.get("mode", "mean")
    (entry,) = report.entries
    assert (entry.name, entry.dtype) == ("weight", dtype) and entry.bytes_after < entry.bytes_before / 3
    values = module.weight
    assert entry.largest_error == pytest.approx(float((values - floats).abs().max()), abs=1e-6)
    if module.include_last_offset:
        offsets = torch.cat((OFFSETS, torch.tensor([24])))
    padding = module.padding_idx
    want = reference(
        INDICES, values.double(), offsets, module.mode, None, module.include_last_offset, padding
    )
    close(module(INDICES, offsets), want)
    recfuse.dequantize(module)
    assert type(module) is kind and torch.equal(module.weight, values) and module.sparse
    assert module.padding_idx == padding and module.note == "kept"
    output = module(INDICES, offsets)
    close(output, want)
    output.sum().backward()
    assert module.weight.grad is not None


def test_models_with_tables_and_collections():
    model = torch.nn.ModuleDict({
        "user": bag(), "city": bag(dim=6), "rest": recfuse.nn.FusedEmbeddingBagCollection([(9, 4)]),
    })  # fmt: skip
    halves = bag(dim=8).half()
    model["halves"] = halves
    kept = model["city"].weight
    report = recfuse.quantize(model, {"user": "int4", "t0": "int8", "halves": "int8"})
    assert [(one.name, one.dtype) for one in report.entries] == [
        ("rest.t0", "int8"), ("user", "int4"), ("halves", "int8"),
    ]  # fmt: skip
    assert type(model["city"]) is torch.nn.EmbeddingBag and model["city"].weight is kept
    assert model["halves"] is halves and halves(INDICES, OFFSETS).dtype == torch.float16
    with pytest.raises(ValueError, match="dtype has 'town'; expected names of tables"):
        recfuse.quantize(model, {"town": "int8"})
    recfuse.dequantize(model)
    assert {type(one) for one in model.values()} == {
        torch.nn.EmbeddingBag, recfuse.nn.FusedEmbeddingBagCollection,
    }  # fmt: skip


def test_modules_of_one_parameter_share_their_codes():
    model = torch.nn.ModuleList([bag(), bag(mode="sum")])
    model[1].weight = model[0].weight
    recfuse.quantize(model)
    assert model[0].codes is model[1].codes
    recfuse.dequantize(model)
    assert model[0].weight is model[1].weight


def test_a_swap_after_quantize_leaves_the_codes():
    model = torch.nn.ModuleDict({
        "bag": bag(), "collection": recfuse.nn.FusedEmbeddingBagCollection([(9, 4)]),
    })  # fmt: skip
    recfuse.quantize(model)
    report = recfuse.swap(model)
    assert {entry.name for entry in report.already} == {"bag", "collection"} and not report.left


def test_hooks_stay():
    module, calls = bag(), []
    module.register_forward_hook(lambda own, arguments, output: 2 * output)
    module.register_load_state_dict_post_hook(lambda own, keys: calls.append("loaded"))
    recfuse.quantize(module)
    assert torch.equal(module(INDICES, OFFSETS), 2 * module.forward(INDICES, OFFSETS))
    module.load_state_dict(module.state_dict())
    assert calls == ["loaded"]


def test_tables_that_are_left():
    class Doubled(torch.nn.EmbeddingBag):
        pass

    replaced, normed, prepared = bag(), torch.nn.utils.parametrizations.weight_norm(bag()), bag()
    replaced.forward = lambda *arguments: 0
    prepared.qconfig = torch.ao.quantization.float_qparams_weight_only_qconfig
    model = torch.nn.ModuleDict({
        "subclass": bag(Doubled), "norm": bag(max_norm=1.0), "replaced": replaced, "normed": normed,
        "pruned": prune.identity(bag(), "weight"), "prepared": prepared, "good": bag(),
    })  # fmt: skip
    report = recfuse.quantize(model)
    assert [entry.name for entry in report.entries] == ["good"]
    reasons = dict(report.left)
    assert set(reasons) == {"subclass", "norm", "replaced", "normed", "pruned", "prepared"}
    for name, text in (
        ("subclass", "Doubled is a subclass"), ("norm", r"max_norm is 1.0; expected None"),
        ("replaced", "forward is replaced"), ("pruned", "weight is no Parameter"),
        ("prepared", "qconfig is set; expected None"),
    ):  # fmt: skip
        assert text in reasons[name]
    with pytest.raises(ValueError, match=r"no torch\.nn\.EmbeddingBag \(the model: max_norm is 1\.0"):
        recfuse.quantize(bag(max_norm=1.0))


def test_tables_of_torchrec_need_a_swap_first():
    torchrec = pytest.importorskip("torchrec")
    tables = [torchrec.EmbeddingBagConfig(name="a", num_embeddings=9, embedding_dim=8, feature_names=["x"])]
    with pytest.raises(
        ValueError, match=r"EmbeddingBagCollection is a module of TorchRec; call recfuse\.swap"
    ):
        recfuse.quantize(torchrec.EmbeddingBagCollection(tables=tables))


def test_errors_change_nothing():
    model = torch.nn.ModuleList([bag(), bag()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="SGD holds a Parameter of tables"):
        recfuse.quantize(model)
    del optimizer
    with torch.no_grad():
        model[1].weight[5, 2] = torch.inf
    with pytest.raises(ValueError, match=r"table '1': weight\[5, 2\] is inf; expected finite values"):
        recfuse.quantize(model)
    with pytest.raises(ValueError, match="a row has 7 columns, of int4 not a whole number"):
        recfuse.quantize(bag(dim=7), "int4")
    with pytest.raises(TypeError, match="table 'weight': weight is float64"):
        recfuse.quantize(bag(dtype=torch.float64))
    assert all(type(one) is torch.nn.EmbeddingBag for one in model)
    with pytest.raises(ValueError, match="no quantised collection or table"):
        recfuse.dequantize(model)


def test_state_dicts_and_copies():
    module = bag()
    floats = module.state_dict()
    recfuse.quantize(module, "int4")
    state = module.state_dict()
    assert {name: (list(one.shape), one.dtype) for name, one in state.items()} == {
        "weight": ([30, 8], torch.uint8),
        "parameters": ([30, 2], torch.float16),
        "bits": ([], torch.uint8),
    }
    expected = module(INDICES, OFFSETS)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    copies.append(torch.load(saved, weights_only=False))
    for one in (*copies, copies[0].half(), copies[1].double()):
        assert torch.equal(one(INDICES, OFFSETS), expected)
    for entries in (state, floats):
        other = QuantizedEmbeddingBag(30, 16, dtype="int4")
        assert not other(INDICES, OFFSETS).any()
        other.load_state_dict(entries)
        assert torch.equal(other(INDICES, OFFSETS), expected)
    wrong = QuantizedEmbeddingBag(30, 8)
    with pytest.raises(RuntimeError, match=r"weight is int4 \[30, 8\]; expected int8 rows of 8 columns"):
        wrong.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**state, "bias": torch.zeros(1)})


def test_compile_and_export():
    module = bag(mode="sum")
    recfuse.quantize(module)
    expected = module(INDICES, OFFSETS)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(INDICES, OFFSETS), expected)
    matrix = INDICES.view(4, 6)
    assert torch.equal(compiled(matrix), module(matrix))
    dynamic = {0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(module, (INDICES, OFFSETS), dynamic_shapes=dynamic)
    names = [str(node.target) for node in program.graph.nodes if "recfuse" in str(node.target)]
    assert names == ["recfuse.fused_embedding_bag_quantized.default"]
    assert torch.equal(program.module()(INDICES[:9], OFFSETS[:3]), module(INDICES[:9], OFFSETS[:3]))


def test_bad_arguments():
    codes, parameters = quantize_rows(torch.randn(30, 8), "int8")
    for change, error, match in (
        ({"input": [1]}, TypeError, "input is a list; expected a"),
        ({"codes": None}, TypeError, "codes is a NoneType; expected a"),
        ({"input": torch.rand(3)}, TypeError, "input is float32; expected int32 or int64"),
        ({"codes": codes[0]}, ValueError, "codes has 1 dimensions; expected 2"),
        ({"offsets": None}, ValueError, "offsets is None; expected a 1-D tensor with a 1-D input"),
        ({"offsets": None, "include_last_offset": True, "input": INDICES.view(4, 6)}, ValueError, "without"),
        ({"mode": "median"}, ValueError, "mode is 'median'"),
        ({"dtype": "int2"}, ValueError, "dtype is 'int2'"),
        ({"padding_idx": 30}, ValueError, "padding_idx is 30"),
        ({"per_sample_weights": torch.ones(3)}, ValueError, r"per_sample_weights has shape \[3\]"),
        ({"per_sample_weights": torch.ones(24)}, NotImplementedError, "expected sum pooling"),
        (
            {"per_sample_weights": torch.ones(24).long(), "mode": "sum"},
            TypeError,
            "per_sample_weights is int64",
        ),
        ({"input": INDICES + 9}, IndexError, r"indices\[\d+\] is 3\d"),
        ({"offsets": OFFSETS + 1}, ValueError, r"offsets\[0\] is 1"),
        ({"parameters": parameters[:3]}, ValueError, r"parameters is float16 \[3, 2\]"),
    ):
        given = {"input": INDICES, "codes": codes, "parameters": parameters, "offsets": OFFSETS}
        with pytest.raises(error, match=match):
            embedding_bag_quantized(**{**given, **change})
    with pytest.raises(ValueError, match=r"nn\.QuantizedEmbeddingBag: mode is 'median'"):
        QuantizedEmbeddingBag(9, 8, mode="median")
    with pytest.raises(ValueError, match=r"num_embeddings is -1; expected \[0, "):
        QuantizedEmbeddingBag(-1, 8)
    with pytest.raises(TypeError, match="embedding_dim is a float; expected a whole number"):
        QuantizedEmbeddingBag(9, 8.5)
    with pytest.raises(ValueError, match=r"nn\.QuantizedEmbeddingBag: dtype is 'float32'"):
        QuantizedEmbeddingBag(9, 8, dtype="float32")
    with pytest.raises(TypeError, match=r"output_dtype is torch\.float64"):
        QuantizedEmbeddingBag(9, 8, output_dtype=torch.float64)
