"""`recfuse compile`: kernels for the cache, ahead of time, also on a machine without a GPU."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from recfuse import _C
from recfuse._codes import DTYPE_NAMES, INTEGER_NAMES, MODES, DType, Integer, Mode

if TYPE_CHECKING:
    from recfuse.plan import CollectionPlan, Plan
    from recfuse.plan.features import CallForm, FeatureTable
    from recfuse.tuner.compile import Job

# Gradients, then the optimizers of rf_optimizer.
TRAINING = ("gradients", "sgd", "adagrad", "rowwise_adagrad", "adam")

_ARCH = re.compile(r"sm_(\d+)[af]?")
_LEAST_ARCH = 80  # kernels prefetch into L2 with an eviction priority, which older GPUs do not have
_NO_COMPILER = re.compile(r"NVRTC \(.*is not here; looked in")  # of an error of csrc/gpu/jit/nvrtc_find.c


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    from recfuse.cli import calls

    parser = commands.add_parser(
        "compile",
        help="compile GPU kernels into the cache, also without a GPU",
        description="Compiles kernels into the cache on disk, so that no process has to at its first call. "
        "Needs no GPU, only NVRTC. What is compiled: for each --plan its own kernel, and for a collection's "
        "that of calls with a mapping; for every combination of --dim, --dtype, --mode, --index, --batch and "
        "--pooling the kernel that runs without a plan (it depends on the GPU and the size of a batch; a "
        "plan, or a --schedule with all its fields, does not); the small kernels that any call may need; "
        "with --training those of training steps; and with --columns those of embedding columns, of any "
        "columns. A folder filled by --out can be shipped: set "
        "RECFUSE_CACHE_DIR to it, and RECFUSE_JIT=off where nothing may be compiled.",
    )
    arch = "what to compile for: sm_80, sm_86, sm_89, sm_90a, sm_100; may be repeated"
    parser.add_argument("--arch", action="append", required=True, metavar="SM", help=arch)

    def several(name: str, default: list[Any], help: str | None = None, **options: Any) -> None:
        parser.add_argument(name, nargs="+", default=default, help=help, **options)

    several("--plan", [], "plans, as recfuse tune writes them", metavar="FILE")
    several("--dim", [], "elements of a row", type=int)
    several("--dtype", ["float32"], choices=DTYPE_NAMES)
    several("--mode", ["sum"], choices=MODES)
    several("--index", ["int64"], "of lookups and offsets", choices=INTEGER_NAMES)
    several("--batch", [2048], "bags of a batch, each size that will come (default: 2048)", type=int)
    pooling = "lookups of a bag on average, each that will come (default: 150)"
    several("--pooling", [150], pooling, type=int)
    gpus = "GPUs that the combinations are for, as SMs and MiB of L2, such as 132:60: the defaults depend "
    gpus += "on both (default: the known ones of each architecture)"
    several("--gpu", [], gpus, type=_gpu, metavar="SMS:MIB")
    parser.add_argument("--rows", type=int, default=500_000, help="of the table (default: %(default)s)")
    schedule = "for the combinations (default: the kernel's defaults)"
    parser.add_argument("--schedule", default="", help=schedule)
    several("--training", [], "what else to compile: gradients for optimizers of torch, and the steps of "
            "recfuse.optim's", choices=TRAINING)  # fmt: skip
    for name, help in (
        ("--weighted", "with per-sample weights (mode sum)"),
        ("--padded", "with a padding_idx"),
        ("--huge-batches", "plans also for batches of 2**30 lookups and more"),
        ("--unchecked", 'for calls with bounds_check="off"'),
        ("--stochastic-rounding", "of float16 and bfloat16 tables, in --training"),
    ):
        parser.add_argument(name, action="store_true", help=help)
    calls.add_arguments(parser)
    parser.add_argument("--out", metavar="FOLDER", help="the cache to fill (default: the user's own)")
    parser.set_defaults(run=run)


def _gpu(text: str) -> tuple[int, int]:
    sms, _, mib = text.partition(":")
    if not (sms.isdigit() and mib.isdigit() and int(sms) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not SMs:MiB, such as 132:60")
    return int(sms), int(mib)


def run(arguments: argparse.Namespace) -> int:
    """Compiles, and prints a line a kernel; 1 when any failed, or is not in the cache afterwards."""
    from recfuse.info import describe_cache
    from recfuse.tuner.compile import compile_all

    for name, least in (("rows", 1), ("batch", 1), ("pooling", 0), ("dim", 1)):
        given = getattr(arguments, name)
        lowest = min(given, default=least) if isinstance(given, list) else given
        if lowest < least:
            raise ValueError(f"--{name} is {lowest}, must be >= {least}")
    _check_uses(arguments)
    plans = _plans(arguments.plan)
    archs = list(dict.fromkeys(arguments.arch))
    for arch in archs:
        _check_arch(arch)
    jobs = {
        f"{arch} {name}": job
        for arch in archs
        for name, job in (*_of_plans(plans, arguments, arch), *_of_combinations(arguments, arch))
    }
    jobs |= _of_calls(arguments, archs)
    if not jobs and arguments.columns is None:
        raise ValueError(
            "nothing to compile: give --plan FILE, or --dim with --dtype, --mode and --index, or --columns, "
            "--ikbo-linear or --ikbo-attention"
        )
    others = {f"{arch} small kernels": partial(_no_figures, _C.small_kernels_compile, arch) for arch in archs}
    others |= {
        f"{arch} {name}": partial(_no_figures, _C.fused_embedding_bag_training_compile, arch, *job)
        for arch in archs
        for name, job in _of_training(plans, arguments)
    }
    if arguments.columns is not None:
        others |= {
            f"{arch} embedding columns": partial(_no_figures, _C.columns_kernels_compile, arch)
            for arch in archs
        }
    if arguments.out:
        os.makedirs(arguments.out, mode=0o755, exist_ok=True)  # one that others may write to is not used
    folder = None if arguments.out is None else os.path.abspath(arguments.out)
    with _environment("RECFUSE_CACHE_DIR", folder):
        results = compile_all(jobs, progress=None) | compile_all(others)
        lost = _lost(results, jobs | others)
        where = describe_cache(_C.jit_status())
    failed, without_compiler = 0, None
    for name, result in results.items():
        if isinstance(result, Exception) and _NO_COMPILER.search(str(result)):
            without_compiler = result
        elif isinstance(result, Exception):
            failed += 1
            print(f"{name}: {result}", file=sys.stderr)
        elif name in lost:
            failed += 1
            print(f"{name}: compiled, but not written to the cache ({where})", file=sys.stderr)
        else:
            print(f"{name}: {_line(result) if result else 'compiled'}")
    if without_compiler is not None:  # the same for every kernel that the cache does not have
        raise NotImplementedError(_in_one_line(without_compiler)) from without_compiler
    if failed:
        print(f"{failed} of {len(results)} failed", file=sys.stderr)
    return 1 if failed else 0


def _check_uses(arguments: argparse.Namespace) -> None:
    """Raises ValueError for an option that changes nothing, since what it is about is not compiled."""
    for needed, options in (
        ("dim", ("weighted", "padded", "schedule", "gpu")),
        ("training", ("stochastic_rounding",)),
        ("plan", ("huge_batches",)),
    ):
        given = [name for name in options if getattr(arguments, name)]
        if given and not getattr(arguments, needed):
            raise ValueError(f"--{given[0].replace('_', '-')} needs --{needed}, which is not given")
    if arguments.training and not (arguments.dim or arguments.plan or arguments.columns):
        raise ValueError("--training needs --dim or --plan, whose tables are trained; none is given")


def _lost(results: Mapping[str, Any], jobs: Mapping[str, Job]) -> set[str]:
    """Names of kernels that are not in the cache: those that say no path are taken from there once more."""
    from recfuse.tuner.compile import compile_all

    compiled = {
        name: jobs[name]
        for name, result in results.items()
        if not isinstance(result, Exception) and not result.get("path")
    }
    with _environment("RECFUSE_JIT", "off"):
        again = compile_all(compiled)
    return {name for name, result in again.items() if isinstance(result, Exception)}


def _check_arch(arch: str) -> None:
    """Raises ValueError for what is no architecture, or one that recfuse has no kernels for."""
    form = _ARCH.fullmatch(arch)
    if form is None or int(form[1]) < _LEAST_ARCH:
        allowed = (
            f"sm_{_LEAST_ARCH} or newer, such as {', '.join(dict.fromkeys(gpu['arch'] for gpu in _C.gpus()))}"
        )
        raise ValueError(f"--arch is {arch!r}, must be {allowed}")


def _in_one_line(error: Exception) -> str:
    """That NVRTC is missing: what is, the folders that were looked in, and what to install."""
    head, *lines = str(error).splitlines()
    folders = [line.strip() for line in lines if line.startswith("  ")]
    advice = [line for line in lines if not line.startswith("  ")]
    head = head[_NO_COMPILER.search(head).start() :]  # without the function that failed first
    return ". ".join([f"{head} {', '.join(folders)}", *advice])


def _no_figures(compile: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    """Several kernels at once, of which nothing is told."""
    compile(*arguments)
    return {}


def _line(result: dict[str, Any]) -> str:
    origin = "cached" if result["cached"] else "compiled"
    schedules = f"{result['classes']} schedules" if "classes" in result else "kernel"
    what = result.get("schedule", schedules)
    return (
        f"{result['registers']} registers, {result['spill_bytes']} bytes spilled, "
        f"{result['cubin_bytes']:,} bytes, {origin}, {result['seconds']:.2f} s; {what}"
    )


def _plans(paths: Sequence[str]) -> dict[str, Plan | CollectionPlan]:
    """By the names of their files."""
    from recfuse.plan import Plan

    plans = {path: Plan.load(path) for path in paths}
    for path, plan in plans.items():
        if plan.device.type != "cuda":
            raise ValueError(f"{path}: the plan is for the CPU, whose kernels are not compiled ahead of time")
    return plans


def _of_plans(
    plans: Mapping[str, Plan | CollectionPlan], arguments: argparse.Namespace, arch: str
) -> Iterator[tuple[str, Job]]:
    """Names and kernels of each plan, those of single tables first."""
    from recfuse.plan import Plan

    check = not arguments.unchecked
    for path, plan in sorted(plans.items(), key=lambda item: not isinstance(item[1], Plan)):
        if isinstance(plan, Plan):
            table, trace = plan.table, plan.trace
            shape = _shape(table.dim, table.dtype, table.indices, table.offsets, table.mode)
            sizes = round(trace.lookups), round(trace.bags)
            job = *shape, table.weighted, table.padded, check, *sizes, plan.schedule, table.rows
            yield path, partial(_C.embedding_bag_compile, arch, *job)
            continue
        for mapped, huge in itertools.product((False, True), (False, True)[: 1 + arguments.huge_batches]):
            name = path + ", with a mapping" * mapped + ", huge batches" * huge
            job = plan.compile_arguments(check=check, mapped=mapped, huge=huge)
            yield name, partial(_C.fused_embedding_bag_compile, arch, *job)


def _of_combinations(arguments: argparse.Namespace, arch: str) -> Iterator[tuple[str, Job]]:
    """Names and kernels of each combination, on each GPU that it may run on."""
    lists = (getattr(arguments, name) for name in ("dim", "dtype", "mode", "index", "batch", "pooling"))
    gpus = arguments.gpu or _gpus_of(arch) or (None,)
    # GPUs are the outermost: most kernels of another one are those of the first, which are there then.
    for gpu, dim, dtype, mode, index, batch, pooling in itertools.product(gpus, *lists):
        name = f"{dim} {dtype} {mode} {index} {batch}x{pooling}"
        on_gpu = (gpu[0], gpu[1] << 20) if gpu else ()
        weighted = arguments.weighted and mode == "sum"
        form = weighted, arguments.padded, not arguments.unchecked, batch * pooling, batch
        job = *_shape(dim, dtype, index, index, mode), *form, arguments.schedule, arguments.rows, *on_gpu
        name += f" on {gpu[0]} SMs, {gpu[1]} MiB" if gpu else ""
        yield name, partial(_C.embedding_bag_compile, arch, *job)


def _gpus_of(arch: str) -> list[tuple[int, int]]:
    """SMs and MiB of L2 of the known GPUs of an architecture, on which defaults depend."""
    known = [(gpu["sms"], gpu["l2_bytes"] >> 20) for gpu in _C.gpus() if gpu["arch"] == arch]
    return list(dict.fromkeys(known))


def _of_calls(arguments: argparse.Namespace, archs: Sequence[str]) -> dict[str, Job]:
    """Kernels of described calls on the known GPUs of each architecture, each kernel once."""
    from recfuse.cli.calls import described_calls

    jobs: dict[str, Job] = {}
    gpus = [gpu["name"] for gpu in _C.gpus() if gpu["arch"] in archs]
    gpus += [arch for arch in archs if not _gpus_of(arch)]
    for call in described_calls(arguments):
        kernels = dict.fromkeys(kernel for gpu in gpus for kernel in call.explain(gpu).kernels())
        for number, kernel in enumerate(kernels):
            jobs[f"{kernel[0]} {call.name}, {kernel[2]} {number}"] = partial(_C.kernel_compile, *kernel)
    return jobs


def _of_training(
    plans: Mapping[str, Plan | CollectionPlan], arguments: argparse.Namespace
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Names, and arguments of `_C.fused_embedding_bag_training_compile` except for the architecture."""
    if not arguments.training:
        return
    from recfuse.nn.collection_view import native_call_of

    for name, tables, form in _trained(plans, arguments):
        integers = INTEGER_NAMES.index(form.indices), INTEGER_NAMES.index(form.offsets)
        call = native_call_of([table.form for table in tables])
        for kind in arguments.training:
            number = TRAINING.index(kind) - 1  # -1: gradients; else a code of the KINDS of recfuse.ops
            rounding = arguments.stochastic_rounding
            yield f"{name}, {kind}", (call, *integers, form.weighted, number, rounding)


