import itertools
import json
import os
import re
from pathlib import Path

import pytest
import torch

import recfuse
from recfuse import _C, cli, info
from recfuse.perf.described import bag_call
from support.bag_plan import plan_for
from support.processes.fresh import run_python

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--dim", "8", "--batch", "8", "--pooling", "5", "--batches", "2", "--index", "int32"]


def run(*arguments):
    return run_python("-m", "recfuse", *arguments)


@pytest.fixture(scope="module")
def printed_info():
    """By a new process, for a narrow terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "30")
        return run("info")


def test_info_prints_the_machine(printed_info):
    result = printed_info
    assert result.returncode == 0, result.stderr
    for text in (
        recfuse.__version__,
        torch.__version__,
        info.cpu_model().split()[0],
        "instruction set",
        "GPU",
    ):
        assert text in result.stdout


def test_info_is_not_wrapped_off_a_terminal(printed_info):
    lines = printed_info.stdout.splitlines()
    (library,) = [line for line in lines if line.startswith("library ")]
    assert len(library) > 30 and library.endswith(str(recfuse.library_path()))
    assert [line for line in lines if line != line.rstrip()] == []
    found = {line.split("  ")[0] for line in lines if not line.startswith(" ")}
    assert {"library", "CPU", "instruction set"} <= found


def test_info_as_json(monkeypatch, capsys):
    monkeypatch.delenv("RECFUSE_CPU_ISA", raising=False)
    assert cli.main(["info", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["library"] == torch.ops.recfuse.library_version()
    assert record["isa"] in record["isa_available"] and record["isa_ignored"] is None
    assert record["threads"] == torch.get_num_threads()
    assert record["library_path"] == str(recfuse.library_path())
    nvrtc = record["cuda"]["libraries"]["libnvrtc"]
    assert (nvrtc["found"] is None) == (nvrtc["version"] is None)
    for where in record["cuda"]["libraries"].values():
        assert where["found"] or len(where["looked_in"]) >= 1


ABSENT = next(name for name in info.ISA_FLAGS if name not in info.isa_available())


@pytest.mark.parametrize(
    ("asked", "words"),
    (
        ("mmx", "RECFUSE_CPU_ISA='mmx' is ignored; expected avx512, avx2, neon or scalar"),
        ("\x1b[2J", r"RECFUSE_CPU_ISA='\x1b[2J' is ignored; expected"),
        (ABSENT, f"RECFUSE_CPU_ISA={ABSENT} is ignored, since this CPU does not have it"),
        ("scalar", "RECFUSE_CPU_ISA=scalar is ignored: it was set after the first use"),
        (torch.ops.recfuse.cpu_isa(), None),
        ("", None),
    ),
)
def test_info_gives_the_reason_for_an_unused_instruction_set(monkeypatch, capsys, asked, words):
    monkeypatch.setenv("RECFUSE_CPU_ISA", asked)
    if asked == "scalar" == torch.ops.recfuse.cpu_isa():
        words = None
    assert cli.main(["info"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("instruction set")]
    assert (words in line) if words else ("ignored" not in line)
    ignored = info.collect()["isa_ignored"]
    assert (words in ignored) if words else (ignored is None)


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"recfuse {recfuse.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["tune"], ["compile"], ["info", "--yaml"], ["tune", "--dtype", "int8"]]
)
def test_bad_command_lines_end_with_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: recfuse" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        (["tune", "--trace", "warm"], "'warm', which is neither a file nor one of one_item, high"),
        (["tune", "--trace", "low", "--dim", "0"], "--dim is 0; expected >= 1"),
        (["tune", "--trace", "low", "--rows", "0"], "--rows is 0; expected >= 1"),
        (["tune", "--trace", "low", "--device", "tpux"], "--device is 'tpux'; expected cpu, cuda or cuda:N"),
        (
            ["tune", "--trace", "low", "--out", "/absent/plan.json", *TINY],
            "'/absent' is missing or not writable",
        ),
        (
            ["tune", "--trace", "low", "--out", "/tmp", *TINY],
            "--out is '/tmp', which is a folder; expected a",
        ),
        (
            ["compile", "--arch", "sm_70", "--dim", "8"],
            "--arch is 'sm_70'; expected sm_80 or newer, such as sm_80,",
        ),
        (["compile", "--arch", "hopper", "--dim", "8"], "--arch is 'hopper'; expected sm_80 or newer"),
        (["compile", "--arch", "sm_90a"], "no call to compile is named. Pass --plan FILE, or --dim"),
        (["compile", "--arch", "sm_90a", "--dim", "-4"], "--dim is -4"),
        (["compile", "--arch", "sm_90a", "--plan", "absent.json"], "absent.json"),
    ),
)
def test_errors_of_commands_are_one_line(capsys, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"recfuse {arguments[0]}: error: ") and words in error and error.count("\n") == 1
    assert error.count(f"recfuse {arguments[0]}: ") == 1


def test_tune_writes_a_plan(capsys, tmp_path):
    trace, out = tmp_path / "trace.txt", tmp_path / "plan.json"
    trace.write_text("\n".join(str(number % 50) for number in range(500)))
    assert (
        cli.main(
            ["tune", "--trace", str(trace), "--out", str(out), "--budget", "0", "--device", "cpu", *TINY]
        )
        == 0
    )
    plan = recfuse.Plan.load(out)
    assert (plan.table.rows, plan.table.dim, plan.table.indices) == (50, 8, "int32")
    assert (plan.trace.batches, plan.trace.lookups) == (2, 40.0)
    lines = capsys.readouterr().out.splitlines()
    assert any("schedule without a plan" in line for line in lines)
    assert lines[-1].startswith("winner: ")
    with pytest.raises(SystemExit):
        cli.main(["tune", "--trace", str(trace), "--rows", "49", *TINY])
    assert "--rows is 49, but the trace has row 49" in capsys.readouterr().err


def test_an_interrupt_ends_with_status_130(capsys, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("recfuse.tuner.tune", interrupt)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tune", "--trace", "low", "--device", "cpu", *TINY])
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "recfuse tune: interrupted\n"


def test_compile_prints_a_line_a_kernel(capsys, monkeypatch, tmp_path):
    asked, folders = [], set()

    def compile(*kernel):
        folders.add(os.environ["RECFUSE_CACHE_DIR"])
        if kernel[4:] != (True,):
            asked.append(kernel)
        if kernel[0] == "sm_99":
            raise ValueError("recfuse: arch is sm_99")
        return {
            "registers": 40, "spill_bytes": 0, "cubin_bytes": 12345, "cached": "-DRF_DIM=6 " in kernel[3],
            "seconds": 0.5, "path": "here",
        }  # fmt: skip

    monkeypatch.setattr(_C, "kernel_compile", compile)
    monkeypatch.delenv("RECFUSE_CACHE_DIR", raising=False)
    plan = plan_for(recfuse.nn.EmbeddingBag(100, 4, mode="mean"))
    object.__setattr__(plan.device, "type", "cuda")
    plan.save(tmp_path / "plan.json")
    cache = tmp_path / "new" / "cache"
    options = ["--dim", "6", "64", "--mode", "sum", "max", "--weighted", "--gpu", "132:60"]
    options += ["--plan", str(tmp_path / "plan.json"), "--out", str(cache)]
    assert cli.main(["compile", "--arch", "sm_80", "--arch", "sm_90a", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(asked) == len(set(asked)) == 2 * (5 + 4)  # tables, and pinning
    assert lines[0] == (
        "sm_80 table of 500,000 x 6 float32, sum, int64, 2,048 bags of 150, rf_embedding_bag 0: "
        "40 registers, 0 bytes spilled, 12,345 bytes, cached, 0.50 s"
    )
    found = {
        (
            arch,
            *(re.search(rf"-D{name}=(\S+)", defines)[1] for name in ("RF_DIM", "RF_POOLING", "RF_WEIGHTED")),
        )
        for arch, _, kernel, defines in asked
        if kernel == "rf_embedding_bag"
    }
    tables = {("6", "0", "1"), ("6", "2", "0"), ("64", "0", "1"), ("64", "2", "0"), ("4", "1", "0")}
    assert found == {(arch, *table) for arch in ("sm_80", "sm_90a") for table in tables}
    assert folders == {str(cache)} and cache.is_dir() and "RECFUSE_CACHE_DIR" not in os.environ
    assert cli.main(["compile", "--arch", "sm_99", "--dim", "8", "--out", str(cache)]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("note: sm_99 is not in the table of GPUs; its GPU is described as H200\n")
    assert "2,048 bags of 150, rf_embedding_bag 0: recfuse: arch is sm_99\n" in printed.err
    assert "5 of 5 failed" in printed.err


@pytest.mark.long
def test_compile_covers_the_kernels_of_training(capsys, monkeypatch, tmp_path):
    """For each table or plan and each optimizer: its form, and the message if there is no table for it."""
    asked = set()

    def compile(*kernel):
        asked.add(kernel[:4])
        return {"registers": 1, "spill_bytes": 0, "cubin_bytes": 1, "cached": False, "seconds": 0}

    monkeypatch.setattr(_C, "kernel_compile", compile)
    plan = plan_for(recfuse.nn.EmbeddingBag(100, 4, mode="mean"))
    object.__setattr__(plan.device, "type", "cuda")
    plan.save(tmp_path / "plan.json")
    given = ["--plan", str(tmp_path / "plan.json"), "--dim", "16", "--rows", "70", "--dtype", "float16"]
    given += ["--index", "int32", "--weighted", "--stochastic-rounding", "--out", str(tmp_path)]
    plain = [one for one in given if one != "--stochastic-rounding"]
    assert cli.main(["compile", "--arch", "sm_90a", *plain]) == 0
    assert not any("backward" in file for _, file, *_ in asked)
    assert cli.main(["compile", "--arch", "sm_90a", *given, "--training", "gradients", "adam"]) == 0
    names = "RF_EPILOGUE", "RF_GRAD_DTYPE", "RF_WEIGHT_DTYPE", "RF_ROUND"
    found = {
        tuple(int(re.search(rf"-D{name}=(\d)", defines)[1]) for name in names)
        for _, _, kernel, defines in asked
        if kernel == "rf_backward_rows"
    }
    adam, half = 4, 1
    assert found >= {(0, 0, 0, 0), (0, half, half, 0), (adam, half, half, 1)}
    assert any(kernel[2] == "rf_sample_weights" for kernel in asked)
    assert "table of 70 x 16 float16, sum, int32, adam" in capsys.readouterr().out


def test_a_missing_nvrtc_is_one_line(capsys, monkeypatch, tmp_path):
    """In the words of the C source, which the command line recognises."""
    source = (ROOT / "csrc/gpu/jit/nvrtc_find.c").read_text()
    words = re.search(r'rf__fail\(\s*RF_ERR_UNSUPPORTED,\s*((?:"[^"]*"\s*)+)', source)
    message = "".join(re.findall(r'"([^"]*)"', words[1])).replace("\\n", "\n")
    message %= "\n  /opt/toolkit/lib64\n  /usr/local/cuda/lib64"

    def fail(*arguments):
        raise NotImplementedError(f"kernel_compile: {message}")

    monkeypatch.setattr(_C, "kernel_compile", fail)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compile", "--arch", "sm_90a", "--dim", "8", "16", "--out", str(tmp_path)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("recfuse compile: error: NVRTC (libnvrtc.so.13 or ")
    assert "searched: /opt/toolkit/lib64, /usr/local/cuda/lib64, the loader's search path. Install" in error
    assert "pip install nvidia-cuda-nvrtc" in error


@pytest.mark.parametrize("gpu", ["132", "0:60", "a:b", "132:-1"])
def test_a_gpu_that_makes_no_sense_is_refused(capsys, gpu):
    with pytest.raises(SystemExit):
        cli.main(["compile", "--arch", "sm_90a", "--dim", "6", "--gpu", gpu])
    assert "is not SMs:MiB, such as 132:60" in capsys.readouterr().err


def test_all_that_a_call_may_ask_for_is_compiled(monkeypatch, tmp_path):
    """On every known GPU of an architecture, and for more rows than 32 bits number."""
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path))
    sizes = {"--batch": [128, 2048], "--pooling": [20]}
    given = [str(one) for name, values in sizes.items() for one in (name, *values)]
    for rows in (400_000, 1 << 32):
        arguments = ["compile", "--arch", "sm_90a", "--dim", "32", *given, "--rows", str(rows)]
        assert cli.main(arguments) == 0
    monkeypatch.setenv("RECFUSE_JIT", "off")
    kernels = set()
    for gpu, batch, rows in itertools.product(
        ("132:60", "132:50", "114:50", "78:60"), sizes["--batch"], (400_000, 1 << 32)
    ):
        found = bag_call(rows, 32, bags=batch, pooling=20).kernels(f"sm_90a:{gpu}")
        assert all(_C.kernel_compile(*kernel)["cached"] for kernel in found)
        kernels.update(found)
    assert len(kernels) > 2  # a GPU of other SMs has other defaults


def test_compile_fails_where_nothing_is_kept(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path / "file"))
    assert cli.main(["compile", "--arch", "sm_90a", "--dim", "6", "--gpu", "78:60"]) == 1
    printed = capsys.readouterr()
    assert "registers" not in printed.out
    assert (
        "sum, int64, 2,048 bags of 150, rf_embedding_bag 0: compiled, but not written to the cache "
        f"({tmp_path / 'file'}, which is not used: it is no folder)\n" in printed.err
    )


def test_the_cache_of_kernels_is_described(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("RECFUSE_JIT", "off")
    name = "0123456789abcdef" * 2 + "-nvrtc13.0.cubin"
    (tmp_path / name).write_bytes(bytes(3 << 20))
    (tmp_path / f"{name}.tmpAbCdEf").write_bytes(bytes(100))
    (tmp_path / "notes.cubin").write_bytes(bytes(100))
    cache = info.cuda()["kernel_cache"]
    assert cache == {
        "folder": str(tmp_path),
        "entries": 1,
        "bytes": 3 << 20,
        "allowed": False,
        "refused": None,
        "ignored": 0,
    }
    assert cli.main(["info"]) == 0
    output = capsys.readouterr().out
    assert "1 kernels, 3.0 MiB in" in output and "forbidden by RECFUSE_JIT=off" in output


def test_a_cache_writable_by_others_is_reported(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path))
    (tmp_path / ("0123456789abcdef" * 2 + "-nvrtc13.0.cubin")).touch(mode=0o666)
    (tmp_path / ("0123456789abcdef" * 2 + "-nvrtc13.0.cubin")).chmod(0o666)
    assert cli.main(["info"]) == 0
    assert "0 kernels, 0.0 MiB" in (output := capsys.readouterr().out) and "1 ignored, which" in output
    tmp_path.chmod(0o777)
    assert cli.main(["info"]) == 0
    output = capsys.readouterr().out
    assert "is not used: others may write there (mode 777" in output


def test_missing_libraries_say_where_they_were_looked_for(monkeypatch, capsys):
    missing = (
        "NVRTC is in no place that was searched:\n  /opt/toolkit/lib64\n  the loader's search path\nInstall"
    )
    status = dict.fromkeys(("nvrtc", "builtins", "folder")) | dict.fromkeys(("major", "entries", "bytes"), 0)
    status |= {"minor": 0, "missing": missing, "allowed": True, "refused": None, "ignored": 0}
    monkeypatch.setattr(info.ctypes.util, "find_library", lambda stem: None)
    monkeypatch.setattr(recfuse._C, "jit_status", lambda: status)
    for name in info.CACHE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
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
