"""Random programs of columns against their reference in plain PyTorch, and values that are known."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recfuse.nn import EmbeddingColumns
from recfuse.nn.columns import (
    Bucketize,
    Cast,
    Cross,
    Hash,
    Identity,
    Key,
    ToBucket,
    ToWord,
    Vocabulary,
    addresses,
    programs,
)
from recfuse.nn.columns import batch as batches
from recfuse.nn.columns.reference_values import hash_integers, scaled, stepped
from support.columns.compare import check_case
from support.columns.random_programs import (
    BOUNDARIES,
    EXTREME_INTEGERS,
    ODD_FLOATS,
    VOCABULARY,
    random_case,
)

quick = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.long
@given(st.randoms(use_true_random=False), st.booleans())
@quick
def test_random_programs(draw, gradients):
    check_case(random_case(draw), draw, gradients)


def test_random_programs_of_a_seed():
    """In addition to hypothesis' cases: most of these are compared, and some of each kind are refused."""
    ends = [check_case(random_case(draw), draw, True) for draw in map(random.Random, range(100))]
    assert ends.count("compared") > 70
    assert {"IndexRangeError", "ArgumentTypeError"} <= set(ends)


@pytest.mark.parametrize("gradients", (False, True))
@pytest.mark.parametrize("kept", (0, 3))
def test_forms_without_end_keep_a_bounded_memory(monkeypatch, kept, gradients):
    """Lists of values that are padded to the longest of a batch have any width."""
    module = EmbeddingColumns([Identity("a", 50, 4), Hash("b", 50, 4)]).requires_grad_(gradients)
    reference = module.to_torch()

    def call(width, samples=2):
        batch = {"a": torch.randint(0, 50, (samples, width)), "b": torch.randint(0, 99, (samples,))}
        torch.testing.assert_close(module(batch), reference(batch))

    call(1)
    own = module._whole._training._groups[0].programs if gradients else module._whole.programs
    (program,) = own._made.values()
    monkeypatch.setattr(programs, "MOST_BYTES", int((kept + 0.5) * program.nbytes))
    for remembers in (addresses, batches):
        monkeypatch.setattr(remembers, "MOST_FORMS", 5)
    for width in (*range(1, 20), *range(1, 20)):
        call(width)
        call(width, 3)
    assert len(own._made) == max(kept, 1)
    assert len(module._reader._interned) <= 5 and len(module._reader._address_reader._places) <= 5


@pytest.mark.parametrize("right", (False, True))
@pytest.mark.parametrize("boundaries", BOUNDARIES, ids=len)
def test_every_boundary(boundaries, right):
    """The value itself, its neighbours and all special floats, in the bucket of torch.bucketize."""
    near = [
        float(np.nextafter(np.float32(one), np.float32(to)))
        for one in boundaries
        for to in (-math.inf, math.inf)
    ]
    values = torch.tensor([*boundaries, *near, *ODD_FLOATS, *np.linspace(-1, 101, 300)], dtype=torch.float32)
    rows = len(boundaries) + 1
    columns = EmbeddingColumns([Bucketize("x", boundaries, 1, right=right)])
    with torch.no_grad():
        columns.tables["x"].weight.copy_(torch.arange(rows)[:, None])
        got = columns({"x": values})[:, 0].long()
    assert torch.equal(
        got, torch.bucketize(values, torch.tensor(boundaries, dtype=torch.float32), right=right)
    )


def test_the_hash_is_xxh64():
    xxhash = pytest.importorskip("xxhash")
    draw = random.Random(3)
    words = [*EXTREME_INTEGERS, 0, 1, *(draw.randrange(-(2**63), 2**63) for _ in range(200))]
    for seed in (0, 1, 2**63, 2**64 - 1, draw.randrange(2**64)):
        for count in (1, 2):
            given = [torch.tensor(draw.sample(words, 60)) for _ in range(count)]
            got = hash_integers(given, seed)
            for number in range(60):
                data = b"".join(int(one[number]).to_bytes(8, "little", signed=True) for one in given)
                want = xxhash.xxh64_intdigest(data, seed)
                assert int(got[number]) % 2**64 == want
                for buckets in (1, 2, 1000, 2**31 - 1):
                    assert int(scaled(got, buckets)[number]) == want * buckets >> 64


