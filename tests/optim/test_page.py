"""The page on training: its programs run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import recfuse
from recfuse.ops.training.applied_gradients import AppliedGradient

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 16, mode="sum", sparse=True, include_last_offset=True)
        self.top = nn.Linear(16, 1)

    def forward(self, indices, offsets):
        return self.top(self.bag(indices, offsets[: (len(offsets) + 1) // 2]))


@pytest.mark.parametrize(
    "program", PROGRAMS, ids=[re.findall(r"recfuse\.\w+(?:\.\w+)?", p)[-1] for p in PROGRAMS]
)
def test_a_program_runs(program):
    batch = torch.randint(0, 50, (24,)), torch.arange(0, 25, 3), torch.zeros(4, 1)
    names = {"torch": torch, "recfuse": recfuse, "Model": Model, "batches": [batch] * 3}
    exec(compile(program, str(PAGE), "exec"), names)
    optimizer = names.get("sparse") or names["report"].fused_optimizers[0]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            stored = parameter.grad is not None and type(parameter.grad) is not AppliedGradient
            assert stored == optimizer.deferred
