"""The example of several GPUs: it trains on two processes, as the page says, and its loss falls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/distributed/torchrec_dlrm.py"


@pytest.mark.long
def test_two_processes_train():
    started = "torchrun --standalone --nproc-per-node 2"
    assert f"{started} {EXAMPLE}" in (ROOT / "docs" / "distributed.md").read_text()
    command = [sys.executable, "-m", "torch.distributed.run", *started.split()[1:], EXAMPLE, "--steps", "41"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 5 and losses[-1] < 0.5 * losses[0]
