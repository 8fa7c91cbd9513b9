"""Synthetic traces and their statistics compared with the published statistics."""

from __future__ import annotations

import io
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from recfuse import _C
from recfuse.data import traces

# The production traces: the paper's figures of each level and the contents of its files, with the tolerance
# of a synthetic trace: 10 %, and half a unit of the last published digit.
PUBLISHED = {
    "medium": {
        "lookups": 429_951,
        "unique_percent": 20.50,
        "coverage_percent": {1: 9.7, 5: 25.3, 10: 38.0, 20: 55.4, 50: 83.6},
        "count_at_rank": {1: 980, 10: 173, 100: 60, 1_000: 24, 10_000: 9, 30_000: 4, 100_000: 1},
        "rows_with_occurrences": {1: 32_135, 2: 19_232, 3: 12_651, 4: 9_300},
        "window_unique": 79_600,
        "gap_percentile": {10: 40, 50: 602, 90: 26_642},
        "duplicates_percent": 10.9,
        "lru_hit_rate": {1_000: 0.556, 10_000: 0.687, 60_000: 0.751},
    },
    "low": {
        "lookups": 379_910,
        "unique_percent": 46.21,
        "coverage_percent": {1: 7.7, 5: 18.5, 10: 27.7, 20: 41.5, 50: 69.6},
        "count_at_rank": {1: 184, 10: 113, 100: 35, 1_000: 9, 10_000: 4, 30_000: 2, 100_000: 1},
        "rows_with_occurrences": {1: 147_415, 2: 54_190, 3: 17_761, 4: 6_096},
        "window_unique": 198_800,
        "gap_percentile": {10: 405, 50: 28_738, 90: 207_918},
        "duplicates_percent": 1.0,
        "lru_hit_rate": {1_000: 0.065, 10_000: 0.147, 60_000: 0.257},
    },
    "high": {"lookups": 500_000, "unique_percent": 4.05, "coverage_percent": {10: 68}},
    "random": {"lookups": 500_000, "unique_percent": 63.21, "window_unique": 229_500},
    "one_item": {
        "unique_percent": 0.0002,
        "window_unique": 1,
        "duplicates_percent": 100,
        "lru_hit_rate": {1_000: 1, 10_000: 1, 60_000: 1},
    },
}
SHUFFLED = {
    "medium": {"gap_percentile": {10: 3_360, 50: 30_563, 90: 137_256}},
    "low": {"gap_percentile": {10: 6_825, 50: 65_071, 90: 210_563}},
}
# CRC-32 of a trace of 20,000 rows and seed 5, as little-endian int64.
GOLDEN = {
    "one_item": 466791041,
    "high": 4127362722,
    "medium": 1935203400,
    "low": 548187681,
    "random": 308855020,
}

MEDIUM_FILE = Path(__file__).resolve().parents[3] / "shared" / "data" / "meta_reuse_medium_500k.txt.gz"


def assert_matches(found: traces.Statistics, published: dict, tolerance: float = 0.10) -> None:
    """Every published number within the tolerance; all that are off are named."""
    numbers = found.as_dict()
    off = []
    for name, expected in published.items():
        for point, value in expected.items() if isinstance(expected, dict) else [(None, expected)]:
            seen = numbers[name] if point is None else numbers[name][str(point)]
            if not abs(seen - value) <= tolerance * value:
                off.append(f"{name} {point or ''}: {seen:.6g}, published {value}")
    assert off == []


