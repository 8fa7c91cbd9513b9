"""Tiny layers over users and candidates by every path, for compute-sanitizer; as sanitizer.py otherwise:

export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=python:tests
compute-sanitizer --tool memcheck python3 tests/gpu/ikbo_sanitizer.py
"""

from __future__ import annotations

import sys

import torch

import recfuse
from support.gpu import DEVICE, MISSING
from support.ikbo import Case, Problem, kernels_of

CASES = (
    Case(m=40, n=64, features=(72, 40), items=(2, 5), dtype=torch.float16, bias=True, activation="gelu"),
    Case(m=260, n=72, features=(50, 33), items=(3, 20), dtype=torch.bfloat16),
    Case(m=260, n=72, features=(64, 40), items=(1, 30), dtype=torch.bfloat16),
    Case(m=40, n=64, features=(72, 40), items=(1, 30), dtype=torch.float16, bias=True),
    Case(m=7, n=8, features=(3, 70, 9), items=(2, 3, 7), dtype=torch.bfloat16, bias=True, chain=True),
    Case(m=33, n=None, features=(9, 5), dtype=torch.float16, map_dtype=torch.int32, bias=True),
    Case(m=9, n=5, activation="silu", bias=True),
    Case(m=9, n=5, dtype=torch.float64, input_layout="odd", weight_layout="poisoned"),
)


def main(tool: str) -> int:
    """Runs all of it; the exit status."""
    if MISSING is not None:
        print(MISSING, file=sys.stderr)
        return 2
    torch.manual_seed(1)
    count = wrong = 0
    for case in CASES:
        problem = Problem(case, DEVICE)
        paths = set(kernels_of(problem))
        if tool != "initcheck":  # it does not see the writes of torch's matmuls
            paths |= {"decomposed", "broadcast"}
        for path in sorted(paths):
            count += 1
            try:
                problem.check(problem.run(path=path))
            except AssertionError as error:
                wrong += 1
                print(f"{case}, {path}: {error}", file=sys.stderr)
            good, problem.maps[-1] = problem.maps[-1], problem.maps[-1] + 100
            problem.run(path=path)
            problem.maps[-1] = good
            try:
                recfuse.check()
            except IndexError:
                continue
            wrong += 1
            print(f"{case}, {path}: a bad map was not found", file=sys.stderr)
    recfuse.check()
    print(f"{count} calls, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "memcheck"))
