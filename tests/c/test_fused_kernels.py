"""The kernels of the fused operator compile for three generations of GPUs, without spilling. Needs no GPU."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recfuse.data import workloads
from support.cuda_program import Program
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
    compile_fused,
    disassembler,
    standalone,
)
from support.partition import features_of

pytestmark = pytest.mark.long

PLACE = 1 << 20  # an address: nothing is read there
BAGS = 256
KNOWN, UNKNOWN = True, False
INT8_ROWS, INT4_ROWS = 4, 5  # of rf_dtype
DEFAULT_REGISTERS = 72  # so that 28 warps of an SM have theirs


@dataclass(frozen=True)
class Job:
    """One kernel: the default classes of a model."""

    model: str
    arch: str = "sm_90a"
    dtype: int = FLOAT32
    integer: int = INT32
    weighted: bool = False
    check: bool = True
    known: bool = KNOWN  # true: lengths of bags are expected; false: any bucket of lengths may occur
    poolings: tuple[int, ...] = (SUM,)
    padding_idx: int = -1

    def features(self) -> NDArray[np.int64]:
        """[features, 7], with consecutive tables."""
        rows = features_of(workloads.model(self.model))
        rows[:, 4] = [self.poolings[number % len(self.poolings)] for number in range(len(rows))]
        rows[:, 5] = self.padding_idx
        return rows

    def schedules(self) -> NDArray[np.int32]:
        """[1, features, 5]: defaults, with the expected lookups of a bag of each."""
        model = workloads.model(self.model)
        schedules = np.zeros((1, model.features, 5), np.int32)
        if self.known:
            lengths = np.diff(model.batch(BAGS, seed=1).offsets).reshape(model.features, BAGS)
            sixteenths = np.maximum(lengths.mean(axis=1) * 16, 1)
            schedules[0, :, -1] = np.where(lengths.any(axis=1), sixteenths, -1)
        return schedules

    def codes(self, features: NDArray[np.int64]) -> list[tuple[int, ...]]:
        """A buffer of codes for each dim, with parameters apart; the features are moved there."""
        dims = sorted(set(features[:, 3].tolist()))
        features[:, 0] = [dims.index(dim) for dim in features[:, 3]]
        features[:, 1] = 0
        rows, bits = int(features[:, 2].max()), 8 if self.dtype == INT8_ROWS else 4
        return [(PLACE, rows * dim, self.dtype, PLACE, dim * bits // 8, 4) for dim in dims]

    def compile(self, mapped: bool = False) -> dict[str, Any]:
        features = self.features()
        elements = int(features[-1, 1] + features[-1, 2] * features[-1, 3])
        buffers, output = [(PLACE, elements, self.dtype)], self.dtype
        if self.dtype in (INT8_ROWS, INT4_ROWS):
            buffers, output = self.codes(features), FLOAT32
        call = (buffers, features, output, int(features[:, 3].sum()))
        kind = (self.integer, self.integer, self.weighted, self.check)
        return compile_fused(self.arch, call, *kind, self.schedules(), 0, False, mapped)


DEFAULTS = "ABDE"  # every class of model C is a class of A
JOBS = (
    *(Job(model) for model in DEFAULTS),
    Job("B", dtype=FLOAT16, known=UNKNOWN),
    Job("B", "sm_80", poolings=(MAX,), padding_idx=0),
    Job("D", "sm_80", FLOAT16, INT64, weighted=True, known=UNKNOWN),
    Job("E", "sm_80", BFLOAT16, weighted=True),
    Job("D", "sm_100", FLOAT16, poolings=(SUM, MAX, MEAN), padding_idx=0),
    Job("E", "sm_100", integer=INT64, weighted=True, padding_idx=3, check=False),
    Job("D", dtype=BFLOAT16, poolings=(MEAN,), check=False),
    Job("A", dtype=INT8_ROWS),
    Job("E", dtype=INT4_ROWS, weighted=True, integer=INT64),
    Job("B", "sm_80", INT4_ROWS, poolings=(SUM, MAX, MEAN), padding_idx=0),
    Job("D", "sm_100", INT8_ROWS, known=UNKNOWN),
)


def compile_all(jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """Side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(Job.compile, jobs))


