"""recfuse.swap of FBGEMM's IntNBitTableBatchedEmbeddingBagsCodegen: its rows are read where they lie."""

from __future__ import annotations

import copy

import pytest
import torch

import recfuse
from recfuse.nn.quantized.tbe import tables_of

pytest.importorskip("torchrec.quant.embedding_modules")
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

from support.processes.changes import at_each_line
from support.reference import Feature
from support.reference import fused_embedding_bag as reference
from support.torchrec.quantised import quantised, values_of_tbe

KINDS = SparseType.INT8, SparseType.INT4, SparseType.FP16, SparseType.FP32
FEATURES = [0, 1, 1, 2, 3]  # tables; two features share one


def tables(
    mode=PoolingMode.SUM, alignment=16, output=SparseType.FP32, location=EmbeddingLocation.HOST, **options
):
    torch.manual_seed(5)
    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        [(f"t{n}", 40 + 9 * n, 8 + 4 * n, kind, location) for n, kind in enumerate(KINDS)],
        feature_table_map=FEATURES, device="cpu", pooling_mode=mode, row_alignment=alignment,
        output_dtype=output, **options,
    )  # fmt: skip
    module.initialize_weights()
    for table in tables_of(module, 0):
        table.write(module.weights_host, torch.randn(table.rows, table.dim))
    return module


def batch(bags=6, integer=torch.int64):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 6, (len(FEATURES) * bags,), generator=generator)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    indices = torch.randint(0, 40, (int(offsets[-1]),), generator=generator)
    return indices.to(integer), offsets.to(integer)


def expected(module, indices, offsets, factors=None):
    mode = "sum" if module.pooling_mode == PoolingMode.SUM else "mean"
    values = list(values_of_tbe(module).values())
    features = [Feature(table, mode, None) for table in FEATURES]
    return reference(values, features, indices.long(), offsets.long(), factors)


@pytest.mark.parametrize("mode", (PoolingMode.SUM, PoolingMode.MEAN))
@pytest.mark.parametrize("alignment", (1, 16, 64))
@pytest.mark.parametrize("integer", (torch.int32, torch.int64))
def test_the_same_module_with_the_same_results(mode, alignment, integer):
    module = tables(mode, alignment)
    model = torch.nn.Sequential(module)
    lookups = batch(integer=integer)
    before, state = module(*lookups), {key: value.clone() for key, value in module.state_dict().items()}
    address = module.weights_host.data_ptr()
    (entry,) = recfuse.swap(model).fused
    assert (entry.name, entry.detail) == ("0", "4 quantised tables, 5 features in one call")
    assert model[0] is module and isinstance(module, IntNBitTableBatchedEmbeddingBagsCodegen)
    after = module(*lookups)
    assert module.weights_host.data_ptr() == address
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after.double(), expected(module, *lookups), atol=1e-4, rtol=1e-5)
    now = module.state_dict()
    assert list(now) == list(state) and all(torch.equal(now[key], value) for key, value in state.items())
    assert recfuse.swap(model).already[0].name == "0"
    restored = recfuse.unswap(model).restored[0]
    assert restored.name == "0" and "fbgemm_gpu.IntNBitTable" in restored.detail
    assert type(module) is IntNBitTableBatchedEmbeddingBagsCodegen
    assert torch.equal(module(*lookups), before)


@pytest.mark.parametrize("output", (SparseType.FP16, SparseType.BF16))
def test_output_dtypes(output):
    module = tables(output=output)
    recfuse.swap(module)
    got = module(*batch())
    assert got.dtype == output.as_dtype()
    torch.testing.assert_close(got.double(), expected(module, *batch()), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("mode", (PoolingMode.SUM, PoolingMode.MEAN))
def test_weights_of_lookups(mode):
    """Those of means are FBGEMM's."""
    module = tables(mode)
    indices, offsets = batch()
    factors = torch.rand(indices.numel(), requires_grad=mode == PoolingMode.SUM)
    before = module(indices, offsets, factors.detach())
    recfuse.swap(module)
    after = module(indices, offsets, per_sample_weights=factors)
    torch.testing.assert_close(after.detach(), before, atol=1e-4, rtol=1e-4)
    if mode == PoolingMode.SUM:
        after.sum().backward()
        exact = factors.detach().double().requires_grad_()
        expected(module, indices, offsets, exact).sum().backward()
        torch.testing.assert_close(factors.grad.double(), exact.grad, atol=1e-4, rtol=1e-4)


def test_updates_in_place_are_visible_and_others_raise():
    module = tables()
    recfuse.swap(module)
    lookups = batch()
    before = module(*lookups)
    rows = module.split_embedding_weights(split_scale_shifts=False)[0][0].clone()
    for row in range(40):
        module.embedding_inplace_update([0], [[row]], [rows[39 - row][None]])
    assert not torch.equal(module(*lookups), before)
    torch.testing.assert_close(module(*lookups).double(), expected(module, *lookups), atol=1e-4, rtol=1e-5)
    for name in ("set_index_remappings", "recompute_module_buffers", "initialize_weights"):
        with pytest.raises(NotImplementedError, match=f"{name} of a swapped module would change"):
            getattr(module, name)()
    with pytest.raises(IndexError, match=r"indices\[0\] is 40, for feature 0"):
        module(torch.tensor([40]), torch.tensor([0, 1, 1, 1, 1, 1]))
    assert torch.equal(copy.deepcopy(module)(*lookups), module(*lookups))


def test_modules_that_are_left():
    replaced = tables()
    replaced.forward = lambda *arguments: None
    model = torch.nn.ModuleDict({
        "rows": IntNBitTableBatchedEmbeddingBagsCodegen(
            [("t", 9, 8, SparseType.INT8, EmbeddingLocation.HOST)], device="cpu",
            pooling_mode=PoolingMode.NONE,
        ),
        "output": tables(output=SparseType.INT8),
        "replaced": replaced,
        "empty": IntNBitTableBatchedEmbeddingBagsCodegen(
            [("t", 9, 8, SparseType.INT8, EmbeddingLocation.HOST)], device="cpu"
        ),
        "of torchrec": quantised(register=True),
    })  # fmt: skip
    report = recfuse.swap(model)
    assert [entry.name for entry in report.fused] == ["of torchrec"]
    reasons = {entry.name: entry.detail for entry in report.left}
    for name, text in (
        ("rows", "pooling_mode is NONE; expected SUM or MEAN"),
        ("output", "output_dtype is SparseType"),
        ("replaced", "forward was replaced"),
        ("empty", "tables have no memory yet"),
    ):
        assert text in reasons[name]


def test_compiled():
    module = tables()
    recfuse.swap(module)
    lookups = batch()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*lookups), module(*lookups))


def test_calls_before_each_line_of_a_swap():
    module = tables()
    model, lookups = torch.nn.Sequential(module), batch()

    def call():
        return module(*lookups)

    answers = [call()]
    recfuse.swap(model)
    answers.append(call())
    recfuse.unswap(model)
    for change in (recfuse.swap, recfuse.unswap, recfuse.swap):
        at_each_line(call, answers, lambda: change(model), least=5)  # noqa: B023
