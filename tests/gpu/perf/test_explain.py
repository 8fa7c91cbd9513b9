"""Launches of `recfuse.explain`: those that the profiler sees, and those that are lowered without a GPU."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import recfuse
from recfuse.nn.columns import Cross, Hash, Identity
from recfuse.perf.explain import known_gpus
from support import gpu
from support.backward.explained import gradient, update
from support.ikbo import explained

pytestmark = gpu.MARKS

DTYPES = torch.float32, torch.float16, torch.bfloat16


def bag(chance: random.Random) -> tuple[Any, ...]:
    mode = chance.choice(("sum", "mean", "max"))
    rows, dim = chance.choice((7, 1000, 300_000)), chance.choice((1, 4, 10, 64, 128, 200, 512))
    table = recfuse.nn.EmbeddingBag(rows, dim, mode=mode, dtype=chance.choice(DTYPES))
    bags, pooling = chance.choice((1, 33, 2048)), chance.choice((0, 1, 5, 80))
    integer = chance.choice((torch.int32, torch.int64))
    batch = [
        torch.randint(rows, (bags * pooling,), dtype=integer),
        (torch.arange(bags) * pooling).to(integer),
    ]
    if mode == "sum" and chance.random() < 0.3:
        batch.append(torch.rand(bags * pooling, dtype=table.weight.dtype))
    return table, *batch


def columns(chance: random.Random) -> tuple[Any, ...]:
    samples = chance.choice((1, 40, 700))
    specs: list[Any] = []
    for number in range(chance.choice((1, 3, 60))):
        specs.append(Hash(f"h{number}", num_embeddings=100, embedding_dim=chance.choice((4, 8, 16))))
    specs.append(Identity("tags", num_embeddings=500, embedding_dim=16, pooling="mean"))
    specs.append(Cross("both", keys=["h0", "tags"], num_embeddings=50, embedding_dim=8))
    batch: dict[str, Any] = {spec.name: torch.randint(90, (samples,)) for spec in specs[:-2]}
    batch["tags"] = torch.randint(500, (2 * samples,)), torch.arange(0, 2 * samples + 1, 2)
    return recfuse.nn.EmbeddingColumns(specs), batch


def linear(chance: random.Random) -> tuple[Any, ...]:
    users, candidates = chance.choice((1, 20)), chance.choice((4, 300, 3000))
    ks = chance.choice((8, 61, 64, 256)), chance.choice((16, 61, 128))
    m, n = chance.choice((64, 200, 433, 600)), chance.choice((8, 64, 200))
    return explained.linear(users, candidates, m, ks, n, chance.choice(DTYPES))


def attention(chance: random.Random) -> tuple[Any, ...]:
    users, candidates, queries = chance.choice((1, 20)), chance.choice((1, 70, 2000)), chance.choice((1, 8))
    positions, heads, dim = (
        chance.choice((1, 100, 3000)),
        chance.choice((1, 4)),
        chance.choice((8, 20, 64, 128)),
    )
    return explained.attention(users, candidates, queries, positions, heads, dim, chance.choice(DTYPES))


FAMILIES: dict[str, Callable[[random.Random], tuple[Any, ...]]] = {
    "bag": bag,
    "columns": columns,
    "linear": linear,
    "attention": attention,
    "gradient": gradient,
    "update": update,
}


def to_device(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: to_device(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(to_device(one) for one in value)
    return value.to("cuda") if isinstance(value, (torch.Tensor, torch.nn.Module)) else value


def profiled(calls: list[tuple[Any, ...]], path: Path) -> tuple[list[Any], list[dict[str, Any]]]:
    """The launches of calls, and the kernels of recfuse in the order in which the device ran them."""
    from torch.profiler import ProfilerActivity, profile

    launches: list[Any] = []
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for call in calls:
            launches.append(recfuse.explain(*call))
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    kernels = [one for one in events if one.get("cat") == "kernel" and one["name"].startswith("rf_")]
    return launches, sorted(kernels, key=lambda one: one["ts"])


def described_name() -> str | None:
    """Returns the known GPU that is most similar to this one."""
    properties = torch.cuda.get_device_properties(0)
    for known in known_gpus():
        if known["sms"] == properties.multi_processor_count and known["l2_bytes"] == properties.L2_cache_size:
            return str(known["name"])
    return None


def seeds() -> Iterator[tuple[str, int]]:
    for family in FAMILIES:
        yield from ((family, seed) for seed in range(10))


@pytest.mark.parametrize(("family", "seed"), seeds())
def test_launches_are_those_that_run(family: str, seed: int, tmp_path: Path) -> None:
    name = described_name()
    torch.manual_seed(seed)
    calls = [FAMILIES[family](random.Random(f"{family} {seed} {number}")) for number in range(10)]
    lowered = [recfuse.explain(*call, gpu=name) if name else None for call in calls]
    calls = [tuple(to_device(one) for one in call) for call in calls]
    for call in calls:
        call[0](*call[1:])  # compiles
    ran, kernels = profiled(calls, tmp_path / "trace.json")
    launches = [one for each in ran for one in each if one.kernel != "fill"]
    assert [kernel["name"] for kernel in kernels] == [launch.kernel for launch in launches]
    for kernel, launch in zip(kernels, launches, strict=True):
        found = kernel["args"]
        assert found["block"] == list(launch.block) and found["grid"][1:] == list(launch.grid[1:]), launch
        if launch.cluster == (1, 1, 1):
            assert found["grid"][0] == launch.grid[0], launch
        else:  # limited to the clusters that fit on the GPU's GPCs, which only the driver knows
            assert 0 < found["grid"][0] <= launch.grid[0], launch
        assert found["registers per thread"] == launch.registers, launch
        static = found["shared memory"] - launch.shared_bytes
        assert 0 <= static <= 48 << 10, (launch, found["shared memory"])
    for on_device, described in zip(ran, lowered, strict=True):
        for field in ("kernel", "defines", "grid", "block", "cluster", "dynamic_shared"):
            if described is not None:
                values = [[getattr(one, field) for one in each] for each in (on_device, described)]
                assert values[0] == values[1], field
