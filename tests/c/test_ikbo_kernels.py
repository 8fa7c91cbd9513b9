"""The kernels of the one-launch linear layer as compiled code. Needs no GPU."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from support.kernels import BFLOAT16, FLOAT16, pipelined, standalone

pytestmark = pytest.mark.long

# dtype, activation, index, rows of a block, blocks of a cluster, slots, joined, weights in place
VARIANTS = [
    (FLOAT16, 0, "rf_i64", 224, 2, 5, 0, 0),
    (FLOAT16, 2, "int", 224, 2, 5, 0, 0),
    (BFLOAT16, 3, "rf_i64", 192, 2, 6, 0, 0),
    (FLOAT16, 1, "int", 160, 1, 7, 0, 0),
    (FLOAT16, 0, "rf_i64", 96, 1, 10, 0, 0),
    (BFLOAT16, 0, "rf_i64", 64, 1, 12, 0, 0),
    (FLOAT16, 0, "rf_i64", 224, 2, 7, 1, 0),
    (BFLOAT16, 2, "int", 224, 2, 7, 1, 1),
    (BFLOAT16, 3, "rf_i64", 192, 2, 8, 1, 1),
    (FLOAT16, 1, "int", 64, 1, 12, 1, 0),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant)))
def test_tensor_core_products_are_consecutive(
    variant: tuple[int, int, str, int, int, int, int, int], tmp_path: Path
) -> None:
    """wgmma and the tensor memory accelerator; nothing spilled, no product waits for the last (C75xx)."""
    names = (
        "RF_DTYPE", "RF_ACTIVATION", "RF_INDEX", "RF_ROWS", "RF_RANKS", "RF_SLOTS", "RF_JOINED", "RF_DIRECT"
    )  # fmt: skip
    defines = dict(zip(names, map(str, variant), strict=True))
    text = pipelined("families/ikbo_linear/ikbo_linear_fused.cu", defines, tmp_path)
    found = Counter(re.findall(r"\b(HGMMA|UTMALDG|UTMASTG|UBLKCP|LDSM|STSM|USETMAXREG)\b", text))
    assert found["HGMMA"] == 8  # two slots of two steps for two halves
    assert {"UTMALDG", "UTMASTG", "LDSM", "USETMAXREG"} <= set(found), found
    rows, direct = variant[3], variant[7]
    assert ("UBLKCP" in found) != direct  # the instruction that copies packed weights and sums
    assert f"HGMMA.64x{rows // 2}x16.F32" in text


@pytest.mark.parametrize(
    ("dtype", "joined", "direct", "shape"),
    [
        (FLOAT16, 0, 0, (64, 1)), (FLOAT16, 0, 0, (112, 3)), (BFLOAT16, 0, 1, (64, 2)),
        (BFLOAT16, 0, 1, (112, 2)), (FLOAT16, 1, 1, (64, 1)), (FLOAT16, 1, 1, (112, 3)),
    ],
    ids=str,
)  # fmt: skip
def test_small_pieces_are_products_of_tensor_cores_too(
    dtype: int, joined: int, direct: int, shape: tuple[int, int], tmp_path: Path
) -> None:
    rows, groups = map(str, shape)
    defines = {"RF_DTYPE": str(dtype), "RF_ACTIVATION": "2", "RF_INDEX": "int", "RF_SLOTS": "12"}
    defines |= {"RF_ROWS": rows, "RF_GROUPS": groups, "RF_JOINED": str(joined), "RF_DIRECT": str(direct)}
    text = pipelined("families/ikbo_linear/small.cu", defines, tmp_path)
    found = Counter(re.findall(r"\b(HGMMA|UTMALDG|UTMASTG|UBLKCP|LDSM|STSM)\b", text))
    assert found["HGMMA"] == 4 and len(found) == 6 - direct, found  # two slots of two steps
    assert ("UBLKCP" in found) != direct
    assert f"HGMMA.64x{rows}x16.F32" in text


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
def test_packing_needs_no_stack(dtype: int, tmp_path: Path) -> None:
    log = standalone("families/ikbo_linear/pack.cu", "sm_90a", {"RF_DTYPE": str(dtype)}, tmp_path)
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log) == [("0", "0")], log


@pytest.mark.parametrize("tail", [0, 1])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
def test_adding_needs_no_stack(dtype: int, tail: int, tmp_path: Path) -> None:
    """With the products of the last rows of k and without."""
    defines = {"RF_DTYPE": str(dtype), "RF_VECTOR": "16", "RF_INDEX": "int", "RF_TAIL": str(tail)}
    log = standalone("families/ikbo_linear/broadcast_add.cu", "sm_80", defines, tmp_path)
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log) == [("0", "0")], log
