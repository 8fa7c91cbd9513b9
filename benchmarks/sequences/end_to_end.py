"""Whole models with histories, before and after ``recfuse.swap``."""

from __future__ import annotations

import copy

import torch
from torch import nn

import recfuse
from common.calls import EAGER
from common.measure import measure
from common.report import Figure, load_notes
from common.settings import Setting
from common.table import Table, times
from sequences import bench
from sequences.group import difference_of
from sequences.models import MODELS, model_batch
from sequences.sides import TORCHREC

SWAPPED = "swapped"


@bench.figure("models")
@torch.inference_mode()
def figure_models(setting: Setting) -> Figure:
    """A forward pass of each model; outputs must be identical."""
    given = setting.arguments
    torch.manual_seed(given.seed)
    rows, notes, record = [], [], {}
    try:
        batches = [
            model_batch(given.rows, given.batch, given.longest, setting.device)
            for _ in range(given.num_batches)
        ]
    except ImportError as error:
        batches, notes = [], [f"{TORCHREC} is left out: {error}"]
    for name, kind in MODELS.items() if batches else ():
        theirs = kind(given.rows, given.dim, given.longest).to(setting.device)
        ours = nn.Sequential(copy.deepcopy(theirs))
        report = recfuse.swap(ours)
        assert len(report.fused) == 1, report
        runs = {TORCHREC: theirs, SWAPPED: ours}
        right = theirs(batches[0])
        row = measure(
            name, runs, batches, setting, lambda _, output, right=right: difference_of(output, right), 0.0
        )
        rows.append(row)
        record[name] = row.record
    table = Table(
        f"us a forward pass of a model, {given.batch} samples with histories of 1 to {given.longest}",
        ["model", "call", TORCHREC, SWAPPED, f"over {TORCHREC}"],
    )
    for row in rows:
        for suffix, called in (("", "graph"), (EAGER, "called")) if setting.on_gpu else (("", "called"),):
            names = TORCHREC + suffix, SWAPPED + suffix
            ratio = times(row.ratio(names[1], names[0]))
            table.rows.append([row.label, called, *map(row.cell, names), ratio])
        notes += row.notes
    table.notes += [*dict.fromkeys(notes), *load_notes([row.result for row in rows])]
    return Figure([table], {}, record)
