"""The fuzzer of readers: a short run of it, and that it finds faults."""

from __future__ import annotations

import os
from pathlib import Path

from support.fuzz import corpus
from support.processes.fresh import run_python

SCRIPT = Path(__file__).with_name("fuzz_readers.py")


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    options = "--cases", "400", "--minutes", "5", "--seed", "1", "--keep", str(tmp_path / "failed")
    run = run_python(SCRIPT, *options)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "400 cases from 0, seed 1: 0 failed" in run.stdout
    for form in ("trace.txt", "trace.txt.gz", "trace.pt", "trace.pt.gz", "plan.json", "collection.json"):
        assert f"{form} read: " in run.stdout and f"{form} refused: " in run.stdout


FAULTS = {
    "raise KeyError(3)": "KeyError: 3",
    "raise FileFormatError('something')": "the error does not name the file",
    "while True: pass": "took more than 0.2 s",
    "bytearray(1 << 20) * (1 << 10)": "MemoryError",
    "os.abort()": "ended with status",
}


def test_it_finds_faults(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {os.fspath(SCRIPT.parent)!r})
import fuzz_readers
from recfuse.errors import FileFormatError
fuzz_readers.MOST_SECONDS = 0.2
def read(path):
    exec(fault)
form = fuzz_readers.corpus.Form("a.txt", "text", [b"1"], read, 1 << 20)
fuzz_readers.corpus.forms = lambda folder: [form]
for fault in {list(FAULTS)}:
    assert fuzz_readers.main(["--cases", "1", "--keep", {os.fspath(tmp_path)!r}]) == 1
"""
    run = run_python("-c", code)
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "0-a.txt").exists()
    found = [line for line in run.stdout.splitlines() if line.startswith("case 0, ")]
    assert len(found) == len(FAULTS) and all(map(str.__contains__, found, FAULTS.values())), found


def test_every_valid_file_is_read(tmp_path: Path) -> None:
    for form in corpus.forms(tmp_path):
        hostile = corpus.hostile_tuples() if form.kind == "pt" else ()
        for contents in (one for one in form.valid if one not in hostile):
            path = tmp_path / form.name
            path.write_bytes(corpus.gzipped(contents) if form.packed else contents)
            form.read(path)
