"""Sharded tables on several GPUs, by NCCL: the cases that gloo runs, with a GPU for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
FILES = ("test_shard.py", "test_shard_errors.py", "test_shard_checkpoints.py", "test_shard_uses.py")
SETTINGS = {
    "RANK_TESTS": "nccl",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("file", FILES)
def test_with_nccl(file):
    path, environment = TESTS / "distributed" / file, os.environ | SETTINGS
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
