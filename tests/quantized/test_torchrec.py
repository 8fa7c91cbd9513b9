"""recfuse.swap of TorchRec's quantised EmbeddingBagCollection: read where it lies, in one call."""

from __future__ import annotations

import copy
import io
import os
import random
import subprocess
import sys

import pytest
import torch

import recfuse

pytest.importorskip("torchrec.quant.embedding_modules")
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torchrec import KeyedJaggedTensor
from torchrec.quant.embedding_modules import EmbeddingBagCollection

from support.compiled import QUICK
from support.processes.changes import at_each_line
from support.torchrec.quantised import (
    MIXED,
    Spec,
    Values,
    batch,
    expected,
    floats,
    quantised,
    values_of,
)

SUMS = tuple(one._replace(mode="sum") for one in MIXED)


def bytes_of(entry: torch.Tensor) -> torch.Tensor:
    """The bytes of an entry of a state_dict; int4 has a class of its own."""
    return getattr(entry, "elem", entry).clone()


def check(module, features, relative: float = 1e-6, rounding: float = 0.0) -> torch.Tensor:
    got = module(features)
    values, magnitudes = expected(module, features)
    distance = (got.values().double() - values).abs()
    assert bool((distance <= relative * magnitudes + rounding * values.abs()).all()), float(distance.max())
    return got


@pytest.mark.parametrize("split", (False, True))
@pytest.mark.parametrize("register", (False, True))
@pytest.mark.parametrize("weighted", (False, True))
def test_the_same_module_with_the_same_results(split, register, weighted):
    module = quantised(split=split, register=register, weighted=weighted)
    model = torch.nn.Sequential(module)
    features = batch(module, weighted=weighted)
    before, state = module(features), {k: bytes_of(v) for k, v in module.state_dict().items()}
    names = [name for name, _ in module.named_modules()]
    address = module._emb_modules[0].weights_host.data_ptr()

    report = recfuse.swap(model, check=[(features,)])
    assert [(entry.name, entry.detail) for entry in report.fused] == [
        ("0", "5 quantised tables, 6 features in one call")
    ]
    assert model[0] is module and isinstance(module, EmbeddingBagCollection)
    after = check(module, features)
    assert after.keys() == before.keys() and after.length_per_key() == before.length_per_key()
    torch.testing.assert_close(after.values(), before.values(), atol=1e-5, rtol=1e-5)
    now = module.state_dict()
    assert list(now) == list(state)
    assert all(torch.equal(bytes_of(now[key]), value) for key, value in state.items())
    assert module.memories()[0].data_ptr() == address and [n for n, _ in module.named_modules()] == names
    assert recfuse.swap(model).already[0].name == "0"

    assert recfuse.unswap(model).restored[0].name == "0"
    assert type(module) is EmbeddingBagCollection and list(module.state_dict()) == list(state)
    assert torch.equal(module(features).values(), before.values())
    assert [name for name, _ in module.named_modules()] == names


@pytest.mark.parametrize("seed", range(12))
def test_random_collections_agree_with_float64(seed):
    """Dims, alignments and dtypes of indices at random; FBGEMM's kernels agree within their own rounding."""
    rng = random.Random(seed)
    specs = [
        Spec(
            f"t{number}", rng.randrange(8, 60), 4 * rng.randrange(1, 40),
            rng.choice(("int8", "int4", "float16", "float32")), rng.choice(("sum", "mean")),
            tuple(f"f{number}_{n}" for n in range(rng.randrange(1, 3))),
        )
        for number in range(rng.randrange(1, 9))
    ]  # fmt: skip
    weighted = rng.random() < 0.4
    module = quantised(specs, weighted=weighted, split=rng.random() < 0.5, alignment=2 ** rng.randrange(5))
    integer = rng.choice((torch.int32, torch.int64))
    features = batch(module, rng.randrange(1, 12), integer, weighted, seed)
    theirs = module(features).values()
    assert recfuse.swap(module).fused
    ours = check(module, features).values()
    _, magnitudes = expected(module, features)
    assert bool(((ours - theirs).abs() <= 1e-5 * magnitudes).all())


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_output_dtypes(dtype):
    module = quantised(output=dtype)
    recfuse.swap(module)
    got = check(module, batch(module), rounding=2.0 ** -(8 if dtype is torch.bfloat16 else 11))
    assert got.values().dtype == module.output_dtype() == dtype


