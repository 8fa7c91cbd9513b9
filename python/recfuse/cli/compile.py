"""`recfuse compile`: kernels for the cache, ahead of time, also on a machine without a GPU."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from recfuse import _C
from recfuse._codes import DTYPE_NAMES, INTEGER_NAMES, MODES

if TYPE_CHECKING:
    from recfuse.plan.collection import CollectionPlan
    from recfuse.plan.table import Plan

_ALIGNMENT = 16  # bytes, of the memory that torch allocates
# SMs and MiB of L2 of the server GPUs of an architecture, on which defaults depend; a typical one first.
_GPUS = {
    "sm_80": ((108, 40), (56, 24)),
    "sm_86": ((84, 6), (82, 6), (72, 6)),
    "sm_89": ((142, 96), (128, 72), (58, 48)),
    "sm_90a": ((132, 60), (132, 50), (114, 50), (78, 60)),
    "sm_100": ((148, 126),),
}


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "compile",
        help="compile GPU kernels into the cache, also without a GPU",
        description="Compiles kernels into the cache on disk, so that no process has to at its first call. "
        "Needs no GPU, only NVRTC. What is compiled: for each --plan its own kernel, and for a collection's "
        "that of calls with a mapping; for every combination of --dim, --dtype, --mode, --index, --batch and "
        "--pooling the kernel that runs without a plan (it depends on the GPU and the size of a batch; a "
        "plan, or a --schedule with all its fields, does not); and the kernels of pinning and of gradients. "
        "A folder filled by --out can be shipped: set RECFUSE_CACHE_DIR to it, and RECFUSE_JIT=off where "
        "nothing may be compiled.",
    )
    parser.add_argument(
        "--arch",
        action="append",
        required=True,
        metavar="SM",
        help="what to compile for: sm_80, sm_86, sm_89, sm_90a, sm_100; may be repeated",
    )
    parser.add_argument(
        "--plan", nargs="+", default=[], metavar="FILE", help="plans, as recfuse tune writes them"
    )
    parser.add_argument("--dim", nargs="+", type=int, default=[], help="elements of a row")
    parser.add_argument("--dtype", nargs="+", choices=DTYPE_NAMES, default=["float32"])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["sum"])
    parser.add_argument(
        "--index", nargs="+", choices=INTEGER_NAMES, default=["int64"], help="of lookups and offsets"
    )
    parser.add_argument("--weighted", action="store_true", help="with per-sample weights (mode sum)")
    parser.add_argument("--padded", action="store_true", help="with a padding_idx")
    parser.add_argument("--rows", type=int, default=500_000, help="of the table (default: %(default)s)")
    parser.add_argument(
        "--batch",
        nargs="+",
        type=int,
        default=[2048],
        help="bags of a batch, each size that will come (default: 2048)",
    )
    parser.add_argument(
        "--pooling",
        nargs="+",
        type=int,
        default=[150],
        help="lookups of a bag on average, each that will come (default: 150)",
    )
    parser.add_argument(
        "--schedule", default="", help="for the combinations (default: the kernel's defaults)"
    )
    parser.add_argument(
        "--gpu",
        nargs="+",
        default=[],
        type=_gpu,
        metavar="SMS:MIB",
        help="GPUs that the combinations are for, as SMs and MiB of L2, such as 132:60: the defaults depend "
        "on both (default: the known ones of each architecture)",
    )
    parser.add_argument(
        "--huge-batches", action="store_true", help="plans also for batches of 2**30 lookups and more"
    )
    parser.add_argument("--unchecked", action="store_true", help='for calls with bounds_check="off"')
    parser.add_argument("--out", metavar="FOLDER", help="the cache to fill (default: the user's own)")
    parser.set_defaults(run=run)


def _gpu(text: str) -> tuple[int, int]:
    sms, _, mib = text.partition(":")
    if not (sms.isdigit() and mib.isdigit() and int(sms) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not SMs:MiB, such as 132:60")
    return int(sms), int(mib)


def run(arguments: argparse.Namespace) -> int:
    """Compiles, and prints a line a kernel; 1 when any failed, or is not in the cache afterwards."""
    from recfuse.tuner.compile import compile_all

    for name, least in (("rows", 1), ("batch", 1), ("pooling", 0)):
        given = getattr(arguments, name)
        lowest = min(given) if isinstance(given, list) else given
        if lowest < least:
            raise ValueError(f"--{name} is {lowest}, must be >= {least}")
    plans, collections = _plans(arguments)
    archs = list(dict.fromkeys(arguments.arch))
    jobs = {
        f"{arch} {name}": (arch, *job)
        for arch in archs
        for name, job in (*_of_plans(plans, arguments), *_of_combinations(arguments, arch))
    }
    fused = {
        f"{arch} {name}{suffix}{', huge batches' if huge else ''}": (
            arch,
            *plan.compile_arguments(check=not arguments.unchecked, mapped=mapped, huge=huge),
        )
        for arch in archs
        for name, plan in collections.items()
        for mapped, suffix in ((False, ""), (True, ", with a mapping"))
        for huge in ((False, True) if arguments.huge_batches else (False,))
    }
    if not jobs and not fused:
        raise ValueError("nothing to compile: give --plan FILE, or --dim with --dtype, --mode and --index")
    with _cache_folder(arguments.out):
        work = {name: partial(_C.embedding_bag_compile, *arguments) for name, arguments in jobs.items()}
        work |= {
            name: partial(_C.fused_embedding_bag_compile, *arguments) for name, arguments in fused.items()
        }
        results = compile_all(work, progress=None)
        small = {f"{arch} pinning and gradients": arch for arch in archs}
        results |= {name: _small_kernels(arch) for name, arch in small.items()}
        cache = _C.jit_status()
        folder = cache["folder"] or "there is none: no RECFUSE_CACHE_DIR and no HOME"
        folder += f", which is not used: {cache['refused']}" if cache["refused"] else ""
    failed = 0
    for name in (*jobs, *fused, *small):
        result = results[name]
        if isinstance(result, Exception):
            failed += 1
            print(f"{name}: {result}", file=sys.stderr)
        elif result is None:
            print(f"{name}: compiled")
        elif not result["path"]:
            failed += 1
            print(f"{name}: compiled, but not written to the cache ({folder})", file=sys.stderr)
        else:
            print(f"{name}: {_line(result)}")
    if failed:
        print(f"{failed} of {len(results)} failed", file=sys.stderr)
    return 1 if failed else 0


def _small_kernels(arch: str) -> Exception | None:
    """Compiles what plans and combinations need besides; why it could not."""
    try:
        _C.small_kernels_compile(arch)
    except Exception as error:  # as for the others, one failure does not end the rest
        return error
    return None


def _line(result: dict[str, Any]) -> str:
    origin = "cached" if result["cached"] else "compiled"
    what = result["schedule"] if "schedule" in result else f"{result['classes']} schedules"
    return (
        f"{result['registers']} registers, {result['spill_bytes']} bytes spilled, "
        f"{result['cubin_bytes']:,} bytes, {origin}, {result['seconds']:.2f} s; {what}"
    )


def _plans(arguments: argparse.Namespace) -> tuple[dict[str, Plan], dict[str, CollectionPlan]]:
    """Plans of single tables, and of collections, by the names of their files."""
    from recfuse.plan.table import Plan

    single, collections = {}, {}
    for path in arguments.plan:
        plan = Plan.load(path)
        if plan.device.type != "cuda":
            raise ValueError(f"{path}: the plan is for the CPU, whose kernels are not compiled ahead of time")
        (single if isinstance(plan, Plan) else collections)[str(path)] = plan
    return single, collections


def _of_plans(plans: dict[str, Plan], arguments: argparse.Namespace) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Name and arguments of each plan's kernel."""
    for path, plan in plans.items():
        table = plan.table
        if plan.device.type != "cuda":
            raise ValueError(f"{path}: the plan is for the CPU, whose kernels are not compiled ahead of time")
        if table.dtype not in DTYPE_NAMES or table.mode not in MODES:
            raise ValueError(f"{path}: no kernel for a {table.dtype} table with mode {table.mode!r}")
        lookups, bags = round(plan.trace.lookups), round(plan.trace.bags)
        yield (
            path,
            (
                *_shape(table.dim, table.dtype, table.indices, table.offsets, table.mode),
                table.weighted,
                table.padded,
                not arguments.unchecked,
                lookups,
                bags,
                plan.schedule,
                table.rows,
            ),
        )


