"""The ablation of attention: recfuse's kernel, and torch's attention of a user's candidates as one query."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from common.ablation import WITH, Cell, ablation, sized
from common.checks import relative_error
from ikbo_attention import bench
from ikbo_attention.forms import RECFUSE, make_runs
from ikbo_attention.measure import AttentionSetting
from ikbo_attention.problem import Problem, Shape

CELLS = [("64+1", 64, 512), ("64+1", 64, 1024), ("64+1", 64, 4096), ("64", 1, 1024)]
PACKED = "path packed"
TOLERANCE = 0.05
"""Of weights in bfloat16."""


@ablation(bench)
def cells(setting: AttentionSetting) -> Iterator[Cell]:
    """Histories of some lengths, and one query a candidate."""
    for group, queries, kv in CELLS:
        shape = Shape(sized(setting, 2048), group, queries, sized(setting, kv))
        problem = Problem(shape, torch.bfloat16, setting.device, setting.arguments.seed)
        runs = make_runs(problem, [PACKED, RECFUSE])
        yield Cell(
            f"bfloat16, {shape}",
            {PACKED: 'path "fused"'},
            {WITH: runs[RECFUSE], PACKED: runs[PACKED]},
            problem.inputs,
            lambda _, output, problem=problem: relative_error(
                problem.sampled(output).double(), problem.right
            ),
            TOLERANCE,
        )
        del problem, runs
