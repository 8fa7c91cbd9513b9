"""Updates of fused calls on the host of a GPU, with a driver that has no GPU (tests/c/cuda)."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recfuse import _C
from recfuse.nn import Table
from recfuse.perf.described_tables import ANY_SIZE, collection_of
from recfuse.perf.described_training import TRAINING
from support.c_program import COMPILER
from support.cuda_program import Build

pytestmark = [pytest.mark.long, pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc, gcc or $CC)")]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that the first command with a kernel fills for the others."""
    return tmp_path_factory.mktemp("backward_kernels")


COMMANDS = ("backward_bounded", "backward_graphs", "backward_held", "backward_threads")
WITH_THREADS = ("backward_held", "backward_threads")
"""Commands with several threads, or with calls within calls; only in these the thread sanitizer finds
anything."""


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("backward_kept", "plain"),
        *itertools.product(COMMANDS, ("plain", "address")),
        *((command, "thread") for command in WITH_THREADS),
    ],
)
def test_caches_of_backward_calls(cuda_build: Build, cache: Path, command: str, kind: str) -> None:
    program = cuda_build(kind).beside_empty_kernels()
    program.add_nvrtc()
    program.run(command, cache=cache, gpu=True)


COMPILE = """
import importlib.util, sys
import torch  # librecfuse.so needs its libraries
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)
for kernel in eval(sys.argv[2]):
    _C.kernel_compile(*kernel)
"""


@pytest.mark.parametrize("rows, optimizer", ((1000, "adam"), (20000, "rowwise_adagrad")))
def test_training_uses_only_kernels_compiled_ahead(
    cuda_build: Build, tmp_path: Path, rows: int, optimizer: str
) -> None:
    """The tables of test_backward.c, from the kernels of `recfuse compile` to calls that compile nothing.
    Another process compiles them, with the module and the library next to the empty kernels."""
    program = cuda_build("plain").beside_empty_kernels()
    program.add_nvrtc()
    module = program.path.with_name(Path(_C.__file__).name)
    for file in (module.name, "librecfuse.so"):
        shutil.copy2(Path(_C.__file__).with_name(file), module.with_name(file))
    tables = collection_of("tables", [Table(rows, dim) for dim in (8, 16, 8, 16)], (torch.int64, torch.int64))
    calls = [call for kind in ("gradients", optimizer) for call in tables.training(kind, ANY_SIZE)]
    kernels = list(dict.fromkeys(kernel for call in calls for kernel in call.kernels("sm_90a")))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, module, repr(kernels)],
        env=program.environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    number = str(TRAINING.index(optimizer) - 1)
    program.run("backward_training", str(rows), number, cache=tmp_path, gpu=True, RECFUSE_JIT="off")
