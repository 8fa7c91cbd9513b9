"""Driver, devices, loaded kernels and error words: csrc/gpu with a driver that has no GPU (tests/c/cuda)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.c_program import COMPILER, SANITIZERS
from support.cuda_program import Build, Program

pytestmark = [pytest.mark.long, pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc, gcc or $CC)")]
KINDS = ["plain", *SANITIZERS]


@pytest.fixture(scope="module")
def warm_cache(cuda_build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds every kernel of the command `kernels`, for both devices."""
    cache = tmp_path_factory.mktemp("warm_cache")
    plain = cuda_build("plain")
    plain.add_nvrtc()
    plain.run("kernels", cache=cache, gpu=True)
    return cache


def test_without_a_driver(cuda_program: Program, tmp_path: Path) -> None:
    line = cuda_program.run("device", "0", cache=tmp_path)
    if line.startswith("ordinal="):
        pytest.skip("this machine has a GPU")
    assert line.startswith("NoDeviceError: ")
    assert "libcuda.so.1" in line or "no GPU" in line


def test_devices_are_described(cuda_program: Program, tmp_path: Path) -> None:
    first, second = (cuda_program.run("device", ordinal, cache=tmp_path, gpu=True) for ordinal in "01")
    assert "name=Fake 0 arch=sm_90a sms=1016 l2=1038 registers=1082 threads=1039" in first
    assert "blocks=1106 shared=1081 optin=1097 reserved=1111" in first
    assert "ordinal=1 name=Fake 1 arch=sm_80 " in second


@pytest.mark.parametrize("ordinal", ["-1", "2", "63", "64", "2000000000"])
def test_a_device_that_is_not_there(cuda_program: Program, tmp_path: Path, ordinal: str) -> None:
    line = cuda_program.run("device", ordinal, cache=tmp_path, gpu=True)
    assert line.startswith(f"ValueError: no GPU has the number {ordinal};")


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("cuInit:100", ["NoDeviceError", "no GPU", "CUDA_VISIBLE_DEVICES"]),
        ("cuInit:3", ["NotImplementedError", "fork", "spawn"]),
        ("cuInit:999", ["CudaError", "cuInit", "CUDA_ERROR_FAKE", "999", "no text"]),
        ("cuDeviceGetCount:101", ["CudaError", "cuDeviceGetCount of", "(101): a text of the fake"]),
        ("cuDeviceGetAttribute:1", ["CudaError", "cuDeviceGetAttribute of"]),
        ("cuDevicePrimaryCtxRetain:2", ["MemoryError", "CUDA_ERROR_OUT_OF_MEMORY"]),
        ("cuMemAlloc_v2:2", ["MemoryError", "cuMemAlloc"]),
        ("cuMemcpyHtoDAsync_v2:700", ["CudaError", "cuMemcpyHtoDAsync", "700"]),
        ("cuCtxPushCurrent_v2:201", ["CudaError", "cuCtxPushCurrent"]),
    ],
)
def test_a_failing_driver_gives_the_reason(
    cuda_program: Program, tmp_path: Path, failure: str, words: list[str]
) -> None:
    line = cuda_program.run("device", "0", cache=tmp_path, gpu=True, FAKE_CUDA_FAIL=failure)
    assert [word for word in words if word not in line] == [], line


