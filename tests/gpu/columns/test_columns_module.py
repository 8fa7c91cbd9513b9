"""EmbeddingColumns on a GPU: random programs against their reference, forms of a batch, graphs, training."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import recfuse
import recfuse.nn.columns.host as host_module
from recfuse.nn import EmbeddingColumns
from recfuse.nn.columns import Bucketize, Hash, Identity, Numeric, TableColumn
from recfuse.nn.columns.host import HostSplit, Lookup
from support import gpu
from support.columns.compare import REFUSED, magnitude, want_dtype
from support.columns.inputs import COLUMNS, SUMS, mapping, parts
from support.columns.random_programs import random_case
from support.columns.scaled import POOLINGS, SCALES, module_and_batch
from support.reference import assert_close_to_reference, tolerance

pytestmark = [*gpu.MARKS, pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")]


def on_gpu(batch: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, entry in batch.items():
        if isinstance(entry, dict):
            found[name] = {key: one.to(gpu.DEVICE) for key, one in entry.items()}
        else:
            found[name] = entry.to(gpu.DEVICE) if isinstance(entry, Tensor) else gpu.moved(entry)
    return found


def check(seed: int) -> str:
    """A random program: dict on the GPU, dict on the host, packed."""
    draw = Random(seed)
    case = random_case(draw)
    module, batch = case.module(), case.batch(draw)
    reference = module.to_torch().double()
    allowed = want = None
    try:
        want = reference(case.batch())
    except REFUSED as error:
        kind = type(error)
    module.to(gpu.DEVICE)
    if want is None:
        with torch.no_grad(), pytest.raises(REFUSED if issubclass(kind, IndexError) else TypeError):
            module(on_gpu(batch))
            recfuse.check(gpu.DEVICE)
        gpu.forget_errors()
        return kind.__name__
    rounded = want.to(want_dtype(module)).double()
    want = torch.where(rounded.isinf(), rounded, want)
    allowed = tolerance(magnitude(case.module(), case.absolute()), case.lookups, want_dtype(module))
    with torch.no_grad():
        for given in (on_gpu(batch), batch, module.pack(batch), module.pack(on_gpu(batch))):
            assert_close_to_reference(module(given).cpu(), want, allowed)
    recfuse.check(gpu.DEVICE)
    return "compared"


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_random_programs(first: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends = [check(seed) for seed in range(first, first + 20)]
    assert ends.count("compared") > 12


def many(count: int) -> list[Any]:
    """Four kinds of features."""
    kinds = (
        lambda name: Bucketize(name, [float(one) for one in range(9)], 8),
        lambda name: Hash(name, 50, 4),
        lambda name: Identity(name, 30, 16, pooling="sum"),
        lambda name: Numeric(name, 3),
    )
    return [kinds[number % 4](f"c{number}") for number in range(count)]


def many_batch(count: int, size: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {}
    for number in range(count):
        lengths = torch.randint(0, 4, (size,), generator=generator)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        found[f"c{number}"] = (
            lambda: torch.rand(size, generator=generator) * 10,
            lambda: torch.randint(-(2**60), 2**60, (size,), generator=generator),
            lambda offsets=offsets: (torch.randint(0, 30, (int(offsets[-1]),), generator=generator), offsets),
            lambda: torch.rand(size, 3, generator=generator),
        )[number % 4]()
    return found


@pytest.mark.parametrize("count", (700, 2500))  # all tensors have room in a call; they have not
@pytest.mark.parametrize("where", ("device", "host", "packed", "packed there"))
def test_many_features(where: str, count: int) -> None:
    module = EmbeddingColumns(many(count))
    batches = [many_batch(count, size, size) for size in (1, 33, 256, 33)]
    reference = module.to_torch()
    want = [reference(batch) for batch in batches]
    module.to(gpu.DEVICE)
    with torch.no_grad():
        for batch, right in zip(batches, want, strict=True):
            given: Any = batch
            if where == "device":
                given = on_gpu(batch)
            elif where == "packed":
                given = module.pack(batch).to(gpu.DEVICE, non_blocking=True)
            elif where == "packed there":
                given = module.pack(on_gpu(batch))
            torch.testing.assert_close(module(given).cpu(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("warm", (False, True))
def test_captured(packed: bool, warm: bool) -> None:
    """Also if the very first call is captured; replays read new contents."""
    module = EmbeddingColumns(many(40), device=gpu.DEVICE)
    batches = [on_gpu(many_batch(40, 64)) for _ in range(2)]
    static: Any = module.pack(batches[0]) if packed else batches[0]
    with torch.no_grad():
        if warm:
            module(static)
        gpu.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = module(static)
        for _ in range(2):
            tensors = (
                static._inputs.dense
                if packed
                else [one for one in static.values() if isinstance(one, Tensor)]
            )
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.uniform_(0, 10)
            for parameter in module.parameters():
                parameter.normal_()
            graph.replay()
            assert torch.equal(found, module(static))


def test_unsupported_captures_are_refused() -> None:
    """The host's memory is read when a graph is captured, and not when it is replayed."""
    batch = many_batch(8, 16)
    module = EmbeddingColumns(many(8), device=gpu.DEVICE)
    host = [dataclasses.replace(one, placement="host") if isinstance(one, Hash) else one for one in many(8)]
    split = EmbeddingColumns(host, device=gpu.DEVICE)
    for call, given, text in ((module, batch, "batch.*on the host"), (split, on_gpu(batch), "tables.*host")):
        with torch.no_grad():
            call(given)
            gpu.synchronize()
            with pytest.raises(ValueError, match=text), torch.cuda.graph(torch.cuda.CUDAGraph()):
                call(given)
            gpu.synchronize()
            call(given)


