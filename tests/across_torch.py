"""Runs the test suite with one built library under several versions of torch.

    python tests/across_torch.py ~/torch-2.11/bin/python ~/torch-2.15/bin/python [-- PYTEST ARGUMENTS]
    python tests/across_torch.py --wheel recfuse-0.1.0-cp310-abi3-linux_x86_64.whl ~/py310/bin/python [-- ...]

Build first (``python setup.py build_ext --inplace``): the same binaries, unrebuilt, are loaded by every
interpreter given. Each needs torch, numpy, tqdm, rich, pytest and hypothesis; recfuse itself comes from this
checkout, or from a wheel, which is installed into each. Ends with one line an interpreter; the exit status is
that of the worst.
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


def fingerprint(wheel: Path | None) -> str:
    """The beginning of one hash over the wheel, or over the built libraries."""
    built = [PACKAGE / name for name in ("librecfuse.so", "librecfuse_core.so", "_C.abi3.so")]
    libraries = [wheel] if wheel else built
    missing = [str(library) for library in libraries if not library.exists()]
    if missing:
        sys.exit(f"not built: {', '.join(missing)}; run python setup.py build_ext --inplace")
    return hashlib.sha256(b"".join(library.read_bytes() for library in libraries)).hexdigest()[:16]


def main() -> int:
    """Runs the suite under each interpreter of the command line; returns the worst exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("interpreters", nargs="+", metavar="PYTHON", help="a Python that has torch")
    parser.add_argument("--wheel", type=Path, help="what to install into each, instead of this checkout")
    before_dashes, _, pytest_arguments = " ".join(sys.argv[1:]).partition(" -- ")
    arguments = parser.parse_args(before_dashes.split())
    environment = {**os.environ, "PYTHONPATH": "" if arguments.wheel else str(ROOT / "python")}
    summary, worst = [], 0
    for interpreter in arguments.interpreters:
        before = fingerprint(arguments.wheel)
        if arguments.wheel:
            install = ["-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", str(arguments.wheel)]
            subprocess.run([interpreter, *install], check=True)
        described = subprocess.run([interpreter, "-c", DESCRIBE], capture_output=True, text=True, check=True)
        print(f"== {described.stdout.strip()} ({interpreter})", flush=True)
        command = [interpreter, "-m", "pytest", "-q", *(pytest_arguments.split() or ["tests"])]
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        unchanged = "unrebuilt" if fingerprint(arguments.wheel) == before else "REBUILT MEANWHILE"
        result = "passed" if status == 0 else f"failed ({status})"
        summary.append(f"{described.stdout.strip()}: {result}, libraries {before} {unchanged}")
        worst = max(worst, status)
    print("\n".join(summary))
    return worst


if __name__ == "__main__":
    sys.exit(main())
