import json
import subprocess
import sys

import pytest
import torch

import recfuse
from recfuse import cli, info


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "recfuse", *arguments], capture_output=True, text=True, timeout=120
    )


def test_info_of_the_module_prints_what_it_runs_on():
    result = run("info")
    assert result.returncode == 0, result.stderr
    for text in (
        recfuse.__version__,
        torch.__version__,
        info.cpu_model().split()[0],
        "instruction set",
        "GPU",
    ):
        assert text in result.stdout


def test_info_as_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["library"] == torch.ops.recfuse.library_version()
    assert record["isa"] in record["isa_available"]
    assert record["threads"] == torch.get_num_threads()
    assert record["library_path"] == str(recfuse.library_path())
    nvrtc = record["cuda"]["libraries"]["libnvrtc"]
    assert (nvrtc["found"] is None) == (nvrtc["version"] is None)
    for where in record["cuda"]["libraries"].values():
        assert where["found"] or len(where["looked_in"]) >= 1


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"recfuse {recfuse.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["tune"], ["info", "--yaml"]])
def test_bad_command_lines_end_with_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: recfuse" in capsys.readouterr().err


def test_the_cache_of_kernels_is_described(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("RECFUSE_JIT", "off")
    name = "0123456789abcdef" * 2 + "-nvrtc13.0.cubin"
    (tmp_path / name).write_bytes(bytes(3 << 20))
    (tmp_path / f"{name}.tmpAbCdEf").write_bytes(bytes(100))
    (tmp_path / "notes.cubin").write_bytes(bytes(100))
    cache = info.cuda()["kernel_cache"]
    assert cache == {"folder": str(tmp_path), "entries": 1, "bytes": 3 << 20, "allowed": False}
    assert cli.main(["info"]) == 0
    output = capsys.readouterr().out
    assert "1 kernels, 3.0 MiB in" in output and "forbidden by RECFUSE_JIT=off" in output


def test_missing_libraries_say_where_they_were_looked_for(monkeypatch, capsys):
    missing = "NVRTC is not here; looked in\n  /opt/toolkit/lib64\n  the loader's search path\nInstall it"
    status = dict.fromkeys(("nvrtc", "builtins", "folder")) | dict.fromkeys(("major", "entries", "bytes"), 0)
    status |= {"minor": 0, "missing": missing, "allowed": True}
    monkeypatch.setattr(info.ctypes.util, "find_library", lambda stem: None)
    monkeypatch.setattr(recfuse._C, "jit_status", lambda: status)
    record = info.cuda()
    assert {"libcuda", "libnvrtc", "libnvrtc-builtins", "a GPU"} <= set(record["missing"])
    assert record["libraries"]["libnvrtc"]["looked_in"] == ["/opt/toolkit/lib64", "the loader's search path"]
    assert cli.main(["info"]) == 0
    output = capsys.readouterr().out
    assert "missing; looked in" in output and "HOME are not set" in output


def test_a_machine_without_system_files_is_described_all_the_same(monkeypatch, tmp_path):
    for name in ("CPUINFO", "CACHES", "HUGE_PAGES"):
        monkeypatch.setattr(info, name, tmp_path / "absent")
    assert info.cpu_model()
    assert info.isa_available() == ["scalar"]
    assert info.last_level_cache_bytes() == 64 << 20
    assert info.huge_pages() == "unknown"


def test_the_commit_is_absent_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert info.git_commit() is None
