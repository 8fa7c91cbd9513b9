"""Kernels without a compile entry of their own, through NVRTC for three architectures: no GPU needed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support.kernels import NVRTC, compile_log

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        NVRTC["nvrtc"] is None and "CI" not in os.environ, reason=f"no NVRTC: {NVRTC['missing']}"
    ),
]

INTEGERS = ("int", "rf_i64")
VARIANTS = [
    *(
        ("families/pin_rows/pin_rows.cu", f"-DRF_INDEX={index} -DRF_KEEP={keep}")
        for index in INTEGERS
        for keep in (0, 1)
    ),
    *(
        ("families/fused_embedding_bag/partition/map.cu", f"-DRF_OFFSET={offset} -DRF_BLOCK=1024")
        for offset in INTEGERS
    ),
    *(  # a vector of many elements, and of one
        (
            "families/ikbo_linear/broadcast_add.cu",
            f"-DRF_DTYPE={dtype} -DRF_VECTOR={vector} -DRF_INDEX={index}",
        )
        for dtype, vector, index in ((0, 16, "int"), (1, 16, "rf_i64"), (2, 2, "int"), (3, 16, "rf_i64"))
    ),
    *(
        (
            "families/fused_embedding/fused_embedding.cu",
            f"-DRF_LAYOUT={layout} -DRF_INDEX={index} -DRF_OFFSET={offset} -DRF_FEATURES={features}",
        )
        for layout, index, offset, features in (
            (0, "int", "rf_i64", 448),
            (1, "rf_i64", "rf_i64", 55),
            (2, "rf_i64", "int", 16),
        )
    ),
    *(("families/ikbo_attention/packed/packed.cu", f"-DRF_VECTOR={vector}") for vector in (2, 4, 8, 16)),
]

CASES = [
    (*variant, arch)
    for number, variant in enumerate(VARIANTS)
    for arch in ("sm_90a", ("sm_80", "sm_100")[number % 2])
]
"""Every variant for sm_90a; those of each file in turns for the other two."""


@pytest.mark.parametrize(("file", "defines", "arch"), CASES)
def test_without_spills(file: str, defines: str, arch: str) -> None:
    log = compile_log(file, arch, defines)
    assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}  # of each kernel in the file


def test_a_wrong_kernel_is_found(tmp_path: Path) -> None:
    (tmp_path / "common.cuh").write_text("")
    (tmp_path / "wrong.cu").write_text("__global__ void wrong() { undeclared(); }")
    with pytest.raises(AssertionError, match="undeclared"):
        compile_log("wrong.cu", "sm_90a", "", tmp_path)
