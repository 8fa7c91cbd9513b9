"""The kernels of embedding columns compile for all possible options, without spilling. Needs no GPU."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recfuse import cli
from support.kernels import ARCHS, BFLOAT16, FLOAT16, FLOAT32, NVRTC, compile_log, disassembler, standalone

FOLDER = "families/embedding_columns"
MOST_REGISTERS = {0: 80, 1: 100}  # with tasks of bags; for the number of blocks that the kernel requests

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        NVRTC["nvrtc"] is None and "CI" not in os.environ, reason=f"no NVRTC: {NVRTC['missing']}"
    ),
]


def forward(bags: int, dtype: int, output: int, units: int = 48, check: int = 1) -> str:
    return f"-DRF_BAGS={bags} -DRF_TABLES={dtype} -DRF_OUTPUT={output} -DRF_UNITS={units} -DRF_CHECK={check}"


def compiled(file: str, arch: str, every: list[str]) -> list[tuple[str, int, int]]:
    """Returns the options, spilled bytes and registers of each."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        logs = list(pool.map(lambda defines: compile_log(f"{FOLDER}/{file}", arch, defines), every))
    found = []
    for defines, log in zip(every, logs, strict=True):
        spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", log)))
        found.append((defines, spilled, max(map(int, re.findall(r"Used (\d+) registers", log)))))
    print(*found, sep="\n")
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_without_spills(arch: str) -> None:
    every = [forward(bags, FLOAT32, FLOAT32) for bags in (0, 1)]
    if arch == "sm_90a":
        every += [forward(0, FLOAT16, FLOAT16, check=0), forward(1, BFLOAT16, BFLOAT16, units=240)]
    for defines, spilled, registers in compiled("embedding_columns.cu", arch, every):
        assert spilled == 0 and registers <= MOST_REGISTERS["RF_BAGS=1" in defines], defines


def test_tables_of_several_types() -> None:
    """All in one kernel, which may spill in rare cases."""
    ((_, spilled, _),) = compiled("embedding_columns.cu", "sm_90a", [forward(1, -1, FLOAT32, units=2016)])
    assert spilled <= 32


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_lookups_spill_few_bytes(arch: str) -> None:
    writes = [f"-DRF_WRITE={write} -DRF_CHECK={check}" for write, check in itertools.product((0, 1), (0, 1))]
    for file, every in (("lookups.cu", writes), ("scan.cu", ["-DRF_SUMS=0", "-DRF_SUMS=1"])):
        assert all(spilled <= 32 for _, spilled, _ in compiled(file, arch, every))


def test_row_loads_are_consecutive(tmp_path: Path) -> None:
    """Eight loads of 16 bytes, without a wait between them."""
    standalone(f"{FOLDER}/embedding_columns.cu", "sm_90a", {"RF_BAGS": "0"}, tmp_path)
    command = [disassembler(), "-c", str(tmp_path / "out.cubin")]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = re.findall(r"\b(LDG\.E\.128|FMUL|STG|BRA|BAR|EXIT)\b", code)
    runs = [len(list(group)) for word, group in itertools.groupby(words) if word == "LDG.E.128"]
    assert max(runs) >= 8


def test_kernels_go_into_the_cache(kernel_cache: Path) -> None:
    assert cli.main(["compile", "--arch", "sm_90a", "--columns"]) == 0
    assert len(list(kernel_cache.rglob("*.cubin"))) == 10