def test_the_models_without_spills(kernel_cache: Path) -> None:
    results = compile_all(JOBS)
    print(
        f"\n{'registers':>9} {'spilled':>7} {'stack':>5} {'classes':>7} {'cubin':>7} {'seconds':>7}  kernel"
    )
    spilling = []
    for job, result in zip(JOBS, results, strict=True):
        numbers = [
            result[name] for name in ("registers", "spill_bytes", "stack_bytes", "classes", "cubin_bytes")
        ]
        print("{:9} {:7} {:5} {:7} {:7} {:7.1f}  {}".format(*numbers, result["seconds"], job))
        assert 0 < result["registers"] <= DEFAULT_REGISTERS and result["classes"] > 0, job
        if result["spill_bytes"] or result["stack_bytes"]:
            spilling.append((job, result["spill_bytes"], result["stack_bytes"]))
    assert spilling == []
    assert len({result["path"] for result in results}) == len(JOBS)
    again = JOBS[3].compile()
    assert again["cached"] and again["path"] == results[3]["path"]


def test_tiles_take_no_more_registers_than_pools(kernel_cache: Path) -> None:
    """Of float16, whose rows leave most registers, for every length: with 64 registers 32 warps fit on an
    SM."""
    result = next(job for job in JOBS if job.dtype == FLOAT16 and job.known == UNKNOWN).compile()
    assert result["classes"] > 30 and result["registers"] <= 64, result["registers"]


@dataclass(frozen=True)
class Instruction:
    text: str
    sets: int  # the barrier that the result opens; 7: no barrier
    waits: int  # a bit for each barrier that it waits for

    @property
    def asks_for_a_row(self) -> bool:
        """Of float32: 16 bytes per lane, at an address without an offset."""
        return re.search(r"\bLDG\.E\.128\.CONSTANT \w+, desc\[\w+\]\[\w+\.64\]$", self.text) is not None

    @property
    def adds(self) -> bool:
        return self.text.startswith("FADD")


