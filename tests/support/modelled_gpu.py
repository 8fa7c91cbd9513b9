"""A GPU modelled by formulas, for tests of the tuner of collections; and a collection for it."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import numpy as np
import torch

from recfuse import _C
from recfuse.nn import FusedEmbeddingBagCollection, Table
from recfuse.tuner.collection import problem as fused_problem
from recfuse.tuner.collection import search
from recfuse.tuner.collection.problem import FusedBench, FusedProblem

POOL, COLUMNS, STAGED = 1, 2, 3
BEST_WARPS = 28  # both more and fewer are candidates


def collection_of(dims=(16, 32), each=12, rows=200, mode="sum"):
    tables = [Table(rows, dim, mode=mode) for dim in dims for _ in range(each)]
    return FusedEmbeddingBagCollection(tables)


def calls(collection, number=3, bags=8, longest=40, seed=0, rows=200, integer=torch.int32):
    """Batches in which a third of the features is one-hot, one is always empty, and the others are long."""
    generator = torch.Generator().manual_seed(seed)
    features = len(collection.feature_names)
    batches = []
    for _ in range(number):
        lengths = torch.randint(longest // 2, longest, (features, bags), generator=generator)
        lengths[::3] = 1
        lengths[1] = 0
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)))
        indices = torch.randint(0, rows, (int(offsets[-1]),), generator=generator)
        batches.append((indices.to(integer), offsets.to(integer)))
    return batches


class FakeGPU:
    """A device on which a formula gives the time of a feature's blocks, and a launch takes the time of its
    blocks."""

    def __init__(self):
        self.noise = 0.003
        self.random = np.random.default_rng(0)
        self.spilling = lambda row, warps: row[2] * 4 + 24 > 65536 // (32 * warps or 1024)
        self.broken_to_compile = self.broken_to_run = lambda row, warps: False
        self.compile_s = 0.0
        self.weighted = False  # calls have per-sample weights
        self.lowered, self.compiled, self.timed, self.raced = [], [], [], []

    def candidates(self, call, feature):
        _, features, _, columns = call
        assert features.shape[1] == 7 and features.dtype == np.int64 and columns > 0
        lanes = int(features[feature, 3]) // 4
        pool = [
            (POOL, threads, distance, split, 0)
            for threads in (lanes, 2 * lanes, 4 * lanes, 8 * lanes)
            for distance in (1, 2, 4, 8, 16)
            for split in (1, 2, 4)
            if threads <= 64
        ]
        return [*pool, (COLUMNS, 1, 1, 1, 0), (STAGED, 0, 0, 0, 0)]

    def lower(self, arch, call, index, offset, weighted, check, sets, warps, timed):
        assert (arch, index, offset, weighted, check) == ("sm_90a", 0, 0, self.weighted, True)
        assert sets.dtype == np.int32 and sets.ndim == 3 and sets.shape[2] == 5
        assert sets.shape[1] == len(call[1]) and sets.flags.c_contiguous
        rows = {tuple(row) for row in sets[:, :, :4].reshape(-1, 4).tolist()}
        self.lowered.append((warps, timed, rows))
        launch = {"gpu": {"arch": arch}, "file": "fused.cu", "kernel": "rf", "defines": len(self.lowered) - 1}
        return [launch], len(rows)

    def compile(self, arch, file, kernel, defines):
        assert (arch, file, kernel) == ("sm_90a", "fused.cu", "rf")
        time.sleep(self.compile_s)
        warps, timed, rows = self.lowered[defines]
        self.compiled.append((warps, timed, len(rows)))
        if any(self.broken_to_compile(row, warps) for row in rows):
            raise ValueError("recfuse.fused_embedding_bag: broken\nlog")
        spills = 16 * sum(bool(self.spilling(row, warps)) for row in rows)
        return {"registers": 64, "spill_bytes": spills, "seconds": 0.1, "cached": False}

    def cost(self, call, feature, row, lookups):
        kind, threads, distance, split, expected = (int(value) for value in row)
        if lookups == 0:
            return 0.0
        length, lanes = expected / 16, int(call[1][feature, 3]) // 4
        factor = 1.3
        if kind == POOL:
            factor = 1 + 0.2 * abs(np.log2(threads / lanes / self.slots(length)))
            factor *= (1 + 0.1 * abs(np.log2(distance / 4))) * (1 + 0.2 * np.log2(split))
            factor *= 1.6 if length <= 2 else 1.0
        elif kind == COLUMNS:
            factor = 0.9 if length <= 2 else 4.0
        elif kind == STAGED:
            factor = 2.0
        return factor * lookups * lanes

    @staticmethod
    def slots(length):
        return 4 if length > 16 else 1

    def costs(self, call, row_of, batches):
        features = len(call[1])
        total = np.zeros(features)
        for _, lookups, _, _, bags, _, _, output, host in batches:
            assert output and host
            memory = (np.ctypeslib.ctypes.c_int32 * (features * bags + 1)).from_address(host)
            offsets = np.ctypeslib.as_array(memory)
            assert offsets[-1] == lookups
            own = np.diff(offsets[::bags])
            total += [self.cost(call, f, row_of[f], own[f]) for f in range(features)]
        return total

    def measure(self, device, stream, call, batches, sets, warps, rounds, timed):
        assert (device, stream) == (0, 77) and sets.dtype == np.int32 and sets.flags.c_contiguous
        rows = {tuple(row) for row in sets[:, :, :4].reshape(-1, 4).tolist()}
        if any(self.broken_to_run(row, warps) for row in rows):
            raise RuntimeError("does not launch\nlog")
        costs = np.stack([self.costs(call, one, batches) for one in sets])
        if timed:
            assert rounds == 1
            self.timed.append((warps, len(sets)))
            return costs * (warps or 32) * self.random.normal(1, self.noise, costs.shape)
        self.raced.append((warps, len(sets)))
        slow = 1 + 0.1 * abs(np.log2((warps or 32) / BEST_WARPS))
        seconds = costs.sum(axis=1) / len(batches) * 1e-9 * slow
        return seconds[:, None] * self.random.normal(1, self.noise / 4, (len(sets), rounds))


def install(monkeypatch):
    """Has recfuse find this GPU; returns it."""
    fake = FakeGPU()
    for name in ("candidates", "lower", "measure"):
        monkeypatch.setattr(_C, f"fused_embedding_bag_{name}", getattr(fake, name), raising=False)
    monkeypatch.setattr(_C, "kernel_compile", fake.compile)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(fused_problem, "_check_kernel", lambda packed: None)
    monkeypatch.setattr(fused_problem, "size_of", lambda device: (132, True))
    monkeypatch.setattr(search, "architecture", lambda device: "sm_90a")
    return fake


def best_rows(device, collection):
    """Returns the candidates with the least time by the formula."""
    problem = FusedProblem.of(collection, calls(collection))
    bench, rows = FusedBench(problem), problem.defaults()
    for feature in range(len(rows)):
        options = bench.candidates(feature)
        options[:, -1] = problem.expected_sixteenths[feature]
        costs = [device.cost(bench.call, feature, one, 1) for one in options]
        rows[feature] = options[int(np.argmin(costs))]
    return rows
