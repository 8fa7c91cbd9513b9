"""The example of Criteo's click logs: its reader against a plain one, and both engines on a sample."""

from __future__ import annotations

import gzip
import importlib
import math
import random
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "criteo"
ROWS = [1, 2, 3, 1000, 2**32 + 1, *[7919] * 21]
MODULES = ("read", "sample", "train")


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def read(modules):
    return modules["read"]


def plain(text: bytes) -> tuple[list, list, list]:
    """Labels, dense values and categories of a text, line by line."""
    lines = text.decode().split("\n")
    samples = [line.removesuffix("\r").split("\t") for line in lines if line]
    labels = [float(fields[0]) for fields in samples]
    dense = [[math.log1p(max(int(field or 0), 0)) for field in fields[1:14]] for fields in samples]
    return labels, dense, [[int(field or "0", 16) for field in fields[14:]] for fields in samples]


def line_of(draw: random.Random) -> str:
    integers = ["", "0", "-1", "-0", "7", "007", str(draw.randrange(10**18)), str(-draw.randrange(10**18))]
    categories = ["", "0", "f", "DEADbeef", "ffffffff", "80000000", f"{draw.randrange(1 << 32):x}"]
    fields = [draw.choice("01"), *(draw.choice(integers) for _ in range(13))]
    fields += [draw.choice(categories) for _ in range(26)]
    if draw.random() < 0.1:  # nothing but a label
        fields[1:] = [""] * 39
    return "\t".join(fields) + draw.choice(["\n", "\r\n"])


def joined(read, batches):
    batches = list(batches)
    return read.Batch(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))


@pytest.mark.parametrize("seed", range(8))
def test_text_is_read_as_by_a_plain_reader(read, tmp_path, monkeypatch, seed):
    draw = random.Random(seed)
    text = "".join(line_of(draw) for _ in range(draw.randrange(1, 60))).encode()
    if draw.random() < 0.5:
        text = text.rstrip(b"\n")
    path, packed = tmp_path / "day.txt", tmp_path / "day.gz"
    path.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    labels, dense, categories = plain(text)
    rows = np.array(ROWS)
    for size in (1, 61, 300, 1 << 20):
        chunks = joined(read, read.read_text(path, rows, size))
        np.testing.assert_array_equal(chunks.labels, labels)
        np.testing.assert_allclose(chunks.dense, dense, rtol=1e-6)
        np.testing.assert_array_equal(chunks.indices, np.array(categories) % rows)
    batches = list(read.read([path, packed], ROWS, 7))
    assert [len(batch.labels) for batch in batches[:-1]] == [7] * (len(batches) - 1)
    both = joined(read, batches)
    assert (both.dense.dtype, both.indices.dtype, both.labels.dtype) == (np.float32, np.int64, np.float32)
    np.testing.assert_array_equal(both.labels, labels * 2)
    np.testing.assert_array_equal(both.indices, np.array(categories * 2) % rows)


GOOD = "\t".join(["1", *["5"] * 13, *["0a"] * 26])


def changed(field: int, value: str) -> str:
    fields = GOOD.split("\t")
    fields[field] = value
    return "\t".join(fields)


@pytest.mark.parametrize(
    "line, message",
    [
        (GOOD.rpartition("\t")[0], "found 39 fields; expected 40"),
        (GOOD.partition("\t")[2], "found 39 fields"),  # as in a file without labels
        (GOOD + "\t", "found 41 fields"),
        ("", "found 1 fields"),
        ("\r", "found 1 fields"),
        (changed(0, ""), "the label is ''; expected 0 or 1"),
        (changed(0, "2"), "the label is '2'"),
        (changed(0, "\ufeff1"), "the label is "),
        (changed(0, "01"), "the label is '01'"),
        (changed(1, "-"), "integer 1 is '-'"),
        (changed(13, "1.5"), "integer 13 is '1.5'"),
        (changed(3, " 1"), "integer 3 is ' 1'"),
        (changed(3, "1" * 19), "integer 3 is '1111111111111111111'; expected an integer of up to 18"),
        (changed(3, "a"), "integer 3 is 'a'"),
        (changed(14, "xyz"), "category 1 is 'xyz'; expected up to 8 hexadecimal digits"),
        (changed(39, "123456789"), "category 26 is '123456789'"),
        (changed(39, "-1"), "category 26 is '-1'"),
        (changed(39, "0x1"), "category 26 is '0x1'"),
        (changed(38, "a\r"), r"category 25 is 'a\\r'"),
        (changed(20, "z" * 1000), r"category 7 is 'z{40}\.\.\.'"),
        (changed(20, "1" * 70_000), "more than 65,536 bytes"),
    ],
)
@pytest.mark.parametrize("before", (0, 3))
@pytest.mark.parametrize("end", ("\n", "\r\n"))
def test_a_bad_line_raises_with_file_and_line(read, tmp_path, line, message, before, end):
    path = tmp_path / "day_3.txt"
    path.write_bytes(end.join([*[GOOD] * before, line, GOOD, "bad", ""]).encode())
    for size in (100, 1 << 20):
        pattern = f"day_3.txt: line {before + 1}: "
        if "bytes" in message and size == 1 << 20:  # the whole file is one chunk
            message = "category 7 is"
        with pytest.raises(ValueError, match=pattern + message):
            list(read.read_text(path, np.array(ROWS), size))


