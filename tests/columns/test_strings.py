"""Hashes of strings of every kind of array: known values, and against the package xxhash."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfuse.data import hash_string_lists, hash_strings
from recfuse.nn.columns.reference_values import hash_integers

try:
    import xxhash
except ImportError:
    xxhash = None

MOST = 2**64 - 1
# From the reference implementation of xxHash, with the seeds 0 and 2^64 - 1.
KNOWN = {
    "": (0xEF46DB3751D8E999, 0x298F4C84B24F5380),
    "a": (0xD24EC4F1A98C6E5B, 0x60C43759873ECE62),
    "abc": (0x44BC2CF5AD770999, 0x28306E589CC02176),
    "user_12345678": (0x79C4F5A9D8116B8F, 0xE452C7F23EFE0DC2),
    "Grüße, 世界 🙂": (0xA6B7B0B84F3DAC0C, 0x4B271E6C321D034B),
    "x" * 40: (0x926F564E1B3E18D5, 0x834970EC0D41F1F5),
}
TEXTS = list(KNOWN)
needs_xxhash = pytest.mark.skipif(xxhash is None, reason="needs the package xxhash")


def known(texts, seed=0):
    hashes = [KNOWN[text][seed == MOST] for text in texts]
    return torch.tensor([value - 2**64 if value >= 2**63 else value for value in hashes], dtype=torch.int64)


def is_lists(found, lists, seed=0):
    """Returns true if they are the hashes of known strings, sample by sample."""
    lengths = torch.tensor([len(one) for one in lists], dtype=torch.int64)
    assert found.values.dtype == found.offsets.dtype == torch.int64
    assert torch.equal(found.offsets, torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))))
    assert torch.equal(found.values, known([text for one in lists for text in one], seed))
    return True


def arrow_kinds():
    pa = pytest.importorskip("pyarrow")
    return [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.string_view(),
        pa.binary_view(),
    ]


@pytest.mark.parametrize("seed", [0, MOST])
@pytest.mark.parametrize("threads", [1, 3, None])
def test_known_hashes_of_every_form(seed, threads):
    as_bytes = [text.encode() for text in TEXTS]
    forms = [TEXTS, tuple(TEXTS), as_bytes, [*TEXTS[:3], *as_bytes[3:]]]
    forms += [np.array(TEXTS), np.array(as_bytes), np.array(TEXTS, object), np.array(TEXTS, ">U40")]
    forms += [np.array(TEXTS, np.dtypes.StringDType()), np.array(as_bytes, "S400")]
    forms += [np.repeat(np.array(TEXTS), 2)[::2], np.repeat(np.array(as_bytes), 3)[::3]]
    for strings in forms:
        found = hash_strings(strings, seed, threads)
        assert found.dtype == torch.int64 and torch.equal(found, known(TEXTS, seed))
        assert is_lists(hash_string_lists(strings, seed, threads), [[text] for text in TEXTS], seed)


def test_known_hashes_of_arrow_arrays():
    pa = pytest.importorskip("pyarrow")
    for kind in arrow_kinds():
        whole = pa.array([*TEXTS, "other"], pa.string()).cast(kind)
        assert torch.equal(hash_strings(whole)[:-1], known(TEXTS))
        assert torch.equal(hash_strings(whole.slice(2, 3), MOST), known(TEXTS[2:5], MOST))
        chunks = pa.chunked_array([whole.slice(0, 1), whole.slice(0, 0), whole.slice(1, 4)])
        assert torch.equal(hash_strings(chunks), known(TEXTS[:5]))
        assert (
            hash_strings(pa.array([], kind)).shape == hash_strings(pa.chunked_array([], kind)).shape == (0,)
        )
    repeated = [TEXTS[i % 3] for i in range(20)]
    assert torch.equal(hash_strings(pa.array(repeated).dictionary_encode().slice(5)), known(repeated[5:]))


def test_arrow_buffers_are_read_where_they_lie():
    """The offsets of a slice, and nothing outside of it."""
    pa = pytest.importorskip("pyarrow")
    offsets = np.array([99, 3, 3, 7, -1], np.int32)
    bad_outside = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(b"...abcdefg")], offset=1
    )
    assert torch.equal(hash_strings(bad_outside), hash_strings(["", "abcd"]))
    offsets[2] = 100
    with pytest.raises(ValueError, match=r"string 0 lies from offset 3 to 100; .* the 10 bytes"):
        hash_strings(bad_outside)


def test_missing_strings_are_empty_samples():
    pa = pytest.importorskip("pyarrow")
    strings = ["abc", None, "", "a", None]
    lists = [["abc"], [], [""], ["a"], []]
    nan = ["abc", float("nan"), "", "a", np.float64("nan")]
    forms = [
        strings,
        nan,
        np.array(strings, object),
        pa.array(strings),
        pa.array(strings).dictionary_encode(),
    ]
    forms += [pa.array(["x", *strings, None]).slice(1, 5), pa.chunked_array([strings[:1], strings[1:]])]
    forms += [pa.array(strings, kind) for kind in arrow_kinds()]
    words = pa.array(["abc", None, "", "a"])
    forms += [pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 3, None]), words)]
    for array in forms:
        assert is_lists(hash_string_lists(array), lists)
        with pytest.raises(
            ValueError, match=r"strings\[1\] is missing \(2 of 5 are\). Use hash_string_lists"
        ):
            hash_strings(array)
    for nothing in ([None, None], pa.nulls(2), pa.array([None, None], pa.string()).dictionary_encode()):
        assert is_lists(hash_string_lists(nothing), [[], []])


@pytest.mark.parametrize("kind", ("U", "S", object))
def test_masked_strings_are_missing(kind):
    masked = np.ma.array(np.array(["abc", "a", "", "a"], kind), mask=[False, True, False, False])
    assert is_lists(hash_string_lists(masked), [["abc"], [], [""], ["a"]])
    with pytest.raises(ValueError, match=r"strings\[1\] is missing"):
        hash_strings(masked)
    assert torch.equal(hash_strings(masked[2:]), known(["", "a"]))


def test_lists_of_strings():
    pa = pytest.importorskip("pyarrow")
    given_lists = [["abc", "a"], None, [], ["", None, "user_12345678"]]
    lists = [["abc", "a"], [], [], ["", "user_12345678"]]
    kinds = [pa.list_(pa.string()), pa.large_list(pa.large_string()), pa.list_(pa.binary())]
    kinds += [pa.list_(pa.dictionary(pa.int8(), pa.string()))]
    forms = [given_lists, np.array(given_lists, object)]
    forms += [[np.array(["abc", "a"]), None, (), ["", None, "user_12345678"]]]
    forms += [pa.array([["x"], *given_lists, ["y"]], kind).slice(1, 4) for kind in kinds]
    forms += [pa.chunked_array([given_lists[:1], given_lists[1:]], kind) for kind in kinds[:2]]
    for array in forms:
        assert is_lists(hash_string_lists(array), lists)
        with pytest.raises(ValueError, match=r"strings are lists\. Use hash_string_lists"):
            hash_strings(array)
    pairs = pa.array([["abc", "a"], None, ["", None]], pa.list_(pa.string(), 2))
    assert is_lists(hash_string_lists(pairs), [["abc", "a"], [], [""]])
    # A null list may span values.
    hidden = pa.ListArray.from_arrays(
        pa.array([0, 1, 3], pa.int32()), pa.array(["a", "abc", ""]), mask=pa.array([False, True])
    )
    assert is_lists(hash_string_lists(hidden), [["a"], []])
    for empty in (
        [],
        pa.array([], kinds[0]),
        pa.chunked_array([], kinds[0]),
        np.array([], object),
        np.array([]),
    ):
        assert is_lists(hash_string_lists(empty), [])


@pytest.mark.parametrize("seed", [0, 5, MOST])
def test_a_string_of_8_bytes_has_the_hash_of_their_integer(seed):
    """So that a column Hash means the same for both."""
    values = torch.tensor([0, 1, -1, 2**62, -(2**63), 123456789])
    strings = [value.tobytes() for value in values.numpy()]
    assert torch.equal(hash_strings(strings, seed), hash_integers([values], seed))


@needs_xxhash
@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(st.binary(max_size=80), st.text(max_size=40))), st.integers(0, MOST))
def test_any_strings_against_xxhash(strings, seed):
    as_bytes = [one.encode() if isinstance(one, str) else one for one in strings]
    hashes = [xxhash.xxh64_intdigest(one, seed) for one in as_bytes]
    want = np.array(hashes, np.uint64).view(np.int64)
    assert np.array_equal(hash_strings(strings, seed).numpy(), want)
    texts = [one for one in strings if isinstance(one, str)]
    for array in (np.array(texts or [""]), np.array(as_bytes or [b""])):
        unpadded = [one.encode() if isinstance(one, str) else one for one in array.tolist()]
        want = np.array([xxhash.xxh64_intdigest(one, seed) for one in unpadded], np.uint64).view(np.int64)
        assert np.array_equal(hash_strings(array, seed).numpy(), want)


@needs_xxhash
def test_many_strings_on_many_threads():
    random = np.random.default_rng(0)
    numbers = random.integers(0, 10 ** random.integers(1, 18, 50_000)).astype(str)
    want = np.array([xxhash.xxh64_intdigest(one.encode(), 7) for one in numbers.tolist()], np.uint64)
    for strings in (numbers, numbers.astype("S"), numbers.tolist()):
        for threads in (1, 2, 256):
            assert np.array_equal(hash_strings(strings, 7, threads).numpy().view(np.uint64), want)


def test_threads_of_a_caller_hash_at_once():
    strings = [TEXTS[i % len(TEXTS)] for i in range(20_000)]
    want, wrong = known(strings), []

    def work():
        for _ in range(5):
            if not torch.equal(hash_strings(strings, 0, 2), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_pandas_series():
    """pandas is no part of the tests; a Series is told by its module and its to_numpy."""
    pandas = pytest.importorskip("pandas")
    strings = ["abc", None, "a"]
    for dtype in (object, "string", "category"):
        assert is_lists(hash_string_lists(pandas.Series(strings, dtype=dtype)), [["abc"], [], ["a"]])
    assert torch.equal(hash_strings(pandas.Series(["abc", "a"])), known(["abc", "a"]))


@pytest.mark.parametrize(
    ("strings", "error", "text"),
    [
        ("abc", TypeError, "strings is a str; expected a pyarrow array"),
        (5, TypeError, "strings is an int; expected"),
        (torch.arange(3), TypeError, "NumPy array of int64"),
        (np.arange(3), TypeError, "NumPy array of int64"),
        (np.array([["a"]]), ValueError, r"the shape \(1, 1\)"),
        (np.array("a"), ValueError, r"the shape \(\)"),
        (["a", 3], TypeError, r"strings\[1\] is of <class 'int'>; expected a str, bytes or None"),
        (["a", ["b"]], TypeError, r"strings\[1\] is of <class 'list'>"),
        ([["b"], "a"], TypeError, r"strings\[1\] is a str among lists"),
        (["a", "\ud800"], ValueError, r"strings\[1\] has a surrogate"),
        (np.array(["a", "b\udfff"]), ValueError, r"strings\[1\] has the code point 0xdfff"),
    ],
)
def test_other_types_than_strings_are_refused(strings, error, text):
    for function in (hash_strings, hash_string_lists):
        with pytest.raises(error, match=f"^hash_strings: .*{text}"):
            function(strings)


def test_other_arrow_arrays_are_refused():
    pa = pytest.importorskip("pyarrow")
    for array in (pa.array([1, 2]), pa.array([[1], [2]]), pa.array([["a"]]).cast(pa.list_(pa.string())).type):
        with pytest.raises(
            TypeError, match=r"^hash_strings: strings is a .* expected a pyarrow array of strings"
        ):
            hash_string_lists(array)
    with pytest.raises(TypeError, match="lists of lists"):
        hash_string_lists(pa.array([[["a"]]]))
    with pytest.raises(TypeError, match="strings is a Table"):
        hash_strings(pa.table({"a": ["b"]}))


@pytest.mark.parametrize(("name", "value"), [("seed", -1), ("seed", 2**64), ("threads", 0), ("threads", 257)])
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"^hash_strings: {name} is {value}; expected \["):
        hash_strings(["a"], **{name: value})
    with pytest.raises(TypeError, match=f"^hash_strings: {name} is a float"):
        hash_strings(["a"], **{name: 1.5})
