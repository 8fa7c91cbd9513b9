"""Compiles kernels in the background, several at once, while other kernels are timed."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import PriorityQueue
from typing import Any, TypeAlias, TypeVar

from recfuse._lowering import compile_kernels
from recfuse.tuner.log import bar

Job: TypeAlias = Callable[[], Any]
"""A function that compiles the kernels of a candidate, such as `compile_launches` with its arguments."""
Name = TypeVar("Name", bound=Hashable)


class Compiler:
    """Compiles kernels into the kernel cache on disk, on all cores.

    No thread outlives the context, except after an interrupt: the compilation of a kernel cannot be stopped
    and may take half a minute.
    """

    def __init__(
        self, *, deadline: float | None = None, progress: bool | None = False, label: str = "compiling"
    ) -> None:
        """Kernels whose compilation has not begun by `deadline`, of `time.monotonic`, are not compiled."""
        self.deadline = deadline
        self._results: dict[Hashable, Future[Any]] = {}
        self._waiting: PriorityQueue[tuple[int, int, Hashable, Job]] = PriorityQueue()
        self._count = itertools.count()
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, "recfuse-compile")
        self._bar = bar(progress, label, total=0)

    def __enter__(self) -> Compiler:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Cancel the kernels that have not begun, and wait for the others; after an interrupt
        it does not wait.
        """
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._pool.shutdown(wait=not interrupted, cancel_futures=True)
        self._bar.close()

    def submit(self, name: Hashable, job: Job, rank: int = 0) -> None:
        """Queue a kernel, after kernels of lower rank and earlier kernels of the same rank."""
        self._bar.total += 1
        self._results[name] = Future()
        self._waiting.put((rank, next(self._count), name, job))
        self._pool.submit(self._compile_next)

    def result(self, name: Hashable) -> Any:
        """Wait for the compiler's result or its exception. Returns None for a kernel that did
        not begin in time.
        """
        return self._results[name].result()

    def _compile_next(self) -> None:
        *_, name, job = self._waiting.get_nowait()  # each call of this function follows one put
        result = None
        try:
            if self.deadline is None or time.monotonic() <= self.deadline:
                result = job()
        except Exception as error:  # an error of a kernel does not end the rest
            result = error
        self._results[name].set_result(result)
        self._bar.update()


def compile_launches(launches: Sequence[Mapping[str, Any]], **facts: Any) -> dict[str, Any]:
    """Compile the kernels of lowered calls. Returns the compiler's report of the kernel with the most
    spills, and `facts`.
    """
    reports = compile_kernels(launches)
    return {**max(reports.values(), key=lambda report: report["spill_bytes"]), **facts}


def compile_all(
    jobs: Mapping[Name, Job],
    *,
    deadline: float | None = None,
    progress: bool | None = False,
    label: str = "kernels",
) -> dict[Name, Any]:
    """Compile all kernels; return the compiler's result or exception of each that began by `deadline`."""
    with Compiler(deadline=deadline, progress=progress, label=f"compiling, {label}") as compiler:
        for name, job in jobs.items():
            compiler.submit(name, job)
        results = {name: compiler.result(name) for name in jobs}
    return {name: result for name, result in results.items() if result is not None}
