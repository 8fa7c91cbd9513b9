"""fused_embedding_bag_quantized on a GPU: against float64, in every layout, and by every form of schedule."""

from __future__ import annotations

import pytest
import torch

import recfuse
from support import gpu
from support.reference import Feature
from support.tables.quantized import FLOATS, Stored, Tables, gradient_check, stored

pytestmark = gpu.MARKS

KINDS = ("int8", "int4", *FLOATS)
DIMS = (2, 6, 8, 16, 32, 64, 128, 300)
OPERATOR = torch.ops.recfuse.fused_embedding_bag_quantized


def tables_of(dims=DIMS, kinds=("int8", "int4"), layout="planar", gap=8) -> list[Stored]:
    generator = torch.Generator().manual_seed(5)
    return [
        stored(torch.randn(20 + dim % 37, dim, generator=generator), kind, layout, gap, align=4)
        for dim in dims
        for kind in kinds
    ]


def on_gpu(problem: Tables) -> Tables:
    """The same tables on the device, in their layout; the values stay."""
    moved = []
    for one in problem.tables:
        weight, parameters = one.weight, one.parameters
        if weight.dtype == torch.uint8 and weight.untyped_storage().data_ptr() == (
            parameters.untyped_storage().data_ptr()
        ):
            memory = torch.empty(0, dtype=torch.uint8, device=gpu.DEVICE)
            memory.set_(weight.untyped_storage().cuda())  # the rows with their parameters
            weight_view = memory.as_strided(weight.shape, weight.stride(), weight.storage_offset())
            halves = memory.view(torch.float16)
            parameters = halves.as_strided(parameters.shape, parameters.stride(), parameters.storage_offset())
            moved.append(Stored(weight_view, parameters, one.values))
        else:
            moved.append(Stored(weight.cuda(), parameters.cuda(), one.values))
    return Tables(moved, problem.features)


def check(problem: Tables, device: Tables, lookups, factors=None, **options) -> torch.Tensor:
    """Runs it twice: the same bits, and the values of float64."""
    indices, offsets = lookups
    results = [device.run(indices, offsets, factors, device="cuda", **options) for _ in range(2)]
    recfuse.check()
    assert torch.equal(*results)
    expected = problem.reference(indices, offsets, factors)
    problem.compare(results[0], expected, indices, offsets, factors)
    return results[0]


