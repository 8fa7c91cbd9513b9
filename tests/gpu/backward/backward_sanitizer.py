"""Tiny gradients and updates of every kind, for compute-sanitizer; as ../sanitizer.py otherwise:

export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=python:tests
compute-sanitizer --tool memcheck python3 tests/gpu/backward/backward_sanitizer.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

import recfuse
from support.backward.calls import BAD, HOT, Call, features_of, numbers_of
from support.fused import Groups
from support.gpu import DTYPES, MISSING
from support.reference import Feature


def calls() -> Iterator[tuple[str, Call]]:
    """Small and large tables, in few variants of kernels."""
    for number, dtype in enumerate(DTYPES):
        torch.manual_seed(number)
        spec = [(dtype, 32, (5, 40, 300)), (dtype, (8, 48, 5)[number], (9, 17_000))]
        for summed in (True, False):
            problem = Groups(spec, features_of(5, summed))
            indices, offsets = problem.lookups(20)
            factors = torch.randn(indices.numel()) if summed and number == 0 else None
            grad = torch.randn(20, problem.output_dim).to(DTYPES[number if summed else 0])
            yield f"{dtype}, {summed}", Call(problem, grad, indices, offsets, factors)
    for name in ("one", "few of a digit"):  # digits with more entries than there is room for
        torch.manual_seed(6)
        problem = Groups([(torch.float32, 32, (17_000,))], [Feature(0, "sum", None)])
        indices, offsets = problem.lookups(200, 160)
        indices = HOT[name](17_000, indices.numel())
        yield f"hot rows: {name}", Call(problem, torch.randn(200, 32), indices, offsets)
    torch.manual_seed(7)
    features = [Feature(0, "mean", 0), Feature(1, "sum", None), Feature(2, "sum", None)]
    problem = Groups([(torch.float32, 64, (3, 700, 150))], features)
    for bags, longest in ((1, 3000), (1000, 4), (2500, 2), (600, 40)):
        indices, offsets = problem.lookups(bags, longest)
        yield f"{bags} bags", Call(problem, torch.randn(bags, problem.output_dim), indices, offsets)


def bad_calls() -> Iterator[Call]:
    for change in BAD.values():
        problem = Groups([(torch.float32, 8, (9, 30, 20_000))], features_of(3, True))
        indices, offsets = problem.lookups(9)
        change(indices, offsets)
        yield Call(problem, torch.randn(9, 24), indices, offsets)


def main() -> int:
    """Runs all of it; the exit status."""
    if MISSING is not None:
        print(MISSING, file=sys.stderr)
        return 2
    count = wrong = 0
    for name, call in calls():
        try:
            call.check_gradients()
            for kind in range(4):
                call.check_update(kind)
            if call.factors is not None:
                lookups = call.problem.rows, call.indices, call.offsets
                torch.ops.recfuse.fused_embedding_bag_sample_weights_backward(
                    call.grad, call.weights, *lookups
                )
        except AssertionError as error:
            wrong += 1
            print(f"{name}: {error}", file=sys.stderr)
        count += 1
    for call in bad_calls():
        call.gradients(False)
        call.gradients(True)
        call.update(3, call.states(3), numbers_of())
        count += 1
    torch.cuda.synchronize()
    recfuse.check()
    print(f"{count} calls, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
