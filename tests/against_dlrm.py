"""Trains facebookresearch/dlrm's own script unchanged and after ``recfuse.swap``, and compares the losses.

    python tests/against_dlrm.py ~/dlrm [CASE ...] [-- MORE ARGUMENTS OF dlrm_s_pytorch.py]

The checkout stays unmodified: its ``DLRM_Net`` is swapped right after its construction or, in some cases,
between two steps with ``optimizers=[optimizer]``. Needs the imports of the script (scikit-learn,
tensorboard). Without a CASE all run. If figures differ by more than 1e-5, the script runs once more
unchanged, with one weight matrix scaled by 1 + 1e-7: rounding grows in training, and a difference of that
size is no error. Exits with 1 if a loss or an output differs.
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
SLOWER = "--learning-rate=0.001"  # Adagrad divides by the gradient's size: with 0.1, rounding decides
CASES: dict[str, list[str]] = {
    "sgd": [],
    "sgd dense": [],
    "sgd between steps": [],
    "adagrad": ["--optimizer=adagrad", SLOWER],
    "adagrad dense": ["--optimizer=adagrad", SLOWER],
    "adagrad between steps": ["--optimizer=adagrad", SLOWER],
    "rwsadagrad": ["--optimizer=rwsadagrad", SLOWER],
    "rwsadagrad between steps": ["--optimizer=rwsadagrad", SLOWER],
    "fixed weights": ["--weighted-pooling=fixed"],
    "learned weights": ["--weighted-pooling=learned"],
    "learned weights, adagrad between steps": ["--weighted-pooling=learned", "--optimizer=adagrad", SLOWER],
    "schedule": ["--lr-num-warmup-steps=10", "--lr-decay-start-step=20", "--lr-num-decay-steps=20"],
    "inference": ["--inference-only"],
    "inference, fixed weights": ["--inference-only", "--weighted-pooling=fixed"],
    "inference, 8 bits": ["--inference-only", "--quantize-emb-with-bit=8"],
    "inference, 4 bits": ["--inference-only", "--quantize-emb-with-bit=4"],
    "qr": ["--qr-flag"],
    "qr add, two tables": ["--qr-flag", "--qr-operation=add", "--qr-threshold=1000"],
    "qr that takes no table": ["--qr-flag", "--qr-threshold=1000000"],
    "md": ["--md-flag"],
}
RUN = """
import sys
import dlrm_s_pytorch as script
swap, noise, case = {swap!r}, {noise!r}, {case!r}
build, models, steps = script.DLRM_Net.__init__, [], []
def build_and_swap(self, *args, **kwargs):
    build(self, *args, **kwargs)
    models.append(self)
    if "dense" in case:
        for bag in self.emb_l:
            bag.sparse = False
    if swap and "between" not in case:
        import recfuse
        print(recfuse.swap(self))
    if noise:
        self.top_l[0].weight.data.mul_(1 + 1e-7)
def between(optimizer, args, kwargs):
    steps.append(optimizer)
    if len(steps) in (10, 40):
        print(recfuse.swap(models[0], optimizers=[optimizer]))
    if len(steps) == 25:
        print(recfuse.unswap(models[0], optimizers=[optimizer]))
if swap and "between" in case:
    import recfuse
    from torch.optim.optimizer import register_optimizer_step_post_hook
    register_optimizer_step_post_hook(between)
forward = script.DLRM_Net.forward
def forward_and_print(self, *args):
    result = forward(self, *args)
    print("output", result.detach().double().sum().item())
    return result
script.DLRM_Net.__init__ = build_and_swap
script.DLRM_Net.forward = forward_and_print
script.run()
"""


def figures(
    checkout: Path, case: str, arguments: list[str], swap: bool = False, noise: bool = False
) -> tuple[list[float], list[float]]:
    """The losses that the script prints, and the sum of the model's output for each batch."""
    path = os.pathsep.join((str(ROOT / "python"), str(checkout), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(swap=swap, noise=noise, case=case), *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{case}: the script failed {'after' if swap else 'before'} the swap:\n{done.stderr}")
    if swap:
        for line in done.stdout.splitlines():
            if re.search(r" (left|fused|restored)( |,|$)", line):
                print(f"    {line[:200]}")
    losses = [float(found) for found in re.findall(r"loss (\S+)", done.stdout)]
    return losses, [float(found) for found in re.findall(r"^output (\S+)", done.stdout, re.MULTILINE)]


def worst(before: list[float], after: list[float]) -> float:
    """Returns the largest relative difference; infinite if numbers are missing."""
    if len(before) != len(after):
        return float("inf")
    pairs = zip(before, after, strict=True)
    differences = [abs(one - other) / max(abs(one), 1e-6) for one, other in pairs]
    return float("inf") if any(number != number for number in differences) else max(differences, default=0.0)


def main() -> int:
    """Compares; returns the exit status."""
    if len(sys.argv) < 2 or not (Path(sys.argv[1]) / "dlrm_s_pytorch.py").exists():
        sys.exit((__doc__ or "").strip())
    checkout, rest = Path(sys.argv[1]), sys.argv[2:]
    more = rest[rest.index("--") + 1 :] if "--" in rest else []
    cases = rest[: rest.index("--")] if "--" in rest else rest
    failed = 0
    for case in cases or CASES:
        arguments = [*ARGUMENTS, *CASES[case], *more]
        print(f"{case}: {' '.join(CASES[case])}", flush=True)
        before, after = (figures(checkout, case, arguments, swap) for swap in (False, True))
        differences = [worst(*pair) for pair in zip(before, after, strict=True)]
        allowed = [1e-5, 1e-5]
        if before[1] and max(differences) > 1e-5:
            rounding = figures(checkout, case, arguments, noise=True)
            allowed = [10 * worst(*pair) for pair in zip(before, rounding, strict=True)]
        losses, outputs = differences
        wrong = not before[1] or not (losses <= allowed[0] and outputs <= allowed[1])
        failed += wrong
        verdict = "  <- DIFFERS" if wrong else ", by rounding" if max(differences) > 1e-5 else ""
        print(
            f"    largest relative difference of {len(before[0])} losses {losses:.1e}, of {len(before[1])} "
            f"batches' outputs {outputs:.1e}{verdict}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
