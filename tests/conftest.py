"""Fixtures that the tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import recfuse
from recfuse import _C
from support.cuda_program import cuda_build, cuda_program  # noqa: F401  (fixtures)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests that are marked as long")


@pytest.hookimpl(tryfirst=True)  # before xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest` without a path runs all tests except long ones, in as many processes as there are cores.
    A path runs all its tests in this process, and so do -s and --pdb, which need the terminal.
    """
    option = config.option
    if hasattr(config, "workerinput") or config.args_source == pytest.Config.ArgsSource.ARGS:
        return
    if not option.markexpr and not option.all:
        option.markexpr = "not long"
    alone = option.usepdb or option.collectonly or option.capture == "no"
    if getattr(option, "numprocesses", 0) is None and not option.tx and not alone:  # 0: without xdist
        option.numprocesses, option.maxprocesses = "auto", option.maxprocesses or 16
        option.dist = "loadfile" if option.dist == "no" else option.dist
        option.loadscopereorder = False  # long files are first, see pytest_collection_modifyitems
        option.maxworkerrestart = option.maxworkerrestart or "2"  # each restart repeats the test that crashed


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_configure_node(node: Any) -> None:
    """Sends the selection to a process, to which xdist sends the options of the command line alone."""
    node.workerinput["markexpr"] = node.config.option.markexpr


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the files that have long tests: a process that ends with one leaves the others idle."""
    files = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in files)


def pytest_configure(config: pytest.Config) -> None:
    """Creates the folder of the session, which all its processes share, so that programs are compiled
    once. Inductor's cache is there too: it ignores the operators' schemas, so entries of another
    version would fail here. Runs before any test module is imported, because inductor reads the
    variable at import."""
    if hasattr(config, "workerinput"):
        config.option.markexpr = config.workerinput["markexpr"]
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


@pytest.fixture(autouse=True, scope="module")
def _operators_listed_once() -> None:
    """torch.export lists all of the dispatcher's operators again for each of their 30 namespaces, which takes
    40 ms a program. Here it lists them again only if there are others."""
    export = sys.modules.get("torch._export.utils")
    listed = getattr(export, "_materialize_cpp_cia_ops", None)
    if listed is None or listed.__module__ == __name__:
        return
    known: list[str] = []

    def list_others() -> None:
        own = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if own != known:
            listed()
            known[:] = own

    setattr(export, "_materialize_cpp_cia_ops", list_others)  # noqa: B010


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