def _trained(
    plans: Mapping[str, Plan | CollectionPlan], arguments: argparse.Namespace
) -> Iterator[tuple[str, list[FeatureTable], CallForm]]:
    """Names, tables and types of what is trained. Batches do not matter."""
    from recfuse.plan import Plan
    from recfuse.plan.features import CallForm, FeatureTable

    for path, plan in plans.items():
        if not isinstance(plan, Plan):
            yield path, plan.feature_tables, plan.form
            continue
        table = plan.table
        yield path, [table], CallForm(table.indices, table.offsets, table.weighted)
    lists = (getattr(arguments, name) for name in ("dim", "dtype", "mode", "index"))
    for dim, dtype, mode, index in itertools.product(*lists):
        own = FeatureTable(arguments.rows, dim, dtype, mode, arguments.padded)
        weighted = arguments.weighted and mode == "sum"
        yield f"{dim} {dtype} {mode} {index}", [own], CallForm(index, index, weighted)


def _shape(dim: int, dtype: DType, indices: Integer, offsets: Integer, mode: Mode) -> tuple[Any, ...]:
    """Arguments of `_C.embedding_bag_compile` from dim to pooling, for a table as torch allocates it."""
    from recfuse.plan.base import row_bytes
    from recfuse.tuner.native import alignment

    integers = INTEGER_NAMES.index(indices), INTEGER_NAMES.index(offsets)
    return dim, dim, alignment(row_bytes(dim, dtype)), DTYPE_NAMES.index(dtype), *integers, MODES.index(mode)


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Gives a variable another value meanwhile; None: the one that it has."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
