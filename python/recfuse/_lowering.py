"""The kernels of lowered calls, and their compilation into the cache on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from recfuse import _C

Kernel: TypeAlias = tuple[str, str, str, str]
"""Architecture, file, name, ``-D`` options: arguments of `_C.kernel_compile`."""


def kernel_of(launch: Mapping[str, Any]) -> Kernel:
    """Return the kernel of a launch, in the form of `_C.explain_end`."""
    return launch["gpu"]["arch"], launch["file"], launch["kernel"], launch["defines"]


def kernels_of(launches: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """Return the distinct kernels of launches."""
    return list(dict.fromkeys(kernel_of(launch) for launch in launches if launch["file"]))


def compile_kernels(launches: Sequence[Mapping[str, Any]]) -> dict[Kernel, dict[str, Any]]:
    """Compile the kernels of launches into the cache on disk, and return the compiler's reports.

    Raises:
        NotImplementedError: there is no compiler, or ``RECFUSE_JIT=off`` forbids it.
    """
    return {kernel: _C.kernel_compile(*kernel) for kernel in kernels_of(launches)}
