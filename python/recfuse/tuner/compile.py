"""Many kernels compiled at once."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

from tqdm import tqdm

from recfuse import _C

Name = TypeVar("Name", bound=Hashable)


def compile_all(
    jobs: Mapping[Name, tuple[Any, ...]],
    *,
    deadline: float | None = None,
    progress: bool | None = False,
    label: str = "kernels",
) -> dict[Name, dict[str, Any] | Exception]:
    """Compiles kernels for the disk cache, as many at once as there are cores.

    Args:
        jobs: arguments of `_C.embedding_bag_compile` for each kernel.
        deadline: by `time.monotonic`; kernels that are not begun then are left out of the result.
        progress: show a bar; None: on a terminal.
        label: what the bar says of them.

    Returns:
        For each kernel what the compiler said, or the exception that ended it. No thread outlives the call,
        however it ends.
    """
    results: dict[Name, dict[str, Any] | Exception] = {}
    if not jobs:
        return results
    with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1), "recfuse-compile") as pool:
        futures = {pool.submit(_compile, arguments, deadline): name for name, arguments in jobs.items()}
        bar = tqdm(total=len(futures), desc=f"compiling, {label}", disable=_hidden(progress), leave=False)
        try:
            for future in as_completed(futures):
                if (result := future.result()) is not None:
                    results[futures[future]] = result
                bar.update()
        finally:
            bar.close()
            pool.shutdown(wait=False, cancel_futures=True)  # leaving the block waits for those that run
    return results


def _compile(arguments: tuple[Any, ...], deadline: float | None) -> dict[str, Any] | Exception | None:
    if deadline is not None and time.monotonic() > deadline:
        return None
    try:
        return _C.embedding_bag_compile(*arguments)
    except Exception as error:
        return error


def _hidden(progress: bool | None) -> bool | None:
    """What tqdm calls `disable`: None there means wherever it is no terminal."""
    return None if progress is None else not progress
