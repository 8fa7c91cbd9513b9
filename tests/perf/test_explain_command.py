"""`recfuse explain`, and kernels that `recfuse compile` takes from described calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import recfuse
from recfuse import _C, cli
from recfuse.nn.columns import Bucketize, Cross, Hash, Numeric
from recfuse.perf.described import bag_call, reserve

CALL = ["--dim", "16", "--batch", "32", "--pooling", "4"]


def test_a_table_is_explained_on_each_gpu(capsys, tmp_path):
    out = tmp_path / "launches.json"
    given = ["explain", *CALL, "--mode", "sum", "max", "--gpu", "H100", "L4", "--json", str(out)]
    assert cli.main(given) == 0
    printed = capsys.readouterr().out
    assert printed.count("H100 (sm_90a, 132 SMs)") == printed.count("L4 (sm_89, 58 SMs)") == 2
    records = json.loads(out.read_text())
    assert [record["gpu"]["name"] for record in records] == ["H100", "L4"] * 2
    launch = records[0]["launches"][0]
    assert launch["written_bytes"] == 32 * 16 * 4
    assert launch["read_bytes"] == 128 * (16 * 4 + 8) + 32 * 8


def test_tables_larger_than_memory_cost_nothing():
    table = reserve((2**36, 128), torch.float32)
    assert table.shape == (2**36, 128) and table[-1, -1] == 0
    assert len(bag_call(2**36, 128).explain("H100")) == 1


def test_gpus_are_listed(capsys):
    assert cli.main(["explain", "--gpu", "list"]) == 0
    names = capsys.readouterr().out
    assert all(gpu["name"] in names for gpu in _C.gpus())


def test_an_unknown_architecture_is_noted(capsys):
    assert cli.main(["explain", *CALL, "--gpu", "sm_103"]) == 0
    printed = capsys.readouterr()
    assert "B200 (sm_103, 148 SMs)" in printed.out
    assert printed.err == "note: sm_103 is not in the table of GPUs; its GPU is described as B200\n"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "no call to explain is named"),
        ([*CALL, "--gpu", "H900"], 'gpu is "H900"; expected one of A100'),
        (["--dim", "0"], "--dim is 0"),
        (["--ikbo-linear", "1:2:3"], "'1:2:3' is not M:KU:KC:N; expected 4 integers from 1 on"),
        (["--ikbo-linear", "1:2:3:4", "--users", "0"], "--users is 0"),
    ],
)
def test_bad_options(capsys, given, text):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["explain", *given])
    assert stopped.value.code == 2 and text in capsys.readouterr().err


@pytest.fixture
def columns_file(tmp_path: Path) -> Path:
    path = tmp_path / "columns.json"
    recfuse.nn.EmbeddingColumns(
        [
            Hash("city", num_embeddings=10, embedding_dim=8),
            Bucketize("age", boundaries=[1, 2], embedding_dim=4),
            Cross("both", keys=["city", "street"], num_embeddings=10, embedding_dim=4),
            Numeric("price"),
        ]
    ).to_json(path)
    return path


def test_columns_of_a_file_are_explained_and_compiled(capsys, columns_file, kernel_cache, monkeypatch):
    assert cli.main(["explain", "--columns", str(columns_file), "--batch", "64", "--gpu", "A100"]) == 0
    assert "rf_embedding_columns" in capsys.readouterr().out
    given = ["compile", "--arch", "sm_80", "--columns", str(columns_file), "--batch", "64"]
    assert cli.main(given) == 0
    assert "4 columns of 64 samples, rf_embedding_columns" in capsys.readouterr().out
    monkeypatch.setenv("RECFUSE_JIT", "off")
    assert cli.main(["explain", *given[3:], "--gpu", "A100", "--compile"]) == 0
    assert "yes" in capsys.readouterr().out
