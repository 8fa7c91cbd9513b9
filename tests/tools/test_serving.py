"""The example of serving: the exported program runs without the Python package, in Python and in C++, with
its own weights or with new ones; and the C library runs without torch."""

from __future__ import annotations

import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from torch._inductor import config

import recfuse
from support.compiled import QUICK
from support.processes.fresh import run_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "serving"
PACKAGE = Path(recfuse.__file__).parent
TOOLS = ("make", os.environ.get("CC", "cc"), os.environ.get("CXX", "g++"))
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]
# An in-place build is found by the child too.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path))}

pytestmark = [pytest.mark.long, pytest.mark.skipif(MISSING != [], reason=f"no {', '.join(MISSING)}")]


def make(folder: Path) -> list[str]:
    command = ["make", "-C", str(EXAMPLE), f"PYTHON={sys.executable}", f"OUT={folder}"]
    return [*command, "CXXFLAGS=-O0", "CFLAGS=-Wall -Wextra -Werror -pedantic"]


def run(*command: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the files of export.py and the compiled programs; all are created at once."""
    folder, printed = tmp_path_factory.mktemp("serving"), io.StringIO()
    with subprocess.Popen(
        make(folder), env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as compiler:
        with pytest.MonkeyPatch.context() as patch, config.patch(QUICK), redirect_stdout(printed):
            patch.setattr(sys, "argv", ["export.py", str(folder)])
            patch.syspath_prepend(str(EXAMPLE))
            runpy.run_path(str(EXAMPLE / "export.py"), run_name="__main__")
        _, said = compiler.communicate(timeout=300)
    assert compiler.returncode == 0, said
    assert "6 tables in one call" in printed.getvalue()
    return folder


def serve_python(folder: Path, *weights: Path) -> str:
    """By serve.py in a process whose Python does not have the package."""
    given = [recfuse.library_path(), folder, folder / "output.pt", *weights]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run_python(EXAMPLE / "serve.py", *given, env=alone)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_cpp(folder: Path, inputs: str, *weights: Path) -> subprocess.CompletedProcess[str]:
    given = [recfuse.library_path(), folder / "package.pt2", folder / inputs, folder / "output.pt"]
    return run(folder / "serve", *given, *weights)


def serve_cpp(folder: Path, *weights: Path) -> str:
    done = run_cpp(folder, "inputs.pt", *weights)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("serve", (serve_python, serve_cpp))
def test_a_package_serves_exported_weights_until_it_loads_new_weights(serve, folder):
    old, new = torch.load(folder / "expected.pt"), torch.load(folder / "expected_new.pt")
    assert not torch.allclose(old, new, atol=1e-3)
    serve(folder, folder / "weights.pt")
    torch.testing.assert_close(torch.load(folder / "output.pt"), new)
    serve(folder)  # the files are as they were
    torch.testing.assert_close(torch.load(folder / "output.pt"), old)


@pytest.mark.parametrize("bags", (0, 1))
def test_a_batch_of_one_sample_or_none(bags, folder, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import model

    dense, offsets, indices = torch.load(folder / "inputs.pt")
    given = [dense[:bags], offsets[:, :bags].contiguous(), indices[:, : 5 * bags].contiguous()]
    torch.save(given, folder / "few.pt")
    done = run_cpp(folder, "few.pt")
    assert done.returncode == 0, done.stderr
    expected = model.DLRM()(*given)
    torch.testing.assert_close(torch.load(folder / "output.pt"), expected)
    torch.testing.assert_close(torch.export.load(folder / "model.pt2").module()(*given), expected)


def test_a_package_names_its_weights(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import model

    module = model.DLRM()
    recfuse.swap(module)
    state, saved = dict(module.named_parameters()), torch.load(folder / "weights.pt")
    assert set(saved) == set(state) and model.fingerprint(saved) != model.fingerprint(state)
    said = serve_cpp(folder, folder / "weights.pt").splitlines()
    assert said == [
        f"package holds weights {model.fingerprint(state)}",
        f"replaced by {folder / 'weights.pt'}",
    ]


@pytest.mark.parametrize(
    "renamed, said",
    [((), "Cannot find constants emb_l_packed_dim16"), (("emb_l.packed_dim32",), "Constant not found")],
)
def test_weights_of_another_model_are_refused(renamed, said, folder):
    weights = torch.load(folder / "weights.pt")
    moved = weights.pop("emb_l.packed_dim16")
    torch.save({**weights, **dict.fromkeys(renamed, moved)}, folder / "bad.pt")
    done = run_cpp(folder, "inputs.pt", folder / "bad.pt")
    assert done.returncode == 1 and said in done.stderr


def test_an_index_out_of_range_is_an_exception_of_the_program(folder):
    dense, offsets, indices = torch.load(folder / "inputs.pt")
    indices[0, 7] = 40
    torch.save([dense, offsets, indices], folder / "bad_inputs.pt")
    done = run_cpp(folder, "bad_inputs.pt")
    assert done.returncode == 1 and "indices[7] is 40" in done.stderr


def test_a_c_program_needs_no_torch(folder):
    done = run(folder / "pool")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"recfuse {recfuse.__version__}, {torch.ops.recfuse.cpu_isa()}",
        *("101 202 303 404 ", "0 0 0 0 ", "21 42 63 84 "),
        "recfuse.embedding_bag: indices[1] is 2, for feature 0, bag 0; expected 0 to 1, less than the 2 "
        "rows of its table",
    ]
    if shutil.which("ldd"):
        needed = re.findall(r"^\s*(\S+)", run("ldd", folder / "pool").stdout, flags=re.MULTILINE)
        system = re.compile(r"linux-vdso.*|.*ld-linux.*|lib(c|m|pthread|dl)\.so\.\d+")
        assert {name for name in needed if not system.fullmatch(name)} == {"librecfuse_core.so"}


def test_headers_of_the_package_are_those_of_the_project():
    include = Path(recfuse.include_dir())
    found = {path.relative_to(include): path.read_text() for path in include.glob("**/*.h")}
    wanted = ROOT / "include"
    assert found == {path.relative_to(wanted): path.read_text() for path in wanted.glob("**/*.h")}


def blocks(*languages: str) -> list[str]:
    """The page's blocks of code."""
    page = (ROOT / "docs" / "serving.md").read_text()
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)


