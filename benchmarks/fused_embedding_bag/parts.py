"""The ablation of fused collections: tables staged in shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from common.ablation import WITH, Cell, ablation, sized
from common.checks import TOLERANCES, relative_error
from fused_embedding_bag import bench
from fused_embedding_bag.candidates import DEFAULT, UNSTAGED, make_runs
from fused_embedding_bag.setting import FusedSetting, right_output


@ablation(bench)
def cells(setting: FusedSetting) -> Iterator[Cell]:
    """Models by their default schedules, and by those that stage no table."""
    size = sized(setting, 512)
    for name in "ADF":
        subject = setting.subject(name)
        runs, batches = make_runs(subject, [DEFAULT, UNSTAGED])[0], subject.batches(size)
        right = right_output(subject, batches[0], torch.float32)
        yield Cell(
            f"{name} {size}",
            {UNSTAGED: "staged/"},
            {WITH: runs[DEFAULT], UNSTAGED: runs[UNSTAGED]},
            batches,
            lambda _, output, right=right: relative_error(output, right),
            TOLERANCES[torch.float32],
        )
        setting.drop(name)
        del subject, runs, batches, right
