"""Runs the test suite with one built library under several versions of torch.

    python tests/across_torch.py ~/torch-2.11/bin/python ~/torch-2.15/bin/python [-- PYTEST ARGUMENTS]

Build first (``python setup.py build_ext --inplace``): the same two binaries, unrebuilt, are loaded by every
interpreter given. Each needs torch, numpy, tqdm, rich, pytest and hypothesis; recfuse itself comes from this
checkout. Ends with one line an interpreter; the exit status is that of the worst.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "recfuse"
DESCRIBE = "import platform, torch; print('python', platform.python_version(), 'torch', torch.__version__)"


def fingerprint() -> str:
    """The beginning of one hash over the built libraries."""
    libraries = [PACKAGE / name for name in ("librecfuse.so", "librecfuse_core.so", "_C.abi3.so")]
    missing = [str(library) for library in libraries if not library.exists()]
    if missing:
        sys.exit(f"not built: {', '.join(missing)}; run python setup.py build_ext --inplace")
    return hashlib.sha256(b"".join(library.read_bytes() for library in libraries)).hexdigest()[:16]


def main() -> int:
    """Runs the suite under each interpreter of the command line; returns the worst exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("interpreters", nargs="+", metavar="PYTHON", help="a Python that has torch")
    before_dashes, _, pytest_arguments = " ".join(sys.argv[1:]).partition(" -- ")
    interpreters = parser.parse_args(before_dashes.split()).interpreters
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    summary, worst = [], 0
    for interpreter in interpreters:
        before = fingerprint()
        described = subprocess.run([interpreter, "-c", DESCRIBE], capture_output=True, text=True, check=True)
        print(f"== {described.stdout.strip()} ({interpreter})", flush=True)
        command = [interpreter, "-m", "pytest", "-q", *(pytest_arguments.split() or ["tests"])]
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        unchanged = "unrebuilt" if fingerprint() == before else "REBUILT MEANWHILE"
        result = "passed" if status == 0 else f"failed ({status})"
        summary.append(f"{described.stdout.strip()}: {result}, libraries {before} {unchanged}")
        worst = max(worst, status)
    print("\n".join(summary))
    return worst


if __name__ == "__main__":
    sys.exit(main())
