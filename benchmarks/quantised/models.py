"""Models A to E: int8, int4 and float16 tables, and their peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from common.batches import Batch, model_batches
from common.checks import relative_error
from common.measure import measure, tabulate
from common.report import Figure, Row
from common.settings import Setting, comma_list, positive
from common.table import Table, times
from quantised import bench
from quantised.contestants import HALF, KINDS, NBIT, OURS, ROWS, TORCH, Quantized, collection_of
from recfuse.data import workloads

OWN, FBGEMM, ROUNDED = 1e-5, 2e-2, 1e-5  # errors relative to the largest value
bench.flag("--models", comma_list, list("ABCDE"), "models", allowed=list("ABCDE"), quick=["D"])
bench.flag("--batch-size", positive, 512, "samples", cpu=187)
bench.flag("--num-batches", positive, 4, "batches to rotate through", quick=2)


def row_of(name: str, setting: Setting) -> Row:
    """Measures one model; ends the program if an output is wrong."""
    arguments = setting.arguments
    model = workloads.model(name, seed=arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    weights = [
        torch.randn(rows, dim, generator=generator) for rows, dim in zip(model.rows, model.dims, strict=True)
    ]
    seeds = range(1, arguments.num_batches + 1)
    batches = model_batches(model, [arguments.batch_size] * len(seeds), seeds, setting.device)
    half = collection_of(weights, torch.float16).to(setting.device)
    runs: dict[str, Callable[[Batch], Tensor]] = {HALF: lambda batch: half(batch.indices, batch.offsets)}
    halves = [weight.half().double().to(setting.device) for weight in weights]
    right = {
        "float16": torch.cat(
            [
                torch.nn.functional.embedding_bag(rows, table, starts, mode="sum")
                for table, (rows, starts) in zip(halves, batches[0].parts, strict=True)
            ],
            1,
        )
    }
    del halves
    for kind in KINDS:
        tables = Quantized(weights, kind, setting.device)
        right[kind] = tables.right(batches[0])
        runs |= tables.runs()

    def error_of(run: str, output: Any) -> float:
        kind = next(kind for kind in right if kind in run)
        return relative_error(output.to(setting.device), right[kind])

    def allowed(run: str) -> float:
        return 1e-3 if run == HALF else FBGEMM if run.startswith(("FBGEMM", "torch")) else OWN

    inference = {name: _without_gradients(run) for name, run in runs.items()}
    row = measure(name, inference, batches, setting, error_of, allowed)
    row.record |= {"model": name, "features": model.features, "batch_size": arguments.batch_size}
    return row


def _without_gradients(run: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    def call(batch: Batch) -> Tensor:
        with torch.inference_mode():
            return run(batch)

    return call


@bench.figure("models")
def figure_models(setting: Setting) -> Iterator[Figure]:
    """Microseconds a call, and how many times faster than the peers: a row a model."""
    rows = []
    for name in setting.arguments.models:
        rows.append(row_of(name, setting))
        setting.release()
    title = f"Quantised tables, batch {setting.arguments.batch_size}: us a call"
    peers = [NBIT] if setting.on_gpu else [NBIT, TORCH]
    names = [HALF, *(form.format(kind) for kind in KINDS for form in (OURS, ROWS, *peers))]
    spent = tabulate(
        title, "model", rows, [name for name in names if any(name in row.result.timings for row in rows)]
    )
    baselines = [(kind, peer.format(kind)) for kind in KINDS for peer in peers] + [
        (kind, HALF) for kind in KINDS
    ]
    ratios = Table(
        "recfuse's own format is faster than",
        ["model", *(f"{peer}, by {kind}" if peer == HALF else peer for kind, peer in baselines)],
    )
    found: dict[int, list[float]] = {}
    for row in rows:
        cells = []
        for at, (kind, peer) in enumerate(baselines):
            ratio = row.ratio(OURS.format(kind), peer)
            cells.append("-" if ratio is None else times(ratio))
            found.setdefault(at, []).extend([] if ratio is None else [ratio])
        ratios.rows.append([row.label, *cells])
    means = ["-" if not found[at] else times(geometric_mean(found[at])) for at in range(len(baselines))]
    ratios.rows.append(["geometric mean", *means])
    spent.notes += [note for row in rows for note in row.notes]
    yield Figure([spent, ratios], {}, [row.record for row in rows])
