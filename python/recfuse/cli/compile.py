"""`recfuse compile`: compiles kernels into the cache ahead of time, also on a machine without a GPU."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from recfuse import _C
from recfuse.cli import calls

if TYPE_CHECKING:
    from recfuse._lowering import Kernel
    from recfuse.perf.described import DescribedCall
    from recfuse.plan import CollectionPlan, Plan

# In an error of csrc/gpu/jit/nvrtc_find.c.
_NO_COMPILER = re.compile(r"NVRTC \(.*is in no place that was searched:")


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "compile",
        help="compile GPU kernels into the cache, also without a GPU",
        description="Compiles kernels into the cache on disk, so that no first call compiles. Needs NVRTC, "
        "but no GPU. The options describe calls; the kernels of these calls are compiled for the known GPUs "
        "of each --arch. --plan and --collection: batches of any size, with and without a mapping. --dim: "
        "each combination of --dim, --dtype, --mode, --index, --batch and --pooling, with the default "
        "schedule, which depends on the GPU and on the size of the batch (a plan, or a --schedule with all "
        "fields, does not). --training: also training steps with batches of any size. --columns: the columns "
        "of FILE, or without FILE any columns. To ship a folder that --out filled, set RECFUSE_CACHE_DIR to "
        "it; RECFUSE_JIT=off forbids compilation.",
    )
    arch = "architecture (sm_80, sm_86, sm_89, sm_90a, sm_100) or name of a GPU; may be repeated"
    parser.add_argument("--arch", action="append", required=True, metavar="SM", help=arch)
    gpus = "SMs and MiB of L2 of the GPUs of each architecture, such as 132:60: default schedules depend on "
    gpus += "both (default: the known GPUs)"
    parser.add_argument("--gpu", nargs="+", default=[], type=_gpu, metavar="SMS:MIB", help=gpus)
    huge = "compile plans also for batches of 2**30 lookups and more"
    parser.add_argument("--huge-batches", action="store_true", help=huge)
    parser.add_argument(
        "--out", metavar="FOLDER", help="folder of the cache (default: the cache of the user)"
    )
    calls.add_arguments(parser)
    parser.set_defaults(run=run)


def _gpu(text: str) -> str:
    sms, _, mib = text.partition(":")
    if not (sms.isdigit() and mib.isdigit() and int(sms) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not SMs:MiB, such as 132:60")
    return text


def run(arguments: argparse.Namespace) -> int:
    """Compile kernels and print a line for each; return 1 if any failed, or is not in the
    cache afterwards.
    """
    from recfuse.info import describe_cache
    from recfuse.tuner.compile import compile_all

    gpus = [gpu for arch in dict.fromkeys(arguments.arch) for gpu in _gpus_of(arch, arguments.gpu)]
    calls.check(arguments, "compile")
    calls.needs(arguments, ("plan",), "huge_batches")
    plans = _plans(arguments.plan)
    from recfuse.cli.described_calls import described_calls

    kernels, refused = _lower(described_calls(arguments, plans, any_batch=True), gpus)
    if arguments.out:
        os.makedirs(arguments.out, mode=0o755, exist_ok=True)  # a folder that others may write to is not used
    folder = None if arguments.out is None else os.path.abspath(arguments.out)
    with _environment("RECFUSE_CACHE_DIR", folder):
        jobs = {name: partial(_C.kernel_compile, *kernel) for name, kernel in kernels.items()}
        results = refused | compile_all(jobs, progress=None)
        compiled = [name for name in kernels if not isinstance(results[name], Exception)]
        lost = {name for name in compiled if _C.kernel_compile(*kernels[name], True) is None}
        where = describe_cache(_C.jit_status())
    return _report(results, lost, where)


def _report(results: Mapping[str, Any], lost: set[str], where: str) -> int:
    """Print a line for each result; `lost`: the kernels that are not in the cache."""
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
            print(f"{name}: {_line(result)}")
    if without_compiler is not None:  # the same error for every kernel that the cache does not have
        raise NotImplementedError(_in_one_line(without_compiler)) from without_compiler
    if failed:
        print(f"{failed} of {len(results)} failed", file=sys.stderr)
    return 1 if failed else 0


def _lower(
    described: Iterable[DescribedCall], gpus: Sequence[str]
) -> tuple[dict[str, Kernel], dict[str, Exception]]:
    """Lower calls for several GPUs.

    Returns the distinct kernels by name (of the first call that has the kernel), and the distinct
    errors of calls.
    """
    names: dict[Kernel, str] = {}
    errors: dict[str, tuple[str, Exception]] = {}
    for call, gpu in itertools.product(described, gpus):
        try:
            kernels = call.kernels(gpu)
        except (ValueError, TypeError, MemoryError, NotImplementedError) as error:
            if not (call.optional and isinstance(error, NotImplementedError)):
                errors.setdefault(str(error), (f"{gpu} {call.name}", error))
            continue
        for kernel in kernels:
            if kernel not in names:
                names[kernel] = f"{kernel[0]} {call.name}, {kernel[2]} {len(names)}"
    refused = dict(errors.values())
    return {name: kernel for kernel, name in names.items()}, refused


def _gpus_of(arch: str, sizes: Sequence[str]) -> list[str]:
    """Return the GPUs of an architecture: with the given SMs and MiB of L2, or the known GPUs.

    Raises ValueError for a text that is no architecture, or an architecture without kernels of recfuse.
    """
    gpus = _C.gpus()
    try:
        gpu = calls.gpu_of(arch)
    except ValueError as error:
        archs = dict.fromkeys(known["arch"] for known in gpus)
        raise ValueError(
            f"--arch is {arch!r}; expected sm_80 or newer, such as {', '.join(archs)}, or one of "
            f"{', '.join(known['name'] for known in gpus)}"
        ) from error
    if sizes:
        return [f"{gpu['arch']}:{size}" for size in sizes]
    return [known["name"] for known in gpus if known["arch"] == arch] or [arch]


def _in_one_line(error: Exception) -> str:
    """Return the error that NVRTC is missing in a single line: missing files, searched folders, and the
    packages to install.
    """
    head, *lines = str(error).splitlines()
    folders = [line.strip() for line in lines if line.startswith("  ")]
    advice = [line for line in lines if not line.startswith("  ")]
    head = head[_NO_COMPILER.search(head).start() :]  # without the name of the function that failed first
    return ". ".join([f"{head} {', '.join(folders)}", *advice])


def _line(result: dict[str, Any]) -> str:
    origin = "cached" if result["cached"] else "compiled"
    return (
        f"{result['registers']} registers, {result['spill_bytes']} bytes spilled, "
        f"{result['cubin_bytes']:,} bytes, {origin}, {result['seconds']:.2f} s"
    )


def _plans(paths: Sequence[str]) -> dict[str, Plan | CollectionPlan]:
    """Load plans, by the names of their files."""
    from recfuse.plan import Plan

    plans = {path: Plan.load(path) for path in paths}
    for path, plan in plans.items():
        if plan.device.type != "cuda":
            raise ValueError(f"{path}: the plan is for the CPU, whose kernels were compiled with the package")
    return plans


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable within the context; value None: leaves it unchanged."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
