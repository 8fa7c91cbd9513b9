"""The kernels of the one-launch attention as compiled code. Needs no GPU."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from support.kernels import BFLOAT16, FLOAT16, NVRTC, compile_log, pipelined, standalone

pytestmark = pytest.mark.long

# dtype, columns, keys of a block, slots of keys and of values, queries that move together
NAMES = ("RF_DTYPE", "RF_DIM", "RF_KEYS", "RF_K_SLOTS", "RF_V_SLOTS", "RF_SEGMENT")
VARIANTS = [
    (FLOAT16, 128, 128, 3, 2, 64),
    (BFLOAT16, 128, 128, 3, 2, 8),
    (FLOAT16, 128, 128, 3, 2, 1),
    (BFLOAT16, 32, 128, 4, 4, 16),
    (FLOAT16, 64, 128, 4, 4, 1),
    (BFLOAT16, 96, 128, 3, 2, 32),
    (FLOAT16, 96, 128, 3, 2, 1),
    (FLOAT16, 192, 64, 3, 2, 64),
    (BFLOAT16, 256, 48, 2, 2, 1),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant)))
def test_tensor_core_products_are_consecutive(
    variant: tuple[int, int, int, int, int, int], tmp_path: Path
) -> None:
    """wgmma and the tensor memory accelerator; nothing spilled, no product waits for the last (C75xx)."""
    defines = dict(zip(NAMES, map(str, variant), strict=True))
    text = pipelined("families/ikbo_attention/ikbo_attention_fused.cu", defines, tmp_path)
    dim, keys, segment = variant[1], variant[2], variant[5]
    products = Counter(re.findall(r"HGMMA\.(64x\d+x16)", text))
    assert products[f"64x{keys}x16"] >= dim // 16, products
    assert products[f"64x{dim}x16"] >= keys // 16, products
    moves = "UTMASTG" if segment > 1 else "LDGSTS"
    assert {"UTMALDG", "STSM", "USETMAXREG", moves} <= set(re.findall(r"\b[A-Z]{4,10}\b", text))


@pytest.mark.skipif(NVRTC["nvrtc"] is None and "CI" not in os.environ, reason=f"no NVRTC: {NVRTC['missing']}")
@pytest.mark.parametrize("variant", VARIANTS[:2], ids=lambda variant: "-".join(map(str, variant)))
def test_nvrtc_keeps_products_apart_too(variant: tuple[int, int, int, int, int, int]) -> None:
    """Users run code compiled by NVRTC, which has serialised products (C7511) in code in which nvcc did
    not."""
    defines = " ".join(f"-D{name}={value}" for name, value in zip(NAMES, variant, strict=True))
    log = compile_log("families/ikbo_attention/ikbo_attention_fused.cu", "sm_90a", defines)
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0"], log
    assert re.search(r"C75\d\d|C76\d\d", log) is None, log


def test_grouping_needs_no_stack(tmp_path: Path) -> None:
    log = standalone(
        "families/ikbo_attention/ikbo_attention_group.cu", "sm_90a", {"RF_BLOCK": "1024"}, tmp_path
    )
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log) == [("0", "0")], log
