"""Models A to E: int8, int4 and float16 tables, and their peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

import recfuse
from common.batches import Batch, from_host, model_batches
from common.checks import relative_error
from common.measure import measure, tabulate
from common.report import Figure, Row
from common.settings import Setting, comma_list, positive
from common.table import Table, times
from quantised import bench
from quantised.contestants import HALF, KINDS, NBIT, OURS, TORCH, Quantized, collection_of
from recfuse.data import workloads

ONE_ROWS, ONE_BAG = 100_000, 20  # of the figure of one table: its rows, and the lookups of a bag
OWN, FBGEMM = 3e-5, 2e-2  # errors relative to the largest value; the two parts of a sum are larger
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
    row = measured(name, weights, batches, setting)
    row.record |= {"model": name, "features": model.features, "batch_size": arguments.batch_size}
    return row


def row_of_one(dim: int, setting: Setting) -> Row:
    """Measures one table of ONE_ROWS rows; ends the program if an output is wrong."""
    arguments = setting.arguments
    size, random = arguments.batch_size, np.random.default_rng(arguments.seed)
    offsets = np.arange(0, size * ONE_BAG + 1, ONE_BAG, dtype=np.int32)
    batches = [
        from_host(random.integers(0, ONE_ROWS, size * ONE_BAG, dtype=np.int32), offsets, size, setting.device)
        for _ in range(arguments.num_batches)
    ]
    weight = torch.randn(ONE_ROWS, dim, generator=torch.Generator().manual_seed(arguments.seed))
    row = measured(f"{ONE_ROWS:,} x {dim}", [weight], batches, setting)
    row.record |= {"dim": dim, "batch_size": size}
    return row


def measured(label: str, weights: list[Tensor], batches: list[Batch], setting: Setting) -> Row:
    """Measures all candidates on tables; ends the program if an output is wrong."""
    half = collection_of(weights, torch.float16)
    if not setting.on_gpu:  # float32 outputs, as the other candidates'
        recfuse.quantize(half, {}, output_dtype=torch.float32)
    half = half.to(setting.device)
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
    return measure(label, inference, batches, setting, error_of, allowed)


def _without_gradients(run: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    def call(batch: Batch) -> Tensor:
        with torch.inference_mode():
            return run(batch)

    return call


def baselines(setting: Setting) -> list[tuple[str, str]]:
    """Pairs of a kind and the peer that its own format is compared with."""
    peers = [NBIT] if setting.on_gpu else [NBIT, TORCH]
    return [(kind, form.format(kind)) for kind in KINDS for form in (*peers, HALF)]


def ratios_of(rows: list[Row], setting: Setting, first: str = "model") -> Table:
    """Returns how many times faster the project's own format is, a row a model, and geometric means."""
    pairs = baselines(setting)
    named = [f"{peer}, by {kind}" if peer == HALF else peer for kind, peer in pairs]
    title = f"Speed of recfuse's format over each peer, by {first}"
    table = Table(title, [first, *named])
    found = [[row.ratio(OURS.format(kind), peer) for kind, peer in pairs] for row in rows]
    for row, ratios in zip(rows, found, strict=True):
        table.rows.append([row.label, *("-" if ratio is None else times(ratio) for ratio in ratios)])
    columns = [[ratio for ratio in column if ratio is not None] for column in zip(*found, strict=True)]
    means = ["-" if not column else times(geometric_mean(column)) for column in columns]
    table.rows.append(["geometric mean", *means])
    return table


@bench.figure("models")
def figure_models(setting: Setting) -> Iterator[Figure]:
    """Microseconds a call, model by model, and how many times faster than the peers."""
    rows = []
    title = f"Quantised tables, batch {setting.arguments.batch_size}: µs a call"
    for name in setting.arguments.models:
        row = row_of(name, setting)
        rows.append(row)
        setting.release()
        spent = tabulate(f"{title}, model {name}", "model", [row], list(row.record["relative_error"]))
        spent.notes += row.notes
        yield Figure([spent], {}, row.record, name=f"model {name}")
    yield Figure([ratios_of(rows, setting)], {}, [row.label for row in rows])


@bench.figure("one")
def figure_one(setting: Setting) -> Iterator[Figure]:
    """Microseconds a call for one table, by its columns."""
    rows = [row_of_one(dim, setting) for dim in (16, 64, 128)]
    spent = tabulate("One quantised table: µs a call", "table", rows, list(rows[0].record["relative_error"]))
    spent.notes += [note for row in rows for note in row.notes]
    yield Figure([spent, ratios_of(rows, setting, "table")], {}, [row.record for row in rows])
