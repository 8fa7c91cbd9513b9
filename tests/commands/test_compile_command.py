"""`recfuse compile`: what it says is in the cache is there, and no option is dropped without a word."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recfuse import _C, cli, info

NO_PATH = os.fsdecode(b"caf\xe9")  # not UTF-8


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stand-ins for the functions of `_C`, which keep as many kernels as they are told."""
    kept: set[Any] = set()

    def stand_in(name: str, room: int) -> Callable[..., Any]:
        def compile(*arguments: Any) -> Any:
            key = name, str(arguments)
            if os.environ.get("RECFUSE_JIT") == "off" and key not in kept:
                raise NotImplementedError(f"{name}: not in the cache")
            if len(kept) < room:
                kept.add(key)
            return {}

        return compile

    def prepare(room: int) -> None:
        for name in (
            "small_kernels_compile",
            "columns_kernels_compile",
            "embedding_bag_compile",
            "fused_embedding_bag_training_compile",
        ):
            monkeypatch.setattr(_C, name, stand_in(name, room))

    return prepare


def test_what_is_not_kept_is_no_success(compiler, capsys, tmp_path):
    """The kernels that tell no figures too: small ones, columns, training."""
    given = ["compile", "--arch", "sm_90a", "--dim", "8", "--training", "sgd", "--columns", "--gpu", "132:60"]
    compiler(room=100)
    assert cli.main([*given, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(": compiled\n") == 4
    compiler(room=0)
    capsys.readouterr()
    assert cli.main([*given, "--arch", "sm_80", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.err.count(f"compiled, but not written to the cache ({tmp_path})\n") == 4
    assert "4 of 8 failed" in printed.err and printed.out.count(": compiled\n") == 4
    assert "RECFUSE_JIT" not in os.environ


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
    compiler(room=0)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compile", "--arch", "sm_90a", *option, *["--columns"] * columns])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_a_folder_that_is_no_text(monkeypatch, capsys, tmp_path):
    """Compiles, or takes from the cache, into a folder whose name is not UTF-8."""
    if _C.jit_status()["nvrtc"] is None:
        pytest.skip("there is no NVRTC")
    folder = tmp_path / NO_PATH
    given = ["compile", "--arch", "sm_90a", "--dim", "8", "--gpu", "132:60", "--out", str(folder)]
    assert cli.main(given) == 0
    assert "registers" in capsys.readouterr().out and any(folder.iterdir())
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(folder))
    kernel = _C.embedding_bag_compile(
        "sm_90a", 8, 8, 16, 0, 1, 1, 0, False, False, True, 307200, 2048, "", 500000, 132, 60 << 20
    )
    assert kernel["path"].startswith(str(folder)) and kernel["cached"]


def test_a_path_that_is_too_long_is_said(monkeypatch, capsys, tmp_path):
    long = Path(tmp_path, *["x" * 200] * 6)
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(long))
    assert cli.main(["info"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kernel cache")]
    assert f"none: its path of {len(str(long)):,} bytes is too long" in line
    for name in info.CACHE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert "RECFUSE_CACHE_DIR, XDG_CACHE_HOME and HOME are not set" in info.describe_cache(_C.jit_status())
