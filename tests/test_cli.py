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


def test_nvrtc_of_a_toolkit_is_found(monkeypatch, tmp_path):
    library = tmp_path / "lib64" / "libnvrtc.so.13"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert info.cuda()["libraries"]["libnvrtc"]["found"] == str(library)


def test_nvrtc_of_a_wheel_comes_before_a_toolkit(monkeypatch, tmp_path):
    for folder in ("nvidia/cu13/lib", "lib64"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "libnvrtc.so.13").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = info.cuda()["libraries"]["libnvrtc"]["found"]
    assert found == str(tmp_path / "nvidia/cu13/lib/libnvrtc.so.13")


def test_a_missing_library_says_where_it_was_looked_for(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(info.ctypes.util, "find_library", lambda stem: None)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(info.Path, "glob", lambda self, pattern: iter(()))
    record = info.cuda()
    assert {"libcuda", "libnvrtc", "libnvrtc-builtins", "a GPU"} <= set(record["missing"])
    assert str(tmp_path / "lib64") in record["libraries"]["libnvrtc"]["looked_in"]
    assert cli.main(["info"]) == 0
    assert "missing; looked in" in capsys.readouterr().out


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
