"""Small calls of ikbo_attention by every path, for compute-sanitizer; as sanitizer.py otherwise:

export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=python:tests
compute-sanitizer --tool memcheck python3 tests/gpu/ikbo_attention_sanitizer.py
"""

from __future__ import annotations

import random
import sys

import torch

import recfuse
from support.gpu import DEVICE, MISSING
from support.ikbo_attention import Case, Problem

HALF, BRAIN = torch.float16, torch.bfloat16
CASES = (
    Case(sq=64, heads=2, kv_heads=2, dim=128, dtype=HALF, users=3, candidates=7, positions=200),
    Case(sq=9, dim=64, dtype=BRAIN, users=5, candidates=30, positions=300, lengths=True, self_queries=70),
    Case(sq=1, dim=128, dtype=BRAIN, users=4, candidates=150, positions=129, jagged=True, kv_layout="framed"),
    Case(sq=3, heads=6, kv_heads=1, dim=256, dtype=HALF, users=3, candidates=40, positions=70, lengths=True),
    Case(sq=16, dim=96, dtype=HALF, users=40, candidates=9, positions=20, jagged=True, self_queries=1),
    Case(
        sq=5, dim=32, dtype=BRAIN, map_dtype=torch.int32, q_layout="odd", kv_layout="poisoned", lengths=True
    ),
    Case(sq=2, dim=40, dtype=BRAIN, positions=0, self_queries=3),
    Case(sq=2, dim=24, candidates=20, positions=90, jagged=True),
    Case(sq=2, dim=64, dtype=BRAIN, users=2, candidates=70, positions=1200, lengths=True),
    Case(sq=64, dim=128, dtype=HALF, users=1, candidates=3, positions=700),
    Case(sq=9, dim=128, dtype=BRAIN, users=2, candidates=20, positions=600, peak=30.0),  # scores that grow
)


def bad(problem: Problem) -> None:
    """Makes all that is looked at bad, at its ends."""
    problem.map[0], problem.map[-1] = -1, 2**31 - 1
    for contents in (problem.lengths, problem.offsets):
        if contents is not None:
            contents[0], contents[-1] = -(2**31), 2**31 - 1


def run(problem: Problem, path: str, gradients: bool) -> None:
    """Compares it, then runs it, and its gradients, with bad contents."""
    problem.check_all(path=path)
    recfuse.check()
    bad(problem)
    for one in problem.tensors():
        one.requires_grad_(gradients)
    found = problem.run(path=path, return_lse=True)
    if gradients:
        outs = found[: len(found) // 2]
        torch.autograd.grad(sum(out.float().sum() for out in outs), problem.tensors())
    try:
        recfuse.check()
    except (IndexError, ValueError):
        return
    raise AssertionError("bad contents were not found")


def main(tool: str) -> int:
    """Runs all of it; the exit status."""
    if MISSING is not None:
        print(MISSING, file=sys.stderr)
        return 2
    count = wrong = 0
    for number, case in enumerate(CASES):
        for path in ("packed", "fused"):
            if tool == "initcheck" and path == "packed":  # it does not see the writes of torch's kernels
                continue
            torch.manual_seed(number)
            random.seed(number)
            problem = Problem(case, DEVICE)
            try:
                problem.run(path=path)
            except NotImplementedError:
                continue
            count += 1
            try:
                run(problem, path, tool != "initcheck")
            except AssertionError as error:
                wrong += 1
                print(f"{case}, {path}: {error}", file=sys.stderr)
    print(f"{count} calls, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "memcheck"))
