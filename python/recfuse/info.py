"""The environment of recfuse: versions, CPU, threads, huge pages, GPU and CUDA libraries.

`environment()` is the short record that accompanies every measurement. `collect()` adds the output of
`recfuse info`: the CUDA libraries, the folders that were searched, and missing parts. This file never starts
CUDA and needs no GPU.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from recfuse._library import VERSION, library_path

CPUINFO = Path("/proc/cpuinfo")
STAT = Path("/proc/stat")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CACHE_VARIABLES = "RECFUSE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"  # each names a folder; the first has priority
# The flags of /proc/cpuinfo that each instruction set of the CPU kernels needs.
ISA_FLAGS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "neon": {"asimd"},
}


def _read(path: Path) -> str:
    """Return the text of a file of the system, or "" if it is absent or not readable."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _cpuinfo(*keys: str) -> str:
    """Return the first value in /proc/cpuinfo with a key of `keys`, or "" if absent."""
    for line in _read(CPUINFO).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def cpu_model() -> str:
    """Return the name of the processor.

    Returns:
        str: the name, as the system reports it.

    Example:
        >>> name = recfuse.info.cpu_model()
    """
    return _cpuinfo("model name", "Model") or platform.processor() or platform.machine()


def isa_available() -> list[str]:
    """Return the instruction sets of the CPU kernels that this processor has.

    Returns:
        list: the names, best first; the last is always "scalar".

    Example:
        >>> recfuse.info.isa_available()[-1]
        'scalar'
    """
    flags = set(_cpuinfo("flags", "Features").split())
    return [name for name, needed in ISA_FLAGS.items() if needed <= flags] + ["scalar"]


def isa_unknown() -> str | None:
    """Return the reason why RECFUSE_CPU_ISA names no kernels of this CPU.

    Returns:
        str: the reason; None if the variable names kernels of this CPU or is not set.

    Example:
        >>> reason = recfuse.info.isa_unknown()
    """
    requested = os.environ.get("RECFUSE_CPU_ISA")
    if not requested or requested in isa_available():
        return None
    if requested in ISA_FLAGS:
        return f"RECFUSE_CPU_ISA={requested} is ignored, since this CPU does not have it"
    return f"RECFUSE_CPU_ISA={requested!a} is ignored; expected {', '.join(ISA_FLAGS)} or scalar"


def isa_ignored(in_use: str) -> str | None:
    """Return the reason why the kernels differ from RECFUSE_CPU_ISA.

    Args:
        in_use: the instruction set of the kernels, from ``torch.ops.recfuse.cpu_isa()``.

    Returns:
        str: the reason; None if they agree or the variable is not set.

    Example:
        >>> reason = recfuse.info.isa_ignored(torch.ops.recfuse.cpu_isa())
    """
    requested = os.environ.get("RECFUSE_CPU_ISA")
    if not requested or requested == in_use:
        return None
    return isa_unknown() or f"RECFUSE_CPU_ISA={requested} is ignored: it was set after the first use"


def last_level_cache_bytes() -> int:
    """Return the size of the largest cache of the first core.

    Returns:
        int: bytes; 64 MiB if unknown.

    Example:
        >>> recfuse.info.last_level_cache_bytes() > 0
        True
    """
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [
        int(text[:-1]) * units[text[-1]]
        for text in (_read(path).strip() for path in CACHES.glob("index*/size"))
        if text[:-1].isdigit() and text[-1] in units
    ]
    return max(sizes, default=64 << 20)


def huge_pages() -> str:
    """Return the setting of transparent huge pages.

    Returns:
        str: "always", "madvise", "never" or "unknown".

    Example:
        >>> recfuse.info.huge_pages() in ("always", "madvise", "never", "unknown")
        True
    """
    text = _read(HUGE_PAGES)
    return text[text.index("[") + 1 : text.index("]")] if "[" in text and "]" in text else "unknown"