@pytest.mark.parametrize("hotness", traces.HOTNESS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_synthetic_traces_are_like_the_published(hotness: str, seed: int) -> None:
    trace = traces.generate(hotness, seed=seed)
    assert trace.dtype == np.int64 and trace.ndim == 1
    assert trace.min() >= 0 and trace.max() < 500_000
    assert_matches(traces.statistics(trace, rows=500_000), PUBLISHED[hotness])


@pytest.mark.parametrize("hotness", ["medium", "low"])
def test_shuffled_traces_lose_their_bursts(hotness: str) -> None:
    trace = traces.generate(hotness)
    shuffles = [np.random.default_rng(seed).permutation(trace) for seed in range(6)]
    found = [traces.statistics(shuffled, rows=500_000) for shuffled in shuffles]
    assert_matches(found[0], SHUFFLED[hotness])
    # A shuffle has only some 200 duplicates: the mean of several is held.
    duplicates = np.mean([one.duplicates_percent for one in found])
    assert duplicates == pytest.approx({"medium": 0.24, "low": 0.06}[hotness], rel=0.10)


def test_high_and_random_at_their_published_points() -> None:
    assert traces.statistics(traces.generate("high"), rows=500_000).window_unique <= 20_300
    found = traces.statistics(traces.generate("random"), rows=500_000)
    assert found.duplicates_percent == pytest.approx(0.02, abs=0.006)  # published with one digit


def test_the_production_trace_has_the_published_statistics() -> None:
    if not MEDIUM_FILE.exists():
        pytest.skip(f"{MEDIUM_FILE.name} is not beside the repository, in shared/data")
    trace = traces.read(MEDIUM_FILE)
    found = traces.statistics(trace, rows=500_000)
    # To the published digits; but the published window is one window, ours is the mean over all.
    assert_matches(found, {**PUBLISHED["medium"], "window_unique": 77_100}, tolerance=0.006)
    assert_matches(found, {"window_unique": PUBLISHED["medium"]["window_unique"]}, tolerance=0.04)
    assert found.count_at(1) == 980 and found.rows_with(4) == 9_300
    shuffled = traces.statistics(np.random.default_rng(1).permutation(trace), rows=500_000)
    assert_matches(shuffled, SHUFFLED["medium"], tolerance=0.02)
    assert shuffled.lru_hit_rate(1_000) == pytest.approx(0.028, abs=0.001)


@pytest.mark.parametrize("hotness", traces.HOTNESS)
def test_the_same_seed_gives_the_same_bits(hotness: str) -> None:
    trace = traces.generate(hotness, rows=20_000, seed=5)
    assert zlib.crc32(trace.astype("<i8").tobytes()) == GOLDEN[hotness]
    assert not np.array_equal(trace, traces.generate(hotness, rows=20_000, seed=6))


def test_hot_rows_are_spread_over_the_table() -> None:
    counts = np.bincount(traces.generate("medium"), minlength=500_000)
    hottest = np.argsort(-counts)[:1000]
    assert np.corrcoef(np.arange(1000), hottest)[0, 1] == pytest.approx(0, abs=0.15)
    assert hottest.mean() == pytest.approx(250_000, rel=0.1)


@pytest.mark.parametrize("hotness", traces.HOTNESS)
@pytest.mark.parametrize(
    ("rows", "lookups"), [(1, 1), (1, 1000), (7, 3), (50, None), (1000, 5000), (3000, 100)]
)
def test_any_size(hotness: str, rows: int, lookups: int | None) -> None:
    trace = traces.generate(hotness, rows=rows, lookups=lookups, seed=3)
    assert len(trace) == lookups if lookups else len(trace) >= 1
    assert trace.min() >= 0 and trace.max() < rows


def test_lengths() -> None:
    whole = traces.generate("medium")
    assert np.array_equal(traces.generate("medium", lookups=1000), whole[:1000])
    longer = traces.statistics(traces.generate("medium", lookups=2_000_000), rows=500_000)
    assert longer.lookups == 2_000_000
    assert longer.unique_percent == pytest.approx(20.5, rel=0.01)
    assert longer.coverage(10) == pytest.approx(38, rel=0.1)
    larger = traces.statistics(traces.generate("low", rows=1_000_000), rows=1_000_000)
    assert larger.lookups == 759_820
    assert larger.unique_percent == pytest.approx(46.2, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"hotness": "warm"}, "hotness is 'warm'; expected one_item, high, medium, low, random"),
        ({"hotness": "low", "rows": 0}, "rows is 0"),
        ({"hotness": "low", "rows": 2**31}, "rows is 2147483648"),
        ({"hotness": "low", "lookups": 0}, "lookups is 0"),
        ({"hotness": "low", "seed": -1}, "seed is -1"),
    ],
)
def test_bad_arguments(arguments: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        traces.generate(**arguments)


def test_bags() -> None:
    trace = np.arange(10, dtype=np.int32)
    indices, offsets = traces.bags(trace, batch=2, pooling=3)
    assert indices.tolist() == [0, 1, 2, 3, 4, 5] and offsets.tolist() == [0, 3]
    assert indices.dtype == offsets.dtype == np.int64
    indices, offsets = traces.bags(trace, batch=2, pooling=3, number=1, include_last_offset=True)
    assert indices.tolist() == [6, 7, 8, 9, 0, 1] and offsets.tolist() == [0, 3, 6]
    assert traces.bags(trace, batch=5, pooling=5)[0].tolist() == [*range(10), *range(10), *range(5)]
    assert [part.tolist() for part in traces.bags(trace, 2, 0, include_last_offset=True)] == [[], [0, 0, 0]]
    with pytest.raises(ValueError, match="pooling is -1"):
        traces.bags(trace, 2, -1)
    with pytest.raises(ValueError, match=r"shape \(0,\)"):
        traces.bags(trace[:0], 2, 2)


def simulate(trace: list[int], cache_rows: int) -> int:
    """Hits in an LRU cache, step by step."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for row in trace:
        hits += row in cache
        cache[row] = None
        cache.move_to_end(row)
        if len(cache) > cache_rows:
            cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("seed", range(5))
def test_statistics_of_small_traces_by_definition(seed: int) -> None:
    random = np.random.default_rng(seed)
    trace = (random.zipf(1.3, size=400) % 60).astype(np.int64)
    found = traces.statistics(trace, rows=64, bag=7, window=50)
    values = trace.tolist()

    last: dict[int, int] = {}
    gaps = []
    for place, row in enumerate(values):
        if row in last:
            gaps.append(place - last[row])
        last[row] = place
    assert found.gaps.tolist() == sorted(gaps)
    for cache_rows in (0, 1, 2, 5, 20, 59, 60, 1000):
        assert found.lru_hit_rate(cache_rows) == simulate(values, cache_rows) / 400

    counts = np.sort(np.bincount(trace)[np.bincount(trace) > 0])[::-1]
    assert found.counts.tolist() == counts.tolist()
    assert found.unique == len(set(values)) and found.unique_percent == 100 * len(set(values)) / 64
    assert found.coverage(50) == 100 * counts[: len(counts) // 2].sum() / 400
    assert found.coverage(100) == 100 and found.coverage(0) == 0
    assert found.count_at(2) == counts[1] and found.count_at(1000) == 0
    assert found.rows_with(1) == np.sum(counts == 1)
    windows = [len(set(values[start : start + 50])) for start in range(351)]
    assert found.window_unique == pytest.approx(np.mean(windows), rel=1e-12)
    duplicates = sum(7 - len(set(values[start : start + 7])) for start in range(0, 399, 7))
    assert found.duplicates_percent == pytest.approx(100 * duplicates / 399)
    assert found.gap_percentile(50) == np.median(gaps)


def test_statistics_of_an_empty_trace() -> None:
    found = traces.statistics(np.array([], np.int64))
    assert (found.lookups, found.unique, found.rows) == (0, 0, 0)
    assert np.isnan(
        [found.coverage(10), found.lru_hit_rate(10), found.gap_percentile(50), found.unique_percent]
    ).all()
    assert np.isnan([found.duplicates_percent, found.window_unique]).all()
    assert "0 lookups" in str(found)


def test_bad_traces() -> None:
    with pytest.raises(TypeError, match="trace is of float64"):
        traces.statistics(np.array([1.0]))
    with pytest.raises(ValueError, match=r"shape \(1, 2\)"):
        traces.statistics(np.array([[1, 2]]))
    with pytest.raises(ValueError, match=r"row ids in \[-1, 3\]; expected \[0, 3\]"):
        traces.statistics(np.array([3, -1]))
    with pytest.raises(ValueError, match=r"row ids in \[0, 9\]; expected \[0, 8\]"):
        traces.statistics(np.array([0, 9]), rows=9)
    with pytest.raises(ValueError, match="bag is 0"):
        traces.statistics(np.array([1]), bag=0)
    found = traces.statistics(np.array([1, 1]))
    for call in (lambda: found.coverage(101), lambda: found.count_at(0), lambda: found.lru_hit_rate(-1)):
        with pytest.raises(ValueError, match="; expected"):
            call()


def test_statistics_print_and_plot() -> None:
    found = traces.statistics(traces.generate("medium", rows=5000), rows=5000)
    text = str(found)
    for part in (
        "4,300 lookups of 5,000 rows",
        "coverage, %",
        "LRU hit rate",
        "reuse gap",
        f"{found.unique:,}",
    ):
        assert part in text
    pytest.importorskip("matplotlib")
    figure = found.plot()
    assert [axes.get_title() for axes in figure.axes] == ["Coverage", "Reuse gaps", "LRU"]
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    assert picture.getvalue().startswith(b"\x89PNG")


def test_bad_arguments_of_the_c_functions() -> None:
    with pytest.raises(IndexError, match=r"trace_reuse: lookup 1 is row 3; expected \[0, 3\)"):
        _C.trace_reuse(np.array([0, 3]), 3)
    with pytest.raises(ValueError, match="n_rows is -1"):
        _C.trace_reuse(np.array([0]), -1)
    with pytest.raises(ValueError, match=r"counts\[1\] is -2"):
        _C.trace_times(np.array([1, -2]), 10.0, 0.5, 1.0, 1.0, 0)
    with pytest.raises(ValueError, match=r"burst 1\.5"):
        _C.trace_times(np.array([1]), 10.0, 1.5, 1.0, 1.0, 0)
    with pytest.raises(ValueError, match="point 1 is"):
        _C.trace_curve([1.0, 1.0], [1.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="no points are given"):
        _C.trace_curve(np.zeros(0), np.zeros(0), [1.0])
    with pytest.raises(ValueError, match="2 ranks and 1 counts"):
        _C.trace_curve([1.0, 2.0], [1.0], [1.0])
    with pytest.raises(ValueError, match="count is -1"):
        _C.permutation(-1, 0)
    with pytest.raises(ValueError, match="bound is 0"):
        _C.uniform(1, 0, 0)


def test_curve_is_a_power_law() -> None:
    curve = _C.trace_curve(
        [1.0, 100.0, 10_000.0], [1000.0, 10.0, 5.0], np.array([0.5, 1, 10, 100, 1000, 1e4, 1e5])
    )
    expected = [1000, 1000, 100, 10, np.sqrt(50), 5, 5]
    np.testing.assert_allclose(curve, expected, rtol=1e-14)


def test_random_numbers() -> None:
    order = _C.permutation(1000, 3)
    assert np.array_equal(np.sort(order), np.arange(1000)) and not np.array_equal(order, np.arange(1000))
    numbers = _C.uniform(100_000, 10, 1)
    assert np.bincount(numbers, minlength=10) == pytest.approx(10_000, abs=500)
    times = _C.trace_times(np.full(1, 20_000), 1e12, 1.0, 50.0, 0.7, 1)
    steps = np.diff(times)
    logs = np.log(steps[steps > 0])
    assert logs.mean() == pytest.approx(np.log(50), abs=0.02) and logs.std() == pytest.approx(0.7, rel=0.03)
