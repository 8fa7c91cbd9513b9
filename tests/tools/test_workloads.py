"""The generator of the heterogeneous models against the published numbers of each."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from recfuse import _C
from recfuse.data import workloads

# Lookups a sample and gathered kilobytes (1,000 bytes) a sample of the published models.
PUBLISHED = {
    "A": (20_253, 2_614),
    "B": (4_650, 531),
    "C": (13_197, 1_642),
    "D": (17_828, 571),
    "E": (17_828, 2_282),
    "F": (178_278, 5_705),
}
FEATURES = {"A": 1000, "B": 1200, "C": 800, "D": 1000, "E": 1000, "F": 10_000}

# CRC-32 of indices and offsets of one batch, and of 1,000 batch sizes, as little-endian int64.
GOLDEN = {
    "A": (1701901212, 3798558497),
    "D": (286335703, 4130066650),
    "B-zipf1.1-rows10": (3693130890, 855628356),
}
GOLDEN_SIZES = 3406858161


def lengths_of_features(model: workloads.Model, size: int, seed: int) -> np.ndarray:
    """Bag lengths [features, size]."""
    return np.diff(model.batch(size, seed).offsets).reshape(model.features, size)


@pytest.mark.parametrize("name", workloads.NAMES)
@pytest.mark.parametrize("seed", [0, 1])
def test_lookups_and_bytes_a_sample(name: str, seed: int) -> None:
    model = workloads.model(name, seed=seed)
    size = 20_000  # the lengths of a group are few numbers: many samples for a mean within a percent
    lengths = model.lengths(size, seed).mean(axis=1)
    features = [group.features for group in model.groups]
    lookups, kilobytes = PUBLISHED[name]
    assert lengths @ features == pytest.approx(lookups, rel=0.03)
    gathered = 4e-3 * sum(lengths[group] * dim for group, dim in zip(model.group_of, model.dims, strict=True))
    assert gathered == pytest.approx(kilobytes, rel=0.03)


@pytest.mark.parametrize("name", workloads.NAMES)
def test_tables(name: str) -> None:
    model = workloads.model(name)
    assert model.name == name and model.pooling == "sum"
    assert model.features == FEATURES[name] == len(model.rows) == len(model.dims) == len(model.group_of)
    rows = {"one-hot": 1024, "multi-hot": 4096, "static": 4096, "one-side": 16_384}
    for group, table_rows in zip(model.group_of, model.rows, strict=True):
        assert table_rows == rows[model.groups[group].kind]
    assert np.array_equal(np.bincount(model.group_of), [group.features for group in model.groups])
    allowed = {"D": {8}, "E": {32}, "F": {8}}.get(name, {4, 8, 16, 32, 64, 128})
    assert set(model.dims) == allowed
    assert model.output_dim == sum(model.dims)
    assert model.weight_bytes == 4 * int(np.dot(model.rows, model.dims))


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_dims_are_drawn_by_the_published_weights(name: str) -> None:
    model = workloads.model(name)
    kinds = np.array([model.groups[group].kind == "one-hot" for group in model.group_of])
    dims = np.array(model.dims)
    for chosen, weights in ((kinds, [8, 8, 4, 2, 1, 1]), (~kinds, [2, 2, 2, 1, 1, 1])):
        if not chosen.any():
            continue
        counts = np.array([np.count_nonzero(dims[chosen] == dim) for dim in (4, 8, 16, 32, 64, 128)])
        expected = np.array(weights) / sum(weights) * chosen.sum()
        assert np.all(np.abs(counts - expected) < 4 * np.sqrt(expected))


def test_seeds_of_a_model_order_its_dims() -> None:
    first, second = workloads.model("A", seed=0), workloads.model("A", seed=1)
    assert first.dims != second.dims and sorted(first.dims) == sorted(second.dims)


def test_features_of_a_group_share_lengths_and_absences() -> None:
    model = workloads.model("A")
    lengths = lengths_of_features(model, 64, seed=3)
    drawn = model.lengths(64, 3)
    assert np.array_equal(lengths, drawn[list(model.group_of)])
    # But no two groups with drawn lengths do.
    random = drawn[[number for number, group in enumerate(model.groups) if group.deviation > 0]]
    assert len(np.unique(random, axis=0)) == len(random)


def test_features_of_a_group_draw_their_own_rows() -> None:
    model = workloads.model("B")
    indices, _ = model.batch(100, 0)
    one_hot = indices[: 1000 * 100].reshape(1000, 100)
    assert len(np.unique(one_hot, axis=0)) == 1000


@pytest.mark.parametrize("name", ["A", "C", "D"])
def test_lengths_are_distributed_as_published(name: str) -> None:
    model = workloads.model(name)
    size = 20_000
    for group, lengths in zip(model.groups, model.lengths(size, 5), strict=True):
        present = lengths[lengths > 0]
        assert lengths.min() >= 0
        assert lengths.max() <= group.maximum
        if group.deviation == 0:
            assert set(np.unique(present)) == {group.mean}
            assert np.mean(lengths > 0) == pytest.approx(group.coverage, abs=0.02)
        elif group.mean >= 4 * group.deviation and group.coverage > 0:
            # Barely truncated: a normal, its floor half a step below.
            assert present.mean() + 0.5 == pytest.approx(group.mean, rel=0.01)
            assert present.std() == pytest.approx(group.deviation, rel=0.05)
            assert np.mean(lengths > 0) == pytest.approx(group.coverage, abs=0.02)
        elif group.coverage == 0:
            assert lengths.max() == 0


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_batches_are_well_formed(dtype: type[np.integer]) -> None:
    model = workloads.model("C", seed=4)
    indices, offsets = model.batch(33, 2, dtype=dtype)
    assert indices.dtype == offsets.dtype == dtype
    assert offsets.shape == (model.features * 33 + 1,)
    assert offsets[0] == 0 and offsets[-1] == len(indices) and np.all(np.diff(offsets) >= 0)
    for feature in (0, 300, 799):
        rows = indices[offsets[feature * 33] : offsets[(feature + 1) * 33]]
        assert rows.min() >= 0 and rows.max() < model.rows[feature]
    assert np.array_equal(indices, model.batch(33, 2, dtype=np.int64).indices)


def test_an_empty_batch() -> None:
    indices, offsets = workloads.model("B").batch(0, 0)
    assert len(indices) == 0 and offsets.tolist() == [0]


def test_rows_are_nearly_uniform() -> None:
    # Row weights u^(1/3): mean 3/4, variance 3/80, so a table's most and least read rows differ little.
    indices, _ = workloads.model("B").batch(2000, 1)
    first_group = indices[: 100 * 2000]
    counts = np.bincount(first_group, minlength=1024) / (len(first_group) / 1024)
    assert counts.max() < 1.7
    assert counts.std() == pytest.approx(np.sqrt(3 / 80 / 0.75**2 + 1024 / len(first_group)), rel=0.15)


@pytest.mark.parametrize("alpha", [0.9, 1.1])
def test_skewed_rows_follow_zipf(alpha: float) -> None:
    model = workloads.model(f"B-zipf{alpha}")
    assert model.name == f"B-zipf{alpha}" and model.skew == alpha
    indices, _ = model.batch(4_000, 1)
    first_group = indices[: 100 * 4_000]
    found = np.sort(np.bincount(first_group, minlength=1024))[::-1] / len(first_group)
    expected = np.arange(1, 1025) ** -alpha
    expected /= expected.sum()
    np.testing.assert_allclose(found[:50], expected[:50], rtol=0.08)
    hottest = np.argsort(-np.bincount(first_group, minlength=1024))[:10]
    assert not np.array_equal(np.sort(hottest), np.arange(10)), "the hot rows must not be the first rows"


def test_variants() -> None:
    model = workloads.model("A-zipf1.0-rows10")
    assert (model.name, model.skew) == ("A-zipf1-rows10", 1.0)
    assert model.rows == tuple(10 * rows for rows in workloads.model("A").rows)
    assert model == workloads.model("A", skew=1.0, rows_scale=10)
    assert workloads.model("A-rows100").rows[-1] == 1_638_400
    indices, offsets = model.batch(4, 0)
    assert indices.max() >= 16_384
    assert np.array_equal(offsets, workloads.model("A").batch(4, 0).offsets)


def test_the_same_seed_gives_the_same_bits() -> None:
    model = workloads.model("C", seed=2)
    first, again, other = model.batch(16, 7), workloads.model("C", seed=2).batch(16, 7), model.batch(16, 8)
    assert np.array_equal(first.indices, again.indices) and np.array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.offsets, other.offsets)
    reseeded = workloads.model("C", seed=3).batch(16, 7)
    assert np.array_equal(first.offsets, reseeded.offsets)
    assert not np.array_equal(first.indices, reseeded.indices)


def test_bits_are_the_same_on_every_platform() -> None:
    def checksum(array: np.ndarray) -> int:
        return zlib.crc32(array.astype("<i8").tobytes())

    found = {
        name: tuple(map(checksum, workloads.model(name, seed=1).batch(64, 1)))
        for name in ("A", "D", "B-zipf1.1-rows10")
    }
    assert found == GOLDEN
    assert checksum(workloads.batch_sizes(1000, 1)) == GOLDEN_SIZES


def test_batch_sizes() -> None:
    sizes = workloads.batch_sizes(200_000, seed=0)
    assert sizes.min() == 1 and sizes.max() == 512
    assert sizes.mean() == pytest.approx(251, rel=0.03)
    assert np.mean(sizes == 512) == pytest.approx(0.38, abs=0.01)
    assert np.mean(sizes == 1) == pytest.approx(0.16, abs=0.01)
    assert np.percentile(sizes, 25) == pytest.approx(9, abs=0.5)
    assert np.median(sizes) == pytest.approx(187, rel=0.05)
    assert np.array_equal(sizes[:100], workloads.batch_sizes(100, seed=0))
    assert not np.array_equal(sizes[:100], workloads.batch_sizes(100, seed=1))
    assert workloads.batch_sizes(0, 0).shape == (0,)
    assert set(workloads.batch_sizes(50, 0, median=7, spread=1).tolist()) <= {6, 7}


@pytest.mark.parametrize("name", ["G", "a", "", "A-zipf", "A-rows", "A-zipf1.0-zipf1.0", "A-rows10-zipf1"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"name is .*expected A, B, C, D, E, F"):
        workloads.model(name)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"skew": -0.5}, "skew is -0.5"),
        ({"skew": float("nan")}, "skew is nan"),
        ({"rows_scale": 0}, "rows_scale is 0"),
        ({"rows_scale": 10**9}, "rows_scale is 1000000000"),
    ],
)
def test_bad_arguments_of_a_model(keywords: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        workloads.model("A", **keywords)


def test_a_variant_given_twice() -> None:
    with pytest.raises(ValueError, match="Give it once"):
        workloads.model("A-zipf1.0", skew=1.0)
    with pytest.raises(ValueError, match="Give it once"):
        workloads.model("A-rows10", rows_scale=10)


def test_bad_arguments_of_a_batch() -> None:
    model = workloads.model("B")
    with pytest.raises(ValueError, match="size is -1"):
        model.batch(-1, 0)
    with pytest.raises(ValueError, match="seed is -1"):
        model.batch(1, -1)
    with pytest.raises(ValueError, match="dtype is float32"):
        model.batch(1, 0, dtype=np.float32)
    with pytest.raises(ValueError, match="lookups do not fit int32"):
        model.batch(500_000, 0)
    with pytest.raises(ValueError, match="count is -1"):
        workloads.batch_sizes(-1, 0)
    with pytest.raises(ValueError, match="median is -1"):
        workloads.batch_sizes(1, 0, median=-1)
    with pytest.raises(ValueError, match="maximum is 0"):
        workloads.batch_sizes(1, 0, maximum=0)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        (0, 0.5, "features is 0.5"),
        (1, 0, "rows is 0"),
        (1, 2.0**31, "rows is"),
        (2, -1, "mean is -1"),
        (2, 60, "mean is 60"),
        (3, -1, "deviation is -1"),
        (3, np.inf, "deviation is inf"),
        (4, np.nan, "maximum nan"),
        (5, 1.5, "coverage is 1.5"),
    ],
)
def test_bad_groups(field: int, value: float, text: str) -> None:
    groups = np.array([[2.0, 10, 5, 5, 50, 1]] * 2)
    groups[1, field] = value
    with pytest.raises(ValueError, match=f"group 1: .*{text}"):
        _C.workload_lengths(groups, 3, 0)


def test_bad_arrays() -> None:
    groups = np.array([[2.0, 10, 5, 5, 50, 1]])
    with pytest.raises(ValueError, match="groups has 2 columns"):
        _C.workload_lengths([[1.0, 2.0]], 3, 0)
    with pytest.raises(ValueError, match="groups has 1 dimensions"):
        _C.workload_lengths([1.0], 3, 0)
    with pytest.raises(TypeError, match="groups is of"):
        _C.workload_lengths([["a"]], 3, 0)
    with pytest.raises(ValueError, match="batch is -1"):
        _C.workload_lengths(groups, -1, 0)
    with pytest.raises(ValueError, match="lengths has 2 rows"):
        _C.workload_indices(groups, np.ones((2, 3), np.int32), 0.0, 0, 0, False)
    with pytest.raises(ValueError, match=r"lengths\[0, 1\] is -1"):
        _C.workload_indices(groups, np.array([[3, -1]], np.int32), 0.0, 0, 0, False)
    with pytest.raises(TypeError, match="lengths is of float64"):
        _C.workload_indices(groups, [[1.5]], 0.0, 0, 0, False)
    with pytest.raises(ValueError, match="skew is -1"):
        _C.workload_indices(groups, np.ones((1, 3), np.int32), -1.0, 0, 0, False)
