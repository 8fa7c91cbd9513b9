"""The ablation of the backward pass: steps without parts of it. All variants train the same tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from common.ablation import WITH, Cell, ablation, sized
from common.settings import Setting
from recfuse import _C
from training import bench, stages
from training.lookups import RankedSubject, Subject, make_subject
from training.sides import OPTIMIZERS, RECFUSE, make_sides
from training.steps import TOLERANCE, fitting_rows

SMALL = "small/"
LEFT_OUT = {WITH: 0, f"without {SMALL}": 1}
"""Bits of `_C.fused_embedding_bag_backward_leave_out`, by run."""
CELLS = [
    *((f"{name}-512", kind) for kind in ("sgd", "rowwise_adagrad") for name in "AD"),
    ("100 x 100-2048", "sgd"),  # not published: equal tables of few and of many rows
    ("100 x 10000-2048", "sgd"),
]


class Uniform(RankedSubject):
    """Equal tables, one lookup a sample, uniform."""

    def ranks(self, uniform: Tensor, rows: int) -> Tensor:
        """All rows alike."""
        return uniform * rows


def without(parts: int, call: Callable[[Any], Any], given: Any) -> Any:
    """Makes a call whose backward passes omit these parts."""
    _C.fused_embedding_bag_backward_leave_out(parts)
    try:
        return call(given)
    finally:
        _C.fused_embedding_bag_backward_leave_out(0)


def subject_of(name: str, kind: str, setting: Setting) -> Subject:
    """The subject of a cell."""
    model, _, size = name.rpartition("-")
    batch = sized(setting, int(size))
    if model.startswith("100 x "):
        return Uniform(model, [int(model.removeprefix("100 x "))] * 100, [1] * 100, batch)
    rows = fitting_rows(sized(setting, 8_000_000), kind, [RECFUSE], setting.device)
    return make_subject(f"{model}-{batch}", setting.arguments.seed, sized(setting, 4_000_000), rows)


@ablation(bench)
def cells(setting: Setting) -> Iterator[Cell]:
    """Published steps, and two that are not."""
    for name, kind in CELLS:
        setting.release()
        subject = subject_of(name, kind, setting)
        batches = subject.batches(2, setting.arguments.seed + 1, setting.device)
        index_dtype = batches[0].indices.dtype
        side = make_sides(subject, kind, [RECFUSE], setting.device, index_dtype)[0][RECFUSE]
        right = stages.right_changes(subject, batches[0], OPTIMIZERS[kind])
        first_step = partial(stages.first_step_error, side, batches[0])
        yield Cell(
            f"{subject.name}, {kind}",
            SMALL,
            {run: partial(without, bit, side.step) for run, bit in LEFT_OUT.items()},
            batches,
            # The first step is undone, except for an optimizer's states: later steps change the rows less.
            lambda name, error, kind=kind: error if kind == "sgd" or name == WITH else 0.0,
            TOLERANCE,
            {run: partial(without, bit, first_step, right) for run, bit in LEFT_OUT.items()},
        )
        del subject, batches, side, right, first_step
