"""The kernels of the backward pass compile for all possible options, without spilling. Needs no GPU."""

from __future__ import annotations

import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.kernels import BFLOAT16, FLOAT16, FLOAT32, NVRTC, compile_log

FOLDER = "families/fused_backward"
GRADIENT = 0  # RF_EPILOGUE
EPILOGUES = range(5)
DTYPES = ((FLOAT32, FLOAT32, 0), (FLOAT16, FLOAT16, 1), (FLOAT32, BFLOAT16, 1), (BFLOAT16, FLOAT32, 0))
INTEGERS = [f"-DRF_INDEX={index} -DRF_OFFSET={offset}" for index, offset in
            itertools.product(("int", "rf_i64"), repeat=2)]  # fmt: skip

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        NVRTC["nvrtc"] is None and "CI" not in os.environ, reason=f"no NVRTC: {NVRTC['missing']}"
    ),
]


def options_of(epilogue: int, grad: int, weight: int, stochastic: int) -> str:
    stochastic = stochastic if epilogue != GRADIENT else 0
    return (
        f"-DRF_EPILOGUE={epilogue} -DRF_GRAD_DTYPE={grad} -DRF_WEIGHT_DTYPE={weight} -DRF_ROUND={stochastic}"
    )


def wide(key: str, value: str) -> str:
    return f"-DRF_KEY=rf_{key} -DRF_VALUE=rf_{value}"


KEYS = wide("u32", "u32"), wide("u64", "u64"), f"{wide('u32', 'u32')} -DRF_GROUPED=1"

FILES = {
    "small/lists.cu": INTEGERS,
    "small/small_rows.cu": [
        f"{options_of(epilogue, *DTYPES[(epilogue + staged + other) % 4])} -DRF_STAGED={staged}"
        for epilogue, staged, other in itertools.product(EPILOGUES, (0, 1), (0, 1))
    ],
    "bags/winners.cu": INTEGERS,
    "bags/sample_weights.cu": [
        f"{INTEGERS[dtype]} -DRF_GRAD_DTYPE={dtype} -DRF_QUANTIZED={quantized}"
        for dtype, quantized in itertools.product(range(3), (0, 1))
    ],
    "keys.cu": [
        f"{INTEGERS[entries]} {kind} -DRF_ENTRIES={entries} -DRF_ITEMS={8 - 4 * (entries % 2)}"
        for entries, kind in itertools.product(range(3), KEYS)
    ],
    "sort/sort.cu": [
        f"{wide(*words)} -DRF_DIGIT_BITS={bits} -DRF_ITEMS={items}"
        for bits, words, items in itertools.product((1, 8, 10, 11), (("u32", "u32"), ("u64", "u64")), (4, 8))
    ]
    + [
        f"{wide('u32', value)} -DRF_DIGIT_BITS=11 -DRF_ITEMS={items} -DRF_GROUPED=1"
        for value, items in itertools.product(("u32", "u64"), (4, 8))
    ],
    "rows.cu": [
        f"{options_of(epilogue, *dtypes)} {wide('u32', 'u32')} -DRF_ENTRIES={entries}"
        for epilogue, (entries, dtypes) in itertools.product(EPILOGUES, ((0, DTYPES[0]), (1, DTYPES[2])))
    ],
    "joins.cu": [options_of(epilogue, *DTYPES[epilogue % 3]) for epilogue in EPILOGUES],
    "listed.cu": [
        options_of(epilogue, *DTYPES[epilogue % 3]) for epilogue in EPILOGUES if epilogue != GRADIENT
    ],
    "unique.cu": [wide("u32", "u32"), wide("u64", "u32")],
}


# Bytes that may spill: once per chunk or task, or in rare cases.
FEW = {("sort/sort.cu", arch): 32 for arch in ("sm_80", "sm_90a")}
FEW |= {("small/small_rows.cu", arch): 16 for arch in ("sm_80", "sm_90a")}
FEW |= {("small/lists.cu", "sm_80"): 128, ("small/lists.cu", "sm_90a"): 160}


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
@pytest.mark.parametrize("file", FILES)
def test_without_spills(file: str, arch: str) -> None:
    step = 1 if arch == "sm_90a" else 3 if len(FILES[file]) > 4 else 4
    every = FILES[file][::step]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        logs = list(pool.map(lambda defines: compile_log(f"{FOLDER}/{file}", arch, defines), every))
    spilling = [
        (defines, found)
        for defines, log in zip(every, logs, strict=True)
        if max(map(int, found := re.findall(r"(\d+) bytes spill stores", log))) > FEW.get((file, arch), 0)
    ]
    assert spilling == []
