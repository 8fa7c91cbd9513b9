"""All kinds of values that an operator in C exchanges with torch (csrc/torch), by a library of the test."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
SOURCES = ["csrc/core/status.c", "csrc/families/embedding_columns/tensors/columns_inputs.c"]
SOURCES += [f"csrc/torch/{name}.c" for name in ("call", "arguments", "values")]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Any:
    assert COMPILER is not None
    library = tmp_path_factory.mktemp("values") / "values.so"
    folder = Path(torch.__file__).parent / "lib"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fexceptions", "-pthread"]
    flags += ["-fvisibility=hidden", "-Wl,-z,nodelete", f"-I{ROOT}/include", f"-I{ROOT}/csrc"]
    command = [COMPILER, *flags, "tests/c/torch/values.c", *SOURCES, "-o", str(library)]
    command += [f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltorch_cpu"]
    subprocess.run(command, cwd=ROOT, check=True)
    torch.ops.load_library(str(library))
    return torch.ops.recfuse_values


def test_scalars_options_and_lists(ops: Any) -> None:
    x = torch.zeros(2, 1, 3, 1, 2)
    assert ops.describe(x, 0.5, list=[]) == "5 0.5 1 3 [0] -1 None a, b) 0"
    given = {"maybe_scale": 2.5, "maybe_flag": False, "maybe_text": "text", "mode": "relu"}
    assert ops.describe(x[0, 0, 0, 0, 0], -1e9, False, 1 << 40, list=[x, x], **given) == (
        "0 -1e+09 0 1099511627776 [2] 2.5 False text 2"
    )
    with pytest.raises(RuntimeError, match='describe: mode is "tanh"; expected "none", "gelu" or "relu"'):
        ops.describe(x, 1.0, list=[], mode="tanh")


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3, 4, 5), (1, 2, 1, 2, 1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("third", [False, True])
def test_outputs_of_any_rank(ops: Any, shape: tuple[int, ...], third: bool) -> None:
    x = torch.randn(shape).double().permute(tuple(reversed(range(len(shape)))))
    copy, flat, count = ops.copies(x, third)
    assert copy.is_contiguous() and torch.equal(copy, x.float()) and torch.equal(flat, x.float().flatten())
    assert count.item() == x.numel() if third else count is None


def test_failures(ops: Any) -> None:
    text = r"ValueError: recfuse\.copies: x is float32 \[2, 3\]; expected another one"
    with pytest.raises(RuntimeError, match=text):
        ops.copies(torch.zeros(2, 3), True, True)
    with pytest.raises(RuntimeError, match="at most 8 are supported"):
        ops.copies(torch.zeros([1] * 9), True)
    with pytest.raises(RuntimeError, match=r"InternalError: recfuse\.missing: output 0 was not made"):
        ops.missing(torch.zeros(1))


def test_a_type_that_is_not_supported_is_not_registered(ops: Any) -> None:
    assert not hasattr(ops, "unsupported")
