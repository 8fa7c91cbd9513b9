"""The surroundings of a process: instruction sets, other processes, names of the package."""

from __future__ import annotations

import os

import pytest

import recfuse
from recfuse import cli, info, timing
from support.processes.fresh import run_python

ABSENT = next(name for name in info.ISA_FLAGS if name not in info.isa_available())


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("foo", "RECFUSE_CPU_ISA='foo' is ignored; expected avx512, avx2, neon or scalar"),
        (ABSENT, f"RECFUSE_CPU_ISA={ABSENT} is ignored, since this CPU does not have it"),
        ("scalar", ""),
        ("", ""),
    ],
)
def test_an_instruction_set_without_kernels_warns_at_import(asked: str, words: str) -> None:
    result = run_python("-c", "import recfuse", env={**os.environ, "RECFUSE_CPU_ISA": asked}, check=True)
    assert (f"UserWarning: recfuse: {words}" in result.stderr) if words else not result.stderr


def test_dir_has_public_names_alone() -> None:
    assert dir(recfuse) == sorted({*recfuse.__all__, "data", "errors"})
    assert not [name for name in dir(recfuse) if name.startswith("_") and name != "__version__"]
    assert all(hasattr(recfuse, name) for name in dir(recfuse))


@pytest.mark.parametrize(("load", "warns"), [(1.5, True), (0.05, False), (None, False)])
def test_tune_warns_of_disturbance_by_other_processes(monkeypatch, capsys, load, warns) -> None:
    monkeypatch.setattr(timing, "other_load_since", lambda: lambda: load)
    given = ["--trace", "low", "--rows", "90", "--budget", "0", "--device", "cpu", "--dim", "8"]
    assert cli.main(["tune", *given, "--batch", "8", "--pooling", "5", "--batches", "2"]) == 0
    error = capsys.readouterr().err
    assert ("recfuse tune: warning: Not a quiet machine: other processes kept up to 1.5" in error) == warns
