"""librecfuse.so as torch loads it: operators without the Python package, values, errors, leaks, threads, fork."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import embedding_bag as torch_embedding_bag

import recfuse

OPS = torch.ops.recfuse
ROWS, DIM, LOOKUPS, BAGS = 100, 12, 60, 7

Inputs = dict[str, Any]


def one_table(**changes: Any) -> Inputs:
    """Arguments of torch.ops.recfuse.embedding_bag: 7 bags of uneven length, one of them empty."""
    torch.manual_seed(1)
    arguments: Inputs = {
        "weight": torch.randn(ROWS, DIM),
        "indices": torch.randint(0, ROWS, (LOOKUPS,)),
        "offsets": torch.tensor([0, 5, 5, 20, 33, 34, 50]),
        "mode": "sum",
    }
    return {**arguments, **changes}


def two_tables(**changes: Any) -> Inputs:
    """Arguments of torch.ops.recfuse.fused_embedding_bag: two tables in one buffer, sum and mean."""
    torch.manual_seed(2)
    arguments: Inputs = {
        "buffers": [torch.randn(50 * 4 + 30 * 8)],
        "features": torch.tensor([[0, 0, 50, 4, 0, -1, 0], [0, 200, 30, 8, 1, -1, 4]]),
        "indices": torch.randint(0, 30, (40,)),
        "offsets": torch.tensor([0, 3, 3, 10, 20, 25, 40]),
        "output_dim": 12,
    }
    return {**arguments, **changes}


def expected_one(arguments: Inputs) -> torch.Tensor:
    """torch's own embedding_bag on the same arguments."""
    weights = arguments.get("per_sample_weights")
    return torch_embedding_bag(
        arguments["indices"].long(),
        arguments["weight"],
        arguments["offsets"].long(),
        mode=arguments["mode"],
        per_sample_weights=None if weights is None else weights.float(),
    )


def expected_two(arguments: Inputs) -> torch.Tensor:
    """The two tables of `two_tables`, one after the other."""
    columns = []
    bags = (arguments["offsets"].numel() - 1) // 2
    for feature, mode in enumerate(("sum", "mean")):
        buffer, start, rows, dim = arguments["features"][feature, :4].tolist()
        table = arguments["buffers"][buffer].float()[start : start + rows * dim].view(rows, dim)
        offsets = arguments["offsets"].long()[feature * bags : (feature + 1) * bags + 1]
        indices = arguments["indices"].long()[offsets[0] : offsets[-1]]
        columns.append(
            torch_embedding_bag(indices, table, offsets - offsets[0], mode=mode, include_last_offset=True)
        )
    return torch.cat(columns, 1)