@pytest.mark.parametrize("columns", (COLUMNS, SUMS), ids=("all", "sums"))
def test_training_is_that_of_the_reference(columns: Any) -> None:
    module = EmbeddingColumns(columns)
    reference = module.to_torch()
    module.to(gpu.DEVICE)
    for kind in (torch.optim.SGD, torch.optim.Adagrad):
        own, theirs = kind(module.parameters(), 0.1), kind(reference.parameters(), 0.1)
        for seed in range(3):
            batch = mapping(parts(seed, 40))
            for one, optimizer, given in ((module, own, on_gpu(batch)), (reference, theirs, batch)):
                optimizer.zero_grad()
                one(given).square().sum().backward()
                optimizer.step()
    for name, table in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name].cpu(), table, rtol=1e-4, atol=1e-4)


def test_compiled() -> None:
    torch.compiler.reset()
    module = EmbeddingColumns(COLUMNS)
    reference = module.to_torch()
    module.to(gpu.DEVICE)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for seed, size in enumerate((6, 9, 31)):
        batch = mapping(parts(seed, size))
        with torch.no_grad():
            torch.testing.assert_close(compiled(on_gpu(batch)).cpu(), reference(batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("names", (("tags",), ("age", "city"), ("age", "city", "tags", "pairs", "many")))
def test_tables_that_stay_on_the_host(names: tuple[str, ...]) -> None:
    columns = [
        dataclasses.replace(one, placement="host")
        if isinstance(one, TableColumn) and one.table_name in names
        else one
        for one in COLUMNS
    ]
    module = EmbeddingColumns(columns)
    reference = module.to_torch()
    module.to(gpu.DEVICE)
    assert {name for name, table in module.tables.items() if table.weight.is_cpu} == set(names)
    for seed in range(4):
        batch = mapping(parts(seed, 50))
        want = reference(batch)
        with torch.no_grad():
            for given in (batch, on_gpu(batch), module.pack(batch), module.pack(batch).to(gpu.DEVICE)):
                torch.testing.assert_close(module(given).cpu(), want, rtol=1e-5, atol=1e-5)
        out = module(on_gpu(batch))
        torch.testing.assert_close(out.detach().cpu(), want, rtol=1e-5, atol=1e-5)
        out.sum().backward()


@pytest.mark.parametrize("most", (0, 8192))
@pytest.mark.parametrize("names", (("tags",), ("age", "city"), ("age", "city", "tags", "pairs", "many")))
def test_frozen_tables_on_the_host_are_read_by_the_gpu(
    names: tuple[str, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows, and all rows if the batch is only on the GPU, also in CUDA graphs; otherwise CPU threads
    do."""
    columns = [
        dataclasses.replace(one, placement="host")
        if isinstance(one, TableColumn) and one.table_name in names
        else one
        for one in COLUMNS
    ]
    first = EmbeddingColumns(columns).requires_grad_(False)
    reference = first.to_torch()
    first.to(gpu.DEVICE)
    by_threads: list[bool] = []
    call = HostSplit.deferred
    monkeypatch.setattr(host_module, "MOST_ROWS", most)
    monkeypatch.setattr(HostSplit, "deferred", lambda *given: by_threads.append(True) or call(*given))
    for module in (first, copy.deepcopy(first)):
        tables = [table.weight for name, table in module.tables.items() if name in names]
        assert all(weight.is_cpu and weight.is_pinned() for weight in tables)
        for seed in range(3):
            batch = mapping(parts(seed, 50))
            want = reference(batch)
            packed = module.pack(batch)
            of_the_host = (batch, packed, packed.to(gpu.DEVICE))
            for given in (*of_the_host, on_gpu(batch), module.pack(on_gpu(batch))):
                by_threads.clear()
                torch.testing.assert_close(module(given).cpu(), want, rtol=1e-5, atol=1e-5)
                assert bool(by_threads) is (most == 0 and any(given is one for one in of_the_host))
        for static in (on_gpu(mapping(parts(5, 50))), packed.to(gpu.DEVICE)):
            module(static)
            gpu.synchronize()
            by_threads.clear()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = module(static)
            for weight in tables:
                weight.mul_(2)
            graph.replay()
            assert not by_threads
            torch.testing.assert_close(found, module(static))
            for weight in tables:
                gpu.synchronize()
                weight.div_(2)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("lookup", Lookup)
def test_calls_that_are_not_waited_for(
    lookup: Lookup, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two streams: each call owns the data that the host hands over."""
    columns = [
        Bucketize("a", [0.25, 0.5], 8, dtype=dtype),
        Identity("b", 50_000, 32, pooling="sum", placement="host", dtype=dtype),
        Numeric("n"),
        Identity("c", 50_000, 32, placement="host", dtype=dtype),
    ]
    module = EmbeddingColumns(columns).requires_grad_(False)
    reference = module.to_torch()
    module.to(gpu.DEVICE)
    batches = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        batches.append({
            "a": torch.rand(256, generator=generator),
            "b": (torch.randint(0, 50_000, (1280,), generator=generator), torch.arange(257) * 5),
            "n": torch.rand(256, generator=generator),
            "c": torch.randint(0, 50_000, (256,), generator=generator),
        })  # fmt: skip
    want = [reference(batch) for batch in batches]
    packed = [module.pack(batch) for batch in batches]
    monkeypatch.setattr(host_module, "MOST_ROWS", 8192 if lookup is Lookup.GPU else 0)
    module.requires_grad_(lookup is Lookup.CALL)
    busy = torch.rand(4096, 4096, device=gpu.DEVICE)
    streams = [torch.cuda.Stream(gpu.DEVICE) for _ in range(2)]
    found = []
    gpu.synchronize()
    with torch.no_grad():
        for turn in range(4):
            for number in range(len(packed)):
                given = (packed, batches)[turn % 2][number]
                with torch.cuda.stream(streams[(turn // 2 + number) % 2]):
                    busy @ busy
                    found.append((number, module(given)))
    gpu.synchronize()
    for number, out in found:
        assert out.dtype == dtype
        exact = dtype == torch.float32
        torch.testing.assert_close(out.cpu(), want[number], rtol=1e-5 if exact else 1e-2, atol=1e-5)


def test_bad_contents_for_tables_on_the_host() -> None:
    """Bad rows, and offsets that lead anywhere, are left out and reported."""
    columns = [Numeric("n"), Identity("b", 9000, 32, pooling="sum", placement="host")]
    module = EmbeddingColumns(columns, device=gpu.DEVICE).requires_grad_(False)
    good = {"n": torch.rand(300), "b": (torch.arange(1500) * 5, torch.arange(301) * 5)}
    for values, offsets in ((good["b"][0] - 100, good["b"][1]), (good["b"][0], good["b"][1] * 10**9)):
        packed = module.pack(good)
        packed._inputs.values[0][: values.shape[0]].copy_(values)
        packed._inputs.offsets[0].copy_(offsets)
        with torch.no_grad(), pytest.raises((IndexError, ValueError), match=r"column ([01]|'b')"):
            module(packed)
            recfuse.check(gpu.DEVICE)
        gpu.forget_errors()
    with torch.no_grad():
        torch.testing.assert_close(module(good).cpu(), module.to_torch().cpu()(good))


def test_the_last_dense_input_may_be_on_the_host() -> None:
    """A graph would copy its contents at the capture."""
    module = EmbeddingColumns([Numeric("a", 3), Numeric("b")], device=gpu.DEVICE)
    numbers = torch.rand(7, 3)
    given = module._reader.read(
        {"a": torch.rand(7, 3, device=gpu.DEVICE), "b": torch.rand(7, device=gpu.DEVICE)}
    )
    for dense, want in (([given.dense[1], numbers], None), ([numbers, given.dense[1]], "dense is on cpu")):
        places = tuple(place._replace(input=1 - place.input) for place in given.places)
        mixed = given._replace(dense=dense, places=places if want is None else given.places)
        with torch.no_grad():
            if want is not None:
                with pytest.raises((ValueError, TypeError), match="dense"):
                    module._whole.programs.compute([], mixed, "on")
                continue
            out = module._whole.programs.compute([], mixed, "on")
            assert torch.equal(out.cpu(), torch.cat((numbers, dense[0].cpu()[:, None]), dim=1))
            gpu.synchronize()
            with (
                pytest.raises(NotImplementedError, match="captured"),
                torch.cuda.graph(torch.cuda.CUDAGraph()),
            ):
                module._whole.programs.compute([], mixed, "on")
            gpu.synchronize()


def test_pageable_weights_are_refused() -> None:
    module = EmbeddingColumns(many(4))
    given = module._reader.read(on_gpu(many_batch(4, 5)))
    with torch.no_grad(), pytest.raises(ValueError, match=r"weights is on the CPU.*weights.pin_memory\(\)"):
        module._whole(module.packed_weights(), given, False, "on")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_and_gradients_of_scaled_weights(pooling: str, scale: float) -> None:
    module, batch = module_and_batch(pooling, scale)
    reference = module.to_torch().double()
    want = reference(batch)
    want.square().sum().backward()
    (want_grad,) = (parameter.grad for parameter in reference.parameters())
    module.to(gpu.DEVICE)
    moved = {"bag": tuple(one.to(gpu.DEVICE) for one in batch["bag"])}
    with torch.no_grad():
        torch.testing.assert_close(module(moved).double().cpu(), want.detach(), rtol=1e-5, atol=1e-5)
    module(moved).square().sum().backward()
    (found,) = (parameter.grad for parameter in module.parameters())
    torch.testing.assert_close(found[:60].double().cpu(), want_grad[:60], rtol=1e-4, atol=1e-4)
