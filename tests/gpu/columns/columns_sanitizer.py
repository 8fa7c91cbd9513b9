"""Tiny embedding columns of every kind, for compute-sanitizer; as ../sanitizer.py otherwise:

export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=python:tests
compute-sanitizer --tool memcheck python3 tests/gpu/columns/columns_sanitizer.py
"""

from __future__ import annotations

import contextlib
import sys

import torch

from support import gpu
from support.raw_columns.problem import BFLOAT16, FLOAT16, FLOAT32
from support.raw_columns.random import Maker
from support.raw_columns.tensors import arguments


def main() -> int:
    """Runs them; returns 1 without a GPU."""
    if gpu.MISSING is not None:
        print(gpu.MISSING, file=sys.stderr)
        return 1
    types = (((FLOAT32,), FLOAT32), ((FLOAT16,), FLOAT16), ((FLOAT32, FLOAT16, BFLOAT16), FLOAT32))
    for seed in range(9):
        how = {"longest": 100, "long": 0.2} if seed % 2 else {}
        problem = Maker(seed, batch=(1, 9, 40)[seed % 3], bad=seed % 4 == 3, **how).make(20, *types[seed % 3])
        given = arguments(problem, gpu.DEVICE)
        torch.ops.recfuse.embedding_columns(*given)
        gpu.forget_errors()  # of invalid contents, which the next call would raise
        with contextlib.suppress(RuntimeError):  # bad contents that it finds while it counts
            torch.ops.recfuse._embedding_columns_lookups(given[1], *given[2:-1])
        gpu.forget_errors()
    torch.cuda.synchronize()
    print("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
