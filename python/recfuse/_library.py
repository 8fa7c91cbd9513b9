"""``librecfuse.so``: its path, and the registration of the operators."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def library_path() -> str:
    """Return the path of ``librecfuse.so``, for ``torch.ops.load_library`` in a process without the package.

    Returns:
        str: the value of the environment variable ``RECFUSE_LIBRARY``, else the file in the package's folder.

    Example:
        >>> torch.ops.load_library(recfuse.library_path())
    """
    return os.environ.get("RECFUSE_LIBRARY") or str(Path(__file__).with_name("librecfuse.so"))


def include_dir() -> str:
    """Return the folder of ``recfuse.h``, the C API, for a compiler's ``-I``.

    Programs link ``librecfuse_core.so`` in the folder above, which needs no torch, or, in a process with
    torch, ``librecfuse.so``. A process must never load both.

    Returns:
        str: the folder.

    Example:
        >>> recfuse.include_dir()
        '.../recfuse/include'
    """
    return str(Path(__file__).with_name("include"))


def _load() -> str:
    """Register the operators and return the library's version.

    Raises:
        ImportError: the library is missing or does not load; names the file, the reason and the remedy.
    """
    path = library_path()
    source = "named by RECFUSE_LIBRARY" if os.environ.get("RECFUSE_LIBRARY") else "part of the package"
    if not os.path.isfile(path):
        raise ImportError(
            f"recfuse: {path} ({source}) does not exist. Install the package (pip install .) or build it in "
            "place (python setup.py build_ext --inplace), or unset RECFUSE_LIBRARY."
        )
    try:
        in_use = torch.ops.recfuse.library_path()
    except AttributeError:
        in_use = path  # no operators yet
    if not os.path.samefile(in_use, path):
        raise ImportError(
            f"recfuse: {path} ({source}) would be a second copy of the library, since this process has the "
            f"operators of {in_use} already. Set RECFUSE_LIBRARY={in_use}, or load no other file before the "
            "package."
        )
    try:
        torch.ops.load_library(path)
        return str(torch.ops.recfuse.library_version())
    except (OSError, AttributeError, RuntimeError) as error:
        raise ImportError(
            f"recfuse: {path} ({source}) does not load with torch {torch.__version__} ({error}); expected "
            "torch >= 2.11 on Linux and a library built for this kind of machine. Reinstall recfuse."
        ) from error


VERSION = _load()
