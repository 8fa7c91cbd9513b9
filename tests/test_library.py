"""librecfuse.so as torch loads it: without the Python package; values, errors, leaks, threads, fork."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import recfuse
from recfuse import _C, errors
from support.library_cases import (
    DIM,
    LAYOUTS,
    LOOKUPS,
    ONE_TABLE_ERRORS,
    OPS,
    ROWS,
    TWO_TABLES_ERRORS,
    Inputs,
    expected_one,
    expected_two,
    freed,
    one_table,
    two_tables,
)
from support.processes.fresh import run_python


def run_alone(script: str, *arguments: str) -> str:
    """Runs `script` in a process whose path does not contain the package; returns its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run_python("-c", textwrap.dedent(script), *arguments, env=environment)
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
        fused = ops.fused_embedding_bag([table.view(-1)], features, indices, ends, 16)
        torch.testing.assert_close(fused, found)
        w, users, candidates = torch.randn(4, 16), torch.randn(2, 16), torch.randn(6, 16)
        found, bias = torch.arange(6) % 2, torch.randn(4)
        linear = ops.ikbo_linear(w, 2 * w, users, candidates, found, bias, activation="relu")
        want = torch.relu(candidates @ (2 * w).t() + (users @ w.t())[found] + bias)
        torch.testing.assert_close(linear, want)
        try:
            ops.embedding_bag(table, indices + 50, offsets)
        except RuntimeError as error:
            print(error)
        assert not [name for name in sys.modules if name.startswith("recfuse")]
    """
    assert run_alone(script, recfuse.library_path()).startswith("IndexError: recfuse.embedding_bag: ")


def test_the_module_and_the_operators_share_one_state() -> None:
    """A failure in recfuse._C leaves its text in the library that torch has loaded."""
    library = ctypes.CDLL(recfuse.library_path())
    library.rf_last_error.restype = ctypes.c_char_p
    with pytest.raises(ValueError, match="hopper") as raised:
        _C.gpu("hopper")
    assert str(raised.value).endswith(library.rf_last_error().decode())
    maps = Path("/proc/self/maps").read_text()
    assert len({line.split()[-1] for line in maps.splitlines() if "librecfuse" in line}) == 1


def test_the_package_with_another_file_has_one_copy(tmp_path: Path) -> None:
    copy = shutil.copy(recfuse.library_path(), tmp_path / "other.so")
    script = """
        import sys
        import torch
        import recfuse
        from recfuse import _C
        assert recfuse.library_path() == torch.ops.recfuse.library_path() == sys.argv[1]
        assert _C.jit_status()["allowed"]
        maps = open("/proc/self/maps").read()
        assert sys.argv[1] in maps and "librecfuse.so" not in maps
    """
    environment = {**os.environ, "RECFUSE_LIBRARY": str(copy)}
    done = run_python("-c", textwrap.dedent(script), copy, env=environment)
    assert done.returncode == 0, done.stderr


def test_the_package_refuses_to_be_the_second_copy(tmp_path: Path) -> None:
    copy = shutil.copy(recfuse.library_path(), tmp_path / "copy.so")
    script = "import sys, torch; torch.ops.load_library(sys.argv[1]); import recfuse"
    done = run_python("-c", script, copy)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"ImportError: recfuse: {recfuse.library_path()} (part of the package) would be a second"
    )
    assert f"Set RECFUSE_LIBRARY={copy}" in last


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
        assert torch.ops.recfuse.library_path() == sys.argv[1]
        copy = ctypes.CDLL(sys.argv[-1])
        copy.rf_last_error.restype = ctypes.c_char_p
        assert copy.rf_unpin_all_cuda(0) != 0
        print(copy.rf_last_error().decode())
    """
    said = run_alone(
        "import ctypes\n" + textwrap.dedent(script), recfuse.library_path(), recfuse.library_path(), str(copy)
    )
    assert said.startswith(f"recfuse: {copy} is a second copy of librecfuse.so in this process")
    assert recfuse.library_path() in said


