"""The functions of `csrc/python`, with positional arguments only.

An address is an `int`; the caller keeps its memory alive. Codes of dtypes, integer types and pooling are
positions in the tuples of `recfuse._codes`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NewType, TypeAlias, TypedDict, overload

import numpy as np
from numpy.typing import NDArray

Integers: TypeAlias = NDArray[np.int32] | NDArray[np.int64]
Buffer: TypeAlias = tuple[int, int, int]
"""address, numel, dtype"""
Call: TypeAlias = tuple[list[Buffer], NDArray[np.int64], int, int]
"""buffers, features [features, 7], output dtype, output stride"""
Table: TypeAlias = tuple[int, int, int, int, int]
"""weight, rows, dim, stride, dtype"""
Batch: TypeAlias = tuple[int, int, int, int, int, int, bool, int, int]
"""indices, lookups, index type, offsets, bags, offset type, include_last_offset, sample weights, output"""
FusedBatch: TypeAlias = tuple[int, int, int, int, int, int, int, int, int]
"""indices, lookups, index type, offsets, bags, offset type, sample weights, output, offsets on the host"""
Described = NewType("Described", object)

class Kernel(TypedDict):
    """The compiler's facts of a kernel."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    cubin_bytes: int
    seconds: float
    cached: bool
    path: str

class JitStatus(TypedDict):
    """The compiler of GPU kernels, and the kernel cache."""

    nvrtc: str | None
    builtins: str | None
    major: int
    minor: int
    missing: str | None
    folder: str | None
    entries: int
    bytes: int
    allowed: bool
    refused: str | None
    ignored: int

