"""librecfuse.so leaves nothing behind of what it is given or makes: tensors, lists, strings, optionals."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from library_cases import (
    LAYOUTS,
    ONE_TABLE_ERRORS,
    OPS,
    TWO_TABLES_ERRORS,
    Inputs,
    one_table,
    two_tables,
)

MALLINFO_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
MALLINFO_FIELDS += ("fordblks", "keepcost")


class Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO_FIELDS)


def allocated_bytes() -> int:
    """Bytes that malloc has given out and not got back, by the main thread's arena and mmap."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("this C library has no mallinfo2")
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def tensors_in(arguments: Inputs) -> list[torch.Tensor]:
    """All tensors among the arguments, those in lists too."""
    values = [
        item for value in arguments.values() for item in (value if isinstance(value, list) else [value])
    ]
    return [value for value in values if isinstance(value, torch.Tensor)]


def assert_no_leak(
    call: Callable[..., Any], arguments: Inputs, fails: bool, bytes_per_call: int = 16
) -> None:
    """Calls often; each argument's reference count and malloc's total must be where they were.

    The smallest thing that can leak, the 8-byte box of an optional, takes 32 bytes of malloc.
    """

    def once() -> None:
        try:
            call(**arguments)
            assert not fails
        except RuntimeError:
            assert fails

    tensors, calls, rounds = tensors_in(arguments), 300, 3
    once()
    counts, growth = [tensor._use_count() for tensor in tensors], []
    for _ in range(rounds):
        before = allocated_bytes()
        for _ in range(calls):
            once()
        growth.append(allocated_bytes() - before)
    assert [tensor._use_count() for tensor in tensors] == counts
    # A leak shows in every round; what Python and torch set up once in a while does not.
    assert min(growth) < calls * bytes_per_call


@pytest.mark.parametrize("name", [*LAYOUTS, *ONE_TABLE_ERRORS])
def test_no_leak(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    changes = LAYOUTS[name] if name in LAYOUTS else ONE_TABLE_ERRORS[name][0]
    assert_no_leak(OPS.embedding_bag, one_table(**changes), fails=name in ONE_TABLE_ERRORS)


@pytest.mark.parametrize("name", ["", *TWO_TABLES_ERRORS])
def test_no_leak_fused(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    changes = TWO_TABLES_ERRORS[name][0] if name else {}
    assert_no_leak(OPS.fused_embedding_bag, two_tables(**changes), fails=bool(name))


def test_no_leak_with_every_optional() -> None:
    sums = two_tables()["features"].clone()
    sums[:, 4] = 0
    buffers = [torch.randn(200), torch.randn(240).half(), torch.randn(0).bfloat16()]
    sums[1, :2] = torch.tensor([1, 0])
    arguments = two_tables(features=sums, buffers=buffers, per_sample_weights=torch.rand(80).half()[::2])
    assert_no_leak(OPS.fused_embedding_bag, arguments, fails=False)


@pytest.mark.parametrize("operator", [OPS.cpu_isa, OPS.library_version])
def test_no_leak_of_strings(operator: Any) -> None:
    """libtorch before 2.15 does not free the string that a kernel returns (48 bytes), and the kernel must not
    either, as 2.15 does. So nothing that runs often returns one."""
    bytes_per_call = 16 if torch.__version__ >= TorchVersion("2.15") else 64
    assert_no_leak(operator, {}, fails=False, bytes_per_call=bytes_per_call)
