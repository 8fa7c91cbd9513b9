"""Every family of GPU kernels compiles for the GPUs of three generations, by default without spilling; and
the text of a schedule. Needs no GPU.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import recfuse
from recfuse import _C
from support.kernels import (
    ARCHS,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT32,
    INT64,
    MAX,
    MEAN,
    SUM,
    compile_bag,
    standalone,
)

pytestmark = pytest.mark.long

DIMS = (1, 4, 7, 8, 16, 32, 50, 64, 100, 128, 132, 256, 1000)
ELEMENT_BYTES = (4, 2, 2)

Job = dict[str, Any]


def job(arch: str = "sm_90a", dim: int = 128, dtype: int = FLOAT32, **changes: Any) -> Job:
    """Arguments of `_C.embedding_bag_lower`, in their order."""
    row_bytes = dim * ELEMENT_BYTES[dtype]
    plain = {
        "arch": arch,
        "dim": dim,
        "stride": dim,
        "alignment": (row_bytes | 16) & -(row_bytes | 16),
        "dtype": dtype,
        "index": INT64,
        "offset": INT64,
        "pooling": SUM,
        "weighted": False,
        "padded": False,
        "check": True,
        "lookups": 2048 * 150,
        "bags": 2048,
        "schedule": "",
    }
    assert not changes.keys() - plain.keys() - {"rows"}
    return {**plain, **changes}


def compile_one(one: Job) -> dict[str, Any]:
    return compile_bag(*one.values())


Compile = Callable[[list[Job]], list[dict[str, Any]]]


@pytest.fixture
def compile_all(kernel_cache: Path, record_property: Callable[[str, object], None]) -> Compile:
    """Compiles jobs on all cores; prints and records the compiler's report of each."""

    def run(jobs: list[Job]) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = list(pool.map(compile_one, jobs))
        print(f"\n{'registers':>9} {'spilled':>7} {'stack':>5} {'shared':>6} {'cubin':>6}  variant")
        for one, result in zip(jobs, results, strict=True):
            numbers = [result[name] for name in ("registers", "spill_bytes", "stack_bytes", "shared_bytes")]
            print("{:9} {:7} {:5} {:6} {:6}  {}".format(*numbers, result["cubin_bytes"], name_of(one)))
            record_property(name_of(one), result["registers"])
            most_shared = _C.gpu(one["arch"])["shared_per_block"]
            assert 0 < result["registers"] <= 255 and 0 <= result["shared_bytes"] <= most_shared, one
            assert result["cubin_bytes"] > 0 and result["schedule"]
        return results

    return run


def name_of(one: Job) -> str:
    plain = job()
    differs = {name: value for name, value in one.items() if value != plain.get(name)}
    return " ".join(f"{name}={value}" for name, value in differs.items()) or "plain"


def spilling(jobs: list[Job], results: list[dict[str, Any]]) -> list[str]:
    """Returns the names of jobs that spill."""
    return [
        f"{name_of(one)}: {result['spill_bytes']} bytes spilled, {result['stack_bytes']} of stack, with "
        f"{result['registers']} registers; {result['schedule']}"
        for one, result in zip(jobs, results, strict=True)
        if result["spill_bytes"] != 0 or result["stack_bytes"] != 0
    ]


STATES = (
    {"pooling": SUM},
    {"pooling": SUM, "weighted": True},
    {"pooling": MEAN},
    {"pooling": MAX},
)
PARTS = {FLOAT32: (0, 2), FLOAT16: (1,), BFLOAT16: (3,)}