def disassembled(cubin: Path) -> list[Instruction]:
    """Bits 105 to 125 of an instruction's 128 are the barriers that it waits for, and the barrier that it
    opens.

    Source: Jia et al., Dissecting the NVIDIA Volta GPU architecture via microbenchmarking, 2018, section 2.1.
    """
    command = [disassembler(), "-hex", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x([0-9a-f]{16}) \*/"
    found = []
    for instruction, word in re.findall(words, text):
        control = int(word, 16) >> 41
        found.append(Instruction(instruction.strip(), control >> 5 & 7, control >> 11 & 63))
    return found


def loops_of(instructions: list[Instruction]) -> list[list[Instruction]]:
    """Returns the code between branches that loads eight rows and adds some."""
    blocks: list[list[Instruction]] = [[]]
    for instruction in instructions:
        blocks[-1].append(instruction)
        if re.search(r"\bBRA\b", instruction.text):
            blocks.append([])
    return [
        block
        for block in blocks
        if sum(one.asks_for_a_row for one in block) >= 8 and any(one.adds for one in block)
    ]


def test_rows_are_prefetched_before_the_first_wait(kernel_cache: Path, tmp_path: Path) -> None:
    """If registers or barriers are scarce, the compiler delays the loads of some rows until others have
    arrived.

    That costs up to a tenth of a model's time, and shows only in the instructions. The last row may be late
    if a lane has eight indices.
    """
    for job in JOBS[: len(DEFAULTS)]:
        cached = Path(job.compile()["path"]).read_bytes()
        cubin = tmp_path / f"{job.model}.cubin"
        cubin.write_bytes(cached[cached.index(b"\x7fELF") :])
        loops = loops_of(disassembled(cubin))
        assert len(loops) > 1, job
        late = 0
        for loop in loops:
            rows = [place for place, one in enumerate(loop) if one.asks_for_a_row]
            missing: dict[int, int] = {}  # rows on their way, by the barrier that opens for them
            for place in range(rows[0], rows[-1]):
                one = loop[place]
                waited_for = sum(missing.pop(barrier, 0) for barrier in range(6) if one.waits >> barrier & 1)
                if waited_for > 0:
                    assert one.adds and place > rows[-2], (job, one, [each.text for each in loop])
                    late += 1
                if one.asks_for_a_row:
                    missing[one.sets] = missing.get(one.sets, 0) + 1
        assert late <= len(loops) // 4, job


def test_kernels_for_staged_tables_are_compiled_with_the_others(kernel_cache: Path) -> None:
    """The kernels for batches that stage tables: on GPUs that can, for tables that are narrow enough."""
    made: dict[str, int] = {}
    jobs = {name: Job(name[0], name[3:] or "sm_90a", weighted=True) for name in ("D", "E", "D, sm_80")}
    for name, job in jobs.items():
        before = set(kernel_cache.rglob("*.cubin"))
        assert job.compile()["spill_bytes"] == 0
        made[name] = len(set(kernel_cache.rglob("*.cubin")) - before)
    assert made == {"D": 3, "E": 1, "D, sm_80": 1}


def test_calls_with_a_mapping_have_kernels_of_their_own(kernel_cache: Path) -> None:
    job = Job("E", "sm_80", weighted=True, padding_idx=1)
    own, mapped = job.compile(), job.compile(mapped=True)
    assert own["path"] != mapped["path"] and not mapped["cached"] and mapped["spill_bytes"] == 0
    assert job.compile(mapped=True)["cached"]


FILES = {
    "fused_embedding_bag": "families/fused_embedding_bag/fused_embedding_bag.cu",
    "fused_map": "families/fused_embedding_bag/partition/map.cu",
    "fused_staged": "families/fused_embedding_bag/staged/staged.cu",
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", FILES)
def test_each_file_compiles_alone(cuda_program: Program, tmp_path: Path, name: str, arch: str) -> None:
    """With its macros' defaults, as by nvcc."""
    if name == "fused_staged" and arch == "sm_80":
        pytest.skip("tables are staged from sm_90 on")
    program = cuda_program.beside_own_kernels()
    info = program.compile(tmp_path, arch, source=(FILES[name], f"rf_{name}"))
    assert "error" not in info, info
    assert info["spill"] == 0 and info["stack"] == 0


@pytest.mark.parametrize("name", FILES)
def test_each_file_compiles_by_nvcc(tmp_path: Path, name: str) -> None:
    output = standalone(FILES[name], "sm_90a", {}, tmp_path)
    assert f"rf_{name}" in output and " 0 bytes spill stores" in output


def compile_call(arch: str = "sm_90a", **changes: Any) -> dict[str, Any]:
    features = np.array([[0, 0, 10, 8, SUM, -1, 0], [1, 0, 10, 128, SUM, -1, 8]], np.int64)
    plain = {
        "buffers": [(PLACE, 80, FLOAT32), (PLACE, 1280, FLOAT32)],
        "features": features,
        "output_dtype": FLOAT32,
        "stride": 136,
        "index": INT64,
        "offset": INT64,
        "schedules": np.zeros((1, 2, 5), np.int32),
        "warps": 0,
    }
    assert not changes.keys() - plain.keys()
    buffers, features, output_dtype, stride, index, offset, schedules, warps = {**plain, **changes}.values()
    call = (buffers, features, output_dtype, stride)
    return compile_fused(arch, call, index, offset, False, True, schedules, warps, False)


def changed(place: int, field: int, value: int) -> NDArray[np.int64]:
    """Features of which one field is another."""
    features = np.array([[0, 0, 10, 8, SUM, -1, 0], [1, 0, 10, 128, SUM, -1, 8]], np.int64)
    features[place, field] = value
    return features


def scheduled(field: int, value: int) -> NDArray[np.int32]:
    schedules = np.zeros((1, 2, 5), np.int32)
    schedules[0, 1, field] = value
    return schedules


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "index type": ({"index": 2}, TypeError, "index_type is 2"),
    "offset type": ({"offset": -1}, TypeError, "offset_type -1"),
    "warps": ({"warps": 65}, ValueError, "warps is 65"),
    "negative warps": ({"warps": -2}, ValueError, "warps is -2"),
    "no set": ({"schedules": np.zeros((0, 2, 5), np.int32)}, ValueError, "schedules"),
    "schedules of fewer": ({"schedules": np.zeros((1, 1, 5), np.int32)}, ValueError, "a row a feature"),
    "wide schedules": ({"schedules": np.zeros((1, 2, 6), np.int32)}, ValueError, "a row a feature"),
    "flat schedules": ({"schedules": np.zeros((2, 5), np.int32)}, (TypeError, ValueError), "schedules"),
    "kind": ({"schedules": scheduled(0, 7)}, ValueError, "kind is 7"),
    "threads": ({"schedules": scheduled(1, 8)}, ValueError, "threads is 8"),
    "distance": ({"schedules": scheduled(2, 5)}, ValueError, "distance is 5"),
    "split": ({"schedules": scheduled(3, 100)}, ValueError, "split is 100"),
    "buffer": ({"features": changed(1, 0, 2)}, ValueError, "not there"),
    "place": ({"features": changed(1, 1, 64)}, ValueError, "expected a table within weights"),
    "rows": ({"features": changed(0, 2, 1 << 62)}, ValueError, "expected a table within weights"),
    "negative dim": ({"features": changed(0, 3, -8)}, ValueError, "expected a table within weights"),
    "huge dim": ({"features": changed(0, 3, (1 << 63) - 1)}, ValueError, "all dims"),
    "pooling": ({"features": changed(0, 4, 9)}, ValueError, "pooling"),
    "padding": ({"features": changed(0, 5, 10)}, ValueError, "padding_idx"),
    "column": ({"features": changed(1, 6, 4)}, ValueError, "the end of the feature before"),
    "stride": ({"stride": 100}, ValueError, "stride"),
    "output dtype": ({"output_dtype": 3}, ValueError, "output_dtype"),
    "dtype": ({"buffers": [(PLACE, 80, 9), (PLACE, 1280, 0)]}, ValueError, "dtype is 9; expected 0 to 2"),
    "short buffer": (
        {"buffers": [(PLACE, 79, 0), (PLACE, 1280, 0)]},
        ValueError,
        "expected a table within weights",
    ),
    "buffers": ({"buffers": (1, 2)}, TypeError, "list"),
    "no pair": ({"buffers": [1, 2]}, TypeError, "expected a tuple"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_kernels_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the compiler runs, which is forbidden here."""
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("RECFUSE_JIT", "off")
    changes, kind, words = BAD[name]
    with pytest.raises(kind, match=words):
        compile_call(**changes)
    with pytest.raises(NotImplementedError, match="RECFUSE_JIT=off forbids"):
        compile_call()


def cached(folder: Path, file: str) -> list[bytes]:
    """Returns the entries of a file's kernels; each begins with its source."""
    entries = (path.read_bytes() for path in folder.glob("*.cubin"))
    return [entry for entry in entries if entry[48 : 48 + len(file) + 1] == file.encode() + b"\0"]


def test_every_variant_that_a_batch_may_ask_for_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call decides whether a batch stages tables; the number of rows of a table is known only then."""
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path))
    staged = np.zeros((1, 2, 5), np.int32)
    staged[0, 0, 0] = 3
    compile_call(schedules=staged)
    assert len(cached(tmp_path, "families/fused_embedding_bag/staged/staged.cu")) == 1
    assert {
        b"-DRF_WITH_STAGED=1\0" in entry
        for entry in cached(tmp_path, "families/fused_embedding_bag/fused_embedding_bag.cu")
    } == {
        False,
        True,
    }
    many = [[0, 0, 1 << 33, 8, SUM, -1, 0], [1, 0, 10, 128, SUM, -1, 8]]
    buffers = [(PLACE, 8 << 33, FLOAT32), (PLACE, 1280, FLOAT32)]
    before = len(cached(tmp_path, "families/fused_embedding_bag/fused_embedding_bag.cu"))
    compile_call(features=np.array(many, np.int64), buffers=buffers)
    entries = cached(tmp_path, "families/fused_embedding_bag/fused_embedding_bag.cu")
    assert len(entries) > before and any(b"-DRF_WIDE_ROWS=1\0" in entry for entry in entries)
    call = ([(PLACE, 80, FLOAT32)], np.array([[0, 0, 10, 8, SUM, -1, 0]], np.int64), FLOAT32, 8)
    one = np.zeros((1, 1, 5), np.int32)
    compile_fused("sm_90a", call, INT64, INT64, False, True, one, 0, False, False, True)
    entries = cached(tmp_path, "families/fused_embedding_bag/fused_embedding_bag.cu")
    assert any(b"-DRF_POSITION=rf_i64\0" in entry for entry in entries)
