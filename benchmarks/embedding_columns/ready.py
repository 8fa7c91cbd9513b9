"""The time until columns can be called, in new processes: construction, compilation, batch sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import recfuse
from common.report import Figure
from common.settings import Setting
from common.table import Table
from embedding_columns import bench
from embedding_columns.forms import COMPILED, RECFUSE, Separate, make_columns, named
from embedding_columns.models import Subject, bucketize
from recfuse import _C
from recfuse._clock import clock

SIZES = (256, 1, 2, 3, 31, 32, 33, 100, 255, 257, 1000, 2048, 4095, 4096)


@bench.figure("ready")
def figure_ready(setting: Setting) -> Figure:
    """With empty caches, and with the caches of the first process."""
    arguments = setting.arguments
    table = Table(
        f"Seconds until a batch of {SIZES[0]}, and calls of {len(SIZES) - 1} other sizes from 1 to 4096",
        ["", "columns", "construction", "first call", "construction and first call, new process",
         "compiled for other sizes", "slowest first call of a size, ms", "slowest later call, ms"],
    )  # fmt: skip
    records = []
    for form, count in ((RECFUSE, max(arguments.columns)), (COMPILED, min(arguments.columns))):
        if form not in arguments.contestants:
            continue
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = (in_new_process(form, count, setting, folder) for _ in range(2))
        both = warm["construction_s"] + warm["first_call_s"]
        table.rows.append(
            [
                form, str(count), f"{cold['construction_s']:.2f}", f"{cold['first_call_s']:.2f}",
                f"{both:.2f}", str(cold["compiled"]),
                *(f"{1e3 * max(warm[name]):.1f}" for name in ("first_s", "later_s")),
            ]
        )  # fmt: skip
        records.append({"form": form, "columns": count, "cold": cold, "warm": warm})
    table.notes.append(
        "Imports are not counted. The compiler's shapes are the default ones, fixed at first and then "
        "dynamic; compiled for other sizes: its graphs, or kernels, after the first."
    )
    return Figure([table], {}, records)


def in_new_process(form: str, count: int, setting: Setting, folder: str) -> dict[str, Any]:
    """Returns the output of `report`, with all caches in a folder."""
    command = [sys.executable, "-m", "embedding_columns.ready", form, str(count), str(setting.device)]
    package = str(Path(recfuse.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    changed = {
        "RECFUSE_CACHE_DIR": f"{folder}/recfuse", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "PYTHONPATH": paths,
    }  # fmt: skip
    done = subprocess.run(
        [*command, str(torch.get_num_threads())], cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, **changed}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def report(form: str, count: int, device: torch.device) -> dict[str, Any]:
    """Times of this process."""
    arguments = SimpleNamespace(seed=0, num_batches=1)
    subject = Subject("ready", [bucketize(count)], SimpleNamespace(arguments=arguments, device=device))  # type: ignore[arg-type]
    batches = {size: subject.batches(size)[0] for size in SIZES}
    finish = clock(device).finish
    finish()
    start = time.perf_counter()
    if form == RECFUSE:
        module = make_columns(subject)
        inputs = {size: named(batch.features) for size, batch in batches.items()}
    else:
        module = torch.compile(Separate(subject))
        inputs = {size: batch.features for size, batch in batches.items()}
    finish()
    record: dict[str, Any] = {"construction_s": time.perf_counter() - start}

    @torch.inference_mode()
    def seconds(size: int) -> float:
        start = time.perf_counter()
        module(inputs[size])
        finish()
        return time.perf_counter() - start

    record["first_call_s"] = seconds(SIZES[0])
    before = compiled_so_far(form)
    record["first_s"] = [seconds(size) for size in SIZES[1:]]
    record["compiled"] = compiled_so_far(form) - before
    record["later_s"] = [seconds(size) for size in SIZES[1:]]
    return record


def compiled_so_far(form: str) -> int:
    """Kernels in recfuse's cache, or graphs of torch.compile."""
    if form == RECFUSE:
        return _C.jit_status()["entries"]
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[4]))
    print(json.dumps(report(sys.argv[1], int(sys.argv[2]), torch.device(sys.argv[3]))))
