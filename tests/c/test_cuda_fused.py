"""Fused calls on the host of a GPU: csrc called from C, with a driver that has no GPU (tests/c/cuda)."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.c_program import COMPILER, SANITIZERS
from support.cuda_program import Build

pytestmark = [pytest.mark.long, pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc, gcc or $CC)")]
COMMANDS = (
    "fused_bad",
    "fused_cache",
    "fused_lower",
    "fused_allocator",
    "fused_rows",
    "fused_streams",
    "fused_bounded",
    "fused_graphs",
    "fused_waiting",
    "fused_held",
    "fused_mapping",
    "fused_unexpected",
    "fused_failures",
    "fused_threads",
    "fused_measure",
)
WITH_THREADS = ("fused_lower", "fused_waiting", "fused_held", "fused_threads")
"""Commands with several threads, or with calls within calls; only in these the thread sanitizer finds
anything."""


@pytest.fixture(scope="module")
def cache(cuda_build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of all commands, compiled by the first command that needs them."""
    folder = tmp_path_factory.mktemp("fused_kernels")
    plain = cuda_build("plain").beside_empty_kernels()
    plain.add_nvrtc()
    for command in COMMANDS:
        plain.run(command, cache=folder, gpu=True)
    return folder


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (command, kind)
        for command in COMMANDS
        for kind in ("plain", *SANITIZERS)
        if kind != "thread" or command in WITH_THREADS
    ],
)
def test_fused_calls(cuda_build: Build, cache: Path, command: str, kind: str) -> None:
    cuda_build(kind).beside_empty_kernels().run(command, cache=cache, gpu=True, RECFUSE_JIT="off")


@pytest.mark.parametrize("kind", ["plain", "address"])
def test_mappings_have_every_vector_once(cuda_build: Build, tmp_path: Path, kind: str) -> None:
    cuda_build(kind).run("fused_map", "2000" if kind == "plain" else "400", cache=tmp_path)


@pytest.mark.parametrize("kind", ["plain", "address"])
def test_invalid_mappings_are_refused(cuda_build: Build, tmp_path: Path, kind: str) -> None:
    cuda_build(kind).run("fused_map_bad", cache=tmp_path)
