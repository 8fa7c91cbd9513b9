"""Fixtures and generators that the tests share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

import recfuse
from recfuse import _C
from support.cuda_program import cuda_build, cuda_program  # noqa: F401  (fixtures)


def pytest_configure(config: pytest.Config) -> None:
    """Gives inductor a cache of its own: what it keeps does not know the operators' schemas, so what another
    version has left there would fail here. Before any test module is imported, since inductor sets the
    variable itself.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20)


@pytest.fixture
def threads():
    """Sets the number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache of kernels for the tests of one file."""
    if _C.jit_status()["nvrtc"] is None:
        pytest.skip("no NVRTC here; pip install '.[test]' brings it")
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECFUSE_CACHE_DIR", str(folder))
        patch.delenv("RECFUSE_JIT", raising=False)
        yield folder


@pytest.fixture
def no_error_left() -> Iterator[None]:
    """Nothing compiled, or found on a GPU, goes into the test; nothing that was found comes out of it."""
    from support import gpu  # begins to use CUDA

    torch.compiler.reset()
    gpu.forget_errors()
    yield
    gpu.synchronize()
    for device in gpu.used():
        recfuse.check(device)


def ragged(rows: int, bags: int, longest: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Random lookups and the offsets of `bags` bags of 0 to `longest` of them, with the last offset."""
    lengths = torch.randint(0, longest + 1, (bags,)) if rows else torch.zeros(bags, dtype=torch.int64)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    return torch.randint(0, max(rows, 1), (int(offsets[-1]),)).to(dtype), offsets.to(dtype)


def poisoned(values: Tensor, row_gap: int = 3, lead: int = 5) -> Tensor:
    """The same [rows, dim] values as a strided view, with NaN before, behind and between the rows."""
    rows, dim = values.shape
    storage = torch.full((lead + rows * (dim + row_gap) + lead,), torch.nan, dtype=values.dtype)
    view = storage[lead : lead + rows * (dim + row_gap)].view(rows, dim + row_gap)[:, :dim]
    view.copy_(values)
    return view


def odd(values: Tensor) -> Tensor:
    """The same values at an address that is aligned to one element only."""
    storage = values.new_zeros(values.numel() + 1)
    storage[1:] = values.reshape(-1)
    return storage[1:].view(values.shape)


def at(*keys: str | int, value: Any = None, drop: bool = False) -> Callable[[Path], None]:
    """Changes a file of JSON: gives what lies at the keys another value, or drops it."""

    def change(path: Path) -> None:
        record = inner = json.loads(path.read_text())
        for key in keys[:-1]:
            inner = inner[key]
        if drop:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value
        path.write_text(json.dumps(record))

    return change