def test_updates_of_the_memory_are_seen():
    module = quantised()
    recfuse.swap(module)
    features = batch(module)
    before = check(module, features).values()
    tbe = module._emb_modules[0]
    rows = torch.zeros(1, tbe.split_embedding_weights(split_scale_shifts=False)[0][0].shape[1])
    for row in range(90):
        tbe.embedding_inplace_update([0], [[row]], [rows.to(torch.uint8)])
    after = check(module, features)
    assert not torch.equal(after.values(), before)
    assert float(after["x"].abs().sum()) == 0  # zeros: bias 0, scale 0
    with torch.no_grad():
        module.state_dict()["embedding_bags.c.weight"].zero_()
    assert float(check(module, features)["w"].abs().sum()) == 0


def test_no_lookups_and_other_batch_forms():
    module = quantised()
    theirs = copy.deepcopy(module)
    recfuse.swap(module)
    keys = module._feature_names
    none = KeyedJaggedTensor(
        keys, torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(len(keys) * 3, dtype=torch.int32)
    )
    assert torch.equal(module(none).values(), torch.zeros(3, 76))
    features = batch(module)
    by_offsets = KeyedJaggedTensor(features.keys(), features.values(), offsets=features.offsets())
    assert torch.equal(module(by_offsets).values(), module(features).values())
    with pytest.raises(ValueError, match="has no key 'x'"):
        module(KeyedJaggedTensor(["z"], torch.tensor([1]), lengths=torch.tensor([1])))
    wrong = KeyedJaggedTensor(features.keys(), features.values().float(), lengths=features.lengths())
    with pytest.raises(TypeError, match="indices is float32"):
        module(wrong)
    for bad in (90, -1, 2**31 - 1):
        values = features.values().clone()
        start = int(features.offset_per_key()[features.keys().index("x")])
        values[start] = bad
        with pytest.raises(IndexError, match=rf"indices\[0\] is {bad}, for feature 0"):
            module(KeyedJaggedTensor(features.keys(), values, lengths=features.lengths()))
    weighted = quantised(SUMS, weighted=True)
    recfuse.swap(weighted)
    with pytest.raises(AssertionError, match="have weights"):  # by TorchRec
        weighted(features)
    assert torch.isfinite(theirs(features).values()).all()


@pytest.mark.parametrize("split", (False, True))
@pytest.mark.parametrize("assign", (False, True))
def test_state_dicts(split, assign):
    module, other = quantised(split=split), quantised(split=split)
    for memory in (tbe.weights_host for tbe in other._emb_modules):
        memory.zero_()
    features = batch(module)
    recfuse.swap(other)
    other.load_state_dict(module.state_dict(), assign=assign)
    torch.testing.assert_close(other(features).values(), module(features).values(), atol=1e-5, rtol=1e-5)
    assert torch.equal(
        bytes_of(other.state_dict()["embedding_bags.b.weight"]),
        bytes_of(module.state_dict()["embedding_bags.b.weight"]),
    )
    theirs = quantised(split=split)
    theirs.load_state_dict(other.state_dict())  # and back into TorchRec's

    trained = floats()
    other.load_state_dict(trained.state_dict(), assign=assign)
    for name, values in values_of(other).items():
        weight = trained.embedding_bags[name].weight.detach().double()
        kind = next(one.kind for one in MIXED if one.name == name)
        steps = {"int8": 255, "int4": 15, "float16": 2**10, "float32": 2**23}[kind]
        spread = (weight.amax(1) - weight.amin(1))[:, None] if kind.startswith("int") else weight.abs()
        assert bool(((values - weight).abs() <= 0.502 * spread / steps + 1e-7).all()), name
    check(other, features)


