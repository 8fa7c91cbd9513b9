"""`recfuse compile`: the kernels that it reports are in the cache, and no option is dropped silently."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recfuse import _C, cli, info
from recfuse.perf.described import bag_call

FIGURES = {"registers": 40, "spill_bytes": 0, "cubin_bytes": 12345, "cached": False, "seconds": 0.5}
NO_PATH = os.fsdecode(b"caf\xe9")  # not UTF-8


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A stand-in for the compiler, which keeps a given number of kernels."""
    kept: set[Any] = set()

    def prepare(room: int) -> None:
        def compile(*kernel: Any) -> Any:
            if kernel[4:] == (True,) and kernel[:4] not in kept:
                return None
            if len(kept) < room:
                kept.add(kernel[:4])
            return FIGURES

        monkeypatch.setattr(_C, "kernel_compile", compile)

    return prepare


def test_uncached_kernels_fail_the_command(compiler, capsys, tmp_path):
    given = ["compile", "--arch", "sm_90a", "--dim", "8", "--training", "sgd", "--columns", "--gpu", "132:60"]
    compiler(100)
    assert cli.main([*given, "--out", str(tmp_path)]) == 0
    kernels = capsys.readouterr().out.count(", compiled, 0.50 s\n")
    assert kernels > 10
    compiler(0)
    assert cli.main([*given, "--arch", "sm_80", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    lost = printed.err.count(f"compiled, but not written to the cache ({tmp_path})\n")
    assert lost > 10 and printed.out.count(", compiled, 0.50 s\n") == kernels
    assert f"{lost} of {lost + kernels} failed" in printed.err


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--training", "sgd"], "--training needs --dim or --plan"),
        (["--weighted"], "--weighted needs --dim"),
        (["--schedule", "warps=32"], "--schedule needs --dim"),
        (["--stochastic-rounding", "--dim", "8"], "--stochastic-rounding needs --training"),
        (["--huge-batches", "--dim", "8"], "--huge-batches needs --plan"),
    ],
)
def test_an_option_without_its_subject_is_refused(compiler, capsys, columns, option, words):
    compiler(0)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compile", "--arch", "sm_90a", *option, *["--columns"] * columns])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_a_folder_that_is_no_text(monkeypatch, capsys, tmp_path):
    """Compiles, or reads the cache, in a folder whose name is not UTF-8."""
    if _C.jit_status()["nvrtc"] is None:
        pytest.skip("there is no NVRTC")
    folder = tmp_path / NO_PATH
    given = ["compile", "--arch", "sm_90a", "--dim", "8", "--gpu", "132:60", "--out", str(folder)]
    assert cli.main(given) == 0
    assert "registers" in capsys.readouterr().out and any(folder.iterdir())
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(folder))
    for kernel in bag_call(500_000, 8).kernels("sm_90a:132:60"):
        found = _C.kernel_compile(*kernel)
        assert found["path"].startswith(str(folder)) and found["cached"]


def test_a_path_that_is_too_long_is_reported(monkeypatch, capsys, tmp_path):
    long = Path(tmp_path, *["x" * 200] * 6)
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(long))
    assert cli.main(["info"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kernel cache")]
    assert f"none: its path of {len(str(long)):,} bytes is too long" in line
    for name in info.CACHE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert "RECFUSE_CACHE_DIR, XDG_CACHE_HOME and HOME are not set" in info.describe_cache(_C.jit_status())
