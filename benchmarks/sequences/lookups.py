"""Many long features whose rows repeat: lookups one feature after the other, and steps of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import recfuse
from common.calls import EAGER
from common.measure import measure
from common.report import Figure, Row, load_notes
from common.settings import Setting
from common.table import Table, times
from sequences import bench
from sequences.group import difference_of, table_of
from sequences.sides import FBGEMM, RECFUSE, TORCH, Batch, batch_of, collection_of, contestants, fbgemm_of

HISTORIES = 1024
LEARNING_RATE = 0.01
OPTIMIZERS = {"SGD": "EXACT_SGD", "Adam": "ADAM"}


def long_batches(setting: Setting) -> tuple[list[Tensor], list[Batch]]:
    """Tables, and batches of `unique` rows of each, some of them several times."""
    arguments = setting.arguments
    torch.manual_seed(arguments.seed)
    shape = arguments.table_rows, arguments.table_dim
    weights = [torch.randn(shape, device=setting.device) for _ in range(arguments.tables)]
    histories = min(HISTORIES, arguments.table_lookups)
    batches = []
    for _ in range(arguments.num_batches):
        cuts = torch.randint(arguments.table_lookups + 1, (histories - 1,)).sort().values
        lengths = torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([arguments.table_lookups]))
        indices = []
        for _ in weights:
            rows = torch.randperm(arguments.table_rows)[: arguments.unique]
            again = rows[torch.randint(len(rows), (arguments.table_lookups - len(rows),))]
            order = torch.randperm(arguments.table_lookups)
            indices.append(torch.cat((rows, again))[order])
        batches.append(batch_of([lengths] * arguments.tables, indices, setting.device))
    return weights, batches


def title_of(setting: Setting) -> str:
    """The sizes of the tables and lookups."""
    arguments = setting.arguments
    return (
        f"{arguments.tables} tables of {arguments.table_rows:,} x {arguments.table_dim}, "
        f"{arguments.table_lookups:,} lookups of {arguments.unique:,} rows each"
    )


@bench.figure("lookups")
@torch.inference_mode()
def figure_lookups(setting: Setting) -> Figure:
    """The rows of all features, one feature after the other."""
    arguments = setting.arguments
    weights, batches = long_batches(setting)
    runs, notes = contestants(weights, "jagged", 0)
    right = runs[TORCH](batches[0])
    label = "forward"
    row = measure(label, runs, batches, setting, lambda name, output: difference_of(output, right), 0.0)
    size = arguments.table_dim * 4
    moved = arguments.tables * (arguments.unique * size + arguments.table_lookups * (size + 8))
    limits = {label: moved / setting.copy_speed} if setting.on_gpu else {}
    return Figure([table_of(title_of(setting), [row], setting, limits, notes)], {}, row.record)


def steps(
    weights: Sequence[Tensor], kind: str, grad: Tensor
) -> tuple[dict[str, Callable[[Batch], Any]], dict[str, list[Tensor]], list[str]]:
    """A training step of each contestant, its tables, and notes."""
    notes, runs = [], {}
    ours = collection_of(weights)
    optimizer = getattr(recfuse.optim, kind)(ours, lr=LEARNING_RATE)
    matrices, features, dim = ours.packed_weights(), ours.layout.features, weights[0].shape[1]

    def step_ours(batch: Batch) -> None:
        recfuse.fused_embedding(matrices, features, batch.indices, batch.offsets, dim).backward(grad)
        optimizer.step()

    tables = {RECFUSE: [table.weight.detach() for table in ours.tables.values()]}
    try:
        theirs = fbgemm_of(weights, OPTIMIZERS[kind], LEARNING_RATE)
        runs[FBGEMM] = lambda batch: theirs(batch.indices, batch.offsets).backward(grad)
        tables[FBGEMM] = theirs.split_embedding_weights()
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        notes.append(f"{FBGEMM} is left out: {str(error).partition(chr(10))[0]}")
    runs[RECFUSE] = step_ours
    return runs, tables, notes


def rows_after(run: Callable[[Batch], Any], batch: Batch, tables: Sequence[Tensor]) -> Tensor:
    """Some rows of each table after a step."""
    run(batch)
    return torch.stack([table[:1000].clone() for table in tables])


def distance(outputs: dict[str, Tensor], name: str, output: Tensor) -> float:
    """The largest difference from the first contestant, which ``outputs`` keeps."""
    right = outputs.setdefault("", output)
    return float((output - right).abs().max())


@bench.figure("training", on=("cuda",))
def figure_training(setting: Setting) -> Figure:
    """A step with each optimizer: forward, backward from a given gradient, and the update."""
    weights, batches = long_batches(setting)
    table = Table(f"us a step, {title_of(setting)}", ["optimizer", "call", FBGEMM, RECFUSE, f"over {FBGEMM}"])
    record: dict[str, Any] = {}
    rows: list[Row] = []
    for kind in OPTIMIZERS:
        grad = torch.randn(len(batches[0].indices), weights[0].shape[1], device=setting.device)
        runs, tables, notes = steps(weights, kind, grad)

        outputs: dict[str, Tensor] = {}
        first = {name: partial(rows_after, run, batches[0], tables[name]) for name, run in runs.items()}
        error_of = partial(distance, outputs)
        row = measure(kind, runs, batches, setting, error_of, 1e-3, first=first)
        for suffix, called in (("", "graph"), (EAGER, "called")) if setting.on_gpu else (("", "called"),):
            ratio = times(row.ratio(RECFUSE + suffix, FBGEMM + suffix))
            table.rows.append([kind, called, row.cell(FBGEMM + suffix), row.cell(RECFUSE + suffix), ratio])
        rows.append(row)
        record[kind] = row.record
        table.notes += [*notes, *row.notes]
        del runs, tables, first
        setting.release()
    table.notes += load_notes([row.result for row in rows])
    return Figure([table], {}, record)
