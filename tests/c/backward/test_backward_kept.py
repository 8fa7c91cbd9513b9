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
from recfuse.nn.collection_view import FeatureForm, native_call_of
from support.c_program import COMPILER, SANITIZERS
from support.cuda_program import Build

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc, gcc or $CC)")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first command that wants a kernel leaves it to the others."""
    return tmp_path_factory.mktemp("backward_kernels")


COMMANDS = ("backward_bounded", "backward_graphs", "backward_held", "backward_threads")


@pytest.mark.parametrize(
    ("command", "kind"),
    [("backward_kept", "plain"), *itertools.product(COMMANDS, ("plain", *SANITIZERS))],
)
def test_what_calls_keep(cuda_build: Build, cache: Path, command: str, kind: str) -> None:
    program = cuda_build(kind).beside_empty_kernels()
    program.add_nvrtc()
    program.run(command, cache=cache, gpu=True)


COMPILE = """
import importlib.util, sys
import torch  # librecfuse.so needs its libraries
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)
from numpy import array, int64
buffers, features, dtype, stride = eval(sys.argv[2])
for optimizer in (-1, int(sys.argv[3])):
    call = buffers, array(features, int64), dtype, stride
    _C.fused_embedding_bag_training_compile("sm_90a", call, 1, 1, False, optimizer, False)
"""


@pytest.mark.parametrize("rows, optimizer", ((1000, 3), (20000, 2)))
def test_what_is_compiled_ahead_is_all_that_training_takes(
    cuda_build: Build, tmp_path: Path, rows: int, optimizer: int
) -> None:
    """The tables of test_backward.c, from `recfuse compile`'s function to calls where nothing is compiled.
    The function runs in a process where the module and the library lie beside the empty kernels.
    """
    program = cuda_build("plain").beside_empty_kernels()
    program.add_nvrtc()
    module = program.path.with_name(Path(_C.__file__).name)
    for file in (module.name, "librecfuse.so"):
        shutil.copy2(Path(_C.__file__).with_name(file), module.with_name(file))
    tables = [FeatureForm(rows, dim, torch.float32, "sum", False) for dim in (8, 16, 8, 16)]
    buffers, features, *rest = native_call_of(tables)
    call = repr((buffers, features.tolist(), *rest))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, module, call, str(optimizer)],
        env=program.environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    program.run("backward_training", str(rows), str(optimizer), cache=tmp_path, gpu=True, RECFUSE_JIT="off")
