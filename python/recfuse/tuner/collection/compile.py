"""Fused kernels compiled in the background, several at once, while others are timed."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import PriorityQueue
from typing import Any

from tqdm import tqdm

from recfuse import _C
from recfuse.tuner.compile import _hidden


class Compiler:
    """Compiles kernels for the disk cache, as many at once as there are cores, the urgent ones first.

    To be left as a context: no thread outlives it, however it ends.
    """

    def __init__(self, *, deadline: float | None = None, progress: bool | None = False) -> None:
        """Kernels that are not begun by `deadline`, of `time.monotonic`, are not compiled."""
        self.deadline = deadline
        self._results: dict[Hashable, Future[dict[str, Any] | Exception | None]] = {}
        self._waiting: PriorityQueue[tuple[int, int, Hashable, tuple[Any, ...]]] = PriorityQueue()
        self._count = itertools.count()
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, "recfuse-compile")
        self._bar = tqdm(total=0, desc="compiling", disable=_hidden(progress), leave=False)

    def __enter__(self) -> Compiler:
        """Itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends what runs, and begins nothing more."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._bar.close()

    def submit(self, name: Hashable, arguments: tuple[Any, ...], rank: int = 0) -> None:
        """Has a kernel compiled, with these arguments of `_C.fused_embedding_bag_compile`, after those of
        lower rank and those of the same that were there before.
        """
        self._bar.total += 1
        self._results[name] = Future()
        self._waiting.put((rank, next(self._count), name, arguments))
        self._pool.submit(self._compile_one)

    def result(self, name: Hashable) -> dict[str, Any] | Exception | None:
        """What the compiler said of a kernel, or the exception that ended it; waits for it. None: it was
        not begun in time.
        """
        return self._results[name].result()

    def _compile_one(self) -> None:
        *_, name, arguments = self._waiting.get_nowait()  # there is one for each call of this
        result: dict[str, Any] | Exception | None = None
        try:
            if self.deadline is None or time.monotonic() <= self.deadline:
                result = _C.fused_embedding_bag_compile(*arguments)
        except Exception as error:  # one that fails does not end the rest
            result = error
        self._results[name].set_result(result)
        self._bar.update()


def compile_fused(
    jobs: dict[Hashable, tuple[Any, ...]], *, progress: bool | None = False
) -> dict[Hashable, dict[str, Any] | Exception]:
    """What became of kernels, all compiled before it returns."""
    with Compiler(progress=progress) as compiler:
        for name, arguments in jobs.items():
            compiler.submit(name, arguments)
        return {name: compiler.result(name) for name in jobs}
