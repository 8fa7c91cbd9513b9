"""Measures recfuse's collections of random tables: the times of their kernels, and the launches
of the same calls.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recfuse import nn as recfuse_nn
from recfuse.perf.calibrating.clock import DeviceClock
from recfuse.perf.known import name_here
from recfuse.perf.tracing.kept_state import KeptState
from recfuse.perf.tracing.tracer import Tracer, run_traced
from recfuse.perf.tracing.unallocated import unallocated

Sample = tuple[str, tuple[float, ...], float, float]


@dataclass(frozen=True)
class Collection:
    """Sizes of a collection of tables."""

    batch: int
    tables: tuple[tuple[int, int, int], ...]  # rows, dim, lookups of a bag

    def bags(self, device: str) -> torch.nn.ModuleList:
        """Return a bag per table."""
        with torch.device(device):
            return torch.nn.ModuleList(
                torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for rows, dim, _ in self.tables
            )

    def inputs(self, seed: int, device: str) -> tuple[list[Tensor], list[Tensor]]:
        """Return offsets and indices of each table."""
        generator = torch.Generator().manual_seed(seed)
        offsets = [torch.arange(0, self.batch * pooling, pooling).to(device) for _, _, pooling in self.tables]
        indices = [
            torch.randint(0, rows, (self.batch * pooling,), generator=generator).to(device)
            for rows, _, pooling in self.tables
        ]
        return offsets, indices


def random_collection(rng: random.Random, most_rows: int = 300_000, most_tables: int = 200) -> Collection:
    """Return a collection of 1 to 200 tables."""
    count = min(rng.choice((1, 2, 4, 8, 16, 26, 64, 128, 200)), most_tables)
    batch = rng.choice((128, 512, 1024, 2048, 4096))
    dim = rng.choice((16, 32, 64, 128))
    mixed = rng.random() < 0.5
    return Collection(batch, tuple(
        (min(rng.choice((1000, 30_000, 300_000)), most_rows),
         rng.choice((16, 32, 64, 128)) if mixed else dim, rng.choice((1, 1, 2, 5, 20, 60)))
        for _ in range(count)
    ))  # fmt: skip


def fused_samples(clock: DeviceClock, count: int, deadline: float) -> Iterator[Sample]:
    """Yield kind, sizes, microseconds and kernels of calls of random collections."""
    rng, device = random.Random(3), str(clock.device)
    gpu = None if device == "cpu" else name_here(clock.device)
    small = device == "cpu"
    for _ in range(count):
        if time.monotonic() > deadline:
            return
        sizes = random_collection(rng, 10_000 if small else 300_000, 16 if small else 200)
        with unallocated():
            described = _pooled(sizes, "cpu")
        module, described_inputs = _pooled(sizes, device), sizes.inputs(0, "cpu")
        inputs = sizes.inputs(0, device)
        forward = list(_native(clock, gpu, described, module, described_inputs, inputs, False))
        yield from forward
        if not small and forward:
            for kind, sizes_of_call, us, kernels in _native(
                clock, gpu, described, module, described_inputs, inputs, True
            ):
                if "backward" in kind and us > forward[0][2]:
                    yield kind, sizes_of_call, us - forward[0][2], max(kernels - forward[0][3], 1.0)


def _pooled(sizes: Collection, device: str) -> Any:
    return recfuse_nn.FusedEmbeddingBagList(list(sizes.bags(device)))


def _native(
    clock: DeviceClock,
    gpu: str | None,
    described: Any,
    module: Any,
    described_inputs: Any,
    inputs: Any,
    training: bool,
) -> Iterator[Sample]:
    """Yield the last operator of recfuse in a call, with the time of all kernels of recfuse that
    the call launches.

    The call is traced on the CPU with ``described`` and ``described_inputs``, and measured with ``module``
    and ``inputs``.
    """

    def call(called: Any, batch: Any) -> None:
        with torch.set_grad_enabled(training):
            pooled = called.pool(*batch)
            if training:
                for parameter in called.parameters():
                    parameter.grad = None
                torch.autograd.backward(pooled, [torch.ones_like(output) for output in pooled])

    tracer = Tracer(gpu, training, KeptState())
    operators, _ = run_traced(tracer, lambda: call(described, described_inputs), described)
    native = [operator for operator in operators if operator.kind and operator.kind.startswith("recfuse")]
    us, kernels = clock.active(lambda: call(module, inputs), prefix="rf_")
    of_kind = [operator for operator in native if operator.kind == native[-1].kind]
    if len(of_kind) == 1 and us > 0:  # otherwise the time covers several calls
        yield native[-1].kind or "", native[-1].sizes, us, max(kernels, 1.0)