def schedules(problem: Tables, offsets: torch.Tensor, **fields: int) -> torch.Tensor:
    """Schedules with the expected lookups of each feature."""
    rows = torch.zeros(len(problem.features), 5, dtype=torch.int32)
    for number, name in enumerate(("kind", "threads", "distance", "split")):
        rows[:, number] = fields.get(name, 0)
    bags = (offsets.numel() - 1) // len(problem.features)
    rows[:, 4] = (offsets.long()[::bags].diff() * 16 // bags).clamp(min=1).int()
    return rows


@pytest.mark.parametrize("layout", ("planar", "before", "behind"))
def test_agrees_with_float64(layout) -> None:
    tables = tables_of(layout=layout)
    modes = ("sum", "mean", "max")
    features = [Feature(n, modes[n // 2 % 3], 3 if n % 4 == 0 else None) for n in range(len(tables))]
    problem = Tables(tables, features)
    device = on_gpu(problem)
    for bags, integer in ((1, torch.int32), (13, torch.int64), (130, torch.int32)):
        lookups = problem.lookups(bags, integer=integer)
        check(problem, device, lookups, schedules=schedules(problem, lookups[1]))


@pytest.mark.parametrize("layout", ("planar", "before", "behind"))
def test_gradients_of_sample_weights(layout) -> None:
    problem = Tables(tables_of(kinds=KINDS, layout=layout))
    device = on_gpu(problem)
    for bags, mean in ((1, 200), (30, 5)):
        lookups = problem.lookups(bags, mean)
        moved = tuple(one.cuda() for one in lookups)

        def run(factors, at=moved):
            return device.run(*at, factors.cuda(), device="cuda")

        gradient_check(problem, lookups, run)
    recfuse.check()


def test_mixed_with_floats_and_every_length() -> None:
    """Without expected lookups the partition is computed on the GPU."""
    problem = Tables(tables_of((8, 64, 128), KINDS))
    device = on_gpu(problem)
    for mean in (0, 1, 5, 90, 400):
        check(problem, device, problem.lookups(9, mean))


def test_weights_and_output_dtypes() -> None:
    problem = Tables(tables_of((6, 64)))
    device = on_gpu(problem)
    indices, offsets = problem.lookups(33)
    factors = torch.randn(indices.numel())
    for dtype in FLOATS.values():
        assert check(problem, device, (indices, offsets), factors, output_dtype=dtype).dtype == dtype


@pytest.mark.parametrize(
    "fields", ({"threads": 64, "distance": 4}, {"distance": 16}, {"threads": 32, "split": 4}), ids=str
)
def test_schedules_of_pool(fields) -> None:
    problem = Tables(tables_of((16, 128)))
    device = on_gpu(problem)
    lookups = problem.lookups(20, 150)
    check(problem, device, lookups, schedules=schedules(problem, lookups[1], kind=1, **fields))


def test_other_schedules_raise() -> None:
    problem = Tables(tables_of((16,)))
    lookups = problem.lookups(3)
    for kind in (2, 3):
        with pytest.raises(ValueError, match=r"for a (quantised )?table"):
            on_gpu(problem).run(*lookups, device="cuda", schedules=schedules(problem, lookups[1], kind=kind))


def test_bad_indices_are_reported_and_left_out() -> None:
    problem = Tables(tables_of((16,), ("int8",)))
    device = on_gpu(problem)
    rows = problem.tables[0].values.shape[0]
    got = device.run(torch.tensor([0, rows, 1]), torch.tensor([0, 2, 3]), device="cuda")
    with pytest.raises(IndexError, match=rf"indices\[1\] is {rows}"):
        recfuse.check()
    expected = problem.tables[0].values[:2]
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-5, rtol=0)


def test_parameters_that_a_gpu_cannot_read() -> None:
    one = stored(torch.randn(20, 6), "int8", "before", 0, align=2)  # rows of 10 bytes
    problem = Tables([one])
    with pytest.raises(NotImplementedError, match="aligned to 4 bytes"):
        on_gpu(problem).run(*problem.lookups(2), device="cuda")
    floats = Tables([Stored(one.weight.contiguous(), one.parameters.float(), one.values)])
    with pytest.raises(NotImplementedError, match="expected float16"):
        on_gpu(floats).run(*floats.lookups(2), device="cuda")


def test_replays_of_a_graph() -> None:
    problem = Tables(tables_of((16, 64)))
    device = on_gpu(problem)
    indices, offsets = (one.cuda() for one in problem.lookups(40))
    expected = device.run(indices, offsets, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = device.run(indices, offsets, device="cuda")
    got.zero_()
    graph.replay()
    assert torch.equal(got, expected)


def collection(device: str = "cpu") -> recfuse.nn.FusedEmbeddingBagCollection:
    torch.manual_seed(2)
    tables = [
        recfuse.nn.Table(100, 64, "a", feature_names=("x", "y")),
        recfuse.nn.Table(70, 16, "b", "mean", 3),
        recfuse.nn.Table(50, 8, "c", "max"),
    ]
    made = recfuse.nn.FusedEmbeddingBagCollection(tables)
    return made.to(device)


def batch(bags: int = 21) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(bags)
    lengths = torch.randint(0, 9, (4 * bags,), generator=generator)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    return torch.randint(0, 50, (int(offsets[-1]),), generator=generator), offsets


@pytest.mark.parametrize("dtype", ("int8", "int4"))
def test_a_collection_quantised_on_a_gpu(dtype) -> None:
    on_cpu, device = collection(), collection("cuda")
    reports = [recfuse.quantize(one, dtype) for one in (on_cpu, device)]
    for name, table in on_cpu.tables.items():
        assert torch.equal(table.codes, device.tables[name].codes.cpu())
        assert torch.equal(table.weight, device.tables[name].weight.cpu())
    assert reports[0].bytes_after == reports[1].bytes_after
    indices, offsets = batch()
    expected = on_cpu(indices, offsets)
    for _ in range(2):
        torch.testing.assert_close(
            device(indices.cuda(), offsets.cuda()).cpu(), expected, atol=1e-4, rtol=1e-5
        )
    moved = on_cpu.cuda()
    assert torch.equal(moved(indices.cuda(), offsets.cuda()), device(indices.cuda(), offsets.cuda()))
    recfuse.dequantize(device)
    assert device.tables["a"].weight.is_cuda


def test_compiled_and_exported() -> None:
    device = collection("cuda")
    recfuse.quantize(device, {"a": "int8", "b": "int4"})
    indices, offsets = (one.cuda() for one in batch())
    expected = device(indices, offsets)
    compiled = torch.compile(device, fullgraph=True)
    torch.testing.assert_close(compiled(indices, offsets), expected, atol=1e-4, rtol=1e-5)
    program = torch.export.export(device, (indices, offsets))
    torch.testing.assert_close(program.module()(indices, offsets), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", ("int8", "int4"))
def test_a_single_table(dtype) -> None:
    torch.manual_seed(6)
    bag = torch.nn.EmbeddingBag(90, 32, mode="sum", padding_idx=4)
    recfuse.quantize(bag, dtype)
    indices, offsets, factors = torch.randint(0, 90, (60,)), torch.tensor([0, 0, 25, 40]), torch.rand(60)
    results = []
    for device in ("cpu", "cuda"):
        bag.to(device)
        weights = factors.to(device).requires_grad_()
        output = bag(indices.to(device), offsets.to(device), weights)
        output.square().sum().backward()
        results.append((output.detach().cpu(), weights.grad.cpu()))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)
    recfuse.check()
