"""RECom's models E and F in plain PyTorch, column by column, against recfuse.nn.EmbeddingColumns by hand.

Tables, batches and the layers on top are those of benchmarks/embedding_columns/models.py. The plain model has
a Parameter a table, and its boundaries as numbers; its raw values come as one tensor of floats and one of
integers, and as (values, offsets) of each column of several values. By hand, values come as one packed batch,
and the layers are compiled.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

import recfuse
from common.checks import check_agreement, relative_error
from common.settings import Setting
from common.table import Table
from embedding_columns.forms import named, specifications
from embedding_columns.models import BOUNDARIES, Batch, Jagged, Kind, Model, Subject, model_kinds
from passes.measure import measure_forms
from recfuse import timing
from recfuse.nn.columns import EmbeddingColumns

PLAIN, PASSED, BY_HAND = "torch", "recfuse.backend()", "by hand"
TOLERANCE = 1e-4


class Plain(nn.Module):
    """Columns one after another, and the layers behind them."""

    def __init__(self, subject: Subject, top: Model) -> None:
        """With a subject's tables."""
        super().__init__()
        self.kinds, self.top = list(subject.columns), top
        self.tables = nn.ParameterList(nn.Parameter(table, requires_grad=False) for table in subject.tables)

    def forward(self, floats: Tensor, integers: Tensor, several: list[Jagged], dense: Tensor) -> Tensor:
        """[size, columns of a kind] each, (values, offsets) of the other columns, [size, 32] to [size, 1]."""
        at = {"floats": 0, "integers": 0, "several": 0}
        pooled = []
        for kind, table in zip(self.kinds, self.tables, strict=True):
            source = source_of(kind)
            number, at[source] = at[source], at[source] + 1
            if source == "floats":
                boundaries = torch.tensor(BOUNDARIES, device=floats.device)
                pooled.append(functional.embedding(torch.bucketize(floats[:, number], boundaries), table))
            elif source == "integers":
                pooled.append(functional.embedding(integers[:, number] % kind.rows, table))
            else:
                values, offsets = several[number]
                pooled.append(
                    functional.embedding_bag(
                        values % kind.rows, table, offsets, mode=kind.pooling, include_last_offset=True
                    )
                )
        return self.top(torch.cat(pooled, 1), dense)  # type: ignore[no-any-return]


def source_of(kind: Kind) -> str:
    """Which of the plain model's inputs has a column's values."""
    return "several" if kind.several else "floats" if kind.buckets else "integers"


def columns_of(subject: Subject) -> EmbeddingColumns:
    """The module by hand, with copies of a subject's tables, all on its device."""
    module = EmbeddingColumns(specifications(subject), device=subject.device, host_tables=None)
    with torch.no_grad():
        for name, view in module.tables.items():
            view.weight.copy_(subject.tables[int(name[1:])])
    return module.requires_grad_(False).eval()


def inputs_of(kinds: list[Kind], batch: Batch) -> tuple[Tensor, Tensor, list[Jagged], Tensor]:
    """A batch as the plain model takes it."""
    of = {
        source: [
            feature for kind, feature in zip(kinds, batch.features, strict=True) if source_of(kind) == source
        ]
        for source in ("floats", "integers", "several")
    }
    return torch.stack(of["floats"], 1), torch.stack(of["integers"], 1), of["several"], batch.dense  # type: ignore[arg-type,return-value]


def measure_columns(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, name: str
) -> tuple[Table, timing.Comparison]:
    """A model in its forms."""
    setting = Setting(parser, arguments)
    subject = Subject(name, model_kinds(name, arguments.large_rows, arguments.part), setting)
    batches = subject.batches(arguments.samples)
    top = Model(name, subject.output_dim, setting.device, arguments.seed).eval()
    plain, columns = Plain(subject, top).eval(), columns_of(subject)
    backend = recfuse.backend()
    passed = torch.compile(plain, backend=backend, fullgraph=True, dynamic=False)
    layers = torch.compile(top, dynamic=False)
    given = [inputs_of(subject.columns, batch) for batch in batches]
    packed = [columns.pack(named(batch.features)) for batch in batches]
    runs = {
        PLAIN: lambda number: plain(*given[number]),
        PASSED: lambda number: passed(*given[number]),
        BY_HAND: lambda number: layers(columns(packed[number]), batches[number].dense),
    }
    right = plain(*given[0])
    errors = [relative_error(run(0), right) for run in runs.values()]
    check_agreement(parser, errors, TOLERANCE)
    if arguments.device == "cuda":  # its copies of boundaries from the host cannot be captured
        del runs[PLAIN]
    title = f"{name}, {len(subject.columns)} columns and the layers behind them, batch {arguments.samples}"
    table, result = measure_forms(arguments, title, runs, len(batches), (BY_HAND,))
    report = backend.reports[-1]
    found = {entry.detail for entry in report.swapped}
    table.notes.append(f"Swapped: {len(report.found('columns'))} columns: {'; '.join(sorted(found))}.")
    return table, result