def test_a_damaged_archive_raises_with_file_and_line(read, tmp_path):
    path = tmp_path / "day.gz"
    path.write_bytes(gzip.compress(f"{GOOD}\n".encode())[:-9])
    with pytest.raises(ValueError, match=r"day\.gz: after line 0: "):
        list(read.read([path], ROWS, 4))


def test_rows_and_empty_folders_are_refused(read, tmp_path):
    with pytest.raises(ValueError, match="expected 26 positive numbers"):
        next(read.read([], ROWS[1:], 4))
    with pytest.raises(ValueError, match="expected 26 positive numbers"):
        next(read.read([], [0, *ROWS[1:]], 4))
    with pytest.raises(FileNotFoundError, match=r"no \*_dense\.npy"):
        next(read.read([tmp_path], ROWS, 4))


def test_both_forms_of_a_sample_are_equal(modules, tmp_path):
    read, sample = modules["read"], modules["sample"]
    text, _ = sample.write(tmp_path / "text", "tsv", 203, 5)
    _, arrays = sample.write(tmp_path / "arrays", "npy", 5, 203)
    for name, path in (("train", text), ("test", arrays)):
        assert path.stem.startswith(name)
    text, arrays = (sample.write(tmp_path / form, form, 203, 5)[0] for form in ("tsv", "npy"))
    from_text, from_arrays = (joined(read, read.read([path], ROWS, 20)) for path in (text, arrays))
    assert len(from_text.labels) == 203
    assert np.load(tmp_path / "npy" / "train_sparse.npy").min() < 0  # hashes above 2^31
    for first, second in zip(from_text, from_arrays, strict=True):
        np.testing.assert_array_equal(first, second)
    folder = joined(read, read.read([tmp_path / "npy"], ROWS, 20))
    assert len(folder.labels) == 208  # test before train, by their names


@pytest.mark.parametrize(
    "part, array, message",
    [
        ("sparse", np.zeros((4, 26), np.int32), r"shape is \[4, 26\]; expected \[5, 26\]"),
        ("sparse", np.zeros((5, 26), np.float32), "dtype is float32; expected a kind of iu"),
        ("dense", np.zeros((5, 12), np.float32), r"expected \[5, 13\]"),
        ("dense", np.full((5, 13), np.nan, np.float32), "row 0: column 0 is nan"),
        ("labels", np.array([0, 1, 0, 2, 3]), r"row 3: the label is 2\.0; expected 0 or 1"),
        ("labels", np.array([[None]] * 5), "Array can't be memory-mapped"),
    ],
)
def test_bad_arrays_raise_with_their_file(modules, tmp_path, part, array, message):
    path, _ = modules["sample"].write(tmp_path, "npy", 5, 1)
    np.save(tmp_path / f"train_{part}.npy", array)
    with pytest.raises(ValueError, match=rf"train_{part}\.npy.*{message}"):
        list(modules["read"].read([path], ROWS, 2))


def test_auc_counts_ties_one_half(modules):
    auc = modules["train"].auc
    random_ = np.random.default_rng(0)
    for levels in (1, 2, 5, 1000):
        labels = random_.integers(0, 2, 60)
        scores = (random_.integers(0, levels, 60) + labels * 0.3).astype(np.float32)
        clicks, others = scores[labels == 1][:, None], scores[labels == 0]
        expected = ((clicks > others) + 0.5 * (clicks == others)).mean()
        assert auc(labels, scores) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ValueError, match="0 clicks and 3 other"):
        auc(np.zeros(3), np.arange(3))
    with pytest.raises(ValueError, match="not finite"):
        auc(np.arange(2), np.array([0, np.nan]))


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("optimizer, form", [("Adagrad", "tsv"), ("SGD", "npy")])
def test_both_engines_learn_the_same(modules, one_thread, monkeypatch, capsys, optimizer, form):
    rate = {"Adagrad": "0.02", "SGD": "0.3"}[optimizer]
    sizes = "--samples 8000 --batch 256 --rows 3000 --report 10"
    options = f"{sizes} --form {form} --optimizer {optimizer} --lr {rate}".split()
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    modules["train"].main()
    printed = capsys.readouterr().out
    assert "26 tables in one call" in printed
    assert re.search(r"^step 30: loss torch 0\.\d{4}, recfuse 0\.\d{4}$", printed, re.MULTILINE)
    found = dict(re.findall(r"^(torch|recfuse) +\d\.\d+ +(\d\.\d+) +\d+\.\d+ ", printed, re.MULTILINE))
    areas = {name: float(area) for name, area in found.items()}
    assert areas.keys() == {"torch", "recfuse"}
    assert areas["recfuse"] == pytest.approx(areas["torch"], abs=1e-3)
    assert min(areas.values()) > 0.6  # the planted signal; 0.5 is chance


def test_one_engine_trains_on_files(modules, monkeypatch, capsys, tmp_path):
    train, test = modules["sample"].write(tmp_path, "tsv", 600, 300)
    options = [
        "--train",
        train,
        "--test",
        test,
        "--engine",
        "recfuse",
        "--rows",
        50,
        "--steps",
        3,
        "--batch",
        64,
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, options)])
    modules["train"].main()
    printed = capsys.readouterr().out
    assert re.search(r"^recfuse +\d\.\d+ +\d\.\d+ ", printed, re.MULTILINE) and "torch  " not in printed


def test_commands_of_the_page_have_these_options(modules, monkeypatch):
    page = (EXAMPLE / "README.md").read_text()
    lines = re.findall(r"^python examples/criteo/train\.py.*$", page, re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        monkeypatch.setattr(sys, "argv", shlex.split(line)[1:])
        modules["train"].parse_arguments()
