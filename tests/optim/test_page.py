"""The page on training: its programs run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recfuse.ops.training.applied_gradients import AppliedGradient

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
IDS = [re.findall(r"recfuse\.\w+(?:\.\w+)?", program)[-1] for program in PROGRAMS]


@pytest.mark.parametrize("last", range(len(PROGRAMS)), ids=IDS)
def test_a_program_runs(last):
    names = {}
    for program in PROGRAMS[: last + 1]:
        names.pop("sparse", None)
        exec(compile(program, str(PAGE), "exec"), names)
    optimizer = names.get("sparse") or names["report"].fused_optimizers[0]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            stored = parameter.grad is not None and type(parameter.grad) is not AppliedGradient
            assert stored == optimizer.deferred