def test_bad_state_dicts():
    module = quantised()
    recfuse.swap(module)
    before = bytes_of(module.state_dict()["embedding_bags.a.weight"])
    state = floats().state_dict()
    state["embedding_bags.a.weight"][3, 1] = torch.nan
    with pytest.raises(RuntimeError, match=r"a\.weight cannot be quantised: .*\[3, 1\] is nan"):
        module.load_state_dict(state)
    int4 = tuple(one._replace(kind="int4") for one in MIXED)
    with pytest.raises(
        RuntimeError,
        match=r"a\.weight is int4 \[90, 32\]; expected uint8 \[90, 32\] for rows of int8, or",
    ):
        module.load_state_dict(quantised(int4).state_dict())
    wide = tuple(one._replace(dim=32) for one in MIXED)
    with pytest.raises(RuntimeError, match=r"is uint8 \[90, 48\]; expected uint8 \[90, 32\]"):
        module.load_state_dict(quantised(wide).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({})
    state = module.state_dict()
    state["embedding_bags.a.weight"] = state["embedding_bags.a.weight"].to(torch.int64)
    with pytest.raises(RuntimeError, match=r"a\.weight is int64"):
        module.load_state_dict(state)
    assert torch.equal(bytes_of(module.state_dict()["embedding_bags.a.weight"]), before)


@pytest.mark.parametrize("register", (False, True))
def test_copies_and_moves(register):
    module = quantised(register=register)
    recfuse.swap(module)
    features = batch(module)
    values = module(features).values()
    copied = copy.deepcopy(module)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    for one in (copied, torch.load(saved, weights_only=False), module.half(), module.double().cpu()):
        assert torch.equal(one(features).values(), values)
        assert one.embedding_bags["c"].weight.dtype == torch.uint8
        recfuse.unswap(one)
        torch.testing.assert_close(one(features).values(), values, atol=1e-5, rtol=1e-5)
        recfuse.swap(one)
    with torch.no_grad():
        copied.memories()[0].zero_()
    assert torch.equal(module(features).values(), values)  # the copy has memory of its own
    copied.to("meta")
    assert copied.state_dict()["embedding_bags.a.weight"].is_meta
    assert "tables are on meta; expected cpu" in recfuse.unswap(copied).left[0].detail


def test_moves_keep_the_dtypes_of_split_parameters():
    module = quantised(split=True)
    recfuse.swap(module)
    features, state = batch(module), module.state_dict()
    values = module(features).values()
    assert torch.equal(module.float().to(torch.bfloat16)(features).values(), values)
    for key, entry in module.state_dict().items():
        assert entry.dtype == state[key].dtype and torch.equal(bytes_of(entry), bytes_of(state[key]))


class OfTensors(torch.nn.Module):
    """A model whose input is the lookups of all keys in the order of the features."""

    def __init__(self, collection):
        super().__init__()
        self.collection = collection

    def forward(self, indices, offsets):
        features = KeyedJaggedTensor(self.collection._feature_names, indices, offsets=offsets)
        return self.collection(features).values()


def graph_calls(graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("register", (False, True))
def test_export(register):
    module = quantised(register=register)
    recfuse.swap(module)
    model, features = OfTensors(module), batch(module)
    moved = features.permute([features.keys().index(name) for name in module._feature_names])
    ready = moved.values(), moved.offsets()
    program = torch.export.export(model, ready, strict=False)
    calls = graph_calls(program.graph)
    assert sum("fused_embedding_bag_quantized" in call for call in calls) == 1
    assert not any("fbgemm" in call for call in calls)
    assert torch.equal(program.module()(*ready), model(*ready))
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    assert torch.equal(torch.export.load(saved).module()(*ready), model(*ready))
    model = Values(module)
    by_key = torch.export.export(model, (features,), strict=False)  # permuted by TorchRec
    assert not any("nbit" in call or "bounds_check" in call for call in graph_calls(by_key.graph))
    assert torch.equal(by_key.module()(features), model(features))


@pytest.mark.long
@pytest.mark.parametrize("register", (False, True))
def test_compile(register):
    module = quantised(register=register)
    recfuse.swap(module)
    model, features = Values(module), batch(module)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.graph)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(compiled(features), model(features))
    calls = [str(node.target) for graph in graphs for node in graph.nodes]
    assert sum("fused_embedding_bag_quantized" in call for call in calls) == 1
    assert not any("nbit" in call or "bounds_check" in call for call in calls)
    torch._dynamo.reset()
    compiled = torch.compile(model)
    for bags in (5, 9, 4):
        other = batch(module, bags)
        assert torch.equal(compiled(other), model(other))
    with torch.no_grad():
        module.memories()[0].zero_()
    assert torch.equal(compiled(features), model(features))


@pytest.mark.long
def test_aot_inductor(tmp_path):
    module = quantised()
    recfuse.swap(module)
    model, features = Values(module), batch(module)
    program = torch.export.export(model, (features,), strict=False)
    path = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=QUICK)
    assert torch.equal(torch._inductor.aoti_load_package(path)(features), model(features))


MEMORY = """
import sys, torch, recfuse, torchrec
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.modules.embedding_configs import DataType
from torchrec.quant.embedding_modules import EmbeddingBagCollection
import recfuse.nn.quantized.torchrec

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10

def collection(rows):
    tables = [EmbeddingBagConfig(
        name=f"t{n}", num_embeddings=rows, embedding_dim=128, feature_names=[f"f{n}"],
        data_type=DataType.INT8, pooling=PoolingType.MEAN if n % 2 else PoolingType.SUM,
    ) for n in range(4)]
    module = EmbeddingBagCollection(tables, False, torch.device("cpu"))
    for tbe in module._emb_modules:
        tbe.weights_host.fill_(1)
    return module

features = KeyedJaggedTensor([f"f{n}" for n in range(4)], torch.arange(4), lengths=torch.ones(4).int())
small = collection(10)
recfuse.swap(small)
small(features)
module = collection(1 << 20)
size = sum(tbe.weights_host.numel() for tbe in module._emb_modules)
before = peak()
assert recfuse.swap(module).fused
module(features)
print(size, peak() - before)
"""