def workload_lengths(groups: NDArray[np.float64], batch: int, seed: int, /) -> NDArray[np.int32]: ...
@overload
def workload_indices(
    groups: NDArray[np.float64],
    lengths: NDArray[np.int32],
    skew: float,
    model_seed: int,
    seed: int,
    wide: Literal[True],
    /,
) -> NDArray[np.int64]: ...
@overload
def workload_indices(
    groups: NDArray[np.float64],
    lengths: NDArray[np.int32],
    skew: float,
    model_seed: int,
    seed: int,
    wide: Literal[False],
    /,
) -> NDArray[np.int32]: ...
@overload
def workload_indices(
    groups: NDArray[np.float64],
    lengths: NDArray[np.int32],
    skew: float,
    model_seed: int,
    seed: int,
    wide: bool,
    /,
) -> Integers: ...
def batch_sizes(
    median: float, spread: float, maximum: int, seed: int, count: int, /
) -> NDArray[np.int64]: ...
def permutation(count: int, seed: int, /) -> NDArray[np.int64]: ...
def uniform(count: int, bound: int, seed: int, /) -> NDArray[np.int64]: ...
def trace_curve(
    ranks: NDArray[np.float64], counts: NDArray[np.float64], positions: NDArray[np.float64], /
) -> NDArray[np.float64]: ...
def trace_times(
    counts: NDArray[np.int64], length: float, burst: float, median: float, sigma: float, seed: int, /
) -> NDArray[np.float64]: ...
def trace_reuse(rows: NDArray[np.int64], n_rows: int, /) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def hash_strings(
    bytes: int, n_bytes: int, offsets: int, offset_type: int, count: int, seed: int, threads: int, /
) -> NDArray[np.int64]: ...
def hash_padded_strings(
    strings: NDArray[np.str_] | NDArray[np.bytes_], seed: int, threads: int, /
) -> NDArray[np.int64]: ...
def hash_string_objects(
    strings: list[Any], seed: int, threads: int, /
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def embedding_columns_program(
    columns: NDArray[np.int64],
    sources: NDArray[np.int64],
    steps: NDArray[np.int64],
    boundaries: NDArray[np.float32],
    vocabulary: NDArray[np.int64],
    /,
) -> NDArray[np.int64]: ...
def codes() -> dict[str, tuple[str, ...]]: ...
def records() -> dict[str, tuple[str, ...]]: ...
def optimizers() -> list[tuple[str, str, bool, bool, str]]: ...
def update_bounds() -> list[tuple[float, float]]: ...
def tensor_cell(tensor: Any, implementation: int, size: int, /) -> int: ...
def join_offsets(type: type, cell: int, offsets: Any, indices: Any, joined: Any, /) -> bool: ...
def check_storages(type: type, cell: int, where: str, name: str, tensors: tuple[Any, ...], /) -> None: ...
def embedding_columns_inputs(
    type: type, cell: int, entries: tuple[Any, ...], batch: int, /
) -> tuple[Any, int, NDArray[np.int64], NDArray[np.int64], int, int, int] | None: ...
def embedding_columns_pack(
    owner: Any, groups: NDArray[np.int32], n_groups: int, memory: int, capacity: int, /
) -> tuple[int, list[tuple[int, int, int, int, int]]]: ...
def jit_status() -> JitStatus: ...
def embedding_bag_lower(
    gpu: str,
    dim: int,
    stride: int,
    alignment: int,
    dtype: int,
    index_type: int,
    offset_type: int,
    pooling: int,
    weighted: bool,
    padded: bool,
    check: bool,
    lookups: int,
    bags: int,
    schedule: str,
    rows: int = ...,
    /,
) -> tuple[list[dict[str, Any]], str]: ...
def embedding_bag_measure(
    device: int,
    stream: int,
    table: Table,
    batches: list[Batch],
    pooling: int,
    padding_idx: int,
    check: bool,
    schedules: list[str],
    rounds: int,
    pinned: tuple[int, int] | tuple[int, int, int] | None,
    /,
) -> NDArray[np.float64]: ...
def fused_embedding_bag_describe(call: Call, schedules: NDArray[np.int32], warps: int, /) -> Described: ...
def fused_embedding_bag_map(
    described: Described,
    offsets: NDArray[np.integer] | Sequence[int],
    sms: int = ...,
    stage: bool = ...,
    memory: Callable[[int], NDArray[np.int32]] | None = ...,
    /,
) -> NDArray[np.int32]: ...
def fused_embedding_bag_rows(mapping: NDArray[np.int32], /) -> int: ...
def fused_embedding_bag_candidates(call: Call, feature: int, /) -> list[tuple[int, ...]]: ...
def fused_embedding_bag_lower(
    gpu: str,
    call: Call,
    index_type: int,
    offset_type: int,
    weighted: bool,
    check: bool,
    schedules: NDArray[np.int32],
    warps: int,
    timed: bool,
    mapped: bool = ...,
    huge: bool = ...,
    /,
) -> tuple[list[dict[str, Any]], int]: ...
def fused_embedding_bag_backward_leave_out(parts: int, /) -> None: ...
def fused_embedding_bag_measure(
    device: int,
    stream: int,
    call: Call,
    batches: list[FusedBatch],
    schedules: NDArray[np.int32],
    warps: int,
    rounds: int,
    timed: bool,
    /,
) -> NDArray[np.float64]: ...
def gpus() -> list[dict[str, Any]]: ...
def gpu(name: str, /) -> dict[str, Any]: ...
def explain_begin(gpu: str | None, /) -> None: ...
def explain_end() -> list[dict[str, Any]]: ...
def explain_lowers() -> bool: ...
def explain_gpu() -> dict[str, Any] | None: ...
def kernel_compile(
    arch: str, file: str, kernel: str, defines: str, cached_only: bool = ..., /
) -> dict[str, Any] | None: ...
def occupancy(
    registers_per_sm: int,
    shared_per_sm: int,
    reserved_shared_per_block: int,
    threads_per_sm: int,
    blocks_per_sm: int,
    registers: int,
    threads: int,
    shared: int,
    /,
) -> int: ...
