"""Figures for a GPU: batches in host memory, and large tables that stay there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from common.checks import check_agreement, largest_difference
from common.report import Figure, Row, load_notes
from common.table import Table, times
from embedding_columns import bench
from embedding_columns.figures import model_subject, model_subject_kinds, release
from embedding_columns.forms import make_columns, named, specifications
from embedding_columns.measure import ColumnsSetting
from embedding_columns.models import Batch, Model, Subject, bucketize
from recfuse import timing
from recfuse.nn.columns import Column, EmbeddingColumns

MEMCPY, PACKED, PINNED = "memcpy", "one copy, pageable", "one copy, pinned"
PACK, EACH = "packing and one copy", "a copy a column"
ON_DEVICE, ON_HOST = "tables on the GPU", "large tables on the host"
TRAINED = "large tables on the host, trained"  # looked up within the call
PLACEMENTS = {ON_DEVICE: "device", ON_HOST: "host", TRAINED: "host"}


@bench.figure("transfers", on=["cuda"])
def figure_transfers(setting: ColumnsSetting) -> Figure:
    """From host memory to the output, with merged copies and without."""
    arguments, records = setting.arguments, []
    subjects: list[tuple[str, Any]] = [
        (f"{max(arguments.columns):,} bucketize", [bucketize(max(arguments.columns))])
    ]
    subjects += [(name, model_subject_kinds(name, setting)) for name in arguments.models]
    names = [MEMCPY, PACKED, PINNED, PACK, EACH]
    table = Table(
        f"From the host's memory, batch {arguments.batch}: µs as called (median ± IQR of {arguments.rounds})",
        ["", "KB", *names, f"{PACKED} over {MEMCPY}", f"{EACH} over {PACKED}"],
    )
    results = []
    for label, kinds in subjects:
        subject = Subject(label, kinds, setting)
        row, differences = _transferred(subject, arguments.batch, arguments.rounds)
        check_agreement(setting.parser, differences, 0.0)
        cells = [times(row.ratio(MEMCPY, PACKED)), times(row.ratio(PACKED, EACH))]
        table.rows.append([label, f"{row.record['bytes'] / 1e3:.0f}", *map(row.cell, names), *cells])
        records.append({"subject": label, **row.record, "measured": row.result.to_json(environment=False)})
        results.append(row.result)
        release(setting)
    table.notes = [
        "memcpy: one copy of the same bytes from pageable memory, alone; the others end with the output.",
        *load_notes(results),
    ]
    return Figure([table], {}, records)


def _transferred(subject: Subject, size: int, rounds: int) -> tuple[Row, list[float]]:
    module, device = make_columns(subject), subject.device
    on_host = [batch.to("cpu") for batch in subject.batches(size)]
    packed = {id(batch): module.pack(named(batch.features)) for batch in on_host}
    pageable = {key: torch.empty(buffer.nbytes, dtype=torch.uint8) for key, buffer in packed.items()}
    target = torch.empty(max(buffer.nbytes for buffer in packed.values()), dtype=torch.uint8, device=device)
    unpinned = {
        id(batch): module._reader.packer(module._reader.read(named(batch.features))) for batch in on_host
    }

    def copied(batch: Batch) -> Tensor:
        source = pageable[id(batch)]
        return target[: source.numel()].copy_(source)

    calls: dict[str, Callable[[Batch], Tensor]] = {
        PACKED: lambda batch: module(unpinned[id(batch)].to(device)),
        PINNED: lambda batch: module(packed[id(batch)].to(device, non_blocking=True)),
        PACK: lambda batch: module(module.pack(named(batch.features)).to(device, non_blocking=True)),
        EACH: lambda batch: module(named(batch.to(device).features)),
    }
    with torch.inference_mode():
        differences = [largest_difference(calls, on_host[0], PACKED)]
        result = timing.compare(
            {MEMCPY: copied, **calls}, inputs=[(batch,) for batch in on_host], rounds=rounds, min_time=1e-3,
            device=device, progress=False,
        )  # fmt: skip
    return Row(subject.name, result, {"bytes": next(iter(packed.values())).nbytes}), differences


def placed(specs: Sequence[Column], subject: Subject, placement: str) -> list[Column]:
    """Returns the columns with their large tables at a placement."""
    return [
        replace(spec, placement=placement) if kind.name == "large" else spec  # type: ignore[call-arg]
        for spec, kind in zip(specs, subject.columns, strict=True)
    ]


@bench.figure("host_tables", on=["cuda"])
def figure_host_tables(setting: ColumnsSetting) -> Figure:
    """E and F with their large tables on the host: memory saved, time lost. Batches are packed on the
    host. Tables are frozen, or looked up like trained tables; each of the two runs in turns with tables
    on the GPU."""
    arguments, records, results = setting.arguments, [], []
    table = Table(
        f"Large tables on the host, batch {arguments.batch}: µs as called "
        f"(median ± IQR of {arguments.rounds})",
        ["", *PLACEMENTS, "relative time", "relative time, trained", "MB on the GPU", "share of the MB"],
    )
    for name in arguments.models:
        subject = model_subject(name, setting)
        follows = Model(name, subject.output_dim, setting.device, arguments.seed)
        modules = {label: _placed(subject, placement) for label, placement in PLACEMENTS.items()}
        modules[TRAINED].requires_grad_(True)
        batches = [(batch, batch.to("cpu")) for batch in subject.batches(arguments.batch)]
        memory = {
            label: sum(one.nbytes for one in module.parameters() if one.device.type == setting.device.type)
            for label, module in modules.items()
        }
        left = memory[ON_HOST] / memory[ON_DEVICE]
        for part, model in (("columns", None), ("whole model", follows)):
            calls = {label: _from_host(module, batches, model) for label, module in modules.items()}
            measured = {}
            with torch.inference_mode():
                check_agreement(setting.parser, [largest_difference(calls, batches[0][0], ON_DEVICE)], 1e-5)
                for other in (ON_HOST, TRAINED):  # torch's threads spin for a while after the latter's calls
                    measured[other] = timing.compare(
                        {label: calls[label] for label in (ON_DEVICE, other)},
                        inputs=[(batch,) for batch, _ in batches], rounds=arguments.rounds, min_time=1e-3,
                        device=setting.device, progress=False,
                    )  # fmt: skip
                    results.append(measured[other])
            rows = {other: Row(f"{name}, {part}", result, {}) for other, result in measured.items()}
            cells = [rows[ON_HOST].cell(ON_DEVICE), *(row.cell(other) for other, row in rows.items())]
            slower = [times(1 / result.ratio(other, ON_DEVICE)) for other, result in measured.items()]
            sizes = f"{memory[ON_DEVICE] / 1e6:,.0f}", f"{left:.1%}"
            table.rows.append([rows[ON_HOST].label, *cells, *slower, *sizes])
            records.append({
                "model": name, "part": part, "bytes": memory,
                "measured": {other: one.to_json(environment=False) for other, one in measured.items()},
            })  # fmt: skip
        del calls, modules, follows, subject
        release(setting)
    table.notes = load_notes(results)
    return Figure([table], {}, records)


def _placed(subject: Subject, placement: str) -> EmbeddingColumns:
    """Creates the columns with the large tables at a placement."""
    specs = placed(specifications(subject), subject, placement)
    module = EmbeddingColumns(specs, device=subject.device).requires_grad_(False)
    with torch.no_grad():
        for view, weight in zip(module.tables.values(), subject.tables, strict=True):
            view.weight.copy_(weight)
    return module


def _from_host(
    module: EmbeddingColumns, batches: Sequence[tuple[Batch, Batch]], model: Model | None
) -> Callable[[Batch], Tensor]:
    """Returns a run from a packed batch on the host to the output."""
    packed = {id(batch): module.pack(named(on_host.features)) for batch, on_host in batches}
    if model is None:
        return lambda batch: module(packed[id(batch)])
    return lambda batch: model(module(packed[id(batch)]), batch.dense)
