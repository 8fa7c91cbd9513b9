"""Tiny fused calls of every kind of schedule, for compute-sanitizer; as sanitizer.py otherwise:

export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=python:tests
compute-sanitizer --tool memcheck python3 tests/gpu/fused_sanitizer.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

import recfuse
from support.fused import Problem, every_mode
from support.gpu import DTYPES, INTEGERS, MISSING
from support.gpu_fused import Fused, bags_of
from support.reference import Feature

DIMS = (4, 8, 17, 64, 300)
MANY = [3 + number % 700 for number in range(402)]  # rows of many tables


class Copied(Fused):
    """Weights come by one copy from the CPU, which initcheck sees."""

    def __init__(self, problem: Problem, schedules: object = None, warps: int = 0) -> None:
        super().__init__(problem, 0, schedules, warps)
        self.weights = [weight.to("cuda") for weight in problem.weights]


def problems() -> Iterator[tuple[Copied, bool]]:
    """Yields problems and whether they are weighted."""
    for number, dtype in enumerate(DTYPES):
        specs = [(7 + dim % 5, dim, dtype) for dim in DIMS]
        yield Copied(Problem(specs, every_mode(specs))), False
        rows = [[0, 0, 0, 0, 40]] * (len(specs) + 2)
        yield Copied(Problem(specs, every_mode(specs)), rows, (0, 8, 64)[number]), False
        for kind in ([2, 0, 0, 0], [1, 64, 2, 1], [1, 64, 16, 4], [1, 0, 1, 1]):
            tables = [Feature(n, ("sum", "mean")[n % 2], 1 if n == 2 else None) for n in range(3)]
            few = Problem([(7, dim, dtype) for dim in DIMS[:3]], tables)
            yield Copied(few, [[*kind, 40]] * 3), False
        narrow = Problem([(8 * n, dim, dtype) for n, dim in ((1, 8), (9, 4), (500, 8))], lead=32, gap=32)
        yield Copied(narrow, [[3, 0, 0, 0, 40]] * 3), False
        yield Copied(Problem(specs), rows[: len(specs)]), True


def train(rows: list[int], optimizer: Any) -> None:
    """A backward pass over tables of that many rows: gradients, or the updates of an optimizer."""
    collection = recfuse.nn.FusedEmbeddingBagCollection(
        [(size, (4, 8)[number % 2]) for number, size in enumerate(rows)]
    ).to("cuda")
    updates = optimizer and optimizer(collection.parameters(), lr=0.1)
    indices, offsets = bags_of([[3, 2, 0]] * len(rows), rows)
    collection(indices.to("cuda"), offsets.to("cuda")).sum().backward()
    if updates is not None:
        updates.step()


def main() -> int:
    """Runs all of it; the exit status."""
    if MISSING is not None:
        print(MISSING, file=sys.stderr)
        return 2
    torch.manual_seed(1)
    count = wrong = 0
    for number, (one, weighted) in enumerate(problems()):
        rows = [one.problem.tables[feature.table].shape[0] for feature in one.problem.features]
        for lengths in ([0, 3, 70, 1], [0, 0], [1, 1, 1]):
            indices, offsets = bags_of([lengths] * len(rows), rows)
            given = indices.to(INTEGERS[number % 2]), offsets.to(INTEGERS[number // 2 % 2])
            factors = torch.rand(indices.numel()) if weighted else None
            for mapping in (None, one.map(offsets)):
                count += 1
                try:
                    one.run_and_check(*given, factors, mapping=mapping)
                except AssertionError as error:
                    wrong += 1
                    print(f"problem {number}: {error}", file=sys.stderr)
    given = bags_of([[3, 2]] * len(rows), rows)
    columns = Copied(one.problem, [[2, 0, 0, 0, 40]] * len(rows))
    staged = Copied(
        Problem([(8, 8, torch.float32)] * len(rows), lead=32, gap=32), [[3, 0, 0, 0, 40]] * len(rows)
    )
    for victim in (one, columns, staged):
        for bad in ((given[0] + 50, given[1]), (given[0], given[1] - 1), (given[0], given[1] * 3)):
            for mapping in (None, victim.map(given[1])):
                victim.run(*bad, mapping=mapping)
                try:
                    recfuse.check()
                except (IndexError, ValueError):
                    continue
                wrong += 1
                print("bad contents were not found", file=sys.stderr)
    # initcheck regards page-locked memory that the host has written as uninitialised.
    if sys.argv[1:] != ["initcheck"]:
        for rows, optimizer in (
            ([9] * 2, None),
            ([9] * 2, recfuse.optim.SGD),
            (MANY, recfuse.optim.RowWiseAdagrad),
        ):
            train(rows, optimizer)
    recfuse.check()
    print(f"{count} calls, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
