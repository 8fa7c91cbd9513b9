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
    """Return the name of the processor, from the system."""
    return _cpuinfo("model name", "Model") or platform.processor() or platform.machine()


def isa_available() -> list[str]:
    """Return the instruction sets of the CPU kernels that this processor has, best first; always "scalar"."""
    flags = set(_cpuinfo("flags", "Features").split())
    return [name for name, needed in ISA_FLAGS.items() if needed <= flags] + ["scalar"]


def isa_unknown() -> str | None:
    """Return why RECFUSE_CPU_ISA names no kernels of this CPU, or None if it does or is not set."""
    asked = os.environ.get("RECFUSE_CPU_ISA")
    if not asked or asked in isa_available():
        return None
    if asked in ISA_FLAGS:
        return f"RECFUSE_CPU_ISA={asked} is ignored, since this CPU does not have it"
    return f"RECFUSE_CPU_ISA={asked!a} is ignored; expected {', '.join(ISA_FLAGS)} or scalar"


def isa_ignored(in_use: str) -> str | None:
    """Return why the kernels differ from RECFUSE_CPU_ISA, or None if they agree or it is not set."""
    asked = os.environ.get("RECFUSE_CPU_ISA")
    if not asked or asked == in_use:
        return None
    return isa_unknown() or f"RECFUSE_CPU_ISA={asked} is ignored: it was set after the first use"


def last_level_cache_bytes() -> int:
    """Return the size of the largest cache of the first core, or 64 MiB if unknown."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [
        int(text[:-1]) * units[text[-1]]
        for text in (_read(path).strip() for path in CACHES.glob("index*/size"))
        if text[:-1].isdigit() and text[-1] in units
    ]
    return max(sizes, default=64 << 20)


def huge_pages() -> str:
    """Return the setting of transparent huge pages: "always", "madvise", "never" or "unknown"."""
    text = _read(HUGE_PAGES)
    return text[text.index("[") + 1 : text.index("]")] if "[" in text and "]" in text else "unknown"


def busy_seconds() -> float | None:
    """Return the processor time of all processes, and of a hypervisor, since the start, in seconds."""
    fields = _read(STAT).partition("\n")[0].split()
    if len(fields) < 9 or fields[0] != "cpu":
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def git_commit() -> str | None:
    """Return the commit of the source tree of this package, with "+" if the tree has changes."""
    try:
        described = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=+"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def package_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Return the record that accompanies a measurement: versions, machine, threads, commit, command, time."""
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

    The entries are `gpus`; `libraries`, each with `found` and `looked_in`, NVRTC also with its `version`;
    `missing`; `torch_cuda`; `kernel_cache` with `folder`, `entries`, `bytes`, `allowed` (compilation is
    allowed), `refused` (the reason why the folder is not used, or None) and `ignored` (the number of ignored
    files).
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
    """Describe the folder of compiled kernels, and why it is not used, from `recfuse._C.jit_status()`."""
    if cache["folder"]:
        return cache["folder"] + (f", which is not used: {cache['refused']}" if cache["refused"] else "")
    own, *others = (os.environ.get(name, "") for name in CACHE_VARIABLES)
    path = own or next((other for other in others if other.startswith("/")), None)
    if path is None:
        return f"none: {', '.join(CACHE_VARIABLES[:-1])} and {CACHE_VARIABLES[-1]} are not set"
    size = len(os.fsencode(path))
    return f"none: its path of {size:,} bytes is too long, or relative to a folder that is gone: {path:.60}"


def collect() -> dict[str, Any]:
    """Return the record that `recfuse info` prints: `environment()`, paths, instruction sets and `cuda()`."""
    record = environment()
    isa = {"isa_available": isa_available(), "isa_ignored": isa_ignored(record["isa"])}
    return {**record, "library_path": library_path(), **isa, "cuda": cuda()}
