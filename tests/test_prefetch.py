"""Prefetching of rows at invalid indices must end for any address."""

from __future__ import annotations

from support.processes.fresh import run_python

ENDLESS = {
    "no rows": "recfuse.embedding_bag(indices, torch.zeros(0, 4), offsets)",
    "no rows, fused": "fused(torch.zeros(0, 4))",
    "no columns": "recfuse.embedding_bag(indices, torch.zeros(3, 0), offsets)",
    "no columns, fused": "fused(torch.zeros(3, 0))",
    "address that wraps": "recfuse.embedding_bag(indices, wide, offsets)",
    "address that wraps, fused": "fused(wide)",
}
PRELUDE = """
import torch, recfuse
offsets = torch.tensor([0, 1])
wide = torch.zeros(3, 1 << 20)
# Rows below the table's address, and the last ones before it wraps.
below = [-2, -1, -(2**31)] + [-(wide.data_ptr() // wide.stride(0) // 4) - 1 - n for n in range(3)]
def fused(weight):
    rows, dim = weight.shape
    features = torch.tensor([[0, 0, rows, dim, 0, -1, 0]])
    return recfuse.fused_embedding_bag([weight], features, indices, offsets, dim)
def expect_error(name, call, integer):
    global indices
    print(name, flush=True)
    for value in (n for n in below if n >= torch.iinfo(integer).min):
        indices = torch.tensor([value], dtype=integer)
        try:
            call()
        except IndexError as error:
            assert str(value) in str(error)
        else:
            raise SystemExit("no error")
"""


def test_a_bad_index_does_not_prefetch_for_ever():
    """In a new process, which ends after a minute; the last call that it names is the endless one."""
    calls = [(integer, name) for integer in ("int32", "int64") for name in ENDLESS]
    lines = [
        f"expect_error('{name}, {integer}', lambda: {ENDLESS[name]}, torch.{integer})"
        for integer, name in calls
    ]
    program = "\n".join([PRELUDE, *lines])
    done = run_python("-c", program, timeout=60)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.splitlines() == [f"{name}, {integer}" for integer, name in calls]
