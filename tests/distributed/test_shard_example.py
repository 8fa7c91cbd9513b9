"""examples/distributed/train.py under torchrun: saved on two ranks, loaded on one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "distributed" / "train.py"

pytestmark = pytest.mark.long


def _run(ranks: int, *options: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, str(SCRIPT), "--samples=32", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _last_loss(text: str) -> float:
    found = re.search(r"last loss ([\d.]+)", text)
    assert found, text
    return float(found[1])


def test_the_example_trains_and_resumes(tmp_path):
    first = _run(2, "--steps=8", f"--save={tmp_path}/saved")
    assert "every rank" in first and "exchange: collectives" in first
    resumed = _run(1, "--steps=1", f"--load={tmp_path}/saved")
    fresh = _run(1, "--steps=1")
    # Rank 0 has seen this batch before the checkpoint, in its first step.
    assert _last_loss(resumed) < _last_loss(fresh)