def _of_combinations(arguments: argparse.Namespace, arch: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Name and arguments of the kernel of each combination, on each GPU that it may run on."""
    gpus = arguments.gpu or _GPUS.get(arch, (None,))
    every = itertools.product(
        gpus,  # the outermost: most kernels of another GPU are those of the first, which are there then
        arguments.dim,
        arguments.dtype,
        arguments.mode,
        arguments.index,
        arguments.batch,
        arguments.pooling,
    )
    for gpu, dim, dtype, mode, index, batch, pooling in every:
        if dim < 1:
            raise ValueError(f"--dim is {dim}, must be >= 1")
        yield (
            f"{dim} {dtype} {mode} {index} {batch}x{pooling}"
            + (f" on {gpu[0]} SMs, {gpu[1]} MiB" if gpu else ""),
            (
                *_shape(dim, dtype, index, index, mode),
                arguments.weighted and mode == "sum",
                arguments.padded,
                not arguments.unchecked,
                batch * pooling,
                batch,
                arguments.schedule,
                arguments.rows,
                *((gpu[0], gpu[1] << 20) if gpu else ()),
            ),
        )


def _shape(dim: int, dtype: str, indices: str, offsets: str, mode: str) -> tuple[int, ...]:
    """The arguments of `_C.embedding_bag_compile` from dim to pooling, for a table whose rows lie side by
    side.
    """
    row_bytes = dim * (4 if dtype == "float32" else 2)
    alignment = (row_bytes | _ALIGNMENT) & -(row_bytes | _ALIGNMENT)
    codes = (
        DTYPE_NAMES.index(dtype),
        INTEGER_NAMES.index(indices),
        INTEGER_NAMES.index(offsets),
        MODES.index(mode),
    )
    return (dim, dim, alignment, *codes)


@contextmanager
def _cache_folder(folder: str | None) -> Iterator[None]:
    """Has kernels cached in another folder meanwhile."""
    if folder is None:
        yield
        return
    os.makedirs(folder, mode=0o755, exist_ok=True)  # a folder that others may write to is not used
    before = os.environ.get("RECFUSE_CACHE_DIR")
    os.environ["RECFUSE_CACHE_DIR"] = os.path.abspath(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["RECFUSE_CACHE_DIR"]
        else:
            os.environ["RECFUSE_CACHE_DIR"] = before
