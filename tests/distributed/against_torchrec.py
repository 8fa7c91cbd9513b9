"""Runs TorchRec's own model-parallel tests on gloo with FBGEMM's and with recfuse's kernels, and compares.

    python tests/distributed/against_torchrec.py ~/torchrec [--ref v1.8.0-rc1] [--most 8] [--json FILE]

The checkout, of the version that is installed, gives the tests that TorchRec's package lacks. They run
unchanged in a copy of the package in a temporary folder. Needs hypothesis. Exits with 1 where less than 95 %
of the cases that pass with FBGEMM's kernels pass with recfuse's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from recfuse import info

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("fbgemm", "recfuse")
TESTS = "torchrec/distributed/tests"
SITECUSTOMIZE = """
import sys
if not any("resource_tracker" in argument for argument in sys.orig_argv):
    import support.torchrec.suite_hook
"""
LEAST = 0.95
PEERS = ("Connection", "Read error", "unsuccessful run")  # of a rank whose peer has failed


def prepare(folder: Path, checkout: Path, ref: str) -> None:
    """Makes a site folder: the installed package, the checkout's tests, and what processes do first."""
    spec = importlib.util.find_spec("torchrec")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("TorchRec is not installed")
    shutil.copytree(spec.submodule_search_locations[0], folder / "torchrec")
    archive = subprocess.run(
        ["git", "-C", str(checkout), "archive", ref, TESTS], capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)


def run(folder: Path, kernels: str, most: int) -> dict[str, dict[str, Any]]:
    """Runs all cases with some kernels; returns their results by test and arguments."""
    out = folder / f"{kernels}.jsonl"
    paths = [str(folder), str(ROOT / "tests"), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "SUITE_KERNELS": kernels,
        "SUITE_RECORD": str(folder / f"{kernels}.record"),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    code = f"from support.torchrec.suite import main; main({str(out)!r}, {most})"
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=folder, check=True)
    lines = map(json.loads, out.read_text().splitlines())
    return {f"{line['test']} {json.dumps(line['case'], sort_keys=True)}": line for line in lines}


def table_of(results: dict[str, dict[str, dict[str, Any]]]) -> list[list[str]]:
    """A row a test: cases, those that pass with either kernels, and those that recfuse fails."""
    counts: dict[str, Counter[str]] = {}
    for key, theirs in results["fbgemm"].items():
        own = results["recfuse"][key]
        count = counts.setdefault(theirs["test"], Counter())
        count["cases"] += 1
        count["fbgemm"] += theirs["status"] == "passes"
        count["recfuse"] += own["status"] == "passes"
        count["lost"] += theirs["status"] == "passes" and own["status"] != "passes"
    names = ("cases", "fbgemm", "recfuse", "lost")
    rows = [[test, *(str(count[name]) for name in names)] for test, count in counts.items()]
    return [*rows, ["all", *(str(sum(count[name] for count in counts.values())) for name in names)]]


def last_line(reason: str) -> str:
    """The last line of a traceback that says something."""
    lines = [line.strip() for line in reason.splitlines() if line.strip(" |")]
    errors = [line for line in lines if "Error: " in line and not any(word in line for word in PEERS)]
    return (errors or lines or ["-"])[-1][:300]


def main() -> None:
    """Runs, prints and writes the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--ref", default=f"v{importlib.metadata.version('torchrec').split('+')[0]}-rc1")
    parser.add_argument("--most", type=int, default=8, help="cases of a test")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, arguments.checkout, arguments.ref)
        results = {kernels: run(folder, kernels, arguments.most) for kernels in KERNELS}
    rows = table_of(results)
    columns = ["test", "cases", "pass with FBGEMM", "pass with recfuse", "lost"]
    widths = [max(len(row[at]) for row in [columns, *rows]) for at in range(len(columns))]
    for row in [columns, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    others = [
        {
            "test": own["test"],
            "case": own["case"],
            "fbgemm": results["fbgemm"][key]["status"],
            "recfuse": own["status"],
            "reason": last_line(own["reason"] or results["fbgemm"][key]["reason"]),
        }
        for key, own in results["recfuse"].items()
        if own["status"] != "passes"
    ]
    for other in others:
        print(other)
    passed = [key for key, one in results["fbgemm"].items() if one["status"] == "passes"]
    kept = [key for key in passed if results["recfuse"][key]["status"] == "passes"]
    made = [Counter(one["kernels"]) for one in results["recfuse"].values()]
    kernels = dict(sum(made, Counter()))
    print(f"{len(kept)} of {len(passed)} that pass with FBGEMM's kernels; kernels made: {kernels}")
    if arguments.json:
        environment = {
            **info.environment(),
            **{name: importlib.metadata.version(name) for name in ("torchrec", "hypothesis")},
            "command": f"tests/distributed/against_torchrec.py CHECKOUT --ref {arguments.ref} --most "
            f"{arguments.most} --json FILE",
        }
        record = {
            "environment": environment,
            "tables": [{"title": "model-parallel tests", "columns": columns, "rows": rows, "notes": []}],
            "kernels of recfuse's run": kernels,
            "not passed with recfuse": others,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(len(kept) < LEAST * len(passed))


if __name__ == "__main__":
    main()