def busy_seconds() -> float | None:
    """Return the processor time of all processes, and of a hypervisor, since the start of the system.

    Returns:
        float: seconds; None if the system does not report them.

    Example:
        >>> seconds = recfuse.info.busy_seconds()
    """
    fields = _read(STAT).partition("\n")[0].split()
    if len(fields) < 9 or fields[0] != "cpu":
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def git_commit() -> str | None:
    """Return the commit of the source tree of this package.

    Returns:
        str: the commit, with "+" if the tree has changes; None without a source tree or git.

    Example:
        >>> commit = recfuse.info.git_commit()
    """
    try:
        described = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=+"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def package_version(name: str) -> str | None:
    """Return the version of an installed distribution.

    Args:
        name: the name of the distribution.

    Returns:
        str: the version; None if it is not installed.

    Example:
        >>> recfuse.info.package_version("torch") is not None
        True
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Return the record that accompanies a measurement.

    Returns:
        dict: versions, machine, threads, commit, command and time.

    Example:
        >>> recfuse.info.environment()["recfuse"] == recfuse.__version__
        True
    """
    import numpy
    import torch

    return {
        "recfuse": VERSION,
        "library": torch.ops.recfuse.library_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "fbgemm": package_version("fbgemm-gpu-cpu") or package_version("fbgemm-gpu"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "isa": torch.ops.recfuse.cpu_isa(),
        "threads": torch.get_num_threads(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "huge_pages": huge_pages(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES"),
        "commit": git_commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _gpus(libcuda: str | None) -> list[str]:
    """Return the names of the GPUs that the driver reports; [] without driver or GPU.

    Creates no CUDA context.
    """
    count, names = ctypes.c_int(0), list[str]()
    try:
        driver = None if libcuda is None else ctypes.CDLL(libcuda)
    except OSError:
        return names
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return names
    for ordinal in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        if driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0:
            driver.cuDeviceGetName(name, len(name), device)
            names.append(name.value.decode(errors="replace"))
    return names


def cuda() -> dict[str, Any]:
    """Return the state of CUDA on this machine.

    Returns:
        dict: ``gpus``; ``libraries``, each with ``found`` and ``looked_in``, NVRTC also with its ``version``;
        ``missing``; ``torch_cuda``; ``kernel_cache`` with ``folder``, ``entries``, ``bytes``, ``allowed``
        (compilation is allowed), ``refused`` (the reason why the folder is not used, or None) and ``ignored``
        (the number of ignored files).

    Example:
        >>> gpus = recfuse.info.cuda()["gpus"]
    """
    import torch

    from recfuse import _C

    jit = _C.jit_status()
    libcuda = ctypes.util.find_library("cuda")
    looked_in = [line.strip() for line in (jit["missing"] or "").splitlines() if line.startswith("  ")]
    libraries = {
        "libcuda": {"found": libcuda, "looked_in": ["the loader's search path"]},
        "libnvrtc": {
            "found": jit["nvrtc"],
            "looked_in": looked_in,
            "version": f"{jit['major']}.{jit['minor']}" if jit["nvrtc"] else None,
        },
        "libnvrtc-builtins": {"found": jit["builtins"], "looked_in": looked_in},
    }
    gpus = _gpus(libcuda)
    missing = [name for name, where in libraries.items() if where["found"] is None]
    return {
        "gpus": gpus,
        "libraries": libraries,
        "missing": missing + ([] if gpus else ["a GPU"]),
        "torch_cuda": torch.version.cuda,
        "kernel_cache": {
            name: jit[name] for name in ("folder", "entries", "bytes", "allowed", "refused", "ignored")
        },
    }


def describe_cache(cache: Mapping[str, Any]) -> str:
    """Describe the folder of compiled kernels.

    Args:
        cache: the record ``cuda()["kernel_cache"]``.

    Returns:
        str: the folder, or the reason why no folder is used.

    Example:
        >>> text = recfuse.info.describe_cache(recfuse.info.cuda()["kernel_cache"])
    """
    if cache["folder"]:
        return cache["folder"] + (f", which is not used: {cache['refused']}" if cache["refused"] else "")
    first, *others = (os.environ.get(name, "") for name in CACHE_VARIABLES)
    path = first or next((other for other in others if other.startswith("/")), None)
    if path is None:
        return f"none: {', '.join(CACHE_VARIABLES[:-1])} and {CACHE_VARIABLES[-1]} are not set"
    size = len(os.fsencode(path))
    return f"none: its path of {size:,} bytes is too long, or relative to a folder that is gone: {path:.60}"


def collect() -> dict[str, Any]:
    """Return the record that ``recfuse info`` prints.

    Returns:
        dict: the record of :func:`environment`, paths, instruction sets, and :func:`cuda`.

    Example:
        >>> recfuse.info.collect()["library_path"] == recfuse.library_path()
        True
    """
    record = environment()
    isa = {"isa_available": isa_available(), "isa_ignored": isa_ignored(record["isa"])}
    return {**record, "library_path": library_path(), **isa, "cuda": cuda()}
