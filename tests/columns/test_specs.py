"""Specifications of columns: refusals, and conversion from and to JSON."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import time

import numpy as np
import pytest
import torch

from recfuse import _C
from recfuse.errors import FileFormatError
from recfuse.nn import EmbeddingColumns, FusedEmbeddingBagCollection, Table
from recfuse.nn.columns import (
    Affine,
    Bucketize,
    Clip,
    ClipInteger,
    Cross,
    Hash,
    Identity,
    Key,
    Log1p,
    Modulo,
    Numeric,
    ToBucket,
    ToHash,
    ToWord,
    Vocabulary,
)
from support.columns.random_programs import random_case

BAD_COLUMNS = {
    "no name": (lambda: Numeric(3), TypeError, "name is an int; expected a str"),
    "empty name": (lambda: Numeric(""), ValueError, "name is empty"),
    "rows": (lambda: Identity("a", -1, 4), ValueError, "'a': num_embeddings is -1"),
    "rows' type": (lambda: Identity("a", 2.5, 4), TypeError, "'a': num_embeddings is a float"),
    "dim": (lambda: Identity("a", 5, True), TypeError, "'a': embedding_dim is a bool"),
    "pooling": (
        lambda: Identity("a", 5, 4, pooling="avg"),
        ValueError,
        (
            r"'a': pooling is 'avg'; expected "
            r"\"sum\""
        ),
    ),
    "invalid": (lambda: Identity("a", 5, 4, invalid="no"), ValueError, "'a': invalid is 'no'"),
    "invalid row": (lambda: Identity("a", 5, 4, invalid=5), ValueError, "'a': invalid is 5"),
    "empty": (lambda: Identity("a", 5, 4, empty="zero"), ValueError, "'a': empty is 'zero'"),
    "empty row": (lambda: Identity("a", 0, 4, empty=0), ValueError, "'a': empty is 0"),
    "fill and row": (lambda: Identity("a", 5, 4, empty=1, fill_value=2), ValueError, "'a': fill_value is 2"),
    "fill": (lambda: Identity("a", 5, 4, fill_value=math.nan), ValueError, "'a': fill_value is nan"),
    "scale": (lambda: Identity("a", 5, 4, scale=1e39), ValueError, r"'a': scale is 1e\+39"),
    "slice": (lambda: Identity("a", 5, 4, slice=(2, 5)), ValueError, "'a': slice's stop is 5"),
    "slice's type": (
        lambda: Identity("a", 5, 4, slice=3),
        TypeError,
        "'a': slice has another form; expected .start, stop.",
    ),
    "dot": (lambda: Identity("a.b", 5, 4), ValueError, "'a.b': the table's name"),
    "dtype": (lambda: Identity("a", 5, 4, dtype=torch.float64), TypeError, "'a': dtype is torch.float64"),
    "weights and weighted": (
        lambda: Identity("a", 5, 4, weights="w", weighted=True),
        ValueError,
        "'a': weighted is True and weights is 'w'",
    ),
    "weighted max": (
        lambda: Identity("a", 5, 4, weighted=True, pooling="max"),
        ValueError,
        "'a': pooling is \"max\"",
    ),
    "placement": (lambda: Identity("a", 5, 4, placement="gpu"), ValueError, "'a': placement is 'gpu'"),
    "step": (lambda: Identity("a", 5, 4, preprocess=[3]), TypeError, "'a': a step of preprocess is an int"),
    "boundaries fall": (lambda: Bucketize("a", [1, 3, 2], 4), ValueError, r"'a': boundaries\[2\] is 2"),
    "boundary NaN": (lambda: Bucketize("a", [1, math.nan], 4), ValueError, r"'a': boundaries\[1\] is nan"),
    "boundaries' shape": (
        lambda: Bucketize("a", [[]], 4),
        TypeError,
        "'a': boundaries has another form; expected a sequence",
    ),
    "words' shape": (
        lambda: Vocabulary("a", [[]], 4),
        TypeError,
        "'a': vocabulary has other values; expected a sequence",
    ),
    "boundaries' type": (lambda: Bucketize("a", "123", 4), TypeError, "'a': boundaries is a str"),
    "words": (lambda: Vocabulary("a", [1, 2, 1], 4), ValueError, "'a': vocabulary has 1 twice"),
    "words' type": (
        lambda: Vocabulary("a", ["x"], 4),
        TypeError,
        "'a': vocabulary has other values; expected a sequence of int",
    ),
    "large word": (
        lambda: Vocabulary("a", [2**63], 4),
        ValueError,
        "'a': vocabulary has 9223372036854775808",
    ),
    "buckets": (lambda: Hash("a", 0, 4), ValueError, "'a': num_embeddings is 0"),
    "no buckets": (lambda: Hash("a", 5, 4, num_buckets=0), ValueError, "'a': num_buckets is 0"),
    "many buckets": (lambda: Hash("a", 2**31, 4), ValueError, "'a': num_embeddings is 2147483648"),
    "seed": (lambda: Hash("a", 5, 4, seed=-1), ValueError, "'a': seed is -1"),
    "keys": (lambda: Cross("a", ("b",), 5, 4), TypeError, "'a': keys has another form; expected two"),
    "key": (lambda: Cross("a", ("b", 3), 5, 4), TypeError, "'a': a key is an int"),
    "width": (lambda: Numeric("a", 0), ValueError, "'a': width is 0"),
    "affine": (lambda: Affine(math.inf), ValueError, "Affine: scale is inf"),
    "clip": (lambda: Clip(math.nan), ValueError, "Clip: min is NaN"),
    "clip_integer": (lambda: ClipInteger(0.5), TypeError, "ClipInteger: min is a float"),
    "modulo": (lambda: Modulo(0), ValueError, "Modulo: divisor is 0"),
}


@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_bad_columns_raise_clear_errors(name):
    make, kind, words = BAD_COLUMNS[name]
    with pytest.raises(kind, match=words):
        make()


def two(**changes):
    return [
        Identity("a", 5, 4, table="t"),
        Identity("b", **{"num_embeddings": 5, "embedding_dim": 4, "table": "t", **changes}),
    ]


BAD_MODULES = {
    "none": ([], ValueError, "columns is empty"),
    "no columns": (3, TypeError, "columns is an int"),
    "no column": ([Numeric("a"), "b"], TypeError, r"columns\[1\] is a str"),
    "twice": ([Numeric("a"), Identity("a", 3, 4)], ValueError, "two columns are named 'a'"),
    "rows": (two(num_embeddings=6), ValueError, "'a' and 'b' share table 't', but num_embeddings is 5"),
    "dims": (two(embedding_dim=3), ValueError, "share table 't', but embedding_dim is 4 in the first and 3"),
    "dtypes": (two(dtype=torch.float16), ValueError, "but dtype is None in the first and torch.float16"),
    "trainable": (two(trainable=False), ValueError, "but trainable is True in the first and False"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_MODULES)
def test_bad_lists_raise_clear_errors(name):
    columns, kind, words = BAD_MODULES[name]
    with pytest.raises(kind, match=words):
        EmbeddingColumns(columns)


@pytest.mark.parametrize(("rows", "dim"), [(2**44, 64), (2**48, 2**24)])
def test_tables_that_no_memory_holds_are_named(rows, dim):
    words = r"need \d[\d,]+ bytes of memory, which are not free, and the largest is table 'big' with"
    columns = [Identity(name, size, dim, placement="host") for name, size in (("a", 3), ("big", rows))]
    with pytest.raises(MemoryError, match=rf"EmbeddingColumns: 2 tables of dim {dim} .* {words}") as error:
        EmbeddingColumns(columns)
    assert isinstance(error.value, torch.OutOfMemoryError)
    with pytest.raises(MemoryError, match=f"FusedEmbeddingBagCollection: 1 tables of dim {dim} .* {words}"):
        FusedEmbeddingBagCollection([Table(rows, dim, name="big")])


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"sparse is True and pooling of column 'a' is \"max\""):
        EmbeddingColumns([Identity("a", 5, 4, pooling="max")], sparse=True)
    with pytest.raises(TypeError, match=r"dtype is torch.float64"):
        EmbeddingColumns([Numeric("a")], dtype=torch.float64)
    for wrong in ("many", "12 XB", "-1"):
        with pytest.raises(ValueError, match="host_tables is"):
            EmbeddingColumns([Numeric("a")], host_tables=wrong)


COLUMNS = [
    Bucketize("age", [18, 25.5, 35], 8, right=True, preprocess=[Affine(2, -1), Clip(0), Log1p()]),
    Hash("city", 100, 8, num_buckets=50, seed=2**64 - 1, invalid=3, scale=0.5, slice=(1, 4)),
    Identity("tags", 50, 16, dtype=torch.float16, weights="tag_weights", pooling="sqrtn", trainable=False),
    Identity(
        "more", 50, 16, dtype=torch.float16, weighted=True, table="tags", trainable=False, invalid="drop"
    ),
    Vocabulary("word", [5, -7, 2**63 - 1], 4, empty=1, preprocess=[ClipInteger(-9), Modulo(7)]),
    Cross("x", ("city", Key("age", [ToBucket([20, 40])])), 30, 4, fill_value=2.5, placement="host"),
    Cross("y", (Key("city", [ToHash(9, 1)]), Key("city", [ToWord([1, 2])])), 30, 4),
    Numeric("price", 2, feature="prices"),
]


def test_json_keeps_everything(tmp_path):
    module = EmbeddingColumns(COLUMNS)
    path = tmp_path / "columns.json"
    listed = module.to_json(path)
    assert json.loads(path.read_text()) == listed == json.loads(json.dumps(listed))
    for given in (path, str(path), listed):
        again = EmbeddingColumns.from_json(given, sparse=True)
        assert again.specs == module.specs == tuple(COLUMNS)
        assert again.layout.sparse
    assert listed[0]["kind"] == "bucketize" and "pooling" not in listed[0]


def test_json_of_random_columns():
    for seed in range(200):
        columns = random_case(random.Random(seed)).columns
        listed = json.loads(json.dumps(EmbeddingColumns(columns).to_json()))
        assert EmbeddingColumns.from_json(listed).specs == tuple(columns)


NUMERIC = {"kind": "numeric", "name": "n"}
BAD_JSON = {
    "no list": (3, TypeError, "columns is an int"),
    "no mapping": ([3], TypeError, r"columns\[0\] is an int"),
    "no kind": ([{"name": "a"}], ValueError, r"columns\[0\] \('a'\): kind is None; expected one of identity"),
    "kind": ([{"kind": "text", "name": "a"}], ValueError, r"\('a'\): kind is 'text'"),
    "kinds": ([{"kind": ["hash"], "name": "a"}], ValueError, r"\('a'\): kind is \['hash'\]; expected one of"),
    "unknown": ([{"kind": "numeric", "name": "a", "dim": 3}], ValueError, "Numeric has no field 'dim'"),
    "missing": ([{"kind": "hash", "name": "a"}], TypeError, r"\('a'\): .*missing 2 required"),
    "value": (
        [{**NUMERIC}, {"kind": "hash", "name": "a", "num_embeddings": 0, "embedding_dim": 1}],
        ValueError,
        r"columns\[1\] \('a'\): .*num_embeddings is 0",
    ),
    "dtype": (
        [{"kind": "identity", "name": "a", "num_embeddings": 2, "embedding_dim": 4, "dtype": "half"}],
        ValueError,
        "dtype is 'half'; expected one of float32",
    ),
    "step": (
        [{"kind": "numeric", "name": "a", "preprocess": [{"step": "sqrt"}]}],
        ValueError,
        r"\('a'\): step is 'sqrt'; expected one of affine",
    ),
    "step's field": (
        [{"kind": "numeric", "name": "a", "preprocess": [{"step": "modulo", "divisor": 0}]}],
        ValueError,
        r"\('a'\): Modulo: divisor is 0",
    ),
    "steps": ([{"kind": "numeric", "name": "a", "preprocess": "log1p"}], TypeError, "preprocess is a str"),
    "no step": ([{"kind": "numeric", "name": "a", "preprocess": ["log1p"]}], TypeError, "a step of pre"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_JSON)
def test_bad_json_raises_clear_errors(name, tmp_path):
    given, kind, words = BAD_JSON[name]
    with pytest.raises(kind, match=words):
        EmbeddingColumns.from_json(given)
    path = tmp_path / "columns.json"
    path.write_text(json.dumps(given))
    with pytest.raises(FileFormatError, match=words) as error:
        EmbeddingColumns.from_json(path)
    assert str(path) in str(error.value)


def test_infinite_numbers_have_a_form_in_json(tmp_path):
    columns = (
        Bucketize("Infinity", [-math.inf, 1.0, math.inf], 4, preprocess=[Clip(-math.inf, math.inf)]),
        Numeric("b", preprocess=[Clip(max=np.float32(2.5)), Affine(np.float32(0.5))]),
    )
    path = tmp_path / "columns.json"
    listed = EmbeddingColumns(columns).to_json(path)
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == listed
    assert listed[0]["boundaries"] == ["-Infinity", 1.0, "Infinity"] and listed[0]["name"] == "Infinity"
    for given in (path, listed):
        assert EmbeddingColumns.from_json(given).specs == columns
    for text in ("Infinity", "NaN", "1e999"):
        path.write_text(f'[{{"kind": "bucketize", "name": "a", "embedding_dim": 1, "boundaries": [{text}]}}]')
        with pytest.raises(FileFormatError, match="is not JSON: a number is"):
            EmbeddingColumns.from_json(path)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path, module = tmp_path / "columns.json", EmbeddingColumns(COLUMNS)
    module.to_json(path)
    before = path.read_bytes()

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left on device: .*columns\.json"):
            EmbeddingColumns([Numeric("a")]).to_json(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["columns.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" + "0," * 4_000_001 + "0]", "has 4,000,002 commas and opening brackets; expected 4,000,000"),
        (" " * ((64 << 20) + 1), "is larger than 67,108,864 bytes, the most that is read"),
        ("[" + "9" * 10**6 + "]", "a number has 1,000,000 digits"),
        ('[{"kind": "%s"}]' % ("x" * 10**6), r"columns\[0\]: kind is 'xxx"),
    ],
)
def test_files_beyond_the_bounds_are_refused(tmp_path, text, words):
    path = tmp_path / "columns.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=words) as error:
        EmbeddingColumns.from_json(path)
    assert len(str(error.value)) < 1500


def test_large_objects_take_linear_time(tmp_path):
    """A hundred thousand names: all pairs of them would take minutes."""
    path, begun = tmp_path / "columns.json", time.process_time()
    names = ", ".join(f'"n{number}": 0' for number in range(100_000))
    path.write_text(f"[{{{names}}}]")
    with pytest.raises(FileFormatError, match="kind is None"):
        EmbeddingColumns.from_json(path)
    path.write_text(f'[{{{names}, "n77": 1}}]')
    with pytest.raises(FileFormatError, match="an object has 'n77' twice"):
        EmbeddingColumns.from_json(path)
    assert time.process_time() - begun < 10


def test_many_vocabularies_take_linear_time():
    """A program with 200,000 of them, of which each is there twice: all pairs would take half a minute."""
    number, vocabulary = 200_000, 9  # of the operation
    first, begun = np.arange(number) // 2, time.process_time()
    steps = np.stack([np.full(number, vocabulary), first, np.ones(number, np.int64)], axis=1)
    none = np.zeros((0, 17), np.int64), np.zeros((0, 5), np.int64)
    program = _C.embedding_columns_program(*none, steps, np.zeros(0, np.float32), np.arange(number // 2))
    assert time.process_time() - begun < 5
    alone = _C.embedding_columns_program(*none, steps[::2], np.zeros(0, np.float32), np.arange(number // 2))
    assert len(program) - len(alone) == 3 * number // 2  # only the steps: words are stored once


def test_invalid_files_are_refused(tmp_path):
    with pytest.raises(OSError, match="absent"):
        EmbeddingColumns.from_json(tmp_path / "absent.json")
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nests lists or objects too deeply"):
        EmbeddingColumns.from_json(path)
    for text in (b"[{]", b"[\xff]", b'[{"kind": "numeric", "name": "a", "name": "b"}]'):
        (tmp_path / "bad.json").write_bytes(text)
        with pytest.raises(
            ValueError, match=r"bad\.json is not JSON: (Expecting|'utf-8'|an object has 'name' twice)"
        ):
            EmbeddingColumns.from_json(tmp_path / "bad.json")
