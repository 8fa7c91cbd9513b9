"""Tiny calls of every kind of kernel, for compute-sanitizer:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=python:tests
    compute-sanitizer --tool memcheck python3 tests/gpu/sanitizer.py

Or racecheck, initcheck. Exits with 1 if a result is wrong. All data that our kernels read are copied from the
CPU, because initcheck sees copies even if it skips torch's kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

import recfuse
from support.gpu import DTYPES, MISSING, Case, Problem

LENGTHS = (0, 3, 70, 1, 0, 33)
STATIONS = ("none", "register distance=3", "shared distance=2", "local distance=2", "l1 distance=3")


def cases() -> Iterator[Case]:
    """Less than 40 variants."""
    few = Case(lengths=LENGTHS, rows=7)
    for number, station in enumerate(STATIONS):
        for turn, threads in enumerate((32, 128)):
            schedule = f"station={station} threads={threads} block=128 segment=32 parts={1 + 3 * turn}"
            yield few.but(dim=40, dtype=DTYPES[(number + turn) % 3], schedule=schedule)
            mode = ("mean", "max")[turn]
            yield few.but(dim=9, padding=5, mode=mode, schedule=schedule.replace("shared", "l1"))
    for number, dtype in enumerate(DTYPES):
        yield few.but(dim=(1, 50, 300)[number], dtype=dtype, index=torch.int32, offset=torch.int32)
        yield few.but(dim=33, dtype=dtype, mode="max", bounds="off")
    for number, lengths in enumerate(((1,) * 40, LENGTHS)):
        yield few.but(dim=(20, 128)[number], lengths=lengths, schedule="bags=4")
        yield few.but(dim=8, lengths=lengths, mode="mean", padding=5, schedule="bags=32 block=32")
    yield few.but(dim=16, weighted=True)
    yield few.but(dim=16, weighted=True, padding=3, schedule="threads=64 parts=2")


class CopiedProblem(Problem):
    """The table is laid out on the CPU, and comes by one copy."""

    def _placed(self) -> torch.Tensor:
        return self.weight.to("cuda")


def main() -> int:
    """Runs all of it; the exit status."""
    if MISSING is not None:
        print(MISSING, file=sys.stderr)
        return 2
    count = wrong = 0
    for case in cases():
        problem = CopiedProblem(case)
        count += 1
        try:
            problem.check(problem.run())
        except AssertionError as error:
            wrong += 1
            print(f"{case}: {error}", file=sys.stderr)
    problem = CopiedProblem(Case(lengths=LENGTHS, rows=7, dim=40))
    for change in ({"indices": problem.indices.add(4)}, {"offsets": problem.offsets.sub(1)}):
        problem.run(**{name: value.to("cuda") for name, value in change.items()})
        try:
            recfuse.check()
        except (IndexError, ValueError):
            continue
        wrong += 1
        print(f"bad {next(iter(change))} were not found", file=sys.stderr)
    for keep in (recfuse.pin_rows, recfuse.unpin):
        keep(problem.table, torch.tensor([0, 3, 6]).to("cuda"))
    recfuse.check()
    print(f"{count} calls, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
