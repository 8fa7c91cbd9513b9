"""The kernels of the benchmarks themselves, compiled by torch's NVRTC."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).parent.parent / "kernels"


@functools.cache
def compiled(file: str, options: tuple[str, ...]) -> Any:
    """The kernel rf_NAME of kernels/NAME.cu."""
    import torch
    from torch.utils import cpp_extension

    # torch wants to name a toolkit's headers to the compiler, which these kernels do not include.
    cpp_extension.CUDA_HOME = cpp_extension.CUDA_HOME or "/usr/local/cuda"
    source, entry = (KERNELS / file).read_text(), f"rf_{Path(file).stem}"
    return torch.cuda._compile_kernel(source, entry, nvcc_options=list(options))
