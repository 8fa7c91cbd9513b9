"""What C tests are compiled with, and a run of one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pthread"]
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "thread": ["-fsanitize=thread"],
}


def run(command: list[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


def skip_unless_links(folder: Path, compiler: str, flags: list[str]) -> None:
    """Skips where an empty program with the sanitizer cannot be linked or started."""
    source, program = folder / "empty.c", folder / "empty"
    source.write_text("int main(void) { return 0; }\n")
    for command in ([compiler, *flags, source, "-o", program], [program]):
        done = run(command)
        if done.returncode != 0:
            pytest.skip(f"no working sanitizer here: {done.stderr.strip()[:200]}")
