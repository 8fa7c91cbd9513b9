"""Fixtures that the tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import recfuse
from recfuse import _C
from support.cuda_program import cuda_build, cuda_program  # noqa: F401  (fixtures)


def pytest_configure(config: pytest.Config) -> None:
    """Creates the folder of the session, which all its processes share, so that programs are compiled
    once. Inductor's cache is there too: it ignores the operators' schemas, so entries of another
    version would fail here. Runs before any test module is imported, because inductor reads the
    variable at import."""
    if hasattr(config, "workerinput"):
        # There are as many processes as cores. Inductor's compiler and the processes of tests take a core
        # each too, and OpenMP's threads wait for each other by spinning.
        torch.set_num_threads(1)
        for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
            os.environ.setdefault(name, "1")
        return
    folder = TemporaryDirectory(prefix="recfuse-tests-")
    config.add_cleanup(folder.cleanup)
    os.environ["RECFUSE_TEST_SESSION"] = folder.name
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder.name}/inductor"


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """Excludes modules and earlier files from garbage collection and heap walks: the tests' items and
    torch's modules are a million objects, and a pass takes a third of a second."""
    gc.collect()
    gc.freeze()


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
    """No compiled state, and no error found on a GPU, enters or leaves a test."""
    from support import gpu  # begins to use CUDA

    torch.compiler.reset()
    gpu.forget_errors()
    yield
    gpu.synchronize()
    for device in gpu.used():
        recfuse.check(device)
