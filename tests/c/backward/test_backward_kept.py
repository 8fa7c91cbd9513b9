"""Updates of fused calls on the host of a GPU, with a driver that has no GPU (tests/c/cuda)."""

from __future__ import annotations

import itertools
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
    program = cuda_build(kind).beside_own_kernels()
    program.add_nvrtc()
    program.run(command, cache=cache, gpu=True)


@pytest.mark.parametrize("rows, optimizer", ((1000, 3), (20000, 2)))
def test_what_is_compiled_ahead_is_all_that_training_takes(
    cuda_build: Build, tmp_path: Path, rows: int, optimizer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables of test_backward.c, from `recfuse compile`'s function to calls where nothing is compiled."""
    program = cuda_build("plain").beside_own_kernels()
    program.add_nvrtc()
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path))
    tables = [FeatureForm(rows, dim, torch.float32, "sum", False) for dim in (8, 16, 8, 16)]
    for number in (-1, optimizer):
        call = native_call_of(tables), 1, 1, False, number, False
        _C.fused_embedding_bag_training_compile("sm_90a", *call)
    program.run("backward_training", str(rows), str(optimizer), cache=tmp_path, gpu=True, RECFUSE_JIT="off")