@pytest.mark.parametrize("dtype", (FLOAT32, FLOAT16, BFLOAT16), ids=("float32", "float16", "bfloat16"))
def test_every_kind_of_call_without_spills(compile_all: Compile, dtype: int) -> None:
    """Every three of the four options for one shape and arch: a half of their product in float32, the other
    half in float16 and bfloat16, which take the same registers; samples of it for the others.
    """
    jobs = []
    kinds = [
        kind
        for kind in itertools.product((INT32, INT64), STATES, (False, True), (False, True))
        if (kind[0] + STATES.index(kind[1]) + kind[2] + kind[3]) % 4 in PARTS[dtype]
    ]
    for number, (integer, state, padded, check) in enumerate(kinds):
        options = {"dtype": dtype, "index": integer, "padded": padded, "check": check, **state}
        jobs.append(job(offset=integer, **options))
        if number % 4 == dtype:
            jobs.append(job(offset=1 - integer, **options))
            jobs += [job(arch, offset=integer, **options) for arch in ("sm_80", "sm_100")]
    assert spilling(jobs, compile_all(jobs)) == []


@pytest.mark.parametrize("arch", ARCHS)
def test_every_dim_without_spills(compile_all: Compile, arch: str) -> None:
    """Plain, or with all that takes registers, for sm_90a both; in turns over dtypes and sizes of batches."""
    rich = ({"weighted": True, "padded": True}, {"pooling": MAX, "padded": True}, {"pooling": MEAN})
    sizes = ((2048 * 150, 2048), (100_000, 100_000), (50 * 150, 50), (20_000, 2048), (10**6, 1))
    jobs = []
    for number, dim in enumerate(DIMS):
        for turn, options in enumerate(({}, rich[number % 3])):
            if arch != "sm_90a" and (number + ARCHS.index(arch) // 2) % 2 != turn:
                continue
            lookups, bags = sizes[(number + turn) % len(sizes)]
            dtype = (number // 2 + turn) % 3
            jobs.append(job(arch, dim, dtype, lookups=lookups, bags=bags, **options))
    assert spilling(jobs, compile_all(jobs)) == []


@pytest.mark.parametrize("size", ((10**6, 1), (7500, 50), (600, 50), (100_000, 100_000)), ids=str)
def test_batches_of_any_size_without_spills(compile_all: Compile, size: tuple[int, int]) -> None:
    """A single bag and many tiny bags, which need other threads: rows from one vector to several slices."""
    lookups, bags = size
    jobs = [
        job(arch, dim, dtype, lookups=lookups, bags=bags, **options)
        for arch, dim, dtype, options in (
            ("sm_90a", 1, FLOAT16, {"pooling": MAX, "padded": True}),
            ("sm_100", 2, FLOAT32, {"weighted": True}),
            ("sm_90a", 4, FLOAT32, {}),
            ("sm_80", 100, FLOAT32, {"pooling": MAX, "padded": True}),
            ("sm_80", 128, FLOAT32, {"weighted": True}),
            ("sm_100", 132, FLOAT32, {"weighted": True, "padded": True}),
            ("sm_80", 256, FLOAT16, {}),
            ("sm_100", 1000, FLOAT16, {}),
            ("sm_80", 1000, BFLOAT16, {"weighted": True, "padded": True, "rows": 1 << 32}),
        )
    ]
    assert spilling(jobs, compile_all(jobs)) == []


STATION_WORDS = ("none", "register", "shared", "local", "l1")


def test_every_station_and_number_of_parts(compile_all: Compile) -> None:
    jobs = []
    pairs = itertools.product(enumerate(STATION_WORDS), enumerate((1, 2, 8, 16)))
    for (row, station), (column, parts) in pairs:
        options = {"dtype": parts % 3, "schedule": f"station={station} parts={parts}"}
        if (row + column) % 2 == 0:
            jobs.append(job(**options, **STATES[len(jobs) % 4]))
        else:
            jobs.append(job(("sm_80", "sm_100")[row % 2], 32, check=False, **options))
    results = compile_all(jobs)
    for one, result in zip(jobs, results, strict=True):
        assert one["schedule"].split()[0] in result["schedule"]
        assert f"parts={one['schedule'].split('=')[-1]} " in result["schedule"]


SCHEDULES = (
    "distance=1",
    "distance=3",
    "station=shared distance=16",
    "station=l1 distance=64",
    "station=local distance=12",
    "threads=32",
    "threads=256",
    "threads=512 block=512",
    "block=32 threads=32",
    "block=1024 threads=64 segment=32",
    "warps=8 block=256",
    "warps=1 block=32 threads=32",
    "warps=64",
    "segment=32",
    "segment=256 threads=64",
    "station=shared distance=2 threads=128 block=256 warps=16 parts=4 segment=64",
)


def test_every_field_of_a_schedule(compile_all: Compile) -> None:
    shapes = itertools.cycle(((128, FLOAT32), (100, FLOAT16), (64, BFLOAT16), (8, FLOAT32), (300, FLOAT32)))
    jobs = []
    for number, (schedule, (dim, dtype)) in enumerate(zip(SCHEDULES, shapes)):  # noqa: B905  (a cycle)
        jobs.append(job(ARCHS[number % 3], dim, dtype, schedule=schedule, **STATES[number % 4]))
    for one, result in zip(jobs, compile_all(jobs), strict=True):
        assert set(one["schedule"].split()) <= set(result["schedule"].split())


@pytest.mark.parametrize("arch", ARCHS)
def test_short_bags_without_spills(compile_all: Compile, arch: str) -> None:
    """Bags of one lookup, and of several by default: few bags, a turn a warp, and many, in eight turns.
    Each architecture compiles another of the three cases per dim."""
    states = ({}, {"pooling": MEAN, "padded": True}, {"padded": True, "rows": 1 << 32}, {"pooling": MEAN})
    jobs = []
    for number, dim in enumerate(DIMS):
        for turn, (bags, lookups) in enumerate(((10**3, 1), (10**6, 1), (10**6, 2))):
            if (number + ARCHS.index(arch)) % 3 != turn:
                continue
            options = {"dtype": (number + turn) % 3, "index": turn % 2, "check": number % 4 != 0}
            options |= states[(number // 2 + turn) % 4]
            jobs.append(job(arch, dim, lookups=lookups * bags, bags=bags, **options))
    results = compile_all(jobs)
    assert spilling(jobs, results) == []
    for one, result in zip(jobs, results, strict=True):
        if one["lookups"] == one["bags"]:  # with more lookups, wide rows do not have several bags a warp
            assert set(re.sub(r"[0-9=]", "", result["schedule"]).split()) == {"block", "bags"}
            block = int(re.search(r"block=(\d+)", result["schedule"])[1])
            row_bytes = 8 if one.get("rows", 0) >= 1 << 31 else 4
            assert result["shared_bytes"] in (block * row_bytes * each for each in (1, 2, 4, 8)), one
    some = [
        "bags=" in found["schedule"]
        for one, found in zip(jobs, results, strict=True)
        if one["lookups"] > one["bags"]
    ]
    assert sum(some) > len(some) // 2


def test_which_calls_are_of_short_bags(kernel_cache: Path) -> None:
    """Sums and means without factors of one lookup a bag in the mean; of some in many bags."""
    one = {"lookups": 5000, "bags": 5000}
    for changes in ({}, {"pooling": MEAN}, {"padded": True}, {"lookups": 10}, {"schedule": "block=64"}):
        assert "bags=" in compile_one(job(**{**one, **changes}))["schedule"]
    for changes in ({"pooling": MAX}, {"weighted": True}, {"lookups": 200_000}, {"schedule": "distance=2"}):
        assert "bags=" not in compile_one(job(**{**one, **changes}))["schedule"]
    bags = 1 << 18
    for dim, dtype, state, most in (
        (128, FLOAT32, {}, 16), (32, FLOAT32, {}, 8), (128, FLOAT16, {}, 16), (32, FLOAT16, {}, 4),
        (256, FLOAT32, {}, 4), (128, FLOAT32, {"pooling": MEAN}, 4), (8, FLOAT16, {}, 1),
    ):  # fmt: skip
        for lookups in (most, most + 1):
            found = compile_one(job(dim=dim, dtype=dtype, lookups=lookups * bags, bags=bags, **state))
            assert ("bags=" in found["schedule"]) == (lookups == most), (dim, dtype, lookups)


def test_how_many_rows_are_in_flight_and_in_order_of_parts(kernel_cache: Path) -> None:
    """Eight rows of halves only if a bag has at most a warp; parts only if a warp has enough bytes for
    each."""
    large = {"rows": 10**6, "lookups": 64 * 32768, "bags": 32768}
    for changes, expected in (
        ({}, "distance=8 threads=32 parts=4"),
        ({"dim": 32}, "distance=8 threads=16 parts=1"),
        ({"dtype": FLOAT16}, "distance=8 threads=16 parts=1"),
        ({"dtype": FLOAT16, "lookups": 150 * 2048, "bags": 2048}, "distance=4 threads=64 parts=1"),
        ({"dtype": FLOAT16, "lookups": 64 * 32768 + 1}, "distance=8 threads=32 parts=1"),
    ):
        found = compile_one(job(**{**large, **changes}))["schedule"]
        assert set(expected.split()) <= set(found.split()), found


def test_tables_of_more_rows_than_int32(compile_all: Compile) -> None:
    jobs = [job("sm_90a", dim, FLOAT16, rows=rows) for dim in (1, 64) for rows in (9, 1 << 31)]
    results = compile_all(jobs)
    assert len({result["path"] for result in results}) == len(jobs)


def test_the_defaults_are_a_schedule_that_is_allowed_for_any_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every one gets as far as the compiler, which is forbidden here."""
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("RECFUSE_JIT", "off")
    dims = (*DIMS, 2, 3, 5, 24, 48, 300, 512, 513, 2048, 5000)
    sizes = ((10**6, 1), (0, 1), (300, 7), (7500, 50), (10**5, 10**5), (2**31, 10**4), (10**9, 3), (9, 10**8))
    states = ({}, {"weighted": True, "padded": True, "rows": 1 << 32}, {"pooling": MAX})
    for arch, dim, (lookups, bags), state in itertools.product(ARCHS, dims, sizes, states):
        for dtype in (FLOAT32, BFLOAT16):
            one = job(arch, dim, dtype, lookups=lookups, bags=bags, **state)
            with pytest.raises(NotImplementedError, match="RECFUSE_JIT=off forbids"):
                compile_one(one)
            threads = {**one, "schedule": "block=32"} if dim < 32 else {**one, "schedule": "warps=1"}
            with pytest.raises(NotImplementedError, match="RECFUSE_JIT=off forbids"):
                compile_one(threads)


def test_completed_schedules_are_stable(kernel_cache: Path) -> None:
    for given in ("", "station=none", "distance=5", "warps=8", " station=l1   parts=2 "):
        once = compile_one(job(dim=32, schedule=given))["schedule"]
        assert set(given.split()) <= set(once.split())
        named = {word.split("=")[0] for word in once.split()}
        assert named >= {"station", "distance", "threads", "block", "parts", "segment"}
        again = compile_one(job(dim=32, schedule=once))
        backwards = compile_one(job(dim=32, schedule="  ".join(reversed(once.split()))))
        assert again["schedule"] == backwards["schedule"] == once
        assert again["cached"] and backwards["cached"] and again["path"] == backwards["path"]


PIN_ROWS_VARIANTS = [
    {"RF_INDEX": index, "RF_KEEP": keep} for index in ("int", "rf_i64") for keep in ("0", "1")
]


@pytest.mark.parametrize("defines", ({}, {"RF_STATION": "3", "RF_DISTANCE": "4"}), ids=str)
def test_the_embedding_bag_compiles_by_nvcc(tmp_path: Path, defines: dict[str, str]) -> None:
    output = standalone("families/embedding_bag/embedding_bag.cu", "sm_90a", defines, tmp_path)
    assert "rf_embedding_bag" in output and " 0 bytes spill stores" in output


@pytest.mark.parametrize("defines", PIN_ROWS_VARIANTS, ids=str)
def test_pinning_compiles_by_nvcc(tmp_path: Path, defines: dict[str, str]) -> None:
    output = standalone("families/pin_rows/pin_rows.cu", "sm_90a", defines, tmp_path)
    assert "rf_pin_rows" in output and " 0 bytes spill stores" in output


BAD_COMPILES = {
    "dim": ({"dim": 0, "stride": 0}, ValueError, r"dim 0, .*expected dim and bags of 1 or more"),
    "negative dim": ({"dim": -4}, ValueError, "dim -4"),
    "huge dim": ({"dim": 1 << 40, "stride": 1 << 40}, NotImplementedError, "at most 4194240"),
    "stride": ({"stride": 127}, ValueError, "stride 127"),
    "alignment": ({"alignment": 3}, ValueError, "alignment 3"),
    "no alignment": ({"alignment": 0}, ValueError, "alignment 0"),
    "small alignment": ({"alignment": 2}, ValueError, "alignment 2"),
    "large alignment": ({"alignment": 32}, ValueError, "alignment 32"),
    "alignment of rows": ({"dim": 7, "stride": 7}, ValueError, "divides the bytes of a row"),
    "dtype": ({"dtype": 3}, ValueError, "dtype is 3, index type"),
    "index type": ({"index": -1}, ValueError, "index type -1"),
    "offset type": ({"offset": 2}, ValueError, "offset type 2"),
    "pooling": ({"pooling": 9}, ValueError, "pooling 9"),
    "bags": ({"bags": 0}, ValueError, "0 bags"),
    "lookups": ({"lookups": -1}, ValueError, "-1 lookups"),
    "schedule": ({"schedule": "distance=0"}, ValueError, "distance is 0"),
    "segment": (
        {"schedule": "segment=16"},
        ValueError,
        "segment is 16; expected at least the 32 threads of a warp that share a bag",
    ),
    "threads": ({"schedule": "threads=16"}, ValueError, "threads is 16; expected at least the 32"),
    "block": ({"schedule": "threads=64 block=32"}, ValueError, "block is 32; expected at least threads, 64"),
    "warps": ({"schedule": "block=64 warps=1"}, ValueError, "warps is 1; expected at least the 2"),
    "shared": (
        {"dim": 7, "stride": 7, "dtype": FLOAT16, "alignment": 2, "schedule": "station=shared"},
        ValueError,
        "rows or output are aligned to 2 bytes; expected 4 bytes or more",
    ),
    "no station": ({"schedule": "station=none distance=8"}, ValueError, "distance is 8; expected 1 or left"),
    "rows": ({"rows": 1 << 60}, ValueError, "that fits int64"),
    "arch": ({"arch": "sm_1"}, ValueError, "sm_1"),
    "arch with options": ({"arch": "sm_90a -include=/etc/passwd"}, (RuntimeError, ValueError), "sm_90a"),
    "type": ({"dim": "wide"}, TypeError, None),
    "schedule type": ({"schedule": None}, TypeError, None),
    "schedule with a zero": ({"schedule": "distance=2\0x"}, ValueError, "null"),
    "bags of a warp": (
        {"schedule": "bags=16"},
        ValueError,
        "bags is 16; expected 1 to 8 for rows of 512 bytes",
    ),
    "bags and parts": (
        {"schedule": "bags=8 parts=1"},
        ValueError,
        "bags is 8, with which there is no station",
    ),
    "bags of maxima": ({"pooling": MAX, "schedule": "bags=8"}, ValueError, "which is for sums and means"),
    "dim beyond int64": ({"dim": 1 << 70}, OverflowError, None),
}


@pytest.mark.parametrize("name", BAD_COMPILES)
def test_bad_arguments_of_the_compiler(kernel_cache: Path, name: str) -> None:
    changes, kind, text = BAD_COMPILES[name]
    with pytest.raises(kind, match=text):
        compile_one({**job(), **changes})


NUMBERS = {
    "distance": (1, 64, False),
    "threads": (1, 1024, True),
    "block": (32, 1024, True),
    "warps": (1, 64, False),
    "parts": (1, 16, True),
    "segment": (1, 256, True),
    "bags": (1, 32, True),
}


def with_schedule(schedule: str) -> torch.Tensor:
    """The operator on the CPU, which reads the schedule and needs only its distance."""
    return torch.ops.recfuse.embedding_bag(
        torch.ones(5, 3), torch.arange(4), torch.tensor([0, 2]), "sum", schedule=schedule
    )


def complaint(schedule: str) -> str:
    with pytest.raises(ValueError) as raised:
        with_schedule(schedule)
    text = str(raised.value)
    head = "recfuse.embedding_bag: schedule: "
    assert text.startswith(head)
    return text.removeprefix(head).split("\n")[0]


@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_of_a_schedule(field: str) -> None:
    least, most, power = NUMBERS[field]
    for good in {least, most, 2 * least, f"+{most}", f"0{least}"}:
        assert with_schedule(f"{field}={good}")[:, 0].tolist() == [2, 2]
    kind = "a power of two, " if power else ""
    bad = {least - 1, most + 1, -least, 2**31, 2**32 + least, -(2**63), 2**63 - 1}
    for value in bad | ({3 * least} if power else set()):
        assert complaint(f"{field}={value}") == f"{field} is {value}; expected {kind}{least} to {most}"
    for value in ("", "x", "4x", "0x20", "32.0", "1e2", "32,", "=32", "\t\n", "\u0661"):
        assert complaint(f"{field}={value}").startswith(f'{field} is "{value}"'.split("\n")[0])
    assert complaint(f"{field}={10**30}").startswith(f"{field} is ")
    assert complaint(field) == f'{field} is ""; expected a number'


@pytest.mark.parametrize("station", STATION_WORDS)
def test_stations_of_a_schedule(station: str) -> None:
    assert with_schedule(f"station={station}").shape == (2, 3)
    for wrong in (station[:-1], f"{station}s", station.upper(), f"{station}=1", ""):
        assert complaint(f"station={wrong}") == (
            f'station is "{wrong}"; expected none, register, shared, local or l1'
        )


def test_words_of_a_schedule() -> None:
    for good in ("", " ", "   distance=2  block=64 "):
        assert with_schedule(good).shape == (2, 3)
    for twice in ("distance=2 distance=3", "station=l1 distance=2 station=none"):
        assert complaint(twice) == f"{twice.partition('=')[0]} is given twice"
    fields = "with the fields station, distance, threads, block, warps, parts, segment and bags"
    for wrong in (
        "bulk",
        "=",
        "=4",
        "Distance=4",
        "distances=4",
        "dist=4",
        "stations=none",
        "-",
        "%s%n",
        "é",
    ):
        text = complaint(f"distance=2 {wrong}")
        assert text == f'found "{wrong}"; expected field=value with spaces between, {fields}'
    assert complaint("distance=2,block=64") == 'distance is "2,block=64"; expected a number'
    assert complaint("distance=2\tblock=64").startswith('distance is "2\tblock=64"')


@pytest.mark.parametrize("word", ("x", "station=", "distance=", "distance=9", "=", "distance=2 "))
def test_a_long_schedule_is_no_harm(word: str) -> None:
    long = word + "y" * 10_000
    assert complaint(long)
    assert complaint("distance=2 " * 1000) == "distance is given twice"
    assert with_schedule(" " * 10_000).shape == (2, 3)


def test_a_schedule_of_the_python_function() -> None:
    weight, indices, offsets = torch.ones(5, 3), torch.arange(4), torch.tensor([0, 2])
    with pytest.raises(ValueError, match=r"^recfuse\.embedding_bag: schedule: distance is 65"):
        recfuse.embedding_bag(indices, weight, offsets, schedule="distance=65")
    module = recfuse.nn.EmbeddingBag(5, 3)
    module.schedule = "nonsense"
    with pytest.raises(ValueError, match='found "nonsense"'):
        module(indices, offsets)