@pytest.mark.parametrize("buckets", (1, 3, 1000))
def test_hashed_columns_find_the_row_of_the_reference(buckets):
    draw = random.Random(buckets)
    values = torch.tensor([*EXTREME_INTEGERS, *(draw.randrange(-(2**63), 2**63) for _ in range(500))])
    others = values[torch.randperm(values.numel())]
    columns = EmbeddingColumns(
        [
            Hash("one", buckets, 1, feature="left", seed=7),
            Cross("both", ("left", "right"), buckets, 1, seed=2**64 - 1),
        ]
    )
    with torch.no_grad():
        for table in columns.tables.values():
            table.weight.copy_(torch.arange(buckets)[:, None])
        got = columns({"left": values, "right": others}).long()
    assert torch.equal(got[:, 0], scaled(hash_integers([values], 7), buckets))
    assert torch.equal(got[:, 1], scaled(hash_integers([values, others], 2**64 - 1), buckets))


def test_words_have_their_places():
    columns = EmbeddingColumns([Vocabulary("w", VOCABULARY, 1, invalid="drop", fill_value=-1.0)])
    values = torch.tensor([*VOCABULARY, 1, 2**62, -(2**63) + 1])
    with torch.no_grad():
        columns.tables["w"].weight.copy_(torch.arange(len(VOCABULARY))[:, None])
        got = columns({"w": values})[:, 0]
    assert got.tolist() == [*range(len(VOCABULARY)), -1, -1, -1]
    assert stepped(ToWord(VOCABULARY), values).tolist() == got.long().tolist()


def test_casts_go_to_the_nearest_integer_that_there_is():
    values = torch.tensor([math.nan, math.inf, -math.inf, 2.0**63, -(2.0**63), 1.9, -1.9, -0.0, 3.4e38])
    want = [-(2**63), 2**63 - 1, -(2**63), 2**63 - 1, -(2**63), 1, -1, 0, 2**63 - 1]
    assert stepped(Cast(), values).tolist() == want
    words = [*dict.fromkeys(want)]
    columns = EmbeddingColumns([Vocabulary("x", words, 1, preprocess=[Cast()])])
    with torch.no_grad():
        columns.tables["x"].weight.copy_(torch.arange(len(words))[:, None])
        assert [words[int(row)] for row in columns({"x": values})[:, 0]] == want


def test_crosses_pair_all_values_of_a_sample():
    left = (torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2, 2, 4]))
    right = (torch.tensor([10.0, 30.0, 10.0]), torch.tensor([0, 1, 2, 3]))
    columns = EmbeddingColumns(
        [Cross("x", ("l", Key("r", [ToBucket([20])])), 97, 3, pooling="sum", fill_value=5.0)]
    )
    rows = scaled(hash_integers([torch.tensor([1, 2, 3, 4]), torch.tensor([0, 0, 0, 0])], 0), 97)
    with torch.no_grad():
        table = columns.tables["x"].weight
        got = columns({"l": left, "r": right})
        torch.testing.assert_close(got[0], table[rows[0]] + table[rows[1]])
        assert got[1].tolist() == [5.0] * 3
        torch.testing.assert_close(got[2], table[rows[2]] + table[rows[3]])


@pytest.mark.parametrize("value", (-1, 10, 2**63 - 1, -(2**63), 2**32 + 3))
def test_invalid_indices(value):
    values = torch.tensor([3, value, 4])
    names = {"error": "error", "drop": "drop", "row": 7}
    table = torch.randn(10, 4)
    for name, invalid in names.items():
        columns = EmbeddingColumns([Identity(name, 10, 4, feature="x", invalid=invalid, fill_value=9.0)])
        columns.tables[name].weight = table
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                if name == "error":
                    with pytest.raises(IndexError, match=r"'error'.*" + str(value)):
                        columns({"x": values})
                    continue
                got = columns({"x": values}).detach()
                want = torch.full((4,), 9.0) if name == "drop" else table[7]
                assert torch.equal(got, torch.stack((table[3], want, table[4])))