def test_an_old_driver_is_named(cuda_program: Program, tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int cuInit(unsigned int flags) { return (int)flags; }\n")
    target = tmp_path / "libcuda.so.1"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", tmp_path / "empty.c", "-o", target], check=True)
    line = cuda_program.run("device", "0", cache=tmp_path, LD_LIBRARY_PATH=str(tmp_path))
    assert line.startswith("NotImplementedError: the CUDA driver (libcuda.so.1) has no cu")


@pytest.mark.parametrize("kind", KINDS)
def test_many_threads_get_each_kernel_once(cuda_build: Build, warm_cache: Path, kind: str) -> None:
    cuda_build(kind).run("kernels", cache=warm_cache, gpu=True, RECFUSE_JIT="off")


def test_a_driver_that_starts_a_helper(cuda_program: Program, warm_cache: Path) -> None:
    """It forks while other threads wait for it: not a deadlock."""
    cuda_program.run("kernels", cache=warm_cache, gpu=True, FAKE_CUDA_HELPER="1", timeout=60)


def test_many_threads_compile_each_kernel(cuda_program: Program, tmp_path: Path) -> None:
    cuda_program.run("kernels", cache=tmp_path, gpu=True)
    assert len(list(tmp_path.iterdir())) == 24


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("cuModuleLoadData:209", "the GPU kernel rf_scale of scale.cu for sm_90a with"),
        ("cuModuleGetFunction:500", "cuModuleGetFunction"),
        ("cuFuncSetAttribute:1", "1024 bytes of dynamic shared memory"),
        ("cuFuncGetAttribute:2", "CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_a_failure_is_not_remembered(
    cuda_build: Build, warm_cache: Path, kind: str, failure: str, words: str
) -> None:
    cuda_build(kind).run("kernel_failure", words, cache=warm_cache, gpu=True, FAKE_CUDA_FAIL=failure)


def test_long_keys_are_told_apart_by_their_ends(cuda_program: Program, warm_cache: Path) -> None:
    cuda_program.run("long_keys", cache=warm_cache, gpu=True)


def test_a_kernel_that_is_not_in_the_cache_is_named(cuda_program: Program, warm_cache: Path) -> None:
    output = cuda_program.run("kernel", "0", "77", cache=warm_cache, gpu=True, RECFUSE_JIT="off")
    assert output.startswith("NotImplementedError: ") and "-DRF_FACTOR=77" in output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", ["errors", "errors_of_two"])
def test_recorded_kernel_errors_are_raised_once(
    cuda_build: Build, tmp_path: Path, kind: str, command: str
) -> None:
    cuda_build(kind).run(command, cache=tmp_path, gpu=True)


@pytest.mark.parametrize("kind", ["plain", "address"])  # the thread sanitizer does not see the driver wait
@pytest.mark.parametrize(
    "command",
    [
        "staging",
        "staging_bound",
        "staging_idle",
        "staging_grown",
        "staging_unfilled",
        "staging_growth_failure",
    ],
)
def test_threads_fill_memory_for_a_stream(cuda_build: Build, tmp_path: Path, kind: str, command: str) -> None:
    cuda_build(kind).run(command, cache=tmp_path, gpu=True)


@pytest.mark.parametrize("kind", KINDS)
def test_errors_noted_by_threads_are_raised_once(cuda_build: Build, tmp_path: Path, kind: str) -> None:
    cuda_build(kind).run("notes", cache=tmp_path, gpu=True)


@pytest.mark.parametrize("kind", ["plain", "address"])
@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [
        ("cuStreamWaitValue32_v2:801", "NotImplementedError", "streams of GPU 0 cannot wait"),
        ("cuStreamWaitValue32_v2:700", "CudaError", "cuStreamWaitValue32_v2"),
        ("cuEventCreate:2", "MemoryError", "cuEventCreate"),
    ],
)
def test_a_stream_that_cannot_wait(
    cuda_build: Build, tmp_path: Path, kind: str, failure: str, status: str, words: str
) -> None:
    cuda_build(kind).run("staging_failure", status, words, cache=tmp_path, gpu=True, FAKE_CUDA_FAIL=failure)


@pytest.mark.parametrize("kind", ["plain", "address"])
@pytest.mark.parametrize("command", ["launch", "tensor_map", "tensor_map_kept"])
def test_launches_and_tensor_maps_follow_the_driver(
    cuda_build: Build, tmp_path: Path, kind: str, command: str
) -> None:
    cuda_build(kind).run(command, cache=tmp_path, gpu=True)


@pytest.mark.parametrize("kind", ["plain", "address"])
@pytest.mark.parametrize("command", ["fork_device", "fork_first"])
def test_a_child_has_no_cuda_and_hears_why(
    cuda_build: Build, warm_cache: Path, kind: str, command: str
) -> None:
    cuda_build(kind).run(command, cache=warm_cache, gpu=True)


@pytest.mark.parametrize("kind", ["plain", "address"])
def test_schedules_of_a_c_program_are_checked(cuda_build: Build, tmp_path: Path, kind: str) -> None:
    cuda_build(kind).run("schedules", cache=tmp_path)