def test_the_page_quotes_the_example():
    sources = "".join(path.read_text() for path in sorted(EXAMPLE.iterdir()) if path.is_file())
    lines = {line.strip() for line in sources.splitlines()}
    quoted = blocks("cpp", "c")
    assert quoted
    assert [line for block in quoted for line in block.splitlines() if line.strip() not in lines] == []


@pytest.fixture
def pasted(folder: Path, tmp_path: Path) -> Path:
    """A copy of the example, with the files of export.py in its folder `out`."""
    example = tmp_path / "serving"
    shutil.copytree(EXAMPLE, example, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(folder, example / "out")
    return example


def test_commands_of_the_page_run_as_pasted(pasted):
    (pasted / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (pasted / "python").chmod(0o755)
    lines = "".join(blocks("bash")).splitlines()
    steps = [
        "cd examples/serving",
        "python export.py out",
    ]  # the first is done by cwd, the second by `folder`
    assert lines[:2] == steps
    for name in ("pool", "output.pt"):  # a second build of serve would take a minute
        (pasted / "out" / name).unlink(missing_ok=True)
    environment = {**ENVIRONMENT, "PATH": f"{pasted}:{os.environ['PATH']}", "CXXFLAGS": "-O0"}
    done = subprocess.run(
        ["sh", "-ec", "\n".join(lines[2:])], cwd=pasted, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "package holds weights" in done.stdout and "101 202 303 404" in done.stdout
    output = torch.load(pasted / "out" / "output.pt")
    torch.testing.assert_close(output, torch.load(pasted / "out" / "expected.pt"))


def test_samples_of_the_page_run_as_pasted(pasted, monkeypatch, capsys):
    export, load, compile_package = blocks("python")
    packages = []
    monkeypatch.chdir(pasted)
    monkeypatch.syspath_prepend(str(pasted))
    monkeypatch.setattr(  # it takes minutes, and `folder` has done the same
        torch._inductor,
        "aoti_compile_and_package",
        lambda program, **given: packages.append((program, given)),
    )
    names: dict[str, object] = {}
    exec(export + compile_package, names)
    assert "6 tables in one call" in capsys.readouterr().out
    ((program, given),) = packages
    assert program is names["program"] and Path(given["package_path"]).exists()
    assert given["inductor_configs"].keys() <= {"always_keep_tensor_constants"}

    shutil.copy(recfuse.library_path(), "out/librecfuse.so")
    (pasted / "load.py").write_text(f'{load}\ntorch.save(output, "out/loaded.pt")\n')
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run_python(pasted / "load.py", env=alone)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load("out/loaded.pt"), torch.load("out/expected.pt"))
