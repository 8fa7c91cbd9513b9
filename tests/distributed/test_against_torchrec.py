"""`against_torchrec.py`: how it counts cases, which line of a failure it shows, which folder it makes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

from distributed.against_torchrec import TESTS, last_line, prepare, table_of


def _results(*statuses: str) -> dict:
    return {str(n): {"test": "A.b", "status": status, "reason": ""} for n, status in enumerate(statuses)}


def test_cases_are_counted():
    results = {
        "fbgemm": _results("passes", "passes", "fails", "passes"),
        "recfuse": _results("passes", "fails", "passes", "skipped"),
    }
    assert table_of(results) == [["A.b", "4", "3", "2", "2"], ["all", "4", "3", "2", "2"]]


def test_the_reason_is_not_that_of_a_peer():
    reason = "Traceback\nValueError: the fault\nRuntimeError: Connection closed by peer\n ^^^\n  |\n"
    assert last_line(reason) == "ValueError: the fault"
    assert last_line("") == "-" and last_line("no error\n\n") == "no error"


@pytest.mark.long
def test_processes_have_the_kernels_that_were_chosen(tmp_path):
    pytest.importorskip("hypothesis")
    checkout = tmp_path / "checkout"
    (checkout / TESTS).mkdir(parents=True)
    (checkout / TESTS / "test_sequence_model.py").write_text("TEST = 1\n")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", checkout, *command], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", checkout, *author, "commit", "-qm", "tests"], check=True)
    folder = tmp_path / "site"
    folder.mkdir()
    prepare(folder, checkout, "HEAD")
    code = (
        "import torchrec, recfuse.torchrec.sharder as sharder, torch.distributed as dist;"
        "from torchrec.distributed.tests.test_sequence_model import TEST;"
        "print(torchrec.__file__, sharder._enabled, dist.init_process_group.__code__.co_filename, TEST)"
    )
    paths = [str(folder), *(path for path in sys.path if path)]
    environment = {
        "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(paths), "SUITE_KERNELS": "recfuse",
        "SUITE_RECORD": str(tmp_path / "record"), "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    words = found.stdout.split()
    assert len(words) == 4, found.stderr[-2000:]
    assert words[0].startswith(str(folder)) and words[1] == "True"
    assert words[2].endswith("suite_hook.py") and words[3] == "1"