def test_a_change_of_folder_moves_nothing(tmp_path: Path) -> None:
    """Loaded by a relative path, with a relative cache: both stay the same folders."""
    shutil.copy(recfuse.library_path(), tmp_path / "librecfuse.so")
    for folder in ("kernels", "include"):  # which the library finds by its own path
        (tmp_path / folder).symlink_to(Path(recfuse.library_path()).with_name(folder))
    script = """
        import ctypes, os, sys
        import torch
        folder = os.getcwd()
        ctypes.CDLL("./librecfuse.so")
        os.chdir("/")
        os.environ["RECFUSE_LIBRARY"] = torch.ops.recfuse.library_path()
        assert os.path.samefile(os.environ["RECFUSE_LIBRARY"], folder + "/librecfuse.so")
        from recfuse import _C
        assert _C.jit_status()["folder"] == folder + "/cache"
        options = "-DRF_INDEX=int -DRF_KEEP=1"
        _C.kernel_compile("sm_80", "families/pin_rows/pin_rows.cu", "rf_pin_rows", options)
        assert os.listdir(folder + "/cache")
    """
    package = str(Path(recfuse.__file__).resolve().parents[1])
    environment = {**os.environ, "RECFUSE_CACHE_DIR": "cache", "PYTHONPATH": package}
    done = run_python("-c", textwrap.dedent(script), env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_strings_come_back() -> None:
    assert OPS.cpu_isa() in {"avx512", "avx2", "neon", "scalar"}
    assert OPS.library_version() == recfuse.__version__


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
        {"weights": [torch.randn(200).bfloat16(), torch.randn(240).half()],
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
def test_fused_keeps_the_dtype_that_all_weights_have(dtype: torch.dtype) -> None:
    weights = [two_tables()["weights"][0].to(dtype)]
    found = OPS.fused_embedding_bag(**two_tables(weights=weights))
    torch.testing.assert_close(found, expected_two(two_tables(weights=weights)).to(dtype))


def test_no_features() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    found = OPS.fused_embedding_bag(
        [], torch.empty(0, 7, dtype=torch.int64), nothing, torch.zeros(1).long(), 0
    )
    assert found.shape == (0, 0)


@pytest.mark.parametrize("name", ONE_TABLE_ERRORS)
def test_errors(name: str) -> None:
    changes, kind, detail = ONE_TABLE_ERRORS[name]
    with pytest.raises(RuntimeError) as raised:
        OPS.embedding_bag(**one_table(**changes))
    assert type(raised.value) is errors.BY_NAME[kind]
    assert str(raised.value).startswith(f"recfuse.embedding_bag: {detail}")


@pytest.mark.parametrize("name", TWO_TABLES_ERRORS)
def test_fused_errors(name: str) -> None:
    changes, kind, detail = TWO_TABLES_ERRORS[name]
    with pytest.raises(RuntimeError) as raised:
        OPS.fused_embedding_bag(**two_tables(**changes))
    assert type(raised.value) is errors.BY_NAME[kind]
    assert str(raised.value).startswith(f"recfuse.fused_embedding_bag: {detail}")


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("character", "\u00e9\u20ac\U0001f600")
def test_a_text_that_is_cut_stays_valid(shift: int, character: str) -> None:
    """The limit of 4,095 bytes falls on each byte of a character of two, three and four bytes."""
    with pytest.raises(ValueError, match=f"^.*{character}") as raised:
        OPS.embedding_bag(**one_table(mode="x" * shift + character * 3000))
    assert len(str(raised.value).encode()) > 3000


def test_freed_tensors_without_elements_are_fine() -> None:
    nothing, offsets = freed(torch.zeros(0).long()), torch.zeros(2).long()
    assert not OPS.embedding_bag(**one_table(indices=nothing, offsets=offsets)).any()


def test_an_output_too_large_is_an_error() -> None:
    features = torch.tensor([[0, 0, 0, 1 << 40, 0, -1, 0]])
    nothing, offsets = torch.empty(0, dtype=torch.int64), torch.zeros((1 << 16) + 1, dtype=torch.int64)
    with pytest.raises(MemoryError, match=r"^recfuse\.fused_embedding_bag: "):
        OPS.fused_embedding_bag([torch.empty(0)], features, nothing, offsets, 1 << 40)
    with pytest.raises(torch.OutOfMemoryError, match=r"^recfuse\.fused_embedding_bag: ") as raised:
        recfuse.fused_embedding_bag([torch.empty(0)], features, nothing, offsets, 1 << 40)
    assert isinstance(raised.value, MemoryError)


@pytest.mark.parametrize("name", sorted(errors.BY_NAME))
def test_each_status_has_a_class_of_its_own(name: str) -> None:
    found = errors.translate(RuntimeError(f"{name}: recfuse.embedding_bag: why\nException raised from x"))
    assert type(found) is errors.BY_NAME[name] and str(found) == "recfuse.embedding_bag: why"
    assert isinstance(found, RuntimeError)
    header = (Path(__file__).resolve().parents[1] / "include" / "recfuse" / "status.h").read_text()
    assert f'"{name}"' in header and len(set(errors.BY_NAME.values())) == len(errors.BY_NAME)


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
            with pytest.raises(IndexError, match=rf"^.*\b{ROWS + seed}\b"):
                OPS.embedding_bag(**arguments)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


# Created before the fork: torch's own operators hang in a child whose parent has run its threads.
TABLE, INDICES, OFFSETS = torch.ones(1000, 64), torch.arange(100_000) % 1000, torch.arange(0, 100_000, 100)


def _pool_in_child(results: Any) -> None:
    found = OPS.embedding_bag(TABLE, INDICES, OFFSETS, "sum")
    results.put([found[bag, column].item() for bag in (0, 500, 999) for column in (0, 63)])


def test_fork() -> None:
    """A forked child computes, even if its parent has run torch's threads before."""
    TABLE.exp()
    OPS.embedding_bag(TABLE, INDICES, OFFSETS, "sum")
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_pool_in_child, args=(results,))
    child.start()
    child.join(30)
    hangs = child.is_alive()
    child.kill()
    assert not hangs
    assert child.exitcode == 0
    assert results.get() == [100.0] * 6
