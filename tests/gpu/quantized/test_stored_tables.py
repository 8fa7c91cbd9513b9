"""Tables within memory that they share, on a GPU; collections that TorchRec has quantised, moved to a GPU."""

from __future__ import annotations

import pytest
import torch

import recfuse
from support import gpu
from support.tables.quantized import gradient_check
from support.tables.stored import call, in_memory

pytestmark = gpu.MARKS

KINDS = ("int8", "int4", "float16", "float32", "bfloat16")


@pytest.mark.parametrize("alignment", (4, 16, 64))
@pytest.mark.parametrize("behind", (False, True))
def test_agrees_with_float64(alignment: int, behind: bool) -> None:
    tables = [(rows, dim, kind) for rows, dim in ((9, 8), (40, 32), (1, 12), (21, 136)) for kind in KINDS]
    memory, rows, problem = in_memory(tables, alignment, behind)
    on_gpu = memory.cuda()
    for integer in (torch.int32, torch.int64):
        lookups = problem.lookups(300, integer=integer)
        got = call(on_gpu, rows, problem, lookups)
        problem.compare(got, problem.reference(*lookups), *lookups, None)
    factors = torch.rand(lookups[0].numel())
    got = call(on_gpu, rows, problem, lookups, factors)
    problem.compare(got, problem.reference(*lookups, factors), *lookups, factors)
    gradient_check(problem, lookups, lambda wanted: call(on_gpu, rows, problem, lookups, wanted))


def test_odd_parameters_are_refused() -> None:
    memory, rows, problem = in_memory([(9, 6, "int8")], 1)
    with pytest.raises(NotImplementedError, match=r"expected float16 .*, aligned to 4 bytes"):
        call(memory.cuda(), rows, problem, problem.lookups(2))


def test_a_collection_of_torchrec() -> None:
    pytest.importorskip("torchrec.quant.embedding_modules")
    from support.torchrec.quantised import batch, quantised

    module = quantised()
    recfuse.swap(module)
    features = batch(module, 200)
    expected = module(features).values()
    module.cuda()
    for lookups in (features, features.to(torch.device("cuda"))):  # FBGEMM moves lookups too
        got = module(lookups).values()
        assert got.is_cuda
        torch.testing.assert_close(got.cpu(), expected, atol=1e-4, rtol=1e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = module(lookups).values()
    graph.replay()
    torch.testing.assert_close(captured, got)
    state = module.state_dict()
    assert all(entry.is_cuda for entry in state.values() if type(entry) is torch.Tensor)
    module.cpu()
    assert torch.equal(module(features).values(), expected)


def test_a_module_of_fbgemm() -> None:
    pytest.importorskip("fbgemm_gpu")
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    from recfuse.nn.quantized.tbe import tables_of

    kinds = SparseType.INT8, SparseType.INT4, SparseType.FP16
    for location, device in ((EmbeddingLocation.HOST, "cpu"), (EmbeddingLocation.DEVICE, "cuda")):
        module = IntNBitTableBatchedEmbeddingBagsCodegen(
            [(f"t{n}", 50, 16, kind, location) for n, kind in enumerate(kinds)], device=device
        )
        module.initialize_weights()
        torch.manual_seed(7)
        memory = module.weights_host if device == "cpu" else module.weights_dev
        for table in tables_of(module, 0):
            table.write(memory, torch.randn(table.rows, table.dim).to(device))
        indices, offsets = torch.arange(48) % 50, torch.arange(0, 49, 2)
        expected = module(indices.to(device), offsets.to(device))
        recfuse.swap(module)
        got = module.cuda()(indices.cuda(), offsets.cuda())
        assert got.is_cuda
        torch.testing.assert_close(got.cpu(), expected.float().cpu(), atol=1e-2, rtol=1e-2)
