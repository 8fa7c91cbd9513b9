"""IKBO layers and embedding columns on the host, with a driver that has no GPU (tests/c/cuda)."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.c_program import COMPILER
from support.cuda_program import Build

pytestmark = [pytest.mark.long, pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc, gcc or $CC)")]
COMMANDS = "ikbo_add", "ikbo_takes", "ikbo_kernel", "ikbo_small"
COMMANDS += "columns_launch", "columns_refusals", "columns_time"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that the first build fills for the other."""
    return tmp_path_factory.mktemp("launched_kernels")


@pytest.mark.parametrize("kind", ["plain", "address"])
@pytest.mark.parametrize("command", COMMANDS)
def test_launches_and_refusals(cuda_build: Build, cache: Path, kind: str, command: str) -> None:
    program = cuda_build(kind).beside_empty_kernels()
    program.add_nvrtc()
    print(program.run(command, cache=cache, gpu=True))
