"""RECom's models E and F in plain PyTorch, column by column, against recfuse.nn.EmbeddingColumns by hand.

Tables, batches and the layers on top are those of benchmarks/embedding_columns/models.py. The plain model has
a tensor per table, and its boundaries as numbers; its raw values are one tensor of floats, one of integers,
and (values, offsets) of each column of several values. torch's make_fx records its graph for recfuse.swap in
seconds; torch.compile would take a minute. By hand, values are one packed batch. The layers after the columns
are compiled, the same for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import recfuse
from common.checks import check_agreement, relative_error
from common.report import Figure
from common.settings import Setting
from embedding_columns.forms import make_columns, named
from embedding_columns.models import BOUNDARIES, Batch, Kind, Model, Subject, model_kinds
from passes import bench
from passes.figures import measure_forms

PLAIN, PASSED, BY_HAND = "torch", "recfuse.swap(graph)", "by hand"
TOLERANCE = 1e-4


class Plain(nn.Module):
    """The columns, computed one by one."""

    def __init__(self, subject: Subject) -> None:
        """Takes the tables of a subject."""
        super().__init__()
        self.kinds = list(subject.columns)

    def forward(self, *tensors: Tensor) -> Tensor:
        """A table per column; floats and integers [size, columns of a kind]; values and offsets of each of
        the other columns, as separate arguments, because Python would unpack a list of them in each
        call."""
        count = len(self.kinds)
        tables, (floats, integers), rest = tensors[:count], tensors[count : count + 2], tensors[count + 2 :]
        pairs = list(zip(rest[::2], rest[1::2], strict=True))
        at = {"floats": 0, "integers": 0, "several": 0}
        pooled = []
        for kind, table in zip(self.kinds, tables, strict=True):
            source = source_of(kind)
            number, at[source] = at[source], at[source] + 1
            if source == "floats":
                boundaries = torch.tensor(BOUNDARIES, device=floats.device)
                pooled.append(functional.embedding(torch.bucketize(floats[:, number], boundaries), table))
            elif source == "integers":
                pooled.append(functional.embedding(integers[:, number] % kind.rows, table))
            else:
                values, offsets = pairs[number]
                pooled.append(
                    functional.embedding_bag(
                        values % kind.rows, table, offsets, mode=kind.pooling, include_last_offset=True
                    )
                )
        return torch.cat(pooled, 1)


def source_of(kind: Kind) -> str:
    """Returns the name of the plain model's input that has a column's values."""
    return "several" if kind.several else "floats" if kind.buckets else "integers"


def inputs_of(kinds: list[Kind], batch: Batch) -> list[Tensor]:
    """Returns a batch in the form of the plain model, after its tables."""
    of = {
        source: [
            feature for kind, feature in zip(kinds, batch.features, strict=True) if source_of(kind) == source
        ]
        for source in ("floats", "integers", "several")
    }
    dense = [torch.stack(of[source], 1) for source in ("floats", "integers")]  # type: ignore[arg-type]
    return [*dense, *itertools.chain.from_iterable(of["several"])]


@bench.figure("E")
@torch.inference_mode()
def figure_e(setting: Setting) -> Figure:
    """RECom's model E."""
    return figure_columns(setting, "E")


@bench.figure("F")
@torch.inference_mode()
def figure_f(setting: Setting) -> Figure:
    """RECom's model F."""
    return figure_columns(setting, "F")


def figure_columns(setting: Setting, name: str) -> Figure:
    """A model in its forms, with the layers after the columns and without."""
    arguments = setting.arguments
    torch.manual_seed(arguments.seed)
    subject = Subject(name, model_kinds(name, arguments.large_rows, arguments.part), setting)
    batches = subject.batches(arguments.samples)
    top = Model(name, subject.output_dim, setting.device, arguments.seed).eval()
    plain, columns, layers = Plain(subject), make_columns(subject), torch.compile(top, dynamic=False)
    inputs = [(*subject.tables, *inputs_of(subject.columns, batch)) for batch in batches]
    packed = [columns.pack(named(batch.features)) for batch in batches]
    graph = make_fx(plain, tracing_mode="fake", pre_dispatch=True)(*inputs[0])
    report = recfuse.swap(graph)
    forms: dict[str, Callable[[int], Tensor]] = {
        PLAIN: lambda number: plain(*inputs[number]),
        PASSED: lambda number: graph(*inputs[number]),
        BY_HAND: lambda number: columns(packed[number]),
    }
    right = plain(*inputs[0])
    check_agreement(setting.parser, [relative_error(run(0), right) for run in forms.values()], TOLERANCE)
    if setting.on_gpu:  # its copies of boundaries from the host cannot be captured
        del forms[PLAIN]
    whole = {
        name: lambda number, run=run: layers(run(number), batches[number].dense)
        for name, run in forms.items()
    }
    tables, record = [], {}
    details = {entry.detail for entry in report.swapped}
    for part, runs in (("and the layers after them", whole), ("alone", forms)):
        title = f"{name}, {len(subject.columns)} columns {part}, batch {arguments.samples}"
        table, row = measure_forms(setting, title, runs, len(batches), (BY_HAND,), TOLERANCE)
        table.notes.append(f"Swapped: {len(report.found('columns'))} columns: {'; '.join(sorted(details))}.")
        tables.append(table)
        record[part] = row.record["measured"]
    return Figure(tables, {}, record)