@pytest.mark.long
def test_no_copy_of_the_tables(tmp_path):
    program = tmp_path / "memory.py"
    program.write_text(MEMORY)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    size, rise = map(int, done.stdout.split()[-2:])
    assert size > 5e8 and rise < size / 100, (size, rise)


def left(module) -> str:
    """The reason of the report; the module is unchanged."""
    before = {key: id(value) for key, value in vars(module).items()}
    report = recfuse.swap(torch.nn.Sequential(module))
    assert type(module) is EmbeddingBagCollection and not report.fused
    assert {key: id(value) for key, value in vars(module).items()} == before
    return next(entry.detail for entry in report.left if entry.name == "0")


def placed(module, **changes):
    """Describes the first table differently."""
    tbe = module._emb_modules[0]
    name, rows, dim, kind, placement = tbe.embedding_specs[0]
    kind, placement = changes.get("kind", kind), changes.get("placement", placement)
    tbe.embedding_specs[0] = (name, rows, dim, kind, placement)
    return module


def test_modules_that_are_left():
    pruned = quantised()
    pruned._emb_modules[0].set_index_remappings_array([torch.arange(90, dtype=torch.int32), None, None])
    assert "rows are pruned (index_remapping is set); expected every row" in left(pruned)
    pruned = quantised()
    pruned.embedding_bag_configs()[0].num_embeddings_post_pruning = 50
    assert "table 'a' is pruned to 50 rows" in left(pruned)
    for placement in (EmbeddingLocation.MANAGED, EmbeddingLocation.MANAGED_CACHING, EmbeddingLocation.MTIA):
        reason = left(placed(quantised(), placement=placement))
        assert reason.startswith(f"table 'a' has placement {placement.name}; expected HOST or DEVICE")
    reason = left(quantised([Spec("a", 30, 16, "int2"), Spec("b", 30, 16)]))
    assert "table 'a' has dtype int2; expected int8, int4, fp16 or fp32. Use per_table_weight_dtype" in reason
    assert "has dtype fp8" in left(placed(quantised(), kind=SparseType.FP8))
    module = quantised()
    module._output_dtype = torch.qint8
    assert left(module) == "output_dtype is torch.qint8; expected float32, float16 or bfloat16"
    module = quantised()
    module._is_weighted = True
    assert left(module) == 'a table of a weighted collection has another mode; expected "sum"'
    module = quantised()
    module.forward = module.forward
    assert left(module) == "forward was replaced on the object"
    module = quantised()
    module._emb_modules[1].register_forward_hook(print)
    assert left(module) == "a table of the collection has hooks"
    module = quantised()
    module.embedding_bags["c"].weight = module.embedding_bags["c"].weight.clone()
    assert left(module).startswith("weight of table 'c' is a copy of its rows")
    empty = EmbeddingBagCollection(quantised().embedding_bag_configs(), False, torch.device("meta"))
    assert left(empty).startswith("tables are on meta; expected cpu or cuda")


def test_subclasses_and_fuse_false():
    class OtherEmbeddingBagCollection(EmbeddingBagCollection):
        pass

    module = quantised()
    assert recfuse.swap(torch.nn.Sequential(module), fuse=False).left[0].name == "0"
    assert type(module) is EmbeddingBagCollection
    module.__class__ = OtherEmbeddingBagCollection
    assert "the class is OtherEmbedding" in recfuse.swap(torch.nn.Sequential(module)).left[0].detail
    assert type(module) is OtherEmbeddingBagCollection


def test_scripts_and_traces_are_refused():
    module = quantised()
    recfuse.swap(module)
    with pytest.raises(TypeError, match="symbolic_trace cannot follow"):
        torch.fx.symbolic_trace(Values(module))
    with pytest.raises(NotImplementedError):
        torch.jit.script(Values(module))


def test_torchrec_is_not_imported_by_swap():
    code = "import sys, torch, recfuse; recfuse.swap(torch.nn.Linear(2, 2)); print('torchrec' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("register", (False, True))
def test_calls_before_each_line_of_a_swap(register):
    model = torch.nn.Sequential(quantised(register=register))
    features = batch(model[0])

    def call():
        return model(features).values()

    answers = [call()]
    recfuse.swap(model)
    answers.append(call())
    recfuse.unswap(model)
    for change in (recfuse.swap, recfuse.unswap, recfuse.swap):
        at_each_line(call, answers, lambda: change(model))  # noqa: B023