def run_alone(script: str, *arguments: str) -> str:
    """Runs `script` in a process whose path does not hold the package; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_works_without_the_python_package() -> None:
    script = """
        import sys
        import torch
        torch.ops.load_library(sys.argv[1])
        ops = torch.ops.recfuse
        table, indices, offsets = torch.randn(50, 16), torch.randint(0, 50, (90,)), torch.arange(0, 90, 9)
        found = ops.embedding_bag(table, indices, offsets)
        torch.testing.assert_close(found, torch.nn.functional.embedding_bag(indices, table, offsets))
        features = torch.tensor([[0, 0, 50, 16, 1, -1, 0]])
        ends = torch.cat([offsets, torch.tensor([90])])
        torch.testing.assert_close(ops.fused_embedding_bag([table.view(-1)], features, indices, ends, 16), found)
        try:
            ops.embedding_bag(table, indices + 50, offsets)
        except RuntimeError as error:
            print(error)
        assert not [name for name in sys.modules if name.startswith("recfuse")]
    """
    assert run_alone(script, recfuse.library_path()).startswith("IndexError: recfuse.embedding_bag: ")


def test_a_second_copy_leaves_the_first_in_charge(tmp_path: Path) -> None:
    copy = shutil.copy(recfuse.library_path(), tmp_path / "copy.so")
    script = """
        import sys
        import torch
        for path in sys.argv[1:]:
            torch.ops.load_library(path)
        table, indices, offsets = torch.randn(50, 16), torch.randint(0, 50, (90,)), torch.arange(0, 90, 9)
        found = torch.ops.recfuse.embedding_bag(table, indices, offsets)
        torch.testing.assert_close(found, torch.nn.functional.embedding_bag(indices, table, offsets))
    """
    run_alone(script, recfuse.library_path(), recfuse.library_path(), str(copy))


def test_strings_come_back() -> None:
    assert OPS.cpu_isa() in {"avx512", "avx2", "neon", "scalar"}
    assert OPS.library_version() == recfuse.__version__


LAYOUTS: dict[str, Inputs] = {
    "contiguous": {},
    "weight transposed": {"weight": torch.randn(DIM, ROWS).t()},
    "weight with wide rows": {"weight": torch.randn(ROWS, 2 * DIM)[:, 3 : 3 + DIM]},
    "weight with strided columns": {"weight": torch.randn(ROWS, 2 * DIM)[:, ::2]},
    "weight one row expanded": {"weight": torch.randn(1, DIM).expand(ROWS, DIM)},
    "weight overlapping": {"weight": torch.randn(ROWS + DIM).as_strided((ROWS, DIM), (1, 1))},
    "weight of one column": {"weight": torch.randn(ROWS, 3)[:, 1:2]},
    "indices strided": {"indices": torch.randint(0, ROWS, (2 * LOOKUPS,))[::2]},
    "indices int32": {"indices": torch.randint(0, ROWS, (LOOKUPS,), dtype=torch.int32)},
    "indices expanded": {"indices": torch.tensor([3]).expand(LOOKUPS)},
    "offsets strided": {"offsets": torch.arange(0, LOOKUPS)[::10]},
    "offsets int32": {"offsets": torch.tensor([0, 7, 7, 20], dtype=torch.int32)},
    "sample weights strided": {"per_sample_weights": torch.rand(3 * LOOKUPS)[::3]},
    "sample weights float16": {"per_sample_weights": torch.rand(LOOKUPS).half()},
    "sample weights bfloat16": {"per_sample_weights": torch.rand(LOOKUPS).bfloat16()},
    "one offset": {"offsets": torch.tensor([0])},
    "grad": {"weight": torch.randn(DIM, ROWS, requires_grad=True).t()},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    arguments = one_table(**LAYOUTS[name])
    found = OPS.embedding_bag(**arguments)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected_one(arguments))


@pytest.mark.parametrize("bags", [0, 1])
def test_empty(bags: int) -> None:
    offsets, nothing = torch.zeros(bags, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    assert OPS.embedding_bag(torch.randn(5, 3), nothing, offsets).tolist() == [[0.0] * 3] * bags
    assert OPS.embedding_bag(torch.randn(5, 0), nothing, offsets).shape == (bags, 0)
    assert OPS.embedding_bag(torch.randn(0, 3), nothing, offsets).tolist() == [[0.0] * 3] * bags


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"features": torch.stack(two_tables()["features"].unbind(1)).t()},
        {"indices": torch.randint(0, 30, (80,), dtype=torch.int32)[::2]},
        {"offsets": torch.tensor([0, 3, 3, 10, 20, 25, 40], dtype=torch.int32)},
        {"buffers": [torch.randn(200).bfloat16(), torch.randn(240).half()],
         "features": torch.tensor([[0, 0, 50, 4, 0, -1, 0], [1, 0, 30, 8, 1, -1, 4]])},
    ],
    ids=["plain", "features strided", "indices strided int32", "offsets int32", "two dtypes"],
)  # fmt: skip
def test_fused_layouts(changes: Inputs) -> None:
    arguments = two_tables(**changes)
    found = OPS.fused_embedding_bag(**arguments)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected_two(arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fused_keeps_the_dtype_that_all_buffers_have(dtype: torch.dtype) -> None:
    buffers = [two_tables()["buffers"][0].to(dtype)]
    found = OPS.fused_embedding_bag(**two_tables(buffers=buffers))
    torch.testing.assert_close(found, expected_two(two_tables(buffers=buffers)).to(dtype))


def test_no_features() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    found = OPS.fused_embedding_bag([], torch.empty(0, 7, dtype=torch.int64), nothing, torch.zeros(1).long(), 0)
    assert found.shape == (0, 0)


# What is wrong with each, and what the text must name. All of them are freed too: see the leak test.
ONE_TABLE_ERRORS: dict[str, tuple[Inputs, str]] = {
    "weight dims": ({"weight": torch.randn(5)}, "ValueError: recfuse.embedding_bag: weight has 1 dimension"),
    "weight dtype": ({"weight": torch.randn(5, 2).double()}, "TypeError: recfuse.embedding_bag: weight is float64"),
    "weight complex": ({"weight": torch.zeros(5, 2).cfloat()}, "TypeError: recfuse.embedding_bag: weight is comp"),
    "weight odd dtype": (
        {"weight": torch.zeros(5, 2).to(torch.float8_e4m3fn)},
        "TypeError: recfuse.embedding_bag: weight is another dtype",
    ),
    "indices dims": ({"indices": torch.zeros(2, 2).long()}, "ValueError: recfuse.embedding_bag: indices has 2 dim"),
    "indices dtype": ({"indices": torch.zeros(LOOKUPS)}, "TypeError: recfuse.embedding_bag: indices is float32"),
    "indices range": ({"indices": torch.full((LOOKUPS,), ROWS)}, "IndexError: recfuse.embedding_bag: "),
    "indices negative": ({"indices": torch.full((LOOKUPS,), -1)}, "IndexError: recfuse.embedding_bag: "),
    "offsets dims": ({"offsets": torch.tensor(0)}, "ValueError: recfuse.embedding_bag: offsets has 0 dim"),
    "offsets dtype": ({"offsets": torch.zeros(2).bool()}, "TypeError: recfuse.embedding_bag: offsets is bool"),
    "offsets fall": ({"offsets": torch.tensor([0, 5, 2])}, "ValueError: recfuse.embedding_bag: offsets"),
    "no last offset": (
        {"offsets": torch.zeros(0).long(), "include_last_offset": True},
        "ValueError: recfuse.embedding_bag: offsets is empty",
    ),
    "mode": ({"mode": "median"}, 'ValueError: recfuse.embedding_bag: mode is "median", must be "sum"'),
    "mode empty": ({"mode": ""}, 'ValueError: recfuse.embedding_bag: mode is ""'),
    "mode long": ({"mode": "x" * 5000}, 'ValueError: recfuse.embedding_bag: mode is "xxx'),
    "bounds_check": ({"bounds_check": "maybe"}, "ValueError: recfuse.embedding_bag: bounds_check is"),
    "prefetch": ({"prefetch_distance": -2}, "ValueError: recfuse.embedding_bag: prefetch_distance is -2"),
    "prefetch far": ({"prefetch_distance": 1 << 40}, "ValueError: recfuse.embedding_bag: prefetch_distance is"),
    "sample weights number": (
        {"per_sample_weights": torch.rand(LOOKUPS - 1)},
        "ValueError: recfuse.embedding_bag: per_sample_weights has 59 elements",
    ),
    "sample weights dtype": (
        {"per_sample_weights": torch.rand(LOOKUPS).double()},
        "TypeError: recfuse.embedding_bag: per_sample_weights is float64",
    ),
    "sample weights dims": (
        {"per_sample_weights": torch.rand(LOOKUPS, 1)},
        "ValueError: recfuse.embedding_bag: per_sample_weights has 2 dim",
    ),
    "sample weights with max": (
        {"per_sample_weights": torch.rand(LOOKUPS), "mode": "max"},
        "NotImplementedError: recfuse.embedding_bag: ",
    ),
    "padding_idx": ({"padding_idx": ROWS}, "ValueError: recfuse.embedding_bag: padding_idx is 100"),
}
TWO_TABLES_ERRORS: dict[str, tuple[Inputs, str]] = {
    "buffer dims": ({"buffers": [torch.randn(4, 4)]}, "ValueError: recfuse.fused_embedding_bag: buffers has 2 dim"),
    "buffer dtype": ({"buffers": [torch.zeros(9).int()]}, "TypeError: recfuse.fused_embedding_bag: buffers is int32"),
    "buffer strided": ({"buffers": [torch.randn(900)[::2]]}, "ValueError: recfuse.fused_embedding_bag: a tensor of"),
    "second buffer": (
        {"buffers": [torch.randn(440), torch.zeros(9).int()]},
        "TypeError: recfuse.fused_embedding_bag: buffers is int32",
    ),
    "no buffer": ({"buffers": []}, "ValueError: recfuse.fused_embedding_bag: features[0] is in buffer 0"),
    "buffer too small": ({"buffers": [torch.randn(439)]}, "ValueError: recfuse.fused_embedding_bag: features[1]"),
    "features dtype": (
        {"features": two_tables()["features"].int()},
        "TypeError: recfuse.fused_embedding_bag: features is int32 [2, 7]",
    ),
    "features width": (
        {"features": two_tables()["features"][:, :6]},
        "ValueError: recfuse.fused_embedding_bag: features is int64 [2, 6]",
    ),
    "features huge": (
        {"features": two_tables()["features"] * (1 << 60)},
        "ValueError: recfuse.fused_embedding_bag: features[",
    ),
    "offsets number": ({"offsets": torch.zeros(6).long()}, "ValueError: recfuse.fused_embedding_bag: offsets has 6"),
    "no offsets": ({"offsets": torch.zeros(0).long()}, "ValueError: recfuse.fused_embedding_bag: offsets has 0"),
    "output_dim": ({"output_dim": 11}, "ValueError: recfuse.fused_embedding_bag: "),
    "output_dim negative": ({"output_dim": -1}, "ValueError: recfuse.fused_embedding_bag: output_dim is -1"),
    "indices range": ({"indices": torch.full((40,), 30)}, "IndexError: recfuse.fused_embedding_bag: "),
    "sample weights with mean": (
        {"per_sample_weights": torch.rand(40)},
        "NotImplementedError: recfuse.fused_embedding_bag: ",
    ),
    "bounds_check": ({"bounds_check": ""}, "ValueError: recfuse.fused_embedding_bag: bounds_check is"),
}


@pytest.mark.parametrize("name", ONE_TABLE_ERRORS)
def test_errors(name: str) -> None:
    changes, text = ONE_TABLE_ERRORS[name]
    with pytest.raises(RuntimeError) as raised:
        OPS.embedding_bag(**one_table(**changes))
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize("name", TWO_TABLES_ERRORS)
def test_fused_errors(name: str) -> None:
    changes, text = TWO_TABLES_ERRORS[name]
    with pytest.raises(RuntimeError) as raised:
        OPS.fused_embedding_bag(**two_tables(**changes))
    assert str(raised.value).startswith(text)


def test_an_output_too_large_is_an_error() -> None:
    features = torch.tensor([[0, 0, 0, 1 << 40, 0, -1, 0]])
    nothing, offsets = torch.empty(0, dtype=torch.int64), torch.zeros((1 << 16) + 1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="recfuse.fused_embedding_bag: "):
        OPS.fused_embedding_bag([torch.empty(0)], features, nothing, offsets, 1 << 40)


def call_cuda_kernel(operator: Any, *arguments: Any) -> Any:
    """The kernel that the dispatcher has for CUDA tensors, on tensors of the CPU."""
    return operator.default.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *arguments)


def test_cuda_is_refused_clearly() -> None:
    one, two = one_table(), two_tables()
    with pytest.raises(RuntimeError, match=r"^NotImplementedError: recfuse.embedding_bag: no CUDA kernels"):
        call_cuda_kernel(OPS.embedding_bag, one["weight"], one["indices"], one["offsets"])
    with pytest.raises(RuntimeError, match=r"^NotImplementedError: recfuse.fused_embedding_bag: no CUDA kernels"):
        call_cuda_kernel(OPS.fused_embedding_bag, *two.values())


class Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keep")
    )  # fmt: skip


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
    values = [item for value in arguments.values() for item in (value if isinstance(value, list) else [value])]
    return [value for value in values if isinstance(value, torch.Tensor)]


def assert_no_leak(call: Callable[..., Any], arguments: Inputs, fails: bool) -> None:
    """Calls often; each argument's reference count and malloc's total must be where they were."""

    def once() -> None:
        try:
            call(**arguments)
            assert not fails
        except RuntimeError:
            assert fails

    tensors, calls = tensors_in(arguments), 600
    for _ in range(100):
        once()
    counts, before = [tensor._use_count() for tensor in tensors], allocated_bytes()
    for _ in range(calls):
        once()
    assert [tensor._use_count() for tensor in tensors] == counts
    # The smallest thing that can leak, the 8-byte box of an optional, takes 32 bytes of malloc.
    assert allocated_bytes() - before < calls * 16


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


def test_no_leak_on_the_cuda_key() -> None:
    table = one_table(per_sample_weights=torch.rand(LOOKUPS))

    def call(weight: Any, indices: Any, offsets: Any, mode: Any, per_sample_weights: Any) -> Any:
        return call_cuda_kernel(OPS.embedding_bag, weight, indices, offsets, mode, per_sample_weights)

    assert_no_leak(call, table, fails=True)


def test_no_leak_of_strings() -> None:
    assert_no_leak(OPS.cpu_isa, {}, fails=False)
    assert_no_leak(OPS.library_version, {}, fails=False)


def test_threads() -> None:
    """Eight Python threads at once, good calls and bad: each gets its own result and its own text."""

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(ROWS, DIM, generator=generator)
        for _ in range(50):
            indices = torch.randint(0, ROWS, (LOOKUPS,), generator=generator)
            arguments = one_table(weight=weight, indices=indices)
            torch.testing.assert_close(OPS.embedding_bag(**arguments), expected_one(arguments))
            indices[seed] = ROWS + seed
            with pytest.raises(RuntimeError, match=rf"^IndexError: .*\b{ROWS + seed}\b"):
                OPS.embedding_bag(**arguments)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def _pool_in_child(results: Any) -> None:
    torch.manual_seed(3)
    table, indices = torch.ones(1000, 64), torch.randint(0, 1000, (100_000,))
    found = OPS.embedding_bag(table, indices, torch.arange(0, 100_000, 100), "sum")
    results.put(bool((found == 100).all()))


def test_fork() -> None:
    """A forked child computes, even where its parent has run torch's threads before."""
    torch.ones(1_000_000).exp()
    table, indices = torch.ones(1000, 64), torch.randint(0, 1000, (100_000,))
    OPS.embedding_bag(table, indices, torch.arange(0, 100_000, 100), "sum")
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_pool_in_child, args=(results,))
    child.start()
    child.join(60)
    hangs = child.is_alive()
    child.kill()
    assert not hangs
    assert child.exitcode == 0
    assert results.get() is True
