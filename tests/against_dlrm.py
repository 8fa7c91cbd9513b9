"""Trains facebookresearch/dlrm's own script as it is and after ``recfuse.swap``, and compares the losses.

    python tests/against_dlrm.py ~/dlrm [-- ARGUMENTS OF dlrm_s_pytorch.py]

The checkout stays unmodified: its ``DLRM_Net`` is swapped right after it is built. Needs what the script
imports (scikit-learn, tensorboard, mlperf-logging). Exits with 1 where a printed loss differs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARGUMENTS = [
    "--arch-embedding-size=1000-5000-20000-300",
    "--arch-sparse-feature-size=16",
    "--arch-mlp-bot=13-64-16",
    "--arch-mlp-top=64-1",
    "--mini-batch-size=128",
    "--data-size=6400",
    "--num-indices-per-lookup=20",
    "--learning-rate=0.1",
    "--print-freq=5",
    "--numpy-rand-seed=5",
]
RUN = """
import sys
import dlrm_s_pytorch as script
if {swap}:
    import recfuse
    build = script.DLRM_Net.__init__
    def build_and_swap(self, *args, **kwargs):
        build(self, *args, **kwargs)
        print(recfuse.swap(self))
    script.DLRM_Net.__init__ = build_and_swap
script.run()
"""


def losses(checkout: Path, arguments: list[str], swap: bool) -> list[str]:
    """The losses that the script prints."""
    path = os.pathsep.join((str(ROOT / "python"), str(checkout), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(swap=swap), *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"the script failed {'after' if swap else 'before'} the swap:\n{done.stderr}")
    if swap:
        print(
            "\n".join(line for line in done.stdout.splitlines() if "EmbeddingBag" in line or "fused" in line)
        )
    return re.findall(r"loss (\S+)", done.stdout)


def main() -> int:
    """Compares; returns the exit status."""
    if len(sys.argv) < 2 or not (Path(sys.argv[1]) / "dlrm_s_pytorch.py").exists():
        sys.exit((__doc__ or "").strip())
    checkout, arguments = Path(sys.argv[1]), sys.argv[3:] or ARGUMENTS
    before, after = (losses(checkout, arguments, swap) for swap in (False, True))
    for one, other in zip(before, after, strict=True):
        print(one, other, "" if one == other else "<- differs")
    return 0 if before and before == after else 1


if __name__ == "__main__":
    sys.exit(main())
